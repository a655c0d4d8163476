//! The content of sectors that the test writes, and its recognition. Test tool, any thread.
//!
//! Every sector carries its own number and that of its write; its other bytes are computed from the two numbers, so a
//! torn sector, or one in the wrong place, differs from every sector that was ever written.

use std::fmt;

use crate::random::mix;

/// Bytes in a sector: the unit of all checks, for every block size of the disk.
pub const SECTOR: usize = 512;

/// The content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The content that write number `0` left.
    Written(u64),
    /// Nothing but zeroes.
    Zero,
    /// A content that no request wrote into this sector.
    Foreign {
        /// The sector's number, as the content says.
        sector: u64,
        /// The write's number, as the content says.
        seq: u64,
        /// The first byte that differs from the content of these two numbers.
        differs_at: usize,
    },
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Written(seq) => write!(f, "write {seq}"),
            Self::Zero => f.write_str("zeroes"),
            Self::Foreign { sector, seq, differs_at } => {
                write!(f, "sector {sector} of write {seq}, other bytes from {differs_at} on")
            }
        }
    }
}

/// The content of `sector` after write `seq`.
#[must_use]
pub fn fill(sector: u64, seq: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..16].copy_from_slice(&seq.to_le_bytes());
    let mut word = mix(seq.wrapping_mul(0x1_0001).wrapping_add(mix(sector + 1)));
    for place in bytes[16..].chunks_exact_mut(8) {
        place.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
    }
    bytes
}

/// Recognizes the content of bytes that were read from `sector`.
#[must_use]
pub fn identify(sector: u64, bytes: &[u8; SECTOR]) -> Content {
    if bytes.iter().all(|&b| b == 0) {
        return Content::Zero;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let (says, seq) = (word(0), word(8));
    let expected = fill(says, seq);
    match bytes.iter().zip(&expected).position(|(a, b)| a != b) {
        None if says == sector => Content::Written(seq),
        differs => Content::Foreign { sector: says, seq, differs_at: differs.unwrap_or(SECTOR) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_known_again_and_others_are_not() {
        let bytes = fill(7, 3);
        assert_eq!(identify(7, &bytes), Content::Written(3));
        assert_eq!(identify(8, &bytes), Content::Foreign { sector: 7, seq: 3, differs_at: SECTOR });
        let mut torn = bytes;
        torn[256..].copy_from_slice(&fill(7, 4)[256..]);
        assert_eq!(identify(7, &torn), Content::Foreign { sector: 7, seq: 3, differs_at: 256 });
        assert_eq!(identify(7, &[0; SECTOR]), Content::Zero);
    }
}
