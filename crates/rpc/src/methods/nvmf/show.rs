//! Methods that list the objects of targets: subsystems, connected hosts, queues; and count queues. Control context.

use super::limits::{self, HostLimitsReply};
use super::subsystem::{OfSubsystem, State as PathState};
use super::{ListenAddress, OfTarget};
use crate::methods::framework::TICK_RATE;
use crate::methods::{Control, Error, Phase, Table, qos};
use aryk_nvme_fabrics::nqn::{DISCOVERY, Nqn};
use aryk_nvme_fabrics::reservation::{Kind, Registrant, State};
use aryk_nvmf::{
    Address, Channel, ControllerInfo, Done, ListenerInfo, NamedHost, NamespaceInfo, SubsystemInfo, Traffic,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "nvmf_get_subsystems",
        Phase::RunTime,
        "Lists the subsystems of a target, or the one of that name.",
        get_subsystems,
    );
    table.add(
        "nvmf_subsystem_get_controllers",
        Phase::RunTime,
        "Lists the hosts that are connected to a subsystem.",
        get_controllers,
    );
    table.add(
        "nvmf_subsystem_get_qpairs",
        Phase::RunTime,
        "Lists the queues of the hosts that are connected to a subsystem.",
        get_qpairs,
    );
    table.add(
        "nvmf_subsystem_get_listeners",
        Phase::RunTime,
        "Lists where a subsystem listens, with the states of the paths.",
        get_listeners,
    );
    table.add("nvmf_get_stats", Phase::RunTime, "Counts the queues of hosts, by reactor.", get_stats);
}

/// Parameters of `nvmf_get_subsystems`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetSubsystems {
    /// Only this subsystem.
    nqn: Option<String>,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
}

/// One of the results of `nvmf_get_subsystems`.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct SubsystemReply {
    nqn: String,
    subtype: &'static str,
    listen_addresses: Vec<ListenAddress>,
    allow_any_host: bool,
    hosts: Vec<HostName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial_number: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model_number: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_namespaces: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_cntlid: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_cntlid: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ana_reporting: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    passthrough: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespaces: Option<Vec<NamespaceReply>>,
    /// Aryk only: limits of hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_limits: Option<Vec<HostLimitsReply>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct HostName {
    nqn: String,
    /// The name of the secret by which the host proves who it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    /// The name of the secret by which the subsystem proves who it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_ctrlr_key: Option<String>,
    /// The name of the host's key of TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
}

impl HostName {
    fn new((host, NamedHost { keys, tls }): (&Nqn, &NamedHost)) -> Self {
        Self {
            nqn: host.to_string(),
            dhchap_key: keys.as_ref().map(|keys| keys.key.clone()),
            dhchap_ctrlr_key: keys.as_ref().and_then(|keys| keys.controller_key.clone()),
            psk: tls.as_ref().map(|key| key.name.clone()),
        }
    }
}

/// A namespace.
#[derive(Debug, Serialize, JsonSchema)]
struct NamespaceReply {
    nsid: u32,
    bdev_name: String,
    name: String,
    nguid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    eui64: Option<String>,
    uuid: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    anagrpid: Option<u32>,
    /// The hosts that see a hidden namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    hosts: Option<Vec<String>>,
    /// Aryk only: the hosts that are registered, and the reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    reservations: Option<ReservationsReply>,
}

/// The registrations of hosts with a namespace, and the reservation.
#[derive(Debug, Serialize, JsonSchema)]
struct ReservationsReply {
    registrants: Vec<RegistrantReply>,
    /// Type of the reservation. Without one: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    rtype: Option<&'static str>,
    /// Whether all of it persists through a loss of power.
    ptpl: bool,
}

/// A host that is registered.
#[derive(Debug, Serialize, JsonSchema)]
struct RegistrantReply {
    hostid: Uuid,
    /// The key, in hexadecimal digits.
    rkey: String,
    /// Whether the host holds the reservation.
    is_holder: bool,
}

impl ReservationsReply {
    fn new(state: &State) -> Self {
        let registrant = |of: &Registrant| RegistrantReply {
            hostid: Uuid::from_bytes(of.host),
            rkey: format!("{:x}", of.key),
            is_holder: state.is_holder(&of.host),
        };
        Self {
            registrants: state.registrants.iter().map(registrant).collect(),
            rtype: state.holder.map(|(_, kind)| match kind {
                Kind::WriteExclusive => "write_exclusive",
                Kind::ExclusiveAccess => "exclusive_access",
                Kind::WriteExclusiveRegistrants => "write_exclusive_reg_only",
                Kind::ExclusiveAccessRegistrants => "exclusive_access_reg_only",
                Kind::WriteExclusiveAll => "write_exclusive_all_regs",
                Kind::ExclusiveAccessAll => "exclusive_access_all_regs",
            }),
            ptpl: state.persists,
        }
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

impl NamespaceReply {
    fn new(nsid: u32, info: &NamespaceInfo) -> Self {
        Self {
            nsid,
            bdev_name: info.disk.clone(),
            name: info.disk.clone(),
            nguid: digits(&info.ids.nguid.unwrap_or_default()),
            eui64: info.ids.eui64.map(|eui64| digits(&eui64)),
            uuid: Uuid::from_bytes(info.ids.uuid.unwrap_or_default()),
            anagrpid: Some(info.ana_group).filter(|&group| group > 0),
            hosts: info.visible_to.as_ref().map(|hosts| hosts.iter().map(Nqn::to_string).collect()),
            reservations: Some(&info.reservations)
                .filter(|state| !state.registrants.is_empty())
                .map(ReservationsReply::new),
        }
    }
}

impl SubsystemReply {
    fn new(info: &SubsystemInfo) -> Self {
        let made_of = &info.made_of;
        Self {
            nqn: made_of.nqn.to_string(),
            subtype: "NVMe",
            listen_addresses: info.listeners.keys().map(|address| ListenAddress::new(*address)).collect(),
            allow_any_host: info.hosts.any,
            hosts: info.hosts.named.iter().map(HostName::new).collect(),
            serial_number: Some(made_of.serial.clone()),
            model_number: Some(made_of.model.clone()),
            max_namespaces: Some(made_of.namespaces_max),
            min_cntlid: Some(*made_of.controller_ids.start()),
            max_cntlid: Some(*made_of.controller_ids.end()),
            ana_reporting: Some(made_of.has_ana),
            passthrough: Some(false),
            namespaces: Some(info.namespaces.iter().map(|(&nsid, n)| NamespaceReply::new(nsid, n)).collect()),
            host_limits: limits::describe(&info.limits),
        }
    }
}

async fn get_subsystems(control: &Control, p: GetSubsystems) -> Result<Vec<SubsystemReply>, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let all = named.target.list();
    let discovery = SubsystemReply {
        nqn: DISCOVERY.into(),
        subtype: "Discovery",
        allow_any_host: true,
        ..SubsystemReply::default()
    };
    let replies = std::iter::once(discovery).chain(all.iter().map(SubsystemReply::new));
    let found: Vec<_> = replies.filter(|reply| p.nqn.as_ref().is_none_or(|nqn| *nqn == reply.nqn)).collect();
    match p.nqn {
        Some(nqn) if found.is_empty() => Err(Error::no_device("subsystem", &nqn)),
        _ => Ok(found),
    }
}

pub(super) fn find(control: &Control, p: &OfSubsystem) -> Result<SubsystemInfo, Error> {
    Ok(control.nvmf.find(p.tgt_name.as_deref())?.target.find(&p.nqn)?)
}

/// One of the results of `nvmf_subsystem_get_controllers`.
#[derive(Debug, Serialize, JsonSchema)]
struct ControllerReply {
    cntlid: u16,
    cntrltype: &'static str,
    hostnqn: String,
    hostid: Uuid,
    num_io_qpairs: usize,
    /// Aryk only: the host's address.
    peer_address: ListenAddress,
    /// Aryk only: where the host was accepted.
    listen_address: ListenAddress,
    /// Aryk only: what was done for the host since it connected.
    traffic: TrafficReply,
    /// Aryk only: limits of the host, for all its queues and all disks of the subsystem.
    assigned_rate_limits: qos::Limits,
}

/// The requests of a host that have ended.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmfTraffic")]
struct TrafficReply {
    reads: u64,
    read_bytes: u64,
    /// Time from the arrival of commands to the ends of their requests, summed over all, in nanoseconds.
    read_ns: u64,
    writes: u64,
    written_bytes: u64,
    write_ns: u64,
    /// Of other kinds.
    others: u64,
    other_ns: u64,
    /// Among all.
    failed: u64,
}

impl From<Traffic> for TrafficReply {
    fn from(traffic: Traffic) -> Self {
        let Traffic { reads, writes, others, failed } = traffic;
        Self {
            reads: reads.requests,
            read_bytes: reads.bytes,
            read_ns: reads.ns,
            writes: writes.requests,
            written_bytes: writes.bytes,
            write_ns: writes.ns,
            others: others.requests,
            other_ns: others.ns,
            failed,
        }
    }
}

async fn get_controllers(control: &Control, p: OfSubsystem) -> Result<Vec<ControllerReply>, Error> {
    let reply = |host: ControllerInfo| ControllerReply {
        cntlid: host.id,
        cntrltype: "io",
        hostnqn: host.host.to_string(),
        hostid: Uuid::from_bytes(host.host_id),
        num_io_qpairs: host.queues.len(),
        peer_address: ListenAddress::new(Address { transport: host.transport, socket: host.peer }),
        listen_address: ListenAddress::new(Address { transport: host.transport, socket: host.local }),
        traffic: host.traffic.into(),
        assigned_rate_limits: host.limits.into(),
    };
    Ok(find(control, &p)?.controllers.into_iter().map(reply).collect())
}

/// The hosts of all targets, for the metrics.
pub(crate) fn metrics(control: &Control) -> Vec<aryk_metrics::Host> {
    let describe = |(subsystem, host): (Nqn, ControllerInfo)| {
        let Traffic { reads, writes, others, failed } = host.traffic;
        let work = |of: Done| aryk_metrics::HostWork {
            requests: of.requests,
            bytes: of.bytes,
            latency_ns: of.ns,
            latencies: of.latencies,
        };
        aryk_metrics::Host {
            subsystem: subsystem.to_string(),
            name: host.host.to_string(),
            controller: host.id,
            queues: host.queues.len() as u64,
            reads: work(reads),
            writes: work(writes),
            others: work(others),
            failed,
        }
    };
    let targets = control.nvmf.targets.borrow();
    targets.values().flat_map(|named| named.target.hosts()).map(describe).collect()
}

/// One of the results of `nvmf_subsystem_get_qpairs`.
#[derive(Debug, Serialize, JsonSchema)]
struct QpairReply {
    cntlid: u16,
    qid: u16,
    state: &'static str,
    /// The core of the queue's reactor. The admin queue has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u16>,
    listen_address: ListenAddress,
    peer_address: ListenAddress,
}

async fn get_qpairs(control: &Control, p: OfSubsystem) -> Result<Vec<QpairReply>, Error> {
    let queues = |host: ControllerInfo| {
        let [listen_address, peer_address] = [host.local, host.peer]
            .map(|socket| ListenAddress::new(Address { transport: host.transport, socket }));
        let queues = host.queues.into_iter().map(|(qid, core)| (qid, Some(core)));
        std::iter::once((0, None)).chain(queues).map(move |(qid, core)| QpairReply {
            cntlid: host.id,
            qid,
            state: "active",
            core,
            listen_address: listen_address.clone(),
            peer_address: peer_address.clone(),
        })
    };
    Ok(find(control, &p)?.controllers.into_iter().flat_map(queues).collect())
}

/// One of the results of `nvmf_subsystem_get_listeners`.
#[derive(Debug, Serialize, JsonSchema)]
struct ListenerReply {
    address: ListenAddress,
    /// Whether connections use TLS.
    secure_channel: bool,
    /// The cores whose reactors may serve the queues. Omitted: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<String>,
    /// The state of the first ANA group.
    ana_state: PathState,
    /// The states of the ANA groups of the subsystem's namespaces.
    ana_states: Vec<GroupState>,
}

/// The state of an ANA group.
#[derive(Debug, Serialize, JsonSchema)]
struct GroupState {
    ana_group: u32,
    ana_state: PathState,
}

async fn get_listeners(control: &Control, p: OfSubsystem) -> Result<Vec<ListenerReply>, Error> {
    let reply = |(address, ListenerInfo { channel, cores, groups }): (Address, ListenerInfo)| {
        let states: Vec<GroupState> = (groups.into_iter())
            .map(|(ana_group, state)| GroupState { ana_group, ana_state: PathState::from(state) })
            .collect();
        ListenerReply {
            address: ListenAddress::new(address),
            secure_channel: channel == Channel::Tls,
            cpumask: cores.map(|cores| cores.to_string()),
            ana_state: states.first().map_or(PathState::Optimized, |group| group.ana_state),
            ana_states: states,
        }
    };
    Ok(find(control, &p)?.listeners.into_iter().map(reply).collect())
}

/// Result of `nvmf_get_stats`.
#[derive(Debug, Serialize, JsonSchema)]
struct Stats {
    tick_rate: u64,
    /// Aryk only: authentications of hosts that have failed.
    failed_authentications: u64,
    poll_groups: Vec<PollGroup>,
}

/// The queues of hosts on one reactor.
#[derive(Debug, Serialize, JsonSchema)]
struct PollGroup {
    name: String,
    /// Admin queues that have begun. All are in control, and counted with the first reactor.
    admin_qpairs: u64,
    /// I/O queues that have begun.
    io_qpairs: u64,
    current_admin_qpairs: usize,
    current_io_qpairs: usize,
}

async fn get_stats(control: &Control, p: OfTarget) -> Result<Stats, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let hosts: Vec<ControllerInfo> =
        named.target.list().into_iter().flat_map(|info| info.controllers).collect();
    let admin_queues = hosts.len() + named.target.discovery_controllers();
    let counts = named.target.began();
    let began = |core: Option<u16>| counts.get(&core).copied().unwrap_or(0);
    let group = |(number, reactor): (usize, aryk_reactor::Handle)| PollGroup {
        name: format!("nvmf_tgt_poll_group_{number:03}"),
        admin_qpairs: if number == 0 { began(None) } else { 0 },
        io_qpairs: began(Some(reactor.core())),
        current_admin_qpairs: if number == 0 { admin_queues } else { 0 },
        current_io_qpairs: (hosts.iter().flat_map(|host| host.queues.values()))
            .filter(|&&core| core == reactor.core())
            .count(),
    };
    let poll_groups = control.reactors.handles().into_iter().enumerate().map(group).collect();
    let failed_authentications = named.target.failed_authentications();
    Ok(Stats { tick_rate: TICK_RATE, failed_authentications, poll_groups })
}
