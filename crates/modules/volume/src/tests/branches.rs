//! Pools whose volumes are used on other reactors than their own.

use super::*;
use aryk_bdev_conformance::{Opener, Outcome};

/// A pool over a disk whose latency can be set, with a volume.
fn slow_stack() -> Stack {
    Stack::new(512).slow_base(BASE).pool().with_volume()
}

fn set_latency(stack: &Stack, us: u64) {
    use aryk_bdev_delay::Kind;
    for kind in [Kind::AvgRead, Kind::P99Read, Kind::AvgWrite, Kind::P99Write] {
        aryk_bdev_delay::set_latency(stack.registry(), "base", kind, us).expect("it is there");
    }
}

/// Waits until all requests of `ids` have ended, and returns how.
fn ends(disk: &mut Opener, ids: &[u64], bench: &mut Bench) -> Vec<Outcome> {
    let mut all: Vec<Outcome> = Vec::new();
    while all.len() < ids.len() {
        bench.turn();
        all.extend(disk.completed());
    }
    all.sort_unstable_by_key(|outcome| outcome.id);
    assert!(all.iter().map(|outcome| outcome.id).eq(ids.iter().copied()));
    all
}

#[test]
fn another_reactor_reads_what_was_written_before() {
    let stack = Stack::new(512).malloc("base", 512, BASE).pool().with_volume();
    let volume = stack.the_pool().find("v").expect("it was made").disk.expect("it has a disk");
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    for round in 1..50_u8 {
        stack.write(&volume, 4096, &[round; 8192]);
        let read = disk.read(4, 24, Shape::Single, &mut bench);
        let data = ends(&mut disk, &[read], &mut bench).remove(0).data;
        let expected = [vec![0; 2048], vec![round; 8192], vec![0; 2048]].concat();
        assert!(data == expected, "round {round}");
        let write = disk.write(8, &[!round; 512], Shape::Single, &mut bench);
        assert_eq!(ends(&mut disk, &[write], &mut bench)[0].status, Status::Ok);
        let expected = [[!round; 512], [round; 512]].concat();
        assert_eq!(stack.read(&volume, 4096, 1024), expected);
    }
    disk.close(&mut bench);
}

#[test]
fn a_branch_ends_with_the_last_channel_and_leaves_nothing() {
    let stack = Stack::new(512).malloc("base", 512, BASE).pool().with_volume();
    let mut bench = Bench::new();
    let handle = bench.cx().handle().clone();
    let before = handle.members();
    let owner = stack.env.reactors().handles().remove(0);
    let owners = owner.members();
    for _ in 0..3 {
        let mut first = bench.open(stack.registry(), &stack.name, Access::Shared, 1, 4096);
        let second = bench.open(stack.registry(), &stack.name, Access::Shared, 1, 4096);
        second.close(&mut bench);
        let read = first.read(0, 8, Shape::Single, &mut bench);
        assert_eq!(ends(&mut first, &[read], &mut bench)[0].status, Status::Ok);
        assert!(handle.members() > before);
        first.close(&mut bench);
        bench.until("the branch to end", || handle.members() == before);
        assert_eq!(owner.members(), owners);
    }
    // Nothing that the pool has lent is missing: its space can be freed.
    let volume = stack.the_pool().find("v").expect("it was made");
    block_on(stack.env.registry().remove(&stack.name)).expect("it can be removed");
    block_on(stack.the_pool().delete(volume.id)).expect("it can be deleted");
}

#[test]
fn requests_are_aborted_at_once_while_the_base_does_not_answer() {
    let stack = slow_stack();
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    let write = disk.write(0, &[1; 65536], Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[write], &mut bench)[0].status, Status::Ok);
    set_latency(&stack, 2_000_000);
    // A part of a block is locked until the rest of it was read. The branch reads the others from the base.
    let ids = [
        disk.write(0, &[2; 4096], Shape::Single, &mut bench),
        disk.write(17, &[3; 512], Shape::Single, &mut bench),
        disk.read(64, 8, Shape::Single, &mut bench),
        disk.read(66, 2, Shape::Single, &mut bench),
    ];
    // What was never written needs no base: when it was read, the pool has all requests before it.
    let zeroes = disk.read(4096, 8, Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[zeroes], &mut bench)[0].status, Status::Ok);
    disk.abort_all(&mut bench);
    // Had they waited for the base, they would have succeeded.
    assert!(ends(&mut disk, &ids, &mut bench).iter().all(|outcome| outcome.status == Status::Aborted));
    set_latency(&stack, 0);
    let write = disk.write(0, &[4; 16384], Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[write], &mut bench)[0].status, Status::Ok);
    let read = disk.read(0, 72, Shape::Single, &mut bench);
    let data = ends(&mut disk, &[read], &mut bench).remove(0).data;
    assert!(data[..16384].iter().all(|byte| *byte == 4) && data[16384..].iter().all(|byte| *byte == 1));
    disk.close(&mut bench);
}

#[test]
fn a_base_is_removed_while_another_reactor_reads_from_it() {
    let stack = slow_stack();
    let pool = stack.the_pool();
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    let write = disk.write(0, &[1; 65536], Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[write], &mut bench)[0].status, Status::Ok);
    set_latency(&stack, 100_000);
    let ids = [0, 16, 64].map(|lba| disk.read(lba, 8, Shape::Single, &mut bench));
    let zeroes = disk.read(4096, 8, Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[zeroes], &mut bench)[0].status, Status::Ok);
    let removed = std::thread::scope(|scope| {
        let removing = scope.spawn(|| block_on(stack.env.registry().remove("base")));
        let ended = ends(&mut disk, &ids, &mut bench);
        assert!(
            ended
                .iter()
                .all(|outcome| matches!(outcome.status, Status::Ok | Status::Removed | Status::Aborted)),
            "{ended:?}"
        );
        disk.close(&mut bench);
        while !removing.is_finished() {
            bench.turn();
            std::thread::yield_now();
        }
        removing.join().expect("it does not panic")
    });
    removed.expect("it can be removed");
    assert!(pool.has_ended());
    assert!(stack.pools.find("p").is_err());
    assert!(stack.env.registry().find("base").is_err());
}

#[test]
fn damaged_data_is_not_returned_on_another_reactor() {
    let stack = in_file(512);
    let path = stack._dir.as_ref().expect("the base is in it").path().join("base");
    let pool = stack.the_pool();
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    let data: Vec<u8> = (0..8192_u32).map(|at| (at % 251) as u8 ^ 0x5a).collect();
    let write = disk.write(0, &data, Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, &[write], &mut bench)[0].status, Status::Ok);
    let bytes = std::fs::read(&path).expect("it can be read");
    let place = bytes.chunks(512).position(|sector| *sector == data[..512]).expect("the data is there");
    let file = std::fs::File::options().write(true).open(&path).expect("it can be opened");
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 512], place as u64 * 512 + 4096).expect("written");
    let reads = [disk.read(0, 8, Shape::Single, &mut bench), disk.read(8, 8, Shape::Single, &mut bench)];
    let ended = ends(&mut disk, &reads, &mut bench);
    assert_eq!([ended[0].status, ended[1].status], [Status::Ok, Status::Medium]);
    assert!(ended[0].data == data[..4096] && ended[1].data.iter().all(|byte| *byte == 0xdd));
    disk.close(&mut bench);
    bench.until("the damage to be counted", || {
        block_on(pool.stats()).is_ok_and(|stats| stats.damaged_blocks == 1)
    });
}
