//! Subsystems: their namespaces, hosts and listeners, and what each host sees of them. Control context; nothing here waits.

use crate::Limits;
use crate::address::Address;
use crate::association::{Live, Way};
use crate::limits::Limited;
use crate::pool::TRANSFER_MAX;
use crate::queue::Opened;
use crate::target::NewSubsystem;
use crate::tls::TlsKey;
use aryk_bdev::{Bdev, Descriptor};
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme_fabrics::association::{Associations, Duplicates};
use aryk_nvme_fabrics::chap::Secrets;
use aryk_nvme_fabrics::discovery::{Entry, Family, Page, Security, Subtype};
use aryk_nvme_fabrics::io::Rules;
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::reservation::{HostId, Reservations};
use aryk_nvme_fabrics::subsystem::{Ana, AnaGroup, AnaState, Commands, Io, Namespace, Service, View};
use aryk_reactor::CoreSet;
use aryk_tls::Psks;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;

/// Physical blocks that an optimal write has, at most.
const OPTIMAL_WRITE_BLOCKS_MAX: u32 = 1 << 10;

/// What a host must prove to know.
#[derive(Clone, Debug)]
pub struct HostKeys {
    /// The secrets.
    pub secrets: Arc<Secrets>,
    /// The name of the host's secret, for reports.
    pub key: String,
    /// The name of the subsystem's secret for this host, if there is one.
    pub controller_key: Option<String>,
}

/// A host that a subsystem allows by its name.
#[derive(Clone, Debug, Default)]
pub struct NamedHost {
    /// What it must prove to know (DH-HMAC-CHAP), if it must.
    pub keys: Option<HostKeys>,
    /// Its key of TLS: it must use TLS then.
    pub tls: Option<TlsKey>,
}

/// The hosts that a subsystem allows.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    /// Any host may connect.
    pub any: bool,
    /// Those that may connect even if not all may.
    pub named: BTreeMap<Nqn, NamedHost>,
}

impl Hosts {
    fn allow(&self, host: &Nqn) -> bool {
        self.any || self.named.contains_key(host)
    }

    /// The keys of a host that must authenticate.
    pub(crate) fn keys_of(&self, host: &Nqn) -> Option<&HostKeys> {
        self.named.get(host).and_then(|named| named.keys.as_ref())
    }

    /// Whether every host must prove who it is.
    pub fn are_authenticated(&self) -> bool {
        !self.any && self.named.values().all(|named| named.keys.is_some() || named.tls.is_some())
    }
}

/// What connections of a listener are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Channel {
    /// Plain: nothing is encrypted.
    #[default]
    Plain,
    /// TLS with a key that the host and the subsystem share.
    Tls,
}

/// A subsystem's listener: the states of ANA groups there.
#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub channel: Channel,
    /// The cores whose reactors serve the queues; `None`: all.
    pub cores: Option<CoreSet>,
    /// The state of the groups without one of their own.
    others: AnaGroup,
    groups: BTreeMap<u32, AnaGroup>,
    changes: u64,
}

impl Path {
    pub fn new(state: AnaState, channel: Channel) -> Self {
        let others = AnaGroup { state, changes: 1 };
        Self { channel, cores: None, others, groups: BTreeMap::new(), changes: 1 }
    }

    /// Sets the state of a group, or of all groups.
    pub fn set(&mut self, group: Option<u32>, state: AnaState) {
        self.changes += 1;
        let state = AnaGroup { state, changes: self.changes };
        match group {
            Some(group) => drop(self.groups.insert(group, state)),
            None => (self.others, self.groups) = (state, BTreeMap::new()),
        }
    }

    pub fn group(&self, group: u32) -> AnaGroup {
        self.groups.get(&group).copied().unwrap_or(self.others)
    }
}

/// A namespace.
pub(crate) struct Shared {
    /// Its number among all that the target has had.
    pub number: u64,
    pub descriptor: Descriptor,
    pub namespace: Namespace,
    /// The hosts that see it; `None`: all that may connect.
    pub visible_to: Option<BTreeSet<Nqn>>,
    pub reservations: Reservations,
    /// Held by the change of the reservations that runs.
    pub turn: Rc<Mutex<()>>,
}

impl Shared {
    pub fn is_visible_to(&self, host: &Nqn) -> bool {
        self.visible_to.as_ref().is_none_or(|hosts| hosts.contains(host))
    }

    /// Takes the size of the disk, and whether it can be written.
    pub fn follow_disk(&mut self) {
        let Namespace { ids, ana_group, can_persist, persists, .. } = self.namespace;
        let followed = namespace_of(self.descriptor.bdev(), ids, ana_group);
        self.namespace = Namespace { can_persist, persists, ..followed };
    }
}

/// A namespace of a disk, with these identifiers, whose reservations do not persist.
pub(crate) fn namespace_of(bdev: &Bdev, ids: Descriptors, ana_group: u32) -> Namespace {
    let geometry = bdev.geometry();
    let physical = geometry.physical_block_size / geometry.block_size;
    Namespace {
        blocks: geometry.blocks.0,
        block_shift: geometry.block_size.trailing_zeros() as u8,
        ids,
        ana_group,
        is_read_only: bdev.device().is_read_only(),
        copy_blocks: bdev.device().limits().copy_max(bdev.device().ops()).0,
        optimal_write_blocks: physical.clamp(1, OPTIMAL_WRITE_BLOCKS_MAX) as u16,
        can_persist: false,
        persists: false,
    }
}

/// A subsystem, or the discovery service.
pub(crate) struct Subsystem {
    pub made_of: NewSubsystem,
    pub hosts: Hosts,
    pub listeners: BTreeMap<Address, Path>,
    pub namespaces: BTreeMap<u32, Shared>,
    /// How much each host may transfer.
    pub limited: Limited,
    pub associations: Associations,
    pub controllers: BTreeMap<u16, Live>,
    /// The I/O queues that begin, by numbers of their own.
    pub beginning: BTreeSet<u64>,
    /// Told when a queue or a controller has ended, or a queue has begun, or a namespace has gone.
    pub changed: Rc<Notify>,
    pub is_ending: bool,
}

impl Subsystem {
    pub fn new(made_of: NewSubsystem, duplicates: Duplicates) -> Self {
        Self {
            hosts: Hosts { any: made_of.allow_any_host, named: BTreeMap::new() },
            listeners: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            limited: Limited::default(),
            associations: Associations::new(made_of.controller_ids.clone(), duplicates),
            controllers: BTreeMap::new(),
            beginning: BTreeSet::new(),
            changed: Rc::default(),
            is_ending: false,
            made_of,
        }
    }

    /// What a host sees that reaches the subsystem through a listener.
    fn io(&self, host: &Nqn, listener: Address, limits: &Limits) -> Io {
        let visible = self.namespaces.iter().filter(|(_, shared)| shared.is_visible_to(host));
        let namespaces: BTreeMap<u32, Namespace> =
            visible.map(|(&nsid, shared)| (nsid, shared.namespace.clone())).collect();
        let path = self.listeners.get(&listener).filter(|_| self.made_of.has_ana);
        let ana = path.map(|path| Ana {
            group_max: self.made_of.namespaces_max,
            groups: namespaces.values().map(|n| (n.ana_group, path.group(n.ana_group))).collect(),
            changes: path.changes,
        });
        Io {
            nsid_max: self.made_of.namespaces_max,
            namespaces,
            ana,
            transfer_max: TRANSFER_MAX as u32,
            in_capsule_max: listener.transport.in_capsule_max(),
            queues: limits.of(listener.transport).queues,
            commands: Commands {
                compare: true,
                compare_and_write: true,
                deallocate: true,
                write_zeroes: true,
                verify: true,
                copy: true,
                reservations: true,
            },
            retry_delays: limits.retry_delays,
        }
    }

    /// The namespaces that a queue of a host opens.
    pub fn opened(
        &self,
        (host, host_id): (&Nqn, &HostId),
        listener: Address,
        limits: &Limits,
    ) -> Vec<Opened> {
        let io = self.io(host, listener, limits);
        let opened = |&nsid: &u32| {
            let Shared { number, descriptor, reservations, .. } = &self.namespaces[&nsid];
            let rules = Rules::new(&io, nsid).expect("it is among them");
            let rules = rules.with_rights(reservations.rights(host_id));
            Opened { nsid, number: *number, rules, descriptor: descriptor.clone() }
        };
        io.namespaces.keys().map(opened).collect()
    }

    /// Has the controllers end that `is_meant` selects.
    pub fn end_controllers(&mut self, is_meant: impl Fn(&Live) -> bool) {
        self.controllers.values_mut().filter(|live| is_meant(live)).for_each(Live::end);
    }

    /// Has the controllers end whose hosts may not connect any more.
    pub fn end_disallowed(&mut self) {
        let hosts = self.hosts.clone();
        self.end_controllers(|live| !hosts.allow(&live.controller.association().host));
    }
}

/// An address that is listened at.
pub(crate) struct Listener {
    /// Its number among the listeners, for [`Associations`].
    pub number: u32,
    pub channel: Channel,
    pub task: JoinHandle<()>,
}

/// All that hosts can see.
#[derive(Default)]
pub(crate) struct State {
    pub subsystems: BTreeMap<Nqn, Subsystem>,
    pub limits: Limits,
    /// Other discovery services.
    pub referrals: Vec<Entry>,
    pub listeners: BTreeMap<Address, Listener>,
    /// The keys of TLS of all hosts.
    pub psks: Arc<Psks>,
    /// Queues that have begun: I/O queues by core, and admin queues.
    pub began: BTreeMap<Option<u16>, u64>,
    /// Counts the changes of what discovery shows.
    pub generation: u64,
}

impl State {
    pub fn subsystem(&mut self, name: &Nqn) -> Option<&mut Subsystem> {
        self.subsystems.get_mut(name)
    }

    /// The number of a listener.
    pub fn listener(&self, address: Address) -> u32 {
        self.listeners.get(&address).map_or(0, |listener| listener.number)
    }

    /// Whether a host may connect to a subsystem through a listener. `None`: hosts find no such subsystem there.
    pub fn may_connect(&self, name: &Nqn, host: &Nqn, listener: Address) -> Option<bool> {
        let subsystem = self.subsystems.get(name)?;
        let is_there = name.is_discovery() || subsystem.listeners.contains_key(&listener);
        is_there.then(|| subsystem.hosts.allow(host))
    }

    /// Takes the keys of TLS from the hosts of all subsystems, after one has gone.
    pub fn gather_psks(&mut self) {
        let named = self.subsystems.values().flat_map(|subsystem| subsystem.hosts.named.values());
        let psks = named.filter_map(|host| host.tls.as_ref()).flat_map(TlsKey::psks);
        self.psks = Arc::new(psks.map(|psk| (psk.identity().into(), psk.clone())).collect());
    }

    /// What a host sees of a subsystem.
    pub fn view(&self, name: &Nqn, host: &Nqn, way: Way) -> View {
        let subsystem = &self.subsystems[name];
        let service = match name.is_discovery() {
            true => Service::Discovery(self.page(host, way.local)),
            false => Service::Io(subsystem.io(host, way.listener, &self.limits)),
        };
        View {
            nqn: name.clone(),
            serial: subsystem.made_of.serial.clone(),
            model: subsystem.made_of.model.clone(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            sgls: way.listener.transport.data_blocks(),
            service,
        }
    }

    /// The subsystems that a host may connect to, and other discovery services. A listener at all addresses is shown with the
    /// host's own way to it.
    fn page(&self, host: &Nqn, local: SocketAddr) -> Page {
        let shown =
            |(name, subsystem): &(&Nqn, &Subsystem)| !name.is_discovery() && subsystem.hosts.allow(host);
        let entries = self.subsystems.iter().filter(shown).flat_map(|(name, subsystem)| {
            subsystem.listeners.iter().map(move |(listener, path)| {
                let Address { transport, socket } = *listener;
                let ip = if socket.ip().is_unspecified() { local.ip() } else { socket.ip() };
                Entry {
                    transport: transport.into(),
                    family: if ip.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 },
                    subtype: Subtype::Subsystem,
                    security: match path.channel {
                        Channel::Plain => Security::Plain,
                        Channel::Tls => Security::Tls,
                    },
                    port_id: self.listener(*listener) as u16,
                    address: ip.to_string(),
                    service: socket.port().to_string(),
                    subsystem: name.clone(),
                }
            })
        });
        Page { generation: self.generation, entries: entries.chain(self.referrals.iter().cloned()).collect() }
    }

    /// Counts a change of what discovery shows, and shows it.
    pub fn show_discovery(&mut self) {
        self.generation += 1;
        self.show();
    }

    /// Shows a change to the controllers of all hosts.
    pub fn show(&mut self) {
        let names: Vec<Nqn> = self.subsystems.keys().cloned().collect();
        names.iter().for_each(|name| self.show_namespaces(name));
    }

    /// Shows a change of a subsystem's namespaces to its controllers.
    pub fn show_namespaces(&mut self, name: &Nqn) {
        let Some(subsystem) = self.subsystems.get(name) else { return };
        let view = |live: &Live| self.view(name, &live.controller.association().host, live.way);
        let views: Vec<View> = subsystem.controllers.values().map(view).collect();
        let controllers = self.subsystems.get_mut(name).map(|subsystem| &mut subsystem.controllers);
        for (live, view) in controllers.into_iter().flat_map(BTreeMap::values_mut).zip(views) {
            live.controller.update(Arc::new(view));
            live.news.notify_one();
        }
    }
}
