//! PCI functions driven from user space: registers, DMA mappings, interrupts.
//!
//! - [`Function`]: what a driver needs of a PCI function. Its implementations: a model of a device in this process, and the ones
//!   below.
//! - [`Registers`]: mapped registers, for doorbells; [`VectorMask`]: the mask of an interrupt vector.
//! - [`Events`]: the device failed, or the kernel asks for it back.
//! - [`vfio`]: functions of this host, by the kernel's VFIO; [`sysfs`] finds them, and binds them to VFIO.
//! - [`uevents`]: the kernel tells that functions appear, go, or get another driver.
//! - [`vfio_user`]: functions that another process emulates, by the vfio-user protocol; and its server.
//! - [`PciError`]: each failure, by what the operator can do about it.
//!
//! Drivers and models know this crate and memory (`aryk_dma`), and no more of the system. This crate knows nothing of what a
//! function does: NVMe is in `crates/nvme`.
#![deny(unsafe_op_in_unsafe_fn)]

mod address;
mod config;
mod error;
mod events;
mod function;
mod info;
mod iova;
mod registers;
pub mod sysfs;
pub mod uevents;
mod vector_mask;
pub mod vfio;
pub mod vfio_user;

pub use address::{Address, BadAddress};
pub use error::PciError;
pub use events::Events;
pub use function::{Function, PendingMap, PendingUnmap, Width};
pub use registers::Registers;
pub use vector_mask::VectorMask;
