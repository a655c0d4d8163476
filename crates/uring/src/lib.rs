//! The two kernel interfaces of a reactor: its io_uring, and signals to eventfds that cannot block.
//!
//! This crate contains the `unsafe` code that they need, and makes no decisions: the caller chooses the operations and the time
//! of submission, and interprets completions. Reactor context.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod blocking;
mod received;
mod ring;
mod signal;

pub use received::Filled;
pub use ring::{Completion, Fsync, Ring, Tag};
pub use signal::Signaller;
