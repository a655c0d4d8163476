//! The move of a queue to another reactor while its host uses it. Reactor context.
//!
//! A queue that is to leave holds new commands back, and goes on with those that it has. When its disks have none and the host
//! has taken all replies, it has the kernel end its receive; what arrives until then is held back, too. Then the connection and
//! the commands held back go to the other reactor by way of control, which starts a queue there. A host that keeps the queue
//! waiting, or a disk, keeps it here: then control takes the order back.

use super::commands::{Slot, Stage};
use super::disks::Disks;
use super::fused::FirstHalf;
use super::link::{Carrier, Link};
use super::{Connected, Ended, IoQueue, Opened};
use crate::traffic::Counts;
use aryk_bdev::OpenError;
use aryk_nvme_fabrics::SlotId;
use aryk_reactor::{CoreSet, Cx, Layer, Moving, RootRef};
use futures_channel::oneshot;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// What a queue carries along to another reactor: its commands, which no disk has.
#[derive(Default)]
pub(crate) struct Carried {
    /// As many as the queue has; none before its first reactor.
    pub(super) slots: Vec<Slot>,
    /// Those that wait for the end of a move, in their order, each with whether its data is intact.
    pub(super) held: VecDeque<(SlotId, bool)>,
    pub(super) first_half: FirstHalf,
}

/// A queue between two reactors.
pub(crate) struct Detached {
    thread: Moving,
    connected: Box<Connected>,
}

/// A queue that comes to a reactor.
pub(crate) enum Arrival {
    /// Its first one. It gets a thread of this name, which may run on these cores.
    New(String, CoreSet, Box<Connected>),
    /// Another one, unless a disk cannot be opened there.
    There(Detached),
    /// The one that it has left.
    Back(Detached),
}

/// A queue that has started on a reactor.
pub(crate) struct Started {
    pub root: RootRef<IoQueue>,
    /// The number of its thread.
    pub thread: u64,
    pub counts: Arc<Counts>,
}

/// Why a queue has not started on a reactor.
pub(crate) enum StartFailure {
    /// A disk cannot be opened there. The queue comes from another reactor, and may go back.
    Open(Detached, OpenError),
    /// Its connection cannot be watched. The queue is lost.
    Lost(io::Error),
}

/// As [`StartFailure`], while the reactor has the thread.
enum Failure {
    Open(Box<Connected>, OpenError),
    Lost(io::Error),
}

impl StartFailure {
    pub fn into_error(self) -> io::Error {
        match self {
            Self::Open(_, error) => io::Error::other(error),
            Self::Lost(error) => error,
        }
    }
}

impl IoQueue {
    /// Starts a queue on this reactor. Nothing is read, and no command is executed, before [`IoQueue::begin`].
    pub fn arrive(
        arrival: Arrival,
        namespaces: Vec<Opened>,
        ended: oneshot::Sender<Ended>,
        cx: &mut Cx,
    ) -> Result<Started, StartFailure> {
        let may_refuse = matches!(arrival, Arrival::There(_));
        let (name, thread, connected) = match arrival {
            Arrival::New(name, cores, connected) => {
                let thread = cx.add_thread(name.clone(), cores);
                (name, thread, connected)
            }
            Arrival::There(Detached { thread, connected })
            | Arrival::Back(Detached { thread, connected }) => {
                (thread.name().to_owned(), cx.adopt_thread(thread), connected)
            }
        };
        let counts = Arc::clone(&connected.counts);
        let made = cx.add_root(thread, &name, |root, cx| {
            let mut disks = Disks::new(Arc::clone(&connected.qos));
            for namespace in namespaces {
                let nsid = namespace.nsid;
                match disks.add(namespace, root, cx) {
                    Ok(()) => {}
                    Err(error) if may_refuse && error != OpenError::Removed => {
                        return Err(Failure::Open(connected, error));
                    }
                    // The disk is being removed, or cannot be opened anywhere: its commands fail.
                    Err(error) => {
                        tracing::warn!(nsid, %error, "a queue of a host cannot open a namespace");
                    }
                }
            }
            Self::new(*connected, disks, ended, (root, thread), cx).map_err(Failure::Lost)
        });
        match made {
            Ok(root) => {
                cx.name_object(Layer::Frontend, root.id().trace_number(), Some(&name));
                Ok(Started { root, thread: cx.thread_number(thread), counts })
            }
            Err(Failure::Open(connected, error)) => {
                let detached = Detached { thread: cx.release_thread(thread), connected };
                Err(StartFailure::Open(detached, error))
            }
            Err(Failure::Lost(error)) => {
                cx.remove_thread(thread);
                Err(StartFailure::Lost(error))
            }
        }
    }

    /// Sets the cores on which the queue may run.
    pub fn set_cores(&self, cores: CoreSet, cx: &mut Cx) {
        cx.set_thread_cores(self.thread, cores);
    }

    /// Has the queue leave its reactor when it has no command that is under way.
    pub fn leave(&mut self, cx: &mut Cx) {
        self.is_leaving = true;
        cx.wake(self.root);
    }

    /// Has the queue stay, if it has not left.
    pub fn stay(&mut self, cx: &mut Cx) {
        self.is_leaving = false;
        self.execute_held(cx);
        cx.wake(self.root);
    }

    /// Executes what was held back.
    pub(super) fn execute_held(&mut self, cx: &mut Cx) {
        while self.takes_input()
            && let Some((id, is_intact)) = self.held.pop_front()
        {
            self.execute(id, is_intact, cx);
        }
    }

    /// Whether the queue is to leave, and nothing keeps it.
    fn may_leave(&mut self) -> bool {
        self.is_ready_to_leave() && self.link.is_at_rest()
    }

    /// Whether the queue is to leave, and neither its disks nor its host keep it.
    pub(super) fn is_ready_to_leave(&mut self) -> bool {
        let is_at_rest = |slot: &Slot| matches!(slot.stage, Stage::Idle);
        self.is_leaving
            && !self.is_closing
            && self.ending.is_none()
            && self.completions.is_empty()
            && self.drains.is_empty()
            && !self.disks.has_requests()
            && !self.link.has_output()
            && self.share.is_empty()
            && self.slots.iter().all(is_at_rest)
    }

    /// Leaves the reactor later in this turn, when the root does not run, if nothing keeps the queue.
    pub(super) fn leave_if_at_rest(&mut self, cx: &mut Cx) {
        if !self.is_ready_to_leave() {
            return;
        }
        if !self.link.is_at_rest() {
            return self.link.stop(cx);
        }
        let root = self.root;
        cx.call_at(cx.now(), move |cx| {
            let Some(queue) = cx.root::<Self>(root) else { return };
            let may_leave = queue.borrow_mut().may_leave();
            drop(queue);
            if may_leave && let Some(queue) = cx.take_root::<Self>(root) {
                queue.detach(cx);
            }
        });
    }

    fn detach(self, cx: &mut Cx) {
        let Self { root, thread, mut link, mut disks, pool, ended, .. } = self;
        let Self { entries, patience, lines, counts, retry_delays, asker, slots, held, first_half, .. } =
            self;
        pool.forget(root);
        cx.name_object(Layer::Frontend, root.trace_number(), None);
        link.unwatch(cx);
        let qos = disks.close();
        let carrier = match link {
            Link::Tcp(tcp) => Carrier::Tcp(tcp.into_carrier()),
            Link::Rdma(rdma) => {
                let pool = Rc::into_inner(pool).expect("the pool of an RDMA connection is its queue's");
                Carrier::Rdma { wire: rdma.wire, buffers: pool.into_buffers() }
            }
        };
        let carried = Carried { slots, held, first_half };
        let connected =
            Connected { carrier, entries, patience, lines, counts, qos, retry_delays, asker, carried };
        let detached = Detached { thread: cx.release_thread(thread), connected: Box::new(connected) };
        if let Some(ended) = ended {
            // Nobody waits for the queue if the target has ended: its connection does, too.
            let _ = ended.send(Ended::Left(detached));
        }
    }
}
