//! Errors of creating and resizing a disk. Control context.

use crate::Holder;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Directories that disks may be in. Confinement applies to the whole process and is set once, so this is a static.
static ALLOWED: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Records that the process has confined itself to `directories`, which are canonical: errors name them from now on.
/// Further calls have no effect.
pub fn note_allowed(directories: Vec<PathBuf>) {
    let _ = ALLOWED.set(directories);
}

/// The error for a permission failure of the kernel when we `action` the file at `path`.
pub(crate) fn refused(action: &'static str, path: &Path) -> Error {
    let path = path.to_owned();
    match ALLOWED.get() {
        Some(allowed) if is_outside(allowed, &path) => {
            let names: Vec<_> = allowed.iter().map(|dir| dir.display().to_string()).collect();
            Error::Outside { path, allowed: names.join(", ") }
        }
        _ => Error::Permission { action, path, user: rustix::process::geteuid().as_raw() },
    }
}

/// Whether `path` is in none of the directories `allowed`. For a path that does not exist yet its directory decides.
fn is_outside(allowed: &[PathBuf], path: &Path) -> bool {
    let parent = || path.parent().and_then(|parent| parent.canonicalize().ok());
    let place = path.canonicalize().ok().or_else(parent);
    place.is_none_or(|place| !allowed.iter().any(|dir| place.starts_with(dir)))
}

/// An error of creating or resizing a disk.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file does not exist, and the caller does not ask to create it.
    #[error("`{0}` does not exist; to have it created, give a size")]
    Missing(PathBuf),
    /// The directory of the file does not exist.
    #[error("the directory `{directory}` does not exist, so there is no place for `{path}`: make it first")]
    NoDirectory {
        /// The file.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
    },
    /// A symbolic link to a file that does not exist: the target is not created.
    #[error(
        "`{0}` is a symbolic link to a file that does not exist; name that file itself to have it created"
    )]
    Dangling(PathBuf),
    /// The size asked for is 0 bytes.
    #[error("a disk of 0 bytes is none: give `{0}` the size that it is to have, or no size if it has one")]
    NoSize(PathBuf),
    /// The file has another size than the one asked for.
    #[error(
        "`{path}` is there already and has {size} bytes, not {asked}: to use it as it is, give no size, and resize the disk then"
    )]
    OtherSize {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The size asked for, in bytes.
        asked: u64,
    },
    /// The file is empty, and no size is given.
    #[error("`{0}` is empty; to have it grown, give a size")]
    Empty(PathBuf),
    /// The path is a directory.
    #[error("`{0}` is a directory; a disk needs a regular file or a block device")]
    Directory(PathBuf),
    /// The path is a socket, a pipe or a character device.
    #[error("`{0}` is neither a regular file nor a block device")]
    NotAFile(PathBuf),
    /// The process may not open or create the file.
    #[error("no permission to {action} `{path}` as user {user}")]
    Permission {
        /// The operation that is not permitted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The effective user ID of the process.
        user: u32,
    },
    /// The file is outside of the directories that the process has confined itself to.
    #[error(
        "`{path}` is not in a directory that disks may be in: {allowed}; to allow another, start arykd with --allow-dir"
    )]
    Outside {
        /// The file.
        path: PathBuf,
        /// The directories that disks may be in.
        allowed: String,
    },
    /// Another disk or process has locked the file.
    #[error("`{path}` is locked by {holder}")]
    Locked {
        /// The file.
        path: PathBuf,
        /// The holder of the lock.
        holder: Holder,
    },
    /// Another process has the block device open exclusively, or a file system on it is mounted.
    #[error("`{0}` is in use: it is mounted, part of another device, or open elsewhere")]
    InUse(PathBuf),
    /// The block size is not one that a disk can have.
    #[error("a block size of {0} is not a power of two from 512 to 65,536")]
    BlockSize(u32),
    /// The size is not a whole number of blocks.
    #[error("`{path}`: {size} bytes are not a multiple of the block size, {unit}")]
    NotAMultiple {
        /// The file.
        path: PathBuf,
        /// The size in bytes.
        size: u64,
        /// The size must be a multiple of so many bytes.
        unit: u64,
    },
    /// The new size is smaller, and the caller did not ask to shrink the disk.
    #[error(
        "`{name}` has {from} bytes; making it smaller, {to} bytes, destroys what lies behind, and was not asked for"
    )]
    Shrinks {
        /// The disk.
        name: String,
        /// The present size in bytes.
        from: u64,
        /// The size asked for, in bytes.
        to: u64,
    },
    /// Another call is resizing the disk.
    #[error("`{0}` is being given another size already")]
    Resizing(String),
    /// The size of a block device or of a read-only disk cannot be set.
    #[error("`{0}` is a block device or read-only: its size cannot be set, only looked at again")]
    FixedSize(String),
    /// The disk belongs to another module.
    #[error("`{0}` is not a disk of a file or block device")]
    NotOurs(String),
    /// The block layer returned an error.
    #[error(transparent)]
    Bdev(#[from] aryk_bdev::Error),
    /// A system call returned an error.
    #[error("cannot {action} `{path}`: {error}")]
    Os {
        /// The operation that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}
