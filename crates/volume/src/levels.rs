//! Flushes of memtables and merges of levels: the index on its way to blobs. Any context.
//!
//! A flush freezes the memtables of all partitions at one place of the log, and merges those of each partition into a run.
//! Nothing is copied: entries refer to the frames of the log. When all runs are written, one edit adds them, moves the tail of
//! the log to that place, and counts the units to which they refer; from then on the frames before the tail are ordinary data. A
//! merge replaces neighbouring levels of one partition by one.

use crate::keeper::Then;
use crate::manifest::{BlobKind, Edit, LogTail};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::{BLOCK, BLOCK_UNITS, BlobId, PARTITIONS, StoreError, StoreOp, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::{
    Input, Level, LevelId, Memtable, Merge, Owned, PAGE_UNITS, PageBytes, PageRead, Place, Run, RunId, Step,
    TimelineId, policy,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Entries that a job merges in one turn.
const ENTRIES_PER_TURN: usize = 4096;

/// Bytes of a change of a blob's live units, generously: so many of the bytes that a turn may encode.
const CHANGE_BYTES: usize = 64;

/// Percent of an oldest level that newer ones must have for a merge, while there is space.
const OLDEST_SHARE: u32 = 20;

/// Levels of a partition at which a flush waits for merges, if there is space: lookups read all of them.
pub(crate) const LEVELS_MAX: usize = 32;

/// Pages that a merge reads ahead of each input.
const READ_AHEAD: u32 = 32;

/// Pages of one write.
const WRITE_PAGES: u32 = 64;

/// Pages that must be left in a blob for another run to begin there.
const RUN_PAGES_MIN: u32 = 16;

/// Writes of a job in flight.
const WRITES_MAX: u32 = 8;

/// The number of the job that flushes, and of the job that merges.
const FLUSH: usize = 0;
pub(crate) const MERGE: usize = 1;

/// Appends pages to an index blob.
#[derive(Debug, Default)]
struct Writer {
    blob: Option<BlobId>,
    /// The unit behind all pages.
    unit: u32,
    /// Pages that wait for more, and their bytes.
    buffer: Option<Buffer>,
    filled: u32,
    /// Full buffers: unit, bytes.
    full: Vec<(u32, Buffer, u32)>,
    in_flight: u32,
    has_failed: bool,
}

impl Writer {
    fn push(&mut self, page: &PageBytes, take: impl FnOnce(u32) -> Buffer) {
        let buffer = self.buffer.get_or_insert_with(|| take(WRITE_PAGES * BLOCK));
        buffer.write(self.filled as usize, page);
        self.filled += BLOCK;
        self.unit += PAGE_UNITS;
        if self.filled == WRITE_PAGES * BLOCK {
            self.cut();
        }
    }

    /// Whether all that it got is written.
    const fn is_idle(&self) -> bool {
        self.filled == 0 && self.full.is_empty() && self.in_flight == 0
    }

    /// Makes a write of what waits.
    fn cut(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let bytes = std::mem::take(&mut self.filled);
            self.full.push((self.unit - bytes / UNIT, buffer, bytes));
        }
    }
}

/// What a job does.
#[derive(Debug)]
enum Purpose {
    Flush(Box<Flush>),
    /// `is_all`: when it began, there were no other levels.
    Merge {
        partition: usize,
        levels: Vec<LevelId>,
        is_all: bool,
    },
}

/// Memtables that are flushed.
#[derive(Debug)]
struct Flush {
    number: u64,
    /// The new start of the log, without its blobs.
    tail: LogTail,
    /// The number of the log's blobs that are before it.
    log_blobs: usize,
    /// The part of the log's bytes that is flushed then, and the part that was frozen before.
    bytes: u64,
    from: u64,
    flushed: [u64; PARTITIONS],
    tables: [usize; PARTITIONS],
    /// The partition that is being merged.
    partition: usize,
    entries: usize,
    /// Those of partitions that are merged.
    merged_entries: usize,
    /// Units of inflations that the memtables have.
    copied_units: u64,
    /// Partitions that are merged.
    done: Vec<(usize, Vec<Run>)>,
}

/// A merge under way, with its output.
#[derive(Debug)]
struct Job {
    purpose: Purpose,
    merge: Option<Merge>,
    reads: u32,
    run: Option<(RunId, Place)>,
    runs: Vec<Run>,
    /// By how much the levels refer to more or fewer units of each blob.
    changes: BTreeMap<BlobId, i64>,
    /// The generation of reservations when the job began, and what it has counted for thick volumes, by partition.
    begun: u64,
    owned: Vec<(usize, BTreeMap<TimelineId, Owned>)>,
    /// For a merge, what flushes have added to its partition meanwhile.
    added: BTreeMap<TimelineId, i64>,
    /// Whether the edit of a merge was made, and the changes are being made in pieces.
    is_ending: bool,
    /// Blobs to which the job appends nothing more.
    closed: Vec<BlobId>,
    /// A page of an input is damaged, or could not be read.
    is_damaged: bool,
}

/// The jobs of a pool.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    jobs: [Option<Job>; 2],
    writers: [Writer; 2],
    /// The number of the latest freeze.
    pub(crate) freezes: u64,
    /// The log's bytes at the latest freeze.
    frozen_bytes: u64,
    /// Entries in memtables, frozen ones included.
    pub(crate) fresh_entries: usize,
    frozen_entries: usize,
    /// Partitions whose levels have entries of deleted timelines or snapshots.
    pub(crate) stale: [bool; PARTITIONS],
    /// Partitions whose levels cannot be merged because a page is damaged.
    damaged: [bool; PARTITIONS],
    /// Memtables that are used again.
    tables: Vec<Memtable>,
    /// Whether the latest look has found no merge that is due, and nothing has changed since.
    is_settled: bool,
    /// Whether entries were flushed or moved since merges were forced.
    pub(crate) can_force: bool,
    /// Whether index blobs have changed since the latest look for sparse ones.
    is_index_due: bool,
    /// Flush as soon as possible.
    pub(crate) is_flush_wanted: bool,
    /// The pool is being rebuilt: there is no cleaner, and blobs are not short.
    pub(crate) is_rebuilding: bool,
    /// Entries may follow that are older than all others: merges keep zeroes that hide nothing yet.
    pub(crate) keeps_zeroes: bool,
}

impl Jobs {
    /// Whether all merges that were asked for have ended.
    pub(crate) fn has_merged(&self) -> bool {
        self.jobs[MERGE].is_none() && !self.is_stale()
    }

    /// Whether no job runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.iter().all(Option::is_none) && !self.is_flush_wanted && !self.is_stale()
    }

    /// The number of writers that have no blob with room for so many units.
    pub(crate) fn writers_short_of(&self, units: i64, blob_units: u32) -> usize {
        let is_short =
            |writer: &&Writer| writer.blob.is_none() || i64::from(blob_units - writer.unit) < units;
        self.writers.iter().filter(is_short).count()
    }

    /// Has all levels of a partition merged, unless that is being done or cannot be.
    pub(crate) fn want_merge(&mut self, number: usize) {
        let is_under_way = self.jobs[MERGE].as_ref().is_some_and(
            |job| matches!(job.purpose, Purpose::Merge { partition, .. } if partition == number),
        );
        self.stale[number] |= !is_under_way && !self.damaged[number];
    }

    fn is_stale(&self) -> bool {
        self.stale.contains(&true)
    }
}

/// The levels of a partition that are to be merged by their sizes.
fn due_levels(levels: &[Level]) -> Option<Range<usize>> {
    let entries: Vec<_> = levels.iter().map(Level::entries).collect();
    policy::choose(&entries, OLDEST_SHARE)
}

impl Pool {
    /// Has flushes and merges go on where the blobs of the index end that have the most room: each opening would use two more
    /// otherwise, which a full pool does not have.
    pub(crate) fn resume_writers(&mut self) {
        let mut ends: BTreeMap<BlobId, u32> = BTreeMap::new();
        for run in
            self.keeper.manifest.partitions.iter().flat_map(|partition| partition.levels.iter().flatten())
        {
            let end = ends.entry(run.place.blob).or_default();
            *end = (*end).max(u32::from(run.place.unit) + run.shape.pages * PAGE_UNITS);
        }
        let blobs = &self.keeper.manifest.blobs;
        let is_index = |id| blobs.get(id).is_some_and(|blob| blob.kind == BlobKind::Index);
        let mut ends: Vec<_> =
            ends.into_iter().filter(|(id, _)| is_index(*id)).map(|(id, end)| (end, id)).collect();
        ends.sort_unstable();
        for (writer, (unit, blob)) in self.jobs.writers.iter_mut().zip(ends) {
            self.keeper.open(blob);
            (writer.blob, writer.unit) = (Some(blob), unit);
        }
    }

    /// Has the jobs begin other blobs, when none runs.
    pub(crate) fn leave_writers(&mut self) {
        for number in [FLUSH, MERGE] {
            if let Some(blob) = self.jobs.writers[number].blob.take() {
                self.keeper.close(blob, 0);
            }
        }
    }

    /// Does a bounded piece of the jobs; `is_short` is [`Pool::is_short`]. Returns whether there is more to do without input.
    pub(crate) fn step_jobs(&mut self, is_short: bool) -> bool {
        if self.jobs.jobs[FLUSH].is_none() {
            self.begin_flush(is_short);
        }
        if self.jobs.jobs[MERGE].is_none() {
            self.begin_merge(is_short);
        }
        let mut has_work = false;
        for number in [FLUSH, MERGE] {
            if self.jobs.jobs[number].is_some() {
                has_work |= self.step_job(number);
            }
        }
        has_work || (self.jobs.jobs[MERGE].is_none() && self.jobs.is_stale())
    }

    /// Freezes the memtables, if there is enough in them.
    fn begin_flush(&mut self, is_short: bool) {
        let jobs = &self.jobs;
        let bytes_due = self.settings.flush_bytes.min(self.pressure.start());
        let entries = jobs.fresh_entries - jobs.frozen_entries;
        let is_large =
            self.log.written_bytes - jobs.frozen_bytes >= bytes_due || entries >= self.settings.flush_entries;
        // The cleaner adds entries, too: there is a limit to those in memory.
        let may_wait = entries < 2 * self.settings.flush_entries;
        let is_due = is_large && !(may_wait && !is_short && self.is_behind())
            || jobs.is_flush_wanted
            || is_short && self.can_flush_free();
        if !is_due {
            return;
        }
        let (sequence, blob, unit) = self.log.tail();
        self.jobs.is_flush_wanted = false;
        let mut tables = [0; PARTITIONS];
        let mut flushed = [0; PARTITIONS];
        for (number, partition) in self.partitions.iter_mut().enumerate() {
            flushed[number] = partition.readable;
            if !partition.index.memtable().is_empty() {
                let next = self.jobs.tables.pop().unwrap_or_else(|| Memtable::with_capacity(1024));
                partition.index.freeze(next);
            }
            tables[number] = partition.index.frozen().len();
        }
        self.pressure.begin_period();
        self.jobs.freezes += 1;
        let flush = Flush {
            number: self.jobs.freezes,
            from: self.jobs.frozen_bytes,
            merged_entries: 0,
            tail: LogTail { sequence, unit, blobs: Vec::new() },
            log_blobs: self.keeper.log_blobs.iter().take_while(|id| Some(**id) != blob).count(),
            bytes: self.log.written_bytes - self.log.in_flight_bytes(),
            flushed,
            tables,
            partition: 0,
            entries: self.jobs.fresh_entries,
            copied_units: self.reserves.copied_units,
            done: Vec::new(),
        };
        self.jobs.frozen_bytes = flush.bytes;
        self.jobs.frozen_entries = flush.entries;
        let begun = self.reserves.generation();
        self.jobs.jobs[FLUSH] = Some(Job::new(Purpose::Flush(Box::new(flush)), begun));
    }

    /// Whether merges are so far behind that a flush waits for them, if free blobs are not short. Then the backlog grows, and
    /// with it the price of writes.
    fn is_behind(&self) -> bool {
        let is_behind = |number: usize| {
            let levels = self.partitions[number].index.levels();
            levels.len() >= LEVELS_MAX && !self.jobs.damaged[number] && due_levels(levels).is_some()
        };
        (0..PARTITIONS).any(is_behind)
    }

    /// Whether a flush may lead to free blobs: emptied ones wait for it, the log's tail is long, or changes wait for space: which
    /// blocks the latest ones have replaced is known after a flush. Forced merges end before another one.
    fn can_flush_free(&self) -> bool {
        self.jobs.fresh_entries > 0
            && self.cleaner.is_idle()
            && self.jobs.jobs[MERGE].is_none()
            && !self.jobs.is_stale()
            && (self.is_worth_merging() || self.keeper.log_blobs.len() > 2 || !self.ring.is_empty())
    }

    /// Bytes of runs that the next merge of each partition reads.
    pub(crate) fn debt_bytes(&self) -> u64 {
        let of = |partition: &crate::partition::Partition| -> u64 {
            let levels = partition.index.levels();
            let due = due_levels(levels).unwrap_or(0..0);
            levels[due].iter().map(aryk_volume_index::Level::pages).sum()
        };
        self.partitions.iter().map(of).sum::<u64>() * u64::from(BLOCK)
    }

    /// The partition and levels of a merge that is due.
    fn due_merge(&mut self) -> Option<(usize, Range<usize>)> {
        if self.jobs.is_settled && !self.jobs.is_stale() {
            return None;
        }
        let due = (0..PARTITIONS).filter(|&number| !self.jobs.damaged[number]).find_map(|number| {
            let levels = self.partitions[number].index.levels();
            let all = (self.jobs.stale[number] && !levels.is_empty()).then_some(0..levels.len());
            all.or_else(|| due_levels(levels)).map(|range| (number, range))
        });
        if due.is_none() {
            self.jobs.stale = [false; PARTITIONS];
            self.jobs.is_settled = true;
        }
        due
    }

    /// Starts a merge of levels, if one is due.
    fn begin_merge(&mut self, is_short: bool) {
        let Some((number, range)) = self.due_merge() else {
            self.force_merges(is_short);
            return;
        };
        let index = &self.partitions[number].index;
        if range == (0..index.levels().len()) {
            self.jobs.stale[number] = false;
        }
        let is_bottom = range.end == index.levels().len();
        let is_all = is_bottom && range.start == 0;
        let levels: Vec<_> = index.levels()[range].iter().collect();
        let ids: Vec<_> = levels.iter().map(|level| level.id()).collect();
        let inputs = levels.iter().map(|level| Input::Level(level.runs().copied().collect())).collect();
        let bottom = (is_bottom && !self.jobs.keeps_zeroes).then(|| index.oldest_besides(&ids));
        let mut merge = Merge::new(inputs, self.histories.views(number), bottom, READ_AHEAD);
        if is_bottom {
            merge.survey(self.settings.pieces);
        }
        merge.count_owned(&self.counted(number));
        let purpose = Purpose::Merge { partition: number, levels: ids, is_all };
        let mut job = Job::new(purpose, self.reserves.generation());
        job.merge = Some(merge);
        self.jobs.jobs[MERGE] = Some(job);
    }

    /// Has all levels merged that are newer than others.
    pub(crate) fn merge_all_levels(&mut self) {
        for (is_stale, partition) in self.jobs.stale.iter_mut().zip(&self.partitions) {
            *is_stale |= partition.index.levels().len() > 1;
        }
    }

    /// Has levels merged although their sizes do not ask for it: where emptied blobs or changes wait for that, or blobs with runs
    /// are sparse. What newer levels have replaced counts as alive until it is merged with them.
    fn force_merges(&mut self, is_short: bool) {
        let may_help = is_short && self.cleaner.is_idle() && self.jobs.jobs[FLUSH].is_none();
        let is_waited_for = || self.is_worth_merging() || !self.ring.is_empty();
        if may_help && self.jobs.can_force && is_waited_for() {
            self.jobs.can_force = false;
            self.merge_all_levels();
            return;
        }
        if !std::mem::take(&mut self.jobs.is_index_due) {
            return;
        }
        let (units, blobs) = (i64::from(self.facts.blob_units), &self.keeper.manifest.blobs);
        if blobs.index_len() as i64 * units <= 2 * blobs.index_live() + 3 * units {
            return;
        }
        let mut sparsest: Option<(BlobId, i64)> = None;
        for (id, blob) in blobs.of_index() {
            if blob.live > 0
                && !self.keeper.is_open(id)
                && sparsest.is_none_or(|(_, least)| blob.live < least)
            {
                sparsest = Some((id, blob.live));
            }
        }
        let Some((sparsest, _)) = sparsest else { return };
        for (number, partition) in self.keeper.manifest.partitions.iter().enumerate() {
            self.jobs.stale[number] |=
                partition.levels.iter().flatten().any(|run| run.place.blob == sparsest);
        }
    }

    /// Does a bounded piece of a job. Returns whether there is more to do without input.
    fn step_job(&mut self, number: usize) -> bool {
        let mut job = self.jobs.jobs[number].take().expect("the job runs");
        if job.is_ending {
            return self.end_changes(job);
        }
        let has_more = self.step_taken(number, &mut job);
        self.write_pages(number);
        if self.jobs.writers[number].has_failed || job.is_damaged {
            return self.end_failed(number, job);
        }
        let writer = &mut self.jobs.writers[number];
        if job.merge.is_none() && job.is_over() {
            writer.cut();
            self.write_pages(number);
            if self.jobs.writers[number].in_flight == 0 {
                self.end_job(job);
                return true;
            }
        }
        self.jobs.jobs[number] = Some(job);
        has_more
    }

    fn step_taken(&mut self, number: usize, job: &mut Job) -> bool {
        if self.jobs.writers[number].in_flight >= WRITES_MAX || job.is_damaged {
            return false;
        }
        if job.merge.is_none() && !self.next_partition(job) {
            return false;
        }
        let merge = job.merge.as_mut().expect("set");
        while let Some(read) = merge.wanted() {
            let len = read.pages * BLOCK;
            let data = self.buffers.take(len);
            let (blob, unit) = (read.place.blob, u32::from(read.place.unit));
            self.keeper.pin(blob);
            self.stats.background_read_bytes += u64::from(len);
            job.reads += 1;
            self.out.op(Owner::MergeRead { job: number, read }, StoreOp::Read { blob, unit, data, len });
        }
        let (writer, buffers) = (&mut self.jobs.writers[number], &mut self.buffers);
        let step = merge.step(ENTRIES_PER_TURN, &mut |page| writer.push(page, |len| buffers.take(len)));
        merge.drain_dead().for_each(|place| self.cleaner.dead.note(place));
        match step {
            Step::Budget => true,
            // Without a read under way, nothing else would bring the turn that begins the next ones.
            Step::Pages => job.reads == 0,
            Step::NewRun => self.begin_run(number, job),
            Step::RunEnd(id, shape) => {
                let (begun, place) = job.run.take().expect("the run has begun");
                assert_eq!(begun, id, "runs end in their order");
                job.runs.push(Run { id, place, shape });
                true
            }
            Step::Done => {
                self.merged(job);
                true
            }
        }
    }

    /// Begins a run in the writer's blob, or in a new one. Returns whether there is room.
    fn begin_run(&mut self, number: usize, job: &mut Job) -> bool {
        let writer = &mut self.jobs.writers[number];
        let blob_units = self.facts.blob_units;
        let room = |writer: &Writer| (blob_units - writer.unit) / PAGE_UNITS;
        if writer.blob.is_none() || room(writer) < RUN_PAGES_MIN {
            writer.cut();
            // The last free blob stays where another job's blob does, too.
            let other = &self.jobs.writers[1 - number];
            let is_last = self.keeper.free() <= 1 && self.jobs.jobs[1 - number].is_none();
            if is_last
                && self.jobs.writers[number].is_idle()
                && other.blob.is_some()
                && room(other) >= RUN_PAGES_MIN
            {
                self.jobs.writers.swap(0, 1);
                return self.begin_run(number, job);
            }
            let Some((blob, _)) = self.keeper.allocate(BlobKind::Index, 0) else { return false };
            if let Some(old) = self.jobs.writers[number].blob.replace(blob) {
                self.write_pages_to(number, old);
                job.closed.push(old);
            }
            self.jobs.writers[number].unit = 0;
        }
        let writer = &self.jobs.writers[number];
        let id = RunId(self.keeper.next_run());
        let place = Place { blob: writer.blob.expect("set"), unit: writer.unit as u16 };
        let pages = room(writer);
        job.run = Some((id, place));
        job.merge.as_mut().expect("under way").begin_run(id, pages);
        true
    }

    fn write_pages(&mut self, number: usize) {
        if let Some(blob) = self.jobs.writers[number].blob {
            self.write_pages_to(number, blob);
        }
    }

    fn write_pages_to(&mut self, number: usize, blob: BlobId) {
        let writer = &mut self.jobs.writers[number];
        for (unit, data, len) in writer.full.drain(..) {
            writer.in_flight += 1;
            self.stats.index_write_bytes += u64::from(len);
            self.out.op(Owner::IndexWrite { job: number }, StoreOp::Write { blob, unit, data, len });
        }
    }

    pub(crate) fn index_write_answered(
        &mut self,
        number: usize,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.buffers.give(data);
        let writer = &mut self.jobs.writers[number];
        writer.in_flight -= 1;
        writer.has_failed |= result.is_err();
        if result == Err(StoreError::Gone) {
            self.fail(StoreError::Gone);
        }
    }

    pub(crate) fn merge_read_answered(
        &mut self,
        number: usize,
        read: &PageRead,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(read.place.blob);
        let job = self.jobs.jobs[number].as_mut().expect("a job ends after its reads");
        job.reads -= 1;
        let bytes = &data.bytes()[..(read.pages * BLOCK) as usize];
        let merge = job.merge.as_mut().filter(|_| !job.is_damaged);
        let is_ok = result.is_ok() && merge.is_none_or(|merge| merge.feed(read, bytes).is_ok());
        if result.is_ok() && !is_ok {
            self.stats.damaged_blocks += 1;
        }
        job.is_damaged |= !is_ok;
        self.buffers.give(data);
    }

    /// Takes the next partition of a flush.
    fn next_partition(&self, job: &mut Job) -> bool {
        let Purpose::Flush(flush) = &mut job.purpose else { return false };
        while flush.partition < PARTITIONS && flush.tables[flush.partition] == 0 {
            flush.partition += 1;
        }
        if flush.partition == PARTITIONS {
            return false;
        }
        let frozen = self.partitions[flush.partition].index.frozen();
        let first = frozen.len() - flush.tables[flush.partition];
        let inputs = frozen[first..].iter().cloned().map(Input::Memtable).collect();
        let views = self.histories.views(flush.partition);
        let mut merge = Merge::new(inputs, views, None, READ_AHEAD);
        merge.count_owned(&self.counted(flush.partition));
        job.merge = Some(merge);
        true
    }

    /// All of a merge was handed out.
    fn merged(&mut self, job: &mut Job) {
        let mut merge = job.merge.take().expect("under way");
        let (ranges, has_more) = merge.take_ranges();
        self.compactor.want(ranges, has_more);
        let partition = match &job.purpose {
            Purpose::Flush(flush) => flush.partition,
            Purpose::Merge { partition, .. } => *partition,
        };
        let owned: BTreeMap<_, _> = merge.take_owned().collect();
        if !owned.is_empty() {
            job.owned.push((partition, owned));
        }
        if job.changes.is_empty() {
            job.changes = merge.into_changes();
        } else {
            for (id, change) in merge.into_changes() {
                *job.changes.entry(id).or_default() += change;
            }
        }
        if let Purpose::Flush(flush) = &mut job.purpose {
            flush.done.push((flush.partition, std::mem::take(&mut job.runs)));
            flush.partition += 1;
            self.count_merged(partition, flush);
        }
    }

    /// A flush has merged the memtables of a partition: its part of the log, by its entries, is no backlog any more.
    fn count_merged(&mut self, partition: usize, flush: &mut Flush) {
        let frozen = self.partitions[partition].index.frozen();
        let entries: usize =
            frozen[frozen.len() - flush.tables[partition]..].iter().map(|table| table.len()).sum();
        flush.merged_entries += entries;
        let (entries, all) = (flush.merged_entries as u128, flush.entries.max(1) as u128);
        let part = u128::from(flush.bytes - flush.from) * entries / all;
        self.pressure.merged_up_to(flush.from + (part as u64).min(flush.bytes - flush.from));
    }

    /// All is written: the edits of a job.
    fn end_job(&mut self, mut job: Job) {
        self.jobs.is_settled = false;
        self.cleaner.is_due = true;
        self.jobs.is_index_due = true;
        self.jobs.can_force |= matches!(job.purpose, Purpose::Flush(_));
        for blob in std::mem::take(&mut job.closed) {
            self.keeper.close(blob, 0);
        }
        match job.purpose {
            Purpose::Flush(flush) => {
                // Memtables refer to few blobs: those of the log and of the cleaner.
                for (id, change) in job.changes.into_iter().filter(|(_, change)| *change != 0) {
                    self.keeper.edit(Edit::Live { id, change });
                }
                for (partition, owned) in job.owned {
                    self.add_to_merge(partition, job.begun, &owned);
                    self.note_owned(partition, job.begun, owned, false);
                }
                self.end_flush(*flush);
            }
            Purpose::Merge { partition, levels, is_all } => {
                self.end_merge(partition, &levels, std::mem::take(&mut job.runs));
                for (partition, mut owned) in std::mem::take(&mut job.owned) {
                    for (id, owned) in &mut owned {
                        owned.total += job.added.get(id).copied().unwrap_or(0);
                    }
                    self.note_owned(partition, job.begun, owned, is_all);
                }
                let purpose = Purpose::Merge { partition, levels, is_all };
                self.end_changes(Job { purpose, is_ending: true, ..job });
            }
        }
    }

    /// Makes some of the changes of a merge, which may be about all blobs of the pool. They take effect together with the edit of
    /// the merge. Returns whether there is more to do without input.
    fn end_changes(&mut self, mut job: Job) -> bool {
        for _ in 0..(self.settings.manifest_bytes_per_turn / CHANGE_BYTES).max(1) {
            let Some((id, change)) = job.changes.pop_first() else {
                self.keeper.gather(false);
                self.keeper.commit(Then::Nothing);
                // The cleaner may have looked before the last of them.
                self.cleaner.is_due = true;
                return true;
            };
            if change != 0 {
                self.keeper.edit(Edit::Live { id, change });
            }
        }
        self.jobs.jobs[MERGE] = Some(job);
        true
    }

    /// Levels are added while those of a partition are merged: what they have counts beside what the merge counts.
    fn add_to_merge(&mut self, partition: usize, begun: u64, owned: &BTreeMap<TimelineId, Owned>) {
        let Some(mut job) = self.jobs.jobs[MERGE].take() else { return };
        if matches!(job.purpose, Purpose::Merge { partition: merged, .. } if merged == partition) {
            for (id, owned) in owned.iter().filter(|(id, _)| !self.is_old(**id, begun)) {
                *job.added.entry(*id).or_default() += owned.change;
            }
        }
        self.jobs.jobs[MERGE] = Some(job);
    }

    fn end_flush(&mut self, flush: Flush) {
        for number in 0..PARTITIONS {
            let at = flush.done.iter().position(|(done, _)| *done == number);
            let runs = at.map_or_else(Vec::new, |at| flush.done[at].1.clone());
            let flushed = flush.flushed[number];
            if at.is_none() && flushed == self.keeper.manifest.partitions[number].flushed {
                continue;
            }
            self.keeper.edit(Edit::Flushed { partition: number as u8, flushed, runs: runs.clone() });
            if at.is_some() {
                let index = &mut self.partitions[number].index;
                let old = index.flushed(flush.tables[number], runs, &mut self.cache);
                for mut table in old.into_iter().filter_map(std::sync::Arc::into_inner) {
                    table.clear();
                    self.jobs.tables.push(table);
                }
            }
        }
        let left: Vec<_> = self.keeper.log_blobs.drain(..flush.log_blobs).collect();
        let blobs = self.keeper.log_blobs.iter().copied().collect();
        self.keeper.edit(Edit::Log(LogTail { blobs, ..flush.tail }));
        left.into_iter().for_each(|blob| self.keeper.add_candidate(blob));
        self.pressure.merged_up_to(flush.bytes);
        self.jobs.fresh_entries -= flush.entries;
        self.jobs.frozen_entries -= flush.entries;
        self.reserves.copied_units -= flush.copied_units;
        self.keeper.commit(Then::Flushed { number: flush.number, bytes: flush.bytes });
    }

    fn end_merge(&mut self, partition: usize, levels: &[LevelId], runs: Vec<Run>) {
        let index = &mut self.partitions[partition].index;
        let first = index
            .levels()
            .iter()
            .position(|level| level.id() == levels[0])
            .expect("levels stay until merged");
        let (first, count) = (first as u32, levels.len() as u32);
        self.keeper.gather(true);
        self.keeper.edit(Edit::Merged { partition: partition as u8, first, count, runs: runs.clone() });
        index.merged(levels, runs, &mut self.cache);
    }

    /// A job that cannot go on: a flush starts again in another blob, a merge is given up.
    fn end_failed(&mut self, number: usize, mut job: Job) -> bool {
        let writer = &mut self.jobs.writers[number];
        writer.buffer = None;
        writer.filled = 0;
        writer.full.clear();
        if writer.in_flight > 0 || job.reads > 0 {
            self.jobs.jobs[number] = Some(job);
            return false;
        }
        writer.has_failed = false;
        job.closed.extend(writer.blob.take());
        for blob in std::mem::take(&mut job.closed) {
            self.keeper.close(blob, 0);
        }
        match job.purpose {
            Purpose::Flush(flush) => {
                let flush = Flush { partition: 0, merged_entries: 0, done: Vec::new(), ..*flush };
                self.jobs.jobs[number] = Some(Job::new(Purpose::Flush(Box::new(flush)), job.begun));
            }
            Purpose::Merge { partition, .. } => self.jobs.damaged[partition] |= job.is_damaged,
        }
        true
    }
}

impl Job {
    const fn new(purpose: Purpose, begun: u64) -> Self {
        Self {
            purpose,
            merge: None,
            reads: 0,
            run: None,
            runs: Vec::new(),
            changes: BTreeMap::new(),
            begun,
            owned: Vec::new(),
            added: BTreeMap::new(),
            is_ending: false,
            closed: Vec::new(),
            is_damaged: false,
        }
    }

    /// Whether nothing is left to merge.
    const fn is_over(&self) -> bool {
        match &self.purpose {
            Purpose::Flush(flush) => flush.partition >= PARTITIONS,
            Purpose::Merge { .. } => true,
        }
    }
}

const _: () = assert!(PAGE_UNITS == BLOCK_UNITS);
