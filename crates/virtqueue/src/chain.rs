//! The buffers of one request, copied out of the guest's descriptors. Used in reactor context.
//!
//! A chain says where buffers are, as the guest claims; whether there is memory is found out when they are used.

use crate::ChainError;
use aryk_dma::{BadAddress, MemTable};
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

/// Descriptors in a chain, if the queue's size is not larger.
///
/// Section 2.7.5.3.1 limits chains to the queue's size, but Linux's driver puts as many segments into an indirect table
/// as the device's own limit (`seg_max`) allows, in queues of any size. This is Linux's IOV_MAX.
pub const CHAIN_MAX: u16 = 1024;

/// A buffer: `len` bytes (not 0) at guest-physical `addr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// The buffers of one chain: first those for the device to read, then those for it to write.
///
/// One serves as scratch for all queues of an owner: [`SplitQueue::pop`](crate::SplitQueue::pop) overwrites it.
#[derive(Debug)]
pub struct Chain {
    pieces: Box<[Piece]>,
    /// `pieces[start..split]` are readable.
    start: usize,
    /// `pieces[split..end]` are writable.
    split: usize,
    end: usize,
}

impl Chain {
    /// Room for the chains of queues of up to `queue_size` descriptors.
    pub fn new(queue_size: u16) -> Self {
        let room = usize::from(queue_size.max(CHAIN_MAX));
        Self { pieces: vec![Piece::default(); room].into(), start: 0, split: 0, end: 0 }
    }

    /// Buffers for the device to read, in order.
    #[inline]
    pub fn readable(&self) -> &[Piece] {
        &self.pieces[self.start..self.split]
    }

    /// Buffers for the device to write, in order.
    #[inline]
    pub fn writable(&self) -> &[Piece] {
        &self.pieces[self.split..self.end]
    }

    /// Bytes for the device to read.
    #[inline]
    pub fn readable_len(&self) -> u64 {
        self.readable().iter().map(|p| u64::from(p.len)).sum()
    }

    /// Bytes for the device to write.
    #[inline]
    pub fn writable_len(&self) -> u64 {
        self.writable().iter().map(|p| u64::from(p.len)).sum()
    }

    /// Copies a header off the front of the readable part, once, however the guest split it; what follows it stays.
    /// `Ok(None)` if the part is shorter than that.
    ///
    /// # Errors
    /// [`BadAddress`] if it is not in the guest's memory. After either failure the readable part is undefined.
    #[inline]
    pub fn take_header<T>(&mut self, memory: &MemTable) -> Result<Option<T>, BadAddress>
    where
        T: FromBytes + IntoBytes + KnownLayout,
    {
        match self.readable().first() {
            Some(&Piece { addr, len }) if len as usize == size_of::<T>() => {
                self.start += 1;
                // Drivers keep the status byte in the header's line.
                memory.read_before_write(addr).map(Some)
            }
            _ => self.gather_header(memory),
        }
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
        Ok(Some(value))
    }

    /// Takes the last byte off the writable part, where block and SCSI devices put a request's status, and says where it
    /// is. `None` if there is no writable part.
    #[inline]
    pub fn take_last_writable(&mut self) -> Option<u64> {
        let last = self.pieces[self.split..self.end].last_mut()?;
        last.len -= 1;
        let addr = last.addr.wrapping_add(last.len.into());
        self.end -= usize::from(last.len == 0);
        Some(addr)
    }

    /// Empties it, for a chain of up to `room` descriptors.
    #[inline]
    pub(crate) fn clear(&mut self, room: u16) {
        assert!(usize::from(room) <= self.pieces.len(), "a chain made for smaller queues");
        (self.start, self.split, self.end) = (0, 0, 0);
    }

    /// Whether there is something for the device to write.
    #[inline]
    const fn has_writable(&self) -> bool {
        self.end > self.split
    }

    /// Descriptors in it.
    #[inline]
    pub(crate) const fn count(&self) -> u16 {
        self.end as u16
    }

    /// Adds a descriptor's buffer, if that makes sense.
    #[inline]
    pub(crate) fn add(&mut self, piece: Piece, writable: bool) -> Result<(), ChainError> {
        if piece.len == 0 {
            return Err(ChainError::Empty);
        }
        if !writable && self.has_writable() {
            return Err(ChainError::Order);
        }
        self.push(piece, writable);
        Ok(())
    }

    /// Adds a buffer. Readable ones come before writable ones.
    #[inline]
    fn push(&mut self, piece: Piece, writable: bool) {
        debug_assert!(writable || self.split == self.end);
        self.pieces[self.end] = piece;
        self.end += 1;
        self.split += usize::from(!writable);
    }
}
