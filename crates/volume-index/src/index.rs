//! The index of one partition: its memtables and levels.
//!
//! Context: any; one owner. Sources are kept newest first. A flush turns the oldest frozen memtables into the newest level; a
//! merge replaces neighbouring levels by one. So the order of sources by age never changes, and of two entries with the same key
//! the one of the newer source is right.

use std::cell::Cell;
use std::sync::Arc;

use crate::cache::PageCache;
use crate::key::{Commit, Key, Value};
use crate::lookup::{BATCH, NeedPages, Position, Query, Slots, look_in_levels};
use crate::memtable::Memtable;
use crate::run::Run;

/// A look into another level takes about three times as long as a merge for an entry; but a merge also writes.
const LOOKS_PER_ENTRY: u64 = 4;

/// The name of a level in memory, from the index's counter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LevelId(u64);

/// A run of a level.
#[derive(Debug)]
pub(crate) struct LevelRun {
    pub(crate) run: Run,
    /// The run's table in the cache.
    pub(crate) table: u32,
    /// A key that is larger than all of earlier runs and not larger than its own: see `run.rs`.
    separator: Key,
}

/// Runs with disjoint keys.
#[derive(Debug)]
pub struct Level {
    id: LevelId,
    /// By key, at least one.
    pub(crate) runs: Vec<LevelRun>,
    oldest: Commit,
    newest: Commit,
    /// Entries and pages of all runs.
    entries: u64,
    pages: u64,
}

impl Level {
    fn new(id: LevelId, runs: Vec<Run>, cache: &mut PageCache) -> Option<Self> {
        let oldest = runs.iter().map(|run| run.shape.oldest).min()?;
        let newest = runs.iter().map(|run| run.shape.newest).max()?;
        let entries = runs.iter().fold(0_u64, |sum, run| sum.wrapping_add(run.shape.entries));
        let pages = runs.iter().map(|run| u64::from(run.shape.pages)).sum();
        let mut before: Option<Key> = None;
        let open = |run: Run| {
            let first = run.shape.first;
            assert!(before.is_none_or(|before| before < first), "runs with disjoint keys, in order");
            let is_same_slot = before.is_some_and(|before| before.newest() == first.newest());
            before = Some(run.shape.last);
            LevelRun {
                table: cache.open(&run),
                run,
                separator: if is_same_slot { first } else { first.newest() },
            }
        };
        Some(Self { id, runs: runs.into_iter().map(open).collect(), oldest, newest, entries, pages })
    }

    /// Its name.
    pub fn id(&self) -> LevelId {
        self.id
    }

    /// The runs, by key.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = &Run> {
        self.runs.iter().map(|run| &run.run)
    }

    /// Entries of all runs.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Pages of all runs.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether `view` includes any entry.
    pub(crate) fn may_have(&self, view: Commit) -> bool {
        self.oldest <= view
    }

    /// The run where the search for `key` ends, if this or the next one may have entries of the key's range.
    pub(crate) fn find(&self, key: Key) -> Option<usize> {
        let group = key.group();
        let place = self.find_any(key);
        let may_have =
            |run: &LevelRun| (run.run.shape.first.group()..=run.run.shape.last.group()).contains(&group);
        self.runs[place..].iter().take(2).any(may_have).then_some(place)
    }

    /// The run where the search for `key` ends.
    pub(crate) fn find_any(&self, key: Key) -> usize {
        self.runs.partition_point(|run| run.separator <= key).saturating_sub(1)
    }

    /// The leaf page that follows.
    pub(crate) fn next_leaf(&self, position: Position) -> Option<Position> {
        let Position { run, leaf } = position;
        if leaf + 1 < self.runs[run].run.shape.leaves {
            return Some(Position { run, leaf: leaf + 1 });
        }
        (run + 1 < self.runs.len()).then_some(Position { run: run + 1, leaf: 0 })
    }
}

/// The index of one partition.
#[derive(Debug)]
pub struct Index {
    memtable: Memtable,
    /// Newest first.
    frozen: Vec<Arc<Memtable>>,
    /// Newest first.
    pub(crate) levels: Vec<Level>,
    /// For each frozen memtable and then for each level: the newest commit of this source and of all older ones.
    remaining: Vec<Commit>,
    levels_made: u64,
    /// Entries of all levels.
    entries: u64,
    /// How often lookups have looked into another level than the first one since the levels changed.
    extra_looks: Cell<u64>,
}

impl Index {
    /// The index with these levels, newest first, each a list of runs by key.
    ///
    /// # Panics
    /// If the runs of a level are not disjoint or not in order, or a run is open in the cache.
    pub fn new(
        memtable: Memtable,
        levels: impl IntoIterator<Item = Vec<Run>>,
        cache: &mut PageCache,
    ) -> Self {
        let mut index = Self {
            memtable,
            frozen: Vec::new(),
            levels: Vec::new(),
            remaining: Vec::new(),
            levels_made: 0,
            entries: 0,
            extra_looks: Cell::new(0),
        };
        for runs in levels {
            let level = Level::new(index.new_level(), runs, cache);
            index.levels.extend(level);
        }
        index.levels_changed();
        index
    }

    fn new_level(&mut self) -> LevelId {
        self.levels_made += 1;
        LevelId(self.levels_made)
    }

    fn levels_changed(&mut self) {
        self.entries = self.levels.iter().fold(0, |sum, level| sum.wrapping_add(level.entries));
        self.extra_looks.set(0);
        self.update_remaining();
    }

    fn update_remaining(&mut self) {
        self.remaining.clear();
        let sources = self.frozen.iter().map(|table| table.commits().1);
        self.remaining.extend(sources.chain(self.levels.iter().map(|level| level.newest)));
        let mut newest = Commit::ZERO;
        for remaining in self.remaining.iter_mut().rev() {
            newest = newest.max(*remaining);
            *remaining = newest;
        }
    }

    /// The memtable that takes new entries.
    pub fn memtable(&self) -> &Memtable {
        &self.memtable
    }

    /// Adds a version: see [`Memtable::insert`].
    ///
    /// A version that moved (the same key, another place) may be added only if a view sees it at this moment at its old place
    /// ([`first_from`](crate::TimelineViews::first_from) and a lookup tell): a merge may have left it out, and what hid it.
    pub fn insert(&mut self, key: Key, value: Value, kept: Commit) {
        self.memtable.insert(key, value, kept);
    }

    /// Freezes the memtable, which `next`, empty, replaces.
    pub fn freeze(&mut self, next: Memtable) -> Arc<Memtable> {
        debug_assert!(next.is_empty());
        let frozen = Arc::new(std::mem::replace(&mut self.memtable, next));
        self.frozen.insert(0, Arc::clone(&frozen));
        self.update_remaining();
        frozen
    }

    /// The frozen memtables, newest first.
    pub fn frozen(&self) -> &[Arc<Memtable>] {
        &self.frozen
    }

    /// The levels, newest first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The oldest `tables` frozen memtables were written as these runs, by key, which become the newest level. Returns the
    /// memtables, newest first.
    ///
    /// # Panics
    /// If there are fewer frozen memtables, or as [`Index::new`].
    pub fn flushed(&mut self, tables: usize, runs: Vec<Run>, cache: &mut PageCache) -> Vec<Arc<Memtable>> {
        let newer = self.frozen.len().checked_sub(tables).expect("as many frozen memtables");
        if let Some(level) = Level::new(self.new_level(), runs, cache) {
            self.levels.insert(0, level);
        }
        let flushed = self.frozen.split_off(newer);
        self.levels_changed();
        flushed
    }

    /// These neighbouring levels, newest first, were merged into these runs, by key. Returns the runs that are no longer part of
    /// the index.
    ///
    /// # Panics
    /// If the levels are not neighbours, or as [`Index::new`].
    pub fn merged(&mut self, levels: &[LevelId], runs: Vec<Run>, cache: &mut PageCache) -> Vec<Run> {
        let place = self.levels.iter().position(|level| Some(&level.id) == levels.first());
        let place = place.expect("levels of the index");
        let inputs = place..place + levels.len();
        let is_same = self
            .levels
            .get(inputs.clone())
            .is_some_and(|found| found.iter().map(|level| &level.id).eq(levels));
        assert!(is_same, "neighbouring levels");
        let output = Level::new(self.new_level(), runs, cache);
        let old: Vec<_> = self.levels.splice(inputs, output).flat_map(|level| level.runs).collect();
        self.levels_changed();
        old.into_iter()
            .map(|old| {
                cache.close(old.table);
                old.run
            })
            .collect()
    }

    /// The smallest commit of all entries besides those of `levels`: what [`crate::Merge::new`] needs to know of a merge of the
    /// oldest levels.
    pub fn oldest_besides(&self, levels: &[LevelId]) -> Commit {
        let others = self.levels.iter().filter(|level| !levels.contains(&level.id)).map(|level| level.oldest);
        let frozen = self.frozen.iter().map(|table| table.commits().0);
        frozen.chain(others).fold(self.memtable.commits().0, Commit::min)
    }

    /// Whether lookups have looked into further levels [`LOOKS_PER_ENTRY`] times for each entry that a merge of all levels would
    /// write, since the levels changed or this was last true: once for each merge.
    pub fn take_paid_merge(&self) -> bool {
        let is_paid = self.extra_looks.get() > self.entries.saturating_mul(LOOKS_PER_ENTRY);
        if is_paid {
            self.extra_looks.set(0);
        }
        is_paid
    }

    /// Looks up the slots of a query.
    ///
    /// # Errors
    /// Pages are missing; `slots` then has no answer.
    ///
    /// # Panics
    /// If the query is not about one or more slots of one range.
    pub fn lookup(&self, cache: &PageCache, query: &Query, slots: &mut Slots) -> Result<(), NeedPages> {
        slots.start(query);
        let mut needed = NeedPages::default();
        self.memtable.lookup(query, slots);
        let (of_tables, of_levels) = self.remaining.split_at(self.frozen.len());
        for (table, remaining) in self.frozen.iter().zip(of_tables) {
            if slots.are_newer_than(*remaining) {
                return Ok(());
            }
            table.lookup(query, slots);
        }
        let mut looks = 0;
        for (levels, remaining) in self.levels.chunks(BATCH).zip(of_levels.iter().step_by(BATCH)) {
            if slots.are_newer_than(*remaining) {
                break;
            }
            looks += look_in_levels(levels, cache, query, slots, &mut needed);
        }
        self.extra_looks.set(self.extra_looks.get() + looks.saturating_sub(1) as u64);
        if needed.pages().is_empty() { Ok(()) } else { Err(needed) }
    }
}
