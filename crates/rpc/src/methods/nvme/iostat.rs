//! `bdev_nvme_get_path_iostat`: what the paths of a disk have carried. Control context.

use super::describe::Trid;
use super::{Control, Error, Phase, Table, paths};
use aryk_bdev_nvme::fabrics::{PathInfo, PathTraffic};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_get_path_iostat",
        Phase::RunTime,
        "Reports what each path of a disk of another host has carried.",
        get,
    );
}

/// Parameters of `bdev_nvme_get_path_iostat`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfDisk {
    /// Name of the disk.
    name: String,
}

/// The result of `bdev_nvme_get_path_iostat`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePathIostat")]
struct PathIostat {
    /// Name of the disk.
    name: String,
    /// The paths.
    stats: Vec<OfPath>,
}

/// A path, and what it has carried.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePathStat")]
struct OfPath {
    trid: Trid,
    stat: Stat,
}

/// Requests that a path has completed without failure, since the path was added. Times in ticks, as in `bdev_get_iostat`, from
/// the submission on the path. Copies are 0: there are none.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmePathCounts")]
struct Stat {
    bytes_read: u64,
    num_read_ops: u64,
    bytes_written: u64,
    num_write_ops: u64,
    bytes_unmapped: u64,
    num_unmap_ops: u64,
    bytes_copied: u64,
    num_copy_ops: u64,
    read_latency_ticks: u64,
    max_read_latency_ticks: u64,
    min_read_latency_ticks: u64,
    write_latency_ticks: u64,
    max_write_latency_ticks: u64,
    min_write_latency_ticks: u64,
    unmap_latency_ticks: u64,
    max_unmap_latency_ticks: u64,
    min_unmap_latency_ticks: u64,
    copy_latency_ticks: u64,
    max_copy_latency_ticks: u64,
    min_copy_latency_ticks: u64,
}

impl Stat {
    fn new(PathTraffic { reads, writes, unmaps }: PathTraffic) -> Self {
        Self {
            bytes_read: reads.bytes,
            num_read_ops: reads.ops,
            bytes_written: writes.bytes,
            num_write_ops: writes.ops,
            bytes_unmapped: unmaps.bytes,
            num_unmap_ops: unmaps.ops,
            bytes_copied: 0,
            num_copy_ops: 0,
            read_latency_ticks: reads.latency_ns,
            max_read_latency_ticks: reads.latency_ns_max,
            min_read_latency_ticks: reads.latency_ns_min.unwrap_or_default(),
            write_latency_ticks: writes.latency_ns,
            max_write_latency_ticks: writes.latency_ns_max,
            min_write_latency_ticks: writes.latency_ns_min.unwrap_or_default(),
            unmap_latency_ticks: unmaps.latency_ns,
            max_unmap_latency_ticks: unmaps.latency_ns_max,
            min_unmap_latency_ticks: unmaps.latency_ns_min.unwrap_or_default(),
            copy_latency_ticks: 0,
            max_copy_latency_ticks: 0,
            min_copy_latency_ticks: 0,
        }
    }
}

async fn get(control: &Control, p: OfDisk) -> Result<PathIostat, Error> {
    let (controller, namespace) = paths::find(control, &p.name)?;
    let config = controller.config();
    let all = controller.traffic(namespace.nsid).await?;
    let of_path = |(path, traffic): (PathInfo, PathTraffic)| OfPath {
        trid: Trid::of_target(config.transport, path.address, config.subsystem.as_str()),
        stat: Stat::new(traffic),
    };
    Ok(PathIostat { name: p.name, stats: all.into_iter().map(of_path).collect() })
}
