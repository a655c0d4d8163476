//! The store's file as a redb backend. Runs on the writer's thread.
//!
//! The sync that redb requests does nothing: data written to the file survives the process, and the writer syncs by its own
//! schedule.

use redb::{Builder, Database, DatabaseError, StorageBackend};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of pages that redb caches in memory.
const CACHE: usize = 16 << 20;

/// Opens the database in `file`, and creates one if the file is empty.
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
