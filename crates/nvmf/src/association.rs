//! The controllers of hosts: how they begin, and how they end after their I/O queues. Control context.

use crate::address::Address;
use crate::authentication::Authentication;
use crate::connection::Ordered;
use crate::queue::IoQueue;
use crate::status::RetryDelays;
use crate::subsystem::State;
use crate::target::Inner;
use crate::traffic::{Counts, Traffic};
use aryk_bdev::OpenerQos;
use aryk_nvme_fabrics::association::Admission;
use aryk_nvme_fabrics::chap::{Parties, Secrets};
use aryk_nvme_fabrics::command::Connect;
use aryk_nvme_fabrics::connect::{ConnectData, InvalidParameter, Refusal};
use aryk_nvme_fabrics::controller::Controller;
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::status;
use aryk_reactor::{CoreSet, MoveError, Order, RootRef};
use futures_channel::oneshot;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

pub(crate) type QueueRef = RootRef<IoQueue>;

/// An I/O queue on a reactor.
pub(crate) struct LiveQueue {
    pub root: QueueRef,
    pub counts: Arc<Counts>,
    /// The number of its thread.
    pub thread: u64,
    /// Where it takes orders to run elsewhere.
    pub orders: UnboundedSender<Ordered>,
    /// The authentication that its host has begun, while no thread computes.
    pub proof: Option<Authentication>,
}

/// The controller of a host.
pub(crate) struct Live {
    pub controller: Controller,
    /// How the host reaches the target.
    pub way: Way,
    /// I/O queues on reactors.
    pub queues: BTreeMap<u16, LiveQueue>,
    /// How much the host may transfer.
    pub qos: Arc<OpenerQos>,
    /// Whether the host waits before it tries commands again.
    pub retry_delays: Arc<RetryDelays>,
    /// What queues have done that have ended.
    pub past: Traffic,
    /// Told when the controller has something for the admin queue, or is to end.
    pub news: Rc<Notify>,
    pub is_ending: bool,
}

impl Live {
    /// What was done for the host.
    pub fn traffic(&self) -> Traffic {
        let mut all = self.past.clone();
        self.queues.values().for_each(|queue| all += queue.counts.get());
        all
    }

    /// Has the admin queue end the controller.
    pub fn end(&mut self) {
        self.is_ending = true;
        self.news.notify_one();
    }
}

/// Which controller a queue belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub subsystem: Nqn,
    pub controller: u16,
}

/// How a host reaches the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub listener: Address,
    /// The host's address.
    pub peer: SocketAddr,
    /// The address at which the host was accepted.
    pub local: SocketAddr,
}

/// The place of a host that must authenticate.
pub(crate) struct Reserved {
    inner: Rc<Inner>,
    pub place: Place,
    is_admin: bool,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.is_admin
            && let Some(subsystem) = self.inner.state.borrow_mut().subsystem(&self.place.subsystem)
        {
            subsystem.associations.release(self.place.controller);
        }
    }
}

/// An I/O queue that begins, until it is dropped.
pub(crate) struct Beginning {
    inner: Rc<Inner>,
    subsystem: Nqn,
    number: u64,
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if let Some(subsystem) = self.inner.state.borrow_mut().subsystem(&self.subsystem) {
            subsystem.beginning.remove(&self.number);
            subsystem.changed.notify_waiters();
        }
    }
}

/// A controller that does not end.
fn find(controllers: &BTreeMap<u16, Live>, id: u16) -> Option<&Controller> {
    controllers.get(&id).filter(|live| !live.is_ending).map(|live| &live.controller)
}

/// What a host sees in a subsystem that it may not use.
fn check(state: &State, data: &ConnectData, way: Way) -> Result<(), Refusal> {
    match state.may_connect(&data.subsystem, &data.host, way.listener) {
        Some(true) => Ok(()),
        Some(false) => Err(Refusal::Code(status::INVALID_HOST)),
        None => Err(Refusal::Parameter(InvalidParameter::SUBNQN)),
    }
}

impl Inner {
    /// What a host that may connect must prove to know, if it must.
    pub fn must_prove(
        &self,
        data: &ConnectData,
        way: Way,
    ) -> Result<Option<(Parties, Arc<Secrets>)>, Refusal> {
        let mut state = self.state.borrow_mut();
        check(&state, data, way)?;
        let subsystem = state.subsystem(&data.subsystem).expect("just checked");
        let parties = Parties { host: data.host.clone(), subsystem: data.subsystem.clone() };
        Ok(subsystem.hosts.keys_of(&data.host).map(|keys| (parties, Arc::clone(&keys.secrets))))
    }

    /// Checks the queue of a host that must authenticate, and reserves the identifier of its controller if it is an admin queue.
    pub fn reserve(
        self: &Rc<Self>,
        connect: &Connect,
        data: &ConnectData,
        way: Way,
    ) -> Result<Reserved, Refusal> {
        let mut state = self.state.borrow_mut();
        let entries = state.limits.of(way.listener.transport).entries;
        let listener = state.listener(way.listener);
        let subsystem =
            state.subsystem(&data.subsystem).ok_or(Refusal::Parameter(InvalidParameter::SUBNQN))?;
        let is_admin = connect.qid == 0;
        let controller = if is_admin {
            subsystem.associations.reserve(connect, data, entries)?
        } else {
            let find = |id| find(&subsystem.controllers, id);
            subsystem.associations.check_io(connect, data, listener, find)?;
            data.controller_id
        };
        let place = Place { subsystem: data.subsystem.clone(), controller };
        Ok(Reserved { inner: Rc::clone(self), place, is_admin })
    }

    /// Admits an admin queue. Earlier controllers of the same host end first.
    pub async fn admit_admin(
        &self,
        connect: &Connect,
        data: &ConnectData,
        way: Way,
        reserved: Option<Reserved>,
    ) -> Result<(Place, Rc<Notify>), Refusal> {
        loop {
            let changed = {
                let mut state = self.state.borrow_mut();
                check(&state, data, way)?;
                let entries = state.limits.of(way.listener.transport).entries;
                let listener = state.listener(way.listener);
                let view = Arc::new(state.view(&data.subsystem, &data.host, way));
                let subsystem = state.subsystem(&data.subsystem).expect("just checked");
                let associations = &mut subsystem.associations;
                let admission = match &reserved {
                    Some(reserved) => {
                        associations.connect_authenticated(reserved.place.controller, data, listener)?
                    }
                    None => associations.connect_admin(connect, data, entries, listener)?,
                };
                match admission {
                    Admission::Admitted(association) => {
                        let id = association.controller_id;
                        let made =
                            Controller::new(association, view, entries, connect.keep_alive_ms, self.now());
                        let controller = made.map_err(|code| {
                            subsystem.associations.ended(id);
                            Refusal::Code(code)
                        })?;
                        let news = Rc::<Notify>::default();
                        let live = Live {
                            controller,
                            way,
                            queues: BTreeMap::new(),
                            qos: subsystem.limited.connect(&data.host),
                            retry_delays: Arc::default(),
                            past: Traffic::default(),
                            news: Rc::clone(&news),
                            is_ending: false,
                        };
                        subsystem.controllers.insert(id, live);
                        *state.began.entry(None).or_default() += 1;
                        return Ok((Place { subsystem: data.subsystem.clone(), controller: id }, news));
                    }
                    Admission::After(earlier) => {
                        for id in earlier {
                            if let Some(live) = subsystem.controllers.get_mut(&id) {
                                live.end();
                            }
                        }
                        Rc::clone(&subsystem.changed)
                    }
                }
            };
            changed.notified().await;
        }
    }

    /// Admits an I/O queue to its controller. [`Inner::queue_ended`] follows.
    pub fn admit_io(&self, connect: &Connect, data: &ConnectData, way: Way) -> Result<Place, Refusal> {
        let mut state = self.state.borrow_mut();
        check(&state, data, way)?;
        let listener = state.listener(way.listener);
        let subsystem = state.subsystem(&data.subsystem).expect("just checked");
        let find = |id| find(&subsystem.controllers, id);
        subsystem.associations.connect_io(connect, data, listener, find)?;
        Ok(Place { subsystem: data.subsystem.clone(), controller: data.controller_id })
    }

    /// What the host of a controller must prove to know, if it must.
    pub fn secrets_of(&self, place: &Place) -> Option<(Parties, Arc<Secrets>)> {
        let mut state = self.state.borrow_mut();
        let subsystem = state.subsystem(&place.subsystem)?;
        let host = subsystem.controllers.get(&place.controller)?.controller.association().host.clone();
        let secrets = Arc::clone(&subsystem.hosts.keys_of(&host)?.secrets);
        Some((Parties { host, subsystem: place.subsystem.clone() }, secrets))
    }

    /// Whether a host that is connected through this listener has the address of another connection's host.
    pub fn has_host_at(&self, way: Way) -> bool {
        let state = self.state.borrow();
        let is_there = |live: &Live| live.way.listener == way.listener && live.way.peer.ip() == way.peer.ip();
        state.subsystems.values().any(|subsystem| subsystem.controllers.values().any(is_there))
    }

    /// The cores whose reactors serve a queue that comes through a listener; `None`: all.
    pub fn cores_of(&self, place: &Place, listener: Address) -> Option<CoreSet> {
        let state = self.state.borrow();
        state.subsystems.get(&place.subsystem)?.listeners.get(&listener)?.cores.clone()
    }

    /// Calls `f` with a controller, unless it has ended.
    pub fn with_live<R>(&self, place: &Place, f: impl FnOnce(&mut Live) -> R) -> Option<R> {
        let mut state = self.state.borrow_mut();
        let live = state.subsystem(&place.subsystem)?.controllers.get_mut(&place.controller)?;
        Some(f(live))
    }

    /// Calls `f` with an I/O queue, unless it has ended: the next queue with its identifier is another one.
    pub fn with_queue<R>(
        &self,
        place: &Place,
        qid: u16,
        root: &QueueRef,
        f: impl FnOnce(&mut LiveQueue) -> R,
    ) -> Option<R> {
        let of_root = |live: &mut Live| live.queues.get_mut(&qid).filter(|queue| queue.root == *root).map(f);
        self.with_live(place, of_root).flatten()
    }

    /// An I/O queue begins: from here on, it may open the namespaces that there are.
    pub fn begin_queue(self: &Rc<Self>, place: &Place) -> Beginning {
        let number = self.number();
        if let Some(subsystem) = self.state.borrow_mut().subsystem(&place.subsystem) {
            subsystem.beginning.insert(number);
        }
        Beginning { inner: Rc::clone(self), subsystem: place.subsystem.clone(), number }
    }

    /// Returns when a namespace has been removed, or hidden from the host of a controller.
    pub async fn until_gone(&self, place: &Place, nsid: u32, number: u64) {
        loop {
            let changed = {
                let mut state = self.state.borrow_mut();
                let Some(subsystem) = state.subsystem(&place.subsystem) else { return };
                let live = subsystem.controllers.get(&place.controller);
                let host = live.map(|live| &live.controller.association().host);
                let shared = subsystem.namespaces.get(&nsid).filter(|shared| shared.number == number);
                if !host.is_some_and(|host| shared.is_some_and(|shared| shared.is_visible_to(host))) {
                    return;
                }
                Rc::clone(&subsystem.changed)
            };
            changed.notified().await;
        }
    }

    /// An I/O queue is on a reactor, its first or another one. Returns whether its controller goes on.
    pub fn queue_began(&self, place: &Place, qid: u16, queue: LiveQueue) -> bool {
        let mut state = self.state.borrow_mut();
        let Some(subsystem) = state.subsystem(&place.subsystem) else { return false };
        // Who ends the queues of the controller has not seen this one.
        subsystem.changed.notify_waiters();
        let Some(live) = subsystem.controllers.get_mut(&place.controller) else { return false };
        let (core, goes_on) = (queue.root.handle().core(), !live.is_ending);
        let before = live.queues.remove(&qid);
        let is_new = before.is_none();
        let proof = before.and_then(|before| before.proof);
        live.queues.insert(qid, LiveQueue { proof, ..queue });
        if is_new {
            *state.began.entry(Some(core)).or_default() += 1;
        }
        goes_on
    }

    /// Gives an order to the queue with that thread. `None` if there is no such queue.
    pub fn order(&self, thread: u64, order: Order) -> Option<oneshot::Receiver<Result<(), MoveError>>> {
        let state = self.state.borrow();
        let queues = state.subsystems.values().flat_map(|subsystem| subsystem.controllers.values());
        let queue = queues.flat_map(|live| live.queues.values()).find(|queue| queue.thread == thread)?;
        let (done, result) = oneshot::channel();
        // The result is dropped if the queue has ended.
        let _ = queue.orders.send((order, done));
        Some(result)
    }

    /// An I/O queue has ended, or has not begun.
    pub fn queue_ended(&self, place: &Place, qid: u16) {
        let mut state = self.state.borrow_mut();
        let Some(subsystem) = state.subsystem(&place.subsystem) else { return };
        subsystem.associations.disconnected(place.controller, qid);
        if let Some(live) = subsystem.controllers.get_mut(&place.controller)
            && let Some(queue) = live.queues.remove(&qid)
        {
            live.past += queue.counts.get();
        }
        subsystem.changed.notify_waiters();
    }

    /// Returns when a controller ends, or its I/O queues.
    pub async fn until_ending(&self, place: &Place) {
        loop {
            let changed = {
                let mut state = self.state.borrow_mut();
                let Some(subsystem) = state.subsystem(&place.subsystem) else { return };
                let live = subsystem.controllers.get(&place.controller);
                if live.is_none_or(|live| live.is_ending || !live.controller.properties().is_ready()) {
                    return;
                }
                Rc::clone(&subsystem.changed)
            };
            changed.notified().await;
        }
    }

    /// Ends the I/O queues of a controller. Returns when all have ended, with those that are being admitted.
    pub async fn end_queues(&self, place: &Place) {
        if let Some(subsystem) = self.state.borrow_mut().subsystem(&place.subsystem) {
            // Queues that are about to begin do not.
            subsystem.changed.notify_waiters();
        }
        loop {
            let (queues, changed) = {
                let mut state = self.state.borrow_mut();
                let Some(subsystem) = state.subsystem(&place.subsystem) else { return };
                if subsystem.associations.queues(place.controller).next().is_none() {
                    return;
                }
                let live = subsystem.controllers.get(&place.controller);
                let queues: Vec<QueueRef> = live
                    .into_iter()
                    .flat_map(|live| live.queues.values().map(|queue| queue.root.clone()))
                    .collect();
                (queues, Rc::clone(&subsystem.changed))
            };
            // What ends from here on is not missed.
            let ended = changed.notified();
            for queue in queues {
                // One that has ended meanwhile needs no end.
                let _ = queue.call(|queue, cx| queue.close(cx)).await;
            }
            ended.await;
        }
    }

    /// Ends a controller after its I/O queues.
    pub async fn end_controller(&self, place: &Place) {
        // No I/O queue is admitted from here on.
        self.with_live(place, |live| live.is_ending = true);
        self.end_queues(place).await;
        let mut state = self.state.borrow_mut();
        let Some(subsystem) = state.subsystem(&place.subsystem) else { return };
        subsystem.controllers.remove(&place.controller);
        subsystem.associations.ended(place.controller);
        subsystem.changed.notify_waiters();
    }
}
