//! The block and the time of the next request.

use super::args::Mix;
use aryk_front_end::Operation;
use fastrand::Rng;

/// The time to the next event in ns, of independent events at `rate` per second.
pub fn gap(random: &mut Rng, rate: f64) -> f64 {
    -(1.0 - random.f64()).ln() / rate * 1e9
}

/// A stream of requests.
#[derive(Debug, Clone)]
pub struct Source {
    mix: Mix,
    blocks: u64,
    random: Rng,
    next: u64,
    /// The blocks to read, if not all blocks.
    listed: Vec<u64>,
}

impl Source {
    /// Requests to `blocks` blocks.
    pub fn new(mix: Mix, blocks: u64, seed: u64) -> Self {
        Self { mix, blocks, random: Rng::with_seed(seed), next: 0, listed: Vec::new() }
    }

    /// Reads of these blocks in order.
    pub fn reading(listed: Vec<u64>) -> Self {
        let mix = Mix { is_random: false, reads: 100 };
        Self { mix, blocks: listed.len() as u64, random: Rng::with_seed(0), next: 0, listed }
    }

    /// The next request: operation and block.
    #[inline]
    pub fn next(&mut self) -> (Operation, u64) {
        let block = if self.mix.is_random {
            self.random.u64(..self.blocks)
        } else {
            let block = self.next;
            self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
            block
        };
        let is_read = match self.mix.reads {
            100 => true,
            0 => false,
            reads => self.random.u64(..100) < u64::from(reads),
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
        let mut random = Rng::with_seed(7);
        let mean = (0..10_000).map(|_| gap(&mut random, 1e6)).sum::<f64>() / 1e4;
        assert!((950.0..1_050.0).contains(&mean), "{mean} ns");
    }
}
