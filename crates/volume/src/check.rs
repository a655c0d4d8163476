//! The check of a pool: every reference and, if wanted, every checksum of data. Any context.
//!
//! Flushes and merges come first, so that levels have no entries that nothing sees. Then the entries of each partition are
//! visited in the order of their keys, which verifies all index pages with entries. Units that the manifest counts as alive and
//! to which no entry refers are leaked; this is told only if nothing was written meanwhile.

use crate::command::add_damage;
use crate::manifest::{Base, BlobKind, Edit};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::Waiter;
use crate::tasks::{Progress, Work};
use crate::verify::{NO_DATA, Piece, Wrong, first_block};
use crate::{
    Answer, BLOCK_UNITS, BlobId, CheckReport, Damage, PARTITIONS, StoreError, StoreOp, TimelineId, VolumeId,
};
use aryk_dma::Buffer;
use aryk_volume_index::{Entry, Key as IndexKey, ScanOptions};
use std::collections::BTreeMap;

/// Entries that are visited in one turn, and blocks that are read for them.
const ENTRIES_PER_TURN: usize = 256;

/// Flushes for which a check waits at most.
const FLUSHES_MAX: u32 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Begin,
    /// The flush with this number comes first.
    Flush(u64),
    /// Then all levels are merged: neighbouring levels may have the same entry, after its data was moved.
    Merge,
    Scan,
}

/// A check under way.
#[derive(Debug)]
pub(crate) struct Check {
    with_data: bool,
    repair: bool,
    step: Step,
    partition: usize,
    from: IndexKey,
    entries: Vec<Entry>,
    /// Units of each blob to which entries refer.
    found: BTreeMap<BlobId, i64>,
    /// The log's sequence when the scan began.
    sequence: u64,
    /// The number of the latest flush, if it was complete when the merges began.
    flush: Option<u64>,
    /// How many more flushes came first.
    flushes: u32,
    reads: u32,
    report: CheckReport,
}

impl Check {
    pub(crate) const fn new(with_data: bool, repair: bool) -> Self {
        Self {
            with_data,
            repair,
            step: Step::Begin,
            partition: 0,
            from: IndexKey::MIN,
            entries: Vec::new(),
            found: BTreeMap::new(),
            sequence: 0,
            flush: None,
            flushes: 0,
            reads: 0,
            report: CheckReport {
                references: 0,
                blocks_read: 0,
                leaked_units: 0,
                damage: Vec::new(),
                is_index_damaged: false,
            },
        }
    }

    fn add(&mut self, volume: Option<VolumeId>, block: u64, blocks: u64, what: &str) {
        add_damage(&mut self.report.damage, volume, block, blocks, what);
    }

    fn next_partition(&mut self) {
        self.partition += 1;
        self.from = IndexKey::MIN;
    }

    /// An index page of the partition cannot be read.
    pub(crate) fn page_failed(&mut self) {
        let what = format!(
            "an index page of partition {} is damaged; its entries were not verified",
            self.partition
        );
        self.report.damage.push(Damage { volume: None, block: 0, blocks: 0, what });
        self.report.is_index_damaged = true;
        self.next_partition();
    }
}

impl Pool {
    pub(crate) fn step_check(&mut self, check: &mut Check) -> Progress {
        match check.step {
            Step::Begin => {
                check.step = Step::Flush(self.jobs.freezes + 1);
                self.jobs.is_flush_wanted = true;
                Progress::More
            }
            Step::Flush(number) if self.keeper.flushed < number => Progress::Wait,
            // Levels of a flush under way would come after the merges. Under load there is always one.
            Step::Flush(_) if self.keeper.flushed < self.jobs.freezes && check.flushes < FLUSHES_MAX => {
                check.flushes += 1;
                check.step = Step::Flush(self.jobs.freezes);
                Progress::Wait
            }
            Step::Flush(_) => {
                check.step = Step::Merge;
                let is_all = self.keeper.flushed == self.jobs.freezes;
                check.flush = is_all.then_some(self.jobs.freezes);
                self.jobs.stale = [true; PARTITIONS];
                Progress::More
            }
            Step::Merge if !self.jobs.is_idle() => Progress::Wait,
            Step::Merge => {
                check.step = Step::Scan;
                check.sequence = self.log.next_sequence;
                Progress::More
            }
            Step::Scan if check.reads > 0 => Progress::Wait,
            Step::Scan if check.partition == PARTITIONS => Progress::Done(Ok(Some(self.checked(check)))),
            Step::Scan => self.scan(check),
        }
    }

    fn scan(&mut self, check: &mut Check) -> Progress {
        let options = ScanOptions { from: check.from, end: None, since: None, limit: ENTRIES_PER_TURN };
        check.entries.clear();
        let index = &self.partitions[check.partition].index;
        match index.scan(&self.cache, &options, &mut check.entries) {
            Ok(Some(next)) => check.from = next,
            Ok(None) => check.next_partition(),
            Err(need) => {
                self.tasks.waits = self.want_pages(&need, Waiter::Task);
                return Progress::Wait;
            }
        }
        let entries = std::mem::take(&mut check.entries);
        for Entry { key, value } in &entries {
            check.report.references += 1;
            let Some((blob, units)) = value.reference() else { continue };
            *check.found.entry(blob).or_default() += i64::from(units);
            if !self.can_hold_data(value) {
                let (first, count) = (first_block(*key), u64::from(units / BLOCK_UNITS));
                check.add(self.shown_by(key.timeline()), first, count, NO_DATA);
            }
        }
        if check.with_data {
            let there = entries.iter().copied().filter(|entry| self.can_hold_data(&entry.value));
            for piece in self.pieces(there) {
                let Piece { blob, unit, len, .. } = piece;
                let data = self.buffers.take(len);
                self.keeper.pin(blob);
                check.reads += 1;
                self.stats.background_read_bytes += u64::from(len);
                self.out.op(Owner::Check { piece }, StoreOp::Read { blob, unit, data, len });
            }
        }
        check.entries = entries;
        Progress::More
    }

    pub(crate) fn check_answered(&mut self, piece: &Piece, data: Buffer, result: Result<(), StoreError>) {
        self.unpin(piece.blob);
        let (read, found) = self.verify(piece, &data, result);
        self.buffers.give(data);
        let volumes: Vec<_> = found.iter().map(|wrong| self.shown_by(wrong.entry.key.timeline())).collect();
        let Some(Work::Check(check)) = self.tasks.running() else { return };
        check.reads -= 1;
        check.report.blocks_read += read;
        for (volume, Wrong { block, blocks, what, .. }) in volumes.into_iter().zip(found) {
            check.add(volume, block, u64::from(blocks), what);
        }
    }

    /// A volume or snapshot that shows a timeline, by itself or by its bases.
    pub(crate) fn shown_by(&self, timeline: TimelineId) -> Option<VolumeId> {
        let manifest = &self.keeper.manifest;
        let shows = |of: TimelineId| {
            let mut next = Some(of);
            while let Some(id) = next {
                if id == timeline {
                    return true;
                }
                next = match manifest.timelines.get(&id).and_then(|timeline| timeline.base.as_ref()) {
                    Some(Base::View { timeline, .. }) => Some(*timeline),
                    _ => None,
                };
            }
            false
        };
        let direct = manifest.volumes.iter().find(|(_, volume)| volume.timeline == timeline);
        direct
            .or_else(|| manifest.volumes.iter().find(|(_, volume)| shows(volume.timeline)))
            .map(|(&id, _)| id)
    }

    fn checked(&mut self, check: &mut Check) -> Answer {
        let is_quiet = self.jobs.fresh_entries == 0
            && self.log.next_sequence == check.sequence
            && check.flush == Some(self.jobs.freezes)
            && self.jobs.is_idle();
        let data = self.keeper.manifest.blobs.iter().filter(|(_, blob)| blob.kind != BlobKind::Index);
        let live: Vec<_> = data.map(|(id, blob)| (id, blob.live)).collect();
        let is_exact = is_quiet && check.report.damage.is_empty();
        for (id, live) in live.into_iter().filter(|_| is_exact) {
            let change = check.found.get(&id).copied().unwrap_or(0) - live;
            if change > 0 {
                let what = format!("blob {} has {change} more units in use than are counted", id.0);
                check.report.damage.push(Damage { volume: None, block: 0, blocks: 0, what });
            } else {
                check.report.leaked_units += change.unsigned_abs();
            }
            if change != 0 && check.repair {
                self.keeper.edit(Edit::Live { id, change });
                self.keeper.commit(crate::keeper::Then::Nothing);
            }
        }
        Answer::Check(std::mem::take(&mut check.report))
    }
}
