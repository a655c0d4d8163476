//! Volumes with snapshots and clones: the engine, without I/O and clock. Any context.
#![forbid(unsafe_code)]

mod active;
mod admin;
mod buffers;
mod check;
mod checksum;
mod clean;
mod codec;
mod command;
mod compact;
mod dead;
mod dense;
pub mod frame;
mod ids;
mod keeper;
mod levels;
mod loading;
mod log;
mod manifest;
mod moving;
mod outbox;
mod partition;
mod pool;
mod pressure;
mod read;
mod reader;
mod rebuild;
mod recover;
mod request;
mod reserve;
mod room;
mod scrub;
mod settings;
mod shard;
mod space;
mod store;
mod tasks;
mod verify;
mod write;

pub use aryk_volume_index::{BlobId, Commit, Pieces, TimelineId};
pub use command::{
    Answer, CheckReport, Command, CommandError, CommandReply, Damage, Foreign, ForeignUse, Label, Origin,
    Space, Volume, WhenFull,
};
pub use ids::{
    BLOCK, BLOCK_UNITS, Cut, ForeignId, PARTITIONS, RANGE_BLOCKS, STRIPE_RANGES, UNIT, VOLUME_UNITS_MAX,
    VolumeId,
};
pub use pool::{Pool, Recovered};
pub use reader::{Read, ReadEnd, ReadId, ReadKey, Reader};
pub use rebuild::{Progress, Rebuild, RebuildError, RebuildReport, Recipe};
pub use request::{Action, Extents, ForeignPiece, Reply, Request, Status, Tag};
pub use scrub::Scrub;
pub use settings::{Form, LogPlace, OpenError, Settings, State, Stats};
pub use shard::{Piece, Shard, WriteGate, pieces};
pub use store::{Done, OpId, StoreError, StoreFacts, StoreOp};

#[cfg(test)]
mod tests;
