//! Helpers of the tests of reactors: virtual time, and roots that log the reactor's calls.

use aryk_reactor::{
    Armed, Clock, CoreSet, Cx, Engine, Reactor, Root, RootId, RootRef, SleepPolicy, ThreadId,
};
use std::cell::RefCell;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub const ENGINES: [Engine; 2] = [Engine::IoUring, Engine::Epoll];

/// Virtual time.
#[derive(Clone, Default)]
pub struct Time(Arc<AtomicU64>);

impl Time {
    pub fn clock(&self) -> Clock {
        Clock::Virtual(Arc::clone(&self.0))
    }

    pub fn pass(&self, d: Duration) {
        self.0.fetch_add(d.as_nanos() as u64, Relaxed);
    }

    pub fn set(&self, nanos: u64) {
        self.0.fetch_max(nanos, Relaxed);
    }

    pub fn nanos(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

pub fn reactor(policy: SleepPolicy, engine: Engine, time: &Time) -> (Reactor, ThreadId) {
    let mut reactor = Reactor::new(0, policy, engine, time.clock()).expect("the kernel has both engines");
    let thread = reactor.cx().add_thread("test", CoreSet::allowed());
    (reactor, thread)
}

pub type Log = Rc<RefCell<Vec<String>>>;

pub fn take(log: &Log) -> Vec<String> {
    log.take()
}

/// A root that runs `work` in each poll, and logs each call.
pub struct Scripted {
    pub log: Log,
    pub name: &'static str,
    pub work: Box<dyn FnMut(&mut Cx) -> bool>,
    pub parks: Armed,
}

impl Root for Scripted {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.log.borrow_mut().push(format!("{} polled", self.name));
        (self.work)(cx)
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.log.borrow_mut().push(format!("{} promoted", self.name));
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        self.log.borrow_mut().push(format!("{} parked", self.name));
        self.parks
    }
}

pub fn scripted(
    cx: &mut Cx,
    thread: ThreadId,
    log: &Log,
    name: &'static str,
    work: impl FnMut(&mut Cx) -> bool + 'static,
) -> RootRef<Scripted> {
    add(cx, thread, |_| Scripted { log: Rc::clone(log), name, work: Box::new(work), parks: Armed::Yes })
}

pub fn add<T: Root>(cx: &mut Cx, thread: ThreadId, make: impl FnOnce(RootId) -> T) -> RootRef<T> {
    let Ok(root) = cx.add_root(thread, "root", |id, _| Ok::<_, Infallible>(make(id)));
    root
}

/// Steps until the reactor sleeps.
pub fn settle(reactor: &mut Reactor) {
    for _ in 0..100_000 {
        if matches!(reactor.step(), aryk_reactor::Step::Slept(_)) {
            return;
        }
    }
    panic!("the reactor does not sleep");
}

pub fn kick(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).expect("an eventfd far from full");
}

struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Arc::new(Unpark(std::thread::current())).into();
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}
