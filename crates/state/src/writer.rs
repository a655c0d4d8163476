//! The thread that writes. It blocks, and nobody but it touches the store.
//!
//! What could not be written waits, and is written with the next change: the store follows what its owner says, if late. It waits by key, and what was
//! made and ended while nothing could be written does not wait at all: however often that is tried, it takes no memory.

use crate::{OpenError, RECORDS, WriteError, checksum, file};
use futures_channel::oneshot;
use redb::{Database, ReadableDatabase, WriteTransaction};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// After so long without a change, everything goes to the disk.
pub const QUIET: Duration = Duration::from_millis(20);
/// After so many commits, everything goes to the disk.
pub const COMMITS_UNSYNCED: u32 = 512;

/// Resolves when the change is written, or is known not to be.
pub type Written = oneshot::Receiver<Result<(), WriteError>>;

/// A record's new content, or its end.
#[derive(Debug)]
pub(crate) struct Change {
    pub key: u64,
    pub content: Option<Vec<u8>>,
    /// It is over only when it is on the disk.
    pub durable: bool,
    pub done: oneshot::Sender<Result<(), WriteError>>,
}

/// What is not written of a record.
struct Owed {
    content: Option<Vec<u8>>,
    /// The store is known to have no record of that key.
    is_new: bool,
}

pub(crate) struct Writer {
    file: File,
    /// Absent after a failure, until it is opened again.
    database: Option<Database>,
    path: Arc<PathBuf>,
    copy: PathBuf,
    /// What is not written.
    owed: BTreeMap<u64, Owed>,
    /// The greatest key of which the store may have a record.
    last: u64,
    unsynced: u32,
    /// Whether the last sync failed, which is told once.
    sync_failed: bool,
}

impl Writer {
    /// `last` is the greatest key of which the store has a record.
    pub fn new(file: File, database: Database, last: u64, (path, copy): (PathBuf, PathBuf)) -> Self {
        Self {
            file,
            database: Some(database),
            path: Arc::new(path),
            copy,
            owed: BTreeMap::new(),
            last,
            // What a predecessor wrote may not be on the disk.
            unsynced: 1,
            sync_failed: false,
        }
    }

    /// Writes what comes, until nobody is left who could send anything.
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
                    // An orderly end leaves an orderly file.
                    self.database = None;
                    return self.sync();
                }
            }
        }
    }

    /// Writes `first` and all that waits behind it.
    fn write(&mut self, first: Change, changes: &Receiver<Change>) {
        let (mut done, mut durable) = (Vec::new(), false);
        for change in std::iter::once(first).chain(changes.try_iter()) {
            self.owe(change.key, change.content);
            durable |= change.durable;
            done.push(change.done);
        }
        let result = self.commit().and_then(|()| if durable { self.carry_to_disk() } else { Ok(()) });
        match &result {
            Ok(()) => {
                self.owed.clear();
                self.unsynced += 1;
            }
            // redb trusts nothing any more after an error; it is opened again for the next commit.
            Err(error) => {
                self.database = None;
                tracing::error!(%error, "the state store cannot be written");
            }
        }
        for done in done {
            // One who waits no more knows it from somewhere else.
            let _ = done.send(result.clone());
        }
    }

    fn owe(&mut self, key: u64, content: Option<Vec<u8>>) {
        let is_new = self.owed.get(&key).map_or(key > self.last, |owed| owed.is_new);
        if is_new && content.is_none() {
            self.owed.remove(&key);
        } else {
            self.owed.insert(key, Owed { content, is_new });
        }
    }

    fn carry_to_disk(&self) -> Result<(), WriteError> {
        let failed = |error: std::io::Error| WriteError {
            path: Arc::clone(&self.path),
            why: error.to_string().into(),
            errno: error.raw_os_error(),
        };
        self.file.sync_data().map_err(failed)
    }

    fn commit(&mut self) -> Result<(), WriteError> {
        if self.owed.is_empty() {
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
                self.look(&database).map_err(failed)?;
                database
            }
        };
        let result = database.begin_write().map_err(redb::Error::from).and_then(|tx| self.fill(tx));
        self.database = Some(database);
        result.map_err(failed)
    }

    /// After a failure, which may have left anything of what was to be written: sees what the store has.
    fn look(&mut self, database: &Database) -> Result<(), redb::Error> {
        let transaction = database.begin_read()?;
        let records = transaction.open_table(RECORDS)?;
        for (&key, owed) in &mut self.owed {
            owed.is_new = records.get(key)?.is_none();
        }
        self.owed.retain(|_, owed| owed.content.is_some() || !owed.is_new);
        Ok(())
    }

    fn fill(&mut self, transaction: WriteTransaction) -> Result<(), redb::Error> {
        {
            let mut records = transaction.open_table(RECORDS)?;
            for (&key, owed) in &self.owed {
                match &owed.content {
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
        // Whether it succeeds or not, the store may have them after this.
        self.owed.values_mut().for_each(|owed| owed.is_new = false);
        self.last = self.owed.last_key_value().map_or(0, |(&key, _)| key).max(self.last);
        Ok(transaction.commit()?)
    }

    /// Carries to the disk what was written, and copies it.
    fn sync(&mut self) {
        self.unsynced = 0;
        let result = sync_file(&self.file, &self.path).and_then(|()| copy(&self.path, &self.copy));
        if let Err(error) = &result
            && !self.sync_failed
        {
            tracing::warn!(%error, "the state store is not on the disk: a power failure may lose it");
        }
        self.sync_failed = result.is_err();
    }
}

fn sync_file(file: &File, path: &Path) -> Result<(), OpenError> {
    file.sync_data().map_err(|source| OpenError::Os { action: "sync", path: path.to_owned(), source })
}

/// Puts a copy of `from` in place of `to`, whole at any moment.
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

    /// A writer of a store that has the record 1, in a file that can be neither extended nor, if that is asked for, written.
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
        written.try_recv().unwrap().expect("it is over")
    }

    #[test]
    fn what_cannot_be_made_and_is_undone_is_not_owed() {
        for read_only in [false, true] {
            let mut writer = full(read_only);
            // More than the file has room for, as each of them is undone by who is told that it failed.
            let big = vec![b'b'; 8 << 20];
            for key in 2..60 {
                change(&mut writer, key, Some(big.clone())).unwrap_err();
                let _ = change(&mut writer, key, None);
                assert!(writer.owed.len() <= 1, "{read_only}: {:?}", writer.owed.keys());
            }
            // The end of what the store has is owed, once.
            for _ in 0..3 {
                assert_eq!(change(&mut writer, 1, None).is_ok(), !read_only);
            }
            assert_eq!(
                writer.owed.keys().copied().collect::<Vec<_>>(),
                if read_only { vec![1] } else { vec![] }
            );
        }
    }
}
