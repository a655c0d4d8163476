//! The driver side of virtqueues (virtio 1.2, sections 2.7 and 2.8). Runs on the front-end's thread; no allocation
//! once a ring exists.
//!
//! A ring may outlive its device and continue with the next one. The front-end tracks outstanding requests in its own
//! memory, never in the ring's.

mod packed;
mod split;

use crate::Memory;
use aryk_dma::GuestArea;
use std::fmt;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Bytes between the parts that the device writes and the driver's: two cache lines, which processors fetch as a
/// pair.
const APART: u64 = 128;

/// The layout of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Descriptor table, available and used ring.
    Split,
    /// One ring of descriptors.
    Packed,
}

/// The parameters of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The ring's layout.
    pub format: Format,
    /// Number of descriptors: a power of two.
    pub size: u16,
    /// Whether EVENT_IDX is negotiated.
    pub event_idx: bool,
}

impl Shape {
    /// Bytes of memory that the ring takes.
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

/// A buffer of a request, for one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset into the memory.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes to the buffer.
    pub write: bool,
}

/// The device completed a chain that is not outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NotOutstanding {
    /// The id in the used element.
    pub id: u32,
}

impl fmt::Display for NotOutstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the device completed id {}, which is not outstanding", self.id)
    }
}

/// Offsets of a ring's three parts in the memory.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// The descriptors.
    pub desc: u64,
    /// The driver area: the available ring, or the driver's event suppression.
    pub driver: u64,
    /// The device area: the used ring, or the device's event suppression.
    pub device: u64,
}

/// A ring and its outstanding requests.
///
/// A request is identified by its **slot**, a number below the ring's size.
#[derive(Debug)]
pub enum Ring {
    /// A split ring (section 2.7).
    Split(split::Split),
    /// A packed ring (section 2.8).
    Packed(packed::Packed),
}

impl Ring {
    /// Creates an empty ring at offset `at` of the memory, a multiple of the page size.
    ///
    /// # Panics
    /// If the ring's size is no power of two, or it does not lie in the memory.
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

    /// Sets the order in which descriptors are allocated, so that a new ring behaves like that of a driver that has
    /// run for a while. Packed rings have a fixed order. No request may be outstanding.
    ///
    /// # Panics
    /// If a request is outstanding, or `order` is not a permutation of all descriptors.
    pub fn set_order(&mut self, order: &[u16]) {
        if let Self::Split(ring) = self {
            ring.set_order(order);
        }
    }

    /// The offsets of the ring's parts.
    #[must_use]
    pub const fn parts(&self) -> Parts {
        match self {
            Self::Split(ring) => ring.parts(),
            Self::Packed(ring) => ring.parts(),
        }
    }

    /// Number of free descriptors.
    #[must_use]
    pub const fn room(&self) -> usize {
        match self {
            Self::Split(ring) => ring.room(),
            Self::Packed(ring) => ring.room(),
        }
    }

    /// Adds the request of `slot`; `table` is the place of its indirect table, if it gets one. Needs free
    /// descriptors.
    ///
    /// # Panics
    /// If descriptors are missing, or the slot is outstanding.
    pub fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        match self {
            Self::Split(ring) => ring.add(slot, pieces, table),
            Self::Packed(ring) => ring.add(slot, pieces, table),
        }
    }

    /// Lays out the request of `slot` for repeated [`Ring::offer`]. The request keeps its descriptors from then on;
    /// another `prepare` of the slot must have the same number of pieces.
    ///
    /// # Panics
    /// If descriptors are missing, or the number of pieces changed.
    pub fn prepare(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        match self {
            Self::Split(ring) => ring.prepare(slot, pieces, table),
            Self::Packed(ring) => ring.prepare(slot, pieces, table),
        }
    }

    /// Adds a request that [`Ring::prepare`] laid out.
    ///
    /// # Panics
    /// If the slot is not prepared, or is outstanding.
    #[inline]
    pub fn offer(&mut self, slot: u16) {
        match self {
            Self::Split(ring) => ring.offer(slot),
            Self::Packed(ring) => ring.offer(slot),
        }
    }

    /// Makes the added requests visible to the device. Returns whether the device asks for a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// Takes the next completion: its slot, and the bytes that the device wrote.
    ///
    /// # Errors
    /// The completed chain is not outstanding.
    #[inline]
    pub fn take(&mut self) -> Result<Option<(u16, u32)>, NotOutstanding> {
        match self {
            Self::Split(ring) => ring.take(),
            Self::Packed(ring) => ring.take(),
        }
    }

    /// Whether [`Ring::take`] would return a completion.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_ready(),
            Self::Packed(ring) => ring.is_ready(),
        }
    }

    /// Asks for a call at the next completion. Completions that exist already may cause none: poll once more after
    /// `arm`.
    pub fn arm(&mut self) {
        match self {
            Self::Split(ring) => ring.arm(),
            Self::Packed(ring) => ring.arm(),
        }
    }

    /// Asks for no calls: the ring is polled from now on.
    pub fn disarm(&mut self) {
        match self {
            Self::Split(ring) => ring.disarm(),
            Self::Packed(ring) => ring.disarm(),
        }
    }

    /// The index for SET_VRING_BASE after a device that ended without GET_VRING_BASE: the end of its completions.
    #[must_use]
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
        }
    }
}

/// Section 2.7.10: whether an index passed `event` between `old` and `new`.
const fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn write_desc(area: &GuestArea, at: u64, piece: Piece, two: [u16; 2]) {
    write_addr(area, at, piece);
    area.write(at as usize + 12, &two[0].to_le_bytes());
    area.write(at as usize + 14, &two[1].to_le_bytes());
}

/// Writes the fields of a descriptor that both formats share: address and length.
fn write_addr(area: &GuestArea, at: u64, piece: Piece) {
    area.write(at as usize, &Memory::guest_addr(piece.at).to_le_bytes());
    area.write(at as usize + 8, &piece.len.to_le_bytes());
}

const fn direction(piece: &Piece) -> u16 {
    if piece.write { WRITE } else { 0 }
}

/// The descriptor that refers to an indirect table.
const fn indirect(table: u64, pieces: &[Piece]) -> Piece {
    Piece { at: table, len: 16 * pieces.len() as u32, write: false }
}

#[cfg(test)]
mod tests;
