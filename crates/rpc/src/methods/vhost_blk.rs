//! `vhost_*blk*`: controllers of one disk each. Control context.

use super::vhost::{Block, Controller, Kind, link, refuse_shared};
use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use crate::params::{CpuMask, SocketGroup, SocketMode, SocketOwner};
use aryk_vhost_blk::{Blk, QUEUES};
use aryk_vhost_device as vhost;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::rc::Rc;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "vhost_create_blk_controller",
        Phase::RunTime,
        "Creates a vhost-user-blk controller: a socket through which a VM accesses a disk.",
        create_blk_controller,
    );
    table.add(
        "virtio_blk_get_transports",
        Phase::RunTime,
        "Lists the transports of vhost-user-blk controllers.",
        get_transports,
    );
}

/// The vhost-user-blk controllers.
pub(super) const KIND: Kind = Kind {
    name: <Blk as vhost::Kind>::NAME,
    subsystem: Subsystem::VhostBlk,
    describe,
    check_unused: |_, _| Ok(()),
    forget,
    unmake: |control, name| Box::pin(unmake(control, name)),
};

fn describe(control: &Control, controller: &mut Controller) {
    let blk = control.controllers.find::<Blk>(&controller.ctrlr).ok();
    controller.backend_specific.block = blk.map(|blk| Block {
        readonly: blk.kind().is_read_only(),
        bdev: blk.kind().disk_name(),
        transport: TRANSPORT,
    });
}

/// Removes the note of a deleted controller, unless a new controller of that name was created during the deletion.
fn forget(control: &Control, name: &str) {
    if control.controllers.kind_of(name) != Some(KIND.name) {
        control.config.removed(Subsystem::VhostBlk, name);
    }
}

async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    let undone = control.controllers.delete(name).await;
    control.config.removed(Subsystem::VhostBlk, name);
    Ok(undone?)
}

/// Ends the controllers that have lost the disk `disk`, which exists again. Their calls and settings stay in the configuration as
/// absent, so that the restoration creates them again.
pub(crate) async fn end_without_disk(control: &Control, disk: &str) {
    for controller in control.controllers.list() {
        let name = &*controller.name;
        let has_lost = |blk: Rc<vhost::Controller<Blk>>| blk.kind().disk_name().is_none();
        if control.controllers.find::<Blk>(name).is_ok_and(has_lost)
            && control.config.has_param(Subsystem::VhostBlk, name, "dev_name", &disk.into())
        {
            for subsystem in [Subsystem::VhostBlk, Subsystem::Signals, Subsystem::Sleep] {
                control.config.went(subsystem, |call| call.params["ctrlr"] == name);
            }
            tracing::info!(
                controller = name,
                disk,
                "its disk is there again: the controller is created again"
            );
            // A client may have deleted it.
            let _ = control.controllers.delete(name).await;
        }
    }
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
    if control.controllers.has(&p.ctrlr) {
        return Err(vhost::Error::Exists(p.ctrlr).into());
    }
    if p.exclusive {
        refuse_shared(control, &p.dev_name, p.readonly)?;
    }
    control.check_open()?;
    let options = vhost::Options {
        name: p.ctrlr.clone(),
        cores: p.cpumask.as_ref().map(|mask| mask.0.clone()),
        queues: p.num_queues.unwrap_or(QUEUES),
        link,
        delay: false,
    };
    aryk_vhost_blk::create(&control.controllers, &control.disks.registry, options, &p.dev_name, p.readonly)?;
    // Now that the controller has opened the disk, no initiator can register; but one that registered before relies on
    // reservations, which this controller does not enforce.
    let disk = control.disks.registry.find(&p.dev_name)?;
    if control.scsi.units().is_registered(&disk) {
        control.controllers.delete(&p.ctrlr).await?;
        let why = "SCSI initiators have registered to reserve this disk, and a blk controller does not enforce reservations";
        let todo = "attach the disk with --scsi, or unregister the initiators";
        return Err(Error::errno(Errno::BUSY, format!("'{}': {why}: {todo}", p.dev_name)));
    }
    // An alias may be another disk's by the next start.
    let note = CreateBlkController { dev_name: disk.name().to_owned(), ..p };
    control.config.made(Subsystem::VhostBlk, &note.ctrlr, "vhost_create_blk_controller", &note);
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
