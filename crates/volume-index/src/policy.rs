//! Which levels to merge: a pure function of their sizes.
//!
//! Context: any. Each level is at least as large as all newer ones together, so their number is at most one more than the
//! logarithm to base 2 of all entries by those of the newest level; when a level is merged, its entries end up in a level of
//! twice the size, so no entry is written more often than that either.
//!
//! Versions that are no longer seen keep their blobs alive until a merge leaves them out. Most of these are in the oldest level,
//! which is merged when the newer levels have a share of its size that the caller chooses: a small one where space is short.

use std::ops::Range;

/// The share at which the oldest level is merged as any other: 100%.
pub const OLDEST_SHARE_MAX: u32 = 100;

/// Which neighbouring levels to merge next, if any. `entries` are the sizes of levels, newest first, the oldest of all last. The
/// oldest level is merged when the newer ones have at least `oldest_share` percent of its entries.
///
/// While a merge runs, the levels that are newer than those being merged may be merged too: the caller then passes only these,
/// and [`OLDEST_SHARE_MAX`].
pub fn choose(entries: &[u64], oldest_share: u32) -> Option<Range<usize>> {
    let share = u128::from(oldest_share.min(OLDEST_SHARE_MAX));
    let mut newer = 0_u128;
    let mut end = None;
    for (place, &size) in entries.iter().enumerate() {
        let share = if place + 1 == entries.len() { share } else { 100 };
        if place > 0 && u128::from(size) * share < newer * 100 {
            end = Some(place + 1);
        }
        newer += u128::from(size);
    }
    end.map(|end| 0..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flushes tables of 1,000 entries into levels until there are `total` entries; returns the levels and the entries written
    /// per entry.
    fn fill(total: u64, oldest_share: u32) -> (Vec<u64>, u64) {
        let (mut levels, mut written, mut levels_max) = (Vec::new(), 0, 0);
        for _ in 0..total / 1000 {
            levels.insert(0, 1000);
            written += 1000;
            while let Some(merged) = choose(&levels, oldest_share) {
                let sum: u64 = levels[merged.clone()].iter().sum();
                written += sum;
                levels.splice(merged, [sum]);
            }
            levels_max = levels_max.max(levels.len());
        }
        assert!(levels_max <= 1 + total.div_ceil(1000).ilog2() as usize, "{levels_max} levels");
        (levels, written / total)
    }

    #[test]
    fn levels_and_rewrites_stay_logarithmic() {
        for total in [1000, 10_000, 777_000, 4_096_000] {
            let (levels, amplification) = fill(total, OLDEST_SHARE_MAX);
            assert_eq!(levels.iter().sum::<u64>(), total);
            assert!(amplification <= 2 + u64::from((total / 1000).ilog2()), "{amplification} for {total}");
        }
    }

    #[test]
    fn the_oldest_level_is_merged_at_its_share() {
        assert_eq!(choose(&[9, 100], 10), None);
        assert_eq!(choose(&[11, 100], 10), Some(0..2));
        assert_eq!(choose(&[11, 100], OLDEST_SHARE_MAX), None);
        assert_eq!(choose(&[5, 6, 100], 10), Some(0..3));
        assert_eq!(choose(&[5, 4, 30, 1000], 10), Some(0..2));
        assert_eq!(choose(&[5], 0), None);
        assert_eq!(choose(&[], 10), None);
    }
}
