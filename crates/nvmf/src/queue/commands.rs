//! The commands of an I/O queue: from the capsule to the disk, and from the disk to the completion. Reactor context.
//!
//! A command that waits, for a buffer or for data, is executed against the namespace against which it was checked, or fails.

use super::disks::Disks;
use super::{DIGESTED_MAX, IoQueue, give_back};
use crate::pool::{TRANSFER_MAX, Taken};
use crate::status;
use aryk_bdev::{Blocks, Completion, Io, Lba, Op, Status, Tag};
use aryk_dma::Sgl as Memory;
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::opcode;
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::chap::MESSAGE_MAX;
use aryk_nvme_fabrics::command::{self, Command};
use aryk_nvme_fabrics::io::{Checked, Request};
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use aryk_nvme_fabrics::status::AUTHENTICATION_REQUIRED;
use aryk_reactor::{Cx, Nanos};

/// Ranges of a Dataset Management command that the disk has at the same time.
const RANGES_AT_ONCE: u16 = 16;
/// Bytes of a range.
const RANGE_LEN: usize = 16;
/// The number of a namespace that is none.
const NO_NAMESPACE: u64 = u64::MAX;

/// Where a command is.
#[derive(Debug)]
pub(super) enum Stage {
    /// Its slot is free, or its capsule arrives, or its completion is being sent.
    Idle,
    /// It waits for a buffer.
    Waiting(Checked, u32),
    /// Its data arrives by an R2T.
    Requested { checked: Checked, len: u32, since: Nanos },
    /// It is half of a fused operation, and has its data.
    Half(Checked, u32),
    /// Control has it.
    Asked,
    /// The disk has it. A discard has several ranges, and ends with the first failure among them.
    Running { op: Op, len: u32, left: u16, status: Status },
}

#[derive(Debug)]
pub(super) struct Slot {
    pub entry: SubmissionEntry,
    /// When it has arrived, or when its last request has ended.
    since: Option<Nanos>,
    capsule_len: u32,
    pub data: Option<Taken>,
    pub stage: Stage,
    /// The number of the namespace against which it was checked.
    pub number: u64,
    /// The other half of a fused operation.
    pub other_half: Option<SlotId>,
    /// It fails with this: when its data has arrived, or when the disk has aborted it.
    pub doom: Option<NvmeStatus>,
    /// A reservation forbids it while the disk has it.
    pub is_draining: bool,
    /// Ranges of a discard, or sources of a copy, that the disk has got.
    pub ranges: u16,
    /// Blocks of a copy's earlier sources.
    pub copied: u32,
}

impl Slot {
    pub const fn new(entry: SubmissionEntry, capsule_len: u32, data: Option<Taken>) -> Self {
        Self {
            entry,
            since: None,
            capsule_len,
            data,
            stage: Stage::Idle,
            number: 0,
            other_half: None,
            doom: None,
            is_draining: false,
            ranges: 0,
            copied: 0,
        }
    }

    pub const fn free() -> Self {
        Self::new(SubmissionEntry::new(0, 0), 0, None)
    }
}

impl IoQueue {
    pub(super) fn slot(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[usize::from(id.0)]
    }

    /// Takes what the disks have completed.
    pub(super) fn complete(&mut self, cx: &mut Cx) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        // All that a wake can be for is done in this poll.
        let has_event = cx.clear_wake(self.root);
        self.disks.poll(has_event, cx, &mut completions);
        let has_any = !completions.is_empty();
        let (mut taken, mut digested) = (0, 0);
        while taken < completions.len() && digested < DIGESTED_MAX {
            digested += self.complete_one(completions[taken], cx);
            taken += 1;
        }
        completions.drain(..taken);
        if !completions.is_empty() {
            cx.wake(self.root);
        }
        self.completions = completions;
        if !self.drains.is_empty() {
            self.end_drains();
        }
        self.disks.close_idle();
        has_any
    }

    /// Returns the bytes whose digest was computed.
    fn complete_one(&mut self, completion: Completion, cx: &mut Cx) -> usize {
        let id = SlotId(completion.tag.0 as u16);
        let slot = &mut self.slots[usize::from(id.0)];
        let Stage::Running { op, len, left, status } = &mut slot.stage else {
            unreachable!("the disk completes what it has, once")
        };
        *status = status.or(completion.status);
        *left -= 1;
        if *left > 0 {
            return 0;
        }
        let (op, len, status) = (*op, *len, *status);
        let now = cx.now();
        let since = slot.since.replace(now).unwrap_or(now);
        self.counts.add(op, len, status, Nanos(now.0.saturating_sub(since.0)));
        slot.stage = Stage::Idle;
        if let Some(data) = slot.data.as_mut().filter(|_| op.has_data()) {
            data.buffer.reclaim();
        }
        match &slot.data {
            Some(_) if op == Op::Read && status.is_ok() && slot.entry.opcode() != opcode::io::VERIFY => {
                return self.link.complete_with_data(id, slot, len, 0);
            }
            _ if op == Op::CompareAndWrite => self.fused_ended(id, status, cx),
            _ if op == Op::Unmap && status.is_ok() => self.deallocate(id, cx),
            _ if op == Op::Copy => self.copied(id, status, cx),
            _ => self.reply(id, self.status_of(id, status, op), cx),
        }
        0
    }

    /// The status of a command whose request has ended.
    pub(super) fn status_of(&self, id: SlotId, status: Status, op: Op) -> NvmeStatus {
        let doom = self.slots[usize::from(id.0)].doom.filter(|_| status == Status::Aborted);
        doom.unwrap_or_else(|| status::of(status, op))
    }

    /// Starts commands that have waited for a buffer.
    pub(super) fn start_waiting(&mut self, cx: &mut Cx) -> bool {
        let mut has_any = false;
        while let Some(&id) = self.waiting.front().filter(|_| self.takes_input()) {
            let Stage::Waiting(checked, len) = self.slot(id).stage else { unreachable!("it waits") };
            let Some(data) = self.pool.take(&mut self.share, room_of(&checked, len), self.root) else {
                break;
            };
            self.slot(id).data = Some(data);
            self.waiting.pop_front();
            self.go_on(id, checked, len, cx);
            has_any = true;
        }
        if let Some(next) = self.pool.pass_on() {
            cx.wake(next);
        }
        has_any
    }

    /// Completes a command without data: its buffer is free.
    pub(super) fn reply(&mut self, id: SlotId, status: NvmeStatus, cx: &mut Cx) {
        self.reply_with(id, status, 0, cx);
    }

    /// As [`Self::reply`], with a result.
    pub(super) fn reply_with(&mut self, id: SlotId, status: NvmeStatus, result: u64, cx: &mut Cx) {
        let status = self.retry_delays.add(status);
        let slot = self.slot(id);
        slot.stage = Stage::Idle;
        if let Some(data) = slot.data.take() {
            give_back(&self.pool, &mut self.share, data, &self.waiting, self.root, cx);
        }
        self.link.complete(id, status, result);
    }

    pub(super) fn fail(&mut self, id: SlotId, code: Code, cx: &mut Cx) {
        self.reply(id, status::refusal(code), cx);
    }

    /// Executes a command, or goes on with one whose data has arrived.
    pub(super) fn execute(&mut self, id: SlotId, is_intact: bool, cx: &mut Cx) {
        let damaged = (!is_intact).then(|| Code::TRANSIENT_TRANSPORT_ERROR.status());
        let slot = self.slot(id);
        if let Stage::Requested { checked, len, .. } = slot.stage {
            slot.stage = Stage::Idle;
            return match slot.doom.or(damaged) {
                Some(status) => self.end_half(id, status, cx),
                None => self.start(id, checked, len, cx),
            };
        }
        slot.since.get_or_insert(cx.now());
        if self.is_leaving {
            self.held.push_back((id, is_intact));
            return;
        }
        let slot = &self.slots[usize::from(id.0)];
        let checked = Self::check(&self.disks, &slot.entry, slot.capsule_len, self.link.data_blocks());
        let checked = match (damaged, checked) {
            (Some(status), _) => Err(status),
            (None, Ok(Some((checked, ..)))) if self.is_refused() && !checked.request.is_authentication() => {
                Err(AUTHENTICATION_REQUIRED.status().as_final())
            }
            (None, checked) => checked.map_err(status::refusal),
        };
        let Some(checked) = self.take_half(id, checked, cx) else { return };
        match checked {
            Ok(None) => self.reply(id, NvmeStatus::new(0), cx),
            Ok(Some((checked, len, number))) => {
                self.slot(id).number = number;
                self.find_buffer(id, checked, len, cx);
            }
            Err(status) => self.reply(id, status, cx),
        }
    }

    fn find_buffer(&mut self, id: SlotId, checked: Checked, len: u32, cx: &mut Cx) {
        if len == 0 || self.slot(id).data.is_some() {
            return self.start(id, checked, len, cx);
        }
        // Those that wait come first.
        let data = match self.waiting.is_empty() {
            true => self.pool.take(&mut self.share, room_of(&checked, len), self.root),
            false => None,
        };
        if let Some(data) = data {
            self.slot(id).data = Some(data);
            self.go_on(id, checked, len, cx);
        } else {
            self.slot(id).stage = Stage::Waiting(checked, len);
            self.waiting.push_back(id);
        }
    }

    /// Checks a command. Returns the bytes of its buffer, and the number of its namespace. `None`: there is nothing to do for it.
    fn check(
        disks: &Disks,
        entry: &SubmissionEntry,
        capsule_len: u32,
        blocks: DataBlocks,
    ) -> Result<Option<(Checked, u32, u64)>, Code> {
        if entry.opcode() == command::OPCODE {
            let request = match Command::decode(entry)? {
                Command::Disconnect { .. } => return Ok(None),
                Command::AuthenticationSend { .. } => Request::AuthenticationSend,
                Command::AuthenticationReceive { .. } => Request::AuthenticationReceive,
                _ => return Err(Code::INVALID_FIELD),
            };
            let sgl = Sgl::decode(entry, blocks)?;
            sgl.check(capsule_len, MESSAGE_MAX as u32)?;
            return Ok(Some((Checked { request, fuse: None }, sgl.len(), NO_NAMESPACE)));
        }
        let sgl = Sgl::decode(entry, blocks)?;
        sgl.check(capsule_len, TRANSFER_MAX as u32)?;
        let disk = disks.find(entry.nsid())?;
        let checked = disk.rules.check(entry, sgl.len())?;
        let len = match checked.request {
            Request::Verify { len, .. } => len,
            _ => sgl.len(),
        };
        Ok(Some((checked, len, disk.number)))
    }

    /// Goes on with a command that has got its buffer.
    fn go_on(&mut self, id: SlotId, checked: Checked, len: u32, cx: &mut Cx) {
        if !checked.request.takes_data() {
            return self.start(id, checked, len, cx);
        }
        let since = cx.now();
        let slot = &mut self.slots[usize::from(id.0)];
        slot.stage = Stage::Requested { checked, len, since };
        self.link.request_data(id, slot, len);
        self.await_host(since, cx);
    }

    /// Gives a command to its disk. The namespace may have gone or shrunk meanwhile; then the block layer refuses it.
    fn start(&mut self, id: SlotId, checked: Checked, len: u32, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        if checked.fuse.is_some() {
            slot.stage = Stage::Half(checked, len);
            return self.start_fused(id, cx);
        }
        let io = match checked.request {
            Request::Read(range) | Request::Verify { range, .. } => io(id, Op::Read, range.lba, range.blocks),
            Request::Write { range, fua } => Io { fua, ..io(id, Op::Write, range.lba, range.blocks) },
            Request::Compare(range) => io(id, Op::Compare, range.lba, range.blocks),
            Request::WriteZeroes { range, fua, may_deallocate } => {
                Io { fua, may_unmap: may_deallocate, ..io(id, Op::WriteZeroes, range.lba, range.blocks) }
            }
            Request::Flush => io(id, Op::Flush, 0, 0),
            Request::Hint => return self.reply(id, NvmeStatus::new(0), cx),
            Request::Deallocate { .. } => return self.deallocate(id, cx),
            Request::Copy(fields) => return self.copy(id, fields, cx),
            request @ (Request::Reserve
            | Request::Report { .. }
            | Request::AuthenticationSend
            | Request::AuthenticationReceive) => return self.ask(id, request, len, cx),
        };
        self.submit(id, io, len, cx);
    }

    /// Submits the only request of a command, with `len` bytes of data if it has some.
    pub(super) fn submit(&mut self, id: SlotId, io: Io, len: u32, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        let Some(disk) = self.disks.get_mut(slot.entry.nsid(), slot.number) else {
            return self.end_half(id, status::refusal(Code::INVALID_NAMESPACE_OR_FORMAT), cx);
        };
        let data = match slot.data.as_mut().filter(|_| io.op.has_data()) {
            Some(data) => data.buffer.lend().first(len),
            None => Memory::EMPTY,
        };
        slot.stage = Stage::Running { op: io.op, len, left: 1, status: Status::Ok };
        disk.channel.submit(Io { data, ..io }, cx);
    }

    /// Goes on with the ranges of a discard: those before one that cannot be discarded are.
    fn deallocate(&mut self, id: SlotId, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        let disk = self.disks.get_mut(slot.entry.nsid(), slot.number).filter(|_| !self.is_closing);
        let Some(disk) = disk else { return self.fail(id, Code::INVALID_NAMESPACE_OR_FORMAT, cx) };
        if let Some(doom) = slot.doom {
            return self.reply(id, doom, cx);
        }
        let data = slot.data.as_ref().map_or(&[][..], |data| data.buffer.bytes());
        let listed = 1 + (slot.entry.cdw(10) & 0xff) as u16;
        let (mut failed, mut left) = (None, 0);
        while slot.ranges < listed && left < RANGES_AT_ONCE && failed.is_none() {
            let bytes = &data[usize::from(slot.ranges) * RANGE_LEN..][..RANGE_LEN];
            slot.ranges += 1;
            match disk.rules.ranges(bytes).next() {
                Some(Ok(range)) => {
                    let io = io(id, Op::Unmap, range.lba, range.blocks);
                    disk.channel.submit(Io { may_unmap: true, ..io }, cx);
                    left += 1;
                }
                Some(Err(code)) => failed = Some(code),
                // A range without blocks.
                None => {}
            }
        }
        let status = failed.map_or(Status::Ok, |_| Status::OutOfRange);
        match (left, failed) {
            (0, None) => self.reply(id, NvmeStatus::new(0), cx),
            (0, Some(code)) => self.fail(id, code, cx),
            _ => slot.stage = Stage::Running { op: Op::Unmap, len: 0, left, status },
        }
    }

    /// Aborts a command, by its identifier. Returns whether it is aborted; if not, it may still be.
    pub fn abort(&mut self, cid: u16, cx: &mut Cx) -> bool {
        let is_meant = |slot: &Slot| slot.entry.cid() == cid && !matches!(slot.stage, Stage::Idle);
        let Some(place) = self.slots.iter().position(is_meant) else { return false };
        let id = SlotId(place as u16);
        let is_aborted = match self.slots[place].stage {
            Stage::Running { .. } => {
                let slot = &self.slots[place];
                if let Some(disk) = self.disks.get_mut(slot.entry.nsid(), slot.number) {
                    disk.channel.abort(Tag(id.0.into()), cx);
                }
                // What the block layer still had has completed now.
                self.complete(cx);
                matches!(self.slots[place].stage, Stage::Idle)
            }
            Stage::Asked => false,
            _ => {
                self.doom(id, Code::ABORT_REQUESTED.status(), cx);
                true
            }
        };
        cx.wake(self.root);
        is_aborted
    }

    /// Has a command fail that the disk does not have: now, or when its data has arrived, which the host sends in any case.
    pub(super) fn doom(&mut self, id: SlotId, status: NvmeStatus, cx: &mut Cx) {
        match self.slot(id).stage {
            Stage::Requested { .. } => self.slot(id).doom = Some(status),
            Stage::Waiting(..) => {
                self.waiting.retain(|waiting| *waiting != id);
                self.end_half(id, status, cx);
            }
            Stage::Half(..) => self.end_half(id, status, cx),
            Stage::Idle | Stage::Asked | Stage::Running { .. } => {}
        }
    }
}

/// Bytes of the buffer of a command with `len` bytes of data. The second half of a fused operation is added to the first.
fn room_of(checked: &Checked, len: u32) -> usize {
    let is_first = matches!(checked.fuse, Some(Fuse::First));
    len as usize * if is_first { 2 } else { 1 }
}

/// A request without data.
pub(super) fn io(id: SlotId, op: Op, lba: u64, blocks: u32) -> Io {
    Io {
        tag: Tag(id.0.into()),
        op,
        fua: false,
        may_unmap: false,
        lba: Lba(lba),
        blocks: Blocks(blocks.into()),
        source: Lba::ZERO,
        data: Memory::EMPTY,
    }
}
