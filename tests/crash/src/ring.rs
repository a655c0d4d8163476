//! Virtqueues, driver side (virtio 1.2, sections 2.7 and 2.8). Test tool, the front-end's thread.
//!
//! They outlive the device: after a crash the same ring goes on with the next daemon.

mod packed;
mod split;

use std::fmt;

use aryk_dma::GuestArea;

use crate::memory::Memory;
use crate::random::Random;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// How a ring is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Descriptor table, available and used ring.
    Split,
    /// One ring of descriptors.
    Packed,
}

/// A piece of a request.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Offset into the memory.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes to it.
    pub write: bool,
}

/// The device gave back what it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Debug)]
pub enum Ring {
    /// Section 2.7.
    Split(split::Split),
    /// Section 2.8.
    Packed(packed::Packed),
}

impl Ring {
    /// An empty ring of `size` at offset `at` of the memory.
    #[must_use]
    pub fn new(
        format: Format,
        memory: &Memory,
        at: u64,
        size: u16,
        event_idx: bool,
        random: &mut Random,
    ) -> Self {
        let area = memory.whole().clone();
        match format {
            Format::Split => Self::Split(split::Split::new(area, at, size, event_idx, random)),
            Format::Packed => Self::Packed(packed::Packed::new(area, at, size, event_idx)),
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
    pub fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        match self {
            Self::Split(ring) => ring.add(slot, pieces, table),
            Self::Packed(ring) => ring.add(slot, pieces, table),
        }
    }

    /// Shows the device what was added; whether it wants to be kicked.
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
    pub fn arm(&self) {
        match self {
            Self::Split(ring) => ring.arm(),
            Self::Packed(ring) => ring.arm(),
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

#[cfg(test)]
mod tests;
