//! The units of requests and disks: block addresses, numbers of blocks, and bytes. Any context.
//!
//! A number gets its unit where it enters (from a wire, a command line, a store) and loses it where it leaves; in between, only
//! sums and conversions that mean something compile. The size of a block stays a `u32`: bytes in each block.
//!
//! Sums and conversions are exact for blocks that lie on a disk, because the registry refuses a disk whose bytes a `u64` does not
//! count. For values that are not checked yet, there are the `checked_` functions.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Rem, Sub, SubAssign};

/// The address of a block: how many blocks of the disk come before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Lba(pub u64);

/// A number of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Blocks(pub u64);

/// A number of bytes, or the offset of a byte in a disk or its store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Bytes(pub u64);

impl Lba {
    /// The first block of a disk.
    pub const ZERO: Self = Self(0);
    /// A block beyond the end of any disk.
    pub const MAX: Self = Self(u64::MAX);

    /// The address that is so many blocks further; `None` if no address is.
    #[inline]
    pub const fn checked_add(self, blocks: Blocks) -> Option<Self> {
        match self.0.checked_add(blocks.0) {
            Some(lba) => Some(Self(lba)),
            None => None,
        }
    }

    /// The offset of the block's first byte on a disk whose blocks have `block_size` bytes.
    #[inline]
    pub const fn to_bytes(self, block_size: u32) -> Bytes {
        Blocks(self.0).to_bytes(block_size)
    }
}

impl Blocks {
    /// No blocks.
    pub const ZERO: Self = Self(0);
    /// The largest number of blocks: as a limit, none.
    pub const MAX: Self = Self(u64::MAX);

    /// The bytes of so many blocks of `block_size` bytes.
    #[inline]
    pub const fn to_bytes(self, block_size: u32) -> Bytes {
        Bytes(self.0 * block_size as u64)
    }

    /// As [`Blocks::to_bytes`]; `None` if that is more than a `u64` holds.
    #[inline]
    pub const fn checked_to_bytes(self, block_size: u32) -> Option<Bytes> {
        match self.0.checked_mul(block_size as u64) {
            Some(bytes) => Some(Bytes(bytes)),
            None => None,
        }
    }

    /// The difference; none if `other` is larger.
    #[inline]
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Whether it is a multiple of `unit`; of none, only no blocks are.
    #[inline]
    pub const fn is_multiple_of(self, unit: Self) -> bool {
        self.0.is_multiple_of(unit.0)
    }
}

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);
    /// The largest number of bytes: as a limit, none.
    pub const MAX: Self = Self(u64::MAX);

    /// The number of blocks of `block_size` bytes; `None` if the last one is not whole.
    #[inline]
    pub const fn to_blocks(self, block_size: u32) -> Option<Blocks> {
        let is_whole = self.0.is_multiple_of(block_size as u64);
        if is_whole { Some(self.whole_blocks(block_size)) } else { None }
    }

    /// The number of whole blocks of `block_size` bytes; bytes that remain do not count.
    #[inline]
    pub const fn whole_blocks(self, block_size: u32) -> Blocks {
        Blocks(self.0 / block_size as u64)
    }

    /// The difference; none if `other` is larger.
    #[inline]
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Twice as many, or [`Bytes::MAX`].
    #[inline]
    #[must_use]
    pub const fn doubled(self) -> Self {
        Self(self.0.saturating_mul(2))
    }
}

impl Add<Blocks> for Lba {
    type Output = Self;

    #[inline]
    fn add(self, blocks: Blocks) -> Self {
        Self(self.0 + blocks.0)
    }
}

impl AddAssign<Blocks> for Lba {
    #[inline]
    fn add_assign(&mut self, blocks: Blocks) {
        self.0 += blocks.0;
    }
}

impl Sub<Blocks> for Lba {
    type Output = Self;

    #[inline]
    fn sub(self, blocks: Blocks) -> Self {
        Self(self.0 - blocks.0)
    }
}

impl Sub for Lba {
    type Output = Blocks;

    #[inline]
    fn sub(self, first: Self) -> Blocks {
        Blocks(self.0 - first.0)
    }
}

/// The blocks between an address and the multiple of `unit` at or before it.
impl Rem<Blocks> for Lba {
    type Output = Blocks;

    #[inline]
    fn rem(self, unit: Blocks) -> Blocks {
        Blocks(self.0 % unit.0)
    }
}

/// What numbers of blocks and of bytes have in common.
macro_rules! amount {
    ($type:ident) => {
        impl Add for $type {
            type Output = Self;

            #[inline]
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $type {
            #[inline]
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $type {
            type Output = Self;

            #[inline]
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl SubAssign for $type {
            #[inline]
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }

        impl Mul<u64> for $type {
            type Output = Self;

            #[inline]
            fn mul(self, times: u64) -> Self {
                Self(self.0 * times)
            }
        }

        impl Div<u64> for $type {
            type Output = Self;

            #[inline]
            fn div(self, parts: u64) -> Self {
                Self(self.0 / parts)
            }
        }

        impl Sum for $type {
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                all.fold(Self::ZERO, Add::add)
            }
        }
    };
}

amount!(Blocks);
amount!(Bytes);

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_numbers_of_blocks_add_up() {
        let end = Lba(5) + Blocks(3);
        assert_eq!((end, end - Lba(5), end - Blocks(8)), (Lba(8), Blocks(3), Lba::ZERO));
        assert_eq!(Lba(u64::MAX).checked_add(Blocks(1)), None);
        assert_eq!(Lba(21) % Blocks(8), Blocks(5));
        assert_eq!(Blocks(3).saturating_sub(Blocks(4)), Blocks::ZERO);
    }

    #[test]
    fn only_whole_blocks_are_blocks() {
        assert_eq!((Blocks(3).to_bytes(512), Lba(3).to_bytes(4096)), (Bytes(1536), Bytes(12_288)));
        assert_eq!(Blocks(1 << 55).checked_to_bytes(512), None);
        assert_eq!((Bytes(1536).to_blocks(512), Bytes(1537).to_blocks(512)), (Some(Blocks(3)), None));
        assert_eq!(Bytes(1537).whole_blocks(512), Blocks(3));
        assert_eq!(Bytes(1 << 63).doubled(), Bytes::MAX);
    }
}
