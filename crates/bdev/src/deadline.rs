//! How long a disk's requests may take, and what becomes of those that take longer. Any context.

use std::time::Duration;

/// What becomes of a request that is over its deadline. Each is counted ([`crate::Stats::overdue`]), whichever.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDeadline {
    /// The log says so, but no more than once a second of each disk and core.
    Report,
    /// It is aborted.
    Abort,
    /// The disk is reset.
    Reset,
}

/// How long requests may take from their submission to their completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadline {
    /// So long.
    pub after: Duration,
    /// What becomes of one that takes longer.
    pub action: OnDeadline,
}
