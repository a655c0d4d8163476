//! Commands of reservations and authentications, which control executes, and what a change of a reservation means for the
//! commands that an I/O queue has. Reactor context.
//!
//! Control tells each queue of a host that loses rights, and answers the command that has taken them when none of the queues has
//! a request any more that the host lost the right to. A queue that has been told starts no such request.

use super::IoQueue;
use super::commands::Stage;
use crate::reservation::{Answer, Asked};
use aryk_bdev::{Op, Tag};
use aryk_nvme::spec::entry::Fuse;
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::io::Request;
use aryk_nvme_fabrics::reservation::Rights;
use aryk_reactor::{Cx, RootRef};
use futures_channel::oneshot;

/// Commands that control has of a queue, at most.
const ASKED_MAX: u16 = 16;

/// Commands that the disk still has, after a change that forbids them.
pub(super) struct Drain {
    left: Vec<SlotId>,
    ended: oneshot::Sender<()>,
}

/// Why a command fails that a change forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The host may not execute it any more.
    Rights,
    /// Another host has preempted this one, and aborts all of its commands.
    All,
}

/// Whether a request that the disk has is one of a host with these rights.
const fn is_allowed(op: Op, rights: Rights) -> bool {
    match rights {
        Rights::All => true,
        Rights::Read => matches!(op, Op::Read | Op::Compare),
        Rights::None => false,
    }
}

impl IoQueue {
    /// Sends a command to control, with `len` bytes of data if it has some.
    pub(super) fn ask(&mut self, id: SlotId, request: Request, len: u32, cx: &mut Cx) {
        if self.asked == ASKED_MAX {
            // The host may try again.
            return self.reply(id, Code::COMMAND_INTERRUPTED.status(), cx);
        }
        let queue = RootRef::new(cx.handle().clone(), self.root);
        let slot = &mut self.slots[usize::from(id.0)];
        let sent = slot.data.as_ref().filter(|_| request.takes_data());
        let data = sent.map_or_else(Vec::new, |data| data.buffer.bytes()[..len as usize].to_vec());
        slot.stage = Stage::Asked;
        let (number, entry) = (slot.number, slot.entry);
        let (host, qid) = (self.asker.host.clone(), self.asker.qid);
        let asked = Asked { host, qid, queue, slot: id, number, entry, len, request, data };
        match self.asker.asked.send(asked) {
            Ok(()) => self.asked += 1,
            // The target ends.
            Err(_) => self.fail(id, Code::INTERNAL_ERROR, cx),
        }
    }

    /// Completes a command with what control has answered.
    pub(crate) fn answer(&mut self, id: SlotId, answer: Answer, cx: &mut Cx) {
        if self.is_closing {
            return;
        }
        self.asked -= 1;
        match answer {
            Err(code) => self.fail(id, code, cx),
            Ok(report) if report.is_empty() => self.reply(id, NvmeStatus::new(0), cx),
            Ok(report) => {
                let slot = &mut self.slots[usize::from(id.0)];
                slot.stage = Stage::Idle;
                slot.data.as_mut().expect("a report has a buffer").buffer.write(0, &report);
                self.link.complete_with_data(id, slot, report.len() as u32, 0);
            }
        }
        cx.wake(self.root);
    }

    /// Sets what the host may do with a namespace, named by identifier and number, and has the commands fail that it has lost.
    /// Returns what tells that the disk has none of them any more; `None`: it has none.
    pub(crate) fn restrict(
        &mut self,
        (nsid, number): (u32, u64),
        rights: Rights,
        loss: Loss,
        cx: &mut Cx,
    ) -> Option<oneshot::Receiver<()>> {
        // A namespace that the queue loses may still have requests.
        if let Some(disk) = self.disks.get_mut(nsid, number) {
            disk.rules = disk.rules.with_rights(rights);
        }
        let (status, is_all) = match loss {
            Loss::Rights => (Code::RESERVATION_CONFLICT.status().as_final(), false),
            Loss::All => (Code::PREEMPTED.status().as_final(), true),
        };
        let mut left = Vec::new();
        for at in 0..self.slots.len() {
            let id = SlotId(at as u16);
            let slot = &mut self.slots[at];
            if slot.number != number {
                continue;
            }
            match slot.stage {
                Stage::Waiting(checked, _) | Stage::Requested { checked, .. } | Stage::Half(checked, _)
                    if is_all || !checked.request.is_allowed(rights) =>
                {
                    self.doom(id, status, cx);
                }
                Stage::Running { op, .. } if is_all || !is_allowed(op, rights) => {
                    slot.doom = Some(status);
                    slot.is_draining = true;
                    left.push(id);
                    // The first half stands for both.
                    if slot.entry.fuse() != Some(Fuse::Second)
                        && let Some(disk) = self.disks.get_mut(nsid, number)
                    {
                        disk.channel.abort(Tag(id.0.into()), cx);
                    }
                }
                _ => {}
            }
        }
        cx.wake(self.root);
        if left.is_empty() {
            return None;
        }
        let (ended, has_ended) = oneshot::channel();
        self.drains.push(Drain { left, ended });
        Some(has_ended)
    }

    /// Reports the drains that have ended.
    pub(super) fn end_drains(&mut self) {
        let Self { drains, slots, .. } = self;
        let is_left = |id: &SlotId| {
            let slot = &slots[usize::from(id.0)];
            slot.is_draining && matches!(slot.stage, Stage::Running { .. })
        };
        for Drain { ended, .. } in drains.extract_if(.., |drain| {
            drain.left.retain(is_left);
            drain.left.is_empty()
        }) {
            // The target may have ended.
            let _ = ended.send(());
        }
    }
}
