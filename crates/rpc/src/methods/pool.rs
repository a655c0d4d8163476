//! `aryk_pool_*`, `aryk_pools_get`, `aryk_volume_*`, `aryk_volumes_get`: what SPDK has no methods for. Control context.

mod scrub;
mod upkeep;

use super::volumes::{self, Attributes, find};
use super::{Control, Count, Error, NoParams, Phase, Table};
use aryk_bdev::Bytes;
use aryk_bdev_volume as module;
use aryk_bdev_volume::{Health, Member, NewPool, NewVolume, Origin, Parent, Pool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add("aryk_pool_create", Phase::RunTime, "Creates a pool for volumes on a disk.", create_pool);
    table.add(
        "aryk_pool_open",
        Phase::RunTime,
        "Opens a pool that was not opened by itself when its disk appeared: one with a damaged log, or one that came back older.",
        open_pool,
    );
    table.add(
        "aryk_pools_get",
        Phase::RunTime,
        "Lists the pools, with their space and their counters.",
        get_pools,
    );
    table.add(
        "aryk_pool_snapshot",
        Phase::RunTime,
        "Takes snapshots of several volumes of a pool at one instant.",
        snapshot,
    );
    table.add("aryk_volume_create", Phase::RunTime, "Creates a volume in a pool.", create_volume);
    table.add("aryk_volumes_get", Phase::RunTime, "Lists the volumes and snapshots.", get_volumes);
    table.add(
        "aryk_volume_revert",
        Phase::RunTime,
        "Gives a volume the content of a snapshot of its pool. What was written since is lost, unless another snapshot has it.",
        revert,
    );
    table.add(
        "aryk_volume_set_when_full",
        Phase::RunTime,
        "Sets what a volume's writes do while the pool is full.",
        set_when_full,
    );
    scrub::register(table);
    upkeep::register(table);
}

/// What the writes of a volume do while its pool is full: they wait for space, or fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum WhenFull {
    Wait,
    Fail,
}

impl From<WhenFull> for module::WhenFull {
    fn from(when_full: WhenFull) -> Self {
        match when_full {
            WhenFull::Wait => Self::Wait,
            WhenFull::Fail => Self::Fail,
        }
    }
}

impl From<module::WhenFull> for WhenFull {
    fn from(when_full: module::WhenFull) -> Self {
        match when_full {
            module::WhenFull::Wait => Self::Wait,
            module::WhenFull::Fail => Self::Fail,
        }
    }
}

/// Parameters of `aryk_pool_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreatePool {
    /// Name of the new pool.
    name: String,
    /// Name of its disk, which the pool then has for itself.
    base_bdev_name: String,
    /// Whether to destroy what the disk holds. Default: a disk that holds data is refused.
    #[serde(default)]
    force: bool,
    /// Bytes of memory for the index and for checksums. Default: 64 MiB.
    cache_bytes: Option<Count>,
    /// Parts of the pool, each with an index and a log of its own on a reactor of its own, if there are as many: 1, 2, 4, 8 or
    /// 16. It stays as it is. Default: 1.
    shards: Option<u32>,
}

async fn create_pool(control: &Control, p: CreatePool) -> Result<Uuid, Error> {
    control.disks.find(&p.base_bdev_name)?;
    let mut new = NewPool { force: p.force, ..NewPool::named(&p.name, &p.base_bdev_name) };
    if let Some(Count(bytes)) = p.cache_bytes {
        let bytes = usize::try_from(bytes).ok().filter(|bytes| (1 << 20..=1 << 40).contains(bytes));
        new.settings.cache_bytes = bytes.ok_or_else(|| Error::invalid("a cache has 1 MiB to 1 TiB"))?;
    }
    new.shards = p.shards.unwrap_or(new.shards);
    Ok(volumes::create_pool(control, new).await?.uuid())
}

/// Parameters of `aryk_pool_open`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OpenPool {
    /// Name of the disk that has the pool.
    base_bdev_name: String,
    /// Whether to open a pool whose log is damaged: all writes behind the damaged place are lost, also those that a flush has
    /// made durable. Default: such a pool is refused, with the place.
    #[serde(default)]
    discard_damaged_log: bool,
    /// Whether to open a pool whose disk came back older than the daemon has had it, as from a backup: what was written since is
    /// lost. Default: such a pool is refused.
    #[serde(default)]
    accept_older: bool,
}

/// Result of `aryk_pool_open`.
#[derive(Debug, Serialize, JsonSchema)]
struct OpenedPool {
    /// Name of the pool.
    name: String,
    /// UUID of the pool.
    uuid: Uuid,
    /// Where the logs of its shards were damaged; not there if none was.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    damaged_log: Vec<DamagedLog>,
}

/// The place where a log was damaged.
#[derive(Debug, Serialize, JsonSchema)]
struct DamagedLog {
    /// Number of the shard.
    shard: u32,
    /// Number of the segment.
    segment: u32,
    /// Byte of the segment.
    offset: u64,
}

async fn open_pool(control: &Control, p: OpenPool) -> Result<OpenedPool, Error> {
    let disk = control.disks.find(&p.base_bdev_name)?;
    let settings =
        module::Settings { accepts_damaged_log: p.discard_damaged_log, ..module::Settings::default() };
    let pool = volumes::open_pool(control, disk.name(), settings, p.accept_older).await?;
    let damaged = |(shard, place): &(module::Shard, module::LogPlace)| DamagedLog {
        shard: shard.index(),
        segment: place.blob.0,
        offset: u64::from(place.unit) * u64::from(module::UNIT),
    };
    let damaged_log = pool.log_damage().iter().map(damaged).collect();
    Ok(OpenedPool { name: pool.name(), uuid: pool.uuid(), damaged_log })
}

/// Counters of a pool since it was opened, in bytes unless the name says otherwise.
#[derive(Debug, Serialize, JsonSchema)]
struct PoolCounters {
    /// Written by users.
    user_write_bytes: u64,
    /// Read by users.
    user_read_bytes: u64,
    /// Written to the disk as log: the first write of all data.
    log_write_bytes: u64,
    /// Written to the disk by the cleaner and by compaction.
    moved_write_bytes: u64,
    /// The part of `moved_write_bytes` that compaction has written, so that sequential reads find more in a row.
    gathered_write_bytes: u64,
    /// Number of ranges of 4 MiB that compaction has gathered.
    gathered_ranges: u64,
    /// Written to the disk as index.
    index_write_bytes: u64,
    /// Written to the disk as manifest.
    manifest_write_bytes: u64,
    /// Read from the disk for users.
    data_read_bytes: u64,
    /// Read from the disk of the index, and of checksums.
    index_read_bytes: u64,
    /// Read from the disk by background work.
    background_read_bytes: u64,
    /// Pages of the index that were in memory.
    cache_hits: u64,
    /// Pages of the index that were not.
    cache_misses: u64,
    /// Blocks whose data did not match its checksum.
    damaged_blocks: u64,
    /// Log that is not flushed into the index: the backlog.
    unflushed_bytes: u64,
    /// Index that is to be merged: the debt.
    debt_bytes: u64,
    /// Requests that wait for space, for the backlog or for a log frame.
    waiting_requests: u64,
    /// What a byte that is written costs because of the backlog: percent of a byte that must be merged into the index for it, 0
    /// to 100. Of several shards, the highest.
    price_percent: u64,
    /// Segments of the disk.
    segments: u64,
    /// Segments that hold nothing.
    free_segments: u64,
    /// Space in segments that are in use, deleted data included.
    used_bytes: u64,
    /// Data to which the index refers.
    live_bytes: u64,
    /// The index.
    index_bytes: u64,
    /// Entries of the index.
    index_entries: u64,
}

/// Result of `aryk_pools_get`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "PoolInfo")]
struct PoolDescription {
    /// Name of the pool.
    name: String,
    /// UUID of the pool.
    uuid: Uuid,
    /// Name of its disk.
    base_bdev_name: String,
    /// Cores of the reactors of its shards.
    cores: Vec<u16>,
    /// `ready`; `read-only` after a failure of its disk; `waiting` while its claim on a disk of several
    /// hosts cannot be renewed; `taken-over` if a daemon of another host has it.
    state: &'static str,
    /// Changes of volumes that are being made, or that wait until all shards can make them: see the log.
    unfinished_changes: u64,
    /// Number of volumes.
    volumes: u64,
    /// Number of snapshots.
    snapshots: u64,
    /// Space for data, in bytes: without what the pool keeps for itself.
    total_bytes: u64,
    /// Space that is free, in bytes, or will be when deleted data has been cleaned, and that is not reserved.
    free_bytes: u64,
    /// Space that is reserved for thick volumes, in bytes, beyond the data that they have for themselves.
    reserved_bytes: u64,
    /// Sizes of all volumes, in bytes.
    provisioned_bytes: u64,
    scrub: scrub::PoolScrub,
    counters: PoolCounters,
}

async fn get_pools(control: &Control, _: NoParams) -> Result<Vec<PoolDescription>, Error> {
    let mut described = Vec::new();
    for pool in control.volumes.pools.list() {
        // A pool may end meanwhile.
        if let Ok(description) = describe_pool(&pool).await {
            described.push(description);
        }
    }
    Ok(described)
}

async fn describe_pool(pool: &Pool) -> Result<PoolDescription, Error> {
    let (space, stats) = (pool.space().await?, pool.stats().await?);
    let (snapshots, volumes): (Vec<Member>, Vec<Member>) =
        pool.members().into_iter().partition(Member::is_snapshot);
    Ok(PoolDescription {
        name: pool.name(),
        uuid: pool.uuid(),
        base_bdev_name: pool.base().name().to_owned(),
        cores: pool.cores(),
        state: match pool.health() {
            Health::Ready => "ready",
            Health::ReadOnly(_) => "read-only",
            Health::Waiting => "waiting",
            Health::TakenOver => "taken-over",
        },
        unfinished_changes: pool.unfinished_changes() as u64,
        volumes: volumes.len() as u64,
        snapshots: snapshots.len() as u64,
        total_bytes: space.total.0,
        free_bytes: space.free.0,
        reserved_bytes: space.reserved.0,
        provisioned_bytes: volumes.iter().map(Member::bytes).sum(),
        scrub: scrub::PoolScrub::new(&pool.scrub_report(), &stats),
        counters: PoolCounters {
            user_write_bytes: stats.user_write_bytes,
            user_read_bytes: stats.user_read_bytes,
            log_write_bytes: stats.log_write_bytes,
            moved_write_bytes: stats.moved_write_bytes,
            gathered_write_bytes: stats.gathered_write_bytes,
            gathered_ranges: stats.gathered_ranges,
            index_write_bytes: stats.index_write_bytes,
            manifest_write_bytes: stats.manifest_write_bytes,
            data_read_bytes: stats.data_read_bytes,
            index_read_bytes: stats.index_read_bytes,
            background_read_bytes: stats.background_read_bytes,
            cache_hits: stats.cache_hits,
            cache_misses: stats.cache_misses,
            damaged_blocks: stats.damaged_blocks,
            unflushed_bytes: stats.unflushed_bytes,
            debt_bytes: stats.debt_bytes,
            waiting_requests: stats.waiting_requests,
            price_percent: stats.price_percent,
            segments: stats.blobs,
            free_segments: stats.free_blobs,
            used_bytes: stats.used_bytes,
            live_bytes: stats.live_bytes,
            index_bytes: stats.index_bytes,
            index_entries: stats.index_entries,
        },
    })
}

/// A snapshot to take.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SnapshotOf {
    /// UUID or alias of the volume.
    volume: String,
    /// Name of the new snapshot.
    snapshot_name: String,
}

/// Parameters of `aryk_pool_snapshot`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SnapshotPool {
    /// The volumes, all of one pool, and the names of their snapshots.
    snapshots: Vec<SnapshotOf>,
}

async fn snapshot(control: &Control, p: SnapshotPool) -> Result<Vec<Uuid>, Error> {
    let mut wanted = Vec::new();
    let mut pool: Option<Arc<Pool>> = None;
    for SnapshotOf { volume, snapshot_name } in p.snapshots {
        let (of, member) = find(control, &volume)?;
        if pool.as_ref().is_some_and(|pool| !Arc::ptr_eq(pool, &of)) {
            return Err(Error::invalid("the volumes are in different pools"));
        }
        pool = Some(of);
        wanted.push((member.id, snapshot_name, Uuid::new_v4()));
    }
    let Some(pool) = pool else { return Err(Error::invalid("no volume is named")) };
    Ok(volumes::snapshot(control, &pool, wanted).await?.iter().map(Member::uuid).collect())
}

/// Parameters of `aryk_volume_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateVolume {
    /// Name or UUID of the pool.
    pool: String,
    /// Name of the new volume.
    name: String,
    /// UUID of the new volume. Default: a random one.
    uuid: Option<Uuid>,
    /// Its size in bytes. Default: that of its snapshot or image.
    size: Option<Count>,
    /// Bytes of a block: 512 or 4096. Default: 512, or that of its snapshot or image.
    block_size: Option<u32>,
    /// UUID or alias of a snapshot of the pool, whose content the volume has.
    snapshot: Option<String>,
    /// UUID, name or alias of a disk of another module or another pool, whose content the volume has. Nobody may write to it
    /// while the volume depends on it.
    image: Option<String>,
    /// What its writes do while the pool is full. Default: `fail`.
    #[serde(default = "fail")]
    when_full: WhenFull,
    /// Whether the pool reserves space for all of it, so that its writes never meet a full pool. Default: no.
    #[serde(default)]
    thick: bool,
}

const fn fail() -> WhenFull {
    WhenFull::Fail
}

async fn create_volume(control: &Control, p: CreateVolume) -> Result<Uuid, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    let snapshot = match &p.snapshot {
        Some(name) => Some(find(control, name)?),
        None => None,
    };
    if snapshot.as_ref().is_some_and(|(of, _)| !Arc::ptr_eq(of, &pool)) {
        return Err(Error::invalid("the snapshot is in another pool"));
    }
    let (bytes, block_size, origin) = match (snapshot, p.image) {
        (Some(_), Some(_)) => return Err(Error::invalid("a volume has a snapshot or an image, not both")),
        (Some((_, member)), None) => {
            (Some(member.bytes()), member.volume.block_size, Origin::Snapshot(member.id))
        }
        (None, Some(image)) => {
            let disk = control.disks.find(&image)?;
            let (bytes, block_size) = volumes::size_on(&disk, p.block_size);
            (Some(bytes), block_size, Origin::Disk(disk.name().to_owned()))
        }
        (None, None) => (None, 512, Origin::Empty),
    };
    let bytes = p.size.map(|Count(bytes)| bytes).or(bytes);
    let new = NewVolume {
        name: p.name,
        uuid: p.uuid.unwrap_or_else(Uuid::new_v4),
        bytes: Bytes(bytes.ok_or_else(|| Error::invalid("the size of the volume is missing"))?),
        block_size: p.block_size.unwrap_or(block_size),
        origin,
        when_full: p.when_full.into(),
        is_thick: p.thick,
    };
    Ok(volumes::create_volume(control, &pool, new).await?.uuid())
}

/// Result of `aryk_volumes_get`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VolumeInfo")]
struct VolumeDescription {
    /// The name of the pool and of the volume, as `POOL/VOLUME`.
    alias: String,
    /// UUID of the volume, which is also the name of its disk.
    uuid: Uuid,
    /// Its size in bytes.
    size: u64,
    /// Bytes of a block.
    block_size: u32,
    #[serde(flatten)]
    attributes: Attributes,
    /// What its writes do while the pool is full.
    when_full: WhenFull,
    /// Name of the snapshot whose blocks it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    base_snapshot: Option<String>,
    /// The disk of another module or another pool on which it depends, directly or by snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<ImageDescription>,
    /// Whether it has a disk. It has none while its image is absent, or while another disk has its UUID or its alias.
    has_disk: bool,
}

/// A disk on which a volume depends.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "VolumeImage")]
struct ImageDescription {
    /// UUID of the disk, by which it is found.
    uuid: Uuid,
    /// Name of the disk when the volume was created.
    name: String,
    /// Whether the disk is there.
    is_there: bool,
}

async fn get_volumes(control: &Control, _: NoParams) -> Result<Vec<VolumeDescription>, Error> {
    let of_pool = |pool: Arc<Pool>| {
        let describe = |member: &Member| {
            let base_snapshot = match pool.parent(member) {
                Parent::None | Parent::Image(_) => None,
                Parent::Snapshot(name) => Some(name),
            };
            let image = member.image().map(|image| ImageDescription {
                uuid: image.uuid,
                name: image.name,
                is_there: !pool.is_degraded(member),
            });
            VolumeDescription {
                alias: pool.alias(member.name()),
                uuid: member.uuid(),
                size: member.bytes(),
                block_size: member.volume.block_size,
                attributes: Attributes::of(&pool, member),
                when_full: member.volume.when_full.into(),
                base_snapshot,
                image,
                has_disk: member.disk.is_some(),
            }
        };
        pool.members().iter().map(describe).collect::<Vec<_>>()
    };
    Ok(control.volumes.pools.list().into_iter().flat_map(of_pool).collect())
}

/// Parameters of `aryk_volume_revert`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Revert {
    /// UUID or alias of the volume.
    volume: String,
    /// UUID or alias of the snapshot.
    snapshot: String,
    /// Whether to revert a volume that is in use: its user sees other data without notice.
    #[serde(default)]
    force: bool,
}

async fn revert(control: &Control, p: Revert) -> Result<bool, Error> {
    let (pool, volume) = find(control, &p.volume)?;
    let (of, snapshot) = find(control, &p.snapshot)?;
    if !Arc::ptr_eq(&pool, &of) {
        return Err(Error::invalid("the snapshot is in another pool"));
    }
    let users = volume.disk.as_ref().map(|disk| disk.openers()).unwrap_or_default();
    if let Some((user, _)) = users.first().filter(|_| !p.force) {
        let why = format!("'{}' is in use by {user}: its data would change under it", p.volume);
        return Err(Error::errno(rustix::io::Errno::BUSY, why));
    }
    pool.revert(volume.id, snapshot.id).await?;
    Ok(true)
}

/// Parameters of `aryk_volume_set_when_full`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetWhenFull {
    /// UUID or alias of the volume.
    volume: String,
    /// What its writes do while the pool is full.
    when_full: WhenFull,
}

async fn set_when_full(control: &Control, p: SetWhenFull) -> Result<bool, Error> {
    let (pool, volume) = find(control, &p.volume)?;
    pool.set_when_full(volume.id, p.when_full.into()).await?;
    Ok(true)
}
