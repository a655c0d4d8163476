//! vhost-user-scsi: disks of the block layer as the targets of a guest's SCSI host (virtio 1.2, section 5.6).
//!
//! `aryk-scsi` carries out the commands. This crate receives them from the guest, and attaches and detaches targets while the
//! guest runs.
#![forbid(unsafe_code)]

mod controller;
mod controllers;
mod events;
#[cfg(fuzzing)]
pub mod guest;
mod initiator;
mod manage;
mod moving;
mod queue;
mod requests;
mod wire;

pub use controller::Scsi;
pub use controllers::{Error, QUEUES, ScsiControllers};
pub use initiator::{BadInitiator, Initiator};
pub use queue::{Queue, Targets};
pub use wire::TARGETS;
