//! The objects that the metrics report on. Control context.

use crate::Collector;
use aryk_bdev::{Bdev, Memory, QosGroup};
use aryk_reactor::Handle;
use std::path::PathBuf;
use std::sync::Arc;

/// The daemon's reactors, disks, groups and controllers.
pub trait Inventory {
    /// The reactors, by core.
    fn reactors(&self) -> Vec<Handle>;
    /// The disks, by age.
    fn disks(&self) -> Vec<Arc<Bdev>>;
    /// The groups of disks, each after its parent.
    fn groups(&self) -> Vec<Arc<QosGroup>>;
    /// The controllers, by name.
    fn controllers(&self) -> Vec<Controller>;
    /// The memory of all guests.
    fn memory(&self) -> &Memory;
    /// The file or block device below a disk, if there is one.
    fn file(&self, disk: &str) -> Option<PathBuf>;
    /// The collector that takes the snapshots.
    fn collector(&self) -> &Collector;
}

/// A controller, through which a VM uses disks.
#[derive(Clone, Debug)]
pub struct Controller {
    /// The controller's name.
    pub name: String,
    /// The kind: `blk` or `scsi`.
    pub kind: &'static str,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// Whether a front-end is connected.
    pub connected: bool,
    /// Running queues.
    pub queues: u64,
    /// Sessions of front-ends so far.
    pub sessions: u64,
    /// Sessions that ended with an error.
    pub failed_sessions: u64,
    /// Protocol errors of the guest and the front-end, by kind.
    pub errors: [(&'static str, u64); 3],
}
