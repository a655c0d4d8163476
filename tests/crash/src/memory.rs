//! The guest's memory: a memfd, where things lie in it, and access to them. Test tool, the front-end's thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use aryk_dma::{GuestArea, Mapping};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::content::SECTOR;

/// Bytes for each queue's rings.
const RING_SPACE: u64 = 64 << 10;
/// Bytes of a request's header, range, status and indirect table.
const SLOT_HEAD: u64 = 1024;
/// Bytes of data in the longest request.
pub const DATA_MAX: u64 = 32 << 10;
const SLOT_SPACE: u64 = SLOT_HEAD + DATA_MAX;

/// Where the memory begins for the guest.
const GUEST_ADDR: u64 = 0x1000_0000;
/// Where it would be in the front-end's process; only ever an argument of messages.
const USER_ADDR: u64 = 0x7f12_3000_0000;

/// Memory of a guest.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    whole: GuestArea,
    queues: u64,
    slots: u64,
}

/// Where the parts of one request lie, as offsets into the memory.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// 16 bytes: kind and sector.
    pub header: u64,
    /// 16 bytes: the range of a discard or write-zeroes.
    pub range: u64,
    /// One byte.
    pub status: u64,
    /// Descriptors, 16 bytes each.
    pub table: u64,
    /// [`DATA_MAX`] bytes.
    pub data: u64,
}

impl Memory {
    /// Memory for `queues` rings with `slots` requests each.
    ///
    /// # Errors
    /// The kernel gives none.
    pub fn new(queues: u16, slots: u16) -> Result<Self> {
        let (queues, slots) = (u64::from(queues), u64::from(slots));
        let len = (queues * (RING_SPACE + slots * SLOT_SPACE)).next_multiple_of(aryk_dma::PAGE);
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).context("memfd_create")?;
        ftruncate(&fd, len)?;
        let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, len)?);
        let whole = GuestArea::new(&mapping, 0, len).context("the whole is inside")?;
        Ok(Self { fd, whole, queues, slots })
    }

    /// The file.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Guest address, length, user address and offset in the file, as messages have them.
    #[must_use]
    pub const fn region(&self) -> [u64; 4] {
        [GUEST_ADDR, self.whole.len(), USER_ADDR, 0]
    }

    /// The address of an offset for the device.
    #[must_use]
    pub const fn guest_addr(offset: u64) -> u64 {
        GUEST_ADDR + offset
    }

    /// The address of an offset in messages about rings.
    #[must_use]
    pub const fn user_addr(offset: u64) -> u64 {
        USER_ADDR + offset
    }

    /// All of it.
    #[must_use]
    pub const fn whole(&self) -> &GuestArea {
        &self.whole
    }

    /// Where a queue's rings begin.
    #[must_use]
    pub fn ring(&self, queue: u16) -> u64 {
        u64::from(queue) * RING_SPACE
    }

    /// Where a request lies.
    #[must_use]
    pub fn slot(&self, queue: u16, slot: u16) -> Slot {
        let at = self.queues * RING_SPACE + (u64::from(queue) * self.slots + u64::from(slot)) * SLOT_SPACE;
        Slot { header: at, range: at + 16, status: at + 32, table: at + 64, data: at + SLOT_HEAD }
    }

    /// A sector of a request's data.
    #[must_use]
    pub fn sector(&self, data: u64, index: u64) -> [u8; SECTOR] {
        self.whole.read((data + index * SECTOR as u64) as usize)
    }

    /// Changes a sector of a request's data.
    pub fn set_sector(&self, data: u64, index: u64, bytes: &[u8; SECTOR]) {
        self.whole.write((data + index * SECTOR as u64) as usize, bytes);
    }
}
