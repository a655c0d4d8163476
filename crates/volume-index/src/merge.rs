//! Merges of memtables and levels into a new level, in bounded steps.
//!
//! Context: any. The caller reads the leaf pages that a merge wants, and writes the pages that it hands out. A merge reads by
//! itself, beside the cache, so that it replaces no page that lookups need.
//!
//! **What is left out.** The oldest view that includes a version decides: if a newer version, or an entry about the whole range
//! that is not older, is not newer than that view, then no view sees the version. The version that each view sees in the inputs
//! stays, so the answers of all views stay, whatever other sources contain.
//!
//! **Zeroes** hide older versions. A zero goes only where it hides nothing: the timeline has no base, no older source exists, no
//! view is older than the zero, so that the inputs keep nothing that is older but a rewritten range, for which the merge looks;
//! and no newer source has older commits. The last condition is needed because a version keeps its commit when it moves: a
//! snapshot may keep a version alive that moves to a newer source; once the snapshot is deleted, only the zero hides that version
//! from the live view.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::key::{BlobId, Commit, Entry, Key, Place, TimelineId, Value};
use crate::memtable::Memtable;
use crate::owned::{Owned, Owners};
use crate::page::{Leaf, PAGE_BYTES, PageBytes, PageError, check};
use crate::run::{Run, RunBuilder, RunId, RunShape};
use crate::survey::{Pieces, Survey};
use crate::tally::Tally;
use crate::views::Views;

/// The next entry's page is not here. Larger than all keys.
const UNKNOWN: u128 = u128::MAX;
/// There is no entry any more. Larger than all keys.
const END: u128 = u128::MAX - 1;

/// Reads of one input that are under way or not yet merged.
const READS_MAX: usize = 2;

/// What is merged.
#[derive(Clone, Debug)]
pub enum Input {
    /// A frozen memtable.
    Memtable(Arc<Memtable>),
    /// A level's runs, by key.
    Level(Vec<Run>),
}

/// Pages that a merge wants to read: neighbours in one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRead {
    /// Which input, in the order given.
    pub input: usize,
    /// The run.
    pub run: RunId,
    /// The first page.
    pub page: u32,
    /// Pages.
    pub pages: u32,
    /// Where the first page is.
    pub place: Place,
}

/// What a step of a merge ended with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The step's budget is used up.
    Budget,
    /// Pages must be fed first: [`Merge::wanted`] returns them, unless their reads are under way.
    Pages,
    /// A new run starts: [`Merge::begin_run`] comes next.
    NewRun,
    /// All pages of the run were handed out. Call [`Merge::step`] again.
    RunEnd(RunId, RunShape),
    /// All is merged.
    Done,
}

/// A merge under way.
#[derive(Debug)]
pub struct Merge {
    sources: Vec<Source>,
    /// The packed key of each source's next entry, [`UNKNOWN`] or [`END`].
    heads: Vec<u128>,
    /// The value of each source's next entry.
    values: Vec<Value>,
    /// How many heads are unknown.
    unknown: usize,
    read_ahead: u32,
    filter: Filter,
    /// An entry that waits for a new run.
    kept: Option<Entry>,
    builder: Option<RunBuilder>,
    /// The last key of the runs before, and whether there are entries about the whole of its range.
    before: Option<(Key, bool)>,
    tally: Tally,
    /// Places of blocks whose entries were left out since the last call of [`Merge::drain_dead`].
    dead: Vec<Place>,
    owners: Owners,
    survey: Option<Survey>,
    entries_merged: u64,
    entries_total: u64,
}

/// What is next in a source.
enum Head {
    /// Its page is not here.
    Unknown,
    Entry(Entry),
    End,
}

#[derive(Debug)]
enum Source {
    Memtable { table: Arc<Memtable>, position: (u32, usize) },
    Level(LevelSource),
}

/// The leaf pages of a level, read ahead.
#[derive(Debug)]
struct LevelSource {
    runs: Vec<Run>,
    /// Reads in the order of keys.
    reads: VecDeque<Pages>,
    /// Where the next read starts: a run's index and a page.
    next_run: usize,
    next_page: u32,
    /// The next page of the first read.
    page: usize,
    /// The entries of the page before, and how many of them are merged.
    entries: Vec<Entry>,
    merged: usize,
    /// Memory of reads that are merged.
    spare: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Pages {
    run: usize,
    first: u32,
    count: u32,
    /// Whole pages that were checked; empty until they are fed.
    bytes: Vec<u8>,
}

impl LevelSource {
    fn new(runs: Vec<Run>) -> Self {
        Self {
            runs,
            reads: VecDeque::with_capacity(READS_MAX),
            next_run: 0,
            next_page: 0,
            page: 0,
            entries: Vec::new(),
            merged: 0,
            spare: Vec::new(),
        }
    }

    fn wanted(&mut self, input: usize, read_ahead: u32) -> Option<PageRead> {
        let run = self.runs.get(self.next_run)?;
        if self.reads.len() == READS_MAX {
            return None;
        }
        let (page, pages) = (self.next_page, read_ahead.min(run.shape.leaves - self.next_page));
        let bytes = self.spare.pop().unwrap_or_default();
        self.reads.push_back(Pages { run: self.next_run, first: page, count: pages, bytes });
        let read = PageRead { input, run: run.id, page, pages, place: run.place_of(page) };
        self.next_page += pages;
        if self.next_page == run.shape.leaves {
            (self.next_run, self.next_page) = (self.next_run + 1, 0);
        }
        Some(read)
    }

    fn feed(&mut self, read: &PageRead, bytes: &[u8]) -> Result<(), PageError> {
        let runs = &self.runs;
        let is_read = |pages: &&mut Pages| {
            runs[pages.run].id == read.run && (pages.first, pages.count) == (read.page, read.pages)
        };
        let pages = self.reads.iter_mut().find(is_read).expect("a read that was wanted");
        let (found, rest) = bytes.as_chunks::<PAGE_BYTES>();
        assert!(found.len() == read.pages as usize && rest.is_empty(), "as many bytes as the pages have");
        for (number, page) in (read.page..).zip(found) {
            check(page, &runs[pages.run], number)?;
        }
        pages.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn next(&mut self) -> Head {
        loop {
            if let Some(entry) = self.entries.get(self.merged) {
                self.merged += 1;
                return Head::Entry(*entry);
            }
            let Some(pages) = self.reads.front() else {
                return if self.next_run == self.runs.len() { Head::End } else { Head::Unknown };
            };
            let (found, _) = pages.bytes.as_chunks::<PAGE_BYTES>();
            if found.is_empty() {
                return Head::Unknown;
            }
            self.entries.clear();
            self.merged = 0;
            if let Some(page) = found.get(self.page) {
                Leaf::of(page).decode(&mut self.entries);
                self.page += 1;
            } else {
                self.page = 0;
                let merged = self.reads.pop_front().map(|pages| pages.bytes);
                self.spare.extend(merged.map(|mut bytes| {
                    bytes.clear();
                    bytes
                }));
            }
        }
    }
}

impl Source {
    fn next(&mut self) -> Head {
        match self {
            Self::Memtable { table, position } => table.step(position).map_or(Head::End, Head::Entry),
            Self::Level(level) => level.next(),
        }
    }
}

/// Decides which versions stay. Gets all versions in the order of their keys, each key once.
#[derive(Debug)]
struct Filter {
    views: Views,
    /// Zeroes of older commits may go.
    zeroes_before: Commit,
    /// The range of the last version.
    group: Option<u64>,
    /// The place of the range's timeline in the views.
    timeline: Option<usize>,
    /// The last version.
    last: Option<Key>,
    /// Commits of versions of the whole range that some view sees, newest first.
    covers: Vec<Commit>,
}

impl Filter {
    fn is_kept(&mut self, entry: &Entry) -> bool {
        let key = entry.key;
        if self.group != Some(key.group()) {
            self.group = Some(key.group());
            self.timeline = self.views.find(key.timeline());
            self.covers.clear();
        }
        let commit = key.commit();
        let newer = self.last.filter(|last| last.newest() == key.newest()).map(Key::commit);
        self.last = Some(key);
        let Some(views) = self.timeline.map(|place| self.views.at(place)) else { return false };
        let Some(view) = views.first_from(commit) else { return false };
        if newer.is_some_and(|newer| newer <= view) {
            return false;
        }
        let older = self.covers.partition_point(|cover| *cover >= commit);
        if key.slot().is_range() {
            self.covers.push(commit);
        } else if self.covers[..older].last().is_some_and(|cover| *cover <= view) {
            return false;
        }
        let hides_nothing = commit < self.zeroes_before
            && !views.has_base()
            && !views.has_frozen_before(commit)
            && (key.slot().is_range() || self.covers[older..].is_empty());
        entry.value != Value::Zero || !hides_nothing
    }
}

impl Merge {
    /// Merges `inputs`, newest first. They must be neighbours: no source that is not merged is newer than one of them and older
    /// than another.
    ///
    /// `views` are those of this moment. `bottom`, if no older source than the inputs exists, is [`crate::Index::oldest_besides`]
    /// at this moment: zeroes of older commits that hide nothing are left out.
    ///
    /// Up to `read_ahead` pages of each input are wanted at a time, at least 1; twice as many are kept in memory.
    pub fn new(inputs: Vec<Input>, views: Views, bottom: Option<Commit>, read_ahead: u32) -> Self {
        let entries = |input: &Input| match input {
            Input::Memtable(table) => table.len() as u64,
            Input::Level(runs) => runs.iter().map(|run| run.shape.entries).sum(),
        };
        let source = |input| match input {
            Input::Memtable(table) => Source::Memtable { position: table.seek(Key::MIN), table },
            Input::Level(runs) => Source::Level(LevelSource::new(runs)),
        };
        Self {
            heads: vec![UNKNOWN; inputs.len()],
            values: vec![Value::Zero; inputs.len()],
            unknown: inputs.len(),
            read_ahead: read_ahead.max(1),
            filter: Filter {
                views,
                zeroes_before: bottom.unwrap_or(Commit::ZERO),
                group: None,
                timeline: None,
                last: None,
                covers: Vec::new(),
            },
            kept: None,
            builder: None,
            before: None,
            tally: Tally::default(),
            dead: Vec::new(),
            owners: Owners::default(),
            survey: None,
            entries_merged: 0,
            entries_total: inputs.iter().map(entries).sum(),
            sources: inputs.into_iter().map(source).collect(),
        }
    }

    /// The next read to start. Each is returned once.
    pub fn wanted(&mut self) -> Option<PageRead> {
        let read_ahead = self.read_ahead;
        self.sources.iter_mut().enumerate().find_map(|(input, source)| match source {
            Source::Memtable { .. } => None,
            Source::Level(level) => level.wanted(input, read_ahead),
        })
    }

    /// Takes the bytes of a read.
    ///
    /// # Errors
    /// One of the pages is not that page of its run: the merge cannot go on.
    ///
    /// # Panics
    /// If the read was not wanted, or the bytes are not as many as its pages have.
    pub fn feed(&mut self, read: &PageRead, bytes: &[u8]) -> Result<(), PageError> {
        let Some(Source::Level(level)) = self.sources.get_mut(read.input) else {
            panic!("a read that was wanted")
        };
        level.feed(read, bytes)
    }

    /// The name of the run that starts now, and how many pages it may have, at least 4.
    ///
    /// # Panics
    /// If no run starts, or it has too few pages.
    pub fn begin_run(&mut self, run: RunId, pages_max: u32) {
        assert!(self.builder.is_none() && self.kept.is_some(), "a run starts");
        self.builder = Some(RunBuilder::new(run, pages_max, self.before));
    }

    /// Merges up to `entries` entries, and hands out pages of the current run in their order: page 0 first.
    pub fn step(&mut self, entries: usize, out: &mut dyn FnMut(&PageBytes)) -> Step {
        if let Some(entry) = self.kept.take()
            && let Some(step) = self.write(entry, out)
        {
            return step;
        }
        for _ in 0..entries.max(1) {
            if self.unknown > 0 && !self.read_heads() {
                return Step::Pages;
            }
            let Some((entry, is_counted, in_runs)) = self.take_first() else {
                return self.end_run(None, out).unwrap_or(Step::Done);
            };
            let is_kept = self.filter.is_kept(&entry);
            self.owners.count(&entry, in_runs, is_kept);
            if !is_kept {
                self.note_dead(entry.value);
                if is_counted {
                    self.tally.remove(&entry.value);
                }
                continue;
            }
            if !is_counted {
                self.tally.add(&entry.value);
            }
            if let Some(survey) = &mut self.survey {
                survey.look(&entry);
            }
            if let Some(step) = self.write(entry, out) {
                return step;
            }
        }
        Step::Budget
    }

    /// Writes an entry, unless the step ends before it.
    fn write(&mut self, entry: Entry, out: &mut dyn FnMut(&PageBytes)) -> Option<Step> {
        match &mut self.builder {
            Some(builder) if !builder.is_full_before(entry.key) => {
                builder.push(&entry, out);
                None
            }
            // A run is full, or none has begun: the entry waits for the next one.
            _ => {
                self.kept = Some(entry);
                Some(self.end_run(Some(entry.key), out).unwrap_or(Step::NewRun))
            }
        }
    }

    /// Reads the next entry of each source where it is unknown; whether all are known.
    fn read_heads(&mut self) -> bool {
        for place in 0..self.heads.len() {
            if self.heads[place] == UNKNOWN {
                self.unknown -= 1;
                self.read_head(place);
            }
        }
        self.unknown == 0
    }

    fn read_head(&mut self, place: usize) {
        self.heads[place] = match self.sources[place].next() {
            Head::Unknown => {
                self.unknown += 1;
                UNKNOWN
            }
            Head::End => END,
            Head::Entry(entry) => {
                self.values[place] = entry.value;
                entry.key.packed()
            }
        };
    }

    /// The first entry of all sources, whether it is an entry of a run, and how many of the runs have its key. Of equal keys,
    /// that of the newest source stays.
    fn take_first(&mut self) -> Option<(Entry, bool, i64)> {
        let (first, key) = self.heads.iter().copied().enumerate().min_by_key(|(_, key)| *key)?;
        if key >= END {
            return None;
        }
        let entry = Entry { key: Key::from_checked(key), value: self.values[first] };
        let mut in_runs = 0;
        for place in first..self.heads.len() {
            if self.heads[place] == key {
                in_runs += i64::from(self.is_run(place));
                if place > first && self.is_run(place) {
                    self.tally.remove(&self.values[place]);
                }
                // The block has moved.
                if self.values[place] != entry.value {
                    self.note_dead(self.values[place]);
                }
                self.entries_merged += 1;
                self.read_head(place);
            }
        }
        Some((entry, self.is_run(first), in_runs))
    }

    fn note_dead(&mut self, value: Value) {
        if let Value::Block { place, .. } = value {
            self.dead.push(place);
        }
    }

    /// The places of blocks whose entries were left out since the last call: no view sees them, nor will any.
    pub fn drain_dead(&mut self) -> impl Iterator<Item = Place> + '_ {
        self.dead.drain(..)
    }

    fn is_run(&self, place: usize) -> bool {
        matches!(self.sources[place], Source::Level(_))
    }

    /// Ends the run that is being written, if any.
    fn end_run(&mut self, next: Option<Key>, out: &mut dyn FnMut(&PageBytes)) -> Option<Step> {
        let builder = self.builder.take()?;
        let run = builder.id();
        let (shape, last) = builder.finish(next, out);
        self.before = Some(last);
        Some(Step::RunEnd(run, shape))
    }

    /// Has the merge look for ranges in many pieces; for one that has the oldest levels.
    pub fn survey(&mut self, pieces: Pieces) {
        self.survey = Some(Survey::new(pieces));
    }

    /// Has the merge count what the live views of these timelines have for themselves: newer than these, which are the newest
    /// frozen views of each.
    pub fn count_owned(&mut self, timelines: &BTreeMap<TimelineId, Commit>) {
        self.owners = Owners::new(timelines);
    }

    /// What was counted ([`Merge::count_owned`]), by timeline. Later calls return nothing.
    pub fn take_owned(&mut self) -> impl Iterator<Item = (TimelineId, Owned)> + use<> {
        std::mem::take(&mut self.owners).finish()
    }

    /// The ranges that a survey has found so far, and whether there were more than it keeps.
    pub fn take_ranges(&mut self) -> (Vec<(TimelineId, u32)>, bool) {
        self.survey.take().map_or((Vec::new(), false), Survey::finish)
    }

    /// Entries of the inputs that were merged, and all of them.
    pub fn progress(&self) -> (u64, u64) {
        (self.entries_merged, self.entries_total)
    }

    /// How the merge changes the units that entries of runs refer to, by blob: entries of memtables that are now in a run count,
    /// and entries of runs that were left out count negatively.
    pub fn into_changes(self) -> BTreeMap<BlobId, i64> {
        self.tally.into_changes()
    }
}
