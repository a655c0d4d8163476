//! Scenes of cleaning, full pools, comparisons, inflation and checks.

use super::rig::{Rig, facts, settings};
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

pub(super) fn pattern(seed: u64, units: u64) -> Vec<u8> {
    let mut bytes = vec![0; (units * 512) as usize];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Reads a volume and compares it, without printing megabytes.
pub(super) fn compare(rig: &mut Rig, volume: VolumeId, content: &[u8]) {
    let found = rig.read(volume, 0, content.len() as u64 / 512);
    let wrong: Vec<_> = (0..content.len() / 4096)
        .filter(|at| found[at * 4096..][..4096] != content[at * 4096..][..4096])
        .collect();
    let zero = wrong.iter().filter(|at| found[**at * 4096..][..4096].iter().all(|byte| *byte == 0)).count();
    assert!(
        wrong.is_empty(),
        "{} blocks differ, {zero} are zero; the first are {:?}",
        wrong.len(),
        &wrong[..wrong.len().min(20)]
    );
}

pub(super) fn flush_levels(rig: &mut Rig) {
    rig.pool.jobs.is_flush_wanted = true;
    rig.settle();
}

#[test]
fn writes_go_on_for_many_times_the_size_of_the_pool() {
    for dense_writes in [false, true] {
        let small = StoreFacts { blobs: 24, ..facts() };
        let mut rig = Rig::with(1, Settings { dense_writes, ..settings() }, small);
        let volume = rig.create("a", 6 * RANGE, Origin::Empty);
        let mut content = pattern(0, 6 * RANGE);
        for range in 0..6 {
            rig.write(
                volume,
                range * RANGE,
                &content[(range * RANGE) as usize * 512..][..RANGE as usize * 512],
            );
        }
        // 24 MiB of 120 MiB are alive; 240 MiB are written.
        for round in 0..if dense_writes { 300 } else { 3840 } {
            let unit = rig.rng.u64(0..6 * RANGE - 128) / 8 * 8;
            let data = pattern(round, 128);
            rig.write(volume, unit, &data);
            content[unit as usize * 512..][..data.len()].copy_from_slice(&data);
        }
        compare(&mut rig, volume, &content);
        rig.flush(volume);
        let lives = rig.pool.keeper.manifest.blobs.iter().map(|(_, blob)| blob.life as u32).max();
        let freed = lives.map_or(0, |lives| lives.saturating_sub(24));
        rig.reopen(true);
        flush_levels(&mut rig);
        compare(&mut rig, volume, &content);
        let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
            panic!()
        };
        assert!(report.is_clean(), "{report:?}");
        assert!(report.blocks_read >= 6 * 1024);
        assert!(dense_writes || freed > 20, "{freed} blobs were freed");
        // Under load, a blob that was freed is written again, not discarded. Without load, all but the last are discarded.
        let discards = rig.disk.discards;
        assert!(
            dense_writes || discards <= u64::from(freed) / 2,
            "{discards} discards of {freed} freed blobs"
        );
        rig.command(Command::Delete(volume)).unwrap();
        rig.settle();
        assert!(rig.disk.discards >= discards + 6, "{} after {discards} discards", rig.disk.discards);
    }
}

#[test]
fn a_full_pool_refuses_or_waits_and_goes_on_when_a_snapshot_is_deleted() {
    // With its snapshot, more than the pool has.
    const SIZE: u64 = 12 * RANGE;
    let small = StoreFacts { blobs: 24, ..facts() };
    let mut rig = Rig::with(2, settings(), small);
    let volume = rig.create("a", SIZE, Origin::Empty);
    rig.command(Command::SetWhenFull { volume, when_full: WhenFull::Fail }).unwrap();
    let data = pattern(1, 1024);
    let mut written = 0;
    let mut snapshot = None;
    let status = loop {
        let tag = rig.submit_write(volume, written % SIZE, &data, false);
        let status = rig.wait(tag).status;
        rig.forget(tag);
        written += 1024;
        if written == SIZE {
            snapshot = Some(rig.snapshot(volume, "s"));
        }
        if status != Status::Ok || written > 40 * RANGE {
            break status;
        }
    };
    assert_eq!(status, Status::NoSpace);
    assert!((13 * RANGE..24 * RANGE).contains(&written), "{written} units were written");
    rig.command(Command::SetWhenFull { volume, when_full: WhenFull::Wait }).unwrap();
    let tag = rig.submit_write(volume, 0, &data, false);
    rig.settle();
    assert!(rig.replies.is_empty(), "the write waits");
    assert_eq!(rig.read(volume, 0, 1024), data);
    rig.command(Command::Delete(snapshot.expect("taken"))).unwrap();
    assert_eq!(rig.wait(tag).status, Status::Ok);
    rig.forget(tag);
    for at in 0..30 {
        rig.write(volume, at * 2048, &data);
    }
}

#[test]
fn writes_that_wait_for_the_backlog_are_aborted_and_have_no_effect() {
    let mut rig = Rig::with(
        4,
        Settings { flush_bytes: 512 << 10, unflushed_bytes_max: 1 << 20, ..settings() },
        facts(),
    );
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    let data = pattern(1, 1024);
    let tags: Vec<Tag> = (0..8).map(|at| rig.submit_write(volume, at * 1024, &data, false)).collect();
    let waiting = rig.pool.stats().waiting_requests;
    assert!((3..8).contains(&waiting), "{waiting} writes wait");
    let queued: Vec<Tag> = tags[8 - waiting as usize..7].to_vec();
    rig.pool.abort(volume, |tag| queued.contains(&tag));
    for (at, &tag) in tags.iter().enumerate() {
        let is_aborted = (8 - waiting..7).contains(&(at as u64));
        let wanted = if is_aborted { Status::Aborted } else { Status::Ok };
        assert_eq!(rig.wait(tag).status, wanted, "write {at}");
        rig.forget(tag);
        let read = rig.read(volume, at as u64 * 1024, 1024);
        assert!(read == if is_aborted { vec![0; data.len()] } else { data.clone() }, "write {at}");
    }
    assert_eq!(rig.pool.stats().waiting_requests, 0);
}

/// A store that does not answer: no request may hold up its VM, nor the VM's memory.
#[test]
fn all_requests_are_aborted_at_once_while_the_store_does_not_answer() {
    let mut rig = Rig::new(11);
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    rig.write(volume, 0, &pattern(1, 1024));
    rig.write(volume, 4 * RANGE, &pattern(2, 8));
    let mut tags: Vec<_> =
        (0..4).map(|at| rig.submit_write(volume, at * 512, &pattern(7, 512), false)).collect();
    // A part of a block, and another one of the same block, which waits for it.
    tags.push(rig.submit_write(volume, 4 * RANGE + 1, &pattern(8, 1), false));
    tags.push(rig.submit_write(volume, 4 * RANGE + 2, &pattern(9, 1), false));
    tags.push(rig.submit_read(volume, 0, 1024));
    tags.push(rig.submit(volume, 0, 0, Action::Flush));
    tags.push(rig.submit(volume, 2 * RANGE, RANGE, Action::Zero { whole_blocks: true, fua: true }));
    // One turn: some are handed to the store, which answers nothing.
    rig.turn();
    assert!(rig.replies.is_empty());
    rig.pool.abort(volume, |tag| tags.contains(&tag));
    rig.turn();
    let mut ended: Vec<_> = rig.replies.drain(..).collect();
    assert!(ended.iter().all(|reply| reply.status == Status::Aborted), "{ended:?}");
    ended.sort_unstable_by_key(|reply| reply.tag.0);
    assert_eq!(ended.iter().map(|reply| reply.tag).collect::<Vec<_>>(), tags);
    assert!(rig.pool.has_requests() && rig.pool.abandoned_bytes() > 0);
    // Their memory goes away, and what follows replaces what they still do.
    tags.into_iter().for_each(|tag| rig.forget(tag));
    let new = pattern(3, 1024);
    rig.write(volume, 0, &new);
    rig.settle();
    assert!(rig.replies.is_empty() && !rig.pool.has_requests() && rig.pool.abandoned_bytes() == 0);
    assert!(rig.read(volume, 0, 1024) == new);
    let block = rig.read(volume, 4 * RANGE, 8);
    let is_whole = |unit: usize, other: u64| {
        let bytes = &block[unit * 512..(unit + 1) * 512];
        bytes == &pattern(2, 8)[unit * 512..(unit + 1) * 512] || bytes == pattern(other, 1)
    };
    assert!((0..8).all(|unit| is_whole(unit, if unit == 1 { 8 } else { 9 })));
}

#[test]
fn deleting_a_volume_makes_room_in_a_full_pool() {
    let small = StoreFacts { blobs: 20, ..facts() };
    let mut rig = Rig::with(3, settings(), small);
    let first = rig.create("a", 40 * RANGE, Origin::Empty);
    rig.command(Command::SetWhenFull { volume: first, when_full: WhenFull::Fail }).unwrap();
    let data = pattern(1, 1024);
    for at in 0.. {
        let tag = rig.submit_write(first, at * 1024, &data, false);
        let status = rig.wait(tag).status;
        rig.forget(tag);
        if status == Status::NoSpace {
            break;
        }
    }
    let second = rig.create("b", 40 * RANGE, Origin::Empty);
    let tag = rig.submit_write(second, 0, &data, false);
    rig.settle();
    assert!(rig.replies.is_empty(), "the write waits");
    rig.command(Command::Delete(first)).unwrap();
    assert_eq!(rig.wait(tag).status, Status::Ok);
    rig.forget(tag);
    assert_eq!(rig.read(second, 0, 1024), data);
}

#[test]
fn changes_between_two_snapshots_are_told() {
    let mut rig = Rig::new(4);
    let volume = rig.create("a", 40 * RANGE, Origin::Empty);
    let data = pattern(1, 64);
    rig.write(volume, 0, &data);
    let first = rig.snapshot(volume, "s");
    rig.write(volume, 16, &data[..16 * 512]);
    rig.write(volume, 5 * RANGE + 8, &data);
    flush_levels(&mut rig);
    rig.write(volume, 5 * RANGE + 40, &data);
    let second = rig.snapshot(volume, "t");
    rig.zero(volume, 8 * RANGE, 2 * RANGE, false);
    let changed = |rig: &mut Rig, since, until| rig.command(Command::Changed { since, until });
    let between = vec![(2, 2), (5 * 1024 + 1, 12)];
    assert_eq!(changed(&mut rig, first, second), Ok(Answer::Changed(between.clone())));
    assert_eq!(changed(&mut rig, second, volume), Ok(Answer::Changed(vec![(8 * 1024, 2048)])));
    assert_eq!(changed(&mut rig, second, second), Ok(Answer::Changed(Vec::new())));
    let clone = rig.create("c", 40 * RANGE, Origin::Snapshot(second));
    rig.write(clone, 0, &data[..8 * 512]);
    let with_clone = [vec![(0, 1)], between].concat();
    assert_eq!(changed(&mut rig, first, clone), Ok(Answer::Changed(with_clone)));
    assert!(changed(&mut rig, second, first).is_err() && changed(&mut rig, volume, clone).is_err());
}

#[test]
fn what_a_volume_and_its_snapshots_have_for_themselves_is_told() {
    let mut rig = Rig::new(4);
    let foreign = Foreign { name: "image".to_owned(), units: RANGE };
    let volume = rig.create("a", 40 * RANGE, Origin::Foreign(foreign));
    let data = pattern(1, 64);
    let own = |rig: &mut Rig, id| rig.command(Command::Own(id));
    assert_eq!(own(&mut rig, volume), Ok(Answer::Changed(Vec::new())));
    rig.write(volume, 16, &data[..16 * 512]);
    let first = rig.snapshot(volume, "s");
    flush_levels(&mut rig);
    rig.write(volume, 5 * RANGE, &data);
    let second = rig.snapshot(volume, "t");
    let clone = rig.create("c", 40 * RANGE, Origin::Snapshot(second));
    rig.zero(clone, 8 * RANGE, 2 * RANGE, false);
    assert_eq!(own(&mut rig, first), Ok(Answer::Changed(vec![(2, 2)])));
    assert_eq!(own(&mut rig, second), Ok(Answer::Changed(vec![(5 * 1024, 8)])));
    assert_eq!(own(&mut rig, volume), Ok(Answer::Changed(Vec::new())));
    assert_eq!(own(&mut rig, clone), Ok(Answer::Changed(vec![(8 * 1024, 2048)])));
    // What a snapshot between two had is the next one's.
    rig.command(Command::Delete(first)).unwrap();
    assert_eq!(own(&mut rig, second), Ok(Answer::Changed(vec![(2, 2), (5 * 1024, 8)])));
}

#[test]
fn blocks_of_clones_and_reverted_volumes_are_not_smaller() {
    let mut rig = Rig::new(4);
    let create = |name: &str, block_size, origin| Command::Create {
        label: rig_label(name),
        units: RANGE,
        block_size,
        origin,
        when_full: WhenFull::Wait,
        is_thick: false,
    };
    let Ok(Answer::Volume(large)) = rig.command(create("large", 4096, Origin::Empty)) else { panic!() };
    let Ok(Answer::Volume(small)) = rig.command(create("small", 512, Origin::Empty)) else { panic!() };
    let snapshot = rig.snapshot(large, "s");
    let clone = rig.command(create("c", 512, Origin::Snapshot(snapshot)));
    assert!(matches!(clone, Err(CommandError::Invalid(_))), "{clone:?}");
    assert!(rig.command(create("c", 4096, Origin::Snapshot(snapshot))).is_ok());
    assert!(rig.command(Command::Revert { volume: small, snapshot }).is_err());
    assert_eq!(rig.command(Command::Revert { volume: large, snapshot }), Ok(Answer::Done));
}

fn rig_label(name: &str) -> Label {
    let mut uuid = [0; 16];
    uuid[..name.len()].copy_from_slice(name.as_bytes());
    Label { name: name.to_owned(), uuid }
}

#[test]
fn a_frozen_volume_is_a_snapshot_of_itself() {
    let mut rig = Rig::new(6);
    let volume = rig.create("a", 4 * RANGE, Origin::Empty);
    let data = pattern(1, 64);
    rig.write(volume, 5, &data);
    let before = rig.snapshot(volume, "s");
    rig.write(volume, 2 * RANGE, &data);
    let content = rig.read(volume, 0, 4 * RANGE);
    assert_eq!(rig.command(Command::Freeze(volume)), Ok(Answer::Done));
    assert!(matches!(rig.command(Command::Freeze(volume)), Err(CommandError::WrongKind(_))));
    assert!(matches!(rig.command(Command::Resize { volume, units: RANGE }), Err(CommandError::WrongKind(_))));
    let clone = rig.create("c", 4 * RANGE, Origin::Snapshot(volume));
    rig.write(clone, 0, &data);
    flush_levels(&mut rig);
    rig.reopen(true);
    assert_eq!(rig.read(volume, 0, 4 * RANGE), content);
    assert_ne!(rig.read(clone, 0, 4 * RANGE), content);
    // It is deleted as a snapshot, in any order.
    rig.command(Command::Delete(volume)).unwrap();
    rig.command(Command::Delete(before)).unwrap();
    assert_eq!(rig.read(clone, 2 * RANGE, 64), content[2 * RANGE as usize * 512..][..64 * 512]);
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn an_inflated_volume_needs_its_base_no_longer() {
    let mut rig = Rig::new(5);
    let foreign = Foreign { name: "image".to_owned(), units: 3000 };
    let volume = rig.create("a", 4 * RANGE, Origin::Foreign(foreign));
    let data = pattern(1, 100);
    rig.write(volume, 50, &data);
    rig.zero(volume, 2000, 500, false);
    let snapshot = rig.snapshot(volume, "s");
    rig.write(volume, 500, &data);
    let clone = rig.create("c", 4 * RANGE, Origin::Snapshot(snapshot));
    rig.write(clone, 700, &data);
    let before: Vec<_> = [volume, snapshot, clone].map(|id| rig.read(id, 0, 4000)).into();
    assert_eq!(rig.command(Command::Inflate(volume)), Ok(Answer::Done));
    assert!(rig.pool.foreign_disks().is_empty());
    assert_eq!(rig.command(Command::Inflate(clone)), Ok(Answer::Done));
    rig.command(Command::Delete(snapshot)).unwrap();
    rig.reopen(true);
    assert_eq!(rig.read(volume, 0, 4000), before[0]);
    assert_eq!(rig.read(clone, 0, 4000), before[2]);
    rig.command(Command::Delete(volume)).unwrap();
    assert_eq!(rig.read(clone, 0, 4000), before[2]);
    assert_eq!(rig.pool.keeper.manifest.timelines.len(), 1);
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn an_inflated_volume_keeps_what_clones_of_it_show() {
    let mut rig = Rig::new(7);
    let foreign = Foreign { name: "image".to_owned(), units: 2 * RANGE };
    let volume = rig.create("a", 2 * RANGE, Origin::Foreign(foreign));
    let snapshot = rig.snapshot(volume, "s");
    let clone = rig.create("c", 2 * RANGE, Origin::Snapshot(snapshot));
    let above = rig.snapshot(clone, "t");
    let before = rig.read(above, RANGE, 100);
    assert!(before.iter().any(|byte| *byte != 0));
    // What is left is smaller than what the snapshot of the clone shows.
    for id in [volume, clone] {
        rig.command(Command::Resize { volume: id, units: 8 }).unwrap();
    }
    rig.command(Command::Delete(snapshot)).unwrap();
    assert_eq!(rig.command(Command::Inflate(volume)), Ok(Answer::Done));
    assert_eq!(rig.read(above, RANGE, 100), before);
}

#[test]
fn a_check_names_damage_by_volume_and_block_and_frees_leaks() {
    let mut rig = Rig::new(6);
    let volume = rig.create("a", 4 * RANGE, Origin::Empty);
    rig.write(volume, 80, &pattern(1, 800));
    flush_levels(&mut rig);
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    assert!(report.is_clean() && report.blocks_read == 100, "{report:?}");
    // One bit of block 12.
    let wanted = pattern(1, 800)[2 * 8 * 512..][..512].to_vec();
    for blob in rig.disk.blobs.values_mut() {
        if let Some(at) = (0..blob.len() / 512).find(|at| blob[at * 512..][..512] == wanted) {
            blob[at * 512 + 100] ^= 4;
        }
    }
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!()
    };
    let what = "data does not match its checksum".to_owned();
    assert_eq!(report.damage, [Damage { volume: Some(volume), block: 12, blocks: 1, what }]);
    // A count that is too large.
    let (id, _) = rig.pool.keeper.manifest.blobs.iter().find(|(_, blob)| blob.live == 800).unwrap();
    rig.pool.keeper.edit(crate::manifest::Edit::Live { id, change: 80 });
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: false, repair: true }) else {
        panic!()
    };
    assert_eq!((report.leaked_units, report.damage.len()), (80, 0));
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: false, repair: false }) else {
        panic!()
    };
    assert_eq!(report.leaked_units, 0);
}
