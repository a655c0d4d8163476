//! The guest's memory: a memfd that the back-end maps too. Any context.

use crate::Error;
use aryk_dma::{GuestArea, Mapping, MemTable, Region, TableError};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Bytes of a huge page.
pub const HUGE_PAGE: u64 = 2 << 20;

/// The memory's guest physical address.
const GUEST_ADDR: u64 = 0x1000_0000;
/// The memory's user address in vhost-user messages. The front-end maps nothing there.
const USER_ADDR: u64 = 0x7f12_3000_0000;

/// A guest's memory. Places in it are offsets.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    whole: GuestArea,
}

impl Memory {
    /// Allocates `len` bytes of zeroes, rounded up to whole pages.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub fn new(len: u64) -> Result<Self, Error> {
        Self::create(len.next_multiple_of(aryk_dma::PAGE), MemfdFlags::empty())
    }

    /// As [`Memory::new`], of pages of [`HUGE_PAGE`] bytes, which the host must have reserved.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub fn of_huge_pages(len: u64) -> Result<Self, Error> {
        Self::create(len.next_multiple_of(HUGE_PAGE), MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
    }

    fn create(len: u64, pages: MemfdFlags) -> Result<Self, Error> {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC | pages).map_err(Error::os("memfd_create"))?;
        ftruncate(&fd, len).map_err(Error::os("ftruncate"))?;
        let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, len)?);
        let whole = GuestArea::new(&mapping, 0, len).expect("the whole mapping is inside the mapping");
        Ok(Self { fd, mapping, whole })
    }

    /// The memfd.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Guest address, length, user address and offset in the file, in the order of vhost-user's memory region
    /// messages.
    #[must_use]
    pub const fn region(&self) -> [u64; 4] {
        [GUEST_ADDR, self.whole.len(), USER_ADDR, 0]
    }

    /// The guest address of an offset, as the device uses it in descriptors.
    #[must_use]
    pub const fn guest_addr(offset: u64) -> u64 {
        GUEST_ADDR + offset
    }

    /// The user address of an offset, as vhost-user messages about rings use it.
    #[must_use]
    pub const fn user_addr(offset: u64) -> u64 {
        USER_ADDR + offset
    }

    /// The whole memory.
    #[must_use]
    pub const fn whole(&self) -> &GuestArea {
        &self.whole
    }

    /// Returns the whole pages of a range to the host's kernel, as a VMM does with what a balloon or free page reporting
    /// returns. The next access, by any process, allocates other pages, which are zeroes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn discard(&self, at: u64, len: u64) -> Result<(), Error> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.fd, flags, at, len).map_err(Error::os("fallocate"))
    }

    /// The memory as a memory table, for a device in this process.
    ///
    /// # Errors
    /// The memory cannot be one region of a guest.
    pub fn table(&self) -> Result<MemTable, TableError> {
        let [guest_addr, len, user_addr, offset] = self.region();
        let mapping = Arc::clone(&self.mapping);
        MemTable::new(vec![Region { guest_addr, user_addr, len, offset, mapping }])
    }
}
