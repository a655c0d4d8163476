//! Saves the reservations and modes that SCSI initiators have set on disks in the state store. Control context.
//!
//! This state outlives the daemon, as all state on which a guest relies does; the part that need not outlive a loss of power (no
//! APTPL, pages not saved) does not outlive a restart of the host. A disk with another UUID than its name had before is another
//! disk, without saved state.

use crate::Control;
use crate::config::Subsystem;
use aryk_bdev::Bdev;
use aryk_scsi::{Mode, Port, SaveRequest, SavedState};
use futures_channel::mpsc;
use serde::{Deserialize, Serialize};
use std::rc::Rc;
use uuid::Uuid;

/// The stored state of a disk.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    uuid: Uuid,
    /// Boot ID of the host at the time.
    boot: String,
    mode: StoredMode,
    saved_mode: StoredMode,
    registrations: Vec<Registration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reservation: Option<Reservation>,
    aptpl: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct StoredMode {
    write_cache: bool,
    protected: bool,
    descriptors: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Registration {
    initiator: u64,
    port: u16,
    key: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Reservation {
    initiator: u64,
    port: u16,
    kind: u8,
}

impl From<Mode> for StoredMode {
    fn from(Mode { write_cache, protected, descriptors }: Mode) -> Self {
        Self { write_cache, protected, descriptors }
    }
}

impl From<StoredMode> for Mode {
    fn from(StoredMode { write_cache, protected, descriptors }: StoredMode) -> Self {
        Self { write_cache, protected, descriptors }
    }
}

impl Stored {
    fn new(saved: &SavedState, uuid: Uuid, boot: &str) -> Self {
        let registration =
            |&(Port { initiator, target: port }, key): &(Port, u64)| Registration { initiator, port, key };
        let reservation = |(Port { initiator, target: port }, kind)| Reservation { initiator, port, kind };
        Self {
            uuid,
            boot: boot.to_owned(),
            mode: saved.mode.into(),
            saved_mode: saved.saved.into(),
            registrations: saved.registrations.iter().map(registration).collect(),
            reservation: saved.reservation.map(reservation),
            aptpl: saved.aptpl,
        }
    }

    /// The part that is still valid, for a disk with this UUID and this boot ID of the host.
    fn saved(self, uuid: Uuid, boot: &str) -> Option<SavedState> {
        if self.uuid != uuid {
            return None;
        }
        let (saved, stays) = (self.saved_mode.into(), self.boot == boot);
        let mut saved =
            SavedState { saved, mode: if stays { self.mode.into() } else { saved }, ..SavedState::default() };
        if stays || self.aptpl {
            let registration = |r: Registration| (Port { initiator: r.initiator, target: r.port }, r.key);
            let reservation = |r: Reservation| (Port { initiator: r.initiator, target: r.port }, r.kind);
            saved.registrations = self.registrations.into_iter().map(registration).collect();
            saved.reservation = self.reservation.map(reservation);
            saved.aptpl = self.aptpl;
        }
        Some(saved)
    }
}

/// Saves the state that initiators set from now on, if a state store is used. Needs a tokio `LocalSet`; must be called before a
/// disk is attached.
///
/// # Errors
/// The host's boot ID cannot be read.
pub fn keep(control: &Rc<Control>) -> std::io::Result<()> {
    if !control.config.has_store() {
        return Ok(());
    }
    let boot: Rc<str> = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().into();
    let (saver, requests) = mpsc::unbounded();
    let (of, then) = (Rc::downgrade(control), Rc::clone(&boot));
    control.scsi.units().persist(saver, move |disk: &Bdev| {
        let stored = of.upgrade()?.config.state(Subsystem::Unit, disk.name())?;
        match serde_json::from_value::<Stored>(stored) {
            Ok(stored) => stored.saved(disk.identity().uuid, &then),
            Err(error) => {
                tracing::error!(disk = disk.name(), %error, "cannot parse the saved SCSI reservations and modes of the disk; they are lost");
                None
            }
        }
    });
    tokio::task::spawn_local(write(Rc::downgrade(control), requests, boot));
    Ok(())
}

/// Writes save requests in their order.
async fn write(
    control: std::rc::Weak<Control>,
    mut requests: mpsc::UnboundedReceiver<SaveRequest>,
    boot: Rc<str>,
) {
    while let Ok(SaveRequest { disk, state: saved, durable, done }) = requests.recv().await {
        let Some(control) = control.upgrade() else { return };
        let Ok(bdev) = control.disks.registry.find(&disk) else { continue };
        let stored = Stored::new(&saved, bdev.identity().uuid, &boot);
        let stored =
            (!saved.is_default()).then(|| serde_json::to_value(stored).expect("the type is made for JSON"));
        let written = control.config.save_state(Subsystem::Unit, &disk, stored, durable);
        tokio::task::spawn_local(async move {
            let is_saved = match written {
                Some(written) => matches!(written.await, Ok(Ok(()))),
                None => true,
            };
            // The unit may have been removed.
            let _ = done.send(is_saved);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_outlives_the_daemon_and_durable_state_the_host() {
        let uuid = Uuid::new_v4();
        let port = Port { initiator: 3 << 60, target: 1 };
        let mode = Mode { write_cache: false, ..Mode::default() };
        let saved = SavedState {
            mode,
            registrations: vec![(port, 7)],
            reservation: Some((port, 5)),
            ..SavedState::default()
        };
        let stored = |saved: &SavedState| {
            let stored = serde_json::to_value(Stored::new(saved, uuid, "monday")).unwrap();
            serde_json::from_value::<Stored>(stored).unwrap()
        };
        assert_eq!(stored(&saved).saved(uuid, "monday"), Some(saved.clone()), "a restart of the daemon");
        assert_eq!(
            stored(&saved).saved(uuid, "tuesday"),
            Some(SavedState::default()),
            "a restart of the host"
        );
        let durable = SavedState { aptpl: true, saved: mode, ..saved };
        assert_eq!(stored(&durable).saved(uuid, "tuesday"), Some(durable.clone()));
        assert_eq!(stored(&durable).saved(Uuid::new_v4(), "monday"), None, "another disk");
    }
}
