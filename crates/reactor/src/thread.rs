//! Lightweight threads: units of placement and account, and what each polls. Reactor context; the statistics in any.

use crate::CoreSet;
use aryk_slots::Key;
use std::time::Duration;

/// Names a thread on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThreadId(pub(crate) Key);

#[derive(Debug)]
pub(crate) struct Thread {
    pub name: String,
    pub cores: CoreSet,
    pub busy: Duration,
    /// Roots and pollers that belong to it.
    pub members: u32,
}

/// What a thread has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStats {
    /// Its name.
    pub name: String,
    /// Its number, unique in the process: the reactor's number in the high half.
    pub id: u64,
    /// Where it may run.
    pub cores: CoreSet,
    /// Time in which its roots and pollers had work.
    pub busy: Duration,
    /// Roots and pollers that belong to it.
    pub members: u32,
}

/// How often something of a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Every turn.
    Always,
    /// At each period.
    Every(Duration),
    /// When it is woken: a root whose wake-ups are on.
    WhenWoken,
}

/// A root or poller, and how it has run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerStats {
    /// Its thread's number, as [`ThreadStats::id`].
    pub thread: u64,
    /// Its number, which no other root or poller of the reactor has at the time.
    pub id: u64,
    /// What it is, as the watchdog names it.
    pub name: String,
    /// How often it runs now.
    pub polled: Polled,
    /// How it has run.
    pub runs: Runs,
}

/// How often something has run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    /// In all.
    pub all: u64,
    /// With work.
    pub busy: u64,
}

impl Runs {
    #[inline]
    pub(crate) fn count(&mut self, worked: bool) {
        self.all += 1;
        self.busy += u64::from(worked);
    }
}
