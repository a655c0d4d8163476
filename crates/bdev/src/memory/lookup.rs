//! What a channel asks on the data path: where the device finds a piece of a request's memory. Reactor context.
//!
//! A channel serves one guest, so it finds nearly all pieces in the range of the piece before, and else in its own list of that
//! guest's ranges: no lock, no reference counting, nothing that other channels write. Only for a range that it has not used
//! before does it try the lock of all ranges, once; if a range is added at that very moment, the piece has no value this time.

use super::{Client, Range};
use aryk_dma::Seg;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ranges that a channel knows at most: as many as a guest may have, and some that have ended.
const KNOWN_MAX: usize = 1024;

/// Where a device finds a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The value that the client returned for the range of the piece: the IOVA of the range's first byte, or its key.
    pub value: u64,
    /// Offset of the piece in the range, in bytes.
    pub offset: u64,
}

/// A channel's lookup of the values of a [`super::MemoryClient`].
pub struct MemoryLookup {
    client: Arc<Client>,
    /// Ranges found before, by address.
    known: Vec<Arc<Range>>,
    /// Index of the range of the last piece.
    last: usize,
}

impl fmt::Debug for MemoryLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLookup").field("known", &self.known.len()).finish_non_exhaustive()
    }
}

impl Range {
    /// Offset of a piece that lies in the range.
    #[inline]
    fn offset_of(&self, piece: &Seg) -> Option<u64> {
        let at = (piece.base() as u64).wrapping_sub(self.memory.addr());
        let end = at.checked_add(piece.len() as u64)?;
        (end <= self.memory.len()).then_some(at)
    }
}

impl MemoryLookup {
    pub(super) const fn new(client: Arc<Client>) -> Self {
        Self { client, known: Vec::new(), last: 0 }
    }

    /// Where the device finds a piece of a request's memory. `None` if the client has not registered the memory: then the module
    /// copies the piece to or from memory that it has registered itself. Such pieces are counted.
    #[inline]
    pub fn translate(&mut self, piece: &Seg) -> Option<Place> {
        if let Some(range) = self.known.get(self.last)
            && let Some(offset) = range.offset_of(piece)
            && let Some(value) = range.value(self.client.index)
        {
            return Some(Place { value, offset });
        }
        self.search(piece)
    }

    /// Counts pieces that the module copies although they have values, because the device cannot access them as they lie.
    #[cold]
    pub fn count_bounced(&self, pieces: usize) {
        self.client.counters.bounced.fetch_add(pieces as u64, Ordering::Relaxed);
    }

    /// [`MemoryLookup::translate`] for a piece of another range, or without a value.
    #[inline(never)]
    fn search(&mut self, piece: &Seg) -> Option<Place> {
        let found = self.find(piece).or_else(|| self.learn(piece));
        let Some(at) = found else {
            self.client.counters.bounced.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        self.last = at;
        let (range, index) = (&self.known[at], self.client.index);
        let offset = range.offset_of(piece).expect("found by its address");
        let Some(value) = range.value(index) else {
            range.bounced[index].fetch_add(1, Ordering::Relaxed);
            self.client.counters.bounced.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        Some(Place { value, offset })
    }

    /// The index of the range among those found before, if it has not ended.
    fn find(&self, piece: &Seg) -> Option<usize> {
        let after = self.known.partition_point(|range| range.memory.addr() <= piece.base() as u64);
        let at = after.checked_sub(1)?;
        let range = &self.known[at];
        (range.offset_of(piece).is_some() && !range.has_ended()).then_some(at)
    }

    /// Searches all ranges, and remembers the range found.
    fn learn(&mut self, piece: &Seg) -> Option<usize> {
        let range = {
            let ranges = self.client.memory.0.ranges.try_read().ok()?;
            let (_, range) = ranges.range(..=piece.base() as u64).next_back()?;
            range.offset_of(piece)?;
            Arc::clone(range)
        };
        if self.known.len() == KNOWN_MAX {
            self.known.clear();
        }
        self.known.retain(|known| !known.has_ended());
        let at = self.known.partition_point(|known| known.memory.addr() < range.memory.addr());
        self.known.insert(at, range);
        Some(at)
    }
}
