//! Memory for secrets, and keys of the kernel's keyring. Any context, but see below.
//!
//! [`SecretBytes`] and [`SecretBox`] hold keys, passphrases and expanded key schedules. Their memory is locked, so that it is
//! never written to swap; it is left out of core dumps; a child process finds zeroes in it; and it is zeroed when it is freed.
//! Neither type prints its content. [`SecretSlice`] is for working memory that is too large to be locked.
//!
//! [`Wiping`] is an allocator for the other memory through which secrets pass: threads that ask for it zero what they free.
//! [`with_wiped_stack`] zeroes the stack after a computation.
//!
//! **Limits.** The kernel allows each process to lock a limited amount of memory (`RLIMIT_MEMLOCK`). Memory beyond that is used
//! unlocked: the first time is logged, and [`unlocked_bytes`] has the amount. Copies in registers, and words that the compiler
//! spills to the stack elsewhere, are not under this crate's control.
//!
//! **Context.** Creating and dropping a secret takes a lock and may call the kernel, so no request does either. Reading one costs
//! what reading a `Box` costs.
//!
//! **Unsafe code** maps the memory and gives out parts of it (`memory`), makes two system calls for which no library is in use
//! (`kernel`), and passes on to an allocator (`wiping`). A part belongs to one owner until the owner frees it, and has the size
//! and alignment that the owner asked for.
#![deny(unsafe_op_in_unsafe_fn)]

mod kernel;
mod memory;
#[cfg(test)]
mod tests;
mod wiping;

pub use kernel::read_kernel_key;
pub use memory::unlocked_bytes;
pub use wiping::{Wiping, wipe_freed_memory, with_wiped_stack};

use memory::{ALIGNMENT, Mapping, Part};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Secret bytes.
pub struct SecretBytes {
    part: Part,
    len: usize,
}

impl SecretBytes {
    /// Zeroes, for the caller to overwrite.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self { part: Part::new(len), len }
    }

    /// A copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut secret = Self::zeroed(bytes.len());
        secret.copy_from_slice(bytes);
        secret
    }

    /// Shortens the secret to `len` bytes; the bytes behind them are zeroed with the others. A longer `len` has no effect.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for SecretBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the part has at least `len` bytes, which were zeroed at first, and belongs to this value.
        unsafe { std::slice::from_raw_parts(self.part.base(), self.len) }
    }
}

impl DerefMut for SecretBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the value is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.part.base(), self.len) }
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretBytes({})", self.len)
    }
}

/// A secret value without a destructor, such as an array of round keys.
pub struct SecretBox<T> {
    part: Part,
    value: std::marker::PhantomData<T>,
}

// SAFETY: the box owns its value, as a `Box` does; any thread may free the part.
unsafe impl<T: Send> Send for SecretBox<T> {}
// SAFETY: a shared box gives out shared references to its value only.
unsafe impl<T: Sync> Sync for SecretBox<T> {}

impl<T> SecretBox<T> {
    /// Takes a value, which should not be secret yet: `value` comes by the stack. The caller then changes it in its place.
    pub fn new(value: T) -> Self {
        const {
            assert!(!std::mem::needs_drop::<T>(), "the value is zeroed, not dropped");
            assert!(align_of::<T>() <= ALIGNMENT, "parts have this alignment");
        }
        let part = Part::new(size_of::<T>());
        // SAFETY: the part has the size and alignment of a `T`, and nothing else uses it.
        unsafe { part.base().cast::<T>().write(value) };
        Self { part, value: std::marker::PhantomData }
    }
}

impl<T> Deref for SecretBox<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `new` has written the value, and the part belongs to this box.
        unsafe { &*self.part.base().cast::<T>() }
    }
}

impl<T> DerefMut for SecretBox<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the box is borrowed mutably.
        unsafe { &mut *self.part.base().cast::<T>() }
    }
}

impl<T> fmt::Debug for SecretBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretBox")
    }
}

/// Values in memory that is left out of core dumps, but not locked. Its pages go back to the kernel with the slice.
pub struct SecretSlice<T> {
    mapping: Mapping,
    len: usize,
    values: std::marker::PhantomData<T>,
}

// SAFETY: the slice owns its values, as a `Vec` does; any thread may free the mapping.
unsafe impl<T: Send> Send for SecretSlice<T> {}
// SAFETY: a shared slice gives out shared references to its values only.
unsafe impl<T: Sync> Sync for SecretSlice<T> {}

impl<T: Copy> SecretSlice<T> {
    /// `len` times `value`; `None` if the system has no memory for them.
    #[must_use]
    pub fn filled(len: usize, value: T) -> Option<Self> {
        const { assert!(align_of::<T>() <= 4096, "mappings are whole pages") };
        let mapping = Mapping::unlocked(len.checked_mul(size_of::<T>())?.max(1))?;
        let first = mapping.base().cast::<T>();
        for index in 0..len {
            // SAFETY: the mapping has room for `len` values, and nothing else uses it.
            unsafe { first.add(index).write(value) };
        }
        Some(Self { mapping, len, values: std::marker::PhantomData })
    }
}

impl<T> Deref for SecretSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `filled` has written as many values, and the mapping belongs to this slice.
        unsafe { std::slice::from_raw_parts(self.mapping.base().cast::<T>(), self.len) }
    }
}

impl<T> DerefMut for SecretSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the slice is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base().cast::<T>(), self.len) }
    }
}

impl<T> fmt::Debug for SecretSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretSlice({})", self.len)
    }
}
