//! Looks after pools: finishes changes that a shard has refused, warns of pools that become full, stores how far they are, counts
//! the space of their volumes, scrubs them, and renews their claims. Control context.

use crate::Control;
use crate::methods::volumes::announce;
use crate::pool_positions;
use aryk_bdev_volume::Pool;
use aryk_reactor::Clock;
use std::rc::Weak;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Interval of the attempts to finish changes.
const PERIOD: Duration = Duration::from_secs(1);
/// Intervals between two looks at how full pools are: a look wakes the reactors of all pools.
const LOOK: u32 = 5;
/// Intervals between two times that the position of a pool is stored.
const SAVE: u32 = 60;
/// How full a pool is, in percent, when it is warned of.
const THRESHOLDS: [u64; 3] = [80, 90, 95];
/// Time from the opening of a pool to the first count of the space of its volumes.
const FIRST_COUNT: Duration = Duration::from_secs(5);
/// Time between two counts, at least.
const COUNT_PAUSE: Duration = Duration::from_secs(60);
/// A count reads the whole index of a pool. So many times its duration pass before the next.
const COUNT_PAUSES: u32 = 50;
/// By how much a pool must have become emptier than a threshold before that is warned of again.
const FALL: u64 = 2;

/// Looks after all pools, as long as the daemon lives.
pub async fn look_after_pools(control: Weak<Control>) {
    // Each pool has a task of its own: one whose disk does not answer does not delay the others.
    let mut known: Vec<std::sync::Weak<Pool>> = Vec::new();
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(now) = control.upgrade() else { return };
        known.retain(|pool| pool.strong_count() > 0);
        for pool in now.volumes.pools.list() {
            let pool = Arc::downgrade(&pool);
            if !known.iter().any(|other| other.ptr_eq(&pool)) {
                tokio::task::spawn_local(look_after(control.clone(), pool.clone()));
                tokio::task::spawn_local(count_space(pool.clone()));
                tokio::task::spawn_local(scrub(pool.clone()));
                tokio::task::spawn_local(renew_claim(pool.clone()));
                known.push(pool);
            }
        }
    }
}

async fn look_after(control: Weak<Control>, pool: std::sync::Weak<Pool>) {
    // The number of thresholds that the pool has reached.
    let mut reached = 0;
    for period in 0_u32.. {
        let Some(now) = pool.upgrade().filter(|pool| !pool.has_ended()) else { return };
        if now.finish_changes().await {
            let Some(control) = control.upgrade() else { return };
            announce(&control, &now).await;
        }
        if period.is_multiple_of(LOOK) {
            warn_of(&now, &mut reached).await;
        }
        if period.is_multiple_of(SAVE) {
            let Some(control) = control.upgrade() else { return };
            pool_positions::save(&control, &now).await;
        }
        drop(now);
        tokio::time::sleep(PERIOD).await;
    }
}

/// Renews the claim of a pool that other hosts reach, as long as it is open.
async fn renew_claim(pool: std::sync::Weak<Pool>) {
    while let Some(now) = pool.upgrade().filter(|pool| !pool.has_ended()) {
        let Some(pause) = now.renew_claim().await else { return };
        drop(now);
        tokio::time::sleep(pause).await;
    }
}

/// Counts the space of the volumes of a pool, as long as it is open. A pool that has written nothing since the last count is left
/// alone; a count that a command of an operator has replaced is made later.
async fn count_space(pool: std::sync::Weak<Pool>) {
    let (mut pause, mut counted) = (FIRST_COUNT, None);
    loop {
        tokio::time::sleep(pause).await;
        let Some(now) = pool.upgrade().filter(|pool| !pool.has_ended()) else { return };
        let begin = Clock::Monotonic.now();
        // A pool may end meanwhile.
        let Ok(stats) = now.stats().await else { return };
        let written = Some((stats.log_write_bytes, stats.manifest_write_bytes));
        if counted != written && now.count_space(true).await.is_ok() {
            counted = written;
        }
        pause = COUNT_PAUSE.max(Clock::Monotonic.now().since(begin) * COUNT_PAUSES);
    }
}

/// Scrubs a pool when that is due, as long as it is open.
async fn scrub(pool: std::sync::Weak<Pool>) {
    loop {
        let Some(now) = pool.upgrade().filter(|pool| !pool.has_ended()) else { return };
        let (pause, changed) = (now.scrub(seconds_since_1970()).await, now.scrub_changed());
        drop(now);
        // Whichever comes first.
        let _ = tokio::time::timeout(pause, changed.notified()).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "the time of a pass outlives the daemon")]
fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

async fn warn_of(pool: &Pool, reached: &mut usize) {
    // A pool may end meanwhile.
    let Ok(percent) = pool.used_percent().await else { return };
    let now = thresholds_reached(percent, *reached);
    if now > *reached {
        tracing::warn!(
            pool = pool.name(),
            percent,
            "the pool becomes full: delete snapshots or volumes, or enlarge its disk and call `aryk pool grow`"
        );
    }
    *reached = now;
}

/// How many thresholds a pool has reached that has reached `before` of them so far.
fn thresholds_reached(percent: u64, before: usize) -> usize {
    let is_reached = |(number, threshold): (usize, &u64)| {
        let least = if number < before { threshold - FALL } else { *threshold };
        percent >= least
    };
    THRESHOLDS.iter().enumerate().take_while(|&threshold| is_reached(threshold)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_threshold_is_reached_once_until_the_pool_is_clearly_emptier() {
        let mut reached = 0;
        for (percent, wanted) in [
            (79, 0),
            (80, 1),
            (79, 1),
            (80, 1),
            (77, 0),
            (80, 1),
            (96, 3),
            (94, 3),
            (92, 2),
            (0, 0),
            (100, 3),
        ] {
            reached = thresholds_reached(percent, reached);
            assert_eq!(reached, wanted, "{percent}");
        }
    }
}
