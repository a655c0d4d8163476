//! An index, its pages and its model, driven by operations.

use std::collections::BTreeMap;

use crate::{
    BLOCK_UNITS, BlobId, Commit, Entry, Index, Input, Key, LevelId, Memtable, Merge, NeedPages, PageBytes,
    PageCache, Place, Query, RANGE_BLOCKS, Run, RunId, ScanOptions, Slot, Slots, Step, Tally, TimelineId,
    Value, Version,
};

use super::model::Model;

const RANGES: u32 = 4;

#[derive(Clone, Debug)]
pub(in crate::tests) enum Op {
    Write { timeline: u32, range: u32, first: u16, count: u16, is_zero: bool },
    Scatter { timeline: u32, writes: u32, seed: u64 },
    Hot { timeline: u32, range: u32, block: u16, writes: u32 },
    ZeroRange { timeline: u32, range: u32 },
    Rewrite { timeline: u32, range: u32 },
    Snapshot { timeline: u32 },
    DeleteSnapshot { timeline: u32, seed: u64 },
    DeleteLive { timeline: u32 },
    Delete { timeline: u32 },
    Move { count: u32, seed: u64 },
    Freeze,
    Flush { tables: usize, pages: u32 },
    StartMerge { seed: u64, pages: u32 },
    StepMerge { entries: usize },
    Look { seed: u64 },
}

struct Running {
    merge: Merge,
    levels: Vec<LevelId>,
    output: Output,
}

/// The runs that a merge has written.
#[derive(Default)]
struct Output {
    pages_max: u32,
    runs: Vec<Run>,
    pages: Vec<PageBytes>,
}

pub(in crate::tests) struct Rig {
    model: Model,
    index: Index,
    cache: PageCache,
    /// The pages of each run.
    disk: BTreeMap<RunId, Vec<PageBytes>>,
    live: BTreeMap<BlobId, i64>,
    running: Option<Running>,
    commit: u64,
    places: u32,
    runs: u64,
    slots: Slots,
}

impl Rig {
    pub(in crate::tests) fn new() -> Self {
        let mut cache = PageCache::new(0);
        Self {
            model: Model::new(),
            index: Index::new(Memtable::default(), [], &mut cache),
            cache,
            disk: BTreeMap::new(),
            live: BTreeMap::new(),
            running: None,
            commit: 1,
            places: 0,
            runs: 0,
            slots: Slots::new(),
        }
    }

    pub(in crate::tests) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Write { timeline, range, first, count, is_zero } => {
                self.commit += 1;
                for block in first..first + count {
                    self.write(timeline, range, Slot::block(block), is_zero);
                }
            }
            Op::Scatter { timeline, writes, seed } => {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..writes {
                    self.commit += 1;
                    let (range, block) = (random.u32(..RANGES), random.u16(..RANGE_BLOCKS));
                    self.write(timeline, range, Slot::block(block), random.u8(..10) == 0);
                }
            }
            Op::Hot { timeline, range, block, writes } => {
                for _ in 0..writes {
                    self.commit += 1;
                    self.write(timeline, range, Slot::block(block), false);
                    self.snapshot(timeline);
                }
            }
            Op::ZeroRange { timeline, range } => {
                self.commit += 1;
                self.write(timeline, range, Slot::RANGE, true);
            }
            // What is newest in the range is in the frame; nothing newer exists.
            Op::Rewrite { timeline, range } => self.write(timeline, range, Slot::RANGE, false),
            Op::Snapshot { timeline } => self.snapshot(timeline),
            Op::DeleteSnapshot { timeline, seed } => {
                if let Some(timeline) = self.model.timelines.get_mut(&timeline) {
                    let place = (seed % timeline.frozen.len().max(1) as u64) as usize;
                    let view = timeline.frozen.iter().nth(place).copied();
                    view.map(|view| timeline.frozen.remove(&view));
                }
            }
            Op::DeleteLive { timeline } => {
                if let Some(timeline) = self.model.timelines.get_mut(&timeline) {
                    timeline.is_live = false;
                }
            }
            Op::Delete { timeline } => drop(self.model.timelines.remove(&timeline)),
            Op::Move { count, seed } => self.relocate(count, seed),
            Op::Freeze => drop(self.index.freeze(Memtable::with_capacity(100))),
            Op::Flush { tables, pages } => self.flush(tables, pages),
            Op::StartMerge { seed, pages } => self.start_merge(seed, pages),
            Op::StepMerge { entries } => self.step_merge(entries),
            Op::Look { seed } => self.look(seed),
        }
    }

    fn is_live(&self, timeline: u32) -> bool {
        self.model.timelines.get(&timeline).is_some_and(|timeline| timeline.is_live)
    }

    fn snapshot(&mut self, timeline: u32) {
        if self.is_live(timeline) {
            let commit = Commit::new(self.commit).unwrap();
            self.model.timelines.get_mut(&timeline).unwrap().frozen.insert(commit);
        }
    }

    fn new_value(&mut self, slot: Slot) -> Value {
        self.places += 1;
        let place = Place { blob: BlobId(self.places / 3000), unit: self.places as u16 };
        if slot.is_range() { Value::Dense { place } } else { Value::Block { place, crc: self.places } }
    }

    /// Writes at the current commit.
    fn write(&mut self, timeline: u32, range: u32, slot: Slot, is_zero: bool) {
        if self.is_live(timeline) {
            let value = if is_zero { Value::Zero } else { self.new_value(slot) };
            let key = Key::new(TimelineId(timeline), range, slot, Commit::new(self.commit).unwrap());
            self.model.insert(key, value);
            self.index.insert(key, value, self.model.kept(timeline));
        }
    }

    /// Moves versions that some view sees.
    fn relocate(&mut self, count: u32, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..count {
            let (timeline, range) = (random.u32(..3), random.u32(..RANGES));
            let slot = Slot::new(random.u16(..=RANGE_BLOCKS)).unwrap();
            let Some(&view) = random.choice(&self.model.views(timeline)) else { continue };
            let seen = if slot.is_range() {
                self.model.own(timeline, range, slot, view)
            } else {
                self.model
                    .seen(timeline, range, slot, view)
                    .filter(|seen| !matches!(seen.value, Value::Dense { .. }))
            };
            let Some(seen) = seen.filter(|seen| seen.value != Value::Zero) else { continue };
            let value = self.new_value(slot);
            let key = Key::new(TimelineId(timeline), range, slot, seen.commit);
            self.model.insert(key, value);
            self.index.insert(key, value, self.model.kept(timeline));
        }
    }

    fn flush(&mut self, tables: usize, pages_max: u32) {
        let frozen = self.index.frozen();
        let tables = tables.min(frozen.len());
        let inputs =
            frozen[frozen.len() - tables..].iter().map(|table| Input::Memtable(table.clone())).collect();
        let mut merge = Merge::new(inputs, self.model.for_merge(), None, 1);
        let mut output = Output { pages_max, ..Output::default() };
        while !self.run(&mut merge, &mut output, 1 << 20) {}
        self.settle(merge.into_changes());
        let old = self.index.flushed(tables, output.runs, &mut self.cache);
        assert_eq!(old.len(), tables);
    }

    fn start_merge(&mut self, seed: u64, pages_max: u32) {
        let count = self.index.levels().len();
        if self.running.is_some() || count == 0 {
            return;
        }
        let mut random = fastrand::Rng::with_seed(seed);
        let first = random.usize(..count);
        let end = random.usize(first + 1..=count);
        let merged = &self.index.levels()[first..end];
        let levels: Vec<_> = merged.iter().map(|level| level.id()).collect();
        let inputs = merged.iter().map(|level| Input::Level(level.runs().copied().collect())).collect();
        let bottom = (end == count).then(|| self.index.oldest_besides(&levels));
        let merge = Merge::new(inputs, self.model.for_merge(), bottom, random.u32(1..5));
        self.running = Some(Running { merge, levels, output: Output { pages_max, ..Output::default() } });
    }

    fn step_merge(&mut self, entries: usize) {
        let Some(mut running) = self.running.take() else { return };
        let before = running.merge.progress();
        let is_done = self.run(&mut running.merge, &mut running.output, entries);
        let after = running.merge.progress();
        assert!(after.0 <= after.1 && before.1 == after.1);
        if !is_done {
            self.running = Some(running);
            return;
        }
        assert_eq!(after.0, after.1);
        self.settle(running.merge.into_changes());
        let old = self.index.merged(&running.levels, running.output.runs, &mut self.cache);
        for run in old {
            self.disk.remove(&run.id).unwrap();
        }
    }

    /// One step of a merge, with all that it waits for; whether the merge is done.
    fn run(&mut self, merge: &mut Merge, output: &mut Output, entries: usize) -> bool {
        loop {
            let (pages, before) = (&mut output.pages, merge.progress().0);
            let step = merge.step(entries, &mut |page| pages.push(*page));
            // Each key comes from as many sources as have it.
            let sources = self.index.levels().len().max(self.index.frozen().len());
            assert!(merge.progress().0 - before <= (entries * sources) as u64, "a step is bounded");
            match step {
                Step::Budget => return false,
                Step::Done => {
                    assert!(output.pages.is_empty());
                    return true;
                }
                Step::Pages => {
                    let wanted: Vec<_> = std::iter::from_fn(|| merge.wanted()).collect();
                    assert!(!wanted.is_empty(), "all reads were done");
                    // Reads end in any order.
                    for read in wanted.iter().rev() {
                        let pages = &self.disk[&read.run][read.page as usize..][..read.pages as usize];
                        merge.feed(read, pages.as_flattened()).unwrap();
                    }
                }
                Step::NewRun => {
                    self.runs += 1;
                    merge.begin_run(RunId(self.runs), output.pages_max);
                }
                Step::RunEnd(id, shape) => {
                    let pages = std::mem::take(&mut output.pages);
                    assert!(pages.len() == shape.pages as usize && shape.pages <= output.pages_max);
                    let run = Run { id, place: Place { blob: BlobId(1 << 20), unit: 16 }, shape };
                    assert!(run.is_valid());
                    self.disk.insert(id, pages);
                    output.runs.push(run);
                }
            }
        }
    }

    fn settle(&mut self, changes: BTreeMap<BlobId, i64>) {
        for (blob, units) in changes {
            *self.live.entry(blob).or_default() += units;
        }
        self.live.retain(|_, units| *units != 0);
    }

    /// Reads missing pages until the call succeeds.
    fn with_pages<T>(&mut self, call: impl Fn(&Index, &PageCache, &mut Slots) -> Result<T, NeedPages>) -> T {
        loop {
            match call(&self.index, &self.cache, &mut self.slots) {
                Ok(result) => return result,
                Err(needed) => {
                    assert!(!needed.pages().is_empty());
                    for page in needed.pages() {
                        let bytes = &self.disk[&page.run][page.page as usize];
                        assert_eq!(u32::from(page.place.unit), 16 + BLOCK_UNITS * page.page);
                        self.cache.insert(page.run, page.page, bytes).unwrap();
                    }
                }
            }
        }
    }

    /// Queries of any size at views that exist.
    fn look(&mut self, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..30 {
            let (timeline, range) = (random.u32(..3), random.u32(..RANGES + 1));
            let Some(&view) = random.choice(&self.model.views(timeline)) else { continue };
            let first = if random.u8(..4) == 0 { 0 } else { random.u16(1..=RANGE_BLOCKS) };
            let room = RANGE_BLOCKS + 1 - first;
            let count = if random.bool() { 1 } else { random.u16(1..=room) };
            self.compare(timeline, range, Slot::new(first).unwrap(), count, view);
        }
    }

    fn compare(&mut self, timeline: u32, range: u32, first: Slot, count: u16, view: Commit) {
        let query = Query { timeline: TimelineId(timeline), range, first, count, view };
        self.with_pages(|index, cache, slots| index.lookup(cache, &query, slots));
        let has_base = self.model.timelines[&timeline].has_base;
        // Where there is no base, a zero that hides nothing may be absent.
        let simple =
            |version: Option<Version>| version.filter(|version| has_base || version.value != Value::Zero);
        for slot in (first.get()..first.get() + count).map(|slot| Slot::new(slot).unwrap()) {
            let (found, expected) = (self.slots.get(slot), self.model.seen(timeline, range, slot, view));
            assert_eq!(simple(found), simple(expected), "{slot:?} of {query:?}");
        }
    }

    /// Compares all views, then all units.
    pub(in crate::tests) fn finish(&mut self) {
        while self.running.is_some() {
            self.step_merge(100);
        }
        for timeline in 0..3 {
            for view in self.model.views(timeline) {
                // Many snapshots: some of them.
                if view == Commit::MAX || view.get().is_multiple_of(7) {
                    for range in 0..RANGES {
                        self.compare(timeline, range, Slot::RANGE, RANGE_BLOCKS + 1, view);
                        self.compare(timeline, range, Slot::block((view.get() % 1024) as u16), 1, view);
                    }
                }
            }
        }
        self.check_units();
        self.check_scan();
    }

    /// The entries of a run, by an index that has nothing else.
    fn entries_of(&self, run: Run) -> Vec<Entry> {
        let mut cache = PageCache::new(0);
        let index = Index::new(Memtable::default(), [vec![run]], &mut cache);
        for (number, page) in self.disk[&run.id].iter().enumerate() {
            cache.insert(run.id, number as u32, page).unwrap();
        }
        let mut found = Vec::new();
        let options = ScanOptions { from: Key::MIN, end: None, since: None, limit: usize::MAX };
        assert_eq!(index.scan(&cache, &options, &mut found), Ok(None));
        found
    }

    fn check_units(&self) {
        let mut tally = Tally::default();
        for run in self.index.levels().iter().flat_map(|level| level.runs()) {
            let entries = self.entries_of(*run);
            let shape = run.shape;
            assert!(entries.is_sorted_by(|a, b| a.key < b.key));
            assert_eq!(shape.entries, entries.len() as u64);
            assert_eq!(
                shape.range_entries,
                entries.iter().filter(|entry| entry.key.slot().is_range()).count() as u64
            );
            assert_eq!(
                (Some(shape.first), Some(shape.last)),
                (entries.first().map(|e| e.key), entries.last().map(|e| e.key))
            );
            let commits = || entries.iter().map(|entry| entry.key.commit());
            assert_eq!((Some(shape.oldest), Some(shape.newest)), (commits().min(), commits().max()));
            entries.iter().for_each(|entry| tally.add(&entry.value));
        }
        assert_eq!(tally.into_changes(), self.live);
    }

    /// A scan finds each key of all sources once, in small steps or large ones, and by commit.
    fn check_scan(&mut self) {
        let all = self.scan(ScanOptions { from: Key::MIN, end: None, since: None, limit: 1000 });
        let mut expected = BTreeMap::new();
        let levels: Vec<Run> =
            self.index.levels().iter().rev().flat_map(|level| level.runs().copied()).collect();
        for run in levels {
            expected.extend(self.entries_of(run).into_iter().map(|entry| (entry.key, entry.value)));
        }
        for table in self.index.frozen().iter().rev().map(AsRef::as_ref).chain([self.index.memtable()]) {
            expected.extend(table.iter().map(|entry| (entry.key, entry.value)));
        }
        let expected: Vec<_> = expected.into_iter().map(|(key, value)| Entry { key, value }).collect();
        assert!(all == expected, "{} entries found, {} expected", all.len(), expected.len());
        let since = Commit::new(self.commit * 3 / 4).unwrap();
        let (from, end) = (all.len() / 5, all.len() * 4 / 5);
        if let (Some(first), Some(last)) = (all.get(from), all.get(end)) {
            let options = ScanOptions { from: first.key, end: Some(last.key), since: Some(since), limit: 7 };
            let expected = all[from..end].iter().filter(|entry| entry.key.commit() > since).copied();
            assert!(self.scan(options) == expected.collect::<Vec<_>>(), "a scan since {since:?}");
        }
    }

    fn scan(&mut self, mut options: ScanOptions) -> Vec<Entry> {
        let mut all = Vec::new();
        loop {
            let part = self.with_pages(|index, cache, _| {
                let mut found = Vec::new();
                index.scan(cache, &options, &mut found).map(|next| (found, next))
            });
            assert!(part.0.len() <= options.limit);
            all.extend(part.0);
            match part.1 {
                Some(next) => options.from = next,
                None => return all,
            }
        }
    }
}
