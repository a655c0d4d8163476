//! All vhost-user-scsi controllers of the process, by name. Control context, within one `LocalSet`.

use crate::Initiator;
use crate::controller::{Controller, FIXED, Settings};
use crate::wire::TARGETS;
use aryk_bdev::{Access, Error as BdevError, Event, OpenError, Registry};
use aryk_reactor::{CoreSet, Hold, Reactors};
use aryk_scsi::{Nexus, Port, Units};
use aryk_vhost_device::{Endpoint, EndpointError, Host, Link, MoveError, Mover};
use aryk_vhost_user::Snapshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;

/// The options of a new controller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, which is also the name of its socket.
    pub name: String,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    /// Request queues: 1 to 254.
    pub queues: u16,
    /// Its initiator port name for reservations; derived from its name if `None`.
    pub initiator: Option<Initiator>,
    /// Whether it listens for its front-end or connects to it.
    pub link: Link,
    /// Its socket is created by [`Controllers::start`] only.
    pub delay: bool,
}

/// The default number of request queues.
pub const QUEUES: u16 = 128;
/// The largest number of request queues.
pub const QUEUES_MAX: u16 = 256 - FIXED;

/// Why a controller cannot be created, found or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another controller has that name.
    #[error("a controller named `{0}` exists already")]
    Exists(String),
    /// No controller has that name.
    #[error("there is no controller named `{0}`")]
    NotFound(String),
    /// The name cannot be the name of a socket.
    #[error("`{0}` cannot be a controller's name, as it is no file name")]
    Name(String),
    /// The number of queues is 0 or too large.
    #[error("a controller has 1 to {QUEUES_MAX} queues for commands, not {0}")]
    Queues(u16),
    /// No reactor runs on any of these cores.
    #[error("no reactor runs on a core of {0}")]
    Cores(CoreSet),
    /// The controller was not created with `delay`, or was started before.
    #[error("controller `{0}` has been started already")]
    Started(String),
    /// There is no such target.
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
    /// Its socket cannot be created or watched.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// The state of a controller.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its targets that have disks, and the disks' names.
    pub targets: Vec<(u8, String)>,
    /// Its own socket, or the front-end's socket that it connects to.
    pub socket: PathBuf,
    /// Whether that is the front-end's socket.
    pub connects: bool,
    /// The cores that it is restricted to.
    pub cores: Option<CoreSet>,
    /// Request queues that a guest can have.
    pub queues: u16,
    /// Its initiator port name.
    pub initiator: Initiator,
    /// Running queues, each with its core.
    pub running: Vec<(u16, u16)>,
    /// Statistics of its sessions; `None` before it is started.
    pub sessions: Option<Snapshot>,
    /// Descriptor chains that were no valid request.
    pub bad_chains: u64,
    /// Requests without a buffer for their response.
    pub unanswerable: u64,
    /// Queues that stopped because their ring was inconsistent.
    pub broken_queues: u64,
}

struct Entry {
    controller: Rc<Controller>,
    /// `None` before it is started.
    endpoint: Option<Endpoint>,
    link: Link,
}

/// All controllers.
pub struct Controllers {
    directory: PathBuf,
    registry: Arc<Registry>,
    reactors: Rc<Reactors>,
    units: Units,
    queue_size_max: u16,
    entries: RefCell<BTreeMap<String, Entry>>,
}

impl std::fmt::Debug for Controllers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controllers").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Controllers {
    /// No controllers yet. Their sockets will be in `directory`, and their queues have up to `queue_size_max` descriptors.
    pub fn new(
        directory: &Path,
        queue_size_max: u16,
        registry: Arc<Registry>,
        reactors: Rc<Reactors>,
    ) -> Self {
        let (directory, entries) = (directory.to_owned(), RefCell::default());
        Self { directory, registry, reactors, units: Units::default(), queue_size_max, entries }
    }

    /// The disks as logical units.
    pub const fn units(&self) -> &Units {
        &self.units
    }

    /// Creates a controller without disks, and its socket unless it is delayed.
    ///
    /// # Errors
    /// [`Error`].
    pub fn create(&self, options: Options) -> Result<(), Error> {
        let Options { name, cores, queues, initiator, link, delay } = options;
        if self.entries.borrow().contains_key(&name) {
            return Err(Error::Exists(name));
        }
        if Path::new(&name).file_name().is_none_or(|f| f != name.as_str()) {
            return Err(Error::Name(name));
        }
        if !(1..=QUEUES_MAX).contains(&queues) {
            return Err(Error::Queues(queues));
        }
        if let Some(cores) = &cores
            && !self.reactors.is_any_on(cores)
        {
            return Err(Error::Cores(cores.clone()));
        }
        let initiator = initiator.unwrap_or_else(|| Initiator::of(&name)).0;
        let queue_size_max = self.queue_size_max;
        let settings = Settings { name: name.clone(), cores, queues, initiator, queue_size_max };
        let memory = self.registry.memory().clone();
        let controller = Rc::new(Controller::new(settings, memory, Rc::clone(&self.reactors)));
        let endpoint = match delay {
            true => None,
            false => Some(Endpoint::start(&name, link.clone(), &self.directory, Rc::clone(&controller))?),
        };
        self.entries.borrow_mut().insert(name, Entry { controller, endpoint, link });
        Ok(())
    }

    /// Creates the socket of a controller that was delayed.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start(&self, name: &str) -> Result<(), Error> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(name).ok_or_else(|| Error::NotFound(name.to_owned()))?;
        if entry.endpoint.is_some() {
            return Err(Error::Started(name.to_owned()));
        }
        let controller = Rc::clone(&entry.controller);
        entry.endpoint = Some(Endpoint::start(name, entry.link.clone(), &self.directory, controller)?);
        Ok(())
    }

    /// Attaches a disk to a target, or to the first target without a disk. Returns the number of the target.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn add_target(&self, name: &str, target: Option<u32>, disk: &str) -> Result<u8, Error> {
        let controller = self.find(name)?;
        let target = match target {
            Some(target) => {
                u8::try_from(target).ok().filter(|t| *t < TARGETS).ok_or(Error::Target(target))?
            }
            None => {
                (0..TARGETS).find(|t| controller.is_free(*t)).ok_or_else(|| Error::Full(name.to_owned()))?
            }
        };
        let (events, arriving) = mpsc::unbounded_channel();
        // A target without the disk needs no events.
        let tell = move |event| {
            let _ = events.send(event);
        };
        let owner = format!("vhost controller {name}");
        let opened = self.registry.open(disk, Access::Shared, &owner, tell)?;
        // Relative identifiers of ports begin with 1.
        let port = Port { initiator: controller.settings().initiator, target: u16::from(target) + 1 };
        let nexus = controller.attach(target, self.units.nexus(opened, port, 0)).await?;
        tokio::task::spawn_local(pass_on(arriving, Rc::downgrade(&controller), target, nexus));
        Ok(target)
    }

    /// Detaches the disk of a target.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn remove_target(&self, name: &str, target: u32) -> Result<(), Error> {
        let controller = self.find(name)?;
        let target = u8::try_from(target).ok().filter(|t| *t < TARGETS).ok_or(Error::Target(target))?;
        if controller.detach(target, None).await { Ok(()) } else { Err(Error::Empty(target)) }
    }

    fn find(&self, name: &str) -> Result<Rc<Controller>, Error> {
        let entries = self.entries.borrow();
        let entry = entries.get(name).ok_or_else(|| Error::NotFound(name.to_owned()))?;
        Ok(Rc::clone(&entry.controller))
    }

    /// Makes the queue whose thread has that number run on one of `cores` from now on. `None` if no queue has that thread.
    pub async fn place(&self, thread: u64, cores: CoreSet) -> Option<Result<(), MoveError>> {
        Some(self.find_thread(thread)?.place(cores).await)
    }

    /// Moves the queue whose thread has that number to another reactor. Fails if the requests that it has in flight do not
    /// complete within `patience`. `None` if no queue has that thread.
    pub async fn move_to(&self, thread: u64, to: Hold, patience: Duration) -> Option<Result<(), MoveError>> {
        Some(self.find_thread(thread)?.move_to(to, patience).await)
    }

    fn find_thread(&self, thread: u64) -> Option<Mover<Controller>> {
        let entries = self.entries.borrow();
        entries.values().find_map(|entry| Mover::find(&entry.controller, thread))
    }

    /// Whether a controller has that name.
    pub fn has(&self, name: &str) -> bool {
        self.entries.borrow().contains_key(name)
    }

    /// Whether a front-end is connected to the controller of that name.
    pub fn is_connected(&self, name: &str) -> bool {
        let entries = self.entries.borrow();
        let endpoint = entries.get(name).and_then(|entry| entry.endpoint.as_ref());
        endpoint.is_some_and(|endpoint| endpoint.stats().connected)
    }

    /// Whether a target of a controller has a disk.
    pub fn has_target(&self, name: &str, target: u8) -> bool {
        self.entries.borrow().get(name).is_some_and(|entry| entry.controller.has_disk(target))
    }

    /// Deletes a controller: disconnects its front-end, waits until its commands complete, and removes its socket.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete(&self, name: &str) -> Result<(), Error> {
        let entry = self.entries.borrow_mut().remove(name);
        entry.ok_or_else(|| Error::NotFound(name.to_owned()))?.end().await;
        Ok(())
    }

    /// Deletes all controllers.
    pub async fn delete_all(&self) {
        let entries = std::mem::take(&mut *self.entries.borrow_mut());
        for entry in entries.into_values() {
            entry.end().await;
        }
    }

    /// Logs how many lines about front-ends were left out, if it is time.
    pub fn tell_left_out(&self) {
        let entries = self.entries.borrow();
        entries.values().filter_map(|entry| entry.endpoint.as_ref()).for_each(Endpoint::tell_left_out);
    }

    /// The state of all controllers, by name.
    pub fn list(&self) -> Vec<Info> {
        self.entries.borrow().values().map(|entry| entry.info(&self.directory)).collect()
    }
}

/// Passes events of a target's disk on, until the target is without the disk.
async fn pass_on(
    mut arriving: mpsc::UnboundedReceiver<Event>,
    controller: Weak<Controller>,
    target: u8,
    nexus: std::sync::Weak<Nexus>,
) {
    while let Some(event) = arriving.recv().await
        && let Some(controller) = controller.upgrade()
    {
        match event {
            Event::Resized { .. } => controller.resized(target, &nexus).await,
            Event::Changed => controller.changed(target, &nexus).await,
            Event::Removed => {
                controller.detach(target, Some(&nexus)).await;
            }
        }
    }
}

impl Entry {
    async fn end(self) {
        if let Some(endpoint) = self.endpoint {
            endpoint.stop().await;
        }
        for (target, _) in self.controller.disks() {
            self.controller.detach(target, None).await;
        }
    }

    fn info(&self, directory: &Path) -> Info {
        let settings = self.controller.settings();
        let errors = self.controller.errors();
        let socket = match (&self.endpoint, &self.link) {
            (Some(endpoint), _) => endpoint.path().to_owned(),
            (None, Link::Connect(path)) => path.clone(),
            (None, Link::Listen(_)) => directory.join(&settings.name),
        };
        Info {
            name: settings.name.clone(),
            targets: self.controller.disks(),
            socket,
            connects: matches!(self.link, Link::Connect(_)),
            cores: settings.cores.clone(),
            queues: settings.queues,
            initiator: Initiator(settings.initiator),
            running: self.controller.queues().cores(),
            sessions: self.endpoint.as_ref().map(Endpoint::stats),
            bad_chains: errors.bad_chains.load(Ordering::Relaxed),
            unanswerable: errors.unanswerable.load(Ordering::Relaxed),
            broken_queues: errors.broken_queues.load(Ordering::Relaxed),
        }
    }
}
