//! Opening a store, and its owner's handle. Any context but a reactor's: opening blocks.

use crate::check::{self, Flaw};
use crate::writer::{Change, Writer, Written};
use crate::{META, OpenError, RECORDS, Record, VERSION, VERSION_KEY, file};
use futures_channel::oneshot;
use redb::Database;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long to wait for a predecessor that was killed just now.
const PATIENCE: Duration = Duration::from_secs(1);
const PATIENCE_STEP: Duration = Duration::from_millis(5);

/// An open store. Nobody else can open it while this is there.
#[derive(Debug)]
pub struct Store {
    changes: Option<Sender<Change>>,
    writer: Option<JoinHandle<()>>,
    _lock: File,
}

impl Store {
    /// Whether a directory has a store, whole or not.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        path_in(dir).exists()
    }

    /// Opens the store in the directory `dir`, which is made if it is not there, and reads it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(dir: &Path) -> Result<(Self, Vec<Record>), OpenError> {
        make_dir(dir)?;
        let lock = take_lock(dir)?;
        let path = dir.join("state.redb");
        let copy = dir.join("state.redb.bak");
        let (records, file) = match fs::read(&path) {
            Ok(bytes) => {
                let records = check::read(bytes).map_err(|flaw| refusal(&path, &copy, flaw))?;
                let file = File::options().read(true).write(true).open(&path);
                (records, file.map_err(os("open", &path))?)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => (Vec::new(), make(dir, &path)?),
            Err(e) => return Err(os("read", &path)(e)),
        };
        let database = file::database(&file).map_err(|e| damaged(&path, e.to_string()))?;
        let (changes, received) = channel();
        let last = records.iter().map(|record| record.key).max().unwrap_or_default();
        let writer = Writer::new(file, database, last, (path, copy));
        let thread = std::thread::Builder::new().name("state".into());
        let writer = thread.spawn(move || writer.run(&received)).map_err(os("start a thread for", dir))?;
        Ok((Self { changes: Some(changes), writer: Some(writer), _lock: lock }, records))
    }

    /// Gives the record `key` this content, or ends it. Changes are made in the order of these calls; each is over when what is returned says so, and those that
    /// fail are made, all the same, when the next one succeeds.
    pub fn write(&self, key: u64, content: Option<Vec<u8>>) -> Written {
        self.send(key, content, false)
    }

    /// The same, of what is over only when a power failure cannot undo it any more.
    pub fn write_durably(&self, key: u64, content: Option<Vec<u8>>) -> Written {
        self.send(key, content, true)
    }

    fn send(&self, key: u64, content: Option<Vec<u8>>, durable: bool) -> Written {
        let (done, written) = oneshot::channel();
        if let Some(changes) = &self.changes {
            // A writer that is gone drops `done`, which tells it.
            let _ = changes.send(Change { key, content, durable, done });
        }
        written
    }
}

impl Drop for Store {
    /// Waits until all is on the disk.
    fn drop(&mut self) {
        self.changes = None;
        if let Some(writer) = self.writer.take() {
            // If it has panicked, that was told.
            let _ = writer.join();
        }
    }
}

fn os<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> OpenError + 'a {
    move |source| OpenError::Os { action, path: path.to_owned(), source }
}

fn damaged(path: &Path, why: String) -> OpenError {
    OpenError::Damaged { path: path.to_owned(), why, copy: None }
}

fn refusal(path: &Path, copy: &Path, flaw: Flaw) -> OpenError {
    match flaw {
        Flaw::Newer(version) => OpenError::Newer { path: path.to_owned(), version },
        Flaw::Damaged(why) => {
            let whole = fs::read(copy).ok().and_then(|bytes| check::read(bytes).ok());
            let copy = whole.map(|records| (copy.to_owned(), records.len()));
            OpenError::Damaged { path: path.to_owned(), why, copy }
        }
    }
}

fn make_dir(dir: &Path) -> Result<(), OpenError> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map_err(os("make", dir)),
    }
}

/// The lock, which holds the number of its holder.
fn take_lock(dir: &Path) -> Result<File, OpenError> {
    let path = dir.join("state.lock");
    let mut options = File::options();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut lock = opened.map_err(os("open", &path))?;
    let mut waited = Duration::ZERO;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if waited < PATIENCE => {
                pause();
                waited += PATIENCE_STEP;
            }
            Err(Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                // Without it the message says less.
                let _ = lock.read_to_string(&mut pid);
                return Err(OpenError::InUse { dir: dir.to_owned(), pid: pid.trim().parse().ok() });
            }
            Err(errno) => return Err(os("lock", &path)(errno.into())),
        }
    }
    // What does not fit on a full disk is missed by a message only.
    let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
    Ok(lock)
}

#[expect(clippy::disallowed_methods, reason = "opening blocks anyway, and a lock's end tells nobody")]
fn pause() {
    std::thread::sleep(PATIENCE_STEP);
}

/// Makes a store that is there whole or not at all.
fn make(dir: &Path, path: &Path) -> Result<File, OpenError> {
    let new = dir.join("state.redb.new");
    let mut options = File::options();
    let opened = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&new);
    let file = opened.map_err(os("make", &new))?;
    file::database(&file).map_err(redb::Error::from).and_then(|database| initialise(&database)).map_err(
        |error| match error {
            redb::Error::Io(error) => os("write", &new)(error),
            error => os("write", &new)(io::Error::other(error)),
        },
    )?;
    file.sync_all().map_err(os("sync", &new))?;
    fs::rename(&new, path).map_err(os("make", path))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(os("sync", dir))?;
    Ok(file)
}

fn initialise(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert(VERSION_KEY, VERSION)?;
    transaction.open_table(RECORDS)?;
    Ok(transaction.commit()?)
}

/// Where a store's file is.
pub(crate) fn path_in(dir: &Path) -> PathBuf {
    dir.join("state.redb")
}
