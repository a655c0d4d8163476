//! Compaction: the blocks of a range that lie apart are gathered. Any context.
//!
//! Merges of the oldest levels report ranges of which many blocks have entries of their own, in many pieces, and dense ranges of
//! which many blocks were written again (*worn* ones). The blocks of one range at a time are looked up, read, verified and
//! written in a row, with their checksums unchanged. How they are written then is a setting: as they are (`compact/row.rs`), or
//! as a dense frame (`compact/range.rs`). It happens at rest: from a call of [`Pool::rest`] until the next request.

mod range;
mod row;

use crate::moving::{Moved, moved_header_len};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::{Waiter, dense_header_len};
use crate::{BLOCK, BlobId, Form, RANGE_BLOCKS, State, StoreError, StoreOp, TimelineId};
use aryk_dma::Buffer;
use aryk_volume_index::{Commit, Query, Slot, Version};
use std::collections::BTreeSet;

/// Ranges that wait.
const WANTED_MAX: usize = 16 << 10;

/// Ranges that were gathered for which levels are merged again, to find more.
const GATHERED_MIN: u32 = 1024;

/// Blocks of one read.
const READ_BLOCKS_MAX: usize = 64;

/// Reads in flight, and while requests are under way.
const READS_MAX: u32 = 16;
const READS_BESIDE_REQUESTS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Look,
    Read,
    Place,
    Write,
    Insert,
}

/// Blocks in a row, in a blob and in what is gathered.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Which block of the gathered data is the first.
    at: usize,
    blocks: usize,
    blob: BlobId,
    life: u64,
    unit: u32,
}

/// A range that is being gathered.
#[derive(Debug)]
struct Gather {
    timeline: TimelineId,
    range: u32,
    partition: usize,
    /// The first block, of the range, of the part that is being gathered.
    first: u32,
    step: Step,
    /// For a dense frame, the version of each block, and the newest of their commits.
    versions: Vec<Option<Version>>,
    commit: Commit,
    /// In a row, the blocks that are moved.
    moved: Vec<Moved>,
    /// The checksum of each block of the gathered data.
    checksums: Vec<u32>,
    /// What was not read yet; the last comes first.
    pieces: Vec<Piece>,
    reads: u32,
    /// Room for a header, then the blocks.
    data: Option<Buffer>,
    target: Option<(BlobId, u32)>,
    /// Index pages and headers that are being read.
    waits: u32,
    /// Parts that were gathered.
    parts: u32,
    has_failed: bool,
}

impl Gather {
    /// The first block of the part, in the volume.
    fn first_block(&self) -> u64 {
        u64::from(self.range) * u64::from(RANGE_BLOCKS) + u64::from(self.first)
    }

    /// The block in the volume that a block of the gathered data is.
    fn block(&self, at: usize) -> u64 {
        self.moved.get(at).map_or_else(|| self.first_block() + at as u64, |moved| moved.record.block)
    }
}

/// The search for ranges to be gathered in a row.
#[derive(Clone, Copy, Debug, Default)]
enum Search {
    /// What the latest merges of all levels have found is being gathered.
    #[default]
    Found,
    /// Levels are merged again when users have written so many bytes.
    After(u64),
}

/// The compaction of a pool.
#[derive(Debug, Default)]
pub(crate) struct Compactor {
    wanted: BTreeSet<(TimelineId, u32)>,
    /// Whether there were more ranges than are kept, so that the levels are merged again when these are done.
    has_more: bool,
    /// Ranges that were gathered since that happened last.
    gathered: u32,
    gather: Option<Gather>,
    search: Search,
    /// Bytes that users have earned, and that are not written any more ([`Pool::allowance`]).
    forfeited: u64,
    /// Bytes that were written, but not for what users have written since the pool was opened.
    excused: u64,
    /// See [`Pool::rest`].
    is_at_rest: bool,
    is_paused: bool,
}

impl Compactor {
    /// Whether nothing is being gathered. Ranges may wait: that is no reason to keep a pool open.
    pub(crate) const fn is_idle(&self) -> bool {
        self.gather.is_none()
    }

    /// A merge has found these ranges.
    pub(crate) fn want(&mut self, ranges: Vec<(TimelineId, u32)>, has_more: bool) {
        self.has_more |= has_more;
        for range in ranges {
            if self.wanted.len() >= WANTED_MAX {
                self.has_more = true;
                break;
            }
            self.wanted.insert(range);
        }
    }

    /// Bytes are written that compaction need not pay back: those of an inflation, or of a log before the opening.
    pub(crate) const fn excuse(&mut self, bytes: u64) {
        self.excused += bytes;
    }

    /// Has no further range begin, or goes on.
    pub(crate) const fn pause(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }
}

/// Why a range is left alone, or what it waits for.
enum Stop {
    Wait,
    Leave,
}

impl Pool {
    /// Does a bounded piece of compaction. Returns whether there is more to do without input.
    pub(crate) fn step_compactor(&mut self) -> bool {
        self.compactor.is_at_rest &= !self.is_in_use();
        let Some(mut gather) = self.compactor.gather.take().or_else(|| self.next_range()) else {
            return self.search_for_ranges();
        };
        if gather.waits > 0 {
            self.compactor.gather = Some(gather);
            return false;
        }
        let result = match (gather.step, self.settings.form) {
            (step, _) if gather.has_failed && gather.reads == 0 && step != Step::Write => Err(Stop::Leave),
            (Step::Look, Form::Dense) => self.look_at_range(&mut gather),
            (Step::Look, Form::Row) => self.look_at_part(&mut gather),
            (Step::Read, _) => self.read_pieces(&mut gather),
            (Step::Place, Form::Dense) => self.write_range(&mut gather),
            (Step::Place, Form::Row) => self.write_part(&mut gather),
            (Step::Write, _) => Err(Stop::Wait),
            (Step::Insert, Form::Dense) => self.insert_range(&mut gather),
            (Step::Insert, Form::Row) => self.insert_entries(&mut gather),
        };
        match result {
            Ok(()) => {
                self.compactor.gather = Some(gather);
                true
            }
            Err(Stop::Wait) => {
                self.compactor.gather = Some(gather);
                false
            }
            Err(Stop::Leave) => {
                self.end_gather(gather);
                true
            }
        }
    }

    fn end_gather(&mut self, gather: Gather) {
        if let Some(data) = gather.data {
            self.buffers.give(data);
        }
        if let Some((blob, _)) = gather.target {
            self.keeper.end_move(blob);
        }
        if gather.parts > 0 {
            self.stats.gathered_ranges += 1;
            self.compactor.gathered += 1;
        }
    }

    /// No request has come for a while: compaction may work in the next turns, until one comes. Returns whether that is new.
    pub fn rest(&mut self) -> bool {
        let may_rest = self.state == State::Ready && !self.is_in_use();
        may_rest && !std::mem::replace(&mut self.compactor.is_at_rest, true)
    }

    /// Has levels merged to find more ranges, if that is worth it. Returns whether it does.
    fn search_for_ranges(&mut self) -> bool {
        let compactor = &self.compactor;
        if compactor.is_paused
            || !compactor.is_at_rest
            || !compactor.wanted.is_empty()
            || !self.jobs.is_idle()
        {
            return false;
        }
        // That ends where only such are left that are not to be gathered.
        if std::mem::take(&mut self.compactor.has_more)
            && std::mem::take(&mut self.compactor.gathered) >= GATHERED_MIN
        {
            self.jobs.stale = [true; crate::PARTITIONS];
            return true;
        }
        self.settings.form == Form::Row && self.search_for_rows()
    }

    /// The next range that may be gathered now.
    fn next_range(&mut self) -> Option<Gather> {
        let may_begin = match self.settings.form {
            Form::Dense => !self.compactor.is_paused && (self.compactor.is_at_rest || !self.is_roomy()),
            Form::Row => !self.compactor.wanted.is_empty() && self.may_gather_rows(),
        };
        let (timeline, range) = may_begin.then(|| self.compactor.wanted.pop_first())??;
        let block = u64::from(range) * u64::from(RANGE_BLOCKS);
        Some(Gather {
            timeline,
            range,
            partition: self.partition_of(timeline, block),
            first: 0,
            step: Step::Look,
            versions: Vec::new(),
            commit: Commit::ZERO,
            moved: Vec::new(),
            checksums: Vec::new(),
            pieces: Vec::new(),
            reads: 0,
            data: None,
            target: None,
            waits: 0,
            parts: 0,
            has_failed: false,
        })
    }

    /// Looks up blocks of the range from the part's first on at a view, into `slots`.
    fn look_up_part(&mut self, gather: &mut Gather, blocks: u32, view: Commit) -> Result<(), Stop> {
        let (timeline, range, first) = (gather.timeline, gather.range, Slot::block(gather.first as u16));
        let query = Query { timeline, range, first, count: blocks as u16, view };
        let index = &self.partitions[gather.partition].index;
        index.lookup(&self.cache, &query, &mut self.slots).map_err(|need| {
            gather.waits = self.want_pages(&need, Waiter::Compactor);
            Stop::Wait
        })
    }

    fn read_pieces(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let max = if self.requests.is_empty() { READS_MAX } else { READS_BESIDE_REQUESTS };
        while gather.reads < max && !gather.has_failed {
            let Some(piece) = gather.pieces.pop() else { break };
            if self.keeper.life(piece.blob) != Some(piece.life) {
                // The blocks were replaced, and their blob was freed.
                gather.has_failed = true;
                break;
            }
            let (blob, unit, len) = (piece.blob, piece.unit, piece.blocks as u32 * BLOCK);
            let data = self.buffers.take(len);
            self.keeper.pin(blob);
            gather.reads += 1;
            self.stats.background_read_bytes += u64::from(len);
            let owner = Owner::CompactRead { blob, at: piece.at, blocks: piece.blocks };
            self.out.op(owner, StoreOp::Read { blob, unit, data, len });
        }
        if gather.reads > 0 {
            return Err(Stop::Wait);
        }
        if gather.pieces.is_empty() {
            gather.step = Step::Place;
        }
        Ok(())
    }

    pub(crate) fn compact_read_answered(
        &mut self,
        blob: BlobId,
        at: usize,
        blocks: usize,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(blob);
        if let Some(gather) = &mut self.compactor.gather {
            gather.reads -= 1;
            let mut to = gather.data.take().expect("the blocks are being read");
            let header = match self.settings.form {
                Form::Dense => dense_header_len(self.facts.alignment),
                Form::Row => moved_header_len(self.facts.alignment),
            } as usize;
            for (at, bytes) in (at..at + blocks).zip(data.bytes().chunks_exact(BLOCK as usize)) {
                let is_right = result.is_ok()
                    && crate::checksum::of_block(gather.block(at), bytes) == gather.checksums[at];
                if result.is_ok() && !is_right {
                    // The entry stays, so the damage is reported by reads and checks.
                    self.stats.damaged_blocks += 1;
                }
                gather.has_failed |= !is_right;
                to.write(header + at * BLOCK as usize, bytes);
            }
            gather.data = Some(to);
        }
        self.buffers.give(data);
    }

    pub(crate) fn compact_write_answered(&mut self, data: Buffer, result: Result<(), StoreError>) {
        self.buffers.give(data);
        let gather = self.compactor.gather.as_mut().expect("a range stays while it is written");
        gather.step = Step::Insert;
        if result.is_err() {
            // Nothing refers to what was written. The next range goes to another blob.
            gather.has_failed = true;
            self.close_writer();
        }
    }

    pub(crate) fn compactor_waited(&mut self, is_ok: bool) {
        let Some(gather) = &mut self.compactor.gather else { return };
        gather.waits -= 1;
        gather.has_failed |= !is_ok;
    }
}
