//! An allocator that zeroes what is freed, and calls that zero the stack that they have used. Any context; a thread that has not
//! asked for the former pays a load and a branch for each allocation that it frees.
//!
//! Text with a secret passes through buffers that no type of this project owns: those of parsers, of HTTP, of TLS. Each of them
//! is freed soon after the call that brought the text. Libraries of ciphers keep expanded keys on the stack.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::hint::black_box;

thread_local! {
    /// Whether this thread zeroes what it frees. Without a destructor, so that it can be read while the thread ends.
    static WIPES: Cell<bool> = const { Cell::new(false) };
}

/// From now on, this thread zeroes all memory that it frees, if the program's allocator is a [`Wiping`]. For threads that handle
/// the text of calls and passphrases; not for reactors.
pub fn wipe_freed_memory() {
    WIPES.set(true);
}

/// Bytes of the stack that are zeroed: more than the ciphers and hashes in use need.
const STACK: usize = 32 << 10;

/// Calls `work`, then zeroes the part of the stack on which it ran. The result is not zeroed.
pub fn with_wiped_stack<R>(work: impl FnOnce() -> R) -> R {
    #[inline(never)]
    fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
    // Both frames begin at the same address.
    #[inline(never)]
    fn wipe_frame() {
        black_box(&mut [0_u8; STACK]);
    }
    let result = run(work);
    wipe_frame();
    result
}

/// The allocator `A`, for programs that hold secrets.
#[derive(Debug)]
pub struct Wiping<A>(pub A);

// SAFETY: memory comes from `A` and returns to it with the same layout; before it returns, nothing else uses it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Wiping<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if WIPES.get() {
            // SAFETY: the caller owns the memory, which has this size.
            unsafe { wipe(memory, layout.size()) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(memory, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !WIPES.get() {
            // SAFETY: the caller's promise.
            return unsafe { self.0.realloc(memory, layout, size) };
        }
        // SAFETY: the caller promises that `size` is a size of this alignment.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: the caller promises that `size` is not zero.
        let new = unsafe { self.alloc(new_layout) };
        if !new.is_null() {
            // SAFETY: both have as many bytes, and the new memory is apart from the old one.
            unsafe { memory.copy_to_nonoverlapping(new, layout.size().min(size)) };
            // SAFETY: the caller gives the memory up if this succeeds.
            unsafe { self.dealloc(memory, layout) };
        }
        new
    }
}

/// Zeroes memory that is about to be freed.
///
/// # Safety
/// The caller owns `len` bytes of memory.
unsafe fn wipe(memory: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { memory.write_bytes(0, len) };
    // Otherwise the compiler may omit stores to memory that only `free` sees.
    black_box(memory);
}
