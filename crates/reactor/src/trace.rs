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

/// What a record is about: a queue, a channel, or both at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traced {
    /// A layer, or [`BOTH`], as in the ring: above the point's bit.
    layer: u64,
    /// As in the ring: the object in the bits from 32 on, a front-end's beside a disk's from 48 on.
    objects: u64,
}

/// In place of a layer: a front-end hands a request to its disk, or gets it back. That is one event of two layers.
const BOTH: u64 = 3;

impl Traced {
    /// An object of a layer, by the number that it registered its name under.
    pub const fn new(layer: Layer, object: u16) -> Self {
        Self { layer: (layer as u64) << 1, objects: (object as u64) << 32 }
    }

    /// A queue of a front-end and its channel of a disk, which name requests by the same tags.
    pub const fn both(front_end: u16, bdev: u16) -> Self {
        Self { layer: BOTH << 1, objects: (bdev as u64) << 32 | (front_end as u64) << 48 }
    }
}

/// One event in one layer.
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

/// Layer and point in the low 8 bits of a record's first word, 56 bits of the time (two years) above; objects and tag in the
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

    #[inline(always)]
    pub fn record(&mut self, at: Nanos, what: Traced, point: Point, tag: u32) {
        let ring = &*self.0;
        // Only this thread writes the counter.
        let written = ring.written.load(Ordering::Relaxed);
        let [first, second] = &ring.words[written as usize % RECORDS];
        fence(Ordering::Release);
        first.store(at.0 << WHAT_BITS | what.layer | point as u64, Ordering::Relaxed);
        second.store(u64::from(tag) | what.objects, Ordering::Relaxed);
        ring.written.store(written + 1, Ordering::Release);
    }
}

impl TraceReader {
    /// The latest records, oldest first, without any that was being overwritten: those of one event less than there is room for.
    pub fn read(&self) -> Vec<Record> {
        let end = self.0.written.load(Ordering::Acquire);
        let start = end.saturating_sub(RECORDS as u64);
        (start..end).filter_map(|position| self.records(position)).flatten().flatten().collect()
    }

    /// The latest record of all.
    pub fn last(&self) -> Option<Record> {
        let end = self.0.written.load(Ordering::Acquire);
        self.records(end.checked_sub(1)?)?.into_iter().flatten().last()
    }

    /// The records of an event, which are two if it is one of a front-end and its disk.
    fn records(&self, position: u64) -> Option<[Option<Record>; 2]> {
        let [first, second] = &self.0.words[position as usize % RECORDS];
        let (a, b) = (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if self.0.written.load(Ordering::Relaxed) >= position + RECORDS as u64 {
            return None;
        }
        let what = a & ((1 << WHAT_BITS) - 1);
        let point = if what & 1 == 0 { Point::Submit } else { Point::Complete };
        let record = |layer, object: u64| {
            Some(Record { at: Nanos(a >> WHAT_BITS), layer, point, object: object as u16, tag: b as u32 })
        };
        Some(match (what >> 1, point) {
            (0, _) => [record(Layer::Frontend, b >> 32), None],
            (1, _) => [record(Layer::Bdev, b >> 32), None],
            // Down the layers, or up.
            (BOTH, Point::Submit) => [record(Layer::Frontend, b >> 48), record(Layer::Bdev, b >> 32)],
            (BOTH, Point::Complete) => [record(Layer::Bdev, b >> 32), record(Layer::Frontend, b >> 48)],
            _ => [record(Layer::Module, b >> 32), None],
        })
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
        let write = |trace: &mut Trace, r: Record| {
            trace.record(r.at, Traced::new(r.layer, r.object), r.point, r.tag);
        };
        assert_eq!(trace.reader().read(), []);
        (0..3).for_each(|i| write(&mut trace, record(i)));
        assert_eq!(trace.reader().read(), [record(0), record(1), record(2)]);
        let n = 3 * RECORDS as u64 + 7;
        (3..n).for_each(|i| write(&mut trace, record(i)));
        let expected: Vec<_> = (n + 1 - RECORDS as u64..n).map(record).collect();
        assert_eq!(trace.reader().read(), expected);
        assert_eq!(trace.reader().last(), expected.last().copied());
    }

    #[test]
    fn a_front_end_and_its_disk_share_a_record() {
        let mut trace = Trace::new();
        let both = Traced::both(0xfffe, 0xfffd);
        trace.record(Nanos(5), both, Point::Submit, u32::MAX);
        trace.record(Nanos(7), both, Point::Complete, 1);
        let record = |at, point, tag, layer, object| Record { at: Nanos(at), layer, point, object, tag };
        let expected = [
            record(5, Point::Submit, u32::MAX, Layer::Frontend, 0xfffe),
            record(5, Point::Submit, u32::MAX, Layer::Bdev, 0xfffd),
            record(7, Point::Complete, 1, Layer::Bdev, 0xfffd),
            record(7, Point::Complete, 1, Layer::Frontend, 0xfffe),
        ];
        assert_eq!(trace.reader().read(), expected);
        assert_eq!(trace.reader().last(), Some(expected[3]));
    }
}
