//! Pages as bytes: damage, places, invalid content behind a right checksum, and a run that version 1 of the format wrote.

use std::sync::Arc;

use proptest::prelude::*;

use crate::page::{PAGE_BYTES, check};
use crate::{
    BlobId, Commit, Entry, Index, Input, Key, Memtable, Merge, PageBytes, PageCache, PageError, Place, Query,
    Run, RunId, ScanOptions, Slot, Slots, Step, TimelineId, Value, Views,
};

pub(super) fn key(timeline: u32, range: u32, slot: u16, commit: u64) -> Key {
    Key::new(TimelineId(timeline), range, Slot::new(slot).unwrap(), Commit::new(commit).unwrap())
}

pub(super) fn block(number: u32) -> Value {
    Value::Block { place: Place { blob: BlobId(number), unit: number as u16 }, crc: !number }
}

/// A run of these entries: all of them stay.
pub(super) fn run_of(id: u64, entries: &[Entry]) -> (Run, Vec<PageBytes>) {
    let (mut table, mut views) = (Memtable::default(), Views::default());
    for entry in entries {
        table.insert(entry.key, entry.value, Commit::MAX);
    }
    let mut timelines: Vec<_> = entries.iter().map(|entry| entry.key.timeline()).collect();
    timelines.sort_unstable();
    timelines.dedup();
    for timeline in timelines {
        let mut commits: Vec<_> = entries.iter().map(|entry| entry.key.commit()).collect();
        commits.sort_unstable();
        views.add(timeline, commits, true, true);
    }
    let mut merge = Merge::new(vec![Input::Memtable(Arc::new(table))], views, None, 1);
    let (mut pages, mut run) = (Vec::new(), None);
    loop {
        match merge.step(100, &mut |page| pages.push(*page)) {
            Step::NewRun => merge.begin_run(RunId(id), 8000),
            Step::RunEnd(id, shape) => {
                run = Some(Run { id, place: Place { blob: BlobId(0), unit: 0 }, shape })
            }
            Step::Done => return (run.unwrap(), pages),
            Step::Budget | Step::Pages => {}
        }
    }
}

/// The entries of the fixture: several timelines, whole ranges, versions that go on on the next page, and all kinds of values.
fn fixture_entries() -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut add = |key, value| entries.push(Entry { key, value });
    add(key(1, 0, 0, 0), Value::Zero);
    add(key(1, 0, 1, 1), block(1));
    for commit in (2..=300).rev() {
        add(key(2, 7, 0, commit), Value::Dense { place: Place { blob: BlobId(9), unit: commit as u16 } });
    }
    // Older versions of blocks are hidden by those of the range.
    for slot in 296..=1024 {
        add(
            key(2, 7, slot, 5 + u64::from(slot)),
            if slot % 10 == 0 { Value::Zero } else { block(u32::from(slot)) },
        );
    }
    for range in 0..500 {
        add(key(3 + range / 200, range, 1024, 1 << 40 | u64::from(range)), block(range));
    }
    add(key(u32::MAX, u32::MAX, 1024, Commit::MAX.get() - 1), block(u32::MAX));
    entries
}

/// The pages of these entries, as version 1 of the format wrote them.
const FIXTURE: &[u8] = include_bytes!("../../fixtures/run-v1");

#[test]
fn a_run_of_version_1_is_read() {
    let (pages, rest) = FIXTURE.as_chunks::<PAGE_BYTES>();
    assert!(rest.is_empty());
    let entries = fixture_entries();
    // The numbers that the manifest has.
    let commits = || entries.iter().map(|entry| entry.key.commit());
    let shape = crate::RunShape {
        pages: 9,
        leaves: 8,
        entries: entries.len() as u64,
        range_entries: 300,
        first: entries[0].key,
        last: entries[entries.len() - 1].key,
        oldest: commits().min().unwrap(),
        newest: commits().max().unwrap(),
    };
    let run = Run { id: RunId(77), place: Place { blob: BlobId(3), unit: 8 }, shape };
    assert!(run.is_valid() && pages.len() == 9);
    let mut cache = PageCache::new(0);
    let index = Index::new(Memtable::default(), [vec![run]], &mut cache);
    for (number, page) in pages.iter().enumerate() {
        cache.insert(run.id, number as u32, page).unwrap();
    }
    let mut found = Vec::new();
    let options = ScanOptions { from: Key::MIN, end: None, since: None, limit: usize::MAX };
    assert_eq!(index.scan(&cache, &options, &mut found), Ok(None));
    assert!(found == entries);
    let mut slots = Slots::new();
    for entry in &entries {
        let (first, view) = (entry.key.slot(), entry.key.commit());
        let query = Query { timeline: entry.key.timeline(), range: entry.key.range(), first, count: 1, view };
        index.lookup(&cache, &query, &mut slots).unwrap();
        let seen = slots.get(first).unwrap();
        assert_eq!(seen.commit, view);
        assert!(seen.value == entry.value || matches!(seen.value, Value::Dense { .. }));
    }
}

#[test]
fn this_version_writes_what_version_1_wrote() {
    let (run, pages) = run_of(77, &fixture_entries());
    assert_eq!((run.shape.pages, run.shape.leaves), (9, 8));
    assert!(pages.as_flattened() == FIXTURE);
}

#[test]
fn each_damaged_byte_and_each_wrong_place_is_found() {
    let (run, pages) = run_of(77, &fixture_entries());
    for (number, page) in (0..).zip(&pages) {
        assert_eq!(check(page, &run, number), Ok(()));
        for at in 0..PAGE_BYTES {
            let mut damaged = *page;
            damaged[at] ^= 1 << (at % 8);
            assert_eq!(check(&damaged, &run, number), Err(PageError::Checksum), "byte {at} of page {number}");
        }
        assert_eq!(check(page, &run, number ^ 1), Err(PageError::Misplaced));
        assert_eq!(check(page, &Run { id: RunId(78), ..run }, number), Err(PageError::Misplaced));
        assert_eq!(check(&[0; PAGE_BYTES], &run, number), Err(PageError::Checksum));
    }
}

/// The page with other bytes at `at`, and a right checksum.
fn changed(page: &PageBytes, at: usize, bytes: &[u8]) -> PageBytes {
    let mut page = *page;
    page[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = crc_fast::crc32_iscsi(&page[8..]);
    page[4..8].copy_from_slice(&crc.to_le_bytes());
    page
}

#[test]
fn invalid_content_behind_a_right_checksum_is_refused() {
    let entries: Vec<_> =
        (1..=10).map(|slot| Entry { key: key(1, u32::from(slot % 2), slot, 9), value: block(1) }).collect();
    let (run, pages) = run_of(1, &entries);
    let (page, refused) = (&pages[0], Err(PageError::Content));
    // Two groups of five entries: ranges at 32, starts at 40, tags at 44, records at the end.
    assert_eq!(check(&changed(page, 44, &[2 << 2 | 1, 0]), &run, 0), Ok(()));
    for (at, bytes, what) in [
        (22, [0, 0], "no group"),
        (22, [200, 0], "more groups than entries"),
        (24, [255, 0], "more entries than a page has room for"),
        (24, [255, 255], "more entries than a page has bytes"),
        (20, [16, 0], "several timelines, none of which is there"),
        (32, [1, 0], "the same range twice"),
        (32, [9, 0], "ranges out of order"),
        (40, [1, 0], "entries before the first group"),
        (42, [10, 0], "a group without entries"),
        (44, [0, 20], "a slot beyond the last"),
        (44, [2 << 2 | 2, 0], "a block with a dense value"),
        (44, [1, 0], "a range with a block's value"),
        (44, [2 << 2 | 3, 0], "a value of no kind"),
        (44, [10 << 2 | 1, 0], "slots out of order"),
        (PAGE_BYTES - 16, [10, 0], "a commit that the run does not have"),
        (PAGE_BYTES - 16, [8, 0], "a commit that the run does not have"),
    ] {
        assert_eq!(check(&changed(page, at, &bytes), &run, 0), refused, "{what}");
    }
    let (run, pages) = run_of(1, &fixture_entries());
    let (inner, number) = (&pages[8], 8);
    assert_eq!(check(&changed(inner, 32, &[0]), &run, number), Ok(()));
    for (at, bytes, what) in [
        (22, [0, 0], "no child"),
        (22, [185, 0], "more children than a page has room for"),
        (22, [9, 0], "the page as its own child"),
        (28, [1, 0], "the page as its own child"),
        (28, [255, 255], "children behind the page"),
        (32 + 14, [255, 255], "keys out of order"),
    ] {
        assert_eq!(check(&changed(inner, at, &bytes), &run, number), refused, "{what}");
    }
}

#[test]
fn runs_of_a_manifest_fit_their_numbers() {
    let (run, _) = run_of(1, &fixture_entries());
    assert!(run.is_valid());
    let changed = |change: &dyn Fn(&mut Run)| {
        let mut run = run;
        change(&mut run);
        run.is_valid()
    };
    assert!(changed(&|run| run.place.unit = u16::MAX - 71));
    assert!(!changed(&|run| run.place.unit = u16::MAX - 70));
    assert!(!changed(&|run| run.shape.pages = 10));
    assert!(!changed(&|run| run.shape.leaves = 0));
    assert!(!changed(&|run| run.shape.leaves = 9));
    assert!(!changed(&|run| run.shape.entries = 10));
    assert!(!changed(&|run| run.shape.range_entries = run.shape.entries + 1));
    assert!(!changed(&|run| std::mem::swap(&mut run.shape.first, &mut run.shape.last)));
    assert!(!changed(&|run| std::mem::swap(&mut run.shape.oldest, &mut run.shape.newest)));
    assert!(!changed(&|run| (run.shape.pages, run.shape.leaves) = (u32::MAX, u32::MAX)));
}

proptest! {
    /// Whatever a page contains, a check ends without a panic.
    #[test]
    fn any_page_is_checked(at in 8..PAGE_BYTES - 64, bytes in prop::collection::vec(any::<u8>(), 1..64), page in 0..9_usize) {
        let (run, pages) = run_of(1, &fixture_entries());
        let _ = check(&changed(&pages[page], at, &bytes), &run, page as u32);
        let _ = check(&changed(&pages[page], 20 + at % 12, &bytes), &run, page as u32);
    }
}
