//! Errors of creating and resizing a disk. Control context.

use crate::Holder;
use aryk_bdev::Bytes;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The directories that disks may be in. A static, because the confinement applies to the whole process and is set once.
static ALLOWED: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Records that the process has confined itself to `directories`, which are canonical: errors mention them from now on. Further
/// calls have no effect.
pub fn note_allowed(directories: Vec<PathBuf>) {
    let _ = ALLOWED.set(directories);
}

/// The error for a permission failure of the kernel when this process tries to `action` the file at `path`.
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

/// Whether `path` is in none of the directories `allowed`. For a path that does not exist yet, its directory decides.
fn is_outside(allowed: &[PathBuf], path: &Path) -> bool {
    let parent = || path.parent().and_then(|parent| parent.canonicalize().ok());
    let place = path.canonicalize().ok().or_else(parent);
    place.is_none_or(|place| !allowed.iter().any(|dir| place.starts_with(dir)))
}

/// An error of creating or resizing a disk.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file does not exist, and the configuration has no size to create it with.
    #[error("`{0}` does not exist; to create it, give a size")]
    Missing(PathBuf),
    /// The directory of the file does not exist.
    #[error("the directory `{directory}` does not exist; create it before `{path}`")]
    NoDirectory {
        /// The file.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
    },
    /// A symbolic link to a file that does not exist: the target is not created.
    #[error("`{0}` is a symbolic link to a file that does not exist; to create that file, give its own path")]
    Dangling(PathBuf),
    /// The requested size is 0 bytes.
    #[error("a disk cannot have 0 bytes: give the size to create `{0}` with, or no size if the file exists")]
    NoSize(PathBuf),
    /// The file has another size than the requested one.
    #[error(
        "`{path}` exists and has {size} bytes, not {requested}: to use it, give no size; the disk can be resized later"
    )]
    OtherSize {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: Bytes,
        /// The requested size.
        requested: Bytes,
    },
    /// The file is empty, and no size is given.
    #[error("`{0}` is empty; to grow it, give a size")]
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
        "`{path}` is not in a directory that disks may be in: {allowed}; to allow another directory, start arykd with --allow-dir"
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
        /// The size.
        size: Bytes,
        /// The size must be a multiple of this number of bytes.
        unit: u32,
    },
    /// The new size is smaller, and shrinking was not requested.
    #[error(
        "`{name}` has {from} bytes; shrinking it to {to} bytes destroys the data behind the new end, and was not requested"
    )]
    Shrinks {
        /// The disk.
        name: String,
        /// The present size.
        from: Bytes,
        /// The requested size.
        to: Bytes,
    },
    /// Another call is resizing the disk.
    #[error("`{0}` is already being resized")]
    Resizing(String),
    /// The size of a block device or of a read-only disk cannot be set.
    #[error("`{0}` is a block device or read-only: its size cannot be set, only rescanned")]
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
