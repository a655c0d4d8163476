//! The block layer: what a disk is, who has it open, and how requests reach it.
//!
//! Two faces:
//! - what callers hold: a [`Descriptor`] (a disk that is open) and its [`BdevChannel`]s, one for each reactor and use. A channel
//!   checks, queues, splits and counts requests, so that
//! - what modules implement, [`Device`] and [`Channel`], sees only requests that are valid, within its limits and its depth.
//!
//! | context | what runs in it |
//! | --- | --- |
//! | control | [`Registry`], opening, preparing reactors, removing, resizing, resetting, reading statistics |
//! | reactor | channels: private to their opener, on one reactor, never locked |
//!
//! **A request's life.** [`BdevChannel::submit`] checks it and takes a slot for it; the slot's key is the tag of what goes
//! to the module, in as many pieces as the module's limits ask for. While the module's depth is used up, requests wait in
//! the channel's one FIFO. [`BdevChannel::poll`] brings completions back, each exactly once. No layer below refuses a
//! request or queues it again.
//!
//! **Removal while requests run is ordinary**: new ones fail with [`Status::Removed`], running ones complete, every opener
//! receives an [`Event`], and the disk goes when the last has closed it.
#![forbid(unsafe_code)]

mod async_channel;
mod base;
mod bdev;
mod bdev_channel;
mod cell;
mod channel;
mod deadline;
mod device;
mod env;
mod failure;
mod forward;
mod gather;
mod histogram;
mod io;
mod layers;
mod memory;
mod observers;
mod outbox;
mod qos;
mod ranges;
mod registry;
mod ring;
mod sampling;
mod stats;
mod summary;
mod units;

pub use aryk_qos::{Limits as RateLimits, LimitsError as RateLimitsError};
pub use async_channel::AsyncChannel;
pub use base::Base;
pub use bdev::{Bdev, Descriptor, Event, Identity, OpeningId, RemovalState};
pub use bdev_channel::{BdevChannel, CreditPool};
pub use cell::open_channels;
pub use channel::Channel;
pub use deadline::{Deadline, OnDeadline};
pub use device::{BaseEvent, BoxFuture, Decorator, Device, Geometry, Limits, OpenError, Stay};
pub use env::Env;
pub use failure::{DeviceError, Failure, Failures};
pub use forward::{ForwardChannel, OpenOwn};
pub use gather::{Part, gather};
pub use histogram::{Coarse, Histogram, Recording, SharedHistogram};
pub use io::{Completion, Io, Op, OpSet, Status, Tag};
pub use layers::{TimeLayer, Times};
pub use memory::{
    Attachment, MEMORY_CLIENTS_MAX, Memory, MemoryClient, MemoryClientInfo, MemoryError, MemoryLookup,
    MemoryWithout, Place, RegisterError,
};
pub use observers::Change;
pub use outbox::Outbox;
pub use qos::{GROUP_DEPTH, OpenerQos, QosGroup, QosGroups};
pub use ranges::Exclusion;
pub use registry::{Access, Error, Registry, RemovalStep};
pub use ring::{RING_BATCH, RingReceiver, RingSender, ring};
pub use sampling::QueueDepth;
pub use stats::{Clear, OpStats, Stats};
pub use summary::{LayerSummary, OpSummary, Summary};
pub use units::{Blocks, Bytes, Lba};
