//! Identifiers and the units of the engine. Any context.

use aryk_volume_index::{Commit, TimelineId};

/// Bytes of a unit: the grain of places in a blob, and of requests.
pub const UNIT: u32 = 512;

/// Bytes of a block: the grain of the index and of checksums.
pub const BLOCK: u32 = 4096;

/// Units of a block.
pub const BLOCK_UNITS: u32 = aryk_volume_index::BLOCK_UNITS;

/// Blocks of a range: the part of a volume that one dense frame holds.
pub const RANGE_BLOCKS: u32 = aryk_volume_index::RANGE_BLOCKS as u32;

/// Ranges of a stripe: the part of a volume that one partition owns.
pub const STRIPE_RANGES: u32 = 4;

/// Blocks of a stripe.
pub(crate) const STRIPE_BLOCKS: u64 = STRIPE_RANGES as u64 * RANGE_BLOCKS as u64;

/// Partitions of a pool. Part of the format.
pub const PARTITIONS: usize = 16;

/// The most units of a volume: 1 EiB, less than keys of the index can name.
pub const VOLUME_UNITS_MAX: u64 = 1 << 51;

/// A volume or a snapshot, as callers name it. Never used again after its deletion.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeId(pub u32);

/// A disk of the caller that is the base of a timeline ([`crate::Foreign`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ForeignId(pub u32);

impl ForeignId {
    /// The foreign disk that is the base of this timeline.
    pub const fn of(timeline: TimelineId) -> Self {
        Self(timeline.0)
    }
}

/// The commits of one cut, one for each partition.
pub type Cut = [Commit; PARTITIONS];

/// The partition that owns a block of a timeline whose stripes are shifted by `shift`.
pub(crate) const fn partition_of(shift: u8, block: u64) -> usize {
    (block / STRIPE_BLOCKS % PARTITIONS as u64 + shift as u64) as usize % PARTITIONS
}
