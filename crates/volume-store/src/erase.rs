//! Clears both superblocks: the pool does not exist afterwards. Clears the start and the end of the disk, too, where another
//! pool is only created if they are blank. Any context.

use std::collections::VecDeque;

use aryk_dma::{Buffer, PAGE};

use crate::disk::{DiskDone, DiskOp, DiskRequest, DiskTag, Purpose};
use crate::foreign::{END_BYTES, START_BYTES};
use crate::superblock::{PLACES, SUPERBLOCK_BYTES};
use crate::{Base, Error};

/// The end of a pool.
#[derive(Debug)]
pub struct Erasing {
    ops: VecDeque<DiskOp>,
    in_flight: usize,
    has_failed: bool,
}

impl Erasing {
    /// Begins to clear a disk on which a pool fits, and that no store uses.
    pub fn new(base: Base) -> Self {
        let end = (base.bytes - END_BYTES as u64, END_BYTES);
        let parts = [(PLACES[0], START_BYTES), (PLACES[1], SUPERBLOCK_BYTES), end];
        let ops = parts.into_iter().enumerate().map(|(part, (offset, len))| {
            let buffer = Buffer::new(len, PAGE as usize);
            let request = DiskRequest::Write { offset, buffer, len: len as u32 };
            DiskOp { tag: DiskTag(Purpose::Journal(part)), request }
        });
        Self { ops: ops.collect(), in_flight: 0, has_failed: false }
    }

    /// The next operation for the base disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        let op = self.ops.pop_front()?;
        self.in_flight += 1;
        Some(op)
    }

    /// An operation has ended. Returns the result, once there is one.
    pub fn completed(&mut self, done: DiskDone) -> Option<Result<(), Error>> {
        self.in_flight -= 1;
        self.has_failed |= done.result.is_err();
        if self.in_flight > 0 || !self.ops.is_empty() {
            return None;
        }
        if self.has_failed {
            return Some(Err(Error::Medium(PLACES[0])));
        }
        let is_flushed = done.tag == DiskTag(Purpose::Flush);
        if !is_flushed {
            self.ops.push_back(DiskOp { tag: DiskTag(Purpose::Flush), request: DiskRequest::Flush });
        }
        is_flushed.then_some(Ok(()))
    }
}
