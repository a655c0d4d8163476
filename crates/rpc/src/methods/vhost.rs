//! `vhost_*`: the controllers through which VMs access disks. Control context.

use super::{Control, Error, Phase, Table, vhost_scsi};
use crate::config::Subsystem;
use crate::params::{CpuMask, SocketGroup, SocketMode, SocketOwner};
use aryk_reactor::{CoreSet, Handle};
use aryk_vhost_blk as vhost;
use aryk_vhost_user::Snapshot;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "vhost_create_blk_controller",
        Phase::RunTime,
        "Creates a vhost-user-blk controller: a socket through which a VM accesses a disk.",
        create_blk_controller,
    );
    table.add("vhost_delete_controller", Phase::RunTime, "Removes a controller.", delete_controller);
    table.add(
        "vhost_get_controllers",
        Phase::RunTime,
        "Lists the controllers, or describes one of them.",
        get_controllers,
    );
    table.add(
        SET_COALESCING,
        Phase::RunTime,
        "Stores the interrupt coalescing of a controller, without delaying interrupts. They are not delayed: the guest's driver alone determines when it is notified.",
        set_coalescing,
    );
    table.add(
        "virtio_blk_get_transports",
        Phase::RunTime,
        "Lists the transports of vhost-user-blk controllers.",
        get_transports,
    );
}

/// The only transport of vhost-user-blk controllers.
const TRANSPORT: &str = "vhost_user_blk";

/// Parameters of `vhost_create_blk_controller`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateBlkController {
    /// Name of the new controller, and of its socket.
    ctrlr: String,
    /// Name, alias or uuid of the disk.
    dev_name: String,
    /// Whether the VM may only read.
    #[serde(default)]
    readonly: bool,
    /// Cores whose reactors may serve the queues. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<CpuMask>,
    /// `vhost_user_blk`, the default.
    #[serde(default, skip_serializing)]
    transport: Option<String>,
    /// Ignored: packed rings are always offered, and the guest's driver chooses.
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "packed rings are always offered; the guest's driver chooses")]
    packed_ring: bool,
    /// Aryk only: maximum number of queues of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_queues: Option<u16>,
    /// Aryk only: path of the VM's socket, to which the controller connects instead of listening.
    #[serde(skip_serializing_if = "Option::is_none")]
    connect: Option<PathBuf>,
    /// Aryk only: owner of the socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_owner: Option<SocketOwner>,
    /// Aryk only: group of the socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_group: Option<SocketGroup>,
    /// Aryk only: permissions of the socket in octal digits. Default: 660 with `socket_group`, 600 otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_mode: Option<SocketMode>,
    /// Aryk only: refuse a disk that others have open, unless all of them only read.
    #[serde(default, skip_serializing)]
    exclusive: bool,
}

async fn create_blk_controller(control: &Control, p: CreateBlkController) -> Result<bool, Error> {
    if let Some(transport) = p.transport.as_ref().filter(|t| *t != TRANSPORT) {
        return Err(Error::invalid(format!("there is no transport '{transport}', only {TRANSPORT}")));
    }
    let rights = (p.socket_owner.as_ref(), p.socket_group.as_ref(), p.socket_mode);
    let link = link(p.connect.as_ref(), rights)?;
    if taken(control, &p.ctrlr) {
        return Err(vhost::Error::Exists(p.ctrlr).into());
    }
    if p.exclusive {
        refuse_shared(control, &p.dev_name, p.readonly)?;
    }
    control.check_open()?;
    control.controllers.create(vhost::Options {
        name: p.ctrlr.clone(),
        disk: p.dev_name.clone(),
        read_only: p.readonly,
        cores: p.cpumask.as_ref().map(|mask| mask.0.clone()),
        queues: p.num_queues.unwrap_or(vhost::QUEUES),
        link,
    })?;
    // Now that the controller has opened the disk, no initiator can register; but one that registered before relies on
    // reservations, which this controller does not enforce.
    let disk = control.disks.registry.find(&p.dev_name)?;
    if control.scsi_controllers.units().is_registered(&disk) {
        control.controllers.delete(&p.ctrlr).await?;
        let why = "SCSI initiators have registered to reserve this disk, and a blk controller does not enforce reservations";
        let todo = "attach the disk with --scsi, or unregister the initiators";
        return Err(Error::errno(Errno::BUSY, format!("'{}': {why}: {todo}", p.dev_name)));
    }
    control.config.made(Subsystem::VhostBlk, &p.ctrlr, "vhost_create_blk_controller", &p);
    Ok(true)
}

/// Refuses a disk that others have open, unless none of them writes: two VMs that write to one file system destroy it. No other
/// opener can appear between this check and the opening of the disk.
pub(super) fn refuse_shared(control: &Control, disk: &str, read_only: bool) -> Result<(), Error> {
    let bdev = control.disks.find(disk)?;
    if bdev.device().is_read_only() {
        return Ok(());
    }
    match bdev.openers().into_iter().find(|(_, writes)| *writes || !read_only) {
        Some((owner, _)) => Err(Error::errno(Errno::BUSY, format!("`{}` is in use by {owner}", bdev.name()))),
        None => Ok(()),
    }
}

/// Whether a controller of any kind has that name.
pub(super) fn taken(control: &Control, name: &str) -> bool {
    control.controllers.has(name) || control.scsi_controllers.has(name)
}

/// How a controller and its VM connect: through the VM's socket, or through a socket of arykd with these permissions.
pub(super) fn link(
    connect: Option<&PathBuf>,
    (owner, group, mode): (Option<&SocketOwner>, Option<&SocketGroup>, Option<SocketMode>),
) -> Result<vhost::Link, Error> {
    let rights = vhost::SocketOptions {
        owner: owner.map(|owner| owner.id),
        group: group.map(|group| group.id),
        mode: mode.map(|mode| mode.0),
    };
    match connect {
        Some(_) if rights != vhost::SocketOptions::default() => Err(Error::invalid(
            "socket owner, group and mode cannot be set with `connect`: the VM creates the socket",
        )),
        Some(path) => Ok(vhost::Link::Connect(path.clone())),
        None => Ok(vhost::Link::Listen(rights)),
    }
}

/// Parameters of `vhost_delete_controller`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteController {
    /// Name of the controller.
    ctrlr: String,
}

async fn delete_controller(control: &Control, p: DeleteController) -> Result<bool, Error> {
    if control.scsi_controllers.has(&p.ctrlr) {
        if control.scsi_controllers.is_connected(&p.ctrlr) {
            let why = "a VM is connected to controller";
            let name = &p.ctrlr;
            return Err(Error::errno(
                Errno::BUSY,
                format!("{why} `{name}`: stop the VM first; its disks can be detached one by one"),
            ));
        }
        let deleted = control.scsi_controllers.delete(&p.ctrlr).await;
        vhost_scsi::forget_gone(control);
        vhost_scsi::forget_absent_targets(control, &p.ctrlr);
        forget_signals(control, &p.ctrlr);
        return Ok(deleted.map(|()| true)?);
    }
    if !control.controllers.has(&p.ctrlr) && forget_absent(control, &p.ctrlr) {
        return Ok(true);
    }
    let deleted = control.controllers.delete(&p.ctrlr).await;
    // While this call waited for the end, a new controller of that name may have been created.
    if !control.controllers.has(&p.ctrlr) {
        control.config.removed(Subsystem::VhostBlk, &p.ctrlr);
    }
    forget_signals(control, &p.ctrlr);
    Ok(deleted.map(|()| true)?)
}

/// Removes the notes of an absent controller and of its targets; returns whether there was one.
fn forget_absent(control: &Control, controller: &str) -> bool {
    let is_known = [Subsystem::VhostBlk, Subsystem::VhostScsi]
        .into_iter()
        .any(|subsystem| control.config.forget_absent(subsystem, controller));
    if is_known {
        vhost_scsi::forget_absent_targets(control, controller);
        forget_signals(control, controller);
    }
    is_known
}

/// Removes the note of the coalescing of a removed controller.
fn forget_signals(control: &Control, controller: &str) {
    if !taken(control, controller) {
        control.config.forget(Subsystem::Signals, controller);
    }
}

/// Parameters of `vhost_get_controllers`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetControllers {
    /// Name of the controller to describe. Default: all controllers.
    name: Option<String>,
}

/// One of the results of `vhost_get_controllers`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostController")]
struct Controller {
    /// Name of the controller.
    ctrlr: String,
    /// Cores that may serve the controller.
    cpumask: String,
    /// As set by `vhost_controller_set_coalescing`, without effect: interrupts are not delayed.
    delay_base_us: u32,
    /// As set by `vhost_controller_set_coalescing`, without effect.
    iops_threshold: u32,
    /// Path of the socket.
    socket: PathBuf,
    /// Aryk only: maximum number of queues.
    num_queues: u16,
    /// Aryk only: the name of a SCSI controller's VM as initiator, for reservations.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_id: Option<String>,
    /// Aryk only: whether the controller connects to the VM's socket.
    connects: bool,
    /// The connected VM, if any.
    sessions: Vec<Session>,
    /// Members of one kind of controller.
    backend_specific: BackendSpecific,
    /// Aryk only: counters of the controller.
    statistics: Statistics,
}

/// A connected front-end.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostSession")]
struct Session {
    /// Number of the connection.
    vid: u64,
    /// Same as `vid`.
    id: u64,
    /// Name of the session, for display.
    name: String,
    /// Whether a queue runs.
    started: bool,
    /// Number of running queues.
    max_queues: usize,
    /// Aryk only: process ID of the front-end, if the kernel reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    /// Aryk only: running queues.
    queues: Vec<Queue>,
}

/// A queue of a VM.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostQueue")]
struct Queue {
    /// Number of the queue.
    index: u16,
    /// Core that serves the queue.
    lcore: u16,
}

/// Members of one kind of controller.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostBackend")]
struct BackendSpecific {
    /// Of a vhost-user-blk controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<Block>,
    /// Of a vhost-user-scsi controller: the targets with a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    scsi: Option<Vec<Target>>,
}

/// A target with a disk.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostTarget")]
struct Target {
    scsi_dev_num: u8,
    id: u8,
    target_name: String,
    luns: Vec<Lun>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostLun")]
struct Lun {
    id: u16,
    bdev_name: String,
}

impl Target {
    fn new(number: u8, disk: String) -> Self {
        Self {
            scsi_dev_num: number,
            id: number,
            target_name: format!("Target {number}"),
            luns: vec![Lun { id: 0, bdev_name: disk }],
        }
    }
}

/// The disk, as the VM sees it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostBlock")]
struct Block {
    /// Whether the VM may only read.
    readonly: bool,
    /// Name of the disk; `null` after the disk was removed.
    bdev: Option<String>,
    /// `vhost_user_blk`.
    transport: &'static str,
}

/// Counters of the controller since its creation.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostStatistics")]
struct Statistics {
    /// Front-ends that have connected.
    sessions: u64,
    /// Sessions that did not end with a disconnect of the front-end.
    failed_sessions: u64,
    /// Messages received from the front-end.
    messages: u64,
    /// Messages answered with a failure, after which the session continued.
    refused_messages: u64,
    /// Errors of the connection; each is a refused message or the end of a session.
    connection_errors: u64,
    /// Errors in messages.
    protocol_errors: u64,
    /// Errors in the number or kind of file descriptors.
    fd_errors: u64,
    /// Errors in guest memory and its tables.
    memory_errors: u64,
    /// Errors that the controller has reported.
    device_errors: u64,
    /// Text of the last error.
    last_error: Option<String>,
    /// Descriptor chains that are not valid requests.
    bad_chains: u64,
    /// Requests without a field for their status.
    unanswerable_requests: u64,
    /// Queues that stopped because of an invalid ring.
    broken_queues: u64,
}

impl Session {
    /// The session of a controller's front-end, if one is connected.
    fn of(name: &str, sessions: &Snapshot, running: &[(u16, u16)]) -> Option<Self> {
        sessions.connected.then(|| Self {
            vid: sessions.sessions,
            id: sessions.sessions,
            name: format!("{name}s{}", sessions.sessions),
            started: !running.is_empty(),
            max_queues: running.len(),
            pid: sessions.pid,
            queues: running.iter().map(|&(index, lcore)| Queue { index, lcore }).collect(),
        })
    }
}

impl Statistics {
    fn new(sessions: Snapshot, [bad_chains, unanswerable_requests, broken_queues]: [u64; 3]) -> Self {
        Self {
            sessions: sessions.sessions,
            failed_sessions: sessions.failed,
            messages: sessions.messages,
            refused_messages: sessions.refused,
            connection_errors: sessions.connection_errors,
            protocol_errors: sessions.protocol_errors,
            fd_errors: sessions.fd_errors,
            memory_errors: sessions.memory_errors,
            device_errors: sessions.device_errors,
            last_error: sessions.last_error,
            bad_chains,
            unanswerable_requests,
            broken_queues,
        }
    }
}

impl Controller {
    fn block(info: vhost::Info, all_cores: &CoreSet, coalescing: Coalescing) -> Self {
        let block = Block { readonly: info.read_only, bdev: info.disk, transport: TRANSPORT };
        Self {
            cpumask: info.cores.as_ref().unwrap_or(all_cores).to_string(),
            delay_base_us: coalescing.delay_base_us,
            iops_threshold: coalescing.iops_threshold,
            socket: info.socket,
            num_queues: info.queues,
            transport_id: None,
            connects: info.connects,
            sessions: Session::of(&info.name, &info.sessions, &info.running).into_iter().collect(),
            backend_specific: BackendSpecific { block: Some(block), scsi: None },
            statistics: Statistics::new(
                info.sessions,
                [info.bad_chains, info.unanswerable, info.broken_queues],
            ),
            ctrlr: info.name,
        }
    }

    fn scsi(info: aryk_vhost_scsi::Info, all_cores: &CoreSet, coalescing: Coalescing) -> Self {
        let targets = info.targets.into_iter().map(|(number, disk)| Target::new(number, disk)).collect();
        let sessions = info.sessions.unwrap_or_default();
        Self {
            cpumask: info.cores.as_ref().unwrap_or(all_cores).to_string(),
            delay_base_us: coalescing.delay_base_us,
            iops_threshold: coalescing.iops_threshold,
            socket: info.socket,
            num_queues: info.queues,
            transport_id: Some(info.initiator.to_string()),
            connects: info.connects,
            sessions: Session::of(&info.name, &sessions, &info.running).into_iter().collect(),
            backend_specific: BackendSpecific { block: None, scsi: Some(targets) },
            statistics: Statistics::new(sessions, [info.bad_chains, info.unanswerable, info.broken_queues]),
            ctrlr: info.name,
        }
    }
}

async fn get_controllers(control: &Control, p: GetControllers) -> Result<Vec<Controller>, Error> {
    let all_cores: CoreSet = control.reactors.handles().iter().map(Handle::core).collect();
    let block = control.controllers.list().into_iter().map(|info| {
        let coalescing = Coalescing::of(control, &info.name);
        Controller::block(info, &all_cores, coalescing)
    });
    let scsi = control.scsi_controllers.list().into_iter().map(|info| {
        let coalescing = Coalescing::of(control, &info.name);
        Controller::scsi(info, &all_cores, coalescing)
    });
    let mut all: Vec<_> = block.chain(scsi).collect();
    all.sort_by(|a, b| a.ctrlr.cmp(&b.ctrlr));
    if let Some(name) = &p.name {
        all.retain(|controller| controller.ctrlr == *name);
        if all.is_empty() {
            return Err(Error::no_device("controller", name));
        }
    }
    Ok(all)
}

/// Parameters of `vhost_controller_set_coalescing`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetCoalescing {
    /// Name of the controller.
    ctrlr: String,
    /// Maximum delay in microseconds. Stored and reported, without effect.
    delay_base_us: u32,
    /// Requests per second from which on interrupts would be delayed. Stored and reported, without effect.
    iops_threshold: u32,
}

/// Interrupt coalescing, as SPDK defines it.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Coalescing {
    delay_base_us: u32,
    iops_threshold: u32,
}

impl Coalescing {
    /// The stored settings of a controller.
    fn of(control: &Control, controller: &str) -> Self {
        let params = control.config.params(Subsystem::Signals, controller);
        params.and_then(|params| serde_json::from_value(params).ok()).unwrap_or_default()
    }
}

const SET_COALESCING: &str = "vhost_controller_set_coalescing";

async fn set_coalescing(control: &Control, p: SetCoalescing) -> Result<bool, Error> {
    if !taken(control, &p.ctrlr) {
        return Err(Error::no_device("controller", &p.ctrlr));
    }
    match p.delay_base_us {
        0 => _ = control.config.forget(Subsystem::Signals, &p.ctrlr),
        _ => control.config.made(Subsystem::Signals, &p.ctrlr, SET_COALESCING, &p),
    }
    Ok(true)
}

/// One of the results of `virtio_blk_get_transports`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VirtioBlkTransport")]
struct Transport {
    name: &'static str,
}

/// Parameters of `virtio_blk_get_transports`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetTransports {
    /// Name of the transport. Default: all transports.
    name: Option<String>,
}

async fn get_transports(_: &Control, p: GetTransports) -> Result<Vec<Transport>, Error> {
    match p.name {
        Some(name) if name != TRANSPORT => Err(Error::no_device("transport", &name)),
        Some(_) | None => Ok(vec![Transport { name: TRANSPORT }]),
    }
}

impl From<vhost::Error> for Error {
    fn from(error: vhost::Error) -> Self {
        use vhost::Error as Vhost;
        let errno = match &error {
            Vhost::Disk(error) => return error.clone().into(),
            Vhost::Exists(_) => Errno::EXIST,
            Vhost::NotFound(_) => Errno::NODEV,
            Vhost::Name(_) | Vhost::Queues(_) | Vhost::Cores(_) => Errno::INVAL,
            Vhost::Endpoint(error) => errno_of(error),
        };
        Self::errno(errno, error.to_string())
    }
}

pub(super) fn errno_of(error: &vhost::EndpointError) -> Errno {
    use vhost::{EndpointError as Endpoint, ListenError};
    let of = |e: &std::io::Error| Errno::from_io_error(e).unwrap_or(Errno::IO);
    match error {
        Endpoint::Os(error) => of(error),
        Endpoint::Listen(ListenError::PathTooLong { .. }) => Errno::NAMETOOLONG,
        Endpoint::Listen(ListenError::InUse(_)) => Errno::ADDRINUSE,
        Endpoint::Listen(ListenError::NotASocket(_)) => Errno::NOTSOCK,
        Endpoint::Listen(ListenError::Rights { source, .. } | ListenError::Os { source, .. }) => of(source),
    }
}
