//! The move of a queue to another reactor while its guest does I/O. Reactor context; the errors in control context.
//!
//! First the disks prepare the other reactor, while the queue runs (`queues.rs`). Then the queue takes no more chains, and its
//! requests in flight complete. Then the ring, with its indexes, goes to the other reactor by message. The queue starts there as
//! any queue does: it opens channels, polls once without a kick, and signals its guest once. No request is in flight in between,
//! so a daemon that dies there leaves only chains that no queue has taken. A disk that does not complete its requests in time
//! cancels the move, and the queue goes on where it is. Other queues are not affected.

use crate::Line;
use aryk_reactor::{CoreSet, Cx, Handle, Root, RootId, RootRef, TimerId};
use futures_channel::oneshot;
use std::fmt;
use std::time::Duration;

/// The default time that a queue waits for its requests in flight before it moves. Its guest waits for the queue during that
/// time.
pub const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// The time that disks may take to prepare the other reactor. The queue runs where it is during that time.
pub(crate) const PREPARE_PATIENCE: Duration = Duration::from_secs(10);

/// Why a queue did not move.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// No reactor runs on these cores.
    #[error("no reactor runs on any of the cores {0}")]
    Cores(CoreSet),
    /// Requests in flight did not complete in time.
    #[error("requests in flight did not complete in time, so the queue stays on its core")]
    TooSlow,
    /// The disks did not prepare the other reactor in time.
    #[error(
        "its disks did not prepare the other core within {} s, so the queue stays on its core",
        PREPARE_PATIENCE.as_secs()
    )]
    NotReady,
    /// A disk could not be opened on the other reactor.
    #[error("the queue cannot run there: {0}")]
    Open(String),
    /// The queue is stopping or has stopped.
    #[error("the queue is stopping")]
    Ending,
}

/// A queue that can move.
pub trait Movable: Root + Sized {
    /// The state of a queue without its channels.
    type Detached: Send + 'static;
    /// The disks that its channels are opened on.
    type Disks: Send + 'static;

    /// The guest's side of the queue.
    fn line(&mut self) -> &mut Line;

    /// The move that has begun, if there is one.
    fn order(&mut self) -> &mut Option<Move<Self>>;

    /// Whether the queue may begin to move, as far as its requests go.
    fn is_free(&self) -> bool {
        true
    }

    /// Begins a move to another reactor, where channels are opened on those disks. The receiver gets the result. `None` if the
    /// queue is stopping.
    fn begin_move(
        &mut self,
        there: (Handle, Self::Disks),
        patience: Duration,
        cx: &mut Cx,
    ) -> Option<oneshot::Receiver<Moved<Self>>> {
        if !self.is_free() || !self.line().begin_move() {
            return None;
        }
        let (order, hears) = Move::begin(self.line().id, there, patience, cx);
        *self.order() = Some(order);
        Some(hears)
    }

    /// Takes the queue off this reactor; it is not a root any more.
    fn pack(self, cx: &mut Cx) -> Self::Detached;

    /// Starts the queue on this reactor.
    ///
    /// # Errors
    /// [`StartFailure`].
    fn unpack(
        detached: Self::Detached,
        disks: &Self::Disks,
        cx: &mut Cx,
    ) -> Result<RootRef<Self>, StartFailure<Self::Detached>>;
}

/// Why a queue cannot start on a reactor.
pub enum StartFailure<L> {
    /// A disk cannot be opened. The queue may start on another reactor.
    Open(Box<L>, String),
    /// The kick fd cannot be watched. The queue is lost.
    Lost(std::io::Error),
}

impl<L> fmt::Debug for StartFailure<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(_, why) => why.fmt(f),
            Self::Lost(error) => error.fmt(f),
        }
    }
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
pub struct Move<Q: Movable> {
    to: Handle,
    disks: Q::Disks,
    deadline: TimerId,
    told: oneshot::Sender<Moved<Q>>,
    /// No request is in flight, and the move cannot be cancelled any more.
    is_quiet: bool,
}

impl<Q: Movable> fmt::Debug for Move<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("to", &self.to).field("is_quiet", &self.is_quiet).finish_non_exhaustive()
    }
}

impl<Q: Movable> Move<Q> {
    /// Begins the move of the root `id` to the reactor `to`, where its channels are opened on `disks`. The move is cancelled if
    /// requests are in flight after `patience`. The receiver gets the result. The root keeps the move until then, and takes
    /// nothing from its ring.
    pub fn begin(
        id: RootId,
        (to, disks): (Handle, Q::Disks),
        patience: Duration,
        cx: &mut Cx,
    ) -> (Self, oneshot::Receiver<Moved<Q>>) {
        let (told, hears) = oneshot::channel();
        let deadline = cx.call_at(cx.now().after(patience), move |cx| {
            if let Some(queue) = cx.root::<Q>(id) {
                cancel(&mut *queue.borrow_mut(), cx);
            }
        });
        cx.wake(id);
        (Self { to, disks, deadline, told, is_quiet: false }, hears)
    }

    /// Nothing is in flight, and all channels are closed: in this turn, when the root does not run, it goes.
    pub fn is_quiet(&mut self, id: RootId, cx: &mut Cx) {
        if std::mem::replace(&mut self.is_quiet, true) {
            return;
        }
        cx.cancel_timer(self.deadline);
        cx.call_at(cx.now(), move |cx| {
            let Some(mut queue) = cx.take_root::<Q>(id) else { return };
            let order = queue.order().take().expect("a move that is quiet is not cancelled");
            let (home, detached) = (cx.handle().clone(), queue.pack(cx));
            aryk_crash_point::step(aryk_crash_point::Step::Moving);
            let Self { to, disks, told, .. } = order;
            cx.post(&to, move |cx| land(detached, disks, Ok(home), told, cx));
        });
    }
}

fn cancel<Q: Movable>(queue: &mut Q, cx: &mut Cx) {
    let order = queue.order();
    if let Some(given_up) = order.take_if(|order| !order.is_quiet) {
        // The receiver may have been dropped.
        let _ = given_up.told.send(Moved::TooSlow);
        queue.line().go_on(cx);
    }
}

/// Starts a queue that comes from another reactor. `home` is the reactor that it may go back to, or the reason why it came back.
fn land<Q: Movable>(
    detached: Q::Detached,
    disks: Q::Disks,
    home: Result<Handle, String>,
    told: oneshot::Sender<Moved<Q>>,
    cx: &mut Cx,
) {
    match (Q::unpack(detached, &disks, cx), home) {
        (Ok(root), Ok(_)) => drop(told.send(Moved::There(root))),
        (Ok(root), Err(why)) => drop(told.send(Moved::Back(root, why))),
        (Err(StartFailure::Open(detached, why)), Ok(home)) => {
            cx.post(&home, move |cx| land(*detached, disks, Err(why), told, cx));
        }
        (Err(error), _) => tracing::error!(?error, "a queue cannot go on after it has left its reactor"),
    }
}
