//! Requests and their replies: the interface between the engine and its caller. Any context.
//!
//! Data is in scatter lists, which the caller keeps in place until the reply. Places and lengths are in units of 512 bytes; for a
//! volume with blocks of 4,096 bytes the caller passes multiples of eight.

use crate::{BLOCK, BlobId, ForeignId, VolumeId};
use aryk_dma::Sgl;

/// The caller's identifier of a request or a command. The reply has the same tag; the engine does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u64);

/// The operation of a request.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Reads units into memory.
    Read {
        /// The memory, as long as the units.
        data: Sgl,
    },
    /// Finds the data of units: the caller reads it from where the reply says ([`Reply::extents`]), for which it has a
    /// [`crate::Reader`].
    Locate,
    /// Writes memory to units.
    Write {
        /// The memory, as long as the units.
        data: Sgl,
        /// Whether the reply says that the write is durable, not only done.
        fua: bool,
    },
    /// Makes units read as zeroes.
    Zero {
        /// Whether blocks that the units cover only in part may keep their data (a discard).
        whole_blocks: bool,
        /// Whether the reply says that the zeroes are durable.
        fua: bool,
    },
    /// Makes every write durable that was answered before this request. Has no units.
    Flush,
}

/// A request to a volume.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The caller's identifier.
    pub tag: Tag,
    /// The volume or the snapshot.
    pub volume: VolumeId,
    /// The first unit.
    pub unit: u64,
    /// The number of units.
    pub units: u64,
    /// The operation.
    pub action: Action,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request has no units, or memory of another length.
    Invalid,
    /// The request reaches beyond the end of the volume.
    OutOfRange,
    /// The volume is a snapshot, or the pool is read-only after a failure.
    ReadOnly,
    /// The pool is full, and the volume reports this ([`crate::WhenFull::Fail`]).
    NoSpace,
    /// The store failed, or returned data that does not match its checksum.
    Medium,
    /// The caller has aborted the request ([`crate::Pool::abort`]). A change may have an effect, also later.
    Aborted,
    /// The volume does not exist.
    Removed,
    /// A part of the data that was to be located is on a foreign disk: the caller submits a read instead.
    Foreign,
}

/// A part of a read that the caller does itself: the data is in a foreign disk, and nowhere in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForeignPiece {
    /// The disk.
    pub disk: ForeignId,
    /// The first unit of the disk.
    pub disk_unit: u64,
    /// The first unit of the request that gets the data, counted from the request's start.
    pub at: u64,
    /// The number of units.
    pub units: u64,
}

/// The answer to a request. For a read, memory has all data except that of the foreign pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The request's tag.
    pub tag: Tag,
    /// The request's result.
    pub status: Status,
    /// What the caller reads from foreign disks, in ascending order; empty for all but successful reads of clones of foreign
    /// disks. Give the list back by [`crate::Pool::recycle`], so that it is not allocated for each reply.
    pub foreign: Vec<ForeignPiece>,
    /// Where the data is; empty for all but a successful [`Action::Locate`]. It stays there until [`crate::Pool::give_back`].
    pub extents: Extents,
}

impl Reply {
    pub(crate) const fn without_data(tag: Tag, status: Status) -> Self {
        let extents = Extents { list: Vec::new(), checksums: Vec::new() };
        Self { tag, status, foreign: Vec::new(), extents }
    }
}

/// Where the data of a request is, in ascending order and without gaps.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Extents {
    pub(crate) list: Vec<Extent>,
    /// Of the blocks that the store has, in their order.
    pub(crate) checksums: Vec<u32>,
}

/// Blocks that lie side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// The first block of the volume.
    pub(crate) block: u64,
    pub(crate) blocks: u32,
    /// `None`: they read as zeroes.
    pub(crate) place: Option<ExtentPlace>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExtentPlace {
    pub(crate) blob: BlobId,
    pub(crate) unit: u32,
    /// The byte of the store's disk.
    pub(crate) offset: u64,
}

impl Extents {
    /// Asks for the byte of the store's disk at which each extent begins, by its blob, its first unit and its bytes.
    pub fn place(&mut self, offset: impl Fn(BlobId, u32, u32) -> u64) {
        for extent in &mut self.list {
            if let Some(place) = &mut extent.place {
                place.offset = offset(place.blob, place.unit, extent.blocks * BLOCK);
            }
        }
    }
}
