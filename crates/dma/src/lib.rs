//! Guest and DMA memory.
//!
//! Memory that a guest, a kernel or a device may change at any time is never a `&[u8]` here: it is accessed only through copies
//! and atomics. This crate contains the `unsafe` code for that.
//!
//! - [`Mapping`]: memory that this process mapped: anonymous, or a peer's memfd.
//! - [`MemTable`]: a guest's memory at one time: translates guest addresses to memory of this process.
//! - [`GuestArea`]: a checked, contiguous piece of a guest's memory, such as one part of a virtqueue; [`GuestArray`]: values of
//!   one type in such a piece.
//! - [`Sgl`]: a scatter list of a request; [`SgTable`] owns the lists of a front-end's requests.
//! - [`Buffer`]: aligned memory of this process, lent to a request; [`Arena`]: buffers in one piece, for a device.
//! - [`DmaRange`]: a part of a mapping that a device may access; [`DmaPin`] keeps it mapped.
//! - [`DeviceMemory`]: mapped registers of a device.
//! - [`Limits`]: upper bounds of mapped peers' memory; [`Peer`]: the peer that shared a mapping.
//! - [`close_memory`], [`reclaiming`]: a separate thread unmaps memory and closes its files.
//! - [`Keeper`]: delays the unmapping while devices have the memory registered.
//! - [`DirtyLog`]: the pages of a migrating guest that were written.
//!
//! **Invariant.** An [`Sgl`] may be used from the submission of a request until its completion, and not after. The owner of the
//! memory ([`SgTable`], [`Buffer`]) keeps it mapped for that time, even when the owner itself is dropped earlier: it leaks the
//! memory rather than freeing it while a device uses it.
#![deny(unsafe_op_in_unsafe_fn)]

mod area;
mod array;
mod budget;
mod buffer;
mod copy;
mod device;
mod dirty;
mod fault;
mod mapping;
mod range;
mod reclaim;
mod sgl;
mod sync;
mod table;

pub use area::GuestArea;
pub use array::{GuestArray, GuestU16};
pub use budget::{Limits, Peer, mapped};
pub use buffer::{Arena, Buffer};
pub use device::DeviceMemory;
pub use dirty::DirtyLog;
pub use fault::{faults, install as install_fault_handler};
pub use mapping::{MapError, Mapping};
pub use range::{DmaPin, DmaRange};
pub use reclaim::{HeldPages, Keeper, Reclaiming, close_memory, reclaiming, revoked};
pub use sgl::{Seg, Sgl};
pub use table::{BadAddress, List, MemTable, Region, SgTable, TableError};

/// The size of a page, and the alignment of every mapping.
pub const PAGE: u64 = 4096;
