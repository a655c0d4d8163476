//! Pages of runs: 4 KiB each, little-endian.
//!
//! Context: any. [`check`] is the only way for bytes of a disk into a [`crate::PageCache`] or a merge. The other functions read
//! pages that passed it: their indexes are in bounds because of what it checked.
//!
//! | bytes | header of each page |
//! | --- | --- |
//! | 0 | magic |
//! | 4 | CRC32C of bytes 8 to 4,095 |
//! | 8 | the run, 64 bits |
//! | 16 | the page's number in the run, 32 bits |
//! | 20 | flags of a leaf page, 16 bits; zero in inner pages |
//! | 22 | groups of a leaf page, or children of an inner page, 16 bits |
//! | 24 | entries of a leaf page, 16 bits; zero in inner pages |
//! | 26 | zero |
//! | 28 | the first child of an inner page, or the timeline of a leaf page's first group, 32 bits |
//!
//! **Leaf page.** A group is the entries of one range of one timeline. From byte 32: the range of each group, 32 bits; the index
//! of each group's first entry, 16 bits; the slot of each entry times four plus the kind of its value, 16 bits; and, if the
//! groups are of several timelines, the timeline of each group, 32 bits. Entry `i` has the 16 bytes before byte `4096 - 16 * i`:
//! commit (48 bits), unit (16), blob (32), checksum (32). So a lookup counts smaller ranges and smaller slots, which are next to
//! each other, and reads one of these records: few cache lines that depend on each other.
//!
//! **Inner page.** From byte 32: for each child a key of 128 bits, which is larger than all keys of earlier children and not
//! larger than the child's own; then the newest commit below each child, 48 bits. Children are neighbouring pages.

use std::cmp::Ordering;

use crate::key::{BLOCK_UNITS, BlobId, Commit, Entry, Key, Place, Slot, Value};
use crate::run::{Run, RunId, RunShape};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Units of a page in its blob.
pub const PAGE_UNITS: u32 = BLOCK_UNITS;

/// The bytes of a page.
pub type PageBytes = [u8; PAGE_BYTES];

const MAGIC: u32 = u32::from_le_bytes(*b"AVIX");
const HEADER: usize = 32;
const RANGE: usize = 4;
const TIMELINE: usize = 4;
const START: usize = 2;
const SLOT: usize = 2;
const RECORD: usize = 16;
const SEPARATOR: usize = 16;
const COMMIT: usize = 6;

/// The most children of an inner page.
pub(crate) const CHILDREN_MAX: usize = (PAGE_BYTES - HEADER) / (SEPARATOR + COMMIT);

/// The first group began on an earlier page.
pub(crate) const BEGAN_BEFORE: u16 = 1;
/// The first group began on an earlier page, and entries about its whole range are there.
pub(crate) const RANGE_BEFORE: u16 = 2;
/// The last group goes on on the next page.
pub(crate) const GROUP_GOES_ON: u16 = 4;
/// The versions of the last slot go on on the next page.
pub(crate) const SLOT_GOES_ON: u16 = 8;
/// The groups are of several timelines.
const MIXED: u16 = 16;

const KIND_ZERO: u16 = 0;
const KIND_BLOCK: u16 = 1;
const KIND_DENSE: u16 = 2;

/// Why a page is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PageError {
    /// The bytes are not what was written.
    #[error("the checksum of an index page is wrong")]
    Checksum,
    /// An index page, but of another run or at another place.
    #[error("an index page belongs to another run or place")]
    Misplaced,
    /// A right checksum around a content that no run has.
    #[error("the content of an index page is invalid")]
    Content,
}

#[inline]
fn load<const N: usize>(page: &PageBytes, at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[at..at + N]);
    bytes
}

#[inline]
fn u16_at(page: &PageBytes, at: usize) -> u16 {
    u16::from_le_bytes(load(page, at))
}

#[inline]
fn u32_at(page: &PageBytes, at: usize) -> u32 {
    u32::from_le_bytes(load(page, at))
}

fn store<const N: usize>(page: &mut PageBytes, at: usize, bytes: [u8; N]) {
    page[at..at + N].copy_from_slice(&bytes);
}

/// Writes the header; the checksum last, over all that is in the page. `first` is the first child or timeline.
fn seal(page: &mut PageBytes, run: u64, number: u32, flags: u16, counts: (u16, u16), first: u32) {
    store(page, 0, MAGIC.to_le_bytes());
    store(page, 8, run.to_le_bytes());
    store(page, 16, number.to_le_bytes());
    store(page, 20, flags.to_le_bytes());
    store(page, 22, counts.0.to_le_bytes());
    store(page, 24, counts.1.to_le_bytes());
    store(page, 28, first.to_le_bytes());
    let crc = crc_fast::crc32_iscsi(&page[8..]);
    store(page, 4, crc.to_le_bytes());
}

/// Checks that `page` is the page of this number of `run`, and that all its parts are in bounds and in order.
pub(crate) fn check(page: &PageBytes, run: &Run, number: u32) -> Result<(), PageError> {
    if u32_at(page, 0) != MAGIC || u32_at(page, 4) != crc_fast::crc32_iscsi(&page[8..]) {
        return Err(PageError::Checksum);
    }
    if u64::from_le_bytes(load(page, 8)) != run.id.0
        || u32_at(page, 16) != number
        || number >= run.shape.pages
    {
        return Err(PageError::Misplaced);
    }
    let is_valid =
        if number < run.shape.leaves { is_leaf_valid(page, run) } else { is_inner_valid(page, number) };
    if is_valid { Ok(()) } else { Err(PageError::Content) }
}

/// The run, the number in it, and the entries of a page whose run is not known otherwise. An inner page has none.
///
/// # Errors
/// If the bytes are no page, or one that no run has.
pub fn entries_of(page: &PageBytes) -> Result<(RunId, u32, Vec<Entry>), PageError> {
    if u32_at(page, 0) != MAGIC || u32_at(page, 4) != crc_fast::crc32_iscsi(&page[8..]) {
        return Err(PageError::Checksum);
    }
    let (id, number) = (RunId(u64::from_le_bytes(load(page, 8))), u32_at(page, 16));
    let mut entries = Vec::new();
    if u16_at(page, 24) == 0 {
        return if is_inner_valid(page, number) {
            Ok((id, number, entries))
        } else {
            Err(PageError::Content)
        };
    }
    let shape = RunShape {
        pages: u32::MAX,
        leaves: u32::MAX,
        entries: u64::MAX,
        range_entries: u64::MAX,
        first: Key::MIN,
        last: Key::from_checked(u128::MAX),
        oldest: Commit::ZERO,
        newest: Commit::MAX,
    };
    let run = Run { id, place: Place { blob: BlobId(0), unit: 0 }, shape };
    if !is_leaf_valid(page, &run) {
        return Err(PageError::Content);
    }
    Leaf::of(page).decode(&mut entries);
    Ok((id, number, entries))
}

fn is_leaf_valid(page: &PageBytes, run: &Run) -> bool {
    let leaf = Leaf::of(page);
    let (groups, entries) = (leaf.groups, leaf.entries);
    if groups == 0 || entries < groups || bytes_of(groups, entries, leaf.has(MIXED)) > PAGE_BYTES {
        return false;
    }
    let starts = || (0..groups).map(|group| leaf.start(group));
    if leaf.start(0) != 0 || leaf.start(groups - 1) >= entries || !starts().is_sorted_by(|a, b| a < b) {
        return false;
    }
    if !(0..groups).map(|group| leaf.group(group)).is_sorted_by(|a, b| a < b) {
        return false;
    }
    let shape = &run.shape;
    for group in 0..groups {
        let mut last = None;
        for index in leaf.start(group)..leaf.end(group) {
            let (slot, commit) = (leaf.slot(index), leaf.commit(index));
            let order = (slot, Commit::MAX.get() - commit.get());
            if last.is_some_and(|last| last >= order) || commit < shape.oldest || commit > shape.newest {
                return false;
            }
            last = Some(order);
            let kind = leaf.tag(index) & 3;
            let Some(slot) = Slot::new(slot).filter(|_| kind <= KIND_DENSE) else { return false };
            if !leaf.value(index).suits(slot) {
                return false;
            }
        }
    }
    leaf.key(0, 0) >= shape.first && leaf.key(groups - 1, entries - 1) <= shape.last
}

fn is_inner_valid(page: &PageBytes, number: u32) -> bool {
    let inner = Inner::of(page);
    let (first, children) = (u32_at(page, 28), inner.children);
    if children == 0 || children > CHILDREN_MAX {
        return false;
    }
    // Children come before their parent: a search ends, whatever else the pages contain.
    first.checked_add(children as u32).is_some_and(|end| end <= number)
        && inner.separators().is_sorted_by(|a, b| u128::from_le_bytes(*a) < u128::from_le_bytes(*b))
}

/// The bytes that a leaf page needs.
const fn bytes_of(groups: usize, entries: usize, is_mixed: bool) -> usize {
    let group = RANGE + START + if is_mixed { TIMELINE } else { 0 };
    HEADER + group * groups + (SLOT + RECORD) * entries
}

/// A leaf page that was checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf<'a> {
    page: &'a PageBytes,
    /// Groups.
    pub(crate) groups: usize,
    /// Entries.
    pub(crate) entries: usize,
}

impl<'a> Leaf<'a> {
    #[inline]
    pub(crate) fn of(page: &'a PageBytes) -> Self {
        let mut leaf = Self::unread(page);
        leaf.read();
        leaf
    }

    /// A page whose memory is not read before [`Leaf::read`]: without groups and entries.
    pub(crate) fn unread(page: &'a PageBytes) -> Self {
        Self { page, groups: 0, entries: 0 }
    }

    pub(crate) fn read(&mut self) {
        self.groups = usize::from(u16_at(self.page, 22));
        self.entries = usize::from(u16_at(self.page, 24));
    }

    #[inline]
    pub(crate) fn has(&self, flag: u16) -> bool {
        u16_at(self.page, 20) & flag != 0
    }

    /// The timeline of a group.
    fn timeline(&self, group: usize) -> u32 {
        let of_groups = HEADER + (RANGE + START) * self.groups + SLOT * self.entries;
        u32_at(self.page, if self.has(MIXED) { of_groups + TIMELINE * group } else { 28 })
    }

    /// Timeline and range of a group.
    pub(crate) fn group(&self, group: usize) -> u64 {
        u64::from(self.timeline(group)) << 32 | u64::from(u32_at(self.page, HEADER + RANGE * group))
    }

    /// The index of a group's first entry.
    #[inline]
    pub(crate) fn start(&self, group: usize) -> usize {
        usize::from(u16_at(self.page, HEADER + RANGE * self.groups + START * group))
    }

    /// The index behind a group's last entry.
    #[inline]
    pub(crate) fn end(&self, group: usize) -> usize {
        if group + 1 == self.groups { self.entries } else { self.start(group + 1) }
    }

    /// The group of this timeline and range, or the number of groups before.
    #[inline]
    pub(crate) fn find(&self, group: u64) -> Result<usize, usize> {
        let (timeline, range) = ((group >> 32) as u32, group as u32);
        let place = if self.has(MIXED) {
            self.find_mixed(group)
        } else {
            match timeline.cmp(&self.timeline(0)) {
                Ordering::Less => 0,
                Ordering::Greater => self.groups,
                Ordering::Equal => {
                    let (ranges, _) = self.page[HEADER..HEADER + RANGE * self.groups].as_chunks::<RANGE>();
                    // Counting all reads the cache lines at once; a binary search reads them one after the other.
                    ranges.iter().map(|other| u32::from(u32::from_le_bytes(*other) < range)).sum::<u32>()
                        as usize
                }
            }
        };
        if place < self.groups && self.group(place) == group { Ok(place) } else { Err(place) }
    }

    fn find_mixed(&self, group: u64) -> usize {
        let (mut from, mut len) = (0, self.groups);
        while len > 0 {
            let half = len / 2;
            if self.group(from + half) < group {
                from += half + 1;
                len -= half + 1;
            } else {
                len = half;
            }
        }
        from
    }

    #[inline]
    fn tag(&self, index: usize) -> u16 {
        u16_at(self.page, HEADER + (RANGE + START) * self.groups + SLOT * index)
    }

    /// The number of an entry's slot.
    #[inline]
    pub(crate) fn slot(&self, index: usize) -> u16 {
        self.tag(index) >> 2
    }

    /// An entry's commit.
    #[inline]
    pub(crate) fn commit(&self, index: usize) -> Commit {
        Commit::from_low_bits(u64::from_le_bytes(load(self.page, PAGE_BYTES - RECORD * (index + 1))))
    }

    /// An entry's value.
    #[inline]
    pub(crate) fn value(&self, index: usize) -> Value {
        value_of(self.tag(index), u128::from_le_bytes(load(self.page, PAGE_BYTES - RECORD * (index + 1))))
    }

    /// Appends all entries.
    pub(crate) fn decode(&self, entries: &mut Vec<Entry>) {
        let tags = HEADER + (RANGE + START) * self.groups;
        for group in 0..self.groups {
            let (start, end) = (self.start(group), self.end(group));
            let high = u128::from(self.group(group)) << 64;
            let (tags, _) = self.page[tags + SLOT * start..tags + SLOT * end].as_chunks::<SLOT>();
            let records = &self.page[PAGE_BYTES - RECORD * end..PAGE_BYTES - RECORD * start];
            let records = records.as_chunks::<RECORD>().0.iter().rev();
            entries.extend(tags.iter().zip(records).map(|(tag, record)| {
                let (tag, record) = (u16::from_le_bytes(*tag), u128::from_le_bytes(*record));
                let commit = Commit::from_low_bits(record as u64);
                let low = u64::from(tag >> 2) << 48 | (Commit::MAX.get() - commit.get());
                Entry { key: Key::from_checked(high | u128::from(low)), value: value_of(tag, record) }
            }));
        }
    }

    /// An entry's key.
    pub(crate) fn key(&self, group: usize, index: usize) -> Key {
        let packed = u128::from(self.group(group)) << 64
            | u128::from(self.slot(index)) << 48
            | u128::from(Commit::MAX.get() - self.commit(index).get());
        Key::from_checked(packed)
    }

    /// The first index in `from..end`, entries of one group, whose slot is not smaller.
    #[inline]
    pub(crate) fn find_slot(&self, from: usize, end: usize, slot: u16) -> usize {
        let tags = HEADER + (RANGE + START) * self.groups;
        let (tags, _) = self.page[tags + SLOT * from..tags + SLOT * end].as_chunks::<SLOT>();
        let limit = slot << 2;
        from + usize::from(tags.iter().map(|tag| u16::from(u16::from_le_bytes(*tag) < limit)).sum::<u16>())
    }

    /// The first index in `from..end`, entries of one group from some version of `slot` on, whose version of `slot` is not newer
    /// than
    /// `commit`, or whose slot is another.
    pub(crate) fn search_versions(&self, from: usize, end: usize, slot: u16, commit: Commit) -> usize {
        let (mut from, mut len) = (from, end - from);
        while len > 0 {
            // Most often, the view sees the newest version.
            let half = if self.commit(from) <= commit { 0 } else { len / 2 };
            let middle = from + half;
            if self.slot(middle) == slot && self.commit(middle) > commit {
                from = middle + 1;
                len -= half + 1;
            } else {
                len = half;
            }
        }
        from
    }
}

/// The value in an entry's tag and record.
#[inline]
fn value_of(tag: u16, record: u128) -> Value {
    let place = Place { blob: BlobId((record >> 64) as u32), unit: (record >> 48) as u16 };
    match tag & 3 {
        KIND_BLOCK => Value::Block { place, crc: (record >> 96) as u32 },
        KIND_DENSE => Value::Dense { place },
        _ => Value::Zero,
    }
}

/// A position on a leaf page, in the order of entries.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LeafPosition {
    index: usize,
    /// The group of the entry before, or that of the entry itself.
    group: usize,
}

impl LeafPosition {
    pub(crate) fn advance(&mut self) {
        self.index += 1;
    }
}

impl Leaf<'_> {
    /// The position of the first entry that is not before `key`.
    pub(crate) fn seek(&self, key: Key) -> LeafPosition {
        match self.find(key.group()) {
            Ok(group) => {
                let (end, slot) = (self.end(group), key.slot().get());
                let first = self.find_slot(self.start(group), end, slot);
                LeafPosition { index: self.search_versions(first, end, slot, key.commit()), group }
            }
            Err(group) if group == self.groups => LeafPosition { index: self.entries, group: group - 1 },
            Err(group) => LeafPosition { index: self.start(group), group },
        }
    }

    /// The entry at a position, or `None` behind the last.
    pub(crate) fn entry(&self, position: &mut LeafPosition) -> Option<Entry> {
        let LeafPosition { index, group } = *position;
        if index >= self.entries {
            return None;
        }
        if index >= self.end(group) {
            position.group += 1;
        }
        Some(Entry { key: self.key(position.group, index), value: self.value(index) })
    }
}

/// An inner page that was checked.
#[derive(Clone, Copy)]
pub(crate) struct Inner<'a> {
    page: &'a PageBytes,
    children: usize,
}

impl<'a> Inner<'a> {
    pub(crate) fn of(page: &'a PageBytes) -> Self {
        Self { page, children: usize::from(u16_at(page, 22)) }
    }

    fn separators(&self) -> &'a [[u8; SEPARATOR]] {
        self.page[HEADER..HEADER + SEPARATOR * self.children].as_chunks().0
    }

    /// The child that has `key`, if any child has it.
    #[inline]
    pub(crate) fn search(&self, key: Key) -> u32 {
        let target = key.packed();
        let place = self.separators().partition_point(|separator| u128::from_le_bytes(*separator) <= target);
        u32_at(self.page, 28) + place.saturating_sub(1) as u32
    }

    /// The newest commit below a child; of the first children, if there are fewer.
    pub(crate) fn newest(&self, child: usize) -> Commit {
        let child = child.min(self.children - 1);
        let mut bytes = [0; 8];
        bytes[..COMMIT]
            .copy_from_slice(&load::<COMMIT>(self.page, HEADER + SEPARATOR * self.children + COMMIT * child));
        Commit::from_low_bits(u64::from_le_bytes(bytes))
    }
}

/// Writes an inner page: for each child its separator and the newest commit below it.
pub(crate) fn write_inner(
    page: &mut PageBytes,
    run: u64,
    number: u32,
    first: u32,
    children: &[(u128, Commit)],
) {
    page.fill(0);
    for (index, (separator, newest)) in children.iter().enumerate() {
        store(page, HEADER + SEPARATOR * index, separator.to_le_bytes());
        let [commit @ .., _, _] = newest.get().to_le_bytes();
        store(page, HEADER + SEPARATOR * children.len() + COMMIT * index, commit);
    }
    seal(page, run, number, 0, (children.len() as u16, 0), first);
}

/// A leaf page that is being filled.
#[derive(Debug)]
pub(crate) struct LeafBuilder {
    /// The records are in place, all else is added last.
    page: Box<PageBytes>,
    groups: Vec<(u64, u16)>,
    tags: Vec<u16>,
    is_mixed: bool,
    /// Flags that concern the page's start.
    pub(crate) flags: u16,
    /// The newest commit.
    pub(crate) newest: Commit,
}

impl LeafBuilder {
    pub(crate) fn new() -> Self {
        Self {
            page: Box::new([0; PAGE_BYTES]),
            groups: Vec::new(),
            tags: Vec::new(),
            is_mixed: false,
            flags: 0,
            newest: Commit::ZERO,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    /// Adds an entry behind all others, if it fits.
    #[inline]
    pub(crate) fn push(&mut self, entry: &Entry) -> bool {
        let group = entry.key.group();
        let (mut groups, mut is_mixed) = (self.groups.len(), self.is_mixed);
        let last = self.groups.last().map(|(last, _)| *last);
        if last != Some(group) {
            groups += 1;
            is_mixed |= last.is_some_and(|last| last >> 32 != group >> 32);
        }
        if bytes_of(groups, self.tags.len() + 1, is_mixed) > PAGE_BYTES {
            return false;
        }
        if groups > self.groups.len() {
            self.groups.push((group, self.tags.len() as u16));
            self.is_mixed = is_mixed;
        }
        let commit = entry.key.commit();
        let (kind, place, crc) = match entry.value {
            Value::Zero => (KIND_ZERO, Place { blob: BlobId(0), unit: 0 }, 0),
            Value::Block { place, crc } => (KIND_BLOCK, place, crc),
            Value::Dense { place } => (KIND_DENSE, place, 0),
        };
        let record = u128::from(commit.get())
            | u128::from(place.unit) << 48
            | u128::from(place.blob.0) << 64
            | u128::from(crc) << 96;
        self.tags.push(entry.key.slot().get() << 2 | kind);
        store(&mut self.page, PAGE_BYTES - RECORD * self.tags.len(), record.to_le_bytes());
        self.newest = self.newest.max(commit);
        true
    }

    /// Completes the page, with `flags` for its end, and forgets its entries.
    pub(crate) fn finish(&mut self, run: u64, number: u32, flags: u16) -> &PageBytes {
        let page = &mut *self.page;
        let (groups, entries) = (self.groups.len(), self.tags.len());
        let starts = HEADER + RANGE * groups;
        let tags = starts + START * groups;
        let timelines = tags + SLOT * entries;
        page[..HEADER].fill(0);
        page[timelines..PAGE_BYTES - RECORD * entries].fill(0);
        for (index, (group, start)) in self.groups.iter().enumerate() {
            store(page, HEADER + RANGE * index, (*group as u32).to_le_bytes());
            store(page, starts + START * index, start.to_le_bytes());
            if self.is_mixed {
                store(page, timelines + TIMELINE * index, ((group >> 32) as u32).to_le_bytes());
            }
        }
        let (places, _) = page[tags..timelines].as_chunks_mut::<SLOT>();
        for (place, tag) in places.iter_mut().zip(&self.tags) {
            *place = tag.to_le_bytes();
        }
        let timeline = self.groups.first().map_or(0, |(group, _)| (group >> 32) as u32);
        let flags = self.flags | flags | if self.is_mixed { MIXED } else { 0 };
        seal(page, run, number, flags, (groups as u16, entries as u16), timeline);
        self.groups.clear();
        self.tags.clear();
        (self.is_mixed, self.flags, self.newest) = (false, 0, Commit::ZERO);
        page
    }
}
