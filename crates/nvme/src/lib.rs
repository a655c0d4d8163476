//! NVMe driver in user space: NVMe 2.x over PCI Express, without a kernel block layer.
//!
//! The driver needs an [`aryk_pci::Function`] and the time; it knows neither the reactor nor the block layer. Cited sections are
//! those of the NVMe Base Specification 2.0 ("NVMe 2.0"), the NVM Command Set Specification 1.0 and the PCIe Transport
//! Specification 1.0. `examples/identify.rs` is a whole program.
//!
//! # Order of reading
//! 1. [`spec`]: what registers and memory contain.
//! 2. [`claims`]: what a controller says about itself, checked; [`quirks`]: where controllers deviate.
//! 3. [`data`]: PRPs and SGLs of a command's data.
//! 4. [`queue`]: a queue pair, which a reactor owns; the hot path.
//! 5. [`io`] and [`admin`]: the commands.
//! 6. [`controller`]: attach, reset, recovery, removal; a thread off the reactors owns it.
//! 7. [`errors`]: what to do about each status; [`replay`]: what to submit again after a reset.
//!
//! | context | functions and types |
//! | --- | --- |
//! | reactor | [`queue::QueuePair`], [`io::Commands`], [`errors::classify`] |
//! | control, may block | [`controller::Controller`] |
//!
//! **Invariants.** No command ends before the controller is known not to access its memory any more ([`queue::DmaEnded`]).
//! Every byte that a controller writes is checked before use; a wrong one gives an error with the field's name, or resets the
//! queue pair. Submission and completion allocate nothing.
#![forbid(unsafe_code)]

pub mod admin;
pub mod claims;
pub mod controller;
pub mod data;
pub mod errors;
pub mod inject;
pub mod io;
mod memory;
pub mod queue;
pub mod quirks;
pub mod replay;
pub mod spec;

pub use memory::MemoryError;
