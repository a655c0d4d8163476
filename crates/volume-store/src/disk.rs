//! Operations on the base disk, and their results. Any context.
//!
//! The caller runs operations in any order and reports each with [`DiskDone`]. A write counts as durable when a flush that was
//! started after the write's completion has completed.

use aryk_dma::Buffer;
use aryk_volume::{OpId, StoreError};

/// What an operation is for. The caller returns it with the result; it identifies nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskTag(pub(crate) Purpose);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The engine's write.
    Write(OpId),
    /// The engine's read or discard.
    Other(OpId),
    /// A write of the journal, to this mirror or copy.
    Journal(usize),
    Flush,
    /// A read at this byte offset, for opening.
    Opening(u64),
}

/// What to do.
#[derive(Debug)]
pub enum DiskRequest {
    /// Read into the start of a buffer.
    Read {
        /// Byte offset on the disk.
        offset: u64,
        /// Gets the data.
        buffer: Buffer,
        /// Number of bytes, at most the buffer's.
        len: u32,
    },
    /// Write the start of a buffer.
    Write {
        /// Byte offset on the disk.
        offset: u64,
        /// Has the data.
        buffer: Buffer,
        /// Number of bytes, at most the buffer's.
        len: u32,
    },
    /// Make all completed writes durable.
    Flush,
    /// Forget these bytes: a later read may return anything. A disk that cannot do this reports success.
    Discard {
        /// Byte offset.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
}

/// An operation for the base disk.
#[derive(Debug)]
pub struct DiskOp {
    /// Returned in [`DiskDone`].
    pub tag: DiskTag,
    /// The operation.
    pub request: DiskRequest,
}

impl DiskOp {
    /// Ends the operation without the disk.
    pub fn refuse(self, error: StoreError) -> DiskDone {
        let buffer = match self.request {
            DiskRequest::Read { buffer, .. } | DiskRequest::Write { buffer, .. } => Some(buffer),
            DiskRequest::Flush | DiskRequest::Discard { .. } => None,
        };
        DiskDone { tag: self.tag, buffer, result: Err(error) }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct DiskDone {
    /// Of the operation.
    pub tag: DiskTag,
    /// The buffer of a read or write. After a failed read, its content is undefined.
    pub buffer: Option<Buffer>,
    /// How it ended.
    pub result: Result<(), StoreError>,
}
