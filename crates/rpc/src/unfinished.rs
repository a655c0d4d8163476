//! Finishes changes of pools that a shard has refused. Control context.

use crate::Control;
use std::rc::Weak;
use std::time::Duration;

/// Interval of the attempts.
const PERIOD: Duration = Duration::from_secs(1);

/// Tries such changes again and again, as long as the daemon lives.
pub async fn finish_changes(control: Weak<Control>) {
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(control) = control.upgrade() else { return };
        control.volumes.pools.finish_changes().await;
    }
}
