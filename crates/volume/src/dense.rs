//! The checksums of dense frames in memory: a bounded number, replaced by CLOCK. Any context.

use crate::{BlobId, RANGE_BLOCKS};
use std::collections::HashMap;

/// A dense frame: blob, its life, unit.
pub(crate) type DenseKey = (BlobId, u64, u32);

#[derive(Debug)]
struct Slot {
    key: DenseKey,
    is_recent: bool,
    checksums: Box<[u32]>,
}

/// The checksums of dense frames.
#[derive(Debug)]
pub(crate) struct DenseCache {
    slots: Vec<Slot>,
    by_key: HashMap<DenseKey, usize>,
    capacity: usize,
    hand: usize,
}

impl DenseCache {
    /// A cache of at most this many bytes, and at least 16 frames.
    pub(crate) fn new(bytes: usize) -> Self {
        let capacity = (bytes / (RANGE_BLOCKS as usize * 4)).max(16);
        Self { slots: Vec::new(), by_key: HashMap::new(), capacity, hand: 0 }
    }

    /// The checksums of a frame.
    pub(crate) fn get(&mut self, key: &DenseKey) -> Option<&[u32]> {
        let slot = &mut self.slots[*self.by_key.get(key)?];
        slot.is_recent = true;
        Some(&slot.checksums)
    }

    /// Keeps the checksums of a frame: as many as a range has blocks.
    pub(crate) fn insert(&mut self, key: DenseKey, checksums: impl Iterator<Item = u32>) {
        if self.by_key.contains_key(&key) {
            return;
        }
        let at = if self.slots.len() < self.capacity {
            self.slots.push(Slot { key, is_recent: true, checksums: checksums.collect() });
            self.slots.len() - 1
        } else {
            let at = self.victim();
            let slot = &mut self.slots[at];
            self.by_key.remove(&slot.key);
            slot.key = key;
            slot.is_recent = true;
            slot.checksums.iter_mut().zip(checksums).for_each(|(place, crc)| *place = crc);
            at
        };
        self.by_key.insert(key, at);
    }

    fn victim(&mut self) -> usize {
        loop {
            let at = self.hand;
            self.hand = (at + 1) % self.slots.len();
            if !std::mem::take(&mut self.slots[at].is_recent) {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_replaces_what_was_not_used() {
        let mut cache = DenseCache::new(0);
        let key = |unit| (BlobId(1), 7, unit);
        for unit in 0..40 {
            cache.insert(key(unit), (0..RANGE_BLOCKS).map(|at| at + unit));
            assert_eq!(cache.get(&key(unit)).unwrap()[5], 5 + unit);
            assert!(cache.get(&key(0)).is_some() || unit >= 16, "frame 0 is there while there is room");
        }
        assert_eq!((0..40).filter(|unit| cache.get(&key(*unit)).is_some()).count(), 16);
    }
}
