//! The store's file, as redb sees it. The writer's thread.
//!
//! A sync that redb asks for does nothing: what was written survives the process, and the writer syncs on its own.

use redb::{Builder, Database, DatabaseError, StorageBackend};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of pages that are kept in memory.
const CACHE: usize = 16 << 20;

/// Opens the database in `file`, and makes one in an empty file.
pub(crate) fn database(file: &File) -> Result<Database, DatabaseError> {
    let file = file.try_clone().map_err(|error| DatabaseError::Storage(error.into()))?;
    Builder::new().set_cache_size(CACHE).create_with_backend(Unsynced(file))
}

#[derive(Debug)]
struct Unsynced(File);

impl StorageBackend for Unsynced {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}
