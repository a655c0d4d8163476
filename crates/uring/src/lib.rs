//! The two kernel interfaces that a reactor works with: its io_uring, and signalling that cannot block.
//!
//! This crate holds the `unsafe` that they need. It makes no decisions: the caller chooses the operations and the time of
//! submission, and interprets completions. Reactor context.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod blocking;
mod ring;
mod signal;

pub use ring::{Completion, Fsync, Ring, Tag};
pub use signal::Signaller;
