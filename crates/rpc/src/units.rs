//! What initiators have set of disks, in the state store: their reservations, and their modes. Control context.
//!
//! It outlives the daemon, as all does that a guest relies on; what of it is not to outlive a loss of power (APTPL, saved pages) does not outlive a restart of
//! the host. A disk that has another UUID than the one of that name had is another disk, and has nothing.

use crate::Control;
use aryk_bdev::Bdev;
use aryk_scsi::{Keep, Kept, Mode, Port};
use futures_channel::mpsc;
use serde::{Deserialize, Serialize};
use std::rc::Rc;
use uuid::Uuid;

/// What is stored of a disk.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    uuid: Uuid,
    /// The host's start in which it was.
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
    fn new(kept: &Kept, uuid: Uuid, boot: &str) -> Self {
        let registration =
            |&(Port { initiator, target: port }, key): &(Port, u64)| Registration { initiator, port, key };
        let reservation = |(Port { initiator, target: port }, kind)| Reservation { initiator, port, kind };
        Self {
            uuid,
            boot: boot.to_owned(),
            mode: kept.mode.into(),
            saved_mode: kept.saved.into(),
            registrations: kept.registrations.iter().map(registration).collect(),
            reservation: kept.reservation.map(reservation),
            aptpl: kept.aptpl,
        }
    }

    /// What of it is still so, for a disk with this UUID, in this start of the host.
    fn kept(self, uuid: Uuid, boot: &str) -> Option<Kept> {
        if self.uuid != uuid {
            return None;
        }
        let (saved, stays) = (self.saved_mode.into(), self.boot == boot);
        let mut kept = Kept { saved, mode: if stays { self.mode.into() } else { saved }, ..Kept::default() };
        if stays || self.aptpl {
            let registration = |r: Registration| (Port { initiator: r.initiator, target: r.port }, r.key);
            let reservation = |r: Reservation| (Port { initiator: r.initiator, target: r.port }, r.kind);
            kept.registrations = self.registrations.into_iter().map(registration).collect();
            kept.reservation = self.reservation.map(reservation);
            kept.aptpl = self.aptpl;
        }
        Some(kept)
    }
}

/// Keeps what initiators set from now on, if there is a state store. Needs a tokio `LocalSet`; no disk is attached yet.
///
/// # Errors
/// The host does not tell its start.
pub fn keep(control: &Rc<Control>) -> std::io::Result<()> {
    if !control.config.has_store() {
        return Ok(());
    }
    let boot: Rc<str> = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().into();
    let (keeper, keeping) = mpsc::unbounded();
    let (of, then) = (Rc::downgrade(control), Rc::clone(&boot));
    control.scsi_controllers.units().keep(keeper, move |disk: &Bdev| {
        let stored = of.upgrade()?.config.kept(disk.name())?;
        match serde_json::from_value::<Stored>(stored) {
            Ok(stored) => stored.kept(disk.identity().uuid, &then),
            Err(error) => {
                tracing::error!(disk = disk.name(), %error, "what initiators have set of it is not understood, and lost");
                None
            }
        }
    });
    tokio::task::spawn_local(write(Rc::downgrade(control), keeping, boot));
    Ok(())
}

/// Writes what comes, one after the other of each disk.
async fn write(control: std::rc::Weak<Control>, mut keeping: mpsc::UnboundedReceiver<Keep>, boot: Rc<str>) {
    while let Ok(Keep { disk, kept, durable, done }) = keeping.recv().await {
        let Some(control) = control.upgrade() else { return };
        let Ok(bdev) = control.disks.registry.find(&disk) else { continue };
        let stored = Stored::new(&kept, bdev.identity().uuid, &boot);
        let stored = (!kept.is_default()).then(|| serde_json::to_value(stored).expect("it is made for JSON"));
        let written = control.config.keep(&disk, stored, durable);
        tokio::task::spawn_local(async move {
            let is_kept = match written {
                Some(written) => matches!(written.await, Ok(Ok(()))),
                None => true,
            };
            // The unit may have gone.
            let _ = done.send(is_kept);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_outlives_what() {
        let uuid = Uuid::new_v4();
        let port = Port { initiator: 3 << 60, target: 1 };
        let mode = Mode { write_cache: false, ..Mode::default() };
        let kept =
            Kept { mode, registrations: vec![(port, 7)], reservation: Some((port, 5)), ..Kept::default() };
        let stored = |kept: &Kept| {
            let stored = serde_json::to_value(Stored::new(kept, uuid, "monday")).unwrap();
            serde_json::from_value::<Stored>(stored).unwrap()
        };
        assert_eq!(stored(&kept).kept(uuid, "monday"), Some(kept.clone()), "the daemon's end");
        assert_eq!(stored(&kept).kept(uuid, "tuesday"), Some(Kept::default()), "the host's");
        let durable = Kept { aptpl: true, saved: mode, ..kept };
        assert_eq!(stored(&durable).kept(uuid, "tuesday"), Some(durable.clone()));
        assert_eq!(stored(&durable).kept(Uuid::new_v4(), "monday"), None, "another disk");
    }
}
