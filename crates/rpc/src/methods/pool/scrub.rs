//! `aryk_pool_start_scrub`, `aryk_pool_stop_scrub`, `aryk_pool_set_scrub`, `aryk_pool_get_scrub`: slow passes over pools that
//! find damage. Control context.

use super::upkeep::{PoolDamage, damage_of};
use crate::methods::{Control, Count, Error, Phase, Table};
use aryk_bdev_volume as module;
use aryk_bdev_volume::{ScrubSettings, ScrubState};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "aryk_pool_start_scrub",
        Phase::RunTime,
        "Begins a pass of the scrub of a pool now: all its data and index are read slowly, and verified.",
        start,
    );
    table.add("aryk_pool_stop_scrub", Phase::RunTime, "Ends the pass of the scrub of a pool.", stop);
    table.add(
        "aryk_pool_set_scrub",
        Phase::RunTime,
        "Sets how often a pool is scrubbed, and how fast. The pool keeps that.",
        set,
    );
    table.add(
        "aryk_pool_get_scrub",
        Phase::RunTime,
        "Tells how far the scrub of a pool is, and what its latest pass has found.",
        get,
    );
}

/// Parameters of `aryk_pool_start_scrub`, `aryk_pool_stop_scrub` and `aryk_pool_get_scrub`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ScrubOfPool")]
struct OfPool {
    /// Name or UUID of the pool.
    pool: String,
}

async fn start(control: &Control, p: OfPool) -> Result<bool, Error> {
    control.volumes.pools.find(&p.pool)?.start_scrub()?;
    Ok(true)
}

/// Returns whether a pass was under way.
async fn stop(control: &Control, p: OfPool) -> Result<bool, Error> {
    Ok(control.volumes.pools.find(&p.pool)?.stop_scrub())
}

/// Parameters of `aryk_pool_set_scrub`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetScrub {
    /// Name or UUID of the pool.
    pool: String,
    /// Days from the beginning of a pass to that of the next one, up to 3650. 0: only `aryk_pool_start_scrub` begins passes.
    /// Default: as before; 14 for a pool for which it was never set.
    days: Option<u32>,
    /// Bytes that are read in a second at most, at least 64 KiB. 0: as many as a pass needs for half of the time until the next
    /// one, and at least 4 MiB. Default: as before; 0 for a pool for which it was never set.
    bytes_per_second: Option<Count>,
}

async fn set(control: &Control, p: SetScrub) -> Result<bool, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    let old = pool.scrub_report().settings;
    let settings = ScrubSettings {
        days: p.days.unwrap_or(old.days),
        bytes_per_second: p.bytes_per_second.map_or(old.bytes_per_second, |Count(bytes)| bytes),
    };
    if !settings.is_valid() {
        return Err(Error::invalid(
            "a pool is scrubbed every 1 to 3650 days, by at least 64 KiB in a second",
        ));
    }
    pool.set_scrub(settings).await?;
    Ok(true)
}

/// The scrub of a pool.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PoolScrub {
    /// `none` if no pass has begun since the pool was opened, `running`, or how the latest pass has ended: `complete`,
    /// `stopped`, or `failed` if the disk of the pool has failed.
    state: &'static str,
    /// Percent of the pass that are done; not there if none is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    percent: Option<u64>,
    /// Time at which the latest complete pass began, in seconds since 1970; not there if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    complete_since: Option<u64>,
    /// Days from the beginning of a pass to that of the next one; 0 if only `aryk_pool_start_scrub` begins passes.
    days: u32,
    /// Bytes that are read in a second at most; 0 if the daemon chooses them.
    bytes_per_second: u64,
    /// Bytes that were read since the pool was opened.
    read_bytes: u64,
    /// Blocks of data and pages of the index that were found damaged since the pool was opened, in all passes.
    damaged_blocks: u64,
}

impl PoolScrub {
    pub(super) fn new(report: &module::ScrubReport, stats: &module::Stats) -> Self {
        let (state, percent) = match report.state {
            ScrubState::None => ("none", None),
            ScrubState::Running { visited, entries } => ("running", Some(visited * 100 / entries.max(1))),
            ScrubState::Complete => ("complete", None),
            ScrubState::Stopped => ("stopped", None),
            ScrubState::Failed => ("failed", None),
        };
        Self {
            state,
            percent,
            complete_since: report.complete_since,
            days: report.settings.days,
            bytes_per_second: report.settings.bytes_per_second,
            read_bytes: stats.scrub_read_bytes,
            damaged_blocks: stats.scrub_damaged_blocks,
        }
    }
}

/// Result of `aryk_pool_get_scrub`.
#[derive(Debug, Serialize, JsonSchema)]
struct ScrubResult {
    #[serde(flatten)]
    scrub: PoolScrub,
    /// What the pass that is running, or else the latest one, has found: the first 1,000 pieces.
    damage: Vec<PoolDamage>,
}

async fn get(control: &Control, p: OfPool) -> Result<ScrubResult, Error> {
    let pool = control.volumes.pools.find(&p.pool)?;
    let (stats, report) = (pool.stats().await?, pool.scrub_report());
    Ok(ScrubResult { scrub: PoolScrub::new(&report, &stats), damage: damage_of(&pool, report.damage) })
}
