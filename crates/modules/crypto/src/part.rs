//! The part of its base that a disk encrypts, and the disk's blocks. Pure; any context.
//!
//! A block of the disk is a block of the base, or a sector of the encryption if that is larger: as in dm-crypt, a sector is then
//! read and written as a whole.

use aryk_bdev::{Blocks, Bytes, Geometry, Lba, Limits};

/// The part of a base that a disk encrypts; by default the whole base.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Area {
    /// Bytes of the base before the part.
    pub offset: Bytes,
    /// Bytes of the part; `None` if it extends to the end of the base, also when the base is resized.
    pub size: Option<Bytes>,
}

/// Why a part does not fit the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AreaError {
    /// The part begins or ends within a block.
    #[error("{0} bytes are not whole blocks of {1} bytes")]
    Unaligned(Bytes, u32),
    /// The base is too small.
    #[error("its data needs {needed} bytes from byte {offset} on, and the base disk has {base} bytes in all")]
    TooSmall {
        /// Start of the part.
        offset: Bytes,
        /// Bytes of the part: at least one block.
        needed: Bytes,
        /// Bytes of the base.
        base: Bytes,
    },
}

/// As [`Area`], in blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Bytes in a block of the disk.
    pub block_size: u32,
    /// Blocks of the base in a block of the disk.
    ratio: u64,
    /// Blocks of the base before the first block of the disk.
    offset: Blocks,
    /// Blocks of the disk, at most.
    blocks_max: Blocks,
}

impl Part {
    /// The part `area` of a disk with the geometry `base`, in blocks of `block_size` bytes: blocks of the base, or larger.
    pub fn new(area: Area, block_size: u32, base: Geometry) -> Result<Self, AreaError> {
        let blocks = |bytes: Bytes, of: u32| bytes.to_blocks(of).ok_or(AreaError::Unaligned(bytes, of));
        let part = Self {
            block_size,
            ratio: u64::from(block_size / base.block_size),
            offset: blocks(area.offset, base.block_size)?,
            blocks_max: area.size.map_or(Ok(Blocks::MAX), |size| blocks(size, block_size))?,
        };
        let needed = area.size.unwrap_or_default().max(Bytes(block_size.into()));
        if part.blocks(base).to_bytes(block_size) < needed {
            let base = base.blocks.to_bytes(base.block_size);
            return Err(AreaError::TooSmall { offset: area.offset, needed, base });
        }
        Ok(part)
    }

    /// The disk's blocks that are on the base.
    fn blocks(&self, base: Geometry) -> Blocks {
        (base.blocks.saturating_sub(self.offset) / self.ratio).min(self.blocks_max)
    }

    /// Whether the disk has the blocks of the base, from the same block on.
    fn is_congruent(&self) -> bool {
        (self.offset, self.ratio) == (Blocks::ZERO, 1)
    }

    pub fn geometry(&self, base: Geometry) -> Geometry {
        let optimal = base.optimal_io_blocks;
        let is_aligned = self.offset.is_multiple_of(optimal) && optimal.is_multiple_of(Blocks(self.ratio));
        Geometry {
            block_size: self.block_size,
            physical_block_size: base.physical_block_size.max(self.block_size),
            blocks: self.blocks(base),
            optimal_io_blocks: if is_aligned { optimal / self.ratio } else { Blocks::ZERO },
        }
    }

    /// The limits of the base, in blocks of the disk, for the operations of crypto disks. The boundaries of the base are
    /// elsewhere on the disk: the base's channel splits there, also writes that it would otherwise store at once.
    pub fn limits(&self, base: Limits) -> Limits {
        if self.is_congruent() {
            return base;
        }
        let in_blocks = |limit: Blocks| (limit / self.ratio).max(Blocks(1));
        let has_boundary = base.boundary_blocks != Blocks::ZERO;
        Limits {
            transfer_blocks: in_blocks(base.transfer_blocks),
            unmap_blocks: in_blocks(base.unmap_blocks),
            boundary_blocks: Blocks::ZERO,
            atomic_blocks: if has_boundary { Blocks(1) } else { in_blocks(base.atomic_blocks) },
            ..base
        }
    }

    /// The place on the base of blocks of the disk.
    #[inline]
    pub fn on_base(&self, lba: Lba, blocks: Blocks) -> (Lba, Blocks) {
        (Lba(lba.0 * self.ratio) + self.offset, blocks * self.ratio)
    }

    /// The block of the disk that has this block of the base.
    pub fn of_base(&self, lba: Lba) -> Option<Lba> {
        Some(Lba(lba.0.checked_sub(self.offset.0)? / self.ratio))
    }
}
