//! Doorbells, in registers or in shadow memory. PCIe Transport 1.0 §3.1.2; NVMe 2.0 §5.8 (Doorbell Buffer Config). Reactor
//! context.

use std::sync::atomic::{Ordering, fence};

use aryk_dma::GuestArea;
use aryk_pci::Registers;

/// The shadow doorbells and the EventIdx values of a controller. The controller reads a shadow doorbell in memory; its
/// EventIdx is the value of the doorbell that the controller wants to be notified of.
#[derive(Clone, Debug)]
pub(crate) struct Shadow {
    pub(crate) doorbells: GuestArea,
    pub(crate) event_indices: GuestArea,
}

/// One doorbell.
#[derive(Debug)]
pub(crate) struct Doorbell {
    registers: Registers,
    /// In both `registers` and the shadow areas.
    offset: u64,
    shadow: Option<Shadow>,
    /// Writes to the register.
    rung: u64,
}

impl Doorbell {
    pub(crate) const fn new(registers: Registers, offset: u64, shadow: Option<Shadow>) -> Self {
        Self { registers, offset, shadow, rung: 0 }
    }

    pub(crate) const fn rung(&self) -> u64 {
        self.rung
    }

    /// Announces a new value of the index, which was `old`.
    #[inline]
    pub(crate) fn ring(&mut self, old: u16, new: u16) {
        if let Some(shadow) = &self.shadow {
            let offset = self.offset as usize;
            // The upper half of the 32 bits stays 0. The store also releases the entries before it.
            shadow.doorbells.store_u16(offset, new, Ordering::Release);
            // The controller writes its EventIdx and then reads the doorbell once more: one of us sees the other's store.
            fence(Ordering::SeqCst);
            let event = shadow.event_indices.load_u16(offset, Ordering::Relaxed);
            if !passes(event, old, new) {
                return;
            }
        }
        self.rung += 1;
        self.registers.write(self.offset, new.into());
    }
}

/// Whether the step from `old` to `new` passes `event`, so that the controller wants the register to be written. Around the
/// end of a queue the result may be a needless yes, never a wrong no: the indices wrap at the queue's size, the sums at 2¹⁶.
const fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_register_is_written_when_the_index_passes_the_event() {
        assert!(passes(3, 3, 4) && passes(3, 2, 9) && passes(3, 3, 9));
        assert!(!passes(9, 3, 4) && !passes(3, 4, 9));
        // A queue of 8 entries.
        for old in 0..8_u16 {
            for step in 1..8 {
                let new = (old + step) % 8;
                for ahead in 0..step {
                    assert!(passes((old + ahead) % 8, old, new), "event {ahead} behind {old}, to {new}");
                }
            }
        }
    }
}
