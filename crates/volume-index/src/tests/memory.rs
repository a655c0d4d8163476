//! Memtables against a sorted map, the bounds of the page cache, and lookups that allocate nothing.

use std::collections::BTreeMap;

use allocation_counter::measure;
use proptest::prelude::*;

use super::pages::{block, key, run_of};
use crate::{Commit, Entry, Index, Memtable, PageCache, Query, Run, Slot, Slots, TimelineId, Value};

proptest! {
    #[test]
    fn a_memtable_is_a_sorted_map(
        inserts in prop::collection::vec((0..3_u32, 0..3_u32, 1..50_u16, 1..50_u64), 0..3000),
        order in 0..3,
    ) {
        let (mut table, mut map) = (Memtable::with_capacity(10), BTreeMap::new());
        let mut inserts = inserts;
        match order {
            0 => inserts.sort_unstable(),
            1 => inserts.sort_unstable_by(|a, b| b.cmp(a)),
            _ => {}
        }
        for round in 0..2 {
            for (number, &(timeline, range, slot, commit)) in inserts.iter().enumerate() {
                let key = key(timeline, range, slot, commit);
                table.insert(key, block(number as u32), Commit::MAX);
                map.insert(key, block(number as u32));
            }
            prop_assert_eq!(table.len(), map.len());
            let expected: Vec<_> = map.iter().map(|(&key, &value)| Entry { key, value }).collect();
            prop_assert!(table.iter().eq(expected.iter().copied()), "round {round}");
            for &(timeline, range, slot, commit) in inserts.iter().take(50) {
                for commit in commit.saturating_sub(1)..commit + 2 {
                    let key = key(timeline, range, slot, commit);
                    prop_assert_eq!(table.get(key), map.get(&key).copied());
                    let from = map.range(key..).next().map(|(key, _)| *key);
                    prop_assert_eq!(table.iter_from(key).next().map(|entry| entry.key), from);
                }
            }
            table.clear();
            map.clear();
            prop_assert!(table.is_empty() && table.iter().next().is_none());
        }
    }
}

#[test]
fn a_version_that_only_the_live_view_saw_is_replaced() {
    let mut table = Memtable::default();
    let kept = |commit| Commit::new(commit).unwrap();
    table.insert(key(1, 1, 5, 10), block(1), kept(0));
    table.insert(key(1, 1, 5, 11), block(2), kept(0));
    assert_eq!(table.len(), 1);
    // A view at 11 sees the version of 11, and from then on only later ones are replaced.
    table.insert(key(1, 1, 5, 12), block(3), kept(11));
    table.insert(key(1, 1, 5, 13), block(4), kept(11));
    table.insert(key(1, 1, 5, 14), Value::Zero, kept(11));
    let versions: Vec<_> = table.iter().map(|entry| (entry.key.commit().get(), entry.value)).collect();
    assert_eq!(versions, [(14, Value::Zero), (11, block(2))]);
    // Other slots, ranges and timelines stay.
    table.insert(key(1, 1, 4, 15), block(5), kept(11));
    table.insert(key(1, 0, 5, 15), block(5), kept(11));
    table.insert(key(0, 1, 5, 15), block(5), kept(11));
    assert_eq!(table.len(), 5);
}

#[test]
fn a_table_takes_its_memory_at_the_start() {
    let mut table = Memtable::with_capacity(10_000);
    let bytes = table.bytes();
    let mut random = fastrand::Rng::with_seed(1);
    let counts = measure(|| {
        for commit in 0..10_000 {
            table.insert(key(1, random.u32(..), random.u16(..1024), commit), Value::Zero, Commit::ZERO);
        }
        table.clear();
    });
    assert_eq!((counts.count_total, table.bytes()), (0, bytes));
}

/// A run with one entry in each of these ranges.
fn sparse(id: u64, ranges: u32) -> (Run, Vec<crate::PageBytes>) {
    let entry = |range| Entry { key: key(1, range, 1, id), value: block(range) };
    run_of(id, &(0..ranges).map(entry).collect::<Vec<_>>())
}

#[test]
fn the_cache_keeps_a_bounded_number_of_pages_and_those_that_are_used() {
    let ((first, first_pages), (second, second_pages)) = (sparse(1, 10_000), sparse(2, 300_000));
    let mut cache = PageCache::new(0);
    let mut index = Index::new(Memtable::default(), [vec![second], vec![first]], &mut cache);
    let max = cache.statistics().pages_max;
    assert!(max == 1024 && second_pages.len() > 1200);
    for (number, page) in (0..).zip(&first_pages) {
        cache.insert(first.id, number, page).unwrap();
    }
    let mut slots = Slots::new();
    let query = |range| Query {
        timeline: TimelineId(1),
        range,
        first: Slot::FIRST,
        count: 1,
        view: Commit::new(1).unwrap(),
    };
    for (number, page) in (0..).zip(&second_pages) {
        cache.insert(second.id, number, page).unwrap();
        // At this view, only the first run has entries.
        index.lookup(&cache, &query(number * 7919 % 10_000), &mut slots).unwrap();
        assert!(slots.get(Slot::FIRST).is_some());
        assert!(cache.statistics().pages <= max);
    }
    let statistics = cache.statistics();
    assert!(statistics.pages == max && statistics.misses == 0 && statistics.hits > 0, "{statistics:?}");
    let live = Query { view: Commit::MAX, ..query(0) };
    let needed = index.lookup(&cache, &live, &mut slots).unwrap_err();
    assert_eq!((needed.pages().len(), needed.pages()[0].run, needed.pages()[0].page), (1, second.id, 0));
    assert!(cache.statistics().misses > 0);
    // A run that is gone has no pages, and takes none.
    let levels: Vec<_> = index.levels().iter().map(|level| level.id()).collect();
    assert_eq!(index.merged(&levels, Vec::new(), &mut cache), [second, first]);
    cache.insert(first.id, 0, &first_pages[0]).unwrap();
    assert_eq!(cache.statistics().pages, 0);
    index.lookup(&cache, &live, &mut slots).unwrap();
    assert_eq!(slots.get(Slot::FIRST), None);
}

#[test]
fn lookups_on_warm_pages_allocate_nothing() {
    let mut cache = PageCache::new(64 << 20);
    let runs: Vec<_> = (1..=6).map(|id| sparse(id, 40_000)).collect();
    let levels = runs.iter().rev().map(|(run, _)| vec![*run]);
    let mut index = Index::new(Memtable::default(), levels, &mut cache);
    for (run, pages) in &runs {
        for (number, page) in (0..).zip(pages) {
            cache.insert(run.id, number, page).unwrap();
        }
    }
    for range in (0..40_000).step_by(3) {
        index.insert(key(1, range, 2, 9), block(range), Commit::ZERO);
    }
    let mut slots = Slots::new();
    let counts = measure(|| {
        for range in 0..40_000 {
            let first = if range % 2 == 0 { Slot::FIRST } else { Slot::RANGE };
            let count = if range % 5 == 0 { 1024 } else { 1 };
            let query = Query { timeline: TimelineId(1), range, first, count, view: Commit::MAX };
            index.lookup(&cache, &query, &mut slots).unwrap();
        }
    });
    assert_eq!(counts.count_total, 0);
}
