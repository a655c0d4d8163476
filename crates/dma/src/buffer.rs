//! Aligned memory of this process that can be lent to a request. Any context.

use crate::{MapError, Mapping, PAGE, Seg, Sgl, copy};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// The alignment of the buffers of an [`Arena`] that are smaller than a page.
const SMALL_ALIGN: usize = 64;

/// Aligned memory, zeroed at first; readable and writable while the buffer is not lent.
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    origin: Origin,
    /// Boxed, so that its [`Sgl`] stays valid when the buffer moves.
    seg: Option<Box<Seg>>,
    lent: bool,
}

/// Where a buffer's memory is from.
#[derive(Debug)]
enum Origin {
    /// The allocator, with this layout.
    Allocated(Layout),
    /// A mapping of which no other buffer has this part.
    Part(Arc<Mapping>),
}

/// The memory of several buffers, as one piece for a device. It stays mapped until this value and all of its buffers are dropped.
#[derive(Debug)]
pub struct Arena(Arc<Mapping>);

impl Arena {
    /// Zeroed memory, and buffers of these sizes in it: at whole pages those of a page or more, the others at multiples of 64
    /// bytes.
    ///
    /// # Errors
    /// [`MapError`].
    ///
    /// # Panics
    /// If a size is 0, or the sum is 2³² or more.
    pub fn new(sizes: &[usize]) -> Result<(Self, Vec<Buffer>), MapError> {
        let mut end = 0;
        let offsets: Vec<usize> = (sizes.iter())
            .map(|&len| {
                assert!(len > 0, "a buffer without bytes");
                let align = if len >= PAGE as usize { PAGE as usize } else { SMALL_ALIGN };
                let offset = usize::next_multiple_of(end, align);
                end = offset + len;
                assert!(u32::try_from(end).is_ok(), "an arena of {end} bytes");
                offset
            })
            .collect();
        let mapping = Arc::new(Mapping::anonymous(end as u64)?);
        let part = |(&len, offset)| {
            // SAFETY: the mapping contains all offsets.
            let base = unsafe { mapping.base().add(offset) };
            Buffer::of(base, len, Origin::Part(Arc::clone(&mapping)))
        };
        let buffers = sizes.iter().zip(offsets).map(part).collect();
        Ok((Self(mapping), buffers))
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.0.base().as_ptr() as u64
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Always `false`: an arena has at least one buffer.
    pub const fn is_empty(&self) -> bool {
        false
    }
}

// SAFETY: it owns its memory.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Allocates `len` bytes at a multiple of `align`.
    ///
    /// # Panics
    /// If `len` is 0 or above 2³²−1, or `align` is not a power of two.
    pub fn new(len: usize, align: usize) -> Self {
        assert!(len > 0 && u32::try_from(len).is_ok(), "a buffer of {len} bytes");
        let layout = Layout::from_size_align(len, align).expect("the alignment is a power of two");
        // SAFETY: the layout is not of size 0.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Self::of(base, len, Origin::Allocated(layout))
    }

    fn of(base: NonNull<u8>, len: usize, origin: Origin) -> Self {
        let seg = Some(Box::new(Seg::new(base.as_ptr(), len)));
        Self { base, len, origin, seg, lent: false }
    }

    /// A page-aligned buffer with a copy of `data`.
    pub fn from_slice(data: &[u8]) -> Self {
        let mut buffer = Self::new(data.len(), crate::PAGE as usize);
        buffer.write(0, data);
        buffer
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Always `false`: a buffer has at least one byte.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Lends the whole buffer to a request. Until [`Buffer::reclaim`] it can be neither read nor written, and dropping it
    /// leaks its memory.
    ///
    /// # Panics
    /// If the buffer is lent already.
    pub fn lend(&mut self) -> Sgl {
        self.assert_ours();
        self.lent = true;
        let seg = self.seg.as_deref().expect("present until dropped");
        // SAFETY: the segment is boxed, and both it and the memory are leaked rather than freed while lent.
        unsafe { Sgl::new(std::slice::from_ref(seg), self.len as u32) }
    }

    /// Ends the loan: the request has completed.
    pub fn reclaim(&mut self) {
        assert!(self.lent, "the buffer is not lent");
        self.lent = false;
    }

    /// Whether a request has the buffer.
    pub const fn is_lent(&self) -> bool {
        self.lent
    }

    /// The buffer's bytes.
    ///
    /// # Panics
    /// If the buffer is lent.
    pub fn bytes(&self) -> &[u8] {
        self.assert_ours();
        // SAFETY: `self` owns the memory, it is initialized, and no request writes to it, because it is not lent.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The buffer's bytes, mutable.
    ///
    /// # Panics
    /// If the buffer is lent.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.assert_ours();
        // SAFETY: as in `bytes`, and it is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Copies `data` to `offset`.
    ///
    /// # Panics
    /// If the buffer is lent, or too short.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        self.assert_ours();
        let end = offset.checked_add(data.len());
        assert!(end.is_some_and(|end| end <= self.len()), "{offset}+{} of {}", data.len(), self.len());
        // SAFETY: checked to be in bounds.
        let dst = unsafe { self.base.add(offset) };
        // SAFETY: `dst` has room, as checked, and is not `data`, which is borrowed beside `&mut self`.
        unsafe { copy::to_shared(dst.as_ptr(), data.as_ptr(), data.len()) };
    }

    fn assert_ours(&self) {
        assert!(!self.lent, "the buffer is lent to a request");
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.lent {
            std::mem::forget(self.seg.take());
            if let Origin::Part(mapping) = &self.origin {
                std::mem::forget(Arc::clone(mapping));
            }
            return;
        }
        if let Origin::Allocated(layout) = self.origin {
            // SAFETY: allocated with this layout in `new`, and not lent.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests;
