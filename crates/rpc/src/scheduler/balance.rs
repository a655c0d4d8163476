//! Decides which queue runs on which core: loads in, moves out. Pure: without time or reactors, so that it can be tested by
//! simulation.
//!
//! **Spread.** From a core whose load exceeds `core_busy`, queues move to the least busy core that they may use, until the load
//! is down to `core_limit`; but only if they gain a margin by that, so that two full cores do not exchange queues.
//!
//! **Gather.** Load that few cores can carry is moved to the first of them, so that the others sleep: either all queues leave a
//! core, or only those that are nearly idle. This never raises a core's load above `core_limit`.
//!
//! **No flapping.** Gathering waits until it would have been right for several rounds in a row; each time that a core is
//! overloaded soon after a gathering, this wait is doubled. A queue rests for a round after its move; a queue that could not be
//! moved rests longer each time.

use aryk_reactor::CoreSet;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// Loads are in thousandths of a core.
pub(crate) const WHOLE: u32 = 1000;
/// Minimum gain of a move: how much less busy the target core, including the queue, must be than the source core was.
const MARGIN: u32 = 100;
/// Moves of a round, at most. Further moves wait for later rounds, when the effect of these is known.
const MOVES: usize = 128;
/// Rounds for which gathering must have been right: initial and maximum number.
const PATIENCE_MIN: u64 = 2;
const PATIENCE_MAX: u64 = 512;
/// An overload within this multiple of the patience after a gathering counts as caused by it.
const SOON: u64 = 16;
/// Maximum number of rounds for which a queue that could not be moved rests.
const HOLD_MAX: u64 = 1024;

/// Thresholds, as in SPDK's dynamic scheduler. In hundredths of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// A queue with a load below this is nearly idle.
    pub load_limit: u8,
    /// Moves do not raise a core's load above this.
    pub core_limit: u8,
    /// A core with a load of at least this is overloaded.
    pub core_busy: u8,
}

impl Default for Limits {
    fn default() -> Self {
        Self { load_limit: 20, core_limit: 80, core_busy: 95 }
    }
}

impl Limits {
    fn idle(self) -> u32 {
        u32::from(self.load_limit) * 10
    }

    fn busy(self) -> u32 {
        u32::from(self.core_busy) * 10
    }

    /// Never above the overload threshold.
    fn full(self) -> u32 {
        (u32::from(self.core_limit) * 10).min(self.busy())
    }
}

/// A core with a reactor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Core {
    pub number: u16,
    /// Load of the reactor.
    pub busy: u32,
}

/// A queue, or another thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Load {
    pub thread: u64,
    /// The core on which it runs.
    pub core: u16,
    pub busy: u32,
    /// The cores on which it may run.
    pub cores: CoreSet,
}

/// A queue to move, and its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub thread: u64,
    pub to: u16,
}

/// A queue that is not moved for now.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    until: u64,
    failures: u32,
}

/// State between rounds.
#[derive(Debug)]
pub(crate) struct Balancer {
    round: u64,
    /// Consecutive rounds in which gathering would have been right.
    calm: u64,
    /// Number of such rounds before queues are gathered.
    patience: u64,
    /// The last round that gathered queues.
    gathered: Option<u64>,
    held: HashMap<u64, Held>,
}

impl Default for Balancer {
    fn default() -> Self {
        Self { round: 0, calm: 0, patience: PATIENCE_MIN, gathered: None, held: HashMap::new() }
    }
}

impl Balancer {
    /// The moves of this round, at most one for each thread.
    pub fn round(&mut self, limits: Limits, cores: &[Core], loads: &[Load]) -> Vec<Move> {
        self.round += 1;
        let round = self.round;
        let present: HashSet<u64> = loads.iter().map(|load| load.thread).collect();
        self.held.retain(|thread, held| held.until + HOLD_MAX > round && present.contains(thread));
        let mut plan = Plan::new(limits, cores, loads, |thread| self.is_held(thread));
        plan.spread();
        if !plan.moves.is_empty() {
            self.was_overloaded();
        } else if self.wait_to_gather(&mut plan) {
            return Vec::new();
        }
        plan.moves.truncate(MOVES);
        for moved in &plan.moves {
            let held = self.held.entry(moved.thread).or_default();
            held.until = self.round + 1;
        }
        plan.moves
    }

    /// Records that a move has failed.
    pub fn failed(&mut self, thread: u64) {
        let held = self.held.entry(thread).or_default();
        held.failures += 1;
        held.until = self.round + (2_u64 << held.failures.min(16)).min(HOLD_MAX);
    }

    /// Records that a move was made.
    pub fn moved(&mut self, thread: u64) {
        if let Some(held) = self.held.get_mut(&thread) {
            held.failures = 0;
        }
    }

    fn is_held(&self, thread: u64) -> bool {
        self.held.get(&thread).is_some_and(|held| held.until >= self.round)
    }

    fn was_overloaded(&mut self) {
        self.calm = 0;
        // The load was too much for one core, although it did not seem so.
        if self.gathered.take_if(|at| self.round <= *at + SOON * self.patience).is_some() {
            self.patience = (self.patience * 2).min(PATIENCE_MAX);
        }
    }

    /// Plans to gather; returns whether it is too early for that, or there is nothing to gather.
    fn wait_to_gather(&mut self, plan: &mut Plan) -> bool {
        if self.gathered.take_if(|at| self.round > *at + 4 * SOON * self.patience).is_some() {
            self.patience = (self.patience / 2).max(PATIENCE_MIN);
        }
        plan.gather();
        if plan.moves.is_empty() {
            self.calm = 0;
            return true;
        }
        self.calm += 1;
        if self.calm <= self.patience {
            return true;
        }
        self.gathered = Some(self.round);
        false
    }
}

/// A queue within a plan.
struct Queue {
    thread: u64,
    /// Index of its core in the plan.
    at: usize,
    busy: u32,
    cores: CoreSet,
    stays: bool,
}

/// Cores and queues as they would be after the moves.
struct Plan {
    limits: Limits,
    /// In the order of core numbers.
    cores: Vec<Core>,
    queues: Vec<Queue>,
    moves: Vec<Move>,
}

impl Plan {
    fn new(limits: Limits, cores: &[Core], loads: &[Load], is_held: impl Fn(u64) -> bool) -> Self {
        let mut cores = cores.to_vec();
        cores.sort_unstable_by_key(|core| core.number);
        let place = |load: &Load| cores.binary_search_by_key(&load.core, |core| core.number).ok();
        let mut sums = vec![0_u64; cores.len()];
        for load in loads {
            if let Some(at) = place(load) {
                sums[at] += u64::from(load.busy);
            }
        }
        // A reactor's overhead is caused by its queues: it moves with them.
        let share = |at: usize, busy: u32| {
            let whole = u64::from(busy) * u64::from(cores[at].busy);
            whole.checked_div(sums[at]).map_or(0, |busy| busy.min(u64::from(WHOLE)) as u32)
        };
        let queues = loads.iter().filter_map(|load| {
            let at = place(load)?;
            Some(Queue {
                thread: load.thread,
                at,
                busy: share(at, load.busy),
                cores: load.cores.clone(),
                stays: is_held(load.thread),
            })
        });
        let queues = queues.collect();
        Self { limits, cores, queues, moves: Vec::new() }
    }

    fn put(&mut self, queue: usize, to: usize) {
        let Queue { thread, at, busy, .. } = self.queues[queue];
        self.cores[at].busy = self.cores[at].busy.saturating_sub(busy);
        self.cores[to].busy += busy;
        self.queues[queue].at = to;
        self.queues[queue].stays = true;
        self.moves.push(Move { thread, to: self.cores[to].number });
    }

    fn is_overloaded(&self, at: usize) -> bool {
        self.cores[at].busy >= self.limits.busy()
    }

    /// Moves load away from overloaded cores.
    fn spread(&mut self) {
        let mut sources: Vec<usize> = (0..self.cores.len()).filter(|&at| self.is_overloaded(at)).collect();
        sources.sort_by_key(|&at| Reverse(self.cores[at].busy));
        for from in sources {
            while self.cores[from].busy > self.limits.full() && self.moves.len() < MOVES {
                let Some((queue, to)) = self.best_relief(from) else { break };
                self.put(queue, to);
            }
        }
    }

    /// The queue of a core, and its target, that minimise the load of the busier of the two cores.
    fn best_relief(&self, from: usize) -> Option<(usize, usize)> {
        let source = self.cores[from].busy;
        let relief = |(index, queue): (usize, &Queue)| {
            let may = |to: &usize| *to != from && queue.cores.contains(self.cores[*to].number);
            let to = (0..self.cores.len()).filter(may).min_by_key(|&to| self.cores[to].busy)?;
            let there = self.cores[to].busy + queue.busy;
            let helps = queue.busy > 0 && there + MARGIN <= source;
            helps.then(|| (there.max(source - queue.busy), index, to))
        };
        let movable = self.queues.iter().enumerate().filter(|(_, q)| q.at == from && !q.stays);
        movable.filter_map(relief).min().map(|(_, queue, to)| (queue, to))
    }

    /// Gathers queues on the first cores, starting with the last core.
    fn gather(&mut self) {
        let mut order: Vec<usize> = (0..self.cores.len()).collect();
        // A core without queues sleeps, and is not woken for this. A core that stays overloaded is left alone.
        let takes_part = |at: usize| !self.is_overloaded(at) && self.queues.iter().any(|q| q.at == at);
        order.retain(|&at| takes_part(at));
        for last in (1..order.len()).rev() {
            if self.moves.len() >= MOVES {
                return;
            }
            let (targets, from) = (&order[..last], order[last]);
            let of = |queue: &&usize| self.queues[**queue].at == from;
            let all: Vec<usize> = (0..self.queues.len()).collect();
            let mut own: Vec<usize> = all.iter().filter(of).copied().collect();
            own.sort_by_key(|&queue| Reverse(self.queues[queue].busy));
            let placed = self.fit(&own, targets);
            let placed = if placed.len() == own.len() { placed } else { self.fit_idle(&own, targets) };
            for (queue, to) in placed {
                self.put(queue, to);
            }
        }
    }

    fn fit_idle(&self, queues: &[usize], targets: &[usize]) -> Vec<(usize, usize)> {
        let is_idle = |queue: &&usize| self.queues[**queue].busy < self.limits.idle();
        let idle: Vec<usize> = queues.iter().filter(is_idle).copied().collect();
        self.fit(&idle, targets)
    }

    /// The targets of those queues that fit somewhere.
    fn fit(&self, queues: &[usize], targets: &[usize]) -> Vec<(usize, usize)> {
        let mut busy: Vec<u32> = self.cores.iter().map(|core| core.busy).collect();
        let fits = |&index: &usize| {
            let queue = &self.queues[index];
            let may = |to: &usize| {
                queue.cores.contains(self.cores[*to].number) && busy[*to] + queue.busy <= self.limits.full()
            };
            let to = targets.iter().copied().find(may).filter(|_| !queue.stays)?;
            busy[to] += queue.busy;
            Some((index, to))
        };
        queues.iter().filter_map(fits).collect()
    }
}

#[cfg(test)]
mod tests;
