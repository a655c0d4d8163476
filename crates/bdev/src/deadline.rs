//! Deadlines of a disk's requests, and the action for those that take longer. Any context.

use std::time::Duration;

/// The action for a request that is over its deadline. Each such request is counted ([`crate::Stats::overdue`]), whatever
/// the action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDeadline {
    /// The log reports it, at most once a second for each disk and core.
    Report,
    /// The request is aborted.
    Abort,
    /// The disk is reset.
    Reset,
}

/// How long requests may take from their submission to their completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadline {
    /// The time from submission to completion.
    pub after: Duration,
    /// The action for a request that takes longer.
    pub action: OnDeadline,
}
