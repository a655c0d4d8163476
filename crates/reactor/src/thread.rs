//! Lightweight threads: groups of roots and pollers that are placed together and share an account of busy time. Reactor context;
//! the statistics in any.

use crate::CoreSet;
use aryk_slots::Key;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Identifies a thread on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThreadId(pub(crate) Key);

/// The number of the next thread of the process.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A number that no thread of the process has or has had.
pub(crate) fn next_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

#[derive(Debug)]
pub(crate) struct Thread {
    /// Unique in the process.
    pub number: u64,
    pub name: String,
    pub cores: CoreSet,
    /// Time in which its roots and pollers had work, in nanoseconds.
    pub busy_ns: u64,
    /// Roots and pollers that belong to it.
    pub members: u32,
}

impl Thread {
    pub fn new(name: String, cores: CoreSet) -> Self {
        Self { number: next_number(), name, cores, busy_ns: 0, members: 0 }
    }
}

/// A thread on its way from one reactor to another. It keeps its number, name, cores and busy time, and has no members.
#[derive(Debug)]
pub struct Moving(pub(crate) Thread);

impl Moving {
    /// Its number, unique in the process.
    pub const fn number(&self) -> u64 {
        self.0.number
    }

    /// The thread's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// The statistics of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStats {
    /// The thread's name.
    pub name: String,
    /// Its number, unique in the process. The number stays the same when the thread moves.
    pub id: u64,
    /// The cores on which it may run.
    pub cores: CoreSet,
    /// Time in which its roots and pollers had work.
    pub busy: Duration,
    /// Roots and pollers that belong to it.
    pub members: u32,
}

/// How often a root or poller of a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Every turn.
    Always,
    /// At each period.
    Every(Duration),
    /// When it is woken: a root whose wake-ups are on.
    WhenWoken,
}

/// The statistics of a root or poller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerStats {
    /// Its thread's number, as [`ThreadStats::id`].
    pub thread: u64,
    /// Its number, unique among the reactor's roots and pollers.
    pub id: u64,
    /// Its name, as in the watchdog's reports.
    pub name: String,
    /// How often it runs now.
    pub polled: Polled,
    /// How often it has run, and how often with work.
    pub runs: Runs,
}

/// How often something has run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    /// All runs.
    pub all: u64,
    /// Runs with work.
    pub busy: u64,
}

impl Runs {
    #[inline]
    pub(crate) fn count(&mut self, worked: bool) {
        self.all += 1;
        if worked {
            self.busy += 1;
        }
    }

    /// The counts with one more run.
    #[inline]
    pub(crate) fn counted(mut self, worked: bool) -> Self {
        self.count(worked);
        self
    }
}
