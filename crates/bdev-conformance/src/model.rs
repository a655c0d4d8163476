//! What each block of a disk may hold, as far as its requests say.

use std::collections::HashMap;

/// Contents are known by their seed (see [`crate::fill`]); of a block whose change was aborted, or that was unmapped, there may be several.
#[derive(Debug, Default)]
pub struct Model {
    /// Blocks that may hold something else than zeroes.
    blocks: HashMap<u64, Vec<u64>>,
}

impl Model {
    /// What `lba` may hold.
    pub fn may_hold(&self, lba: u64) -> Vec<u64> {
        self.blocks.get(&lba).cloned().unwrap_or_else(|| vec![0])
    }

    /// `lba` holds this, and nothing else.
    pub fn holds(&mut self, lba: u64, seed: u64) {
        self.blocks.insert(lba, vec![seed]);
    }

    /// `lba` holds this, or what it held.
    pub fn may_hold_also(&mut self, lba: u64, seed: u64) {
        let mut seeds = self.may_hold(lba);
        seeds.push(seed);
        self.blocks.insert(lba, seeds);
    }
}
