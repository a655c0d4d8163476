//! `nvmf_*`: targets of NVMe over TCP and RDMA, through which hosts on the network reach disks. Control context.
//!
//! Each subsystem, namespace, host and listener has a note of its own. After a restart, a subsystem listens when all its
//! namespaces exist again: a host that reconnected before would see that disks in use are gone.

mod keys;
mod limits;
mod mdns;
mod object;
mod reservations;
mod show;
mod subsystem;

pub(super) use keys::{KeyNames, read_psk};
pub(super) use mdns::{is_own, open_socket as open_mdns};
pub(crate) use object::{Needs, disk_of, forget_gone, is_of_one, needs, object, place};
pub use reservations::keep;
pub(crate) use show::metrics;

use super::{Control, Error, NoParams, Phase, Table, is_default};
use crate::config::Subsystem;
use crate::error::INTERNAL;
use aryk_bdev::Env;
use aryk_nvme_fabrics::discovery::{Entry, Family, Security, Subtype};
use aryk_nvme_fabrics::nqn::{self, Nqn};
use aryk_nvmf::{
    Address, ENTRIES_MAX, Limits, NewSubsystem, QUEUES_MAX, QueueLimits, SHARED_RECEIVES_MAX, Target,
    Transport,
};
use aryk_reactor::{MoveError, Order};
use reservations::Keeper;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        CREATE_TARGET,
        Phase::RunTime,
        "Creates a target in addition to `nvmf_tgt`, which always exists. The result is its name.",
        create_target,
    );
    table.add(
        "nvmf_delete_target",
        Phase::RunTime,
        "Deletes a target with its subsystems; its hosts are disconnected.",
        delete_target,
    );
    table.add("nvmf_get_targets", Phase::RunTime, "Lists the names of the targets.", get_targets);
    table.add(
        CREATE_TRANSPORT,
        Phase::RunTime,
        "Lets a target listen for hosts by TCP or RDMA, and sets the limits of their queues.",
        create_transport,
    );
    table.add(
        "nvmf_get_transports",
        Phase::RunTime,
        "Lists a target's transports, with the limits of hosts' queues.",
        get_transports,
    );
    table.add(
        SET_MAX_SUBSYSTEMS,
        Phase::Any,
        "Sets how many subsystems a target may have.",
        set_max_subsystems,
    );
    table.add(
        SET_CRDT,
        Phase::Any,
        "Sets the delays after which hosts try failed commands again, for controllers that begin.",
        set_crdt,
    );
    table.add(
        ADD_REFERRAL,
        Phase::RunTime,
        "Adds another discovery service to the discovery page.",
        add_referral,
    );
    table.add(
        "nvmf_discovery_remove_referral",
        Phase::RunTime,
        "Removes another discovery service from the discovery page.",
        remove_referral,
    );
    table.add(
        "nvmf_discovery_get_referrals",
        Phase::RunTime,
        "Lists the other discovery services that the discovery page has.",
        get_referrals,
    );
    subsystem::register(table);
    limits::register(table);
    show::register(table);
    mdns::register(table);
}

pub(crate) const CREATE_TARGET: &str = "nvmf_create_target";
pub(crate) const CREATE_TRANSPORT: &str = "nvmf_create_transport";
const SET_MAX_SUBSYSTEMS: &str = "nvmf_set_max_subsystems";
const SET_CRDT: &str = "nvmf_set_crdt";
const ADD_REFERRAL: &str = "nvmf_discovery_add_referral";

/// The target that always exists.
const DEFAULT_TARGET: &str = "nvmf_tgt";
/// The port of NVMe over TCP and RDMA.
const PORT: u16 = 4420;
/// The port of discovery services.
const DISCOVERY_PORT: u16 = 8009;

/// The targets.
#[derive(Debug)]
pub(crate) struct State {
    env: Env,
    targets: RefCell<BTreeMap<String, Rc<Named>>>,
    subsystems_max: Cell<u32>,
    retry_delays: Cell<[u16; 3]>,
    /// Stores the reservations of all targets, if there is a state store.
    keeper: OnceCell<Keeper>,
    /// The target that is announced.
    published: RefCell<Option<mdns::Published>>,
    /// The name under which this daemon announces services, from the first one on.
    announced_as: OnceCell<String>,
}

/// A target.
#[derive(Debug)]
struct Named {
    target: Target,
    subsystems_max: Option<u32>,
    transports: RefCell<BTreeSet<Transport>>,
    /// Other discovery services, and whether their channels must be secure.
    referrals: RefCell<Vec<((Address, Nqn), bool)>>,
}

impl State {
    /// No target yet: the first call makes one.
    pub fn new(env: Env) -> Self {
        Self {
            env,
            targets: RefCell::default(),
            subsystems_max: Cell::new(1024),
            retry_delays: Cell::default(),
            keeper: OnceCell::new(),
            published: RefCell::default(),
            announced_as: OnceCell::new(),
        }
    }

    fn add(&self, name: &str, subsystems_max: Option<u32>) -> Rc<Named> {
        let target = Target::new(self.env.clone());
        target.set_limits(Limits { retry_delays: self.retry_delays.get(), ..Limits::default() });
        if let Some(keeper) = self.keeper.get() {
            target.set_saver(keeper.saver(name));
        }
        let (transports, referrals) = (RefCell::default(), RefCell::default());
        let named = Rc::new(Named { target, subsystems_max, transports, referrals });
        self.targets.borrow_mut().insert(name.to_owned(), Rc::clone(&named));
        named
    }

    /// The target of that name, or the one that there always is.
    fn find(&self, name: Option<&str>) -> Result<Rc<Named>, Error> {
        let name = name.unwrap_or(DEFAULT_TARGET);
        let found = self.targets.borrow().get(name).cloned();
        match found {
            Some(found) => Ok(found),
            None if name == DEFAULT_TARGET => Ok(self.add(name, None)),
            None => Err(Error::no_device("NVMe-oF target", name)),
        }
    }

    /// Has the queue of a host whose thread has that number run elsewhere. `None` if no queue has that thread.
    pub async fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        let targets: Vec<Rc<Named>> = self.targets.borrow().values().cloned().collect();
        for named in targets {
            if let Some(done) = named.target.order(thread, order.clone()).await {
                return Some(done);
            }
        }
        None
    }

    /// Ends all targets: no host uses a disk afterwards.
    pub async fn close(&self) {
        let published = self.published.take();
        if let Some(published) = published {
            published.end().await;
        }
        let targets: Vec<Rc<Named>> = self.targets.borrow().values().cloned().collect();
        for named in targets {
            named.target.close().await;
        }
    }
}

/// Parameters of `nvmf_create_target`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateTarget {
    /// Name of the new target.
    name: String,
    /// Number of subsystems that it may have. Default: that of `nvmf_set_max_subsystems`.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_subsystems: Option<u32>,
}

async fn create_target(control: &Control, p: CreateTarget) -> Result<String, Error> {
    if control.nvmf.find(Some(&p.name)).is_ok() {
        return Err(Error::errno(Errno::EXIST, format!("the target '{}' exists already", p.name)));
    }
    control.check_open()?;
    control.nvmf.add(&p.name, p.max_subsystems);
    object::made(control, CREATE_TARGET, &p);
    Ok(p.name)
}

/// Parameters of methods that name a target.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct TargetName {
    /// Name of the target.
    name: String,
}

async fn delete_target(control: &Control, p: TargetName) -> Result<bool, Error> {
    if p.name == DEFAULT_TARGET {
        return Err(Error::invalid(format!("the target '{DEFAULT_TARGET}' is always there")));
    }
    let named = control.nvmf.find(Some(&p.name))?;
    mdns::end(control, &named).await;
    named.target.close().await;
    control.nvmf.targets.borrow_mut().remove(&p.name);
    control.config.forget_that(Subsystem::Nvmf, |call| object::is_of_target(call, &p.name));
    reservations::forget_gone(control);
    Ok(true)
}

async fn get_targets(control: &Control, _: NoParams) -> Result<Vec<String>, Error> {
    control.nvmf.find(None)?;
    Ok(control.nvmf.targets.borrow().keys().cloned().collect())
}

/// Parameters of `nvmf_create_transport`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "many parameters are checked and have no effect")]
struct CreateTransport {
    /// The transport: `TCP` or `RDMA`.
    trtype: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// Entries of a queue, 2 to 1,024. Default: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_queue_depth: Option<u16>,
    /// I/O queues of a controller, 1 to 128. Default: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_io_qpairs_per_ctrlr: Option<u16>,
    /// Ignored.
    #[serde(skip_serializing)]
    in_capsule_data_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    max_io_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    io_unit_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    max_aq_depth: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    num_shared_buffers: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    buf_cache_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    iobuf_small_cache_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    iobuf_large_cache_size: Option<u32>,
    /// TCP: send replies of 16 KiB or more without a copy, if io_uring sends them. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    zcopy: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    num_cqe: Option<i32>,
    /// RDMA: the I/O queues of all hosts share so many receives of each device, 1 to 65,535. Default: each queue has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_srq_depth: Option<u32>,
    /// RDMA: each queue has its own receives, also with `max_srq_depth`. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_srq: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    c2h_success: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    sock_priority: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    acceptor_backlog: Option<i32>,
    /// Ignored.
    #[serde(skip_serializing)]
    abort_timeout_sec: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    no_wr_batching: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    control_msg_num: Option<u16>,
    /// Ignored.
    #[serde(skip_serializing)]
    disable_mappable_bar0: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    disable_adaptive_irq: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    disable_shadow_doorbells: Option<bool>,
    /// Ignored.
    #[serde(skip_serializing)]
    acceptor_poll_rate: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    ack_timeout: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    data_wr_pool_size: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    disable_command_passthru: Option<bool>,
}

/// The transport of this name.
fn parse_transport(name: &str) -> Result<Transport, Error> {
    let found = Transport::ALL.into_iter().find(|transport| transport.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        Error::invalid(format!("there is no transport '{name}': the target can have TCP and RDMA"))
    })
}

async fn create_transport(control: &Control, p: CreateTransport) -> Result<bool, Error> {
    let transport = parse_transport(&p.trtype)?;
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    if named.transports.borrow().contains(&transport) {
        // A CSI driver that was started again looks for "already exists".
        let message = format!("Transport type '{}' already exists", transport.name());
        let detail = "the target has it".into();
        return Err(Error::Coded { code: INTERNAL, message, detail });
    }
    let before = named.target.limits().of(transport);
    let limits = QueueLimits {
        entries: p.max_queue_depth.unwrap_or(before.entries),
        queues: p.max_io_qpairs_per_ctrlr.unwrap_or(before.queues),
    };
    if !(2..=ENTRIES_MAX).contains(&limits.entries) {
        return Err(Error::invalid(format!("max_queue_depth is 2 to {ENTRIES_MAX}")));
    }
    if !(1..=QUEUES_MAX).contains(&limits.queues) {
        return Err(Error::invalid(format!("max_io_qpairs_per_ctrlr is 1 to {QUEUES_MAX}")));
    }
    if p.max_srq_depth.is_some_and(|depth| !(1..=SHARED_RECEIVES_MAX).contains(&depth)) {
        return Err(Error::invalid(format!("max_srq_depth is 1 to {SHARED_RECEIVES_MAX}")));
    }
    // SPDK's command-line client always sends `no_srq` as false.
    let shared_receives = p.max_srq_depth.filter(|_| p.no_srq != Some(true));
    if transport == Transport::Rdma {
        named.target.prepare_rdma().await?;
    }
    let all = named.target.limits();
    named.target.set_limits(match transport {
        Transport::Tcp => Limits { tcp: limits, zero_copy: p.zcopy.unwrap_or(all.zero_copy), ..all },
        Transport::Rdma => Limits { rdma: limits, shared_receives, ..all },
    });
    named.transports.borrow_mut().insert(transport);
    object::made(control, CREATE_TRANSPORT, &CreateTransport { trtype: transport.name().into(), ..p });
    Ok(true)
}

/// Parameters of `nvmf_get_transports`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetTransports {
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
    /// Only this transport.
    trtype: Option<String>,
}

/// One of the results of `nvmf_get_transports`.
#[derive(Debug, Serialize, JsonSchema)]
struct TransportInfo {
    #[serde(rename = "type")]
    kind: &'static str,
    trtype: &'static str,
    max_queue_depth: u16,
    max_io_qpairs_per_ctrlr: u16,
    in_capsule_data_size: u32,
    max_io_size: u32,
    io_unit_size: u32,
    abort_timeout_sec: u32,
    /// RDMA: receives of a device that the I/O queues share. Absent: each queue has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_srq_depth: Option<u32>,
}

async fn get_transports(control: &Control, p: GetTransports) -> Result<Vec<TransportInfo>, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let only = p.trtype.as_deref().map(parse_transport).transpose()?;
    let limits = named.target.limits();
    let info = |transport: Transport| {
        let QueueLimits { entries, queues } = limits.of(transport);
        TransportInfo {
            kind: transport.name(),
            trtype: transport.name(),
            max_queue_depth: entries,
            max_io_qpairs_per_ctrlr: queues,
            in_capsule_data_size: transport.in_capsule_max(),
            max_io_size: 128 << 10,
            io_unit_size: 128 << 10,
            abort_timeout_sec: 1,
            max_srq_depth: limits.shared_receives.filter(|_| transport == Transport::Rdma),
        }
    };
    let transports = named.transports.borrow();
    let wanted = transports.iter().filter(|transport| only.is_none_or(|only| only == **transport));
    let found: Vec<TransportInfo> = wanted.map(|transport| info(*transport)).collect();
    match only {
        Some(transport) if found.is_empty() => Err(Error::no_device("transport", transport.name())),
        _ => Ok(found),
    }
}

/// Parameters of `nvmf_set_max_subsystems`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetMaxSubsystems {
    /// Number of subsystems that a target may have.
    max_subsystems: u32,
}

async fn set_max_subsystems(control: &Control, p: SetMaxSubsystems) -> Result<bool, Error> {
    control.nvmf.subsystems_max.set(p.max_subsystems);
    object::made(control, SET_MAX_SUBSYSTEMS, &p);
    Ok(true)
}

/// Parameters of `nvmf_set_crdt`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetCrdt {
    /// The delay after a command that may succeed at once, as one whose data was damaged on its way, in units of 100 ms.
    #[serde(default)]
    crdt1: u16,
    /// The delay while a namespace is not ready or a path changes its state, in units of 100 ms.
    #[serde(default)]
    crdt2: u16,
    /// The delay while a path is inaccessible, in units of 100 ms.
    #[serde(default)]
    crdt3: u16,
}

async fn set_crdt(control: &Control, p: SetCrdt) -> Result<bool, Error> {
    let retry_delays = [p.crdt1, p.crdt2, p.crdt3];
    control.nvmf.retry_delays.set(retry_delays);
    for named in control.nvmf.targets.borrow().values() {
        named.target.set_limits(Limits { retry_delays, ..named.target.limits() });
    }
    object::made(control, SET_CRDT, &p);
    Ok(true)
}

/// Where a target listens, or another discovery service is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListenAddress {
    /// The transport: `TCP` or `RDMA`.
    trtype: String,
    /// The kind of address, `IPv4` or `IPv6`, which follows from the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    adrfam: Option<String>,
    /// The IP address.
    traddr: String,
    /// The port. Default: 4420, of a discovery service 8009.
    #[serde(skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
}

impl ListenAddress {
    fn new(Address { transport, socket }: Address) -> Self {
        Self {
            trtype: transport.name().into(),
            adrfam: Some(if socket.is_ipv4() { "IPv4" } else { "IPv6" }.into()),
            traddr: socket.ip().to_string(),
            trsvcid: Some(socket.port().to_string()),
        }
    }

    fn parse(&self, port: u16) -> Result<Address, Error> {
        let transport = parse_transport(&self.trtype)?;
        let ip: IpAddr = (self.traddr.trim_matches(['[', ']']).parse())
            .map_err(|_| Error::invalid(format!("'{}' is no IP address", self.traddr)))?;
        let is_family = |name: &String| match ip {
            IpAddr::V4(_) => name.eq_ignore_ascii_case("ipv4"),
            IpAddr::V6(_) => name.eq_ignore_ascii_case("ipv6"),
        };
        if let Some(family) = self.adrfam.as_ref().filter(|name| !is_family(name)) {
            return Err(Error::invalid(format!("'{}' is no {family} address", self.traddr)));
        }
        let port = match self.trsvcid.as_deref() {
            None | Some("") => port,
            Some(text) => text.parse().map_err(|_| Error::invalid(format!("'{text}' is no port")))?,
        };
        Ok(Address { transport, socket: SocketAddr::new(ip, port) })
    }
}

/// An NVMe qualified name among the parameters.
fn parse_nqn(text: &str) -> Result<Nqn, Error> {
    text.parse().map_err(|error: nqn::NqnError| Error::invalid(format!("'{text}': {error}")))
}

/// Parameters of `nvmf_discovery_add_referral`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Referral {
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// The address of the discovery service.
    address: ListenAddress,
    /// Name of the discovery service. Default: the one of all discovery services.
    #[serde(skip_serializing_if = "Option::is_none")]
    subnqn: Option<String>,
    /// Whether connections to it must use TLS; only by TCP. Default: false.
    #[serde(default, skip_serializing_if = "is_default")]
    secure_channel: bool,
}

/// Parameters of `nvmf_discovery_remove_referral`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveReferral {
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
    /// The address of the discovery service.
    address: ListenAddress,
    /// Name of the discovery service. Default: the one of all discovery services.
    subnqn: Option<String>,
}

/// A discovery service with this address and name.
fn parse_referral(address: &ListenAddress, name: Option<&str>) -> Result<(Address, Nqn), Error> {
    Ok((address.parse(DISCOVERY_PORT)?, parse_nqn(name.unwrap_or(nqn::DISCOVERY))?))
}

impl Named {
    fn show_referrals(&self) {
        let entry = |(number, ((address, name), is_secure)): (usize, &((Address, Nqn), bool))| Entry {
            transport: address.transport.into(),
            family: if address.socket.is_ipv6() { Family::Ipv6 } else { Family::Ipv4 },
            subtype: Subtype::Referral,
            security: if *is_secure { Security::Tls } else { Security::Unspecified },
            port_id: u16::MAX - number as u16,
            address: address.socket.ip().to_string(),
            service: address.socket.port().to_string(),
            subsystem: name.clone(),
        };
        self.target.set_referrals(self.referrals.borrow().iter().enumerate().map(entry).collect());
    }
}

async fn add_referral(control: &Control, p: Referral) -> Result<bool, Error> {
    let referral = parse_referral(&p.address, p.subnqn.as_deref())?;
    if p.secure_channel && referral.0.transport != Transport::Tcp {
        return Err(Error::invalid("`secure_channel` is for TCP only"));
    }
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    if named.referrals.borrow().iter().any(|(known, _)| *known == referral) {
        return Err(Error::errno(Errno::EXIST, "the discovery page has this discovery service already"));
    }
    let address = ListenAddress::new(referral.0);
    named.referrals.borrow_mut().push((referral, p.secure_channel));
    named.show_referrals();
    object::made(control, ADD_REFERRAL, &Referral { address, ..p });
    Ok(true)
}

async fn remove_referral(control: &Control, p: RemoveReferral) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let referral = parse_referral(&p.address, p.subnqn.as_deref())?;
    let before = named.referrals.borrow().len();
    named.referrals.borrow_mut().retain(|(known, _)| *known != referral);
    if named.referrals.borrow().len() == before {
        return Err(Error::errno(Errno::NOENT, "the discovery page does not have this discovery service"));
    }
    named.show_referrals();
    let RemoveReferral { tgt_name, subnqn, .. } = p;
    let address = ListenAddress::new(referral.0);
    object::forget(control, ADD_REFERRAL, &Referral { tgt_name, address, subnqn, secure_channel: false });
    Ok(true)
}

/// Parameters of methods that may name a target.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfTarget {
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
}

/// One of the results of `nvmf_discovery_get_referrals`.
#[derive(Debug, Serialize, JsonSchema)]
struct ReferralInfo {
    address: ListenAddress,
    subnqn: String,
    /// Whether connections to it must use TLS.
    secure_channel: bool,
}

async fn get_referrals(control: &Control, p: OfTarget) -> Result<Vec<ReferralInfo>, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let referrals = named.referrals.borrow();
    let info = |((address, name), is_secure): &((Address, Nqn), bool)| ReferralInfo {
        address: ListenAddress::new(*address),
        subnqn: name.to_string(),
        secure_channel: *is_secure,
    };
    Ok(referrals.iter().map(info).collect())
}

impl From<aryk_nvmf::Error> for Error {
    fn from(error: aryk_nvmf::Error) -> Self {
        use aryk_nvmf::Error as Nvmf;
        let errno = match &error {
            Nvmf::Disk(_) => {
                let Nvmf::Disk(error) = error else { unreachable!("just matched") };
                return error.into();
            }
            Nvmf::Exists(_) | Nvmf::NamespaceExists(_) => Errno::EXIST,
            Nvmf::NotFound(_) | Nvmf::NoNamespace(_) => Errno::NODEV,
            Nvmf::NotListening(_) => Errno::NOENT,
            Nvmf::Channel(_) => Errno::ADDRINUSE,
            Nvmf::NamespaceId(_) | Nvmf::Group(_) | Nvmf::NoAna | Nvmf::SeenByAll(_) | Nvmf::Limits(_) => {
                Errno::INVAL
            }
            Nvmf::Rdma(_) => Errno::OPNOTSUPP,
            Nvmf::NoDevice(_) => Errno::ADDRNOTAVAIL,
            Nvmf::Listen { error, .. } => Errno::from_io_error(error).unwrap_or(Errno::IO),
        };
        Self::errno(errno, error.to_string())
    }
}

/// Removes what a call has created that could not be stored.
pub(crate) async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    let Some(call) = control.config.noted(Subsystem::Nvmf, name) else { return Ok(()) };
    object::unmake(control, &call).await
}

/// Defaults of a new subsystem, which SPDK's are.
fn new_subsystem(name: Nqn) -> NewSubsystem {
    NewSubsystem { namespaces_max: 32, ..NewSubsystem::named(name) }
}
