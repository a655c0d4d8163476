//! `driver_specific` of `bdev_get_bdevs`: what a module's disks have beyond what all disks have. Control context.

use crate::params::Count;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;

/// What a disk's module says of it: one member at most, of the module's name.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
#[schemars(rename = "DriverSpecific")]
pub(crate) struct Details {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aio: Option<Aio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_disk: Option<ErrorDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub malloc: Option<Malloc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passthru: Option<Passthru>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uring: Option<Uring>,
    /// Not of its module's own: told with what all disks have.
    #[serde(skip)]
    pub preferred: Preferred,
}

/// What is preferred of writes and unmaps, in blocks: told, without effect. 0 where nothing is.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub(crate) struct Preferred {
    pub preferred_write_alignment: u32,
    pub preferred_write_granularity: u32,
    pub optimal_write_size: u32,
    pub preferred_unmap_alignment: u32,
    pub preferred_unmap_granularity: u32,
}

/// Of a disk that `bdev_aio_create` made.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "AioDetails")]
pub(crate) struct Aio {
    /// Whether its block size was given.
    pub block_size_override: bool,
    /// Whether holes are punched.
    pub fallocate: bool,
    /// The file, or block device.
    pub filename: PathBuf,
    /// Whether writes are refused.
    pub readonly: bool,
}

/// Of a disk that `bdev_delay_create` made. Latencies in microseconds.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "DelayDetails")]
pub(crate) struct Delay {
    /// What most reads take longer.
    pub avg_read_latency: Count,
    /// What most writes take longer.
    pub avg_write_latency: Count,
    /// The other disk.
    pub base_bdev_name: String,
    /// Its own name.
    pub name: String,
    /// What one read of a hundred takes longer.
    pub p99_read_latency: Count,
    /// What one write of a hundred takes longer.
    pub p99_write_latency: Count,
}

/// Of a disk that `bdev_error_create` made.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "ErrorDetails")]
pub(crate) struct ErrorDisk {
    /// The other disk.
    pub base_bdev: String,
}

/// Of a disk that `bdev_malloc_create` made, and that was made again when the daemon started.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "MallocDetails")]
pub(crate) struct Malloc {
    /// What it held went with the daemon before.
    pub emptied: bool,
}

/// Of a disk that `bdev_passthru_create` made.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "PassthruDetails")]
pub(crate) struct Passthru {
    /// The other disk.
    pub base_bdev_name: String,
    /// Its own name.
    pub name: String,
}

/// Of a disk that `bdev_split_create` made.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "SplitDetails")]
pub(crate) struct Split {
    /// The other disk.
    pub base_bdev: String,
    /// Where it begins in that disk.
    pub offset_blocks: u64,
}

/// Of a disk that `bdev_uring_create` made.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "UringDetails")]
pub(crate) struct Uring {
    /// The file, or block device.
    pub filename: PathBuf,
}
