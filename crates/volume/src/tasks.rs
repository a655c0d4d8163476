//! Long commands, one at a time: which blocks have changed, and volumes that become independent of their base. Any context.
//! Checks (`check.rs`) and counts of space (`space.rs`) are run here, too.
//!
//! **Changed.** Levels skip pages without newer commits, so the time is proportional to what changed.
//!
//! **Inflate.** What a volume inherits is copied, at commit 1: below all of its own writes, and visible at all of its snapshots.
//! So writes of the volume need no lock meanwhile. The volume loses its base when all copies are in durable levels. If the pool
//! ends before, the copies are what the base has, and do no harm.

use crate::active::{Active, Op, Origin};
use crate::frame::{self, Head, Kind, NO_STREAM, Record};
use crate::ids::STRIPE_BLOCKS;
use crate::keeper::Then;
use crate::manifest::{Base, Edit, Timeline};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::Waiter;
use crate::{
    Answer, BLOCK, BLOCK_UNITS, BlobId, CommandError, CommandReply, Cut, PARTITIONS, RANGE_BLOCKS, Status,
    StoreError, StoreOp, Tag, UNIT, VolumeId,
};
use aryk_dma::Buffer;
use aryk_volume_index::{Commit, Entry, Key as IndexKey, Place, ScanOptions, Slot, TimelineId, Value};
use std::collections::VecDeque;

/// Entries that are visited in one turn.
const ENTRIES_PER_TURN: usize = 2048;

/// Blocks that are copied at once.
const COPY_BLOCKS: u32 = 256;

/// The commit of what a volume inherits.
const INHERITED: Commit = match Commit::new(1) {
    Some(commit) => commit,
    None => unreachable!(),
};

/// Commits of one timeline that a comparison is about: newer than the first, up to the second.
type Segment = (TimelineId, [(Commit, Commit); PARTITIONS]);

/// What a view is compared with.
#[derive(Clone, Copy, Debug)]
enum Since {
    Snapshot(VolumeId),
    /// The snapshot before it in its history, or the beginning of its history.
    Predecessor,
}

/// A comparison of two views.
#[derive(Debug)]
pub(crate) struct Changed {
    since: Since,
    until: VolumeId,
    /// The commits of all writes before the comparison began. It begins when the commands before it have ended.
    now: Option<Cut>,
    /// The newest first; the comparison goes from the oldest on.
    segments: Vec<Segment>,
    /// Segments that were not visited.
    left: usize,
    partition: usize,
    from: Option<IndexKey>,
    /// First block and blocks.
    found: Vec<(u64, u64)>,
    entries: Vec<Entry>,
}

/// A volume that is inflated.
#[derive(Debug)]
pub(crate) struct Inflate {
    volume: VolumeId,
    timeline: TimelineId,
    /// The next block to copy.
    block: u64,
    end: u64,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Next,
    /// Blocks are being read, to behind the room for a header.
    Read {
        buffer: Buffer,
        blocks: u32,
    },
    /// Blocks that were read and wait for a place.
    Place {
        buffer: Buffer,
        records: Vec<Record>,
    },
    /// Blocks are being written.
    Write {
        blob: BlobId,
        unit: u32,
        records: Vec<Record>,
        checksums: Vec<u32>,
    },
    /// All is copied; the flush with this number makes it durable.
    Flush(u64),
}

#[derive(Debug)]
pub(crate) enum Work {
    Changed(Changed),
    Inflate(Inflate),
    Check(crate::check::Check),
    Space(crate::space::Count),
}

/// The long commands of a pool.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    queue: VecDeque<(Tag, Work)>,
    running: Option<(Tag, Work)>,
    /// Pages for which the running one waits.
    pub(crate) waits: u32,
    pub(crate) has_failed: bool,
}

impl Tasks {
    /// Whether no command runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_none() && self.queue.is_empty()
    }

    /// Adds a command.
    pub(crate) fn push(&mut self, tag: Tag, work: Work) {
        self.queue.push_back((tag, work));
    }

    /// Whether a command runs or waits that concerns the volume.
    pub(crate) fn has(&self, id: VolumeId) -> bool {
        let is_of = |(_, work): &(Tag, Work)| matches!(work, Work::Inflate(inflate) if inflate.volume == id);
        self.running.as_ref().is_some_and(is_of) || self.queue.iter().any(is_of)
    }

    /// Takes the running command if it gives way to one that waits.
    fn take_replaced(&mut self) -> Option<Tag> {
        if self.queue.is_empty() {
            return None;
        }
        let gives_way = |(_, work): &mut (Tag, Work)| matches!(work, Work::Space(count) if count.gives_way);
        self.running.take_if(gives_way).map(|(tag, _)| tag)
    }

    pub(crate) fn running(&mut self) -> Option<&mut Work> {
        self.running.as_mut().map(|(_, work)| work)
    }

    /// The tags of all commands, which end.
    pub(crate) fn drain(&mut self) -> Vec<Tag> {
        self.running.take().into_iter().chain(self.queue.drain(..)).map(|(tag, _)| tag).collect()
    }
}

/// What a piece of work ended with.
pub(crate) enum Progress {
    /// There is more to do now.
    More,
    /// Something is to be waited for.
    Wait,
    /// The command has ended. Without an answer, the answer follows when an edit is durable.
    Done(Result<Option<Answer>, CommandError>),
}

impl Pool {
    /// Does a bounded piece of the running command. Returns whether there is more to do without input.
    pub(crate) fn step_tasks(&mut self) -> bool {
        if self.tasks.waits > 0 {
            return false;
        }
        if let Some(tag) = self.tasks.take_replaced() {
            self.tasks.has_failed = false;
            self.out.command_replies.push_back(CommandReply { tag, result: Err(CommandError::Busy) });
        }
        let Some((tag, mut work)) = self.tasks.running.take().or_else(|| self.tasks.queue.pop_front()) else {
            return false;
        };
        let has_failed = std::mem::take(&mut self.tasks.has_failed);
        let progress = match &mut work {
            Work::Check(check) => {
                if has_failed {
                    check.page_failed();
                }
                self.step_check(check)
            }
            _ if has_failed => Progress::Done(Err(CommandError::Medium)),
            Work::Changed(changed) => self.step_changed(changed),
            Work::Space(count) => self.step_space(count),
            Work::Inflate(inflate) => self.step_inflate(tag, inflate),
        };
        match progress {
            Progress::More | Progress::Wait => {
                self.tasks.running = Some((tag, work));
                // The read may end at once.
                self.start_inherited_read() || matches!(progress, Progress::More)
            }
            Progress::Done(Ok(None)) => true,
            Progress::Done(Ok(Some(answer))) => {
                self.out.command_replies.push_back(CommandReply { tag, result: Ok(answer) });
                true
            }
            Progress::Done(Err(error)) => {
                self.out.command_replies.push_back(CommandReply { tag, result: Err(error) });
                true
            }
        }
    }

    pub(crate) fn task_waited(&mut self, is_ok: bool) {
        self.tasks.waits -= 1;
        self.tasks.has_failed |= !is_ok;
    }

    /// Starts a comparison of two views of one history.
    pub(crate) fn start_changed(
        &mut self,
        tag: Tag,
        since: VolumeId,
        until: VolumeId,
    ) -> Result<(), CommandError> {
        self.start_comparison(tag, Since::Snapshot(since), until)
    }

    /// Starts a search for the blocks that a view has for itself.
    pub(crate) fn start_own(&mut self, tag: Tag, id: VolumeId) -> Result<(), CommandError> {
        self.start_comparison(tag, Since::Predecessor, id)
    }

    fn start_comparison(&mut self, tag: Tag, since: Since, until: VolumeId) -> Result<(), CommandError> {
        self.segments(since, until, &self.now())?;
        let (segments, found, entries) = (Vec::new(), Vec::new(), Vec::new());
        let changed =
            Changed { since, until, now: None, segments, left: 0, partition: 0, from: None, found, entries };
        self.tasks.push(tag, Work::Changed(changed));
        Ok(())
    }

    /// The commits of all writes so far.
    fn now(&self) -> Cut {
        std::array::from_fn(|number| self.partitions[number].now())
    }

    /// The commits by which a view differs from an older snapshot of its history.
    fn segments(&self, since: Since, until: VolumeId, now: &Cut) -> Result<Vec<Segment>, CommandError> {
        let new = self.find(until)?;
        let since = match since {
            Since::Snapshot(since) => since,
            Since::Predecessor => {
                let (timeline, high) = (new.timeline, new.cut.unwrap_or(*now));
                let cuts = self.keeper.manifest.cuts_of(timeline).copied();
                let low = cuts.filter(|cut| *cut < high).max().unwrap_or([Commit::ZERO; PARTITIONS]);
                return Ok(vec![(timeline, std::array::from_fn(|number| (low[number], high[number])))]);
            }
        };
        let old = self.find(since)?;
        let Some(old_cut) = old.cut else {
            return Err(CommandError::WrongKind("changes are told since a snapshot"));
        };
        let (mut timeline, mut high) = (new.timeline, new.cut.unwrap_or(*now));
        let mut segments = Vec::new();
        while timeline != old.timeline {
            segments.push((timeline, std::array::from_fn(|number| (Commit::ZERO, high[number]))));
            match &self.keeper.manifest.timelines[&timeline].base {
                Some(Base::View { timeline: base, cut }) => (timeline, high) = (*base, *cut),
                _ => return Err(CommandError::Invalid("the two have no common history")),
            }
        }
        segments.push((timeline, std::array::from_fn(|number| (old_cut[number], high[number]))));
        if old_cut.iter().zip(&high).any(|(old, new)| old > new) {
            return Err(CommandError::Invalid("the first is not older than the second"));
        }
        Ok(segments)
    }

    fn step_changed(&mut self, changed: &mut Changed) -> Progress {
        let now = *changed.now.get_or_insert_with(|| self.now());
        let segments = match self.segments(changed.since, changed.until, &now) {
            Ok(segments) => segments,
            Err(error) => return Progress::Done(Err(error)),
        };
        if changed.segments.is_empty() {
            changed.left = segments.len();
            changed.segments = segments;
        } else if changed.segments != segments {
            // Its versions may have been left out of the levels.
            return Progress::Done(Err(CommandError::Busy));
        }
        let Some((timeline, commits)) = changed.left.checked_sub(1).map(|at| &changed.segments[at]) else {
            changed.found.sort_unstable();
            return Progress::Done(Ok(Some(Answer::Changed(joined(&changed.found)))));
        };
        let (low, high) = commits[changed.partition];
        let start = |timeline| IndexKey::new(timeline, 0, Slot::RANGE, Commit::MAX);
        let options = ScanOptions {
            from: changed.from.unwrap_or_else(|| start(*timeline)),
            end: timeline.0.checked_add(1).map(|next| start(TimelineId(next))),
            since: (low > Commit::ZERO).then_some(low),
            limit: ENTRIES_PER_TURN,
        };
        changed.entries.clear();
        let index = &self.partitions[changed.partition].index;
        let next = match index.scan(&self.cache, &options, &mut changed.entries) {
            Ok(next) => next,
            Err(need) => {
                self.tasks.waits = self.want_pages(&need, Waiter::Task);
                return Progress::Wait;
            }
        };
        for entry in changed.entries.iter().filter(|entry| entry.key.commit() <= high) {
            let first = u64::from(entry.key.range()) * u64::from(RANGE_BLOCKS);
            let piece = match entry.key.slot().get() {
                0 => (first, u64::from(RANGE_BLOCKS)),
                slot => (first + u64::from(slot) - 1, 1),
            };
            match changed.found.last_mut() {
                Some(last) if last.0 + last.1 == piece.0 => last.1 += piece.1,
                _ => changed.found.push(piece),
            }
        }
        changed.from = next;
        if next.is_none() {
            changed.partition += 1;
            if changed.partition == PARTITIONS {
                changed.partition = 0;
                changed.left -= 1;
            }
        }
        Progress::More
    }

    /// Starts the inflation of a volume.
    pub(crate) fn start_inflate(&mut self, tag: Tag, id: VolumeId) -> Result<(), CommandError> {
        let volume = self.find(id)?;
        if volume.cut.is_some() {
            return Err(CommandError::WrongKind("a volume is inflated, not a snapshot"));
        }
        self.check_free(id)?;
        let timeline = volume.timeline;
        if self.keeper.manifest.timelines[&timeline].base.is_none() {
            self.out.command_replies.push_back(CommandReply { tag, result: Ok(Answer::Done) });
            return Ok(());
        }
        let end = self.keeper.manifest.units_that_show(timeline).div_ceil(u64::from(BLOCK_UNITS));
        self.tasks
            .push(tag, Work::Inflate(Inflate { volume: id, timeline, block: 0, end, step: Step::Next }));
        Ok(())
    }

    fn step_inflate(&mut self, tag: Tag, inflate: &mut Inflate) -> Progress {
        // The other shards copy their stripes.
        inflate.block = self.settings.shard.next_block(inflate.block);
        match std::mem::replace(&mut inflate.step, Step::Next) {
            Step::Next if inflate.block >= inflate.end => {
                inflate.step = Step::Flush(self.jobs.freezes + 1);
                self.jobs.is_flush_wanted = true;
                Progress::More
            }
            Step::Next if self.jobs.fresh_entries > 2 * self.settings.flush_entries => Progress::Wait,
            Step::Next => {
                self.read_inherited(inflate);
                Progress::Wait
            }
            Step::Flush(number) if self.keeper.flushed < number => {
                inflate.step = Step::Flush(number);
                Progress::Wait
            }
            Step::Flush(_) => {
                let Timeline { shift, base } = self.keeper.manifest.timelines[&inflate.timeline].clone();
                self.keeper
                    .edit(Edit::Timeline { id: inflate.timeline, timeline: Timeline { shift, base: None } });
                self.histories.update(inflate.timeline, &self.keeper.manifest);
                if let Some(Base::View { timeline, .. }) = base {
                    self.collect_timelines(timeline);
                }
                self.keeper.commit(Then::Answer(tag, Answer::Done));
                Progress::Done(Ok(None))
            }
            Step::Place { buffer, records } => self.write_inherited(inflate, buffer, records),
            step @ (Step::Read { .. } | Step::Write { .. }) => {
                inflate.step = step;
                Progress::Wait
            }
        }
    }

    /// Reads the next blocks as the base has them.
    fn read_inherited(&mut self, inflate: &mut Inflate) {
        let left = inflate.end - inflate.block;
        let blocks = left.min(u64::from(COPY_BLOCKS) - inflate.block % u64::from(COPY_BLOCKS)) as u32;
        let header = copy_header_len(self.facts.alignment);
        let mut buffer = self.buffers.take(header + COPY_BLOCKS * BLOCK);
        let memory = buffer.lend().slice(header, blocks * BLOCK);
        inflate.step = Step::Read { buffer, blocks };
        let range = (inflate.block * u64::from(BLOCK_UNITS), u64::from(blocks * BLOCK_UNITS));
        let request = Active::new(Origin::Inflate, inflate.volume, inflate.timeline, Op::Read, range, memory);
        let key = self.requests.add(request);
        self.inflating = Some(key);
    }

    /// Starts the read that [`Pool::read_inherited`] has prepared, when the task is back in its place.
    /// Returns whether there was one.
    fn start_inherited_read(&mut self) -> bool {
        let key = self.inflating.take();
        if let Some(key) = key {
            self.advance_read(key);
        }
        key.is_some()
    }

    /// Blocks of the base were read: those that are not zeroes are kept.
    pub(crate) fn inherited_read(&mut self, status: Status) {
        let Some(Work::Inflate(inflate)) = self.tasks.running() else { return };
        let Step::Read { mut buffer, blocks } = std::mem::replace(&mut inflate.step, Step::Next) else {
            unreachable!("a read was under way");
        };
        buffer.reclaim();
        let (first, timeline) = (inflate.block, inflate.timeline);
        inflate.block += u64::from(blocks);
        let header = copy_header_len(self.facts.alignment) as usize;
        let mut records: Vec<Record> = Vec::new();
        let mut count = 0;
        for at in 0..blocks {
            let from = header + (at * BLOCK) as usize;
            let bytes = &buffer.bytes()[from..from + BLOCK as usize];
            if bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            let to = header + (count * BLOCK) as usize;
            buffer.bytes_mut().copy_within(from..from + BLOCK as usize, to);
            let block = first + u64::from(at);
            match records.last_mut() {
                Some(last) if last.block + u64::from(last.blocks) == block => last.blocks += 1,
                _ => records.push(Record {
                    timeline,
                    partition: 0,
                    kind: Kind::Data,
                    commit: INHERITED,
                    block,
                    blocks: 1,
                    data: count,
                }),
            }
            count += 1;
        }
        if records.is_empty() || status != Status::Ok {
            self.tasks.has_failed |= status != Status::Ok;
            self.buffers.give(buffer);
            return;
        }
        debug_assert_eq!(first / STRIPE_BLOCKS, (first + u64::from(blocks) - 1) / STRIPE_BLOCKS);
        let partition = self.partition_of(timeline, first) as u8;
        records.iter_mut().for_each(|record| record.partition = partition);
        if let Some(Work::Inflate(inflate)) = self.tasks.running() {
            inflate.step = Step::Place { buffer, records };
        }
    }

    fn write_inherited(&mut self, inflate: &mut Inflate, mut data: Buffer, records: Vec<Record>) -> Progress {
        let header = copy_header_len(self.facts.alignment);
        let blocks: u32 = records.iter().map(|record| record.blocks).sum();
        let len = header + blocks * BLOCK;
        let place = match self.may_copy(inflate.volume, blocks) {
            true => self.take_place(len, self.reserve()),
            false => None,
        };
        let Some((blob, life, unit)) = place else {
            inflate.step = Step::Place { buffer: data, records };
            return Progress::Wait;
        };
        let (out, bytes) = data.bytes_mut()[..len as usize].split_at_mut(header as usize);
        let numbers = records.iter().flat_map(|record| record.block..record.block + u64::from(record.blocks));
        let checksums: Vec<u32> = bytes
            .chunks_exact(BLOCK as usize)
            .zip(numbers)
            .map(|(bytes, block)| crate::checksum::of_block(block, bytes))
            .collect();
        let places = frame::checksums_mut(out, records.len(), blocks as usize).chunks_exact_mut(4);
        places.zip(&checksums).for_each(|(place, crc)| place.copy_from_slice(&crc.to_le_bytes()));
        let head =
            Head { uuid: self.keeper.manifest.uuid, life, sequence: 0, stream: NO_STREAM, unit, durable: 0 };
        frame::encode(out, &head, &records, blocks);
        inflate.step = Step::Write { blob, unit: unit + header / UNIT, records, checksums };
        self.stats.moved_write_bytes += u64::from(len);
        self.compactor.excuse(u64::from(len));
        self.out.op(Owner::CopyWrite, StoreOp::Write { blob, unit, data, len });
        Progress::Wait
    }

    pub(crate) fn copy_write_answered(&mut self, data: Buffer, result: Result<(), StoreError>) {
        self.buffers.give(data);
        let Some(Work::Inflate(inflate)) = self.tasks.running() else { return };
        let Step::Write { blob, unit, records, checksums } = std::mem::replace(&mut inflate.step, Step::Next)
        else {
            unreachable!("a write was under way");
        };
        self.tasks.has_failed |= result.is_err();
        for record in records.into_iter().filter(|_| result.is_ok()) {
            let Some(history) = self.histories.get(record.timeline) else { continue };
            let kept = history.kept[usize::from(record.partition)];
            for at in 0..record.blocks {
                let block = record.block + u64::from(at);
                let (range, slot) = (block / u64::from(RANGE_BLOCKS), block % u64::from(RANGE_BLOCKS));
                let key = IndexKey::new(record.timeline, range as u32, Slot::block(slot as u16), INHERITED);
                let data = record.data + at;
                let place = Place { blob, unit: (unit + data * BLOCK_UNITS) as u16 };
                let value = Value::Block { place, crc: checksums[data as usize] };
                self.partitions[usize::from(record.partition)].index.insert(key, value, kept);
            }
            self.jobs.fresh_entries += record.blocks as usize;
            self.reserves.copied_units += u64::from(record.blocks * BLOCK_UNITS);
        }
        self.keeper.hold(blob, self.jobs.freezes + 1);
        self.keeper.end_move(blob);
    }
}

/// Bytes of the header of frames with copied blocks: room for as many records as blocks.
fn copy_header_len(alignment: u32) -> u32 {
    frame::header_bytes(COPY_BLOCKS as usize, COPY_BLOCKS as usize, alignment)
}

/// Pieces in ascending order, which may overlap, as pieces that do not.
fn joined(pieces: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for &(first, blocks) in pieces {
        match all.last_mut() {
            Some(last) if first <= last.0 + last.1 => last.1 = last.1.max(first + blocks - last.0),
            _ => all.push((first, blocks)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_pieces_are_joined() {
        assert_eq!(joined(&[(0, 4), (1, 1), (4, 2), (9, 1), (9, 3)]), [(0, 6), (9, 3)]);
        assert_eq!(joined(&[]), []);
    }
}
