//! Scenes of compaction, and what it costs and gains.

use super::rig::{Rig, facts, settings};
use super::wide::{compare, flush_levels, pattern};
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

fn pieces() -> Pieces {
    Pieces { blocks_min: 896, pieces_min: 64, worn_min: 256 }
}

/// Writes blocks of the volume in any order, and the content with them.
pub(super) fn scatter(rig: &mut Rig, volume: VolumeId, content: &mut [u8], blocks: &mut [u64]) {
    rig.rng.shuffle(blocks);
    for (at, block) in blocks.iter().enumerate() {
        let bytes = pattern(*block + at as u64 * 77, 8);
        content[*block as usize * 4096..][..4096].copy_from_slice(&bytes);
        rig.write(volume, block * 8, &bytes);
    }
}

/// Merges all levels, and lets compaction end.
pub(super) fn merge_all(rig: &mut Rig) {
    for _ in 0..3 {
        rig.pool.jobs.stale = [true; PARTITIONS];
        flush_levels(rig);
    }
}

fn entries_of(rig: &mut Rig) -> u64 {
    rig.pool.stats().index_entries
}

#[test]
fn scattered_ranges_get_one_entry_and_worn_ones_again() {
    let settings = Settings { form: Form::Dense, pieces: pieces(), ..settings() };
    let mut rig = Rig::with(7, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", 2 * RANGE, Origin::Empty);
    let mut content = vec![0; 2 * RANGE as usize * 512];
    scatter(&mut rig, volume, &mut content, &mut (0..2048).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().gathered_ranges, entries_of(&mut rig)), (2, 2));
    compare(&mut rig, volume, &content);
    // A few blocks more stay beside the dense frame; many make it worn.
    scatter(&mut rig, volume, &mut content, &mut (0..200).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().gathered_ranges, entries_of(&mut rig)), (2, 202));
    scatter(&mut rig, volume, &mut content, &mut (100..400).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().gathered_ranges, entries_of(&mut rig)), (3, 2));
    compare(&mut rig, volume, &content);
    rig.reopen(true);
    compare(&mut rig, volume, &content);
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn what_a_snapshot_shares_is_not_copied() {
    let settings = Settings { form: Form::Dense, pieces: pieces(), ..settings() };
    let mut rig = Rig::with(8, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", RANGE, Origin::Empty);
    let mut content = vec![0; RANGE as usize * 512];
    rig.pool.pause(true);
    scatter(&mut rig, volume, &mut content, &mut (0..1024).collect::<Vec<_>>());
    let snapshot = rig.snapshot(volume, "s");
    let old = content.clone();
    scatter(&mut rig, volume, &mut content, &mut (0..300).collect::<Vec<_>>());
    rig.pool.pause(false);
    merge_all(&mut rig);
    assert_eq!(rig.pool.stats().gathered_ranges, 0, "724 blocks would exist twice");
    assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().gathered_ranges, entries_of(&mut rig)), (1, 1));
    compare(&mut rig, volume, &content);
    // The snapshot and the volume show the same range: it is gathered for both.
    scatter(&mut rig, volume, &mut content, &mut (0..1024).collect::<Vec<_>>());
    let snapshot = rig.snapshot(volume, "t");
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().gathered_ranges, entries_of(&mut rig)), (2, 1));
    compare(&mut rig, snapshot, &content);
    assert_ne!(content, old);
}

#[test]
fn nothing_is_gathered_while_writes_come() {
    let settings = Settings { form: Form::Dense, pieces: pieces(), ..settings() };
    let mut rig = Rig::with(9, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", 4 * RANGE, Origin::Empty);
    let mut content = vec![0; 4 * RANGE as usize * 512];
    for _ in 0..3 {
        scatter(&mut rig, volume, &mut content, &mut (0..1024).collect::<Vec<_>>());
        rig.pool.jobs.stale = [true; PARTITIONS];
        rig.pool.jobs.is_flush_wanted = true;
    }
    assert_eq!(rig.pool.stats().gathered_ranges, 0);
    rig.settle();
    assert_eq!(rig.pool.stats().gathered_ranges, 1);
    compare(&mut rig, volume, &content);
}

#[test]
fn writes_go_on_over_dense_ranges_in_a_pool_that_is_short_of_space() {
    const RANGES: u64 = 12;
    let small = StoreFacts { blob_units: 20_480, blobs: 17, ..facts() };
    let mut rig = Rig::with(
        3,
        Settings { form: Form::Dense, pieces: pieces(), dense_writes: true, ..settings() },
        small,
    );
    let volume = rig.create("a", RANGES * RANGE, Origin::Empty);
    let mut content = pattern(1, RANGES * RANGE);
    for range in 0..RANGES {
        let bytes = &content[(range * RANGE) as usize * 512..][..RANGE as usize * 512];
        rig.write(volume, range * RANGE, bytes);
    }
    for _ in 0..2 {
        scatter(&mut rig, volume, &mut content, &mut (0..RANGES * 1024).collect::<Vec<_>>());
    }
    let stats = rig.pool.stats();
    assert!(stats.gathered_ranges > 0, "{stats:?}");
    compare(&mut rig, volume, &content);
}
