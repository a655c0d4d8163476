//! What the control thread, the devices and the queue pairs of a controller share. Any context; nothing here blocks.

use crate::control::Command;
use crate::pool::Pool;
use crate::{Config, Info};
use aryk_nvme::queue::Counters as PairCounters;
use aryk_reactor::{DriverKey, Handle, Hold};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// Counters of a controller, since it was attached.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) resets: AtomicU64,
    pub(crate) aborts: AtomicU64,
    /// Attempts after a status that allows one.
    pub(crate) retried: AtomicU64,
    /// Commands that resets submitted again.
    pub(crate) resubmitted: AtomicU64,
    /// Requests that failed because a reset could not submit them again.
    pub(crate) failed_by_reset: AtomicU64,
    /// Commands and doorbells of pairs that are gone.
    pub(crate) submitted_before: AtomicU64,
    pub(crate) doorbells_before: AtomicU64,
}

/// Counters of a queue pair, which its reactor writes.
#[derive(Debug, Default)]
pub(crate) struct PairStats {
    pub(crate) core: u16,
    pub(crate) submitted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) doorbells: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) last_change: AtomicU64,
    pub(crate) pool_pages: AtomicU64,
    pub(crate) pool_low: AtomicU64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) key: DriverKey,
    pub(crate) retries: u8,
    commands: UnboundedSender<Command>,
    pub(crate) counters: Counters,
    info: Mutex<Info>,
    /// Reactors without a pair, each with the reactor whose pair it uses.
    routes: Mutex<Vec<(Handle, Hold)>>,
    /// Submission time of the last flush that succeeded.
    flushed: AtomicU64,
    /// The control thread looks at the controller rarely.
    is_idle: AtomicBool,
    /// By queue.
    pairs: Mutex<BTreeMap<u16, Arc<PairStats>>>,
}

impl Shared {
    pub(crate) fn new(config: &Config, commands: UnboundedSender<Command>, info: Info) -> Self {
        Self {
            name: config.name.clone(),
            key: DriverKey::unique(),
            retries: config.retries,
            commands,
            counters: Counters::default(),
            info: Mutex::new(info),
            routes: Mutex::default(),
            flushed: AtomicU64::new(0),
            is_idle: AtomicBool::new(false),
            pairs: Mutex::default(),
        }
    }

    /// Sends a command to the control thread. A controller that has ended ignores it.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// A request was submitted: the control thread looks at the controller more often from now on.
    #[inline]
    pub(crate) fn wake_idle(&self) {
        if self.is_idle.load(Ordering::Relaxed) && self.is_idle.swap(false, Ordering::Relaxed) {
            self.send(Command::Busy);
        }
    }

    pub(crate) fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(is_idle, Ordering::Relaxed);
    }

    /// A flush that was submitted at this time has succeeded.
    pub(crate) fn flushed(&self, submitted: u64) {
        self.flushed.fetch_max(submitted, Ordering::Relaxed);
    }

    /// Whether changes have completed that no later flush covers.
    pub(crate) fn has_unflushed(&self) -> bool {
        let flushed = self.flushed.load(Ordering::Relaxed);
        lock(&self.pairs).values().any(|pair| {
            let last = pair.last_change.load(Ordering::Relaxed);
            last > flushed
        })
    }

    /// Whether the control thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.commands.is_closed()
    }

    /// Waits until the control thread has ended.
    pub(crate) async fn ended(&self) {
        self.commands.closed().await;
    }

    /// The controller as the control thread last described it.
    pub(crate) fn info(&self) -> MutexGuard<'_, Info> {
        lock(&self.info)
    }

    /// Adds the statistics of a new queue pair.
    pub(crate) fn add_pair(&self, qid: u16, core: u16) -> Arc<PairStats> {
        let stats = Arc::new(PairStats { core, ..PairStats::default() });
        lock(&self.pairs).insert(qid, Arc::clone(&stats));
        stats
    }

    /// Makes a reactor without a pair use that of another.
    pub(crate) fn route(&self, reactor: Handle, owner: Hold) {
        let mut routes = lock(&self.routes);
        routes.retain(|(from, _)| *from != reactor && !from.has_ended());
        routes.push((reactor, owner));
    }

    /// The reactor whose pair this one uses.
    pub(crate) fn owner_for(&self, reactor: &Handle) -> Option<Hold> {
        lock(&self.routes).iter().find(|(from, _)| from == reactor).map(|(_, owner)| owner.clone())
    }

    /// Forgets all routes to a reactor, so that it can end.
    pub(crate) fn forget_owner(&self, owner: &Handle) {
        lock(&self.routes).retain(|(_, to)| **to != *owner);
    }

    /// Forgets all routes at the end of the controller.
    pub(crate) fn forget_routes(&self) {
        lock(&self.routes).clear();
    }

    pub(crate) fn remove_pair(&self, qid: u16) {
        let Some(pair) = lock(&self.pairs).remove(&qid) else { return };
        for (before, of_pair) in [
            (&self.counters.submitted_before, &pair.submitted),
            (&self.counters.doorbells_before, &pair.doorbells),
        ] {
            before.fetch_add(of_pair.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// The statistics of all queue pairs.
    pub(crate) fn pairs(&self) -> Vec<(u16, Arc<PairStats>)> {
        lock(&self.pairs).iter().map(|(qid, stats)| (*qid, Arc::clone(stats))).collect()
    }
}

impl PairStats {
    /// Publishes the counters of a pair. Only its reactor calls this.
    #[inline]
    pub(crate) fn publish(&self, counters: PairCounters, in_flight: u16, last_change: u64, pool: &Pool) {
        let PairCounters { submitted, completed, doorbells, .. } = counters;
        self.submitted.store(submitted, Ordering::Relaxed);
        self.completed.store(completed, Ordering::Relaxed);
        self.doorbells.store(doorbells, Ordering::Relaxed);
        self.in_flight.store(in_flight.into(), Ordering::Relaxed);
        self.last_change.store(last_change, Ordering::Relaxed);
        self.pool_pages.store(pool.pages().into(), Ordering::Relaxed);
        self.pool_low.store(pool.low().into(), Ordering::Relaxed);
    }
}

/// Locks a mutex whose holders do not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
