//! The store of an open pool: the engine's operations become operations on the base disk. Any context.
//!
//! Reads and writes of blobs go to their segments as they are. Edits, checkpoints and flushes go through the journal and the
//! shared flushes. Every operation is answered once.

use std::collections::VecDeque;

use aryk_volume::{BlobId, Done, OpId, StoreError, StoreFacts, StoreOp, UNIT};
use uuid::Uuid;

use crate::Error;
use crate::disk::{DiskDone, DiskOp, DiskRequest, DiskTag, Purpose};
use crate::flush::{Flushes, Waiter};
use crate::journal::{Ended, Journal, Start, Want, Write};
use crate::superblock::{Superblock, is_name};

/// How much of a pool's state the disk had at a moment. A disk with a smaller one is an older copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The number of the checkpoint.
    pub generation: u64,
    /// The number of records of edits after it.
    pub sequence: u64,
}

/// The store of one pool.
#[derive(Debug)]
pub struct Store {
    journal: Journal,
    flushes: Flushes,
    ops: VecDeque<DiskOp>,
    answers: VecDeque<Done>,
    growth: Growth,
}

/// A change of the superblock: a growth of the pool, or another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// None has been started.
    None,
    /// The superblock is being written.
    Running,
    /// The pool has this number of blobs now.
    Grown(u32),
    /// The superblock could not be written.
    Failed(StoreError),
}

impl Store {
    pub(crate) fn new(start: Start) -> Self {
        Self {
            journal: Journal::new(start),
            flushes: Flushes::default(),
            ops: VecDeque::new(),
            answers: VecDeque::new(),
            growth: Growth::None,
        }
    }

    /// What the engine must know.
    pub fn facts(&self) -> StoreFacts {
        let superblock = self.journal.superblock();
        StoreFacts {
            alignment: superblock.alignment,
            blob_units: superblock.segment_bytes / UNIT,
            blobs: superblock.segments(),
        }
    }

    /// The pool's identity.
    pub fn pool(&self) -> Uuid {
        self.journal.superblock().pool
    }

    /// The superblock.
    pub const fn superblock(&self) -> &Superblock {
        self.journal.superblock()
    }

    /// What the disk has of the pool's state at least.
    pub fn position(&self) -> Position {
        let (generation, sequence) = self.journal.position();
        Position { generation, sequence }
    }

    /// Whether the engine should hand out a checkpoint: the edits since the last one take long to read, or most of their room.
    pub fn is_checkpoint_due(&self) -> bool {
        self.journal.is_checkpoint_due()
    }

    /// Writes to one of two mirrors that have failed: the pool has less redundancy, until the next checkpoint.
    pub const fn degraded_writes(&self) -> u64 {
        self.journal.degraded
    }

    /// Whether nothing is in flight or waits, of the store's own operations.
    pub fn is_idle(&self) -> bool {
        self.journal.is_idle() && self.growth != Growth::Running
    }

    /// Starts an operation of the engine.
    ///
    /// # Panics
    /// If the operation reads a foreign disk, or reaches beyond its blob.
    pub fn submit(&mut self, id: OpId, op: StoreOp) {
        match op {
            StoreOp::Write { blob, unit, data, len } => {
                let offset = self.offset(blob, unit, len);
                self.push(Purpose::Write(id), DiskRequest::Write { offset, buffer: data, len });
            }
            StoreOp::Read { blob, unit, data, len } => {
                let offset = self.offset(blob, unit, len);
                self.push(Purpose::Other(id), DiskRequest::Read { offset, buffer: data, len });
            }
            StoreOp::Discard { blob } => {
                let bytes = self.journal.superblock().segment_bytes;
                let offset = self.offset(blob, 0, bytes);
                self.push(Purpose::Other(id), DiskRequest::Discard { offset, bytes: bytes.into() });
            }
            StoreOp::Flush => self.wait_for_flush(Waiter::Engine(id)),
            StoreOp::Commit { edit } => self.journal.commit(id, edit),
            StoreOp::Checkpoint { bytes } => self.journal.checkpoint(id, bytes),
            StoreOp::Copy { bytes } => self.journal.copy(id, bytes),
            StoreOp::ReadForeign { disk, .. } => panic!("the foreign disk {disk:?} is not in the pool"),
        }
    }

    /// Adds what the base disk has gained; `bytes` is its size now. [`Store::growth`] reports the end.
    pub fn grow(&mut self, bytes: u64) {
        self.growth = Growth::Running;
        self.journal.grow(bytes);
    }

    /// Gives the pool another name. [`Store::growth`] reports the end.
    ///
    /// # Errors
    /// If the name is too long, or has control characters.
    pub fn rename(&mut self, name: &str) -> Result<(), Error> {
        if !is_name(name) {
            return Err(Error::Name);
        }
        self.growth = Growth::Running;
        self.journal.rename(name);
        Ok(())
    }

    /// How the last [`Store::grow`] or [`Store::rename`] ended.
    pub const fn growth(&self) -> Growth {
        self.growth
    }

    /// The next operation for the base disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        if self.ops.is_empty() {
            self.advance();
        }
        self.ops.pop_front()
    }

    /// The next answer for the engine. To be called when [`Store::next_op`] has nothing.
    pub fn next_answer(&mut self) -> Option<Done> {
        self.answers.pop_front()
    }

    /// An operation on the base disk has ended.
    pub fn completed(&mut self, done: DiskDone) {
        let DiskDone { tag: DiskTag(purpose), buffer, result } = done;
        match purpose {
            Purpose::Write(id) => {
                self.flushes.note_write();
                self.answers.push_back(Done { id, data: buffer, result });
            }
            Purpose::Other(id) => self.answers.push_back(Done { id, data: buffer, result }),
            Purpose::Journal(copy) => {
                self.flushes.note_write();
                self.journal.written(copy, result);
            }
            Purpose::Flush => {
                for waiter in self.flushes.finish(result) {
                    self.flushed(waiter, result);
                }
            }
            Purpose::Opening(_) => panic!("a read of the opening, which is over"),
        }
    }

    /// Hands out what the journal and the flushes have to do.
    fn advance(&mut self) {
        let (mut writes, mut ended) = (Vec::new(), Vec::new());
        while self.journal.advance(self.flushes.is_needed(), &mut writes, &mut ended) == Want::Flush {
            self.wait_for_flush(Waiter::Journal);
        }
        for Write { copy, offset, buffer } in writes {
            let len = buffer.len() as u32;
            self.push(Purpose::Journal(copy), DiskRequest::Write { offset, buffer, len });
        }
        for end in ended {
            match end {
                Ended::Op(id, result) => self.answers.push_back(Done { id, data: None, result }),
                Ended::Superblock(Ok(())) => {
                    self.growth = Growth::Grown(self.journal.superblock().segments());
                }
                Ended::Superblock(Err(error)) => self.growth = Growth::Failed(error),
            }
        }
        if self.flushes.try_start() {
            self.push(Purpose::Flush, DiskRequest::Flush);
        }
    }

    /// Answers at once where nothing is to be flushed, or where no flush can help.
    fn wait_for_flush(&mut self, waiter: Waiter) {
        match self.flushes.failure() {
            Some(error) => self.flushed(waiter, Err(error)),
            None if self.flushes.is_needed() => self.flushes.wait(waiter),
            None => self.flushed(waiter, Ok(())),
        }
    }

    fn flushed(&mut self, waiter: Waiter, result: Result<(), StoreError>) {
        match waiter {
            Waiter::Engine(id) => self.answers.push_back(Done { id, data: None, result }),
            Waiter::Journal => self.journal.flushed(result),
        }
    }

    fn push(&mut self, purpose: Purpose, request: DiskRequest) {
        self.ops.push_back(DiskOp { tag: DiskTag(purpose), request });
    }

    /// The byte offset on the disk of `len` bytes from a blob's unit on.
    ///
    /// # Panics
    /// If they reach beyond the blob.
    pub fn offset(&self, blob: BlobId, unit: u32, len: u32) -> u64 {
        let superblock = self.journal.superblock();
        let start = u64::from(unit) * u64::from(UNIT);
        let end = start + u64::from(len);
        let place = superblock.segment(blob.0);
        let is_inside = end <= u64::from(superblock.segment_bytes);
        let place =
            place.filter(|_| is_inside).unwrap_or_else(|| panic!("{len} bytes from unit {unit} of {blob:?}"));
        place.offset + start
    }
}

#[cfg(test)]
mod tests;
