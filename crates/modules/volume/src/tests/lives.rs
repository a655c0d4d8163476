//! What a pool keeps: over closing and opening, and when its base goes.

use super::*;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// The pool on the disk `base`, found again.
fn open(stack: &Stack) -> Arc<Pool> {
    let found = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
    found.expect("it can be opened").expect("there is a pool")
}

/// Removes the disks of all volumes, and closes the pool.
fn close(stack: &Stack, pool: &Arc<Pool>) {
    for disk in pool.members().into_iter().filter_map(|member| member.disk) {
        block_on(stack.env.registry().remove(disk.name())).expect("it can be removed");
    }
    block_on(stack.pools.close(pool));
}

fn stack() -> Stack {
    Stack::new(512).malloc("base", 512, BASE).pool().with_volume()
}

#[test]
fn everything_is_there_again_after_a_restart() {
    let stack = stack();
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made");
    let disk = volume.disk.clone().expect("it has a disk");
    stack.write(&disk, 8192, &[1; 4096]);
    stack.write(&disk, 12288 + 512, &[2; 512]);
    let wanted = vec![(volume.id, "s".to_owned(), Uuid::new_v4())];
    let snapshot = block_on(pool.snapshot(wanted)).expect("it can be taken").remove(0);
    stack.write(&disk, 8192, &[3; 4096]);
    let clone = stack.volume("c", Origin::Snapshot(snapshot.id));
    stack.write(clone.disk.as_ref().expect("it has a disk"), 0, &[4; 4096]);
    drop(disk);
    for round in 0..3 {
        let pool = stack.the_pool();
        close(&stack, &pool);
        assert!(pool.has_ended());
        assert!(stack.pools.list().is_empty());
        drop(pool);
        let pool = open(&stack);
        assert_eq!(pool.name(), "p");
        assert_eq!(pool.health(), Health::Ready);
        let names: Vec<String> = pool.members().iter().map(|member| member.name().to_owned()).collect();
        assert_eq!(names, ["v", "s", "c"], "round {round}");
        let read = |name: &str, offset, len| {
            let disk = stack.env.registry().find(&format!("p/{name}")).expect("it has a disk");
            stack.read(&disk, offset, len)
        };
        assert_eq!(read("v", 8192, 4096), [3; 4096]);
        assert_eq!(read("s", 8192, 4096), [1; 4096]);
        assert_eq!(read("c", 8192, 4096), [1; 4096]);
        assert_eq!(read("c", 0, 4096), [4; 4096]);
        assert_eq!(read("v", 0, 4096), [0; 4096]);
        let partly = [[0; 512], [2; 512], [0; 512]].concat();
        assert_eq!(read("v", 12288, 1536), partly);
        assert_eq!(read("c", 12288, 1536), partly);
    }
}

#[test]
fn a_removed_base_takes_its_volumes_and_gives_back_everything() {
    let stack = stack();
    let pool = stack.the_pool();
    block_on(stack.env.registry().remove("base")).expect("it can be removed");
    assert!(pool.has_ended());
    assert!(stack.env.registry().list().is_empty(), "the volume went with its base");
    assert!(stack.pools.find("p").is_err());
    assert_eq!(block_on(pool.stats()).map(drop), Err(Error::Ended));
    let made = block_on(pool.create_volume(stack.new_volume("late", Origin::Empty)));
    assert_eq!(made.map(drop), Err(Error::Ended));
}

#[test]
fn a_deleted_pool_is_not_found_again() {
    let stack = stack();
    let pool = stack.the_pool();
    let again = NewPool { segment_bytes: Some(8 << 20), ..NewPool::named("q", "base") };
    let claimed = block_on(stack.pools.create(&stack.env, again.clone()));
    assert!(matches!(claimed, Err(Error::Registry(aryk_bdev::Error::Claimed { .. }))));
    close(&stack, &pool);
    let refused = block_on(stack.pools.create(&stack.env, again.clone()));
    assert!(matches!(refused, Err(Error::Format(FormatError::Pool { .. }))), "{refused:?}");
    let pool = open(&stack);
    for disk in pool.members().into_iter().filter_map(|member| member.disk) {
        block_on(stack.env.registry().remove(disk.name())).expect("it can be removed");
    }
    block_on(stack.pools.delete(&stack.env, &pool)).expect("it can be deleted");
    let found = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
    assert!(matches!(found, Ok(None)), "{found:?}");
    block_on(stack.pools.create(&stack.env, again)).expect("the disk is free");
}

#[test]
fn a_pool_is_not_on_a_volume_and_names_are_checked() {
    let stack = stack();
    let nested = NewPool::named("q", &stack.name);
    assert!(matches!(block_on(stack.pools.create(&stack.env, nested)), Err(Error::Nested(_))));
    let twice = NewPool::named("p", "base");
    assert!(matches!(block_on(stack.pools.create(&stack.env, twice)), Err(Error::PoolExists(_))));
    let pool = stack.the_pool();
    for name in ["", "a/b", "a\n", &"x".repeat(256)] {
        let made = block_on(pool.create_volume(stack.new_volume(name, Origin::Empty)));
        assert_eq!(made.map(drop), Err(Error::Name(name.to_owned())));
    }
    let made = block_on(pool.create_volume(stack.new_volume("v", Origin::Empty)));
    assert_eq!(made.map(drop), Err(Error::Registry(aryk_bdev::Error::Exists("p/v".to_owned()))));
}

#[test]
fn a_renamed_volume_has_another_alias() {
    let stack = stack();
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made");
    block_on(pool.rename(volume.id, "w".to_owned())).expect("it can be renamed");
    let registry = stack.env.registry();
    assert!(registry.find("p/v").is_err());
    assert_eq!(registry.find("p/w").expect("it has the alias").name(), stack.name);
    block_on(pool.rename_pool("q".to_owned())).expect("it can be renamed");
    assert_eq!(registry.find("q/w").expect("it has the alias").name(), stack.name);
    assert!(registry.find("p/w").is_err());
    let too_long = block_on(pool.rename_pool("x".repeat(65)));
    assert_eq!(too_long, Err(Error::Format(FormatError::Name)));
    close(&stack, &pool);
    drop(pool);
    assert_eq!(open(&stack).name(), "q");
    assert!(registry.find("q/w").is_ok());
}

#[test]
fn changes_since_a_snapshot_are_listed_and_an_inflated_clone_is_independent() {
    let stack = stack();
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made");
    let disk = volume.disk.clone().expect("it has a disk");
    stack.write(&disk, 0, &[5; 65536]);
    let wanted = vec![(volume.id, "s".to_owned(), Uuid::new_v4())];
    let snapshot = block_on(pool.snapshot(wanted)).expect("it can be taken").remove(0);
    assert_eq!(block_on(pool.changed(snapshot.id, volume.id)), Ok(vec![]));
    stack.write(&disk, 8192, &[6; 4096]);
    stack.write(&disk, 1 << 20, &[6; 8192]);
    assert_eq!(block_on(pool.changed(snapshot.id, volume.id)), Ok(vec![(8192, 4096), (1 << 20, 8192)]));
    let clone = stack.volume("c", Origin::Snapshot(snapshot.id));
    assert_eq!(pool.parent(&clone), Parent::Snapshot("s".to_owned()));
    block_on(pool.inflate(clone.id)).expect("it can be inflated");
    let clone = pool.find("c").expect("it is there");
    assert_eq!(pool.parent(&clone), Parent::None);
    assert_eq!(stack.read(&clone.disk.expect("it has a disk"), 0, 65536), [5; 65536]);
    let report = block_on(pool.check(true, false)).expect("it can be checked");
    assert!(report.is_clean() && report.blocks_read > 0, "{report:?}");
}

#[test]
fn a_deleted_volume_is_gone_and_a_snapshot_keeps_its_data() {
    let stack = stack();
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made");
    let disk = volume.disk.clone().expect("it has a disk");
    stack.write(&disk, 0, &[5; 4096]);
    drop(disk);
    let wanted = vec![(volume.id, "s".to_owned(), Uuid::new_v4())];
    let snapshot = block_on(pool.snapshot(wanted)).expect("it can be taken").remove(0);
    assert_eq!(pool.parent(&volume), Parent::Snapshot("s".to_owned()));
    assert_eq!(pool.parent(&snapshot), Parent::None);
    let disk = snapshot.disk.expect("it has a disk");
    assert!(disk.device().is_read_only());
    block_on(stack.env.registry().remove(&stack.name)).expect("it can be removed");
    block_on(pool.delete(volume.id)).expect("it can be deleted");
    assert_eq!(pool.find("v").map(drop), Err(Error::NoVolume("v".to_owned())));
    assert_eq!(stack.read(&disk, 0, 4096), [5; 4096]);
}

#[test]
fn a_volume_is_read_more_often_than_reads_have_buffers() {
    let stack = stack();
    let disk = stack.the_pool().find("v").expect("it was made").disk.expect("it has a disk");
    stack.write(&disk, 0, &[5; 4096]);
    for _ in 0..=64 * MIB / VOLUME.0 {
        let read = stack.read(&disk, 0, VOLUME.0);
        assert!(read[..4096].iter().all(|&byte| byte == 5) && read[4096..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn aborted_writes_do_not_wait_for_space_any_longer() {
    const WRITES: u64 = 8;
    let stack = Stack::new(4096).malloc("base", 4096, 96 * MIB).pool();
    let volume = NewVolume { bytes: Bytes(1 << 30), ..stack.new_volume("v", Origin::Empty) };
    let name = volume.uuid.to_string();
    let pool = stack.the_pool();
    block_on(pool.create_volume(volume)).expect("it can be made");
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &name, Access::Exclusive, WRITES as u16, MIB as u32);
    let data = vec![7; MIB as usize];
    let mut next = 0;
    let mut waiting = Vec::new();
    let mut quiet = 0;
    while quiet < 100 {
        while (waiting.len() as u64) < WRITES {
            waiting.push(disk.write(next * 256, &data, Shape::Single, &mut bench));
            next += 1;
        }
        bench.turn();
        let ended = disk.completed();
        assert!(ended.iter().all(|outcome| outcome.status == Status::Ok), "{ended:?}");
        waiting.retain(|id| !ended.iter().any(|outcome| outcome.id == *id));
        let stats = block_on(pool.stats()).expect("it is open");
        let all_wait = ended.is_empty() && stats.waiting_requests == WRITES;
        quiet = if all_wait { quiet + 1 } else { 0 };
    }
    disk.abort(waiting[1], &mut bench);
    disk.abort(waiting[6], &mut bench);
    let mut aborted = Vec::new();
    while aborted.len() < 2 {
        bench.turn();
        aborted.extend(disk.completed());
    }
    let mut ids: Vec<u64> = aborted.iter().map(|outcome| outcome.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [waiting[1], waiting[6]]);
    assert!(aborted.iter().all(|outcome| outcome.status == Status::Aborted));
    assert_eq!(block_on(pool.stats()).expect("it is open").waiting_requests, WRITES - 2);
    disk.abort_all(&mut bench);
    let rest = disk.drain(&mut bench);
    assert!(rest.len() == 6 && rest.iter().all(|outcome| outcome.status == Status::Aborted));
    disk.close(&mut bench);
}

#[test]
fn requests_are_aborted_at_once_while_the_base_does_not_answer() {
    use aryk_bdev_delay::Kind;
    const LONG_US: u64 = 2_000_000;
    let stack = Stack::new(512).slow_base(BASE).pool().with_volume();
    let disk = stack.the_pool().find("v").expect("it was made").disk.expect("it has a disk");
    stack.write(&disk, 0, &[1; 65536]);
    let set_latency = |us| {
        for kind in [Kind::AvgRead, Kind::P99Read, Kind::AvgWrite, Kind::P99Write] {
            aryk_bdev_delay::set_latency(stack.registry(), "base", kind, us).expect("it is there");
        }
    };
    set_latency(LONG_US);
    let ended = stack.on_owner(&disk, async |channel| {
        let write = channel.write(Lba(0), Blocks(8), Buffer::from_slice(&[2; 4096]));
        // Its block is locked until the rest of it was read.
        let part = channel.write(Lba(17), Blocks(1), Buffer::from_slice(&[3; 512]));
        let read = channel.read(Lba(64), Blocks(8), Buffer::new(4096, 4096));
        let (mut write, mut part, mut read) = (pin!(write), pin!(part), pin!(read));
        let is_pending = poll_fn(|cx| {
            let all = [
                write.as_mut().poll(cx).is_pending(),
                part.as_mut().poll(cx).is_pending(),
                read.as_mut().poll(cx).is_pending(),
            ];
            Poll::Ready(all == [true; 3])
        });
        assert!(is_pending.await);
        // What was never written needs no base: when it was read, the pool has all requests before it.
        let zeroes = channel.read(Lba(4096), Blocks(8), Buffer::new(4096, 4096)).await;
        assert!(zeroes.is_ok_and(|zeroes| zeroes.bytes().iter().all(|byte| *byte == 0)));
        channel.abort_all();
        [write.await.map(drop), part.await.map(drop), read.await.map(drop)]
    });
    // Had they waited for the base, they would have succeeded.
    assert_eq!(ended, [Err(Status::Aborted); 3]);
    set_latency(0);
    // What comes later replaces what they may still do.
    stack.write(&disk, 0, &[4; 16384]);
    assert_eq!(stack.read(&disk, 0, 16384), [4; 16384]);
    assert_eq!(stack.read(&disk, 32768, 4096), [1; 4096]);
}

#[test]
fn a_copy_of_the_base_of_an_open_pool_is_left_alone() {
    let dir = TempDir::new().expect("there is a directory for temporary files");
    let [base, twin] = ["base", "twin"].map(|name| dir.path().join(name));
    std::fs::File::create(&base).and_then(|file| file.set_len(BASE)).expect("it can be created");
    let stack = Stack::new(512);
    stack.file("base", &base, None);
    let stack = stack.pool();
    close(&stack, &stack.the_pool());
    std::fs::copy(&base, &twin).expect("it can be copied");
    let before = std::fs::read(&twin).expect("it can be read");
    assert_eq!(open(&stack).name(), "p");
    stack.file("twin", &twin, None);
    let found = block_on(stack.pools.examine(&stack.env, "twin", Settings::default(), |_| Vec::new()));
    let (first, second) = ("base".to_owned(), "twin".to_owned());
    assert_eq!(found.map(drop), Err(Error::Twin { pool: "p".to_owned(), first, second }));
    assert!(std::fs::read(&twin).expect("it can be read") == before, "nothing was written");
}

#[test]
fn a_volume_gets_another_parent_and_keeps_what_it_has_for_itself() {
    let stack = stack().malloc("image", 512, VOLUME.0);
    let pool = stack.the_pool();
    let snapshot = |id, name: &str| {
        let wanted = vec![(id, name.to_owned(), Uuid::new_v4())];
        block_on(pool.snapshot(wanted)).expect("it can be taken").remove(0)
    };
    let volume = pool.find("v").expect("it was made");
    let disk = volume.disk.clone().expect("it has a disk");
    stack.write(&disk, 0, &[1; 4096]);
    let before = snapshot(volume.id, "before");
    stack.write(&disk, 8192, &[2; 4096]);
    stack.command(&disk, Op::WriteZeroes, 16384, 4096);
    let other = stack.volume("other", Origin::Empty);
    stack.write(other.disk.as_ref().unwrap(), 0, &[3; 32768]);
    let parent = snapshot(other.id, "parent");
    stack.write(&stack.env.registry().find("image").unwrap(), 0, &[4; 32768]);

    // The same, whatever the volume was based on before.
    for (origin, byte) in [
        (Origin::Snapshot(parent.id), 3),
        (Origin::Disk("image".to_owned()), 4),
        (Origin::Snapshot(parent.id), 3),
    ] {
        block_on(pool.set_parent(volume.id, origin)).expect("it can be set");
        let mut expected = vec![byte; 32768];
        expected[8192..12288].fill(2);
        expected[16384..20480].fill(0);
        assert_eq!(stack.read(&disk, 0, 32768), expected);
        let members: Vec<_> = pool.members().iter().map(|member| member.name().to_owned()).collect();
        assert_eq!(members, ["v", "before", "other", "parent"]);
    }
    assert_eq!(pool.parent(&pool.find("v").unwrap()), Parent::Snapshot("parent".to_owned()));
    assert_eq!(stack.read(before.disk.as_ref().unwrap(), 0, 12288)[..4096], [1; 4096]);
    // A volume that is in use, and a parent that does not fit.
    let writer = stack.env.registry().open(disk.name(), Access::Shared, "a VM", |_| ()).unwrap();
    assert!(block_on(pool.set_parent(volume.id, Origin::Snapshot(before.id))).is_err());
    drop(writer);
    let large = NewVolume { bytes: Bytes(2 * VOLUME.0), ..stack.new_volume("large", Origin::Empty) };
    let large = block_on(pool.create_volume(large)).expect("it can be made");
    let large = snapshot(large.id, "large-snapshot");
    assert!(block_on(pool.set_parent(volume.id, Origin::Snapshot(large.id))).is_err());
    assert_eq!(pool.members().len(), 6);
    assert_eq!(stack.read(&disk, 8192, 4096), [2; 4096]);
}
