//! The trace ring: the last submissions and completions in each layer, with their times.
//!
//! One per reactor. The reactor writes with plain stores and never waits; anyone may read at any time, and drops what was
//! overwritten meanwhile. It stays on: a record is two stores.

use crate::Nanos;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where in the stack something happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Layer {
    /// A front-end's queue.
    Frontend = 0,
    /// The block layer.
    Bdev = 1,
    /// A bdev module.
    Module = 2,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Point {
    /// A request was handed down.
    Submit = 0,
    /// Its completion was handed up.
    Complete = 1,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The time of the turn's step in which it happened.
    pub at: Nanos,
    /// Where.
    pub layer: Layer,
    /// What.
    pub point: Point,
    /// Which channel or queue: the number that it registered its name under.
    pub object: u16,
    /// Which request: the low 32 bits of its tag.
    pub tag: u32,
}

/// Records kept for each reactor.
const RECORDS: usize = 4096;

/// time in the low 56 bits of the first word (two years), layer and point above; object and tag in the second; and the
/// position that it was written at, in the high 16 bits of the second, to tell a torn record.
#[derive(Debug)]
struct Ring {
    written: AtomicU64,
    words: Box<[[AtomicU64; 2]]>,
}

/// The writing end. The reactor's.
#[derive(Debug)]
pub(crate) struct Trace {
    ring: Arc<Ring>,
    written: u64,
}

/// A reading end. Anyone's.
#[derive(Clone, Debug)]
pub struct TraceReader(Arc<Ring>);

const TIME_MASK: u64 = (1 << 56) - 1;

impl Trace {
    pub fn new() -> Self {
        let words = (0..RECORDS).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect();
        Self { ring: Arc::new(Ring { written: AtomicU64::new(0), words }), written: 0 }
    }

    pub fn reader(&self) -> TraceReader {
        TraceReader(Arc::clone(&self.ring))
    }

    #[inline]
    pub fn record(&mut self, r: Record) {
        let [first, second] = &self.ring.words[self.written as usize % RECORDS];
        let what = (r.layer as u64) << 1 | r.point as u64;
        first.store(r.at.0 & TIME_MASK | what << 56, Ordering::Relaxed);
        let lap = self.written / RECORDS as u64;
        second.store(u64::from(r.tag) | u64::from(r.object) << 32 | lap << 48, Ordering::Relaxed);
        self.written += 1;
        self.ring.written.store(self.written, Ordering::Release);
    }
}

impl TraceReader {
    /// The latest records, oldest first. One that was being overwritten is left out.
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
        let (a, b) = (first.load(Ordering::Acquire), second.load(Ordering::Acquire));
        let lap = (position / RECORDS as u64) & 0xffff;
        if b >> 48 != lap || first.load(Ordering::Relaxed) != a {
            return None;
        }
        let layer = match a >> 57 {
            0 => Layer::Frontend,
            1 => Layer::Bdev,
            _ => Layer::Module,
        };
        let point = if a >> 56 & 1 == 0 { Point::Submit } else { Point::Complete };
        Some(Record { at: Nanos(a & TIME_MASK), layer, point, object: (b >> 32) as u16, tag: b as u32 })
    }
}

#[cfg(test)]
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
        let expected: Vec<_> = (n - RECORDS as u64..n).map(record).collect();
        assert_eq!(trace.reader().read(), expected);
        assert_eq!(trace.reader().last(), expected.last().copied());
    }
}
