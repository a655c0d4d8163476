//! The reactors of a process: starting them on their cores, choosing among them, adding, removing and stopping them.
//! Control context.
//!
//! A reactor that is being removed gets no new roots and pollers. It ends when nothing runs on it and no caller has a [`Hold`]
//! of it. A caller takes a [`Hold`] before it places an object on a reactor or moves an object away that may come back.

use crate::background::Background;
use crate::blocking::Blocking;
use crate::handle::{Message, lock};
use crate::mailbox::Refused;
use crate::reactor::BLOCKING_THREADS;
use crate::{Clock, CoreSet, Engine, Handle, Reactor, SleepPolicy, watchdog};
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Options of the reactors of a process.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cores that get one reactor each.
    pub cores: CoreSet,
    /// The sleep policy of an idle reactor.
    pub policy: SleepPolicy,
    /// The kernel interface that the reactors use.
    pub engine: Engine,
    /// A turn longer than this is reported in the log.
    pub watchdog: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cores: CoreSet::from_iter([CoreSet::allowed().iter().next().unwrap_or(0)]),
            policy: SleepPolicy::default(),
            engine: Engine::default(),
            watchdog: Duration::from_secs(1),
        }
    }
}

/// An error of starting the reactors.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// None of the cores may be used.
    #[error("this process may not run on any of the cores {asked}; it may on {allowed}")]
    NoCores {
        /// The requested cores.
        asked: CoreSet,
        /// Cores of this process.
        allowed: CoreSet,
    },
    /// The kernel refused a resource of the reactor.
    #[error("cannot start a reactor on core {core}: {error}")]
    Os {
        /// The core.
        core: u16,
        /// The kernel's error.
        error: io::Error,
    },
}

/// An error of adding or removing a reactor.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The process may not use that core.
    #[error("this process may not run on core {core}; it may on {allowed}")]
    Forbidden {
        /// The core.
        core: u16,
        /// Cores of this process.
        allowed: CoreSet,
    },
    /// The core has a reactor already.
    #[error("there is a reactor on core {0} already")]
    Exists(u16),
    /// The core has no reactor.
    #[error("there is no reactor on core {0}")]
    NotFound(u16),
    /// Another call is removing the reactor.
    #[error("the reactor on core {0} is already being removed")]
    Leaving(u16),
    /// The last reactor cannot be removed, since it serves the I/O.
    #[error("the reactor on core {0} is the last one")]
    Last(u16),
    /// The kernel refused a resource of the reactor.
    #[error("cannot start a reactor on core {core}: {error}")]
    Os {
        /// The core.
        core: u16,
        /// The kernel's error.
        error: io::Error,
    },
}

/// A reactor of the group.
#[derive(Debug)]
struct Member {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    /// A clone of this for each [`Hold`].
    holds: Arc<()>,
    /// The reactor is being removed: nothing new is placed on it.
    leaving: bool,
}

/// The running reactors of a process, by core. Cheap to clone; empty where a program runs its reactors itself. Any thread.
#[derive(Clone, Debug, Default)]
pub struct ReactorList(Arc<Mutex<Vec<Member>>>);

impl ReactorList {
    fn lock(&self) -> MutexGuard<'_, Vec<Member>> {
        lock(&self.0)
    }

    /// The handles of all reactors, by core.
    pub fn handles(&self) -> Vec<Handle> {
        self.lock().iter().map(|member| member.handle.clone()).collect()
    }

    /// The handles of the reactors that are not being removed.
    pub fn staying(&self) -> Vec<Handle> {
        let members = self.lock();
        members.iter().filter(|member| !member.leaving).map(|member| member.handle.clone()).collect()
    }

    /// Whether a reactor that is not being removed runs on one of `cores`.
    pub fn is_any_on(&self, cores: &CoreSet) -> bool {
        self.lock().iter().any(|m| !m.leaving && cores.contains(m.handle.core()))
    }

    /// The reactor with the fewest roots and pollers among those on `cores`, or among all; `None` if each of them is being
    /// removed.
    pub fn find_least_loaded(&self, cores: Option<&CoreSet>) -> Option<Hold> {
        let members = self.lock();
        let fits = |m: &&Member| !m.leaving && cores.is_none_or(|c| c.contains(m.handle.core()));
        members.iter().filter(fits).min_by_key(|m| m.handle.members()).map(Member::hold)
    }

    /// Holds the reactor on `core`, to place an object on it. `None` if the reactor is being removed.
    pub fn hold_for_arrival(&self, core: u16) -> Option<Hold> {
        let members = self.lock();
        members.iter().find(|m| m.handle.core() == core && !m.leaving).map(Member::hold)
    }

    /// Holds a reactor from which an object is moved away that may come back. `None` if the reactor has ended.
    pub fn hold(&self, handle: &Handle) -> Option<Hold> {
        self.lock().iter().find(|member| member.handle == *handle).map(Member::hold)
    }
}

/// Keeps a reactor from ending while a caller places something on it or takes something from it.
#[derive(Debug, Clone)]
pub struct Hold {
    handle: Handle,
    _count: Arc<()>,
}

impl Deref for Hold {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

/// The running reactors of a process. Dropping this stops them.
#[derive(Debug)]
pub struct Reactors {
    /// The cores that this process could use before any of its threads was pinned.
    allowed: CoreSet,
    options: Options,
    blocking: Blocking,
    members: ReactorList,
    background: Background,
    watchdog: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Deref for Reactors {
    type Target = ReactorList;

    fn deref(&self) -> &ReactorList {
        &self.members
    }
}

impl Reactors {
    /// Starts a reactor on each core of `options` that this process may use; logs a warning if it may not use all of them.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(options: &Options) -> Result<Self, StartError> {
        let allowed = CoreSet::allowed();
        let cores = options.cores.intersection(&allowed);
        if cores.is_empty() {
            return Err(StartError::NoCores { asked: options.cores.clone(), allowed });
        }
        if cores != options.cores {
            tracing::warn!(asked = %options.cores, used = %cores, "this process may not use all requested cores");
        }
        let members = ReactorList::default();
        let mut reactors = Self {
            allowed,
            options: options.clone(),
            blocking: Blocking::new(BLOCKING_THREADS),
            background: Background::new(members.clone()),
            members,
            watchdog: None,
        };
        for core in cores.iter() {
            reactors.start_on(core).map_err(|error| StartError::Os { core, error })?;
        }
        let (stop, stopped) = mpsc::channel();
        let (members, limit) = (reactors.members.clone(), options.watchdog);
        let watch = move || watchdog::run(&members, limit, &stopped);
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(watch);
        let thread = thread.map_err(|error| StartError::Os { core: 0, error })?;
        reactors.watchdog = Some((stop, thread));
        Ok(reactors)
    }

    fn start_on(&self, core: u16) -> io::Result<Handle> {
        let (handle, thread) = start_one(core, &self.options, self.blocking.clone())?;
        let member =
            Member { handle: handle.clone(), thread: Some(thread), holds: Arc::default(), leaving: false };
        let mut members = self.members.lock();
        assert!(
            members.iter().all(|member| member.handle.core() != core),
            "core {core} has a reactor already"
        );
        members.push(member);
        members.sort_unstable_by_key(|member| member.handle.core());
        Ok(handle)
    }

    /// The cores that this process may use, whether or not there is a reactor on each.
    pub const fn allowed(&self) -> &CoreSet {
        &self.allowed
    }

    /// The reactor with the fewest roots and pollers among those on `cores`; if there is none, among all, with a warning.
    pub fn least_loaded(&self, cores: Option<&CoreSet>) -> Hold {
        let found = self.members.find_least_loaded(cores);
        found.unwrap_or_else(|| {
            let asked = cores.map(tracing::field::display);
            tracing::warn!(asked, "no reactor runs on the requested cores: another core is used");
            self.members.find_least_loaded(None).expect("one always stays")
        })
    }

    /// Starts background tasks of modules on these reactors.
    pub const fn background(&self) -> &Background {
        &self.background
    }

    /// Starts a reactor on `core`.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn add(&self, core: u16) -> Result<Handle, ChangeError> {
        if !self.allowed.contains(core) {
            return Err(ChangeError::Forbidden { core, allowed: self.allowed.clone() });
        }
        if self.members.lock().iter().any(|member| member.handle.core() == core) {
            return Err(ChangeError::Exists(core));
        }
        self.start_on(core).map_err(|error| ChangeError::Os { core, error })
    }

    /// Begins to remove the reactor on `core`: no new object is placed on it, until [`Reactors::keep`].
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn begin_to_leave(&self, core: u16) -> Result<Handle, ChangeError> {
        let mut members = self.members.lock();
        let others = members.iter().filter(|m| m.handle.core() != core && !m.leaving).count();
        let found = members.iter_mut().find(|m| m.handle.core() == core);
        let member = found.ok_or(ChangeError::NotFound(core))?;
        if member.leaving {
            return Err(ChangeError::Leaving(core));
        }
        if others == 0 {
            return Err(ChangeError::Last(core));
        }
        member.leaving = true;
        Ok(member.handle.clone())
    }

    /// Cancels the removal of a reactor.
    pub fn keep(&self, handle: &Handle) {
        if let Some(member) = self.members.lock().iter_mut().find(|member| member.handle == *handle) {
            member.leaving = false;
        }
    }

    /// Ends a reactor that is being removed, and returns its thread. `None`, and the reactor goes on, if something still runs on
    /// it or a caller holds it.
    pub async fn end(&self, handle: &Handle) -> Option<Ending> {
        if !handle.call(|cx| cx.is_deserted()).await.unwrap_or(true) {
            return None;
        }
        let thread = {
            let mut members = self.members.lock();
            let at = members.iter().position(|member| member.handle == *handle && member.leaving)?;
            if Arc::strong_count(&members[at].holds) > 1 {
                return None;
            }
            let removed = members.remove(at);
            assert!(members.iter().any(|member| !member.leaving), "the last reactor that stays ends");
            removed.thread
        };
        // No caller finds the reactor from here on. An error means that it has already ended.
        let _ = handle.cast(|cx| cx.stopping = true).await;
        Some(Ending(thread))
    }

    /// Moves the calling thread, and the threads that it will start, off the reactors' cores, if there are other cores.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave_cores(&self) -> io::Result<()> {
        let theirs: CoreSet = self.handles().iter().map(Handle::core).collect();
        let mut others = rustix::thread::CpuSet::new();
        self.allowed.iter().filter(|&core| !theirs.contains(core)).for_each(|core| others.set(core.into()));
        if others.count() == 0 {
            self.allowed.iter().for_each(|core| others.set(core.into()));
        }
        Ok(rustix::thread::sched_setaffinity(None, &others)?)
    }
}

impl Member {
    fn hold(&self) -> Hold {
        Hold { handle: self.handle.clone(), _count: Arc::clone(&self.holds) }
    }
}

/// The thread of a reactor that is ending.
#[derive(Debug)]
pub struct Ending(Option<JoinHandle<()>>);

impl Ending {
    /// Whether the thread has ended, which takes a turn of the reactor.
    pub fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        join(self.0.take());
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a reactor ended by a panic");
    }
}

fn start_one(core: u16, options: &Options, blocking: Blocking) -> io::Result<(Handle, JoinHandle<()>)> {
    let (policy, engine) = (options.policy, options.engine);
    let (started, result) = mpsc::channel();
    let body = move || {
        let made =
            pin(core).and_then(|()| Reactor::sharing(core, policy, engine, Clock::Monotonic, blocking));
        match made {
            Ok(reactor) => {
                // The thread that starts this one waits for the result.
                let _ = started.send(Ok(reactor.handle().clone()));
                reactor.run();
            }
            Err(e) => drop(started.send(Err(e))),
        }
    };
    let thread = std::thread::Builder::new().name(format!("reactor_{core}")).spawn(body)?;
    let handle = result.recv().map_err(|_| io::Error::other("the reactor's thread died"))??;
    Ok((handle, thread))
}

fn pin(core: u16) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core.into());
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

impl Drop for Reactors {
    fn drop(&mut self) {
        let members = std::mem::take(&mut *self.members.lock());
        for member in &members {
            let mut stop: Message = Box::new(|cx| cx.stopping = true);
            while let Err(Refused::Full(again)) = member.handle.try_send(stop) {
                stop = again;
                std::thread::yield_now();
            }
        }
        if let Some((stop, thread)) = self.watchdog.take() {
            drop(stop);
            drop(thread.join());
        }
        members.into_iter().for_each(|member| join(member.thread));
    }
}
