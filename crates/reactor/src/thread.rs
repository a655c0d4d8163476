//! Lightweight threads: units of placement and account. Reactor context; the statistics in any.

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
