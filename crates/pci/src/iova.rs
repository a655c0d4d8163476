//! Allocation of IOVA ranges: addresses at which devices access memory. Control context; pure.
//!
//! The IOMMU allows only some ranges. The lowest free range that fits is allocated: low addresses need fewer levels of page
//! tables.

use std::collections::BTreeMap;

/// The lowest page is never allocated: drivers take address 0 for none.
const START: u64 = aryk_dma::PAGE;

/// Free and allocated ranges. Ends are exclusive; the last page of the address space is never allocated.
#[derive(Debug, Default)]
pub(crate) struct Allocator {
    /// First and last addresses that the IOMMU allows.
    allowed: Vec<(u64, u64)>,
    /// From the first address of each free range to its end. No two free ranges touch.
    free: BTreeMap<u64, u64>,
    /// From the first address of each allocated range to its end.
    used: BTreeMap<u64, u64>,
}

impl Allocator {
    /// Allows exactly these ranges, each given by its first and its last address, from now on. Allocated ranges stay allocated.
    pub(crate) fn allow(&mut self, ranges: &[(u64, u64)]) {
        self.allowed = ranges.to_vec();
        self.allowed.sort_unstable();
        self.find_free();
    }

    /// Finds the parts of the allowed ranges that are not allocated.
    fn find_free(&mut self) {
        self.free.clear();
        // The end of the ranges before: ranges may overlap.
        let mut at = START;
        for &(first, last) in &self.allowed {
            let Some(mut start) = first.max(at).checked_next_multiple_of(aryk_dma::PAGE) else { break };
            let end = whole(last);
            let covered = self.used.range(..start).next_back().filter(|(_, used_end)| **used_end > start);
            start = covered.map_or(start, |(_, used_end)| *used_end);
            for (&used_start, &used_end) in self.used.range(start..end.max(start)) {
                if start < used_start {
                    self.free.insert(start, used_start);
                }
                start = used_end;
            }
            if start < end {
                self.free.insert(start, end);
            }
            at = at.max(end);
        }
        self.join();
    }

    /// Allocates `len` bytes, a multiple of the page, at an address that is `offset` above a multiple of `align`; `None` if no
    /// free range is large enough. `align` is a power of two and at least a page; `offset` is below it and a multiple of the
    /// page.
    pub(crate) fn allocate(&mut self, len: u64, align: u64, offset: u64) -> Option<u64> {
        let (from, until, start) = self.free.iter().find_map(|(&from, &until)| {
            let start = (from.checked_sub(offset).map_or(Some(0), |n| n.checked_next_multiple_of(align)))?;
            let start = start.checked_add(offset).filter(|start| *start >= from)?;
            (start.checked_add(len)? <= until).then_some((from, until, start))
        })?;
        self.free.remove(&from);
        if from < start {
            self.free.insert(from, start);
        }
        if start + len < until {
            self.free.insert(start + len, until);
        }
        self.used.insert(start, start + len);
        Some(start)
    }

    /// Frees an allocated range. The caller passes the address that [`Allocator::allocate`] returned.
    pub(crate) fn release(&mut self, start: u64) {
        self.used.remove(&start);
        self.find_free();
    }

    /// Joins free ranges that touch.
    fn join(&mut self) {
        let mut joined: BTreeMap<u64, u64> = BTreeMap::new();
        for (&start, &end) in &self.free {
            match joined.last_entry() {
                Some(mut last) if *last.get() == start => *last.get_mut() = end,
                _ => drop(joined.insert(start, end)),
            }
        }
        self.free = joined;
    }
}

/// The end of the last whole page up to address `last`.
const fn whole(last: u64) -> u64 {
    let end = last.saturating_add(1);
    end - end % aryk_dma::PAGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = aryk_dma::PAGE;

    fn allocator(ranges: &[(u64, u64)]) -> Allocator {
        let mut allocator = Allocator::default();
        allocator.allow(ranges);
        allocator
    }

    #[test]
    fn the_lowest_range_that_fits_is_allocated() {
        // The ranges of QEMU's VT-d: a hole for the interrupts' addresses.
        let mut iova = allocator(&[(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        assert_eq!(iova.allocate(PAGE, PAGE, 0), Some(PAGE), "never address 0");
        assert_eq!(iova.allocate(2 << 20, 2 << 20, 0), Some(2 << 20));
        assert_eq!(iova.allocate(PAGE, PAGE, 0), Some(2 * PAGE));
        assert_eq!(iova.allocate(4 << 30, 1 << 30, 5 << 20), Some((4 << 30) + (5 << 20)), "above the hole");
        assert_eq!(iova.allocate(1 << 39, PAGE, 0), None);
        iova.release(PAGE);
        assert_eq!(iova.allocate(PAGE, PAGE, 0), Some(PAGE));
    }

    #[test]
    fn odd_ranges_are_cut_to_whole_pages() {
        for ranges in [vec![(0, u64::MAX)], vec![(5, u64::MAX - 5)], vec![(PAGE, u64::MAX), (0, 1 << 40)]] {
            let mut iova = allocator(&ranges);
            assert!(iova.allocate(PAGE, PAGE, 0).is_some());
            assert_eq!(iova.allocate(u64::MAX - PAGE + 1, PAGE, 0), None);
        }
        for ranges in [vec![], vec![(0, PAGE - 1)], vec![(PAGE, PAGE + 5)], vec![(9 * PAGE, PAGE)]] {
            assert_eq!(allocator(&ranges).allocate(PAGE, PAGE, 0), None, "{ranges:?}");
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Allocate { pages: u64, align: u32, offset: u64 },
        Release(usize),
        Allow(Vec<(u64, u64)>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = (0..200 * PAGE, 0..100 * PAGE).prop_map(|(first, len)| (first, first + len));
        prop_oneof![
            6 => (1..20_u64, 0..5_u32, any::<u64>())
                .prop_map(|(pages, align, offset)| Step::Allocate { pages, align, offset }),
            4 => any::<usize>().prop_map(Step::Release),
            1 => prop::collection::vec(range, 0..5).prop_map(Step::Allow),
        ]
    }

    fn contains(ranges: &[(u64, u64)], page: u64) -> bool {
        ranges.iter().any(|&(first, last)| first <= page && page + (PAGE - 1) <= last)
    }

    proptest! {
        /// Pages one by one are the model: an allocation has only allowed and free pages, is the lowest one, and none is refused
        /// while enough pages are free.
        #[test]
        fn allocations_are_allowed_free_aligned_and_lowest(steps in prop::collection::vec(step(), 0..60)) {
            let mut allowed = vec![(0, 150 * PAGE - 1)];
            let mut iova = allocator(&allowed);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate { pages, align, offset } => {
                        let (len, align) = (pages * PAGE, PAGE << align);
                        let offset = offset % align / PAGE * PAGE;
                        let fits = |start: u64| (start..start + len).step_by(PAGE as usize).all(|page| {
                            page >= PAGE && contains(&allowed, page)
                                && !live.iter().any(|&(at, n)| at <= page && page < at + n)
                        });
                        let expected = (0..400).map(|n| n * align + offset).take_while(|s| *s < 400 * PAGE).find(|s| fits(*s));
                        let got = iova.allocate(len, align, offset);
                        prop_assert_eq!(got, expected);
                        live.extend(got.map(|start| (start, len)));
                    }
                    Step::Release(at) if !live.is_empty() => {
                        let (start, _) = live.swap_remove(at % live.len());
                        iova.release(start);
                    }
                    Step::Release(_) => {}
                    Step::Allow(ranges) => {
                        allowed = ranges;
                        iova.allow(&allowed);
                    }
                }
            }
        }

        /// Without changes of the allowed ranges, releasing alone gives all back.
        #[test]
        fn released_ranges_are_joined(sizes in prop::collection::vec(1..9_u64, 1..40), seed: u64) {
            let mut iova = allocator(&[(0, 400 * PAGE - 1)]);
            let mut live: Vec<_> = sizes.iter().filter_map(|pages| iova.allocate(pages * PAGE, PAGE, 0)).collect();
            let mut seed = seed;
            while !live.is_empty() {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (seed >> 33) as usize % live.len();
                iova.release(live.swap_remove(at));
            }
            prop_assert_eq!(iova.allocate(399 * PAGE, PAGE, 0), Some(PAGE));
        }
    }
}
