//! The content of units: each write has a value of its own, from which its units' bytes follow.

use crate::disk::SECTOR;

/// Bytes of a unit.
pub const UNIT: usize = SECTOR as usize;

/// The value of zeroes.
pub const ZERO: u64 = 0;

/// The value of a foreign disk's content.
pub const fn foreign(disk: u32) -> u64 {
    1 << 63 | disk as u64
}

/// Fills a unit with the content that this value has at this place.
pub fn fill(bytes: &mut [u8], value: u64, unit: u64) {
    assert_eq!(bytes.len(), UNIT);
    if value == ZERO {
        bytes.fill(0);
        return;
    }
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&word_at(value, unit, n as u64).to_le_bytes());
    }
}

/// The value of a unit's content at this place; `None` if it is no such content.
pub fn value(bytes: &[u8], unit: u64) -> Option<u64> {
    let value = u64::from_le_bytes(bytes[..8].try_into().ok()?);
    let is_right = |(n, word): (usize, &[u8])| {
        let expected = if value == ZERO { 0 } else { word_at(value, unit, n as u64) };
        word == expected.to_le_bytes()
    };
    bytes.chunks_exact(8).enumerate().all(is_right).then_some(value)
}

const fn word_at(value: u64, unit: u64, n: u64) -> u64 {
    if n == 0 {
        return value;
    }
    (value ^ unit.rotate_left(40)).wrapping_add(n).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_tells_value_and_place() {
        let mut bytes = [1; UNIT];
        for of in [ZERO, 1, 77, foreign(3)] {
            fill(&mut bytes, of, 9);
            assert_eq!(value(&bytes, 9), Some(of));
            assert_eq!(value(&bytes, 10), (of == ZERO).then_some(ZERO));
        }
        bytes[300] ^= 1;
        assert_eq!(value(&bytes, 9), None);
    }
}
