//! Memory of the driver itself that the controller accesses: queues, PRP lists, the data of admin commands. Allocated and
//! freed in control context.

use std::sync::Arc;

use aryk_dma::{GuestArea, MapError, Mapping, PAGE};
use aryk_pci::{Function, PciError};

/// Why the driver gets no memory for DMA.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The process has no memory.
    #[error("cannot allocate {len} bytes of memory for DMA: {error}")]
    Allocate {
        /// Bytes.
        len: u64,
        /// The kernel's answer.
        error: MapError,
    },
    /// The function cannot map the memory.
    #[error(transparent)]
    Map(#[from] PciError),
    /// The address is not aligned for the controller's memory pages.
    #[error("IOVA {iova:#x} of {len} bytes cannot be aligned to memory pages of {page} bytes")]
    Alignment {
        /// The address of the mapping.
        iova: u64,
        /// Bytes.
        len: u64,
        /// CC.MPS in bytes.
        page: u64,
    },
}

/// Zeroed memory, mapped for the controller until it is dropped.
///
/// The owner drops the memory only after the controller's last access. If the function cannot end the mapping, the memory is
/// leaked: the controller could still write to it.
#[derive(Debug)]
pub(crate) struct DmaMemory {
    mapping: Arc<Mapping>,
    /// Bytes before the first one of ours, for alignment.
    skip: u64,
    len: u64,
    /// Address of the mapping's first byte for the controller.
    start: u64,
    function: Arc<dyn Function>,
}

impl DmaMemory {
    /// `len` bytes, which start at a multiple of `page` (a power of two) for the controller.
    pub(crate) fn new(function: &Arc<dyn Function>, len: u64, page: u64) -> Result<Self, MemoryError> {
        let whole = len.next_multiple_of(PAGE) + if page > PAGE { page } else { 0 };
        let allocate = |error| MemoryError::Allocate { len: whole, error };
        let mapping = Arc::new(Mapping::in_file(whole).map_err(allocate)?);
        let range = mapping.dma_range(0, whole).ok_or(PciError::Unsupported("memory of this length"))?;
        let start = function.map(&range)?;
        let skip = start.wrapping_neg() & (page - 1);
        let memory = Self { mapping, skip, len, start, function: Arc::clone(function) };
        // At the end of the 64 bits, later sums would wrap.
        let fits = start.checked_add(whole).is_some() && skip + len <= whole;
        if fits { Ok(memory) } else { Err(MemoryError::Alignment { iova: start, len, page }) }
    }

    /// Address of the first byte for the controller.
    pub(crate) const fn iova(&self) -> u64 {
        self.start + self.skip
    }

    /// `len` bytes from `offset` on, for access by this process; `None` if they are not all inside.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<GuestArea> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len)?;
        GuestArea::new(&self.mapping, self.skip + end - len, len)
    }
}

impl Drop for DmaMemory {
    fn drop(&mut self) {
        match self.function.unmap(self.start, self.mapping.len()) {
            Ok(()) | Err(PciError::NotMapped { .. } | PciError::Gone { .. }) => {}
            Err(_) => std::mem::forget(Arc::clone(&self.mapping)),
        }
    }
}
