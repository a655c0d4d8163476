//! Reads of data that the engine has located ([`crate::Action::Locate`]): on any thread, beside the pool. Any context.
//!
//! Blocks are read into buffers of the reader, and reach the memory of their request after their checksums were verified. The
//! extents of a request go back to the pool when nothing reads them any more.

use crate::buffers::Buffers;
use crate::read::{deliver, fill_zeroes};
use crate::{BLOCK, Extents, Status, StoreError, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_slots::{Key, Slots};
use std::collections::VecDeque;

/// A request of a reader, until it has ended, and while nothing else has its key.
pub type ReadKey = Key;

/// Identifies a read until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReadId(u64);

/// A read of the store's disk.
#[derive(Debug)]
pub struct Read {
    /// Identifies it.
    pub id: ReadId,
    /// The first byte of the disk.
    pub offset: u64,
    /// The buffer whose first bytes get the data.
    pub data: Buffer,
    /// The number of bytes.
    pub len: u32,
}

/// What has come to an end.
#[derive(PartialEq, Eq, Debug)]
pub enum ReadEnd {
    /// A request: nothing accesses its memory any more.
    Request {
        /// The request's tag.
        tag: Tag,
        /// Its result.
        status: Status,
    },
    /// The use of what was located, for [`crate::Pool::give_back`].
    Extents {
        /// What was located.
        extents: Extents,
        /// Blocks that did not match their checksums.
        damaged_blocks: u64,
    },
}

/// A request whose data is being read.
#[derive(Debug)]
struct Request {
    /// `None` if the caller has aborted it.
    tag: Option<Tag>,
    /// The unit of the volume of the first byte of `memory`.
    unit: u64,
    memory: Sgl,
    extents: Extents,
    /// Reads in flight.
    left: u32,
    status: Status,
    damaged_blocks: u64,
}

/// A read in flight.
#[derive(Debug)]
struct Piece {
    request: Key,
    /// The number of its extent, and of its first checksum.
    extent: usize,
    checksum: usize,
}

/// The reads of a thread.
#[derive(Debug)]
pub struct Reader {
    requests: Slots<Request>,
    pieces: Slots<Piece>,
    buffers: Buffers,
    reads: VecDeque<Read>,
    ends: VecDeque<ReadEnd>,
    /// Bytes of requests that were aborted and have reads in flight.
    abandoned_bytes: u64,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            requests: Slots::new(64),
            pieces: Slots::new(64),
            buffers: Buffers::default(),
            reads: VecDeque::new(),
            ends: VecDeque::new(),
            abandoned_bytes: 0,
        }
    }
}

impl Reader {
    /// Begins to read the data of a request into memory, which is that of the units from `unit` on. Returns a key for
    /// [`Reader::abort`].
    pub fn start(&mut self, tag: Tag, unit: u64, memory: Sgl, extents: Extents) -> ReadKey {
        let (status, damaged_blocks) = (Status::Ok, 0);
        let request = Request { tag: Some(tag), unit, memory, extents, left: 0, status, damaged_blocks };
        let key = self.requests.add(request);
        let request = self.requests.get_mut(key).expect("just added");
        let mut checksum = 0;
        for (number, extent) in request.extents.list.iter().enumerate() {
            let Some(place) = extent.place else {
                fill_zeroes(unit, &memory, extent.block, extent.blocks.into());
                continue;
            };
            let len = extent.blocks * BLOCK;
            let id = ReadId(self.pieces.add(Piece { request: key, extent: number, checksum }).raw());
            let data = self.buffers.take(len);
            self.reads.push_back(Read { id, offset: place.offset, data, len });
            request.left += 1;
            checksum += extent.blocks as usize;
        }
        if request.left == 0 {
            self.end(key);
        }
        key
    }

    /// The next read.
    pub fn next_read(&mut self) -> Option<Read> {
        self.reads.pop_front()
    }

    /// Takes the result of a read.
    ///
    /// # Panics
    /// If the read was answered before.
    pub fn completed(&mut self, id: ReadId, data: Buffer, result: Result<(), StoreError>) {
        let Piece { request: key, extent, checksum } =
            self.pieces.remove(Key::from_raw(id.0)).expect("each read is answered once");
        let request = self.requests.get_mut(key).expect("a request waits for its reads");
        let extent = request.extents.list[extent];
        // The memory of an aborted request is the caller's.
        if request.tag.is_some() {
            let checksums = &request.extents.checksums[checksum..][..extent.blocks as usize];
            if result.is_err() {
                request.status = Status::Medium;
            } else if !deliver(request.unit, &request.memory, extent.block, checksums, data.bytes()) {
                request.status = Status::Medium;
                request.damaged_blocks += 1;
            }
        }
        self.buffers.give(data);
        request.left -= 1;
        if request.left == 0 {
            self.end(key);
        }
    }

    /// Ends a request with [`Status::Aborted`], unless it has ended. From now on, nothing accesses its memory.
    pub fn abort(&mut self, key: ReadKey) {
        if let Some(tag) = self.abandon(key) {
            self.ends.push_back(ReadEnd::Request { tag, status: Status::Aborted });
        }
    }

    /// As [`Reader::abort`], but the request's end is not reported.
    pub fn abandon(&mut self, key: ReadKey) -> Option<Tag> {
        let request = self.requests.get_mut(key)?;
        let tag = request.tag.take()?;
        self.abandoned_bytes += u64::from(request.memory.len());
        Some(tag)
    }

    /// Bytes of memory that the reader has for aborted requests that have not ended. The caller begins no more while these are
    /// many.
    pub const fn abandoned_bytes(&self) -> u64 {
        self.abandoned_bytes
    }

    /// The next end.
    pub fn next_end(&mut self) -> Option<ReadEnd> {
        self.ends.pop_front()
    }

    /// Whether no read is in flight.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    fn end(&mut self, key: Key) {
        let Request { tag, memory, status, extents, damaged_blocks, .. } =
            self.requests.remove(key).expect("a request ends once");
        match tag {
            Some(tag) => self.ends.push_back(ReadEnd::Request { tag, status }),
            None => self.abandoned_bytes -= u64::from(memory.len()),
        }
        self.ends.push_back(ReadEnd::Extents { extents, damaged_blocks });
    }
}
