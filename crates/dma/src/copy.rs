//! Copies between our memory and memory that others may change meanwhile, by direction and size.
//!
//! A guest that changes its data while it is copied gets what it deserves: torn data. It cannot harm us, for
//! no value that steers control is read through these functions twice.
//!
//! Measured with a polled front-end on the other core (4 KiB, memory disk, queue depth 32): plain `memcpy` is the
//! best way into a guest's memory; non-temporal stores are 30% better into a large disk's memory, whose lines would
//! only push others out of the cache; `rep movsb` lost 14%.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Copies `len` bytes out of memory that others may change.
///
/// # Safety
/// Both ranges are mapped, and do not overlap.
pub(crate) unsafe fn from_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise. The source may change meanwhile: `memcpy` of bytes has no invariant
    // to break, and the compiler cannot see through the pointers' origin.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Copies `len` bytes into memory that others may read or change.
///
/// # Safety
/// Both ranges are mapped, and do not overlap.
pub(crate) unsafe fn to_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: as in `from_shared`.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Sets `len` bytes.
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::write_bytes(dst, byte, len) };
}

/// Asks for the first lines of a range, at most as many as the processor fetches side by side.
pub(crate) fn prefetch(src: *const u8, len: usize) {
    const LINE: usize = 64;
    const LINES_MAX: usize = 64;
    for line in 0..len.div_ceil(LINE).min(LINES_MAX) {
        // SAFETY: a prefetch of any address is a hint that never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(line * LINE).cast()) };
    }
}

/// Asks for the line at `dst`, to write to it: one trip to the other core's cache instead of two where it is first
/// read and then written.
pub(crate) fn prefetch_write(dst: *const u8) {
    // SAFETY: a prefetch of any address is a hint that never faults. The intrinsic would give PREFETCHT0, for not
    // every x86-64 processor has this instruction; those without it (before 2006) take it as a NOP.
    unsafe { asm!("prefetchw [{}]", in(reg) dst, options(nostack, preserves_flags, readonly)) };
}
