//! Values in guest memory: of one type, side by side, as the entries of a virtqueue's rings; and 16-bit integers, as the rings'
//! indices. Used in reactor context.

use crate::{GuestArea, Mapping, copy};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `len` values of type `T` in one mapping, which the array keeps mapped.
///
/// [`GuestArray::new`] checks once what never changes: all values are inside of the mapping, and aligned. An access then checks
/// only its index, which a queue must check anyway if the guest chose the index; an index of the queue itself wraps around.
#[derive(Debug)]
pub struct GuestArray<T> {
    base: NonNull<T>,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: it points into its mapping, which is `Send` and `Sync`; access is by copies and atomics of plain bytes.
unsafe impl<T> Send for GuestArray<T> {}

impl<T> GuestArray<T> {
    /// `len` values from `offset` of `area`; `None` if there are none, if they are not all inside, or if the first is not
    /// aligned for a `T`.
    pub fn new(area: &GuestArea, offset: usize, len: usize) -> Option<Self> {
        let bytes = size_of::<T>().checked_mul(NonZeroUsize::new(len)?.get())?;
        let base = area.start_of(offset, bytes)?.cast::<T>();
        base.is_aligned().then(|| Self { base, len, _mapping: Arc::clone(area.mapping()) })
    }

    /// Prefetches the cache line of a value. An index that is out of range prefetches another line, which does no harm.
    #[inline]
    pub fn prefetch(&self, index: usize) {
        copy::prefetch(self.base.as_ptr().wrapping_add(index).cast(), 1);
    }

    /// The address of a value; `None` if the index is out of range.
    #[inline]
    fn at(&self, index: usize) -> Option<*mut T> {
        // SAFETY: `new` checked that `len` values lie in the mapping.
        (index < self.len).then(|| unsafe { self.base.add(index) }.as_ptr())
    }

    /// The address of the value at `index` modulo the length, if the length is a power of two; of another value otherwise.
    #[inline]
    fn at_wrapped(&self, index: u16) -> *mut T {
        // No check: there is at least one value, and `len - 1` with some bits cleared is below `len`.
        let index = usize::from(index) & (self.len - 1);
        // SAFETY: `new` checked that `len` values, at least one, lie in the mapping.
        unsafe { self.base.add(index) }.as_ptr()
    }
}

impl<T: FromBytes> GuestArray<T> {
    /// Copies a value out: each byte is read once. `None` if the index is out of range.
    #[inline]
    pub fn read(&self, index: usize) -> Option<T> {
        // SAFETY: the value lies in the mapping.
        self.at(index).map(|place| unsafe { copy::read_once(place.cast()) })
    }
}

impl<T: IntoBytes + Immutable> GuestArray<T> {
    /// Copies a value into the place at `index` modulo the length, which is a power of two.
    #[inline]
    pub fn write_wrapped(&self, index: u16, value: &T) {
        let place = self.at_wrapped(index);
        // SAFETY: the place lies in the mapping; the source is a `T` of ours.
        unsafe { copy::to_shared(place.cast(), value.as_bytes().as_ptr(), size_of::<T>()) };
    }
}

impl GuestArray<u16> {
    /// Loads the little-endian 16-bit integer at `index` modulo the length, which is a power of two, in no order with other
    /// accesses.
    #[inline]
    pub fn load_wrapped(&self, index: u16) -> u16 {
        // SAFETY: in the mapping, and aligned as `new` checked; the guest may change it at any time, as an atomic allows.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.at_wrapped(index)) }.load(Ordering::Relaxed))
    }
}

/// A little-endian 16-bit integer in one mapping, which it keeps mapped.
///
/// [`GuestU16::new`] checks its place once, so that an access needs no check.
#[derive(Debug)]
pub struct GuestU16 {
    at: NonNull<u16>,
    _mapping: Arc<Mapping>,
}

// SAFETY: it points into its mapping, which is `Send` and `Sync`; access is by atomics.
unsafe impl Send for GuestU16 {}

impl GuestU16 {
    /// The integer at `offset` of `area`; `None` if it is not inside, or if its address is odd.
    pub fn new(area: &GuestArea, offset: usize) -> Option<Self> {
        let at = area.start_of(offset, size_of::<u16>())?.cast::<u16>();
        at.is_aligned().then(|| Self { at, _mapping: Arc::clone(area.mapping()) })
    }

    /// Loads the integer.
    #[inline]
    pub fn load(&self, order: Ordering) -> u16 {
        u16::from_le(self.atomic().load(order))
    }

    /// Stores the integer.
    #[inline]
    pub fn store(&self, value: u16, order: Ordering) {
        self.atomic().store(value.to_le(), order);
    }

    #[inline]
    fn atomic(&self) -> &AtomicU16 {
        // SAFETY: in the mapping, and aligned, as `new` checked; the guest may change it at any time, as an atomic allows.
        unsafe { AtomicU16::from_ptr(self.at.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_lies_inside_of_its_area_and_is_aligned() {
        let area = area();
        assert!(GuestU16::new(&area, 63).is_none(), "odd, and it ends behind the area");
        assert!(GuestU16::new(&area, 61).is_none(), "odd");
        assert!(GuestU16::new(&area, 64).is_none() && GuestU16::new(&area, usize::MAX - 1).is_none());
        let last = GuestU16::new(&area, 62).unwrap();
        last.store(0x0201, Ordering::Release);
        assert_eq!((area.read::<[u8; 2]>(62), area.read::<[u8; 2]>(60)), ([1, 2], [0, 0]));
        area.write(62, &[3_u8, 4]);
        assert_eq!(last.load(Ordering::Acquire), 0x0403);
    }

    fn area() -> GuestArea {
        GuestArea::new(&Arc::new(Mapping::anonymous(crate::PAGE).unwrap()), 0, 64).unwrap()
    }

    #[test]
    fn an_array_lies_inside_of_its_area_and_is_aligned() {
        let area = area();
        assert!(
            GuestArray::<u64>::new(&area, 0, 8).is_some() && GuestArray::<u64>::new(&area, 56, 1).is_some()
        );
        assert!(GuestArray::<u64>::new(&area, 0, 9).is_none(), "too long");
        assert!(GuestArray::<u64>::new(&area, 64, 1).is_none(), "behind the end");
        assert!(GuestArray::<u64>::new(&area, 4, 1).is_none(), "unaligned");
        assert!(GuestArray::<u64>::new(&area, 0, usize::MAX / 4).is_none(), "the length wraps");
        assert!(GuestArray::<u64>::new(&area, usize::MAX - 7, 1).is_none(), "the end wraps");
    }

    #[test]
    fn values_are_read_and_written_in_their_places() {
        let area = area();
        let (words, halves) =
            (GuestArray::<u32>::new(&area, 8, 4).unwrap(), GuestArray::<u16>::new(&area, 8, 8).unwrap());
        words.write_wrapped(5, &0x0403_0201);
        words.write_wrapped(3, &0xffff_fffe);
        assert_eq!(area.read::<[u8; 4]>(12), [1, 2, 3, 4]);
        assert_eq!(
            (words.read(1), words.read(3), words.read(4), words.read(usize::MAX)),
            (Some(0x0403_0201), Some(0xffff_fffe), None, None)
        );
        let loaded = [2, 3 + 8, 0xffff].map(|index| halves.load_wrapped(index));
        assert_eq!(loaded, [0x0201, 0x0403, 0xffff]);
        words.prefetch(1 << 40);
    }

    #[test]
    fn no_index_leaves_an_array_of_any_length() {
        let area = area();
        area.write(0, &[7_u8; 64]);
        for len in 1..=8 {
            let words = GuestArray::<u32>::new(&area, 8, len).unwrap();
            (0..=u16::MAX).for_each(|index| words.write_wrapped(index, &0));
            assert_eq!(area.read::<[u8; 8]>(0), [7; 8], "{len}");
            assert_eq!(area.read::<[u8; 8]>(8 + 4 * len), [7; 8], "{len}");
        }
        assert!(GuestArray::<u32>::new(&area, 8, 0).is_none(), "no value would be inside");
    }
}
