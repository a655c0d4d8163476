//! One virtqueue of one disk, on its reactor: from the guest's ring to the disk's channel and back. Reactor context.
//!
//! The head of a request's descriptor chain identifies the request on the whole path: it is the slot of the scatter list, the
//! tag of the [`aryk_bdev::Io`], and the id of the used element. The ring makes sure that no head is in flight twice.

use crate::request::{Answer, Disk, Layout, Other, Parsed, Unanswerable};
use aryk_bdev::{BdevChannel, Completion, Io, Status, Tag};
use aryk_crash_point::{Step, step};
use aryk_reactor::{Armed, Cx, Root, RootId};
use aryk_vhost_device::{GuestQueue, Move, Parts};
use aryk_virtqueue::Chain;

/// A virtqueue. A root of its reactor from start to stop.
pub struct Queue {
    pub(crate) guest: GuestQueue,
    pub(crate) requests: Requests,
    pub(crate) order: Option<Move<Self>>,
}

/// The requests of a queue, and its disk.
pub(crate) struct Requests {
    pub disk: Disk,
    /// `None` after the disk was removed; then requests fail.
    pub channel: Option<BdevChannel>,
    completions: Vec<Completion>,
    closing_channel: bool,
    /// Requests are being aborted so that the queue can stop.
    giving_up: bool,
}

impl Queue {
    /// Starts a queue on the calling reactor. The queue polls its ring once without a kick, because requests may be available
    /// already. `disk` tells how to interpret requests.
    pub fn start(
        id: RootId,
        parts: Parts,
        disk: Disk,
        mut channel: Option<BdevChannel>,
        cx: &mut Cx,
    ) -> std::io::Result<Self> {
        let size = parts.ring.size();
        if let Some(channel) = &mut channel {
            channel.trace_front_end();
        }
        let requests = Requests {
            disk,
            channel,
            completions: Vec::with_capacity(size.into()),
            closing_channel: false,
            giving_up: false,
        };
        Ok(Self { guest: GuestQueue::new(id, parts, cx)?, requests, order: None })
    }

    /// As [`DeviceQueue::give_up`](aryk_vhost_device::DeviceQueue::give_up).
    pub(crate) fn give_up(&mut self, cx: &mut Cx) {
        self.requests.giving_up = self.guest.keeps_in_flight;
        let (queue, requests) = (self.guest.index, self.guest.sgs.in_use());
        if let Some(channel) = self.requests.channel.as_mut().filter(|_| requests > 0) {
            tracing::warn!(queue, requests, "the disk is slow: requests are aborted");
            channel.abort_all(cx);
        }
    }

    /// As [`GuestQueue::leave_removed_memory`].
    pub(crate) fn leave_removed_memory(&mut self, cx: &mut Cx) -> bool {
        let Self { guest, requests, .. } = self;
        let Some(channel) = &mut requests.channel else { return true };
        guest.leave_removed_memory(|uses_it| {
            let is_meant = |tag: Tag| uses_it(tag.0 as u16);
            channel.abort_those(is_meant, cx);
            channel.are_revocable(is_meant)
        })
    }

    /// As [`DeviceQueue::is_revocable`](aryk_vhost_device::DeviceQueue::is_revocable).
    pub(crate) fn is_revocable(&self) -> bool {
        self.requests.channel.as_ref().is_none_or(|channel| channel.are_revocable(|_| true))
    }

    /// The disk is being removed: requests in flight complete, later requests fail.
    pub fn lose_disk(&mut self, cx: &mut Cx) {
        self.requests.closing_channel = true;
        cx.wake(self.guest.id);
    }

    /// Carries out what had to wait for requests to complete: the stop or move of the queue, or the close of the channel.
    fn settle(&mut self, cx: &mut Cx) {
        if self.guest.sgs.in_use() > 0 {
            return;
        }
        drop(self.requests.channel.take());
        if self.guest.is_stopping() {
            self.guest.leave(cx);
        } else if let Some(order) = &mut self.order {
            order.begin_transfer(self.guest.id, cx);
        }
    }

    /// Whether the disk is being removed and its channel is still open.
    pub(crate) const fn is_losing_disk(&self) -> bool {
        self.requests.closing_channel && self.requests.channel.is_some()
    }
}

impl Requests {
    #[inline(always)]
    fn start(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        // The first layout must release the chain before the second layout borrows it.
        let parsed = Layout::separate(chain, guest.sgs.memory())
            .map(|layout| self.disk.parse(layout, head, &mut guest.sgs));
        let Some(parsed) = parsed else { return self.start_scattered(head, chain, guest, cx) };
        match parsed {
            Ok(io) => self.submit(io, head, guest, cx),
            Err(other) => self.start_other(other, head, chain, guest, cx),
        }
    }

    /// Starts a request whose header or status shares a buffer with data or spans several buffers.
    #[cold]
    fn start_scattered(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        let layout = Layout::any(chain, guest.sgs.memory());
        match self.disk.parse(layout, head, &mut guest.sgs) {
            Ok(io) => self.submit_outlined(io, head, guest, cx),
            Err(other) => self.start_other(other, head, chain, guest, cx),
        }
    }

    /// [`Requests::submit`], not inlined.
    #[inline(never)]
    fn submit_outlined(&mut self, io: Io, head: u16, guest: &mut GuestQueue, cx: &mut Cx) {
        self.submit(io, head, guest, cx);
    }

    // Always inlined: the parts of a request stay in registers until they are stored.
    #[inline(always)]
    fn submit(&mut self, io: Io, head: u16, guest: &mut GuestQueue, cx: &mut Cx) {
        match &mut self.channel {
            Some(channel) if !self.closing_channel => channel.submit(io, cx),
            _ => answer(head, Answer::IoError, guest),
        }
        step(Step::Submitted);
    }

    /// Starts a request that is neither a read nor a write.
    #[inline(never)]
    fn start_other(&mut self, other: Other, head: u16, chain: &Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        match self.disk.parse_other(other, chain, head, &mut guest.sgs) {
            Ok(Parsed::Submit(io)) => self.submit_outlined(io, head, guest, cx),
            Ok(Parsed::Identify) => {
                let (well, written) = self.disk.write_id(chain, guest.sgs.memory());
                guest.mark_written(chain, written);
                guest.sgs.note(head, 1 + written);
                answer(head, well, guest);
            }
            Ok(Parsed::Answer(failed)) => answer(head, failed, guest),
            Err(Unanswerable) => guest.complete_unanswerable(head),
        }
    }

    /// Answers the requests that the disk has completed. Returns whether there were any.
    #[inline(always)]
    fn take_completions(&mut self, guest: &mut GuestQueue, cx: &mut Cx) -> bool {
        let Self { channel: Some(channel), completions, giving_up, .. } = self else { return false };
        let mut worked = false;
        channel.poll_each(cx, completions, |completion, _| {
            worked = true;
            complete(completion, *giving_up, guest);
        });
        worked | self.take_rest(guest)
    }

    /// The same for requests that ended in the block layer, without the disk's device.
    #[inline]
    fn take_rest(&mut self, guest: &mut GuestQueue) -> bool {
        let worked = !self.completions.is_empty();
        if worked {
            self.completions.drain(..).for_each(|completion| complete(completion, self.giving_up, guest));
        }
        worked
    }
}

/// Answers a request that the disk has completed, unless the request is to stay in flight for the queue's successor.
#[inline(always)]
fn complete(Completion { tag, status }: Completion, giving_up: bool, guest: &mut GuestQueue) {
    let head = tag.0 as u16;
    if status == Status::Aborted && giving_up {
        guest.sgs.end(head);
        return;
    }
    step(Step::Completed);
    finish(head, status.into(), guest);
}

/// Answers a request that was not sent to the disk.
#[cold]
fn answer(head: u16, answer: Answer, guest: &mut GuestQueue) {
    finish(head, answer, guest);
}

/// Completes a request with its answer.
#[inline(always)]
fn finish(head: u16, answer: Answer, guest: &mut GuestQueue) {
    // How much data a failed read has written is unknown.
    guest.answer(head, answer as u8, |most| if answer == Answer::Ok { most } else { 1 });
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let Self { guest, requests, .. } = self;
        let mut worked = guest.complete_unlogged(cx);
        worked |= cx.without_wakes(guest.id, |cx| {
            guest.take(cx, |guest, head, chain, cx| requests.start(head, chain, guest, cx))
        });
        worked |= requests.take_completions(guest, cx);
        if worked {
            guest.publish(cx);
        }
        guest.check_for_lost_memory();
        if guest.is_leaving() || requests.closing_channel {
            self.settle(cx);
        }
        worked
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.guest.promoted();
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        self.guest.park(true)
    }
}

#[cfg(test)]
mod tests;
