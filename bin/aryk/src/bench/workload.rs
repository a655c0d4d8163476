//! The block and the time of the next request.

use super::args::Mix;
use aryk_front_end::Operation;

/// A small pseudo-random generator (SplitMix64), sufficient for a load.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..limit`.
    #[inline]
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.next() as u128 * limit as u128) >> 64) as u64
    }

    /// The time to the next event in ns, of independent events at `rate` per second.
    pub fn gap(&mut self, rate: f64) -> f64 {
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        -(1.0 - unit).ln() / rate * 1e9
    }
}

/// A stream of requests.
#[derive(Debug, Clone)]
pub struct Source {
    mix: Mix,
    blocks: u64,
    random: Random,
    next: u64,
    /// The blocks to read, if not all blocks.
    listed: Vec<u64>,
}

impl Source {
    /// Requests to `blocks` blocks.
    pub const fn new(mix: Mix, blocks: u64, seed: u64) -> Self {
        Self { mix, blocks, random: Random::new(seed), next: 0, listed: Vec::new() }
    }

    /// Reads of these blocks in order.
    pub const fn reading(listed: Vec<u64>) -> Self {
        let mix = Mix { is_random: false, reads: 100 };
        Self { mix, blocks: listed.len() as u64, random: Random::new(0), next: 0, listed }
    }

    /// The next request: operation and block.
    #[inline]
    pub fn next(&mut self) -> (Operation, u64) {
        let block = if self.mix.is_random {
            self.random.below(self.blocks)
        } else {
            let block = self.next;
            self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
            block
        };
        let is_read = match self.mix.reads {
            100 => true,
            0 => false,
            reads => self.random.below(100) < u64::from(reads),
        };
        let block = self.listed.get(block as usize).copied().unwrap_or(block);
        (if is_read { Operation::Read } else { Operation::Write }, block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_have_their_share_of_reads() {
        let mut source = Source::new(Mix { is_random: true, reads: 70 }, 100, 1);
        let all: Vec<_> = (0..10_000).map(|_| source.next()).collect();
        let reads = all.iter().filter(|(operation, _)| *operation == Operation::Read).count();
        assert!((6_700..7_300).contains(&reads), "{reads}");
        for block in 0..100 {
            assert!(all.iter().any(|(_, b)| *b == block), "{block} was never requested");
        }
    }

    #[test]
    fn sequential_blocks_wrap_around() {
        let mut source = Source::new(Mix { is_random: false, reads: 0 }, 3, 1);
        let blocks: Vec<_> = (0..7).map(|_| source.next().1).collect();
        assert_eq!(blocks, [0, 1, 2, 0, 1, 2, 0]);
        let mut source = Source::reading(vec![7, 9]);
        assert_eq!([source.next(), source.next()], [(Operation::Read, 7), (Operation::Read, 9)]);
    }

    #[test]
    fn gaps_have_the_mean_of_the_rate() {
        let mut random = Random::new(7);
        let mean = (0..10_000).map(|_| random.gap(1e6)).sum::<f64>() / 1e4;
        assert!((950.0..1_050.0).contains(&mean), "{mean} ns");
    }
}
