//! The loop that keeps requests in flight. One polling thread. It allocates nothing, and makes no system call except for kicks
//! and a periodic check of the connection.

use super::rig::Rig;
use super::verify::Verifier;
use super::workload::{Source, gap};
use crate::error::Error;
use aryk_front_end::{Builder, Done, Operation};
use fastrand::Rng;
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Completions of a burst between two reads of the clock.
const BURST: u32 = 8;
/// Completions after which their replacement requests are published to the device.
const PUBLISH_EVERY: u32 = 16;
/// Turns between two checks of time and connection.
const TURNS_PER_CHECK: u32 = 1024;
/// One of this many turns with work is timed.
const TURNS_PER_TIMED: u32 = 16;
/// Interval of the connection checks, in ns.
const CONNECTION_CHECK_NS: u64 = 1_000_000;
/// The longest distinguishable latency, in ns.
const LATENCY_MAX: u64 = 3_600_000_000_000;

/// Duration and rate of a run.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Duration in ns.
    pub time: u64,
    pub requests: u64,
    /// Requests per second of an open loop; `None` for a closed loop.
    pub rate: Option<f64>,
    /// The longest time without a completion.
    pub patience: Duration,
}

/// The result of a run.
#[derive(Debug)]
pub struct Measured {
    pub elapsed: Duration,
    /// Latencies in ns, of reads and of writes.
    pub latency: [Histogram<u64>; 2],
    /// Share of the time in which the loop had work.
    pub busy: f64,
}

impl Measured {
    pub fn requests(&self) -> u64 {
        self.latency.iter().map(Histogram::len).sum()
    }

    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Progress of a run, for other threads.
#[derive(Debug, Default)]
pub struct Progress {
    /// Elapsed time in ns.
    pub elapsed: AtomicU64,
    pub requests: AtomicU64,
}

/// A request in flight.
#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    /// Start of its latency, in ns since the start of the run.
    due: u64,
    block: u64,
}

/// The requests of a queue.
#[derive(Debug)]
struct QueueLoad {
    slots: Vec<InFlight>,
    free: Vec<u16>,
}

/// A run; see the module.
pub struct Load<'a, B> {
    rig: &'a mut Rig<B>,
    progress: &'a Progress,
    verifier: Option<&'a mut Verifier>,
    source: Source,
    pace: Pace,
    lanes: Vec<QueueLoad>,
    start: Instant,
    /// Time of the last read of the clock, in ns since the start.
    now: u64,
    submitted: u64,
    completed: u64,
    /// When the next request of an open loop is due, in ns since the start.
    due: f64,
    random: Rng,
    latency: [Histogram<u64>; 2],
    busy: u64,
    working_turns: u32,
    /// Time of the last completion or submission, and of the last check of the connection.
    moved: u64,
    looked: u64,
}

impl<'a, B: Builder + Copy> Load<'a, B> {
    /// A run of the requests of `source`. The rig must have no requests in flight.
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]
    pub fn new(rig: &'a mut Rig<B>, source: Source, pace: Pace, progress: &'a Progress) -> Self {
        let slots = rig.layout.slots;
        let lane =
            || QueueLoad { slots: vec![InFlight::default(); slots.into()], free: (0..slots).rev().collect() };
        let lanes = rig.queues.iter().map(|_| lane()).collect();
        let histogram = || Histogram::new_with_bounds(1, LATENCY_MAX, 3).expect("the bounds are valid");
        Self {
            lanes,
            rig,
            progress,
            verifier: None,
            source,
            pace,
            now: 0,
            submitted: 0,
            completed: 0,
            due: 0.0,
            random: Rng::with_seed(3),
            latency: [histogram(), histogram()],
            busy: 0,
            working_turns: 0,
            moved: 0,
            looked: 0,
            start: Instant::now(),
        }
    }

    /// Makes the run stamp and check blocks.
    pub fn verified(mut self, verifier: Option<&'a mut Verifier>) -> Self {
        self.verifier = verifier;
        self
    }

    /// Runs to the end, and waits for the requests in flight.
    pub fn run(mut self) -> Result<Measured, Error> {
        let mut turns = 0_u32;
        while self.wants_more() || self.submitted > self.completed {
            let mut work = 0;
            for index in 0..self.lanes.len() {
                work += self.turn(index)?;
            }
            turns += 1;
            if work == 0 {
                std::hint::spin_loop();
            }
            if turns >= TURNS_PER_CHECK || self.pace.rate.is_some() {
                turns = 0;
                self.check_time(work)?;
            }
        }
        self.tick();
        let elapsed = Duration::from_nanos(self.now);
        let busy = (self.busy * u64::from(TURNS_PER_TIMED)) as f64 / self.now.max(1) as f64;
        Ok(Measured { elapsed, latency: self.latency, busy: busy.min(1.0) })
    }

    const fn wants_more(&self) -> bool {
        self.submitted < self.pace.requests && self.now < self.pace.time
    }

    fn tick(&mut self) {
        self.now = self.start.elapsed().as_nanos() as u64;
    }

    /// Takes a queue's completions and refills it. Returns the number of completed and submitted requests.
    #[inline]
    fn turn(&mut self, index: usize) -> Result<u32, Error> {
        let limit = self.lanes[index].slots.len() as u32;
        let mut taken = 0;
        let mut since = 0;
        while taken < limit {
            let Some(done) = self.rig.queues[index].take()? else { break };
            if taken % BURST == 0 {
                self.tick();
                since = if taken == 0 { self.now } else { since };
            }
            self.complete(index, done)?;
            taken += 1;
            if self.pace.rate.is_none() && self.wants_more() {
                self.submit(index, done.slot, self.now);
                if taken % PUBLISH_EVERY == 0 {
                    self.rig.queues[index].publish();
                }
            } else {
                self.lanes[index].free.push(done.slot);
            }
        }
        let added = self.refill(index);
        if taken + added == 0 {
            return Ok(0);
        }
        self.rig.queues[index].publish();
        if taken > 0 {
            self.working_turns += 1;
            if self.working_turns.is_multiple_of(TURNS_PER_TIMED) {
                let before = since;
                self.tick();
                self.busy += self.now - before;
            }
        }
        Ok(taken + added)
    }

    /// Submits the requests that are due, while slots are free.
    #[inline]
    fn refill(&mut self, index: usize) -> u32 {
        if self.lanes[index].free.is_empty() {
            return 0;
        }
        let mut added = 0;
        while self.wants_more() {
            let due = match self.pace.rate {
                None => self.now,
                Some(_) if self.due > self.now as f64 => break,
                Some(_) => self.due as u64,
            };
            let Some(slot) = self.lanes[index].free.pop() else { break };
            self.submit(index, slot, due);
            if let Some(rate) = self.pace.rate {
                self.due += gap(&mut self.random, rate);
            }
            added += 1;
        }
        added
    }

    #[inline]
    fn submit(&mut self, index: usize, slot: u16, due: u64) {
        let (operation, mut block) = self.source.next();
        if self.verifier.is_some() {
            block = self.mark(index, slot, operation, block);
        }
        self.submitted += 1;
        self.lanes[index].slots[usize::from(slot)] = InFlight { due, block };
        let len = u64::from(self.rig.layout.len);
        self.rig.queues[index].submit(slot, operation, block * len);
    }

    /// Prepares a request's data. Returns its block.
    #[cold]
    fn mark(&mut self, index: usize, slot: u16, operation: Operation, block: u64) -> u64 {
        let Some(verifier) = &mut self.verifier else { return block };
        let block = verifier.reserve(block);
        let place = self.rig.queues[index].place(slot);
        match operation {
            Operation::Read => verifier.wipe(self.rig.memory.whole(), place),
            Operation::Write => verifier.stamp(self.rig.memory.whole(), place, block),
        }
        block
    }

    #[inline]
    fn complete(&mut self, index: usize, done: Done) -> Result<(), Error> {
        let InFlight { due, block } = self.lanes[index].slots[usize::from(done.slot)];
        self.completed += 1;
        self.latency[done.operation as usize].saturating_record(self.now.saturating_sub(due).max(1));
        match (&mut self.verifier, done.operation) {
            (None, _) => Ok(()),
            (Some(verifier), Operation::Write) => {
                verifier.release(block);
                Ok(())
            }
            (Some(verifier), Operation::Read) => {
                Ok(verifier.check(self.rig.memory.whole(), done.place, block)?)
            }
        }
    }

    /// Updates the time, and checks for a back-end that is gone or does not respond.
    #[inline]
    fn check_time(&mut self, work: u32) -> Result<(), Error> {
        self.tick();
        if work > 0 || self.submitted == self.completed {
            self.moved = self.now;
        }
        if self.now - self.looked < CONNECTION_CHECK_NS {
            return Ok(());
        }
        self.check_connection()
    }

    #[cold]
    fn check_connection(&mut self) -> Result<(), Error> {
        self.looked = self.now;
        self.progress.elapsed.store(self.now, Ordering::Relaxed);
        let before = self.progress.requests.swap(self.completed, Ordering::Relaxed);
        if before != self.completed {
            self.moved = self.now;
        }
        let in_flight = self.submitted - self.completed;
        if self.rig.has_ended() {
            return Err(Error::Gone(in_flight));
        }
        if self.now - self.moved > self.pace.patience.as_nanos() as u64 {
            return Err(Error::Unanswered { in_flight, patience: self.pace.patience });
        }
        Ok(())
    }
}
