//! Clears both superblocks: the pool does not exist afterwards. Any context.

use std::collections::VecDeque;

use aryk_dma::{Buffer, PAGE};

use crate::Error;
use crate::disk::{DiskDone, DiskOp, DiskRequest, DiskTag, Purpose};
use crate::superblock::{PLACES, SUPERBLOCK_BYTES};

/// The end of a pool.
#[derive(Debug)]
pub struct Erasing {
    ops: VecDeque<DiskOp>,
    in_flight: usize,
    has_failed: bool,
}

impl Default for Erasing {
    fn default() -> Self {
        let ops = PLACES.into_iter().enumerate().map(|(copy, offset)| {
            let buffer = Buffer::new(SUPERBLOCK_BYTES, PAGE as usize);
            let request = DiskRequest::Write { offset, buffer, len: SUPERBLOCK_BYTES as u32 };
            DiskOp { tag: DiskTag(Purpose::Journal(copy)), request }
        });
        Self { ops: ops.collect(), in_flight: 0, has_failed: false }
    }
}

impl Erasing {
    /// Begins to clear the superblocks of a disk that no store uses.
    pub fn new() -> Self {
        Self::default()
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
