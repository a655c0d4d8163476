//! Which ranges a merge of the oldest levels finds in many pieces.
//!
//! Context: any. Such a merge sees nearly all entries of a range, one after the other, so looking costs nothing more. What it
//! finds is a hint: newer sources may have other versions, and some versions may be those of old views only.

use crate::key::{BLOCK_UNITS, Entry, TimelineId, Value};

/// Ranges of one merge that are reported.
const RANGES_MAX: usize = 4096;

/// From which numbers on a range is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pieces {
    /// Blocks with an entry of their own, in a range without a dense version.
    pub blocks_min: u32,
    /// Places in blobs among which they are spread, as pieces without gaps.
    pub pieces_min: u32,
    /// Blocks that are newer than the range's dense version.
    pub worn_min: u32,
}

/// Looks at the entries of a merge in the order of their keys.
#[derive(Debug)]
pub(crate) struct Survey {
    pieces: Pieces,
    range: Option<(TimelineId, u32)>,
    /// The newest version of the whole range: its packed commit and whether it is dense.
    cover: Option<(u64, bool)>,
    slot: u16,
    blocks: u32,
    parts: u32,
    /// Where the next block would be if it followed the last one.
    next: Option<(u32, u32)>,
    found: Vec<(TimelineId, u32)>,
    /// Whether there were more ranges.
    has_more: bool,
}

impl Survey {
    pub(crate) const fn new(pieces: Pieces) -> Self {
        Self {
            pieces,
            range: None,
            cover: None,
            slot: 0,
            blocks: 0,
            parts: 0,
            next: None,
            found: Vec::new(),
            has_more: false,
        }
    }

    /// The next entry that the merge keeps.
    pub(crate) fn look(&mut self, entry: &Entry) {
        let key = entry.key;
        let range = Some((key.timeline(), key.range()));
        if self.range != range {
            self.end_range();
            self.range = range;
        }
        let slot = key.slot().get();
        match entry.value {
            Value::Dense { .. } | Value::Zero if slot == 0 => {
                let is_dense = matches!(entry.value, Value::Dense { .. });
                self.cover.get_or_insert((key.commit().get(), is_dense));
            }
            Value::Block { place, .. }
                if slot != self.slot && self.cover.is_none_or(|(commit, _)| commit < key.commit().get()) =>
            {
                let place = (place.blob.0, u32::from(place.unit));
                self.blocks += 1;
                self.parts += u32::from(self.next != Some(place));
                self.next = Some((place.0, place.1 + BLOCK_UNITS));
            }
            _ => {}
        }
        self.slot = slot;
    }

    fn end_range(&mut self) {
        let Some(range) = self.range.take() else { return };
        let is_dense = matches!(self.cover, Some((_, true)));
        let is_wanted = if is_dense {
            self.blocks >= self.pieces.worn_min
        } else {
            self.blocks >= self.pieces.blocks_min && self.parts >= self.pieces.pieces_min
        };
        if is_wanted && self.found.len() < RANGES_MAX {
            self.found.push(range);
        } else {
            self.has_more |= is_wanted;
        }
        (self.cover, self.slot, self.blocks, self.parts, self.next) = (None, 0, 0, 0, None);
    }

    /// The ranges that were found, and whether there were more.
    pub(crate) fn finish(mut self) -> (Vec<(TimelineId, u32)>, bool) {
        self.end_range();
        (self.found, self.has_more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{BlobId, Commit, Key, Place, Slot};

    fn find(entries: &[(u32, u16, u64, Value)]) -> Vec<u32> {
        let mut survey = Survey::new(Pieces { blocks_min: 4, pieces_min: 3, worn_min: 2 });
        for &(range, slot, commit, value) in entries {
            let (slot, commit) = (Slot::new(slot).unwrap(), Commit::new(commit).unwrap());
            survey.look(&Entry { key: Key::new(TimelineId(1), range, slot, commit), value });
        }
        survey.finish().0.into_iter().map(|(_, range)| range).collect()
    }

    #[test]
    fn ranges_in_many_pieces_and_worn_ones_are_found() {
        let at = |unit| Value::Block { place: Place { blob: BlobId(1), unit }, crc: 0 };
        let dense = Value::Dense { place: Place { blob: BlobId(2), unit: 0 } };
        let scattered: Vec<_> = (1..5).map(|slot| (0, slot, 9, at(slot * 100))).collect();
        assert_eq!(find(&scattered), [0]);
        let in_a_row: Vec<_> = (1..5).map(|slot| (0, slot, 9, at(slot * 8))).collect();
        assert_eq!(find(&in_a_row), []);
        // Old versions of one block are one block.
        let versions: Vec<_> = (1..9).map(|age| (0, 1, 20 - age, at(age as u16 * 100))).collect();
        assert_eq!(find(&versions), []);
        let worn = [(3, 0, 5, dense), (3, 7, 6, at(0)), (3, 9, 7, at(80))];
        assert_eq!(find(&worn), [3]);
        assert_eq!(find(&worn[..2]), []);
        let hidden = [(3, 0, 50, dense), (3, 7, 6, at(0)), (3, 9, 7, at(80))];
        assert_eq!(find(&hidden), []);
        let zeroed = [(3, 0, 5, Value::Zero), (3, 7, 6, at(0)), (3, 9, 7, at(80))];
        assert_eq!(find(&zeroed), []);
    }
}
