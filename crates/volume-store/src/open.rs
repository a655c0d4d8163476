//! Opening a pool: superblock, checkpoint, edits. Any context.
//!
//! [`find`] is a function of the disk's bytes. Bytes that are not in memory yet end it with [`Lack::Unread`]; [`Opening`] reads
//! them and runs it again, until it has a result. So the rules are in one place, in their order, and tests and fuzzers run them
//! on bytes.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use aryk_dma::{Buffer, PAGE};
use aryk_volume::{Recovered, Shard};
use uuid::Uuid;

use crate::disk::{DiskDone, DiskOp, DiskRequest, DiskTag, Purpose};
use crate::error::{Error, Finding};
use crate::store::{Position, Store};

mod find;

pub(crate) use find::{find, occupant};

/// Bytes of a read.
const CHUNK: u64 = 256 << 10;
/// Reads in flight.
const READS_MAX: usize = 8;

/// The base disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Its size, in bytes.
    pub bytes: u64,
    /// Bytes of its blocks.
    pub block: u32,
}

/// What the caller expects of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The pool's identity, if the caller knows it.
    pub pool: Option<Uuid>,
    /// Where the pool was when the caller last had it open.
    pub position: Option<Position>,
    /// Whether a pool whose checkpoint is lost is opened without it, to be rebuilt.
    pub may_lack_checkpoint: bool,
    /// Which shard of the pool the disk has, if the caller knows it.
    pub shard: Option<Shard>,
}

/// An open pool.
#[derive(Debug)]
pub struct Opened {
    /// The store.
    pub store: Store,
    /// The manifest; `None` if the checkpoint or an edit is lost, and the caller has allowed that.
    pub recovered: Option<Recovered>,
    /// The copy of the manifest, if the manifest is lost and the disk has a copy.
    pub copy: Option<Vec<u8>>,
    /// Structures whose copy had to be used. The next checkpoint writes them anew.
    pub findings: Vec<Finding>,
}

/// Why bytes are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    /// They have not been read yet.
    Unread(Range<u64>),
    /// The disk cannot read them.
    Unreadable,
}

/// The bytes of the disk that have been read: whole chunks, without the pages that the disk cannot read.
#[derive(Debug, Default)]
pub(crate) struct Known {
    chunks: BTreeMap<u64, Chunk>,
}

#[derive(Debug)]
struct Chunk {
    buffer: Buffer,
    /// Byte offsets in the chunk of the pages that cannot be read.
    unreadable: Vec<u64>,
}

impl Known {
    /// Bytes of the disk. The caller will want those up to `ahead` next.
    pub(crate) fn get(&self, range: Range<u64>, ahead: u64) -> Result<Vec<u8>, Lack> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut is_readable = true;
        let mut at = range.start;
        while at < range.end {
            let start = at / CHUNK * CHUNK;
            let Some(chunk) = self.chunks.get(&start) else {
                return Err(Lack::Unread(at..range.end.max(ahead)));
            };
            let end = range.end.min(start + chunk.buffer.len() as u64);
            let inside = (at - start)..(end - start);
            is_readable &= !chunk.unreadable.iter().any(|&bad| bad < inside.end && inside.start < bad + PAGE);
            bytes.extend_from_slice(&chunk.buffer.bytes()[inside.start as usize..inside.end as usize]);
            at = end;
        }
        if is_readable { Ok(bytes) } else { Err(Lack::Unreadable) }
    }
}

/// Reads what a function of [`Known`] needs.
#[derive(Debug)]
pub(crate) struct Reading {
    base: Base,
    known: Known,
    /// Offsets and lengths of reads that have not been started.
    reads: VecDeque<(u64, u32)>,
    in_flight: usize,
}

impl Reading {
    pub(crate) fn new(base: Base) -> Self {
        Self { base, known: Known::default(), reads: VecDeque::new(), in_flight: 0 }
    }

    pub(crate) const fn known(&self) -> &Known {
        &self.known
    }

    /// Starts to read what is missing of these bytes of the disk.
    pub(crate) fn want(&mut self, range: Range<u64>) {
        let first = range.start / CHUNK * CHUNK;
        let end = range.end.min(self.base.bytes);
        let missing = (first..end).step_by(CHUNK as usize).filter(|at| !self.known.chunks.contains_key(at));
        self.reads = missing.map(|at| (at, self.chunk_bytes(at) as u32)).collect();
        assert!(!self.reads.is_empty(), "{range:?} is on the disk, and unknown");
    }

    pub(crate) fn next_op(&mut self) -> Option<DiskOp> {
        if self.in_flight >= READS_MAX {
            return None;
        }
        let (offset, len) = self.reads.pop_front()?;
        self.in_flight += 1;
        let buffer = Buffer::new(len as usize, PAGE as usize);
        let request = DiskRequest::Read { offset, buffer, len };
        Some(DiskOp { tag: DiskTag(Purpose::Opening(offset)), request })
    }

    /// A read has ended. Returns whether all have.
    pub(crate) fn completed(&mut self, done: DiskDone) -> bool {
        let DiskDone { tag: DiskTag(Purpose::Opening(offset)), buffer: Some(buffer), result } = done else {
            panic!("not a read of an opening: {done:?}");
        };
        self.in_flight -= 1;
        let start = offset / CHUNK * CHUNK;
        let len = buffer.len() as u64;
        if offset == start && len == self.chunk_bytes(start) {
            let mut unreadable = Vec::new();
            if result.is_err() && len > PAGE {
                // The pages are read one by one: most of them can be.
                let pages = (0..len).step_by(PAGE as usize);
                self.reads.extend(pages.map(|at| (start + at, (len - at).min(PAGE) as u32)));
            } else if result.is_err() {
                unreadable.push(0);
            }
            self.known.chunks.insert(start, Chunk { buffer, unreadable });
        } else {
            let chunk = self.known.chunks.get_mut(&start).expect("a chunk whose pages are read");
            match result {
                Ok(()) => chunk.buffer.write((offset - start) as usize, buffer.bytes()),
                Err(_) => chunk.unreadable.push(offset - start),
            }
        }
        self.in_flight == 0 && self.reads.is_empty()
    }

    /// Bytes of the chunk at this offset: the last one of the disk may be shorter.
    fn chunk_bytes(&self, start: u64) -> u64 {
        (self.base.bytes - start).min(CHUNK)
    }
}

/// The opening of a pool.
///
/// Its last operation is a flush: after the end of a process, the disk returns data that is not durable, and what was found must
/// not be lost any more when the engine relies on it.
#[derive(Debug)]
pub struct Opening {
    expected: Expected,
    reading: Reading,
    found: Option<Box<Opened>>,
    flush: Option<DiskOp>,
}

impl Opening {
    /// Begins to open the pool on a disk.
    pub fn new(base: Base, expected: Expected) -> Self {
        let mut reading = Reading::new(base);
        reading.want(0..CHUNK);
        Self { expected, reading, found: None, flush: None }
    }

    /// The next operation for the base disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        self.flush.take().or_else(|| self.reading.next_op())
    }

    /// An operation has ended. Returns the result of the opening, once there is one.
    pub fn completed(&mut self, done: DiskDone) -> Option<Result<Box<Opened>, Error>> {
        if let Some(found) = self.found.take() {
            return Some(done.result.map(|()| found).map_err(|_| Error::Flush));
        }
        if !self.reading.completed(done) {
            return None;
        }
        match find(&self.reading.known, self.reading.base, &self.expected) {
            Ok(Ok(opened)) => {
                self.found = Some(Box::new(opened));
                self.flush = Some(DiskOp { tag: DiskTag(Purpose::Flush), request: DiskRequest::Flush });
                None
            }
            Ok(Err(error)) => Some(Err(error)),
            Err(range) => {
                self.reading.want(range);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
