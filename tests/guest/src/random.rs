//! Random numbers that a seed repeats. Test tool, any thread.

use fastrand::Rng;

/// A generator; `stream` distinguishes the generators of one seed.
#[must_use]
pub fn stream(seed: u64, stream: u64) -> Rng {
    Rng::with_seed(mix(seed).wrapping_add(mix(stream ^ 0x5851_f42d_4c95_7f2d)))
}

/// Spreads a number over all bits, the same on every platform.
#[must_use]
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
