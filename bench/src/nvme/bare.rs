//! The bare loop, which the NVMe driver is compared with: it writes submission entries and reads completion entries. It checks
//! nothing that a hostile controller could do, keeps no table of commands, and has no way to abort or reset.

use super::alone::Host;
use crate::driver::{BLOCK, Request, model};
use anyhow::{Context, Result, ensure};
use aryk_dma::{DmaPin, Mapping};
use aryk_nvme_model::{Model, SubmissionEntry, admin, nvm};
use aryk_pci::{Function, Registers, Width};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Entries of the bare loop's queues.
const ENTRIES: u64 = 256;
/// The bare loop's memory: admin queues, I/O submission queue, I/O completion queue, a page of PRP list for each entry, data.
const ADMIN_CQ: u64 = BLOCK;
const IO_SQ: u64 = 2 * BLOCK;
const IO_CQ: u64 = 6 * BLOCK;
const LISTS: u64 = 8 * BLOCK;
const DATA: u64 = LISTS + ENTRIES * BLOCK;
/// Writes entries and reads entries.
pub struct Bare {
    model: Arc<Model>,
    memory: DmaPin,
    iova: u64,
    doorbells: Registers,
    /// PRP2 of each entry, and the number of blocks.
    blocks: u64,
    tail: u64,
    head: u64,
    phase: u8,
    rung: u64,
    _mapping: Arc<Mapping>,
}

impl Bare {
    /// A loop for commands of `len` bytes, on a controller of its own.
    ///
    /// # Errors
    /// A process without memory or descriptors.
    pub fn new(len: u64) -> Result<Self> {
        let model = model()?;
        let mapping = Arc::new(Mapping::in_file(DATA + ENTRIES * len)?);
        let range = mapping.dma_range(0, mapping.len()).context("a range of the memory")?;
        let iova = model.map(&range)?;
        let memory = range.pin().context("the memory")?;
        let doorbells = model.map_registers(0x1000, 0x1000)?;
        model.set_bus_master(true)?;
        model.write_register(0x24, Width::Four, 31 << 16 | 31)?;
        model.write_register(0x28, Width::Eight, iova)?;
        model.write_register(0x30, Width::Eight, iova + ADMIN_CQ)?;
        model.write_register(0x14, Width::Four, 6 << 16 | 4 << 20 | 1)?;
        model.step(0);
        let size = 1 | (ENTRIES as u32 - 1) << 16;
        let queues = [(admin::CREATE_CQ, 1, IO_CQ), (admin::CREATE_SQ, 1 << 16 | 1, IO_SQ)];
        for (i, (opcode, cdw11, at)) in queues.into_iter().enumerate() {
            let mut entry = SubmissionEntry { opcode, ..SubmissionEntry::default() };
            (entry.cdw10, entry.cdw11) = (size.into(), cdw11.into());
            entry.dptr[..8].copy_from_slice(&(iova + at).to_le_bytes());
            ensure!(memory.write(64 * i as u64, entry.as_bytes()));
            doorbells.write(0, i as u32 + 1);
            model.step(0);
        }
        let blocks = len / BLOCK;
        for entry in 0..ENTRIES {
            let pages: Vec<u64> = (1..blocks).map(|i| iova + DATA + entry * len + i * BLOCK).collect();
            ensure!(memory.write(LISTS + entry * BLOCK, pages.as_bytes()));
        }
        let (tail, head, phase, rung) = (0, 0, 1, 0);
        Ok(Self { model, memory, iova, doorbells, blocks, tail, head, phase, rung, _mapping: mapping })
    }
}

impl Host for Bare {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    #[inline(never)]
    fn submit(&mut self, requests: &[Request]) {
        for request in requests {
            let opcode = if request.is_write { nvm::WRITE } else { nvm::READ };
            let mut entry = SubmissionEntry { opcode, nsid: 1.into(), ..SubmissionEntry::default() };
            entry.cid = (self.tail as u16).into();
            (entry.cdw10, entry.cdw12) = ((request.lba as u32).into(), (self.blocks as u32 - 1).into());
            let data = self.iova + DATA + self.tail * self.blocks * BLOCK;
            entry.dptr[..8].copy_from_slice(&data.to_le_bytes());
            entry.dptr[8..].copy_from_slice(&(self.iova + LISTS + self.tail * BLOCK).to_le_bytes());
            assert!(self.memory.write(IO_SQ + 64 * self.tail, entry.as_bytes()));
            self.tail = (self.tail + 1) % ENTRIES;
        }
        self.doorbells.write(8, self.tail as u32);
        self.rung += 1;
    }

    #[inline(never)]
    fn reap(&mut self) -> usize {
        let mut count = 0;
        loop {
            let mut entry = [0; 16];
            assert!(self.memory.read(IO_CQ + 16 * self.head, &mut entry));
            if entry[14] & 1 != self.phase {
                break;
            }
            assert_eq!((entry[14] & !1, entry[15]), (0, 0), "a failed command");
            self.head = (self.head + 1) % ENTRIES;
            self.phase ^= u8::from(self.head == 0);
            count += 1;
        }
        if count > 0 {
            self.doorbells.write(12, self.head as u32);
            self.rung += 1;
        }
        count
    }

    fn doorbells(&self) -> u64 {
        self.rung
    }
}
