//! virtio virtqueues, device side, in a guest's memory (virtio 1.2 and 1.3, sections 2.7 and 2.8).
//!
//! - [`SplitQueue`]: a split ring: takes descriptor chains, gives used elements, and decides who wakes whom.
//! - [`PackedQueue`]: the same of a packed ring; [`Virtqueue`]: either.
//! - [`Chain`]: the buffers of one request, as copied and checked out of the guest's descriptors.
//!
//! All is used in reactor context by the queue's one owner; nothing here blocks, locks, or allocates after a queue and
//! its scratch [`Chain`] were made.
//!
//! **Invariant.** What a guest can change is read once, then checked, and only the copy is used. Whatever it
//! writes gives an error here, never a panic: a [`ChainError`] condemns one request, a [`QueueError`] the queue.
//!
//! Device types know requests; this crate knows buffers only.
#![forbid(unsafe_code)]

mod chain;
mod error;
mod packed;
mod queue;
mod split;

pub use chain::{CHAIN_MAX, Chain, Piece};
pub use error::{ChainError, ConfigError, InflightError, PopError, QueueError};
pub use packed::{EVENT_LEN, PackedConfig, PackedQueue};
pub use queue::{Config, Format, Virtqueue, inflight_len};
pub use split::{SIZE_MAX, SplitConfig, SplitQueue, avail_len, desc_len, used_idx, used_len};
