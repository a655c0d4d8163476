//! Long chains of snapshots and of clones: what a read costs in operations of the store, and deletions in any order.

use super::rig::{Rig, facts, settings};
use crate::*;

const BLOCKS: usize = 4096;
const SNAPSHOTS: usize = 1000;
const CLONES: usize = 30;

/// A pool with a volume, each block of which is written once, in an order.
struct Chain {
    rig: Rig,
    volume: VolumeId,
    order: Vec<usize>,
    /// Snapshots, and the number of blocks that each has.
    snapshots: Vec<(VolumeId, usize)>,
}

const fn byte(block: usize) -> u8 {
    (block % 251) as u8 + 1
}

impl Chain {
    /// With so many snapshots between the writes.
    fn new(snapshots: usize) -> Self {
        // The cache has a few pages of the index only.
        let settings = Settings { cache_bytes: 64 << 10, manifest_bytes_per_turn: 64 << 10, ..settings() };
        let mut rig = Rig::with(7, settings, facts());
        // Blocks stay where they are, so that costs can be compared.
        rig.pool.pause(true);
        let volume = rig.create("volume", BLOCKS as u64 * 8, Origin::Empty);
        let mut order: Vec<_> = (0..BLOCKS).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut order);
        let mut chain = Self { rig, volume, order, snapshots: Vec::new() };
        for number in 0..SNAPSHOTS {
            let (start, end) = (BLOCKS * number / SNAPSHOTS, BLOCKS * (number + 1) / SNAPSHOTS);
            for at in start..end {
                let block = chain.order[at];
                chain.rig.write(volume, block as u64 * 8, &[byte(block); 4096]);
            }
            if number < snapshots {
                let id = chain.rig.snapshot(volume, &format!("s{number}"));
                chain.snapshots.push((id, end));
            }
        }
        chain
    }

    /// Reads single blocks of a volume that has the first so many of the order. Returns the operations of the store that all
    /// reads have needed, and the most of one.
    fn cost(&mut self, volume: VolumeId, count: usize) -> (u64, u64) {
        let mut expected = vec![0; BLOCKS];
        self.order[..count].iter().for_each(|block| expected[*block] = byte(*block));
        self.rig.settle();
        let (start, mut most) = (self.rig.ops, 0);
        for block in self.order.clone().into_iter().step_by(3) {
            let before = self.rig.ops;
            assert_eq!(self.rig.read(volume, block as u64 * 8, 8), [expected[block]; 4096]);
            most = most.max(self.rig.ops - before);
        }
        (self.rig.ops - start, most)
    }

    fn delete(&mut self, id: VolumeId) {
        assert_eq!(self.rig.command(Command::Delete(id)), Ok(Answer::Done));
    }

    /// A check finds nothing, nor anything that is left of what was deleted.
    fn check(&mut self) {
        self.rig.settle();
        let Ok(Answer::Check(report)) = self.rig.command(Command::Check { data: true, repair: false }) else {
            panic!("no report")
        };
        assert!(report.is_clean(), "{report:?}");
    }
}

#[test]
fn reads_cost_the_same_with_any_number_of_snapshots() {
    let mut without = Chain::new(0);
    let volume = without.volume;
    let expected = without.cost(volume, BLOCKS);
    assert!(expected.0 > BLOCKS.div_ceil(3) as u64, "pages of the index are read: {expected:?}");
    for count in [1, 10, 100, SNAPSHOTS] {
        let mut chain = Chain::new(count);
        let volume = chain.volume;
        assert_eq!(chain.cost(volume, BLOCKS), expected, "{count} snapshots");
        chain.rig.rng.shuffle(&mut chain.snapshots);
        while let Some((id, _)) = chain.snapshots.pop() {
            chain.delete(id);
            if chain.snapshots.len() == count / 2 {
                assert!(
                    chain.cost(volume, BLOCKS).0 <= expected.0,
                    "{count} snapshots, half of them deleted"
                );
                for (id, has) in chain.snapshots.clone().into_iter().take(5) {
                    assert!(chain.cost(id, has).1 <= expected.1);
                }
            }
        }
        chain.check();
        assert!(chain.cost(volume, BLOCKS).0 <= expected.0, "{count} snapshots, all of them deleted");
    }
}

#[test]
fn clones_of_clones_read_data_once_and_go_in_any_order() {
    let mut chain = Chain::new(0);
    let (root, mut last) = (chain.volume, chain.volume);
    let without = chain.cost(root, BLOCKS).1;
    let mut all = vec![root];
    for number in 1..=CLONES {
        let snapshot = chain.rig.snapshot(last, &format!("s{number}"));
        last = chain.rig.create(&format!("c{number}"), BLOCKS as u64 * 8, Origin::Snapshot(snapshot));
        all.extend([snapshot, last]);
        // The same data again: the block is the clone's own.
        let block = chain.order[number];
        chain.rig.write(last, block as u64 * 8, &[byte(block); 4096]);
    }
    // A page of the index for each clone at most, and the data once.
    let (_, most) = chain.cost(last, BLOCKS);
    assert!(most <= without + CLONES as u64, "{most} operations, {without} without clones");
    let own = chain.order[CLONES] as u64 * 8;
    let before = chain.rig.ops;
    chain.rig.read(last, own, 8);
    assert!(chain.rig.ops - before <= without, "a block of the clone's own");
    chain.rig.rng.shuffle(&mut all);
    while let Some(id) = all.pop() {
        chain.delete(id);
        if all.len().is_multiple_of(10) {
            for id in all.iter().take(2) {
                chain.cost(*id, BLOCKS);
            }
        }
    }
    chain.check();
    assert_eq!(chain.rig.pool.stats().live_bytes, 0);
}
