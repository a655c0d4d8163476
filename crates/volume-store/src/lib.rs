//! The store of volumes on one base disk: superblocks, meta journal, segments. Any context; no I/O and no clock.
//!
//! The engine (`aryk-volume`) hands out operations on blobs and on its manifest. [`Store`] translates them into operations on the
//! base disk, which the caller runs, and the results back into answers.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `superblock` | what a pool is, and where its parts are; `layout` chooses the places |
//! | `record` | the records of the meta journal: checkpoints and edits |
//! | `journal` | writing them, and the superblock, in an order that a crash cannot break; `flush`: shared flushes |
//! | `open` | [`Opening`]: finding the state again; what is damaged, and what is refused |
//! | `format` | [`Formatting`]: a new pool; `foreign` recognises what it would destroy; `erase`: [`Erasing`], the end of a pool |
//! | `share` | the part of the base that a shard of a pool has |
//! | `store` | [`Store`]: an open pool |
//!
//! **A crash** may lose, reorder and tear (at 512 bytes) all writes that no flush has covered. The pool then opens with every
//! edit that was answered, possibly with the edits that were in flight, and with no others.
//!
//! **Damage** of one copy of any structure is repaired from the other one, and reported. Damage of both copies is an error.
//! Segments have no headers: what is in a blob is the engine's, with checksums of its own.
//!
//! `docs/formats/volume-pool.md` describes the format field by field.
#![forbid(unsafe_code)]

mod checksum;
mod claim;
mod disk;
mod erase;
mod error;
mod flush;
mod foreign;
mod format;
mod journal;
mod layout;
mod open;
#[cfg(test)]
mod ram;
mod record;
mod share;
mod store;
mod superblock;

pub use claim::{CLAIM_BYTES, CLAIM_PLACE, Claim, ClaimPace, Holder};
pub use disk::{DiskDone, DiskOp, DiskRequest, DiskTag};
pub use erase::Erasing;
pub use error::{Error, Finding, Structure};
pub use foreign::{END_BYTES, Foreign, START_BYTES, recognise};
pub use format::{Formatting, Looking};
pub use layout::Options;
pub use open::{Base, Expected, Opened, Opening};
pub use record::{HEADER_BYTES, Header, Kind, edits};
pub use share::{share_bytes, share_place, share_places};
pub use store::{Growth, Position, Store};
pub use superblock::{
    Area, COPY_BYTES, COPY_PLACES, Device, Extent, Invalid, PLACES as SUPERBLOCK_PLACES, Place,
    SEGMENT_BYTES, SUPERBLOCK_BYTES, Superblock,
};
