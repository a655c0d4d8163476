//! Blocks that merges have found dead. Any context.
//!
//! A merge leaves out entries that no view sees, and no later view will. The cleaner need not look up their blocks in the victim,
//! which are most of it. This is a hint in memory: a block that is not listed may be dead too, as after an opening.

use crate::{BLOCK_UNITS, BlobId};
use aryk_volume_index::Place;

/// Blocks of the largest blob.
const BLOCKS_MAX: usize = 1 << 13;

/// Blobs with a list, at most: each takes 1 KiB, and has up to 32 MiB.
const LISTS_MAX: usize = 32 << 10;

/// A bit for each block. Blocks do not overlap, so their first units, divided by those of a block, differ.
type List = [u64; BLOCKS_MAX / 64];

/// The blocks of all blobs.
#[derive(Debug, Default)]
pub(crate) struct DeadBlocks {
    /// By blob; may be shorter than the pool has blobs.
    lists: Vec<Option<Box<List>>>,
    count: usize,
}

const fn bit(unit: u16) -> (usize, u64) {
    let number = unit as usize / BLOCK_UNITS as usize;
    (number / 64, 1 << (number % 64))
}

impl DeadBlocks {
    /// No view sees the block at this place, nor will any.
    pub(crate) fn note(&mut self, place: Place) {
        let blob = place.blob.0 as usize;
        if self.lists.len() <= blob {
            self.lists.resize_with(blob + 1, || None);
        }
        let list = &mut self.lists[blob];
        if list.is_none() {
            if self.count == LISTS_MAX {
                return;
            }
            self.count += 1;
        }
        let (word, bit) = bit(place.unit);
        list.get_or_insert_with(|| Box::new([0; BLOCKS_MAX / 64]))[word] |= bit;
    }

    /// Whether the block at this place is known to be dead.
    pub(crate) fn has(&self, place: Place) -> bool {
        let (word, bit) = bit(place.unit);
        let list = self.lists.get(place.blob.0 as usize).and_then(Option::as_ref);
        list.is_some_and(|list| list[word] & bit != 0)
    }

    /// Forgets a blob, which begins another life.
    pub(crate) fn forget(&mut self, blob: BlobId) {
        if let Some(list) = self.lists.get_mut(blob.0 as usize) {
            self.count -= usize::from(list.take().is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(blob: u32, unit: u16) -> Place {
        Place { blob: BlobId(blob), unit }
    }

    #[test]
    fn blocks_at_any_unit_are_told_apart_until_their_blob_is_forgotten() {
        let mut dead = DeadBlocks::default();
        let units = (3..u16::MAX - 7).step_by(9);
        for unit in units.clone().step_by(2) {
            dead.note(place(2, unit));
        }
        for (number, unit) in units.enumerate() {
            assert_eq!(dead.has(place(2, unit)), number % 2 == 0, "{unit}");
            assert!(!dead.has(place(1, unit)) && !dead.has(place(7, unit)));
        }
        dead.forget(BlobId(2));
        dead.forget(BlobId(9));
        assert!(!dead.has(place(2, 3)));
        assert_eq!(dead.count, 0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut dead = DeadBlocks::default();
        (0..LISTS_MAX as u32 + 10).for_each(|blob| dead.note(place(blob, 0)));
        assert_eq!(dead.count, LISTS_MAX);
        assert!(!dead.has(place(LISTS_MAX as u32, 0)));
        dead.forget(BlobId(5));
        dead.note(place(LISTS_MAX as u32, 0));
        assert!(dead.has(place(LISTS_MAX as u32, 0)));
    }
}
