//! The guest's memory: where things lie in it, and access to them. Test tool, the front-end's thread.

use aryk_dma::GuestArea;
use aryk_front_end::{Error, Memory as Guest};

use crate::content::SECTOR;

/// Bytes for each queue's rings.
const RING_SPACE: u64 = 64 << 10;
/// Bytes of a request's header, range, status and indirect table.
const SLOT_HEAD: u64 = 1024;
/// Bytes of data in the longest request.
pub const DATA_MAX: u64 = 32 << 10;
const SLOT_SPACE: u64 = SLOT_HEAD + DATA_MAX;

/// Memory of a guest.
#[derive(Debug)]
pub struct Memory {
    guest: Guest,
    queues: u64,
    slots: u64,
}

/// Where the parts of one request lie, as offsets into the memory.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// 64 bytes: a block device's kind and sector, or a SCSI host's request.
    pub header: u64,
    /// 64 bytes: the range of a discard or write-zeroes.
    pub range: u64,
    /// 128 bytes: a block device's status, or a SCSI host's answer.
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
    pub fn new(queues: u16, slots: u16) -> Result<Self, Error> {
        let (queues, slots) = (u64::from(queues), u64::from(slots));
        let guest = Guest::new(queues * (RING_SPACE + slots * SLOT_SPACE))?;
        Ok(Self { guest, queues, slots })
    }

    /// As the back-end is given it.
    #[must_use]
    pub const fn guest(&self) -> &Guest {
        &self.guest
    }

    /// All of it.
    #[must_use]
    pub const fn whole(&self) -> &GuestArea {
        self.guest.whole()
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
        Slot { header: at, range: at + 64, status: at + 128, table: at + 256, data: at + SLOT_HEAD }
    }

    /// A sector of a request's data.
    #[must_use]
    pub fn sector(&self, data: u64, index: u64) -> [u8; SECTOR] {
        self.whole().read((data + index * SECTOR as u64) as usize)
    }

    /// Changes a sector of a request's data.
    pub fn set_sector(&self, data: u64, index: u64, bytes: &[u8; SECTOR]) {
        self.whole().write((data + index * SECTOR as u64) as usize, bytes);
    }
}
