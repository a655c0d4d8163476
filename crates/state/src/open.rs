//! Opening a store, and the owner's handle. Any context except a reactor's: opening blocks.

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

/// How long to wait for the lock of a predecessor that was killed just now.
const PATIENCE: Duration = Duration::from_secs(1);
const PATIENCE_STEP: Duration = Duration::from_millis(5);

/// An open store. No other process can open it while this value exists.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    changes: Option<Sender<Change>>,
    writer: Option<JoinHandle<()>>,
    _lock: File,
}

impl Store {
    /// Whether the directory has a store, whole or damaged.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        path_in(dir).exists()
    }

    /// Opens the store in the directory `dir` and reads it. Creates the directory if it does not exist.
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
        Ok((Self { dir: dir.to_owned(), changes: Some(changes), writer: Some(writer), _lock: lock }, records))
    }

    /// The directory. Other code may keep files of its own there.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Sets the content of record `key`, or deletes the record. Changes are applied in the order of these calls. The returned
    /// receiver resolves when the change is written or has failed; a failed change is written together with the next successful
    /// one.
    pub fn write(&self, key: u64, content: Option<Vec<u8>>) -> Written {
        self.send(key, content, false)
    }

    /// Like [`Store::write`], but resolves only when the change survives a power failure.
    pub fn write_durably(&self, key: u64, content: Option<Vec<u8>>) -> Written {
        self.send(key, content, true)
    }

    fn send(&self, key: u64, content: Option<Vec<u8>>, durable: bool) -> Written {
        let (done, written) = oneshot::channel();
        if let Some(changes) = &self.changes {
            // A dead writer drops `done`, which reports the failure.
            let _ = changes.send(Change { key, content, durable, done });
        }
        written
    }
}

impl Drop for Store {
    /// Waits until all changes are on the disk.
    fn drop(&mut self) {
        self.changes = None;
        if let Some(writer) = self.writer.take() {
            // If the writer has panicked, the panic hook has logged it.
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

/// Takes the lock. Its file contains the process id of its holder.
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
                // Without the id the message only omits it.
                let _ = lock.read_to_string(&mut pid);
                return Err(OpenError::InUse { dir: dir.to_owned(), pid: pid.trim().parse().ok() });
            }
            Err(errno) => return Err(os("lock", &path)(errno.into())),
        }
    }
    // If the id does not fit on a full disk, only an error message lacks it.
    let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
    Ok(lock)
}

#[expect(
    clippy::disallowed_methods,
    reason = "opening blocks anyway, and nothing notifies of a lock's release"
)]
fn pause() {
    std::thread::sleep(PATIENCE_STEP);
}

/// Creates a store so that the file appears complete or not at all.
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

/// The path of a store's file.
pub(crate) fn path_in(dir: &Path) -> PathBuf {
    dir.join("state.redb")
}
