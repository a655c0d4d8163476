//! A drive that comes back at another place: the controller that waits for it goes on there.
//!
//! The operator or hot-plug attaches the other place. Once the drive there is identified, that attach ends, and the controller
//! that waits opens the drive at its new place.

use super::{Command, Life, Thread, now};
use crate::{Error, Location, Phase};
use aryk_nvme::claims::ControllerInfo;

/// Whether both are the same controller of the same drive. The other controllers of a drive with several ports could still
/// execute commands that this process has given up.
pub(crate) fn is_same(one: &ControllerInfo, other: &ControllerInfo) -> bool {
    let identity = |info: &ControllerInfo| (info.vendor, info.controller_id);
    one.serial == other.serial && one.model == other.model && identity(one) == identity(other)
}

impl Thread {
    /// Whether another controller waits for this drive; the caller of the attach gets the error.
    pub(super) fn is_awaited_by_another(&mut self) -> bool {
        let (Life::Driven(driven), Some(_)) = (&self.life, &self.attached) else { return false };
        let Some(info) = driven.controller.info() else { return false };
        let Some(other) = self.controllers.away_with(info) else { return false };
        let error = Error::Moved {
            location: self.config.location.to_string(),
            serial: info.serial.clone(),
            name: other.name.clone(),
        };
        tracing::info!(controller = other.name, location = %self.config.location, "the NVMe drive is back at another place");
        if let Some(attached) = self.attached.take() {
            // The caller may be gone.
            let _ = attached.send(Err(error));
        }
        self.awaited_by = Some(other);
        self.is_stopping = true;
        self.are_removed = true;
        true
    }

    /// Gives the place to the controller that waits for the drive: the function is closed.
    pub(super) fn give_place(&mut self) {
        if let Some(other) = self.awaited_by.take() {
            other.send(Command::Moved(self.config.location.clone()));
        }
    }

    /// Opens the drive at another place from now on.
    pub(super) fn moved(&mut self, location: Location) {
        // It may have come back meanwhile, or be given up.
        if self.has_controller() || self.is_stopping || self.shared.info().phase != Phase::Away {
            return;
        }
        // The old place does not delay the new one.
        self.life = Life::Away;
        self.shared.info().location = location.to_string();
        self.config.location = location;
        self.next_open = now();
    }
}
