//! Runs: immutable B-trees of pages, one after the other in a blob.
//!
//! Context: any. Leaf pages come first, in the order of their keys; then each level of inner pages; the root is last. Children of
//! an inner page are neighbours, so an inner page names only the first.
//!
//! **Separators.** The key by which a parent finds a page is the newest possible version of the page's first slot, unless
//! versions of that slot are on the page before: a search for a version of a slot then ends on the page where the slot's versions
//! begin.

use crate::key::{Commit, Entry, Key, Place};
use crate::page::{
    self, BEGAN_BEFORE, CHILDREN_MAX, GROUP_GOES_ON, LeafBuilder, PAGE_BYTES, PAGE_UNITS, PageBytes,
    PageError, RANGE_BEFORE, SLOT_GOES_ON, write_inner,
};

/// The name of a run, which each of its pages repeats. Never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RunId(pub u64);

/// What a run contains: for the manifest, and for skipping runs on lookups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunShape {
    /// All pages.
    pub pages: u32,
    /// The first pages: those with entries.
    pub leaves: u32,
    /// Entries.
    pub entries: u64,
    /// Entries about whole ranges.
    pub range_entries: u64,
    /// The first key.
    pub first: Key,
    /// The last key.
    pub last: Key,
    /// The smallest commit.
    pub oldest: Commit,
    /// The largest commit.
    pub newest: Commit,
}

/// A run and where it is: page `n` is at unit `place.unit + 8 * n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its name.
    pub id: RunId,
    /// The place of its first page.
    pub place: Place,
    /// Its content.
    pub shape: RunShape,
}

impl Run {
    /// Whether a manifest may contain this run: its pages are within a blob, and its numbers fit each other.
    pub fn is_valid(&self) -> bool {
        let RunShape { pages, leaves, entries, range_entries, first, last, oldest, newest } = self.shape;
        let end = u64::from(self.place.unit) + u64::from(pages) * u64::from(PAGE_UNITS);
        let is_within = end <= 1 << 16;
        is_within
            && leaves >= 1
            && pages == pages_of(leaves)
            && range_entries <= entries
            && entries >= u64::from(leaves)
            && first <= last
            && oldest <= newest
    }

    /// Checks that bytes are the page of this number.
    ///
    /// # Errors
    /// They are not.
    pub fn check_page(&self, page: u32, bytes: &PageBytes) -> Result<(), PageError> {
        page::check(bytes, self, page)
    }

    /// The place of a page.
    ///
    /// # Panics
    /// If the run has no such page, or is not valid.
    pub fn place_of(&self, page: u32) -> Place {
        assert!(page < self.shape.pages, "a page of the run");
        let unit = u32::from(self.place.unit) + PAGE_UNITS * page;
        Place { blob: self.place.blob, unit: u16::try_from(unit).expect("a valid run ends within its blob") }
    }
}

/// All pages of a run of so many leaf pages.
pub(crate) fn pages_of(leaves: u32) -> u32 {
    let (mut pages, mut level) = (leaves, leaves);
    while level > 1 {
        level = level.div_ceil(CHILDREN_MAX as u32);
        pages += level;
    }
    pages
}

/// The most leaf pages of a run of so many pages.
fn leaves_of(pages: u32) -> u32 {
    (1..=pages).rev().find(|leaves| pages_of(*leaves) <= pages).unwrap_or(0)
}

/// Writes the pages of a run from its sorted entries.
#[derive(Debug)]
pub(crate) struct RunBuilder {
    id: RunId,
    leaves_max: u32,
    leaf: LeafBuilder,
    /// The separator of the page that is being filled.
    separator: u128,
    /// For each leaf page: its separator and its newest commit.
    children: Vec<(u128, Commit)>,
    entries: u64,
    range_entries: u64,
    first: Option<Key>,
    /// The last key of this run, or of the run before.
    last: Option<Key>,
    oldest: Commit,
    newest: Commit,
    /// Whether the group of the last entry has entries about its whole range in this run.
    has_range: bool,
}

impl RunBuilder {
    /// A builder of a run of up to `pages_max` pages. `before` is the last key of the level's earlier runs and whether there are
    /// entries about the whole range of that key.
    pub(crate) fn new(id: RunId, pages_max: u32, before: Option<(Key, bool)>) -> Self {
        let leaves_max = leaves_of(pages_max);
        assert!(leaves_max >= 2, "a run has at least two leaf pages");
        let (last, has_range) = before.map_or((None, false), |(last, has_range)| (Some(last), has_range));
        Self {
            id,
            leaves_max,
            leaf: LeafBuilder::new(),
            separator: 0,
            children: Vec::new(),
            entries: 0,
            range_entries: 0,
            first: None,
            last,
            oldest: Commit::MAX,
            newest: Commit::ZERO,
            has_range,
        }
    }

    /// The run's name.
    pub(crate) fn id(&self) -> RunId {
        self.id
    }

    /// Whether the run should end before this key: at the start of a group if it is nearly full, otherwise if it is full.
    pub(crate) fn is_full_before(&self, key: Key) -> bool {
        let leaves = self.children.len() as u32;
        let starts_group = self.last.is_none_or(|last| last.group() != key.group());
        // Each entry needs at most one page more than there are.
        leaves + 1 >= self.leaves_max || (starts_group && leaves + 1 >= self.leaves_max - self.leaves_max / 8)
    }

    /// Adds an entry behind all others.
    pub(crate) fn push(&mut self, entry: &Entry, out: &mut dyn FnMut(&PageBytes)) {
        let key = entry.key;
        debug_assert!(self.last.is_none_or(|last| last < key), "entries in order");
        let is_same_group = self.last.is_some_and(|last| last.group() == key.group());
        let is_same_slot = self.last.is_some_and(|last| last.newest() == key.newest());
        if !is_same_group {
            self.has_range = false;
        }
        if self.leaf.is_empty() {
            self.start_leaf(key, is_same_group, is_same_slot);
        }
        if !self.leaf.push(entry) {
            self.end_leaf(is_same_group, is_same_slot, out);
            self.start_leaf(key, is_same_group, is_same_slot);
            let fits = self.leaf.push(entry);
            debug_assert!(fits, "an empty page has room");
        }
        if key.slot().is_range() {
            self.has_range = true;
            self.range_entries += 1;
        }
        self.entries += 1;
        self.first.get_or_insert(key);
        self.last = Some(key);
        self.oldest = self.oldest.min(key.commit());
        self.newest = self.newest.max(key.commit());
    }

    fn start_leaf(&mut self, key: Key, is_same_group: bool, is_same_slot: bool) {
        self.leaf.flags = if is_same_group { BEGAN_BEFORE } else { 0 }
            | if is_same_group && self.has_range { RANGE_BEFORE } else { 0 };
        self.separator = if is_same_slot { key } else { key.newest() }.packed();
    }

    fn end_leaf(&mut self, goes_on: bool, slot_goes_on: bool, out: &mut dyn FnMut(&PageBytes)) {
        let number = self.children.len() as u32;
        self.children.push((self.separator, self.leaf.newest));
        let flags = if goes_on { GROUP_GOES_ON } else { 0 } | if slot_goes_on { SLOT_GOES_ON } else { 0 };
        out(self.leaf.finish(self.id.0, number, flags));
    }

    /// Writes the last leaf page and all inner pages. `next` is the first key of the level's next run. Returns what a builder of
    /// that run needs to know as `before`.
    pub(crate) fn finish(
        mut self,
        next: Option<Key>,
        out: &mut dyn FnMut(&PageBytes),
    ) -> (RunShape, (Key, bool)) {
        let (first, last) = self.first.zip(self.last).expect("a run has entries");
        let goes_on = next.is_some_and(|next| next.group() == last.group());
        let slot_goes_on = next.is_some_and(|next| next.newest() == last.newest());
        self.end_leaf(goes_on, slot_goes_on, out);
        let leaves = self.children.len() as u32;
        let (mut level, mut first_child, mut pages) = (self.children, 0, leaves);
        let mut page = [0; PAGE_BYTES];
        while level.len() > 1 {
            let mut above = Vec::with_capacity(level.len().div_ceil(CHILDREN_MAX));
            let mut child = first_child;
            first_child = pages;
            for children in level.chunks(CHILDREN_MAX) {
                write_inner(&mut page, self.id.0, pages, child, children);
                out(&page);
                let newest = children.iter().map(|(_, newest)| *newest).max();
                above.push((children[0].0, newest.unwrap_or(Commit::ZERO)));
                child += children.len() as u32;
                pages += 1;
            }
            level = above;
        }
        debug_assert_eq!(pages, pages_of(leaves));
        let shape = RunShape {
            pages,
            leaves,
            entries: self.entries,
            range_entries: self.range_entries,
            first,
            last,
            oldest: self.oldest,
            newest: self.newest,
        };
        (shape, (last, self.has_range))
    }
}
