//! Reports suppressed log lines after the last line of a burst. Control context.

use crate::Control;
use std::rc::Weak;
use std::time::Duration;

/// Interval of the check.
const PERIOD: Duration = Duration::from_secs(5);

/// Logs how many lines about disks and controllers were suppressed, as long as the daemon lives.
pub async fn log_left_out(control: Weak<Control>) {
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(control) = control.upgrade() else { return };
        control.disks.registry.list().iter().for_each(|bdev| bdev.device().tell_left_out());
        control.controllers.tell_left_out();
    }
}
