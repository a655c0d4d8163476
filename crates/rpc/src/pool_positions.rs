//! Stores how far pools of volumes were when they were open last, so that a base is refused which came back older, as from an old
//! backup. Control context.
//!
//! The position of a pool is stored when the pool was created or opened, now and then while it is open, and when the daemon ends.
//! A base that is as old as a stored position or newer passes; what was written between the latest stored position and the end of
//! a daemon that was killed is not missed.

use crate::Control;
use crate::config::Subsystem;
use aryk_bdev_volume::{Pool, Position};
use uuid::Uuid;

/// The stored positions of a pool's shards; empty if none are stored.
pub(crate) fn stored(control: &Control, pool: Uuid) -> Vec<Position> {
    let Some(stored) = control.config.state(Subsystem::Pools, &pool.to_string()) else { return Vec::new() };
    match serde_json::from_value::<Vec<(u64, u64)>>(stored) {
        Ok(all) => all.into_iter().map(|(generation, sequence)| Position { generation, sequence }).collect(),
        Err(error) => {
            tracing::error!(%pool, %error, "cannot parse the stored position of the pool; an older copy of it would be opened");
            Vec::new()
        }
    }
}

/// Stores the positions of a pool, if they differ from the stored ones.
pub(crate) async fn save(control: &Control, pool: &Pool) {
    // A pool may end meanwhile.
    let Ok(positions) = pool.positions().await else { return };
    if positions != stored(control, pool.uuid()) {
        let all: Vec<_> =
            positions.iter().map(|Position { generation, sequence }| (generation, sequence)).collect();
        let all = serde_json::to_value(all).expect("numbers are valid JSON");
        // Without a state store there is nothing to write. Nothing waits for the write.
        drop(control.config.save_state(Subsystem::Pools, &pool.uuid().to_string(), Some(all), false));
    }
}

/// Stores the positions of all pools.
pub(crate) async fn save_all(control: &Control) {
    for pool in control.volumes.pools.list() {
        save(control, &pool).await;
    }
}

/// Removes the stored positions of a pool that is deleted.
pub(crate) fn forget(control: &Control, pool: Uuid) {
    drop(control.config.save_state(Subsystem::Pools, &pool.to_string(), None, false));
}
