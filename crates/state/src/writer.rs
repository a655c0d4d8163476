//! The thread that writes. It blocks, and only it writes to the store.
//!
//! A change that could not be written is kept and written with the next change, so the store catches up with its owner. Unwritten
//! changes are kept by key, and a record that is created and deleted while the store cannot be written is not kept at all:
//! repeating that takes no memory.

use crate::{OpenError, RECORDS, WriteError, checksum, file};
use futures_channel::oneshot;
use redb::{Database, ReadableDatabase, WriteTransaction};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// The store is synced to the disk after this time without a change.
pub const QUIET: Duration = Duration::from_millis(20);
/// The store is synced to the disk after this many commits.
pub const COMMITS_UNSYNCED: u32 = 512;

/// Resolves when the change is written, or has failed.
pub type Written = oneshot::Receiver<Result<(), WriteError>>;

/// New content of a record, or its deletion.
#[derive(Debug)]
pub(crate) struct Change {
    pub key: u64,
    pub content: Option<Vec<u8>>,
    /// The change is complete only when it is on the disk.
    pub durable: bool,
    pub done: oneshot::Sender<Result<(), WriteError>>,
}

/// The unwritten change of a record.
struct Unwritten {
    content: Option<Vec<u8>>,
    /// Whether the store is known to have no record of that key.
    is_new: bool,
}

pub(crate) struct Writer {
    file: File,
    /// Absent after a failure; the next commit opens it again.
    database: Option<Database>,
    path: Arc<PathBuf>,
    copy: PathBuf,
    /// Unwritten changes by key.
    unwritten: BTreeMap<u64, Unwritten>,
    /// The greatest key of which the store may have a record.
    last: u64,
    unsynced: u32,
    /// Whether the last sync failed: only the first failure is logged.
    sync_failed: bool,
}

impl Writer {
    /// `last` is the greatest key in the store.
    pub fn new(file: File, database: Database, last: u64, (path, copy): (PathBuf, PathBuf)) -> Self {
        Self {
            file,
            database: Some(database),
            path: Arc::new(path),
            copy,
            unwritten: BTreeMap::new(),
            last,
            // A predecessor's last commits may not be on the disk.
            unsynced: 1,
            sync_failed: false,
        }
    }

    /// Writes changes until all senders are gone.
    pub fn run(mut self, changes: &Receiver<Change>) {
        loop {
            let first = match self.unsynced {
                0 => changes.recv().map_err(|_| RecvTimeoutError::Disconnected),
                COMMITS_UNSYNCED.. => Err(RecvTimeoutError::Timeout),
                _ => changes.recv_timeout(QUIET),
            };
            match first {
                Ok(first) => self.write(first, changes),
                Err(RecvTimeoutError::Timeout) => self.sync(),
                Err(RecvTimeoutError::Disconnected) => {
                    // Closing the database leaves an orderly file.
                    self.database = None;
                    return self.sync();
                }
            }
        }
    }

    /// Writes `first` and all changes that wait behind it.
    fn write(&mut self, first: Change, changes: &Receiver<Change>) {
        let (mut done, mut durable) = (Vec::new(), false);
        for change in std::iter::once(first).chain(changes.try_iter()) {
            self.defer(change.key, change.content);
            durable |= change.durable;
            done.push(change.done);
        }
        let result = self.commit().and_then(|()| if durable { self.sync_data() } else { Ok(()) });
        match &result {
            Ok(()) => {
                self.unwritten.clear();
                self.unsynced += 1;
            }
            // After an error redb refuses all operations; the next commit opens the database again.
            Err(error) => {
                self.database = None;
                tracing::error!(%error, "the state store cannot be written");
            }
        }
        for done in done {
            // A caller that has gone needs no result.
            let _ = done.send(result.clone());
        }
    }

    fn defer(&mut self, key: u64, content: Option<Vec<u8>>) {
        let is_new = self.unwritten.get(&key).map_or(key > self.last, |unwritten| unwritten.is_new);
        if is_new && content.is_none() {
            self.unwritten.remove(&key);
        } else {
            self.unwritten.insert(key, Unwritten { content, is_new });
        }
    }

    fn sync_data(&self) -> Result<(), WriteError> {
        let failed = |error: std::io::Error| WriteError {
            path: Arc::clone(&self.path),
            why: error.to_string().into(),
            errno: error.raw_os_error(),
        };
        self.file.sync_data().map_err(failed)
    }

    fn commit(&mut self) -> Result<(), WriteError> {
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let path = Arc::clone(&self.path);
        let failed = |error: redb::Error| WriteError {
            path: Arc::clone(&path),
            why: error.to_string().into(),
            errno: match &error {
                redb::Error::Io(error) => error.raw_os_error(),
                _ => None,
            },
        };
        let database = match self.database.take() {
            Some(database) => database,
            None => {
                let database = file::database(&self.file).map_err(|e| failed(e.into()))?;
                self.refresh_unwritten(&database).map_err(failed)?;
                database
            }
        };
        let result = database.begin_write().map_err(redb::Error::from).and_then(|tx| self.fill(tx));
        self.database = Some(database);
        result.map_err(failed)
    }

    /// After a failure, which may have left any part of the unwritten changes in the store: reads which of their keys the store
    /// has.
    fn refresh_unwritten(&mut self, database: &Database) -> Result<(), redb::Error> {
        let transaction = database.begin_read()?;
        let records = transaction.open_table(RECORDS)?;
        for (&key, unwritten) in &mut self.unwritten {
            unwritten.is_new = records.get(key)?.is_none();
        }
        self.unwritten.retain(|_, unwritten| unwritten.content.is_some() || !unwritten.is_new);
        Ok(())
    }

    fn fill(&mut self, transaction: WriteTransaction) -> Result<(), redb::Error> {
        {
            let mut records = transaction.open_table(RECORDS)?;
            for (&key, unwritten) in &self.unwritten {
                match &unwritten.content {
                    Some(content) => {
                        let sum = checksum(key, content);
                        let value = [sum.as_slice(), content.as_slice()].concat();
                        records.insert(key, value.as_slice())?;
                    }
                    None => {
                        records.remove(key)?;
                    }
                }
            }
        }
        // Whether the commit succeeds or not, the store may have the records after it.
        self.unwritten.values_mut().for_each(|unwritten| unwritten.is_new = false);
        self.last = self.unwritten.last_key_value().map_or(0, |(&key, _)| key).max(self.last);
        Ok(transaction.commit()?)
    }

    /// Syncs the store to the disk, and copies it.
    fn sync(&mut self) {
        self.unsynced = 0;
        let result = sync_file(&self.file, &self.path).and_then(|()| copy(&self.path, &self.copy));
        if let Err(error) = &result
            && !self.sync_failed
        {
            tracing::warn!(%error, "the state store is not synced to the disk: a power failure may lose changes");
        }
        self.sync_failed = result.is_err();
    }
}

fn sync_file(file: &File, path: &Path) -> Result<(), OpenError> {
    file.sync_data().map_err(|source| OpenError::Os { action: "sync", path: path.to_owned(), source })
}

/// Replaces `to` with a copy of `from` atomically.
fn copy(from: &Path, to: &Path) -> Result<(), OpenError> {
    let new = to.with_extension("bak.new");
    let copied = std::fs::copy(from, &new).and_then(|_| File::open(&new)?.sync_data());
    copied.and_then(|()| std::fs::rename(&new, to)).map_err(|source| OpenError::Os {
        action: "write",
        path: to.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::path_in;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use std::io::Write;
    use std::sync::mpsc::channel;

    /// A writer of a store that has the record 1, in a file that cannot grow and, with `read_only`, cannot be written.
    fn full(read_only: bool) -> Writer {
        let dir = tempfile::TempDir::new().unwrap();
        let (store, _) = crate::Store::open(dir.path()).unwrap();
        drop(store.write(1, Some(vec![b'a'; 100])));
        drop(store);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("store", flags).unwrap());
        file.write_all(&std::fs::read(path_in(dir.path())).unwrap()).unwrap();
        let database = super::file::database(&file).unwrap();
        let seals = if read_only { SealFlags::GROW | SealFlags::WRITE } else { SealFlags::GROW };
        fcntl_add_seals(&file, seals).unwrap();
        Writer::new(file, database, 1, Default::default())
    }

    fn change(writer: &mut Writer, key: u64, content: Option<Vec<u8>>) -> Result<(), WriteError> {
        let (done, mut written) = oneshot::channel();
        writer.write(Change { key, content, durable: false, done }, &channel().1);
        written.try_recv().unwrap().expect("the write is complete")
    }

    #[test]
    fn a_failed_creation_that_is_deleted_takes_no_memory() {
        for read_only in [false, true] {
            let mut writer = full(read_only);
            // More data than the file has room for; the caller deletes each record when its write has failed.
            let big = vec![b'b'; 8 << 20];
            for key in 2..60 {
                change(&mut writer, key, Some(big.clone())).unwrap_err();
                let _ = change(&mut writer, key, None);
                assert!(writer.unwritten.len() <= 1, "{read_only}: {:?}", writer.unwritten.keys());
            }
            // The deletion of a record that the store has is kept, once.
            for _ in 0..3 {
                assert_eq!(change(&mut writer, 1, None).is_ok(), !read_only);
            }
            assert_eq!(
                writer.unwritten.keys().copied().collect::<Vec<_>>(),
                if read_only { vec![1] } else { vec![] }
            );
        }
    }
}
