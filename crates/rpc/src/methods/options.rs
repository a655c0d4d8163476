//! `*_set_options` and `iobuf_*`: sizes of pools of memory, which SPDK has and Aryk lacks; `bdev_examine`. Control context.
//!
//! Clients and saved configurations call these methods first, and continue only if they succeed. The parameters are checked and
//! have no effect: memory is allocated from the system when it is needed.

use super::{Control, Count, Error, NoParams, Phase, Table};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_set_options",
        Phase::Any,
        "Sets whether new disks are searched for pools of volumes, until the daemon ends.",
        async |control: &Control, p: BdevOptions| {
            if let Some(searches) = p.bdev_auto_examine {
                control.volumes.set_auto_examine(searches);
            }
            Ok(true)
        },
    );
    table.add(
        "accel_set_options",
        Phase::Any,
        "Checks its parameters and does nothing else: Aryk has no pools to size.",
        async |_: &Control, _: AccelOptions| Ok(true),
    );
    table.add(
        "iobuf_set_options",
        Phase::Any,
        "Checks its parameters and does nothing else: Aryk has no pools to size.",
        async |_: &Control, _: IobufOptions| Ok(true),
    );
    table.add(
        "iobuf_get_stats",
        Phase::RunTime,
        "Reports how often requests waited for a buffer: never, since Aryk has no pools.",
        get_iobuf_stats,
    );
    table.add(
        "bdev_examine",
        Phase::RunTime,
        "Searches a disk for a pool of volumes, if it exists and nobody uses it.",
        examine,
    );
}

/// Parameters of `bdev_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "most parameters are checked and have no effect")]
struct BdevOptions {
    /// Ignored.
    bdev_io_pool_size: Option<u32>,
    /// Ignored.
    bdev_io_cache_size: Option<u32>,
    /// Whether disks are searched for pools of volumes when they appear. At first they are.
    bdev_auto_examine: Option<bool>,
    /// Ignored.
    iobuf_small_cache_size: Option<u32>,
    /// Ignored.
    iobuf_large_cache_size: Option<u32>,
}

/// Parameters of `accel_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "the parameters are checked and have no effect")]
struct AccelOptions {
    /// Ignored.
    small_cache_size: Option<u32>,
    /// Ignored.
    large_cache_size: Option<u32>,
    /// Ignored.
    task_count: Option<u32>,
    /// Ignored.
    sequence_count: Option<u32>,
    /// Ignored.
    buf_count: Option<u32>,
}

/// Parameters of `iobuf_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "the parameters are checked and have no effect")]
struct IobufOptions {
    /// Ignored.
    small_pool_count: Option<Count>,
    /// Ignored.
    large_pool_count: Option<Count>,
    /// Ignored.
    small_bufsize: Option<u32>,
    /// Ignored.
    large_bufsize: Option<u32>,
    /// Ignored.
    enable_numa: Option<bool>,
}

/// One of the results of `iobuf_get_stats`.
#[derive(Debug, Serialize, JsonSchema)]
struct IobufStats {
    /// Owner of the pools.
    module: &'static str,
    small_pool: PoolStats,
    large_pool: PoolStats,
}

/// Number of buffers, by source.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct PoolStats {
    /// Buffers from a thread's own cache.
    cache: u64,
    /// Buffers from the shared pool.
    main: u64,
    /// Requests that had to wait for a buffer, which clients monitor: always 0.
    retry: u64,
}

async fn get_iobuf_stats(_: &Control, _: NoParams) -> Result<Vec<IobufStats>, Error> {
    let (small_pool, large_pool) = (PoolStats::default(), PoolStats::default());
    Ok(vec![IobufStats { module: "bdev", small_pool, large_pool }])
}

/// Parameters of `bdev_examine`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Examine {
    /// Name of a disk, which may not exist yet: SPDK saves these calls before those that create disks.
    name: String,
}

async fn examine(control: &Control, p: Examine) -> Result<bool, Error> {
    if let Ok(disk) = control.disks.find(&p.name) {
        // `bdev_wait_for_examine` waits for the end.
        drop(control.volumes.search(disk.name()));
    }
    Ok(true)
}
