//! The meta journal: checkpoints and edits, and the superblock, written in steps. Any context.
//!
//! One task runs at a time; edits that arrive meanwhile are written together as one record. A task is a list of steps: writes
//! that are in flight together, and flushes of the base between them.
//!
//! | task | steps |
//! | --- | --- |
//! | edits | flush, if data may not be durable; the record, to both mirrors; flush |
//! | checkpoint | flush, as before; the record, to both mirrors of another area; flush; mark the old checkpoint as replaced; flush |
//! | superblock | one copy; flush; the other copy; flush |
//! | copy of the manifest | flush, as before; the copy, to one of its two places; flush |
//!
//! The first flush makes sure that no edit survives a crash that the data before it does not. At most one record of edits is in
//! flight, so after a crash only the last one can be incomplete. The mark tells a checkpoint that was never finished from one
//! that was damaged later: the first is ignored, the second is an error.
//!
//! A checkpoint that replaces a lost one overwrites the one before, from which that was made again. So it is written to one
//! mirror after the other, with a flush between: what it is made of is in one of them until it is complete in the other.
//!
//! A write that fails in one mirror is a loss of redundancy, not a failure of the task. A task that fails may have reached the
//! disk nevertheless. So edits fail after it, until a checkpoint succeeds.

use std::collections::VecDeque;
use std::mem;

use aryk_dma::{Buffer, PAGE};
use aryk_volume::{OpId, StoreError};

use crate::checksum;
use crate::layout;
use crate::record::{self, HEADER_BYTES, Header, Kind, RECORD_ALIGN};
use crate::superblock::{COPY_BYTES, COPY_PLACES, PLACES, Superblock};

/// Bytes of one write of a checkpoint. Not more, because a turn copies and verifies them.
const WRITE_BYTES: usize = 16 << 10;
/// Bytes of a checkpoint's payload that are in its first page, behind the header.
pub(crate) const FIRST_BYTES: usize = RECORD_ALIGN as usize - HEADER_BYTES;
/// The generation of a pool's first checkpoint, which is that of an empty pool.
pub(crate) const FIRST_GENERATION: u64 = 1;
/// Writes of a checkpoint in flight, both mirrors together.
const WRITES_MAX: usize = 8;
/// Bytes of edits, beyond those of their checkpoint, after which a new checkpoint is due.
const EDITS_DUE: u64 = 4 << 20;

/// The end of the journal: where the next record goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// Index of the area.
    pub(crate) area: usize,
    /// The header of the checkpoint.
    pub(crate) checkpoint: Header,
    /// Byte offset of the next record in the area.
    pub(crate) offset: u64,
    /// The next record's sequence number, and its link to the record before.
    pub(crate) sequence: u64,
    pub(crate) link: u32,
}

/// Bytes to be written at a byte offset of the disk; which mirror or copy they belong to.
#[derive(Debug)]
pub(crate) struct Patch {
    pub(crate) copy: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

/// What a journal starts with.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) superblock: Superblock,
    /// `None` before the first checkpoint.
    pub(crate) end: Option<End>,
    /// The largest generation that the disk has.
    pub(crate) generation: u64,
    /// Headers of checkpoints that are to be marked as replaced, and copies of records that are missing.
    pub(crate) patches: Vec<Patch>,
    /// The copy of the superblock that is missing, damaged or older.
    pub(crate) stale_copy: Option<usize>,
    /// The bytes of the checkpoint's first page behind its header.
    pub(crate) first_page: Vec<u8>,
    /// If both copies of the checkpoint are damaged, so that another one is due: the mirror that is written first.
    pub(crate) lost: Option<usize>,
    /// Where the next copy of the manifest goes, and its number.
    pub(crate) next_copy: (usize, u64),
}

#[derive(Debug)]
enum Task {
    Commit(OpId, Vec<u8>),
    Checkpoint(OpId, Vec<u8>),
    ManifestCopy(OpId, Vec<u8>),
    /// Adds what the base has gained to the superblock; its size now.
    Grow(u64),
    Rename(String),
    /// Writes the stale copy of the superblock.
    Copy(usize),
}

#[derive(Debug)]
enum Step {
    Flush,
    Write(Vec<Patch>),
    /// A checkpoint or a copy at these byte offsets of the disk, for these mirrors, in pieces. Its first page is the last to be
    /// written, because the header has the checksum of the payload.
    Record {
        at: Vec<(usize, u64)>,
        payload: Vec<u8>,
        /// The part of the payload that was handed out; at first, nothing.
        sent: usize,
        digest: Box<checksum::Running>,
    },
}

/// What the end of a task changes.
#[derive(Debug)]
enum Outcome {
    Edits { ids: Vec<OpId>, end: End },
    Checkpoint { id: OpId, end: End, first_page: Vec<u8> },
    Superblock { new: Box<Superblock>, first: usize },
    Copy,
    ManifestCopy { id: OpId, header: Header, is_empty: bool },
}

#[derive(Debug)]
struct Running {
    steps: VecDeque<Step>,
    outcome: Outcome,
    in_flight: usize,
    is_flushing: bool,
    /// The first failure of each mirror or copy.
    failures: [Option<StoreError>; 2],
}

/// What the journal wants to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Want {
    Flush,
    Nothing,
}

/// The end of an operation of the engine, or of a growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Op(OpId, Result<(), StoreError>),
    Superblock(Result<(), StoreError>),
}

#[derive(Debug)]
pub(crate) struct Journal {
    superblock: Superblock,
    end: Option<End>,
    generation: u64,
    patches: Vec<Patch>,
    stale_copy: Option<usize>,
    /// The bytes of the checkpoint's first page behind its header, which stay when it is marked as replaced.
    first_page: Vec<u8>,
    lost: Option<usize>,
    next_copy: (usize, u64),
    queue: VecDeque<Task>,
    running: Option<Running>,
    /// After a failed edit, edits fail until a checkpoint has replaced them all.
    failure: Option<StoreError>,
    /// Writes that failed in one mirror only.
    pub(crate) degraded: u64,
}

impl Journal {
    pub(crate) fn new(start: Start) -> Self {
        let Start { superblock, end, generation, patches, stale_copy, first_page, lost, next_copy } = start;
        Self {
            superblock,
            end,
            generation,
            patches,
            stale_copy,
            first_page,
            lost,
            next_copy,
            queue: VecDeque::new(),
            running: None,
            failure: None,
            degraded: 0,
        }
    }

    pub(crate) const fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Generation and sequence number of the last durable record.
    pub(crate) fn position(&self) -> (u64, u64) {
        self.end.map_or((0, 0), |end| (end.checkpoint.generation, end.sequence - 1))
    }

    /// Whether the edits are long enough for a new checkpoint: opening the pool reads them all, and the area has an end.
    pub(crate) fn is_checkpoint_due(&self) -> bool {
        self.end.is_some_and(|end| {
            if self.lost.is_some() {
                return true;
            }
            let base = end.checkpoint.bytes();
            let room = self.superblock.areas[end.area].bytes - base;
            end.offset - base > (room / 2).min(base + EDITS_DUE)
        })
    }

    pub(crate) fn commit(&mut self, id: OpId, edit: Vec<u8>) {
        self.queue.push_back(Task::Commit(id, edit));
    }

    pub(crate) fn checkpoint(&mut self, id: OpId, bytes: Vec<u8>) {
        self.queue.push_back(Task::Checkpoint(id, bytes));
    }

    pub(crate) fn copy(&mut self, id: OpId, bytes: Vec<u8>) {
        self.queue.push_back(Task::ManifestCopy(id, bytes));
    }

    /// Adds what the base has gained.
    pub(crate) fn grow(&mut self, bytes: u64) {
        self.queue.push_back(Task::Grow(bytes));
    }

    /// Gives the pool another name.
    pub(crate) fn rename(&mut self, name: &str) {
        self.queue.push_back(Task::Rename(name.to_owned()));
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_none() && self.queue.is_empty()
    }

    /// Goes on as far as possible: hands out writes, and reports what ended. `is_dirty`: whether data may not be durable.
    pub(crate) fn advance(
        &mut self,
        is_dirty: bool,
        writes: &mut Vec<Write>,
        ended: &mut Vec<Ended>,
    ) -> Want {
        loop {
            if self.running.is_none() && !self.start(is_dirty, ended) {
                return Want::Nothing;
            }
            let running = self.running.as_mut().expect("started");
            if !running.has_copy() {
                running.steps.clear();
            }
            match running.steps.front_mut() {
                Some(Step::Flush) => {
                    if running.in_flight > 0 || mem::replace(&mut running.is_flushing, true) {
                        return Want::Nothing;
                    }
                    return Want::Flush;
                }
                Some(Step::Write(patches)) if running.in_flight == 0 => {
                    let patches = mem::take(patches);
                    running.in_flight += patches.len();
                    writes.extend(patches.into_iter().map(Write::new));
                    running.steps.pop_front();
                }
                Some(Step::Record { at, payload, sent, digest }) => {
                    if running.in_flight + at.len() > WRITES_MAX {
                        return Want::Nothing;
                    }
                    let first = payload.len().min(FIRST_BYTES);
                    if *sent == 0 {
                        digest.update(&payload[..first]);
                        *sent = first;
                    }
                    running.in_flight += at.len();
                    let piece = &payload[*sent..payload.len().min(*sent + WRITE_BYTES)];
                    if !piece.is_empty() {
                        let skip = (HEADER_BYTES + *sent) as u64;
                        writes.extend(each(at, skip, &[piece]));
                        digest.update(piece);
                        *sent += piece.len();
                        continue;
                    }
                    let header = match &mut running.outcome {
                        Outcome::Checkpoint { end, first_page, .. } => {
                            end.checkpoint.payload = digest.finish();
                            end.link = end.checkpoint.link();
                            *first_page = payload[..first].to_vec();
                            end.checkpoint
                        }
                        Outcome::ManifestCopy { header, .. } => {
                            header.payload = digest.finish();
                            *header
                        }
                        _ => unreachable!("the steps of a checkpoint or a copy"),
                    };
                    writes.extend(each(at, 0, &[&header.encode(), &payload[..first]]));
                    running.steps.pop_front();
                }
                Some(Step::Write(_)) => return Want::Nothing,
                None if running.in_flight > 0 => return Want::Nothing,
                None => self.finish(ended),
            }
        }
    }

    /// A write has ended.
    pub(crate) fn written(&mut self, copy: usize, result: Result<(), StoreError>) {
        let running = self.running.as_mut().expect("a task whose write ended");
        running.in_flight -= 1;
        if let Err(error) = result {
            self.degraded += 1;
            running.failures[copy].get_or_insert(error);
        }
    }

    /// The flush has ended that [`Want::Flush`] asked for.
    pub(crate) fn flushed(&mut self, result: Result<(), StoreError>) {
        let running = self.running.as_mut().expect("a task that waited for a flush");
        running.steps.pop_front();
        running.is_flushing = false;
        if let Err(error) = result {
            running.failures = [Some(error); 2];
        }
    }

    /// Starts the next task. Returns whether one runs.
    fn start(&mut self, is_dirty: bool, ended: &mut Vec<Ended>) -> bool {
        if let Some(copy) = self.stale_copy.filter(|_| self.end.is_some() && !self.queue.is_empty()) {
            self.queue.push_front(Task::Copy(copy));
        }
        while let Some(task) = self.queue.pop_front() {
            let started = match task {
                Task::Commit(id, edit) => self.start_edits(id, &edit, is_dirty),
                Task::Checkpoint(id, bytes) => self.start_checkpoint(id, bytes, is_dirty),
                Task::ManifestCopy(id, bytes) => self.start_copy(id, bytes, is_dirty),
                Task::Grow(bytes) => match layout::grow(&self.superblock, bytes) {
                    Some(new) => Ok(self.start_superblock(new)),
                    None => Err(vec![Ended::Superblock(Ok(()))]),
                },
                Task::Rename(name) => {
                    let update = self.superblock.update + 1;
                    Ok(self.start_superblock(Superblock { name, update, ..self.superblock.clone() }))
                }
                Task::Copy(copy) => {
                    self.stale_copy = None;
                    Ok(Running::new(false, copy_steps(&self.superblock, copy), Outcome::Copy))
                }
            };
            match started {
                Ok(running) => {
                    self.running = Some(running);
                    return true;
                }
                Err(failed) => ended.extend(failed),
            }
        }
        false
    }

    /// A changed superblock: the stale copy first.
    fn start_superblock(&self, new: Superblock) -> Running {
        let first = self.stale_copy.unwrap_or(1);
        let steps: Vec<_> = [first, 1 - first].into_iter().flat_map(|copy| copy_steps(&new, copy)).collect();
        Running::new(false, steps, Outcome::Superblock { new: Box::new(new), first })
    }

    /// A record of this edit and all that follow it directly in the queue.
    fn start_edits(&mut self, id: OpId, edit: &[u8], is_dirty: bool) -> Result<Running, Vec<Ended>> {
        let mut ids = vec![id];
        let mut payload = Vec::new();
        assert!(record::push_edit(&mut payload, edit), "an edit of {} bytes", edit.len());
        while let Some(Task::Commit(id, edit)) = self.queue.front() {
            if !record::push_edit(&mut payload, edit) {
                break;
            }
            ids.push(*id);
            self.queue.pop_front();
        }
        let refuse = |ids: Vec<OpId>, error| ids.into_iter().map(|id| Ended::Op(id, Err(error))).collect();
        let end = match (self.failure, self.end) {
            (Some(error), _) => return Err(refuse(ids, error)),
            (None, None) => panic!("a checkpoint comes before edits"),
            (None, Some(end)) => end,
        };
        let area = self.superblock.areas[end.area];
        let mut header = Header::new(Kind::Edits, self.superblock.pool, end.checkpoint.generation, &payload);
        (header.sequence, header.previous) = (end.sequence, end.link);
        if end.offset + header.bytes() > area.bytes {
            self.failure = Some(StoreError::NoSpace);
            return Err(refuse(ids, StoreError::NoSpace));
        }
        let bytes = record(&header, &payload);
        let mut patches = mem::take(&mut self.patches);
        patches.extend(area.mirrors.iter().enumerate().map(|(copy, place)| Patch {
            copy,
            offset: place.offset + end.offset,
            bytes: bytes.clone(),
        }));
        let end = End {
            offset: end.offset + header.bytes(),
            sequence: end.sequence + 1,
            link: header.link(),
            ..end
        };
        let steps = [Step::Write(patches), Step::Flush];
        Ok(Running::new(is_dirty, steps, Outcome::Edits { ids, end }))
    }

    /// A checkpoint in the largest of the areas that have not the current one.
    fn start_checkpoint(
        &mut self,
        id: OpId,
        payload: Vec<u8>,
        is_dirty: bool,
    ) -> Result<Running, Vec<Ended>> {
        let current = self.end.map(|end| end.area);
        let others = (0..self.superblock.areas.len()).filter(|&n| Some(n) != current);
        let n = others.max_by_key(|&n| (self.superblock.areas[n].bytes, usize::MAX - n)).expect("two areas");
        let area = self.superblock.areas[n];
        self.generation += 1;
        // Its checksum follows when all of the payload was handed out.
        let header = Header::unsealed(Kind::Checkpoint, self.superblock.pool, self.generation, payload.len());
        // Edits must have room behind it.
        if 2 * header.bytes() > area.bytes {
            return Err(vec![Ended::Op(id, Err(StoreError::NoSpace))]);
        }
        let at = [0, 1].map(|mirror| (mirror, area.mirrors[mirror].offset));
        let step = |at, payload| Step::Record { at, payload, sent: 0, digest: Box::default() };
        let mut steps = match self.lost {
            None => vec![step(at.to_vec(), payload), Step::Flush],
            Some(first) => {
                let one = step(vec![at[first]], payload.clone());
                vec![one, Step::Flush, step(vec![at[1 - first]], payload), Step::Flush]
            }
        };
        let is_inside = |patch: &Patch| {
            area.mirrors.iter().any(|m| (m.offset..m.offset + area.bytes).contains(&patch.offset))
        };
        let mut marks = mem::take(&mut self.patches);
        marks.retain(|patch| !is_inside(patch));
        if let Some(old) = &self.end {
            let mark = Header { successor: self.generation, previous: old.link, ..old.checkpoint };
            let bytes = [&mark.encode()[..], &self.first_page].concat();
            marks.extend(
                self.superblock.areas[old.area].mirrors.iter().enumerate().map(|(copy, place)| Patch {
                    copy,
                    offset: place.offset,
                    bytes: bytes.clone(),
                }),
            );
        }
        if !marks.is_empty() {
            steps.extend([Step::Write(marks), Step::Flush]);
        }
        if self.end.is_none() {
            steps.extend([1, 0].into_iter().flat_map(|copy| copy_steps(&self.superblock, copy)));
        }
        let end =
            End { area: n, checkpoint: header, offset: header.bytes(), sequence: 1, link: header.link() };
        Ok(Running::new(is_dirty, steps, Outcome::Checkpoint { id, end, first_page: Vec::new() }))
    }

    fn finish(&mut self, ended: &mut Vec<Ended>) {
        let running = self.running.take().expect("a task that ends");
        let result = if running.has_copy() { Ok(()) } else { Err(running.failure()) };
        match running.outcome {
            Outcome::Edits { ids, end } => {
                match result {
                    Ok(()) => self.end = Some(end),
                    Err(error) => self.failure = Some(error),
                }
                ended.extend(ids.into_iter().map(|id| Ended::Op(id, result)));
            }
            Outcome::Checkpoint { id, end, first_page } => {
                match result {
                    Ok(()) => {
                        (self.end, self.failure) = (Some(end), None);
                        (self.first_page, self.lost) = (first_page, None);
                    }
                    Err(error) => self.failure = Some(error),
                }
                ended.push(Ended::Op(id, result));
            }
            Outcome::Superblock { new, first } => {
                if result.is_ok() {
                    self.superblock = *new;
                    self.stale_copy = running.failures[1 - first].map(|_| 1 - first);
                }
                ended.push(Ended::Superblock(result));
            }
            Outcome::Copy => {}
            Outcome::ManifestCopy { id, header, is_empty } => {
                if result.is_ok() {
                    self.next_copy = (1 - self.next_copy.0, header.generation + 1);
                }
                let none = if is_empty { Err(StoreError::NoSpace) } else { Ok(()) };
                ended.push(Ended::Op(id, result.and(none)));
            }
        }
    }

    /// A copy of the manifest in the place of the older one. If it does not fit, an empty one: what is there is old from now on.
    fn start_copy(&mut self, id: OpId, payload: Vec<u8>, is_dirty: bool) -> Result<Running, Vec<Ended>> {
        if !self.superblock.has_room_for_copies() {
            return Err(vec![Ended::Op(id, Err(StoreError::NoSpace))]);
        }
        let is_empty = (HEADER_BYTES + payload.len()) as u64 > COPY_BYTES;
        let payload = if is_empty { Vec::new() } else { payload };
        let (place, number) = self.next_copy;
        let header = Header::unsealed(Kind::Copy, self.superblock.pool, number, payload.len());
        let at = vec![(0, COPY_PLACES[place])];
        let steps = [Step::Record { at, payload, sent: 0, digest: Box::default() }, Step::Flush];
        Ok(Running::new(is_dirty, steps, Outcome::ManifestCopy { id, header, is_empty }))
    }
}

/// A write for the disk.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) copy: usize,
    pub(crate) offset: u64,
    pub(crate) buffer: Buffer,
}

impl Write {
    /// Pads a patch to whole pages: what follows a header, or a superblock, in its page is not used.
    fn new(patch: Patch) -> Self {
        Self { copy: patch.copy, offset: patch.offset, buffer: padded(&[&patch.bytes]) }
    }
}

/// The same bytes for each of these mirrors, at a byte offset of each.
fn each(at: &[(usize, u64)], skip: u64, parts: &[&[u8]]) -> Vec<Write> {
    at.iter()
        .map(|(copy, offset)| Write { copy: *copy, offset: offset + skip, buffer: padded(parts) })
        .collect()
}

/// These bytes in whole pages.
fn padded(parts: &[&[u8]]) -> Buffer {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut buffer = Buffer::new(len.next_multiple_of(PAGE as usize), PAGE as usize);
    let mut at = 0;
    for part in parts {
        buffer.write(at, part);
        at += part.len();
    }
    buffer
}

impl Running {
    fn new(is_dirty: bool, steps: impl IntoIterator<Item = Step>, outcome: Outcome) -> Self {
        let steps = is_dirty.then_some(Step::Flush).into_iter().chain(steps).collect();
        Self { steps, outcome, in_flight: 0, is_flushing: false, failures: [None; 2] }
    }

    /// Whether one copy is complete so far. The copies of a superblock are written one after the other: if the first of these
    /// writes failed, the other copy stays as it was.
    const fn has_copy(&self) -> bool {
        match self.outcome {
            Outcome::Superblock { first, .. } => self.failures[first].is_none(),
            Outcome::ManifestCopy { .. } => self.failures[0].is_none(),
            _ => self.failures[0].is_none() || self.failures[1].is_none(),
        }
    }

    fn failure(&self) -> StoreError {
        self.failures.iter().flatten().next().copied().unwrap_or(StoreError::Medium)
    }
}

/// Writes a copy of the superblock.
fn copy_steps(new: &Superblock, copy: usize) -> [Step; 2] {
    let bytes = new.encode().to_vec();
    [Step::Write(vec![Patch { copy, offset: PLACES[copy], bytes }]), Step::Flush]
}

/// A record's bytes in its area.
fn record(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(header.bytes() as usize);
    bytes.extend_from_slice(&header.encode());
    bytes.extend_from_slice(payload);
    bytes.resize(header.bytes() as usize, 0);
    debug_assert!((bytes.len() as u64).is_multiple_of(RECORD_ALIGN) && bytes.len() >= HEADER_BYTES);
    bytes
}
