//! Pages of an index with any content behind a right header and checksum.
//!
//! The first byte is the number of leaf pages, the second the number of inner pages. Each page is two lengths of 16 bits and the
//! bytes from its flags on and before its end; the header's other fields are made right.
//!
//! For any pages, no code panics, searches end, and a scan returns keys in order. If the run is one leaf page, a lookup of each
//! entry at its own commit returns this entry, unless an entry about its whole range has the same commit; and a merge keeps all
//! other entries.
#![no_main]

use aryk_volume_index::{
    BlobId, Commit, Entry, Index, Input, Key, Memtable, Merge, PAGE_BYTES, PageBytes, PageCache, Place,
    Query, Run, RunId, RunShape, ScanOptions, Slot, Slots, Step, TimelineId, Views,
};
use libfuzzer_sys::fuzz_target;

/// The first byte behind the fields that the fuzzer makes right.
const CONTENT: usize = 20;
const RUN: RunId = RunId(7);

/// The next pages of the input.
fn page(data: &mut &[u8], number: u32) -> Option<PageBytes> {
    let (lengths, rest) = data.split_first_chunk::<4>()?;
    let length = |low, high| usize::from(u16::from_le_bytes([low, high]));
    let room = PAGE_BYTES - CONTENT;
    let front = length(lengths[0], lengths[1]).min(rest.len()).min(room);
    let (front, rest) = rest.split_at(front);
    let back = length(lengths[2], lengths[3]).min(rest.len()).min(room - front.len());
    let (back, rest) = rest.split_at(back);
    *data = rest;
    let mut page = [0; PAGE_BYTES];
    page[..4].copy_from_slice(b"AVIX");
    page[8..16].copy_from_slice(&RUN.0.to_le_bytes());
    page[16..20].copy_from_slice(&number.to_le_bytes());
    page[CONTENT..CONTENT + front.len()].copy_from_slice(front);
    page[PAGE_BYTES - back.len()..].copy_from_slice(back);
    let crc = crc_fast::crc32_iscsi(&page[8..]);
    page[4..8].copy_from_slice(&crc.to_le_bytes());
    Some(page)
}

/// A run of these pages that excludes no key and no commit.
fn run_of(leaves: u32, pages: u32) -> Run {
    let last = Key::new(TimelineId(u32::MAX), u32::MAX, Slot::LAST, Commit::ZERO);
    let shape = RunShape {
        pages,
        leaves,
        entries: u64::from(leaves),
        range_entries: 0,
        first: Key::MIN,
        last,
        oldest: Commit::ZERO,
        newest: Commit::MAX,
    };
    Run { id: RUN, place: Place { blob: BlobId(0), unit: 0 }, shape }
}

fn scan(index: &Index, cache: &PageCache, since: Option<Commit>) -> Option<Vec<Entry>> {
    let mut found = Vec::new();
    let mut options = ScanOptions { from: Key::MIN, end: None, since, limit: 50 };
    for _ in 0..100 {
        match index.scan(cache, &options, &mut found).ok()? {
            Some(next) => {
                assert!(next > options.from, "a scan goes on");
                options.from = next;
            }
            None => break,
        }
    }
    Some(found)
}

/// A merge of the run, whose only views are the live ones of these timelines; the number of its entries, if its pages are right.
fn merge(run: Run, pages: &[PageBytes], entries: &[Entry]) -> Option<u64> {
    let mut views = Views::default();
    let mut timelines: Vec<_> = entries.iter().map(|entry| entry.key.timeline()).collect();
    timelines.dedup();
    for timeline in timelines {
        let mut commits: Vec<_> = entries.iter().map(|entry| entry.key.commit()).collect();
        commits.sort_unstable();
        views.add(timeline, commits, true, true);
    }
    let mut merge = Merge::new(vec![Input::Level(vec![run])], views, None, 4);
    let mut kept = 0;
    for _ in 0..1000 {
        match merge.step(100, &mut |_| ()) {
            Step::Budget => {}
            Step::Pages => {
                let read = merge.wanted().expect("no read is under way");
                let pages = &pages[read.page as usize..][..read.pages as usize];
                merge.feed(&read, pages.as_flattened()).ok()?;
            }
            Step::NewRun => merge.begin_run(RunId(8), 100),
            Step::RunEnd(_, shape) => kept += shape.entries,
            Step::Done => return Some(kept),
        }
    }
    panic!("a merge ends");
}

/// Whether an entry about the whole range of `key` has its commit.
fn has_range<'a>(mut entries: impl Iterator<Item = &'a Entry>, key: Key) -> bool {
    let of_range = Key::new(key.timeline(), key.range(), Slot::RANGE, key.commit());
    entries.any(|entry| entry.key == of_range)
}

fuzz_target!(|data: &[u8]| {
    let Some((&[leaves, inners], mut data)) = data.split_first_chunk::<2>() else { return };
    let (leaves, inners) = (1 + u32::from(leaves % 4), u32::from(inners % 3));
    let run = run_of(leaves, leaves + inners);
    let mut pages = Vec::new();
    while let (true, Some(page)) =
        (pages.len() < run.shape.pages as usize, page(&mut data, pages.len() as u32))
    {
        pages.push(page);
    }
    let mut cache = PageCache::new(0);
    let index = Index::new(Memtable::default(), [vec![run]], &mut cache);
    let mut is_right = true;
    for (number, page) in pages.iter().enumerate() {
        is_right &= cache.insert(RUN, number as u32, page).is_ok();
    }
    let found = scan(&index, &cache, None);
    scan(&index, &cache, Commit::new(1000));
    let mut slots = Slots::new();
    for entry in found.iter().flatten() {
        let (key, count) = (entry.key, 1);
        let query = Query {
            timeline: key.timeline(),
            range: key.range(),
            first: key.slot(),
            count,
            view: key.commit(),
        };
        let is_found = index.lookup(&cache, &query, &mut slots).is_ok();
        if leaves == 1 && inners == 0 {
            let version = slots.get(key.slot()).expect("the entry itself, or one about its range");
            assert!(is_found && version.commit == key.commit());
            assert!(version.value == entry.value || has_range(found.iter().flatten(), key));
        }
        let rest = 1024 - key.slot().get().min(1023);
        let _ = index.lookup(&cache, &Query { count: rest, view: Commit::MAX, ..query }, &mut slots);
    }
    if let (1, 0, true, 1, Some(found)) = (leaves, inners, is_right, pages.len(), &found) {
        assert!(found.is_sorted_by(|a, b| a.key < b.key) && !found.is_empty());
    }
    if is_right && pages.len() == run.shape.pages as usize && leaves == 1 {
        let found = found.unwrap_or_default();
        let kept = merge(run, &pages, &found).expect("pages that are right");
        let is_seen = |entry: &&Entry| entry.key.slot().is_range() || !has_range(found.iter(), entry.key);
        assert!(inners > 0 || kept == found.iter().filter(is_seen).count() as u64);
    }
});
