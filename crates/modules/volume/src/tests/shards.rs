//! Pools of several shards.

use super::*;
use crate::gate::Closed;
use crate::note::Intent;
use aryk_volume::{Answer, Command, Label, VolumeId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a stripe.
const STRIPE: u64 = 16 * MIB;
/// Bytes of the volumes.
const SIZE: u64 = 5 * STRIPE + 4 * MIB;

/// A pool of so many shards, with a volume.
fn stack(shards: u32) -> Stack {
    let stack = Stack::on(512, 2).malloc("base", 512, 1024 * MIB);
    let stack = Stack { shards, volume: Bytes(SIZE), ..stack };
    stack.pool().with_volume()
}

fn disk(stack: &Stack, name: &str) -> Arc<Bdev> {
    stack.env.registry().find(&format!("p/{name}")).expect("it has a disk")
}

/// Opens the pool again.
fn reopen(stack: &Stack) -> Arc<Pool> {
    let pool = stack.the_pool();
    for disk in pool.members().into_iter().filter_map(|member| member.disk) {
        // A test may have removed it.
        let _ = block_on(stack.env.registry().remove(disk.name()));
    }
    block_on(stack.pools.close(&pool));
    drop(pool);
    let found = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
    found.expect("it can be opened").expect("there is a pool")
}

fn snapshot(stack: &Stack, name: &str) -> Result<Vec<Member>, Error> {
    let pool = stack.the_pool();
    let id = pool.find("v")?.id;
    block_on(pool.snapshot(vec![(id, name.to_owned(), Uuid::new_v4())]))
}

/// Whether all parts of the pool are in order.
fn check(pool: &Pool) {
    let report = block_on(pool.check(true, false)).expect("it can be checked");
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn data_of_all_shards_is_there_again_after_a_restart() {
    for shards in [2, 4] {
        let stack = stack(shards);
        assert_eq!(stack.the_pool().cores().len(), shards as usize);
        let mut model = BTreeMap::new();
        // In each stripe, and over the end of each.
        for (round, at) in (0..5).flat_map(|n| [n * STRIPE + 8192, (n + 1) * STRIPE - 4096]).enumerate() {
            let data = [round as u8 + 1; 8192];
            stack.write(&disk(&stack, "v"), at, &data);
            model.insert(at, data);
        }
        let verify = |stack: &Stack, name: &str| {
            for (at, data) in &model {
                assert_eq!(stack.read(&disk(stack, name), *at, 8192), data, "{name} at {at}");
            }
        };
        verify(&stack, "v");
        snapshot(&stack, "s").expect("it can be taken");
        let of = stack.the_pool().find("s").expect("it was made").id;
        stack.command(&disk(&stack, "v"), Op::WriteZeroes, 0, SIZE);
        stack.volume("c", Origin::Snapshot(of));
        stack.write(&disk(&stack, "c"), 3 * STRIPE + MIB, &[99; 4096]);
        for _ in 0..2 {
            verify(&stack, "s");
            verify(&stack, "c");
            for at in (0..SIZE).step_by(MIB as usize) {
                let zeroes = stack.read(&disk(&stack, "v"), at, MIB.min(SIZE - at));
                assert!(zeroes.iter().all(|byte| *byte == 0), "at {at}");
            }
            assert_eq!(stack.read(&disk(&stack, "c"), 3 * STRIPE + MIB, 4096), [99; 4096]);
            let pool = reopen(&stack);
            assert_eq!(pool.cores().len(), shards as usize);
            check(&pool);
        }
    }
}

#[test]
fn volumes_are_changed_in_all_shards() {
    let stack = stack(4);
    let pool = stack.the_pool();
    let id = pool.find("v").expect("it was made").id;
    let last = SIZE - 4096;
    stack.write(&disk(&stack, "v"), last, &[1; 4096]);
    stack.write(&disk(&stack, "v"), STRIPE, &[2; 4096]);
    snapshot(&stack, "s").expect("it can be taken");
    let s = pool.find("s").expect("it was made");
    // What is cut off reads zeroes when the volume grows again.
    block_on(pool.resize(id, Bytes(STRIPE + 4096))).expect("it shrinks");
    block_on(pool.resize(id, Bytes(2 * SIZE))).expect("it grows");
    assert_eq!(stack.read(&disk(&stack, "v"), last, 4096), [0; 4096]);
    assert_eq!(stack.read(&disk(&stack, "v"), STRIPE, 4096), [2; 4096]);
    stack.write(&disk(&stack, "v"), 2 * SIZE - 512, &[3; 512]);
    let changed = block_on(pool.changed(s.id, id)).expect("they are compared");
    let covers = |at: u64| changed.iter().any(|(first, bytes)| (*first..first + bytes).contains(&at));
    assert!(covers(2 * SIZE - 512) && covers(last) && !covers(STRIPE), "{changed:?}");
    assert!(changed.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "{changed:?}");
    block_on(pool.rename(id, "w".to_owned())).expect("it is renamed");
    block_on(pool.set_when_full(id, WhenFull::Fail)).expect("it is set");
    block_on(pool.set_thick(id, true)).expect("there is space");
    let reserved = block_on(pool.space()).expect("it is open").reserved.0;
    assert!(reserved > SIZE && reserved <= 2 * SIZE, "{reserved}");
    let too_large = block_on(pool.resize(id, Bytes(4096 * MIB)));
    assert!(matches!(too_large, Err(Error::Command(CommandError::NotReservable { .. }))), "{too_large:?}");
    let pool = reopen(&stack);
    let w = pool.find("w").expect("it was renamed");
    assert_eq!((w.bytes(), w.volume.is_thick, w.volume.when_full), (2 * SIZE, true, WhenFull::Fail));
    let now = block_on(pool.space()).expect("it is open").reserved.0;
    // A block that was written is the volume's own as soon as the log was read.
    assert!((reserved - 4096..=reserved).contains(&now), "{now}, {reserved} before");
    block_on(pool.set_thick(w.id, false)).expect("it can be set");
    let s = pool.find("s").expect("it was made");
    block_on(pool.revert(w.id, s.id)).expect("it is reverted");
    assert_eq!(pool.find("w").expect("it is there").bytes(), SIZE);
    assert_eq!(stack.read(&disk(&stack, "w"), last, 4096), [1; 4096]);
    assert_eq!(pool.parent(&pool.find("w").expect("it is there")), Parent::Snapshot("s".to_owned()));
    let space = block_on(pool.count_space(true)).expect("it is counted").of[&s.id];
    assert_eq!(space.own_bytes + space.shared_bytes, 8192);
    assert_eq!(pool.last_count().expect("it was counted").of[&s.id], space);
    block_on(stack.env.registry().remove(disk(&stack, "w").name())).expect("it can be removed");
    block_on(pool.delete(w.id)).expect("it is deleted");
    let pool = reopen(&stack);
    assert!(pool.find("w").is_err());
    check(&pool);
}

#[test]
fn images_are_the_base_of_volumes_in_all_shards() {
    let stack = Stack::on(512, 2).malloc("base", 512, 1024 * MIB).malloc("image", 512, SIZE);
    let stack = Stack { shards: 2, volume: Bytes(SIZE), ..stack }.pool();
    let image = stack.env.registry().find("image").expect("it was made");
    let places = [0, STRIPE - 2048, 2 * STRIPE + 512, 5 * STRIPE + MIB];
    for at in places {
        stack.write(&image, at, &[at as u8 | 1; 4096]);
    }
    let member = stack.volume("o", Origin::Disk("image".to_owned()));
    stack.write(&disk(&stack, "o"), STRIPE, &[200; 512]);
    let verify = |stack: &Stack| {
        assert_eq!(stack.read(&disk(stack, "o"), STRIPE - 2048, 2048), [1; 2048]);
        assert_eq!(stack.read(&disk(stack, "o"), STRIPE, 512), [200; 512]);
        assert_eq!(stack.read(&disk(stack, "o"), STRIPE + 512, 1536), [1; 1536]);
        for at in [0, 2 * STRIPE + 512, 5 * STRIPE + MIB] {
            assert_eq!(stack.read(&disk(stack, "o"), at, 4096), [at as u8 | 1; 4096]);
        }
    };
    verify(&stack);
    let before = block_on(stack.the_pool().stats()).expect("it is open").live_bytes;
    block_on(stack.the_pool().inflate(member.id)).expect("it is copied");
    // Each shard has copied its own stripes: six blocks, and those that zeroes share with data.
    let copied = block_on(stack.the_pool().stats()).expect("it is open").live_bytes - before;
    assert!((4 * 4096..=9 * 4096).contains(&copied), "{copied}");
    let pool = reopen(&stack);
    block_on(stack.env.registry().remove("image")).expect("nothing depends on it");
    verify(&stack);
    check(&pool);
}

#[test]
fn snapshots_under_load_have_no_write_without_those_before_it_and_none_in_part() {
    let stack = stack(2);
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut bench = Bench::new();
            let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
            while !is_over.load(Ordering::Relaxed) {
                let round = rounds.fetch_add(1, Ordering::Relaxed) + 1;
                // Each in another shard than the one before, and the last in both.
                for at in [0, STRIPE, 2 * STRIPE - 512] {
                    let data: Vec<u8> = round.to_le_bytes().repeat(128);
                    disk.write(at / 512, &data, Shape::Single, &mut bench);
                    let ended = ends(&mut disk, 1, &mut bench);
                    assert_eq!(ended[0].status, Status::Ok);
                }
            }
            disk.close(&mut bench);
        });
        for n in 0..40 {
            let before = rounds.load(Ordering::Relaxed);
            while !writer.is_finished() && rounds.load(Ordering::Relaxed) < before + 2 {
                std::thread::yield_now();
            }
            let taken = snapshot(&stack, &format!("s{n}"));
            if taken.is_err() {
                is_over.store(true, Ordering::Relaxed);
            }
            taken.expect("it can be taken");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    for n in 0..40 {
        let disk = disk(&stack, &format!("s{n}"));
        let number = |at: u64| {
            let data = stack.read(&disk, at, 1024);
            let first = u64::from_le_bytes(data[..8].try_into().expect("8 bytes"));
            assert!(data.chunks(8).all(|bytes| bytes == first.to_le_bytes()), "s{n} has a part of a write");
            first
        };
        let [first, second, both] = [0, STRIPE, 2 * STRIPE - 512].map(number);
        assert!(first >= second && second >= both && both + 1 >= first, "s{n}: {first} {second} {both}");
    }
    check(&stack.the_pool());
}

#[test]
fn a_gate_does_not_wait_for_ever_for_writes_and_opens_again() {
    let stack = Stack::on(512, 2).slow_base(1024 * MIB);
    let stack = Stack { shards: 2, volume: Bytes(SIZE), ..stack }.pool().with_volume();
    let mut bench = Bench::new();
    let mut writer = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    use aryk_bdev_delay::Kind;
    let slow = |us| {
        for kind in [Kind::AvgWrite, Kind::P99Write] {
            aryk_bdev_delay::set_latency(stack.registry(), "base", kind, us).expect("it is there");
        }
    };
    slow(3_000_000);
    writer.write(0, &[1; 4096], Shape::Single, &mut bench);
    bench.turn();
    let base = disk(&stack, "v");
    let closed = Closed::new(vec![&base.device_as::<VolumeDisk>().expect("it is a volume").gate]);
    let drained = std::thread::scope(|scope| {
        let draining = scope.spawn(|| block_on(closed.drained()));
        bench.until("the end of its patience", || draining.is_finished());
        draining.join().expect("it does not panic")
    });
    assert!(matches!(drained, Err(Error::Busy(_))), "{drained:?}");
    slow(0);
    // The gate has opened by itself.
    writer.write(STRIPE / 512, &[2; 4096], Shape::Single, &mut bench);
    assert!(ends(&mut writer, 2, &mut bench).iter().all(|ended| ended.status == Status::Ok));
    writer.close(&mut bench);
    // Its reactor ends.
    drop(bench);
    snapshot(&stack, "t").expect("it can be taken");
}

/// Changes that a crash has interrupted.
mod interrupted {
    use super::*;

    fn label(name: &str, uuid: Uuid) -> Label {
        Label { name: name.to_owned(), uuid: uuid.into_bytes() }
    }

    fn create(name: &str, uuid: Uuid) -> Command {
        Command::Create {
            label: label(name, uuid),
            units: SIZE / 512,
            block_size: 512,
            origin: aryk_volume::Origin::Empty,
            when_full: WhenFull::Wait,
            is_thick: false,
        }
    }

    #[test]
    fn what_was_made_in_some_shards_is_deleted() {
        let stack = stack(4);
        for parts in [vec![], vec![0], vec![3], vec![1, 2, 3], vec![0, 1, 2]] {
            let (pool, uuid) = (stack.the_pool(), Uuid::new_v4());
            block_on(pool.begin_intent(Intent::Make(vec![uuid]))).expect("it is noted");
            for part in parts {
                let name = if part == 0 { "half".to_owned() } else { uuid.to_string() };
                block_on(pool.parts[part].command(create(&name, uuid))).expect("it is made");
            }
            drop(pool);
            let pool = reopen(&stack);
            assert!(pool.find("half").is_err());
            stack.volume("half", Origin::Empty);
            let id = pool.find("half").expect("it was made").id;
            block_on(stack.env.registry().remove(disk(&stack, "half").name())).expect("it can be removed");
            block_on(pool.delete(id)).expect("it is deleted");
        }
    }

    #[test]
    fn what_was_made_in_all_shards_stays() {
        let stack = stack(2);
        let (pool, uuid) = (stack.the_pool(), Uuid::new_v4());
        block_on(pool.begin_intent(Intent::Make(vec![uuid]))).expect("it is noted");
        block_on(pool.parts[1].command(create(&uuid.to_string(), uuid))).expect("it is made");
        block_on(pool.parts[0].command(create("whole", uuid))).expect("it is made");
        drop(pool);
        reopen(&stack);
        stack.write(&disk(&stack, "whole"), STRIPE - 512, &[7; 1024]);
    }

    #[test]
    fn a_deletion_goes_on() {
        for parts in [vec![], vec![0], vec![0, 2]] {
            let stack = stack(4);
            let pool = stack.the_pool();
            let volume = pool.find("v").expect("it was made");
            block_on(stack.env.registry().remove(disk(&stack, "v").name())).expect("it can be removed");
            block_on(pool.begin_intent(Intent::Delete(vec![volume.uuid()]))).expect("it is noted");
            for part in parts {
                let delete = Command::Delete(volume.ids[part]);
                block_on(pool.parts[part].command(delete)).expect("it is deleted");
            }
            drop((pool, volume));
            let pool = reopen(&stack);
            assert!(pool.find("v").is_err());
            for part in &pool.parts {
                assert_eq!(block_on(part.root.call(|owner, _| owner.volumes().len())), Ok(0));
            }
        }
    }

    #[test]
    fn a_revert_is_done_once_in_all_shards() {
        let stack = stack(2);
        let places = [0, STRIPE];
        places.iter().for_each(|at| stack.write(&disk(&stack, "v"), *at, &[1; 4096]));
        snapshot(&stack, "s").expect("it can be taken");
        places.iter().for_each(|at| stack.write(&disk(&stack, "v"), *at, &[2; 4096]));
        let pool = stack.the_pool();
        let [v, s] = ["v", "s"].map(|name| pool.find(name).expect("it was made"));
        let intent = block_on(pool.revert_intent(v.uuid(), s.uuid())).expect("both are there");
        block_on(pool.begin_intent(intent)).expect("it is noted");
        let revert = Command::Revert { volume: v.ids[1], snapshot: s.ids[1] };
        block_on(pool.parts[1].command(revert)).expect("it is reverted");
        // A write that was held back until the gate has opened by itself.
        stack.write(&disk(&stack, "v"), STRIPE, &[3; 4096]);
        drop((pool, v, s));
        reopen(&stack);
        assert_eq!(stack.read(&disk(&stack, "v"), 0, 4096), [1; 4096]);
        assert_eq!(stack.read(&disk(&stack, "v"), STRIPE, 4096), [3; 4096]);
    }

    #[test]
    fn all_changes_that_are_noted_go_on() {
        let stack = stack(2);
        for name in ["a", "b", "c"] {
            stack.volume(name, Origin::Empty);
        }
        let pool = stack.the_pool();
        let [a, b, c] = ["a", "b", "c"].map(|name| pool.find(name).expect("it was made"));
        for intent in [
            Intent::Delete(vec![a.uuid()]),
            Intent::Follow(b.uuid()),
            Intent::Make(vec![c.uuid(), Uuid::new_v4()]),
        ] {
            block_on(pool.begin_intent(intent)).expect("it is noted");
        }
        // A volume has one change at a time.
        let second = block_on(pool.begin_intent(Intent::Delete(vec![b.uuid()])));
        assert!(matches!(second, Err(Error::Busy(_))), "{second:?}");
        let when_full = Command::SetWhenFull { volume: b.ids[0], when_full: WhenFull::Fail };
        block_on(pool.parts[0].command(when_full)).expect("it is set");
        drop((pool, a, b, c));
        let pool = reopen(&stack);
        let names: Vec<_> = pool.members().iter().map(|member| member.name().to_owned()).collect();
        assert_eq!(names, ["v", "b"]);
        let volumes = block_on(pool.parts[1].root.call(|owner, _| owner.volumes())).expect("it is open");
        let when_full: Vec<_> = volumes.iter().map(|listed| listed.volume.when_full).collect();
        assert_eq!(when_full, [WhenFull::Wait, WhenFull::Fail]);
    }

    /// Takes all space of the second shard that nothing has reserved.
    fn take_second_shard(pool: &Pool) -> VolumeId {
        let hog = |units| Command::Create {
            label: label("hog", Uuid::new_v4()),
            units,
            block_size: 512,
            origin: aryk_volume::Origin::Empty,
            when_full: WhenFull::Wait,
            is_thick: true,
        };
        let free = match block_on(pool.parts[1].command(hog(1 << 30))) {
            Err(Error::Command(CommandError::NotReservable { free, .. })) => free,
            other => panic!("{other:?}"),
        };
        // The volume's place in the index takes a little.
        let free = free - (64 << 10);
        let bytes = free / STRIPE * 2 * STRIPE + STRIPE + free % STRIPE;
        match block_on(pool.parts[1].command(hog(bytes / 512))) {
            Ok(Answer::Volume(id)) => id,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_change_that_a_shard_refuses_is_finished_later_and_others_go_on() {
        let stack = stack(2);
        let pool = stack.the_pool();
        let v = pool.find("v").expect("it was made");
        let hog = take_second_shard(&pool);
        block_on(pool.begin_intent(Intent::Follow(v.uuid()))).expect("it is noted");
        // The first shard has the space, and the second one has not.
        let thick = Command::SetThick { volume: v.ids[0], is_thick: true };
        block_on(pool.parts[0].command(thick)).expect("it has the space");
        let is_thick = |pool: &Pool| {
            let volumes = block_on(pool.parts[1].root.call(|owner, _| owner.volumes()));
            volumes.expect("it is open").iter().any(|listed| listed.id == v.ids[1] && listed.volume.is_thick)
        };
        assert!(!block_on(pool.finish_changes()));
        let resized = block_on(pool.resize(v.id, Bytes(2 * SIZE)));
        assert!(matches!(resized, Err(Error::Busy(_))), "{resized:?}");
        stack.volume("other", Origin::Empty);
        stack.write(&disk(&stack, "other"), 0, &[9; 4096]);
        // Also a restart does not finish it. The content is the volume's.
        drop(pool);
        let pool = reopen(&stack);
        stack.write(&disk(&stack, "v"), STRIPE, &[8; 4096]);
        assert!(!is_thick(&pool));
        block_on(pool.parts[1].command(Command::Delete(hog))).expect("it is deleted");
        assert!(block_on(pool.finish_changes()) && is_thick(&pool));
        assert_eq!(pool.unfinished_changes(), 0);
        assert_eq!(stack.read(&disk(&stack, "other"), 0, 4096), [9; 4096]);
        block_on(pool.resize(v.id, Bytes(2 * SIZE))).expect("it grows");
        check(&pool);
    }

    #[test]
    fn a_volume_that_is_half_reverted_has_no_disk_and_can_be_deleted() {
        let stack = stack(2);
        let pool = stack.the_pool();
        stack.write(&disk(&stack, "v"), 0, &[1; 4096]);
        snapshot(&stack, "s").expect("it can be taken");
        let [v, s] = ["v", "s"].map(|name| pool.find(name).expect("it was made"));
        // The second shard refuses to revert what is a snapshot there.
        block_on(pool.parts[1].command(Command::Freeze(v.ids[1]))).expect("it is frozen");
        let reverted = block_on(pool.revert(v.id, s.id));
        assert!(matches!(reverted, Err(Error::Unfinished(_))), "{reverted:?}");
        let is_there = |stack: &Stack| stack.env.registry().find("p/v").is_ok();
        assert!(!is_there(&stack));
        let delete_snapshot = |pool: &Pool| {
            block_on(stack.env.registry().remove(disk(&stack, "s").name())).expect("it can be removed");
            let deleted = block_on(pool.delete(s.id));
            block_on(pool.refresh()).expect("it is open");
            deleted
        };
        assert!(matches!(delete_snapshot(&pool), Err(Error::Busy(_))), "the change needs it");
        drop(pool);
        let pool = reopen(&stack);
        assert!(!is_there(&stack) && pool.unfinished_changes() == 1);
        block_on(pool.delete(v.id)).expect("it is deleted with its change");
        assert_eq!(pool.unfinished_changes(), 0);
        for part in &pool.parts {
            assert_eq!(block_on(part.root.call(|owner, _| owner.volumes().len())), Ok(1));
        }
        delete_snapshot(&pool).expect("nothing needs it");
        check(&pool);
    }

    #[test]
    fn a_revert_that_a_shard_has_no_space_for_changes_nothing() {
        let stack = stack(2);
        let pool = stack.the_pool();
        let v = pool.find("v").expect("it was made").id;
        block_on(pool.set_thick(v, true)).expect("there is space");
        stack.write(&disk(&stack, "v"), STRIPE, &[1; 4096]);
        snapshot(&stack, "s").expect("it can be taken");
        let s = pool.find("s").expect("it was made").id;
        block_on(pool.resize(v, Bytes(STRIPE))).expect("it shrinks");
        let hog = take_second_shard(&pool);
        let reverted = block_on(pool.revert(v, s));
        assert!(matches!(reverted, Err(Error::Command(CommandError::NotReservable { .. }))), "{reverted:?}");
        assert_eq!(pool.unfinished_changes(), 0);
        assert_eq!(pool.find("v").expect("it is there").bytes(), STRIPE);
        block_on(pool.parts[1].command(Command::Delete(hog))).expect("it is deleted");
        block_on(pool.revert(v, s)).expect("there is space");
        assert_eq!(stack.read(&disk(&stack, "v"), STRIPE, 4096), [1; 4096]);
        assert_eq!(pool.find("v").expect("it is there").bytes(), SIZE);
        check(&pool);
    }

    #[test]
    fn a_volume_that_a_shard_has_lost_is_deleted_in_the_others_only() {
        let stack = stack(4);
        stack.volume("w", Origin::Empty);
        let pool = stack.the_pool();
        let v = pool.find("v").expect("it was made");
        // Then the ids of the shards differ.
        block_on(pool.parts[1].command(Command::Delete(v.ids[1]))).expect("it is deleted");
        drop(pool);
        let pool = reopen(&stack);
        assert!(stack.env.registry().find("p/v").is_err());
        block_on(pool.delete(v.id)).expect("it is deleted");
        for part in &pool.parts {
            let volumes = block_on(part.root.call(|owner, _| owner.volumes())).expect("it is open");
            assert_eq!(volumes.len(), 1);
        }
        stack.write(&disk(&stack, "w"), 0, &[7; 4096]);
        check(&pool);
    }

    /// A change that fails in a part is undone before the next one, without a crash.
    #[test]
    fn a_change_that_has_failed_is_undone_before_the_next_one() {
        let stack = stack(2);
        let (pool, uuid) = (stack.the_pool(), Uuid::new_v4());
        // Another volume of the second shard has the name.
        let other = create(&uuid.to_string(), Uuid::new_v4());
        block_on(pool.parts[1].command(other)).expect("it is made");
        let new = NewVolume { uuid, ..stack.new_volume("x", Origin::Empty) };
        let made = block_on(pool.create_volume(new));
        assert_eq!(made.map(drop), Err(Error::Command(CommandError::Exists)));
        let volumes = block_on(pool.parts[0].root.call(|owner, _| owner.volumes().len()));
        assert_eq!(volumes, Ok(1));
        stack.volume("x", Origin::Empty);
    }

    #[test]
    fn a_change_of_a_newer_version_is_not_touched() {
        let stack = stack(2);
        let note = Command::SetNote(b"intent=move 1\n".to_vec());
        block_on(stack.the_pool().parts[0].command(note)).expect("it is noted");
        let pool = stack.the_pool();
        for disk in pool.members().into_iter().filter_map(|member| member.disk) {
            block_on(stack.env.registry().remove(disk.name())).expect("it can be removed");
        }
        block_on(stack.pools.close(&pool));
        let found = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
        assert_eq!(found.map(drop), Err(Error::Intent("move 1".to_owned())));
        assert!(stack.pools.list().is_empty());
        assert_eq!(stack.env.registry().find("base").expect("it is free").writers(), 0);
    }
}

#[test]
fn numbers_of_shards_and_bases_are_checked() {
    let stack = Stack::on(512, 1).malloc("base", 512, 256 * MIB);
    for shards in [0, 3, 32] {
        let made =
            block_on(stack.pools.create(&stack.env, NewPool { shards, ..NewPool::named("p", "base") }));
        assert_eq!(made.map(drop), Err(Error::Shards(shards)));
    }
    let made =
        block_on(stack.pools.create(&stack.env, NewPool { shards: 16, ..NewPool::named("p", "base") }));
    assert!(matches!(made, Err(Error::Format(FormatError::TooSmall { .. }))), "{made:?}");
    let stack = Stack { shards: 2, ..stack }.pool();
    let pool = stack.the_pool();
    assert_eq!(pool.cores().len(), 2);
    block_on(stack.pools.close(&pool));
    // Without force, the pool is not destroyed.
    let again = NewPool { shards: 2, ..NewPool::named("q", "base") };
    let refused = block_on(stack.pools.create(&stack.env, again));
    assert!(matches!(refused, Err(Error::Format(FormatError::Pool { .. }))), "{refused:?}");
    reopen_closed(&stack);
}

fn reopen_closed(stack: &Stack) {
    let found = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
    found.expect("it can be opened").expect("there is a pool");
}

#[test]
fn shards_grow_with_their_base() {
    let stack = Stack { shards: 2, ..Stack::on(512, 2) };
    let dir = TempDir::new_in("/var/tmp").expect("a directory can be made");
    let path = dir.path().join("base");
    let file = std::fs::File::create(&path).expect("a file can be made");
    file.set_len(512 * MIB).expect("it is sparse");
    stack.file("base", &path, None);
    let mut stack = stack.pool().with_volume();
    stack._dir = Some(dir);
    stack.write(&disk(&stack, "v"), 0, &[1; 4096]);
    let before = block_on(stack.the_pool().stats()).expect("it is open").blobs;
    block_on(stack.env.registry().remove("base")).expect("it can be removed");
    assert!(stack.pools.list().is_empty());
    file.set_len(1024 * MIB).expect("it is sparse");
    stack.file("base", &path, None);
    reopen_closed(&stack);
    let segments = block_on(stack.the_pool().grow()).expect("it grows");
    assert!(u64::from(segments) > before + 50, "{before} {segments}");
    let pool = reopen(&stack);
    assert_eq!(block_on(pool.stats()).expect("it is open").blobs, u64::from(segments));
    assert_eq!(stack.read(&disk(&stack, "v"), 0, 4096), [1; 4096]);
    check(&pool);
}

#[test]
fn the_size_of_clusters_is_kept_beside_changes() {
    let stack = Stack::on(512, 2).malloc("base", 512, 1024 * MIB);
    for shards in [1, 4] {
        let new = NewPool { shards, cluster: Bytes(64 << 10), force: true, ..NewPool::named("p", "base") };
        let pool = block_on(stack.pools.create(&stack.env, new)).expect("it can be created");
        assert_eq!(pool.cluster(), Bytes(64 << 10));
        stack.volume("v", Origin::Empty);
        snapshot(&stack, "s").expect("it can be taken");
        drop(pool);
        let pool = reopen(&stack);
        assert_eq!(pool.cluster(), Bytes(64 << 10));
        for disk in pool.members().into_iter().filter_map(|member| member.disk) {
            block_on(stack.env.registry().remove(disk.name())).expect("it is there");
        }
        block_on(stack.pools.close(&pool));
    }
}
