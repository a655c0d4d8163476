//! Commands that take several requests to the disk, one after the other. Reactor context; these functions may allocate.

use super::tasks::{AbortCause, Task};
use super::{Begun, Failure, Request, UnitChannel};
use crate::cell::Command as Order;
use crate::lun::ChangeRequest;
use crate::reservations::Refused;
use aryk_bdev::{Blocks, Io, Lba, Op, Status as BdevStatus, Tag};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::Cx;
use std::rc::Rc;
use std::sync::Arc;

/// The continuation of a command after one of its requests has completed.
pub(super) enum Job {
    /// The command unmaps the next range of its list.
    Unmap { data: Sgl, next: u32, ranges: u32 },
    /// The command continues with the next blocks.
    Loop(Loop),
    /// The command has no request to the disk: external work ends it. That work holds a weak reference, which shows whether the
    /// command still waits.
    External { _waits: Arc<()> },
}

impl Job {
    /// Whether external work ends the command.
    pub const fn is_external(&self) -> bool {
        matches!(self, Self::External { .. })
    }
}

/// A loop over blocks that uses the same data for each: of WRITE SAME, and of VERIFY.
pub(super) struct Loop {
    op: Op,
    fua: bool,
    lba: Lba,
    left: Blocks,
    /// Blocks in the buffer.
    step: Blocks,
    buffer: Buffer,
    data: Sgl,
}

/// Loops of a channel that run at the same time, at most, since each has a buffer.
pub(super) const LOOPS_MAX: u32 = 16;

/// Bytes of a loop's buffer, unless one block is larger.
const LOOP_BYTES: usize = 64 * 1024;

impl Loop {
    /// A loop over `blocks` blocks, at least one, each with the data of `block`.
    fn new(op: Op, lba: Lba, blocks: Blocks, fua: bool, block: &[u8]) -> Self {
        let copies = (LOOP_BYTES / block.len()).max(1).min(usize::try_from(blocks.0).unwrap_or(usize::MAX));
        let mut buffer = Buffer::new(copies * block.len(), PAGE as usize);
        (0..copies).for_each(|i| buffer.write(i * block.len(), block));
        let data = buffer.lend();
        Self { op, fua, lba, left: blocks, step: Blocks(copies as u64), buffer, data }
    }

    /// The next request, if one is left.
    fn next(&mut self, block_shift: u32) -> Option<Io> {
        let blocks = self.left.min(self.step);
        if blocks == Blocks::ZERO {
            return None;
        }
        let data = self.data.slice(0, (blocks.0 << block_shift) as u32);
        let io = Io {
            tag: Tag(0),
            op: self.op,
            fua: self.fua,
            may_unmap: false,
            lba: self.lba,
            blocks,
            source: Lba::ZERO,
            data,
        };
        self.lba += blocks;
        self.left -= blocks;
        Some(io)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A loop is dropped only between requests.
        self.buffer.reclaim();
    }
}

/// The range of an UNMAP's descriptor.
pub(super) fn range(data: Sgl, i: u32) -> (Lba, Blocks) {
    let mut bytes = [0; 16];
    data.read(8 + 16 * i, &mut bytes);
    let [lba @ .., _, _, _, _, _, _, _, _] = bytes;
    let blocks = u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    (Lba(u64::from_be_bytes(lba)), Blocks(blocks.into()))
}

/// The next range of an UNMAP that is not empty. The initiator may have changed the range since it was checked: the disk checks
/// it again.
fn next_unmap(data: Sgl, next: &mut u32, ranges: u32) -> Option<Io> {
    while *next < ranges {
        let (lba, blocks) = range(data, *next);
        *next += 1;
        if blocks > Blocks::ZERO {
            let op = Op::Unmap;
            return Some(Io {
                tag: Tag(0),
                op,
                fua: false,
                may_unmap: false,
                lba,
                blocks,
                source: Lba::ZERO,
                data: Sgl::EMPTY,
            });
        }
    }
    None
}

impl UnitChannel {
    pub(super) fn start_unmap(
        &mut self,
        request: &Request<'_>,
        moved: u32,
        data: Sgl,
        ranges: u32,
        cx: &mut Cx,
    ) -> Begun {
        let mut next = 0;
        let Some(io) = next_unmap(data, &mut next, ranges) else { return Ok(Some(moved)) };
        self.start(request, moved, Some(Box::new(Job::Unmap { data, next, ranges })), io, cx);
        Ok(None)
    }

    /// Starts a loop over those blocks, at least one.
    pub(super) fn start_loop(
        &mut self,
        request: &Request<'_>,
        moved: u32,
        (op, lba, blocks, fua): (Op, Lba, Blocks, bool),
        block: &[u8],
        cx: &mut Cx,
    ) -> Begun {
        if self.loops == LOOPS_MAX {
            return Err(Failure::Full);
        }
        self.loops += 1;
        let mut job = Loop::new(op, lba, blocks, fua, block);
        let io = job.next(self.block_shift).expect("the loop has blocks");
        self.start(request, moved, Some(Box::new(Job::Loop(job))), io, cx);
        Ok(None)
    }

    /// Starts a command that ends when `change` ends; `change` needs nothing of this channel. If the command is aborted, a
    /// change that has begun continues, and a change that waits for its turn has no effect. The change counts against the limit
    /// until it ends.
    pub(super) fn start_external(
        &mut self,
        request: &Request<'_>,
        moved: u32,
        change: impl AsyncFnOnce(ChangeRequest) -> Result<(), Refused> + 'static,
        cx: &mut Cx,
    ) -> Begun {
        let counted = self.nexus.begin_change().ok_or(Failure::Full)?;
        let (waits, op, status) = (Arc::new(()), Op::Flush, BdevStatus::Ok);
        let (wanted, requested) =
            (Arc::downgrade(&waits), ChangeRequest::new(&self.nexus, Arc::downgrade(&waits)));
        let Request { tag, task: name, .. } = *request;
        let job = Some(Box::new(Job::External { _waits: waits }));
        let task =
            Task { name, lba: Lba::ZERO, job, moved, op, status, abort_cause: AbortCause::None, runs: true };
        self.tasks.insert(tag, task);
        let (cell, local) = (Rc::clone(&self.cell), cx.local().clone());
        let task = async move {
            let result = change(requested).await;
            drop(counted);
            local.defer(move |cx| cell.commands.add(Order::Ended(tag, wanted, result), cx));
        };
        cx.local().spawn(task).detach();
        Ok(None)
    }

    /// Sends the next request of a command; returns whether there was one.
    #[cold]
    pub(super) fn submit_next(&mut self, tag: u16, cx: &mut Cx) -> bool {
        let task = self.tasks.get(tag);
        if task.status.is_ok() && task.abort_cause != AbortCause::None {
            task.status = BdevStatus::Aborted;
        }
        if !task.status.is_ok() {
            return false;
        }
        let io = match task.job.as_deref_mut() {
            None | Some(Job::External { .. }) => None,
            Some(Job::Unmap { data, next, ranges }) => next_unmap(*data, next, *ranges),
            Some(Job::Loop(job)) => job.next(self.block_shift),
        };
        let Some(io) = io else { return false };
        task.lba = io.lba;
        self.disk.submit(Io { tag: Tag(tag.into()), ..io }, cx);
        true
    }
}
