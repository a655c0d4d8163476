//! What a guest can do wrong to a queue, and who hears of it. Counted and told in reactor context, read anywhere.

use aryk_virtqueue::{ConfigError, QueueError};
use std::sync::atomic::AtomicU64;

/// What a guest did wrong, counted over all queues of a controller. Read anywhere.
#[derive(Debug, Default)]
pub struct Errors {
    /// Descriptor chains that make no request; they were given back empty.
    pub bad_chains: AtomicU64,
    /// Requests without a place for their status.
    pub unanswerable: AtomicU64,
    /// Rings that contradict themselves; each ended its queue.
    pub broken_queues: AtomicU64,
}

/// Why a queue wants its session to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Trouble {
    /// The ring contradicts itself.
    #[error("queue {0} is broken: {1}")]
    Broken(u16, QueueError),
    /// The ring does not lie in the guest's new memory as a ring must.
    #[error("queue {0} cannot move to the new memory: {1}")]
    Moved(u16, ConfigError),
    /// The memory behind the guest was truncated.
    #[error("the front-end truncated the guest's memory")]
    MemoryLost,
}

/// How a queue says that it is in trouble. Called in reactor context, once: it only passes the word on.
pub type Alarm = Box<dyn Fn(Trouble) + Send>;
