//! A pool of threads for calls that block, such as file I/O where io_uring is forbidden. Reactors submit the calls; the pool's
//! threads run them.
//!
//! The reactor receives a call's result in the form of a completion of its ring, so that a module treats both alike. The
//! threads start when they are first needed, and end when the last reactor that shares them has ended.

use crate::handle::lock;
use crate::{CoreSet, Handle};
use aryk_uring::{Completion, Tag};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// A call that may block; its return value becomes the result of its completion.
pub(crate) type BlockingCall = Box<dyn FnOnce() -> i32 + Send>;

struct Job {
    tag: Tag,
    call: BlockingCall,
    to: Handle,
}

#[derive(Default)]
struct Load {
    threads: usize,
    /// Calls submitted and not yet completed.
    unfinished: usize,
}

struct Pool {
    jobs: Mutex<Receiver<Job>>,
    threads_max: usize,
    /// The cores on which its threads run.
    cores: CoreSet,
    load: Mutex<Load>,
}

impl fmt::Debug for Blocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking").field("threads_max", &self.pool.threads_max).finish_non_exhaustive()
    }
}

/// Submits calls to the pool. The pool ends when the last clone of this is dropped.
#[derive(Clone)]
pub(crate) struct Blocking {
    sender: Sender<Job>,
    pool: Arc<Pool>,
}

impl Blocking {
    /// Creates a pool of up to `threads_max` threads, at least one, on the cores that the process may use now.
    pub fn new(threads_max: usize) -> Self {
        let (sender, receiver) = channel();
        let pool = Pool {
            jobs: Mutex::new(receiver),
            threads_max: threads_max.max(1),
            cores: CoreSet::allowed(),
            load: Mutex::default(),
        };
        Self { sender, pool: Arc::new(pool) }
    }

    /// Runs `call` on a thread of the pool, and delivers its result to `to` as the completion of `tag`.
    pub fn submit(&self, to: &Handle, tag: Tag, call: BlockingCall) {
        if self.admit() {
            // The send does not fail: the receiver is dropped after this sender.
            let _ = self.sender.send(Job { tag, call, to: to.clone() });
        } else {
            let result = -rustix::io::Errno::AGAIN.raw_os_error();
            to.complete_blocking(Completion::of_call(tag, result));
        }
    }

    /// Counts a new call, and starts another thread if there are now more calls than threads. Returns false, and does not
    /// count the call, if there is no thread.
    fn admit(&self) -> bool {
        let mut load = lock(&self.pool.load);
        load.unfinished += 1;
        if load.unfinished > load.threads && load.threads < self.pool.threads_max {
            let pool = Arc::clone(&self.pool);
            let body = move || {
                leave_core(&pool.cores);
                pool.work();
            };
            match std::thread::Builder::new().name(format!("blocking_{}", load.threads)).spawn(body) {
                Ok(_) => load.threads += 1,
                Err(error) => tracing::warn!(%error, "cannot start a thread for blocking calls"),
            }
        }
        let any = load.threads > 0;
        load.unfinished -= usize::from(!any);
        any
    }
}

/// Lets the calling thread run on all of `cores`. It inherited the core of the reactor that started it, and would delay that
/// reactor.
fn leave_core(cores: &CoreSet) {
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|core| set.set(core.into()));
    // If the kernel refuses, the thread is only slower.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

impl Pool {
    fn work(&self) {
        // Of idle threads, one waits for a job and the others for the lock.
        while let Some(job) = self.next_job() {
            let result = catch_unwind(AssertUnwindSafe(job.call));
            let result = result.unwrap_or(-rustix::io::Errno::IO.raw_os_error());
            lock(&self.load).unfinished -= 1;
            job.to.complete_blocking(Completion::of_call(job.tag, result));
        }
    }

    fn next_job(&self) -> Option<Job> {
        lock(&self.jobs).recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Cx, Driver, Engine, Reactor, RingClient, Root, RootId, SleepPolicy};
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::convert::Infallible;
    use std::sync::{Barrier, mpsc};

    struct Collector {
        client: RingClient,
        got: Vec<Completion>,
    }

    impl Root for Collector {
        fn poll(&mut self, _: &mut Cx) -> bool {
            let before = self.got.len();
            self.client.take(&mut self.got);
            self.got.len() > before
        }
    }

    fn with_collector(engine: Engine, test: impl FnOnce(&mut Reactor, RootId, u16)) {
        let mut reactor = Reactor::new(0, SleepPolicy::Adaptive, engine, Clock::Monotonic).unwrap();
        let cx = reactor.cx();
        let thread = cx.add_thread("t", CoreSet::allowed());
        let root = cx.add_root(thread, "collector", |id, cx| {
            Ok::<_, Infallible>(Collector { client: cx.open_ring_client(id), got: Vec::new() })
        });
        let Ok(root) = root;
        let client = cx.root::<Collector>(root.id()).unwrap().borrow().client.number();
        test(&mut reactor, root.id(), client);
    }

    fn results(reactor: &mut Reactor, root: RootId, count: usize) -> BTreeMap<u64, i32> {
        let collector = reactor.cx().root::<Collector>(root).unwrap();
        while collector.borrow().got.len() < count {
            reactor.step();
        }
        let results: BTreeMap<_, _> =
            collector.borrow_mut().got.drain(..).map(|c| (c.tag.token, c.result)).collect();
        assert_eq!(results.len(), count);
        results
    }

    #[test]
    fn results_wake_the_clients_root_on_both_engines() {
        for engine in [Engine::IoUring, Engine::Epoll] {
            with_collector(engine, |reactor, root, client| {
                let main = std::thread::current().id();
                for token in 0..100 {
                    let tag = Tag { client, token };
                    reactor.cx().submit_blocking(
                        tag,
                        Box::new(move || {
                            assert_ne!(std::thread::current().id(), main);
                            token as i32 - 50
                        }),
                    );
                }
                let in_flight = |reactor: &mut Reactor| reactor.cx().kernel.borrow().in_flight();
                assert_eq!(in_flight(reactor), 100);
                let expected: BTreeMap<_, _> = (0..100).map(|t| (t, t as i32 - 50)).collect();
                assert_eq!(results(reactor, root, 100), expected);
                assert_eq!(in_flight(reactor), 0);
            });
        }
    }

    #[test]
    fn as_many_as_there_are_threads_run_at_a_time() {
        with_collector(Engine::Epoll, |reactor, root, client| {
            let together = Arc::new(Barrier::new(4));
            for token in 0..8 {
                let (tag, together) = (Tag { client, token }, Arc::clone(&together));
                reactor.cx().submit_blocking(tag, Box::new(move || i32::from(together.wait().is_leader())));
            }
            assert_eq!(results(reactor, root, 8).values().sum::<i32>(), 2);
            assert_eq!(lock(&reactor.cx().blocking.pool.load).threads, 4);
        });
    }

    #[test]
    fn a_panic_is_an_error_of_its_call_alone() {
        with_collector(Engine::Epoll, |reactor, root, client| {
            for token in 0..10 {
                let tag = Tag { client, token };
                reactor.cx().submit_blocking(
                    tag,
                    Box::new(move || {
                        assert_ne!(token, 3, "on purpose");
                        7
                    }),
                );
            }
            let results = results(reactor, root, 10);
            assert_eq!(results[&3], -rustix::io::Errno::IO.raw_os_error());
            assert_eq!(results.values().filter(|&&r| r == 7).count(), 9);
        });
    }

    thread_local! {
        /// Dropped when its thread ends.
        static ALIVE: RefCell<Option<mpsc::Sender<()>>> = const { RefCell::new(None) };
    }

    #[test]
    fn threads_end_with_the_last_reactor() {
        let (alive, ended) = mpsc::channel();
        let blocking = Blocking::new(1);
        let reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).unwrap();
        let call = move || {
            ALIVE.set(Some(alive));
            0
        };
        blocking.clone().submit(reactor.handle(), Tag { client: 1, token: 0 }, Box::new(call));
        drop(blocking);
        assert_eq!(ended.recv(), Err(mpsc::RecvError));
    }
}
