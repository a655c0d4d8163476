//! A guest's errors on a queue: their counters, and the report that ends the session. Written in reactor context, read in any.

use aryk_virtqueue::{ConfigError, QueueError};
use std::sync::atomic::AtomicU64;

/// A guest's errors, counted over all queues of a controller.
#[derive(Debug, Default)]
pub struct Errors {
    /// Descriptor chains that are no valid request; they were completed with length 0.
    pub bad_chains: AtomicU64,
    /// Requests without a buffer for their status.
    pub unanswerable: AtomicU64,
    /// Inconsistent rings; each ended its session.
    pub broken_queues: AtomicU64,
}

/// The reason why a queue ends its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Trouble {
    /// The ring is inconsistent.
    #[error("queue {0} is broken: {1}")]
    Broken(u16, QueueError),
    /// The ring is not valid in the guest's new memory.
    #[error("queue {0} cannot move to the new memory: {1}")]
    Moved(u16, ConfigError),
    /// The memory behind the guest was truncated.
    #[error("the front-end truncated the guest's memory")]
    MemoryLost,
}

/// Reports that a queue cannot go on. Called in reactor context, at most once per queue, so it must not wait.
pub type Alarm = Box<dyn Fn(Trouble) + Send>;
