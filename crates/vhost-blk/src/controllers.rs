//! All vhost-user-blk controllers of the process, by name. Control context, within one `LocalSet`.

use crate::controller::{Controller, Settings};
use aryk_bdev::{Access, Error as BdevError, Event, Registry};
use aryk_reactor::{CoreSet, Hold, Reactors};
use aryk_vhost_device::{Endpoint, EndpointError, Host, Link, MoveError, Mover};
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

/// The options of a new controller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, which is also the name of its socket.
    pub name: String,
    /// The disk.
    pub disk: String,
    /// Whether the guest can only read.
    pub read_only: bool,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    /// Queues that a guest can have: 1 to 256.
    pub queues: u16,
    /// Whether it listens for its front-end or connects to it.
    pub link: Link,
}

/// The default number of queues.
pub const QUEUES: u16 = 128;
/// The largest number of queues.
pub const QUEUES_MAX: u16 = 256;

/// Why a controller cannot be created or found.
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
    #[error("a controller has 1 to {QUEUES_MAX} queues, not {0}")]
    Queues(u16),
    /// No reactor runs on any of these cores.
    #[error("no reactor runs on a core of {0}")]
    Cores(CoreSet),
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] BdevError),
    /// Its socket cannot be created or watched.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// The state of a controller.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its disk; `None` if the disk was removed.
    pub disk: Option<String>,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Its own socket, or the front-end's socket that it connects to.
    pub socket: PathBuf,
    /// Whether that is the front-end's socket.
    pub connects: bool,
    /// The cores that it is restricted to.
    pub cores: Option<CoreSet>,
    /// Queues that a guest can have.
    pub queues: u16,
    /// Running queues, each with its core.
    pub running: Vec<(u16, u16)>,
    /// Statistics of its sessions.
    pub sessions: Snapshot,
    /// Descriptor chains that were no valid request.
    pub bad_chains: u64,
    /// Requests without a buffer for their status.
    pub unanswerable: u64,
    /// Queues that stopped because their ring was inconsistent.
    pub broken_queues: u64,
}

struct Entry {
    controller: Rc<Controller>,
    endpoint: Endpoint,
    /// Passes events of the disk on.
    events: JoinHandle<()>,
}

/// All controllers.
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
    /// No controllers yet. Their sockets will be in `directory`, and their queues have up to `queue_size_max` descriptors.
    pub fn new(
        directory: &Path,
        queue_size_max: u16,
        registry: Arc<Registry>,
        reactors: Rc<Reactors>,
    ) -> Self {
        let (directory, entries) = (directory.to_owned(), RefCell::default());
        Self { directory, registry, reactors, queue_size_max, entries }
    }

    /// Creates a controller and its socket. Returns the path of the socket.
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
        let (events, arriving) = mpsc::unbounded_channel();
        // A controller that is being deleted needs no events.
        let tell = move |event| {
            let _ = events.send(event);
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
        let memory = self.registry.memory().clone();
        let controller = Rc::new(Controller::new(settings, disk, memory, Rc::clone(&self.reactors)));
        let endpoint = Endpoint::start(&name, options.link, &self.directory, Rc::clone(&controller))?;
        let path = endpoint.path().to_owned();
        let events = tokio::task::spawn_local(pass_on(arriving, Rc::clone(&controller)));
        self.entries.borrow_mut().insert(name, Entry { controller, endpoint, events });
        Ok(path)
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

    /// Deletes a controller: disconnects its front-end, waits until its requests complete, and removes its socket.
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

    /// Deletes all controllers.
    pub async fn delete_all(&self) {
        let entries = std::mem::take(&mut *self.entries.borrow_mut());
        for entry in entries.into_values() {
            entry.endpoint.stop().await;
            entry.events.abort();
        }
    }

    /// Logs how many lines about front-ends were left out, if it is time.
    pub fn tell_left_out(&self) {
        self.entries.borrow().values().for_each(|entry| entry.endpoint.tell_left_out());
    }

    /// The state of all controllers, by name.
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
