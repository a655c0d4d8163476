//! Scatter lists: the memory of a request's data. Used in reactor context, and by the threads that execute a reactor's
//! blocking calls.

use crate::{Mapping, copy};
use zerocopy::{Immutable, IntoBytes};

/// A store of at least this many bytes does not fit into the cache beside other data: writes to it use non-temporal stores.
const STREAMED_STORE_MIN: u64 = 32 << 20;

/// For shorter pieces, the fence after non-temporal stores costs more than they save.
const STREAMED_LEN_MIN: usize = 4096;

/// A contiguous piece of memory, with the layout of the kernel's `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Seg {
    base: *mut u8,
    len: usize,
}

const _: () = assert!(size_of::<Seg>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<Seg>() == align_of::<libc::iovec>());

impl Seg {
    pub(crate) const fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// Address of the first byte.
    pub const fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A view of `len` bytes of a list of segments, starting `skip` bytes into it.
///
/// Borrows the list without a lifetime: see the crate's invariant. An empty view is always valid.
#[derive(Clone, Copy, Debug)]
pub struct Sgl {
    segs: *const Seg,
    count: u32,
    skip: u32,
    len: u32,
}

// SAFETY: the segments name memory of the process, which the request's owner keeps in place until the
// request completes, whichever thread works on it; access to it is by copies only.
unsafe impl Send for Sgl {}

impl Sgl {
    /// An empty view, for requests without data.
    pub const EMPTY: Self = Self { segs: std::ptr::null(), count: 0, skip: 0, len: 0 };

    /// A view of all of `segs`, whose lengths sum up to `len`.
    ///
    /// # Safety
    /// `segs`, and the memory that they name, stay in place until the request that carries the view
    /// completes.
    pub(crate) unsafe fn new(segs: &[Seg], len: u32) -> Self {
        debug_assert_eq!(segs.iter().map(Seg::len).sum::<usize>(), len as usize);
        Self { segs: segs.as_ptr(), count: segs.len() as u32, skip: 0, len }
    }

    /// Length of the view in bytes.
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether the length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Upper bound of the number of the view's pieces. Counts segments beyond the view's end too.
    pub const fn segments(&self) -> u32 {
        self.count
    }

    /// The view of `len` bytes from `offset`, without unneeded segments in front.
    ///
    /// # Panics
    /// If this view is shorter than that.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: u32, len: u32) -> Self {
        let end = offset.checked_add(len).expect("a slice's end is a u32");
        assert!(end <= self.len, "slice {offset}+{len} of {} bytes", self.len);
        if len == 0 {
            return Self::EMPTY;
        }
        let mut skip = (self.skip + offset) as usize;
        let mut first = 0;
        let all = self.all();
        while skip >= all[first].len() {
            skip -= all[first].len();
            first += 1;
        }
        Self { segs: all[first..].as_ptr(), count: self.count - first as u32, skip: skip as u32, len }
    }

    /// The first `len` bytes of the view.
    ///
    /// # Panics
    /// If the view is shorter.
    #[inline]
    #[must_use]
    pub fn first(&self, len: u32) -> Self {
        assert!(len <= self.len, "the first {len} of {} bytes", self.len);
        if len == 0 { Self::EMPTY } else { Self { len, ..*self } }
    }

    /// As [`Sgl::first`], inlined at every call.
    ///
    /// # Panics
    /// If the view is shorter.
    #[inline(always)]
    pub(crate) fn shortened(self, len: u32) -> Self {
        assert!(len <= self.len, "the first {len} of {} bytes", self.len);
        Self { len, ..self }
    }

    /// The pieces of the view, in order; none is empty.
    pub fn pieces(&self) -> impl Iterator<Item = Seg> + use<> {
        let (all, mut i, mut skip, mut left) = (*self, 0, self.skip as usize, self.len as usize);
        std::iter::from_fn(move || {
            while left > 0 {
                let seg = all.all()[i];
                i += 1;
                let len = (seg.len - skip.min(seg.len)).min(left);
                let base = seg.base.wrapping_add(skip);
                skip = 0;
                left -= len;
                if len > 0 {
                    return Some(Seg { base, len });
                }
            }
            None
        })
    }

    /// The view's piece, if it has exactly one.
    pub fn as_single(&self) -> Option<Seg> {
        let first = self.pieces().next()?;
        (first.len == self.len as usize).then_some(first)
    }

    /// The view's memory as one piece, if each of its pieces follows the one before in memory; `None` also for an empty view.
    pub fn as_contiguous(&self) -> Option<Seg> {
        let mut pieces = self.pieces();
        let first = pieces.next()?;
        let mut end = first.base.wrapping_add(first.len);
        for piece in pieces {
            if piece.base != end {
                return None;
            }
            end = end.wrapping_add(piece.len);
        }
        Some(Seg { len: self.len as usize, ..first })
    }

    /// Whether every piece's address and length are multiples of `align` (a power of two).
    pub fn is_aligned(&self, align: usize) -> bool {
        self.pieces().all(|s| (s.base as usize | s.len) & (align - 1) == 0)
    }

    /// Copies the view's bytes from `offset` on into `dst`.
    ///
    /// # Panics
    /// If the view ends before `dst` does.
    pub fn read(&self, offset: u32, dst: &mut [u8]) {
        let mut at = 0;
        for seg in self.slice(offset, dst.len() as u32).pieces() {
            // SAFETY: by the crate's invariant the piece is mapped; `dst` has room, because the pieces sum up to its
            // length, and no other code accesses it.
            unsafe { copy::from_shared(dst[at..].as_mut_ptr(), seg.base, seg.len) };
            at += seg.len;
        }
    }

    /// Copies `src` to the view's bytes from `offset` on.
    ///
    /// # Panics
    /// If the view ends before `src` does.
    pub fn write(&self, offset: u32, src: &[u8]) {
        let mut at = 0;
        for seg in self.slice(offset, src.len() as u32).pieces() {
            // SAFETY: by the crate's invariant the piece is mapped; `src` has as many bytes from `at` on.
            unsafe { copy::to_shared(seg.base, src[at..].as_ptr(), seg.len) };
            at += seg.len;
        }
    }

    /// Copies a value to the view's first bytes.
    ///
    /// # Panics
    /// If the view is shorter than that.
    #[inline]
    pub fn put<T: IntoBytes + Immutable>(&self, value: &T) {
        let (src, len) = (value.as_bytes(), size_of::<T>());
        match self.all().first() {
            Some(first) if self.len as usize >= len && first.len >= self.skip as usize + len => {
                let dst = first.base.wrapping_add(self.skip as usize);
                // SAFETY: by the crate's invariant the piece is mapped; it has room, and `src` as many bytes.
                unsafe { copy::to_shared(dst, src.as_ptr(), len) };
            }
            _ => self.write(0, src),
        }
    }

    /// Writes one byte of the view.
    ///
    /// # Panics
    /// If the view is not that long.
    #[inline]
    pub fn put_byte(&self, offset: u32, byte: u8) {
        assert!(offset < self.len, "byte {offset} of {}", self.len);
        let mut at = (self.skip + offset) as usize;
        for seg in self.all() {
            if let Some(rest) = at.checked_sub(seg.len) {
                at = rest;
                continue;
            }
            // SAFETY: by the crate's invariant the piece is mapped, and `at` is inside of it.
            unsafe { copy::to_shared(seg.base.wrapping_add(at), &raw const byte, 1) };
            return;
        }
        unreachable!("segments are as long as the view");
    }

    /// Copies bytes of `store` from `offset` on into the whole view: a read from a memory disk.
    ///
    /// # Panics
    /// If `store` ends before the view does.
    pub fn load_from(&self, store: &Mapping, offset: u64) {
        let mut src = store_at(store, offset, self.len);
        for seg in self.pieces() {
            // SAFETY: by the crate's invariant the piece is mapped; `store_at` checked the source. A guest's memory and
            // a store's are different mappings.
            unsafe { copy::to_shared(seg.base, src, seg.len) };
            src = src.wrapping_add(seg.len);
        }
    }

    /// Copies the whole view to bytes of `store` from `offset` on: a write to a memory disk.
    ///
    /// # Panics
    /// If `store` ends before the view does.
    pub fn store_to(&self, store: &Mapping, offset: u64) {
        let mut dst = store_at(store, offset, self.len);
        let large = store.len() >= STREAMED_STORE_MIN;
        for seg in self.pieces() {
            // SAFETY: as in `load_from`, in the other direction.
            unsafe {
                if large && seg.len >= STREAMED_LEN_MIN {
                    copy::streaming(dst, seg.base, seg.len);
                } else {
                    copy::from_shared(dst, seg.base, seg.len);
                }
            }
            dst = dst.wrapping_add(seg.len);
        }
        if large {
            copy::settle();
        }
    }

    /// Copies the whole view to the first bytes of `to`.
    ///
    /// # Panics
    /// If `to` is shorter.
    pub fn copy_to(&self, to: &Self) {
        let (mut to, mut room) = (to.first(self.len).pieces(), Seg::new(std::ptr::null_mut(), 0));
        for mut from in self.pieces() {
            while !from.is_empty() {
                if room.is_empty() {
                    room = to.next().expect("both views are of one length");
                }
                let len = from.len.min(room.len);
                // SAFETY: by the crate's invariant both pieces are mapped, with so many bytes.
                unsafe { copy::between(room.base, from.base, len) };
                from = Seg::new(from.base.wrapping_add(len), from.len - len);
                room = Seg::new(room.base.wrapping_add(len), room.len - len);
            }
        }
    }

    /// Sets every byte of the view to `byte`.
    pub fn fill(&self, byte: u8) {
        for seg in self.pieces() {
            // SAFETY: by the crate's invariant the piece is mapped.
            unsafe { copy::fill(seg.base, byte, seg.len) };
        }
    }

    /// Prefetches the cache lines that a copy out of the view would read first.
    pub fn prefetch(&self) {
        if let Some(seg) = self.pieces().next() {
            copy::prefetch(seg.base, seg.len);
        }
    }

    /// Prefetches the cache line of the view's first byte for writing.
    #[inline]
    pub fn prefetch_write(&self) {
        if let Some(first) = self.all().first() {
            copy::prefetch_write(first.base.wrapping_add(self.skip as usize));
        }
    }

    #[inline]
    fn all(&self) -> &[Seg] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: `Sgl::new`'s caller keeps the list in place until the request completes.
        unsafe { std::slice::from_raw_parts(self.segs, self.count as usize) }
    }
}

/// The address of `len` bytes from `offset` of `store`.
fn store_at(store: &Mapping, offset: u64, len: u32) -> *mut u8 {
    let end = offset.checked_add(len.into());
    assert!(end.is_some_and(|end| end <= store.len()), "{offset}+{len} of {}", store.len());
    store.base().as_ptr().wrapping_add(offset as usize)
}

#[cfg(test)]
mod tests;
