//! The guest's memory: a memfd that the back end maps too. Any context.

use crate::Error;
use aryk_dma::{GuestArea, Mapping, MemTable, Region, TableError};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Where the memory begins for the guest.
const GUEST_ADDR: u64 = 0x1000_0000;
/// Where it would be in the front-end's process; only ever an argument of messages.
const USER_ADDR: u64 = 0x7f12_3000_0000;

/// Memory of a guest. Places in it are named by offset.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    whole: GuestArea,
}

impl Memory {
    /// Zeroes, `len` bytes rounded up to whole pages.
    ///
    /// # Errors
    /// The kernel gives none.
    pub fn new(len: u64) -> Result<Self, Error> {
        let len = len.next_multiple_of(aryk_dma::PAGE);
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).map_err(Error::os("memfd_create"))?;
        ftruncate(&fd, len).map_err(Error::os("ftruncate"))?;
        let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, len)?);
        let whole = GuestArea::new(&mapping, 0, len).expect("the whole is inside");
        Ok(Self { fd, mapping, whole })
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

    /// As a device within this process sees it.
    ///
    /// # Errors
    /// It cannot be one region of a guest.
    pub fn table(&self) -> Result<MemTable, TableError> {
        let [guest_addr, len, user_addr, offset] = self.region();
        let mapping = Arc::clone(&self.mapping);
        MemTable::new(vec![Region { guest_addr, user_addr, len, offset, mapping }])
    }
}
