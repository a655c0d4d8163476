//! The details of one disk, for the panel of the web page that a click on a disk opens. Control context; pure except for reading
//! the inventory.

use crate::{Inventory, Snapshot};
use aryk_bdev::{Bdev, Coarse, Failure, Op, OpSummary, RateLimits, Summary};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// Details of a disk. Sizes in bytes; rates per second, over the time between two snapshots.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskDetails {
    name: String,
    kind: &'static str,
    uuid: String,
    /// The file or block device below the disk, if there is one.
    file: Option<PathBuf>,
    bytes: u64,
    block_bytes: u32,
    store_block_bytes: u32,
    read_only: bool,
    claimed_by: Option<String>,
    users: Vec<User>,
    /// The disk's own limits, then those of its groups from the innermost to the outermost.
    limits: Vec<LimitSet>,
    operations: Vec<Operation>,
    /// Requests that completed between the two snapshots, by latency.
    reads: [u64; Coarse::BUCKETS],
    writes: [u64; Coarse::BUCKETS],
    in_flight: u64,
    in_flight_max: u64,
    waiting: u64,
    /// All requests so far that took longer than the disk's deadline.
    overdue: u64,
    /// The last request that the store failed.
    last_failure: Option<Failed>,
}

/// A request that the store failed.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Failed {
    op: &'static str,
    lba: u64,
    blocks: u64,
    error: String,
    /// Milliseconds since 1970.
    at_ms: u64,
}

impl Failed {
    fn new(failure: &Failure) -> Self {
        let since = failure.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            op: failure.op.name(),
            lba: failure.lba.0,
            blocks: failure.blocks.0,
            error: failure.error().to_string(),
            at_ms: since.as_millis() as u64,
        }
    }
}

/// A controller through which a VM uses the disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct User {
    controller: String,
    kind: &'static str,
    connected: bool,
}

/// Rate limits per second; 0 means no limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct LimitSet {
    /// The group that sets the limits; `None` for the disk itself.
    group: Option<String>,
    ops: u64,
    read_ops: u64,
    write_ops: u64,
    bytes: u64,
    read_bytes: u64,
    write_bytes: u64,
}

impl LimitSet {
    const fn new(group: Option<String>, limits: &RateLimits) -> Self {
        Self {
            group,
            ops: limits.ios,
            read_ops: limits.read_ios,
            write_ops: limits.write_ios,
            bytes: limits.bytes,
            read_bytes: limits.read_bytes,
            write_bytes: limits.write_bytes,
        }
    }
}

/// The counts of one kind of request: per second, and in total.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Operation {
    op: &'static str,
    ops: u64,
    bytes: u64,
    mean_ns: Option<u64>,
    max_ns_ever: u64,
    ops_ever: u64,
    errors_ever: u64,
}

impl Operation {
    /// Returns `None` for an optional kind without any request so far.
    fn between(op: Op, old: Option<&Summary>, new: &Summary, seconds: f64) -> Option<Self> {
        let ever = new.op(op);
        let grown = old.map_or(OpSummary::default(), |old| *new.since(old).op(op));
        let per_second = |count: u64| (count as f64 / seconds).round() as u64;
        let is_used = ever.ops + ever.errors > 0 || matches!(op, Op::Read | Op::Write);
        is_used.then(|| Self {
            op: op.name(),
            ops: per_second(grown.ops),
            bytes: per_second(grown.bytes.0),
            mean_ns: grown.latency_ns.checked_div(grown.ops),
            max_ns_ever: ever.latency_ns_max,
            ops_ever: ever.ops,
            errors_ever: ever.errors,
        })
    }
}

impl DiskDetails {
    /// Details of the disk `name` as of the snapshot `now`, with rates since `before`. Returns `None` if there is no such disk.
    pub fn new(
        inventory: &dyn Inventory,
        name: &str,
        before: Option<&Snapshot>,
        now: &Snapshot,
    ) -> Option<Self> {
        let bdev = inventory.disks().into_iter().find(|bdev| bdev.name() == name)?;
        let disk = now.disks.iter().find(|disk| disk.name == name)?;
        let old = before
            .and_then(|snapshot| snapshot.disks.iter().find(|disk| disk.name == name))
            .map(|disk| &disk.counts);
        let seconds = before.map_or(1.0, |before| now.seconds_since(before));
        let grown = old.map_or_else(Summary::default, |old| disk.counts.since(old));
        let geometry = bdev.geometry();
        let users = now
            .controllers
            .iter()
            .map(|of_controller| &of_controller.controller)
            .filter(|c| c.disks.iter().any(|d| d == name));
        Some(Self {
            name: name.to_owned(),
            kind: disk.product,
            uuid: bdev.identity().uuid.to_string(),
            file: inventory.file(name),
            bytes: disk.size.0,
            block_bytes: geometry.block_size,
            store_block_bytes: geometry.physical_block_size,
            read_only: bdev.device().is_read_only(),
            claimed_by: bdev.claimed_by(),
            users: users
                .map(|c| User { controller: c.name.clone(), kind: c.kind, connected: c.connected })
                .collect(),
            limits: limits(&bdev),
            operations: Op::ALL
                .into_iter()
                .filter_map(|op| Operation::between(op, old, &disk.counts, seconds))
                .collect(),
            reads: *grown.reads.counts(),
            writes: *grown.writes.counts(),
            in_flight: disk.counts.in_flight,
            in_flight_max: disk.in_flight_max,
            waiting: disk.counts.waiting,
            overdue: disk.counts.overdue,
            last_failure: disk.last_failure.as_ref().map(Failed::new),
        })
    }
}

fn limits(bdev: &Arc<Bdev>) -> Vec<LimitSet> {
    let group = bdev.qos_group();
    let outwards = std::iter::successors(group.as_ref(), |group| group.parent());
    let own = LimitSet::new(None, &bdev.qos_limits());
    let groups = outwards.map(|group| LimitSet::new(Some(group.name().to_owned()), &group.limits()));
    std::iter::once(own).chain(groups).collect()
}
