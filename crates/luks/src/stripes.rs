//! Anti-forensic stripes: a key spread over many times its size, so that losing any part of it on the disk destroys the key. Any
//! context.
//!
//! All stripes but the last are random. A block starts as zeroes; for each of these stripes it is combined with the stripe by
//! XOR, then hashed. The last stripe is the key combined with the final block. The hash of a block is that of its parts: each
//! part of a digest's length is replaced by the digest of its number and itself, and a shorter last part by the digest's start.

use aryk_secrets::SecretBytes;

use crate::error::Error;
use crate::hash::Hash;
use crate::key::random;

/// The number of stripes that all programs write.
pub(crate) const STRIPES: u32 = 4000;
/// The largest number that is read: it bounds the memory for an area.
pub(crate) const STRIPES_MAX: u32 = 16_384;

/// The key of `key_len` bytes that `stripes` hold. Their length is a multiple of it.
pub(crate) fn merge(hash: Hash, stripes: &[u8], key_len: usize) -> SecretBytes {
    let (spread, last) = stripes.split_at(stripes.len() - key_len);
    let mut key = combined(hash, spread, key_len);
    xor(&mut key, last);
    key
}

/// `count` stripes that hold `key`.
pub(crate) fn split(hash: Hash, key: &[u8], count: u32) -> Result<SecretBytes, Error> {
    let mut stripes = SecretBytes::zeroed(key.len() * count as usize);
    let spread_len = stripes.len() - key.len();
    let (spread, last) = stripes.split_at_mut(spread_len);
    random(spread)?;
    last.copy_from_slice(&combined(hash, spread, key.len()));
    xor(last, key);
    Ok(stripes)
}

fn combined(hash: Hash, spread: &[u8], key_len: usize) -> SecretBytes {
    let mut block = SecretBytes::zeroed(key_len);
    for stripe in spread.chunks_exact(key_len) {
        xor(&mut block, stripe);
        for (number, part) in (0_u32..).zip(block.chunks_mut(hash.len())) {
            let digest = hash.digest(&[&number.to_be_bytes(), part]);
            part.copy_from_slice(&digest.as_ref()[..part.len()]);
        }
    }
    block
}

fn xor(block: &mut [u8], other: &[u8]) {
    for (byte, other) in block.iter_mut().zip(other) {
        *byte ^= other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stripe_is_needed() {
        for (hash, key_len) in [(Hash::Sha1, 32), (Hash::Sha256, 64), (Hash::Sha512, 32), (Hash::Sha512, 64)]
        {
            let key: Vec<u8> = (0..key_len).collect();
            let mut stripes = split(hash, &key, 20).unwrap();
            assert_eq!(*merge(hash, &stripes, key.len()), *key);
            for at in (0..stripes.len()).step_by(7) {
                stripes[at] ^= 1;
                assert_ne!(*merge(hash, &stripes, key.len()), *key, "{hash:?}, byte {at}");
                stripes[at] ^= 1;
            }
        }
    }

    #[test]
    fn a_single_stripe_is_the_key() {
        assert_eq!(*split(Hash::Sha256, &[7; 32], 1).unwrap(), [7; 32]);
        assert_eq!(*merge(Hash::Sha256, &[7; 32], 32), [7; 32]);
    }
}
