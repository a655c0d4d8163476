//! `driver_specific` of `bdev_get_bdevs`: the properties that only disks of one module have. Control context.

use crate::params::Count;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;
use uuid::Uuid;

/// A module's description of a disk: one member at most, with the module's name.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
#[schemars(rename = "DriverSpecific")]
pub(crate) struct Details {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aio: Option<Aio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crypto: Option<Crypto>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_disk: Option<ErrorDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub luks: Option<Luks>,
    /// A volume or a snapshot of a pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lvol: Option<Lvol>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub malloc: Option<Malloc>,
    /// Path selection of a disk of an NVMe controller: always `active_passive`, since it has one path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mp_policy: Option<&'static str>,
    /// A disk of an NVMe controller: its paths, of which there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvme: Option<[super::nvme::DiskDetails; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passthru: Option<Passthru>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rbd: Option<Rbd>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uring: Option<Uring>,
    /// Not a member of `driver_specific`: reported with the members that all disks have.
    #[serde(skip)]
    pub preferred: Preferred,
}

/// Preferred sizes of writes and unmaps, in blocks: reported, without effect. 0 means no preference.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub(crate) struct Preferred {
    pub preferred_write_alignment: u32,
    pub preferred_write_granularity: u32,
    pub optimal_write_size: u32,
    pub preferred_unmap_alignment: u32,
    pub preferred_unmap_granularity: u32,
}

/// A disk of `bdev_aio_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "AioDetails")]
pub(crate) struct Aio {
    /// Whether the block size was set explicitly.
    pub block_size_override: bool,
    /// Whether unmapped blocks are deallocated in the file.
    pub fallocate: bool,
    /// Path of the file or block device.
    pub filename: PathBuf,
    /// Whether writes are refused.
    pub readonly: bool,
}

/// A disk of `bdev_crypto_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "CryptoDetails")]
pub(crate) struct Crypto {
    /// Name of the base disk.
    pub base_bdev_name: String,
    /// Name of the disk.
    pub name: String,
    /// Name of the key.
    pub key_name: String,
    /// The options of dm-crypt's `aes-xts-plain64`, if the disk is encrypted so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plain64: Option<Plain64>,
    /// The rotation of the key, while it is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rekey: Option<Rekey>,
}

/// The rotation of a disk's key.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "CryptoRekeyDetails")]
pub(crate) struct Rekey {
    /// Name of the new key.
    pub key_name: String,
    /// `running`, `stopped`, `failed`, or for a moment `complete`.
    pub state: &'static str,
    /// Why the rotation has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Blocks that have the new key.
    pub done_blocks: u64,
    /// Blocks of the disk.
    pub num_blocks: u64,
    /// Blocks of which it is unknown what is stored, after an error: requests for them fail until the rotation continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<Unavailable>,
}

/// Blocks of a disk.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "CryptoUnavailable")]
pub(crate) struct Unavailable {
    /// The first block.
    pub lba: u64,
    /// Number of blocks.
    pub num_blocks: u64,
}

/// The options of dm-crypt's `aes-xts-plain64`, as in `bdev_crypto_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "CryptoPlain64Details")]
pub(crate) struct Plain64 {
    /// Bytes that are encrypted together.
    pub sector_size: u32,
    /// Added to the number of a sector, in units of 512 bytes.
    pub iv_offset: Count,
    /// Whether sectors are counted in units of their own size instead of 512 bytes.
    pub iv_large_sectors: bool,
}

/// A disk of `bdev_delay_create`. Latencies in microseconds.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "DelayDetails")]
pub(crate) struct Delay {
    /// Additional latency of most reads.
    pub avg_read_latency: Count,
    /// Additional latency of most writes.
    pub avg_write_latency: Count,
    /// Name of the base disk.
    pub base_bdev_name: String,
    /// Name of the disk.
    pub name: String,
    /// Additional latency of 1 % of the reads.
    pub p99_read_latency: Count,
    /// Additional latency of 1 % of the writes.
    pub p99_write_latency: Count,
}

/// A disk of `bdev_error_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "ErrorDetails")]
pub(crate) struct ErrorDisk {
    /// Name of the base disk.
    pub base_bdev: String,
}

/// A disk of `bdev_luks_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "LuksDetails")]
pub(crate) struct Luks {
    /// Name of the disk that has the header.
    pub base_bdev_name: String,
    /// Name of the disk.
    pub name: String,
    /// `luks1` or `luks2`.
    pub version: &'static str,
    /// The identifier in the header; missing if the header has an invalid one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// The key slot that the key file has opened.
    pub key_slot: u32,
}

/// A disk of `bdev_malloc_create` that was created again when the daemon started.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "MallocDetails")]
pub(crate) struct Malloc {
    /// Its contents were lost with the previous daemon.
    pub emptied: bool,
}

/// A disk of `bdev_passthru_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "PassthruDetails")]
pub(crate) struct Passthru {
    /// Name of the base disk.
    pub base_bdev_name: String,
    /// Name of the disk.
    pub name: String,
}

/// A disk of `bdev_rbd_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "RbdDetails")]
pub(crate) struct Rbd {
    /// Name of the pool.
    pub pool_name: String,
    /// Name of the image, or `IMAGE@SNAPSHOT`.
    pub rbd_name: String,
    /// Namespace in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_name: Option<String>,
    /// Name of the registered client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_name: Option<String>,
    /// Ceph's user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// A disk of `bdev_split_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "SplitDetails")]
pub(crate) struct Split {
    /// Name of the base disk.
    pub base_bdev: String,
    /// The first block of the part in the base disk.
    pub offset_blocks: u64,
}

/// A volume or a snapshot of a pool.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "LvolDetails")]
pub(crate) struct Lvol {
    /// UUID of the pool.
    pub lvol_store_uuid: Uuid,
    /// Name of the pool's disk.
    pub base_bdev: String,
    /// Whether the volume takes space when it is written only. False if the pool reserves space for it.
    pub thin_provision: bool,
    /// Its size in clusters: the space that it has for itself is not known.
    pub num_allocated_clusters: u64,
    /// Whether it is a snapshot.
    pub snapshot: bool,
    /// Whether it has the blocks of a snapshot, as far as it was not written since.
    pub clone: bool,
    /// Whether it has the blocks of a disk of another module, as far as it was not written since.
    pub esnap_clone: bool,
    /// UUID of the disk of another module on which it depends, directly or by snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_snapshot_name: Option<String>,
    /// Name of the snapshot whose blocks it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_snapshot: Option<String>,
    /// Names of the volumes and snapshots that have the blocks of this snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clones: Option<Vec<String>>,
}

/// A disk of `bdev_uring_create`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(rename = "UringDetails")]
pub(crate) struct Uring {
    /// Path of the file or block device.
    pub filename: PathBuf,
}
