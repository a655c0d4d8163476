//! How the position of data on a disk becomes its tweak. Pure; any context.
//!
//! A tweak is a number of 128 bits, and in each mode the tweaks of consecutive sectors are an arithmetic sequence. Four modes are
//! SPDK's; [`TweakMode::Plain64`] is that of dm-crypt's `aes-xts-plain64`. SPDK's engines disagree about
//! [`TweakMode::SimpleLba`]: its software, the default, puts the LBA into the high half, and so does this module; its drivers of
//! cryptographic hardware put the LBA into the low half.

use aryk_aes_xts::{SectorSize, Tweaks};
use aryk_bdev::Lba;

/// The unit in which most modes count.
const UNIT: u32 = 512;

/// No disk has more units: its bytes are a `u64`.
const UNITS_MAX: u64 = 1 << 55;

/// How the position of data on a disk becomes its tweak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TweakMode {
    /// The high half of a block's tweak is its LBA.
    SimpleLba,
    /// The low half of a block's tweak is its LBA; the high half is the complement of the LBA's low 63 bits.
    JoinNegLbaWithLba,
    /// Each 512 bytes have a tweak of their own, which is their number on the disk.
    Incr512FullLba,
    /// Each 512 bytes have a tweak of their own, whose high half is their number on the disk.
    Incr512UpperLba,
    /// As dm-crypt's `plain64`: the tweak of a sector is the number of its first 512 bytes on the disk, plus an offset.
    Plain64 {
        /// Added to each number, in units of 512 bytes: a multiple of the sector size. dm-crypt calls it `iv_offset`.
        iv_offset: u64,
        /// Bytes that are encrypted together: a power of two from 512 to 4096. A block of the disk has at least as many.
        sector_size: u32,
        /// Whether the tweak counts sectors instead of 512 bytes. dm-crypt calls it `iv_large_sectors`.
        iv_large_sectors: bool,
    },
}

/// Why a tweak mode does not fit a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TweakError {
    /// The sector size is none that dm-crypt has.
    #[error("a sector size of {0} is not 512, 1024, 2048 or 4096")]
    SectorSize(u32),
    /// The offset is within a sector, or so large that numbers would wrap.
    #[error("an IV offset of {0} is not a multiple of the sector size, or is above 2^64 - 2^55")]
    Offset(u64),
    /// A block of the disk is larger than a sector of AES-XTS.
    #[error("AES-XTS cannot encrypt blocks of {0} bytes")]
    BlockSize(u32),
    /// With the tweak mode, the blocks of the disk would have the first size. They have the second one.
    #[error("with this tweak mode, the disk would have blocks of {0} bytes, and it has blocks of {1} bytes")]
    OtherBlocks(u32, u32),
    /// The new key of a rotation is the old one: another tweak mode alone does not make it a new key.
    #[error("the disk is encrypted with this key")]
    SameKey,
}

/// The sectors of a disk, and their tweaks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Bytes that have one tweak.
    pub sector: SectorSize,
    /// Bytes in a block of the disk.
    pub block_size: u32,
    mode: TweakMode,
}

impl Layout {
    /// The layout of a disk on a base with blocks of `block_size` bytes. A block of the disk is at least a sector.
    pub fn new(mode: TweakMode, block_size: u32) -> Result<Self, TweakError> {
        let bytes = match mode {
            TweakMode::SimpleLba | TweakMode::JoinNegLbaWithLba => block_size,
            TweakMode::Incr512FullLba | TweakMode::Incr512UpperLba => UNIT,
            TweakMode::Plain64 { iv_offset, sector_size, .. } => {
                if !matches!(sector_size, 512 | 1024 | 2048 | 4096) {
                    return Err(TweakError::SectorSize(sector_size));
                }
                let is_within = iv_offset.is_multiple_of(u64::from(sector_size / UNIT));
                if !is_within || iv_offset > u64::MAX - UNITS_MAX + 1 {
                    return Err(TweakError::Offset(iv_offset));
                }
                sector_size
            }
        };
        let sector = SectorSize::new(bytes as usize).map_err(|_| TweakError::BlockSize(block_size))?;
        Ok(Self { sector, block_size: block_size.max(bytes), mode })
    }

    /// The block that is `bytes` bytes, a whole number of blocks, after `lba`.
    pub const fn block_after(&self, lba: Lba, bytes: usize) -> Lba {
        Lba(lba.0 + bytes as u64 / self.block_size as u64)
    }

    /// Bytes that are equal for equal layouts only.
    pub fn fingerprint(&self) -> [u8; 16] {
        let (mode, offset) = match self.mode {
            TweakMode::SimpleLba => (0, 0),
            TweakMode::JoinNegLbaWithLba => (1, 0),
            TweakMode::Incr512FullLba => (2, 0),
            TweakMode::Incr512UpperLba => (3, 0),
            TweakMode::Plain64 { iv_offset, iv_large_sectors: false, .. } => (4, iv_offset),
            TweakMode::Plain64 { iv_offset, iv_large_sectors: true, .. } => (5, iv_offset),
        };
        let sector = self.sector.bytes() as u64;
        (u128::from(offset) << 64 | u128::from(sector << 8 | mode)).to_le_bytes()
    }

    /// The tweaks from a block on.
    #[inline]
    pub fn tweaks(&self, lba: Lba) -> Tweaks {
        // Exact: the block is on the disk, whose bytes are a `u64`.
        let units = lba.0 * u64::from(self.block_size / UNIT);
        match self.mode {
            TweakMode::SimpleLba => Tweaks { start: u128::from(lba.0) << 64, step: 1 << 64 },
            TweakMode::JoinNegLbaWithLba => {
                let high = !lba.0 & (u64::MAX >> 1);
                // The low half grows by one, the high half shrinks by one.
                Tweaks {
                    start: u128::from(high) << 64 | u128::from(lba.0),
                    step: 1_u128.wrapping_sub(1 << 64),
                }
            }
            TweakMode::Incr512FullLba => Tweaks { start: units.into(), step: 1 },
            TweakMode::Incr512UpperLba => Tweaks { start: u128::from(units) << 64, step: 1 << 64 },
            TweakMode::Plain64 { iv_offset, sector_size, iv_large_sectors } => {
                let (number, in_sector) = (units + iv_offset, u64::from(sector_size / UNIT));
                match iv_large_sectors {
                    true => Tweaks { start: (number / in_sector).into(), step: 1 },
                    false => Tweaks { start: number.into(), step: in_sector.into() },
                }
            }
        }
    }
}
