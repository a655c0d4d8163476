//! The buffers that the crypto channels of one reactor share. Reactor context.
//!
//! A buffer is allocated when it is first needed and then kept, so a reactor whose load is steady allocates nothing. Each channel
//! has a reserve: so many bytes of buffers come from no other channel, and channels whose base disk does not respond leave it to
//! the others. What exceeds the reserves is limited for all channels together. A channel may have as much of that as is left for
//! the others, so one busy channel gets half of it, and each of several busy ones an equal share. Every channel has one buffer of
//! its own besides ([`crate::channel`]), and waits only while it has requests in flight: so crypto disks on top of each other
//! cannot block each other.

use aryk_dma::{Buffer, PAGE};
use std::cell::{Cell, RefCell};

/// The sizes of buffers.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, BUFFER_MAX];

/// Bytes of the largest buffer.
pub(crate) const BUFFER_MAX: usize = 128 << 10;

/// The bytes of a pool's buffers. All channels of a pool have the same.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolBytes {
    /// What the channels have together, beside their reserves.
    pub common: usize,
    /// What each channel has for itself.
    pub reserve: usize,
}

/// The buffers of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Buffers that no channel has, by size.
    idle: RefCell<[Vec<Buffer>; SIZES.len()]>,
    /// Bytes of all buffers, idle or not.
    allocated: Cell<usize>,
    /// Bytes that channels have beyond their reserves.
    common: Cell<usize>,
    channels: Cell<usize>,
}

/// A channel's share of a pool.
#[derive(Debug)]
pub(crate) struct Share {
    bytes: PoolBytes,
    /// Bytes of the buffers that the channel has.
    used: usize,
}

impl Share {
    pub const fn new(bytes: PoolBytes) -> Self {
        Self { bytes, used: 0 }
    }

    /// What so many bytes have beyond the reserve.
    const fn beyond(&self, used: usize) -> usize {
        used.saturating_sub(self.bytes.reserve)
    }
}

impl Pool {
    /// Takes a buffer of at least `len` bytes for a channel.
    #[inline]
    pub fn take(&self, share: &mut Share, len: usize) -> Option<Buffer> {
        let class = SIZES.iter().position(|&size| size >= len)?;
        let size = SIZES[class];
        let after = share.used + size;
        if after > share.bytes.reserve {
            self.take_common(share, after)?;
        }
        share.used = after;
        let buffer = self.idle.borrow_mut()[class].pop();
        Some(buffer.unwrap_or_else(|| self.allocate(size, share.bytes)))
    }

    /// Takes what a channel that will have `after` bytes needs beyond its reserve, if there is so much.
    fn take_common(&self, share: &Share, after: usize) -> Option<()> {
        let (has, needs, taken) = (share.beyond(share.used), share.beyond(after), self.common.get());
        if needs > share.bytes.common.saturating_sub(taken) {
            return None;
        }
        self.common.set(taken + needs - has);
        Some(())
    }

    /// Frees buffers of other sizes, if there is no room for one more buffer, and allocates it.
    #[cold]
    fn allocate(&self, size: usize, bytes: PoolBytes) -> Buffer {
        let limit = bytes.common + bytes.reserve * self.channels.get();
        let mut allocated = self.allocated.get() + size;
        for (class, idle) in self.idle.borrow_mut().iter_mut().enumerate().rev() {
            while allocated > limit && idle.pop().is_some() {
                allocated -= SIZES[class];
            }
        }
        self.allocated.set(allocated);
        Buffer::new(size, PAGE as usize)
    }

    /// Takes a buffer back from a channel.
    #[inline]
    pub fn give_back(&self, share: &mut Share, buffer: Buffer) {
        let size = buffer.len();
        let class = SIZES.iter().position(|&s| s == size).expect("the buffer is the pool's");
        let after = share.used - size;
        self.common.set(self.common.get() - (share.beyond(share.used) - share.beyond(after)));
        share.used = after;
        self.idle.borrow_mut()[class].push(buffer);
    }

    /// Counts a channel that uses the pool.
    pub fn open(&self) {
        self.channels.set(self.channels.get() + 1);
    }

    /// Ends the use of the pool by a channel, which gives up its share. The last channel frees the buffers.
    pub fn close(&self, share: &Share) {
        self.common.set(self.common.get() - share.beyond(share.used));
        self.allocated.set(self.allocated.get() - share.used);
        self.channels.set(self.channels.get() - 1);
        if self.channels.get() == 0 {
            *self.idle.borrow_mut() = Default::default();
            self.allocated.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    /// A pool that a channel uses.
    fn pool(common: usize, reserve: usize) -> (Pool, impl Fn() -> Share) {
        let pool = Pool::default();
        pool.open();
        (pool, move || Share::new(PoolBytes { common: common * KIB, reserve: reserve * KIB }))
    }

    fn take_all(pool: &Pool, share: &mut Share, len: usize) -> Vec<Buffer> {
        std::iter::from_fn(|| pool.take(share, len)).collect()
    }

    fn idle_bytes(pool: &Pool) -> usize {
        pool.idle.borrow().iter().flatten().map(Buffer::len).sum()
    }

    #[test]
    fn buffers_are_kept_and_used_again() {
        let (pool, share) = pool(64, 0);
        let mut share = share();
        let buffer = pool.take(&mut share, 5000).unwrap();
        assert_eq!((buffer.len(), share.used, pool.common.get()), (16 * KIB, 16 * KIB, 16 * KIB));
        let address = buffer.bytes().as_ptr();
        pool.give_back(&mut share, buffer);
        assert_eq!((idle_bytes(&pool), share.used, pool.common.get()), (16 * KIB, 0, 0));
        let again = pool.take(&mut share, 16 * KIB).unwrap();
        assert_eq!((again.bytes().as_ptr(), idle_bytes(&pool)), (address, 0));
        pool.give_back(&mut share, again);
    }

    #[test]
    fn one_channel_gets_half_and_a_second_a_share_of_the_rest() {
        let (pool, share) = pool(128, 0);
        let (mut first, mut second) = (share(), share());
        let taken = take_all(&pool, &mut first, 4 * KIB);
        let rest = take_all(&pool, &mut second, 4 * KIB);
        assert_eq!((taken.len(), rest.len()), (16, 8));
        assert!(pool.take(&mut share(), BUFFER_MAX + 1).is_none(), "no buffer is that large");
        taken.into_iter().for_each(|buffer| pool.give_back(&mut first, buffer));
        rest.into_iter().for_each(|buffer| pool.give_back(&mut second, buffer));
        assert_eq!((first.used, second.used, pool.common.get()), (0, 0, 0));
    }

    #[test]
    fn channels_that_have_taken_all_leave_each_other_its_reserve() {
        let (pool, share) = pool(1024, 256);
        let mut stuck: Vec<_> = (0..64).map(|_| (pool.open(), share()).1).collect();
        let held: Vec<_> = stuck.iter_mut().map(|share| take_all(&pool, share, 64 * KIB)).collect();
        assert_eq!((held[0].len(), held[63].len()), (4 + 8, 4), "half of the common part; the reserve");
        let mut healthy = share();
        for (len, count) in [(4 * KIB, 64), (16 * KIB, 16), (128 * KIB, 2)] {
            let taken = take_all(&pool, &mut healthy, len);
            assert_eq!(taken.len(), count);
            taken.into_iter().for_each(|buffer| pool.give_back(&mut healthy, buffer));
        }
        // A channel may end with its requests: its buffers are not the pool's any more.
        for (share, buffers) in stuck.iter().zip(held) {
            pool.close(share);
            drop(buffers);
        }
        assert_eq!((pool.common.get(), pool.allocated.get()), (0, idle_bytes(&pool)));
        assert_eq!(take_all(&pool, &mut healthy, 64 * KIB).len(), 4 + 8);
    }

    #[test]
    fn idle_buffers_of_other_sizes_make_room() {
        for (common, reserve) in [(128, 0), (0, 128)] {
            let (pool, share) = pool(common, reserve);
            let mut share = share();
            let small: Vec<_> = (0..16).map(|_| pool.take(&mut share, 4 * KIB).unwrap()).collect();
            small.into_iter().for_each(|buffer| pool.give_back(&mut share, buffer));
            let large = pool.take(&mut share, 128 * KIB).unwrap();
            assert_eq!((idle_bytes(&pool), pool.allocated.get()), (0, 128 * KIB));
            pool.give_back(&mut share, large);
            pool.close(&share);
            assert_eq!(
                (idle_bytes(&pool), pool.allocated.get()),
                (0, 0),
                "the last channel frees the buffers"
            );
        }
    }
}
