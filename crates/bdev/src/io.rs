//! A request, its completion, and their parts. Reactor context.

use crate::{Blocks, Lba};
use aryk_dma::Sgl;

/// The submitter's identifier of a request. The completion has the same tag; the device does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u64);

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Op {
    /// Reads blocks into memory.
    Read,
    /// Writes memory to blocks.
    Write,
    /// Makes every write that has completed durable.
    Flush,
    /// Returns the blocks' space to the store. Afterwards the blocks read as zeroes, or as before.
    Unmap,
    /// Makes blocks read as zeroes. [`Io::may_unmap`] says whether the store may free their space.
    WriteZeroes,
    /// Compares blocks with memory.
    Compare,
    /// Compares blocks with the first half of the memory and, if they are equal, writes the second half. No other request, on any
    /// channel, changes these blocks in between.
    CompareAndWrite,
    /// Copies blocks to other blocks of the disk. If the two ranges overlap, the target gets the data that the source had before.
    Copy,
}

impl Op {
    /// All operations.
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Unmap,
        Self::WriteZeroes,
        Self::Compare,
        Self::CompareAndWrite,
        Self::Copy,
    ];

    /// Whether a request with this operation has data in memory.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Compare | Self::CompareAndWrite)
    }

    /// Whether the operation changes the disk.
    pub const fn is_change(self) -> bool {
        matches!(self, Self::Write | Self::Unmap | Self::WriteZeroes | Self::CompareAndWrite | Self::Copy)
    }

    /// Whether the block layer builds the operation from reads and writes if the device does not support it.
    #[inline]
    pub const fn is_compound(self) -> bool {
        self as u8 >= Self::Compare as u8
    }

    /// The operation's name in RPC.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Unmap => "unmap",
            Self::WriteZeroes => "write_zeroes",
            Self::Compare => "compare",
            Self::CompareAndWrite => "compare_and_write",
            Self::Copy => "copy",
        }
    }
}

/// A set of operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpSet(u8);

impl OpSet {
    /// Every operation.
    pub const ALL: Self = Self::of(&Op::ALL);

    /// The operations that the block layer does not build from others.
    pub const PLAIN: Self = Self::of(&[Op::Read, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes]);

    /// The set without operations that change the disk.
    #[must_use]
    pub const fn without_changes(self) -> Self {
        let mut bits = self.0;
        let mut i = 0;
        while i < Op::ALL.len() {
            if Op::ALL[i].is_change() {
                bits &= !(1 << Op::ALL[i] as u8);
            }
            i += 1;
        }
        Self(bits)
    }

    /// The set of these operations.
    pub const fn of(ops: &[Op]) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < ops.len() {
            bits |= 1 << ops[i] as u8;
            i += 1;
        }
        Self(bits)
    }

    /// Whether `op` is among them.
    pub const fn contains(self, op: Op) -> bool {
        self.0 >> op as u8 & 1 == 1
    }

    /// The set with `op` added.
    #[must_use]
    pub const fn with(self, op: Op) -> Self {
        Self(self.0 | 1 << op as u8)
    }

    /// The set with `op` removed.
    #[must_use]
    pub const fn without(self, op: Op) -> Self {
        Self(self.0 & !(1 << op as u8))
    }
}

/// A request. The opener of a disk hands it over by value; a device's channel copies what it keeps.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// The submitter's identifier.
    pub tag: Tag,
    /// The operation.
    pub op: Op,
    /// The write is durable when it completes.
    pub fua: bool,
    /// For a write-zeroes: whether the store may free the blocks' space. If not, the blocks have space in the store afterwards.
    /// `false` for other operations.
    pub may_unmap: bool,
    /// The first block.
    pub lba: Lba,
    /// The number of blocks; none for a flush.
    pub blocks: Blocks,
    /// The first block that a copy reads; [`Lba::ZERO`] for other operations.
    pub source: Lba,
    /// The data in memory: the bytes of the blocks for a read, a write or a compare, twice that for a compare-and-write, nothing
    /// for other operations.
    pub data: Sgl,
}

const _: () = assert!(size_of::<Io>() <= 64, "a request fits a cache line");

/// The result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request is malformed: it has no blocks, or data of a length that does not match its blocks.
    Invalid,
    /// The request reaches beyond the end of the disk.
    OutOfRange,
    /// The disk does not support the operation.
    Unsupported,
    /// The disk is read-only, or was opened read-only.
    ReadOnly,
    /// The store is full.
    NoSpace,
    /// Another host has reserved the store.
    ReservationConflict,
    /// The store refuses access, for example because it is locked.
    AccessDenied,
    /// The store failed.
    Medium,
    /// The request was aborted, by its submitter or by a reset.
    Aborted,
    /// The disk has been removed.
    Removed,
    /// A compare found different data in the blocks.
    Miscompare,
}

impl Status {
    /// Whether the request succeeded.
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }

    /// This status if it is a failure, otherwise `other`.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        if self.is_ok() { other } else { self }
    }
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: Tag,
    /// The request's result.
    pub status: Status,
}
