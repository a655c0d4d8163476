//! The interface of a driver to its PCI function. Control context: every call may block, unless it says otherwise.

use crate::{Events, PciError, Registers, VectorMask};
use aryk_dma::DmaRange;
use std::os::fd::BorrowedFd;

/// Width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    Four,
    /// 64 bits. A transport may access the two halves one after the other, the lower one first.
    Eight,
}

impl Width {
    /// Bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// `offset`, if it is a multiple of the width.
    pub(crate) const fn check(self, offset: u64) -> Result<u64, PciError> {
        let len = self.bytes() as u64;
        if offset.is_multiple_of(len) {
            Ok(offset)
        } else {
            Err(PciError::OutOfBounds { what: "registers", offset, len })
        }
    }
}

/// A DMA mapping that is made piece by piece ([`Function::map_piece`]).
#[derive(Debug)]
pub struct PendingMap {
    pub(crate) memory: DmaRange,
    /// The address, once it is reserved.
    pub(crate) iova: Option<u64>,
}

impl PendingMap {
    /// A mapping of memory, not begun.
    pub const fn new(memory: DmaRange) -> Self {
        Self { memory, iova: None }
    }

    /// The memory.
    pub const fn memory(&self) -> &DmaRange {
        &self.memory
    }
}

/// The end of a DMA mapping piece by piece ([`Function::unmap_piece`]).
#[derive(Debug)]
pub struct PendingUnmap {
    pub(crate) iova: u64,
    pub(crate) len: u64,
    /// The first address that is still mapped, once the mapping has begun to end.
    pub(crate) next: Option<u64>,
}

impl PendingUnmap {
    /// The end of a mapping, not begun, with the address and the length of the mapping.
    pub const fn new(iova: u64, len: u64) -> Self {
        Self { iova, len, next: None }
    }

    /// Address and length of the mapping.
    pub const fn range(&self) -> (u64, u64) {
        (self.iova, self.len)
    }
}

/// A PCI function that this process drives alone. Every call may block, unless it says otherwise: no reactor makes one.
///
/// Dropping the last reference ends the function's DMA and its interrupts, and removes its mappings. The function is closed, and
/// can be opened again, when its [`Registers`] and [`VectorMask`]s are dropped too.
pub trait Function: Send + Sync + std::fmt::Debug + 'static {
    /// The name for people: an address such as `0000:3d:00.0`, or the path of a socket.
    fn name(&self) -> &str;

    /// Reads a register of BAR 0. A removed function returns all ones or [`PciError::Gone`].
    ///
    /// # Errors
    /// [`PciError::OutOfBounds`], also for an offset that is no multiple of the width; [`PciError::Gone`];
    /// [`PciError::TimedOut`].
    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError>;

    /// Writes a register of BAR 0.
    ///
    /// # Errors
    /// As [`Function::read_register`].
    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError>;

    /// Reads configuration space.
    ///
    /// # Errors
    /// As [`Function::read_register`].
    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError>;

    /// Writes configuration space.
    ///
    /// # Errors
    /// As [`Function::read_register`].
    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError>;

    /// Maps `len` bytes of BAR 0 from `offset` on. Reactors write the result. A mapping that a reset or a removal has taken away
    /// ([`Registers::is_lost`]) stays lost; call this again after a reset.
    ///
    /// # Errors
    /// [`PciError::Unsupported`] if the transport cannot map these registers; [`PciError::OutOfBounds`].
    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError>;

    /// Maps memory for DMA, and returns the address at which the function accesses it (the IOVA). Pins the memory, where the
    /// transport needs that: the kernel then no longer moves or frees its pages. The range must start and end on a page of 4 KiB.
    /// The caller unmaps the range before it drops the memory.
    ///
    /// # Errors
    /// [`PciError::LockLimit`], [`PciError::MappingLimit`], [`PciError::AddressSpace`], each with the remedy;
    /// [`PciError::OutOfBounds`] if the range is not of whole pages.
    fn map(&self, memory: &DmaRange) -> Result<u64, PciError>;

    /// [`Function::map`] in steps, so that a thread can map memory of several VMs in turns: maps the next piece, and returns the
    /// IOVA with the last. A transport that maps memory by one call does so in one step. After a step the caller takes the next,
    /// until one returns the IOVA or an error; after an error, nothing of the memory is mapped for the caller.
    ///
    /// # Errors
    /// As [`Function::map`].
    fn map_piece(&self, pending: &mut PendingMap) -> Result<Option<u64>, PciError> {
        self.map(&pending.memory).map(Some)
    }

    /// Ends a mapping, with the address and the length that [`Function::map`] had. The function no longer accesses the memory
    /// when this returns.
    ///
    /// # Errors
    /// [`PciError::NotMapped`] if that is no mapping. After any other error the function may still access the memory: the caller
    /// must keep the memory.
    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError>;

    /// [`Function::unmap`] in steps, as [`Function::map_piece`]: unmaps the next piece, and returns whether it was the last.
    /// After an error, the next call begins with the first piece again.
    ///
    /// # Errors
    /// As [`Function::unmap`].
    fn unmap_piece(&self, pending: &mut PendingUnmap) -> Result<bool, PciError> {
        self.unmap(pending.iova, pending.len).map(|()| true)
    }

    /// The number of MSI-X vectors; 0 without MSI-X.
    fn vectors(&self) -> u16;

    /// Makes vector i signal eventfd i, in place of all earlier eventfds, and unmasks it. An empty list disables interrupts.
    ///
    /// # Errors
    /// [`PciError::OutOfBounds`] for more eventfds than vectors.
    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError>;

    /// The mask of a vector, which a reactor sets and clears; `None` where the MSI-X table cannot be mapped, as over vfio-user,
    /// and for a vector that the function does not have. Call this again after a reset.
    fn vector_mask(&self, vector: u16) -> Option<VectorMask>;

    /// Allows or forbids DMA and MSI-X by the function: the bus master bit of its command register. With `false`, DMA is over
    /// when this returns.
    ///
    /// # Errors
    /// As [`Function::read_register`].
    fn set_bus_master(&self, on: bool) -> Result<(), PciError>;

    /// Resets the function (function-level reset). Registers mapped before may be lost; DMA mappings stay. Vectors may
    /// be unmasked afterwards. A write to mapped registers can wait for the end of the reset: the caller stops reactors that
    /// write them.
    ///
    /// # Errors
    /// [`PciError::Unsupported`] if the function cannot be reset alone; [`PciError::Gone`].
    fn reset(&self) -> Result<(), PciError>;

    /// The eventfds of the function's events; `None` if the transport reports none. Does not block.
    fn events(&self) -> Option<Events>;
}
