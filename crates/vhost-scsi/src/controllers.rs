//! Creates and finds the vhost-user-scsi controllers, and changes their targets. Control context, within one `LocalSet`.

use crate::Initiator;
use crate::controller::Scsi;
use crate::wire::TARGETS;
use aryk_bdev::{Access, Error as BdevError, Event, OpenError, Registry};
use aryk_scsi::{Nexus, Port, Units};
use aryk_vhost_device::{Controller, Controllers, Error as ControllerError, Options};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use tokio::sync::mpsc;

/// The default number of request queues.
pub const QUEUES: u16 = 128;

/// Why a controller cannot be created, found or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error that controllers of all kinds report.
    #[error(transparent)]
    Controller(#[from] ControllerError),
    /// The target does not exist.
    #[error("a controller has targets 0 to {max}, not {0}", max = TARGETS - 1)]
    Target(u32),
    /// The target has a disk.
    #[error("target {0} has a disk already")]
    Taken(u8),
    /// All targets have disks.
    #[error("all targets of controller `{0}` have disks")]
    Full(String),
    /// The target has no disk.
    #[error("target {0} has no disk")]
    Empty(u8),
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] BdevError),
    /// The disk cannot be opened on a queue's reactor.
    #[error("cannot open the disk for a queue: {0}")]
    Open(#[from] OpenError),
}

/// The vhost-user-scsi controllers, and the disks as their logical units.
#[derive(Debug)]
pub struct ScsiControllers {
    all: Rc<Controllers>,
    registry: Arc<Registry>,
    units: Units,
}

impl ScsiControllers {
    /// The vhost-user-scsi controllers among `all`.
    pub fn new(all: Rc<Controllers>, registry: Arc<Registry>) -> Self {
        Self { all, registry, units: Units::default() }
    }

    /// The disks as logical units.
    pub const fn units(&self) -> &Units {
        &self.units
    }

    /// Creates a controller without disks, and its socket unless the controller is delayed. If `initiator` is `None`, the
    /// initiator port name is derived from the controller's name.
    ///
    /// # Errors
    /// As [`Controllers::create`].
    pub fn create(&self, options: Options, initiator: Option<Initiator>) -> Result<(), ControllerError> {
        let initiator = initiator.unwrap_or_else(|| Initiator::of(&options.name));
        let queues = options.queues;
        self.all.create(options, || Ok(Scsi::new(initiator, queues))).map(|_| ())
    }

    /// Creates the socket of a delayed controller.
    ///
    /// # Errors
    /// As [`Controllers::start`].
    pub fn start(&self, name: &str) -> Result<(), ControllerError> {
        self.all.find::<Scsi>(name)?;
        self.all.start(name)
    }

    /// Attaches a disk to a target, or to the first target without a disk. Returns the number of the target.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn add_target(&self, name: &str, target: Option<u32>, disk: &str) -> Result<u8, Error> {
        let controller = self.all.find::<Scsi>(name)?;
        let target = match target {
            Some(target) => {
                u8::try_from(target).ok().filter(|t| *t < TARGETS).ok_or(Error::Target(target))?
            }
            None => (0..TARGETS)
                .find(|t| controller.kind().is_free(*t))
                .ok_or_else(|| Error::Full(name.to_owned()))?,
        };
        let (events, arriving) = mpsc::unbounded_channel();
        // The receiver is gone if the target no longer has the disk; then the event is not needed.
        let send = move |event| {
            let _ = events.send(event);
        };
        let owner = format!("vhost controller {name}");
        let opened = self.registry.open(disk, Access::Shared, &owner, send)?;
        // Relative port identifiers begin with 1.
        let port = Port { initiator: controller.kind().initiator().0, target: u16::from(target) + 1 };
        let nexus = Scsi::attach(&controller, target, self.units.nexus(opened, port, 0)).await?;
        tokio::task::spawn_local(pass_on(arriving, Rc::downgrade(&controller), target, nexus));
        Ok(target)
    }

    /// Detaches the disk of a target.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn remove_target(&self, name: &str, target: u32) -> Result<(), Error> {
        let controller = self.all.find::<Scsi>(name)?;
        let target = u8::try_from(target).ok().filter(|t| *t < TARGETS).ok_or(Error::Target(target))?;
        if Scsi::detach(&controller, target, None).await { Ok(()) } else { Err(Error::Empty(target)) }
    }

    /// Whether a target of a controller has a disk.
    pub fn has_target(&self, name: &str, target: u8) -> bool {
        self.all.find::<Scsi>(name).is_ok_and(|controller| controller.kind().has_disk(target))
    }
}

/// Passes the disk's events to the controller until the target no longer has the disk.
async fn pass_on(
    mut arriving: mpsc::UnboundedReceiver<Event>,
    controller: Weak<Controller<Scsi>>,
    target: u8,
    nexus: std::sync::Weak<Nexus>,
) {
    while let Some(event) = arriving.recv().await
        && let Some(controller) = controller.upgrade()
    {
        Scsi::disk_event(&controller, event, target, &nexus).await;
    }
}
