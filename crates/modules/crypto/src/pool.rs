//! The buffers that the crypto channels of one reactor share. Reactor context.
//!
//! A buffer is allocated when it is first needed and then kept, so a reactor whose load is steady allocates nothing. The bytes of
//! all buffers are limited. A channel may have as many of them as are left for the others, so one busy channel gets half of them,
//! and each of several busy ones an equal share. Every channel has one buffer of its own besides ([`crate::channel`]), and waits
//! only while it has requests in flight: so crypto disks on top of each other cannot block each other.

use aryk_dma::{Buffer, PAGE};
use std::cell::{Cell, RefCell};

/// The sizes of buffers.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, BUFFER_MAX];

/// Bytes of the largest buffer.
pub(crate) const BUFFER_MAX: usize = 128 << 10;

/// The buffers of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Buffers that no channel has, by size.
    idle: RefCell<[Vec<Buffer>; SIZES.len()]>,
    idle_bytes: Cell<usize>,
    /// Bytes of the buffers that channels have.
    lent_bytes: Cell<usize>,
    channels: Cell<u32>,
}

impl Pool {
    /// Takes a buffer of at least `len` bytes for a channel that has buffers of `used` bytes, from a pool of `limit` bytes.
    #[inline]
    pub fn take(&self, len: usize, used: usize, limit: usize) -> Option<Buffer> {
        let class = SIZES.iter().position(|&size| size >= len)?;
        let (size, lent) = (SIZES[class], self.lent_bytes.get());
        if used + size > limit.saturating_sub(lent) {
            return None;
        }
        self.lent_bytes.set(lent + size);
        let buffer = self.idle.borrow_mut()[class].pop();
        if buffer.is_some() {
            self.idle_bytes.set(self.idle_bytes.get() - size);
        }
        Some(buffer.unwrap_or_else(|| self.allocate(size, limit)))
    }

    /// Frees buffers of other sizes, if there is no room for one more buffer, and allocates it.
    #[cold]
    fn allocate(&self, size: usize, limit: usize) -> Buffer {
        for (class, idle) in self.idle.borrow_mut().iter_mut().enumerate().rev() {
            while self.idle_bytes.get() + self.lent_bytes.get() > limit && idle.pop().is_some() {
                self.idle_bytes.set(self.idle_bytes.get() - SIZES[class]);
            }
        }
        Buffer::new(size, PAGE as usize)
    }

    /// Takes a buffer back.
    #[inline]
    pub fn give_back(&self, buffer: Buffer) {
        let size = buffer.len();
        let class = SIZES.iter().position(|&s| s == size).expect("the buffer is the pool's");
        self.lent_bytes.set(self.lent_bytes.get() - size);
        self.idle_bytes.set(self.idle_bytes.get() + size);
        self.idle.borrow_mut()[class].push(buffer);
    }

    /// Counts a channel that uses the pool.
    pub fn open(&self) {
        self.channels.set(self.channels.get() + 1);
    }

    /// Ends the use of the pool by a channel. The last channel frees the buffers.
    pub fn close(&self) {
        self.channels.set(self.channels.get() - 1);
        if self.channels.get() == 0 {
            *self.idle.borrow_mut() = Default::default();
            self.idle_bytes.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    #[test]
    fn buffers_are_kept_and_used_again() {
        let pool = Pool::default();
        let buffer = pool.take(5000, 0, 64 * KIB).unwrap();
        assert_eq!((buffer.len(), pool.lent_bytes.get()), (16 * KIB, 16 * KIB));
        let address = buffer.bytes().as_ptr();
        pool.give_back(buffer);
        assert_eq!((pool.idle_bytes.get(), pool.lent_bytes.get()), (16 * KIB, 0));
        let again = pool.take(16 * KIB, 0, 64 * KIB).unwrap();
        assert_eq!((again.bytes().as_ptr(), pool.idle_bytes.get()), (address, 0));
        pool.give_back(again);
    }

    #[test]
    fn one_channel_gets_half_and_a_second_a_share_of_the_rest() {
        let (pool, limit) = (Pool::default(), 128 * KIB);
        let take_all = || {
            let mut taken = Vec::new();
            while let Some(buffer) = pool.take(4 * KIB, 4 * KIB * taken.len(), limit) {
                taken.push(buffer);
            }
            taken
        };
        let first = take_all();
        let second = take_all();
        assert_eq!((first.len(), second.len()), (16, 8));
        assert!(pool.take(BUFFER_MAX + 1, 0, 1 << 30).is_none(), "no buffer is that large");
        first.into_iter().chain(second).for_each(|buffer| pool.give_back(buffer));
        assert_eq!(pool.lent_bytes.get(), 0);
    }

    #[test]
    fn idle_buffers_of_other_sizes_make_room() {
        let (pool, limit) = (Pool::default(), 128 * KIB);
        let small: Vec<_> = (0..16).map(|i| pool.take(4 * KIB, 4 * KIB * i, limit).unwrap()).collect();
        small.into_iter().for_each(|buffer| pool.give_back(buffer));
        let large = pool.take(128 * KIB, 0, limit).unwrap();
        assert_eq!((pool.idle_bytes.get(), pool.lent_bytes.get()), (0, 128 * KIB));
        pool.give_back(large);
        pool.open();
        pool.close();
        assert_eq!(pool.idle_bytes.get(), 0, "the last channel frees the buffers");
    }
}
