//! Reads a store that may be damaged, without modifying it. Any context.
//!
//! redb asserts properties that a damaged file may lack. So it works on a copy in memory, and a panic of redb is reported as
//! damage.

use crate::{META, RECORDS, Record, VERSION, VERSION_KEY, checksum};
use redb::{Builder, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend};
use std::cell::Cell;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, Once, PoisonError};

/// Why a store cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A newer version of Aryk wrote it, with this format version.
    Newer(u64),
    Damaged(String),
}

impl<E: std::error::Error> From<E> for Flaw {
    fn from(error: E) -> Self {
        Self::Damaged(error.to_string())
    }
}

/// Bytes by which the copy may grow while redb repairs it.
const GROWTH_MAX: usize = 16 << 20;

/// Reads the records of a store with the contents `bytes`, in the order of their keys.
pub(crate) fn read(bytes: Vec<u8>) -> Result<Vec<Record>, Flaw> {
    if bytes.is_empty() {
        return Err(Flaw::Damaged("the file is empty".into()));
    }
    catch_panic(AssertUnwindSafe(|| read_copy(bytes)))
        .unwrap_or_else(|| Err(Flaw::Damaged("its structure contradicts itself".into())))
}

fn read_copy(bytes: Vec<u8>) -> Result<Vec<Record>, Flaw> {
    let limit = bytes.len() + GROWTH_MAX;
    let mut store = match Builder::new().create_with_backend(Copy { bytes: Mutex::new(bytes), limit }) {
        Err(DatabaseError::UpgradeRequired(version)) => {
            return Err(Flaw::Damaged(format!("its pages are of version {version}")));
        }
        store => store?,
    };
    if !store.check_integrity()? {
        return Err(Flaw::Damaged("the checksums of its pages do not match".into()));
    }
    let reading = store.begin_read()?;
    let version = reading.open_table(META)?.get(VERSION_KEY)?.map(|version| version.value());
    match version {
        Some(VERSION) => {}
        Some(version) => return Err(Flaw::Newer(version)),
        None => return Err(Flaw::Damaged("it has no version".into())),
    }
    let mut records = Vec::new();
    for entry in reading.open_table(RECORDS)?.iter()? {
        let (key, value) = entry?;
        let key = key.value();
        match value.value().split_first_chunk() {
            Some((sum, content)) if *sum == checksum(key, content) => {
                records.push(Record { key, content: content.to_vec() });
            }
            _ => return Err(Flaw::Damaged(format!("record {key} does not have its checksum"))),
        }
    }
    Ok(records)
}

/// Runs `f`; returns `None` if it panics. The panic is not printed.
fn catch_panic<R>(f: AssertUnwindSafe<impl FnOnce() -> R>) -> Option<R> {
    thread_local!(static QUIET: Cell<bool> = const { Cell::new(false) });
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                others(panic);
            }
        }));
    });
    QUIET.set(true);
    let result = std::panic::catch_unwind(f);
    QUIET.set(false);
    result.ok()
}

/// A store in memory with a limited size.
#[derive(Debug)]
struct Copy {
    bytes: Mutex<Vec<u8>>,
    limit: usize,
}

impl Copy {
    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        // No code panics while it holds the lock.
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The range of `len` bytes at `offset`.
fn range(offset: u64, len: usize, limit: usize) -> io::Result<std::ops::Range<usize>> {
    let start = usize::try_from(offset).ok().filter(|&start| start <= limit && len <= limit - start);
    start.map(|start| start..start + len).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl StorageBackend for Copy {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes().len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes();
        out.copy_from_slice(&bytes[range(offset, out.len(), bytes.len())?]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let range = range(0, usize::try_from(len).unwrap_or(usize::MAX), self.limit)?;
        self.bytes().resize(range.end, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut bytes = self.bytes();
        let range = range(offset, data.len(), bytes.len())?;
        bytes[range].copy_from_slice(data);
        Ok(())
    }
}
