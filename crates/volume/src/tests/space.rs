//! The space of volumes and snapshots, compared with what really becomes free.

use super::compact::merge_all;
use super::rig::{Rig, facts, settings};
use super::wide::pattern;
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

pub(super) fn space(rig: &mut Rig, of: &[VolumeId]) -> Vec<Space> {
    match rig.command(Command::Space { of: of.to_vec(), gives_way: true }) {
        Ok(Answer::Space(all)) => all,
        other => panic!("{other:?}"),
    }
}

/// A pool with a small cache, whose cleaner rests.
pub(super) fn small_rig(seed: u64) -> Rig {
    let small = Settings {
        cache_bytes: 96 << 10,
        dense_writes: seed.is_multiple_of(2),
        // What the cleaner has moved counts twice until the next merge.
        space_amplification_max: 10_000,
        ..settings()
    };
    let mut rig = Rig::with(seed, small, facts());
    rig.pool.pause(true);
    rig
}

/// A random history of volumes, snapshots and clones. Returns all of them.
pub(super) fn history(rig: &mut Rig) -> Vec<VolumeId> {
    let first = rig.create("v0", 5 * RANGE, Origin::Empty);
    let (mut volumes, mut snapshots) = (vec![first], Vec::new());
    for step in 0..120 {
        let volume = volumes[rig.rng.usize(0..volumes.len())];
        match rig.rng.u32(0..12) {
            0 | 1 => snapshots.push((rig.snapshot(volume, &format!("s{step}")), volume)),
            2 if !snapshots.is_empty() && volumes.len() < 6 => {
                let (snapshot, _) = snapshots[rig.rng.usize(0..snapshots.len())];
                volumes.push(rig.create(&format!("v{step}"), 5 * RANGE, Origin::Snapshot(snapshot)));
            }
            3 => {
                let unit = rig.rng.u64(0..4 * RANGE);
                rig.zero(volume, unit, RANGE + 100, true);
            }
            4 => {
                let range = rig.rng.u64(0..5);
                rig.write(volume, range * RANGE, &pattern(step, RANGE));
            }
            5 if !snapshots.is_empty() => {
                let (snapshot, volume) = snapshots[rig.rng.usize(0..snapshots.len())];
                assert_eq!(rig.command(Command::Revert { volume, snapshot }), Ok(Answer::Done));
            }
            _ => {
                let unit = rig.rng.u64(0..5 * RANGE - 512) / 8 * 8;
                rig.write(volume, unit, &pattern(step, 512));
            }
        }
    }
    volumes.into_iter().chain(snapshots.into_iter().map(|(snapshot, _)| snapshot)).collect()
}

#[test]
fn own_space_is_what_a_deletion_frees_and_the_rest_is_what_stays_without_the_others() {
    for seed in 0..8 {
        let mut rig = small_rig(seed);
        let mut left = history(&mut rig);
        // It is the same with fresh entries, and with entries that were moved.
        let fresh = space(&mut rig, &[]);
        merge_all(&mut rig);
        let before = space(&mut rig, &[]);
        assert_eq!(before, fresh);
        assert_eq!(before.len(), left.len());
        rig.rng.shuffle(&mut left);
        while let Some(id) = left.pop() {
            let live = rig.pool.stats().live_bytes;
            let [found] = space(&mut rig, &[id])[..] else { panic!("one was asked for") };
            assert_eq!(space(&mut rig, &[]).iter().find(|found| found.volume == id), Some(&found));
            if left.is_empty() {
                let first = before.iter().find(|found| found.volume == id).unwrap();
                assert_eq!(
                    found,
                    Space { own_bytes: first.own_bytes + first.shared_bytes, shared_bytes: 0, ..*first }
                );
                assert_eq!(found.own_bytes, live);
            }
            assert_eq!(rig.command(Command::Delete(id)), Ok(Answer::Done));
            merge_all(&mut rig);
            assert_eq!(
                live - rig.pool.stats().live_bytes,
                found.own_bytes,
                "seed {seed}, {} are left",
                left.len()
            );
        }
        assert_eq!(rig.pool.stats().live_bytes, 0);
    }
}

#[test]
fn a_count_gives_way_to_another_command_only_if_it_is_meant_to() {
    for gives_way in [true, false] {
        let mut rig = small_rig(1);
        history(&mut rig);
        merge_all(&mut rig);
        let (count, check) = (rig.tag(), rig.tag());
        rig.pool.command(count, Command::Space { of: Vec::new(), gives_way });
        rig.turn();
        assert!(rig.command_replies.is_empty(), "the count waits for pages");
        rig.pool.command(check, Command::Check { data: false, repair: false });
        while rig.command_replies.len() < 2 {
            assert!(rig.turn() | rig.step(), "the commands do not end");
        }
        let [counted, checked] = &rig.command_replies[..] else { panic!("two commands were given") };
        assert_eq!((counted.tag, checked.tag), (count, check));
        assert_eq!(counted.result == Err(CommandError::Busy), gives_way, "{counted:?}");
        assert!(matches!(&checked.result, Ok(Answer::Check(report)) if report.is_clean()), "{checked:?}");
        assert!(!space(&mut rig, &[]).is_empty());
    }
}

#[test]
fn a_snapshot_a_clone_and_their_volume_share_what_was_not_written_again() {
    let mut rig = Rig::new(1);
    let volume = rig.create("a", 2 * RANGE, Origin::Empty);
    let unknown = Command::Space { of: vec![VolumeId(77)], gives_way: false };
    assert_eq!(rig.command(unknown), Err(CommandError::NotFound));
    rig.write(volume, 0, &pattern(1, 512));
    let snapshot = rig.snapshot(volume, "s");
    rig.write(volume, 0, &pattern(2, 128));
    let clone = rig.create("b", 2 * RANGE, Origin::Snapshot(snapshot));
    rig.write(clone, 256, &pattern(3, 64));
    let of =
        |volume, own: u64, shared: u64| Space { volume, own_bytes: own * 512, shared_bytes: shared * 512 };
    assert_eq!(
        space(&mut rig, &[]),
        [of(volume, 128, 384), of(snapshot, 0, 512), of(clone, 64, 512)],
        "the clone keeps what the snapshot has"
    );
    assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
    assert_eq!(space(&mut rig, &[]), [of(volume, 128, 384), of(clone, 64 + 128, 384)]);
    assert_eq!(rig.command(Command::Delete(volume)), Ok(Answer::Done));
    assert_eq!(space(&mut rig, &[clone]), [of(clone, 64 + 512, 0)]);
}

/// A pool with `blobs` of 8 MiB, and a volume that has so many percent of its usable space, all written.
struct Filled {
    rig: Rig,
    volume: VolumeId,
    blocks: u64,
    /// The largest of used ÷ live space since the volume was overwritten once.
    space_amplification: f64,
}

/// Has the pool work until nothing is left to do at rest, or until `ends` after a turn: all that a turn hands out has ended
/// before the next one, and no turn comes without a reason.
fn work_as_on_a_fast_disk(rig: &mut Rig, ends: impl Fn(&Rig) -> bool) {
    loop {
        let (has_more, before) = (rig.turn(), rig.ops);
        if ends(rig) {
            break;
        }
        while rig.step() {}
        rig.disk.flush();
        if !has_more && rig.ops == before && !rig.pool.rest() {
            break;
        }
    }
}

impl Filled {
    fn new(seed: u64, blobs: u32, percent: u64) -> Self {
        Self::with(seed, StoreFacts { blob_units: 16_384, blobs, ..facts() }, percent)
    }

    fn with(seed: u64, facts: StoreFacts, percent: u64) -> Self {
        let mut rig = Rig::with(seed, Settings::default(), facts);
        let blocks = rig.pool.stats().usable_bytes / u64::from(BLOCK) * percent / 100;
        let volume = rig.create("a", blocks * 8, Origin::Empty);
        assert_eq!(rig.command(Command::SetWhenFull { volume, when_full: WhenFull::Fail }), Ok(Answer::Done));
        for at in 0..blocks / 16 {
            rig.write(volume, at * 128, &[7; 1 << 16]);
            rig.disk.flush();
        }
        Self { rig, volume, blocks, space_amplification: 0.0 }
    }

    /// Submits 32 writes of blocks anywhere, and has the pool work: until it rests, or, for a VM that is in a hurry, until the
    /// last of them has ended.
    fn write_some(&mut self, is_in_a_hurry: bool) {
        let Self { rig, volume, blocks, .. } = self;
        let mut tags: Vec<_> = (0..32)
            .map(|_| {
                let unit = rig.rng.u64(0..*blocks) * 8;
                rig.submit_write(*volume, unit, &[7; 4096], false)
            })
            .collect();
        work_as_on_a_fast_disk(rig, |rig| is_in_a_hurry && rig.replies.len() == tags.len());
        for reply in std::mem::take(&mut rig.replies) {
            assert_eq!(reply.status, Status::Ok, "{:?}", rig.pool.stats());
            tags.retain(|tag| *tag != reply.tag);
            rig.forget(reply.tag);
        }
        assert!(tags.is_empty(), "they wait for good: {:?}", rig.pool.stats());
    }

    /// Overwrites the volume at random, some times over. Returns the write amplification of that.
    fn overwrite(&mut self, times: u64, is_in_a_hurry: bool) -> f64 {
        let before = self.rig.pool.stats();
        for round in 0..times * self.blocks / 32 {
            self.write_some(is_in_a_hurry);
            let now = self.rig.pool.stats();
            if round > self.blocks / 32 {
                let amplification = now.used_bytes as f64 / now.live_bytes as f64;
                self.space_amplification = self.space_amplification.max(amplification);
            }
        }
        let after = self.rig.pool.stats();
        let written =
            |stats: &Stats| stats.log_write_bytes + stats.moved_write_bytes + stats.index_write_bytes;
        let by_user = after.user_write_bytes - before.user_write_bytes;
        (written(&after) - written(&before)) as f64 / by_user as f64
    }
}

/// Overwrites a pool that rests now and then, with compaction and without. Returns its write amplification.
fn amplification(seed: u64, percent: u64, times: u64, has_compaction: bool) -> f64 {
    let mut filled = Filled::new(seed, 62, percent);
    filled.rig.pool.pause(!has_compaction);
    let amplification = filled.overwrite(times, false);
    assert!(filled.space_amplification <= 2.05, "{}", filled.space_amplification);
    let stats = filled.rig.pool.stats();
    assert_eq!(stats.gathered_ranges > 0, has_compaction, "{stats:?}");
    amplification
}

#[test]
fn a_half_full_pool_is_written_at_random_for_ever() {
    let without = amplification(1, 50, 4, false);
    assert!(without < 2.5, "{without}");
    let with = amplification(1, 50, 4, true);
    assert!(with < 3.5, "{with}");
}

#[test]
fn a_pool_that_is_nine_tenths_full_is_written_at_random_for_ever() {
    let without = amplification(2, 90, 3, false);
    assert!(without < 3.5, "{without}");
    let with = amplification(2, 90, 3, true);
    assert!(with < 3.5, "{with}");
}

#[test]
fn merges_end_without_other_work() {
    // Now and then, a turn merges the short end of a run and all that was read of the next one.
    let mut filled = Filled::with(8, StoreFacts { blob_units: 10_240, blobs: 120, ..facts() }, 90);
    for _ in 0..300 {
        filled.write_some(false);
        let rig = &mut filled.rig;
        rig.pool.jobs.is_flush_wanted = true;
        work_as_on_a_fast_disk(rig, |_| false);
        rig.pool.merge_all_levels();
        work_as_on_a_fast_disk(rig, |_| false);
        assert!(rig.pool.jobs.has_merged(), "a merge waits for good");
    }
}

#[test]
fn a_full_pool_of_few_blobs_is_written_at_random_for_ever() {
    for (seed, blobs) in [(3, 14), (4, 16), (5, 25)] {
        for is_in_a_hurry in [false, true] {
            let amplification = Filled::new(seed, blobs, 100).overwrite(4, is_in_a_hurry);
            assert!(amplification < 8.0, "{amplification}");
        }
    }
}

#[test]
fn a_full_pool_goes_on_after_each_crash() {
    let mut filled = Filled::new(6, 16, 100);
    for _ in 0..40 {
        for _ in 0..filled.rig.rng.u64(0..filled.blocks / 64) {
            filled.write_some(true);
        }
        filled.rig.reopen(true);
    }
    filled.overwrite(2, false);
}

#[test]
fn what_is_deleted_from_a_full_pool_is_used_by_writes_that_wait() {
    let mut filled = Filled::new(7, 24, 50);
    let (other, rig) = (filled.volume, &mut filled.rig);
    let waiting = rig.create("waits", 64 * RANGE, Origin::Empty);
    let failing = rig.create("fails", 64 * RANGE, Origin::Empty);
    let when_full = WhenFull::Fail;
    assert_eq!(rig.command(Command::SetWhenFull { volume: failing, when_full }), Ok(Answer::Done));
    let mut unit = 0;
    let mut fill = |rig: &mut Rig| {
        loop {
            let tag = rig.submit_write(failing, unit, &[3; 1 << 16], false);
            let status = rig.wait(tag).status;
            rig.forget(tag);
            if status != Status::Ok {
                break status;
            }
            unit += 128;
        }
    };
    assert_eq!(fill(rig), Status::NoSpace);
    let tag = rig.submit_write(waiting, 0, &[4; 1 << 20], false);
    rig.settle();
    assert!(rig.replies.is_empty(), "{:?}", rig.replies);
    // A full pool takes a snapshot, and reads.
    let snapshot = rig.snapshot(other, "s");
    assert_eq!(rig.read(snapshot, 0, 8), [7; 4096]);
    assert_eq!(rig.command(Command::Delete(other)), Ok(Answer::Done));
    assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
    assert_eq!(rig.wait(tag).status, Status::Ok);
    rig.forget(tag);
    rig.write(failing, 0, &[5; 4096]);
    assert_eq!(fill(rig), Status::NoSpace);
    assert_eq!(rig.read(waiting, 0, 2048), vec![4; 1 << 20]);
}
