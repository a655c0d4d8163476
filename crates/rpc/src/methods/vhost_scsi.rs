//! `vhost_*scsi*`: controllers whose disks can be attached and detached while their VM runs. Control context.
//!
//! A controller and each of its targets have one note each. After a restart, a controller accepts connections only when all its
//! targets exist again: a guest that reconnected before would see that disks in use are gone.

use super::vhost::{Controller, Kind, Target, link, refuse_shared};
use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use crate::params::{CpuMask, SocketGroup, SocketMode, SocketOwner};
use aryk_vhost_device as vhost;
use aryk_vhost_scsi::{BadInitiator, Error as ScsiError, QUEUES, Scsi};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "vhost_create_scsi_controller",
        Phase::RunTime,
        "Creates a vhost-user-scsi controller: a socket through which a VM accesses disks that can be attached and detached.",
        create_scsi_controller,
    );
    table.add(
        "vhost_start_scsi_controller",
        Phase::RunTime,
        "Creates the socket of a controller that was created with `delay`.",
        start_scsi_controller,
    );
    table.add(
        "vhost_scsi_controller_add_target",
        Phase::RunTime,
        "Attaches a disk as a target of a controller, and notifies the VM. The result is the target's number.",
        add_target,
    );
    table.add(
        "vhost_scsi_controller_remove_target",
        Phase::RunTime,
        "Detaches the disk of a controller's target without waiting for the VM, and notifies the VM.",
        remove_target,
    );
    table.add(
        "scsi_get_devices",
        Phase::RunTime,
        "Lists the targets with a disk of all controllers, with the numbers and names of `vhost_get_controllers`.",
        get_devices,
    );
}

const CREATE: &str = "vhost_create_scsi_controller";
pub(crate) const ADD: &str = "vhost_scsi_controller_add_target";

/// Parameters of `vhost_create_scsi_controller`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateScsiController {
    /// Name of the new controller, and of its socket.
    ctrlr: String,
    /// Cores whose reactors may serve the queues. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<CpuMask>,
    /// Create the socket later, with `vhost_start_scsi_controller`.
    #[serde(default)]
    delay: bool,
    /// Aryk only: maximum number of command queues of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_queues: Option<u16>,
    /// Aryk only: the name of the VM as initiator, for reservations: `naa.` and 16 hexadecimal digits, the first of them 2, 3 or
    /// 5. Default: derived from the controller's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_id: Option<String>,
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
}

async fn create_scsi_controller(control: &Control, p: CreateScsiController) -> Result<bool, Error> {
    if control.controllers.has(&p.ctrlr) {
        return Err(vhost::Error::Exists(p.ctrlr).into());
    }
    let initiator = p.transport_id.as_deref().map(str::parse).transpose();
    let initiator = initiator.map_err(|e: BadInitiator| Error::invalid(e.to_string()))?;
    control.check_open()?;
    let options = vhost::Options {
        name: p.ctrlr.clone(),
        cores: p.cpumask.as_ref().map(|mask| mask.0.clone()),
        queues: p.num_queues.unwrap_or(QUEUES),
        link: link(p.connect.as_ref(), (p.socket_owner.as_ref(), p.socket_group.as_ref(), p.socket_mode))?,
        delay: true,
    };
    control.scsi.create(options, initiator)?;
    let delay = p.delay || has_absent_targets(control, &p.ctrlr);
    if !delay && let Err(error) = control.scsi.start(&p.ctrlr) {
        control.controllers.delete(&p.ctrlr).await?;
        return Err(error.into());
    }
    control.config.made(Subsystem::VhostScsi, &p.ctrlr, CREATE, &p);
    Ok(true)
}

/// Parameters of `vhost_start_scsi_controller`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StartScsiController {
    /// Name of the controller.
    ctrlr: String,
}

async fn start_scsi_controller(control: &Control, p: StartScsiController) -> Result<bool, Error> {
    control.scsi.start(&p.ctrlr)?;
    control.config.changed(Subsystem::VhostScsi, &p.ctrlr, "delay", false);
    Ok(true)
}

/// Parameters of `vhost_scsi_controller_add_target`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddTarget {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target, 0 to 7; or -1 for the first free target.
    scsi_target_num: i32,
    /// Name, alias or uuid of the disk.
    bdev_name: String,
    /// Aryk only: refuse a disk that others have open.
    #[serde(default, skip_serializing)]
    exclusive: bool,
}

async fn add_target(control: &Control, p: AddTarget) -> Result<u8, Error> {
    let wanted = match p.scsi_target_num {
        -1 => None,
        number => {
            Some(u32::try_from(number).map_err(|_| Error::invalid(format!("there is no target {number}")))?)
        }
    };
    if p.exclusive {
        refuse_shared(control, &p.bdev_name, false)?;
    }
    control.check_open()?;
    // An alias may be another disk's by the next start.
    let bdev_name = control.disks.find(&p.bdev_name)?.name().to_owned();
    let target = control.scsi.add_target(&p.ctrlr, wanted, &bdev_name).await?;
    let note = AddTarget { scsi_target_num: target.into(), bdev_name, ..p };
    control.config.made(Subsystem::VhostScsi, &target_object(&note.ctrlr, target), ADD, &note);
    start_if_whole(control, &note.ctrlr);
    Ok(target)
}

/// Parameters of `vhost_scsi_controller_remove_target`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveTarget {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target, 0 to 7.
    scsi_target_num: u32,
}

async fn remove_target(control: &Control, p: RemoveTarget) -> Result<bool, Error> {
    let number = u8::try_from(p.scsi_target_num).map_err(|_| ScsiError::Target(p.scsi_target_num))?;
    let object = target_object(&p.ctrlr, number);
    if control.config.forget_absent(Subsystem::VhostScsi, &object) {
        start_if_whole(control, &p.ctrlr);
        return Ok(true);
    }
    let removed = control.scsi.remove_target(&p.ctrlr, p.scsi_target_num).await;
    forget_gone(control);
    Ok(removed.map(|()| true)?)
}

/// The object name of a target's note. No controller's name contains a slash.
fn target_object(controller: &str, target: u8) -> String {
    format!("{controller}/{target}")
}

/// The vhost-user-scsi controllers.
pub(super) const KIND: Kind = Kind {
    name: <Scsi as vhost::Kind>::NAME,
    subsystem: Subsystem::VhostScsi,
    describe,
    check_unused,
    forget,
    unmake: |control, object| Box::pin(unmake(control, object)),
};

fn describe(control: &Control, controller: &mut Controller) {
    if let Ok(scsi) = control.controllers.find::<Scsi>(&controller.ctrlr) {
        let targets = scsi.kind().targets().into_iter().map(|(number, disk)| Target::new(number, disk));
        controller.backend_specific.scsi = Some(targets.collect());
        controller.transport_id = Some(scsi.kind().initiator().to_string());
    }
}

fn check_unused(control: &Control, name: &str) -> Result<(), Error> {
    if !control.controllers.is_connected(name) {
        return Ok(());
    }
    let todo = "stop the VM first; its disks can be detached one by one";
    Err(Error::errno(Errno::BUSY, format!("a VM is connected to controller `{name}`: {todo}")))
}

/// Removes the notes of a deleted controller and of its targets, present and absent.
fn forget(control: &Control, name: &str) {
    forget_gone(control);
    control.config.forget_all_absent(Subsystem::VhostScsi, |object| is_target_of(object, name));
}

async fn unmake(control: &Control, object: &str) -> Result<(), Error> {
    let undone: Result<(), ScsiError> = match object.split_once('/') {
        Some((controller, target)) => {
            let target = target.parse().expect("a valid note");
            control.scsi.remove_target(controller, target).await
        }
        None => control.controllers.delete(object).await.map_err(ScsiError::from),
    };
    forget_gone(control);
    Ok(undone?)
}

/// Removes the notes of controllers and targets that no longer exist.
pub(crate) fn forget_gone(control: &Control) {
    let exists = |object: &str| match object.split_once('/') {
        Some((name, target)) => control.scsi.has_target(name, target.parse().expect("a valid note")),
        None => control.controllers.kind_of(object) == Some(KIND.name),
    };
    control.config.retain(Subsystem::VhostScsi, exists);
}

fn is_target_of(object: &str, controller: &str) -> bool {
    object.split_once('/').is_some_and(|(name, _)| name == controller)
}

fn has_absent_targets(control: &Control, controller: &str) -> bool {
    control.config.has_absent(Subsystem::VhostScsi, |object| is_target_of(object, controller))
}

/// Starts a controller that has waited until all its targets exist again.
fn start_if_whole(control: &Control, controller: &str) {
    let is_delayed = control.config.has_param(Subsystem::VhostScsi, controller, "delay", &true.into());
    if is_delayed || has_absent_targets(control, controller) {
        return;
    }
    match control.scsi.start(controller) {
        Ok(()) | Err(vhost::Error::Started(_) | vhost::Error::NotFound(_)) => {}
        Err(error) => tracing::error!(controller, %error, "cannot start the controller"),
    }
}

impl From<ScsiError> for Error {
    fn from(error: ScsiError) -> Self {
        use ScsiError as Scsi;
        let errno = match error {
            Scsi::Controller(error) => return error.into(),
            Scsi::Disk(error) => return error.into(),
            Scsi::Taken(_) => Errno::EXIST,
            Scsi::Empty(_) | Scsi::Open(_) => Errno::NODEV,
            Scsi::Full(_) => Errno::NOSPC,
            Scsi::Target(_) => Errno::INVAL,
        };
        Self::errno(errno, error.to_string())
    }
}

/// One of the results of `scsi_get_devices`.
#[derive(Debug, Serialize, JsonSchema)]
struct ScsiDevice {
    /// Number of the target within its controller.
    id: u8,
    device_name: String,
}

async fn get_devices(control: &Control, _: NoParams) -> Result<Vec<ScsiDevice>, Error> {
    let controllers = control.controllers.list().into_iter();
    let scsi = controllers.filter_map(|info| control.controllers.find::<Scsi>(&info.name).ok());
    let device = |(id, _): (u8, String)| ScsiDevice { id, device_name: format!("Target {id}") };
    Ok(scsi.flat_map(|scsi| scsi.kind().targets()).map(device).collect())
}
