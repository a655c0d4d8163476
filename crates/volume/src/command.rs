//! Commands to a pool: volumes, snapshots and clones are created, changed and deleted. Any context.

use crate::{Cut, ForeignId, Tag, TimelineId, VolumeId};

/// What a volume's writes do while the pool has no space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenFull {
    /// They wait for space.
    Wait,
    /// They fail with [`crate::Status::NoSpace`].
    Fail,
}

/// A disk of the caller that is the base of volumes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Foreign {
    /// How the caller finds the disk again; the engine stores it only.
    pub name: String,
    /// The size of the disk. A volume reads zeroes beyond it.
    pub units: u64,
}

/// What a new volume starts with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Zeroes.
    Empty,
    /// The content of a snapshot.
    Snapshot(VolumeId),
    /// The content of a foreign disk, which nothing changes while a volume depends on it.
    Foreign(Foreign),
}

/// A name for a new volume or snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The name, unique in the pool: 1 to 255 bytes.
    pub name: String,
    /// The identifier that the caller has chosen, unique in the pool.
    pub uuid: [u8; 16],
}

/// A change of a pool's volumes. Durable when answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Creates a volume: [`Answer::Volume`].
    Create {
        /// Its name.
        label: Label,
        /// Its size.
        units: u64,
        /// Bytes of a block as its users see it: 512 or 4,096.
        block_size: u32,
        /// Its content.
        origin: Origin,
        /// What its writes do while the pool is full.
        when_full: WhenFull,
        /// Whether space for all of it is reserved ([`Volume::is_thick`]).
        is_thick: bool,
    },
    /// Deletes a volume or a snapshot, in constant time. Its space becomes free afterwards.
    Delete(VolumeId),
    /// Gives a volume another size. The part that a shrunk volume loses reads zeroes if the volume grows again.
    Resize {
        /// The volume.
        volume: VolumeId,
        /// The new size.
        units: u64,
    },
    /// Gives a volume or a snapshot another name.
    Rename {
        /// The volume.
        volume: VolumeId,
        /// The new name.
        name: String,
    },
    /// Changes what a volume's writes do while the pool is full.
    SetWhenFull {
        /// The volume.
        volume: VolumeId,
        /// What they do.
        when_full: WhenFull,
    },
    /// Reserves space for all of a volume, or gives it up ([`Volume::is_thick`]).
    SetThick {
        /// The volume.
        volume: VolumeId,
        /// Whether space is reserved.
        is_thick: bool,
    },
    /// Stores up to 4,096 bytes about the pool for the caller ([`crate::Pool::note`]).
    SetNote(Vec<u8>),
    /// Takes snapshots of volumes at one instant: [`Answer::Volumes`]. A request that was answered before the command is in; one
    /// that is submitted after the answer is not; each request is wholly in or out, and if a request is in, so are all that were
    /// answered before it was submitted.
    Snapshot(Vec<(VolumeId, Label)>),
    /// Gives a volume the content of a snapshot.
    Revert {
        /// The volume.
        volume: VolumeId,
        /// The snapshot.
        snapshot: VolumeId,
    },
    /// Gives a volume the content of another volume, which ends. The volume keeps its name, its identifier and its snapshots.
    Adopt {
        /// The volume.
        volume: VolumeId,
        /// The other volume, which has the same size, and no requests under way.
        from: VolumeId,
    },
    /// Makes a volume a snapshot of itself, which nothing changes any more, under its own name and identifier.
    Freeze(VolumeId),
    /// Which blocks a volume or a snapshot has for itself: those that were written since the snapshot before it, or since its
    /// history began: [`Answer::Changed`].
    Own(VolumeId),
    /// Makes a volume independent of its base: what it inherits is copied. Answered when the copies are durable; reads and writes
    /// go on meanwhile. If the pool is closed before, the command has to be given again.
    Inflate(VolumeId),
    /// Which blocks may differ between two views of one history: [`Answer::Changed`].
    Changed {
        /// The older snapshot.
        since: VolumeId,
        /// The newer snapshot, the volume, or a clone.
        until: VolumeId,
    },
    /// How much space these volumes and snapshots keep in use, or all if none is named: [`Answer::Space`]. That takes a read of
    /// all index entries of the volumes and of what is below them.
    Space {
        /// The volumes and snapshots.
        of: Vec<VolumeId>,
        /// Whether the count ends with [`CommandError::Busy`] when another long command comes, which otherwise waits for its end.
        gives_way: bool,
    },
    /// Verifies every reference: [`Answer::Check`].
    Check {
        /// Whether data is read and compared with its checksums, too.
        data: bool,
        /// Whether leaked space becomes free.
        repair: bool,
    },
}

/// Why a command was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CommandError {
    /// No volume or snapshot has this identifier.
    #[error("the volume does not exist")]
    NotFound,
    /// Another volume or snapshot has this name or UUID.
    #[error("a volume or snapshot with this name or UUID exists")]
    Exists,
    /// A name, size or block size is not allowed.
    #[error("{0}")]
    Invalid(&'static str),
    /// The operation is for volumes, not for snapshots, or the reverse.
    #[error("{0}")]
    WrongKind(&'static str),
    /// Another command runs on the volume.
    #[error("another operation on the volume is running")]
    Busy,
    /// The pool has no space.
    #[error("the pool is full")]
    NoSpace,
    /// The pool has less space that is neither used nor reserved than thick volumes would need.
    #[error("{needed} bytes of the pool would have to be reserved, and {free} are free")]
    NotReservable {
        /// Bytes that would have to be reserved, beyond what the volumes have already.
        needed: u64,
        /// Bytes that are neither used nor reserved.
        free: u64,
    },
    /// The pool is read-only after a failure of its store.
    #[error("the pool is read-only after a failure of its disk")]
    ReadOnly,
    /// The store failed.
    #[error("the disk of the pool failed")]
    Medium,
}

/// The result of a command that succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Done.
    Done,
    /// The new volume.
    Volume(VolumeId),
    /// The new snapshots, in the order of the command.
    Volumes(Vec<VolumeId>),
    /// The changed blocks as (first block, blocks), in ascending order.
    Changed(Vec<(u64, u64)>),
    /// The space of each volume and snapshot, by identifier. One that was created or deleted meanwhile is missing.
    Space(Vec<Space>),
    /// What a check found.
    Check(CheckReport),
}

/// The end of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommandReply {
    /// The command's tag.
    pub tag: Tag,
    /// The command's result.
    pub result: Result<Answer, CommandError>,
}

/// A volume or a snapshot, as callers see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume {
    /// Its name and UUID.
    pub label: Label,
    /// Its size.
    pub units: u64,
    /// Bytes of a block as its users see it.
    pub block_size: u32,
    /// What its writes do while the pool is full.
    pub when_full: WhenFull,
    /// Whether the pool keeps space for all of the volume: its writes never meet a full pool. Never true for a snapshot.
    pub is_thick: bool,
    /// The history that it shows.
    pub timeline: TimelineId,
    /// For a snapshot, where in the history it was taken; `None` for a volume.
    pub cut: Option<Cut>,
}

/// The data that a volume or snapshot keeps in use, headers of frames and the index aside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// The volume or snapshot.
    pub volume: VolumeId,
    /// What becomes free if it is deleted.
    pub own_bytes: u64,
    /// What other volumes or snapshots keep in use, too. Own and shared bytes together stay in use if all others are deleted.
    /// Data of a snapshot that a clone of it has written again is among the clone's, because it stays in use while the clone
    /// exists.
    pub shared_bytes: u64,
}

/// Damage that a check found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// A volume or snapshot that shows the damage; `None` if the place belongs to no volume, or to a part of the index.
    pub volume: Option<VolumeId>,
    /// The first damaged block of the volume.
    pub block: u64,
    /// The number of damaged blocks.
    pub blocks: u64,
    /// What is wrong.
    pub what: String,
}

/// Pieces of damage that are reported one by one.
const DAMAGE_MAX: usize = 10_000;

/// Adds damage to a list: to its last piece, if the two are adjacent and equal. A full list stays as it is.
pub(crate) fn add_damage(
    list: &mut Vec<Damage>,
    volume: Option<VolumeId>,
    block: u64,
    blocks: u64,
    what: &str,
) {
    if let Some(last) = list.last_mut()
        && (last.volume, last.block + last.blocks) == (volume, block)
        && last.what == what
    {
        last.blocks += blocks;
    } else if list.len() < DAMAGE_MAX {
        list.push(Damage { volume, block, blocks, what: what.to_owned() });
    }
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// References that were verified.
    pub references: u64,
    /// Blocks whose data was compared with its checksum.
    pub blocks_read: u64,
    /// Units that the manifest counts as used, and nothing refers to.
    pub leaked_units: u64,
    /// What is damaged.
    pub damage: Vec<Damage>,
    /// Whether pages of the index are among it.
    pub is_index_damaged: bool,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub const fn is_clean(&self) -> bool {
        self.leaked_units == 0 && self.damage.is_empty()
    }
}

/// A foreign disk on which a volume depends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignUse {
    /// The identifier in pieces and operations.
    pub id: ForeignId,
    /// The disk.
    pub foreign: Foreign,
}
