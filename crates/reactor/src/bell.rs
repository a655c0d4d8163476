//! Bells: with a bell, another thread wakes a root of a reactor without a message. Any thread rings; the reactor wakes the root.
//!
//! A thread that shares memory with a root, such as a ring, changes the memory and then rings the bell. A bell that is already
//! rung does not notify the reactor again, so a batch of changes costs one load of the reactor's `sleeping` flag.
//!
//! **No change is missed.** A ringer changes the memory, then swaps `rung` to true. The reactor swaps it to false, then
//! wakes the root, which reads the memory. All swaps have one order: if the reactor's swap comes after a ringer's, its
//! root sees that ringer's change; if it comes before, the ringer finds the bell silent, and notifies the reactor.

use crate::sync::{AtomicBool, Ordering};
use crate::{Handle, RootId};
use std::fmt;
use std::sync::Arc;

/// Wakes the root of a reactor for which [`crate::Cx::answer_bell`] registered this bell. If the bell was rung before, the
/// registration wakes the root.
#[derive(Clone)]
pub struct Bell {
    rung: Arc<AtomicBool>,
    handle: Handle,
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bell of {:?}", self.handle)
    }
}

impl Bell {
    /// Creates a bell of the reactor behind `handle`.
    pub fn new(handle: &Handle) -> Self {
        Self { rung: Arc::new(AtomicBool::new(false)), handle: handle.clone() }
    }

    /// The handle of the bell's reactor.
    pub const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Wakes the bell's root, in this turn of its reactor or the next. Does nothing if the root or the reactor no longer exists.
    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.handle.notify();
        }
    }
}

/// The bells of a reactor, by root.
#[derive(Default)]
pub(crate) struct Bells(Vec<(Arc<AtomicBool>, RootId)>);

impl Bells {
    /// Adds a bell and silences it. The caller wakes `root` once, in case the bell was rung before.
    pub fn add(&mut self, bell: &Bell, root: RootId) {
        bell.rung.swap(false, Ordering::AcqRel);
        self.0.push((Arc::clone(&bell.rung), root));
    }

    pub fn remove(&mut self, root: RootId) {
        self.0.retain(|(_, of)| *of != root);
    }

    /// Silences the bells that were rung, and passes their roots to `wake`.
    pub fn silence(&self, mut wake: impl FnMut(RootId)) {
        for (rung, root) in &self.0 {
            if rung.load(Ordering::Relaxed) && rung.swap(false, Ordering::AcqRel) {
                wake(*root);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Clock, CoreSet, Cx, Engine, Reactor, Root, SleepPolicy};
    use std::convert::Infallible;
    use std::time::Duration;

    struct Counter(u32);

    impl Root for Counter {
        fn poll(&mut self, _: &mut Cx) -> bool {
            self.0 += 1;
            true
        }
    }

    #[test]
    fn a_bell_wakes_its_root_from_sleep_once_for_many_rings() {
        for engine in [Engine::IoUring, Engine::Epoll] {
            let mut reactor = Reactor::new(0, SleepPolicy::Interrupt, engine, Clock::Monotonic).unwrap();
            let cx = reactor.cx();
            let thread = cx.add_thread("t", CoreSet::allowed());
            let Ok(root) = cx.add_root(thread, "counter", |_, _| Ok::<_, Infallible>(Counter(0)));
            let counter = cx.root::<Counter>(root.id()).unwrap();
            let bell = Bell::new(cx.handle());
            bell.ring();
            // The reactor has checked its bells before it knows this one.
            while reactor.turn() {}
            reactor.cx().answer_bell(&bell, root.id());
            while reactor.turn() {}
            assert_eq!(counter.borrow().0, 1, "what was rung before it was answered");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::park_timeout(Duration::from_millis(20));
                    (0..100).for_each(|_| bell.ring());
                });
                while counter.borrow().0 == 1 {
                    // Only the bell wakes the reactor from sleep.
                    reactor.step();
                }
            });
            while reactor.turn() {}
            assert!(counter.borrow().0 <= 101);
            let before = counter.borrow().0;
            bell.ring();
            bell.ring();
            while reactor.turn() {}
            assert_eq!(counter.borrow().0, before + 1);
            reactor.cx().remove_root(root.id());
            bell.ring();
            assert!(reactor.cx().bells.0.is_empty());
        }
    }
}
