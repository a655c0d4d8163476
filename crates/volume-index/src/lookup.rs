//! Lookups of slots of one range at a view.
//!
//! Context: any; on warm pages without allocation. A lookup offers the versions of each source, newest source first, to the
//! answer, which keeps the newest version of each slot. It skips sources by their commits: those that are newer than the view as
//! a whole, and all that remain when each slot has a version that is newer than all of theirs.

use std::ops::Range;

use crate::cache::PageCache;
use crate::index::{Level, LevelRun};
use crate::key::{Commit, Key, Place, RANGE_BLOCKS, Slot, TimelineId, Value};
use crate::page::{BEGAN_BEFORE, GROUP_GOES_ON, Inner, Leaf, PageBytes, RANGE_BEFORE, SLOT_GOES_ON};
use crate::run::RunId;

/// Which slots of which range, and in which state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Query {
    /// The history.
    pub timeline: TimelineId,
    /// The range.
    pub range: u32,
    /// The first slot. From [`Slot::RANGE`] on, the answer has the version of the whole range by itself.
    pub first: Slot,
    /// Slots, at least 1.
    pub count: u16,
    /// The view: [`Commit::MAX`] is the live one.
    pub view: Commit,
}

impl Query {
    /// The last slot.
    ///
    /// # Panics
    /// If the query is not about one or more slots of one range.
    pub(crate) fn last(&self) -> Slot {
        let last = self.count.checked_sub(1).and_then(|more| self.first.get().checked_add(more));
        last.and_then(Slot::new).expect("a query about slots of one range")
    }

    pub(crate) fn group(&self) -> u64 {
        u64::from(self.timeline.0) << 32 | u64::from(self.range)
    }

    fn key(&self, slot: Slot) -> Key {
        Key::new(self.timeline, self.range, slot, self.view)
    }
}

/// A version that a view sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    /// The write that made the version.
    pub commit: Commit,
    /// Its content.
    pub value: Value,
}

/// The slots of a range.
const SLOTS: usize = RANGE_BLOCKS as usize + 1;

/// The answer to a query. Kept by the caller and used again, so that lookups allocate nothing.
#[derive(Debug)]
pub struct Slots {
    first: u16,
    count: u16,
    /// The version of the whole range; if the query is not about it, it may be absent where all blocks have newer versions.
    range: Option<Version>,
    /// The versions of blocks, without regard to the version of the whole range.
    versions: Box<[Option<Version>; SLOTS]>,
}

impl Default for Slots {
    fn default() -> Self {
        Self::new()
    }
}

impl Slots {
    /// An empty answer, with room for the largest.
    pub fn new() -> Self {
        Self { first: 0, count: 0, range: None, versions: Box::new([None; SLOTS]) }
    }

    /// The version of a slot of the query; `None`: the base's. Of a block, [`Value::Dense`] or the zero of a whole range is the
    /// version where the block has no newer one.
    ///
    /// # Panics
    /// If the slot was not in the query.
    pub fn get(&self, slot: Slot) -> Option<Version> {
        let place = usize::from(slot.get().checked_sub(self.first).expect("a slot of the query"));
        let version = self.versions[..usize::from(self.count)][place];
        match (self.range, version) {
            (Some(range), Some(version)) => {
                Some(if range.commit >= version.commit { range } else { version })
            }
            (range, version) => version.or(range),
        }
    }

    pub(crate) fn start(&mut self, query: &Query) {
        let last = query.last();
        (self.first, self.count, self.range) = (query.first.get(), query.count, None);
        debug_assert_eq!(last.get(), self.first + self.count - 1);
        self.versions[..usize::from(self.count)].fill(None);
    }

    /// Keeps the newest version; of the same version that of the newest source, which comes first.
    pub(crate) fn offer(&mut self, slot: u16, version: Version) {
        let is_range = slot == Slot::RANGE.get();
        let known =
            if is_range { &mut self.range } else { &mut self.versions[usize::from(slot - self.first)] };
        if known.is_none_or(|known| known.commit < version.commit) {
            *known = Some(version);
        }
    }

    /// Whether each slot has a version that is newer than `commit`.
    pub(crate) fn are_newer_than(&self, commit: Commit) -> bool {
        let is_newer = |version: Option<Version>| version.is_some_and(|version| version.commit > commit);
        is_newer(self.range)
            || (self.first > Slot::RANGE.get()
                && self.versions[..usize::from(self.count)].iter().all(|version| is_newer(*version)))
    }
}

/// A page that a lookup needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missing {
    /// The page's run.
    pub run: RunId,
    /// The page's number in the run.
    pub page: u32,
    /// Where to read the page.
    pub place: Place,
}

/// Pages that are not in the cache. The caller reads them, inserts them into the cache, and repeats the call.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct NeedPages {
    pages: Vec<Missing>,
}

impl NeedPages {
    /// The pages: at least one.
    pub fn pages(&self) -> &[Missing] {
        &self.pages
    }

    #[cold]
    fn add(&mut self, run: &LevelRun, page: u32) {
        let missing = Missing { run: run.run.id, page, place: run.run.place_of(page) };
        if !self.pages.contains(&missing) {
            self.pages.push(missing);
        }
    }
}

/// The leaf page of a run where the search for `key` ends; a missing page on the way is noted.
pub(crate) fn find_leaf(run: &LevelRun, cache: &PageCache, key: Key, needed: &mut NeedPages) -> Option<u32> {
    let shape = &run.run.shape;
    let mut page = shape.pages - 1;
    while page >= shape.leaves {
        page = Inner::of(page_of(run, cache, page, needed)?).search(key);
    }
    Some(page)
}

/// A page of a run, or a note that it is missing.
pub(crate) fn page_of<'a>(
    run: &LevelRun,
    cache: &'a PageCache,
    page: u32,
    needed: &mut NeedPages,
) -> Option<&'a PageBytes> {
    let found = cache.page(run.table, page);
    if found.is_none() {
        needed.add(run, page);
    }
    found
}

/// A leaf page of a level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// The run's index.
    pub(crate) run: usize,
    /// The page's number.
    pub(crate) leaf: u32,
}

/// How many levels are searched side by side.
pub(crate) const BATCH: usize = 4;

/// A level's leaf page where the search for the first slot of a query ended.
#[derive(Clone, Copy)]
struct Probe<'a> {
    level: &'a Level,
    position: Position,
    leaf: Leaf<'a>,
    /// The query's group on the page, or the number of groups before.
    found: Result<usize, usize>,
    /// The first of the group's entries whose slot is not smaller than the query's first.
    place: usize,
}

/// Adds what up to [`BATCH`] levels, newest first, know to the answer of a query. Notes pages that are missing. Returns the
/// number of levels in which it has looked at a leaf page.
///
/// A page of a large index is in none of the processor's caches: each first access to one of its lines takes as long as hundreds
/// of instructions. So each step is done for all levels before the next one, and the processor waits for their lines at the same
/// time.
pub(crate) fn look_in_levels(
    levels: &[Level],
    cache: &PageCache,
    query: &Query,
    slots: &mut Slots,
    needed: &mut NeedPages,
) -> usize {
    let (group, key) = (query.group(), query.key(query.first));
    let mut probes = [const { None }; BATCH];
    let mut count = 0;
    for level in levels.iter().filter(|level| level.may_have(query.view)) {
        let Some(run) = level.find(key) else { continue };
        let Some(leaf) = find_leaf(&level.runs[run], cache, key, needed) else { continue };
        let Some(page) = page_of(&level.runs[run], cache, leaf, needed) else { continue };
        let position = Position { run, leaf };
        probes[count] = Some(Probe { level, position, leaf: Leaf::unread(page), found: Err(0), place: 0 });
        count += 1;
    }
    let probes = &mut probes[..count];
    for probe in probes.iter_mut().flatten() {
        probe.leaf.read();
    }
    for probe in probes.iter_mut().flatten() {
        probe.found = probe.leaf.find(group);
    }
    for probe in probes.iter_mut().flatten() {
        if let Ok(found) = probe.found {
            let (start, end) = (probe.leaf.start(found), probe.leaf.end(found));
            probe.place = probe.leaf.find_slot(start, end, query.first.get());
        }
    }
    for probe in probes.iter().flatten() {
        // A missing page is noted. Those of the other levels are wanted too, so that the caller reads all at the same time.
        let _ = look_from(probe, cache, query, slots, needed);
    }
    count
}

/// Adds what a level knows from its probe on.
fn look_from(
    probe: &Probe<'_>,
    cache: &PageCache,
    query: &Query,
    slots: &mut Slots,
    needed: &mut NeedPages,
) -> Option<()> {
    let Probe { level, mut position, mut leaf, mut found, mut place } = *probe;
    if let (Ok(found), false) = (found, query.first.is_range()) {
        if found > 0 || !leaf.has(BEGAN_BEFORE) {
            // Entries about the range are in front of those of blocks: all are on this page.
            look_at_range(leaf, leaf.start(found)..place, query.view, slots);
        } else if leaf.has(RANGE_BEFORE) {
            look_for_range(level, cache, query, slots, needed)?;
        }
    }
    let mut wanted = query.first.get();
    loop {
        let goes_on = match found {
            Ok(found) => {
                wanted = look_at_slots(leaf, place, leaf.end(found), wanted, query, slots);
                found + 1 == leaf.groups
                    && leaf.has(if query.count > 1 { GROUP_GOES_ON } else { SLOT_GOES_ON })
            }
            // The next page may begin with a later slot of the query.
            Err(before) => before == leaf.groups && query.count > 1,
        };
        if !goes_on || wanted > query.last().get() {
            return Some(());
        }
        let Some(next) = level.next_leaf(position) else { return Some(()) };
        position = next;
        leaf = Leaf::of(page_of(&level.runs[position.run], cache, position.leaf, needed)?);
        found = leaf.find(query.group());
        place = 0;
    }
}

/// Offers the version of a whole range, if it is among these entries of its group.
fn look_at_range(leaf: Leaf<'_>, entries: Range<usize>, view: Commit, slots: &mut Slots) -> bool {
    if entries.is_empty() || leaf.slot(entries.start) != Slot::RANGE.get() {
        return false;
    }
    let place = leaf.search_versions(entries.start, entries.end, Slot::RANGE.get(), view);
    let is_found = place < entries.end && leaf.slot(place) == Slot::RANGE.get();
    if is_found {
        slots.offer(Slot::RANGE.get(), Version { commit: leaf.commit(place), value: leaf.value(place) });
    }
    is_found
}

/// Searches for the version of the whole range on pages before those with its blocks.
fn look_for_range(
    level: &Level,
    cache: &PageCache,
    query: &Query,
    slots: &mut Slots,
    needed: &mut NeedPages,
) -> Option<()> {
    let key = query.key(Slot::RANGE);
    let Some(run) = level.find(key) else { return Some(()) };
    let mut position = Position { run, leaf: find_leaf(&level.runs[run], cache, key, needed)? };
    loop {
        let leaf = Leaf::of(page_of(&level.runs[position.run], cache, position.leaf, needed)?);
        let Ok(found) = leaf.find(query.group()) else { return Some(()) };
        let (start, end) = (leaf.start(found), leaf.end(found));
        let goes_on =
            end == leaf.entries && leaf.slot(end - 1) == Slot::RANGE.get() && leaf.has(SLOT_GOES_ON);
        if look_at_range(leaf, start..end, query.view, slots) || !goes_on {
            return Some(());
        }
        let Some(next) = level.next_leaf(position) else { return Some(()) };
        position = next;
    }
}

/// Offers versions of slots from `wanted` on, among the entries `place..end` of one group. Returns the first slot that is still
/// wanted.
fn look_at_slots(
    leaf: Leaf<'_>,
    mut place: usize,
    end: usize,
    mut wanted: u16,
    query: &Query,
    slots: &mut Slots,
) -> u16 {
    let (last, view) = (query.last().get(), query.view);
    while place < end {
        let slot = leaf.slot(place);
        if slot > last {
            return last + 1;
        }
        if slot < wanted {
            // Older versions than the one that the view sees.
            place = leaf.find_slot(place, end, wanted);
            continue;
        }
        wanted = slot;
        let commit = leaf.commit(place);
        if commit > view {
            place = leaf.search_versions(place, end, slot, view);
            continue;
        }
        slots.offer(slot, Version { commit, value: leaf.value(place) });
        wanted = slot + 1;
        if wanted > last {
            return wanted;
        }
        place += 1;
    }
    wanted
}
