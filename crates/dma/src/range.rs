//! Memory that a device may access: the argument of a DMA mapping. Any context.

use crate::{GuestArea, Mapping, PAGE};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

/// A part of a [`Mapping`] that a device may access. The range does not keep the memory mapped: its owner unmaps it from the
/// device before dropping the mapping.
///
/// A device uses the address of the range. A model of a device copies by [`DmaRange::read`] and [`DmaRange::write`], or through
/// [`DmaRange::pin`], which keeps the memory mapped for several accesses.
#[derive(Clone, Debug)]
pub struct DmaRange {
    address: u64,
    offset: u64,
    len: u64,
    mapping: Weak<Mapping>,
}

impl Mapping {
    /// The `len` bytes from `offset` on, as memory for a device; `None` if the mapping does not contain all of them, or `len` is
    /// 0.
    pub fn dma_range(self: &Arc<Self>, offset: u64, len: u64) -> Option<DmaRange> {
        let end = offset.checked_add(len).filter(|_| len > 0)?;
        let address = self.base().as_ptr() as u64 + offset;
        (end <= self.len()).then(|| DmaRange { address, offset, len, mapping: Arc::downgrade(self) })
    }
}

impl Mapping {
    /// All pages of the mapping, to the end of the last one, as memory for a device: what a device is to access must be whole
    /// pages.
    pub fn dma_pages(self: &Arc<Self>) -> DmaRange {
        let len = self.len().next_multiple_of(PAGE);
        DmaRange { address: self.base().as_ptr() as u64, offset: 0, len, mapping: Arc::downgrade(self) }
    }
}

impl DmaRange {
    /// Bytes of the pages that the memory consists of, which are huge for a file of hugetlbfs; `None` once the mapping was
    /// dropped.
    pub fn page_size(&self) -> Option<u64> {
        Some(self.mapping.upgrade()?.page_size())
    }

    /// Address of the first byte in this process.
    pub const fn addr(&self) -> u64 {
        self.address
    }

    /// Length in bytes; at least 1.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Always `false`: a range has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Whether both ranges are the same bytes of the same mapping.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.offset, self.len) == (other.offset, other.len) && self.mapping.ptr_eq(&other.mapping)
    }

    /// Keeps the memory mapped, for several accesses; `None` once the mapping was dropped.
    pub fn pin(&self) -> Option<DmaPin> {
        GuestArea::new(&self.mapping.upgrade()?, self.offset, self.len).map(DmaPin)
    }

    /// As [`DmaPin::read`]; also returns `false` if the mapping was dropped.
    #[must_use]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        self.pin().is_some_and(|pin| pin.read(offset, out))
    }

    /// As [`DmaPin::write`]; also returns `false` if the mapping was dropped.
    #[must_use]
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.pin().is_some_and(|pin| pin.write(offset, data))
    }

    /// Calls `use_file` with the memory's file and the range's offset in it, and returns the result. A peer that receives the
    /// file can map it. Returns `None` if this process did not create the memory in a file (see [`Mapping::in_file`]), or the
    /// mapping was dropped.
    pub fn with_file<T>(&self, use_file: impl FnOnce(BorrowedFd<'_>, u64) -> T) -> Option<T> {
        let mapping = self.mapping.upgrade()?;
        let file = mapping.file()?;
        Some(use_file(file, self.offset))
    }
}

/// The bytes of a [`DmaRange`], which stay mapped while this value lives.
#[derive(Clone, Debug)]
pub struct DmaPin(GuestArea);

impl DmaPin {
    /// Length in bytes; at least 1.
    pub const fn len(&self) -> u64 {
        self.0.len()
    }

    /// Always `false`: a range has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Copies bytes from `offset` of the range on, and reads each of them once. Returns `false`, without a copy, if the range
    /// does not contain all of them. Later reads of this thread see at least what was written before these bytes.
    #[must_use]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let is_inside = self.contains(offset, out.len());
        if is_inside {
            self.0.read_bytes(offset as usize, out);
            fence(Ordering::Acquire);
        }
        is_inside
    }

    /// Copies bytes to `offset` of the range. Returns `false`, without a copy, if the range does not contain all of them. Other
    /// threads that see these bytes also see what this thread wrote before.
    #[must_use]
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        let is_inside = self.contains(offset, data.len());
        if is_inside {
            fence(Ordering::Release);
            self.0.write_bytes(offset as usize, data);
        }
        is_inside
    }

    fn contains(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_inside_of_its_mapping_and_ends_with_it() {
        let mapping = Arc::new(Mapping::anonymous(8192).unwrap());
        for (offset, len) in [(0, 0), (0, 8193), (8192, 1), (u64::MAX, 2), (4096, 4097)] {
            assert!(mapping.dma_range(offset, len).is_none(), "{offset}+{len}");
        }
        let range = mapping.dma_range(4096, 4096).unwrap();
        assert_eq!(range.addr(), mapping.base().as_ptr() as u64 + 4096);
        assert_eq!(range.len(), 4096);
        assert!(range.write(4094, &[1, 2]));
        let mut out = [0; 2];
        assert!(mapping.dma_range(0, 8192).unwrap().read(8190, &mut out));
        assert_eq!(out, [1, 2]);
        for offset in [4095, 4096, u64::MAX] {
            assert!(!range.write(offset, &[1, 2]), "{offset}");
            assert!(!range.read(offset, &mut out), "{offset}");
        }
        assert!(range.is_same(&mapping.dma_range(4096, 4096).unwrap()));
        assert!(!range.is_same(&mapping.dma_range(0, 4096).unwrap()));

        let pin = range.pin().unwrap();
        drop(mapping);
        assert!(pin.read(4094, &mut out) && range.read(4094, &mut out), "the pin keeps the memory mapped");
        drop(pin);
        assert!(!range.write(0, &[1]) && !range.read(0, &mut out));
        assert!(range.pin().is_none());
    }

    #[test]
    fn memory_in_a_file_is_shared_with_the_holder_of_the_file() {
        let mapping = Arc::new(Mapping::in_file(8192).unwrap());
        let range = mapping.dma_range(4096, 4096).unwrap();
        let other = range.with_file(|file, offset| Mapping::shared(file, offset, 4096).unwrap()).unwrap();
        assert!(range.write(7, b"here"));
        let mut out = [0; 4];
        assert!(Arc::new(other).dma_range(0, 4096).unwrap().read(7, &mut out));
        assert_eq!(&out, b"here");
        let anonymous = Arc::new(Mapping::anonymous(4096).unwrap());
        assert!(anonymous.dma_range(0, 4096).unwrap().with_file(|_, _| ()).is_none());
    }
}
