//! Orders to queues to run on other reactors, and why a queue does not follow one. Control context.

use crate::{CoreSet, Hold};
use std::time::Duration;

/// The default time that a queue waits for its requests in flight before it moves. Its guest or host waits for the queue during
/// that time.
pub const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// The time that disks may take to prepare the other reactor. The queue runs where it is during that time.
pub const PREPARE_PATIENCE: Duration = Duration::from_secs(10);

/// Where a queue has to run.
#[derive(Clone, Debug)]
pub enum Order {
    /// On one of these cores from now on.
    Stay(CoreSet),
    /// On this reactor. The move fails if the requests in flight do not complete in that time.
    Move(Hold, Duration),
}

/// Why a queue did not move.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// No reactor runs on these cores.
    #[error("no reactor runs on any of the cores {0}")]
    Cores(CoreSet),
    /// Requests in flight did not complete in time.
    #[error("requests in flight did not complete in time, so the queue stays on its core")]
    TooSlow,
    /// The disks did not prepare the other reactor in time.
    #[error(
        "its disks did not prepare the other core within {} s, so the queue stays on its core",
        PREPARE_PATIENCE.as_secs()
    )]
    NotReady,
    /// A disk could not be opened on the other reactor.
    #[error("the queue cannot run there: {0}")]
    Open(String),
    /// Another move of it has not ended.
    #[error("it is being moved already")]
    Moving,
    /// The queue is stopping or has stopped.
    #[error("the queue is stopping")]
    Ending,
}
