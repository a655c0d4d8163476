//! `bdev_lvol_*_lvstore`: pools as SPDK's lvolstores. Control context.

use super::{StoreClearMethod, failed, find_store};
use crate::methods::volumes;
use crate::methods::{Control, Count, Error, Phase, Table};
use aryk_bdev::Bytes;
use aryk_bdev_volume::{NewPool, Pool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_lvol_create_lvstore",
        Phase::RunTime,
        "Creates a pool for volumes, an lvolstore, on a disk. A disk that holds data is refused.",
        create,
    );
    table.add(
        "bdev_lvol_delete_lvstore",
        Phase::RunTime,
        "Deletes a pool with its volumes and snapshots.",
        delete,
    );
    table.add("bdev_lvol_get_lvstores", Phase::RunTime, "Lists the pools, or describes one of them.", get);
    table.add("bdev_lvol_rename_lvstore", Phase::RunTime, "Gives a pool another name.", rename);
    table.add(
        "bdev_lvol_grow_lvstore",
        Phase::RunTime,
        "Lets a pool use the space that its disk has gained.",
        grow,
    );
}

/// Parameters of `bdev_lvol_create_lvstore`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CreateLvstore")]
struct Create {
    /// Name of the disk.
    bdev_name: String,
    /// Name of the new pool.
    lvs_name: String,
    /// Bytes of a cluster, the unit in which sizes and space are reported, and to which sizes are rounded up: a multiple of 4,096
    /// below 4 GiB. Default, and 0: 4 MiB.
    #[serde(default)]
    cluster_sz: Count,
    /// Has no effect: nothing has to be cleared.
    #[serde(default, rename = "clear_method")]
    _clear_method: Option<StoreClearMethod>,
    /// Has no effect.
    #[serde(default, rename = "num_md_pages_per_cluster_ratio")]
    _num_md_pages_per_cluster_ratio: Count,
    /// Has no effect.
    #[serde(default, rename = "md_page_size")]
    _md_page_size: Count,
    /// Aryk only: destroys what the disk holds.
    #[serde(default)]
    force: bool,
}

async fn create(control: &Control, p: Create) -> Result<Uuid, Error> {
    control.disks.find(&p.bdev_name)?;
    let mut new = NewPool { force: p.force, ..NewPool::named(&p.lvs_name, &p.bdev_name) };
    if p.cluster_sz.0 > 0 {
        new.cluster = Bytes(p.cluster_sz.0);
    }
    Ok(volumes::create_pool(control, new).await?.uuid())
}

/// Parameters of methods that name a pool: one of the two.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Lvstore")]
struct Named {
    /// UUID of the pool.
    uuid: Option<String>,
    /// Name of the pool.
    lvs_name: Option<String>,
}

async fn delete(control: &Control, p: Named) -> Result<bool, Error> {
    let pool = find_store(control, p.uuid.as_deref(), p.lvs_name.as_deref())?;
    volumes::delete_pool(control, &pool).await.map_err(failed)?;
    Ok(true)
}

/// Result of `bdev_lvol_get_lvstores`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvstoreInfo")]
struct Description {
    /// UUID of the pool.
    uuid: Uuid,
    /// Name of the pool.
    name: String,
    /// Name of its disk.
    base_bdev: String,
    /// Space for data, in clusters: without what the pool keeps for itself.
    total_data_clusters: u64,
    /// Space that is free, in clusters. Space of deleted data counts as free, also before the pool has cleaned it.
    free_clusters: u64,
    /// Block size of the disk in bytes.
    block_size: u32,
    /// Bytes of a cluster.
    cluster_size: u64,
    /// Bytes to which the pool can grow.
    max_growable_size: u64,
}

async fn get(control: &Control, p: Named) -> Result<Vec<Description>, Error> {
    let pools = match (&p.uuid, &p.lvs_name) {
        (None, None) => control.volumes.pools.list(),
        (uuid, name) => vec![find_store(control, uuid.as_deref(), name.as_deref())?],
    };
    let mut described = Vec::new();
    for pool in pools {
        // A pool may end meanwhile.
        if let Ok(description) = describe(&pool).await {
            described.push(description);
        }
    }
    Ok(described)
}

async fn describe(pool: &Pool) -> Result<Description, Error> {
    let (space, cluster) = (pool.space().await?, pool.cluster().0);
    Ok(Description {
        uuid: pool.uuid(),
        name: pool.name(),
        base_bdev: pool.base().name().to_owned(),
        total_data_clusters: space.total.0 / cluster,
        free_clusters: space.free.0 / cluster,
        block_size: pool.base().geometry().block_size,
        cluster_size: cluster,
        max_growable_size: MAX_GROWABLE,
    })
}

/// Parameters of `bdev_lvol_rename_lvstore`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "RenameLvstore")]
struct Rename {
    /// Name of the pool.
    old_name: String,
    /// Its new name.
    new_name: String,
}

async fn rename(control: &Control, p: Rename) -> Result<bool, Error> {
    let pool = find_store(control, None, Some(&p.old_name))?;
    volumes::rename_pool(control, &pool, p.new_name).await.map_err(failed)?;
    Ok(true)
}

/// The segments of a pool have 32-bit numbers, and 32 MiB each.
const MAX_GROWABLE: u64 = (u32::MAX as u64 - 1) * (32 << 20);

async fn grow(control: &Control, p: Named) -> Result<bool, Error> {
    let pool = find_store(control, p.uuid.as_deref(), p.lvs_name.as_deref())?;
    pool.grow().await.map_err(failed)?;
    Ok(true)
}
