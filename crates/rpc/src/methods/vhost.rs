//! `vhost_*`: the methods for controllers of all kinds, through which VMs access disks. Control context.

use super::{Control, Error, Phase, Table, vhost_blk, vhost_scsi};
use crate::config::Subsystem;
use crate::params::{SocketGroup, SocketMode, SocketOwner};
use aryk_reactor::{CoreSet, Handle, SleepPolicy};
use aryk_vhost_device as vhost;
use aryk_vhost_user::{Snapshot, SocketOptions};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::pin::Pin;

pub(super) fn register(table: &mut Table<Control>) {
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
        SET_SLEEP_POLICY,
        Phase::RunTime,
        "Sets what a reactor does between the requests of a controller. The setting applies at once, also to a connected VM.",
        set_sleep_policy,
    );
}

/// What the methods for all controllers need to know of one kind.
pub(super) struct Kind {
    /// The name of the kind, [`vhost::Kind::NAME`].
    pub name: &'static str,
    /// The subsystem of its controllers' notes.
    pub subsystem: Subsystem,
    /// Adds to a controller's description what only this kind has.
    pub describe: fn(&Control, &mut Controller),
    /// Fails if a controller must not be deleted now.
    pub check_unused: fn(&Control, &str) -> Result<(), Error>,
    /// Removes the notes of a controller that has been deleted, and of what belonged to it.
    pub forget: fn(&Control, &str),
    /// Removes an object that a call has created, with its note.
    pub unmake: for<'a> fn(&'a Control, &'a str) -> Unmaking<'a>,
}

type Unmaking<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// All kinds of controllers.
const KINDS: [Kind; 2] = [vhost_blk::KIND, vhost_scsi::KIND];

/// The kind of the controller of that name, if there is one.
fn kind_of(control: &Control, name: &str) -> Option<&'static Kind> {
    let kind = control.controllers.kind_of(name)?;
    Some(KINDS.iter().find(|known| known.name == kind).expect("every kind is listed"))
}

/// Removes an object of a kind's subsystem that a call has created.
pub(crate) async fn unmake(control: &Control, subsystem: Subsystem, object: &str) -> Result<(), Error> {
    match KINDS.iter().find(|kind| kind.subsystem == subsystem) {
        Some(kind) => (kind.unmake)(control, object).await,
        None => Ok(()),
    }
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

/// How a controller and its VM connect: through the VM's socket, or through a socket of arykd with these permissions.
pub(super) fn link(
    connect: Option<&PathBuf>,
    (owner, group, mode): (Option<&SocketOwner>, Option<&SocketGroup>, Option<SocketMode>),
) -> Result<vhost::Link, Error> {
    let rights = SocketOptions {
        owner: owner.map(|owner| owner.id),
        group: group.map(|group| group.id),
        mode: mode.map(|mode| mode.0),
    };
    match connect {
        Some(_) if rights != SocketOptions::default() => Err(Error::invalid(
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
    let name = &p.ctrlr;
    let Some(kind) = kind_of(control, name) else {
        let is_known = KINDS.iter().any(|kind| forget_absent(control, kind, name));
        return if is_known { Ok(true) } else { Err(vhost::Error::NotFound(p.ctrlr).into()) };
    };
    (kind.check_unused)(control, name)?;
    // Before the wait for its end, during which another controller may get the name and settings of its own.
    forget_settings(control, name);
    let deleted = control.controllers.delete(name).await;
    (kind.forget)(control, name);
    Ok(deleted.map(|()| true)?)
}

/// Removes the notes of an absent controller of that kind and of what belongs to it; returns whether there was one.
fn forget_absent(control: &Control, kind: &Kind, controller: &str) -> bool {
    let is_known = control.config.forget_absent(kind.subsystem, controller);
    if is_known {
        (kind.forget)(control, controller);
        forget_settings(control, controller);
    }
    is_known
}

/// Removes the notes of a controller's settings.
fn forget_settings(control: &Control, controller: &str) {
    control.config.forget(Subsystem::Signals, controller);
    control.config.forget(Subsystem::Sleep, controller);
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
pub(super) struct Controller {
    /// Name of the controller.
    pub ctrlr: String,
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
    pub transport_id: Option<String>,
    /// Aryk only: whether the controller connects to the VM's socket.
    connects: bool,
    /// Aryk only: as set by `aryk_controller_set_sleep_policy`.
    sleep_policy: Policy,
    /// The connected VM, if any.
    sessions: Vec<Session>,
    /// Members of one kind of controller.
    pub backend_specific: BackendSpecific,
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
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(rename = "VhostBackend")]
pub(super) struct BackendSpecific {
    /// Of a vhost-user-blk controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<Block>,
    /// Of a vhost-user-scsi controller: the targets with a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scsi: Option<Vec<Target>>,
}

/// A target with a disk.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VhostTarget")]
pub(super) struct Target {
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
    pub fn new(number: u8, disk: String) -> Self {
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
pub(super) struct Block {
    /// Whether the VM may only read.
    pub readonly: bool,
    /// Name of the disk; `null` after the disk was removed.
    pub bdev: Option<String>,
    /// `vhost_user_blk`.
    pub transport: &'static str,
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
    fn new(control: &Control, info: vhost::Info, all_cores: &CoreSet) -> Self {
        let coalescing = Coalescing::of(control, &info.name);
        let sessions = info.sessions.unwrap_or_default();
        let mut controller = Self {
            cpumask: info.cores.as_ref().unwrap_or(all_cores).to_string(),
            delay_base_us: coalescing.delay_base_us,
            iops_threshold: coalescing.iops_threshold,
            socket: info.socket,
            num_queues: info.queues,
            transport_id: None,
            connects: info.connects,
            sleep_policy: info.sleep_policy.into(),
            sessions: Session::of(&info.name, &sessions, &info.running).into_iter().collect(),
            backend_specific: BackendSpecific::default(),
            statistics: Statistics::new(sessions, [info.bad_chains, info.unanswerable, info.broken_queues]),
            ctrlr: info.name,
        };
        if let Some(kind) = kind_of(control, &controller.ctrlr) {
            (kind.describe)(control, &mut controller);
        }
        controller
    }
}

async fn get_controllers(control: &Control, p: GetControllers) -> Result<Vec<Controller>, Error> {
    let all_cores: CoreSet = control.reactors.handles().iter().map(Handle::core).collect();
    let listed = control.controllers.list().into_iter();
    let mut all: Vec<_> = listed.map(|info| Controller::new(control, info, &all_cores)).collect();
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
    if !control.controllers.has(&p.ctrlr) {
        return Err(Error::no_device("controller", &p.ctrlr));
    }
    match p.delay_base_us {
        0 => _ = control.config.forget(Subsystem::Signals, &p.ctrlr),
        _ => control.config.made(Subsystem::Signals, &p.ctrlr, SET_COALESCING, &p),
    }
    Ok(true)
}

/// Parameters of `aryk_controller_set_sleep_policy`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetSleepPolicy {
    /// Name of the controller.
    ctrlr: String,
    /// The policy.
    policy: Policy,
}

/// What a reactor does between the requests of a controller: as the daemon's option `--sleep-policy` says (`default`), sleep at
/// once (`interrupt`), poll for a short time and then sleep (`adaptive`), or never sleep while it serves a queue of the
/// controller (`poll`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "SleepPolicy")]
#[serde(rename_all = "lowercase")]
enum Policy {
    Default,
    Interrupt,
    Adaptive,
    Poll,
}

impl From<Policy> for Option<SleepPolicy> {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Default => None,
            Policy::Interrupt => Some(SleepPolicy::Interrupt),
            Policy::Adaptive => Some(SleepPolicy::Adaptive),
            Policy::Poll => Some(SleepPolicy::Poll),
        }
    }
}

impl From<Option<SleepPolicy>> for Policy {
    fn from(policy: Option<SleepPolicy>) -> Self {
        match policy {
            None => Self::Default,
            Some(SleepPolicy::Interrupt) => Self::Interrupt,
            Some(SleepPolicy::Adaptive) => Self::Adaptive,
            Some(SleepPolicy::Poll) => Self::Poll,
        }
    }
}

const SET_SLEEP_POLICY: &str = "aryk_controller_set_sleep_policy";

async fn set_sleep_policy(control: &Control, p: SetSleepPolicy) -> Result<bool, Error> {
    control.controllers.set_sleep_policy(&p.ctrlr, p.policy.into()).await?;
    match p.policy {
        Policy::Default => _ = control.config.forget(Subsystem::Sleep, &p.ctrlr),
        _ => control.config.made(Subsystem::Sleep, &p.ctrlr, SET_SLEEP_POLICY, &p),
    }
    Ok(true)
}

impl From<vhost::Error> for Error {
    fn from(error: vhost::Error) -> Self {
        use vhost::Error as Vhost;
        let errno = match &error {
            Vhost::Disk(error) => return error.clone().into(),
            Vhost::Exists(_) => Errno::EXIST,
            Vhost::NotFound(_) => Errno::NODEV,
            Vhost::Started(_) => Errno::ALREADY,
            Vhost::Name(_) | Vhost::Queues { .. } | Vhost::Cores(_) => Errno::INVAL,
            Vhost::Endpoint(error) => errno_of(error),
        };
        Self::errno(errno, error.to_string())
    }
}

fn errno_of(error: &vhost::EndpointError) -> Errno {
    use aryk_vhost_user::ListenError;
    use vhost::EndpointError as Endpoint;
    let of = |e: &std::io::Error| Errno::from_io_error(e).unwrap_or(Errno::IO);
    match error {
        Endpoint::Os(error) => of(error),
        Endpoint::Listen(ListenError::PathTooLong { .. }) => Errno::NAMETOOLONG,
        Endpoint::Listen(ListenError::InUse(_)) => Errno::ADDRINUSE,
        Endpoint::Listen(ListenError::NotASocket(_)) => Errno::NOTSOCK,
        Endpoint::Listen(ListenError::Rights { source, .. } | ListenError::Os { source, .. }) => of(source),
    }
}
