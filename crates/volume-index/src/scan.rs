//! Scans: all versions in the order of their keys, without regard to visibility.
//!
//! Context: any. A scan has no state between two calls but the key at which it goes on, so entries may be inserted and levels
//! merged between calls. A scan for versions since a commit skips leaf pages, and inner pages, without such versions.

use crate::cache::PageCache;
use crate::index::{Index, Level, LevelRun};
use crate::key::{Commit, Entry, Key};
use crate::lookup::{NeedPages, Position, find_leaf, page_of};
use crate::page::{CHILDREN_MAX, Inner, Leaf, LeafPosition, PageBytes};

/// Which versions a scan returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanOptions {
    /// Where to start.
    pub from: Key,
    /// Where to stop: the first key that is not wanted.
    pub end: Option<Key>,
    /// Only versions that are newer than this commit.
    pub since: Option<Commit>,
    /// How many entries to visit, at least 1.
    pub limit: usize,
}

/// A page is missing, and noted.
struct IsMissing;

/// A position in a level, in the order of keys.
struct Cursor<'a> {
    level: &'a Level,
    cache: &'a PageCache,
    since: Option<Commit>,
    /// `None` at the end.
    page: Option<Position>,
    bytes: Option<&'a PageBytes>,
    within: LeafPosition,
}

impl<'a> Cursor<'a> {
    /// At the first entry that is not before the start.
    fn seek(
        level: &'a Level,
        cache: &'a PageCache,
        options: &ScanOptions,
        needed: &mut NeedPages,
    ) -> Result<Self, IsMissing> {
        let run = level.find_any(options.from);
        let leaf = find_leaf(&level.runs[run], cache, options.from, needed).ok_or(IsMissing)?;
        let bytes = page_of(&level.runs[run], cache, leaf, needed).ok_or(IsMissing)?;
        Ok(Self {
            level,
            cache,
            since: options.since,
            page: Some(Position { run, leaf }),
            bytes: Some(bytes),
            within: Leaf::of(bytes).seek(options.from),
        })
    }

    /// The next entry, or `None` at the end.
    fn peek(&mut self, needed: &mut NeedPages) -> Result<Option<Entry>, IsMissing> {
        while let Some(position) = self.page {
            let run = &self.level.runs[position.run];
            let bytes = match self.bytes {
                Some(bytes) => bytes,
                None => page_of(run, self.cache, position.leaf, needed).ok_or(IsMissing)?,
            };
            self.bytes = Some(bytes);
            if let Some(entry) = Leaf::of(bytes).entry(&mut self.within) {
                return Ok(Some(entry));
            }
            self.page = self.next_page(position, needed)?;
            self.bytes = None;
            self.within = LeafPosition::default();
        }
        Ok(None)
    }

    /// The next leaf page that has wanted entries.
    fn next_page(&self, page: Position, needed: &mut NeedPages) -> Result<Option<Position>, IsMissing> {
        let mut next = self.level.next_leaf(page);
        while let (Some(Position { run, leaf }), Some(since)) = (next, self.since) {
            let run_at = &self.level.runs[run];
            match next_leaf_since(run_at, self.cache, leaf, since, needed)? {
                Some(leaf) => return Ok(Some(Position { run, leaf })),
                None => next = self.level.next_leaf(Position { run, leaf: run_at.run.shape.leaves - 1 }),
            }
        }
        Ok(next)
    }
}

/// The first leaf page from `leaf` on that has entries newer than `since`, by the inner pages. A run has up to three levels of
/// pages, and inner pages are full but for the last of each level.
fn next_leaf_since(
    run: &LevelRun,
    cache: &PageCache,
    mut leaf: u32,
    since: Commit,
    needed: &mut NeedPages,
) -> Result<Option<u32>, IsMissing> {
    const CHILDREN: u32 = CHILDREN_MAX as u32;
    let shape = &run.run.shape;
    if shape.newest <= since {
        return Ok(None);
    }
    if shape.leaves == 1 {
        return Ok((leaf == 0).then_some(0));
    }
    let parents = shape.leaves.div_ceil(CHILDREN);
    while leaf < shape.leaves {
        let parent = leaf / CHILDREN;
        if parents > 1 {
            let above = shape.leaves + parents + parent / CHILDREN;
            let above = Inner::of(page_of(run, cache, above, needed).ok_or(IsMissing)?);
            if above.newest((parent % CHILDREN) as usize) <= since {
                leaf = (parent + 1) * CHILDREN;
                continue;
            }
        }
        let page = Inner::of(page_of(run, cache, shape.leaves + parent, needed).ok_or(IsMissing)?);
        let end = shape.leaves.min((parent + 1) * CHILDREN);
        if let Some(found) = (leaf..end).find(|leaf| page.newest((leaf % CHILDREN) as usize) > since) {
            return Ok(Some(found));
        }
        leaf = end;
    }
    Ok(None)
}

impl Index {
    /// Appends versions in the order of their keys to `found`, each key once. Returns the key at which to go on, which is
    /// behind all that were visited, or `None` at the end. A call visits up to `limit` entries, or fewer where a page is
    /// missing.
    ///
    /// A level ends before the first page that is not behind the page before: only forged pages are not in order.
    ///
    /// # Errors
    /// Pages are missing at the start; `found` then is unchanged.
    pub fn scan(
        &self,
        cache: &PageCache,
        options: &ScanOptions,
        found: &mut Vec<Entry>,
    ) -> Result<Option<Key>, NeedPages> {
        let mut needed = NeedPages::default();
        let tables = std::iter::once(self.memtable()).chain(self.frozen().iter().map(AsRef::as_ref));
        let mut tables: Vec<_> = tables.map(|table| table.iter_from(options.from)).collect();
        let mut heads: Vec<_> = tables.iter_mut().map(Iterator::next).collect();
        let mut cursors = Vec::with_capacity(self.levels.len());
        for level in &self.levels {
            let Ok(mut cursor) = Cursor::seek(level, cache, options, &mut needed) else { continue };
            let Ok(head) = cursor.peek(&mut needed) else { continue };
            heads.push(head.filter(|head| head.key >= options.from));
            cursors.push(cursor);
        }
        if !needed.pages().is_empty() {
            return Err(needed);
        }
        for _ in 0..options.limit.max(1) {
            // Of equal keys, the newest source's comes first.
            let Some(entry) = heads.iter().copied().flatten().min_by_key(|entry| entry.key) else {
                return Ok(None);
            };
            if options.end.is_some_and(|end| entry.key >= end) {
                return Ok(None);
            }
            if options.since.is_none_or(|since| entry.key.commit() > since) {
                found.push(entry);
            }
            let Some(next) = entry.key.next() else { return Ok(None) };
            for (place, head) in heads.iter_mut().enumerate() {
                if head.is_none_or(|head| head.key != entry.key) {
                    continue;
                }
                match place.checked_sub(tables.len()) {
                    None => *head = tables[place].next(),
                    Some(level) => {
                        cursors[level].within.advance();
                        let Ok(entry) = cursors[level].peek(&mut needed) else { return Ok(Some(next)) };
                        *head = entry.filter(|head| head.key >= next);
                    }
                }
            }
        }
        let rest = heads.iter().flatten().map(|entry| entry.key).min();
        Ok(rest.filter(|rest| options.end.is_none_or(|end| *rest < end)))
    }
}
