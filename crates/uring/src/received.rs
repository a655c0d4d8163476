//! The buffers into which sockets are read: all receives of a ring share them. Reactor context.
//!
//! The kernel takes a buffer when bytes arrive, not when a receive begins: a receive that waits holds no memory, however many
//! there are. If there is no free buffer when bytes arrive, or when a receive begins, the receive ends with `ENOBUFS`; what has
//! arrived stays in the socket.
//!
//! **Invariant.** A buffer belongs to the kernel until the completion that names it is reaped, and then to the reader of that
//! completion, until its [`Filled`] is dropped. The memory is unmapped after the kernel has ended all receives
//! (`Ring::drop`).

use aryk_dma::Mapping;
use io_uring::types::BufRingEntry;
use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};

/// The number of buffers.
pub(crate) const BUFFERS: u16 = 256;
/// Bytes of a buffer.
const BUFFER_LEN: usize = 16 << 10;
/// The number of the buffers in the ring, which has no others.
pub(crate) const GROUP: u16 = 0;
/// Bytes of the list in which the kernel finds free buffers; the buffers follow.
const LIST_LEN: usize = BUFFERS as usize * size_of::<BufRingEntry>();
const _: () = assert!(BUFFERS.is_power_of_two() && LIST_LEN.is_multiple_of(4096), "as the kernel requires");

/// The buffers, and the list of those that are free.
#[derive(Debug)]
pub(crate) struct Buffers {
    memory: Mapping,
    /// The number of buffers that were ever added to the list.
    tail: Cell<u16>,
    /// Whether a reaped completion has named the buffer, and it has no [`Filled`] yet.
    is_unclaimed: Vec<Cell<bool>>,
}

/// The name of a buffer in a completion.
pub(crate) type BufferName = NonZero<u16>;

impl Buffers {
    pub fn new() -> io::Result<Self> {
        let len = LIST_LEN + usize::from(BUFFERS) * BUFFER_LEN;
        let memory = Mapping::anonymous(len as u64).map_err(io::Error::other)?;
        let buffers =
            Self { memory, tail: Cell::new(0), is_unclaimed: vec![Cell::new(false); BUFFERS.into()] };
        (0..BUFFERS).for_each(|index| buffers.provide(index));
        Ok(buffers)
    }

    /// The address of the list.
    pub fn list(&self) -> *mut BufRingEntry {
        self.memory.base().as_ptr().cast()
    }

    /// The address of a buffer.
    fn buffer(&self, index: u16) -> *mut u8 {
        assert!(index < BUFFERS, "there are {BUFFERS} buffers");
        // SAFETY: the mapping has the list and all buffers.
        unsafe { self.memory.base().as_ptr().add(LIST_LEN + usize::from(index) * BUFFER_LEN) }
    }

    /// Gives a buffer to the kernel.
    fn provide(&self, index: u16) {
        let tail = self.tail.get();
        let addr = self.buffer(index) as u64;
        // SAFETY: the list is part of the mapping, which was zeroed. This thread alone writes to it, and the kernel does not read
        // an entry before the tail is behind it.
        let shared_tail = unsafe {
            let entry = &mut *self.list().add(usize::from(tail % BUFFERS));
            entry.set_addr(addr);
            entry.set_len(BUFFER_LEN as u32);
            entry.set_bid(index);
            AtomicU16::from_ptr(BufRingEntry::tail(self.list()).cast_mut())
        };
        self.tail.set(tail.wrapping_add(1));
        shared_tail.store(self.tail.get(), Ordering::Release);
    }

    /// A completion was reaped that names a buffer.
    pub fn reaped(&self, index: u16) -> BufferName {
        let before = self.is_unclaimed[usize::from(index)].replace(true);
        assert!(!before, "the kernel fills buffers that it was given");
        NonZero::new(index + 1).expect("it is above 0")
    }

    /// The bytes of a buffer that a reaped completion has named.
    pub fn claim(self: &Rc<Self>, name: BufferName, len: usize) -> Filled {
        let index = name.get() - 1;
        let is_unclaimed = self.is_unclaimed[usize::from(index)].replace(false);
        assert!(is_unclaimed && len <= BUFFER_LEN, "a completion is claimed once, with its own length");
        Filled { buffers: Rc::clone(self), index, len }
    }
}

/// Bytes that a socket has received. Dropping them frees their buffer for the next receive.
#[derive(Debug)]
pub struct Filled {
    buffers: Rc<Buffers>,
    index: u16,
    len: usize,
}

impl Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has the buffer, of which `len` is not beyond the end, and which the kernel does not have: it was
        // named by a completion (`Buffers::claim`), and is given back when `self` is dropped.
        unsafe { std::slice::from_raw_parts(self.buffers.buffer(self.index), self.len) }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        self.buffers.provide(self.index);
    }
}
