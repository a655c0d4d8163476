//! The message queue of a reactor, and its protocols for sleep, back-pressure and the reactor's end. Senders run in any context,
//! the receiver in the reactor's.
//!
//! The ring is a bounded queue of many producers and one consumer, after Vyukov: each cell's sequence number shows whether a
//! producer or the consumer may use the cell. Safe Rust needs a mutex around the cell's contents, though the sequence number
//! already gives exclusive access. The mutex is never contended, so a lock of it never waits.
//!
//! Three protocols have the same form: each side stores, fences, then loads what the other side stores; the side whose fence
//! comes second sees the other's store.
//! - **No wake-up is lost.** A sender adds a message, fences, reads `sleeping`. The receiver sets `sleeping`, fences, reads
//!   the ring.
//! - **No sender waits while a cell is free.** A sender that found no room stores its waker, sets `has_waiting`, fences,
//!   tries again. The receiver frees cells, fences, reads `has_waiting`.
//! - **No message stays after the end.** A sender adds a message, fences, reads `closed`. The receiver sets `closed`,
//!   fences, drops the messages that are there.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, fence};
use std::task::Waker;

/// The reason why a message was refused, with the message.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused<T> {
    /// There is no room now.
    Full(T),
    /// The receiver has ended.
    Closed(T),
}

/// What a sender must do after its message was accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Taken {
    /// Nothing: the receiver is awake.
    Awake,
    /// Wake the receiver: it sleeps, and no other sender will wake it.
    MustWake,
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
    /// The receiver has work besides messages.
    attention: AtomicBool,
    closed: AtomicBool,
    /// Senders that found no room.
    waiting: Mutex<Vec<Waker>>,
    has_waiting: AtomicBool,
    /// Serialises the threads that drop messages after the end, so that there is one receiver.
    draining: Mutex<()>,
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
            attention: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            waiting: Mutex::new(Vec::new()),
            has_waiting: AtomicBool::new(false),
            draining: Mutex::new(()),
        }
    }

    /// Adds a message.
    ///
    /// # Errors
    /// [`Refused`], with the message.
    pub fn push(&self, value: T) -> Result<Taken, Refused<T>> {
        if self.is_closed() {
            return Err(Refused::Closed(value));
        }
        self.enqueue(value).map_err(Refused::Full)?;
        let taken = self.after_store();
        if self.closed.load(Ordering::Relaxed) {
            self.drain();
        }
        Ok(taken)
    }

    /// Adds a message. If there is no room, `waker` is woken when there may be room or the receiver has ended.
    ///
    /// # Errors
    /// [`Refused`], with the message; if it is [`Refused::Full`], the waker will be woken.
    pub fn push_or_wait(&self, value: T, waker: &Waker) -> Result<Taken, Refused<T>> {
        let value = match self.push(value) {
            Err(Refused::Full(value)) => value,
            done => return done,
        };
        {
            let mut waiting = self.waiting.lock().expect("no one panics holding it");
            // `close` takes the wakers after it has set this.
            if self.is_closed() {
                return Err(Refused::Closed(value));
            }
            waiting.push(waker.clone());
        }
        self.has_waiting.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.push(value)
    }

    /// Announces work besides messages, which the sender has stored before; the receiver sees it by [`Mailbox::take_attention`].
    pub fn notify(&self) -> Taken {
        self.attention.store(true, Ordering::Release);
        self.after_store()
    }

    fn after_store(&self) -> Taken {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel) {
            Taken::MustWake
        } else {
            Taken::Awake
        }
    }

    /// Whether there is a message. For the receiver only.
    #[inline]
    pub fn has_message(&self) -> bool {
        let position = self.tail.load(Ordering::Relaxed);
        self.cell(position).sequence.load(Ordering::Acquire) == position.wrapping_add(1)
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

    /// Wakes senders that wait for room, after pops. For the receiver only.
    pub fn made_room(&self) {
        fence(Ordering::SeqCst);
        if self.has_waiting.load(Ordering::Relaxed) {
            // Cleared before the list is taken, so that a sender that joins the list later sets it again.
            self.has_waiting.store(false, Ordering::Relaxed);
            self.wake_waiting();
        }
    }

    /// Whether there was a [`Mailbox::notify`] since the last call. For the receiver only.
    pub fn take_attention(&self) -> bool {
        let any = self.attention.load(Ordering::Acquire);
        if any {
            // Cleared before the receiver checks for the work. A notification after this swap is seen next time; for one
            // before it, the work is already there.
            self.attention.swap(false, Ordering::Acquire);
        }
        any
    }

    /// Whether there is no work for the receiver. For the receiver only.
    pub fn is_idle(&self) -> bool {
        !self.has_message() && !self.attention.load(Ordering::Acquire)
    }

    /// Marks the receiver as about to sleep. The receiver must call [`Mailbox::is_idle`] once more after this, and then
    /// sleep or call [`Mailbox::awake`].
    pub fn about_to_sleep(&self) {
        // Swaps, here and in `awake`: all changes of the flag have one order, also with the swaps of senders that belong to an
        // earlier sleep.
        self.sleeping.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Marks the receiver as awake.
    pub fn awake(&self) {
        self.sleeping.swap(false, Ordering::AcqRel);
    }

    /// Whether the receiver has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends the receiver, which pops no more: drops the messages that are there, and those that come later.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.drain();
        self.wake_waiting();
    }

    fn cell(&self, position: usize) -> &Cell<T> {
        &self.cells[position & (self.cells.len() - 1)]
    }

    fn enqueue(&self, value: T) -> Result<(), T> {
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

    /// Drops messages that the receiver will not take. A sender that still writes its cell hides the messages behind it, and
    /// drains them when it has written the cell.
    fn drain(&self) {
        let mut dropped = Vec::new();
        {
            let _one = self.draining.lock().expect("no one panics holding it");
            dropped.extend(std::iter::from_fn(|| self.pop()));
        }
        // Outside of the lock: the drop of a message may wake a task that waits for its answer.
        drop(dropped);
    }

    fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().expect("no one panics holding it"));
        waiting.into_iter().for_each(Waker::wake);
    }
}
