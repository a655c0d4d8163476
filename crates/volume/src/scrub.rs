//! The scrub: a slow pass over all of a pool that finds damage before a user reads it. Any context.
//!
//! A pass goes through the partitions. Of each, it reads the pages of all index runs from the store, past the cache, and then
//! visits all entries in the order of their keys, and reads their data. The place of a pass is a key, so that it goes on whatever
//! flushes, merges and the cleaner do meanwhile. Data may be dead although an entry refers to it; so wrong blocks are looked up,
//! and are damage if a view sees them.
//!
//! The engine has no clock: the caller grants bytes as time passes, and nothing is read without. While the pool has other work,
//! less of a grant counts, and one read is in flight at a time.

use crate::command::add_damage;
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::Waiter;
use crate::verify::{NO_DATA, Piece, Wrong, first_block, place_of};
use crate::{
    BLOCK, BLOCK_UNITS, BlobId, Damage, PARTITIONS, RANGE_BLOCKS, State, StoreError, StoreOp, TimelineId,
    Volume, VolumeId,
};
use aryk_dma::Buffer;
use aryk_volume_index::{
    Commit, Entry, Key as IndexKey, PAGE_UNITS, PageBytes, Query, Run, RunId, ScanOptions, Slot,
};
use std::collections::VecDeque;

/// Entries that are visited in one turn.
const ENTRIES_PER_TURN: usize = 256;

/// Pages of one read.
const READ_PAGES: u32 = 64;

/// Reads in flight, while the pool has nothing else to do.
const READS_MAX: u32 = 4;

/// The part of a grant that counts while the pool has other work.
const BUSY_SHARE: u64 = 4;

/// How far the scrub is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scrub {
    /// No pass was started since the pool was opened, or the latest was stopped or ended with a failure of the store.
    Idle,
    /// A pass is under way.
    Running {
        /// Index entries that were visited.
        visited: u64,
        /// Index entries when the pass began.
        entries: u64,
    },
    /// The latest pass has visited all.
    Done,
}

/// What a pass does in its partition.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// It reads pages: the next page of this run, or of the next run behind it. Later runs were written since.
    Pages { run: RunId, page: u32, end: RunId },
    /// It visits entries from this key on.
    Entries(IndexKey),
}

/// A pass under way.
#[derive(Debug)]
struct Pass {
    partition: usize,
    step: Step,
    /// What was visited and is to be read.
    pieces: VecDeque<Piece>,
    /// Wrong blocks that are to be looked up.
    suspects: Vec<Wrong>,
    /// A page for which a lookup or a visit has waited cannot be used.
    has_failed: bool,
    /// Blocks of a timeline that the pass has left out since it could last visit entries, because an index page is damaged.
    left_out: u64,
    visited: u64,
    entries: u64,
}

#[derive(Debug, Default)]
enum Latest {
    #[default]
    None,
    Running(Pass),
    Done,
}

/// The scrub of a pool.
#[derive(Debug, Default)]
pub(crate) struct Scrubber {
    latest: Latest,
    /// Bytes that may be read; less than none if the latest read was larger than what was left.
    budget: i64,
    /// Whether the pool had other work at the latest grant.
    is_busy: bool,
    /// Reads in flight, and pages for which the pass waits. They may be of a pass that was stopped.
    reads: u32,
    waits: u32,
    damage: Vec<Damage>,
}

impl Scrubber {
    /// Whether nothing is in flight, and nothing goes on without another grant.
    pub(crate) const fn is_idle(&self) -> bool {
        let can_go_on = matches!(self.latest, Latest::Running(_)) && self.budget > 0;
        self.reads == 0 && self.waits == 0 && !can_go_on
    }

    /// The pass ends early.
    pub(crate) fn stop(&mut self) {
        self.latest = Latest::None;
        self.budget = 0;
    }
}

/// What a step leaves.
#[derive(PartialEq, Eq)]
enum Progress {
    More,
    Wait,
    Done,
}

impl Pool {
    /// Starts a pass, from the beginning, unless one is under way. A pool that is not ready is left alone.
    pub fn start_scrub(&mut self) {
        if self.state != State::Ready || matches!(self.scrubber.latest, Latest::Running(_)) {
            return;
        }
        self.scrubber.budget = 0;
        self.scrubber.latest = Latest::Running(Pass {
            partition: 0,
            step: self.first_step(0),
            pieces: VecDeque::new(),
            suspects: Vec::new(),
            has_failed: false,
            left_out: 0,
            visited: 0,
            entries: self.keeper.manifest.entries + self.jobs.fresh_entries as u64,
        });
    }

    /// Ends the pass that is under way, if there is one.
    pub fn stop_scrub(&mut self) {
        if matches!(self.scrubber.latest, Latest::Running(_)) {
            self.scrubber.stop();
        }
    }

    /// Lets the pass under way read so many bytes in the next turns. What is left of the grant before is lost; a read that was
    /// larger is made up for.
    pub fn grant_scrub(&mut self, bytes: u64) {
        if matches!(self.scrubber.latest, Latest::Running(_)) {
            self.scrubber.is_busy = self.is_busy();
            let bytes = if self.scrubber.is_busy { bytes / BUSY_SHARE } else { bytes };
            self.scrubber.budget = self.scrubber.budget.min(0).saturating_add_unsigned(bytes);
        }
    }

    /// How far the scrub is.
    pub const fn scrub(&self) -> Scrub {
        match &self.scrubber.latest {
            Latest::None => Scrub::Idle,
            Latest::Running(pass) => Scrub::Running { visited: pass.visited, entries: pass.entries },
            Latest::Done => Scrub::Done,
        }
    }

    /// Takes the damage that was found since the last call.
    pub fn take_scrub_damage(&mut self) -> Vec<Damage> {
        std::mem::take(&mut self.scrubber.damage)
    }

    /// Whether there is work other than the scrub.
    fn is_busy(&self) -> bool {
        self.is_in_use()
            || !self.jobs.is_idle()
            || !self.cleaner.is_idle()
            || !self.compactor.is_idle()
            || !self.tasks.is_idle()
    }

    /// Does a bounded piece of the pass. Returns whether there is more to do without input.
    pub(crate) fn step_scrub(&mut self) -> bool {
        let mut pass = match std::mem::take(&mut self.scrubber.latest) {
            Latest::Running(pass) => pass,
            latest @ (Latest::None | Latest::Done) => {
                self.scrubber.latest = latest;
                return false;
            }
        };
        let progress = self.step_pass(&mut pass);
        self.scrubber.latest = if progress == Progress::Done { Latest::Done } else { Latest::Running(pass) };
        progress == Progress::More
    }

    fn step_pass(&mut self, pass: &mut Pass) -> Progress {
        if self.scrubber.waits > 0 {
            return Progress::Wait;
        }
        if std::mem::take(&mut pass.has_failed) {
            self.page_is_missing(pass);
            return Progress::More;
        }
        if let Some(wrong) = pass.suspects.pop() {
            return self.look_up_wrong(pass, wrong);
        }
        if pass.partition == PARTITIONS && pass.pieces.is_empty() {
            return if self.scrubber.reads > 0 { Progress::Wait } else { Progress::Done };
        }
        let reads_max = if self.scrubber.is_busy { 1 } else { READS_MAX };
        if self.scrubber.budget <= 0 || self.scrubber.reads >= reads_max {
            return Progress::Wait;
        }
        if let Some(piece) = pass.pieces.pop_front() {
            self.read_piece(piece);
            return Progress::More;
        }
        match pass.step {
            Step::Pages { run, page, end } => self.read_pages(pass, run, page, end),
            Step::Entries(from) => self.visit(pass, from),
        }
    }

    /// What a pass does first in a partition.
    fn first_step(&self, partition: usize) -> Step {
        let runs = self.keeper.manifest.partitions.get(partition);
        let runs = runs.into_iter().flat_map(|partition| partition.levels.iter().flatten());
        let end = runs.map(|run| run.id.0 + 1).max().unwrap_or(0);
        Step::Pages { run: RunId(0), page: 0, end: RunId(end) }
    }

    fn next_partition_of(&self, pass: &mut Pass) {
        pass.partition += 1;
        pass.step = self.first_step(pass.partition);
    }

    /// Visits the next entries.
    fn visit(&mut self, pass: &mut Pass, from: IndexKey) -> Progress {
        let options = ScanOptions { from, end: None, since: None, limit: ENTRIES_PER_TURN };
        let mut entries: Vec<Entry> = Vec::new();
        let index = &self.partitions[pass.partition].index;
        let next = match index.scan(&self.cache, &options, &mut entries) {
            Ok(next) => next,
            Err(need) => {
                self.scrubber.waits = self.want_pages(&need, Waiter::Scrub);
                self.spend(u64::from(self.scrubber.waits * BLOCK));
                return Progress::Wait;
            }
        };
        pass.left_out = 0;
        pass.visited += entries.len() as u64;
        let (there, astray): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|entry| self.can_hold_data(&entry.value));
        pass.suspects.extend(astray.into_iter().map(|entry| Wrong::all(entry, NO_DATA)));
        pass.pieces = self.pieces(there.into_iter()).into();
        match next {
            Some(next) => pass.step = Step::Entries(next),
            None => self.next_partition_of(pass),
        }
        Progress::More
    }

    fn spend(&mut self, bytes: u64) {
        self.scrubber.budget = self.scrubber.budget.saturating_sub_unsigned(bytes);
        self.stats.scrub_read_bytes += bytes;
    }

    /// Reads data, if it is still there: what has moved since its entry was visited was verified by the cleaner.
    fn read_piece(&mut self, piece: Piece) {
        let Piece { blob, life, unit, len, .. } = piece;
        if self.keeper.life(blob) != Some(life) {
            return;
        }
        self.start_scrub_read(blob, unit, len, Owner::ScrubData { piece });
    }

    fn start_scrub_read(&mut self, blob: BlobId, unit: u32, len: u32, owner: Owner) {
        let data = self.buffers.take(len);
        self.keeper.pin(blob);
        self.scrubber.reads += 1;
        self.spend(u64::from(len));
        self.stats.background_read_bytes += u64::from(len);
        self.out.op(owner, StoreOp::Read { blob, unit, data, len });
    }

    /// Data was read.
    pub(crate) fn scrub_data_answered(
        &mut self,
        piece: &Piece,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(piece.blob);
        self.scrubber.reads -= 1;
        let (_, wrong) = self.verify(piece, &data, result);
        self.buffers.give(data);
        if let Latest::Running(pass) = &mut self.scrubber.latest {
            pass.suspects.extend(wrong);
        }
    }

    /// Tells wrong blocks that the live view sees, or else the oldest one that can. Others are in use until a merge leaves out
    /// their entry.
    fn look_up_wrong(&mut self, pass: &mut Pass, wrong: Wrong) -> Progress {
        let Wrong { entry: Entry { key, value }, block, blocks, what } = wrong;
        let partition = self.partition_of(key.timeline(), block);
        let Some(history) = self.histories.get(key.timeline()) else { return Progress::More };
        let oldest = history.first_from(partition, key.commit());
        let views = [history.is_live.then_some(Commit::MAX), oldest];
        let slot = |at: u32| Slot::block((block % u64::from(RANGE_BLOCKS)) as u16 + at as u16);
        // For each block, the view that sees it.
        let mut seen = vec![None; blocks as usize];
        for view in views.into_iter().flatten() {
            let (timeline, range, count) = (key.timeline(), key.range(), blocks as u16);
            let query = Query { timeline, range, first: slot(0), count, view };
            let index = &self.partitions[partition].index;
            if let Err(need) = index.lookup(&self.cache, &query, &mut self.slots) {
                pass.suspects.push(wrong);
                self.scrubber.waits = self.want_pages(&need, Waiter::Scrub);
                return Progress::Wait;
            }
            for (at, seen) in (0..blocks).zip(&mut seen) {
                let is_seen = self.slots.get(slot(at)).is_some_and(|version| {
                    version.commit == key.commit() && place_of(&version.value) == place_of(&value)
                });
                *seen = seen.or(is_seen.then_some(view));
            }
        }
        for (block, view) in (block..).zip(seen) {
            if let Some(view) = view {
                let volume = self.shown_at(key.timeline(), partition, view);
                self.add_damaged_blocks(volume, block, 1, what);
            }
        }
        Progress::More
    }

    /// The volume or snapshot of a view, or one that is based on it.
    fn shown_at(&self, timeline: TimelineId, partition: usize, view: Commit) -> Option<VolumeId> {
        let is_it = |volume: &Volume| {
            let of_volume = volume.cut.map_or(Commit::MAX, |cut| cut[partition]);
            volume.timeline == timeline && of_volume == view
        };
        let found = self.volumes().find(|(_, volume)| is_it(volume)).map(|(id, _)| id);
        found.or_else(|| self.shown_by(timeline))
    }

    /// Reads the next pages of the runs of a partition.
    fn read_pages(&mut self, pass: &mut Pass, from: RunId, page: u32, end: RunId) -> Progress {
        let runs = self.keeper.manifest.partitions[pass.partition].levels.iter().flatten();
        let next = runs.filter(|run| run.id >= from && run.id < end).min_by_key(|run| run.id);
        let Some(run) = next.copied() else {
            pass.step = Step::Entries(IndexKey::MIN);
            return Progress::More;
        };
        let page = if run.id == from { page } else { 0 };
        let pages = (run.shape.pages - page).min(READ_PAGES);
        pass.step = if page + pages < run.shape.pages {
            Step::Pages { run: run.id, page: page + pages, end }
        } else {
            Step::Pages { run: RunId(run.id.0 + 1), page: 0, end }
        };
        let unit = u32::from(run.place.unit) + page * PAGE_UNITS;
        let owner = Owner::ScrubPages { run: Box::new(run), page, pages, partition: pass.partition };
        self.start_scrub_read(run.place.blob, unit, pages * BLOCK, owner);
        Progress::More
    }

    /// Pages were read.
    pub(crate) fn scrub_pages_answered(
        &mut self,
        run: &Run,
        (page, pages): (u32, u32),
        partition: usize,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(run.place.blob);
        self.scrubber.reads -= 1;
        let all = data.bytes()[..(pages * BLOCK) as usize].as_chunks::<{ BLOCK as usize }>().0;
        let is_wrong =
            |(page, bytes): (u32, &PageBytes)| result.is_err() || run.check_page(page, bytes).is_err();
        let wrong = (page..).zip(all).filter(|page| is_wrong(*page)).count() as u64;
        self.buffers.give(data);
        let mut runs = self.keeper.manifest.partitions[partition].levels.iter().flatten();
        if wrong > 0 && runs.any(|other| other.id == run.id) {
            self.stats.damaged_blocks += wrong;
            self.stats.scrub_damaged_blocks += wrong;
            let what = format!("an index page of partition {partition} is damaged");
            add_damage(&mut self.scrubber.damage, None, 0, 0, &what);
        }
    }

    /// The index page is damaged on which a wrong block would be looked up, or the next entry would be found: the block is told,
    /// or entries are left out. The page was counted when it was read.
    fn page_is_missing(&mut self, pass: &mut Pass) {
        if let Some(Wrong { entry, block, blocks, what }) = pass.suspects.pop() {
            let volume = self.shown_by(entry.key.timeline());
            self.add_damaged_blocks(volume, block, blocks, what);
        } else if let Step::Entries(from) = pass.step {
            self.leave_out(pass, from);
        }
    }

    /// Has the pass go on behind the next entries, which cannot be visited. How many lie on the damaged page is not known: each
    /// attempt leaves out as many blocks as all before it together.
    fn leave_out(&mut self, pass: &mut Pass, from: IndexKey) {
        let start_of = |timeline| IndexKey::new(timeline, 0, Slot::RANGE, Commit::MAX);
        let mut timelines = self.keeper.manifest.timelines.range(from.timeline()..).map(|(&id, _)| id);
        let (timeline, next_timeline) = (timelines.next(), timelines.next());
        if timeline != Some(from.timeline()) {
            return match timeline {
                Some(timeline) => pass.step = Step::Entries(start_of(timeline)),
                None => self.next_partition_of(pass),
            };
        }
        let first = first_block(from);
        let blocks = pass.left_out.max(1);
        pass.left_out += blocks;
        let sizes = self.volumes().filter(|(_, volume)| volume.timeline == from.timeline());
        let end = sizes.map(|(_, volume)| volume.units.div_ceil(u64::from(BLOCK_UNITS))).max();
        let next = (first + blocks).min(end.unwrap_or(u64::MAX));
        let volume = self.shown_by(from.timeline());
        let what = format!("not verified: an index page of partition {} is damaged", pass.partition);
        add_damage(&mut self.scrubber.damage, volume, first, next.saturating_sub(first), &what);
        let range = u32::try_from(next / u64::from(RANGE_BLOCKS)).ok().filter(|_| Some(next) != end);
        let slot = Slot::block((next % u64::from(RANGE_BLOCKS)) as u16);
        match (range, next_timeline) {
            (Some(range), _) => {
                pass.step = Step::Entries(IndexKey::new(from.timeline(), range, slot, Commit::MAX));
            }
            (None, Some(timeline)) => (pass.step, pass.left_out) = (Step::Entries(start_of(timeline)), 0),
            (None, None) => self.next_partition_of(pass),
        }
    }

    fn add_damaged_blocks(&mut self, volume: Option<VolumeId>, block: u64, blocks: u32, what: &str) {
        self.stats.damaged_blocks += u64::from(blocks);
        self.stats.scrub_damaged_blocks += u64::from(blocks);
        add_damage(&mut self.scrubber.damage, volume, block, u64::from(blocks), what);
    }

    /// A page for which the scrub has waited was read, or cannot be used.
    pub(crate) fn scrub_waited(&mut self, is_ok: bool) {
        self.scrubber.waits -= 1;
        if let Latest::Running(pass) = &mut self.scrubber.latest {
            pass.has_failed |= !is_ok;
        }
    }
}
