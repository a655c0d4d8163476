//! The trace ring: the last submissions and completions in each layer, with their times.
//!
//! Each reactor has one. The reactor writes with plain stores and never waits; any thread may read at any time, and drops the
//! records that were overwritten meanwhile. Tracing is always on: a record costs three stores.
//!
//! **No record is torn.** The writer counts a record after it wrote it, and fences before it writes the next record. A reader
//! that saw a word of the next record, and then fences, also sees the new count, and drops the record.

use crate::Nanos;
use crate::sync::{AtomicU64, Ordering, fence};
use std::sync::Arc;

/// The layer of the stack in which an event happened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Layer {
    /// A front-end's queue.
    Frontend = 0,
    /// The block layer.
    Bdev = 1,
    /// A bdev module.
    Module = 2,
}

impl Layer {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frontend => "front-end",
            Self::Bdev => "bdev",
            Self::Module => "module",
        }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Point {
    /// A request was handed down.
    Submit = 0,
    /// Its completion was handed up.
    Complete = 1,
}

impl Point {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Submit => "submit",
            Self::Complete => "complete",
        }
    }
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The time of the turn's step in which it happened.
    pub at: Nanos,
    /// The layer.
    pub layer: Layer,
    /// The kind of the event.
    pub point: Point,
    /// The channel or queue: the number under which its name is registered.
    pub object: u16,
    /// The request: the low 32 bits of its tag.
    pub tag: u32,
}

/// Records kept for each reactor.
#[cfg(not(loom))]
const RECORDS: usize = 4096;
#[cfg(loom)]
const RECORDS: usize = 2;

/// Layer and point in the low 8 bits of a record's first word, 56 bits of the time (two years) above; object and tag in the
/// second.
#[derive(Debug)]
struct Ring {
    /// Records written since the start.
    written: AtomicU64,
    words: [[AtomicU64; 2]; RECORDS],
}

/// The only writer of a trace ring; it belongs to the reactor.
#[derive(Debug)]
pub(crate) struct Trace(Arc<Ring>);

/// A reader of a trace ring, for any thread.
#[derive(Clone, Debug)]
pub struct TraceReader(Arc<Ring>);

/// Bits of a record's first word below the time.
const WHAT_BITS: u32 = 8;

impl Trace {
    pub fn new() -> Self {
        let words = std::array::from_fn(|_| [AtomicU64::new(0), AtomicU64::new(0)]);
        Self(Arc::new(Ring { written: AtomicU64::new(0), words }))
    }

    pub fn reader(&self) -> TraceReader {
        TraceReader(Arc::clone(&self.0))
    }

    #[inline]
    pub fn record(&mut self, r: Record) {
        let ring = &*self.0;
        // Only this thread writes the counter.
        let written = ring.written.load(Ordering::Relaxed);
        let [first, second] = &ring.words[written as usize % RECORDS];
        let what = (r.layer as u64) << 1 | r.point as u64;
        fence(Ordering::Release);
        first.store(r.at.0 << WHAT_BITS | what, Ordering::Relaxed);
        second.store(u64::from(r.tag) | u64::from(r.object) << 32, Ordering::Relaxed);
        ring.written.store(written + 1, Ordering::Release);
    }
}

impl TraceReader {
    /// The latest records, oldest first, without any that was being overwritten: at most one less than there is room for.
    pub fn read(&self) -> Vec<Record> {
        let end = self.0.written.load(Ordering::Acquire);
        let start = end.saturating_sub(RECORDS as u64);
        (start..end).filter_map(|position| self.record(position)).collect()
    }

    /// The latest record of all.
    pub fn last(&self) -> Option<Record> {
        let end = self.0.written.load(Ordering::Acquire);
        self.record(end.checked_sub(1)?)
    }

    fn record(&self, position: u64) -> Option<Record> {
        let [first, second] = &self.0.words[position as usize % RECORDS];
        let (a, b) = (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if self.0.written.load(Ordering::Relaxed) >= position + RECORDS as u64 {
            return None;
        }
        let what = a & ((1 << WHAT_BITS) - 1);
        let layer = match what >> 1 {
            0 => Layer::Frontend,
            1 => Layer::Bdev,
            _ => Layer::Module,
        };
        let point = if what & 1 == 0 { Point::Submit } else { Point::Complete };
        Some(Record { at: Nanos(a >> WHAT_BITS), layer, point, object: (b >> 32) as u16, tag: b as u32 })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_records_are_kept() {
        let mut trace = Trace::new();
        let record = |i: u64| Record {
            at: Nanos(i * 10),
            layer: [Layer::Frontend, Layer::Bdev, Layer::Module][i as usize % 3],
            point: [Point::Submit, Point::Complete][i as usize % 2],
            object: i as u16,
            tag: i as u32 ^ 0x8000_0000,
        };
        assert_eq!(trace.reader().read(), []);
        (0..3).for_each(|i| trace.record(record(i)));
        assert_eq!(trace.reader().read(), [record(0), record(1), record(2)]);
        let n = 3 * RECORDS as u64 + 7;
        (3..n).for_each(|i| trace.record(record(i)));
        let expected: Vec<_> = (n + 1 - RECORDS as u64..n).map(record).collect();
        assert_eq!(trace.reader().read(), expected);
        assert_eq!(trace.reader().last(), expected.last().copied());
    }
}
