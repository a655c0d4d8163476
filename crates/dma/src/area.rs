//! A contiguous piece of guest memory with bounds-checked, atomic access: a part of a virtqueue.
//! Used in reactor context.

use crate::{Mapping, copy};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// `len` bytes of one mapping, which it keeps mapped.
///
/// Every access is checked against the length: an index out of range is a bug of this process, and panics; callers mask
/// or check indices from a guest first.
#[derive(Clone, Debug)]
pub struct GuestArea {
    base: NonNull<u8>,
    len: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: it points into its mapping, which is `Send` and `Sync`, and access is by copies and atomics.
unsafe impl Send for GuestArea {}

impl GuestArea {
    /// The `len` bytes from `offset` of `mapping` on; `None` if the mapping does not contain all of them.
    pub fn new(mapping: &Arc<Mapping>, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        if end > mapping.len() {
            return None;
        }
        // SAFETY: `offset` is within the mapping, or one past its end.
        let base = unsafe { mapping.base().add(offset as usize) };
        Some(Self { base, len: len as usize, mapping: Arc::clone(mapping) })
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether the length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the area starts at a multiple of `align`, a power of two.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.base.as_ptr() as usize & (align - 1) == 0
    }

    /// Whether the memory of its mapping was lost; see [`Mapping::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    /// The mapping that contains the area.
    pub(crate) const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The local address of `len` bytes from `offset`; `None` if the area does not contain all of them.
    pub(crate) fn start_of(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: `offset` is within the area, or one past its end.
        is_inside.then(|| unsafe { self.base.add(offset) })
    }

    /// Makes the kernel allocate the area's pages now; see [`Mapping::populate`].
    pub fn populate(&self) {
        let offset = self.base.as_ptr() as usize - self.mapping.base().as_ptr() as usize;
        self.mapping.populate(offset as u64, self.len());
    }

    /// Copies a value out: each byte is read once.
    #[inline]
    pub fn read<T: FromBytes>(&self, offset: usize) -> T {
        let src = self.at(offset, size_of::<T>());
        // SAFETY: `at` checked that the bytes are inside of the mapping.
        unsafe { copy::read_once(src) }
    }

    /// Copies a value into the area.
    #[inline]
    pub fn write<T: IntoBytes + zerocopy::Immutable>(&self, offset: usize, value: &T) {
        let dst = self.at(offset, size_of::<T>());
        // SAFETY: `at` checked the destination; the source is a `T` of ours.
        unsafe { copy::to_shared(dst, value.as_bytes().as_ptr(), size_of::<T>()) };
    }

    /// Copies bytes out of the area.
    ///
    /// # Panics
    /// If the area does not contain all of them.
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) {
        let src = self.at(offset, out.len());
        // SAFETY: `at` checked the source; the destination is ours.
        unsafe { copy::from_shared(out.as_mut_ptr(), src, out.len()) };
    }

    /// Copies bytes into the area.
    ///
    /// # Panics
    /// As [`GuestArea::read_bytes`].
    pub fn write_bytes(&self, offset: usize, data: &[u8]) {
        let dst = self.at(offset, data.len());
        // SAFETY: `at` checked the destination; the source is ours.
        unsafe { copy::to_shared(dst, data.as_ptr(), data.len()) };
    }

    /// Loads a little-endian 16-bit integer.
    ///
    /// # Panics
    /// If `offset` is out of bounds or the address is odd.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.atomic_u16(offset).load(order))
    }

    /// Stores a little-endian 16-bit integer.
    ///
    /// # Panics
    /// As [`GuestArea::load_u16`].
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        self.atomic_u16(offset).store(value.to_le(), order);
    }

    /// Loads a little-endian 64-bit integer in a single access.
    ///
    /// # Panics
    /// If `offset` is out of bounds or the address is no multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        u64::from_le(self.atomic_u64(offset).load(Ordering::Acquire))
    }

    /// Stores a little-endian 64-bit integer in a single access.
    ///
    /// # Panics
    /// As [`GuestArea::load_u64`].
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.atomic_u64(offset).store(value.to_le(), Ordering::Release);
    }

    #[inline]
    fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        let ptr = self.at(offset, 8).cast::<u64>();
        assert!(ptr.is_aligned(), "64-bit fields lie on multiples of 8");
        // SAFETY: in bounds and aligned; others may change it at any time, as an atomic allows.
        unsafe { AtomicU64::from_ptr(ptr) }
    }

    #[inline]
    fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        let ptr = self.at(offset, 2).cast::<u16>();
        assert!(ptr.is_aligned(), "16-bit ring fields lie on even addresses");
        // SAFETY: in bounds and aligned; the guest may change it at any time, as an atomic allows.
        unsafe { AtomicU16::from_ptr(ptr) }
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            outside(offset, len, self.len);
        }
        // SAFETY: checked above.
        unsafe { self.base.add(offset) }.as_ptr()
    }
}

/// A separate function, so that the checks on the hot path are a compare and a branch.
#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize, of: usize) -> ! {
    panic!("{offset}+{len} is outside of an area of {of} bytes");
}
