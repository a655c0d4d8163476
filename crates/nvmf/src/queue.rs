//! An I/O queue: a root that owns a connection, and has a channel of each namespace. Reactor context.
//!
//! A poll takes what has completed, starts what has waited for a buffer, takes what the host has sent, and sends the output: the
//! replies of a turn leave together. What a host makes a queue hold is bounded by the queue's entries, and the data of commands
//! by its share of the reactor's [`Pool`], or by the buffers of an RDMA connection.

mod commands;
mod copy;
mod disks;
mod ending;
mod fused;
mod link;
mod moving;
mod rdma;
mod reserve;
mod sealed;
mod tcp;

use crate::pool::{Pool, Share, Taken};
use crate::reservation::Asker;
use crate::status::RetryDelays;
use crate::traffic::Counts;
use aryk_bdev::{Completion, Descriptor, OpenError, OpenerQos};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::spec::status::Status as NvmeStatus;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::io::Rules;
use aryk_reactor::{Armed, Cx, Layer, Nanos, Root, RootId, ThreadId};
use commands::{Slot, Stage};
use disks::Disks;
use ending::Ending;
use fused::FirstHalf;
use futures_channel::oneshot;
pub(crate) use link::Carrier;
use link::Link;
pub(crate) use moving::{Arrival, Carried, Detached, StartFailure, Started};
use reserve::Drain;
pub(crate) use reserve::Loss;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
pub(crate) use tcp::TcpCarrier;

/// Bytes of data whose digests one poll computes for reads, and those of one more.
const DIGESTED_MAX: usize = 1 << 20;

/// A connection that becomes an I/O queue.
pub(crate) struct Connected {
    pub carrier: Carrier,
    pub entries: u16,
    /// How long the host has to send data that it was asked for, and to read a reply.
    pub patience: Nanos,
    /// Limits the lines about what hosts do.
    pub lines: Arc<LogLimit>,
    /// What the queue does is counted here.
    pub counts: Arc<Counts>,
    /// The limits of the host.
    pub qos: Arc<OpenerQos>,
    /// Whether the host waits before it tries commands again.
    pub retry_delays: Arc<RetryDelays>,
    /// The way to control, which executes the commands of reservations.
    pub asker: Asker,
    /// What a queue brings along that comes from another reactor.
    pub carried: Carried,
}

/// How a queue has ended on its reactor.
pub(crate) enum Ended {
    /// Its connection has ended.
    Closed,
    /// It goes on on another reactor.
    Left(Detached),
}

/// A namespace for a queue.
#[derive(Clone)]
pub(crate) struct Opened {
    pub nsid: u32,
    /// Its number among all namespaces of the target: a later one may have the same identifier.
    pub number: u64,
    pub rules: Rules,
    pub descriptor: Descriptor,
}

/// The root.
pub(crate) struct IoQueue {
    root: RootId,
    thread: ThreadId,
    link: Link,
    /// Entries of the queue.
    entries: u16,
    /// Those that a host has used, on a connection of TCP: idle queues are to be small.
    slots: Vec<Slot>,
    /// Commands that wait for a buffer.
    waiting: VecDeque<SlotId>,
    /// Commands that wait for the end of a move, each with whether its data is intact.
    held: VecDeque<(SlotId, bool)>,
    /// The command before the next one, if that is the first half of a fused operation.
    first_half: FirstHalf,
    patience: Nanos,
    /// When the queue looks whether its host keeps it waiting.
    look_at: Option<Nanos>,
    disks: Disks,
    pool: Rc<Pool>,
    share: Share,
    /// What the disks have completed and the queue has not taken yet.
    completions: Vec<Completion>,
    counts: Arc<Counts>,
    retry_delays: Arc<RetryDelays>,
    asker: Asker,
    /// Commands that control has.
    asked: u16,
    /// Commands that a reservation forbids, and that the disks still have.
    drains: Vec<Drain>,
    /// Connect has been answered; before that, nothing is read.
    has_begun: bool,
    /// No more input is read: the queue ends when its disks have completed what they have.
    is_closing: bool,
    /// The queue is about to close, and its host must learn why.
    ending: Option<Ending>,
    /// The queue goes to another reactor as soon as no command is under way.
    is_leaving: bool,
    ended: Option<oneshot::Sender<Ended>>,
    lines: Arc<LogLimit>,
}

impl Root for IoQueue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut has_worked = self.complete(cx);
        has_worked |= self.start_waiting(cx);
        has_worked |= self.receive(cx);
        has_worked |= self.send(cx);
        self.look_at_host(cx);
        self.go_on_ending(cx);
        self.finish(cx);
        self.leave_if_at_rest(cx);
        has_worked
    }

    fn park(&mut self, cx: &mut Cx) -> Armed {
        self.park_link(cx)
    }
}

impl IoQueue {
    fn new(
        connected: Connected,
        disks: Disks,
        ended: oneshot::Sender<Ended>,
        (root, thread): (RootId, ThreadId),
        cx: &mut Cx,
    ) -> io::Result<Self> {
        let Connected { carrier, entries, patience, lines, counts, retry_delays, asker, carried, qos: _ } =
            connected;
        let (link, pool) = Link::new(carrier, root, cx)?;
        let Carried { mut slots, held, first_half } = carried;
        slots.resize_with(link.slots(entries).max(slots.len()), Slot::free);
        Ok(Self {
            root,
            thread,
            slots,
            link,
            entries,
            waiting: VecDeque::new(),
            held,
            first_half,
            patience,
            look_at: None,
            disks,
            pool,
            share: Share::default(),
            completions: Vec::new(),
            counts,
            retry_delays,
            asker,
            asked: 0,
            drains: Vec::new(),
            has_begun: false,
            is_closing: false,
            ending: None,
            is_leaving: false,
            ended: Some(ended),
            lines,
        })
    }

    /// Answers Connect, whose slot is `id`, unless that has been done, and goes on with what the queue has brought.
    pub fn begin(&mut self, id: Option<SlotId>, disables_flow_control: bool, controller: u16, cx: &mut Cx) {
        if let Some(id) = id {
            self.link.connect(self.entries, disables_flow_control);
            self.link.complete(id, NvmeStatus::new(0), controller.into());
        }
        self.has_begun = true;
        self.execute_held(cx);
        cx.kick(self.root);
    }

    /// Adds a namespace, unless the queue has it.
    pub fn add(&mut self, opened: Opened, cx: &mut Cx) -> Result<(), OpenError> {
        self.disks.add(opened, self.root, cx)
    }

    /// A namespace comes as soon as its disk is ready for this reactor. Until then, the host may try its commands again.
    pub fn expect(&mut self, nsid: u32, number: u64) {
        self.disks.expect(nsid, number);
    }

    /// Has namespaces, named by identifier and number, follow other rules, as after a resize.
    pub fn update(&mut self, rules: &[(u32, u64, Rules)]) {
        for &(nsid, number, rules) in rules {
            if let Some(disk) = self.disks.get_mut(nsid, number) {
                disk.rules = rules;
            }
        }
    }

    /// Applies the limits that the host has now.
    pub fn apply_limits(&mut self, cx: &mut Cx) {
        self.disks.apply_limits(cx);
    }

    /// Removes a namespace: its commands are aborted, and later ones fail. `closed` is told when its channel is closed, and
    /// dropped if there is no such namespace.
    pub fn remove(&mut self, nsid: u32, number: u64, closed: oneshot::Sender<()>, cx: &mut Cx) {
        self.disks.remove(nsid, number, closed, cx);
        cx.wake(self.root);
    }

    /// Ends the queue at once.
    pub fn close(&mut self, cx: &mut Cx) {
        if !self.is_closing {
            self.is_closing = true;
            self.link.shut_down();
            self.disks.abort_all(cx);
        }
        cx.wake(self.root);
    }

    /// Takes what the host has sent.
    fn receive(&mut self, cx: &mut Cx) -> bool {
        match self.link {
            Link::Tcp(_) => self.receive_tcp(cx),
            Link::Rdma(_) => self.receive_rdma(cx),
        }
    }

    /// Sends the output, as far as it can leave now.
    fn send(&mut self, cx: &mut Cx) -> bool {
        match self.link {
            _ if self.has_sent_all() => false,
            Link::Tcp(_) => self.send_tcp(cx),
            Link::Rdma(_) => self.send_rdma(cx),
        }
    }

    /// Has the queue look at its host when it has waited for it since `since` for long.
    fn await_host(&mut self, since: Nanos, cx: &mut Cx) {
        if self.look_at.is_none() {
            let at = Nanos(since.0 + self.patience.0);
            self.look_at = Some(at);
            cx.wake_at(self.root, at);
        }
    }

    /// Ends the queue if its host has kept it waiting for too long: the buffers that it holds are those of other hosts, too.
    fn look_at_host(&mut self, cx: &mut Cx) {
        if self.look_at.is_none_or(|at| cx.now() < at) {
            return;
        }
        self.look_at = None;
        let requested = self.slots.iter().filter_map(|slot| match slot.stage {
            Stage::Requested { since, .. } => Some(since),
            _ => None,
        });
        let Some(since) = requested.chain(self.link.waiting_since()).min() else { return };
        if cx.now().0 >= since.0 + self.patience.0 {
            limited!(
                self.lines,
                warn,
                "a host neither sends data nor reads replies for long: its connection ends"
            );
            self.close(cx);
        } else {
            self.await_host(since, cx);
        }
    }

    /// Ends the queue, if it is closing, and neither its disks nor the kernel have something of it.
    fn finish(&mut self, cx: &mut Cx) {
        if !self.is_closing || self.disks.has_requests() || !self.completions.is_empty() {
            return;
        }
        if !self.link.is_at_rest() {
            return self.link.end(cx);
        }
        let Some(ended) = self.ended.take() else { return };
        self.pool.forget(self.root);
        cx.name_object(Layer::Frontend, self.root.trace_number(), None);
        self.link.unwatch(cx);
        for data in self.slots.iter_mut().filter_map(|slot| slot.data.take()) {
            if let Some(root) = self.pool.give_back(&mut self.share, data) {
                cx.wake(root);
            }
        }
        self.disks.close();
        let _ = ended.send(Ended::Closed);
        let (root, thread) = (self.root, self.thread);
        cx.local().defer(move |cx| {
            cx.remove_root(root);
            cx.remove_thread(thread);
        });
    }
}

/// Gives a buffer back, and wakes what may go on with it.
fn give_back(
    pool: &Pool,
    share: &mut Share,
    data: Taken,
    waiting: &VecDeque<SlotId>,
    own: RootId,
    cx: &mut Cx,
) {
    let own = (!waiting.is_empty()).then_some(own);
    pool.give_back(share, data).into_iter().chain(own).for_each(|root| cx.wake(root));
}

#[cfg(test)]
mod tests;
