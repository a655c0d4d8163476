//! Commands of the NVM command set (NVM Command Set 1.0 §3). Context: the holder of the controller.
//!
//! A command is checked completely before it changes anything: fields, namespace, range, data pointer, and whether the
//! memory is accessible.

use super::identify::MSRC;
use super::{Controller, Status};
use crate::config::Nanos;
use crate::namespace::Namespace;
use crate::wire::{SubmissionEntry, first, nvm};

/// Bit 30 of CDW12: Force Unit Access.
const FUA: u32 = 1 << 30;
/// Bytes of a range of Dataset Management, and of the most ranges.
const RANGE_LEN: usize = 16;
const RANGES_LEN: usize = 256 * RANGE_LEN;

impl Controller {
    /// Executes a command of an I/O queue.
    pub(super) fn run_io(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let oncs = self.config.oncs;
        match entry.opcode {
            nvm::READ => self.read(entry),
            nvm::WRITE => self.write(entry),
            nvm::FLUSH => self.flush(entry),
            nvm::COMPARE if oncs & 1 != 0 => self.compare(entry),
            nvm::WRITE_UNCORRECTABLE if oncs & 1 << 1 != 0 => self.write_uncorrectable(entry),
            nvm::DATASET_MANAGEMENT if oncs & 1 << 2 != 0 => self.dataset_management(entry),
            nvm::WRITE_ZEROES if oncs & 1 << 3 != 0 => self.write_zeroes(entry),
            nvm::VERIFY if oncs & 1 << 7 != 0 => self.verify(entry),
            nvm::COPY if oncs & 1 << 8 != 0 => self.copy(entry),
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Executes a fused pair at one moment: Compare and Write, the only pair there is.
    pub(super) fn run_fused(
        &mut self,
        first: &SubmissionEntry,
        second: &SubmissionEntry,
    ) -> (Result<u32, Status>, Result<u32, Status>) {
        let is_pair = first.opcode == nvm::COMPARE && second.opcode == nvm::WRITE;
        if !is_pair || self.config.fuses & 1 == 0 || self.config.oncs & 1 == 0 {
            return (Err(Status::INVALID_FIELD), Err(Status::INVALID_FIELD));
        }
        let range = |entry: &SubmissionEntry| (entry.nsid.get(), entry.slba(), entry.blocks());
        if range(first) != range(second) {
            return (Err(Status::INVALID_FIELD), Err(Status::INVALID_FIELD));
        }
        if first.blocks() > u64::from(self.config.acwu) + 1 {
            return (Err(Status::ATOMIC_UNIT_EXCEEDED), Err(Status::ATOMIC_UNIT_EXCEEDED));
        }
        match self.compare(first) {
            Ok(result) => (Ok(result), self.write(second)),
            Err(status) => (Err(status), Err(Status::FUSED_FAILED)),
        }
    }

    /// The namespace of a command that accesses blocks; the checks that all such commands need.
    fn namespace(&mut self, nsid: u32, is_write: bool) -> Result<&mut Namespace, Status> {
        let is_sanitizing = self.logs.is_sanitizing();
        let is_locked = self.config.locking == Some(true);
        let now = self.now;
        let found = self.namespaces.get_mut(&nsid).filter(|n| n.config.attached);
        let namespace = found.ok_or(Status::INVALID_NAMESPACE)?;
        if is_sanitizing {
            return Err(Status::SANITIZE_IN_PROGRESS);
        }
        if namespace.formatting_until > now {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if !namespace.is_served() {
            return Err(Status::INVALID_NAMESPACE);
        }
        if is_locked {
            return Err(Status::ACCESS_DENIED);
        }
        if is_write && namespace.config.write_protected {
            return Err(Status::WRITE_PROTECTED);
        }
        Ok(namespace)
    }

    /// Checks the range of a command that moves data, and loads its data pointer. Returns the starting block and their
    /// number.
    fn load(&mut self, entry: &SubmissionEntry, to_host: bool, is_write: bool) -> Result<(u64, u64), Status> {
        let (lba, blocks) = (entry.slba(), entry.blocks());
        let max = self.transfer_max();
        let namespace = self.namespace(entry.nsid.get(), is_write)?;
        if !namespace.contains(lba, blocks) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        let len = blocks * namespace.block_len();
        if len > max {
            return Err(Status::INVALID_FIELD);
        }
        let rules = self.pointer_rules(false, to_host);
        self.transfer.load(&mut self.bus, rules, entry, len)?;
        self.transfer.check(&mut self.bus, to_host)?;
        self.charge(blocks);
        self.counts.bytes += len;
        if is_write {
            self.logs.count_write(len);
        } else {
            self.logs.count_read(len);
        }
        Ok((lba, blocks))
    }

    fn read(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (lba, blocks) = self.load(entry, true, false)?;
        let Some(namespace) = self.namespaces.get(&entry.nsid.get()) else {
            return Err(Status::INVALID_NAMESPACE);
        };
        if namespace.first_unreadable(lba, blocks).is_some() {
            return Err(Status::UNRECOVERED_READ);
        }
        self.transfer.write(&mut self.bus, namespace.read(lba, blocks))?;
        Ok(0)
    }

    fn write(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (lba, blocks) = self.load(entry, false, true)?;
        let is_durable = !self.features.has_write_cache() || entry.cdw12.get() & FUA != 0;
        let is_atomic = blocks <= u64::from(self.config.awupf) + 1;
        let Some(namespace) = self.namespaces.get_mut(&entry.nsid.get()) else {
            return Err(Status::INVALID_NAMESPACE);
        };
        let to = namespace.write(lba, blocks, is_durable, is_atomic);
        self.transfer.read(&mut self.bus, to)?;
        Ok(0)
    }

    fn flush(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        if entry.nsid.get() == u32::MAX {
            self.namespaces.values_mut().for_each(Namespace::flush);
            return Ok(0);
        }
        self.namespace(entry.nsid.get(), false)?.flush();
        Ok(0)
    }

    fn compare(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (lba, blocks) = self.load(entry, false, false)?;
        let Some(namespace) = self.namespaces.get(&entry.nsid.get()) else {
            return Err(Status::INVALID_NAMESPACE);
        };
        if namespace.first_unreadable(lba, blocks).is_some() {
            return Err(Status::UNRECOVERED_READ);
        }
        let stored = namespace.read(lba, blocks);
        let given = &mut self.scratch[..stored.len()];
        self.transfer.read(&mut self.bus, given)?;
        if given == stored { Ok(0) } else { Err(Status::COMPARE_FAILURE) }
    }

    /// The blocks of a command that moves no data.
    fn range(
        &mut self,
        entry: &SubmissionEntry,
        is_write: bool,
    ) -> Result<(&mut Namespace, u64, u64), Status> {
        let (lba, blocks) = (entry.slba(), entry.blocks());
        if !self.namespace(entry.nsid.get(), is_write)?.contains(lba, blocks) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        self.charge(blocks);
        let namespace = self.namespace(entry.nsid.get(), is_write)?;
        Ok((namespace, lba, blocks))
    }

    fn verify(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (namespace, lba, blocks) = self.range(entry, false)?;
        match namespace.first_unreadable(lba, blocks) {
            Some(_) => Err(Status::UNRECOVERED_READ),
            None => Ok(0),
        }
    }

    fn write_zeroes(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let is_durable = !self.features.has_write_cache() || entry.cdw12.get() & FUA != 0;
        let (namespace, lba, blocks) = self.range(entry, true)?;
        namespace.write(lba, blocks, is_durable, false).fill(0);
        Ok(0)
    }

    fn write_uncorrectable(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (namespace, lba, blocks) = self.range(entry, true)?;
        namespace.mark_unreadable(lba, blocks);
        Ok(0)
    }

    /// Dataset Management. Only Deallocate has an effect: the blocks read as zeroes. Ranges beyond the size of the
    /// namespace in total are ignored, as a hint may be.
    fn dataset_management(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let is_durable = !self.features.has_write_cache();
        let deallocates = entry.cdw11.get() & 1 << 2 != 0;
        self.namespace(entry.nsid.get(), true)?;
        let mut data = [0; RANGES_LEN];
        let ranges = self.load_ranges(entry, &mut data)?;
        let namespace = self.namespace(entry.nsid.get(), true)?;
        if ranges.clone().any(|(lba, blocks)| !namespace.contains(lba, blocks)) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        let size = namespace.config.blocks;
        let mut left = size;
        for (lba, blocks) in ranges.filter(|_| deallocates) {
            if blocks <= left {
                left -= blocks;
                namespace.write(lba, blocks, is_durable, false).fill(0);
            }
        }
        self.charge(size - left);
        Ok(0)
    }

    /// The ranges of a Dataset Management command: first block and number of blocks.
    fn load_ranges<'a>(
        &mut self,
        entry: &SubmissionEntry,
        data: &'a mut [u8; RANGES_LEN],
    ) -> Result<impl Iterator<Item = (u64, u64)> + Clone + use<'a>, Status> {
        let data = &mut data[..RANGE_LEN * ((entry.cdw10.get() as usize & 0xff) + 1)];
        let rules = self.pointer_rules(false, false);
        self.transfer.load(&mut self.bus, rules, entry, data.len() as u64)?;
        self.transfer.read(&mut self.bus, data)?;
        Ok(data.chunks_exact(RANGE_LEN).map(|bytes| {
            let blocks = u64::from(u32::from_le_bytes(first(&bytes[4..])));
            (u64::from_le_bytes(first(&bytes[8..])), blocks)
        }))
    }

    /// The time of a command that deallocates or zeroes blocks, which begins when those before have ended.
    pub(super) fn start_emptying(&mut self, entry: &SubmissionEntry) -> Nanos {
        let blocks = match entry.opcode {
            nvm::WRITE_ZEROES => entry.blocks(),
            nvm::DATASET_MANAGEMENT if entry.cdw11.get() & 1 << 2 != 0 => {
                let mut data = [0; RANGES_LEN];
                let ranges = self.load_ranges(entry, &mut data);
                // An error is reported when the command is executed.
                ranges.map_or(0, |ranges| ranges.map(|(_, blocks)| blocks).sum())
            }
            _ => 0,
        };
        let Some(namespace) = self.namespaces.get(&entry.nsid.get()).filter(|_| blocks > 0) else { return 0 };
        let bytes = blocks.saturating_mul(namespace.block_len());
        let time = (u128::from(bytes) * u128::from(self.config.timing.empty_mib)) >> 20;
        let time = Nanos::try_from(time).unwrap_or(Nanos::MAX);
        self.emptied_at = self.emptied_at.max(self.now).saturating_add(time);
        self.emptied_at - self.now
    }

    /// Copy with descriptors of format 0 (NVM Command Set 1.0 §3.2.2). All sources are read before the destination is
    /// written.
    fn copy(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let cdw12 = entry.cdw12.get();
        let count = (cdw12 as usize & 0xff) + 1;
        let is_durable = !self.features.has_write_cache() || cdw12 & FUA != 0;
        if cdw12 >> 8 & 0xf != 0 {
            return Err(Status::INVALID_FIELD);
        }
        if count > usize::from(MSRC) + 1 {
            return Err(Status::COMMAND_SIZE_LIMIT);
        }
        let max = self.transfer_max();
        self.namespace(entry.nsid.get(), true)?;
        let mut descriptors = [0; 32 * (MSRC as usize + 1)];
        let descriptors = &mut descriptors[..32 * count];
        let rules = self.pointer_rules(false, false);
        self.transfer.load(&mut self.bus, rules, entry, descriptors.len() as u64)?;
        self.transfer.read(&mut self.bus, descriptors)?;
        let Some(namespace) = self.namespaces.get_mut(&entry.nsid.get()) else {
            return Err(Status::INVALID_NAMESPACE);
        };
        let block_len = namespace.block_len();
        let mut total = 0;
        for descriptor in descriptors.chunks_exact(32) {
            let lba = u64::from_le_bytes(first(&descriptor[8..]));
            let blocks = u64::from(u16::from_le_bytes(first(&descriptor[16..]))) + 1;
            if !namespace.contains(lba, blocks) {
                return Err(Status::LBA_OUT_OF_RANGE);
            }
            if (total + blocks) * block_len > max {
                return Err(Status::COMMAND_SIZE_LIMIT);
            }
            if namespace.first_unreadable(lba, blocks).is_some() {
                return Err(Status::UNRECOVERED_READ);
            }
            let source = namespace.read(lba, blocks);
            let at = ((total * block_len) as usize).min(self.scratch.len());
            if !source.is_empty() {
                self.scratch[at..at + source.len()].copy_from_slice(source);
            }
            total += blocks;
        }
        if !namespace.contains(entry.slba(), total) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        let to = namespace.write(entry.slba(), total, is_durable, false);
        to.copy_from_slice(&self.scratch[..to.len()]);
        self.charge(total);
        Ok(0)
    }
}
