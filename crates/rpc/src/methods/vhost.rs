//! `vhost_*`: the controllers through which virtual machines reach disks. Control context.

use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use crate::params::{CpuMask, SocketGroup, SocketMode, SocketOwner};
use aryk_reactor::{CoreSet, Handle};
use aryk_vhost_blk as vhost;
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
    /// Ours: permissions in octal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_mode: Option<SocketMode>,
}

async fn create_blk_controller(control: &Control, p: CreateBlkController) -> Result<bool, Error> {
    if let Some(transport) = p.transport.as_ref().filter(|t| *t != TRANSPORT) {
        return Err(Error::invalid(format!("there is no transport '{transport}', only {TRANSPORT}")));
    }
    let rights = vhost::SocketOptions {
        owner: p.socket_owner.as_ref().map(|owner| owner.id),
        group: p.socket_group.as_ref().map(|group| group.id),
        mode: p.socket_mode.map(|mode| mode.0),
    };
    if p.connect.is_some() && rights != vhost::SocketOptions::default() {
        return Err(Error::invalid("a socket that is connected to has its owner's rights already"));
    }
    control.controllers.create(vhost::Options {
        name: p.ctrlr.clone(),
        disk: p.dev_name.clone(),
        read_only: p.readonly,
        cores: p.cpumask.as_ref().map(|mask| mask.0.clone()),
        queues: p.num_queues.unwrap_or(vhost::QUEUES),
        link: p.connect.clone().map_or(vhost::Link::Listen(rights), vhost::Link::Connect),
    })?;
    control.config.made(Subsystem::VhostBlk, &p.ctrlr, "vhost_create_blk_controller", &p);
    Ok(true)
}

/// Parameters of `vhost_delete_controller`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteController {
    /// Its name.
    ctrlr: String,
}

async fn delete_controller(control: &Control, p: DeleteController) -> Result<bool, Error> {
    let deleted = control.controllers.delete(&p.ctrlr).await;
    // Another of that name may have been made while its end was waited for.
    let names: Vec<_> = control.controllers.list().into_iter().map(|info| info.name).collect();
    control.config.retain(Subsystem::VhostBlk, |name| names.iter().any(|n| n == name));
    Ok(deleted.map(|()| true)?)
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
    /// 0: interrupts are not delayed.
    delay_base_us: u32,
    /// 0: interrupts are not delayed.
    iops_threshold: u32,
    /// The socket's path.
    socket: PathBuf,
    /// Ours.
    num_queues: u16,
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
    block: Block,
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

impl Controller {
    fn new(info: vhost::Info, all_cores: &CoreSet) -> Self {
        let sessions = info.sessions.connected.then(|| Session {
            vid: info.sessions.sessions,
            id: info.sessions.sessions,
            name: format!("{}s{}", info.name, info.sessions.sessions),
            started: !info.running.is_empty(),
            max_queues: info.running.len(),
            queues: info.running.iter().map(|&(index, lcore)| Queue { index, lcore }).collect(),
        });
        Self {
            cpumask: info.cores.as_ref().unwrap_or(all_cores).to_string(),
            delay_base_us: 0,
            iops_threshold: 0,
            socket: info.socket,
            num_queues: info.queues,
            connects: info.connects,
            sessions: sessions.into_iter().collect(),
            backend_specific: BackendSpecific {
                block: Block { readonly: info.read_only, bdev: info.disk, transport: TRANSPORT },
            },
            statistics: Statistics {
                sessions: info.sessions.sessions,
                failed_sessions: info.sessions.failed,
                messages: info.sessions.messages,
                refused_messages: info.sessions.refused,
                connection_errors: info.sessions.connection_errors,
                protocol_errors: info.sessions.protocol_errors,
                fd_errors: info.sessions.fd_errors,
                memory_errors: info.sessions.memory_errors,
                device_errors: info.sessions.device_errors,
                last_error: info.sessions.last_error,
                bad_chains: info.bad_chains,
                unanswerable_requests: info.unanswerable,
                broken_queues: info.broken_queues,
            },
            ctrlr: info.name,
        }
    }
}

async fn get_controllers(control: &Control, p: GetControllers) -> Result<Vec<Controller>, Error> {
    let all_cores: CoreSet = control.reactors.handles().iter().map(Handle::core).collect();
    let mut infos = control.controllers.list();
    if let Some(name) = &p.name {
        infos.retain(|info| info.name == *name);
        if infos.is_empty() {
            return Err(Error::no_device("controller", name));
        }
    }
    Ok(infos.into_iter().map(|info| Controller::new(info, &all_cores)).collect())
}

/// One of the results of `virtio_blk_get_transports`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VirtioBlkTransport")]
struct Transport {
    name: &'static str,
}

async fn get_transports(_: &Control, _: NoParams) -> Result<Vec<Transport>, Error> {
    Ok(vec![Transport { name: TRANSPORT }])
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

fn errno_of(error: &vhost::EndpointError) -> Errno {
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
