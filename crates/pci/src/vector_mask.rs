//! The mask of an interrupt vector, which a reactor sets and clears. Any context.

use crate::Registers;
use crate::config::{MSIX_CONTROL, MSIX_ENTRY};

/// Vector control of an MSI-X vector: the mask bit (PCI Local Bus 3.0 §6.8.2.9). The other bits are reserved, and 0.
const MASKED: u32 = 1;

/// The mask of an MSI-X vector in the function's mapped table. Clones share the mapping, and keep it.
///
/// Both calls are one write to the function: they do not wait, make no system call, and a lost mapping ignores them. The host can
/// unmask a vector by itself, for example when it moves the interrupt to another processor: a masked vector may still signal
/// its eventfd.
#[derive(Clone, Debug)]
pub struct VectorMask(Registers);

impl VectorMask {
    /// The mask of `vector` in a mapped MSI-X table; `None` if the table ends before it.
    pub fn new(table: &Registers, vector: u16) -> Option<Self> {
        table.part(u64::from(vector) * MSIX_ENTRY + MSIX_CONTROL, 4).map(Self)
    }

    /// Masks the vector: the function keeps its next interrupt pending.
    #[inline]
    pub fn mask(&self) {
        self.0.write(0, MASKED);
    }

    /// Unmasks the vector. A pending interrupt is signalled.
    #[inline]
    pub fn unmask(&self) {
        self.0.write(0, 0);
    }

    /// Whether an access found the table gone: the function was removed, or is being reset.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_the_fourth_word_of_its_vector() {
        let bar = Registers::in_memory(4096).unwrap();
        let table = bar.part(2048, 3 * MSIX_ENTRY).unwrap();
        let mask = VectorMask::new(&table, 2).unwrap();
        let words = || (0..1024).filter(|&i| bar.read(4 * i) != 0).collect::<Vec<_>>();
        mask.mask();
        assert_eq!((words(), bar.read(2048 + 2 * 16 + 12)), (vec![512 + 8 + 3], 1));
        mask.unmask();
        assert!(words().is_empty() && !mask.is_lost());
        assert!(VectorMask::new(&table, 3).is_none(), "behind the table");
        assert!(VectorMask::new(&table, u16::MAX).is_none());
    }
}
