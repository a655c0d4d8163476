//! The scheduler of queues and of shards of pools: its choice, and the rounds of the dynamic one. Control context.
//!
//! In each period the dynamic scheduler reads the counters of reactors and threads, a few at a time; lets [`balance`] decide; and
//! moves queues and shards. Requests are not affected, except while they move.

pub(crate) mod balance;

use crate::methods::nvmf::State as Targets;
use crate::methods::volumes::State as Volumes;
use aryk_reactor::{CoreSet, Handle, Hold, MoveError, Order, ReactorStats, Reactors, ThreadStats};
use aryk_vhost_device::Controllers;
use balance::{Balancer, Core, Limits, Load, Move, WHOLE};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Default time between two rounds.
const PERIOD: Duration = Duration::from_secs(1);
/// Minimum time between two rounds: shorter ones would measure only noise.
const PERIOD_MIN: Duration = Duration::from_millis(10);
/// How long a queue waits for its requests in flight. No operator asked for the move, so that it must not be noticeable.
const PATIENCE: Duration = Duration::from_millis(10);
/// Threads of a reactor that are read in one message.
const SLICE: usize = 256;

/// The available schedulers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Queues stay where they are.
    Static,
    /// Queues move to cores with free time, and idle ones gather on few cores.
    Dynamic,
}

/// Counters of a scheduler.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Done {
    /// Queues that were moved.
    pub moves: u64,
    /// Queues that could not be moved.
    pub failures: u64,
}

/// The scheduler.
#[derive(Debug)]
pub(crate) struct Scheduler {
    world: Rc<World>,
    kind: Cell<Kind>,
    period: Cell<Duration>,
    limits: Cell<Limits>,
    rounds: RefCell<Option<AbortHandle>>,
}

/// The objects that the scheduler reads and moves.
#[derive(Debug)]
struct World {
    reactors: Rc<Reactors>,
    /// Of VMs.
    controllers: Rc<Controllers>,
    /// Of hosts.
    targets: Rc<Targets>,
    /// Whose shards move as queues do.
    volumes: Rc<Volumes>,
    done: Cell<Done>,
}

impl Scheduler {
    /// The static scheduler.
    pub fn new(
        reactors: &Rc<Reactors>,
        controllers: &Rc<Controllers>,
        targets: &Rc<Targets>,
        volumes: &Rc<Volumes>,
    ) -> Self {
        let (reactors, controllers) = (Rc::clone(reactors), Rc::clone(controllers));
        let (targets, volumes) = (Rc::clone(targets), Rc::clone(volumes));
        let world = World { reactors, controllers, targets, volumes, done: Cell::default() };
        Self {
            world: Rc::new(world),
            kind: Cell::new(Kind::Static),
            period: Cell::new(PERIOD),
            limits: Cell::default(),
            rounds: RefCell::default(),
        }
    }

    pub fn kind(&self) -> Kind {
        self.kind.get()
    }

    pub fn period(&self) -> Duration {
        self.period.get()
    }

    pub fn limits(&self) -> Limits {
        self.limits.get()
    }

    pub fn done(&self) -> Done {
        self.world.done.get()
    }

    /// Selects the scheduler. It starts without history, and learns the loads in its first period. Needs a tokio `LocalSet`.
    pub fn set(&self, kind: Kind, period: Duration, limits: Limits) {
        self.stop();
        self.kind.set(kind);
        self.period.set(period.max(PERIOD_MIN));
        self.limits.set(limits);
        if kind == Kind::Dynamic {
            let rounds = Rc::clone(&self.world).go_round(self.period.get(), limits);
            self.rounds.replace(Some(tokio::task::spawn_local(rounds).abort_handle()));
        }
    }

    /// Has the queue of a VM or a host, or the shard of a pool, whose thread has that ID run elsewhere; `None` if none has that
    /// thread.
    pub async fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        self.world.order(thread, order).await
    }

    /// Moves the thread with that ID: a queue, a shard of a pool, or a background task; `None` if there is no such thread.
    pub async fn move_thread(
        &self,
        thread: u64,
        to: Hold,
        patience: Duration,
    ) -> Option<Result<(), MoveError>> {
        self.world.move_thread(thread, to, patience).await
    }

    /// Stops moving queues. A move in progress is completed.
    pub fn stop(&self) {
        if let Some(rounds) = self.rounds.take() {
            rounds.abort();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Counters at one time: of reactors by core, of threads by ID.
#[derive(Default)]
struct Reading {
    reactors: BTreeMap<u16, ReactorStats>,
    threads: BTreeMap<u64, Counted>,
}

struct Counted {
    core: u16,
    busy: Duration,
    cores: CoreSet,
}

impl World {
    async fn go_round(self: Rc<Self>, period: Duration, limits: Limits) {
        let mut balancer = Balancer::default();
        let mut before = self.read().await;
        loop {
            tokio::time::sleep(period).await;
            let now = self.read().await;
            let (cores, loads) = now.since(&before);
            let moves = balancer.round(limits, &cores, &loads);
            before = now;
            // Moves that are not done within the period are decided again, with new counters.
            let until = Instant::now() + period;
            for planned in moves {
                if Instant::now() > until {
                    break;
                }
                self.carry_out(planned, &mut balancer).await;
            }
        }
    }

    async fn carry_out(&self, Move { thread, to }: Move, balancer: &mut Balancer) {
        // A reactor that is about to end takes no queues.
        let Some(there) = self.reactors.hold_for_arrival(to) else { return };
        let moved = self.move_thread(thread, there, PATIENCE).await;
        let mut done = self.done.get();
        match moved {
            Some(Ok(())) => {
                balancer.moved(thread);
                done.moves += 1;
                tracing::debug!(thread, to, "the scheduler has moved a queue");
            }
            // The queue has ended, or the thread is not a queue.
            None | Some(Err(MoveError::Ending)) => balancer.failed(thread),
            Some(Err(error)) => {
                balancer.failed(thread);
                done.failures += 1;
                tracing::debug!(%error, thread, to, "the scheduler cannot move a queue");
            }
        }
        self.done.set(done);
    }

    async fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        if let Some(done) = self.controllers.order(thread, order.clone()).await {
            return Some(done);
        }
        match self.targets.order(thread, order.clone()).await {
            Some(done) => Some(done),
            None => self.volumes.order(thread, order, &self.reactors).await,
        }
    }

    async fn move_thread(&self, thread: u64, to: Hold, patience: Duration) -> Option<Result<(), MoveError>> {
        if let Some(moved) = self.order(thread, Order::Move(to.clone(), patience)).await {
            return Some(moved);
        }
        // A task whose request does not end leaves when it does, whether this waits or not.
        match tokio::time::timeout(patience, self.reactors.background().move_to(thread, to)).await {
            Ok(is_task) => is_task.then_some(Ok(())),
            Err(_) => Some(Err(MoveError::TooSlow)),
        }
    }

    async fn read(&self) -> Reading {
        let mut reading = Reading::default();
        // A reactor that is about to end is handled by the code that removes it.
        for handle in self.reactors.staying() {
            let core = handle.core();
            for stats in threads(&handle).await {
                let ThreadStats { id, busy, cores, .. } = stats;
                // A thread that moves during the reading may be counted twice.
                reading.threads.insert(id, Counted { core, busy, cores });
            }
            reading.reactors.insert(core, handle.stats());
        }
        reading
    }
}

/// The threads of a reactor; none if it has ended.
async fn threads(handle: &Handle) -> Vec<ThreadStats> {
    let mut all = Vec::new();
    loop {
        let skip = all.len();
        let Ok(some) = handle.call(move |cx| cx.some_thread_stats(skip, SLICE)).await else { return all };
        let is_last = some.len() < SLICE;
        all.extend(some);
        if is_last {
            return all;
        }
    }
}

impl Reading {
    /// Loads of all reactors and threads since then. A thread that did not exist then has no load yet.
    fn since(&self, before: &Self) -> (Vec<Core>, Vec<Load>) {
        let part = |busy: Duration, of: Duration| {
            let part = busy.as_nanos() * u128::from(WHOLE) / of.as_nanos().max(1);
            part.min(u128::from(WHOLE)) as u32
        };
        let took = |core: u16| {
            let zero = ReactorStats::default();
            let (now, then) = (&self.reactors[&core], before.reactors.get(&core).unwrap_or(&zero));
            let all = |s: &ReactorStats| s.busy + s.idle + s.sleeping;
            (now.busy.saturating_sub(then.busy), all(now).saturating_sub(all(then)))
        };
        let core = |&number: &u16| {
            let (busy, all) = took(number);
            Core { number, busy: part(busy, all) }
        };
        let load = |(&thread, now): (&u64, &Counted)| {
            let busy =
                before.threads.get(&thread).map_or(Duration::ZERO, |b| now.busy.saturating_sub(b.busy));
            Load { thread, core: now.core, busy: part(busy, took(now.core).1), cores: now.cores.clone() }
        };
        (self.reactors.keys().map(core).collect(), self.threads.iter().map(load).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(busy_ms: u64, idle_ms: u64, threads: &[(u64, u64)]) -> Reading {
        let ms = Duration::from_millis;
        let stats = ReactorStats { busy: ms(busy_ms), idle: ms(idle_ms), ..ReactorStats::default() };
        let counted = |&(id, busy): &(u64, u64)| {
            (id, Counted { core: 3, busy: ms(busy), cores: CoreSet::from_iter([3]) })
        };
        Reading { reactors: BTreeMap::from([(3, stats)]), threads: threads.iter().map(counted).collect() }
    }

    #[test]
    fn loads_are_the_difference_of_two_readings() {
        let (before, now) = (reading(100, 900, &[(1, 50), (2, 9)]), reading(700, 1300, &[(1, 550), (7, 80)]));
        let (cores, loads) = now.since(&before);
        assert_eq!(cores, [Core { number: 3, busy: 600 }]);
        let busy: Vec<_> = loads.iter().map(|load| (load.thread, load.core, load.busy)).collect();
        assert_eq!(busy, [(1, 3, 500), (7, 3, 0)], "a new thread has no load yet");
        let (cores, _) = before.since(&before);
        assert_eq!(cores[0].busy, 0, "no time has passed");
    }
}
