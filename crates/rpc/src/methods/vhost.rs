//! `vhost_*`: the controllers through which virtual machines reach disks. Control context.

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
        "Makes a controller: a socket through which a virtual machine reaches a disk.",
        create_blk_controller,
    );
    table.add("vhost_delete_controller", Phase::RunTime, "Removes a controller.", delete_controller);
    table.add("vhost_get_controllers", Phase::RunTime, "The controllers, or one of them.", get_controllers);
    table.add(
        SET_COALESCING,
        Phase::RunTime,
        "Keeps by how much SPDK would delay signals to a machine. They are not delayed: they are given as the machine's driver asks for them.",
        set_coalescing,
    );
    table.add(
        "virtio_blk_get_transports",
        Phase::RunTime,
        "The ways by which machines reach controllers.",
        get_transports,
    );
}

/// The one way by which machines reach controllers.
const TRANSPORT: &str = "vhost_user_blk";

/// Parameters of `vhost_create_blk_controller`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateBlkController {
    /// The name that it is to have, and its socket.
    ctrlr: String,
    /// The disk: name, alias or uuid.
    dev_name: String,
    /// Whether the machine may only read.
    #[serde(default)]
    readonly: bool,
    /// The cores to serve it on; by default any.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<CpuMask>,
    /// `vhost_user_blk`, which is the default.
    #[serde(default, skip_serializing)]
    transport: Option<String>,
    /// Not heeded: packed rings are always offered, and the machine chooses.
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "packed rings are offered in any case; the machine chooses")]
    packed_ring: bool,
    /// Ours: the most queues that a machine can have.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_queues: Option<u16>,
    /// Ours: the machine's socket, which to connect to instead of listening.
    #[serde(skip_serializing_if = "Option::is_none")]
    connect: Option<PathBuf>,
    /// Ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_owner: Option<SocketOwner>,
    /// Ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_group: Option<SocketGroup>,
    /// Ours: permissions in octal digits; if not given, 660 with `socket_group`, and 600 otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_mode: Option<SocketMode>,
    /// Ours: refuse a disk that others have open, unless all of them only read.
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
    control.controllers.create(vhost::Options {
        name: p.ctrlr.clone(),
        disk: p.dev_name.clone(),
        read_only: p.readonly,
        cores: p.cpumask.as_ref().map(|mask| mask.0.clone()),
        queues: p.num_queues.unwrap_or(vhost::QUEUES),
        link,
    })?;
    // Now that it is open no one can register any more; who has before is not to meet one that reservations do not hold off.
    let disk = control.disks.registry.find(&p.dev_name)?;
    if control.scsi_controllers.units().is_registered(&disk) {
        control.controllers.delete(&p.ctrlr).await?;
        let why =
            "SCSI initiators have registered with it to reserve it, which a block controller does not heed";
        let todo = "attach it with --scsi, or have them unregister";
        return Err(Error::errno(Errno::BUSY, format!("'{}': {why}: {todo}", p.dev_name)));
    }
    control.config.made(Subsystem::VhostBlk, &p.ctrlr, "vhost_create_blk_controller", &p);
    Ok(true)
}

/// Refuses a disk that others have open, unless nobody writes: two machines that write to one file system destroy it. Whoever opens the disk next does so
/// before anybody else is asked.
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

/// Whether there is a controller of that name, of any kind.
pub(super) fn taken(control: &Control, name: &str) -> bool {
    control.controllers.has(name) || control.scsi_controllers.has(name)
}

/// How a controller and its machine find each other: by the machine's socket, or by one of ours with these rights.
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
        Some(_) if rights != vhost::SocketOptions::default() => {
            Err(Error::invalid("a socket that is connected to has its owner's rights already"))
        }
        Some(path) => Ok(vhost::Link::Connect(path.clone())),
        None => Ok(vhost::Link::Listen(rights)),
    }
}

/// Parameters of `vhost_delete_controller`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteController {
    /// Its name.
    ctrlr: String,
}

async fn delete_controller(control: &Control, p: DeleteController) -> Result<bool, Error> {
    if control.scsi_controllers.has(&p.ctrlr) {
        if control.scsi_controllers.is_connected(&p.ctrlr) {
            let why = "a machine is connected to controller";
            let name = &p.ctrlr;
            return Err(Error::errno(
                Errno::BUSY,
                format!("{why} `{name}`: stop it first; its disks can be taken away one by one"),
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
    // Another of that name may have been made while its end was waited for.
    if !control.controllers.has(&p.ctrlr) {
        control.config.removed(Subsystem::VhostBlk, &p.ctrlr);
    }
    forget_signals(control, &p.ctrlr);
    Ok(deleted.map(|()| true)?)
}

/// Forgets a controller that could not be made again, and its targets; tells whether there was one.
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

/// Forgets what was set of a controller that is there no more.
fn forget_signals(control: &Control, controller: &str) {
    if !taken(control, controller) {
        control.config.forget(Subsystem::Signals, controller);
    }
}

/// Parameters of `vhost_get_controllers`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetControllers {
    /// The only one that is wanted.
    name: Option<String>,
}

/// One of the results of `vhost_get_controllers`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostController")]
struct Controller {
    /// Its name.
    ctrlr: String,
    /// The cores that it may be served on.
    cpumask: String,
    /// As `vhost_controller_set_coalescing` has set it, without effect: interrupts are not delayed.
    delay_base_us: u32,
    /// The same.
    iops_threshold: u32,
    /// The socket's path.
    socket: PathBuf,
    /// Ours.
    num_queues: u16,
    /// Ours: what disks know a SCSI controller by when its machine reserves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_id: Option<String>,
    /// Ours: whether the socket is the machine's.
    connects: bool,
    /// The machine, if it is connected.
    sessions: Vec<Session>,
    /// What only controllers of disks have.
    backend_specific: BackendSpecific,
    /// Ours.
    statistics: Statistics,
}

/// A front-end that is connected.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostSession")]
struct Session {
    /// Counts the connections.
    vid: u64,
    /// The same.
    id: u64,
    /// For people.
    name: String,
    /// Whether a queue is served.
    started: bool,
    /// Queues that are served.
    max_queues: usize,
    /// Ours: its process, if the kernel tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    /// Ours.
    queues: Vec<Queue>,
}

/// A queue of a machine.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostQueue")]
struct Queue {
    /// Its number.
    index: u16,
    /// The core that serves it.
    lcore: u16,
}

/// What only controllers of disks have.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostBackend")]
struct BackendSpecific {
    /// Of a controller of one disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<Block>,
    /// Of a controller whose disks come and go.
    #[serde(skip_serializing_if = "Option::is_none")]
    scsi: Option<Vec<Target>>,
}

/// A target that has a disk.
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

/// The disk, as the machine sees it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostBlock")]
struct Block {
    /// Whether the machine may only read.
    readonly: bool,
    /// `null` when the disk has been removed.
    bdev: Option<String>,
    /// `vhost_user_blk`.
    transport: &'static str,
}

/// What has happened at the socket since the controller was made.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostStatistics")]
struct Statistics {
    /// Front-ends that have connected.
    sessions: u64,
    /// Those of them that did not end by hanging up.
    failed_sessions: u64,
    /// From the machine.
    messages: u64,
    /// Those of them that were answered with a failure, after which the session went on.
    refused_messages: u64,
    /// Errors, each a refusal or the end of a session, of the connection.
    connection_errors: u64,
    /// Errors in messages.
    protocol_errors: u64,
    /// Errors in the number or kind of file descriptors.
    fd_errors: u64,
    /// Errors in the machine's memory and its tables.
    memory_errors: u64,
    /// Errors that the controller has found.
    device_errors: u64,
    /// For people.
    last_error: Option<String>,
    /// Descriptor chains that made no request.
    bad_chains: u64,
    /// Requests without a place for their status.
    unanswerable_requests: u64,
    /// Rings that contradicted themselves.
    broken_queues: u64,
}

impl Session {
    /// The front-end of a controller, if one is connected.
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
    /// The controller.
    ctrlr: String,
    /// Microseconds at most. Kept and told, without effect.
    delay_base_us: u32,
    /// Requests a second from which on signals would be delayed. Kept and told, without effect.
    iops_threshold: u32,
}

/// By how much SPDK would delay signals, and from when on.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Coalescing {
    delay_base_us: u32,
    iops_threshold: u32,
}

impl Coalescing {
    /// What was set of a controller.
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
    /// The only one that is wanted.
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
