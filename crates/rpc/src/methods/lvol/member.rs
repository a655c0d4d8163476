//! `bdev_lvol_*` of volumes, snapshots and clones. Control context.

use super::{ClearMethod, failed, find, find_store, whole_clusters};
use crate::error::INTERNAL;
use crate::methods::volumes::{self, Attributes};
use crate::methods::{Control, Count, Error, Name, Phase, Table};
use aryk_bdev::Bytes;
use aryk_bdev_volume::{Member, NewVolume, Origin, Parent, Pool, WhenFull};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_lvol_create", Phase::RunTime, "Creates a volume in a pool.", create);
    table.add("bdev_lvol_snapshot", Phase::RunTime, "Takes a snapshot of a volume.", snapshot);
    table.add(
        "bdev_lvol_clone",
        Phase::RunTime,
        "Creates a volume with the content of a snapshot, without copying.",
        clone,
    );
    table.add(
        "bdev_lvol_clone_bdev",
        Phase::RunTime,
        "Creates a volume with the content of a disk of another module or another pool, without copying.",
        clone_bdev,
    );
    table.add("bdev_lvol_rename", Phase::RunTime, "Gives a volume or a snapshot another name.", rename);
    table.add("bdev_lvol_resize", Phase::RunTime, "Gives a volume another size.", resize);
    table.add(
        "bdev_lvol_set_read_only",
        Phase::RunTime,
        "Makes a volume read-only for ever: a snapshot of itself, under its name.",
        set_read_only,
    );
    table.add("bdev_lvol_delete", Phase::RunTime, "Deletes a volume or a snapshot.", delete);
    table.add(
        "bdev_lvol_inflate",
        Phase::RunTime,
        "Reserves space for all of a volume, and copies what it has of its snapshot. Returns when that is done.",
        inflate,
    );
    table.add(
        "bdev_lvol_decouple_parent",
        Phase::RunTime,
        "Copies what a clone has of its snapshot, after which it is independent. Returns when that is done.",
        decouple,
    );
    table.add(
        "bdev_lvol_set_parent",
        Phase::RunTime,
        "Makes a volume a clone of another snapshot. What it has for itself stays, and is copied. It must not be in use.",
        set_parent,
    );
    table.add(
        "bdev_lvol_set_parent_bdev",
        Phase::RunTime,
        "The same, with a disk of another module or another pool in place of the snapshot.",
        set_parent_bdev,
    );
    table.add("bdev_lvol_get_lvols", Phase::RunTime, "Lists the volumes and snapshots.", get);
}

/// Parameters of `bdev_lvol_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CreateLvol")]
struct Create {
    /// Name of the new volume.
    lvol_name: String,
    /// Its size in MiB, which is rounded up to whole clusters.
    size_in_mib: Count,
    /// Whether it takes space when it is written only. Default: the pool reserves space for all of it.
    #[serde(default)]
    thin_provision: bool,
    /// UUID of the pool.
    uuid: Option<String>,
    /// Name of the pool.
    lvs_name: Option<String>,
    /// Has no effect: blocks that were never written read as zeroes.
    #[serde(default, rename = "clear_method")]
    _clear_method: Option<ClearMethod>,
}

async fn create(control: &Control, p: Create) -> Result<Uuid, Error> {
    let pool = find_store(control, p.uuid.as_deref(), p.lvs_name.as_deref())?;
    check_name(&pool, &p.lvol_name)?;
    let bytes = whole_clusters(&pool, p.size_in_mib.0)?;
    let new = NewVolume {
        name: p.lvol_name,
        uuid: Uuid::new_v4(),
        bytes,
        block_size: block_size(&pool),
        origin: Origin::Empty,
        when_full: WhenFull::Fail,
        is_thick: !p.thin_provision,
    };
    Ok(volumes::create_volume(control, &pool, new).await.map_err(failed)?.uuid())
}

/// The block size of new volumes: that of the pool's disk, as in SPDK.
fn block_size(pool: &Pool) -> u32 {
    pool.base().geometry().block_size.clamp(512, 4096)
}

/// Refuses a name that another volume has.
fn check_name(pool: &Pool, name: &str) -> Result<(), Error> {
    match pool.members().iter().any(|member| member.name() == name) {
        true => Err(Error::errno(Errno::EXIST, format!("the pool '{}' has a volume '{name}'", pool.name()))),
        false => Ok(()),
    }
}

/// Parameters of `bdev_lvol_snapshot`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LvolSnapshot")]
struct Snapshot {
    /// UUID or alias of the volume.
    lvol_name: String,
    /// Name of the new snapshot.
    snapshot_name: String,
}

async fn snapshot(control: &Control, p: Snapshot) -> Result<Uuid, Error> {
    let (pool, member) = find(control, &p.lvol_name)?;
    check_name(&pool, &p.snapshot_name).map_err(failed)?;
    let wanted = vec![(member.id, p.snapshot_name, Uuid::new_v4())];
    let made = volumes::snapshot(control, &pool, wanted).await.map_err(failed)?;
    made.first().map(Member::uuid).ok_or_else(|| Error::Internal("the snapshot is gone".into()))
}

/// Parameters of `bdev_lvol_clone`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LvolClone")]
struct Clone {
    /// UUID or alias of the snapshot.
    snapshot_name: String,
    /// Name of the new volume.
    clone_name: String,
}

async fn clone(control: &Control, p: Clone) -> Result<Uuid, Error> {
    let (pool, member) = find(control, &p.snapshot_name)?;
    check_name(&pool, &p.clone_name).map_err(failed)?;
    if !member.is_snapshot() {
        return Err(failed(Error::invalid(format!("'{}' is not a snapshot", p.snapshot_name))));
    }
    let new = NewVolume {
        name: p.clone_name,
        uuid: Uuid::new_v4(),
        bytes: Bytes(member.bytes()),
        block_size: member.volume.block_size,
        origin: Origin::Snapshot(member.id),
        when_full: WhenFull::Fail,
        is_thick: false,
    };
    Ok(volumes::create_volume(control, &pool, new).await.map_err(failed)?.uuid())
}

/// Parameters of `bdev_lvol_clone_bdev`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LvolCloneBdev")]
struct CloneBdev {
    /// Name or UUID of the disk, to which nobody may write while the volume depends on it. The pool finds it again by its UUID.
    bdev: String,
    /// Name of the pool.
    lvs_name: String,
    /// Name of the new volume.
    clone_name: String,
}

async fn clone_bdev(control: &Control, p: CloneBdev) -> Result<Uuid, Error> {
    let pool = find_store(control, None, Some(&p.lvs_name))?;
    check_name(&pool, &p.clone_name)?;
    let disk = control.disks.find(&p.bdev)?;
    let (geometry, cluster) = (disk.geometry(), pool.cluster().0);
    let block_size = block_size(&pool).max(geometry.block_size);
    let bytes = geometry.blocks.to_bytes(geometry.block_size).0.next_multiple_of(cluster);
    let new = NewVolume {
        name: p.clone_name,
        uuid: Uuid::new_v4(),
        bytes: Bytes(bytes),
        block_size,
        origin: Origin::Disk(disk.name().to_owned()),
        when_full: WhenFull::Fail,
        is_thick: false,
    };
    Ok(volumes::create_volume(control, &pool, new).await.map_err(failed)?.uuid())
}

/// Parameters of `bdev_lvol_rename`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "RenameLvol")]
struct Rename {
    /// UUID or alias of the volume or snapshot.
    old_name: String,
    /// Its new name.
    new_name: String,
}

async fn rename(control: &Control, p: Rename) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.old_name)?;
    if member.name() != p.new_name {
        check_name(&pool, &p.new_name).map_err(failed)?;
        pool.rename(member.id, p.new_name).await.map_err(failed)?;
    }
    Ok(true)
}

/// Parameters of `bdev_lvol_resize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ResizeLvol")]
struct Resize {
    /// UUID or alias of the volume.
    name: String,
    /// Its new size in MiB, which is rounded up to whole clusters.
    size_in_mib: Count,
}

async fn resize(control: &Control, p: Resize) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.name)?;
    let bytes = whole_clusters(&pool, p.size_in_mib.0).map_err(failed)?;
    pool.resize(member.id, bytes).await.map_err(failed)?;
    Ok(true)
}

async fn set_read_only(control: &Control, p: Name) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.name)?;
    if !member.is_snapshot() {
        volumes::set_read_only(control, &pool, &member).await.map_err(failed)?;
    }
    Ok(true)
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.name)?;
    volumes::delete(control, &pool, &member).await.map_err(|error| error.coded(INTERNAL))?;
    Ok(true)
}

async fn inflate(control: &Control, p: Name) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.name)?;
    // With its space reserved, the copy meets no full pool.
    let becomes_thick = !member.volume.is_thick && !member.is_snapshot();
    if becomes_thick {
        pool.set_thick(member.id, true).await.map_err(failed)?;
    }
    let inflated = pool.inflate(member.id).await.map_err(failed);
    if inflated.is_err() && becomes_thick {
        // The first error is reported.
        let _ = pool.set_thick(member.id, false).await;
    }
    inflated.map(|()| true)
}

async fn decouple(control: &Control, p: Name) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.name)?;
    pool.inflate(member.id).await.map_err(failed)?;
    Ok(true)
}

/// Parameters of `bdev_lvol_set_parent`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "SetLvolParent")]
struct SetParent {
    /// UUID or alias of the volume.
    lvol_name: String,
    /// UUID or alias of the snapshot, which is not larger than the volume.
    parent_name: String,
}

async fn set_parent(control: &Control, p: SetParent) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.lvol_name)?;
    let (of, parent) = find(control, &p.parent_name)?;
    if !Arc::ptr_eq(&pool, &of) {
        return Err(failed(Error::invalid("the snapshot is in another pool")));
    }
    if !parent.is_snapshot() {
        return Err(failed(Error::invalid(format!("'{}' is not a snapshot", p.parent_name))));
    }
    if pool.parent(&member) == Parent::Snapshot(parent.name().to_owned()) {
        let why = format!("'{}' is a clone of '{}' already", p.lvol_name, p.parent_name);
        return Err(failed(Error::errno(Errno::EXIST, why)));
    }
    volumes::set_parent(control, &pool, &member, Origin::Snapshot(parent.id)).await.map_err(failed)?;
    Ok(true)
}

/// Parameters of `bdev_lvol_set_parent_bdev`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "SetLvolParentBdev")]
struct SetParentBdev {
    /// UUID or alias of the volume.
    lvol_name: String,
    /// Name or UUID of the disk, which is not larger than the volume, and has no writer while the volume depends on
    /// it.
    parent_name: String,
}

async fn set_parent_bdev(control: &Control, p: SetParentBdev) -> Result<bool, Error> {
    let (pool, member) = find(control, &p.lvol_name)?;
    let disk = control.disks.find(&p.parent_name)?;
    let uuid = disk.identity().uuid;
    if matches!(pool.parent(&member), Parent::Image(image) if image.uuid == uuid) {
        let why = format!("'{}' is on '{}' already", p.lvol_name, p.parent_name);
        return Err(failed(Error::errno(Errno::EXIST, why)));
    }
    let origin = Origin::Disk(disk.name().to_owned());
    volumes::set_parent(control, &pool, &member, origin).await.map_err(failed)?;
    Ok(true)
}

/// Parameters of `bdev_lvol_get_lvols`: at most one of the two.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "GetLvols")]
struct Get {
    /// UUID of the pool whose volumes are listed.
    lvs_uuid: Option<String>,
    /// Name of the pool whose volumes are listed.
    lvs_name: Option<String>,
}

/// Result of `bdev_lvol_get_lvols`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvolInfo")]
struct Description {
    /// The pool's name and the volume's, as `POOL/VOLUME`.
    alias: String,
    /// UUID of the volume, which is also the name of its disk.
    uuid: Uuid,
    /// Name of the volume.
    name: String,
    #[serde(flatten)]
    attributes: Attributes,
    /// Whether the volume has no disk, since the disk on which it depends is absent, or another disk has its UUID or its alias.
    is_degraded: bool,
    /// The pool.
    lvs: Store,
}

/// The pool of a volume.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvolLvstore")]
struct Store {
    /// Name of the pool.
    name: String,
    /// UUID of the pool.
    uuid: Uuid,
}

async fn get(control: &Control, p: Get) -> Result<Vec<Description>, Error> {
    let pools = match (&p.lvs_uuid, &p.lvs_name) {
        (None, None) => control.volumes.pools.list(),
        (uuid, name) => vec![find_store(control, uuid.as_deref(), name.as_deref())?],
    };
    let of_pool = |pool: &Arc<Pool>| {
        let describe = |member: &Member| Description {
            alias: pool.alias(member.name()),
            uuid: member.uuid(),
            name: member.name().to_owned(),
            attributes: Attributes::of(pool, member),
            is_degraded: member.disk.is_none(),
            lvs: Store { name: pool.name(), uuid: pool.uuid() },
        };
        pool.members().iter().map(describe).collect::<Vec<_>>()
    };
    Ok(pools.iter().flat_map(of_pool).collect())
}
