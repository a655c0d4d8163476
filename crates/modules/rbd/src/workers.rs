//! Threads for the calls of Ceph that block: a bounded number for each client, so that a cluster that does not answer delays no
//! other. Any context but a reactor's.

use crate::Error;
use aryk_reactor::CoreSet;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// The most threads of a client.
const THREADS_MAX: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads, and those of them that wait for a job.
    threads: usize,
    idle: usize,
    has_ended: bool,
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
    pub async fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Result<R, Error> {
        let (sender, result) = oneshot::channel();
        // The caller may have stopped waiting.
        self.start(move || drop(sender.send(job())))?;
        result.await.map_err(|_| Error::Ending)
    }

    /// Runs `job` on one of the threads.
    ///
    /// # Errors
    /// [`Error::Thread`] if there is no thread.
    pub fn start(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut queue = lock(&self.0.queue);
        if queue.idle <= queue.jobs.len() && queue.threads < THREADS_MAX {
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
        queue.jobs.push_back(Box::new(job));
        drop(queue);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl Shared {
    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job();
                queue = lock(&self.queue);
            } else if queue.has_ended {
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
