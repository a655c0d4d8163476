//! What the control thread, the devices and the queue pairs of a controller share. Any context; nothing here blocks.

use crate::control::Command;
use crate::pool::Pool;
use crate::{Config, Info};
use aryk_nvme::inject::Injections;
use aryk_nvme::queue::Counters as PairCounters;
use aryk_nvme::spec::status::{CodeType, Status};
use aryk_reactor::{DriverKey, Handle, Hold};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// Counters of a controller, since it was attached.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) resets: AtomicU64,
    /// Resets of single queue pairs.
    pub(crate) queue_resets: AtomicU64,
    pub(crate) aborts: AtomicU64,
    /// Attempts after a status that allows one.
    pub(crate) retried: AtomicU64,
    /// Commands that resets submitted again.
    pub(crate) resubmitted: AtomicU64,
    /// Requests that failed because a reset could not submit them again.
    pub(crate) failed_by_reset: AtomicU64,
    /// Errors and health warnings that the controller reported by itself.
    pub(crate) warnings: AtomicU64,
    /// Commands that got an injected status.
    pub(crate) injected: Arc<AtomicU64>,
}

/// Errors that an operator injects into commands.
#[derive(Debug, Default)]
pub(crate) struct Injected {
    /// Into admin commands.
    pub(crate) admin: Injections,
    /// Into I/O commands of all pairs.
    pub(crate) io: Arc<Injections>,
}

/// Polls of a pair's completion queue, and requests that could not be submitted at once. Its driver counts them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polls {
    pub(crate) all: u64,
    /// Those that found no completion.
    pub(crate) idle: u64,
    /// Requests that had to wait before their first attempt.
    pub(crate) queued: u64,
}

/// Counters of the queue pairs that a core has had, one after the other. The reactor of the last one writes them. They never
/// decrease.
#[derive(Debug, Default)]
pub(crate) struct PairStats {
    pub(crate) core: u16,
    /// The pair is the second of its core, with interrupts that cannot be masked.
    pub(crate) is_waking: bool,
    /// Those of the pairs before.
    base: PairCounters,
    base_polls: Polls,
    pub(crate) submitted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) sq_doorbells: AtomicU64,
    pub(crate) cq_doorbells: AtomicU64,
    pub(crate) polls: AtomicU64,
    pub(crate) idle_polls: AtomicU64,
    pub(crate) queued: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) pool_pages: AtomicU64,
    pub(crate) pool_low: AtomicU64,
    /// Commands that the controller answered by an error, by [`CodeType`].
    pub(crate) errors: [AtomicU64; CodeType::ALL.len()],
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: String,
    /// The drivers of the reactors' queue pairs.
    pub(crate) key: DriverKey,
    /// The drivers of their second pairs, with interrupts, if these cannot be masked.
    pub(crate) waking_key: DriverKey,
    pub(crate) retries: u16,
    /// The longest time between two attempts, in nanoseconds: the time limit of a command.
    pub(crate) retry_delay_max: u64,
    commands: UnboundedSender<Command>,
    pub(crate) counters: Counters,
    info: Mutex<Info>,
    /// Reactors without a pair, each with the reactor whose pair it uses.
    routes: Mutex<Vec<(Handle, Hold)>>,
    /// The control thread looks at the controller rarely.
    is_idle: AtomicBool,
    pairs: Mutex<Vec<OfCore>>,
    injected: Mutex<Injected>,
}

/// The queue pair of a core, if there is one, and the counters of all that the core has had.
#[derive(Debug)]
struct OfCore {
    qid: Option<u16>,
    stats: Arc<PairStats>,
}

impl Shared {
    pub(crate) fn new(config: &Config, commands: UnboundedSender<Command>, info: Info) -> Self {
        Self {
            name: config.name.clone(),
            key: DriverKey::unique(),
            waking_key: DriverKey::unique(),
            retries: config.retries,
            retry_delay_max: config.options.io.command,
            commands,
            counters: Counters::default(),
            info: Mutex::new(info),
            routes: Mutex::default(),
            is_idle: AtomicBool::new(false),
            pairs: Mutex::default(),
            injected: Mutex::default(),
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

    /// The errors that are injected.
    pub(crate) fn injected(&self) -> MutexGuard<'_, Injected> {
        lock(&self.injected)
    }

    /// Adds the statistics of a new queue pair, which go on from those of the core's pair before.
    pub(crate) fn add_pair(&self, qid: u16, core: u16, is_waking: bool) -> Arc<PairStats> {
        let mut pairs = lock(&self.pairs);
        let of_pair = |stats: &PairStats| (stats.core, stats.is_waking) == (core, is_waking);
        let before = pairs.iter().position(|pair| pair.qid.is_none() && of_pair(&pair.stats));
        let stats = Arc::new(match before {
            Some(index) => PairStats::after(&pairs[index].stats),
            None => PairStats { core, is_waking, ..PairStats::default() },
        });
        let pair = OfCore { qid: Some(qid), stats: Arc::clone(&stats) };
        match before {
            Some(index) => pairs[index] = pair,
            None => pairs.push(pair),
        }
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

    /// The pair is gone. Its counters stay.
    pub(crate) fn remove_pair(&self, qid: u16) {
        if let Some(pair) = lock(&self.pairs).iter_mut().find(|pair| pair.qid == Some(qid)) {
            pair.qid = None;
            for level in [&pair.stats.in_flight, &pair.stats.pool_pages, &pair.stats.pool_low] {
                level.store(0, Ordering::Relaxed);
            }
        }
    }

    /// The statistics of all cores that have had queue pairs, with the pair that each has now.
    pub(crate) fn pairs(&self) -> Vec<(Option<u16>, Arc<PairStats>)> {
        lock(&self.pairs).iter().map(|pair| (pair.qid, Arc::clone(&pair.stats))).collect()
    }
}

impl PairStats {
    /// The statistics of a pair, after those of an earlier one of the same core.
    fn after(before: &Self) -> Self {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (submitted, completed) = (get(&before.submitted), get(&before.completed));
        let (sq_doorbells, cq_doorbells) = (get(&before.sq_doorbells), get(&before.cq_doorbells));
        let (all, idle, queued) = (get(&before.polls), get(&before.idle_polls), get(&before.queued));
        Self {
            core: before.core,
            is_waking: before.is_waking,
            base: PairCounters {
                submitted,
                completed,
                sq_doorbells,
                cq_doorbells,
                ..PairCounters::default()
            },
            base_polls: Polls { all, idle, queued },
            submitted: submitted.into(),
            completed: completed.into(),
            sq_doorbells: sq_doorbells.into(),
            cq_doorbells: cq_doorbells.into(),
            polls: all.into(),
            idle_polls: idle.into(),
            queued: queued.into(),
            errors: before.errors.each_ref().map(|count| get(count).into()),
            ..Self::default()
        }
    }

    /// Counts the answer to a command, unless it is a success. Only the pair's reactor calls this.
    #[cold]
    pub(crate) fn count_error(&self, answer: Status) {
        if !answer.is_success() {
            self.errors[answer.code().code_type() as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Publishes the counters of a pair. Only its reactor calls this.
    #[inline]
    pub(crate) fn publish(&self, counters: PairCounters, polls: Polls, in_flight: u16, pool: &Pool) {
        let (base, base_polls) = (&self.base, &self.base_polls);
        self.submitted.store(base.submitted + counters.submitted, Ordering::Relaxed);
        self.completed.store(base.completed + counters.completed, Ordering::Relaxed);
        self.sq_doorbells.store(base.sq_doorbells + counters.sq_doorbells, Ordering::Relaxed);
        self.cq_doorbells.store(base.cq_doorbells + counters.cq_doorbells, Ordering::Relaxed);
        self.polls.store(base_polls.all + polls.all, Ordering::Relaxed);
        self.idle_polls.store(base_polls.idle + polls.idle, Ordering::Relaxed);
        self.queued.store(base_polls.queued + polls.queued, Ordering::Relaxed);
        self.in_flight.store(in_flight.into(), Ordering::Relaxed);
        self.pool_pages.store(pool.pages().into(), Ordering::Relaxed);
        self.pool_low.store(pool.low().into(), Ordering::Relaxed);
    }
}

/// Locks a mutex whose holders do not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
