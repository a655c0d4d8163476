//! Requests that a device holds: how they end, and when their memory is free.

use aryk_bdev::{Access, AsyncChannel, Blocks, Env, Identity, Lba, Op, OpSet, Registry, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on, contents};
use aryk_bdev_error::{Fault, Injection};
use aryk_dma::Buffer;
use aryk_reactor::{Clock, CoreSet, Options, Reactors};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

const BLOCKS: u64 = 1024;

/// `disk` on `base`, in memory.
fn env() -> Env {
    let env = Env::default();
    let malloc = aryk_bdev_malloc::Config {
        identity: Identity::named("base"),
        block_size: 512,
        physical_block_size: 512,
        blocks: Blocks(BLOCKS),
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(&env, malloc).expect("it can be made");
    let error = aryk_bdev_error::Config { identity: Identity::named("disk"), base: "base".to_owned() };
    aryk_bdev_error::create(&env, error).expect("it can be made");
    env
}

fn inject(registry: &Registry, fault: Fault, ops: &[Op], count: u32) {
    let injection = Injection { fault, ops: OpSet::of(ops), count, queue_depth: 0 };
    aryk_bdev_error::inject(registry, "disk", injection).expect("the disk is there");
}

fn turn(bench: &mut Bench, times: u32) {
    for _ in 0..times {
        bench.turn();
    }
}

fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn a_reset_ends_what_is_held_and_keeps_what_waits() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 300, 512);
    inject(env.registry(), Fault::Pending, &[Op::Write], 256);
    // As many requests as the depth, all held, and one after them.
    for lba in 0..256 {
        disk.write(lba, &contents(1, lba, 1, 512), Shape::Single, &mut bench);
    }
    let behind = disk.write(7, &contents(2, 7, 1, 512), Shape::Single, &mut bench);
    turn(&mut bench, 50);
    assert_eq!(disk.completed(), []);
    let stats = bench.wait("statistics", bdev.stats());
    assert_eq!((stats.in_flight, stats.waiting), (257, 1));
    assert!(bench.wait("a reset", bdev.reset()));
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len(), 257);
    for outcome in outcomes {
        assert_eq!(outcome.status, if outcome.id == behind { Status::Ok } else { Status::Aborted });
    }
    disk.read(7, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, contents(2, 7, 1, 512));
    disk.close(&mut bench);
}

#[test]
fn queues_do_not_grow_with_aborted_requests() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 300, 512);
    inject(env.registry(), Fault::Pending, &[Op::Read], 256);
    for lba in 0..256 {
        disk.read(lba, 1, Shape::Single, &mut bench);
    }
    turn(&mut bench, 50);
    // One request that waits for a credit, is aborted and submitted again; and one that waits for compares to end.
    for op in [Op::Flush, Op::Compare] {
        for _ in 0..5000 {
            let id = match op {
                Op::Compare => disk.with_data(op, 0, 1, Shape::Single, &[0; 512], &mut bench),
                _ => disk.command(op, 0, 0, &mut bench),
            };
            disk.abort(id, &mut bench);
            bench.turn();
            assert_eq!(disk.completed().len(), 1);
        }
        let stats = bench.wait("statistics", bdev.stats());
        assert!(stats.in_flight == 256 && stats.waiting < 1000, "{op:?}: {} wait", stats.waiting);
    }
    disk.abort_all(&mut bench);
    assert_eq!(disk.drain(&mut bench).len(), 256);
    disk.close(&mut bench);
}

#[test]
fn an_abort_ends_one_that_is_held_and_one_that_waits() {
    let env = env();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 300, 512);
    inject(env.registry(), Fault::Pending, &[Op::Read], 256);
    let held: Vec<_> = (0..256).map(|lba| disk.read(lba, 1, Shape::Single, &mut bench)).collect();
    let waiting = [300, 301].map(|lba| disk.read(lba, 1, Shape::Single, &mut bench));
    disk.abort(waiting[0], &mut bench);
    bench.turn();
    let ended = |outcomes: Vec<aryk_bdev_conformance::Outcome>| -> Vec<_> {
        outcomes.into_iter().map(|o| (o.id, o.status)).collect()
    };
    assert_eq!(ended(disk.completed()), [(waiting[0], Status::Aborted)]);
    disk.abort(held[9], &mut bench);
    turn(&mut bench, 3);
    assert_eq!(ended(disk.completed()), [(held[9], Status::Aborted), (waiting[1], Status::Ok)]);
    disk.abort_all(&mut bench);
    assert_eq!(disk.drain(&mut bench).len(), 255);
    disk.close(&mut bench);
}

#[test]
fn held_requests_continue_on_demand() {
    let env = env();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 8, 512);
    inject(env.registry(), Fault::Pending, &[Op::Write], 256);
    for lba in 0..4 {
        disk.write(lba, &contents(1, lba, 1, 512), Shape::Single, &mut bench);
    }
    turn(&mut bench, 20);
    assert_eq!(disk.completed(), []);
    bench.wait("to go on", aryk_bdev_error::resume(env.registry(), "disk")).unwrap();
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.iter().map(|o| o.status).collect::<Vec<_>>(), [Status::Ok; 4]);
    // No request is held any more, and nothing was lost.
    disk.write(4, &contents(1, 4, 1, 512), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.read(0, 5, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, contents(1, 0, 5, 512));
    disk.close(&mut bench);
}

#[test]
fn a_disk_is_settled_when_what_changes_those_blocks_has_completed() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 8, 512);
    inject(env.registry(), Fault::Pending, &[Op::Write], 256);
    disk.write(500, &contents(1, 500, 1, 512), Shape::Single, &mut bench);
    turn(&mut bench, 20);
    let mut settled = pin!(bdev.settle(Lba(500)..Lba(BLOCKS)));
    for _ in 0..20 {
        assert!(is_pending(settled.as_mut()));
        bench.turn();
    }
    // Other blocks do not concern it.
    bench.wait("other blocks", bdev.settle(Lba(0)..Lba(500)));
    assert!(is_pending(settled.as_mut()));
    bench.wait("to go on", aryk_bdev_error::resume(env.registry(), "disk")).unwrap();
    bench.wait("the blocks", settled);
    assert_eq!(disk.drain(&mut bench).len(), 1);
    // No request is held off any more.
    disk.write(500, &contents(2, 500, 1, 512), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
    assert!(!is_pending(pin!(bdev.settle(Lba(0)..Lba(BLOCKS)))), "the disk has no opener");
}

#[test]
fn removal_aborts_what_is_held_after_a_while() {
    let env = env();
    let nanos = Arc::new(AtomicU64::new(1));
    let mut bench = Bench::at(Clock::Virtual(Arc::clone(&nanos)));
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 4, 512);
    inject(env.registry(), Fault::Pending, &[Op::Write], 1);
    disk.write(0, &contents(1, 0, 1, 512), Shape::Single, &mut bench);
    let mut removal = pin!(env.registry().remove("base"));
    let pass = |bench: &mut Bench, time: Duration| {
        nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        turn(bench, 20);
    };
    assert!(is_pending(removal.as_mut()));
    pass(&mut bench, Duration::ZERO);
    assert!(is_pending(removal.as_mut()));
    pass(&mut bench, Duration::from_secs(9));
    assert_eq!(disk.completed(), []);
    pass(&mut bench, Duration::from_secs(2));
    assert_eq!(disk.finish(&mut bench).status, Status::Aborted);
    disk.close(&mut bench);
    assert_eq!(bench.wait("the removal", removal), Ok(()));
    assert!(env.registry().list().is_empty());
}

#[test]
fn removal_during_a_reset_ends_both() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 300, 512);
    inject(env.registry(), Fault::Pending, &[Op::Write], 256);
    for lba in 0..260 {
        disk.write(lba, &contents(1, lba, 1, 512), Shape::Single, &mut bench);
    }
    let mut reset = pin!(bdev.reset());
    assert!(is_pending(reset.as_mut()));
    bench.turn();
    let mut removal = pin!(env.registry().remove("disk"));
    assert!(is_pending(removal.as_mut()));
    let late = disk.read(0, 1, Shape::Single, &mut bench);
    assert!(bench.wait("the reset", reset));
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len(), 261);
    for outcome in outcomes {
        let expected = match outcome.id {
            0..256 => Status::Aborted,
            id if id == late => Status::Removed,
            _ => Status::Ok,
        };
        assert_eq!(outcome.status, expected, "{}", outcome.id);
    }
    disk.close(&mut bench);
    assert_eq!(bench.wait("the removal", removal), Ok(()));
}

#[test]
fn the_buffer_of_a_task_that_gave_up_is_kept_until_its_request_ends() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let mut bench = Bench::new();
    let descriptor = env.registry().open("disk", Access::Exclusive, "tasks", |_| ()).unwrap();
    let (thread, reactor) = (bench.thread(), bench.cx().handle().clone());
    bench.wait("the reactor to be prepared", descriptor.prepare(&reactor)).unwrap();
    let channel = AsyncChannel::open(&descriptor, thread, bench.cx()).unwrap();
    let data = contents(3, 0, 8, 512);
    bench.wait("a write", channel.write(Lba::ZERO, Blocks(8), Buffer::from_slice(&data))).unwrap();
    inject(env.registry(), Fault::Pending, &[Op::Read], 1);
    {
        let mut given_up = pin!(channel.read(Lba::ZERO, Blocks(8), Buffer::new(4096, 4096)));
        assert!(is_pending(given_up.as_mut()));
        turn(&mut bench, 5);
        assert!(is_pending(given_up.as_mut()));
    }
    // The channel continues to work, stays open while the request is held, though the task's handle of it is dropped, and
    // closes then.
    let read = bench.wait("a read", channel.read(Lba::ZERO, Blocks(8), Buffer::new(4096, 4096))).unwrap();
    assert_eq!(read.bytes(), data);
    let failed = bench.wait("a read", channel.read(Lba(BLOCKS), Blocks(8), Buffer::new(4096, 4096)));
    assert_eq!(failed.unwrap_err(), Status::OutOfRange);
    bench.wait("a flush", channel.command(Op::Flush, Lba::ZERO, Blocks::ZERO)).unwrap();
    drop((channel, descriptor));
    let mut removal = pin!(env.registry().remove("disk"));
    for _ in 0..20 {
        assert!(is_pending(removal.as_mut()), "a request is held");
        bench.turn();
    }
    assert!(bench.wait("a reset", bdev.reset()));
    assert_eq!(bench.wait("the removal", removal), Ok(()));
}

#[test]
fn a_reset_waits_for_all_reactors() {
    let env = env();
    let bdev = env.registry().find("disk").unwrap();
    let options = Options { cores: CoreSet::allowed(), ..Options::default() };
    let reactors = Reactors::start(&options).unwrap();
    inject(env.registry(), Fault::Pending, &[Op::Write], u32::MAX);
    let descriptor = env.registry().open("disk", Access::Exclusive, "tasks", |_| ()).unwrap();
    let ended = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks = 2 * reactors.handles().len();
    for (handle, i) in reactors.handles().iter().cycle().zip(0..tasks as u64) {
        block_on(descriptor.prepare(handle)).unwrap();
        let (descriptor, ended) = (descriptor.clone(), Arc::clone(&ended));
        block_on(handle.call(move |cx| {
            let thread = cx.add_thread("task", CoreSet::allowed());
            let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
            let task = async move {
                let status = channel.write(Lba(i), Blocks(1), Buffer::new(512, 512)).await.map(drop);
                ended.lock().unwrap().push(status);
            };
            cx.local().spawn(task).detach();
        }))
        .unwrap();
    }
    // Each task has submitted its request when the statistics count it as in flight.
    while block_on(bdev.stats()).in_flight < tasks as u64 {
        std::thread::yield_now();
    }
    assert!(block_on(bdev.reset()));
    drop(descriptor);
    assert_eq!(block_on(env.registry().remove("disk")), Ok(()));
    assert_eq!(*ended.lock().unwrap(), vec![Err(Status::Aborted); tasks]);
}

/// A channel requests the blocks of eight compound requests at one time, even if those requests are aborted and others
/// come.
#[test]
fn an_abort_gives_no_other_a_place_while_blocks_are_asked_for() {
    let env = env();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 64, 2 * 512);
    let data = [vec![0; 512], contents(1, 0, 1, 512)].concat();
    inject(env.registry(), Fault::Pending, &[Op::Read], 1);
    let swap = |disk: &mut Opener, lba, bench: &mut Bench| {
        let id = disk.with_data(Op::CompareAndWrite, lba, 1, Shape::Single, &data, bench);
        turn(bench, 50);
        id
    };
    // It has its block, and does not continue.
    let holder = swap(&mut disk, 5, &mut bench);
    for _ in 0..3 {
        let ids: Vec<_> = (0..7).map(|_| swap(&mut disk, 5, &mut bench)).collect();
        ids.iter().for_each(|id| disk.abort(*id, &mut bench));
        turn(&mut bench, 50);
        let ended = disk.completed();
        assert_eq!(ended.iter().map(|o| o.status).collect::<Vec<_>>(), [Status::Aborted; 7], "at once");
    }
    // No other request needs its block, but all places are taken.
    let other = swap(&mut disk, 100, &mut bench);
    assert_eq!(disk.completed().len(), 0);
    disk.abort(holder, &mut bench);
    let mut ended: Vec<_> = disk.drain(&mut bench).into_iter().map(|o| (o.id, o.status)).collect();
    ended.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(ended, [(holder, Status::Aborted), (other, Status::Ok)]);
    // Then all places are free again.
    let ids: Vec<_> = (0..8).map(|lba| swap(&mut disk, 200 + lba, &mut bench)).collect();
    assert_eq!(disk.drain(&mut bench).iter().filter(|o| o.status == Status::Ok).count(), ids.len());
    disk.close(&mut bench);
}
