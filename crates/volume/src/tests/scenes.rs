//! Single scenes: each says what a volume must do.

use super::rig::Rig;
use crate::*;

/// Units of 4 MiB.
const RANGE: u64 = 8192;

fn pattern(seed: u64, units: u64) -> Vec<u8> {
    let mut bytes = vec![0; (units * 512) as usize];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

#[test]
fn a_new_volume_reads_zeroes_and_then_what_was_written() {
    let mut rig = Rig::new(1);
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    assert_eq!(rig.read(volume, 0, 64), vec![0; 64 * 512]);
    let data = pattern(1, 32);
    rig.write(volume, 8, &data);
    assert_eq!(rig.read(volume, 8, 32), data);
    assert_eq!(rig.read(volume, 16, 8), data[8 * 512..16 * 512]);
    assert_eq!(rig.read(volume, 0, 8), vec![0; 8 * 512]);
    assert_eq!(rig.read(volume, 40, 8), vec![0; 8 * 512]);
}

#[test]
fn a_write_of_a_part_of_a_block_keeps_the_rest() {
    let mut rig = Rig::new(2);
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    let (below, above) = (pattern(1, 24), pattern(2, 11));
    rig.write(volume, 0, &below);
    rig.write(volume, 5, &above);
    let mut expected = below;
    expected[5 * 512..16 * 512].copy_from_slice(&above);
    assert_eq!(rig.read(volume, 0, 24), expected);
    assert_eq!(rig.read(volume, 3, 7), expected[3 * 512..10 * 512]);
}

#[test]
fn writes_of_parts_of_one_block_at_the_same_time_all_take_effect() {
    let mut rig = Rig::new(3);
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    let data = pattern(1, 16);
    let tags: Vec<_> =
        (0..16).map(|at| rig.submit_write(volume, at, &data[at as usize * 512..][..512], false)).collect();
    for tag in tags {
        assert_eq!(rig.wait(tag).status, Status::Ok);
        rig.forget(tag);
    }
    assert_eq!(rig.read(volume, 0, 16), data);
    // A part and the whole, in both orders: the last one wins, and nothing of the whole is lost.
    let (part, whole) = (pattern(5, 1), pattern(6, 8));
    let first = rig.submit_write(volume, 0, &whole, false);
    let second = rig.submit_write(volume, 3, &part, false);
    for tag in [first, second] {
        assert_eq!(rig.wait(tag).status, Status::Ok);
        rig.forget(tag);
    }
    let mut expected = whole;
    expected[3 * 512..4 * 512].copy_from_slice(&part);
    assert_eq!(rig.read(volume, 0, 8), expected);
}

#[test]
fn a_request_across_stripes_and_a_whole_range_are_written_and_read() {
    let mut rig = Rig::new(4);
    let volume = rig.create("a", 20 * RANGE, Origin::Empty);
    let data = pattern(1, 3 * RANGE + 40);
    rig.write(volume, 3 * RANGE - 16, &data);
    assert_eq!(rig.read(volume, 3 * RANGE - 16, 3 * RANGE + 40), data);
    rig.flush(volume);
    rig.reopen(true);
    assert_eq!(rig.read(volume, 3 * RANGE - 16, 3 * RANGE + 40), data);
    let patch = pattern(2, 8);
    rig.write(volume, 4 * RANGE + 80, &patch);
    assert_eq!(rig.read(volume, 4 * RANGE + 80, 8), patch);
    assert_eq!(rig.read(volume, 4 * RANGE + 88, 8), data[(RANGE as usize + 104) * 512..][..8 * 512]);
}

#[test]
fn what_was_flushed_outlives_power_loss_at_any_point() {
    for seed in 0..30 {
        let mut rig = Rig::new(seed);
        let volume = rig.create("a", 10 * RANGE, Origin::Empty);
        let data = pattern(seed, 800);
        for (at, piece) in data.chunks(16 * 512).enumerate() {
            rig.write(volume, at as u64 * 16, piece);
        }
        rig.flush(volume);
        let tag = rig.submit_write(volume, 2000, &pattern(1, 64), false);
        for _ in 0..rig.rng.u32(0..6) {
            rig.turn();
            rig.step();
        }
        rig.forget(tag);
        rig.reopen(true);
        assert_eq!(rig.read(volume, 0, 800), data, "seed {seed}");
    }
}

#[test]
fn a_durable_write_outlives_power_loss_without_a_flush() {
    let mut rig = Rig::new(6);
    let volume = rig.create("a", 10 * RANGE, Origin::Empty);
    let data = pattern(1, 8);
    let tag = rig.submit_write(volume, 8, &data, true);
    assert_eq!(rig.wait(tag).status, Status::Ok);
    rig.forget(tag);
    rig.reopen(true);
    assert_eq!(rig.read(volume, 8, 8), data);
}

#[test]
fn a_snapshot_keeps_its_content_and_a_clone_goes_its_own_way() {
    let mut rig = Rig::new(7);
    let volume = rig.create("a", 40 * RANGE, Origin::Empty);
    let (old, new, other) = (pattern(1, 16), pattern(2, 16), pattern(3, 8));
    for at in [0, 5 * RANGE, 39 * RANGE] {
        rig.write(volume, at, &old);
    }
    let snapshot = rig.snapshot(volume, "s");
    rig.write(volume, 5 * RANGE, &new);
    let clone = rig.create("c", 40 * RANGE, Origin::Snapshot(snapshot));
    assert_eq!(rig.read(clone, 5 * RANGE, 16), old);
    rig.write(clone, 5 * RANGE + 8, &other);
    for round in 0..3 {
        assert_eq!(rig.read(volume, 5 * RANGE, 16), new, "round {round}");
        assert_eq!(rig.read(snapshot, 5 * RANGE, 16), old);
        assert_eq!(rig.read(clone, 5 * RANGE, 16), [&old[..8 * 512], &other].concat());
        assert_eq!(rig.read(clone, 39 * RANGE, 16), old);
        assert_eq!(rig.read(clone, 39 * RANGE + 16, 8), vec![0; 8 * 512]);
        if round == 0 {
            rig.flush(clone);
            rig.reopen(true);
        } else {
            rig.pool.jobs.is_flush_wanted = true;
            rig.settle();
            rig.reopen(false);
        }
    }
    let tag = rig.submit_write(snapshot, 0, &old, false);
    assert_eq!(rig.wait(tag).status, Status::ReadOnly);
    rig.forget(tag);
}

#[test]
fn zeroes_hide_the_base_of_a_clone() {
    let mut rig = Rig::new(8);
    let volume = rig.create("a", 40 * RANGE, Origin::Empty);
    let data = pattern(1, 3 * RANGE);
    rig.write(volume, 0, &data);
    let snapshot = rig.snapshot(volume, "s");
    let clone = rig.create("c", 40 * RANGE, Origin::Snapshot(snapshot));
    rig.zero(clone, 100, 2 * RANGE, false);
    let mut expected = data.clone();
    expected[100 * 512..(100 + 2 * RANGE as usize) * 512].fill(0);
    for _ in 0..3 {
        assert_eq!(rig.read(clone, 0, 3 * RANGE), expected);
        assert_eq!(rig.read(snapshot, 0, 3 * RANGE), data);
        rig.pool.jobs.is_flush_wanted = true;
        rig.settle();
        rig.reopen(false);
    }
    // A discard leaves what is not a whole block.
    rig.zero(volume, 3, 13, true);
    assert_eq!(rig.read(volume, 0, 8), data[..8 * 512]);
    assert_eq!(rig.read(volume, 8, 8), vec![0; 8 * 512]);
    assert_eq!(rig.read(volume, 16, 8), data[16 * 512..24 * 512]);
    rig.zero(volume, 0, 40 * RANGE, true);
    assert_eq!(rig.read(volume, 0, 3 * RANGE), vec![0; 3 * RANGE as usize * 512]);
}

#[test]
fn a_clone_of_a_foreign_disk_reads_it_where_nothing_was_written() {
    let mut rig = Rig::new(9);
    let foreign = Foreign { name: "image".to_owned(), units: 1000 };
    let volume = rig.create("a", 4 * RANGE, Origin::Foreign(foreign));
    assert_eq!(rig.pool.foreign_disks().len(), 1);
    let mut expected = vec![0; 1100 * 512];
    super::rig::foreign_bytes(0, &mut expected[..1000 * 512]);
    assert_eq!(rig.read(volume, 0, 1100), expected);
    let (whole, part) = (pattern(1, 16), pattern(2, 3));
    rig.write(volume, 80, &whole);
    rig.write(volume, 993, &part);
    expected[80 * 512..96 * 512].copy_from_slice(&whole);
    expected[993 * 512..996 * 512].copy_from_slice(&part);
    assert_eq!(rig.read(volume, 0, 1100), expected);
    assert_eq!(rig.read(volume, 77, 23), expected[77 * 512..100 * 512]);
    rig.zero(volume, 88, 100, false);
    expected[88 * 512..188 * 512].fill(0);
    rig.reopen(false);
    assert_eq!(rig.read(volume, 0, 1100), expected);
}

#[test]
fn a_volume_is_at_least_as_large_as_its_base() {
    let mut rig = Rig::new(14);
    let volume = rig.create("a", 2 * RANGE, Origin::Empty);
    let snapshot = rig.snapshot(volume, "s");
    let foreign = Foreign { name: "image".to_owned(), units: 2 * RANGE };
    for origin in [Origin::Snapshot(snapshot), Origin::Foreign(foreign)] {
        let create = |units| Command::Create {
            label: Label { name: format!("b{units}"), uuid: [units as u8; 16] },
            units,
            block_size: 4096,
            origin: origin.clone(),
            when_full: WhenFull::Fail,
            is_thick: false,
        };
        assert!(matches!(rig.command(create(2 * RANGE - 8)), Err(CommandError::Invalid(_))));
        let Ok(Answer::Volume(clone)) = rig.command(create(2 * RANGE)) else {
            panic!("the clone was not created")
        };
        rig.command(Command::Delete(clone)).unwrap();
    }
}

#[test]
fn a_volume_that_was_shrunk_and_grown_reads_zeroes() {
    let mut rig = Rig::new(10);
    let volume = rig.create("a", 8 * RANGE, Origin::Empty);
    let data = pattern(1, 8 * RANGE);
    rig.write(volume, 0, &data);
    let snapshot = rig.snapshot(volume, "s");
    rig.command(Command::Resize { volume, units: RANGE + 21 }).unwrap();
    let tag = rig.submit_read(volume, RANGE + 16, 8);
    assert_eq!(rig.wait(tag).status, Status::OutOfRange);
    rig.forget(tag);
    rig.command(Command::Resize { volume, units: 9 * RANGE }).unwrap();
    let mut expected = data.clone();
    expected[(RANGE as usize + 21) * 512..].fill(0);
    assert_eq!(rig.read(volume, 0, 8 * RANGE), expected);
    assert_eq!(rig.read(snapshot, 0, 8 * RANGE), data);
    rig.reopen(true);
    assert_eq!(rig.read(volume, 0, 8 * RANGE), expected);
}

#[test]
fn volumes_and_snapshots_go_in_any_order_and_leave_nothing() {
    for order in 0..24 {
        let mut rig = Rig::new(order);
        let volume = rig.create("a", 8 * RANGE, Origin::Empty);
        let data = pattern(1, RANGE);
        rig.write(volume, 0, &data);
        let snapshot = rig.snapshot(volume, "s");
        let clone = rig.create("c", 8 * RANGE, Origin::Snapshot(snapshot));
        rig.write(clone, 8, &data[..8 * 512]);
        let second = rig.snapshot(clone, "t");
        let mut left = vec![volume, snapshot, clone, second];
        let mut order = order as usize;
        for count in (1..=4).rev() {
            let id = left.remove(order % count);
            order /= count;
            rig.command(Command::Delete(id)).unwrap();
            for &id in &left {
                let mut expected = data[..16 * 512].to_vec();
                if id == clone || id == second {
                    expected[8 * 512..].copy_from_slice(&data[..8 * 512]);
                }
                assert_eq!(rig.read(id, 0, 16), expected);
            }
        }
        rig.pool.jobs.is_flush_wanted = true;
        rig.settle();
        assert!(rig.pool.keeper.manifest.timelines.is_empty());
        let stats = rig.pool.stats();
        assert_eq!((stats.live_bytes, stats.index_entries), (0, 0), "order {order}");
        assert!(stats.free_blobs + 8 > stats.blobs, "{stats:?}");
    }
}

#[test]
fn a_volume_goes_back_to_a_snapshot() {
    let mut rig = Rig::new(12);
    let volume = rig.create("a", 8 * RANGE, Origin::Empty);
    let (old, new) = (pattern(1, 16), pattern(2, 16));
    rig.write(volume, 0, &old);
    let snapshot = rig.snapshot(volume, "s");
    rig.write(volume, 0, &new);
    rig.command(Command::Revert { volume, snapshot }).unwrap();
    assert_eq!(rig.read(volume, 0, 16), old);
    rig.write(volume, 8, &new[..8 * 512]);
    rig.reopen(false);
    assert_eq!(rig.read(volume, 0, 16), [&old[..8 * 512], &new[..8 * 512]].concat());
    assert_eq!(rig.read(snapshot, 0, 16), old);
}

#[test]
fn frames_that_cannot_be_written_are_written_elsewhere() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed);
        let volume = rig.create("a", 8 * RANGE, Origin::Empty);
        rig.write_failures = 12;
        let data = pattern(seed, 1600);
        let mut tags = Vec::new();
        for (at, piece) in data.chunks(8 * 512).enumerate() {
            tags.push(rig.submit_write(volume, at as u64 * 8, piece, false));
            rig.turn();
            if rig.rng.bool() {
                rig.step();
            }
        }
        for tag in tags {
            assert_eq!(rig.wait(tag).status, Status::Ok);
            rig.forget(tag);
        }
        rig.flush(volume);
        rig.reopen(true);
        rig.write_failures = 0;
        assert_eq!(rig.read(volume, 0, 1600), data, "seed {seed}");
    }
}

#[test]
fn damaged_data_is_an_error() {
    let mut rig = Rig::new(13);
    let volume = rig.create("a", 8 * RANGE, Origin::Empty);
    rig.write(volume, 0, &pattern(1, 8));
    rig.disk.flush();
    for blob in rig.disk.blobs.values_mut() {
        blob.iter_mut().for_each(|byte| *byte ^= 1);
    }
    let tag = rig.submit_read(volume, 0, 8);
    assert_eq!(rig.wait(tag).status, Status::Medium);
    rig.forget(tag);
    assert_eq!(rig.pool.stats().damaged_blocks, 1);
}

#[test]
fn wrong_requests_are_refused() {
    let mut rig = Rig::new(14);
    let volume = rig.create("a", 100, Origin::Empty);
    for (unit, units, status) in
        [(100, 1, Status::OutOfRange), (u64::MAX, 1, Status::OutOfRange), (0, 0, Status::Invalid)]
    {
        let tag = rig.submit(volume, unit, units, Action::Zero { whole_blocks: false, fua: false });
        assert_eq!(rig.wait(tag).status, status);
    }
    let tag = rig.submit(VolumeId(77), 0, 1, Action::Flush);
    assert_eq!(rig.wait(tag).status, Status::Removed);
    let label = Label { name: "a".to_owned(), uuid: [1; 16] };
    let command = Command::Create {
        label,
        units: 8,
        block_size: 512,
        origin: Origin::Empty,
        when_full: WhenFull::Wait,
        is_thick: false,
    };
    assert_eq!(rig.command(command), Err(CommandError::Exists));
    assert_eq!(rig.command(Command::Delete(VolumeId(77))), Err(CommandError::NotFound));
}

#[test]
fn a_volume_adopts_the_content_of_another_one_and_keeps_its_name_and_snapshots() {
    let mut rig = Rig::new(11);
    let volume = rig.create("v", 64 * RANGE, Origin::Empty);
    rig.write(volume, 0, &[1; 4096]);
    let snapshot = rig.snapshot(volume, "s");
    rig.write(volume, 8, &[2; 4096]);
    let base = rig.create("base", 64 * RANGE, Origin::Empty);
    rig.write(base, 16, &[3; 4096]);
    let parent = rig.snapshot(base, "parent");
    let from = rig.create("from", 64 * RANGE, Origin::Snapshot(parent));
    rig.write(from, 8, &[2; 4096]);
    let small = rig.create("small", 32 * RANGE, Origin::Empty);
    let adopt = |volume, from| Command::Adopt { volume, from };
    for wrong in [adopt(volume, volume), adopt(volume, small), adopt(volume, parent), adopt(snapshot, from)] {
        assert!(rig.command(wrong.clone()).is_err(), "{wrong:?}");
    }
    assert_eq!(rig.command(adopt(volume, from)), Ok(Answer::Done));
    for is_reopened in [false, true] {
        if is_reopened {
            rig.reopen(true);
        }
        let names: Vec<_> = rig.pool.volumes().map(|(_, volume)| volume.label.name.clone()).collect();
        assert_eq!(names, ["v", "s", "base", "parent", "small"]);
        assert_eq!(rig.read(volume, 0, 24), [[0; 4096], [2; 4096], [3; 4096]].concat());
        assert_eq!(rig.read(snapshot, 0, 24), [[1; 4096], [0; 4096], [0; 4096]].concat());
    }
    rig.write(volume, 0, &[4; 4096]);
    assert_eq!(rig.command(Command::Delete(parent)), Ok(Answer::Done));
    assert_eq!(rig.read(volume, 0, 24), [[4; 4096], [2; 4096], [3; 4096]].concat());
    let check = Command::Check { data: true, repair: false };
    let Ok(Answer::Check(report)) = rig.command(check) else { panic!("a report") };
    assert!(report.is_clean(), "{report:?}");
}
