//! The move of a queue to another reactor while its guest does I/O. Reactor context.
//!
//! First the disks prepare the other reactor, while the queue runs (`queues.rs`). Then the queue takes no more chains, and its
//! requests in flight complete. Then the ring, with its indexes, goes to the other reactor by message. The queue starts there as
//! any queue does: it opens channels, polls once without a kick, and signals its guest once. No request is in flight in between,
//! so a daemon that dies there leaves only chains that no queue has taken. A disk that does not complete its requests in time
//! cancels the move, and the queue goes on where it is. Other queues are not affected.

use crate::DeviceQueue;
use crate::guest_queue::MakeParts;
use aryk_bdev::OpenError;
use aryk_reactor::{Cx, Handle, Moving, RootId, RootRef, TimerId};
use futures_channel::oneshot;
use std::fmt;
use std::time::Duration;

/// The state of a queue between two reactors.
struct Detached<Q: DeviceQueue> {
    thread: Moving,
    parts: MakeParts,
    role: Q::Role,
}

/// Why a queue cannot start on a reactor.
enum StartFailure<Q> {
    /// A disk cannot be opened. The queue may start on another reactor.
    Open(Box<Q>, OpenError),
    /// The kick fd cannot be watched. The queue is lost.
    Lost(std::io::Error),
}

/// The result of a move. If the sender is dropped without a result, the queue is lost.
#[derive(Debug)]
pub enum Moved<Q> {
    /// The queue runs on the other reactor.
    There(RootRef<Q>),
    /// The queue runs on the reactor that it came from, because it could not start on the other one.
    Back(RootRef<Q>, String),
    /// The queue did not move: its requests took too long.
    TooSlow,
}

/// A move that has begun.
pub struct Move<Q: DeviceQueue> {
    to: Handle,
    disks: Q::Disks,
    deadline: TimerId,
    result: oneshot::Sender<Moved<Q>>,
    /// No request is in flight, and the move cannot be cancelled any more.
    has_transfer_begun: bool,
}

impl<Q: DeviceQueue> fmt::Debug for Move<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move")
            .field("to", &self.to)
            .field("has_transfer_begun", &self.has_transfer_begun)
            .finish_non_exhaustive()
    }
}

impl<Q: DeviceQueue> Move<Q> {
    /// Begins the move of the root `id` to the reactor `to`, where its channels are opened on `disks`. The move is cancelled if
    /// requests are in flight after `patience`. The receiver gets the result. The root keeps the move until then, and takes
    /// nothing from its ring.
    pub fn begin(
        id: RootId,
        (to, disks): (Handle, Q::Disks),
        patience: Duration,
        cx: &mut Cx,
    ) -> (Self, oneshot::Receiver<Moved<Q>>) {
        let (result, receiver) = oneshot::channel();
        let deadline = cx.call_at(cx.now().after(patience), move |cx| {
            if let Some(queue) = cx.root::<Q>(id) {
                cancel(&mut *queue.borrow_mut(), cx);
            }
        });
        cx.wake(id);
        (Self { to, disks, deadline, result, has_transfer_begun: false }, receiver)
    }

    /// Transfers the queue to the other reactor, later in this turn, when the root does not run. The caller has no request in
    /// flight and all its channels closed. Further calls have no effect.
    pub fn begin_transfer(&mut self, id: RootId, cx: &mut Cx) {
        if std::mem::replace(&mut self.has_transfer_begun, true) {
            return;
        }
        let is_cancelled = cx.cancel_timer(self.deadline);
        assert!(is_cancelled, "the deadline of a move cancels it, or has not passed");
        cx.call_at(cx.now(), move |cx| {
            let Some(mut queue) = cx.take_root::<Q>(id) else { return };
            let order = queue.order().take().expect("a transfer that has begun is not cancelled");
            assert!(order.has_transfer_begun, "this is the move that began");
            let (home, detached) = (cx.handle().clone(), pack(queue, cx));
            aryk_crash_point::step(aryk_crash_point::Step::Moving);
            let Self { to, disks, result, .. } = order;
            cx.post(&to, move |cx| land(detached, disks, Ok(home), result, cx));
        });
    }
}

fn cancel<Q: DeviceQueue>(queue: &mut Q, cx: &mut Cx) {
    let order = queue.order();
    if let Some(cancelled) = order.take_if(|order| !order.has_transfer_begun) {
        // The receiver may have been dropped.
        let _ = cancelled.result.send(Moved::TooSlow);
        queue.guest().resume(cx);
    }
}

/// Takes the queue off this reactor; it is not a root any more.
fn pack<Q: DeviceQueue>(queue: Q, cx: &mut Cx) -> Detached<Q> {
    let (guest, role) = queue.into_parts();
    let (thread, parts) = guest.pack(cx);
    Detached { thread, parts, role }
}

/// Starts a queue that comes from another reactor. `home` is the reactor that it may go back to, or the reason why it came back.
fn land<Q: DeviceQueue>(
    detached: Detached<Q>,
    disks: Q::Disks,
    home: Result<Handle, String>,
    result: oneshot::Sender<Moved<Q>>,
    cx: &mut Cx,
) {
    let Detached { thread, parts, role } = detached;
    let name = thread.name().to_owned();
    let thread = cx.adopt_thread(thread);
    let parts = parts(thread);
    let landed = cx.add_root(thread, &name, |id, cx| {
        let mut queue = Q::new(id, parts, role, cx).map_err(StartFailure::Lost)?;
        match queue.open(&disks, cx) {
            Ok(()) => Ok(queue),
            Err(why) => Err(StartFailure::Open(Box::new(queue), why)),
        }
    });
    let error = match (landed, home) {
        (Ok(root), Ok(_)) => return drop(result.send(Moved::There(root))),
        (Ok(root), Err(why)) => return drop(result.send(Moved::Back(root, why))),
        (Err(StartFailure::Open(mut queue, why)), Ok(home)) => {
            // The queue is not a root any more, but its thread is still on this reactor.
            queue.close();
            let detached = pack(*queue, cx);
            cx.post(&home, move |cx| land(detached, disks, Err(why.to_string()), result, cx));
            return;
        }
        (Err(StartFailure::Open(mut queue, why)), Err(_)) => {
            queue.close();
            queue.guest().unregister(cx);
            why.to_string()
        }
        (Err(StartFailure::Lost(error)), _) => error.to_string(),
    };
    cx.remove_thread(thread);
    tracing::error!(error, "a queue cannot go on after it has left its reactor");
}
