//! Why a disk cannot be made or resized. Control context.

use crate::Holder;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where disks may be. A process confines all of itself, and once, so this is the process's too.
static ALLOWED: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Notes that the process has confined itself to `directories`, which are canonical: errors say so from now on. Further
/// calls do nothing.
pub fn note_allowed(directories: Vec<PathBuf>) {
    let _ = ALLOWED.set(directories);
}

/// Why the system does not let us `action` the file at `path`.
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

/// What does not exist yet is where its directory is.
fn is_outside(allowed: &[PathBuf], path: &Path) -> bool {
    let parent = || path.parent().and_then(|parent| parent.canonicalize().ok());
    let place = path.canonicalize().ok().or_else(parent);
    place.is_none_or(|place| !allowed.iter().any(|dir| place.starts_with(dir)))
}

/// Why a disk cannot be made or resized.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No file, and none is to be created.
    #[error("`{0}` does not exist; to have it created, give a size")]
    Missing(PathBuf),
    /// No directory for the file.
    #[error("the directory `{directory}` does not exist, so there is no place for `{path}`: make it first")]
    NoDirectory {
        /// The file.
        path: PathBuf,
        /// Where it would be.
        directory: PathBuf,
    },
    /// A symbolic link to nothing: what it leads to is not created.
    #[error(
        "`{0}` is a symbolic link to a file that does not exist; name that file itself to have it created"
    )]
    Dangling(PathBuf),
    /// No bytes.
    #[error("a disk of 0 bytes is none: give `{0}` the size that it is to have, or no size if it has one")]
    NoSize(PathBuf),
    /// A file that has a size, and not the one that is asked for.
    #[error(
        "`{path}` is there already and has {size} bytes, not {asked}: to use it as it is, give no size, and resize the disk then"
    )]
    OtherSize {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        size: u64,
        /// Those asked for.
        asked: u64,
    },
    /// A file without anything in it, and no size for it.
    #[error("`{0}` is empty; to have it grown, give a size")]
    Empty(PathBuf),
    /// A directory.
    #[error("`{0}` is a directory; a disk needs a regular file or a block device")]
    Directory(PathBuf),
    /// A socket, a pipe or a character device.
    #[error("`{0}` is neither a regular file nor a block device")]
    NotAFile(PathBuf),
    /// We may not open or create it.
    #[error("no permission to {action} `{path}` as user {user}")]
    Permission {
        /// What we may not do.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// Who we are.
        user: u32,
    },
    /// The process has confined itself to other directories.
    #[error(
        "`{path}` is not in a directory that disks may be in: {allowed}; to allow another, start arykd with --allow-dir"
    )]
    Outside {
        /// The file.
        path: PathBuf,
        /// Where disks may be.
        allowed: String,
    },
    /// Someone else has it.
    #[error("`{path}` is locked by {holder}")]
    Locked {
        /// The file.
        path: PathBuf,
        /// Who has it.
        holder: Holder,
    },
    /// Someone else has the block device, or a file system on it is mounted.
    #[error("`{0}` is in use: it is mounted, part of another device, or open elsewhere")]
    InUse(PathBuf),
    /// No block size of a disk.
    #[error("a block size of {0} is not a power of two from 512 to 65,536")]
    BlockSize(u32),
    /// Not a whole number of blocks.
    #[error("`{path}`: {size} bytes are not a multiple of the block size, {unit}")]
    NotAMultiple {
        /// The file.
        path: PathBuf,
        /// Bytes.
        size: u64,
        /// Of which they should be a multiple.
        unit: u64,
    },
    /// A new size that is smaller.
    #[error(
        "`{name}` has {from} bytes; making it smaller, {to} bytes, destroys what lies behind, and was not asked for"
    )]
    Shrinks {
        /// The disk.
        name: String,
        /// Bytes now.
        from: u64,
        /// Bytes asked for.
        to: u64,
    },
    /// Someone else is giving it another size.
    #[error("`{0}` is being given another size already")]
    Resizing(String),
    /// Its size is not ours to change.
    #[error("`{0}` is a block device or read-only: its size cannot be set, only looked at again")]
    FixedSize(String),
    /// A disk of another kind.
    #[error("`{0}` is not a disk of a file or block device")]
    NotOurs(String),
    /// The block layer refuses.
    #[error(transparent)]
    Bdev(#[from] aryk_bdev::Error),
    /// The system refuses.
    #[error("cannot {action} `{path}`: {error}")]
    Os {
        /// What.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}
