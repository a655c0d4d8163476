//! Pages of runs in memory: a bounded number, replaced by CLOCK.
//!
//! Context: any; one cache for each reactor. Each run has a table from its pages to frames, four bytes for a page, so that
//! finding a page is an access by index. An empty table is all zeroes, so that the kernel provides its memory when it is used:
//! the tables of a pool of 15 TiB that was written at random take 100 MiB. Finding a page only sets a flag. A page is checked
//! when it enters.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::page::{self, PAGE_BYTES, PageBytes, PageError};
use crate::run::{Run, RunId};

/// Frames that are allocated together.
const CHUNK: usize = 64;
/// The least frames: what one lookup of a whole range needs at the same time is far below.
const FRAMES_MIN: usize = 1024;
/// How far the hand goes for one page before it takes one that was used.
const SWEEP_MAX: usize = 64;

/// Pages in memory, of all indexes of one reactor.
#[derive(Debug)]
pub struct PageCache {
    chunks: Vec<Box<[PageBytes]>>,
    frames: Vec<Frame>,
    frames_max: usize,
    /// Frames without a page.
    free: Vec<u32>,
    hand: usize,
    tables: Vec<Table>,
    free_tables: Vec<u32>,
    by_run: BTreeMap<RunId, u32>,
    hits: Cell<u64>,
    misses: Cell<u64>,
}

#[derive(Debug)]
struct Frame {
    table: u32,
    page: u32,
    is_used: Cell<bool>,
}

#[derive(Debug)]
struct Table {
    run: Run,
    /// The frame of each page that is in memory, counted from 1; empty if the table is free.
    frames: Vec<Option<NonZeroU32>>,
}

impl Table {
    fn frame(&self, page: u32) -> Option<u32> {
        self.frames[page as usize].map(|frame| frame.get() - 1)
    }
}

/// Counters of a cache.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct CacheStatistics {
    /// Pages that were found.
    pub hits: u64,
    /// Pages that were missing.
    pub misses: u64,
    /// Pages in memory.
    pub pages: u64,
    /// The most pages in memory.
    pub pages_max: u64,
}

impl PageCache {
    /// A cache of at most this many bytes, and at least 4 MiB, so that the pages of one lookup fit. Memory is taken as pages
    /// arrive.
    pub fn new(bytes: usize) -> Self {
        Self {
            chunks: Vec::new(),
            frames: Vec::new(),
            frames_max: (bytes / PAGE_BYTES).clamp(FRAMES_MIN, u32::MAX as usize),
            free: Vec::new(),
            hand: 0,
            tables: Vec::new(),
            free_tables: Vec::new(),
            by_run: BTreeMap::new(),
            hits: Cell::new(0),
            misses: Cell::new(0),
        }
    }

    /// Checks a page that was read and keeps it. A page of a run that is gone in the meantime is ignored.
    ///
    /// # Errors
    /// The page is not that page of this run.
    pub fn insert(&mut self, run: RunId, page: u32, bytes: &PageBytes) -> Result<(), PageError> {
        let Some(&table) = self.by_run.get(&run) else { return Ok(()) };
        page::check(bytes, &self.tables[table as usize].run, page)?;
        let known = self.tables[table as usize].frame(page);
        let frame = known.unwrap_or_else(|| self.free_frame(table, page));
        let place = frame as usize;
        self.chunks[place / CHUNK][place % CHUNK] = *bytes;
        Ok(())
    }

    /// The counters.
    pub fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            hits: self.hits.get(),
            misses: self.misses.get(),
            pages: (self.frames.len() - self.free.len()) as u64,
            pages_max: self.frames_max as u64,
        }
    }

    /// A frame for a page that is not in the cache; the page's table has it.
    fn free_frame(&mut self, table: u32, page: u32) -> u32 {
        let frame = Frame { table, page, is_used: Cell::new(false) };
        let place = if let Some(free) = self.free.pop() {
            self.frames[free as usize] = frame;
            free
        } else if self.frames.len() < self.frames_max {
            if self.frames.len().is_multiple_of(CHUNK) {
                self.chunks.push(vec![[0; PAGE_BYTES]; CHUNK].into_boxed_slice());
            }
            self.frames.push(frame);
            self.frames.len() as u32 - 1
        } else {
            let victim = self.sweep();
            let old = std::mem::replace(&mut self.frames[victim], frame);
            self.tables[old.table as usize].frames[old.page as usize] = None;
            victim as u32
        };
        self.tables[table as usize].frames[page as usize] = NonZeroU32::new(place + 1);
        place
    }

    /// The frame that the hand takes. A page that was used since the hand's last visit stays, within limits.
    fn sweep(&mut self) -> usize {
        for _ in 0..SWEEP_MAX {
            let place = self.hand;
            self.hand = (place + 1) % self.frames.len();
            if !self.frames[place].is_used.replace(false) {
                return place;
            }
        }
        let place = self.hand;
        self.hand = (place + 1) % self.frames.len();
        place
    }

    /// The table of a run that lookups will use.
    pub(crate) fn open(&mut self, run: &Run) -> u32 {
        let table = Table { run: *run, frames: vec![None; run.shape.pages as usize] };
        let place = if let Some(free) = self.free_tables.pop() {
            self.tables[free as usize] = table;
            free
        } else {
            self.tables.push(table);
            self.tables.len() as u32 - 1
        };
        assert!(self.by_run.insert(run.id, place).is_none(), "a run is open once");
        place
    }

    /// Forgets a run and its pages.
    pub(crate) fn close(&mut self, table: u32) {
        let frames = std::mem::take(&mut self.tables[table as usize].frames);
        self.free.extend(frames.into_iter().flatten().map(|frame| frame.get() - 1));
        self.by_run.remove(&self.tables[table as usize].run.id);
        self.free_tables.push(table);
    }

    /// A page, if it is in memory.
    pub(crate) fn page(&self, table: u32, page: u32) -> Option<&PageBytes> {
        let Some(frame) = self.tables[table as usize].frame(page) else {
            self.misses.set(self.misses.get() + 1);
            return None;
        };
        self.hits.set(self.hits.get() + 1);
        let place = frame as usize;
        let used = &self.frames[place].is_used;
        if !used.get() {
            used.set(true);
        }
        Some(&self.chunks[place / CHUNK][place % CHUNK])
    }
}
