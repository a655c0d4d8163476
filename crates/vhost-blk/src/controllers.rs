//! All vhost-user-blk controllers of the process, by name. Control context, within one `LocalSet`.

use crate::controller::{Controller, Settings};
use aryk_bdev::{Access, Error as BdevError, Event, Registry};
use aryk_reactor::{CoreSet, Hold, Reactors};
use aryk_vhost_device::{Endpoint, EndpointError, Host, Link, MoveError, Traveller};
use aryk_vhost_user::Snapshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A controller that is to be made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, and its socket's.
    pub name: String,
    /// The disk.
    pub disk: String,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The cores whose reactors serve its queues; all if `None`.
    pub cores: Option<CoreSet>,
    /// Queues that a guest can have: 1 to 256.
    pub queues: u16,
    /// How it and its machine find each other.
    pub link: Link,
}

/// Queues that a guest can have if nothing is said.
pub const QUEUES: u16 = 128;
/// Queues that a guest can have at most.
pub const QUEUES_MAX: u16 = 256;

/// Why a controller cannot be made or found.
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
    #[error("a controller has 1 to {QUEUES_MAX} queues, not {0}")]
    Queues(u16),
    /// No reactor runs on any of these cores.
    #[error("no reactor runs on a core of {0}")]
    Cores(CoreSet),
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] BdevError),
    /// It cannot be reached.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// What there is to know of a controller.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its disk; `None` when that has been removed.
    pub disk: Option<String>,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Its socket, or its machine's.
    pub socket: PathBuf,
    /// Whether it is its machine's.
    pub connects: bool,
    /// The cores that it was restricted to.
    pub cores: Option<CoreSet>,
    /// Queues that a guest can have.
    pub queues: u16,
    /// Queues that run, each with its core.
    pub running: Vec<(u16, u16)>,
    /// What its sessions have come to.
    pub sessions: Snapshot,
    /// Descriptor chains that made no request.
    pub bad_chains: u64,
    /// Requests without a place for their status.
    pub unanswerable: u64,
    /// Rings that contradicted themselves.
    pub broken_queues: u64,
}

struct Entry {
    controller: Rc<Controller>,
    endpoint: Endpoint,
    /// Passes news of the disk on.
    events: JoinHandle<()>,
}

/// The controllers.
pub struct Controllers {
    directory: PathBuf,
    registry: Arc<Registry>,
    reactors: Rc<Reactors>,
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
        Self { directory, registry, reactors, queue_size_max, entries }
    }

    /// Makes a controller and its socket; the socket's path.
    ///
    /// # Errors
    /// [`Error`].
    pub fn create(&self, options: Options) -> Result<PathBuf, Error> {
        let name = options.name.clone();
        if self.entries.borrow().contains_key(&name) {
            return Err(Error::Exists(name));
        }
        if Path::new(&name).file_name().is_none_or(|f| f != name.as_str()) {
            return Err(Error::Name(name));
        }
        if !(1..=QUEUES_MAX).contains(&options.queues) {
            return Err(Error::Queues(options.queues));
        }
        if let Some(cores) = &options.cores
            && !self.reactors.is_any_on(cores)
        {
            return Err(Error::Cores(cores.clone()));
        }
        let access = if options.read_only { Access::Read } else { Access::Shared };
        let (news, arriving) = mpsc::unbounded_channel();
        // A controller that is being deleted does not want to know.
        let tell = move |event| {
            let _ = news.send(event);
        };
        let owner = format!("vhost controller {name}");
        let disk = self.registry.open(&options.disk, access, &owner, tell)?;
        let settings = Settings {
            name: name.clone(),
            read_only: options.read_only,
            cores: options.cores,
            queues: options.queues,
            queue_size_max: self.queue_size_max,
        };
        let controller = Rc::new(Controller::new(settings, disk, Rc::clone(&self.reactors)));
        let endpoint = Endpoint::start(&name, options.link, &self.directory, Rc::clone(&controller))?;
        let path = endpoint.path().to_owned();
        let events = tokio::task::spawn_local(pass_on(arriving, Rc::clone(&controller)));
        self.entries.borrow_mut().insert(name, Entry { controller, endpoint, events });
        Ok(path)
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

    /// Ends a controller: its front-end is disconnected, its requests complete, its socket goes.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete(&self, name: &str) -> Result<(), Error> {
        let entry = self.entries.borrow_mut().remove(name);
        let entry = entry.ok_or_else(|| Error::NotFound(name.to_owned()))?;
        entry.endpoint.stop().await;
        entry.events.abort();
        Ok(())
    }

    /// Ends all of them.
    pub async fn delete_all(&self) {
        let entries = std::mem::take(&mut *self.entries.borrow_mut());
        for entry in entries.into_values() {
            entry.endpoint.stop().await;
            entry.events.abort();
        }
    }

    /// Tells the log how many lines about their front-ends were left out, if it is time.
    pub fn tell_left_out(&self) {
        self.entries.borrow().values().for_each(|entry| entry.endpoint.tell_left_out());
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Info> {
        self.entries.borrow().values().map(Entry::info).collect()
    }
}

async fn pass_on(mut arriving: mpsc::UnboundedReceiver<Event>, controller: Rc<Controller>) {
    while let Some(event) = arriving.recv().await {
        controller.disk_event(event).await;
    }
}

impl Entry {
    fn info(&self) -> Info {
        let settings = self.controller.settings();
        let errors = self.controller.errors();
        Info {
            name: settings.name.clone(),
            disk: self.controller.disk_name(),
            read_only: settings.read_only,
            socket: self.endpoint.path().to_owned(),
            connects: self.endpoint.connects(),
            cores: settings.cores.clone(),
            queues: settings.queues,
            running: self.controller.queues().cores(),
            sessions: self.endpoint.stats(),
            bad_chains: errors.bad_chains.load(Ordering::Relaxed),
            unanswerable: errors.unanswerable.load(Ordering::Relaxed),
            broken_queues: errors.broken_queues.load(Ordering::Relaxed),
        }
    }
}
