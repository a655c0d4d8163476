//! Threads for the calls of Ceph that block: a bounded number for each client, so that a cluster that does not answer delays no
//! other. Calls for open images of one pool, those that open images of one pool, those for the whole client, and those that end
//! something have a lane each, with a bounded number of threads: a pool that does not answer delays neither the disks of other
//! pools nor the end of disks, and calls for images that do not answer delay the opening of no other. Any context but a
//! reactor's.

use crate::Error;
use aryk_reactor::CoreSet;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// The most threads of a client that do not end something.
const THREADS_MAX: usize = 8;
/// The most threads of one lane.
const LANE_MAX: usize = 2;

/// What a job waits for, if it waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    /// The cluster's monitors.
    Client,
    /// The OSDs of this pool.
    Pool(String),
    /// As [`Lane::Pool`], to open an image.
    Opening(String),
    /// The end of something: there are always threads for that.
    End,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Lane, Job)>,
    /// The lanes of the jobs that run.
    running: Vec<Lane>,
    /// Threads, and those of them that wait for a job.
    threads: usize,
    idle: usize,
    has_ended: bool,
}

impl Queue {
    /// Whether a thread may take a job of this lane now.
    fn may_run(&self, lane: &Lane) -> bool {
        let of_lane = self.running.iter().filter(|running| *running == lane).count();
        let others = self.running.iter().filter(|running| **running != Lane::End).count();
        of_lane < LANE_MAX && (*lane == Lane::End || others < THREADS_MAX)
    }

    /// Takes the first job that may run.
    fn take(&mut self) -> Option<(Lane, Job)> {
        let at = self.jobs.iter().position(|(lane, _)| self.may_run(lane))?;
        let (lane, job) = self.jobs.remove(at)?;
        self.running.push(lane.clone());
        Some((lane, job))
    }

    fn has_run(&mut self, lane: &Lane) {
        let at = self.running.iter().position(|running| running == lane).expect("a job that runs");
        self.running.swap_remove(at);
    }
}

struct Shared {
    name: String,
    cores: Option<CoreSet>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// The threads of a client. They end with this, after the jobs that wait.
pub(crate) struct Workers(Arc<Shared>);

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "threads of {}", self.0.name)
    }
}

/// Locks a mutex whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the calling thread, and the threads that it will start, run on `cores`.
pub(crate) fn run_on(cores: Option<&CoreSet>) {
    let Some(cores) = cores else { return };
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|core| set.set(core.into()));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(%error, %cores, "threads of Ceph cannot run on the cores that are set for them");
    }
}

/// The cores of the calling thread.
pub(crate) fn own_cores() -> Option<CoreSet> {
    let set = rustix::thread::sched_getaffinity(None).ok()?;
    let cores = 0..u16::try_from(rustix::thread::CpuSet::MAX_CPU).unwrap_or(u16::MAX);
    Some(cores.filter(|&core| set.is_set(core.into())).collect())
}

impl Workers {
    /// Threads of the client `name`, on `cores`, or on those of the threads that need a job done.
    pub fn new(name: &str, cores: Option<CoreSet>) -> Self {
        let (name, queue, changed) = (name.to_owned(), Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { name, cores, queue, changed }))
    }

    /// The cores of the threads.
    pub fn cores(&self) -> Option<&CoreSet> {
        self.0.cores.as_ref()
    }

    /// Runs `job` on one of the threads, and returns its result. If the future is dropped, the job runs all the same.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub async fn run<R: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (sender, result) = oneshot::channel();
        // The caller may have stopped waiting.
        self.start(lane, move || drop(sender.send(job())))?;
        result.await.map_err(|_| Error::Ending)
    }

    /// Runs `job` on one of the threads.
    ///
    /// # Errors
    /// [`Error::Thread`] if there is no thread.
    pub fn start(&self, lane: Lane, job: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut queue = lock(&self.0.queue);
        // Each idle thread takes one of the jobs that may run.
        let ready = queue.jobs.iter().filter(|(lane, _)| queue.may_run(lane)).count();
        if queue.may_run(&lane) && queue.idle <= ready && queue.threads < THREADS_MAX + LANE_MAX {
            let shared = Arc::clone(&self.0);
            let body = move || {
                run_on(shared.cores.as_ref());
                shared.work();
            };
            match std::thread::Builder::new().name("rbd_calls".into()).spawn(body) {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => return Err(error.into()),
                // The job waits for another thread.
                Err(_) => {}
            }
        }
        queue.jobs.push_back((lane, Box::new(job)));
        drop(queue);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl Shared {
    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((lane, job)) = queue.take() {
                drop(queue);
                job();
                queue = lock(&self.queue);
                queue.has_run(&lane);
                // There is room for another job of the lane, and the last job ends the threads that wait.
                self.changed.notify_all();
            } else if queue.has_ended && queue.jobs.is_empty() {
                return;
            } else {
                queue.idle += 1;
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.0.queue).has_ended = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::until;
    use aryk_bdev_conformance::block_on;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    #[test]
    fn jobs_that_hang_leave_threads_to_other_pools_and_to_ends() {
        let workers = Workers::new("test", None);
        let hanging = Arc::new(AtomicUsize::new(0));
        let hang = |lane: Lane| {
            let (release, released) = channel::<()>();
            let hanging = Arc::clone(&hanging);
            let job = move || {
                hanging.fetch_add(1, Ordering::SeqCst);
                // Ends when the sender is dropped.
                let _ = released.recv();
            };
            workers.start(lane, job).unwrap();
            release
        };
        let releases: Vec<_> = (0..20).map(|_| hang(Lane::Pool("stuck".into()))).collect();
        until("some hang", || hanging.load(Ordering::SeqCst) == LANE_MAX);
        assert_eq!(block_on(workers.run(Lane::Pool("other".into()), || 1)).unwrap(), 1);
        let more: Vec<_> = (0..20).map(|pool| hang(Lane::Pool(format!("pool{pool}")))).collect();
        until("all threads but those of ends hang", || hanging.load(Ordering::SeqCst) == THREADS_MAX);
        assert_eq!(block_on(workers.run(Lane::End, || 2)).unwrap(), 2);
        assert!(lock(&workers.0.queue).threads <= THREADS_MAX + LANE_MAX);
        drop((releases, more));
        until("all have run", || hanging.load(Ordering::SeqCst) == 40);
    }
}
