//! A queue pair whose controller is a script: a test or a fuzzer writes completions into the queue's memory, right or wrong.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use aryk_dma::{DmaRange, GuestArea};
use aryk_pci::{Events, Function, PciError, Registers, VectorMask, Width};

use super::{DmaEnded, Doorbells, Fate, Layout, QueuePair, Restart, Timeouts, Unfinished};
use crate::data::SglSupport;
use crate::memory::DmaMemory;

/// A function that only maps memory, each range at its own address.
#[derive(Debug, Default)]
struct Memory(Mutex<u64>);

/// Address of the pair's memory for the controller.
pub const BASE: u64 = 1 << 32;
/// The pair's queue identifier.
pub const QID: u16 = 3;
/// The pair's controller.
const CONTROLLER: u64 = 9;

impl Function for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }
    fn read_register(&self, _: u64, _: Width) -> Result<u64, PciError> {
        Err(PciError::Unsupported("registers"))
    }
    fn write_register(&self, _: u64, _: Width, _: u64) -> Result<(), PciError> {
        Err(PciError::Unsupported("registers"))
    }
    fn read_config(&self, _: u16, _: &mut [u8]) -> Result<(), PciError> {
        Err(PciError::Unsupported("configuration"))
    }
    fn write_config(&self, _: u16, _: &[u8]) -> Result<(), PciError> {
        Err(PciError::Unsupported("configuration"))
    }
    fn map_registers(&self, _: u64, _: u64) -> Result<Registers, PciError> {
        Err(PciError::Unsupported("registers"))
    }
    fn map(&self, _: &DmaRange) -> Result<u64, PciError> {
        let mut maps = self.0.lock().expect("no thread panics with the lock");
        *maps += 1;
        Ok(BASE + ((*maps - 1) << 28))
    }
    fn unmap(&self, _: u64, _: u64) -> Result<(), PciError> {
        Ok(())
    }
    fn vectors(&self) -> u16 {
        0
    }
    fn set_interrupts(&self, _: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        Ok(())
    }
    fn vector_mask(&self, _: u16) -> Option<VectorMask> {
        None
    }
    fn set_bus_master(&self, _: bool) -> Result<(), PciError> {
        Ok(())
    }
    fn reset(&self) -> Result<(), PciError> {
        Ok(())
    }
    fn events(&self) -> Option<Events> {
        None
    }
}

/// A pair, and its controller's view of it.
#[derive(Debug)]
pub struct Scripted {
    /// The pair.
    pub pair: QueuePair,
    /// All memory of the pair; the submission queue comes first.
    pub device: GuestArea,
    registers: Registers,
    cq_offset: usize,
    cq_tail: u16,
    phase: bool,
    entries: u16,
    _memory: DmaMemory,
}

fn registers() -> Registers {
    Registers::in_memory(64).expect("there is memory")
}

fn doorbells(registers: &Registers) -> Doorbells {
    Doorbells { registers: registers.clone(), stride: 4, shadow: None }
}

impl Scripted {
    /// A pair for `depth` commands in queues of `entries` entries. Commands are late after 100 ns, and again after 50 more.
    ///
    /// # Panics
    /// Without memory.
    pub fn new(depth: u16, entries: u16) -> Self {
        let function: Arc<dyn Function> = Arc::new(Memory::default());
        let layout = Layout {
            qid: QID,
            controller: CONTROLLER,
            entries: entries.into(),
            depth,
            page: 4096,
            sgl: SglSupport::None,
            list: 256,
            timeouts: Timeouts { command: 100, grace: 50 },
        };
        let memory = DmaMemory::new(&function, layout.len(), 4096).expect("there is memory");
        let registers = registers();
        let cq_offset = layout.cq_offset() as usize;
        let device = memory.part(0, layout.len()).expect("the memory has this length");
        let pair = QueuePair::new(layout, &memory, &doorbells(&registers)).expect("as above");
        Self { pair, device, registers, cq_offset, cq_tail: 0, phase: true, entries, _memory: memory }
    }

    /// Posts a completion with these fields, in its place and with its phase.
    pub fn post(&mut self, cid: u16, sqid: u16, sqhd: u16, status: u16) {
        let at = self.cq_offset + usize::from(self.cq_tail) * 16;
        let fields = u64::from(sqhd) | u64::from(sqid) << 16 | u64::from(cid) << 32;
        self.device.write(at + 8, &fields.to_le_bytes());
        let phase = u16::from(self.phase);
        self.device.store_u16(at + 14, status << 1 | phase, Ordering::Release);
        self.cq_tail = (self.cq_tail + 1) % self.entries;
        self.phase ^= self.cq_tail == 0;
    }

    /// Overwrites entry `index` of the completion queue, modulo its length.
    pub fn scribble(&mut self, index: u16, bytes: [u8; 16]) {
        self.device.write(self.cq_offset + usize::from(index % self.entries) * 16, &bytes);
    }

    /// Values of the SQ tail and CQ head doorbells.
    pub fn doorbells(&self) -> (u32, u32) {
        (self.registers.read(24), self.registers.read(28))
    }

    /// Resets the pair as a controller and an owner do, and returns the number of commands that it submits again.
    pub fn reset(&mut self, now: u64, decide: impl FnMut(&Unfinished) -> Fate) -> u16 {
        let kept = self.pair.rewind(DmaEnded::new(QID, CONTROLLER), decide);
        (self.cq_tail, self.phase) = (0, true);
        self.registers = registers();
        let doorbells = doorbells(&self.registers);
        self.pair.resume(Restart { qid: QID, controller: CONTROLLER, sgl: SglSupport::None, doorbells }, now);
        kept
    }
}
