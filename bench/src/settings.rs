//! What to run, and for how long: the command line's wishes, worked out.

use crate::backend::{Policy, Store};
use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// How a run of the bench is to be done.
#[derive(Debug)]
pub struct Settings {
    /// Runs of each measurement on each side.
    pub runs: usize,
    /// How long a closed or open loop is measured.
    pub span: Duration,
    /// How long it runs before that.
    pub warm_up: Duration,
    /// How long idleness is watched.
    pub idle: Duration,
    /// Rather quick than exact.
    pub quick: bool,
    /// Only cases whose name contains one of these; all if there are none.
    pub cases: Vec<String>,
    /// The sleep policy of `arykd` in closed loops.
    pub policy: Policy,
    /// Queues of the front-end.
    pub queues: usize,
    /// The `arykd` to measure.
    pub arykd: PathBuf,
    /// Sockets.
    pub sockets: TempDir,
    /// Files on a disk.
    pub files: TempDir,
    /// Files in memory.
    pub memory: TempDir,
}

impl Settings {
    /// Whether a case was asked for.
    pub fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|part| case.contains(part.as_str()))
    }

    /// A command with names for our temporary directories.
    pub fn without_paths(&self, command: &str) -> String {
        let dirs = [(&self.sockets, "$SOCKETS"), (&self.files, "$FILES"), (&self.memory, "$SHM")];
        dirs.into_iter().fold(command.to_owned(), |command, (dir, name)| {
            command.replace(&*dir.path().to_string_lossy(), name)
        })
    }

    /// Bytes in disks that hold something.
    pub const fn size(&self) -> u64 {
        if self.quick { 128 << 20 } else { 1 << 30 }
    }

    /// The store of a case of closed loops, made and filled where it is a file.
    pub fn store(&self, case: &str) -> Result<Store> {
        let size = self.size();
        Ok(match case {
            "null" => null(),
            "memory" => Store::Memory { size, peer: filled(self.memory.path(), "peer", size)? },
            _ => Store::File { path: filled(self.files.path(), "disk", size)? },
        })
    }
}

/// A disk that keeps nothing, of a terabyte.
pub const fn null() -> Store {
    Store::Null { size: 1 << 40 }
}

/// A file of `size` bytes with no hole in it.
fn filled(dir: &Path, name: &str, size: u64) -> Result<PathBuf> {
    let path = dir.join(name);
    let write = || {
        let mut file = File::create(&path)?;
        let chunk: Vec<u8> =
            (0..1_u32 << 18).flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes()).collect();
        for _ in 0..size / chunk.len() as u64 {
            file.write_all(&chunk)?;
        }
        file.sync_all()
    };
    write().with_context(|| format!("filling {}", path.display()))?;
    Ok(path)
}
