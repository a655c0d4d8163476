//! Requests under way. Any context.

use crate::pressure::Share;
use crate::{BLOCK_UNITS, Extents, ForeignPiece, Status, Tag, UNIT, VolumeId};
use aryk_dma::{Buffer, Sgl};
use aryk_slots::Key;
use aryk_volume_index::TimelineId;
use std::collections::VecDeque;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Read,
    Locate,
    Write,
    Zero,
    Flush,
}

/// Who gets to know the end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// The caller.
    User(Tag),
    /// Nobody any more: the caller has aborted the request, and has the reply.
    Abandoned,
    /// A write of less than a block, which needs the rest of the block.
    Edge { parent: Key, which: usize },
    /// The command that runs on the volume.
    Command,
    /// The volume is inflated: what its base has is copied.
    Inflate,
}

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// It waits for other changes of the blocks that it changes in part.
    Locked,
    /// It waits until earlier writes are readable, and for the rests of its first and last block.
    Edges,
    /// It waits for its turn among all volumes.
    Queued,
    /// Its parts are in the log's queue or in frames.
    Logged,
    /// It waits for index pages.
    Looking,
    /// Its data is being read.
    Reading,
    /// It waits for a flush of the store.
    Flushing,
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) origin: Origin,
    pub(crate) volume: VolumeId,
    pub(crate) timeline: TimelineId,
    pub(crate) unit: u64,
    pub(crate) units: u64,
    pub(crate) op: Op,
    pub(crate) fua: bool,
    pub(crate) data: Sgl,
    /// The memory, once the caller has taken back that of the request.
    pub(crate) own: Option<Buffer>,
    pub(crate) phase: Phase,
    /// Parts, reads or edges that are not done.
    pub(crate) left: u32,
    /// Index pages and headers for which the request waits.
    pub(crate) waits: u32,
    pub(crate) status: Status,
    /// For reads, the next block to look up.
    pub(crate) cursor: u64,
    /// For writes of parts of blocks, the first and the last block.
    pub(crate) edges: [Option<Buffer>; 2],
    /// Whether the edges are locked for this request.
    pub(crate) has_locks: bool,
    /// For reads, what the caller reads itself.
    pub(crate) foreign: Vec<ForeignPiece>,
    /// Where the data of a request is that locates it.
    pub(crate) extents: Extents,
}

impl Active {
    /// A request of which nothing is done: `range` is its first unit and its units.
    pub(crate) const fn new(
        origin: Origin,
        volume: VolumeId,
        timeline: TimelineId,
        op: Op,
        range: (u64, u64),
        data: Sgl,
    ) -> Self {
        Self {
            origin,
            volume,
            timeline,
            unit: range.0,
            units: range.1,
            op,
            fua: false,
            data,
            own: None,
            phase: Phase::Queued,
            left: 0,
            waits: 0,
            status: Status::Ok,
            cursor: range.0 / BLOCK_UNITS as u64,
            edges: [None, None],
            has_locks: false,
            foreign: Vec::new(),
            extents: Extents { list: Vec::new(), checksums: Vec::new() },
        }
    }

    /// The unit behind the last.
    pub(crate) const fn end(&self) -> u64 {
        self.unit + self.units
    }

    /// The first block that the request touches.
    pub(crate) const fn first_block(&self) -> u64 {
        self.unit / BLOCK_UNITS as u64
    }

    /// The block behind the last that the request touches.
    pub(crate) const fn end_block(&self) -> u64 {
        self.end().div_ceil(BLOCK_UNITS as u64)
    }

    /// The blocks that the request covers only in part: the first, the last, or both in one.
    pub(crate) fn edge_blocks(&self) -> [Option<u64>; 2] {
        let (first, last) = (self.first_block(), self.end_block() - 1);
        let head = !self.unit.is_multiple_of(u64::from(BLOCK_UNITS));
        let tail = !self.end().is_multiple_of(u64::from(BLOCK_UNITS));
        let one = first == last;
        [(head || (one && tail)).then_some(first), (tail && !one).then_some(last)]
    }

    /// The part of a block that the request covers: first unit in the block, first byte of the request's data, bytes.
    pub(crate) fn overlap(&self, block: u64) -> (u32, u32, u32) {
        let start = (block * u64::from(BLOCK_UNITS)).max(self.unit);
        let end = ((block + 1) * u64::from(BLOCK_UNITS)).min(self.end());
        let in_block = (start - block * u64::from(BLOCK_UNITS)) as u32;
        (in_block, (start - self.unit) as u32 * UNIT, (end - start) as u32 * UNIT)
    }
}

/// What the pool keeps in memory for each volume.
#[derive(Debug, Default)]
pub(crate) struct Runtime {
    /// Requests under way, also those that wait for their turn.
    pub(crate) in_flight: u32,
    /// Requests that wait for their turn.
    pub(crate) queue: VecDeque<Key>,
    /// Whether the volume is in the ring of volumes whose requests wait.
    pub(crate) is_in_ring: bool,
    /// Bytes that may be admitted at its turn in the ring.
    pub(crate) deficit: u64,
    /// What it has used of what it pays nothing for.
    pub(crate) share: Share,
    /// Changes under way that the caller has aborted, and the reads that wait for their end.
    pub(crate) abandoned: u32,
    pub(crate) behind: Vec<Key>,
    /// A command waits until no request is under way, or runs; requests wait meanwhile.
    pub(crate) is_held: bool,
    pub(crate) held: VecDeque<crate::Request>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(unit: u64, units: u64) -> Active {
        Active::new(Origin::User(Tag(0)), VolumeId(0), TimelineId(0), Op::Write, (unit, units), Sgl::EMPTY)
    }

    #[test]
    fn blocks_that_are_covered_in_part() {
        assert_eq!(write(8, 16).edge_blocks(), [None, None]);
        assert_eq!(write(9, 15).edge_blocks(), [Some(1), None]);
        assert_eq!(write(9, 16).edge_blocks(), [Some(1), Some(3)]);
        assert_eq!(write(8, 9).edge_blocks(), [None, Some(2)]);
        assert_eq!(write(8, 1).edge_blocks(), [Some(1), None]);
        assert_eq!(write(9, 1).edge_blocks(), [Some(1), None]);
        assert_eq!(write(15, 2).edge_blocks(), [Some(1), Some(2)]);
        assert_eq!(write(15, 2).overlap(1), (7, 0, 512));
        assert_eq!(write(15, 2).overlap(2), (0, 512, 512));
        assert_eq!(write(3, 2).overlap(0), (3, 0, 1024));
    }
}
