//! Disks that appear and disappear by themselves: no call has created them, so that no call handles the configuration that refers
//! to them. Control context.
//!
//! Objects that need such a disk, such as a controller or a limit configured before a restart, are created when the disk appears.
//! The settings of the disk are kept when it disappears, and are applied again when it comes back. A blk controller without its
//! disk fails its guest's requests; when the disk comes back, the controller is created again, and its front-end connects again.
//!
//! An NVMe controller that ends by itself takes its disks with it. It is absent then, with the disks that calls have built on its
//! disks; the daemon tries to attach it again, as it does with all absent objects. If its drive may have lost acknowledged
//! writes, these attempts fail until a client attaches the controller.

use crate::config::{Call, Subsystem};
use crate::methods::nvme::{Followed, follow_announced, follow_discoveries, follow_plugged, is_attached};
use crate::methods::waiting::make_waiting;
use crate::methods::{nvmf, qos, rekey, vhost_blk, vhost_scsi, volumes};
use crate::{Control, Methods, restore};
use aryk_bdev::Change;
use std::rc::{Rc, Weak};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Follows changes of the disks as long as the daemon lives. Needs a tokio `LocalSet`.
pub fn follow_disks(control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    let (sender, changes) = unbounded_channel();
    control.disks.registry.observe(move |change, bdev| {
        if matches!(change, Change::Added | Change::Removed) {
            // The receiver has ended with the daemon.
            let _ = sender.send((change, bdev.name().to_owned()));
        }
    });
    tokio::task::spawn_local(follow(Rc::downgrade(control), Rc::downgrade(methods), changes));
    tokio::task::spawn_local(follow_failures(Rc::downgrade(control), Rc::downgrade(methods)));
    tokio::task::spawn_local(follow_plugged(Rc::downgrade(control), Rc::downgrade(methods)));
    let (sender, started) = unbounded_channel();
    control.nvme.discovering.replace(Some(sender));
    tokio::task::spawn_local(follow_discoveries(Rc::downgrade(control), Rc::downgrade(methods), started));
    let (sender, started) = unbounded_channel();
    control.nvme.browsing.replace(Some(sender));
    tokio::task::spawn_local(follow_announced(Rc::downgrade(control), Rc::downgrade(methods), started));
    rekey::follow_all(control);
    volumes::follow(control);
    let (sender, attached) = unbounded_channel();
    control.nvme.attached.replace(Some(sender));
    tokio::task::spawn_local(follow_controllers(Rc::downgrade(control), Rc::downgrade(methods), attached));
}

/// Awaits the end of each NVMe controller that is attached.
async fn follow_controllers(
    control: Weak<Control>,
    methods: Weak<Methods<Control>>,
    mut attached: UnboundedReceiver<Followed>,
) {
    while let Some(controller) = attached.recv().await {
        let (control, methods) = (Weak::clone(&control), Weak::clone(&methods));
        tokio::task::spawn_local(async move {
            controller.ended().await;
            let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
            if !control.is_closing() {
                keep_controller(&control, &methods, &controller);
            }
        });
    }
}

/// Keeps an NVMe controller that has ended by itself in the configuration, as absent. A call that detaches a controller removes
/// its note before.
fn keep_controller(control: &Rc<Control>, methods: &Rc<Methods<Control>>, ended: &Followed) {
    let name = ended.name();
    if is_attached(control, name) {
        return;
    }
    if ended.may_have_lost_writes() {
        // An attach by itself would give the VMs old data without an error.
        control.config.changed(Subsystem::Nvme, name, "may_have_lost_writes", true);
    }
    let Some(key) = control.config.lost(Subsystem::Nvme, name) else { return };
    let why = ended.last_failure().unwrap_or_else(|| "the controller has ended".into());
    control.config.failed(key, &why);
    restore::retry_failed(control, methods);
}

/// Makes disks be retried that waited for their bases and could not be created.
async fn follow_failures(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let Some(start_up) = control.upgrade().map(|control| Rc::clone(&control.start_up)) else { return };
    loop {
        start_up.waiting_failed.notified().await;
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        restore::retry_failed(&control, &methods);
    }
}

async fn follow(
    control: Weak<Control>,
    methods: Weak<Methods<Control>>,
    mut changes: UnboundedReceiver<(Change, String)>,
) {
    while let Some((change, disk)) = changes.recv().await {
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        // The call that created the disk handles its notes; during the restoration, the objects that need the disk are tried
        // anyway.
        if change == Change::Removed {
            volumes::forget_gone(&control);
        }
        let is_leaving = control.nvme.leaving.borrow().contains(&disk);
        let is_of_call = || {
            control.disks.is_made(&disk) && !(change == Change::Added && control.disks.has_come_back(&disk))
        };
        if is_leaving || is_of_call() || !control.start_up.is_over() {
            continue;
        }
        let is_there = control.disks.find(&disk).is_ok();
        match change {
            Change::Added if is_there => {
                drop(volumes::begin_search(&control, &disk));
                make_waiting(&control, &disk).await;
                // A controller ends when the requests of its VM have completed. Other disks do not wait for that.
                tokio::task::spawn_local(async move {
                    vhost_blk::end_without_disk(&control, &disk).await;
                    restore::create_dependents_of(&disk, &control, &methods).await;
                });
            }
            Change::Removed if !is_there => {
                keep_settings(&control, &disk);
                keep_disks_above(&control);
            }
            // The disk has disappeared or come back in between: that is the next change.
            Change::Added | Change::Removed | Change::Resized | Change::Stalled | Change::Resumed => {}
        }
    }
}

/// Keeps the settings of a removed disk in the configuration.
fn keep_settings(control: &Control, disk: &str) {
    let namespaces = control.config.calls_that(Subsystem::Nvmf, |call| nvmf::disk_of(call) == Some(disk));
    control.config.went(Subsystem::Nvmf, |call| nvmf::is_of_one(call, &namespaces));
    for subsystem in [Subsystem::Watch, Subsystem::Qos, Subsystem::VhostScsi] {
        control.config.went(subsystem, |call| disk_of(subsystem, call) == Some(disk));
    }
}

/// Keeps the disks that were removed with a disk below them in the configuration, with their settings: a call has created each of
/// them, but no call has removed it.
fn keep_disks_above(control: &Control) {
    for disk in control.disks.take_lost() {
        // The parts of a split disk have one note.
        if let Some(key) = control.config.lost(Subsystem::Bdev, &disk) {
            control.config.failed(key, "the disk below it is gone");
        }
        keep_settings(control, &disk);
    }
}

/// The disk of which a call sets something.
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
