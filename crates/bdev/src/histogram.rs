//! Latencies in log-linear buckets: eight to each power of two, so that a value is known to one part in eight. Any context.

use crate::Op;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets to each power of two, and its logarithm.
const SUB: u64 = 8;
const SUB_BITS: u32 = SUB.trailing_zeros();
/// The last bucket takes everything from about 128 s on.
const BUCKETS: usize = 35 * SUB as usize;

/// Counts of values, by size.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Made with the first value: of most disks, most operations are never used.
    counts: Option<Box<[u64; BUCKETS]>>,
}

impl PartialEq for Histogram {
    fn eq(&self, other: &Self) -> bool {
        self.counts() == other.counts()
    }
}

impl Eq for Histogram {}

/// A histogram to which one thread adds while others read.
#[derive(Debug, Default)]
pub struct SharedHistogram {
    /// Made with the first value.
    counts: OnceLock<Box<[AtomicU64; BUCKETS]>>,
}

impl SharedHistogram {
    /// Counts one value. If several threads call this at the same time, counts are lost.
    #[inline]
    pub fn record(&self, value: u64) {
        let counts = self.counts.get_or_init(|| Box::new([const { AtomicU64::new(0) }; BUCKETS]));
        let count = &counts[index(value)];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The counts at present.
    pub fn get(&self) -> Histogram {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = self.counts.get();
        Histogram { counts: counts.map(|counts| Box::new(std::array::from_fn(|i| read(&counts[i])))) }
    }
}

/// A histogram in few buckets, for a look at many disks at once. Values below 2 to the power of each of
/// [`Coarse::BOUNDS_LOG2`], and those above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coarse([u64; Coarse::BUCKETS]);

impl Coarse {
    /// The binary logarithms of the buckets' upper bounds in nanoseconds, but for the last one's, which has none: from 4
    /// microseconds to 8 seconds, fine up to 4 milliseconds, where disks' latencies are. Each one is half a megabyte in a
    /// scrape of thousands of disks.
    pub const BOUNDS_LOG2: [u32; Self::BUCKETS - 1] =
        [12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 29, 33];
    /// Buckets.
    pub const BUCKETS: usize = 15;

    /// For each octave of a [`Histogram`], the bucket that it belongs to.
    const OF_OCTAVE: [usize; BUCKETS / SUB as usize] = {
        let mut of = [0; BUCKETS / SUB as usize];
        let mut octave = 0;
        while octave < of.len() {
            while of[octave] < Self::BOUNDS_LOG2.len()
                && octave as u32 + SUB_BITS > Self::BOUNDS_LOG2[of[octave]]
            {
                of[octave] += 1;
            }
            octave += 1;
        }
        of
    };

    /// The counts, by bucket.
    pub const fn counts(&self) -> &[u64; Self::BUCKETS] {
        &self.0
    }

    /// The counts that were added since the state `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| crate::summary::since(self.0[i], earlier.0[i])))
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Adds the counts of `other`.
    pub fn merge_fine(&mut self, other: &Histogram) {
        let Some(counts) = &other.counts else { return };
        for (octave, &bucket) in counts.chunks_exact(SUB as usize).zip(&Self::OF_OCTAVE) {
            self.0[bucket] += octave.iter().sum::<u64>();
        }
    }

    /// Takes away the counts of `other`, which were added before.
    pub(crate) fn remove_fine(&mut self, other: &Histogram) {
        let mut theirs = Self::default();
        theirs.merge_fine(other);
        for (mine, theirs) in self.0.iter_mut().zip(theirs.0) {
            debug_assert!(theirs <= *mine, "what is taken away was added before");
            *mine -= theirs;
        }
    }

    /// How many values there are.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// A recording of latencies, apart from those of requests that completed before it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recording {
    /// Of this operation, or of all.
    pub op: Option<Op>,
    /// The shortest latency with a bucket of its own, in nanoseconds.
    pub min_ns: u64,
    /// The longest latency with a bucket of its own, in nanoseconds.
    pub max_ns: u64,
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

static ZEROES: [u64; BUCKETS] = [0; BUCKETS];

#[cold]
fn empty() -> Box<[u64; BUCKETS]> {
    Box::new([0; BUCKETS])
}

impl Histogram {
    /// Counts to each octave.
    pub const PER_OCTAVE: usize = SUB as usize;

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.counts.get_or_insert_with(empty)[index(value)] += 1;
    }

    /// Counts a value several times.
    #[inline]
    pub fn record_times(&mut self, value: u64, times: u64) {
        self.counts.get_or_insert_with(empty)[index(value)] += times;
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        let Some(theirs) = &other.counts else { return };
        let mine = self.counts.get_or_insert_with(empty);
        mine.iter_mut().zip(theirs.iter()).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// What came after `before`, an earlier state of it.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = empty();
        let counts = self.counts().iter().zip(before.counts());
        since.iter_mut().zip(counts).for_each(|(s, (now, before))| *s = now.saturating_sub(*before));
        Self { counts: Some(since) }
    }

    /// All counts, [`Histogram::PER_OCTAVE`] to each octave. The first octave is that of the values below that number; each
    /// further begins where the one before ends, at a power of two.
    pub fn counts(&self) -> &[u64] {
        self.counts.as_deref().map_or(&ZEROES, |counts| counts)
    }

    /// The octave of a value.
    pub const fn octave(value: u64) -> usize {
        index(value) / SUB as usize
    }

    /// How many values there are.
    pub fn total(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// The value that `quantile` (0 to 1) of all values do not exceed, to the bucket's precision; 0 if there are none.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let wanted = ((self.total() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (i, &count) in self.counts().iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return lower(i + 1) - 1;
            }
        }
        0
    }

    /// Each bucket that is not empty: its smallest value, the next one's, and the count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let used = self.counts().iter().enumerate().filter(|(_, c)| **c > 0);
        used.map(|(i, &count)| (lower(i), lower(i + 1), count))
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
    fn coarse_buckets_end_at_their_bounds() {
        for (bucket, log2) in Coarse::BOUNDS_LOG2.into_iter().enumerate() {
            let mut fine = Histogram::default();
            fine.record((1 << log2) - 1);
            fine.record(1 << log2);
            let mut coarse = Coarse::default();
            coarse.merge_fine(&fine);
            assert_eq!((coarse.counts()[bucket], coarse.counts()[bucket + 1], coarse.total()), (1, 1, 2));
        }
        let mut fine = Histogram::default();
        (0..64).for_each(|log2| fine.record(1 << log2));
        let mut coarse = Coarse::default();
        coarse.merge_fine(&fine);
        coarse.merge(&coarse.clone());
        assert_eq!((coarse.counts()[0], coarse.counts()[Coarse::BUCKETS - 1], coarse.total()), (24, 62, 128));
    }

    #[test]
    fn a_shared_histogram_is_read_while_it_grows() {
        let shared = SharedHistogram::default();
        assert_eq!(shared.get(), Histogram::default());
        let mut expected = Histogram::default();
        for value in [0, 7, 4096, 4096, u64::MAX] {
            shared.record(value);
            expected.record(value);
            assert_eq!(shared.get(), expected);
        }
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
        assert_eq!((twice.since(&h), h.since(&h)), (h.clone(), Histogram::default()));
        assert_eq!((twice.total(), twice.buckets().map(|b| b.2).sum::<u64>()), (2000, 2000));
    }
}
