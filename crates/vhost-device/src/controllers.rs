//! All controllers of the process, of all kinds, by name. Control context, within one `LocalSet`.

use crate::controller::{Controller, Kind, Settings};
use crate::endpoint::Endpoint;
use crate::{EndpointError, Errors, Link};
use aryk_bdev::{Error as BdevError, Memory};
use aryk_reactor::{CoreSet, MoveError, Order, Reactors, SleepPolicy};
use aryk_vhost_user::Snapshot;
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use tokio::task::JoinHandle;

/// The largest number of queues of a controller, request queues and others.
pub const QUEUES_MAX: u16 = 256;

/// The options of a new controller of any kind.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, which is also the name of its socket.
    pub name: String,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    /// Request queues that a guest can have, at least 1.
    pub queues: u16,
    /// Whether it listens for its front-end or connects to it.
    pub link: Link,
    /// It listens or connects from [`Controllers::start`] on only.
    pub delay: bool,
}

/// Why a controller cannot be created, found or started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another controller has that name.
    #[error("a controller named `{0}` exists already")]
    Exists(String),
    /// No controller has that name, or only one of another kind.
    #[error("there is no controller named `{0}`")]
    NotFound(String),
    /// The name cannot be the name of a socket.
    #[error("`{0}` cannot be a controller's name, as it is no file name")]
    Name(String),
    /// The number of request queues is 0 or too large.
    #[error("a controller has 1 to {max} request queues, not {queues}")]
    Queues {
        /// The number.
        queues: u16,
        /// The largest number for this kind of controllers.
        max: u16,
    },
    /// No reactor runs on any of these cores.
    #[error("no reactor runs on a core of {0}")]
    Cores(CoreSet),
    /// The controller was not created with `delay`, or was started before.
    #[error("controller `{0}` has been started already")]
    Started(String),
    /// Its disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] BdevError),
    /// Its socket cannot be created or watched.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// The state of a controller of any kind.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its kind: [`Kind::NAME`].
    pub kind: &'static str,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// Its own socket, or the front-end's socket that it connects to.
    pub socket: PathBuf,
    /// Whether that is the front-end's socket.
    pub connects: bool,
    /// The cores that it is restricted to.
    pub cores: Option<CoreSet>,
    /// Request queues that a guest can have.
    pub queues: u16,
    /// Running queues, each with its core.
    pub running: Vec<(u16, u16)>,
    /// The sleep policy of its queues; `None`: the daemon's policy.
    pub sleep_policy: Option<SleepPolicy>,
    /// Statistics of its sessions; `None` before it is started.
    pub sessions: Option<Snapshot>,
    /// Descriptor chains that were no valid request.
    pub bad_chains: u64,
    /// Requests without a buffer for their status.
    pub unanswerable: u64,
    /// Queues that stopped because their ring was inconsistent.
    pub broken_queues: u64,
}

/// A controller whose kind is not known here.
trait AnyController: Any {
    fn kind_name(&self) -> &'static str;
    fn settings(&self) -> &Settings;
    fn errors(&self) -> &Errors;
    fn disk_names(&self) -> Vec<String>;
    fn running(&self) -> Vec<(u16, u16)>;
    fn sleep_policy(&self) -> Option<SleepPolicy>;
    fn set_sleep_policy(self: Rc<Self>, policy: Option<SleepPolicy>) -> Pin<Box<dyn Future<Output = ()>>>;
    fn serve(self: Rc<Self>, link: Link, directory: &Path) -> Result<Endpoint, EndpointError>;
    fn order(self: Rc<Self>, thread: u64, order: Order) -> Option<JoinHandle<Result<(), MoveError>>>;
    fn end(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

impl<K: Kind> AnyController for Controller<K> {
    fn kind_name(&self) -> &'static str {
        K::NAME
    }

    fn settings(&self) -> &Settings {
        self.settings()
    }

    fn errors(&self) -> &Errors {
        self.errors()
    }

    fn disk_names(&self) -> Vec<String> {
        self.kind().disk_names()
    }

    fn running(&self) -> Vec<(u16, u16)> {
        self.queues().cores()
    }

    fn sleep_policy(&self) -> Option<SleepPolicy> {
        self.queues().sleep_policy()
    }

    fn set_sleep_policy(self: Rc<Self>, policy: Option<SleepPolicy>) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(async move { self.queues().set_sleep_policy(policy).await })
    }

    fn serve(self: Rc<Self>, link: Link, directory: &Path) -> Result<Endpoint, EndpointError> {
        Endpoint::start(&self.settings().name.clone(), link, directory, self)
    }

    fn order(self: Rc<Self>, thread: u64, order: Order) -> Option<JoinHandle<Result<(), MoveError>>> {
        Self::order(&self, thread, order)
    }

    fn end(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(K::end(self))
    }
}

struct Entry {
    controller: Rc<dyn AnyController>,
    /// `None` before it is started.
    endpoint: Option<Endpoint>,
    link: Link,
}

/// All controllers.
pub struct Controllers {
    directory: PathBuf,
    memory: Memory,
    reactors: Rc<Reactors>,
    queue_size_max: u16,
    entries: RefCell<BTreeMap<String, Entry>>,
}

impl fmt::Debug for Controllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controllers").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Controllers {
    /// No controllers yet. Their sockets will be in `directory`, their queues have up to `queue_size_max` descriptors, and their
    /// guests' memory is announced to `memory`.
    pub fn new(directory: &Path, queue_size_max: u16, memory: Memory, reactors: Rc<Reactors>) -> Self {
        let (directory, entries) = (directory.to_owned(), RefCell::default());
        Self { directory, memory, reactors, queue_size_max, entries }
    }

    /// Creates a controller of the kind that `make` makes when the options are valid; and its socket, unless that is delayed.
    ///
    /// # Errors
    /// [`Error`]; those of `make`.
    pub fn create<K: Kind>(
        &self,
        options: Options,
        make: impl FnOnce() -> Result<K, BdevError>,
    ) -> Result<Rc<Controller<K>>, Error> {
        let Options { name, cores, queues, link, delay } = options;
        let max = QUEUES_MAX - K::FIXED_QUEUES;
        if self.has(&name) {
            return Err(Error::Exists(name));
        }
        if Path::new(&name).file_name().is_none_or(|f| f != name.as_str()) {
            return Err(Error::Name(name));
        }
        if !(1..=max).contains(&queues) {
            return Err(Error::Queues { queues, max });
        }
        if let Some(cores) = &cores
            && !self.reactors.is_any_on(cores)
        {
            return Err(Error::Cores(cores.clone()));
        }
        let queue_size_max = self.queue_size_max;
        let settings = Settings { name: name.clone(), cores, queues, queue_size_max };
        let (memory, reactors) = (self.memory.clone(), Rc::clone(&self.reactors));
        let controller = Rc::new(Controller::new(settings, make()?, memory, reactors));
        let mut entry = Entry { controller: controller.clone(), endpoint: None, link };
        if !delay {
            entry.start(&self.directory)?;
        }
        self.entries.borrow_mut().insert(name, entry);
        Ok(controller)
    }

    /// Creates the socket of a controller that was delayed, or connects it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start(&self, name: &str) -> Result<(), Error> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(name).ok_or_else(|| Error::NotFound(name.to_owned()))?;
        match entry.endpoint {
            Some(_) => Err(Error::Started(name.to_owned())),
            None => entry.start(&self.directory),
        }
    }

    /// The controller of that name and kind.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn find<K: Kind>(&self, name: &str) -> Result<Rc<Controller<K>>, Error> {
        let found = self.entries.borrow().get(name).map(|entry| Rc::clone(&entry.controller));
        let found = found.and_then(|controller| (controller as Rc<dyn Any>).downcast().ok());
        found.ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// Has the queue whose thread has that number run elsewhere. `None` if no queue has that thread.
    pub async fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        let begun = self.entries.borrow().values().find_map(|entry| {
            let controller = Rc::clone(&entry.controller);
            controller.order(thread, order.clone())
        });
        Some(begun?.await.unwrap_or(Err(MoveError::Ending)))
    }

    /// Sets the sleep policy of a controller's queues, also of those that start later; `None`: the daemon's policy.
    ///
    /// # Errors
    /// [`Error::NotFound`], also if the controller was deleted meanwhile.
    pub async fn set_sleep_policy(&self, name: &str, policy: Option<SleepPolicy>) -> Result<(), Error> {
        let find = || self.entries.borrow().get(name).map(|entry| Rc::clone(&entry.controller));
        let not_found = || Error::NotFound(name.to_owned());
        let controller = find().ok_or_else(not_found)?;
        Rc::clone(&controller).set_sleep_policy(policy).await;
        let is_there = find().is_some_and(|found| Rc::ptr_eq(&found, &controller));
        if is_there { Ok(()) } else { Err(not_found()) }
    }

    /// The kind of the controller of that name, if there is one.
    pub fn kind_of(&self, name: &str) -> Option<&'static str> {
        self.entries.borrow().get(name).map(|entry| entry.controller.kind_name())
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

    /// Deletes a controller: disconnects its front-end, waits until its requests complete, and removes its socket.
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

impl Entry {
    fn start(&mut self, directory: &Path) -> Result<(), Error> {
        let controller = Rc::clone(&self.controller);
        self.endpoint = Some(controller.serve(self.link.clone(), directory)?);
        Ok(())
    }

    async fn end(self) {
        if let Some(endpoint) = self.endpoint {
            endpoint.stop().await;
        }
        self.controller.end().await;
    }

    fn info(&self, directory: &Path) -> Info {
        let (settings, errors) = (self.controller.settings(), self.controller.errors());
        let socket = match (&self.endpoint, &self.link) {
            (Some(endpoint), _) => endpoint.path().to_owned(),
            (None, Link::Connect(path)) => path.clone(),
            (None, Link::Listen(_)) => directory.join(&settings.name),
        };
        Info {
            name: settings.name.clone(),
            kind: self.controller.kind_name(),
            disks: self.controller.disk_names(),
            socket,
            connects: matches!(self.link, Link::Connect(_)),
            cores: settings.cores.clone(),
            queues: settings.queues,
            running: self.controller.running(),
            sleep_policy: self.controller.sleep_policy(),
            sessions: self.endpoint.as_ref().map(Endpoint::stats),
            bad_chains: errors.bad_chains.load(Ordering::Relaxed),
            unanswerable: errors.unanswerable.load(Ordering::Relaxed),
            broken_queues: errors.broken_queues.load(Ordering::Relaxed),
        }
    }
}
