//! `bdev_nvme_*`: NVMe controllers that the daemon drives itself, and the disks of their namespaces. Control context.
//!
//! A controller is an object of the configuration, with one note: its disks come and go with it, and so have no notes of their
//! own. A controller that ends by itself, because its drive did not come back in time, is absent, and is attached again when the
//! drive is there.

mod abilities;
mod attach;
mod command;
mod describe;
mod discovery;
mod hotplug;
mod injection;
mod iostat;
mod mdns;
mod options;
mod paths;
mod remote;
mod statistics;
mod tools;

pub(crate) use attach::ATTACH;
pub(crate) use describe::{Details as DiskDetails, details};
pub(crate) use discovery::{
    Discovery, START as START_DISCOVERY, follow as follow_discoveries, unmake as unmake_discovery,
};
pub(crate) use hotplug::follow as follow_plugged;
pub(crate) use mdns::{Mdns, START_MDNS, follow as follow_announced, unmake as unmake_mdns};
pub(crate) use options::is_saved;
pub(crate) use statistics::{Errors, metrics, remote_metrics};

use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use aryk_bdev_nvme::fabrics::{RemoteController, RemoteControllers};
use aryk_bdev_nvme::{AttachedController, Controllers, Error as Nvme, Exposed};
use aryk_cuse::CuseError;
use aryk_nvme::controller::Failure;
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_pci::{Address, PciError};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

/// The kind of these controllers in error texts.
const KIND: &str = "NVMe controller";

/// What the daemon holds of NVMe.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The controllers.
    pub controllers: Controllers,
    /// The controllers of other hosts. No two controllers of both kinds have the same name.
    pub remotes: RemoteControllers,
    /// Disks that a call removes with their controller: they are not lost.
    pub leaving: RefCell<BTreeSet<String>>,
    /// What holds for controllers that are attached later.
    pub options: RefCell<options::Options>,
    /// Time between two looks for new drives, if drives are attached by themselves.
    pub hotplug: watch::Sender<Option<Duration>>,
    /// PCI functions that a client has detached: they are not attached by themselves.
    pub released: RefCell<BTreeSet<Address>>,
    /// Receives each controller that a call attaches.
    pub attached: RefCell<Option<UnboundedSender<Followed>>>,
    /// Discovery services that are followed, by name.
    pub discoveries: RefCell<BTreeMap<String, Rc<Discovery>>>,
    /// Subsystems that are being attached for discovery services.
    pub discovered: RefCell<BTreeSet<Nqn>>,
    /// Receives each discovery service that a call starts to follow.
    pub discovering: RefCell<Option<UnboundedSender<Rc<Discovery>>>>,
    /// mDNS discoveries, by name.
    pub mdns: RefCell<BTreeMap<String, Rc<Mdns>>>,
    /// Receives each mDNS discovery that a call starts.
    pub browsing: RefCell<Option<UnboundedSender<Rc<Mdns>>>>,
}

/// A controller whose end is awaited.
#[derive(Debug)]
pub(crate) enum Followed {
    /// A drive of this host.
    Drive(Arc<AttachedController>),
    /// A controller of another host.
    Remote(Arc<RemoteController>),
}

impl Followed {
    /// The controller's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Drive(controller) => controller.name(),
            Self::Remote(controller) => controller.name(),
        }
    }

    /// Waits until the controller is detached, or is given up.
    pub async fn ended(&self) {
        match self {
            Self::Drive(controller) => controller.ended().await,
            Self::Remote(controller) => controller.ended().await,
        }
    }

    /// Its last failure.
    pub fn last_failure(&self) -> Option<String> {
        match self {
            Self::Drive(controller) => controller.info().last_failure,
            Self::Remote(controller) => controller.info().last_loss,
        }
    }

    /// Whether the drive went away with acknowledged writes in its cache.
    pub fn may_have_lost_writes(&self) -> bool {
        match self {
            Self::Drive(controller) => controller.info().may_have_lost_writes,
            Self::Remote(_) => false,
        }
    }
}

/// Whether a controller of this name is attached.
pub(crate) fn is_attached(control: &Control, name: &str) -> bool {
    control.nvme.controllers.find(name).is_ok() || control.nvme.remotes.find(name).is_ok()
}

pub(super) fn register(table: &mut Table<Control>) {
    attach::register(table);
    command::register(table);
    describe::register(table);
    discovery::register(table);
    injection::register(table);
    iostat::register(table);
    mdns::register(table);
    options::register(table);
    paths::register(table);
    statistics::register(table);
    tools::register(table);
}

/// The names of the disks that an NVMe controller has now.
pub(crate) fn disks_of(control: &Control, controller: &str) -> Vec<String> {
    let drive = control.nvme.controllers.find(controller).map(|controller| controller.info().namespaces);
    let remote = || control.nvme.remotes.find(controller).map(|controller| controller.info().namespaces);
    let namespaces = drive.or_else(|_| remote()).unwrap_or_default();
    namespaces.into_iter().filter_map(|namespace| namespace.disk).collect()
}

/// Whether the disk `disk` is one of the NVMe controller that a call with these parameters attaches.
pub(crate) fn is_disk_of(disk: &str, params: &serde_json::Value) -> bool {
    let text = |param: &str| params.get(param).and_then(|value| value.as_str());
    let of_name = || {
        let nsid = disk.strip_prefix(text("name")?)?.strip_prefix('n')?;
        Some(
            nsid.bytes().all(|byte| byte.is_ascii_digit())
                && !nsid.starts_with('0')
                && nsid.parse::<u32>().is_ok(),
        )
    };
    match text("disk") {
        Some(one) => one == disk,
        None => of_name() == Some(true),
    }
}

/// Detaches a controller whose call could not be stored, or was revoked.
pub(crate) async fn unmake(control: &Control, name: &str) -> Result<(), Error> {
    control.config.removed(Subsystem::Nvme, name);
    attach::detach(control, name).await
}

/// Detaches all controllers, whose disks are removed already.
pub(crate) async fn close(control: &Control) {
    for controller in control.nvme.controllers.list() {
        // The controller may have ended by itself.
        let _ = control.nvme.controllers.detach(controller.name()).await;
    }
    for controller in control.nvme.remotes.list() {
        // The controller may have ended by itself.
        let _ = control.nvme.remotes.detach(controller.name()).await;
    }
}

/// The controller of that name.
fn find(control: &Control, name: &str) -> Result<Arc<AttachedController>, Error> {
    control.nvme.controllers.find(name).map_err(|_| Error::no_device(KIND, name))
}

/// The disk's name, for a controller that is attached for one namespace.
fn exposed(nsid: Option<u32>, disk: Option<&str>, name: &str) -> Result<Exposed, Error> {
    match (nsid, disk) {
        (None, None) => Ok(Exposed::All),
        (Some(nsid), disk) => {
            let disk = disk.map_or_else(|| format!("{name}n{nsid}"), str::to_owned);
            Ok(Exposed::One { nsid, disk })
        }
        (None, Some(_)) => {
            Err(Error::invalid("`disk` names the disk of one namespace, which `nsid` must give"))
        }
    }
}

/// A PCI address in one of SPDK's forms: its parts are separated by colons or full stops.
fn address(text: &str) -> Result<Address, Error> {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let written = match *parts.as_slice() {
        [domain, bus, device, function] => format!("{domain}:{bus}:{device}.{function}"),
        [bus, device, function] => format!("{bus}:{device}.{function}"),
        _ => text.to_owned(),
    };
    written.parse().map_err(|_| {
        Error::invalid(format!(
            "'{text}' is no PCI address such as 0000:3d:00.0 (`aryk nvme list` shows the drives)"
        ))
    })
}

impl From<Nvme> for Error {
    fn from(error: Nvme) -> Self {
        let errno = match error {
            Nvme::Exists(_) | Nvme::Awaited { .. } => Errno::EXIST,
            Nvme::Attached { .. } | Nvme::Moved { .. } => Errno::ALREADY,
            Nvme::NotFound(_) | Nvme::Namespace { .. } | Nvme::OtherDrive { .. } => Errno::NODEV,
            Nvme::Failure(Failure::Pci(ref error)) | Nvme::Pci(ref error) => errno_of(error),
            Nvme::Failure(Failure::Vanished(_)) => Errno::NODEV,
            Nvme::Failure(Failure::AdminTimeout(_) | Failure::StartTooLong { .. }) => Errno::TIMEDOUT,
            Nvme::Failure(Failure::Memory(_)) => Errno::NOMEM,
            Nvme::Failure(_) => Errno::IO,
            Nvme::Registry(error) => return error.into(),
            Nvme::Refused(_) | Nvme::WrongData { .. } => Errno::INVAL,
            Nvme::Forbidden(_) => Errno::PERM,
            Nvme::InUse { .. } => Errno::BUSY,
            Nvme::NotReady(_) => Errno::AGAIN,
            Nvme::NotDisabled(_) => Errno::ALREADY,
            Nvme::NotEnabled { .. } => Errno::IO,
            Nvme::Tools(ref error) => errno_of_tools(error),
            Nvme::Thread(ref error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
        };
        Self::errno(errno, error.to_string())
    }
}

/// The errno of a failure to create a device for tools.
fn errno_of_tools(error: &CuseError) -> Errno {
    match error {
        CuseError::BadName(_) => Errno::INVAL,
        CuseError::Exists(_) => Errno::EXIST,
        CuseError::NoCuse => Errno::NODEV,
        CuseError::NoPermission => Errno::ACCESS,
        CuseError::Version(..) => Errno::NOTSUP,
        CuseError::Handshake | CuseError::Refused(_) => Errno::IO,
        CuseError::System(errno) => *errno,
        CuseError::Thread(error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
    }
}

/// The errno of a failure to access a PCI function.
fn errno_of(error: &PciError) -> Errno {
    match error {
        PciError::NotFound { .. }
        | PciError::NoDriver
        | PciError::NoIommu { .. }
        | PciError::NotBound { .. }
        | PciError::Gone { .. } => Errno::NODEV,
        PciError::InUse { .. } | PciError::SharedGroup { .. } => Errno::BUSY,
        PciError::WrongClass { .. } => Errno::INVAL,
        PciError::Permission { .. } => Errno::ACCESS,
        PciError::NoInterruptRemapping { .. } => Errno::PERM,
        PciError::LockLimit { .. } | PciError::AddressSpace { .. } => Errno::NOMEM,
        PciError::MappingLimit { .. } => Errno::NOSPC,
        PciError::NoFile { .. } | PciError::Unsupported(_) => Errno::NOTSUP,
        PciError::TimedOut { .. } => Errno::TIMEDOUT,
        PciError::Protocol { .. } => Errno::PROTO,
        PciError::Os { errno, .. } => *errno,
        PciError::OutOfBounds { .. } | PciError::NotMapped { .. } => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pci_addresses_have_spdks_forms() {
        for text in ["0000:3d:00.0", "3d:00.0", "0000.3d.00.0", "3d.0.0", "0:3d:0:0"] {
            assert_eq!(address(text).unwrap().to_string(), "0000:3d:00.0", "{text}");
        }
        for text in ["", "3d", "0000:3d:00.0.0", "0000:3d:00.8", "x:3d:00.0", "0000:3d:20.0"] {
            assert_eq!(address(text).unwrap_err().code(), -22, "{text}");
        }
    }

    #[test]
    fn disks_belong_to_the_controller_that_they_are_named_after() {
        let all = json!({"name": "Nvme0"});
        assert!(is_disk_of("Nvme0n1", &all) && is_disk_of("Nvme0n12", &all));
        for other in ["Nvme0", "Nvme0n", "Nvme0n01", "Nvme0n1p1", "Nvme01n1", "Nvme0n+1", "Nvme0n4294967296"]
        {
            assert!(!is_disk_of(other, &all), "{other}");
        }
        let one = json!({"name": "a", "nsid": 1, "disk": "vm1"});
        assert!(is_disk_of("vm1", &one) && !is_disk_of("an1", &one));
    }
}
