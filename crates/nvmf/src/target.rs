//! Subsystems, their namespaces, hosts and listeners. Control context.

use crate::association::{Live, QueueRef};
use crate::connection;
use crate::pool::TRANSFER_MAX;
use crate::queue::Opened;
use aryk_bdev::{Access, Bdev, Descriptor, Env, Event};
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme_fabrics::association::{Associations, Duplicates};
use aryk_nvme_fabrics::connect::CONTROLLER_ID_MAX;
use aryk_nvme_fabrics::discovery::{Entry, Family, Page, Security, Subtype, Transport};
use aryk_nvme_fabrics::io::Rules;
use aryk_nvme_fabrics::nqn::{self, Nqn};
use aryk_nvme_fabrics::subsystem::{Commands, Io, Namespace, Service, View};
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::Instant;

/// Bytes of data that a command may have in its capsule.
pub(crate) const IN_CAPSULE_MAX: u32 = 8192;
/// Entries of a queue, at most.
pub(crate) const ENTRIES_MAX: u16 = 128;
/// I/O queues of a controller, at most.
const QUEUES_MAX: u16 = 64;
/// Namespaces of a subsystem, at most.
const NAMESPACES_MAX: u32 = 256;
/// Physical blocks that an optimal write has, at most.
const OPTIMAL_WRITE_BLOCKS_MAX: u32 = 1 << 10;

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
    #[error("namespaces have the identifiers 1 to {NAMESPACES_MAX}")]
    NamespaceId,
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] aryk_bdev::Error),
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The kernel's error.
        error: io::Error,
    },
}

/// The hosts that a subsystem allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Any.
    Any,
    /// Those with these names.
    Named(BTreeSet<Nqn>),
}

impl Hosts {
    fn allow(&self, host: &Nqn) -> bool {
        match self {
            Self::Any => true,
            Self::Named(names) => names.contains(host),
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
    /// The hosts that it allows.
    pub hosts: Hosts,
}

/// What is known of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemInfo {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number.
    pub serial: String,
    /// Its model.
    pub model: String,
    /// The hosts that it allows.
    pub hosts: Hosts,
    /// Where hosts reach it.
    pub listeners: Vec<SocketAddr>,
    /// The names of its disks, by their namespaces' identifiers.
    pub namespaces: BTreeMap<u32, String>,
    /// The hosts that are connected: each one's controller, name, and number of I/O queues.
    pub controllers: Vec<(u16, Nqn, usize)>,
}

/// A namespace.
struct Shared {
    /// Its number among all that the target has had.
    number: u64,
    descriptor: Descriptor,
    namespace: Namespace,
}

fn namespace_of(bdev: &Bdev) -> Namespace {
    let uuid = bdev.identity().uuid.into_bytes();
    let geometry = bdev.geometry();
    let physical = geometry.physical_block_size / geometry.block_size;
    Namespace {
        blocks: geometry.blocks.0,
        block_shift: geometry.block_size.trailing_zeros() as u8,
        ids: Descriptors { uuid: Some(uuid), nguid: Some(uuid), ..Descriptors::default() },
        ana_group: 0,
        is_read_only: bdev.device().is_read_only(),
        optimal_write_blocks: physical.clamp(1, OPTIMAL_WRITE_BLOCKS_MAX) as u16,
    }
}

/// A subsystem, or the discovery service.
pub(crate) struct Subsystem {
    serial: String,
    model: String,
    hosts: Hosts,
    listeners: BTreeSet<SocketAddr>,
    namespaces: BTreeMap<u32, Shared>,
    pub associations: Associations,
    pub controllers: BTreeMap<u16, Live>,
    /// Told when a queue or a controller has ended.
    pub changed: Rc<Notify>,
}

impl Subsystem {
    fn new(serial: String, model: String, hosts: Hosts, duplicates: Duplicates) -> Self {
        Self {
            serial,
            model,
            hosts,
            listeners: BTreeSet::new(),
            namespaces: BTreeMap::new(),
            associations: Associations::new(1..=CONTROLLER_ID_MAX, duplicates),
            controllers: BTreeMap::new(),
            changed: Rc::default(),
        }
    }

    fn io(&self) -> Io {
        Io {
            nsid_max: NAMESPACES_MAX,
            namespaces: self.namespaces.iter().map(|(&id, shared)| (id, shared.namespace.clone())).collect(),
            ana: None,
            transfer_max: TRANSFER_MAX as u32,
            in_capsule_max: IN_CAPSULE_MAX,
            queues: QUEUES_MAX,
            commands: Commands {
                compare: true,
                compare_and_write: false,
                deallocate: true,
                write_zeroes: true,
            },
            retry_delays: [0; 3],
        }
    }

    /// What a queue opens.
    pub fn opened(&self) -> Vec<Opened> {
        let io = self.io();
        let opened = |(&nsid, shared): (&u32, &Shared)| Opened {
            nsid,
            rules: Rules::new(&io, nsid).expect("it is among them"),
            descriptor: shared.descriptor.clone(),
        };
        self.namespaces.iter().map(opened).collect()
    }
}

struct Listener {
    /// Its number among the listeners, for [`Associations`].
    number: u32,
    task: JoinHandle<()>,
}

#[derive(Default)]
pub(crate) struct State {
    subsystems: BTreeMap<Nqn, Subsystem>,
    listeners: BTreeMap<SocketAddr, Listener>,
    /// Counts the changes of what discovery shows.
    generation: u64,
}

impl State {
    pub fn subsystem(&mut self, name: &Nqn) -> Option<&mut Subsystem> {
        self.subsystems.get_mut(name)
    }

    fn named(&mut self, name: &str) -> Result<&mut Subsystem, Error> {
        let found = self.subsystems.iter_mut().find(|(nqn, _)| nqn.as_str() == name);
        found.map(|(_, subsystem)| subsystem).ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// The number of a listener.
    pub fn listener(&self, address: SocketAddr) -> u32 {
        self.listeners.get(&address).map_or(0, |listener| listener.number)
    }

    /// Whether a host may connect to a subsystem through a listener. `None`: hosts find no such subsystem there.
    pub fn may_connect(&self, name: &Nqn, host: &Nqn, listener: SocketAddr) -> Option<bool> {
        let subsystem = self.subsystems.get(name)?;
        let is_there = name.is_discovery() || subsystem.listeners.contains(&listener);
        is_there.then(|| subsystem.hosts.allow(host))
    }

    /// What a host sees of a subsystem. It reaches the target at `local`.
    pub fn view(&self, name: &Nqn, host: &Nqn, local: SocketAddr) -> View {
        let subsystem = &self.subsystems[name];
        let service = match name.is_discovery() {
            true => Service::Discovery(self.page(host, local)),
            false => Service::Io(subsystem.io()),
        };
        View {
            nqn: name.clone(),
            serial: subsystem.serial.clone(),
            model: subsystem.model.clone(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            service,
        }
    }

    /// The subsystems that a host may connect to. A listener at all addresses is shown with the host's own way to it.
    fn page(&self, host: &Nqn, local: SocketAddr) -> Page {
        let shown =
            |(name, subsystem): &(&Nqn, &Subsystem)| !name.is_discovery() && subsystem.hosts.allow(host);
        let entries = self.subsystems.iter().filter(shown).flat_map(|(name, subsystem)| {
            subsystem.listeners.iter().map(move |listener| {
                let ip = if listener.ip().is_unspecified() { local.ip() } else { listener.ip() };
                Entry {
                    transport: Transport::Tcp,
                    family: if ip.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 },
                    subtype: Subtype::Subsystem,
                    security: Security::Plain,
                    port_id: self.listener(*listener) as u16,
                    address: ip.to_string(),
                    service: listener.port().to_string(),
                    subsystem: name.clone(),
                }
            })
        });
        Page { generation: self.generation, entries: entries.collect() }
    }

    /// Shows a change to the controllers of all hosts.
    fn show(&mut self) {
        let mut views = Vec::new();
        for (name, subsystem) in &self.subsystems {
            for (&id, live) in &subsystem.controllers {
                let host = &live.controller.association().host;
                views.push((name.clone(), id, Arc::new(self.view(name, host, live.local))));
            }
        }
        for (name, id, view) in views {
            let live = self.subsystems.get_mut(&name).and_then(|found| found.controllers.get_mut(&id));
            if let Some(live) = live {
                live.controller.update(view);
                live.news.notify_one();
            }
        }
    }
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
    /// Connections that have not sent Connect yet.
    pub unconnected: Cell<u32>,
    /// Namespaces that there have been.
    namespaces: Cell<u64>,
    events: mpsc::UnboundedSender<Happened>,
    started: Instant,
}

impl Inner {
    /// The time of the controllers.
    pub fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

/// A target. Cheap to clone. Its tasks end with its `LocalSet`.
#[derive(Clone)]
pub struct Target(pub(crate) Rc<Inner>);

impl Target {
    /// A target for disks of `env`, with the discovery service only. Needs a tokio `LocalSet`.
    ///
    /// # Panics
    /// Outside of a `LocalSet`.
    pub fn new(env: Env) -> Self {
        let (events, mut happened) = mpsc::unbounded_channel();
        let mut state = State::default();
        let discovery = Subsystem::new("discovery".into(), "Aryk".into(), Hosts::Any, Duplicates::Allow);
        state.subsystems.insert(nqn::DISCOVERY.parse().expect("a name of the specification"), discovery);
        let target = Self(Rc::new(Inner {
            env,
            state: RefCell::new(state),
            unconnected: Cell::new(0),
            namespaces: Cell::new(0),
            events,
            started: Instant::now(),
        }));
        let weak = Rc::downgrade(&target.0);
        spawn_local(async move {
            while let Some(happened) = happened.recv().await {
                let Some(inner) = weak.upgrade() else { return };
                Self(inner).follow(happened).await;
            }
        });
        target
    }

    /// Adds a subsystem.
    ///
    /// # Errors
    /// [`Error::Exists`].
    pub fn add_subsystem(&self, new: NewSubsystem) -> Result<(), Error> {
        let NewSubsystem { nqn, serial, model, hosts } = new;
        let mut state = self.0.state.borrow_mut();
        if state.subsystems.contains_key(&nqn) {
            return Err(Error::Exists(nqn));
        }
        state.subsystems.insert(nqn, Subsystem::new(serial, model, hosts, Duplicates::Replace));
        Ok(())
    }

    /// Removes a subsystem. Its hosts are disconnected first.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn remove_subsystem(&self, name: &str) -> Result<(), Error> {
        let found = {
            let mut state = self.0.state.borrow_mut();
            let subsystem = state.named(name)?;
            // Nobody connects any more.
            subsystem.listeners.clear();
            subsystem.controllers.values_mut().for_each(Live::end);
            Rc::clone(&subsystem.changed)
        };
        loop {
            let changed = found.notified();
            let is_empty = self.0.state.borrow_mut().named(name)?.controllers.is_empty();
            if is_empty {
                break;
            }
            changed.await;
        }
        {
            let mut state = self.0.state.borrow_mut();
            state.subsystems.retain(|nqn, _| nqn.as_str() != name);
            state.generation += 1;
            state.show();
        }
        self.end_unused_listeners().await;
        Ok(())
    }

    /// Adds a disk as a namespace, with the lowest identifier that is free if none is given. Returns its identifier.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn add_namespace(&self, name: &str, nsid: Option<u32>, disk: &str) -> Result<u32, Error> {
        let (opened, queues) = self.open_namespace(name, nsid, disk)?;
        let nsid = opened.nsid;
        for queue in queues {
            // A disk that cannot be opened there is being removed.
            if opened.descriptor.prepare(queue.handle()).await.is_ok() {
                let opened = opened.clone();
                let added = queue.call(move |queue, cx| queue.add(opened, cx)).await;
                if let Ok(Err(error)) = added {
                    tracing::warn!(nsid, %error, "a queue of a host cannot open a namespace");
                }
            }
        }
        self.0.state.borrow_mut().show();
        Ok(nsid)
    }

    /// Opens a disk as a namespace. Returns what queues open, and the queues that there are.
    fn open_namespace(
        &self,
        name: &str,
        nsid: Option<u32>,
        disk: &str,
    ) -> Result<(Opened, Vec<QueueRef>), Error> {
        let mut state = self.0.state.borrow_mut();
        let nqn = state.subsystems.keys().find(|nqn| nqn.as_str() == name && !nqn.is_discovery()).cloned();
        let nqn = nqn.ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let subsystem = state.named(name)?;
        let is_free = |nsid: &u32| !subsystem.namespaces.contains_key(nsid);
        let nsid = match nsid {
            Some(nsid) if !(1..=NAMESPACES_MAX).contains(&nsid) => return Err(Error::NamespaceId),
            Some(nsid) if !is_free(&nsid) => return Err(Error::NamespaceExists(nsid)),
            Some(nsid) => nsid,
            None => (1..=NAMESPACES_MAX).find(is_free).ok_or(Error::NamespaceId)?,
        };
        let number = self.0.namespaces.get();
        self.0.namespaces.set(number + 1);
        let events = self.0.events.clone();
        let listener = move |event| {
            let is_removed = matches!(event, Event::Removed);
            // The target may have ended.
            let _ = events.send(Happened { subsystem: nqn.clone(), nsid, number, is_removed });
        };
        let owner = format!("share {name}");
        let descriptor = self.0.env.registry().open(disk, Access::Exclusive, &owner, listener)?;
        let namespace = namespace_of(descriptor.bdev());
        subsystem.namespaces.insert(nsid, Shared { number, descriptor, namespace });
        let opened = subsystem.opened().into_iter().find(|opened| opened.nsid == nsid).expect("just added");
        Ok((opened, queues_of(subsystem)))
    }

    /// Removes a namespace. Returns when no queue uses its disk any more.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NoNamespace`].
    pub async fn remove_namespace(&self, name: &str, nsid: u32) -> Result<(), Error> {
        let (shared, queues) = {
            let mut state = self.0.state.borrow_mut();
            let subsystem = state.named(name)?;
            let shared = subsystem.namespaces.remove(&nsid).ok_or(Error::NoNamespace(nsid))?;
            let queues = queues_of(subsystem);
            state.show();
            (shared, queues)
        };
        for queue in queues {
            let (closed, is_closed) = oneshot::channel();
            // Neither a queue that has ended nor one without this namespace has a channel.
            if queue.call(move |queue, cx| queue.remove(nsid, closed, cx)).await.is_ok() {
                let _ = is_closed.await;
            }
        }
        drop(shared);
        Ok(())
    }

    /// Has a namespace follow its disk.
    async fn follow(&self, Happened { subsystem, nsid, number, is_removed }: Happened) {
        let is_current = {
            let state = self.0.state.borrow();
            let shared = state.subsystems.get(&subsystem).and_then(|found| found.namespaces.get(&nsid));
            shared.is_some_and(|shared| shared.number == number)
        };
        if is_current {
            // A call that comes between has removed it.
            let _ = match is_removed {
                true => self.remove_namespace(subsystem.as_str(), nsid).await,
                false => self.refresh(&subsystem, nsid).await,
            };
        }
    }

    /// Has a namespace take the size of its disk, and whether that can be written.
    async fn refresh(&self, nqn: &Nqn, nsid: u32) -> Result<(), Error> {
        let (rules, queues) = {
            let mut state = self.0.state.borrow_mut();
            let subsystem = state.named(nqn.as_str())?;
            let shared = subsystem.namespaces.get_mut(&nsid).ok_or(Error::NoNamespace(nsid))?;
            shared.namespace = namespace_of(shared.descriptor.bdev());
            let rules = Rules::new(&subsystem.io(), nsid).expect("it is among them");
            let queues = queues_of(subsystem);
            (rules, queues)
        };
        for queue in queues {
            // A queue that has ended needs no rules.
            let _ = queue.call(move |queue, _| queue.update(nsid, rules)).await;
        }
        self.0.state.borrow_mut().show();
        Ok(())
    }

    /// Has a subsystem listen at an address. Returns the address, with the port that the kernel has chosen for port 0.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Listen`].
    pub async fn listen(&self, name: &str, address: SocketAddr) -> Result<SocketAddr, Error> {
        self.0.state.borrow_mut().named(name)?;
        let is_bound = self.0.state.borrow().listeners.contains_key(&address);
        let address = if is_bound { address } else { self.bind(address).await? };
        let mut state = self.0.state.borrow_mut();
        state.named(name)?.listeners.insert(address);
        state.generation += 1;
        state.show();
        Ok(address)
    }

    async fn bind(&self, asked: SocketAddr) -> Result<SocketAddr, Error> {
        let failed = |error| Error::Listen { address: asked, error };
        let listener = TcpListener::bind(asked).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let task = spawn_local(connection::accept(Rc::downgrade(&self.0), listener, address));
        let mut state = self.0.state.borrow_mut();
        let number = (0..).find(|number| state.listeners.values().all(|other| other.number != *number));
        let number = number.expect("there are more numbers than ports");
        state.listeners.insert(address, Listener { number, task });
        Ok(address)
    }

    /// Has a subsystem listen no longer at an address. Hosts that are connected stay.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn stop_listening(&self, name: &str, address: SocketAddr) -> Result<(), Error> {
        {
            let mut state = self.0.state.borrow_mut();
            state.named(name)?.listeners.remove(&address);
            state.generation += 1;
            state.show();
        }
        self.end_unused_listeners().await;
        Ok(())
    }

    async fn end_unused_listeners(&self) {
        let unused: Vec<Listener> = {
            let State { subsystems, listeners, .. } = &mut *self.0.state.borrow_mut();
            let is_used = |address: &SocketAddr| subsystems.values().any(|of| of.listeners.contains(address));
            listeners.extract_if(.., |address, _| !is_used(address)).map(|(_, listener)| listener).collect()
        };
        for Listener { task, .. } in unused {
            task.abort();
            // The socket is closed when the task has ended.
            let _ = task.await;
        }
    }

    /// The subsystems.
    pub fn list(&self) -> Vec<SubsystemInfo> {
        let state = self.0.state.borrow();
        let info = |(nqn, subsystem): (&Nqn, &Subsystem)| SubsystemInfo {
            nqn: nqn.clone(),
            serial: subsystem.serial.clone(),
            model: subsystem.model.clone(),
            hosts: subsystem.hosts.clone(),
            listeners: subsystem.listeners.iter().copied().collect(),
            namespaces: (subsystem.namespaces.iter())
                .map(|(&nsid, shared)| (nsid, shared.descriptor.bdev().name().to_owned()))
                .collect(),
            controllers: (subsystem.controllers.iter())
                .map(|(&id, live)| (id, live.controller.association().host.clone(), live.queues.len()))
                .collect(),
        };
        state.subsystems.iter().filter(|(nqn, _)| !nqn.is_discovery()).map(info).collect()
    }
}

fn queues_of(subsystem: &Subsystem) -> Vec<QueueRef> {
    subsystem.controllers.values().flat_map(|live| live.queues.values().cloned()).collect()
}
