//! The message ring of a reactor and the hand-shake of its sleep. Senders in any context, the receiver in the reactor's.
//!
//! The ring is a bounded queue of many producers and one consumer, after Vyukov: each cell's sequence number tells whose
//! turn it is. A cell's contents are behind a mutex only to say in safe Rust what the sequence number already ensures: it is
//! never contended, and so never waits.
//!
//! **No wake-up is lost.** A sender pushes, fences, then reads `sleeping`. The receiver sets `sleeping`, fences, then looks at
//! the ring again. Whichever fence comes second sees the other's store.

use crate::mailbox::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, fence};

#[cfg(loom)]
mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
}
#[cfg(not(loom))]
mod sync {
    pub use std::sync::Mutex;
    pub use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
}

#[derive(Debug)]
struct Cell<T> {
    /// `position` when free for the push of that position, `position + 1` when it holds that push's value.
    sequence: AtomicUsize,
    value: Mutex<Option<T>>,
}

/// A bounded queue of messages, and whether its receiver sleeps.
#[derive(Debug)]
pub struct Mailbox<T> {
    cells: Box<[Cell<T>]>,
    head: AtomicUsize,
    /// Written by the receiver alone.
    tail: AtomicUsize,
    sleeping: AtomicBool,
}

impl<T> Mailbox<T> {
    /// An empty mailbox for up to `capacity` messages, a power of two of at least 2.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= 2, "a power of two of at least 2, not {capacity}");
        let cell = |i| Cell { sequence: AtomicUsize::new(i), value: Mutex::new(None) };
        Self {
            cells: (0..capacity).map(cell).collect(),
            head: AtomicUsize::new(0),
            tail: AtomicUsize::new(0),
            sleeping: AtomicBool::new(false),
        }
    }

    fn cell(&self, position: usize) -> &Cell<T> {
        &self.cells[position & (self.cells.len() - 1)]
    }

    /// Adds a message.
    ///
    /// # Errors
    /// A full mailbox gives it back.
    pub fn push(&self, value: T) -> Result<(), T> {
        let mut position = self.head.load(Ordering::Relaxed);
        loop {
            let cell = self.cell(position);
            let sequence = cell.sequence.load(Ordering::Acquire);
            if sequence == position {
                let next = position.wrapping_add(1);
                match self.head.compare_exchange_weak(position, next, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        *cell.value.lock().expect("no one panics holding it") = Some(value);
                        cell.sequence.store(next, Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => position = now,
                }
            } else if sequence.wrapping_sub(position).cast_signed() < 0 {
                return Err(value);
            } else {
                position = self.head.load(Ordering::Relaxed);
            }
        }
    }

    /// Takes the oldest message. For the receiver only.
    pub fn pop(&self) -> Option<T> {
        let position = self.tail.load(Ordering::Relaxed);
        let cell = self.cell(position);
        let filled = position.wrapping_add(1);
        if cell.sequence.load(Ordering::Acquire) != filled {
            return None;
        }
        let value = cell.value.lock().expect("no one panics holding it").take();
        assert!(value.is_some(), "there is one receiver");
        self.tail.store(filled, Ordering::Relaxed);
        cell.sequence.store(position.wrapping_add(self.cells.len()), Ordering::Release);
        value
    }

    /// Whether there is no message. For the receiver only.
    pub fn is_empty(&self) -> bool {
        let position = self.tail.load(Ordering::Relaxed);
        self.cell(position).sequence.load(Ordering::Acquire) != position.wrapping_add(1)
    }

    /// After a push, or any other store that the receiver must see: whether the receiver sleeps and this caller is the one to
    /// wake it.
    pub fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed)
    }

    /// The receiver is about to sleep; it must look for work once more, and then sleep or call [`Mailbox::awake`].
    pub fn about_to_sleep(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The receiver does not sleep, or no longer.
    pub fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}
