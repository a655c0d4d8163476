//! Scenes of compaction in a row: what it gains, what it costs, and what it leaves alone.

use super::compact::{merge_all, scatter};
use super::rig::{Rig, facts, settings};
use super::wide::{compare, pattern};
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

/// The volume of these tests.
const RANGES: u64 = 4;
const BLOCKS: u64 = RANGES * 1024;

/// A pool whose volume was written at random twice, and that did not rest since.
fn scattered(seed: u64, settings: Settings) -> (Rig, VolumeId, Vec<u8>) {
    let mut rig = Rig::with(seed, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", RANGES * RANGE, Origin::Empty);
    let mut content = vec![0; (RANGES * RANGE) as usize * 512];
    for _ in 0..2 {
        scatter(&mut rig, volume, &mut content, &mut (0..BLOCKS).collect::<Vec<_>>());
    }
    (rig, volume, content)
}

fn written(rig: &Rig) -> u64 {
    let stats = rig.pool.stats();
    stats.log_write_bytes + stats.moved_write_bytes + stats.index_write_bytes + stats.manifest_write_bytes
}

fn gathered(rig: &Rig) -> u64 {
    rig.pool.stats().gathered_ranges
}

/// Reads of the store for each of a volume's pieces of 128 KiB, one after the other, when the index is in memory.
fn reads_of_pieces(rig: &mut Rig, volume: VolumeId) -> f64 {
    let mut before = 0;
    for _ in 0..2 {
        before = rig.ops;
        for piece in 0..RANGES * 32 {
            rig.read(volume, piece * 256, 256);
        }
    }
    (rig.ops - before) as f64 / (RANGES * 32) as f64
}

fn check(rig: &mut Rig) {
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn sequential_reads_after_random_writes_are_few_when_the_pool_has_rested() {
    let (mut rig, volume, content) = scattered(1, settings());
    assert_eq!(gathered(&rig), 0, "nothing is gathered while writes come");
    rig.pool.pause(true);
    merge_all(&mut rig);
    let entries = rig.pool.stats().index_entries;
    let before = reads_of_pieces(&mut rig, volume);
    rig.pool.pause(false);
    merge_all(&mut rig);
    let after = reads_of_pieces(&mut rig, volume);
    assert!(before > 25.0 && after == 1.0, "{before} reads before, {after} after");
    let stats = rig.pool.stats();
    assert_eq!((stats.gathered_ranges, entries, stats.index_entries), (RANGES, BLOCKS, BLOCKS));
    assert!((BLOCKS * 4096..BLOCKS * 4200).contains(&stats.gathered_write_bytes), "{stats:?}");
    assert!(written(&rig) <= stats.user_write_bytes * 7 / 2, "{stats:?}");
    compare(&mut rig, volume, &content);
    rig.reopen(true);
    compare(&mut rig, volume, &content);
    check(&mut rig);
}

#[test]
fn a_rested_pool_does_nothing_until_much_of_a_range_is_written_again() {
    let (mut rig, volume, mut content) = scattered(2, settings());
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), RANGES);
    // 200 blocks are 400 pieces, with what is between them.
    scatter(&mut rig, volume, &mut content, &mut (0..1024).step_by(5).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), RANGES);
    rig.settle();
    let (ops, bytes) = (rig.ops, written(&rig));
    rig.settle();
    assert_eq!((rig.ops, written(&rig)), (ops, bytes));
    compare(&mut rig, volume, &content);
}

#[test]
fn what_lies_in_a_row_is_left_where_it_is() {
    let (mut rig, volume, mut content) = scattered(3, settings());
    let bytes = pattern(5, RANGE / 2);
    content[..bytes.len()].copy_from_slice(&bytes);
    rig.write(volume, 0, &bytes);
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), RANGES);
    let moved = rig.pool.stats().gathered_write_bytes / 4096;
    assert!((BLOCKS - 512..BLOCKS - 400).contains(&moved), "{moved} blocks");
    compare(&mut rig, volume, &content);
}

#[test]
fn snapshots_and_clones_show_what_they_showed() {
    let settings = Settings { write_amplification_max: 1000, ..settings() };
    let (mut rig, volume, mut content) = scattered(4, settings);
    let (snapshot, old) = (rig.snapshot(volume, "s"), content.clone());
    let clone = rig.create("c", RANGES * RANGE, Origin::Snapshot(snapshot));
    let mut of_clone = content.clone();
    scatter(&mut rig, volume, &mut content, &mut (0..BLOCKS).step_by(2).collect::<Vec<_>>());
    scatter(&mut rig, clone, &mut of_clone, &mut (0..BLOCKS).filter(|at| at % 4 > 0).collect::<Vec<_>>());
    rig.zero(volume, RANGE, 800, true);
    content[RANGE as usize * 512..][..800 * 512].fill(0);
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), 2 * RANGES, "of the volume and of the clone");
    for is_reopened in [false, true] {
        if is_reopened {
            rig.reopen(true);
        }
        compare(&mut rig, volume, &content);
        compare(&mut rig, snapshot, &old);
        compare(&mut rig, clone, &of_clone);
    }
    check(&mut rig);
    rig.command(Command::Delete(snapshot)).unwrap();
    merge_all(&mut rig);
    compare(&mut rig, volume, &content);
    compare(&mut rig, clone, &of_clone);
    check(&mut rig);
}

#[test]
fn a_write_while_its_range_is_gathered_wins() {
    for seed in 0..16 {
        let (mut rig, volume, mut content) = scattered(seed, settings());
        while rig.pool.compactor.is_idle() {
            assert!(rig.turn() | rig.step() || rig.pool.rest(), "nothing is gathered");
        }
        // At the look, among the reads, beside the write, between the entries.
        for _ in 0..seed * 50 {
            rig.turn();
            rig.step();
        }
        let tags: Vec<_> = (0..64)
            .map(|at| {
                let (block, bytes) = (rig.rng.usize(0..BLOCKS as usize), pattern(seed * 99 + at, 8));
                content[block * 4096..][..4096].copy_from_slice(&bytes);
                let tag = rig.submit_write(volume, block as u64 * 8, &bytes, false);
                rig.turn();
                rig.step();
                tag
            })
            .collect();
        for tag in tags {
            assert_eq!(rig.wait(tag).status, Status::Ok);
            rig.forget(tag);
        }
        merge_all(&mut rig);
        compare(&mut rig, volume, &content);
        rig.reopen(true);
        compare(&mut rig, volume, &content);
        check(&mut rig);
    }
}

#[test]
fn it_writes_no_more_than_users_have_earned() {
    for (hundredths, ranges) in [(120, 0..1), (150, 1..RANGES), (300, RANGES..RANGES + 1)] {
        let settings = Settings { write_amplification_max: hundredths, ..settings() };
        let (mut rig, volume, content) = scattered(6, settings);
        merge_all(&mut rig);
        let (all, stats) = (written(&rig), rig.pool.stats());
        let earned = stats.user_write_bytes / 100 * u64::from(hundredths);
        assert!(ranges.contains(&stats.gathered_ranges), "{hundredths}: {stats:?}");
        // Index that is written later is paid back later.
        assert!(all <= earned + (1 << 20), "{hundredths}: {all} of {earned}, {stats:?}");
        compare(&mut rig, volume, &content);
    }
}

#[test]
fn nothing_is_gathered_while_free_blobs_are_short() {
    let few = StoreFacts { blobs: 30, ..facts() };
    let mut rig = Rig::with(7, settings(), few);
    let volume = rig.create("a", RANGES * RANGE, Origin::Empty);
    let mut content = vec![0; (RANGES * RANGE) as usize * 512];
    scatter(&mut rig, volume, &mut content, &mut (0..BLOCKS).collect::<Vec<_>>());
    let other = rig.create("b", 64 * RANGE, Origin::Empty);
    rig.command(Command::SetWhenFull { volume: other, when_full: WhenFull::Fail }).unwrap();
    let mut unit = 0;
    loop {
        let tag = rig.submit_write(other, unit, &[7; 1 << 18], false);
        let status = rig.wait(tag).status;
        rig.forget(tag);
        unit += 512;
        if status == Status::NoSpace {
            break;
        }
    }
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), 0, "{:?}", rig.pool.stats());
    rig.command(Command::Delete(other)).unwrap();
    merge_all(&mut rig);
    assert_eq!(gathered(&rig), RANGES, "{:?}", rig.pool.stats());
    compare(&mut rig, volume, &content);
}
