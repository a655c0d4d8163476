//! The settings of a run, derived from the command line.

use crate::backend::{LUKS_SECRET, Policy, Store};
use crate::closed;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The settings of a run of the bench.
#[derive(Debug)]
pub struct Settings {
    /// Runs of each measurement on each side.
    pub runs: usize,
    /// Duration of a closed or open loop.
    pub span: Duration,
    /// Duration of the warm-up before a loop.
    pub warm_up: Duration,
    /// Duration of an idle measurement.
    pub idle: Duration,
    /// Quick instead of exact.
    pub quick: bool,
    /// Only cases whose name contains one of these strings; all cases if there are none.
    pub cases: Vec<String>,
    /// The sleep policy of `arykd` in closed loops.
    pub policy: Policy,
    /// Queues of the front-end.
    pub queues: usize,
    /// The `arykd` to measure.
    pub arykd: PathBuf,
    /// Directory for sockets.
    pub sockets: TempDir,
    /// Directory for files on a disk.
    pub files: TempDir,
    /// Directory for files in memory.
    pub memory: TempDir,
}

impl Settings {
    /// Whether the command line selects a case.
    pub fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|part| case.contains(part.as_str()))
    }

    /// The command with placeholders for the temporary directories.
    pub fn without_paths(&self, command: &str) -> String {
        let dirs = [(&self.sockets, "$SOCKETS"), (&self.files, "$FILES"), (&self.memory, "$SHM")];
        dirs.into_iter().fold(command.to_owned(), |command, (dir, name)| {
            command.replace(&*dir.path().to_string_lossy(), name)
        })
    }

    /// Bytes of disks that store data.
    pub const fn size(&self) -> u64 {
        if self.quick { 128 << 20 } else { 1 << 30 }
    }

    /// A file on a disk, of `size` bytes without holes.
    pub fn filled(&self, name: &str, size: u64) -> Result<PathBuf> {
        filled(self.files.path(), name, size)
    }

    /// The store of a case of closed loops; a file is created and filled.
    pub fn store(&self, case: &str) -> Result<Store> {
        let size = self.size();
        Ok(match case {
            "null" => null(),
            "memory" => Store::Memory { size, peer: filled(self.memory.path(), "peer", size)? },
            closed::CRYPTO => Store::Luks { path: luks(self.memory.path(), size)? },
            _ => Store::File { path: filled(self.files.path(), "disk", size)? },
        })
    }
}

/// A null disk of a terabyte.
pub const fn null() -> Store {
    Store::Null { size: 1 << 40 }
}

/// Creates a file of `size` bytes that `qemu-img` has made a disk in the format LUKS.
fn luks(dir: &Path, size: u64) -> Result<PathBuf> {
    let path = dir.join("luks");
    let secret = format!("secret,{LUKS_SECRET}");
    let options = "key-secret=luks,iter-time=10,preallocation=full";
    let status = Command::new("qemu-img")
        .args(["create", "-q", "-f", "luks", "--object", &secret, "-o", options])
        .arg(&path)
        .arg(size.to_string())
        .status();
    ensure!(status.context("running qemu-img")?.success(), "qemu-img cannot create {}", path.display());
    Ok(path)
}

/// Creates a file of `size` bytes without holes.
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
