//! Virtqueues, driver side (virtio 1.2, sections 2.7 and 2.8). The front-end's thread; no allocation once a ring is made.
//!
//! A ring may outlive its device: it goes on with the next one. What is outstanding is known from memory of our own, never
//! from the ring's.

mod packed;
mod split;

use crate::Memory;
use aryk_dma::GuestArea;
use std::fmt;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// What the device writes begins on lines of its own, a pair of which processors fetch together.
const APART: u64 = 128;

/// How a ring is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Descriptor table, available and used ring.
    Split,
    /// One ring of descriptors.
    Packed,
}

/// What a ring is to be.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Its layout.
    pub format: Format,
    /// Descriptors: a power of two.
    pub size: u16,
    /// Whether EVENT_IDX is negotiated.
    pub event_idx: bool,
}

impl Shape {
    /// Bytes that such a ring takes.
    #[must_use]
    pub fn space(&self) -> u64 {
        let size = u64::from(self.size);
        match self.format {
            Format::Split => split::parts(0, self.size).device + 6 + 8 * size,
            Format::Packed => packed::parts(0, self.size).device + 4,
        }
        .next_multiple_of(aryk_dma::PAGE)
    }
}

/// A piece of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset into the memory.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes to it.
    pub write: bool,
}

/// The device gave back what it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NotOutstanding {
    /// What it gave as the chain's id.
    pub id: u32,
}

impl fmt::Display for NotOutstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id {} was completed, which is not outstanding", self.id)
    }
}

/// Offsets of a ring's three parts into the memory.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Descriptors.
    pub desc: u64,
    /// What the driver writes: the available ring, or its event suppression.
    pub driver: u64,
    /// What the device writes: the used ring, or its event suppression.
    pub device: u64,
}

/// A ring and what is outstanding in it.
///
/// A request is known by its **slot**, a number below the ring's size.
#[derive(Debug)]
pub enum Ring {
    /// Section 2.7.
    Split(split::Split),
    /// Section 2.8.
    Packed(packed::Packed),
}

impl Ring {
    /// An empty ring at offset `at` of the memory, a multiple of a page.
    ///
    /// # Panics
    /// If its size is no power of two, or it does not lie in the memory.
    #[must_use]
    pub fn new(shape: Shape, memory: &Memory, at: u64) -> Self {
        assert!(shape.size.is_power_of_two(), "a ring of {} descriptors", shape.size);
        assert!(at + shape.space() <= memory.whole().len(), "a ring outside of the memory");
        let area = memory.whole().clone();
        match shape.format {
            Format::Split => Self::Split(split::Split::new(area, at, shape)),
            Format::Packed => Self::Packed(packed::Packed::new(area, at, shape)),
        }
    }

    /// Uses descriptors in this order, as a driver does that has run for a while. Packed rings know only one. Nothing may
    /// be outstanding.
    ///
    /// # Panics
    /// If something is, or these are not all descriptors.
    pub fn set_order(&mut self, order: &[u16]) {
        if let Self::Split(ring) = self {
            ring.set_order(order);
        }
    }

    /// Where its parts are.
    #[must_use]
    pub const fn parts(&self) -> Parts {
        match self {
            Self::Split(ring) => ring.parts(),
            Self::Packed(ring) => ring.parts(),
        }
    }

    /// Free descriptors.
    #[must_use]
    pub const fn room(&self) -> usize {
        match self {
            Self::Split(ring) => ring.room(),
            Self::Packed(ring) => ring.room(),
        }
    }

    /// Adds the request of `slot`; `table` is where its indirect table goes, if it is to have one. There must be room.
    ///
    /// # Panics
    /// If there is none, or the slot is outstanding.
    pub fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        match self {
            Self::Split(ring) => ring.add(slot, pieces, table),
            Self::Packed(ring) => ring.add(slot, pieces, table),
        }
    }

    /// Lays out the request of `slot` for [`Ring::offer`], over and over. It keeps its descriptors from then on;
    /// laid out once more, it has as many pieces as before.
    ///
    /// # Panics
    /// If there is no room, or the number of pieces changed.
    pub fn prepare(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        match self {
            Self::Split(ring) => ring.prepare(slot, pieces, table),
            Self::Packed(ring) => ring.prepare(slot, pieces, table),
        }
    }

    /// Adds a request that was prepared.
    ///
    /// # Panics
    /// If it was not, or is outstanding.
    #[inline]
    pub fn offer(&mut self, slot: u16) {
        match self {
            Self::Split(ring) => ring.offer(slot),
            Self::Packed(ring) => ring.offer(slot),
        }
    }

    /// Shows the device what was added; whether it wants to be kicked.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// The next completion: its slot, and how many bytes were written.
    ///
    /// # Errors
    /// It is of nothing that is outstanding.
    #[inline]
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, NotOutstanding> {
        match self {
            Self::Split(ring) => ring.take(),
            Self::Packed(ring) => ring.take(),
        }
    }

    /// Whether [`Ring::take`] has something.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_ready(),
            Self::Packed(ring) => ring.is_ready(),
        }
    }

    /// Asks for a call at the next completion. What is there already may go without: look again.
    pub fn arm(&mut self) {
        match self {
            Self::Split(ring) => ring.arm(),
            Self::Packed(ring) => ring.arm(),
        }
    }

    /// Asks for no calls from now on: the ring is polled.
    pub fn disarm(&mut self) {
        match self {
            Self::Split(ring) => ring.disarm(),
            Self::Packed(ring) => ring.disarm(),
        }
    }

    /// What SET_VRING_BASE says of a device that did not say goodbye: where its completions end.
    #[must_use]
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
        }
    }
}

/// Section 2.7.10: whether an index went past `event` on its way from `old` to `new`.
const fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn write_desc(area: &GuestArea, at: u64, piece: Piece, two: [u16; 2]) {
    write_addr(area, at, piece);
    area.write(at as usize + 12, &two[0].to_le_bytes());
    area.write(at as usize + 14, &two[1].to_le_bytes());
}

/// The part of a descriptor that both formats share: address and length.
fn write_addr(area: &GuestArea, at: u64, piece: Piece) {
    area.write(at as usize, &Memory::guest_addr(piece.at).to_le_bytes());
    area.write(at as usize + 8, &piece.len.to_le_bytes());
}

const fn direction(piece: &Piece) -> u16 {
    if piece.write { WRITE } else { 0 }
}

/// The descriptor of an indirect table.
const fn indirect(table: u64, pieces: &[Piece]) -> Piece {
    Piece { at: table, len: 16 * pieces.len() as u32, write: false }
}

#[cfg(test)]
mod tests;
