//! What a verified read costs while nothing of the index is in memory.

use super::compact::merge_all;
use super::rig::{Rig, facts, settings};
use super::wide::{flush_levels, pattern};
use crate::read::dense_header_len;
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

const PAGE: u64 = BLOCK as u64;

/// What one read of a block costs: operations of the store, bytes of index pages and checksums, bytes of data.
#[derive(PartialEq, Eq, Debug)]
struct Cost {
    ops: u64,
    index: u64,
    data: u64,
}

fn cost_of_block(rig: &mut Rig, volume: VolumeId, block: u64) -> Cost {
    rig.settle();
    let (stats, ops) = (rig.pool.stats(), rig.ops);
    rig.read(volume, block * 8, 8);
    let now = rig.pool.stats();
    Cost {
        ops: rig.ops - ops,
        index: now.index_read_bytes - stats.index_read_bytes,
        data: now.data_read_bytes - stats.data_read_bytes,
    }
}

/// A volume with one range, whose blocks were written one by one if it is not dense, with an empty cache.
fn cold(is_dense: bool) -> (Rig, VolumeId) {
    let facts = StoreFacts { blob_units: 20_480, ..facts() };
    let mut rig = Rig::with(3, Settings { dense_writes: is_dense, ..settings() }, facts);
    let volume = rig.create("a", RANGE, Origin::Empty);
    let content = pattern(1, RANGE);
    if is_dense {
        rig.write(volume, 0, &content);
    } else {
        let mut blocks: Vec<_> = (0..1024).collect();
        rig.rng.shuffle(&mut blocks);
        blocks.iter().for_each(|at| rig.write(volume, at * 8, &content[*at as usize * 4096..][..4096]));
    }
    merge_all(&mut rig);
    rig.reopen(false);
    (rig, volume)
}

#[test]
fn blocks_that_were_written_alone_have_their_checksums_in_the_index() {
    let (mut rig, volume) = cold(false);
    // The root, a leaf, the block.
    assert_eq!(cost_of_block(&mut rig, volume, 500), Cost { ops: 3, index: 2 * PAGE, data: PAGE });
    assert_eq!(cost_of_block(&mut rig, volume, 501), Cost { ops: 1, index: 0, data: PAGE });
    // Another leaf.
    assert_eq!(cost_of_block(&mut rig, volume, 0), Cost { ops: 2, index: PAGE, data: PAGE });
}

#[test]
fn each_level_that_may_have_the_block_is_looked_at() {
    let (mut rig, volume) = cold(false);
    rig.write(volume, 8, &pattern(2, 8));
    rig.write(volume, 8 * 1000, &pattern(3, 8));
    flush_levels(&mut rig);
    rig.reopen(false);
    // The newer level has one page.
    assert_eq!(cost_of_block(&mut rig, volume, 500), Cost { ops: 4, index: 3 * PAGE, data: PAGE });
    assert_eq!(cost_of_block(&mut rig, volume, 501), Cost { ops: 1, index: 0, data: PAGE });
}

#[test]
fn dense_frames_have_their_checksums_in_front_of_the_data() {
    let (mut rig, volume) = cold(true);
    let header = u64::from(dense_header_len(512));
    // The only page of the index, the header, the block.
    assert_eq!(cost_of_block(&mut rig, volume, 500), Cost { ops: 3, index: PAGE + header, data: PAGE });
    assert!((4096..=5120).contains(&header), "{header} bytes of header");
    assert_eq!(cost_of_block(&mut rig, volume, 0), Cost { ops: 1, index: 0, data: PAGE });
}

#[test]
fn reads_pay_for_a_merge_of_the_levels_that_writes_leave() {
    let mut rig = Rig::new(5);
    let volume = rig.create("a", RANGE, Origin::Empty);
    rig.write(volume, 0, &pattern(1, RANGE));
    merge_all(&mut rig);
    (0..100).for_each(|at| rig.write(volume, at * 80, &pattern(at, 8)));
    flush_levels(&mut rig);
    let levels = |rig: &Rig| rig.pool.partitions.iter().map(|partition| partition.index.levels().len()).max();
    assert_eq!(levels(&rig), Some(2));
    let all = rig.pool.stats().index_entries;
    let mut reads = 0;
    while levels(&rig) == Some(2) {
        assert_eq!(rig.read(volume, reads * 8 % RANGE, 8).len(), 4096);
        reads += 1;
    }
    // Reads go on while the merge does.
    assert!((4 * all..4 * all + 100).contains(&reads), "{reads} reads for {all} entries");
    assert_eq!(rig.pool.stats().index_entries, 1024);
    let written = rig.pool.stats().index_write_bytes;
    assert!(rig.pool.jobs.has_merged(), "once");
    (0..reads).for_each(|at| drop(rig.read(volume, at * 8 % RANGE, 8)));
    rig.settle();
    assert_eq!(rig.pool.stats().index_write_bytes, written, "one level has nothing to merge");
}
