//! What the queues of all kinds of devices have in common: their start on a reactor, their stop, and their move to another one.
//! Reactor context.

use crate::guest_queue::STOP_GRACE;
use crate::moving::Moved;
use crate::{GuestQueue, Move, Parts, StartError};
use aryk_bdev::OpenError;
use aryk_dma::Mapping;
use aryk_reactor::{Cx, Handle, Root, RootId, RootRef};
use aryk_virtqueue::private_len;
use futures_channel::oneshot;
use std::sync::Arc;
use std::time::Duration;

/// A queue of a device: the guest's side, and a role.
pub trait DeviceQueue: Root + Sized {
    /// The task of the queue, without its channels. It moves with the queue.
    type Role: Send + 'static;
    /// The disks that its channels are opened on.
    type Disks: Send + 'static;
    /// What a queue that stops leaves to its successor, apart from its ring.
    type Left: Send + 'static;

    /// A queue without channels on the calling reactor.
    ///
    /// # Errors
    /// The kick fd cannot be watched.
    fn new(id: RootId, parts: Parts, role: Self::Role, cx: &mut Cx) -> std::io::Result<Self>;

    /// Opens a channel on each disk that the role uses. A disk that is being removed counts as gone.
    ///
    /// # Errors
    /// A disk cannot be opened. Other channels may be open.
    fn open(&mut self, disks: &Self::Disks, cx: &mut Cx) -> Result<(), OpenError>;

    /// Closes all channels. No request is in flight.
    fn close(&mut self);

    /// The guest's side of the queue.
    fn guest(&mut self) -> &mut GuestQueue;

    /// The move that has begun, if there is one.
    fn order(&mut self) -> &mut Option<Move<Self>>;

    /// The guest's side and the role of a queue without channels.
    fn into_parts(self) -> (GuestQueue, Self::Role);

    /// Whether the queue may begin to move, as far as its requests go.
    fn is_free(&self) -> bool {
        true
    }

    /// Asks the disks to abort the requests in flight, since the queue stops. Requests that are aborted stay in flight for the
    /// successor if an in-flight region records them, and fail otherwise.
    fn give_up(&mut self, cx: &mut Cx);

    /// As [`GuestQueue::leave_removed_memory`].
    fn leave_removed_memory(&mut self, cx: &mut Cx) -> bool;

    /// Whether the memory of all requests in flight may be replaced: each was aborted, and its disk allows that.
    fn is_revocable(&self) -> bool;

    /// Leaves a front-end that has gone, as [`GuestQueue::leave_front_end`], if the memory of the requests in flight may be
    /// replaced. Returns the number of these requests; `None` if nothing has changed. The queue is stopping.
    fn leave_front_end(&mut self, cx: &mut Cx) -> Option<u32> {
        if !self.is_revocable() {
            return None;
        }
        let guest = self.guest();
        let requests = guest.sgs.in_use();
        // The kernel allocates the pages when the last requests are returned.
        let private = Mapping::anonymous(private_len(guest.ring.size())).ok()?;
        guest.leave_front_end(&Arc::new(private), cx).ok()?;
        Some(requests)
    }

    /// Takes what the queue leaves to its successor.
    fn take_left(&mut self) -> Self::Left;

    /// A queue on the calling reactor, with its channels.
    ///
    /// # Errors
    /// A disk cannot be opened, or the kick fd cannot be watched.
    fn begin(
        id: RootId,
        parts: Parts,
        role: Self::Role,
        disks: &Self::Disks,
        cx: &mut Cx,
    ) -> Result<Self, StartError> {
        let mut queue = Self::new(id, parts, role, cx)?;
        if let Err(error) = queue.open(disks, cx) {
            queue.close();
            queue.guest().unregister(cx);
            return Err(error.into());
        }
        Ok(queue)
    }

    /// Takes no more requests; when the last one has completed, the queue is gone, and the receiver gets the base at which a
    /// successor goes on. After [`STOP_GRACE`] the queue gives up.
    fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        let (stopped, id) = (self.guest().stop(cx), self.guest().id);
        cx.call_at(cx.now().after(STOP_GRACE), move |cx| {
            if let Some(queue) = cx.root::<Self>(id) {
                queue.borrow_mut().give_up(cx);
            }
        });
        stopped
    }

    /// Begins a move to another reactor, where channels are opened on those disks. The receiver gets the result. `None` if the
    /// queue is stopping.
    fn begin_move(
        &mut self,
        there: (Handle, Self::Disks),
        patience: Duration,
        cx: &mut Cx,
    ) -> Option<oneshot::Receiver<Moved<Self>>> {
        if !self.is_free() || !self.guest().begin_move() {
            return None;
        }
        let (order, receiver) = Move::begin(self.guest().id, there, patience, cx);
        let before = self.order().replace(order);
        assert!(before.is_none(), "a queue has one move at a time");
        Some(receiver)
    }
}

/// A running queue.
pub(crate) struct Running<Q> {
    pub root: RootRef<Q>,
    /// The number of its thread.
    pub thread: u64,
}
