//! Latencies in log-linear buckets: eight to each power of two, so that a value is known to one part in eight. Any context.

/// Buckets to each power of two, and its logarithm.
const SUB: u64 = 8;
const SUB_BITS: u32 = SUB.trailing_zeros();
/// The last bucket takes everything from about 34 s on.
const BUCKETS: usize = 33 * SUB as usize;

/// Counts of values, by size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: Box<[u32; BUCKETS]>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]) }
    }
}

const fn index(value: u64) -> usize {
    if value < SUB {
        return value as usize;
    }
    let octave = value.ilog2() - SUB_BITS;
    let bucket = (octave as u64 + 1) * SUB + ((value >> octave) - SUB);
    if bucket < BUCKETS as u64 { bucket as usize } else { BUCKETS - 1 }
}

/// The smallest value of a bucket.
const fn lower(index: usize) -> u64 {
    let (octave, sub) = (index as u64 / SUB, index as u64 % SUB);
    if octave == 0 { sub } else { (SUB + sub) << (octave - 1) }
}

impl Histogram {
    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        let count = &mut self.counts[index(value)];
        *count = count.saturating_add(1);
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts.iter()) {
            *mine = mine.saturating_add(*theirs);
        }
    }

    /// How many values there are.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|&c| u64::from(c)).sum()
    }

    /// The value that `quantile` (0 to 1) of all values do not exceed, to the bucket's precision; 0 if there are none.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let wanted = ((self.total() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (i, &count) in self.counts.iter().enumerate() {
            seen += u64::from(count);
            if seen >= wanted {
                return lower(i + 1) - 1;
            }
        }
        0
    }

    /// Each bucket that is not empty: its smallest value, the next one's, and the count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let used = self.counts.iter().enumerate().filter(|(_, c)| **c > 0);
        used.map(|(i, &count)| (lower(i), lower(i + 1), u64::from(count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_adjoin_and_hold_their_values() {
        for i in 0..BUCKETS - 1 {
            assert!(lower(i) < lower(i + 1));
            assert_eq!((index(lower(i)), index(lower(i + 1) - 1)), (i, i));
        }
        assert_eq!(index(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_right_to_an_eighth() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile(0.5), 0);
        (1..=1000).for_each(|v| h.record(v * 1000));
        let mut twice = h.clone();
        twice.merge(&h);
        for (q, exact) in [(0.5, 500_000), (0.99, 990_000), (0.0, 1000), (1.0, 1_000_000)] {
            let got = twice.quantile(q);
            assert!(got >= exact && got <= exact + exact / 8, "{q}: {got}");
        }
        assert_eq!((twice.total(), twice.buckets().map(|b| b.2).sum::<u64>()), (2000, 2000));
    }
}
