//! What the log left out: told when no line comes that would. Control context.

use crate::Control;
use std::rc::Weak;
use std::time::Duration;

/// How often it is looked for.
const PERIOD: Duration = Duration::from_secs(5);

/// Tells the log, for as long as the daemon lives, how many lines about disks and controllers it does not have.
pub async fn keep_telling(control: Weak<Control>) {
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(control) = control.upgrade() else { return };
        control.disks.registry.list().iter().for_each(|bdev| bdev.device().tell_left_out());
        control.controllers.tell_left_out();
        control.scsi_controllers.tell_left_out();
    }
}
