//! Errors of a store, as texts for the operator. Any context.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a store cannot be opened. The store is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has the store open.
    #[error("another daemon{} keeps its state in {dir}: each needs a directory of its own", .pid.map_or_else(String::new, |pid| format!(" (process {pid})")))]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Process id of that process, if known.
        pid: Option<u32>,
    },
    /// The file is not a store, or is damaged.
    #[error("{path} is damaged, and was not modified: {why}. {}", next_step(.path, .copy))]
    Damaged {
        /// The store.
        path: PathBuf,
        /// What the check found.
        why: String,
        /// The store's copy and its number of records, if the copy is whole.
        copy: Option<(PathBuf, usize)>,
    },
    /// A newer version of Aryk wrote the store.
    #[error(
        "{path} was written by a newer version of Aryk (format {version}; this one knows {}), and was not modified. \
         Start that version, or give another --state-dir",
        crate::VERSION
    )]
    Newer {
        /// The store.
        path: PathBuf,
        /// The format version of the store.
        version: u64,
    },
    /// A system call failed.
    #[error("cannot {action} {path}: {source}")]
    Os {
        /// The failed action, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn next_step(path: &std::path::Path, copy: &Option<(PathBuf, usize)>) -> String {
    let path = path.display();
    match copy {
        Some((copy, records)) => {
            let copy = copy.display();
            format!(
                "Its last copy is whole and has {records} records: 'mv {path} {path}.damaged; mv {copy} {path}' restores it"
            )
        }
        None => format!("To start with an empty state, move it away: 'mv {path} {path}.damaged'"),
    }
}

/// Why changes were not written. The store is as it was before these changes.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot write to {path}: {why}")]
pub struct WriteError {
    pub(crate) path: Arc<PathBuf>,
    pub(crate) why: Arc<str>,
    pub(crate) errno: Option<i32>,
}

impl WriteError {
    /// The system's errno, if a system call failed.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}
