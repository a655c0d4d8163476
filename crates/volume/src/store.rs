//! The interface between the engine and its store. Any context.
//!
//! The engine hands out operations ([`crate::Pool::next_op`]), and the store answers each exactly once
//! ([`crate::Pool::completed`]), in any order unless the operation says otherwise. The store may start operations in any order
//! too: where the engine needs an order, it waits for the answer.
//!
//! A blob is used in one life after another. Within a life, the engine writes each unit at most once, from the blob's start to
//! its end; it reads only what was written in this life, except during recovery, which finds the end of a log by reading beyond
//! it. What a read returns there is the store's choice (old bytes, zeroes), but no error.
//!
//! These are the operations of a store of blobs and of a log, as values: `Write` is the put of a new blob, or the append to the
//! log; `Read` gets ranges, or reads the log from a place on; `Discard` deletes; the manifest lists blobs, and a `Commit` that
//! moves the start of the log trims it. `docs/decisions/0024-one-log-for-all-writes-of-a-shard.md` says how a store other than
//! one disk would implement them, and what it would lack.

use crate::{BlobId, ForeignId, UNIT};
use aryk_dma::Buffer;

/// Identifies an operation until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpId(pub u64);

/// An operation on the store. Buffers come back with the answer.
#[derive(Debug)]
pub enum StoreOp {
    /// Writes a blob's bytes from `unit` on. No unit of a blob's life is written twice. Several writes of a blob may be in
    /// flight, and may reach the disk in any order.
    Write {
        /// The blob.
        blob: BlobId,
        /// The first unit; a multiple of the store's alignment.
        unit: u32,
        /// The data in the buffer's first bytes.
        data: Buffer,
        /// The number of bytes to write; a multiple of the store's alignment.
        len: u32,
    },
    /// Reads a blob's bytes from `unit` on.
    Read {
        /// The blob.
        blob: BlobId,
        /// The first unit; a multiple of the store's alignment.
        unit: u32,
        /// The buffer whose first bytes get the data.
        data: Buffer,
        /// The number of bytes to read; a multiple of the store's alignment.
        len: u32,
    },
    /// Reads a foreign disk, for a write of less than a block, and while a volume is inflated.
    ReadForeign {
        /// The disk.
        disk: ForeignId,
        /// The first unit of the disk.
        unit: u64,
        /// The buffer whose first bytes get the data.
        data: Buffer,
        /// The number of bytes to read.
        len: u32,
    },
    /// Appends an edit to the journal of the manifest. Edits take effect in the order in which they are handed out. The answer
    /// says that this edit and all before it are durable, and so is every write that was answered before this operation was
    /// handed out (the store flushes its base before or together with the edit, such that an edit never survives a crash that
    /// such a write does not survive).
    Commit {
        /// The edit.
        edit: Vec<u8>,
    },
    /// Replaces the checkpoint and all edits that were handed out before, atomically. Ordered with commits as they are with each
    /// other: edits handed out later apply to this checkpoint. Durable when answered.
    Checkpoint {
        /// The whole manifest.
        bytes: Vec<u8>,
    },
    /// Replaces the copy of the manifest that a rebuild uses where the checkpoint is lost. Ordered with commits and checkpoints;
    /// all that was answered before is durable before the copy is. A store without room for it answers `NoSpace`, and forgets the
    /// copies that it has.
    Copy {
        /// The copy.
        bytes: Vec<u8>,
    },
    /// Makes every write durable that was answered before this operation was handed out.
    Flush,
    /// The blob's bytes are no longer needed. A later life of the blob begins after the answer.
    Discard {
        /// The blob.
        blob: BlobId,
    },
}

/// Why an operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk failed at this place.
    #[error("the disk failed")]
    Medium,
    /// The disk has no space, although the blob is part of it (a thin disk below).
    #[error("the disk below has no space")]
    NoSpace,
    /// The disk has gone; every later operation fails too.
    #[error("the disk has gone")]
    Gone,
}

/// The answer to an operation.
#[derive(Debug)]
pub struct Done {
    /// The operation.
    pub id: OpId,
    /// The operation's buffer, if it had one.
    pub data: Option<Buffer>,
    /// The operation's result.
    pub result: Result<(), StoreError>,
}

/// What the engine must know of its store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreFacts {
    /// Bytes of the grain of reads and writes: 512 or 4,096.
    pub alignment: u32,
    /// Units of each blob; up to 65,536, and at least 10,240, so that a dense range fits.
    pub blob_units: u32,
    /// The number of blobs, whose identifiers are 0 up to this. May grow ([`crate::Pool::grow`]).
    pub blobs: u32,
}

impl StoreFacts {
    /// Bytes of a blob.
    pub const fn blob_bytes(&self) -> u64 {
        self.blob_units as u64 * UNIT as u64
    }
}
