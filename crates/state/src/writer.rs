//! The thread that writes. It blocks, and nobody but it touches the store.
//!
//! What could not be written waits, and is written with the next change: the store follows what its owner says, if late.

use crate::{OpenError, RECORDS, WriteError, checksum, file};
use futures_channel::oneshot;
use redb::{Database, WriteTransaction};
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
    pub done: oneshot::Sender<Result<(), WriteError>>,
}

pub(crate) struct Writer {
    file: File,
    /// Absent after a failure, until it is opened again.
    database: Option<Database>,
    path: Arc<PathBuf>,
    copy: PathBuf,
    /// What could not be written.
    owed: BTreeMap<u64, Option<Vec<u8>>>,
    unsynced: u32,
    /// Whether the last sync failed, which is told once.
    sync_failed: bool,
}

impl Writer {
    pub fn new(file: File, database: Database, path: PathBuf, copy: PathBuf) -> Self {
        Self {
            file,
            database: Some(database),
            path: Arc::new(path),
            copy,
            owed: BTreeMap::new(),
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
        let mut done = Vec::new();
        for change in std::iter::once(first).chain(changes.try_iter()) {
            self.owed.insert(change.key, change.content);
            done.push(change.done);
        }
        let result = self.commit();
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

    fn commit(&mut self) -> Result<(), WriteError> {
        let failed = |error: redb::Error| WriteError {
            path: Arc::clone(&self.path),
            why: error.to_string().into(),
            errno: match &error {
                redb::Error::Io(error) => error.raw_os_error(),
                _ => None,
            },
        };
        let database = match self.database.take() {
            Some(database) => database,
            None => file::database(&self.file).map_err(|e| failed(e.into()))?,
        };
        let result = database.begin_write().map_err(redb::Error::from).and_then(|tx| self.fill(tx));
        self.database = Some(database);
        result.map_err(failed)
    }

    fn fill(&self, transaction: WriteTransaction) -> Result<(), redb::Error> {
        {
            let mut records = transaction.open_table(RECORDS)?;
            for (&key, content) in &self.owed {
                match content {
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
