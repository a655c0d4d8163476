//! Pools of volumes: a pool on a base disk has volumes, snapshots and clones, which are disks. Control context; channels run in
//! reactor context.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `pool` | [`Pool`]: a pool, its volumes and their disks; commands |
//! | `pools` | [`Pools`]: all pools; creating, finding, deleting them |
//! | `claim` | keeps daemons of other hosts away from a pool, and this one when another has it |
//! | `visit` | a short task with a channel of a disk, on a reactor |
//! | `copy` | copies of parts of a disk to another |
//! | `part` | a part of a pool: a root on one reactor, for one shard |
//! | `owner` | that root, which runs the engine and the store of the shard, and moves to another reactor |
//! | `branch` | the root on each other reactor that has channels of volumes |
//! | `striped` | the channels of a volume of a pool with several parts; `gate` holds back their writes during a snapshot |
//! | `inbox` | requests and completions between the channels of volumes on a reactor and the root there |
//! | `note` | the settings that a pool stores |
//! | `disk` | a disk that the root uses: the base, or the base of volumes |
//! | `foreign` | the disks of other modules that are the bases of volumes |
//! | `device` | the disk of a volume |
//!
//! The engine (`aryk_volume`) and the store (`aryk_volume_store`) are without I/O: this crate gives them a disk and a reactor. A
//! pool has one or several shards, each with a root on one reactor. On each other reactor with channels of its volumes, a shard
//! has a branch, which reads data from the base by itself, and forwards what else there is to do.
#![forbid(unsafe_code)]

mod branch;
mod claim;
mod copy;
mod device;
mod disk;
mod foreign;
mod gate;
mod inbox;
mod note;
mod owner;
mod part;
mod pool;
mod pools;
mod striped;
mod visit;

use device::VolumeDisk;

pub use aryk_volume::{
    BLOCK, CheckReport, CommandError, Damage, LogPlace, Settings, Shard, Space as VolumeSpace, Stats,
    StoreError, UNIT, VolumeId, WhenFull,
};
pub use aryk_volume_store::{Error as FormatError, Finding, Position};
pub use copy::{Copy, whole_clusters};
pub use pool::{
    Health, Image, Member, Parent, Pool, ScrubReport, ScrubSettings, ScrubState, Space, SpaceCount,
};
pub use pools::{NewPool, Pools};

use aryk_bdev::Bytes;
use uuid::Uuid;

/// Bytes of reads that a reactor has buffers for. Requests behind them wait in the inbox. What is read from foreign disks does
/// not count: one that hangs would stop all volumes.
pub(crate) const READ_BYTES: u64 = 64 << 20;

/// The result of a change of the superblock: the number of segments.
pub(crate) type Growing = Result<u32, Error>;

/// What a new volume starts with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Zeroes.
    Empty,
    /// The content of a snapshot of the pool.
    Snapshot(VolumeId),
    /// The content of a disk of another module or of another pool, by its name. Nobody may write to it while a volume depends on
    /// it.
    Disk(String),
}

/// A volume to create.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// Its name, unique in the pool: 1 to 255 bytes, without `/`.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its size: a multiple of its blocks.
    pub bytes: Bytes,
    /// Bytes of a block: 512 or 4,096.
    pub block_size: u32,
    /// Its content.
    pub origin: Origin,
    /// What its writes do while the pool is full.
    pub when_full: WhenFull,
    /// Whether the pool reserves space for all of it.
    pub is_thick: bool,
}

/// Why an operation on a pool failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A disk cannot be opened or registered.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// A channel of a disk cannot be opened.
    #[error(transparent)]
    Open(#[from] aryk_bdev::OpenError),
    /// The disk has no pool, or cannot get one.
    #[error(transparent)]
    Format(#[from] aryk_volume_store::Error),
    /// The manifest of the pool cannot be used.
    #[error(transparent)]
    Manifest(#[from] aryk_volume::OpenError),
    /// The disk failed.
    #[error("the base disk of the pool failed: {0}")]
    Store(StoreError),
    /// The log has lost a part that was durable.
    #[error(
        "the log of the pool is damaged in segment {segment}, at byte {offset} of it or behind: \
         if it is opened, all writes behind this place are lost"
    )]
    DamagedLog {
        /// The number of the segment.
        segment: u32,
        /// The byte offset in the segment.
        offset: u64,
    },
    /// The manifest is lost.
    #[error("the manifest of the pool is lost")]
    NoManifest,
    /// The pool has refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The pool has ended: its base was removed, or it was closed.
    #[error("the pool has ended")]
    Ended,
    /// There is no thread that could open the pool.
    #[error("no thread could be started to open the pool")]
    NoThread,
    /// Another change is running.
    #[error("{0}")]
    Busy(&'static str),
    /// The base is read-only.
    #[error("`{0}` is read-only: a pool must write to its base disk")]
    ReadOnlyBase(String),
    /// The base is a volume of a pool.
    #[error("`{0}` is a volume: a pool cannot be on a volume, since pools are not looked for there")]
    Nested(String),
    /// No pool has this name or UUID.
    #[error("there is no pool `{0}`")]
    NoPool(String),
    /// The disk has no pool.
    #[error("`{0}` has no pool")]
    NoPoolOn(String),
    /// Another pool has this name.
    #[error("a pool named `{0}` exists already")]
    PoolExists(String),
    /// Two disks have the same pool.
    #[error(
        "the disks `{first}` and `{second}` have the same pool, `{pool}`: it is open from `{first}`, so `{second}` is left alone"
    )]
    Twin {
        /// The name of the pool.
        pool: String,
        /// The disk from which it is open.
        first: String,
        /// The other disk.
        second: String,
    },
    /// No volume has this name or UUID.
    #[error("there is no volume or snapshot `{0}`")]
    NoVolume(String),
    /// A disk cannot be the base of a volume.
    #[error("`{disk}` cannot be the base of the volume: {why}")]
    Image {
        /// The disk.
        disk: String,
        /// The reason.
        why: &'static str,
    },
    /// A disk cannot be the target of a copy.
    #[error("the disk cannot be the target of the copy: {0}")]
    CopyTarget(&'static str),
    /// A copy failed.
    #[error("the copy failed: cannot {what}: {status:?}")]
    Copy {
        /// What failed.
        what: &'static str,
        /// The status of the request.
        status: aryk_bdev::Status,
    },
    /// Another daemon has the pool open.
    #[error(
        "the pool on `{disk}` is in use by the daemon with process ID {pid} on the host `{host}`: \
         end that daemon, or its access to the disk, and call `aryk pool open --disk {disk}`"
    )]
    InUse {
        /// The disk.
        disk: String,
        /// The other daemon's host.
        host: String,
        /// The other daemon's process ID there.
        pid: u32,
    },
    /// Another daemon has taken the pool over.
    #[error(
        "a daemon of another host has taken the pool over: it is that daemon's; delete its disk here instead"
    )]
    TakenOver,
    /// The claim of a pool cannot be read or written.
    #[error("the claim of the pool on `{disk}` cannot be taken: {status:?}")]
    Claim {
        /// The disk.
        disk: String,
        /// The status of the request.
        status: aryk_bdev::Status,
    },
    /// A change of the pool was interrupted that this version does not know.
    #[error(
        "a change of the pool was interrupted ({0:?}) that this version of Aryk does not know; \
         open the pool with the version of Aryk that has begun it, or a newer one"
    )]
    Intent(String),
    /// A change was made in some shards of the pool, and others have refused it. It is tried again until they make it.
    #[error(
        "the change is made in some shards of the pool, and is tried again in the others, which have refused it: {0}"
    )]
    Unfinished(Box<Self>),
    /// A volume is not in all shards of its pool.
    #[error("a shard of the pool does not have the volume")]
    Incomplete,
    /// A number of shards is not allowed.
    #[error("a pool has 1, 2, 4, 8 or 16 shards, not {0}")]
    Shards(u32),
    /// A size of clusters is not allowed.
    #[error("a cluster cannot have {0} bytes, only a multiple of 4096 below 4 GiB")]
    Cluster(Bytes),
    /// A name is not allowed.
    #[error(
        "{0:?} cannot be the name of a volume: a name has 1 to 255 bytes, no `/` and no control characters"
    )]
    Name(String),
    /// A size is not allowed.
    #[error("{0} bytes are not a multiple of 512")]
    Size(Bytes),
}

#[cfg(test)]
mod tests;
