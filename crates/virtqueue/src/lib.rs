//! virtio virtqueues, device side, in a guest's memory (virtio 1.2 and 1.3, sections 2.7 and 2.8).
//!
//! - [`SplitQueue`]: a split ring. Takes descriptor chains, writes used elements, and handles notifications in both directions.
//! - [`PackedQueue`]: the same for a packed ring; [`Virtqueue`]: either.
//! - [`Chain`]: the buffers of one request, copied from the guest's descriptors and checked.
//!
//! The queue's single owner uses all types in reactor context. No function blocks, locks, or allocates after the creation of a
//! queue and its scratch [`Chain`].
//!
//! **Invariant.** Memory that a guest can change is read once, then checked, and only the copy is used. Any content of that
//! memory causes at most an error, never a panic: a [`ChainError`] fails one request, a [`QueueError`] the queue.
//!
//! This crate handles buffers only; the device types interpret requests.
#![forbid(unsafe_code)]

mod chain;
mod error;
mod packed;
mod queue;
mod split;

pub use chain::{CHAIN_MAX, Chain, Ends, Piece};
pub use error::{ChainError, ConfigError, InflightError, PopError, QueueError};
pub use packed::{EVENT_LEN, PackedConfig, PackedQueue};
pub use queue::{Config, Format, Popped, Virtqueue, inflight_len, private_len};
pub use split::{SIZE_MAX, SplitConfig, SplitQueue, avail_len, desc_len, used_idx, used_len};
