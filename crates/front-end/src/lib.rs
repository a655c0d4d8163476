//! A vhost-user front-end: the part of a VM and its VMM, for measuring and testing back-ends.
//!
//! - [`Memory`]: the guest's memory, a memfd.
//! - [`Ring`]: a virtqueue's driver side, split or packed.
//! - [`Wire`] and [`Session`]: vhost-user's messages, and their order.
//! - [`blk`] and [`scsi`]: requests for block devices and SCSI hosts, each a [`Builder`].
//! - [`Queue`]: a ring whose requests are laid out once and submitted repeatedly: no allocation per request, and at
//!   most one system call, the kick, per batch.
//!
//! Written from the virtio and vhost-user specifications, independently of the device side. Everything that a
//! back-end sends is checked: a wrong message and a missing reply both give an [`Error`]. Runs on any one thread; the
//! caller polls.
#![forbid(unsafe_code)]

pub mod blk;
mod builder;
mod error;
mod memory;
mod queue;
mod ring;
pub mod scsi;
mod session;
mod wire;

pub use builder::{Builder, Operation, Place, RequestError};
pub use error::Error;
pub use memory::{HUGE_PAGE, Memory};
pub use queue::{Done, Layout, Queue};
pub use ring::{Format, NotOutstanding, Parts, Piece, Ring, Shape};
pub use session::{Announced, Session, Wanted, feature, protocol};
pub use wire::{Request, Wire};
