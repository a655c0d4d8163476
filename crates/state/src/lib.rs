//! A store of small records in a directory: the configuration that must survive the death of the process. Any context except a
//! reactor's.
//!
//! | file of the directory | content |
//! | --- | --- |
//! | `state.redb` | the store |
//! | `state.redb.bak` | its copy, made at the last quiet moment: the fallback if a power failure damages the store |
//! | `state.lock` | held by the process that has the store open |
//!
//! **One thread writes.** It takes all waiting changes and commits them together, so concurrent callers share a commit.
//!
//! **What a commit survives.** When a caller's change is reported as written, the kernel has it: the process may be killed at any
//! moment. The change is synced to the disk when no change has come for [`QUIET`], and every [`COMMITS_UNSYNCED`] commits at the
//! latest; a power failure loses changes after the last sync. Until the sync nothing orders the writes, so a power failure may
//! also leave a damaged store: opening it detects the damage, and the copy is as old as the last quiet moment.
//!
//! **A damaged store is not modified.** A store is read and checked in memory before it is opened: redb's checksums of its pages,
//! and our checksum of each record.
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

/// A record of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The record's key, which is also its place in the order.
    pub key: u64,
    /// The record's content.
    pub content: Vec<u8>,
}

/// The version of the format that this crate writes.
const VERSION: u64 = 1;
/// The key of the version in [`META`].
const VERSION_KEY: &str = "version";

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// Contents, each preceded by the [`checksum`] of its key and content.
const RECORDS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("records");

/// CRC-32 of a record's key and content.
fn checksum(key: u64, content: &[u8]) -> [u8; 4] {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&key.to_le_bytes());
    crc.update(content);
    crc.finalize().to_le_bytes()
}
