//! What a channel goes by of its device, which may change while the disk is open: limits, operations, and whether it can be written. Reactor context.

use super::{BdevChannel, offered};
use crate::{Device, Limits};

/// The limits of a device.
///
/// # Panics
/// If they let nothing through.
pub(super) fn limits(device: &dyn Device) -> Limits {
    let limits = device.limits();
    assert!(limits.depth > 0 && limits.transfer_blocks > 0 && limits.segments > 0, "{limits:?}");
    assert!(limits.unmap_blocks > 0 && limits.write_zeroes_blocks > 0, "{limits:?}");
    limits
}

impl BdevChannel {
    /// Goes by the properties that the device has now. What the device has stays there, also beyond its new depth; all that is sent from now on is
    /// within the new limits. Requests that were accepted before and wait are sent, though new ones of their kind are refused.
    pub(super) fn reload_properties(&mut self) {
        let device = self.bdev.device();
        let limits = limits(&**device);
        self.credits += i64::from(limits.depth) - i64::from(self.limits.depth);
        self.limits = limits;
        self.ops = device.ops();
        self.offered = offered(self.ops);
        self.writable = self.descriptor.is_writable();
    }
}
