//! The layout of the guest's memory, and access to it. Test tool, the front-end's thread.

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

/// Offsets of the parts of one request in the memory.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// 64 bytes: a block device's request type and sector, or a SCSI host's request.
    pub header: u64,
    /// 64 bytes: the range of a discard or write-zeroes.
    pub range: u64,
    /// 128 bytes: a block device's status, or a SCSI host's response.
    pub status: u64,
    /// Descriptors, 16 bytes each.
    pub table: u64,
    /// [`DATA_MAX`] bytes.
    pub data: u64,
}

impl Memory {
    /// Allocates memory for `queues` rings with `slots` requests each.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub fn new(queues: u16, slots: u16) -> Result<Self, Error> {
        let (queues, slots) = (u64::from(queues), u64::from(slots));
        let guest = Guest::new(queues * (RING_SPACE + slots * SLOT_SPACE))?;
        Ok(Self { guest, queues, slots })
    }

    /// The memory that is shared with the back-end.
    #[must_use]
    pub const fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The whole memory.
    #[must_use]
    pub const fn whole(&self) -> &GuestArea {
        self.guest.whole()
    }

    /// The offset of a queue's rings.
    #[must_use]
    pub fn ring(&self, queue: u16) -> u64 {
        u64::from(queue) * RING_SPACE
    }

    /// The offsets of a request's parts.
    #[must_use]
    pub fn slot(&self, queue: u16, slot: u16) -> Slot {
        let at = self.queues * RING_SPACE + (u64::from(queue) * self.slots + u64::from(slot)) * SLOT_SPACE;
        Slot { header: at, range: at + 64, status: at + 128, table: at + 256, data: at + SLOT_HEAD }
    }

    /// Reads a sector of a request's data.
    #[must_use]
    pub fn sector(&self, data: u64, index: u64) -> [u8; SECTOR] {
        self.whole().read((data + index * SECTOR as u64) as usize)
    }

    /// Writes a sector of a request's data.
    pub fn set_sector(&self, data: u64, index: u64, bytes: &[u8; SECTOR]) {
        self.whole().write((data + index * SECTOR as u64) as usize, bytes);
    }
}
