//! The objects that the metrics report on. Control context.

use crate::Collector;
use aryk_bdev::{Bdev, Histogram, Memory, QosGroup};
use aryk_reactor::Handle;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A future of the control context.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

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
    /// The NVMe controllers that the daemon drives, by name.
    fn nvme(&self) -> Vec<Nvme>;
    /// The controllers of other hosts that the daemon uses, by name.
    fn remotes(&self) -> Vec<Remote>;
    /// The clients of Ceph clusters.
    fn rbd(&self) -> Vec<RbdClient>;
    /// The hosts that use shared disks.
    fn hosts(&self) -> Vec<Host>;
    /// The pools of volumes, by age.
    fn pools(&self) -> LocalFuture<'_, Vec<Pool>>;
    /// The memory of all guests.
    fn memory(&self) -> &Memory;
    /// The file or block device below a disk, if there is one.
    fn file(&self, disk: &str) -> Option<PathBuf>;
    /// The collector that takes the snapshots.
    fn collector(&self) -> &Collector;
}

/// An NVMe controller that the daemon drives itself. Counts since it was attached.
#[derive(Clone, Debug, Default)]
pub struct Nvme {
    /// The controller's name.
    pub name: String,
    /// Whether it serves requests.
    pub is_ready: bool,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// Degrees Celsius, 0 for less; `None` if not known.
    pub celsius: Option<u64>,
    /// Resets.
    pub resets: u64,
    /// Commands that were aborted because they were late.
    pub aborts: u64,
    /// Commands that were tried again.
    pub retries: u64,
    /// Errors and health warnings that the controller reported by itself.
    pub warnings: u64,
    /// I/O commands that the controller answered by an error: the types of their status codes, each with its number.
    pub errors: Vec<(&'static str, u64)>,
    /// I/O commands.
    pub commands: u64,
    /// Writes to doorbell registers of I/O queues.
    pub doorbells: u64,
    /// Commands in flight.
    pub in_flight: u64,
    /// Pages of bounce buffers.
    pub pool_pages: u64,
    /// The fewest pages that were free.
    pub pool_free_min: u64,
}

/// A controller of another host, which the daemon uses over NVMe/TCP or NVMe/RDMA. Counts since it was attached.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The controller's name.
    pub name: String,
    /// Its paths.
    pub paths: Vec<RemotePath>,
    /// Requests that were submitted again after a loss.
    pub resubmitted: u64,
    /// Requests that failed, because a request that was submitted again could have brought old data back.
    pub failed: u64,
}

/// A path to a controller of another host. Counts since it was added.
#[derive(Clone, Copy, Debug)]
pub struct RemotePath {
    /// Where the target listens.
    pub address: SocketAddr,
    /// Whether it is connected.
    pub is_connected: bool,
    /// Times that its connections were lost.
    pub losses: u64,
}

/// A client of a Ceph cluster. Counts since it was connected.
#[derive(Clone, Debug, Default)]
pub struct RbdClient {
    /// Its name, which no other client has.
    pub name: String,
    /// Disks that use it.
    pub disks: u64,
    /// Whether the cluster has excluded it.
    pub is_blocklisted: bool,
    /// Images that were opened.
    pub opens: u64,
    /// Images that could not be opened.
    pub failed_opens: u64,
    /// Images that librbd did not close in time.
    pub quarantined: u64,
    /// Requests that librbd has failed: the meanings of the errno, each with its number.
    pub errors: Vec<(&'static str, u64)>,
}

/// A host that uses the disks of a subsystem. Counts since it connected.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The subsystem.
    pub subsystem: String,
    /// The host's name.
    pub name: String,
    /// The identifier of its controller: a host may have several.
    pub controller: u16,
    /// I/O queues.
    pub queues: u64,
    /// Reads.
    pub reads: HostWork,
    /// Writes.
    pub writes: HostWork,
    /// Requests of other kinds.
    pub others: HostWork,
    /// Requests that have failed.
    pub failed: u64,
}

impl Host {
    /// The work of all kinds, each with its name.
    pub fn work(&self) -> [(&'static str, &HostWork); 3] {
        [("read", &self.reads), ("write", &self.writes), ("other", &self.others)]
    }
}

/// Requests of a host of one kind that have ended.
#[derive(Clone, Debug, Default)]
pub struct HostWork {
    /// How many.
    pub requests: u64,
    /// The bytes that they were about.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds: from the arrival of the command to the end of its request.
    pub latency_ns: u64,
    /// Their latencies, in nanoseconds.
    pub latencies: Histogram,
}

/// A pool of volumes. Counts since it was opened.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Whether its disk can be written.
    pub is_writable: bool,
    /// Volumes.
    pub volumes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Space for data, in bytes.
    pub total_bytes: u64,
    /// Space that is free, in bytes, or will be when deleted data has been cleaned.
    pub free_bytes: u64,
    /// Sizes of all volumes, in bytes.
    pub provisioned_bytes: u64,
    /// Bytes that users have written.
    pub user_write_bytes: u64,
    /// Bytes that users have read.
    pub user_read_bytes: u64,
    /// Bytes that were written to the disk: for what, and how many.
    pub written: [(&'static str, u64); 5],
    /// Bytes that were read from the disk: for what, and how many.
    pub read: [(&'static str, u64); 3],
    /// Space in bytes: for what, and how much.
    pub space: [(&'static str, u64); 3],
    /// Lookups of index pages that found them in memory.
    pub cache_hits: u64,
    /// Lookups of index pages that did not.
    pub cache_misses: u64,
    /// Bytes of log that are not in the index yet.
    pub backlog_bytes: u64,
    /// Bytes of index that are to be merged.
    pub debt_bytes: u64,
    /// Requests that wait for space or for the backlog.
    pub waiting_requests: u64,
    /// What a byte that is written costs because of the backlog: percent of a byte that is merged into the index.
    pub price_percent: u64,
    /// Ranges of 4 MiB whose blocks compaction has written in a row.
    pub gathered_ranges: u64,
    /// Blocks whose data did not match its checksum.
    pub damaged_blocks: u64,
    /// Bytes that the scrub has read.
    pub scrub_read_bytes: u64,
    /// Blocks of data and pages of the index that the scrub has found damaged.
    pub scrub_damaged_blocks: u64,
    /// Time at which the latest complete pass of the scrub began, in seconds since 1970.
    pub scrub_complete_since: Option<u64>,
    /// The space of volumes and snapshots, as it was counted last; empty before.
    pub members: Vec<PoolMember>,
    /// The time since that count.
    pub counted_ago: Option<Duration>,
}

/// A volume or a snapshot of a pool.
#[derive(Clone, Debug)]
pub struct PoolMember {
    /// Its name in the pool.
    pub name: String,
    /// Whether it is a snapshot.
    pub is_snapshot: bool,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of data that become free if it is deleted.
    pub own_bytes: u64,
    /// Bytes of data that it shows and others keep in use, too.
    pub shared_bytes: u64,
}

impl PoolMember {
    /// `snapshot` or `volume`.
    pub const fn kind(&self) -> &'static str {
        if self.is_snapshot { "snapshot" } else { "volume" }
    }
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
