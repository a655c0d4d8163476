//! Thick volumes: their space is theirs, whatever others do.

use super::compact::merge_all;
use super::rig::{Rig, facts};
use super::space::{history, small_rig, space};
use super::wide::pattern;
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

/// A pool with `blobs` of 8 MiB.
fn pool(seed: u64, blobs: u32) -> Rig {
    let small = Settings { flush_bytes: 4 << 20, unflushed_bytes_max: 16 << 20, ..Settings::default() };
    Rig::with(seed, small, StoreFacts { blob_units: 16_384, blobs, ..facts() })
}

fn create(
    rig: &mut Rig,
    name: &str,
    units: u64,
    is_thick: bool,
    origin: Origin,
) -> Result<VolumeId, CommandError> {
    let mut uuid = [0; 16];
    rig.rng.fill(&mut uuid);
    let label = Label { name: name.to_owned(), uuid };
    let when_full = WhenFull::Fail;
    match rig.command(Command::Create { label, units, block_size: 512, origin, when_full, is_thick })? {
        Answer::Volume(id) => Ok(id),
        other => panic!("{other:?}"),
    }
}

fn try_snapshot(rig: &mut Rig, of: VolumeId, name: &str) -> Result<Answer, CommandError> {
    let mut uuid = [0; 16];
    rig.rng.fill(&mut uuid);
    rig.command(Command::Snapshot(vec![(of, Label { name: name.to_owned(), uuid })]))
}

/// Units of the pool's room.
fn room(rig: &Rig) -> u64 {
    rig.pool.stats().usable_bytes / u64::from(UNIT)
}

fn reserved(rig: &Rig) -> u64 {
    rig.pool.stats().reserved_bytes / u64::from(UNIT)
}

fn try_write(rig: &mut Rig, volume: VolumeId, unit: u64, bytes: &[u8]) -> Status {
    let tag = rig.submit_write(volume, unit, bytes, false);
    let status = rig.wait(tag).status;
    rig.forget(tag);
    status
}

/// Writes until the pool is full for the volume. Returns how many units were written.
fn fill(rig: &mut Rig, volume: VolumeId, from: u64, end: u64) -> u64 {
    let mut unit = from;
    while unit < end {
        match try_write(rig, volume, unit, &[3; 1 << 16]) {
            Status::Ok => unit += 128,
            Status::NoSpace => break,
            other => panic!("{other:?}"),
        }
    }
    unit
}

/// Writes all of a thick volume in any order, `times` over, while another one takes all that it can get.
fn overwrite(rig: &mut Rig, volume: VolumeId, units: u64, times: u64, greedy: VolumeId) {
    for round in 0..times * units / 128 {
        let unit = rig.rng.u64(0..units / 128) * 128;
        assert_eq!(
            try_write(rig, volume, unit, &[round as u8; 1 << 16]),
            Status::Ok,
            "{:?}",
            rig.pool.stats()
        );
        if round % 4 == 0 {
            let unit = rig.rng.u64(0..room(rig) / 8) * 8;
            let status = try_write(rig, greedy, unit, &[9; 4096]);
            assert!(matches!(status, Status::Ok | Status::NoSpace), "{status:?}");
        }
    }
}

#[test]
fn writes_to_a_thick_volume_never_meet_a_full_pool() {
    for (seed, blobs, percent) in [(1, 24, 60), (2, 30, 25), (3, 20, 95)] {
        let mut rig = pool(seed, blobs);
        let units = room(&rig) * percent / 100 / 128 * 128;
        let thick = create(&mut rig, "thick", units, true, Origin::Empty).unwrap();
        let all = 2 * room(&rig);
        let greedy = create(&mut rig, "greedy", all, false, Origin::Empty).unwrap();
        let written = fill(&mut rig, greedy, 0, all);
        let left = room(&rig) - units;
        assert!(written <= left && written + room(&rig) / 32 >= left, "{written} of {left}");
        // What the volume shows is no matter: it was never written.
        assert_eq!(reserved(&rig), units);
        overwrite(&mut rig, thick, units, 3, greedy);
        rig.reopen(true);
        overwrite(&mut rig, thick, units, 1, greedy);
        for unit in (0..units).step_by(128) {
            assert_eq!(try_write(&mut rig, thick, unit, &[4; 1 << 16]), Status::Ok);
        }
        merge_all(&mut rig);
        let stats = rig.pool.stats();
        assert_eq!(stats.reserved_bytes, 0, "it has all that it can have");
        assert!(stats.live_bytes <= stats.usable_bytes, "{stats:?}");
    }
}

#[test]
fn waiting_writes_hold_up_no_thick_volume_and_go_on_after_a_deletion() {
    let mut rig = pool(4, 24);
    let half = room(&rig) / 2 / 128 * 128;
    let thick = create(&mut rig, "thick", half, true, Origin::Empty).unwrap();
    let other = create(&mut rig, "other", 2 * half, false, Origin::Empty).unwrap();
    fill(&mut rig, other, 0, 2 * half);
    let waiting = rig.create("waits", RANGE, Origin::Empty);
    let tags: Vec<_> = (0..4).map(|at| rig.submit_write(waiting, at * 2048, &[5; 1 << 20], false)).collect();
    rig.settle();
    assert!(rig.replies.is_empty(), "{:?}", rig.replies);
    assert_eq!(rig.pool.stats().waiting_requests, 4);
    for unit in (0..half).step_by(128) {
        assert_eq!(try_write(&mut rig, thick, unit, &[6; 1 << 16]), Status::Ok);
    }
    assert!(rig.replies.is_empty(), "{:?}", rig.replies);
    // One gives up; a discard of the same volume needs nothing, so it does not wait.
    rig.pool.abort(waiting, |tag| tag == tags[3]);
    assert_eq!(rig.wait(tags[3]).status, Status::Aborted);
    rig.zero(waiting, 0, RANGE, true);
    assert_eq!(rig.command(Command::Delete(other)), Ok(Answer::Done));
    while !rig.replies.is_empty() || rig.pool.stats().waiting_requests > 0 {
        assert!(rig.turn() | rig.step(), "they wait for good: {:?}", rig.pool.stats());
        assert!(rig.replies.drain(..).all(|reply| reply.status == Status::Ok));
    }
    tags.into_iter().for_each(|tag| rig.forget(tag));
}

#[test]
fn discards_make_room_for_others() {
    let mut rig = pool(5, 24);
    let half = room(&rig) / 2 / 128 * 128;
    create(&mut rig, "thick", half, true, Origin::Empty).unwrap();
    let other = create(&mut rig, "other", 2 * half, false, Origin::Empty).unwrap();
    let end = fill(&mut rig, other, 0, 2 * half);
    assert_eq!(try_write(&mut rig, other, end, &[1; 1 << 16]), Status::NoSpace);
    rig.zero(other, 0, end / RANGE * RANGE, true);
    assert_eq!(try_write(&mut rig, other, end, &[1; 1 << 16]), Status::Ok);
}

#[test]
fn what_does_not_fit_is_refused_with_numbers_and_what_was_deleted_fits() {
    let mut rig = pool(6, 24);
    let (all, units) = (room(&rig), room(&rig) * 3 / 5 / 128 * 128);
    let thick = create(&mut rig, "thick", units, true, Origin::Empty).unwrap();
    let bytes = |units: u64| units * u64::from(UNIT);
    let refused =
        |needed: u64, free: u64| CommandError::NotReservable { needed: bytes(needed), free: bytes(free) };
    assert_eq!(create(&mut rig, "b", units, true, Origin::Empty), Err(refused(units, all - units)));
    assert_eq!(
        rig.command(Command::Resize { volume: thick, units: all + 8 }),
        Err(refused(all + 8 - units, all - units))
    );
    assert_eq!(rig.command(Command::Resize { volume: thick, units: all / 8 * 8 }), Ok(Answer::Done));
    assert_eq!(rig.command(Command::Resize { volume: thick, units }), Ok(Answer::Done));
    // A snapshot keeps what it shows, so the volume needs its space again.
    assert_eq!(fill(&mut rig, thick, 0, units), units);
    match try_snapshot(&mut rig, thick, "s") {
        Err(CommandError::NotReservable { needed, free }) => {
            assert_eq!(needed, bytes(units));
            assert!(free <= bytes(all - units) && free + bytes(all / 50) > bytes(all - units), "{free}");
        }
        other => panic!("{other:?}"),
    }
    // A thin volume becomes thick if there is room for what it does not have yet.
    let thin = create(&mut rig, "thin", all - units, false, Origin::Empty).unwrap();
    let has = fill(&mut rig, thin, 0, (all - units) / 2);
    assert!(rig.command(Command::SetThick { volume: thin, is_thick: true }).is_ok());
    merge_all(&mut rig);
    assert_eq!(reserved(&rig), (all - units).next_multiple_of(8) - has);
    assert_eq!(rig.command(Command::SetThick { volume: thin, is_thick: false }), Ok(Answer::Done));
    assert_eq!(reserved(&rig), 0);
    assert!(rig.command(Command::Resize { volume: thin, units: all }).is_ok());
    let result = rig.command(Command::SetThick { volume: thin, is_thick: true });
    assert!(matches!(result, Err(CommandError::NotReservable { .. })), "{result:?}");
    assert!(rig.pool.keeper.manifest.own.len() == 1, "only the thick volume is counted");
    assert_eq!(rig.command(Command::Delete(thick)), Ok(Answer::Done));
    assert_eq!(rig.command(Command::Delete(thin)), Ok(Answer::Done));
    let volume = create(&mut rig, "all", all / 8 * 8, true, Origin::Empty);
    assert!(volume.is_ok(), "{volume:?}");
}

#[test]
fn snapshots_of_a_thick_volume_reserve_its_space_again() {
    let mut rig = pool(7, 40);
    let units = room(&rig) / 4 / 128 * 128;
    let thick = create(&mut rig, "thick", units, true, Origin::Empty).unwrap();
    let all = 2 * room(&rig);
    let greedy = create(&mut rig, "greedy", all, false, Origin::Empty).unwrap();
    assert_eq!(fill(&mut rig, thick, 0, units), units);
    let Ok(Answer::Volumes(snapshots)) = try_snapshot(&mut rig, thick, "s") else { panic!("it fits") };
    assert_eq!(reserved(&rig), units);
    let clone = create(&mut rig, "clone", units, true, Origin::Snapshot(snapshots[0])).unwrap();
    assert_eq!(reserved(&rig), 2 * units);
    fill(&mut rig, greedy, 0, all);
    overwrite(&mut rig, thick, units, 2, greedy);
    rig.reopen(false);
    overwrite(&mut rig, clone, units, 1, greedy);
    // The volume has for itself what it has written since; without the snapshot, also what nobody else shows.
    merge_all(&mut rig);
    let own = space(&mut rig, &[thick, clone]);
    assert_eq!(reserved(&rig), 2 * units - (own[0].own_bytes + own[1].own_bytes) / u64::from(UNIT));
    assert_eq!(rig.command(Command::Revert { volume: thick, snapshot: snapshots[0] }), Ok(Answer::Done));
    overwrite(&mut rig, thick, units, 1, greedy);
    assert_eq!(rig.command(Command::Freeze(thick)), Ok(Answer::Done));
    merge_all(&mut rig);
    let own = space(&mut rig, &[clone]);
    assert_eq!(reserved(&rig), units - own[0].own_bytes / u64::from(UNIT));
}

#[test]
fn an_inflation_leaves_reserved_space_alone() {
    let mut rig = pool(8, 24);
    let units = room(&rig) / 4 / 128 * 128;
    let source = create(&mut rig, "source", units, false, Origin::Empty).unwrap();
    assert_eq!(fill(&mut rig, source, 0, units), units);
    let snapshot = rig.snapshot(source, "s");
    let thick = create(&mut rig, "thick", 2 * units, true, Origin::Empty).unwrap();
    let clone = create(&mut rig, "clone", units, false, Origin::Snapshot(snapshot)).unwrap();
    let greedy = create(&mut rig, "greedy", 2 * units, false, Origin::Empty).unwrap();
    let end = fill(&mut rig, greedy, 0, 2 * units);
    assert!(end <= units);
    let tag = rig.tag();
    rig.pool.command(tag, Command::Inflate(clone));
    rig.settle();
    assert!(rig.command_replies.is_empty(), "it waits for space");
    assert_eq!(fill(&mut rig, thick, 0, 2 * units), 2 * units);
    assert_eq!(rig.command(Command::Delete(greedy)), Ok(Answer::Done));
    rig.settle();
    assert!(rig.command_replies.iter().any(|reply| reply.tag == tag && reply.result == Ok(Answer::Done)));
    assert_eq!(rig.read(clone, units - 128, 128), vec![3; 1 << 16]);
}

#[test]
fn what_volumes_have_for_themselves_is_counted_through_any_history() {
    for seed in 0..6 {
        let mut rig = small_rig(seed);
        let mut all = history(&mut rig);
        for round in 0..4 {
            for id in all.clone() {
                let is_thick = rig.rng.bool();
                if rig.pool.keeper.manifest.volumes[&id].cut.is_none() {
                    let _ = rig.command(Command::SetThick { volume: id, is_thick });
                    let unit = rig.rng.u64(0..4 * RANGE) / 8 * 8;
                    rig.write(id, unit, &pattern(round, 512));
                }
            }
            if round > 0 {
                let gone = all.swap_remove(rig.rng.usize(0..all.len()));
                assert_eq!(rig.command(Command::Delete(gone)), Ok(Answer::Done));
            }
            rig.settle();
            rig.reopen(false);
            merge_all(&mut rig);
            let spaces = space(&mut rig, &[]);
            let manifest = &rig.pool.keeper.manifest;
            let thick: Vec<_> = manifest.thick.iter().collect();
            assert!(!thick.is_empty() || round > 0, "seed {seed}");
            for id in thick {
                let volume = &manifest.volumes[id];
                let own: u64 = manifest.own[&volume.timeline].iter().flatten().sum();
                let found = spaces.iter().find(|space| space.volume == *id).expect("it is there");
                let has_base = manifest.timelines[&volume.timeline].base.is_some();
                let own = own * u64::from(UNIT);
                assert!(
                    own == found.own_bytes || has_base && own < found.own_bytes,
                    "seed {seed}: {own} {found:?}"
                );
            }
        }
    }
}
