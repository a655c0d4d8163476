//! Disks that come and go by themselves: no call made them, so no call sees to what is configured of them. Control context.
//!
//! What needs such a disk, as a controller or a limit that was configured before a restart, is made when it comes. What was set of it is kept when it goes,
//! and set again when it comes back.

use crate::config::{Call, Subsystem};
use crate::methods::waiting::make_waiting;
use crate::methods::{qos, vhost_scsi};
use crate::{Control, Methods, restore};
use aryk_bdev::Change;
use std::rc::{Rc, Weak};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Follows the disks from now on, for as long as the daemon lives. Needs a tokio `LocalSet`.
pub fn follow_disks(control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    let (sender, changes) = unbounded_channel();
    control.disks.registry.observe(move |change, bdev| {
        if change != Change::Resized {
            // Whoever followed has ended with the daemon.
            let _ = sender.send((change, bdev.name().to_owned()));
        }
    });
    tokio::task::spawn_local(follow(Rc::downgrade(control), Rc::downgrade(methods), changes));
}

async fn follow(
    control: Weak<Control>,
    methods: Weak<Methods<Control>>,
    mut changes: UnboundedReceiver<(Change, String)>,
) {
    while let Some((change, disk)) = changes.recv().await {
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        // The call that made it sees to that; while all is made again, what needs it is tried anyway.
        if control.disks.is_made(&disk) || !control.start_up.is_over() {
            continue;
        }
        let is_there = control.disks.find(&disk).is_ok();
        match change {
            Change::Added if is_there => {
                make_waiting(&control, &disk).await;
                restore::make_those_of(&disk, &control, &methods).await;
            }
            Change::Removed if !is_there => keep_what_was_set(&control, &disk),
            // It has gone, or come back, meanwhile: that is the next change.
            Change::Added | Change::Removed | Change::Resized => {}
        }
    }
}

/// What was set of a disk that is gone stays configured.
fn keep_what_was_set(control: &Control, disk: &str) {
    for subsystem in [Subsystem::Watch, Subsystem::Qos, Subsystem::VhostScsi] {
        control.config.went(subsystem, |call| disk_of(subsystem, call) == Some(disk));
    }
}

/// The disk that a call sets something of.
fn disk_of(subsystem: Subsystem, call: &Call) -> Option<&str> {
    let param = match (subsystem, &*call.method) {
        (Subsystem::Watch, _) | (Subsystem::Qos, qos::SET_LIMIT) => "name",
        (Subsystem::Qos, qos::ADD) | (Subsystem::VhostScsi, vhost_scsi::ADD) => "bdev_name",
        _ => return None,
    };
    call.params.get(param)?.as_str()
}

#[cfg(test)]
mod tests;
