//! I/O queues: each begins on a reactor, may move to others, and ends. Control context.
//!
//! A queue finds the namespaces that there are when it begins, also after a move: changes that come while it is on no reactor do
//! not reach it, but it compares what it has with what there is before it executes a command.

use super::{Begun, Connection, End, Link};
use crate::association::{Beginning, Live, LiveQueue, Place, QueueRef, Way};
use crate::queue::{Arrival, Carried, Connected, Detached, Ended, IoQueue, Opened, StartFailure, Started};
use crate::reservation::{Asker, OfHost};
use crate::target::{Inner, Target};
use aryk_bdev::OpenError;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::command::Connect;
use aryk_nvme_fabrics::connect::ConnectData;
use aryk_reactor::{
    CoreSet, Cx, Gone, Handle, Hold, MOVE_PATIENCE, MoveError, Nanos, Order, PREPARE_PATIENCE,
};
use futures_channel::oneshot;
use std::collections::BTreeSet;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::spawn_local;
use tokio::time::timeout;

/// An order to a queue, and where its result goes.
pub(crate) type Ordered = (Order, oneshot::Sender<Result<(), MoveError>>);

/// Moves an I/O queue to a reactor, and waits for its end.
pub(super) async fn serve(
    inner: &Rc<Inner>,
    mut connection: Connection,
    way: Way,
    begun: Begun,
) -> Result<(), End> {
    let Begun { connect, data, start, _connected } = begun;
    let (id, _) = start.split();
    let place = match inner.admit_io(&connect, &data, way) {
        Ok(place) => place,
        Err(refusal) => {
            let end = connection.refuse(id, refusal).await;
            return Err(connection.end_after(end).await);
        }
    };
    if let Some(slot) = id.and_then(|id| connection.slots.get_mut(&id)) {
        slot.data.clear();
    }
    let (orders, ordered) = unbounded_channel();
    let queue = Queue { inner, way, place: &place, connect: &connect, data: &data, orders };
    let ended = queue.run(connection, id, ordered).await;
    inner.queue_ended(&place, connect.qid);
    ended
}

/// A queue of a host, wherever it runs.
struct Queue<'a> {
    inner: &'a Rc<Inner>,
    way: Way,
    place: &'a Place,
    connect: &'a Connect,
    data: &'a ConnectData,
    orders: UnboundedSender<Ordered>,
}

/// A queue on a reactor.
struct Running {
    root: QueueRef,
    ended: oneshot::Receiver<Ended>,
}

/// The namespaces of a queue that is about to be on a reactor.
struct Prepared {
    /// A call that removes a namespace waits until the queue has learned of that.
    beginning: Beginning,
    /// The namespaces that there were, by identifier and number.
    first: Vec<(u32, u64)>,
    /// Those that it opens.
    opened: Vec<Opened>,
}

/// Where a queue is after an order, unless it has ended; and what has become of the order.
type Went = (Option<Running>, Result<(), MoveError>);

impl Queue<'_> {
    /// Runs the queue until it ends. Connect has the slot `id`, if it has not been answered.
    async fn run(
        &self,
        connection: Connection,
        id: Option<SlotId>,
        mut ordered: UnboundedReceiver<Ordered>,
    ) -> Result<(), End> {
        let inner = self.inner;
        let Connection { mut link, slots } = connection;
        drop(slots);
        let cores = inner.cores_of(self.place, self.way.listener);
        let reactors = inner.env.reactors();
        let least = |cores| reactors.find_least_loaded(cores);
        let hold = least(cores.as_ref()).or_else(|| least(None)).ok_or(End::Refused)?;
        let shared = |live: &mut Live| (Arc::clone(&live.qos), Arc::clone(&live.retry_delays));
        let (qos, retry_delays) = inner.with_live(self.place, shared).ok_or(End::Refused)?;
        let prepared = tokio::select! {
            prepared = Box::pin(self.prepare(&hold)) => prepared.ok_or(End::Refused)?,
            end = link.take_messages() => return Err(end),
        };
        let connected = Connected {
            carrier: match link {
                Link::Tcp(tcp) => tcp.into_carrier(inner.state.borrow().limits.zero_copy)?,
                Link::Rdma(rdma) => rdma.into_carrier(),
            },
            entries: self.connect.sqsize + 1,
            patience: Nanos(inner.state.borrow().limits.patience.as_nanos() as u64),
            lines: Arc::clone(&inner.lines),
            counts: Arc::default(),
            qos,
            retry_delays,
            asker: Asker {
                host: OfHost { place: self.place.clone(), id: self.data.host_id },
                qid: self.connect.qid,
                asked: inner.asked.clone(),
            },
            carried: Carried::default(),
        };
        let name = format!("{} queue {}", self.data.host, self.connect.qid);
        let cores = cores.unwrap_or_else(CoreSet::allowed);
        let started = self.start(&hold, prepared, Arrival::New(name, cores, Box::new(connected)), id);
        let mut running = match Box::pin(started).await {
            Ok(Some(running)) => running,
            Ok(None) => return Ok(()),
            Err(failure) => return Err(failure.into_error().into()),
        };
        // The reactor may end when the queue has left it.
        drop(hold);
        loop {
            let (order, done) = tokio::select! {
                _ = &mut running.ended => return Ok(()),
                Some(order) = ordered.recv() => order,
            };
            let (went, result) = Box::pin(self.follow(order, running)).await;
            // The caller that has given the order may be gone.
            let _ = done.send(result);
            match went {
                Some(somewhere) => running = somewhere,
                None => return Ok(()),
            }
        }
    }

    /// The namespaces that a queue of the host has now.
    fn namespaces(&self) -> Vec<Opened> {
        let state = self.inner.state.borrow();
        let Some(subsystem) = state.subsystems.get(&self.place.subsystem) else { return Vec::new() };
        subsystem.opened((&self.data.host, &self.data.host_id), self.way.listener, &state.limits)
    }

    /// Has the disks of the namespaces prepare the first reactor of the queue. `None`: the controller ends.
    async fn prepare(&self, there: &Handle) -> Option<Prepared> {
        let Prepared { beginning, first, opened } = self.prepared();
        let prepared = async {
            let mut ready = Vec::new();
            for opened in opened {
                match self.prepare_one(there, &opened).await {
                    Ok(()) => ready.push(opened),
                    // A disk that is being removed, or one that the host finds when it connects again.
                    Err(error) => {
                        let nsid = opened.nsid;
                        tracing::warn!(nsid, %error, "a queue of a host cannot open a namespace");
                    }
                }
            }
            ready
        };
        tokio::select! {
            opened = prepared => Some(Prepared { beginning, first, opened }),
            () = self.inner.until_ending(self.place) => None,
        }
    }

    /// Has the disks of the namespaces prepare a reactor to which the queue moves, while it runs elsewhere. Fails if one of them
    /// cannot.
    async fn prepare_move(&self, there: &Handle) -> Result<Prepared, MoveError> {
        let mut asked = BTreeSet::new();
        let prepared = async {
            loop {
                let all = self.namespaces();
                let Some(next) = all.iter().find(|opened| !asked.contains(&opened.number)) else {
                    return Ok(self.prepared());
                };
                asked.insert(next.number);
                match self.prepare_one(there, next).await {
                    Ok(()) | Err(OpenError::Removed) => {}
                    Err(why) => return Err(MoveError::Open(why.to_string())),
                }
            }
        };
        tokio::select! {
            prepared = timeout(PREPARE_PATIENCE, prepared) => prepared.unwrap_or(Err(MoveError::NotReady)),
            () = self.inner.until_ending(self.place) => Err(MoveError::Ending),
        }
    }

    /// The queue opens all namespaces that there are now.
    fn prepared(&self) -> Prepared {
        let beginning = self.inner.begin_queue(self.place);
        let opened = self.namespaces();
        let first = opened.iter().map(|opened| (opened.nsid, opened.number)).collect();
        Prepared { beginning, first, opened }
    }

    /// Has the disk of a namespace prepare a reactor.
    async fn prepare_one(&self, there: &Handle, opened: &Opened) -> Result<(), OpenError> {
        tokio::select! {
            is_ready = opened.descriptor.prepare(there) => is_ready,
            () = self.inner.until_gone(self.place, opened.nsid, opened.number) => Err(OpenError::Removed),
        }
    }

    /// Starts the queue on a reactor. `None`: it has ended.
    async fn start(
        &self,
        there: &Handle,
        prepared: Prepared,
        arrival: Arrival,
        id: Option<SlotId>,
    ) -> Result<Option<Running>, StartFailure> {
        let Prepared { beginning, first, opened } = prepared;
        let is_new = matches!(arrival, Arrival::New(..));
        let (sender, mut ended) = oneshot::channel();
        let started = there.call(move |cx| IoQueue::arrive(arrival, opened, sender, cx)).await;
        // The caller holds the reactor.
        let Started { root, thread, counts } = started.map_err(|Gone| StartFailure::Lost(lost()))??;
        // The host has no reply to Connect yet, or none to the commands that were held back: what ends its controller or removes
        // a namespace finds the queue before its next command.
        let orders = self.orders.clone();
        let live = LiveQueue { root: root.clone(), counts, thread, orders, proof: None };
        if !self.inner.queue_began(self.place, self.connect.qid, live) {
            let _ = root.call(|queue, cx| queue.close(cx)).await;
            let _ = ended.await;
            return Ok(None);
        }
        let (disables_flow_control, controller) = (self.connect.disables_flow_control, self.place.controller);
        let begin = async {
            self.reconcile(&root, &first, beginning, is_new).await;
            let begin = move |queue: &mut IoQueue, cx: &mut Cx| {
                queue.begin(id, disables_flow_control, controller, cx);
            };
            let _ = root.call(begin).await;
        };
        tokio::select! {
            _ = &mut ended => return Ok(None),
            () = begin => {}
        }
        Ok(Some(Running { root, ended }))
    }

    /// Adds and removes namespaces of a queue that has just begun with the namespaces `first`, as they were added and removed
    /// meanwhile, and applies the limits of its host. The target knows the queue from then on, and updates it at each later
    /// change.
    ///
    /// A host waits for the first reactor of its queue until all is there. Later, only namespaces that are ready at once are
    /// there for the commands that wait; the others follow.
    async fn reconcile(&self, root: &QueueRef, first: &[(u32, u64)], beginning: Beginning, is_new: bool) {
        let (kept, added): (Vec<_>, Vec<_>) = (self.namespaces().into_iter())
            .partition(|opened| first.iter().any(|(_, number)| *number == opened.number));
        let is_gone = |number: u64| kept.iter().all(|opened| opened.number != number);
        let gone: Vec<_> = first.iter().copied().filter(|(_, number)| is_gone(*number)).collect();
        let rules: Vec<_> = kept.iter().map(|of| (of.nsid, of.number, of.rules)).collect();
        let (closing, gone): (Vec<_>, Vec<_>) = (gone.into_iter())
            .map(|of| {
                let (closed, is_closed) = oneshot::channel();
                (is_closed, (of, closed))
            })
            .unzip();
        let follow = move |queue: &mut IoQueue, cx: &mut Cx| {
            gone.into_iter().for_each(|((nsid, number), closed)| queue.remove(nsid, number, closed, cx));
            queue.update(&rules);
            queue.apply_limits(cx);
        };
        let _ = root.call(follow).await;
        for is_closed in closing {
            // The sender is dropped if the queue has not opened it.
            let _ = is_closed.await;
        }
        drop(beginning);
        for opened in added {
            let (nsid, number) = (opened.nsid, opened.number);
            let prepared = self.prepare_one(root.handle(), &opened);
            let is_ready = match is_new {
                true => prepared.await.is_ok(),
                false => matches!(timeout(MOVE_PATIENCE, prepared).await, Ok(Ok(()))),
            };
            if !is_ready {
                // The host has seen the namespace, and may use it already.
                if self.namespaces().iter().any(|opened| opened.number == number) {
                    let _ = root.call(move |queue, _| queue.expect(nsid, number)).await;
                }
                let (target, subsystem) = (Target(Rc::clone(self.inner)), self.place.subsystem.clone());
                let host = self.data.host.clone();
                let of_host = move |live: &Live| live.controller.association().host == host;
                drop(spawn_local(async move { target.give(&subsystem, nsid, number, of_host).await }));
            } else if let Some(opened) = self.namespaces().into_iter().find(|opened| opened.number == number)
            {
                let _ = root.call(move |queue, cx| queue.add(opened, cx)).await;
            }
        }
    }

    async fn follow(&self, order: Order, running: Running) -> Went {
        match order {
            Order::Stay(cores) => self.stay_on(cores, running).await,
            Order::Move(to, patience) => self.go(&to, patience, running).await,
        }
    }

    async fn stay_on(&self, cores: CoreSet, mut running: Running) -> Went {
        if !cores.contains(running.root.handle().core()) {
            let Some(to) = self.inner.env.reactors().find_least_loaded(Some(&cores)) else {
                return (Some(running), Err(MoveError::Cores(cores)));
            };
            match self.go(&to, MOVE_PATIENCE, running).await {
                (Some(moved), Ok(())) => running = moved,
                failed => return failed,
            }
        }
        let set = running.root.call(move |queue, cx| queue.set_cores(cores, cx)).await;
        (Some(running), set.map_err(|Gone| MoveError::Ending))
    }

    async fn go(&self, to: &Hold, patience: Duration, mut running: Running) -> Went {
        let home = running.root.handle().clone();
        if home == **to {
            return (Some(running), Ok(()));
        }
        // The queue may come back.
        let Some(home) = self.inner.env.reactors().hold(&home) else {
            return (Some(running), Err(MoveError::Ending));
        };
        // The queue runs while its disks prepare the other reactor.
        let prepared = tokio::select! {
            prepared = self.prepare_move(to) => prepared,
            _ = &mut running.ended => return (None, Err(MoveError::Ending)),
        };
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(why) => return (Some(running), Err(why)),
        };
        let detached = match running.leave(patience).await {
            Ok(detached) => detached,
            Err(stays) => return stays,
        };
        let (detached, why) = match self.start(to, prepared, Arrival::There(detached), None).await {
            Ok(Some(running)) => return (Some(running), Ok(())),
            Ok(None) => return (None, Err(MoveError::Ending)),
            Err(StartFailure::Open(detached, why)) => (detached, MoveError::Open(why.to_string())),
            Err(failure) => return self.lose(failure),
        };
        // Its disks have prepared this reactor before.
        let prepared = self.prepared();
        match self.start(&home, prepared, Arrival::Back(detached), None).await {
            Ok(Some(running)) => (Some(running), Err(why)),
            Ok(None) => (None, Err(MoveError::Ending)),
            Err(failure) => self.lose(failure),
        }
    }

    /// The queue can go on nowhere: its connection ends, and the host may connect again.
    fn lose(&self, failure: StartFailure) -> Went {
        let (error, peer) = (failure.into_error(), self.way.peer);
        tracing::warn!(%peer, %error, "a queue of a host cannot go on after it has left its reactor: its connection ends");
        (None, Err(MoveError::Ending))
    }
}

impl Running {
    /// Has the queue leave its reactor. Fails if it stays, or has ended.
    async fn leave(mut self, patience: Duration) -> Result<Detached, Went> {
        if self.root.call(|queue, cx| queue.leave(cx)).await.is_err() {
            return Err((None, Err(MoveError::Ending)));
        }
        let left = match timeout(patience, &mut self.ended).await {
            Ok(left) => left,
            Err(_) => match self.root.call(|queue, cx| queue.stay(cx)).await {
                Ok(()) => return Err((Some(self), Err(MoveError::TooSlow))),
                // It has left, or has ended, just now.
                Err(Gone) => self.ended.await,
            },
        };
        match left {
            Ok(Ended::Left(detached)) => Ok(detached),
            Ok(Ended::Closed) | Err(_) => Err((None, Err(MoveError::Ending))),
        }
    }
}

fn lost() -> io::Error {
    io::Error::other("its reactor has ended")
}
