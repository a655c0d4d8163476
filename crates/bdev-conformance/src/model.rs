//! The possible contents of each block of a disk, derived from its requests.

use std::collections::HashMap;

/// A content is identified by its seed (see [`crate::fill`]); a block whose change was aborted, or that was unmapped, may
/// have several.
#[derive(Debug, Default)]
pub struct Model {
    /// Blocks that may hold something other than zeroes.
    blocks: HashMap<u64, Vec<u64>>,
}

impl Model {
    /// The seeds that `lba` may hold.
    pub fn may_hold(&self, lba: u64) -> Vec<u64> {
        self.blocks.get(&lba).cloned().unwrap_or_else(|| vec![0])
    }

    /// Sets the only seed that `lba` may hold.
    pub fn holds(&mut self, lba: u64, seed: u64) {
        self.blocks.insert(lba, vec![seed]);
    }

    /// Adds a seed that `lba` may hold.
    pub fn may_hold_also(&mut self, lba: u64, seed: u64) {
        let mut seeds = self.may_hold(lba);
        seeds.push(seed);
        self.blocks.insert(lba, seeds);
    }
}
