//! A queue moves to another reactor while its guest does I/O. Reactor context; the errors in control context.
//!
//! The disks prepare the other reactor first, while the queue runs on (`queues.rs`). Then it takes no more chains, and what it has in flight completes. Then the ring, which knows where it is, goes to the other reactor by message, and the queue
//! starts there as any queue does: on channels of its own, as if kicked, with one signal to its guest. No request is in flight in between, so that a
//! daemon that dies there leaves nothing behind but chains that nobody has taken. A disk that does not complete in time cancels the move, and the queue goes
//! on where it is; other queues notice nothing of all that.

use crate::Line;
use aryk_reactor::{CoreSet, Cx, Handle, Root, RootId, RootRef, TimerId};
use futures_channel::oneshot;
use std::fmt;
use std::time::Duration;

/// How long a queue that is to move waits for the requests that it has in flight, if nothing else is said. Meanwhile its guest waits for the queue.
pub const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// How long disks may take to prepare a reactor for a queue that is to move there. Meanwhile the queue runs on where it is.
pub(crate) const PREPARE_PATIENCE: Duration = Duration::from_secs(10);

/// Why a queue runs where it ran before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// No reactor is there.
    #[error("no reactor runs on any of the cores {0}")]
    Cores(CoreSet),
    /// Requests took too long.
    #[error("its requests have not completed in time: it stays where it is")]
    TooSlow,
    /// The disks have not prepared the other reactor in time.
    #[error("its disks are not ready there after {} s: it stays where it is", PREPARE_PATIENCE.as_secs())]
    NotReady,
    /// The disk cannot be opened on the other reactor.
    #[error("it cannot run there: {0}")]
    Open(String),
    /// It is being stopped, or has been.
    #[error("it is ending")]
    Ending,
}

/// A queue that can move.
pub trait Movable: Root + Sized {
    /// All of it but its channels.
    type Luggage: Send + 'static;
    /// What its channels are opened on.
    type Disks: Send + 'static;

    /// What it has of its guest.
    fn line(&mut self) -> &mut Line;

    /// Its move, if it has begun one.
    fn order(&mut self) -> &mut Option<Move<Self>>;

    /// Whether nothing but its line keeps it from moving.
    fn is_free(&self) -> bool {
        true
    }

    /// Begins to move to another reactor, on channels of those disks, and gives who hears of the end. `None` if it is ending.
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

    /// Leaves this reactor, where it is a root no more.
    fn pack(self, cx: &mut Cx) -> Self::Luggage;

    /// Starts on this reactor.
    ///
    /// # Errors
    /// [`Stranded`].
    fn unpack(
        luggage: Self::Luggage,
        disks: &Self::Disks,
        cx: &mut Cx,
    ) -> Result<RootRef<Self>, Stranded<Self::Luggage>>;
}

/// Why a queue cannot start on a reactor.
pub enum Stranded<L> {
    /// Its disk cannot be opened: it may go elsewhere.
    Shut(Box<L>, String),
    /// Its kicks cannot be watched.
    Lost(std::io::Error),
}

impl<L> fmt::Debug for Stranded<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shut(_, why) => why.fmt(f),
            Self::Lost(error) => error.fmt(f),
        }
    }
}

/// How a move has ended. If nobody says how, the queue is no more.
#[derive(Debug)]
pub enum Moved<Q> {
    /// It runs on the other reactor.
    There(RootRef<Q>),
    /// It runs on the reactor that it came from, for it cannot run on the other.
    Back(RootRef<Q>, String),
    /// It has never stopped: its requests took too long.
    TooSlow,
}

/// A move that has begun.
pub struct Move<Q: Movable> {
    to: Handle,
    disks: Q::Disks,
    deadline: TimerId,
    told: oneshot::Sender<Moved<Q>>,
    /// Nothing is in flight any more, and nothing can end it.
    is_quiet: bool,
}

impl<Q: Movable> fmt::Debug for Move<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move").field("to", &self.to).field("is_quiet", &self.is_quiet).finish_non_exhaustive()
    }
}

impl<Q: Movable> Move<Q> {
    /// The move of the root `id` to the reactor `to`, where its channels will be on `disks`, if all that is in flight completes within `patience`; and who hears
    /// of its end. The root keeps it until then, and takes nothing from its ring.
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
            let (home, luggage) = (cx.handle().clone(), queue.pack(cx));
            aryk_crash_point::step(aryk_crash_point::Step::Moving);
            let Self { to, disks, told, .. } = order;
            cx.post(&to, move |cx| land(luggage, disks, Ok(home), told, cx));
        });
    }
}

fn cancel<Q: Movable>(queue: &mut Q, cx: &mut Cx) {
    let order = queue.order();
    if let Some(given_up) = order.take_if(|order| !order.is_quiet) {
        // Whoever waited may have gone.
        let _ = given_up.told.send(Moved::TooSlow);
        queue.line().go_on(cx);
    }
}

/// Starts a queue that comes from another reactor. `home` is where it may go back to, or why it is back.
fn land<Q: Movable>(
    luggage: Q::Luggage,
    disks: Q::Disks,
    home: Result<Handle, String>,
    told: oneshot::Sender<Moved<Q>>,
    cx: &mut Cx,
) {
    match (Q::unpack(luggage, &disks, cx), home) {
        (Ok(root), Ok(_)) => drop(told.send(Moved::There(root))),
        (Ok(root), Err(why)) => drop(told.send(Moved::Back(root, why))),
        (Err(Stranded::Shut(luggage, why)), Ok(home)) => {
            cx.post(&home, move |cx| land(*luggage, disks, Err(why), told, cx));
        }
        (Err(error), _) => tracing::error!(?error, "a queue cannot go on after it has left its reactor"),
    }
}
