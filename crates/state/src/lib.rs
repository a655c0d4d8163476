//! A store of small records in a directory: what must be there again after the process has died. Any context but a reactor's.
//!
//! | file of the directory | what |
//! | --- | --- |
//! | `state.redb` | the store |
//! | `state.redb.bak` | its copy, as of the last time that it was quiet: what is left if a power failure damages it |
//! | `state.lock` | held by whoever has the store open |
//!
//! **One thread writes.** It takes all changes that wait and commits them together, so callers that come at the same time share a commit.
//!
//! **What a commit survives.** When its callers are told, the change is with the kernel: the process may be killed at any moment. To the disk it goes when
//! nothing was changed for [`QUIET`], and every [`COMMITS_UNSYNCED`] commits at the latest; a power failure loses what came later. As nothing orders the
//! writes until then, such a failure may also leave a store that is damaged: that is noticed, and the copy is as old as the last quiet moment.
//!
//! **What is damaged is left alone.** A store is read and checked in memory before it is opened: redb's checksums of its pages, and ours of each record.
#![forbid(unsafe_code)]

mod check;
mod error;
mod file;
mod open;
#[cfg(test)]
mod tests;
mod writer;

pub use error::{OpenError, WriteError};
pub use open::Store;
pub use writer::{COMMITS_UNSYNCED, QUIET, Written};

use redb::TableDefinition;

/// What the store holds under one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its place among the others.
    pub key: u64,
    /// Its content.
    pub content: Vec<u8>,
}

/// The version of what this crate writes.
const VERSION: u64 = 1;
/// Where it stands in [`META`].
const VERSION_KEY: &str = "version";

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// Contents, each behind the [`checksum`] of it and its key.
const RECORDS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("records");

/// CRC-32 of a record.
fn checksum(key: u64, content: &[u8]) -> [u8; 4] {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&key.to_le_bytes());
    crc.update(content);
    crc.finalize().to_le_bytes()
}
