//! Registers of a device that are mapped into this process. Any context; stores do not wait.
//!
//! A load from a device whose link is down can stall the core for a long time, so a reactor only stores.
//!
//! The kernel removes the pages while the device's memory is disabled (during a reset, or after a removal), and raises SIGBUS
//! at the next access. The fault handler then maps anonymous memory over the whole mapping: [`DeviceMemory::is_lost`].

use crate::{MapError, Mapping, fault, mapping};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// Mapped registers of a device, accessed in units of 32 bits.
#[derive(Debug)]
pub struct DeviceMemory {
    base: NonNull<u8>,
    len: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// A mapping of a device's file; the guard is removed before the memory is unmapped.
    Device { guard: Option<fault::Guard> },
    /// Memory of this process, which belongs to a model of a device.
    Model { memory: Mapping },
}

// SAFETY: the memory belongs to the process, not to a thread, is accessed by volatile loads and stores only, and may be unmapped
// from any thread.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Maps `len` bytes from `offset` of a device's file on, for example of a VFIO device. Installs the fault handler.
    ///
    /// # Errors
    /// [`MapError::BadRange`] if the range is not of whole pages; [`MapError::Os`].
    pub fn map(device: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        let is_whole = |n: u64| n.is_multiple_of(crate::PAGE);
        let bytes = usize::try_from(len).ok().filter(|_| len > 0 && is_whole(offset) && is_whole(len));
        let len = bytes.ok_or(MapError::BadRange { offset, len })?;
        fault::install();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses, changes no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, device, offset)? };
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        // The device is lost as a whole: a page above all addresses makes the handler replace all of it.
        let span = fault::Span { base: base.as_ptr() as usize, len, page: 1 << 62 };
        Ok(Self { base, len, kind: Kind::Device { guard: Some(fault::watch(span)) } })
    }

    /// Maps registers that another process emulates: `len` bytes from `offset` of its memory file on. Only memfd, tmpfs and
    /// hugetlbfs files are accepted, as by [`Mapping::shared`]. Installs the fault handler.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn shared(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        mapping::check_range(file, offset, len)?;
        Self::map(file, offset, len)
    }

    /// Zeroed memory of this process in place of a device's.
    ///
    /// # Errors
    /// As [`Mapping::in_file`].
    pub fn of_model(len: u64) -> Result<Self, MapError> {
        let memory = Mapping::in_file(len)?;
        Ok(Self { base: memory.base(), len: memory.len() as usize, kind: Kind::Model { memory } })
    }

    /// The memory file of registers of a model, which another process can map.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            Kind::Model { memory } => memory.file(),
            Kind::Device { .. } => None,
        }
    }

    /// Length in bytes: whole pages.
    pub const fn len(&self) -> u64 {
        self.len as u64
    }

    /// Always `false`: registers have at least one page.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Whether an access failed: from then on, stores do nothing, and loads return all ones, as a removed PCI device does.
    pub fn is_lost(&self) -> bool {
        matches!(&self.kind, Kind::Device { guard: Some(guard) } if guard.is_poisoned())
    }

    /// Loads a register, little-endian.
    ///
    /// # Panics
    /// If `offset` is out of bounds or no multiple of 4.
    #[inline]
    pub fn load(&self, offset: u64) -> u32 {
        // SAFETY: `at` checked that the register is inside of the mapping, and aligned.
        let value = unsafe { self.at(offset).read_volatile() };
        // The failed load itself returns a zero of the anonymous memory.
        if self.is_lost() { u32::MAX } else { u32::from_le(value) }
    }

    /// Stores a register, little-endian. Earlier stores to the device and to memory become visible before it.
    ///
    /// # Panics
    /// As [`DeviceMemory::load`].
    #[inline]
    pub fn store(&self, offset: u64, value: u32) {
        // Entries of a queue are visible before the doorbell is. On x86 this emits no instruction.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        // SAFETY: as in `load`.
        unsafe { self.at(offset).write_volatile(value.to_le()) };
    }

    #[inline]
    fn at(&self, offset: u64) -> *mut u32 {
        let is_inside = offset.checked_add(4).is_some_and(|end| end <= self.len as u64);
        assert!(is_inside && offset.is_multiple_of(4), "no register at {offset:#x} of {:#x} bytes", self.len);
        self.base.as_ptr().wrapping_add(offset as usize).cast()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Kind::Device { guard } = &mut self.kind else { return };
        // Before other mappings can reuse the addresses.
        *guard = None;
        // SAFETY: only this value uses the mapping. Its pages are the device's, so unmapping frees no memory and is quick.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        // With too many mappings (ENOMEM) the pages stay mapped until the device is removed.
        let _ = unmapped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;

    #[test]
    fn registers_of_a_model_keep_their_values() {
        let registers = DeviceMemory::of_model(100).unwrap();
        assert_eq!(registers.len(), crate::PAGE);
        registers.store(4092, 0x0102_0304);
        assert_eq!((registers.load(4092), registers.load(0)), (0x0102_0304, 0));
        assert!(!registers.is_lost());
    }

    #[test]
    #[should_panic(expected = "no register at 0xffe")]
    fn a_register_outside_is_refused() {
        DeviceMemory::of_model(4096).unwrap().store(0xffe, 1);
    }

    #[test]
    fn a_lost_device_reads_all_ones_and_ignores_stores() {
        let file = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 20).unwrap();
        let registers = DeviceMemory::map(file.as_fd(), 4096, 512 << 10).unwrap();
        registers.store(8, 7);
        assert_eq!(registers.load(8), 7);
        ftruncate(&file, 0).unwrap();
        registers.store(300 << 10, 1);
        assert!(registers.is_lost());
        assert_eq!(registers.load(300 << 10), u32::MAX, "the stored value is not the device's");
        assert_eq!(registers.load(8), u32::MAX);
        registers.store(0, 5);

        ftruncate(&file, 1 << 20).unwrap();
        let again = DeviceMemory::map(file.as_fd(), 4096, 512 << 10).unwrap();
        again.store(8, 9);
        assert_eq!(again.load(8), 9, "a new mapping of a device that is back");
        assert!(DeviceMemory::map(file.as_fd(), 1, 4096).is_err());
        assert!(DeviceMemory::map(file.as_fd(), 0, 0).is_err());
    }
}
