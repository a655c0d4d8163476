//! The buffers of one request, copied out of the guest's descriptors. Used in reactor context.
//!
//! A chain holds buffers as the guest describes them. Whether they are in guest memory is checked when they are used.

use crate::ChainError;
use aryk_dma::{BadAddress, MemTable};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

/// Upper bound of the descriptors of a chain, in the ring and an indirect table together, for all queue sizes.
///
/// Section 2.7.5.3.1 limits chains to the queue's size, but Linux's driver puts as many segments into an indirect table
/// as the device's own limit (`seg_max`) allows, in queues of any size. QEMU's largest queues have this many descriptors,
/// and its SCSI hosts report two fewer to guests; it is Linux's IOV_MAX too.
pub const CHAIN_MAX: u16 = 1024;

/// A buffer: `len` bytes (not 0) at guest-physical `addr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The buffers of one chain: first the readable ones (which the device reads), then the writable ones.
///
/// An owner of several queues uses one chain as scratch memory for all of them: [`SplitQueue::pop`](crate::SplitQueue::pop)
/// overwrites the chain.
#[derive(Debug)]
pub struct Chain {
    pieces: Box<[Piece; CHAIN_MAX as usize]>,
    /// `pieces[start..split]` are readable.
    start: usize,
    /// `pieces[split..end]` are writable.
    split: usize,
    end: usize,
    /// The approximate number of descriptors that were read to find the chain.
    cost: u32,
}

/// A header, copied once, and a status byte that were taken from a chain; and the data between them.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a, T> {
    /// The header.
    pub header: T,
    /// Guest-physical address of the status byte.
    pub status: u64,
    /// As [`Chain::readable`].
    pub readable: &'a [Piece],
    /// As [`Chain::writable`].
    pub writable: &'a [Piece],
}

impl Default for Chain {
    /// An empty chain.
    fn default() -> Self {
        let pieces = vec![Piece::default(); CHAIN_MAX.into()].into_boxed_slice();
        let pieces = pieces.try_into().expect("as many");
        Self { pieces, start: 0, split: 0, end: 0, cost: 0 }
    }
}

impl Chain {
    /// Buffers that the device reads, in order.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        self.pieces.get(self.start..self.split).unwrap_or_default()
    }

    /// Buffers that the device writes, in order.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        self.pieces.get(self.split..self.end).unwrap_or_default()
    }

    /// Total length of the readable buffers in bytes.
    #[inline]
    pub fn readable_len(&self) -> u64 {
        self.readable().iter().map(|p| u64::from(p.len)).sum()
    }

    /// Total length of the writable buffers in bytes.
    #[inline]
    pub fn writable_len(&self) -> u64 {
        self.writable().iter().map(|p| u64::from(p.len)).sum()
    }

    /// Copies a header from the front of the readable part, once, however the guest split it over buffers; the rest of the part
    /// stays. Returns `Ok(None)` if the part is shorter than the header.
    ///
    /// # Errors
    /// [`BadAddress`] if the header is not in the guest's memory. After either failure the readable part is undefined.
    pub fn take_header<T>(&mut self, memory: &MemTable) -> Result<Option<T>, BadAddress>
    where
        T: FromBytes + IntoBytes + KnownLayout,
    {
        match self.take_whole_header(memory) {
            Some(header) => Ok(Some(header)),
            None => self.gather_header(memory),
        }
    }

    /// As [`Chain::take_header`], of a header that is a buffer of its own in the guest's largest region, as nearly all are.
    /// `None` has taken nothing.
    #[inline(always)]
    pub fn take_whole_header<T: FromBytes>(&mut self, memory: &MemTable) -> Option<T> {
        let &Piece { addr, len } = self.readable().first()?;
        if len as usize != size_of::<T>() {
            return None;
        }
        // Drivers keep the status byte in the header's cache line.
        let header = memory.read_largest_before_write(addr)?;
        self.start += 1;
        Some(header)
    }

    #[cold]
    fn gather_header<T>(&mut self, memory: &MemTable) -> Result<Option<T>, BadAddress>
    where
        T: FromBytes + IntoBytes + KnownLayout,
    {
        let mut value = T::new_zeroed();
        let mut left = value.as_mut_bytes();
        while !left.is_empty() {
            let Some(piece) = self.pieces[self.start..self.split].first_mut() else { return Ok(None) };
            let (now, later) = left.split_at_mut(left.len().min(piece.len as usize));
            memory.read_bytes(piece.addr, now)?;
            piece.addr = piece.addr.wrapping_add(now.len() as u64);
            piece.len -= now.len() as u32;
            self.start += usize::from(piece.len == 0);
            left = later;
        }
        self.check_invariants();
        Ok(Some(value))
    }

    /// Takes a header and a status byte from the chain, if nothing was taken from it before, each of the two has its own
    /// buffer, and the header is in the guest's largest region. Nearly all block requests are like that, and need fewer checks
    /// this way. `None` leaves the chain unchanged: [`Chain::take_last_writable`] and [`Chain::take_header`] take the two from
    /// any chain.
    #[inline(always)]
    pub fn take_ends<T>(&mut self, memory: &MemTable) -> Option<Ends<'_, T>>
    where
        T: FromBytes + IntoBytes + KnownLayout,
    {
        // Without a header or a status, an index wraps and is out of range.
        let [header, others @ ..] = &*self.pieces;
        let (data, status) = (others.get(..self.end.wrapping_sub(2))?, others.get(self.end.wrapping_sub(2))?);
        let (readable, writable) = data.split_at_checked(self.split.wrapping_sub(1))?;
        if self.start != 0 || header.len as usize != size_of::<T>() || status.len != 1 {
            return None;
        }
        // Drivers keep the status byte in the header's cache line.
        let header = memory.read_largest_before_write(header.addr)?;
        debug_assert!(
            readable.len() + writable.len() + 2 == self.end,
            "the two ends and the data are the chain"
        );
        (self.start, self.end) = (1, self.end - 1);
        Some(Ends { header, status: status.addr, readable, writable })
    }

    /// Takes the last byte of the writable part, where block and SCSI devices put a request's status, and returns its address.
    /// Returns `None` if there is no writable part.
    #[inline]
    pub fn take_last_writable(&mut self) -> Option<u64> {
        if self.end == self.split {
            return None;
        }
        let last = self.pieces.get_mut(self.end - 1)?;
        last.len -= 1;
        let addr = last.addr.wrapping_add(last.len.into());
        self.end -= usize::from(last.len == 0);
        self.check_invariants();
        Some(addr)
    }

    /// The approximate number of descriptors that were read to find the chain, even if it was refused: its cost.
    #[inline]
    pub const fn cost(&self) -> u32 {
        self.cost
    }

    /// Counts descriptors that were read and are not part of the chain.
    #[cold]
    pub(crate) const fn skip(&mut self, count: u16) {
        self.cost += count as u32;
    }

    /// Number of descriptors in the chain.
    #[inline]
    pub(crate) const fn count(&self) -> u16 {
        self.end as u16
    }

    /// Removes all buffers.
    #[inline]
    pub(crate) const fn clear(&mut self) {
        self.set_counts(Counts::NONE);
    }

    /// Adds a descriptor's buffer, if it is valid.
    #[inline]
    pub(crate) fn add(&mut self, piece: Piece, writable: bool) -> Result<(), ChainError> {
        if piece.len == 0 {
            return Err(ChainError::Empty);
        }
        if !writable && self.end > self.split {
            return Err(ChainError::Order);
        }
        *self.pieces.get_mut(self.end).ok_or(ChainError::TooLong)? = piece;
        self.end += 1;
        self.cost += 1;
        if !writable {
            self.split = self.end;
        }
        self.check_invariants();
        Ok(())
    }

    /// The array of a new chain's buffers, for a caller that keeps the counts in registers until it calls
    /// [`Chain::set_counts`].
    #[inline]
    pub(crate) const fn places(&mut self) -> &mut [Piece; CHAIN_MAX as usize] {
        &mut self.pieces
    }

    /// Begins a chain that consists of the first buffers of the array.
    #[inline]
    pub(crate) const fn set_counts(&mut self, counts: Counts) {
        (self.start, self.split, self.end, self.cost) =
            (0, counts.readable, counts.all, counts.all as u32 + 1);
        self.check_invariants();
    }

    /// Checks the order of the parts, in debug builds.
    #[inline]
    const fn check_invariants(&self) {
        debug_assert!(
            self.start <= self.split && self.split <= self.end,
            "readable buffers come before writable ones"
        );
        debug_assert!(self.end <= CHAIN_MAX as usize, "a chain has no more pieces than its bound");
    }
}

/// The counts of a chain's buffers.
#[derive(Clone, Copy)]
pub(crate) struct Counts {
    pub readable: usize,
    pub all: usize,
}

impl Counts {
    pub const NONE: Self = Self { readable: 0, all: 0 };
}
