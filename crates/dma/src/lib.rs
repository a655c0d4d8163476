//! Guest and DMA memory.
//!
//! What a guest, a kernel or a device may change while we look at it is never a `&[u8]` here: it is
//! reached through copies and atomics only, and this crate holds the `unsafe` that does so.
//!
//! - [`Mapping`]: memory that this process mapped: anonymous, or a peer's memfd.
//! - [`MemTable`]: one epoch of a guest's memory: which guest address lies where.
//! - [`GuestArea`]: a checked, contiguous piece of it, such as one part of a virtqueue.
//! - [`Sgl`]: a scatter list of a request; [`SgTable`] owns those of a front-end's requests.
//! - [`Buffer`]: aligned memory of our own, lent to a request.
//! - [`Limits`]: how much of peers' memory is mapped at most; [`Peer`]: who gave a mapping.
//! - [`close_memory`], [`reclaiming`]: memory is unmapped, and its files are closed, on a thread of their own.
//! - [`DirtyLog`]: which pages of a guest that migrates were written to.
//!
//! **Invariant.** An [`Sgl`] may be used from the submission of a request until its completion, and
//! not after. Whoever lends the memory ([`SgTable`], [`Buffer`]) keeps it mapped for that time, even
//! when it is itself dropped earlier: it leaks the memory rather than freeing it under a device.
#![deny(unsafe_op_in_unsafe_fn)]

mod area;
mod budget;
mod buffer;
mod copy;
mod dirty;
mod fault;
mod mapping;
mod reclaim;
mod sgl;
mod sync;
mod table;

pub use area::GuestArea;
pub use budget::{Limits, Peer, mapped};
pub use buffer::Buffer;
pub use dirty::DirtyLog;
pub use fault::{faults, install as install_fault_handler};
pub use mapping::{MapError, Mapping};
pub use reclaim::{Reclaiming, close_memory, reclaiming};
pub use sgl::{Seg, Sgl};
pub use table::{BadAddress, List, MemTable, Region, SgTable, TableError};

/// The size of a page, and the alignment of every mapping.
pub const PAGE: u64 = 4096;
