//! `*_set_options` and `iobuf_*`: the sizes of pools that SPDK has and Aryk has not. Control context.
//!
//! Clients and saved configurations set them before anything else, and go on only if that succeeds. The parameters are
//! checked, and do nothing: memory comes from the system as it is needed, so there is nothing to size.

use super::{Control, Count, Error, NoParams, Phase, Table};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_set_options",
        Phase::Any,
        "Checks its parameters, and does nothing: there are no pools to size.",
        async |_: &Control, _: BdevOptions| Ok(true),
    );
    table.add(
        "accel_set_options",
        Phase::Any,
        "Checks its parameters, and does nothing: there are no pools to size.",
        async |_: &Control, _: AccelOptions| Ok(true),
    );
    table.add(
        "iobuf_set_options",
        Phase::Any,
        "Checks its parameters, and does nothing: there are no pools to size.",
        async |_: &Control, _: IobufOptions| Ok(true),
    );
    table.add(
        "iobuf_get_stats",
        Phase::RunTime,
        "How often a buffer was waited for: never, as there are no pools.",
        get_iobuf_stats,
    );
    table.add(
        "bdev_examine",
        Phase::RunTime,
        "Checks its parameters, and does nothing: no module looks for its own on disks that others made.",
        async |_: &Control, _: Examine| Ok(true),
    );
}

/// Parameters of `bdev_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "they are checked and do nothing")]
struct BdevOptions {
    /// Not heeded.
    bdev_io_pool_size: Option<u32>,
    /// Not heeded.
    bdev_io_cache_size: Option<u32>,
    /// Not heeded.
    bdev_auto_examine: Option<bool>,
    /// Not heeded.
    iobuf_small_cache_size: Option<u32>,
    /// Not heeded.
    iobuf_large_cache_size: Option<u32>,
}

/// Parameters of `accel_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "they are checked and do nothing")]
struct AccelOptions {
    /// Not heeded.
    small_cache_size: Option<u32>,
    /// Not heeded.
    large_cache_size: Option<u32>,
    /// Not heeded.
    task_count: Option<u32>,
    /// Not heeded.
    sequence_count: Option<u32>,
    /// Not heeded.
    buf_count: Option<u32>,
}

/// Parameters of `iobuf_set_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "they are checked and do nothing")]
struct IobufOptions {
    /// Not heeded.
    small_pool_count: Option<Count>,
    /// Not heeded.
    large_pool_count: Option<Count>,
    /// Not heeded.
    small_bufsize: Option<u32>,
    /// Not heeded.
    large_bufsize: Option<u32>,
    /// Not heeded.
    enable_numa: Option<bool>,
}

/// One of the results of `iobuf_get_stats`.
#[derive(Debug, Serialize, JsonSchema)]
struct IobufStats {
    /// Whose they are.
    module: &'static str,
    small_pool: PoolStats,
    large_pool: PoolStats,
}

/// How often a buffer came from where.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct PoolStats {
    /// From a thread's own.
    cache: u64,
    /// From those of all.
    main: u64,
    /// Requests that had to wait for one: what clients watch, and none ever does.
    retry: u64,
}

async fn get_iobuf_stats(_: &Control, _: NoParams) -> Result<Vec<IobufStats>, Error> {
    let (small_pool, large_pool) = (PoolStats::default(), PoolStats::default());
    Ok(vec![IobufStats { module: "bdev", small_pool, large_pool }])
}

/// Parameters of `bdev_examine`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "it is checked and does nothing")]
struct Examine {
    /// Of a disk, which may come later: SPDK saves these calls before those that make disks. Not heeded.
    name: String,
}
