//! What there is to be watched. Control context.

use crate::Observatory;
use aryk_bdev::{Bdev, QosGroup};
use aryk_reactor::Handle;
use std::path::PathBuf;
use std::sync::Arc;

/// Whoever knows what the daemon has.
pub trait Inventory {
    /// The reactors, by core.
    fn reactors(&self) -> Vec<Handle>;
    /// The disks, by age.
    fn disks(&self) -> Vec<Arc<Bdev>>;
    /// The groups of disks, each after its parent.
    fn groups(&self) -> Vec<Arc<QosGroup>>;
    /// The controllers, by name.
    fn controllers(&self) -> Vec<Controller>;
    /// The file or block device that a disk is in, if it is in one.
    fn file(&self, disk: &str) -> Option<PathBuf>;
    /// Who looks at all that.
    fn observatory(&self) -> &Observatory;
}

/// A controller, through which a machine reaches disks.
#[derive(Clone, Debug)]
pub struct Controller {
    /// Its name.
    pub name: String,
    /// What it is: `blk` or `scsi`.
    pub kind: &'static str,
    /// Its disks' names.
    pub disks: Vec<String>,
    /// Whether its machine is connected.
    pub connected: bool,
    /// Queues that run.
    pub queues: u64,
    /// Machines that have connected.
    pub sessions: u64,
    /// Sessions that ended by an error.
    pub failed_sessions: u64,
    /// What machines did wrong, by kind.
    pub errors: [(&'static str, u64); 3],
}
