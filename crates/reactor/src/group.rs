//! The reactors of a process: starting them on their cores, choosing among them, stopping them. Control context.

use crate::blocking::Blocking;
use crate::handle::Message;
use crate::mailbox::Refused;
use crate::reactor::BLOCKING_THREADS;
use crate::{Clock, CoreSet, Engine, Handle, Reactor, SleepPolicy, watchdog};
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How reactors are to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// One reactor each.
    pub cores: CoreSet,
    /// What they do without work.
    pub policy: SleepPolicy,
    /// Which kernel interface they use.
    pub engine: Engine,
    /// A turn longer than this is told of.
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

/// Why reactors cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// None of the cores may be used.
    #[error("this process may not run on any of the cores {asked}; it may on {allowed}")]
    NoCores {
        /// Cores asked for.
        asked: CoreSet,
        /// Cores of this process.
        allowed: CoreSet,
    },
    /// The kernel refuses.
    #[error("cannot start a reactor on core {core}: {error}")]
    Os {
        /// Where.
        core: u16,
        /// Why.
        error: io::Error,
    },
}

/// Running reactors. Dropping them stops them.
#[derive(Debug)]
pub struct Reactors {
    /// The cores that this process might use, before any of its threads was pinned.
    allowed: CoreSet,
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    watchdog: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Reactors {
    /// Starts a reactor on each core of `options` that this process may use; says so if those are fewer.
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
            tracing::warn!(asked = %options.cores, used = %cores, "this process may not use all cores asked for");
        }
        let mut reactors = Self { allowed, handles: Vec::new(), threads: Vec::new(), watchdog: None };
        let blocking = Blocking::new(BLOCKING_THREADS);
        for core in cores.iter() {
            let (handle, thread) =
                start_one(core, options, blocking.clone()).map_err(|error| StartError::Os { core, error })?;
            reactors.handles.push(handle);
            reactors.threads.push(thread);
        }
        let (stop, stopped) = mpsc::channel();
        let (handles, limit) = (reactors.handles.clone(), options.watchdog);
        let watch = move || watchdog::run(&handles, limit, &stopped);
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(watch);
        let thread = thread.map_err(|error| StartError::Os { core: 0, error })?;
        reactors.watchdog = Some((stop, thread));
        Ok(reactors)
    }

    /// The cores that this process may use, whether or not there is a reactor on each.
    pub const fn allowed(&self) -> &CoreSet {
        &self.allowed
    }

    /// All of them, by core.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }

    /// The one with the fewest roots and pollers among those on `cores`; or, which it says, among all if none is there.
    pub fn least_loaded(&self, cores: Option<&CoreSet>) -> &Handle {
        let fits = |h: &&Handle| cores.is_none_or(|c| c.contains(h.core()));
        let least = self.handles.iter().filter(fits).min_by_key(|h| h.members());
        least.unwrap_or_else(|| {
            let asked = cores.map(tracing::field::display);
            tracing::warn!(asked, "no reactor runs on the cores asked for: any will do");
            self.least_loaded(None)
        })
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
                // The starter waits for this.
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
        for handle in &self.handles {
            let mut stop: Message = Box::new(|cx| cx.stopping = true);
            while let Err(Refused::Full(again)) = handle.try_send(stop) {
                stop = again;
                std::thread::yield_now();
            }
        }
        if let Some((stop, thread)) = self.watchdog.take() {
            drop(stop);
            drop(thread.join());
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a reactor ended by a panic");
            }
        }
    }
}
