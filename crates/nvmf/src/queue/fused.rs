//! Fused operations of an I/O queue: a Compare and the Write that follows it at once, of one block. NVMe 2.0 §3.4.2. Reactor
//! context.
//!
//! Both halves wait for each other, with their data. The first one's buffer has room for the data of both.

use super::IoQueue;
use super::commands::{Stage, io};
use crate::pool::TRANSFER_MAX;
use crate::status;
use aryk_bdev::{Io, Op, Status};
use aryk_nvme::spec::entry::Fuse;
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::io::{Checked, Range, Request};
use aryk_reactor::Cx;

/// The command before the next one.
#[derive(Debug, Default)]
pub(super) enum FirstHalf {
    /// It is no first half.
    #[default]
    None,
    /// It is one, which has failed.
    Failed,
    /// It is one, which waits for the second.
    Some(SlotId),
}

/// What the check of a command returns: the command, the bytes of its data and the number of its namespace.
type Found = Result<Option<(Checked, u32, u64)>, NvmeStatus>;

/// The blocks of a half.
const fn range(request: &Request) -> Option<Range> {
    match *request {
        Request::Compare(range) | Request::Write { range, .. } => Some(range),
        _ => None,
    }
}

impl IoQueue {
    /// Finds a command's place in a fused operation. Returns how the command goes on; `None` if it has failed with that.
    pub(super) fn take_half(&mut self, id: SlotId, found: Found, cx: &mut Cx) -> Option<Found> {
        let before = std::mem::take(&mut self.first_half);
        let fuse = self.slot(id).entry.fuse();
        let first = match before {
            FirstHalf::Some(first) => Some(first),
            FirstHalf::None | FirstHalf::Failed => None,
        };
        match (fuse, first) {
            (None | Some(Fuse::First), None) => {}
            (None | Some(Fuse::First), Some(first)) => self.miss(first, cx),
            (Some(Fuse::Second), Some(first)) => return self.join(first, id, found, cx),
            (Some(Fuse::Second), None) => {
                let is_failed = matches!(before, FirstHalf::Failed);
                let code = if is_failed { Code::FUSED_FAILED } else { Code::FUSED_MISSING };
                self.fail(id, code, cx);
                return None;
            }
        }
        if fuse.is_none() {
            return Some(found);
        }
        let found = found.and_then(|found| match found {
            Some((checked, ..)) if range(&checked.request).is_none_or(|range| range.blocks > 1) => {
                Err(status::refusal(Code::ATOMIC_WRITE_UNIT_EXCEEDED))
            }
            Some((_, len, _)) if 2 * len as usize > TRANSFER_MAX => Err(status::refusal(Code::INVALID_FIELD)),
            found => Ok(found),
        });
        self.first_half = match found {
            Ok(Some(_)) => FirstHalf::Some(id),
            Ok(None) | Err(_) => FirstHalf::Failed,
        };
        Some(found)
    }

    /// The second half has not followed the first.
    fn miss(&mut self, first: SlotId, cx: &mut Cx) {
        self.doom(first, status::refusal(Code::FUSED_MISSING), cx);
    }

    /// The second half has followed the first.
    fn join(&mut self, first: SlotId, second: SlotId, found: Found, cx: &mut Cx) -> Option<Found> {
        let found = found.and_then(|found| {
            let of_first = self.slot(first);
            let expected = match of_first.stage {
                Stage::Waiting(checked, _) | Stage::Half(checked, _) | Stage::Requested { checked, .. } => {
                    range(&checked.request).map(|range| (range, of_first.number))
                }
                Stage::Idle | Stage::Asked | Stage::Running { .. } => None,
            };
            let is_same =
                found.as_ref().and_then(|(checked, _, number)| Some((range(&checked.request)?, *number)));
            match is_same == expected {
                true => Ok(found),
                false => Err(status::refusal(Code::INVALID_FIELD)),
            }
        });
        if found.is_ok() {
            self.slot(first).other_half = Some(second);
            self.slot(second).other_half = Some(first);
        } else {
            self.doom(first, status::refusal(Code::FUSED_FAILED), cx);
        }
        Some(found)
    }

    /// Completes a command that has failed, and the other half with it if it is one of a fused operation.
    pub(super) fn end_half(&mut self, id: SlotId, status: NvmeStatus, cx: &mut Cx) {
        if let FirstHalf::Some(first) = self.first_half
            && first == id
        {
            self.first_half = FirstHalf::Failed;
        }
        let other = self.slot(id).other_half.take();
        self.reply(id, status, cx);
        if let Some(other) = other {
            self.slot(other).other_half = None;
            self.doom(other, status::refusal(Code::FUSED_FAILED), cx);
        }
    }

    /// Starts the operation when both halves have their data. `id` is the half that has got it just now.
    pub(super) fn start_fused(&mut self, id: SlotId, cx: &mut Cx) {
        let Some(other) = self.slot(id).other_half else { return };
        let is_first = self.slot(id).entry.fuse() == Some(Fuse::First);
        let (first, second) = if is_first { (id, other) } else { (other, id) };
        let Stage::Half(..) = self.slot(other).stage else { return };
        let Stage::Half(Checked { request: Request::Write { range, fua }, .. }, len) =
            self.slot(second).stage
        else {
            unreachable!("the second half is a write")
        };
        let from = self.slot(second).data.take().expect("a write has data");
        let to = self.slot(first).data.as_mut().expect("a compare has data");
        to.buffer.write(len as usize, &from.buffer.bytes()[..len as usize]);
        self.slot(second).data = Some(from);
        let io = Io { fua, ..io(first, Op::CompareAndWrite, range.lba, range.blocks) };
        self.submit(first, io, 2 * len, cx);
        // Unless the namespace has gone, the first half stands for both.
        if matches!(self.slot(first).stage, Stage::Running { .. }) {
            let stage = Stage::Running { op: Op::CompareAndWrite, len, left: 1, status: Status::Ok };
            self.slot(second).stage = stage;
        }
    }

    /// The disk has completed the operation.
    pub(super) fn fused_ended(&mut self, first: SlotId, status: Status, cx: &mut Cx) {
        let Some(second) = self.slot(first).other_half.take() else {
            unreachable!("both halves wait for it")
        };
        self.slot(second).other_half = None;
        self.reply(first, self.status_of(first, status, Op::CompareAndWrite), cx);
        match status {
            Status::Ok => self.reply(second, NvmeStatus::new(0), cx),
            _ => self.fail(second, Code::FUSED_FAILED, cx),
        }
    }
}
