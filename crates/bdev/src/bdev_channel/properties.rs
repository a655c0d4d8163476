//! A disk's properties may change while it is open: its limits, its operations, and whether it can be written. Reactor context.

use super::BdevChannel;
use super::shape::Shape;

impl BdevChannel {
    /// Applies the properties that the device has now. What the device has stays there, also beyond its new depth;
    /// everything that is sent from now on is within the new limits. Requests that were accepted before and wait are sent,
    /// though new ones of their kind are refused; a compound request that the device no longer does fails.
    pub(super) fn reload_properties(&mut self) {
        self.shape = Shape::new(&**self.bdev().device(), self.descriptor.is_writable());
        self.credits.set_depth(self.shape.limits.depth);
    }
}
