//! What can go wrong with a store, for people to read. Any context.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a store cannot be opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Somebody has it open.
    #[error("another daemon{} keeps its state in {dir}: each needs a directory of its own", .pid.map_or_else(String::new, |pid| format!(" (process {pid})")))]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Who.
        pid: Option<u32>,
    },
    /// What is in the file is no store, or not whole.
    #[error("{path} is damaged, and was left as it is: {why}. {}", next_step(.path, .copy))]
    Damaged {
        /// The store.
        path: PathBuf,
        /// What was found.
        why: String,
        /// Its copy, if there is one that is whole, and how many records it has.
        copy: Option<(PathBuf, usize)>,
    },
    /// A later version of us wrote it.
    #[error(
        "{path} was written by a newer version of Aryk (format {version}; this one knows {}), and was left as it is. \
         Start that version, or give another --state-dir",
        crate::VERSION
    )]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its version.
        version: u64,
    },
    /// The system refuses.
    #[error("cannot {action} {path}: {source}")]
    Os {
        /// What.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn next_step(path: &std::path::Path, copy: &Option<(PathBuf, usize)>) -> String {
    let path = path.display();
    match copy {
        Some((copy, records)) => {
            let copy = copy.display();
            format!(
                "Its last copy is whole and has {records} records: 'mv {path} {path}.damaged; mv {copy} {path}' takes it"
            )
        }
        None => format!("To start with nothing, move it away: 'mv {path} {path}.damaged'"),
    }
}

/// Why changes were not written. The store is as it was before them.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot write to {path}: {why}")]
pub struct WriteError {
    pub(crate) path: Arc<PathBuf>,
    pub(crate) why: Arc<str>,
    pub(crate) errno: Option<i32>,
}

impl WriteError {
    /// The system's error, if it was the system's.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}
