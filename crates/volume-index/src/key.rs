//! Keys and values of the index: which version of which block is where.
//!
//! Context: any. A [`Key`] packs into 128 bits, whose order is the order of the index: by timeline, range and slot, and the
//! newest commit first. What the bits of a page look like is in `page.rs`.

use std::fmt;

/// Blocks of a range.
pub const RANGE_BLOCKS: u16 = 1024;
/// Units of 512 bytes in a block.
pub const BLOCK_UNITS: u32 = 8;

/// One history of writes. An id is never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TimelineId(pub u32);

/// A file of up to 65,536 units, written once from its start to its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlobId(pub u32);

/// A unit of a blob.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// The blob.
    pub blob: BlobId,
    /// The unit in the blob.
    pub unit: u16,
}

/// The number of a write in its partition: 48 bits. Also a view: the state after all writes up to this one.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Commit(u64);

impl Commit {
    /// Before all writes.
    pub const ZERO: Self = Self(0);
    /// After all writes: the live view.
    pub const MAX: Self = Self((1 << 48) - 1);

    /// A commit of this number, unless it has more than 48 bits.
    pub const fn new(number: u64) -> Option<Self> {
        if number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The commit in the low 48 bits of a number.
    pub(crate) const fn from_low_bits(bits: u64) -> Self {
        Self(bits & Self::MAX.0)
    }
}

/// What of a range an entry is about: the whole range, or one of its blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(u16);

impl Slot {
    /// The whole range.
    pub const RANGE: Self = Self(0);
    /// The first block.
    pub const FIRST: Self = Self(1);
    /// The last block.
    pub const LAST: Self = Self(RANGE_BLOCKS);

    /// The slot of a block of the range, from 0.
    ///
    /// # Panics
    /// If the range has no such block.
    pub const fn block(block: u16) -> Self {
        assert!(block < RANGE_BLOCKS, "a block within the range");
        Self(block + 1)
    }

    /// The slot of this number: 0 for the range, 1 to 1,024 for its blocks.
    pub const fn new(number: u16) -> Option<Self> {
        if number <= RANGE_BLOCKS { Some(Self(number)) } else { None }
    }

    /// The number: 0 for the range, 1 to 1,024 for its blocks.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether the entry is about the whole range.
    pub const fn is_range(self) -> bool {
        self.0 == 0
    }
}

/// The name of one version of a block or of a range.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(u128);

impl Key {
    /// Before all keys.
    pub const MIN: Self = Self(0);

    /// The version of `slot` that `commit` wrote.
    pub const fn new(timeline: TimelineId, range: u32, slot: Slot, commit: Commit) -> Self {
        Self(
            (timeline.0 as u128) << 96
                | (range as u128) << 64
                | (slot.0 as u128) << 48
                | (Commit::MAX.0 - commit.0) as u128,
        )
    }

    /// The packed key: its order is the order of the index.
    pub const fn packed(self) -> u128 {
        self.0
    }

    /// The key of this packed form, unless its slot is none.
    pub const fn from_packed(packed: u128) -> Option<Self> {
        if (packed >> 48) as u16 <= RANGE_BLOCKS { Some(Self(packed)) } else { None }
    }

    /// The key of a packed form whose slot was checked.
    pub(crate) const fn from_checked(packed: u128) -> Self {
        Self(packed)
    }

    /// The same slot, from its newest version on.
    pub(crate) const fn newest(self) -> Self {
        Self(self.0 >> 48 << 48)
    }

    /// The history to which the version belongs.
    pub const fn timeline(self) -> TimelineId {
        TimelineId((self.0 >> 96) as u32)
    }

    /// The number of the range of 4 MiB in its volume.
    pub const fn range(self) -> u32 {
        (self.0 >> 64) as u32
    }

    /// Which part of the range.
    pub const fn slot(self) -> Slot {
        Slot((self.0 >> 48) as u16)
    }

    /// The write that made the version.
    pub const fn commit(self) -> Commit {
        Commit(Commit::MAX.0 - (self.0 as u64 & Commit::MAX.0))
    }

    /// Timeline and range.
    pub(crate) const fn group(self) -> u64 {
        (self.0 >> 64) as u64
    }

    /// The key that follows this one, unless this is the last: where an iteration goes on.
    pub fn next(self) -> Option<Self> {
        let next = self.0.checked_add(1)?;
        // The first key of the next range follows the oldest version of a range's last block.
        Self::from_packed(next).or_else(|| {
            ((next >> 64).checked_add(1)).filter(|group| group >> 64 == 0).map(|group| Self(group << 64))
        })
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (timeline, range, slot, commit) =
            (self.timeline().0, self.range(), self.slot().0, self.commit().0);
        write!(f, "{timeline}/{range}/{slot}@{commit}")
    }
}

/// What a version consists of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Value {
    /// One block of data; only for a block's slot.
    Block {
        /// Its first unit.
        place: Place,
        /// The checksum of its data.
        crc: u32,
    },
    /// All blocks of the range in a row, behind a header with their checksums; only for the slot of the range.
    Dense {
        /// The header's first unit.
        place: Place,
    },
    /// Zeroes: the block, or the whole range. Hides the base, which an absent entry does not.
    Zero,
}

impl Value {
    /// The blob that the value refers to, and how many of its units it keeps alive: the data, without a header.
    pub const fn reference(&self) -> Option<(BlobId, u32)> {
        match self {
            Self::Block { place, .. } => Some((place.blob, BLOCK_UNITS)),
            Self::Dense { place } => Some((place.blob, BLOCK_UNITS * RANGE_BLOCKS as u32)),
            Self::Zero => None,
        }
    }

    /// Whether an entry of this slot may have this value.
    pub const fn suits(&self, slot: Slot) -> bool {
        match self {
            Self::Block { .. } => !slot.is_range(),
            Self::Dense { .. } => slot.is_range(),
            Self::Zero => true,
        }
    }
}

/// A key and its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Which version of what.
    pub key: Key,
    /// What it consists of.
    pub value: Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_parts_and_sort_by_them_with_the_newest_commit_first() {
        let key = |timeline, range, slot, commit| {
            Key::new(TimelineId(timeline), range, Slot::new(slot).unwrap(), Commit::new(commit).unwrap())
        };
        let sorted = [
            key(0, 0, 0, 9),
            key(0, u32::MAX, 1024, 0),
            key(1, 0, 1024, Commit::MAX.get()),
            key(1, 0, 1024, 3),
            key(1, 0, 1024, 2),
            key(1, 1, 0, 7),
            key(1, 1, 1, 8),
            key(u32::MAX, u32::MAX, 1024, 0),
        ];
        assert!(sorted.is_sorted() && sorted.iter().all(|&key| Key::from_packed(key.packed()) == Some(key)));
        let last = sorted[7];
        assert_eq!(
            (last.timeline().0, last.range(), last.slot(), last.commit().get()),
            (u32::MAX, u32::MAX, Slot::LAST, 0)
        );
        assert_eq!(key(3, 4, 0, 5).next(), Some(key(3, 4, 0, 4)));
        assert_eq!(key(3, 4, 1024, 0).next(), Some(key(3, 5, 0, Commit::MAX.get())));
        assert_eq!(key(3, u32::MAX, 1024, 0).next(), Some(key(4, 0, 0, Commit::MAX.get())));
        assert_eq!(last.next(), None);
        assert_eq!(Key::from_packed(1025 << 48), None);
    }
}
