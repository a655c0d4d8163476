//! The other side: what a virtual machine and its monitor do, for measuring and testing back ends.
//!
//! - [`Memory`]: the guest's memory, a memfd.
//! - [`Ring`]: a virtqueue's driver side, split or packed.
//! - [`Wire`] and [`Session`]: vhost-user's messages, and their order.
//! - [`blk`] and [`scsi`]: requests of block devices and SCSI hosts, each a [`Builder`].
//! - [`Queue`]: a ring whose requests are laid out once, and offered again and again: no allocation and at most one
//!   system call, the kick, for many of them.
//!
//! Written from the virtio and vhost-user specifications, and apart from the device side. Nothing that a back end
//! says is believed: what is wrong gives an [`Error`], and what does not come gives one too. Any one thread; whoever calls polls.
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

pub use builder::{Builder, Operation, Place, Trouble};
pub use error::Error;
pub use memory::Memory;
pub use queue::{Done, Layout, Queue};
pub use ring::{Format, NotOutstanding, Parts, Piece, Ring, Shape};
pub use session::{Announced, Session, Wanted, feature, protocol};
pub use wire::{Request, Wire};
