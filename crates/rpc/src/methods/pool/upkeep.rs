//! `aryk_pool_check`, `aryk_volume_get_space`, `aryk_volume_get_changed`: methods that read much of a pool; and `aryk_pool_move`.
//! Control context.

use crate::methods::volumes::{find, move_shard};
use crate::methods::{Control, Error, Phase, Table};
use aryk_bdev_volume as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "aryk_pool_check",
        Phase::RunTime,
        "Verifies the references of a pool, and the checksums of its data, while it is in use.",
        check,
    );
    table.add(
        "aryk_pool_move",
        Phase::RunTime,
        "Moves a shard of a pool to another reactor, while its volumes are in use.",
        move_pool,
    );
    table.add(
        "aryk_volume_get_space",
        Phase::RunTime,
        "Counts the space that the volumes and snapshots of a pool keep in use, alone and together with others.",
        space,
    );
    table.add(
        "aryk_volume_get_changed",
        Phase::RunTime,
        "Lists the parts of a volume that may have changed since a snapshot of it.",
        changed,
    );
}

/// Parameters of `aryk_pool_move`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MovePool {
    /// Name or UUID of the pool.
    pool: String,
    /// Number of the shard, from 0 on, as in `cores` of `aryk_pools_get`. Default: the only one.
    shard: Option<u32>,
    /// Core of the reactor on which the shard runs from now on. The dynamic scheduler may move it again.
    core: u16,
}

async fn move_pool(control: &Control, p: MovePool) -> Result<bool, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    move_shard(control, &pool, p.shard, p.core).await?;
    Ok(true)
}

/// Parameters of `aryk_pool_check`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CheckPool {
    /// Name or UUID of the pool.
    pool: String,
    /// Whether all data is read and compared with its checksums. Default: true.
    #[serde(default = "yes")]
    data: bool,
    /// Whether space that nothing refers to becomes free. Default: false.
    #[serde(default)]
    repair: bool,
}

const fn yes() -> bool {
    true
}

/// Result of `aryk_pool_check`.
#[derive(Debug, Serialize, JsonSchema)]
struct PoolCheck {
    /// References that were verified.
    references: u64,
    /// Blocks of 4 KiB whose data was compared with its checksum.
    blocks_read: u64,
    /// Bytes that count as used, and that nothing refers to.
    leaked_bytes: u64,
    /// What is damaged.
    damage: Vec<PoolDamage>,
}

/// A damaged part of a pool.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PoolDamage {
    /// Alias of a volume or snapshot that shows the damage. Not there if it belongs to none, or to a part of the index.
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<String>,
    /// First damaged byte of the volume.
    offset: u64,
    /// Damaged bytes.
    bytes: u64,
    /// What is wrong.
    what: String,
}

/// Bytes of a block of the index.
const BLOCK: u64 = aryk_bdev_volume::BLOCK as u64;

async fn check(control: &Control, p: CheckPool) -> Result<PoolCheck, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    let report = pool.check(p.data, p.repair).await?;
    Ok(PoolCheck {
        references: report.references,
        blocks_read: report.blocks_read,
        leaked_bytes: report.leaked_units * u64::from(aryk_bdev_volume::UNIT),
        damage: damage_of(&pool, report.damage),
    })
}

/// Damage of a pool, as clients get it.
pub(super) fn damage_of(pool: &module::Pool, damage: Vec<module::Damage>) -> Vec<PoolDamage> {
    let members = pool.members();
    let describe = |damage: module::Damage| PoolDamage {
        volume: damage.volume.and_then(|id| {
            let member = members.iter().find(|member| member.id == id)?;
            Some(pool.alias(member.name()))
        }),
        offset: damage.block * BLOCK,
        bytes: damage.blocks * BLOCK,
        what: damage.what,
    };
    damage.into_iter().map(describe).collect()
}

/// Parameters of `aryk_volume_get_changed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Compare {
    /// UUID or alias of the volume, of a later snapshot, or of a clone.
    volume: String,
    /// UUID or alias of the snapshot.
    since: String,
}

/// A part of a volume. `aryk_volume_get_changed` returns a list of them, in ascending order.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VolumePart")]
struct Part {
    /// First byte.
    offset: u64,
    /// Bytes.
    bytes: u64,
}

async fn changed(control: &Control, p: Compare) -> Result<Vec<Part>, Error> {
    let (pool, volume) = find(control, &p.volume)?;
    let (of, snapshot) = find(control, &p.since)?;
    if !Arc::ptr_eq(&pool, &of) {
        return Err(Error::invalid("the snapshot is in another pool"));
    }
    let parts = pool.changed(snapshot.id, volume.id).await?;
    Ok(parts.into_iter().map(|(offset, bytes)| Part { offset, bytes }).collect())
}

/// Parameters of `aryk_volume_get_space`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "VolumesOfPool")]
struct OfPool {
    /// Name or UUID of the pool.
    pool: String,
}

/// The space of a volume or a snapshot. `aryk_volume_get_space` returns a list of them, in the order of creation.
#[derive(Debug, Serialize, JsonSchema)]
struct VolumeSpace {
    /// The name of the pool and of the volume, as `POOL/VOLUME`.
    alias: String,
    /// UUID of the volume.
    uuid: Uuid,
    /// Whether it is a snapshot.
    is_snapshot: bool,
    /// Its size in bytes.
    size: u64,
    /// Bytes of data that become free if it is deleted.
    own_bytes: u64,
    /// Bytes of data that it shows and others keep in use, too.
    shared_bytes: u64,
}

async fn space(control: &Control, p: OfPool) -> Result<Vec<VolumeSpace>, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    let count = pool.count_space(false).await?;
    let members = pool.members();
    let describe = |space: &module::VolumeSpace| {
        // It may have been deleted since.
        let member = members.iter().find(|member| member.id == space.volume)?;
        Some(VolumeSpace {
            alias: pool.alias(member.name()),
            uuid: member.uuid(),
            is_snapshot: member.is_snapshot(),
            size: member.bytes(),
            own_bytes: space.own_bytes,
            shared_bytes: space.shared_bytes,
        })
    };
    Ok(count.of.values().filter_map(describe).collect())
}
