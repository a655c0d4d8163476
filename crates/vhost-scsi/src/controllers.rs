//! All vhost-user-scsi controllers of the process, by name. Control context, within one `LocalSet`.

use crate::Initiator;
use crate::controller::{Controller, FIXED, Settings};
use crate::wire::TARGETS;
use aryk_bdev::{Access, Error as BdevError, Event, OpenError, Registry};
use aryk_reactor::{CoreSet, Hold, Reactors};
use aryk_scsi::{Nexus, Port, Units};
use aryk_vhost_device::{Endpoint, EndpointError, Host, Link, MoveError, Traveller};
use aryk_vhost_user::Snapshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;

/// A controller that is to be made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, and its socket's.
    pub name: String,
    /// The cores whose reactors serve its queues; all if `None`.
    pub cores: Option<CoreSet>,
    /// Queues for commands that a guest can have: 1 to 254.
    pub queues: u16,
    /// What disks know it by, as an initiator that reserves them; made of its name if `None`.
    pub initiator: Option<Initiator>,
    /// How it and its machine find each other.
    pub link: Link,
    /// It is reached only after [`Controllers::start`].
    pub delay: bool,
}

/// Queues for commands that a guest can have if nothing is said.
pub const QUEUES: u16 = 128;
/// Queues for commands that a guest can have at most.
pub const QUEUES_MAX: u16 = 256 - FIXED;

/// Why a controller cannot be made, found or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is one of that name.
    #[error("a controller named `{0}` exists already")]
    Exists(String),
    /// There is none of that name.
    #[error("there is no controller named `{0}`")]
    NotFound(String),
    /// The name cannot be a socket's.
    #[error("`{0}` cannot be a controller's name, as it is no file name")]
    Name(String),
    /// None, or too many.
    #[error("a controller has 1 to {QUEUES_MAX} queues for commands, not {0}")]
    Queues(u16),
    /// No reactor runs on any of these cores.
    #[error("no reactor runs on a core of {0}")]
    Cores(CoreSet),
    /// It was not to be delayed, or has been started before.
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
    /// The same, on a reactor.
    #[error("cannot open the disk for a queue: {0}")]
    Open(#[from] OpenError),
    /// It cannot be reached.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// What there is to know of a controller.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its targets that have disks, and the disks' names.
    pub targets: Vec<(u8, String)>,
    /// Its socket, or its machine's.
    pub socket: PathBuf,
    /// Whether it is its machine's.
    pub connects: bool,
    /// The cores that it was restricted to.
    pub cores: Option<CoreSet>,
    /// Queues for commands that a guest can have.
    pub queues: u16,
    /// What disks know it by.
    pub initiator: Initiator,
    /// Queues that run, each with its core.
    pub running: Vec<(u16, u16)>,
    /// What its sessions have come to; `None` before it is started.
    pub sessions: Option<Snapshot>,
    /// Descriptor chains that made no request.
    pub bad_chains: u64,
    /// Requests without a place for their answer.
    pub unanswerable: u64,
    /// Rings that contradicted themselves.
    pub broken_queues: u64,
}

struct Entry {
    controller: Rc<Controller>,
    /// `None` before it is started.
    endpoint: Option<Endpoint>,
    link: Link,
}

/// The controllers.
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
    /// None yet; their sockets will be in `directory`, and their queues have up to `queue_size_max` descriptors.
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

    /// Makes a controller without disks, and its socket unless it is delayed.
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
        let controller = Rc::new(Controller::new(settings, Rc::clone(&self.reactors)));
        let endpoint = match delay {
            true => None,
            false => Some(Endpoint::start(&name, link.clone(), &self.directory, Rc::clone(&controller))?),
        };
        self.entries.borrow_mut().insert(name, Entry { controller, endpoint, link });
        Ok(())
    }

    /// Makes the socket of a controller that was delayed.
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

    /// Gives a disk to a target, or to the first that has none; which it is.
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
        let (news, arriving) = mpsc::unbounded_channel();
        // A target that has let go of its disk does not want to know.
        let tell = move |event| {
            let _ = news.send(event);
        };
        let owner = format!("vhost controller {name}");
        let opened = self.registry.open(disk, Access::Shared, &owner, tell)?;
        // Relative identifiers of ports begin with 1.
        let port = Port { initiator: controller.settings().initiator, target: u16::from(target) + 1 };
        let nexus = controller.attach(target, self.units.nexus(opened, port, 0)).await?;
        tokio::task::spawn_local(pass_on(arriving, Rc::downgrade(&controller), target, nexus));
        Ok(target)
    }

    /// Takes a target's disk away.
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

    /// Has the queue that is the thread of that number run on one of `cores` from now on; `None` if there is none.
    pub async fn place(&self, thread: u64, cores: CoreSet) -> Option<Result<(), MoveError>> {
        Some(self.find_thread(thread)?.place(cores).await)
    }

    /// Moves the queue that is the thread of that number to another reactor, if all that it has in flight completes within `patience`; `None` if there is none.
    pub async fn move_to(&self, thread: u64, to: Hold, patience: Duration) -> Option<Result<(), MoveError>> {
        Some(self.find_thread(thread)?.move_to(to, patience).await)
    }

    fn find_thread(&self, thread: u64) -> Option<Traveller<Controller>> {
        let entries = self.entries.borrow();
        entries.values().find_map(|entry| Traveller::find(&entry.controller, thread))
    }

    /// Whether there is a controller of that name.
    pub fn has(&self, name: &str) -> bool {
        self.entries.borrow().contains_key(name)
    }

    /// Whether a machine is connected to the controller of that name.
    pub fn is_connected(&self, name: &str) -> bool {
        let entries = self.entries.borrow();
        let endpoint = entries.get(name).and_then(|entry| entry.endpoint.as_ref());
        endpoint.is_some_and(|endpoint| endpoint.stats().connected)
    }

    /// Whether that target of a controller has a disk.
    pub fn has_target(&self, name: &str, target: u8) -> bool {
        self.entries.borrow().get(name).is_some_and(|entry| entry.controller.has_disk(target))
    }

    /// Ends a controller: its front-end is disconnected, its commands complete, its socket goes.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete(&self, name: &str) -> Result<(), Error> {
        let entry = self.entries.borrow_mut().remove(name);
        entry.ok_or_else(|| Error::NotFound(name.to_owned()))?.end().await;
        Ok(())
    }

    /// Ends all of them.
    pub async fn delete_all(&self) {
        let entries = std::mem::take(&mut *self.entries.borrow_mut());
        for entry in entries.into_values() {
            entry.end().await;
        }
    }

    /// Tells the log how many lines about their front-ends were left out, if it is time.
    pub fn tell_left_out(&self) {
        let entries = self.entries.borrow();
        entries.values().filter_map(|entry| entry.endpoint.as_ref()).for_each(Endpoint::tell_left_out);
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Info> {
        self.entries.borrow().values().map(|entry| entry.info(&self.directory)).collect()
    }
}

/// Passes news of a target's disk on, until the target has let go of it.
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
