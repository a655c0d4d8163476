//! Timers. Reactor context.

use crate::Nanos;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Identifies a timer on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TimerId(u64);

/// Timers by deadline. Timers that are due together fire in the order in which they were set.
#[derive(Debug)]
pub(crate) struct Timers<T> {
    heap: BinaryHeap<Reverse<(Nanos, TimerId)>>,
    /// The action of each timer. A missing entry means that the timer was cancelled: its entry in the heap is skipped.
    targets: HashMap<TimerId, T>,
    next: u64,
}

/// Cancelled timers that may stay in the heap, in addition to one for each timer that was not cancelled.
const HEAP_SLACK: usize = 64;

impl<T> Timers<T> {
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), targets: HashMap::new(), next: 0 }
    }

    pub fn set(&mut self, at: Nanos, target: T) -> TimerId {
        let id = TimerId(self.next);
        self.next += 1;
        if self.heap.len() > 2 * self.targets.len() + HEAP_SLACK {
            self.heap.retain(|Reverse((_, id))| self.targets.contains_key(id));
        }
        self.heap.push(Reverse((at, id)));
        self.targets.insert(id, target);
        self.check_invariants();
        id
    }

    pub fn cancel(&mut self, id: TimerId) -> Option<T> {
        let target = self.targets.remove(&id);
        self.drop_cancelled();
        target
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes a timer that is due at `now`.
    pub fn pop(&mut self, now: Nanos) -> Option<T> {
        if self.next()? > now {
            return None;
        }
        let Reverse((_, id)) = self.heap.pop()?;
        let target = self.targets.remove(&id);
        self.drop_cancelled();
        target
    }

    /// Removes cancelled timers from the top of the heap, so that `next` causes no needless wake-up.
    fn drop_cancelled(&mut self) {
        while let Some(Reverse((_, id))) = self.heap.peek() {
            if self.targets.contains_key(id) {
                break;
            }
            self.heap.pop();
        }
        self.check_invariants();
    }

    /// Checks, in debug builds, that every timer will fire, and that the earliest deadline is a timer's.
    fn check_invariants(&self) {
        let (entries, timers) = (self.heap.len(), self.targets.len());
        debug_assert!(timers <= entries, "{timers} timers have only {entries} entries in the heap");
        let is_live = |Reverse((_, id)): &Reverse<(Nanos, TimerId)>| self.targets.contains_key(id);
        debug_assert!(self.heap.peek().is_none_or(is_live), "a cancelled timer would wake the reactor");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_timers_come_in_order_and_cancelled_ones_never() {
        let mut t = Timers::new();
        let late = t.set(Nanos(30), "late");
        let gone = t.set(Nanos(10), "gone");
        t.set(Nanos(20), "first");
        t.set(Nanos(20), "second");
        assert_eq!(t.cancel(gone), Some("gone"));
        assert_eq!((t.next(), t.pop(Nanos(19))), (Some(Nanos(20)), None));
        assert_eq!((t.pop(Nanos(20)), t.pop(Nanos(25))), (Some("first"), Some("second")));
        assert_eq!(t.cancel(late), Some("late"));
        assert_eq!((t.next(), t.pop(Nanos(u64::MAX))), (None, None));
        assert_eq!(t.cancel(late), None);
    }

    #[test]
    fn cancelled_timers_take_no_room() {
        let mut t = Timers::new();
        t.set(Nanos(1), 0);
        for i in 0..100_000 {
            let id = t.set(Nanos(1_000_000 + i), i);
            assert_eq!(t.cancel(id), Some(i));
        }
        assert!(t.heap.len() <= 2 * (HEAP_SLACK + 2), "{}", t.heap.len());
        assert_eq!((t.pop(Nanos(u64::MAX)), t.next()), (Some(0), None));
    }
}
