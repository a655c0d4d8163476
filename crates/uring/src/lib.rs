//! The two kernel interfaces that a reactor works with: its io_uring, and signalling that cannot block.
//!
//! This crate holds the `unsafe` that they need. It decides nothing: which operations, when to submit and what a
//! completion means is the caller's. Reactor context.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod blocking;
mod ring;
mod signal;

pub use ring::{Completion, Fsync, Ring, Tag};
pub use signal::Signaller;
