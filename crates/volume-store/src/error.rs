//! Why a pool is not created or opened, as texts for the operator, and what is damaged in a pool that opens. Any context.

use std::fmt;

use uuid::Uuid;

use crate::Foreign;
use crate::superblock::{Invalid, PLACES};

/// Why a pool is not created or opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The disk has no superblock.
    #[error("the disk has no pool: {}", .found.map_or_else(|| "it is empty".to_owned(), |found| format!("it has {found}")))]
    NotAPool {
        /// What the disk has instead.
        found: Option<Foreign>,
    },
    /// A new pool would destroy other data.
    #[error("the disk has {0}; to destroy it and create a pool, force the creation")]
    Foreign(Foreign),
    /// A new pool would destroy a pool.
    #[error(
        "the disk has the pool {name:?} ({pool}); to destroy it and create another one, force the creation"
    )]
    Pool {
        /// Its identity.
        pool: Uuid,
        /// Its name.
        name: String,
    },
    /// A superblock that this version does not read.
    #[error(
        "the pool has version {0} of the format, and this version of Aryk reads version 1 only; \
        open the pool with the version of Aryk that wrote it, or a newer one"
    )]
    Version(u32),
    /// A superblock with features that this version does not know.
    #[error(
        "the pool uses features that this version of Aryk does not know (bits {0:#x}); \
        open the pool with the version of Aryk that wrote it, or a newer one"
    )]
    Features(u64),
    /// A pool on several disks.
    #[error("the pool has {0} disks, and this version of Aryk opens pools of one disk only")]
    Devices(u32),
    /// The disk is shorter than the pool.
    #[error(
        "the disk has {found} bytes, and the pool needs {expected}: the disk has become shorter, or is an incomplete copy; \
        give it its size again"
    )]
    Shorter {
        /// Bytes that the pool needs.
        expected: u64,
        /// Bytes of the disk.
        found: u64,
    },
    /// Another pool than the caller expects.
    #[error(
        "the disk has the pool {found}, and not {expected}: the name of the disk belongs to another disk now"
    )]
    OtherPool {
        /// The expected identity.
        expected: Uuid,
        /// The identity of the pool on the disk.
        found: Uuid,
    },
    /// Another part of the pool than the caller expects.
    #[error("the disk has another part of the pool there: it was changed, or is an incomplete copy")]
    OtherShard,
    /// The pool's state is older than one that the caller has seen.
    #[error(
        "the pool on the disk is older than when it was open last: the disk was restored from an older copy; \
        to lose what was written since: aryk pool open --disk DISK --accept-older"
    )]
    Older,
    /// The disk has larger blocks than the pool allows.
    #[error(
        "the disk has blocks of {disk} bytes, and the pool was created on a disk with blocks of {pool} bytes"
    )]
    BlockSize {
        /// Bytes of the disk's block.
        disk: u32,
        /// The pool's alignment.
        pool: u32,
    },
    /// The disk is too small for a pool.
    #[error("the disk has {bytes} bytes, and a pool needs at least {needed}")]
    TooSmall {
        /// Bytes of the disk.
        bytes: u64,
        /// Bytes that a pool needs.
        needed: u64,
    },
    /// The name is too long, or has control characters.
    #[error("a pool's name has at most 64 bytes, and no control characters")]
    Name,
    /// A structure is damaged, with all its copies.
    #[error("the pool is damaged: {what}, at byte {offset} of the disk, and so is its copy{}", what.remedy())]
    Damaged {
        /// The structure.
        what: Structure,
        /// Byte offset on the disk.
        offset: u64,
    },
    /// The disk failed.
    #[error("the disk cannot be read or written at byte {0}")]
    Medium(u64),
    /// The disk failed to flush its cache.
    #[error("the disk cannot flush its cache")]
    Flush,
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        match invalid {
            Invalid::Signature => Self::NotAPool { found: None },
            Invalid::Version(version) => Self::Version(version),
            Invalid::Features(features) => Self::Features(features),
            Invalid::Checksum | Invalid::Field(_) => {
                Self::Damaged { what: Structure::Superblocks, offset: PLACES[0] }
            }
        }
    }
}

/// A structure of a pool that is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// One of two copies of the superblock.
    Superblock,
    /// Both copies of the superblock.
    Superblocks,
    /// The superblocks, which are of two pools.
    TwoPools,
    /// One of two copies of a checkpoint.
    Checkpoint,
    /// Both copies of a checkpoint that could be made again.
    RemadeCheckpoint,
    /// Both copies of a checkpoint.
    Checkpoints,
    /// All checkpoints.
    AllCheckpoints,
    /// One of two copies of a record of edits.
    Edits,
    /// Both copies of a record of edits.
    AllEdits,
    /// Whatever is at a place that cannot be read.
    Unreadable,
}

impl Structure {
    /// The command that makes it again.
    const fn remedy(self) -> &'static str {
        match self {
            Self::Checkpoint
            | Self::RemadeCheckpoint
            | Self::Checkpoints
            | Self::AllCheckpoints
            | Self::Edits
            | Self::AllEdits => {
                "; to make it again, while no daemon has the pool open: aryk pool check --offline FILE --repair"
            }
            Self::Superblock | Self::Superblocks | Self::TwoPools | Self::Unreadable => "",
        }
    }
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Superblock => "a copy of the superblock",
            Self::Superblocks => "both copies of the superblock",
            Self::TwoPools => "the superblocks are of two pools",
            Self::Checkpoint => "a checkpoint",
            Self::RemadeCheckpoint => "a checkpoint, with its copy,",
            Self::Checkpoints => "both copies of the checkpoint",
            Self::AllCheckpoints => "no checkpoint is intact",
            Self::Edits => "a record of edits",
            Self::AllEdits => "both copies of a record of edits",
            Self::Unreadable => "a place that cannot be read",
        })
    }
}

/// A structure that is damaged, while its copy is intact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The structure.
    pub what: Structure,
    /// Byte offset on the disk.
    pub offset: u64,
}
