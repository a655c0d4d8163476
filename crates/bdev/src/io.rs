//! A request, its completion, and their parts. Reactor context.

use crate::{Blocks, Lba};
use aryk_dma::Sgl;

/// What the submitter calls a request by; it comes back with the completion, and means nothing to anyone else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u64);

/// What a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Op {
    /// Blocks into memory.
    Read,
    /// Memory into blocks.
    Write,
    /// Makes every write that has completed durable.
    Flush,
    /// Gives blocks back to the store: what they read as afterwards is zeroes, or what they held.
    Unmap,
    /// Makes blocks read as zeroes. [`Io::may_unmap`] says whether the store may give their space back.
    WriteZeroes,
    /// Compares blocks with memory.
    Compare,
    /// Compares blocks with the first half of the memory, and if they are the same, writes the second half: no change of
    /// these blocks, through whichever channel, comes between.
    CompareAndWrite,
    /// Copies blocks to other blocks of the disk, which hold in the end what the first held at the beginning, also if the
    /// two overlap.
    Copy,
}

impl Op {
    /// All of them.
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

    /// Whether it carries data.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Compare | Self::CompareAndWrite)
    }

    /// Whether it changes the disk.
    pub const fn is_change(self) -> bool {
        matches!(self, Self::Write | Self::Unmap | Self::WriteZeroes | Self::CompareAndWrite | Self::Copy)
    }

    /// Whether the block layer makes it of reads and writes where the device does not do it.
    #[inline]
    pub const fn is_compound(self) -> bool {
        self as u8 >= Self::Compare as u8
    }

    /// Its name, as RPC has it.
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

    /// Every operation that the block layer does not make of others.
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
    /// The submitter's.
    pub tag: Tag,
    /// The operation.
    pub op: Op,
    /// The write is durable when it completes.
    pub fua: bool,
    /// The blocks of a write-zeroes may be given back to the store. If not, they have their place in it afterwards; false
    /// for all else.
    pub may_unmap: bool,
    /// The first block.
    pub lba: Lba,
    /// How many blocks; a flush has none.
    pub blocks: Blocks,
    /// The first of the blocks that a copy reads; [`Lba::ZERO`] for all else.
    pub source: Lba,
    /// Where the data lies: as many bytes as the blocks have for a read, a write or a compare, twice as many for a
    /// compare-and-write, none otherwise.
    pub data: Sgl,
}

const _: () = assert!(size_of::<Io>() <= 64, "a request fits a cache line");

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// Something about it is wrong: no blocks, or data of another length than the blocks.
    Invalid,
    /// It reaches beyond the disk's end.
    OutOfRange,
    /// The disk does not do this.
    Unsupported,
    /// The disk, or this opening of it, is read-only.
    ReadOnly,
    /// The store is full.
    NoSpace,
    /// The store failed.
    Medium,
    /// It was aborted, by its submitter or by a reset.
    Aborted,
    /// The disk has been removed.
    Removed,
    /// The blocks hold other data than they were compared with.
    Miscompare,
}

impl Status {
    /// Whether it was done.
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }

    /// The first failure of the two.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        if self.is_ok() { other } else { self }
    }
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The request's.
    pub tag: Tag,
    /// How it ended.
    pub status: Status,
}
