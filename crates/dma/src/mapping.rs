//! Memory that this process mapped. Created and dropped in control context; used from any context.

use crate::budget::{Charge, Peer};
use crate::reclaim::{self, Keeper, Pages};
use crate::{copy, fault};
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// The reason for which memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The file's pages may not always be accessible (see [`Mapping::shared`]).
    #[error("guest memory must be a memfd, or a file on tmpfs or hugetlbfs (this is {0})")]
    NotMemory(&'static str),
    /// The file ends before the range does.
    #[error("the memory file has {size} bytes, but bytes {offset}..{end} of it were announced")]
    TooShort {
        /// Bytes in the file.
        size: u64,
        /// First byte announced.
        offset: u64,
        /// First byte after those announced.
        end: u64,
    },
    /// The range is empty, wraps, or does not start on a page of 4 KiB.
    #[error("not a range of whole pages: offset {offset:#x}, length {len:#x}")]
    BadRange {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The memory of all guests together would exceed the limit.
    #[error(
        "cannot map {len} more bytes of guests' memory: {mapped} bytes are mapped, and {max} is the limit; memory counts once for each controller (--guest-memory-total)"
    )]
    NoRoom {
        /// Requested bytes.
        len: u64,
        /// Mapped bytes.
        mapped: u64,
        /// The limit, in bytes, for a mapping of this size.
        max: u64,
    },
    /// There would be too many regions of guests' memory.
    #[error("the limit of {max} regions of guests' memory is reached (sysctl vm.max_map_count)")]
    TooMany {
        /// The limit of regions, for one of this size.
        max: u64,
    },
    /// The kernel reported an error.
    #[error("cannot map memory: {0}")]
    Os(#[from] rustix::io::Errno),
}

/// Mapped memory, readable and writable, until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// All mapped pages: whole pages of the file's own page size, which may be huge. `Some` until the mapping is dropped.
    pages: Option<Pages>,
    /// The memory file that this process created for the pages.
    file: Option<OwnedFd>,
}

// SAFETY: the memory belongs to the process, not to a thread, and is reached only through copies and
// atomics; `munmap` may be called from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed anonymous memory, `len` bytes rounded up to whole pages. The kernel allocates pages when they are first
    /// written.
    ///
    /// # Errors
    /// [`MapError::BadRange`] for a length of 0; [`MapError::Os`].
    pub fn anonymous(len: u64) -> Result<Self, MapError> {
        let rounded = len.checked_next_multiple_of(crate::PAGE).filter(|&n| n > 0);
        let len = rounded.ok_or(MapError::BadRange { offset: 0, len })? as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel chooses, changes no existing memory.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, Self::PROT, flags)? };
        Ok(Self::new(Pages::of_ours(base, len), 0, len))
    }

    /// As [`Mapping::anonymous`], in a memory file that this process can give to another process: [`Mapping::file`]. The file's
    /// size is sealed.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn in_file(len: u64) -> Result<Self, MapError> {
        let rounded = len.checked_next_multiple_of(crate::PAGE).filter(|&n| n > 0);
        let len = rounded.ok_or(MapError::BadRange { offset: 0, len })?;
        let file = memfd_create("aryk-dma", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (len, flags) = (len as usize, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, at an address that the kernel chooses, changes no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), len, Self::PROT, flags, &file, 0)? };
        let mut mapping = Self::new(Pages::of_ours(base, len), 0, len);
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// The file of memory that [`Mapping::in_file`] created; its first byte is the mapping's.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(OwnedFd::as_fd)
    }

    /// Maps `len` bytes from `offset` of a peer's memory file, shared with that peer.
    ///
    /// Only memfd, tmpfs and hugetlbfs files are accepted: a page of another file system's file (FUSE above all) may take
    /// as long as its server chooses, and would block a core in a page fault. The fault handler catches later truncation
    /// of a file: see [`Mapping::is_poisoned`].
    ///
    /// # Errors
    /// [`MapError`].
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        Self::shared_start(fd, offset, len, len)
    }

    /// As [`Mapping::shared`], but maps only the first `max` bytes.
    pub(crate) fn shared_start(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        max: u64,
    ) -> Result<Self, MapError> {
        let bad = MapError::BadRange { offset, len };
        let page = check_range(fd, offset, len)?;
        let len = len.min(max);
        // Front-ends announce ranges of hugetlbfs files that begin and end within a huge page (the PC's holes below 1
        // MiB), but only whole huge pages can be mapped and unmapped.
        let skip = offset % page;
        let all =
            (skip + len).checked_next_multiple_of(page).and_then(|n| usize::try_from(n).ok()).ok_or(bad)?;
        let charge = Charge::new(all as u64)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel chooses, changes no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), all, Self::PROT, flags, fd, offset - skip)? };
        let fault = fault::watch(fault::Span { base: base as usize, len: all, page: page as usize });
        let pages = Pages::of_file(base, all, fault, charge);
        Ok(Self::new(pages, skip as usize, len as usize))
    }

    /// Makes `peer` wait until this mapping is unmapped before it may announce much more memory.
    #[must_use]
    pub fn given_by(mut self, peer: &Peer) -> Self {
        if let Some(pages) = &mut self.pages {
            pages.peer = Some(peer.clone());
        }
        self
    }

    /// Makes `keeper` decide when the pages are unmapped after the mapping was dropped. A mapping has one keeper, the first.
    /// Returns whether `keeper` was set.
    pub fn set_keeper(&self, keeper: Arc<dyn Keeper>) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.keeper.set(keeper).is_ok())
    }

    /// Whether the mapping has a keeper.
    pub fn has_keeper(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.keeper.get().is_some())
    }

    const PROT: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    fn new(pages: Pages, skip: usize, len: usize) -> Self {
        reclaim::prepare();
        let base = pages.base.cast::<u8>().wrapping_add(skip);
        let base = NonNull::new(base).expect("the kernel maps nothing at address 0");
        assert!(len > 0 && skip + len <= pages.len(), "{skip}+{len} of {} mapped bytes", pages.len());
        Self { base, len, pages: Some(pages), file: None }
    }

    /// Bytes of the pages that the memory consists of: [`crate::PAGE`], or more for a file of huge pages.
    pub fn page_size(&self) -> u64 {
        self.fault().map_or(crate::PAGE, fault::Guard::page)
    }

    fn fault(&self) -> Option<&fault::Guard> {
        self.pages.as_ref()?.fault.as_ref()
    }

    /// Address of the first byte.
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len as u64
    }

    /// Always `false`: a mapping has at least one page.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Zeroes `len` bytes from `offset`, and returns the whole pages among them to the kernel. Only for anonymous memory.
    ///
    /// # Panics
    /// If the mapping does not contain all of them, or the memory is in a file.
    pub fn zero(&self, offset: u64, len: u64) {
        assert!(self.fault().is_none() && self.file.is_none(), "dropped pages of a file keep their content");
        let end = offset.checked_add(len).filter(|&end| end <= self.len());
        let end = end.unwrap_or_else(|| panic!("{offset}+{len} of {}", self.len()));
        let pages_start = offset.next_multiple_of(crate::PAGE);
        let pages_end = end / crate::PAGE * crate::PAGE;
        if pages_start >= pages_end {
            self.fill_zero(offset, end);
            return;
        }
        self.fill_zero(offset, pages_start);
        let base = self.base.as_ptr().wrapping_add(pages_start as usize);
        // SAFETY: the range is inside of this mapping, into which no references exist; the mapping is private and
        // anonymous, so that the kernel supplies zeroes from now on.
        let given =
            unsafe { madvise(base.cast(), (pages_end - pages_start) as usize, Advice::LinuxDontNeed) };
        if given.is_err() {
            // Locked pages cannot be returned to the kernel.
            self.fill_zero(pages_start, pages_end);
        }
        self.fill_zero(pages_end, end);
    }

    fn fill_zero(&self, start: u64, end: u64) {
        let base = self.base.as_ptr().wrapping_add(start as usize);
        // SAFETY: the caller checked that the range is inside of the mapping.
        unsafe { copy::fill(base, 0, (end - start) as usize) };
    }

    /// Prefetches the cache lines that a copy of `len` bytes from `offset` on would read first. Only a hint: useful for
    /// the next request while the current one is copied.
    pub fn prefetch(&self, offset: u64, len: u32) {
        if offset < self.len() {
            copy::prefetch(self.base.as_ptr().wrapping_add(offset as usize), len as usize);
        }
    }

    /// Takes the memory of a peer's file away from the users of this mapping: they read and write private anonymous memory from
    /// now on, at the same addresses, which stay in use until the mapping is dropped. Only for users that access the memory by
    /// these addresses: the kernel and devices may have the file's pages themselves. Takes long for much memory.
    ///
    /// # Errors
    /// The kernel has no more mappings; then a part of the memory may be replaced, and the caller may try again.
    pub fn revoke(&self) -> Result<(), MapError> {
        self.pages.as_ref().map_or(Ok(()), |pages| Ok(pages.revoke()?))
    }

    /// Whether the file was truncated and an access has hit the hole. The memory is still readable and writable, but the
    /// content of the hole is lost, and no longer shared: end the session of this mapping.
    pub fn is_poisoned(&self) -> bool {
        self.fault().is_some_and(fault::Guard::is_poisoned)
    }

    /// Makes the kernel allocate the pages of `len` bytes from `offset`, so that the first access need not wait. This call
    /// itself waits, and the owner of the file can make it wait long. A hint only: a page that cannot be allocated now is
    /// allocated, or fails, at its first access.
    pub fn populate(&self, offset: u64, len: u64) {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len() && len > 0) else { return };
        let first = (self.base.as_ptr() as usize + offset as usize) & !(crate::PAGE as usize - 1);
        let last = self.base.as_ptr() as usize + end as usize;
        // SAFETY: whole pages of this mapping, whose content stays unchanged.
        let _ = unsafe {
            madvise(
                first as *mut std::ffi::c_void,
                last.next_multiple_of(crate::PAGE as usize) - first,
                Advice::LinuxPopulateWrite,
            )
        };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            reclaim::unmap(pages);
        }
    }
}

/// Checks that a file is of memory, and contains the range; returns its page size.
pub(crate) fn check_range(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, MapError> {
    let bad = MapError::BadRange { offset, len };
    let Some(end) = offset.checked_add(len).filter(|_| len > 0) else { return Err(bad) };
    if !offset.is_multiple_of(crate::PAGE) {
        return Err(bad);
    }
    let (file_len, page) = check_file(fd)?;
    if end > file_len {
        return Err(MapError::TooShort { size: file_len, offset, end });
    }
    Ok(page)
}

/// The file's length and its page size, if its pages are always accessible.
fn check_file(fd: BorrowedFd<'_>) -> Result<(u64, u64), MapError> {
    // Linux's include/uapi/linux/magic.h. A memfd is a file of tmpfs, or of hugetlbfs with MFD_HUGETLB.
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
    let stat = rustix::fs::fstat(fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MapError::NotMemory("not a regular file"));
    }
    let statfs = rustix::fs::fstatfs(fd)?;
    let page = match statfs.f_type {
        TMPFS_MAGIC => crate::PAGE,
        HUGETLBFS_MAGIC => statfs.f_bsize.cast_unsigned(),
        _ => return Err(MapError::NotMemory("a file of another file system")),
    };
    Ok((stat.st_size.cast_unsigned(), page))
}

#[cfg(test)]
mod tests;
