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
fn scatter(rig: &mut Rig, volume: VolumeId, content: &mut [u8], blocks: &mut [u64]) {
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
    let settings = Settings { pieces: pieces(), ..settings() };
    let mut rig = Rig::with(7, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", 2 * RANGE, Origin::Empty);
    let mut content = vec![0; 2 * RANGE as usize * 512];
    scatter(&mut rig, volume, &mut content, &mut (0..2048).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().compacted_ranges, entries_of(&mut rig)), (2, 2));
    compare(&mut rig, volume, &content);
    // A few blocks more stay beside the dense frame; many make it worn.
    scatter(&mut rig, volume, &mut content, &mut (0..200).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().compacted_ranges, entries_of(&mut rig)), (2, 202));
    scatter(&mut rig, volume, &mut content, &mut (100..400).collect::<Vec<_>>());
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().compacted_ranges, entries_of(&mut rig)), (3, 2));
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
    let settings = Settings { pieces: pieces(), ..settings() };
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
    assert_eq!(rig.pool.stats().compacted_ranges, 0, "724 blocks would exist twice");
    assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().compacted_ranges, entries_of(&mut rig)), (1, 1));
    compare(&mut rig, volume, &content);
    // The snapshot and the volume show the same range: it is gathered for both.
    scatter(&mut rig, volume, &mut content, &mut (0..1024).collect::<Vec<_>>());
    let snapshot = rig.snapshot(volume, "t");
    merge_all(&mut rig);
    assert_eq!((rig.pool.stats().compacted_ranges, entries_of(&mut rig)), (2, 1));
    compare(&mut rig, snapshot, &content);
    assert_ne!(content, old);
}

#[test]
fn nothing_is_gathered_while_writes_come() {
    let settings = Settings { pieces: pieces(), ..settings() };
    let mut rig = Rig::with(9, settings, StoreFacts { blob_units: 20_480, ..facts() });
    let volume = rig.create("a", 4 * RANGE, Origin::Empty);
    let mut content = vec![0; 4 * RANGE as usize * 512];
    for _ in 0..3 {
        scatter(&mut rig, volume, &mut content, &mut (0..1024).collect::<Vec<_>>());
        rig.pool.jobs.stale = [true; PARTITIONS];
        rig.pool.jobs.is_flush_wanted = true;
    }
    assert_eq!(rig.pool.stats().compacted_ranges, 0);
    rig.settle();
    assert_eq!(rig.pool.stats().compacted_ranges, 1);
    compare(&mut rig, volume, &content);
}

/// Prints numbers. `cargo test --release -p aryk-volume -- --ignored --nocapture compaction_costs`
#[test]
#[ignore = "measures"]
fn compaction_costs() {
    const RANGES: u64 = 64;
    let facts = StoreFacts { alignment: 512, blob_units: 65_536, blobs: 80 };
    let mut rig =
        Rig::with(1, Settings { cache_bytes: 64 << 20, pieces: pieces(), ..Settings::default() }, facts);
    rig.pool.pause(true);
    let volume = rig.create("a", RANGES * RANGE, Origin::Empty);
    for range in 0..RANGES {
        rig.write(volume, range * RANGE, &pattern(range, RANGE));
    }
    rig.settle();
    let report = |rig: &mut Rig, what: &str, before: Stats| {
        let stats = rig.pool.stats();
        let user = (stats.user_write_bytes - before.user_write_bytes).max(1) as f64;
        let of = |now: u64, before: u64| (now - before) as f64 / user;
        println!(
            "{what}: amplification {:.2} (log {:.2}, moved {:.2}, index {:.3}), moved {} MiB; {} entries per GiB, index {} KiB; \
             used {} MiB, live {} MiB",
            of(
                stats.log_write_bytes + stats.moved_write_bytes + stats.index_write_bytes,
                before.log_write_bytes + before.moved_write_bytes + before.index_write_bytes
            ),
            of(stats.log_write_bytes, before.log_write_bytes),
            of(stats.moved_write_bytes, before.moved_write_bytes),
            of(stats.index_write_bytes, before.index_write_bytes),
            (stats.moved_write_bytes - before.moved_write_bytes) >> 20,
            stats.index_entries * 256 / RANGES,
            stats.index_bytes >> 10,
            stats.used_bytes >> 20,
            stats.live_bytes >> 20,
        );
        stats
    };
    let reads = |rig: &mut Rig| {
        let before = (rig.ops, rig.pool.stats().data_read_bytes);
        for at in 0..RANGES * RANGE / 256 {
            rig.read(volume, at * 256, 256);
        }
        println!(
            "  {:.2} base reads per sequential read of 128 KiB",
            (rig.ops - before.0) as f64 / (RANGES * RANGE / 256) as f64
        );
    };
    let before = report(&mut rig, "written in order", Stats::default());
    reads(&mut rig);
    let write = |rig: &mut Rig, times: f64| {
        for at in 0..(times * (RANGES * 1024) as f64) as u64 {
            let block = rig.rng.u64(0..RANGES * 1024);
            rig.write(volume, block * 8, &pattern(at, 8));
        }
        rig.settle();
    };
    write(&mut rig, 3.0);
    let before = report(&mut rig, "written at random, 3 times", before);
    reads(&mut rig);
    rig.pool.pause(false);
    merge_all(&mut rig);
    let before = report(&mut rig, "compacted", before);
    reads(&mut rig);
    rig.pool.pause(true);
    write(&mut rig, 3.0);
    let before = report(&mut rig, "written at random, 3 times more, under load", before);
    reads(&mut rig);
    rig.pool.pause(false);
    merge_all(&mut rig);
    report(&mut rig, "compacted again", before);
    reads(&mut rig);
}

#[test]
fn writes_go_on_over_dense_ranges_in_a_pool_that_is_short_of_space() {
    const RANGES: u64 = 12;
    let small = StoreFacts { blob_units: 20_480, blobs: 17, ..facts() };
    let mut rig = Rig::with(3, Settings { pieces: pieces(), dense_writes: true, ..settings() }, small);
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
    assert!(stats.compacted_ranges > 0, "{stats:?}");
    compare(&mut rig, volume, &content);
}

/// Prints numbers. `cargo test -p aryk-volume -- --ignored --nocapture sustained`
#[test]
#[ignore = "measures"]
fn sustained_random_writes_after_compaction() {
    for (percent, has_dense) in [(50, false), (50, true), (80, false), (80, true)] {
        let facts = StoreFacts { alignment: 512, blob_units: 65_536, blobs: 40 };
        let ranges = 40 * 8 * percent / 100;
        let settings = Settings { dense_writes: has_dense, cache_bytes: 64 << 20, ..Settings::default() };
        let settings =
            Settings { flush_bytes: 16 << 20, unflushed_bytes_max: 64 << 20, pieces: pieces(), ..settings };
        let mut rig = Rig::with(1, settings, facts);
        let volume = rig.create("a", ranges * RANGE, Origin::Empty);
        for range in 0..ranges {
            rig.write(volume, range * RANGE, &pattern(range, RANGE));
        }
        let mut before = rig.pool.stats();
        for round in 0..3 {
            for at in 0..ranges * 1024 {
                let block = rig.rng.u64(0..ranges * 1024);
                rig.write(volume, block * 8, &pattern(at, 8));
            }
            let stats = rig.pool.stats();
            let all =
                |stats: &Stats| stats.log_write_bytes + stats.moved_write_bytes + stats.index_write_bytes;
            let user = (stats.user_write_bytes - before.user_write_bytes) as f64;
            println!(
                "{percent}% full, dense {has_dense}, round {round}: amplification {:.2} (moved {:.2}), {} ranges, {} free blobs",
                (all(&stats) - all(&before)) as f64 / user,
                (stats.moved_write_bytes - before.moved_write_bytes) as f64 / user,
                stats.compacted_ranges - before.compacted_ranges,
                stats.free_blobs,
            );
            before = stats;
        }
    }
}
