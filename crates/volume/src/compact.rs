//! Compaction: a range whose blocks lie apart is gathered into one dense frame. Any context.
//!
//! Merges of the oldest levels report ranges of which nearly all blocks have entries of their own, in many pieces, and dense
//! ranges of which many blocks were written again (*worn* ones). The blocks of one range at a time are looked up, read, verified
//! and written in a row, with their checksums unchanged. The dense frame gets the commit *M* of the newest of them. So its one
//! entry is a version of all blocks of the range for each view from *M* on, and hides those from which it was made.
//!
//! **When that is right.** At the oldest view that includes *M*, each block must be the version that was gathered, or newer data:
//! when the frame is written, this is looked up once more, in the turn in which the entry is made. Later views differ from this
//! one only by newer versions, and a merge that begins later leaves out no zero that is newer than an entry elsewhere.
//!
//! **When that is worth it.** Blocks that a view older than *M* sees stay, and would exist twice: a range with many of them is
//! left alone, and so is one that shows its base. All work waits until no write has come for some turns; only worn ranges are
//! gathered before that, while free blobs are short, because a worn dense frame is alive as a whole.

use crate::dense::DenseKey;
use crate::frame::{self, Head, Kind, NO_STREAM, Record};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::{Waiter, dense_header_len};
use crate::{BLOCK, BLOCK_UNITS, BlobId, RANGE_BLOCKS, StoreError, StoreOp, TimelineId, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::{Commit, Key as IndexKey, Place, Query, Slot, Value, Version};
use std::collections::BTreeSet;

/// Turns without writes after which the pool is quiet.
const QUIET_TURNS: u32 = 32;

/// Ranges that wait.
const WANTED_MAX: usize = 16 << 10;

/// Ranges that were gathered for which levels are merged again, to find more.
const GATHERED_MIN: u32 = 1024;

/// Blocks of one read.
const READ_BLOCKS_MAX: usize = 64;

/// Reads in flight, and while requests are under way.
const READS_MAX: u32 = 16;
const READS_BESIDE_REQUESTS: u32 = 2;

/// Blocks that may exist twice, because older views keep them.
const TWICE_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Look,
    Read,
    Place,
    Write,
    Insert,
}

/// Blocks in a row.
#[derive(Clone, Copy, Debug)]
struct Piece {
    block: usize,
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
    step: Step,
    /// The version of each block, and the newest of their commits.
    versions: Vec<Option<Version>>,
    commit: Commit,
    checksums: Vec<u32>,
    /// What was not read yet; the last comes first.
    pieces: Vec<Piece>,
    reads: u32,
    /// Room for a header, then the blocks.
    data: Option<Buffer>,
    target: Option<(BlobId, u32)>,
    /// Index pages and headers that are being read.
    waits: u32,
    has_failed: bool,
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
    /// The log's next sequence at the latest turn, and for how many turns it has been that.
    sequence: u64,
    quiet_turns: u32,
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
        if self.log.next_sequence != self.compactor.sequence {
            self.compactor.sequence = self.log.next_sequence;
            self.compactor.quiet_turns = 0;
        }
        let is_quiet = self.compactor.quiet_turns >= QUIET_TURNS;
        self.compactor.quiet_turns = self.compactor.quiet_turns.saturating_add(1);
        let Some(mut gather) = self.compactor.gather.take().or_else(|| self.next_range(is_quiet)) else {
            return !is_quiet && !self.compactor.wanted.is_empty() && !self.compactor.is_paused;
        };
        if gather.waits > 0 {
            self.compactor.gather = Some(gather);
            return false;
        }
        let result = match gather.step {
            _ if gather.has_failed && gather.reads == 0 && gather.step != Step::Write => Err(Stop::Leave),
            Step::Look => self.look(&mut gather),
            Step::Read => self.read_pieces(&mut gather),
            Step::Place => self.write_range(&mut gather),
            Step::Write => Err(Stop::Wait),
            Step::Insert => self.insert_range(&mut gather),
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
    }

    /// The next range that may be gathered now.
    fn next_range(&mut self, is_quiet: bool) -> Option<Gather> {
        let has_space = self.is_roomy();
        if self.compactor.is_paused || (!is_quiet && has_space) {
            return None;
        }
        let Some((timeline, range)) = self.compactor.wanted.pop_first() else {
            // More are found by merging all again. That ends where only such are left that are not to be gathered.
            let compactor = &mut self.compactor;
            if is_quiet && self.jobs.is_idle() && std::mem::take(&mut compactor.has_more) {
                let is_worth_it = std::mem::take(&mut compactor.gathered) >= GATHERED_MIN;
                self.jobs.stale = [is_worth_it; crate::PARTITIONS];
            }
            return None;
        };
        let block = u64::from(range) * u64::from(RANGE_BLOCKS);
        Some(Gather {
            timeline,
            range,
            partition: self.partition_of(timeline, block),
            step: Step::Look,
            versions: Vec::new(),
            commit: Commit::ZERO,
            checksums: Vec::new(),
            pieces: Vec::new(),
            reads: 0,
            data: None,
            target: None,
            waits: 0,
            has_failed: false,
        })
    }

    /// Looks up the range at a view, into `slots`.
    fn look_up_range(&mut self, gather: &mut Gather, view: Commit) -> Result<(), Stop> {
        let (timeline, range) = (gather.timeline, gather.range);
        let query = Query { timeline, range, first: Slot::FIRST, count: RANGE_BLOCKS as u16, view };
        let index = &self.partitions[gather.partition].index;
        index.lookup(&self.cache, &query, &mut self.slots).map_err(|need| {
            gather.waits = self.want_pages(&need, Waiter::Compactor);
            Stop::Wait
        })
    }

    /// Finds what the range consists of, and whether it is to be gathered.
    fn look(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let (has_base, kept) = (history.base.is_some(), history.kept[gather.partition]);
        let view = if history.is_live { Commit::MAX } else { kept };
        self.look_up_range(gather, view)?;
        let slots = (0..RANGE_BLOCKS).map(|block| self.slots.get(Slot::block(block as u16)));
        gather.versions.clear();
        gather.versions.extend(slots);
        let versions = gather.versions.iter().flatten();
        gather.commit = versions.clone().map(|version| version.commit).max().ok_or(Stop::Leave)?;
        let shows_base = has_base && gather.versions.contains(&None);
        let has_data = |version: &&Version| version.value != Value::Zero;
        let blocks = versions.clone().filter(has_data).count();
        let of_dense = |version: &&Version| matches!(version.value, Value::Dense { .. });
        let dense = versions.clone().filter(of_dense).count();
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let is_twice = |version: &&Version| {
            let first = history.first_from(gather.partition, version.commit);
            has_data(version) && first.is_some_and(|view| view < gather.commit)
        };
        let twice = versions.clone().filter(is_twice).count();
        let pieces = self.settings.pieces;
        let is_worn = dense > 0 && blocks - dense >= pieces.worn_min as usize;
        let has_space = self.is_roomy() && !self.is_short();
        let is_full = dense == 0 && blocks >= pieces.blocks_min as usize && has_space;
        if shows_base || twice > TWICE_MAX || !(is_worn || is_full) {
            return Err(Stop::Leave);
        }
        self.find_pieces(gather)?;
        if !is_worn && gather.pieces.len() < pieces.pieces_min as usize {
            return Err(Stop::Leave);
        }
        gather.data = Some(self.buffers.take(dense_header_len(self.facts.alignment) + RANGE_BLOCKS * BLOCK));
        gather.step = Step::Read;
        Ok(())
    }

    /// Finds the places and checksums of the blocks.
    fn find_pieces(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let header = dense_header_len(self.facts.alignment) / UNIT;
        let mut latest: Option<DenseKey> = None;
        gather.pieces.clear();
        gather.checksums.clear();
        for block in 0..RANGE_BLOCKS as usize {
            let value = gather.versions[block].map_or(Value::Zero, |version| version.value);
            let (blob, unit, crc) = match value {
                Value::Zero => {
                    gather.checksums.push(0);
                    continue;
                }
                Value::Block { place, crc } => (place.blob, u32::from(place.unit), crc),
                Value::Dense { place } => {
                    let life = self.keeper.life(place.blob).expect("the index refers to blobs in use");
                    let key = (place.blob, life, u32::from(place.unit));
                    let crc = self.dense.get(&key).map(|checksums| checksums[block]);
                    if crc.is_none() && latest != Some(key) {
                        latest = Some(key);
                        gather.waits += 1;
                        self.want_header(key, Waiter::Compactor);
                    }
                    let crc = crc.unwrap_or_default();
                    (place.blob, key.2 + header + block as u32 * BLOCK_UNITS, crc)
                }
            };
            gather.checksums.push(crc);
            let life = self.keeper.life(blob).expect("the index refers to blobs in use");
            match gather.pieces.last_mut() {
                Some(last)
                    if (last.blob, last.unit + last.blocks as u32 * BLOCK_UNITS) == (blob, unit)
                        && last.block + last.blocks == block
                        && last.blocks < READ_BLOCKS_MAX =>
                {
                    last.blocks += 1;
                }
                _ => gather.pieces.push(Piece { block, blocks: 1, blob, life, unit }),
            }
        }
        if gather.waits > 0 { Err(Stop::Wait) } else { Ok(()) }
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
            let owner = Owner::CompactRead { blob, block: piece.block, blocks: piece.blocks };
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
        block: usize,
        blocks: usize,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(blob);
        if let Some(gather) = &mut self.compactor.gather {
            gather.reads -= 1;
            let first = u64::from(gather.range) * u64::from(RANGE_BLOCKS);
            let to = gather.data.as_mut().expect("the range is being read");
            let header = dense_header_len(self.facts.alignment) as usize;
            for (at, bytes) in (block..block + blocks).zip(data.bytes().chunks_exact(BLOCK as usize)) {
                let is_right = result.is_ok()
                    && crate::checksum::of_block(first + at as u64, bytes) == gather.checksums[at];
                if result.is_ok() && !is_right {
                    // The entry stays, so the damage is reported by reads and checks.
                    self.stats.damaged_blocks += 1;
                }
                gather.has_failed |= !is_right;
                to.write(header + at * BLOCK as usize, bytes);
            }
        }
        self.buffers.give(data);
    }

    fn write_range(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let header = dense_header_len(self.facts.alignment);
        let len = header + RANGE_BLOCKS * BLOCK;
        let (blob, life, unit) = self.take_place(len, self.index_reserve() + 1).ok_or(Stop::Leave)?;
        gather.target = Some((blob, unit));
        let block = u64::from(gather.range) * u64::from(RANGE_BLOCKS);
        let mut data = gather.data.take().expect("the range was read");
        let (out, blocks) = data.bytes_mut()[..len as usize].split_at_mut(header as usize);
        let versions = gather.versions.iter().zip(blocks.chunks_exact_mut(BLOCK as usize));
        for ((at, (version, bytes)), crc) in (block..).zip(versions).zip(&mut gather.checksums) {
            if version.is_none_or(|version| version.value == Value::Zero) {
                bytes.fill(0);
                *crc = crate::checksum::of_block(at, bytes);
            }
        }
        let places = frame::checksums_mut(out, 1, RANGE_BLOCKS as usize).chunks_exact_mut(4);
        places.zip(&gather.checksums).for_each(|(place, crc)| place.copy_from_slice(&crc.to_le_bytes()));
        let record = Record {
            timeline: gather.timeline,
            partition: gather.partition as u8,
            kind: Kind::Dense,
            commit: gather.commit,
            block,
            blocks: RANGE_BLOCKS,
            data: 0,
        };
        let head =
            Head { uuid: self.keeper.manifest.uuid, life, sequence: 0, stream: NO_STREAM, unit, durable: 0 };
        frame::encode(out, &head, &[record], RANGE_BLOCKS);
        gather.step = Step::Write;
        self.stats.moved_write_bytes += u64::from(len);
        self.out.op(Owner::CompactWrite, StoreOp::Write { blob, unit, data, len });
        Err(Stop::Wait)
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

    /// Makes the entry of the range, unless something came between.
    fn insert_range(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let kept = history.kept[gather.partition];
        let view = history.first_from(gather.partition, gather.commit).ok_or(Stop::Leave)?;
        self.look_up_range(gather, view)?;
        let is_same = |(block, old): (u32, &Option<Version>)| {
            let now = self.slots.get(Slot::block(block as u16));
            // A merge under way may leave a newer zero out, which then would not hide the frame.
            let is_newer = |now: &Version| now.commit > gather.commit && now.value != Value::Zero;
            now == *old || now.as_ref().is_some_and(is_newer)
        };
        if (0..RANGE_BLOCKS).zip(&gather.versions).all(is_same) {
            let (blob, unit) = gather.target.expect("written");
            let key = IndexKey::new(gather.timeline, gather.range, Slot::RANGE, gather.commit);
            let value = Value::Dense { place: Place { blob, unit: unit as u16 } };
            self.partitions[gather.partition].index.insert(key, value, kept);
            self.jobs.fresh_entries += 1;
            self.stats.compacted_ranges += 1;
            self.compactor.gathered += 1;
            self.keeper.hold(blob, self.jobs.freezes + 1);
        }
        Err(Stop::Leave)
    }

    pub(crate) fn compactor_waited(&mut self, is_ok: bool) {
        let Some(gather) = &mut self.compactor.gather else { return };
        gather.waits -= 1;
        gather.has_failed |= !is_ok;
    }
}
