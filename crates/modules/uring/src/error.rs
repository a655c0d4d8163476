//! Why a disk cannot be made or resized. Control context.

use crate::Holder;
use std::io;
use std::path::PathBuf;

/// Why a disk cannot be made or resized.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No file, and none is to be created.
    #[error("`{0}` does not exist; to have it created, give a size")]
    Missing(PathBuf),
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
