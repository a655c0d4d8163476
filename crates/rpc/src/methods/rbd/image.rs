//! `bdev_rbd_get_image_info`: what the cluster says about a disk's image. A method of Aryk only. Control context.

use super::{Control, Error, MODULE, Phase, Table};
use aryk_bdev_rbd as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_rbd_get_image_info",
        Phase::RunTime,
        "Asks the cluster for the snapshots, locks and features of a disk's image. Fails if the cluster does not answer in ten seconds.",
        get_image,
    );
}

/// Parameters of `bdev_rbd_get_image_info`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetImage {
    /// Name, alias or uuid of the disk.
    name: String,
}

/// An image of a Ceph cluster.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RbdImage")]
struct Image {
    /// Name of the pool.
    pool_name: String,
    /// Namespace in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace_name: Option<String>,
    /// Name of the image.
    image_name: String,
    /// The snapshot that the disk is.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_name: Option<String>,
    /// Size in bytes; that of the snapshot, if the disk is one.
    size: u64,
    /// The image's features, by Ceph's names.
    features: Vec<String>,
    /// Whether the image has the feature `exclusive-lock`.
    exclusive_lock: bool,
    /// Whether this disk holds the exclusive lock. librbd takes it for the first write.
    lock_owner: bool,
    /// All locks: the exclusive lock, and those of `rbd lock add`.
    locks: Vec<Lock>,
    /// The snapshots, the oldest first.
    snapshots: Vec<Snapshot>,
    /// Version of the LUKS header at the image's beginning: the image has been encrypted by `rbd encryption format`, by `aryk
    /// luks format`, or by a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    luks_version: Option<u16>,
}

/// A lock of an image.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RbdLock")]
struct Lock {
    /// Ceph's name of the client, such as `client.4123`.
    client: String,
    /// Text of the lock; `auto NUMBER` for the exclusive lock.
    id: String,
    /// Address of the client.
    address: String,
}

/// A snapshot of an image.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RbdSnapshot")]
struct Snapshot {
    /// Ceph's number of the snapshot.
    id: u64,
    /// Name of the snapshot.
    name: String,
    /// Size of the image in bytes, at the time of the snapshot.
    size: u64,
}

async fn get_image(control: &Control, p: GetImage) -> Result<Image, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let state = module::state(&bdev).await?;
    let module::Spec { pool, namespace, image, snapshot } = state.spec;
    let lock = |module::Lock { client, id, address }| Lock { client, id, address };
    let of_snapshot = |module::Snapshot { id, name, size }| Snapshot { id, name, size };
    Ok(Image {
        pool_name: pool,
        namespace_name: namespace,
        image_name: image,
        snapshot_name: snapshot,
        size: state.size,
        exclusive_lock: state.features.iter().any(|feature| feature == "exclusive-lock"),
        features: state.features,
        lock_owner: state.is_lock_owner,
        locks: state.locks.into_iter().map(lock).collect(),
        snapshots: state.snapshots.into_iter().map(of_snapshot).collect(),
        luks_version: state.luks_version,
    })
}
