//! A target: how its subsystems, namespaces and listeners come and go; its hosts are in `hosts`. Control context.

mod hosts;

use crate::address::{Address, Transport};
use crate::association::{Live, QueueRef};
use crate::connection;
use crate::limits::HostLimits;
use crate::queue::Opened;
use crate::quota::{Budget, Quota, Waiting};
use crate::rdma::MESSAGE_MAX;
use crate::reservation::{Asked, Saver};
use crate::subsystem::{Channel, Hosts, Listener, Path, Shared, State, Subsystem, namespace_of};
use crate::traffic::Traffic;
use aryk_bdev::{Access, Env, Event, RateLimits, RateLimitsError};
use aryk_log_limit::LogLimit;
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme_fabrics::association::Duplicates;
use aryk_nvme_fabrics::connect::CONTROLLER_ID_MAX;
use aryk_nvme_fabrics::discovery::Entry;
use aryk_nvme_fabrics::nqn::{self, Nqn};
use aryk_nvme_fabrics::reservation::{self, Reservations};
use aryk_nvme_fabrics::subsystem::{AnaState, Namespace};
use aryk_rdma::{CallError, Device, Manager, Pending, SharedReceives, StartError};
use aryk_reactor::{CoreSet, MoveError, Order};
use futures_channel::oneshot;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, OnceCell, Semaphore, mpsc};
use tokio::task::spawn_local;
use tokio::time::Instant;

/// Entries of a queue, at most.
pub const ENTRIES_MAX: u16 = 1024;
/// Receives of RDMA that queues share, at most.
pub const SHARED_RECEIVES_MAX: u32 = 65_535;
/// I/O queues of a controller, at most.
pub const QUEUES_MAX: u16 = 128;
/// Namespaces of a subsystem, at most.
pub const NAMESPACES_MAX: u32 = 256;

/// Computations of authentications that run at the same time.
const COMPUTING_MAX: usize = 2;
/// Connections of all hosts, at least and at most.
const CONNECTIONS: RangeInclusive<u64> = 1024..=16_384;
/// The part of the process's descriptors that connections may use. An I/O queue has up to four.
const PART_OF_DESCRIPTORS: u64 = 8;

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is such a subsystem already.
    #[error("the subsystem {0} exists already")]
    Exists(Nqn),
    /// There is no such subsystem.
    #[error("there is no subsystem {0}")]
    NotFound(String),
    /// The subsystem has a namespace with this identifier.
    #[error("the subsystem has a namespace {0} already")]
    NamespaceExists(u32),
    /// The subsystem has no namespace with this identifier.
    #[error("the subsystem has no namespace {0}")]
    NoNamespace(u32),
    /// The identifier is 0 or too large, or the subsystem has as many namespaces as it can.
    #[error("namespaces of the subsystem have the identifiers 1 to {0}")]
    NamespaceId(u32),
    /// The group is 0 or too large.
    #[error("the subsystem has the ANA groups 1 to {0}")]
    Group(u32),
    /// The subsystem does not report ANA states.
    #[error("the subsystem does not report ANA states")]
    NoAna,
    /// All hosts see the namespace.
    #[error("all hosts see namespace {0}: it was not added as a hidden one")]
    SeenByAll(u32),
    /// The subsystem does not listen at the address.
    #[error("the subsystem does not listen at {0}")]
    NotListening(Address),
    /// Another subsystem listens at the address, with TLS or without.
    #[error("another subsystem listens at {0}, and either all use TLS there or none")]
    Channel(Address),
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] aryk_bdev::Error),
    /// The limits of a host are wrong.
    #[error(transparent)]
    Limits(#[from] RateLimitsError),
    /// RDMA cannot be used on this computer.
    #[error(transparent)]
    Rdma(#[from] StartError),
    /// The address is not one of an RDMA device.
    #[error("no RDMA device has the address {0}")]
    NoDevice(IpAddr),
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: Address,
        /// The kernel's error.
        error: io::Error,
    },
}

/// The limits of a transport's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Entries of a queue, 2 to [`ENTRIES_MAX`].
    pub entries: u16,
    /// I/O queues of a controller, 1 to [`QUEUES_MAX`].
    pub queues: u16,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self { entries: 128, queues: QUEUES_MAX }
    }
}

/// The limits of controllers that begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The queues of TCP.
    pub tcp: QueueLimits,
    /// The queues of RDMA.
    pub rdma: QueueLimits,
    /// The I/O queues of RDMA share so many receives of each device. `None`: each has its own.
    pub shared_receives: Option<u32>,
    /// CRDT1 to CRDT3: delays before a retry, in units of 100 ms.
    pub retry_delays: [u16; 3],
    /// Queues of all hosts together, admin queues among them. Each takes memory for its entries.
    pub connections: u32,
    /// Connections that have not sent Connect yet, or whose hosts have not authenticated yet. More take the places of the oldest.
    pub unconnected: u32,
    /// How long a host has to send data that it was asked for, and to read a reply of an I/O queue.
    pub patience: Duration,
    /// The kernel sends large replies of TCP without a copy, where the reactor's ring writes the socket.
    pub zero_copy: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            tcp: QueueLimits::default(),
            rdma: QueueLimits::default(),
            shared_receives: None,
            retry_delays: [0; 3],
            connections: connections_max(),
            unconnected: 1024,
            patience: Duration::from_secs(30),
            zero_copy: false,
        }
    }
}

impl Limits {
    /// The limits of a transport's queues.
    pub const fn of(&self, transport: Transport) -> QueueLimits {
        match transport {
            Transport::Tcp => self.tcp,
            Transport::Rdma => self.rdma,
        }
    }
}

/// What a subsystem is made of.
#[derive(Clone, Debug)]
pub struct NewSubsystem {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number, at most 20 characters of ASCII.
    pub serial: String,
    /// Its model, at most 40 characters of ASCII.
    pub model: String,
    /// Whether any host may connect.
    pub allow_any_host: bool,
    /// Namespaces that it can have, 1 to [`NAMESPACES_MAX`].
    pub namespaces_max: u32,
    /// The identifiers of its controllers, 1 to [`CONTROLLER_ID_MAX`].
    pub controller_ids: RangeInclusive<u16>,
    /// Whether it reports the states of paths (ANA).
    pub has_ana: bool,
}

impl NewSubsystem {
    /// A subsystem that no host may connect to yet.
    pub fn named(nqn: Nqn) -> Self {
        Self {
            nqn,
            serial: "00000000000000000000".to_owned(),
            model: "Aryk".to_owned(),
            allow_any_host: false,
            namespaces_max: NAMESPACES_MAX,
            controller_ids: 1..=CONTROLLER_ID_MAX,
            has_ana: false,
        }
    }
}

/// What a namespace is made of.
#[derive(Clone, Debug, Default)]
pub struct NewNamespace {
    /// Its identifier. `None`: the lowest that is free.
    pub nsid: Option<u32>,
    /// EUI-64, NGUID and UUID. Default of the UUID: that of the disk; of the NGUID: the UUID.
    pub ids: Descriptors,
    /// Its ANA group, if the subsystem has groups. `None`: that with the number of the namespace.
    pub ana_group: Option<u32>,
    /// No host sees it until [`Target::show_to`].
    pub is_hidden: bool,
    /// The registrations and the reservation that were stored.
    pub reservations: reservation::State,
}

/// The state of a subsystem.
#[derive(Clone, Debug)]
pub struct SubsystemInfo {
    /// The values with which the subsystem was created.
    pub made_of: NewSubsystem,
    /// The hosts that it allows.
    pub hosts: Hosts,
    /// The listeners, by address.
    pub listeners: BTreeMap<Address, ListenerInfo>,
    /// The namespaces, by identifier.
    pub namespaces: BTreeMap<u32, NamespaceInfo>,
    /// How much each host may transfer.
    pub limits: HostLimits,
    /// The hosts that are connected.
    pub controllers: Vec<ControllerInfo>,
}

/// The state of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerInfo {
    /// Whether its connections use TLS.
    pub channel: Channel,
    /// The cores whose reactors serve the queues; `None`: all.
    pub cores: Option<CoreSet>,
    /// The states of the namespaces' ANA groups.
    pub groups: BTreeMap<u32, AnaState>,
}

/// The state of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// The disk's name.
    pub disk: String,
    /// EUI-64, NGUID and UUID.
    pub ids: Descriptors,
    /// Its ANA group; 0: none.
    pub ana_group: u32,
    /// The hosts that see it; `None`: all that may connect.
    pub visible_to: Option<BTreeSet<Nqn>>,
    /// The registrations and the reservation.
    pub reservations: reservation::State,
}

/// The state of a connected host's controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// The controller's identifier.
    pub id: u16,
    /// The host's name.
    pub host: Nqn,
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// The transport.
    pub transport: Transport,
    /// The host's address.
    pub peer: SocketAddr,
    /// The address at which the host was accepted.
    pub local: SocketAddr,
    /// The I/O queues, each with the core of its reactor.
    pub queues: BTreeMap<u16, u16>,
    /// What was done for the host.
    pub traffic: Traffic,
    /// How much the host may transfer.
    pub limits: RateLimits,
}

/// An event of a namespace's disk.
struct Happened {
    subsystem: Nqn,
    nsid: u32,
    /// Another namespace may have the identifier meanwhile.
    number: u64,
    is_removed: bool,
}

pub(crate) struct Inner {
    pub env: Env,
    pub state: RefCell<State>,
    /// Connections that have not sent Connect yet, or whose hosts have not authenticated yet.
    pub unconnected: Rc<Waiting>,
    /// Connections that have.
    pub connected: Rc<Quota>,
    /// The thread that manages RDMA connections, once there is one.
    rdma: OnceCell<Manager>,
    /// Connections of RDMA in the first state, and the memory of all.
    pub rdma_unconnected: Rc<Waiting>,
    pub rdma_memory: Rc<Budget>,
    shared_receives: Mutex<HashMap<Device, SharedReceives>>,
    /// Limits the lines about what hosts do.
    pub lines: Arc<LogLimit>,
    /// Computations of authentications that run: each may take tens of milliseconds.
    pub computing: Arc<Semaphore>,
    /// Authentications that have failed.
    pub failures: Cell<u64>,
    /// The next number of a namespace, or of a queue that begins.
    next: Cell<u64>,
    events: mpsc::UnboundedSender<Happened>,
    /// Takes the commands of I/O queues that control executes.
    pub asked: mpsc::UnboundedSender<Asked>,
    /// Stores reservations.
    pub saver: RefCell<Option<Rc<Saver>>>,
    started: Instant,
}

impl Inner {
    /// A number that nothing else of this target has.
    pub fn number(&self) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        number
    }

    /// The time of the controllers.
    pub fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// The receives that the I/O queues of a connection's device share. The first connection makes them: so many.
    pub async fn shared_receives(&self, pending: &Pending, count: u32) -> Result<SharedReceives, CallError> {
        let mut all = self.shared_receives.lock().await;
        if let Some(receives) = all.get(&pending.device()) {
            return Ok(receives.clone());
        }
        let receives = pending.share_receives(count, MESSAGE_MAX).await?;
        tracing::info!(
            asked = count,
            count = receives.count(),
            "the I/O queues of an RDMA device share receives"
        );
        all.insert(pending.device(), receives.clone());
        Ok(receives)
    }
}

/// A target. Cheap to clone. Its tasks end with its `LocalSet`.
#[derive(Clone)]
pub struct Target(pub(crate) Rc<Inner>);

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

impl Target {
    /// A target for disks of `env`, with the discovery service only. Needs a tokio `LocalSet`.
    ///
    /// # Panics
    /// Outside of a `LocalSet`.
    pub fn new(env: Env) -> Self {
        let (events, mut happened) = mpsc::unbounded_channel();
        let (asked, mut commands) = mpsc::unbounded_channel();
        let mut state = State::default();
        let name: Nqn = nqn::DISCOVERY.parse().expect("a name of the specification");
        let discovery = NewSubsystem { allow_any_host: true, ..NewSubsystem::named(name.clone()) };
        state.subsystems.insert(name, Subsystem::new(discovery, Duplicates::Allow));
        let target = Self(Rc::new(Inner {
            env,
            state: RefCell::new(state),
            unconnected: Rc::default(),
            connected: Rc::default(),
            rdma: OnceCell::new(),
            rdma_unconnected: Rc::default(),
            rdma_memory: Rc::default(),
            shared_receives: Mutex::default(),
            lines: Arc::new(LogLimit::new(10, Duration::from_secs(5))),
            computing: Arc::new(Semaphore::new(COMPUTING_MAX)),
            failures: Cell::new(0),
            next: Cell::new(0),
            events,
            asked,
            saver: RefCell::new(None),
            started: Instant::now(),
        }));
        let weak = Rc::downgrade(&target.0);
        spawn_local(async move {
            while let Some(happened) = happened.recv().await {
                let Some(inner) = weak.upgrade() else { return };
                // The removal of one disk may wait for its last request.
                spawn_local(async move { Self(inner).follow(happened).await });
            }
        });
        let weak = Rc::downgrade(&target.0);
        spawn_local(async move {
            while let Some(command) = commands.recv().await {
                let Some(inner) = weak.upgrade() else { return };
                // One may wait for requests of other hosts.
                spawn_local(inner.execute_asked(command));
            }
        });
        target
    }

    /// The limits of controllers that begin.
    pub fn limits(&self) -> Limits {
        self.0.state.borrow().limits.clone()
    }

    /// Sets the limits of controllers that begin.
    pub fn set_limits(&self, limits: Limits) {
        let mut state = self.0.state.borrow_mut();
        state.limits = limits;
        state.show();
    }

    /// Has the reservations stored of the namespaces that are added from now on.
    pub fn set_saver(&self, saver: Rc<Saver>) {
        *self.0.saver.borrow_mut() = Some(saver);
    }

    /// Sets the other discovery services, which the discovery page lists.
    pub fn set_referrals(&self, referrals: Vec<Entry>) {
        let mut state = self.0.state.borrow_mut();
        state.referrals = referrals;
        state.show_discovery();
    }

    /// Adds a subsystem.
    ///
    /// # Errors
    /// [`Error::Exists`].
    pub fn add_subsystem(&self, new: NewSubsystem) -> Result<(), Error> {
        let mut state = self.0.state.borrow_mut();
        if state.subsystems.contains_key(&new.nqn) {
            return Err(Error::Exists(new.nqn));
        }
        state.subsystems.insert(new.nqn.clone(), Subsystem::new(new, Duplicates::Replace));
        Ok(())
    }

    /// Removes a subsystem. Its hosts are disconnected first.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn remove_subsystem(&self, name: &str) -> Result<(), Error> {
        self.with(name, |subsystem| {
            subsystem.is_ending = true;
            // Nobody connects any more.
            subsystem.listeners.clear();
            subsystem.end_controllers(|_| true);
        })?;
        self.until_ended(name).await;
        {
            let mut state = self.0.state.borrow_mut();
            state.subsystems.remove(name);
            state.gather_psks();
            state.show_discovery();
        }
        self.end_unused_listeners().await;
        Ok(())
    }

    /// Adds a disk as a namespace. Returns its identifier.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn add_namespace(&self, name: &str, disk: &str, new: NewNamespace) -> Result<u32, Error> {
        let (nqn, nsid, number) = self.open_namespace(name, disk, new)?;
        self.give(&nqn, nsid, number, |_| true).await;
        self.0.state.borrow_mut().show_namespaces(&nqn);
        Ok(nsid)
    }

    /// Opens a disk as a namespace, of which no queue knows yet. Returns its identifier and its number.
    fn open_namespace(&self, name: &str, disk: &str, new: NewNamespace) -> Result<(Nqn, u32, u64), Error> {
        let number = self.0.number();
        let can_persist = self.0.saver.borrow().is_some();
        let (events, registry) = (self.0.events.clone(), self.0.env.registry());
        self.with(name, |subsystem| {
            let max = subsystem.made_of.namespaces_max;
            let is_free = |nsid: &u32| !subsystem.namespaces.contains_key(nsid);
            let nsid = match new.nsid {
                Some(nsid) if !(1..=max).contains(&nsid) => return Err(Error::NamespaceId(max)),
                Some(nsid) if !is_free(&nsid) => return Err(Error::NamespaceExists(nsid)),
                Some(nsid) => nsid,
                None => (1..=max).find(is_free).ok_or(Error::NamespaceId(max))?,
            };
            let group = match new.ana_group.unwrap_or(nsid) {
                group if !(1..=max).contains(&group) => return Err(Error::Group(max)),
                group => group,
            };
            let nqn = subsystem.made_of.nqn.clone();
            let of_events = nqn.clone();
            let listener = move |event| {
                let is_removed = matches!(event, Event::Removed);
                // The target may have ended.
                let _ = events.send(Happened { subsystem: of_events.clone(), nsid, number, is_removed });
            };
            let descriptor = registry.open(disk, Access::Exclusive, &format!("share {name}"), listener)?;
            let uuid = new.ids.uuid.unwrap_or(descriptor.bdev().identity().uuid.into_bytes());
            let nguid = new.ids.nguid.unwrap_or(uuid);
            let ids = Descriptors { uuid: Some(uuid), nguid: Some(nguid), ..new.ids };
            let group = if subsystem.made_of.has_ana { group } else { 0 };
            let reservations = Reservations::restored(new.reservations);
            let namespace = Namespace {
                can_persist,
                persists: reservations.state().persists,
                ..namespace_of(descriptor.bdev(), ids, group)
            };
            let visible_to = new.is_hidden.then(BTreeSet::new);
            let turn = Rc::default();
            let shared = Shared { number, descriptor, namespace, visible_to, reservations, turn };
            subsystem.namespaces.insert(nsid, shared);
            Ok((nqn, nsid, number))
        })?
    }

    /// Removes a namespace. Returns when no queue uses its disk any more.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoNamespace`].
    pub async fn remove_namespace(&self, name: &str, nsid: u32) -> Result<(), Error> {
        let (nqn, shared, queues) = self.with(name, |subsystem| {
            let shared = subsystem.namespaces.remove(&nsid).ok_or(Error::NoNamespace(nsid))?;
            Ok::<_, Error>((subsystem.made_of.nqn.clone(), shared, queues_of(subsystem, |_| true)))
        })??;
        self.0.state.borrow_mut().show_namespaces(&nqn);
        take(nsid, shared.number, queues).await;
        self.until_begun(&nqn).await;
        drop(shared);
        Ok(())
    }

    /// Shows a hidden namespace to a host.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoNamespace`], [`Error::SeenByAll`].
    pub async fn show_to(&self, name: &str, nsid: u32, host: Nqn) -> Result<(), Error> {
        let (nqn, number) = self.with(name, |subsystem| {
            let shared = subsystem.namespaces.get_mut(&nsid).ok_or(Error::NoNamespace(nsid))?;
            shared.visible_to.as_mut().ok_or(Error::SeenByAll(nsid))?.insert(host.clone());
            Ok::<_, Error>((subsystem.made_of.nqn.clone(), shared.number))
        })??;
        self.give(&nqn, nsid, number, |live| live.controller.association().host == host).await;
        self.0.state.borrow_mut().show_namespaces(&nqn);
        Ok(())
    }

    /// Hides a namespace from a host that saw it. Returns when the host's queues do not use the disk any more.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoNamespace`], [`Error::SeenByAll`].
    pub async fn hide_from(&self, name: &str, nsid: u32, host: &Nqn) -> Result<(), Error> {
        let (nqn, number, queues) = self.with(name, |subsystem| {
            let shared = subsystem.namespaces.get_mut(&nsid).ok_or(Error::NoNamespace(nsid))?;
            shared.visible_to.as_mut().ok_or(Error::SeenByAll(nsid))?.remove(host);
            let (nqn, number) = (subsystem.made_of.nqn.clone(), shared.number);
            let queues = queues_of(subsystem, |live| live.controller.association().host == *host);
            Ok::<_, Error>((nqn, number, queues))
        })??;
        self.0.state.borrow_mut().show_namespaces(&nqn);
        take(nsid, number, queues).await;
        self.until_begun(&nqn).await;
        Ok(())
    }

    /// Moves a namespace to another ANA group.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoNamespace`], [`Error::NoAna`], [`Error::Group`].
    pub async fn set_group(&self, name: &str, nsid: u32, group: u32) -> Result<(), Error> {
        let nqn = self.with(name, |subsystem| {
            check_group(subsystem, Some(group))?;
            let shared = subsystem.namespaces.get_mut(&nsid).ok_or(Error::NoNamespace(nsid))?;
            shared.namespace.ana_group = group;
            Ok::<_, Error>(subsystem.made_of.nqn.clone())
        })??;
        self.update_queues(&nqn).await;
        Ok(())
    }

    /// Sets the state of an ANA group, or of all, for hosts that come through a listener.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotListening`], [`Error::NoAna`], [`Error::Group`].
    pub async fn set_state(
        &self,
        name: &str,
        listener: Address,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<(), Error> {
        let nqn = self.with(name, |subsystem| {
            check_group(subsystem, group)?;
            let path = subsystem.listeners.get_mut(&listener).ok_or(Error::NotListening(listener))?;
            path.set(group, state);
            Ok::<_, Error>(subsystem.made_of.nqn.clone())
        })??;
        self.update_queues(&nqn).await;
        Ok(())
    }

    /// Has a namespace follow its disk.
    async fn follow(&self, Happened { subsystem, nsid, number, is_removed }: Happened) {
        if !self.is_current(&subsystem, nsid, number) {
            return;
        }
        if is_removed {
            // A call that comes between has removed it.
            let _ = self.remove_namespace(subsystem.as_str(), nsid).await;
            return;
        }
        let followed = self.with(subsystem.as_str(), |found| {
            found.namespaces.get_mut(&nsid).map(Shared::follow_disk);
        });
        if followed.is_ok() {
            self.update_queues(&subsystem).await;
        }
    }

    fn is_current(&self, nqn: &Nqn, nsid: u32, number: u64) -> bool {
        let state = self.0.state.borrow();
        let shared = state.subsystems.get(nqn).and_then(|found| found.namespaces.get(&nsid));
        shared.is_some_and(|shared| shared.number == number)
    }

    /// Opens a namespace on the queues of the hosts that `is_meant` selects and that see it.
    pub(crate) async fn give(&self, nqn: &Nqn, nsid: u32, number: u64, is_meant: impl Fn(&Live) -> bool) {
        for (controller, queue) in self.queues(nqn, is_meant) {
            let find = || self.opened(nqn, controller).into_iter().find(|opened| opened.number == number);
            let Some(Opened { descriptor, .. }) = find() else { continue };
            // A disk that cannot be opened there is being removed.
            if descriptor.prepare(queue.handle()).await.is_err() {
                continue;
            }
            // A call that has removed or hidden the namespace meanwhile did not find it on this queue.
            let Some(opened) = find() else { continue };
            let added = queue.call(move |queue, cx| queue.add(opened, cx)).await;
            if let Ok(Err(error)) = added {
                tracing::warn!(nsid, %error, "a queue of a host cannot open a namespace");
            }
        }
    }

    /// The queues of the hosts that `is_meant` selects, each with its controller.
    fn queues(&self, nqn: &Nqn, is_meant: impl Fn(&Live) -> bool) -> Vec<(u16, QueueRef)> {
        let state = self.0.state.borrow();
        let Some(subsystem) = state.subsystems.get(nqn) else { return Vec::new() };
        let meant = subsystem.controllers.iter().filter(|(_, live)| is_meant(live));
        meant.flat_map(|(id, live)| live.queues.values().map(|queue| (*id, queue.root.clone()))).collect()
    }

    /// The namespaces that the queues of a controller have open now.
    fn opened(&self, nqn: &Nqn, controller: u16) -> Vec<Opened> {
        let state = self.0.state.borrow();
        let Some(subsystem) = state.subsystems.get(nqn) else { return Vec::new() };
        let Some(live) = subsystem.controllers.get(&controller) else { return Vec::new() };
        let association = live.controller.association();
        subsystem.opened((&association.host, &association.host_id), live.way.listener, &state.limits)
    }

    /// Has all queues of a subsystem follow its namespaces' sizes and states, and shows them to hosts.
    async fn update_queues(&self, nqn: &Nqn) {
        for (controller, queue) in self.queues(nqn, |_| true) {
            let opened = self.opened(nqn, controller).into_iter();
            let rules: Vec<_> = opened.map(|of| (of.nsid, of.number, of.rules)).collect();
            // A queue that has ended needs no rules.
            let _ = queue.call(move |queue, _| queue.update(&rules)).await;
        }
        self.0.state.borrow_mut().show_namespaces(nqn);
    }

    /// Has a subsystem listen at an address, with this state of all ANA groups. Returns the address, with the port that the
    /// kernel has chosen for port 0. Nothing changes if it listens there already.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Listen`], [`Error::Channel`].
    pub async fn listen(
        &self,
        name: &str,
        address: Address,
        state: AnaState,
        channel: Channel,
    ) -> Result<Address, Error> {
        self.with(name, |_| ())?;
        let bound = self.0.state.borrow().listeners.get(&address).map(|listener| listener.channel);
        let address = match bound {
            Some(bound) if bound != channel => return Err(Error::Channel(address)),
            Some(_) => address,
            None => self.bind(address, channel).await?,
        };
        let listens = self.with(name, |subsystem| {
            subsystem.listeners.entry(address).or_insert_with(|| Path::new(state, channel));
        });
        self.0.state.borrow_mut().show_discovery();
        if listens.is_err() {
            self.end_unused_listeners().await;
        }
        listens.map(|()| address)
    }

    /// Sets the cores whose reactors serve the queues that begin from now on and come through a listener; `None`: all. If none of
    /// them has a reactor, any reactor serves a queue.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotListening`].
    pub fn place_queues(&self, name: &str, listener: Address, cores: Option<CoreSet>) -> Result<(), Error> {
        self.with(name, |subsystem| {
            let path = subsystem.listeners.get_mut(&listener).ok_or(Error::NotListening(listener))?;
            path.cores = cores;
            Ok(())
        })?
    }

    /// Makes sure that the target can use RDMA, and returns what manages its connections.
    async fn rdma(&self) -> Result<&Manager, Error> {
        Ok(self.0.rdma.get_or_try_init(Manager::start).await?)
    }

    /// Makes sure that the target can listen by RDMA.
    ///
    /// # Errors
    /// [`Error::Rdma`].
    pub async fn prepare_rdma(&self) -> Result<(), Error> {
        self.rdma().await.map(drop)
    }

    async fn bind(&self, asked: Address, channel: Channel) -> Result<Address, Error> {
        let failed = |error| Error::Listen { address: asked, error };
        let inner = Rc::downgrade(&self.0);
        let (address, task) = match asked.transport {
            Transport::Tcp => {
                let listener = TcpListener::bind(asked.socket).await.map_err(failed)?;
                let address = Address::tcp(listener.local_addr().map_err(failed)?);
                (address, spawn_local(connection::accept(inner, listener, address, channel)))
            }
            Transport::Rdma => {
                let (sender, requests) = mpsc::unbounded_channel();
                // Without a receiver, the request is refused by its drop.
                let take = Box::new(move |pending| drop(sender.send(pending)));
                let listener = self.rdma().await?.listen(asked.socket, take).await;
                let listener = listener.map_err(|error| match Errno::from_raw_os_error(error.errno) {
                    Errno::NODEV => Error::NoDevice(asked.socket.ip()),
                    errno => failed(errno.into()),
                })?;
                let address = Address { socket: listener.address(), ..asked };
                (address, spawn_local(connection::accept_rdma(inner, listener, requests, address)))
            }
        };
        let mut state = self.0.state.borrow_mut();
        let number = (0..).find(|number| state.listeners.values().all(|other| other.number != *number));
        let number = number.expect("there are more numbers than ports");
        state.listeners.insert(address, Listener { number, channel, task });
        Ok(address)
    }

    /// Has a subsystem listen no longer at an address. The hosts that have come through it are disconnected first.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotListening`].
    pub async fn stop_listening(&self, name: &str, address: Address) -> Result<(), Error> {
        self.with(name, |subsystem| {
            subsystem.listeners.remove(&address).ok_or(Error::NotListening(address))?;
            subsystem.end_controllers(|live| live.way.listener == address);
            Ok::<_, Error>(())
        })??;
        self.until_ended(name).await;
        self.0.state.borrow_mut().show_discovery();
        self.end_unused_listeners().await;
        Ok(())
    }

    async fn end_unused_listeners(&self) {
        let unused: Vec<Listener> = {
            let State { subsystems, listeners, .. } = &mut *self.0.state.borrow_mut();
            let is_used =
                |address: &Address| subsystems.values().any(|of| of.listeners.contains_key(address));
            listeners.extract_if(.., |address, _| !is_used(address)).map(|(_, listener)| listener).collect()
        };
        for Listener { task, .. } in unused {
            task.abort();
            // The socket is closed when the task has ended.
            let _ = task.await;
        }
    }

    /// Ends all: hosts are disconnected, and no disk is open afterwards.
    pub async fn close(&self) {
        let names: Vec<String> = self.list().into_iter().map(|info| info.made_of.nqn.to_string()).collect();
        for name in names {
            // A call that comes between has removed it.
            let _ = self.remove_subsystem(&name).await;
        }
        let _ = self.with_any(nqn::DISCOVERY, |discovery| discovery.end_controllers(|_| true));
        self.until_ended(nqn::DISCOVERY).await;
    }

    /// Returns when the queues that begin now have begun, without what has gone before the call.
    async fn until_begun(&self, nqn: &Nqn) {
        let all = || {
            let mut state = self.0.state.borrow_mut();
            state.subsystem(nqn).map(|subsystem| (subsystem.beginning.clone(), Rc::clone(&subsystem.changed)))
        };
        let Some((first, changed)) = all() else { return };
        // Those that wait for the disk wait no longer.
        changed.notify_waiters();
        while let Some((now, changed)) = all() {
            if first.is_disjoint(&now) {
                return;
            }
            changed.notified().await;
        }
    }

    /// Waits for the end of the controllers of a subsystem that are to end.
    async fn until_ended(&self, name: &str) {
        loop {
            let ending = self.with_any(name, |subsystem| {
                let is_any_ending = subsystem.controllers.values().any(|live| live.is_ending);
                is_any_ending.then(|| Rc::clone(&subsystem.changed))
            });
            let Ok(Some(changed)) = ending else { return };
            changed.notified().await;
        }
    }

    /// Calls `f` with a subsystem other than the discovery service that is not being removed.
    fn with<R>(&self, name: &str, f: impl FnOnce(&mut Subsystem) -> R) -> Result<R, Error> {
        let missing = || Error::NotFound(name.to_owned());
        match name {
            nqn::DISCOVERY => Err(missing()),
            _ => self.with_any(name, |found| (!found.is_ending).then(|| f(found)))?.ok_or_else(missing),
        }
    }

    fn with_any<R>(&self, name: &str, f: impl FnOnce(&mut Subsystem) -> R) -> Result<R, Error> {
        let mut state = self.0.state.borrow_mut();
        state.subsystems.get_mut(name).map(f).ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// The subsystems without the discovery service, by name.
    pub fn list(&self) -> Vec<SubsystemInfo> {
        let state = self.0.state.borrow();
        let all = state.subsystems.iter().filter(|(nqn, _)| !nqn.is_discovery());
        all.map(|(_, subsystem)| info(subsystem)).collect()
    }

    /// The controllers of hosts, each with its subsystem.
    pub fn hosts(&self) -> Vec<(Nqn, ControllerInfo)> {
        let state = self.0.state.borrow();
        let all = state.subsystems.iter().filter(|(nqn, _)| !nqn.is_discovery());
        let hosts =
            all.flat_map(|(nqn, subsystem)| subsystem.controllers.iter().map(move |live| (nqn, live)));
        hosts.map(|(nqn, (&id, live))| (nqn.clone(), host(id, live))).collect()
    }

    /// The subsystem of that name, unless it is the discovery service.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn find(&self, name: &str) -> Result<SubsystemInfo, Error> {
        self.with(name, |subsystem| info(subsystem))
    }

    /// The number of subsystems without the discovery service.
    pub fn count(&self) -> usize {
        self.0.state.borrow().subsystems.len() - 1
    }

    /// Has the I/O queue whose thread has that number run elsewhere. `None` if no queue has that thread.
    pub async fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        let result = self.0.order(thread, order)?;
        Some(result.await.unwrap_or(Err(MoveError::Ending)))
    }

    /// How many queues have begun: I/O queues by core, and admin queues.
    pub fn began(&self) -> BTreeMap<Option<u16>, u64> {
        self.0.state.borrow().began.clone()
    }

    /// Authentications of hosts that have failed.
    pub fn failed_authentications(&self) -> u64 {
        self.0.failures.get()
    }

    /// The hosts that are connected to the discovery service.
    pub fn discovery_controllers(&self) -> usize {
        self.with_any(nqn::DISCOVERY, |discovery| discovery.controllers.len()).unwrap_or(0)
    }
}

fn host(id: u16, live: &Live) -> ControllerInfo {
    ControllerInfo {
        id,
        host: live.controller.association().host.clone(),
        host_id: live.controller.association().host_id,
        transport: live.way.listener.transport,
        peer: live.way.peer,
        local: live.way.local,
        queues: live.queues.iter().map(|(&qid, queue)| (qid, queue.root.handle().core())).collect(),
        traffic: live.traffic(),
        limits: live.qos.limits(),
    }
}

fn info(subsystem: &Subsystem) -> SubsystemInfo {
    let groups: BTreeSet<u32> = subsystem.namespaces.values().map(|n| n.namespace.ana_group).collect();
    let listener = |path: &Path| ListenerInfo {
        channel: path.channel,
        cores: path.cores.clone(),
        groups: groups.iter().map(|&group| (group, path.group(group).state)).collect(),
    };
    let namespace = |shared: &Shared| NamespaceInfo {
        disk: shared.descriptor.bdev().name().to_owned(),
        ids: shared.namespace.ids,
        ana_group: shared.namespace.ana_group,
        visible_to: shared.visible_to.clone(),
        reservations: shared.reservations.state().clone(),
    };
    SubsystemInfo {
        made_of: subsystem.made_of.clone(),
        hosts: subsystem.hosts.clone(),
        listeners: subsystem.listeners.iter().map(|(address, path)| (*address, listener(path))).collect(),
        namespaces: subsystem.namespaces.iter().map(|(&nsid, shared)| (nsid, namespace(shared))).collect(),
        limits: subsystem.limited.limits().clone(),
        controllers: subsystem.controllers.iter().map(|(&id, live)| host(id, live)).collect(),
    }
}

/// Hosts leave the process descriptors for everything else.
fn connections_max() -> u32 {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (descriptors / PART_OF_DESCRIPTORS).clamp(*CONNECTIONS.start(), *CONNECTIONS.end()) as u32
}

fn check_group(subsystem: &Subsystem, group: Option<u32>) -> Result<(), Error> {
    let max = subsystem.made_of.namespaces_max;
    match group {
        _ if !subsystem.made_of.has_ana => Err(Error::NoAna),
        Some(group) if !(1..=max).contains(&group) => Err(Error::Group(max)),
        Some(_) | None => Ok(()),
    }
}

fn queues_of(subsystem: &Subsystem, is_meant: impl Fn(&Live) -> bool) -> Vec<QueueRef> {
    let meant = subsystem.controllers.values().filter(|live| is_meant(live));
    meant.flat_map(|live| live.queues.values().map(|queue| queue.root.clone())).collect()
}

/// Takes a namespace from queues. Returns when none uses its disk any more.
async fn take(nsid: u32, number: u64, queues: Vec<QueueRef>) {
    let mut closing = Vec::new();
    for queue in queues {
        let (closed, is_closed) = oneshot::channel();
        // Neither a queue that has ended nor one without this namespace has a channel.
        if queue.call(move |queue, cx| queue.remove(nsid, number, closed, cx)).await.is_ok() {
            closing.push(is_closed);
        }
    }
    // No queue takes commands for it any more.
    for is_closed in closing {
        let _ = is_closed.await;
    }
}
