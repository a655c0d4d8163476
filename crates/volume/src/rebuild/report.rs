//! What a rebuild tells: how far it is, what it has found, and why it fails. Any context.

use crate::{Damage, OpenError, StoreError, VolumeId};

/// Why a pool is not rebuilt.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RebuildError {
    /// No segment has anything of the pool.
    #[error("no segment has data of the pool")]
    Nothing,
    /// The new index needs segments that hold nothing.
    #[error(
        "the new index needs {0} segments in which nothing is alive; make the disk larger by as many, and try again"
    )]
    NoSpace(usize),
    /// So much is damaged that it cannot be remembered.
    #[error("more than a million blocks do not match their checksums")]
    TooDamaged,
    /// The rebuilt manifest contradicts itself.
    #[error("the rebuilt manifest is wrong: {0}")]
    Wrong(OpenError),
    /// The disk failed while the rebuilt pool was written.
    #[error("the rebuilt pool cannot be written: {0}")]
    Store(StoreError),
}

/// From where names, sizes and snapshots are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recipe {
    /// The copy of the manifest, with its index: the pool is as it was.
    Copy,
    /// Names and snapshots are those of the copy of the manifest; the index is made of frames' headers.
    Headers,
    /// There is no copy: snapshots are lost, and each history of writes is a volume with a new name.
    HeadersOnly,
}

/// What a rebuild has found.
#[derive(Clone, Debug)]
pub struct RebuildReport {
    /// From where names, sizes and snapshots are.
    pub recipe: Recipe,
    /// Segments that have frames or runs.
    pub segments: u32,
    /// Frames of these segments.
    pub frames: u64,
    /// Entries of the new index.
    pub entries: u64,
    /// Volumes and snapshots.
    pub volumes: Vec<(VolumeId, String)>,
    /// Blocks that are lost or in doubt.
    pub damage: Vec<Damage>,
}

/// What a rebuild does, and how much of it is done.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The step.
    pub what: &'static str,
    /// How much of it.
    pub done: u64,
    /// All of it.
    pub all: u64,
}
