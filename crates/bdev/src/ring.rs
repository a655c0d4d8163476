//! Rings between two reactors: one side adds entries, the other takes them. Reactor context.
//!
//! A sender adds the entries of a turn to the ring at the turn's end, and then rings the other side's bell. What exceeds the room
//! of the ring waits at the sender, in order.

use rtrb::{Consumer, Producer, RingBuffer};
use std::collections::VecDeque;
use std::fmt;

/// The most entries that one poll takes from a ring.
pub const RING_BATCH: usize = 128;

/// Makes a ring with room for so many entries.
pub fn ring<T>(capacity: usize) -> (RingSender<T>, RingReceiver<T>) {
    let (producer, consumer) = RingBuffer::new(capacity);
    (RingSender { ring: producer, staged: VecDeque::new() }, RingReceiver(consumer))
}

/// The producer's end of a ring, and the entries that wait to be added to it.
pub struct RingSender<T> {
    ring: Producer<T>,
    staged: VecDeque<T>,
}

impl<T> fmt::Debug for RingSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a ring, for which {} entries wait", self.staged.len())
    }
}

impl<T> RingSender<T> {
    /// Has an entry wait for [`RingSender::send`].
    pub fn stage(&mut self, entry: T) {
        self.staged.push_back(entry);
    }

    /// Whether no entry waits.
    pub fn is_empty(&self) -> bool {
        self.staged.is_empty()
    }

    /// Adds the waiting entries for which the ring has room; returns whether there were any.
    pub fn send(&mut self) -> bool {
        let count = self.staged.len().min(self.ring.slots());
        if count == 0 {
            return false;
        }
        let chunk = self.ring.write_chunk_uninit(count).expect("there are as many slots");
        let sent = chunk.fill_from_iter(self.staged.drain(..count));
        assert_eq!(sent, count, "a chunk takes as many as it has slots");
        true
    }
}

impl<T> Extend<T> for RingSender<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, entries: I) {
        self.staged.extend(entries);
    }
}

/// The consumer's end of a ring.
pub struct RingReceiver<T>(Consumer<T>);

impl<T> fmt::Debug for RingReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a ring with {} entries", self.0.slots())
    }
}

impl<T> RingReceiver<T> {
    /// Takes up to [`RING_BATCH`] entries out of the ring, and returns how many.
    pub fn receive(&mut self, into: &mut Vec<T>) -> usize {
        let count = self.0.slots().min(RING_BATCH);
        if count > 0 {
            into.extend(self.0.read_chunk(count).expect("there are as many slots"));
        }
        count
    }

    /// Whether the sender was dropped. Then the ring has all entries that it has sent: look before [`RingReceiver::receive`].
    pub fn is_abandoned(&self) -> bool {
        self.0.is_abandoned()
    }
}
