//! Requests: their start and end, and the path of changes through locks, queues, the log and the flush gate. Any context.
//!
//! A change of part of a block locks the block, waits until earlier changes can be read, reads the rest of the block, and goes on
//! as a change of whole blocks; changes of the block that have no commit yet wait for it. A change gets its commits when it
//! enters the log's queue, all at once: a cut has all or nothing of it.

use crate::active::{Active, Op, Origin, Phase};
use crate::frame::{Kind, Record};
use crate::log::{LogFrame, Part, Source};
use crate::manifest::{BlobKind, Edit, LogTail};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::{
    Action, BLOCK, BLOCK_UNITS, OpId, PARTITIONS, RANGE_BLOCKS, Reply, Request, State, Status, StoreError,
    StoreOp, Tag, UNIT, VolumeId, WhenFull, keeper::Then,
};
use aryk_dma::{Buffer, Sgl};
use aryk_slots::Key;
use aryk_volume_index::{Key as IndexKey, Place, Slot, TimelineId, Value};
use std::collections::VecDeque;

/// Failures of log frames in a row after which the pool becomes read-only.
const FRAME_FAILURES_MAX: u32 = 16;

/// Ranges of one record that makes ranges read as zeroes.
const ZERO_RANGES_MAX: u64 = 1024;

/// Requests that wait for a flush of the store.
#[derive(Debug)]
pub(crate) struct Gate {
    waiting: Vec<Key>,
    running: Vec<Key>,
    is_running: bool,
    /// Whether writes were answered since the latest flush was started. At first, the store may hold writes of a process that
    /// ended: they were read during recovery, and no flush has covered them.
    is_dirty: bool,
    /// Failures of log frames in a row.
    frame_failures: u32,
}

impl Gate {
    pub(crate) const fn new() -> Self {
        Self {
            waiting: Vec::new(),
            running: Vec::new(),
            is_running: false,
            is_dirty: true,
            frame_failures: 0,
        }
    }
}

impl Pool {
    /// Starts a request, or answers that it is wrong.
    pub(crate) fn start(&mut self, request: Request) {
        let status = self.check(&request);
        let Some(runtime) = self.runtimes.get_mut(&request.volume).filter(|_| status == Status::Ok) else {
            self.out.replies.push_back(Reply::without_data(request.tag, status));
            return;
        };
        if runtime.is_held {
            runtime.held.push_back(request);
            return;
        }
        let (op, data, fua) = match request.action {
            Action::Read { data } => (Op::Read, data, false),
            Action::Locate => (Op::Locate, Sgl::EMPTY, false),
            Action::Write { data, fua } => (Op::Write, data, fua),
            Action::Zero { fua, .. } => (Op::Zero, Sgl::EMPTY, fua),
            Action::Flush => (Op::Flush, Sgl::EMPTY, false),
        };
        let (mut unit, mut end) = (request.unit, request.unit + request.units);
        if matches!(request.action, Action::Zero { whole_blocks: true, .. }) {
            unit = unit.next_multiple_of(u64::from(BLOCK_UNITS));
            end = (end / u64::from(BLOCK_UNITS) * u64::from(BLOCK_UNITS)).max(unit);
        }
        let origin = Origin::User(request.tag);
        self.begin(origin, request.volume, op, (unit, end - unit), data, fua);
    }

    fn check(&self, request: &Request) -> Status {
        let Some(volume) = self.keeper.manifest.volumes.get(&request.volume) else { return Status::Removed };
        let is_change = matches!(request.action, Action::Write { .. } | Action::Zero { .. });
        match self.state {
            State::Failed(_) | State::Damaged(_) => return Status::Medium,
            State::ReadOnly(_) if is_change => return Status::ReadOnly,
            State::ReadOnly(_) if matches!(request.action, Action::Flush) => return Status::Medium,
            _ => {}
        }
        if is_change && volume.cut.is_some() {
            return Status::ReadOnly;
        }
        let bytes = match request.action {
            Action::Flush => return Status::Ok,
            Action::Read { data } | Action::Write { data, .. } => Some(u64::from(data.len())),
            Action::Locate | Action::Zero { .. } => None,
        };
        if request.units == 0
            || bytes.is_some_and(|bytes| bytes != request.units.saturating_mul(u64::from(UNIT)))
        {
            return Status::Invalid;
        }
        let end = request.unit.checked_add(request.units);
        if end.is_none_or(|end| end > volume.units) { Status::OutOfRange } else { Status::Ok }
    }

    /// Begins a request that was checked: `range` is its first unit and its units.
    pub(crate) fn begin(
        &mut self,
        origin: Origin,
        volume: VolumeId,
        op: Op,
        range: (u64, u64),
        data: Sgl,
        fua: bool,
    ) -> Key {
        let timeline = self.keeper.manifest.volumes[&volume].timeline;
        let mut request = Active::new(origin, volume, timeline, op, range, data);
        request.fua = fua;
        let key = self.requests.add(request);
        if !matches!(origin, Origin::Edge { .. }) {
            self.runtimes.get_mut(&volume).expect("the volume exists").in_flight += 1;
        }
        match op {
            Op::Read | Op::Locate => self.start_read(key),
            Op::Flush => self.wait_for_flush(key),
            Op::Write | Op::Zero if range.1 == 0 => self.logged(key),
            Op::Write | Op::Zero => self.start_change(key),
        }
        key
    }

    /// Ends a request.
    pub(crate) fn finish(&mut self, key: Key) {
        let mut request = self.requests.remove(key).expect("the request is under way");
        if request.has_locks {
            self.unlock(&request);
        }
        for buffer in request.edges.iter_mut().filter_map(Option::take) {
            self.buffers.give(buffer);
        }
        if let Some(mut own) = request.own.take() {
            self.abandoned_bytes -= own.len() as u64;
            own.reclaim();
            self.buffers.give(own);
        }
        let bytes = request.units * u64::from(UNIT);
        match (request.origin, request.op) {
            (Origin::User(tag), op) => {
                match op {
                    Op::Read => self.stats.user_read_bytes += bytes,
                    Op::Locate if request.status != Status::Foreign => self.stats.user_read_bytes += bytes,
                    Op::Write => self.stats.user_write_bytes += bytes,
                    Op::Locate | Op::Zero | Op::Flush => {}
                }
                let Active { status, mut foreign, mut extents, .. } = request;
                if status != Status::Ok {
                    foreign.clear();
                    self.take_back(std::mem::take(&mut extents));
                }
                self.lent += u64::from(!extents.list.is_empty());
                self.out.replies.push_back(Reply { tag, status, foreign, extents });
            }
            (Origin::Abandoned, _) => {
                self.recycle(request.foreign);
                self.take_back(request.extents);
            }
            (Origin::Edge { parent, which }, _) => return self.edge_read(parent, which, request.status),
            (Origin::Inflate, _) => return self.inherited_read(request.status),
            (Origin::Command, _) => self.command_request_ended(request.volume, request.status),
        }
        let runtime =
            self.runtimes.get_mut(&request.volume).expect("the volume exists while it has requests");
        runtime.in_flight -= 1;
        if request.origin == Origin::Abandoned && matches!(request.op, Op::Write | Op::Zero) {
            runtime.abandoned -= 1;
        }
        if runtime.in_flight == 0 && runtime.is_held {
            self.drained(request.volume);
        } else if runtime.abandoned == 0 && !runtime.behind.is_empty() {
            std::mem::take(&mut runtime.behind).into_iter().for_each(|read| self.advance_read(read));
        }
    }

    /// A block of a change that another change has locked.
    fn find_lock(&self, key: Key) -> Option<(TimelineId, u64)> {
        if self.locks.is_empty() {
            return None;
        }
        let request = self.requests.get(key).expect("the change is under way");
        let (timeline, first, end) = (request.timeline, request.first_block(), request.end_block());
        let own = if request.has_locks { request.edge_blocks() } else { [None, None] };
        let is_other = |block: &u64| !own.contains(&Some(*block));
        if (self.locks.len() as u64) < end - first {
            let is_in = |(of, block): &&(TimelineId, u64)| {
                *of == timeline && (first..end).contains(block) && is_other(block)
            };
            return self.locks.keys().find(is_in).copied();
        }
        (first..end)
            .filter(is_other)
            .map(|block| (timeline, block))
            .find(|lock| self.locks.contains_key(lock))
    }

    /// Has a change wait until a block is unlocked.
    fn wait_for_lock(&mut self, key: Key, locked: (TimelineId, u64)) {
        self.requests.get_mut(key).expect("the change is under way").phase = Phase::Locked;
        self.locks.get_mut(&locked).expect("found").push_back(key);
    }

    /// Locks the blocks that a change covers in part, or has the change wait for another one.
    fn start_change(&mut self, key: Key) {
        let request = self.requests.get(key).expect("the change is under way");
        let (timeline, edges) = (request.timeline, request.edge_blocks());
        if let Some(locked) = self.find_lock(key) {
            self.wait_for_lock(key, locked);
            return;
        }
        let request = self.requests.get_mut(key).expect("the change is under way");
        if edges == [None, None] {
            return self.enqueue(key);
        }
        request.phase = Phase::Edges;
        request.has_locks = true;
        request.left = edges.iter().flatten().count() as u32;
        for (which, block) in edges.into_iter().enumerate().filter_map(|(which, block)| Some((which, block?)))
        {
            self.locks.insert((timeline, block), VecDeque::new());
            let number = self.partition_of(timeline, block);
            let partition = &mut self.partitions[number];
            if partition.readable + 1 == partition.next {
                self.read_edge(key, which);
            } else {
                partition.waiting.push_back((partition.next - 1, key, which));
            }
        }
    }

    fn unlock(&mut self, request: &Active) {
        for block in request.edge_blocks().into_iter().flatten() {
            for waiter in self.locks.remove(&(request.timeline, block)).expect("locked by this request") {
                let has_locks = self.requests.get(waiter).expect("the change is under way").has_locks;
                if has_locks { self.enqueue(waiter) } else { self.start_change(waiter) }
            }
        }
    }

    fn read_edge(&mut self, key: Key, which: usize) {
        let mut buffer = self.buffers.take(BLOCK);
        let memory = buffer.lend().first(BLOCK);
        let request = self.requests.get_mut(key).expect("the change is under way");
        let block = request.edge_blocks()[which].expect("the edge exists");
        request.edges[which] = Some(buffer);
        let volume = request.volume;
        let range = (block * u64::from(BLOCK_UNITS), u64::from(BLOCK_UNITS));
        self.begin(Origin::Edge { parent: key, which }, volume, Op::Read, range, memory, false);
    }

    /// The rest of a block was read: it gets the data of the request.
    fn edge_read(&mut self, key: Key, which: usize, status: Status) {
        let request = self.requests.get_mut(key).expect("the change is under way");
        let block = request.edge_blocks()[which].expect("the edge exists");
        let (unit, at, len) = request.overlap(block);
        let (is_zero, data) = (request.op == Op::Zero, request.data);
        let buffer = request.edges[which].as_mut().expect("read");
        buffer.reclaim();
        let bytes = &mut buffer.bytes_mut()[(unit * UNIT) as usize..][..len as usize];
        if is_zero {
            bytes.fill(0);
        } else {
            data.read(at, bytes);
        }
        if status != Status::Ok {
            request.status = status;
        }
        request.left -= 1;
        if request.left == 0 {
            if request.status == Status::Ok {
                self.enqueue(key);
            } else {
                self.finish(key);
            }
        }
    }

    /// Has a change wait for its turn among all volumes, unless it can go at once.
    fn enqueue(&mut self, key: Key) {
        if self.state != State::Ready {
            self.requests.get_mut(key).expect("the change is under way").status = Status::ReadOnly;
            return self.finish(key);
        }
        let Active { volume, origin, .. } = *self.requests.get(key).expect("the change is under way");
        if origin == Origin::Abandoned {
            // Nothing of it was done.
            return self.finish(key);
        }
        // What needs no space passes what waits for space only.
        let is_first = !self.runtimes[&volume].is_in_ring || self.is_free_of_cost(key);
        if is_first && self.can_admit(key) && self.has_unreserved(key) && self.try_pass(key) {
            return self.admit(key);
        }
        self.requests.get_mut(key).expect("the change is under way").phase = Phase::Queued;
        let runtime = self.runtimes.get_mut(&volume).expect("the volume exists");
        runtime.queue.push_back(key);
        self.waiting += 1;
        if !std::mem::replace(&mut runtime.is_in_ring, true) {
            runtime.deficit = 0;
            self.ring.push_back(volume);
        }
    }

    /// Bytes of the log that are not flushed.
    pub(crate) const fn unflushed_bytes(&self) -> u64 {
        self.log.written_bytes - self.flushed_bytes
    }

    /// Whether the limit of the backlog and the log's blobs allow another change.
    pub(crate) fn can_admit(&self, key: Key) -> bool {
        let bytes = self.log_bytes_of(key);
        let is_zero = self.requests.get(key).is_some_and(|request| request.op == Op::Zero);
        // Zeroes need little: they may use what is left of the log's last blob.
        let slack = if is_zero { 0 } else { self.settings.frame_bytes_max };
        self.is_below_limit(bytes)
            && self.jobs.fresh_entries < 4 * self.settings.flush_entries
            && (self.log.spares() >= self.spares_wanted() || self.log.has_room(bytes, slack))
    }

    /// Blobs that the log has in advance.
    const fn spares_wanted(&self) -> usize {
        if self.facts.blobs < 256 { 1 } else { 3 }
    }

    /// Whether there is no blob for the log, and nothing under way that could free one.
    fn is_full(&self) -> bool {
        self.log.spares() == 0
            && !self.log.has_asked
            && self.keeper.free() <= self.reserve()
            && self.keeper.is_idle()
            && !self.keeper.has_going()
            && self.jobs.is_idle()
            && self.cleaner.is_idle()
    }

    /// Fails waiting changes of volumes that report a full pool, if it is full.
    pub(crate) fn refuse_waiting(&mut self) {
        if self.ring.is_empty() || !self.is_full() {
            return;
        }
        let volumes: Vec<_> = self.ring.iter().copied().collect();
        for id in volumes {
            if self.keeper.manifest.volumes[&id].when_full == WhenFull::Fail {
                self.end_waiting(id, Status::NoSpace, |_| true);
            }
        }
    }

    /// Ends requests of a volume with [`Status::Aborted`]: those for whose tags `is_wanted` returns true. From now on, nothing
    /// accesses their memory, whatever the store does: a request of which a part is done goes on in memory of the pool. A change
    /// that waits for its turn has no effect. One that is in the log may have; changes that are submitted after the abort replace
    /// it as usual, and reads wait for its end.
    pub fn abort(&mut self, volume: VolumeId, mut is_wanted: impl FnMut(Tag) -> bool) {
        let Some(runtime) = self.runtimes.get_mut(&volume) else { return };
        let replies = &mut self.out.replies;
        let mut reply = |tag| replies.push_back(Reply::without_data(tag, Status::Aborted));
        runtime.held.retain(|request| {
            let ends = is_wanted(request.tag);
            if ends {
                reply(request.tag);
            }
            !ends
        });
        self.end_waiting(
            volume,
            Status::Aborted,
            |origin| matches!(origin, Origin::User(tag) if is_wanted(tag)),
        );
        let Self { requests, runtimes, buffers, out, .. } = self;
        // A deletion that waited for what has ended just now may be done.
        let Some(runtime) = runtimes.get_mut(&volume) else { return };
        for (_, request) in requests.iter_mut().filter(|(_, request)| request.volume == volume) {
            let Origin::User(tag) = request.origin else { continue };
            if !is_wanted(tag) {
                continue;
            }
            request.origin = Origin::Abandoned;
            runtime.abandoned += u32::from(matches!(request.op, Op::Write | Op::Zero));
            let len = request.data.len();
            if len > 0 {
                let mut own = buffers.take(len);
                self.abandoned_bytes += own.len() as u64;
                if request.op == Op::Write {
                    request.data.read(0, &mut own.bytes_mut()[..len as usize]);
                }
                request.data = own.lend().first(len);
                request.own = Some(own);
            }
            out.replies.push_back(Reply::without_data(tag, Status::Aborted));
        }
    }

    /// The request of a user that waits for an operation on a foreign disk, if one does: a change of a part of a block.
    pub fn foreign_reader(&self, id: OpId) -> Option<Tag> {
        let Owner::Foreign { request, .. } = self.out.owner(id)? else { return None };
        let mut origin = self.requests.get(*request)?.origin;
        if let Origin::Edge { parent, .. } = origin {
            origin = self.requests.get(parent)?.origin;
        }
        if let Origin::User(tag) = origin { Some(tag) } else { None }
    }

    /// Ends changes of a volume that wait for their turn: those of whose origins `is_wanted` returns true.
    pub(crate) fn end_waiting(
        &mut self,
        id: VolumeId,
        status: Status,
        mut is_wanted: impl FnMut(Origin) -> bool,
    ) {
        let Self { runtimes, requests, .. } = self;
        let runtime = runtimes.get_mut(&id).expect("the volume exists while it has requests");
        let mut keys = Vec::new();
        runtime.queue.retain(|&key| {
            let ends = is_wanted(requests.get(key).expect("the change is under way").origin);
            keys.extend(ends.then_some(key));
            !ends
        });
        if runtime.queue.is_empty() && std::mem::take(&mut runtime.is_in_ring) {
            self.ring.retain(|volume| *volume != id);
            self.reserves.parked.retain(|volume| *volume != id);
        }
        self.waiting -= keys.len() as u64;
        for key in keys {
            self.requests.get_mut(key).expect("the change is under way").status = status;
            self.finish(key);
        }
    }

    /// Gives a change its commits, and its parts to the log. A change whose blocks a later one has locked waits for that: it has
    /// read the blocks without this change, and would undo it if its commit came later.
    pub(crate) fn admit(&mut self, key: Key) {
        if let Some(locked) = self.find_lock(key) {
            self.wait_for_lock(key, locked);
            return;
        }
        let request = self.requests.get_mut(key).expect("the change is under way");
        request.phase = Phase::Logged;
        let (op, units) = (request.op, request.units);
        self.note_changed(units);
        let parts = if op == Op::Write { self.write_parts(key) } else { self.zero_parts(key) };
        self.requests.get_mut(key).expect("the change is under way").left = parts;
    }

    fn push_part(
        &mut self,
        request: Key,
        timeline: TimelineId,
        piece: (u64, u64),
        kind: Kind,
        source: Source,
    ) {
        let partition = self.partition_of(timeline, piece.0);
        let commit = self.partitions[partition].take_commit();
        let (block, blocks) = (piece.0, piece.1 as u32);
        let record = Record { timeline, partition: partition as u8, kind, commit, block, blocks, data: 0 };
        let entries = match kind {
            Kind::Data | Kind::Zero => piece.1,
            Kind::Dense => 1,
            Kind::ZeroRanges => piece.1 / u64::from(RANGE_BLOCKS) / PARTITIONS as u64 + 4,
        };
        self.log.push(Part { request, record, source, entries });
    }

    fn write_parts(&mut self, key: Key) -> u32 {
        let request = self.requests.get(key).expect("the change is under way");
        let (timeline, unit, edges) = (request.timeline, request.unit, request.edge_blocks());
        let (mut block, end) = (request.first_block(), request.end_block());
        let frame_blocks = u64::from((self.settings.frame_bytes_max / BLOCK).max(1));
        let range = u64::from(RANGE_BLOCKS);
        let mut parts = 0;
        while block < end {
            let edge = edges.iter().position(|edge| *edge == Some(block));
            let whole_end = edges[1].unwrap_or(end);
            let (blocks, kind, source) = if let Some(which) = edge {
                (1, Kind::Data, Source::Edge(which))
            } else {
                let at = (block * u64::from(BLOCK_UNITS) - unit) as u32 * UNIT;
                let left = whole_end - block;
                if self.settings.dense_writes && block.is_multiple_of(range) && left >= range {
                    (range, Kind::Dense, Source::Memory(at))
                } else {
                    (left.min(range - block % range).min(frame_blocks), Kind::Data, Source::Memory(at))
                }
            };
            self.push_part(key, timeline, (block, blocks), kind, source);
            block += blocks;
            parts += 1;
        }
        parts
    }

    fn zero_parts(&mut self, key: Key) -> u32 {
        let request = self.requests.get(key).expect("the change is under way");
        let (timeline, edges) = (request.timeline, request.edge_blocks());
        let (mut block, end) = (request.first_block(), request.end_block());
        let range = u64::from(RANGE_BLOCKS);
        let mut parts = 0;
        while block < end {
            let edge = edges.iter().position(|edge| *edge == Some(block));
            let left = edges[1].unwrap_or(end) - block;
            let ranges = left / range;
            if let Some(which) = edge {
                self.push_part(key, timeline, (block, 1), Kind::Data, Source::Edge(which));
                block += 1;
            } else if block.is_multiple_of(range) && ranges > 0 {
                // One record for each partition that owns ranges of this piece.
                let blocks = ranges.min(ZERO_RANGES_MAX * PARTITIONS as u64) * range;
                let stripes = blocks.div_ceil(crate::ids::STRIPE_BLOCKS) + 1;
                let first = block / crate::ids::STRIPE_BLOCKS;
                for stripe in first..first + stripes.min(PARTITIONS as u64) {
                    let start = (stripe * crate::ids::STRIPE_BLOCKS).max(block);
                    if start < block + blocks {
                        let piece = (start, block + blocks - start);
                        self.push_part(key, timeline, piece, Kind::ZeroRanges, Source::Nothing);
                        parts += 1;
                    }
                }
                block += blocks;
                continue;
            } else {
                let blocks = left.min(range - block % range);
                self.push_part(key, timeline, (block, blocks), Kind::Zero, Source::Nothing);
                block += blocks;
            }
            parts += 1;
        }
        parts
    }

    /// Puts the log's queue into frames.
    pub(crate) fn pump(&mut self) {
        self.log.retry(&mut self.out);
        loop {
            let (requests, buffers) = (&self.requests, &mut self.buffers);
            let fill = |part: &Part, from: u32, bytes: &mut [u8]| {
                let request = requests.get(part.request).expect("a part's request is under way");
                match part.source {
                    Source::Nothing => {}
                    Source::Memory(at) => request.data.read(at + from, bytes),
                    Source::Edge(which) => {
                        let buffer = request.edges[which].as_ref().expect("read before");
                        bytes.copy_from_slice(&buffer.bytes()[..BLOCK as usize]);
                    }
                }
            };
            if !self.log.pump(&self.settings, &mut self.out, |len| buffers.take(len), fill) {
                break;
            }
        }
        while let Some(blob) = self.log.left.pop() {
            self.keeper.close(blob, 0);
        }
    }

    pub(crate) fn frame_answered(&mut self, sequence: u64, data: Buffer, result: Result<(), StoreError>) {
        if self.state != State::Ready {
            self.buffers.give(data);
            return;
        }
        self.gate.frame_failures = if result.is_ok() { 0 } else { self.gate.frame_failures + 1 };
        self.log.answered(sequence, data, result.is_ok());
        if let Err(error) = result
            && (error == StoreError::Gone || self.gate.frame_failures > FRAME_FAILURES_MAX)
        {
            return self.fail(error);
        }
        self.gate.is_dirty = true;
        while let Some(mut frame) = self.log.pop_done() {
            for at in 0..frame.parts.len() {
                self.insert_part(&frame, at);
            }
            self.end_parts(&frame);
            self.buffers.give(frame.buffer.take().expect("answered"));
            self.log.recycle(std::mem::take(&mut frame.parts));
        }
    }

    fn insert_part(&mut self, frame: &LogFrame, at: usize) {
        let part = &frame.parts[at];
        let data = part.record.data;
        let place = |index: u32| {
            (
                Place { blob: frame.blob, unit: frame.data_unit(data + index) as u16 },
                frame.checksum(data + index),
            )
        };
        self.insert(&part.record, Place { blob: frame.blob, unit: frame.unit as u16 }, place);
    }

    /// Adds the entries of a record to the index. `frame` is the place of its frame, `block` that of each of its blocks.
    pub(crate) fn insert(&mut self, record: &Record, frame: Place, block: impl Fn(u32) -> (Place, u32)) {
        let Some(history) = self.histories.get(record.timeline) else { return };
        let (shift, kept) = (history.shift, history.kept[usize::from(record.partition)]);
        let index = &mut self.partitions[usize::from(record.partition)].index;
        let range = u64::from(RANGE_BLOCKS);
        let key =
            |block: u64, slot| IndexKey::new(record.timeline, (block / range) as u32, slot, record.commit);
        let slot = |block: u64| Slot::block((block % range) as u16);
        match record.kind {
            Kind::Data | Kind::Zero => {
                for at in 0..record.blocks {
                    let number = record.block + u64::from(at);
                    let value = if record.kind == Kind::Zero {
                        Value::Zero
                    } else {
                        let (place, crc) = block(at);
                        Value::Block { place, crc }
                    };
                    index.insert(key(number, slot(number)), value, kept);
                }
                self.jobs.fresh_entries += record.blocks as usize;
            }
            Kind::Dense => {
                index.insert(key(record.block, Slot::RANGE), Value::Dense { place: frame }, kept);
                self.jobs.fresh_entries += 1;
            }
            Kind::ZeroRanges => {
                let (mut at, end) = (record.block, record.block + u64::from(record.blocks));
                while at < end {
                    if crate::ids::partition_of(shift, at) == usize::from(record.partition) {
                        index.insert(key(at, Slot::RANGE), Value::Zero, kept);
                        self.jobs.fresh_entries += 1;
                        at += range;
                    } else {
                        at = (at / crate::ids::STRIPE_BLOCKS + 1) * crate::ids::STRIPE_BLOCKS;
                    }
                }
            }
        }
    }

    /// The entries of a frame can be read: its requests go on, and those that waited for its commits.
    fn end_parts(&mut self, frame: &LogFrame) {
        for part in &frame.parts {
            let number = usize::from(part.record.partition);
            let commit = part.record.commit.get();
            self.partitions[number].readable = commit;
            while let Some(&(wanted, key, which)) = self.partitions[number].waiting.front()
                && wanted <= commit
            {
                self.partitions[number].waiting.pop_front();
                self.read_edge(key, which);
            }
            let request = self.requests.get_mut(part.request).expect("a part's request is under way");
            request.left -= 1;
            if request.left == 0 {
                self.logged(part.request);
            }
        }
        self.cut_written();
    }

    /// All parts of a change can be read.
    fn logged(&mut self, key: Key) {
        let request = self.requests.get_mut(key).expect("the change is under way");
        if request.fua && request.status == Status::Ok {
            self.wait_for_flush(key);
        } else {
            self.finish(key);
        }
    }

    fn wait_for_flush(&mut self, key: Key) {
        self.requests.get_mut(key).expect("the request is under way").phase = Phase::Flushing;
        if self.gate.is_dirty {
            self.gate.waiting.push(key);
        } else if self.gate.is_running {
            self.gate.running.push(key);
        } else {
            self.finish(key);
        }
    }

    /// Starts a flush of the store for the requests that wait for one.
    pub(crate) fn open_gate(&mut self) {
        if self.gate.is_running || self.gate.waiting.is_empty() {
            return;
        }
        std::mem::swap(&mut self.gate.waiting, &mut self.gate.running);
        self.gate.is_running = true;
        self.gate.is_dirty = false;
        let durable = self.log.tail().0;
        self.out.op(Owner::Flush { durable }, StoreOp::Flush);
    }

    pub(crate) fn flush_answered(&mut self, durable: u64, result: Result<(), StoreError>) {
        self.gate.is_running = false;
        let keys = std::mem::take(&mut self.gate.running);
        for &key in &keys {
            if result.is_err() {
                self.requests.get_mut(key).expect("the request waits").status = Status::Medium;
            }
            self.finish(key);
        }
        match result {
            Ok(()) => self.log.durable = self.log.durable.max(durable),
            // What was answered before may be lost, and no later flush could tell.
            Err(error) => self.fail(error),
        }
    }

    /// Lists more blobs as the log's, before it needs them.
    pub(crate) fn ask_for_log_blobs(&mut self) {
        let wanted = self.spares_wanted();
        // The first blob after an opening replaces the last one of the opening before, which may be nearly empty.
        let has_none = self.log.tail().1.is_none();
        if self.log.has_asked || self.log.spares() >= wanted || !(has_none || self.may_log_grow()) {
            return;
        }
        let reserve = if has_none { self.opening_reserve() } else { self.reserve() };
        let blobs: Vec<_> =
            (self.log.spares()..wanted).map_while(|_| self.keeper.allocate(BlobKind::Log, reserve)).collect();
        if blobs.is_empty() {
            return;
        }
        self.log.has_asked = true;
        self.cleaner.is_due = true;
        self.keeper.log_blobs.extend(blobs.iter().map(|(blob, _)| *blob));
        self.edit_log_blobs();
        self.keeper.commit(Then::LogBlobs(blobs));
    }

    pub(crate) fn edit_log_blobs(&mut self) {
        let LogTail { sequence, unit, .. } = self.keeper.manifest.log;
        let blobs = self.keeper.log_blobs.iter().copied().collect();
        self.keeper.edit(Edit::Log(LogTail { sequence, unit, blobs }));
    }

    /// Ends all changes under way: nothing can be written any more.
    pub(crate) fn fail_changes(&mut self) {
        self.ring.clear();
        self.reserves.parked.clear();
        for part in self.log.fail() {
            let request = self.requests.get_mut(part.request).expect("a part's request is under way");
            request.status = Status::Medium;
            request.left -= 1;
            if request.left == 0 {
                self.finish(part.request);
            }
        }
        let volumes: Vec<_> = self.runtimes.keys().copied().collect();
        volumes.into_iter().for_each(|id| self.end_waiting(id, Status::Medium, |_| true));
        for number in 0..PARTITIONS {
            while let Some((_, key, which)) = self.partitions[number].waiting.pop_front() {
                self.read_edge(key, which);
            }
        }
        for key in std::mem::take(&mut self.gate.waiting) {
            self.requests.get_mut(key).expect("the request waits").status = Status::Medium;
            self.finish(key);
        }
        self.fail_commands();
    }
}
