//! A model whose function lacks something that others have.

use aryk_dma::DmaRange;
use aryk_nvme_model::Model;
use aryk_pci::{Events, Function, PciError, PendingMap, PendingUnmap, Registers, VectorMask, Width};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

/// Bytes of a piece of a mapping.
pub(super) const PIECE: u64 = 16 << 10;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Odd {
    model: Arc<Model>,
    /// Its MSI-X table cannot be mapped.
    has_no_masks: bool,
    /// The memory of which pieces were mapped, by address, or unmapped, by IOVA, in order.
    pub(super) pieces: Mutex<Vec<u64>>,
    /// Memory of so many bytes is not mapped.
    pub(super) refused: Mutex<Range<u64>>,
    /// Reads of the configuration space wait for this lock, as the kernel waits for a drive that was pulled out.
    pub(super) config_space: Mutex<()>,
    /// More interrupts than this are refused.
    interrupts_max: usize,
}

impl Odd {
    /// A function that maps memory in pieces.
    pub(super) fn slow(model: &Arc<Model>) -> Self {
        Self {
            model: Arc::clone(model),
            has_no_masks: false,
            pieces: Mutex::default(),
            refused: Mutex::default(),
            config_space: Mutex::default(),
            interrupts_max: usize::MAX,
        }
    }

    /// A function whose MSI-X table cannot be mapped, and that accepts so many interrupts.
    pub(super) fn without_masks(model: &Arc<Model>, interrupts_max: usize) -> Self {
        Self { has_no_masks: true, interrupts_max, ..Self::slow(model) }
    }
}

impl Function for Odd {
    fn name(&self) -> &str {
        self.model.name()
    }

    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError> {
        self.model.read_register(offset, width)
    }

    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError> {
        self.model.write_register(offset, width, value)
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        let _turn = self.config_space.lock().unwrap();
        self.model.read_config(offset, out)
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        self.model.write_config(offset, data)
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        self.model.map_registers(offset, len)
    }

    fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        if self.refused.lock().unwrap().contains(&memory.len()) {
            return Err(PciError::Os { what: "a mapping", errno: rustix::io::Errno::NOMEM });
        }
        self.model.map(memory)
    }

    fn map_piece(&self, pending: &mut PendingMap) -> Result<Option<u64>, PciError> {
        let memory = pending.memory();
        let mut pieces = self.pieces.lock().unwrap();
        pieces.push(memory.addr());
        let mapped = pieces.iter().filter(|addr| **addr == memory.addr()).count() as u64 * PIECE;
        if mapped < memory.len() { Ok(None) } else { self.map(memory).map(Some) }
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        self.model.unmap(iova, len)
    }

    fn unmap_piece(&self, pending: &mut PendingUnmap) -> Result<bool, PciError> {
        let (iova, len) = pending.range();
        let mut pieces = self.pieces.lock().unwrap();
        pieces.push(iova);
        let unmapped = pieces.iter().filter(|piece| **piece == iova).count() as u64 * PIECE;
        if unmapped < len { Ok(false) } else { self.unmap(iova, len).map(|()| true) }
    }

    fn vectors(&self) -> u16 {
        self.model.vectors()
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        if eventfds.len() > self.interrupts_max {
            return Err(PciError::Unsupported("this number of interrupts"));
        }
        self.model.set_interrupts(eventfds)
    }

    fn vector_mask(&self, vector: u16) -> Option<VectorMask> {
        if self.has_no_masks { None } else { self.model.vector_mask(vector) }
    }

    fn set_bus_master(&self, on: bool) -> Result<(), PciError> {
        self.model.set_bus_master(on)
    }

    fn reset(&self) -> Result<(), PciError> {
        self.model.reset()
    }

    fn events(&self) -> Option<Events> {
        self.model.events()
    }
}
