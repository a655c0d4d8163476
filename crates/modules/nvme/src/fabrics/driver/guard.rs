//! Blocks that a lost connection may still change: later changes of these blocks wait. Any context.

use std::sync::Arc;

/// Blocks of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    pub(crate) nsid: u32,
    pub(crate) first: u64,
    /// The block behind the last.
    pub(crate) end: u64,
}

/// A set of blocks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard(Arc<[Extent]>);

impl Guard {
    /// The blocks of this set and of `extents`.
    pub(crate) fn with(&self, extents: &[Extent]) -> Self {
        let mut all = [&self.0, extents].concat();
        all.sort_unstable();
        let mut merged: Vec<Extent> = Vec::with_capacity(all.len());
        for extent in all {
            match merged.last_mut() {
                Some(last) if last.nsid == extent.nsid && extent.first <= last.end => {
                    last.end = last.end.max(extent.end);
                }
                _ => merged.push(extent),
            }
        }
        Self(merged.into())
    }

    /// Whether there are no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether any of these blocks is in the set.
    pub(crate) fn overlaps(&self, nsid: u32, first: u64, blocks: u64) -> bool {
        let end = first.saturating_add(blocks);
        // The last extent that begins before the end of these blocks is the only one that can overlap.
        let after = self.0.partition_point(|extent| (extent.nsid, extent.first) < (nsid, end));
        let before = self.0[..after].last();
        before.is_some_and(|extent| extent.nsid == nsid && extent.end > first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(nsid: u32, first: u64, blocks: u64) -> Extent {
        Extent { nsid, first, end: first + blocks }
    }

    #[test]
    fn extents_are_merged() {
        let guard = Guard::default().with(&[extent(1, 10, 5), extent(1, 15, 1), extent(2, 0, 4)]);
        assert_eq!(&*guard.0, [extent(1, 10, 6), extent(2, 0, 4)]);
        let guard = guard.with(&[extent(1, 0, 11), extent(1, 20, 1)]);
        assert_eq!(&*guard.0, [extent(1, 0, 16), extent(1, 20, 1), extent(2, 0, 4)]);
        assert!(!guard.is_empty() && Guard::default().is_empty());
    }

    #[test]
    fn an_overlap_is_found_as_by_a_look_at_all_blocks() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..200 {
            let mut make = || extent(random.u32(1..3), random.u64(..40), random.u64(1..5));
            let extents: Vec<Extent> = (0..6).map(|_| make()).collect();
            let guard = Guard::default().with(&extents);
            for nsid in 1..4 {
                for first in 0..48 {
                    for blocks in 1..6 {
                        let is_in = |e: &Extent| e.nsid == nsid && e.first < first + blocks && first < e.end;
                        assert_eq!(guard.overlaps(nsid, first, blocks), extents.iter().any(is_in));
                    }
                }
            }
        }
    }
}
