//! A disk that stays when one of its bases is removed: no request fails, and none reads old data.

mod device;

use aryk_bdev::{Access, AsyncChannel, Blocks, Env, Event, Identity, Lba, Op, OpSet, Registry, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on, contents};
use aryk_bdev_error::{Fault, Injection};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Options, Reactors};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};

const BLOCKS: u64 = 64;

/// `mirror` on `a` and `b`, each a disk of the error module on a disk in memory.
fn env() -> Env {
    let env = Env::default();
    for (store, leg) in [("a0", "a"), ("b0", "b")] {
        let malloc = aryk_bdev_malloc::Config {
            identity: Identity::named(store),
            block_size: 512,
            physical_block_size: 512,
            blocks: Blocks(BLOCKS),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, malloc).expect("a disk of ours");
        let error = aryk_bdev_error::Config { identity: Identity::named(leg), base: store.to_owned() };
        aryk_bdev_error::create(&env, error).expect("a disk of ours");
    }
    device::create(&env, "mirror", &["a", "b"]);
    env
}

fn names(registry: &Registry) -> Vec<String> {
    registry.list().iter().map(|bdev| bdev.name().to_owned()).collect()
}

fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

fn all_done(disk: &mut Opener, bench: &mut Bench) {
    let outcomes = disk.drain(bench);
    assert!(outcomes.iter().all(|outcome| outcome.status == Status::Ok), "{outcomes:?}");
}

/// Each opener reads all blocks several times, from each remaining disk.
fn holds(disks: &mut [&mut Opener], seed: u64, bench: &mut Bench) {
    for disk in disks {
        for _ in 0..4 {
            disk.read(0, BLOCKS, Shape::Single, bench);
            let outcome = disk.finish(bench);
            assert_eq!(outcome.status, Status::Ok);
            assert!(outcome.data == contents(seed, 0, BLOCKS, 512), "seed {seed}");
        }
    }
}

#[test]
fn a_mirror_stays_without_one_of_its_disks() {
    let (env, mut bench) = (env(), Bench::new());
    let open =
        |bench: &mut Bench| bench.open(env.registry(), "mirror", Access::Shared, 8, 512 * BLOCKS as u32);
    let (mut first, mut second) = (open(&mut bench), open(&mut bench));
    first.write(0, &contents(1, 0, BLOCKS, 512), Shape::Single, &mut bench);
    all_done(&mut first, &mut bench);
    holds(&mut [&mut first, &mut second], 1, &mut bench);

    // Writes that `a` holds when it is removed.
    let injection =
        Injection { fault: Fault::Pending, ops: OpSet::of(&[Op::Write]), count: 4, queue_depth: 0 };
    aryk_bdev_error::inject(env.registry(), "a", injection).unwrap();
    for lba in 0..4 {
        first.write(lba, &contents(2, lba, 1, 512), Shape::Single, &mut bench);
    }
    bench.turn();
    {
        let mut removal = pin!(env.registry().remove("a"));
        assert!(is_pending(removal.as_mut()));
        for _ in 0..50 {
            bench.turn();
            assert!(is_pending(removal.as_mut()), "it has writes in flight");
        }
        assert_eq!(first.completed(), []);
        // At the same time the mirror serves requests with the other disk.
        second.write(4, &contents(2, 4, BLOCKS - 4, 512), Shape::Single, &mut bench);
        all_done(&mut second, &mut bench);
        let late = open(&mut bench);
        bench.wait("to go on", aryk_bdev_error::resume(env.registry(), "a")).unwrap();
        all_done(&mut first, &mut bench);
        assert_eq!(bench.wait("the removal", removal), Ok(()));
        late.close(&mut bench);
    }
    assert_eq!(names(env.registry()), ["a0", "b0", "b", "mirror"]);
    assert_eq!(env.registry().find("a0").unwrap().claimed_by(), None);
    let mut third = open(&mut bench);
    holds(&mut [&mut first, &mut second, &mut third], 2, &mut bench);
    first.write(0, &contents(3, 0, BLOCKS, 512), Shape::Single, &mut bench);
    all_done(&mut first, &mut bench);
    holds(&mut [&mut first, &mut second, &mut third], 3, &mut bench);
    assert_eq!(first.events(), []);

    // The last disk is removed, and the mirror before it.
    let mut removal = pin!(env.registry().remove("b0"));
    assert!(is_pending(removal.as_mut()));
    assert_eq!(first.events(), [Event::Removed]);
    for disk in [first, second, third] {
        disk.close(&mut bench);
    }
    assert_eq!(bench.wait("the removal", removal), Ok(()));
    assert_eq!(names(env.registry()), ["a0"]);
}

#[test]
fn a_removal_that_is_abandoned_is_taken_up_again() {
    let (env, mut bench) = (env(), Bench::new());
    let mut disk = bench.open(env.registry(), "mirror", Access::Shared, 8, 512 * BLOCKS as u32);
    // The removal is dropped once after each of its steps, and the next removal runs all of them.
    for turns in 0..20 {
        let mut removal = pin!(env.registry().remove("a0"));
        let mut ended = !is_pending(removal.as_mut());
        for _ in 0..turns {
            bench.turn();
            ended |= !ended && !is_pending(removal.as_mut());
        }
        disk.write(0, &contents(turns + 1, 0, BLOCKS, 512), Shape::Single, &mut bench);
        all_done(&mut disk, &mut bench);
        holds(&mut [&mut disk], turns + 1, &mut bench);
        if ended {
            break;
        }
    }
    assert_eq!(names(env.registry()), ["b0", "b", "mirror"]);
    disk.close(&mut bench);
}

/// The completed writes, by block.
#[derive(Default)]
struct Board {
    written: [AtomicU64; 8],
    rounds: AtomicU64,
    stop: AtomicBool,
}

/// Writes ascending numbers to one block, and reads the other writers' blocks.
async fn work(channel: &AsyncChannel, board: &Board, own: usize) -> Result<(), String> {
    let mut number = 0_u64;
    while !board.stop.load(Ordering::Acquire) {
        number += 1;
        let mut block = [0; 512];
        block[..8].copy_from_slice(&number.to_le_bytes());
        let written = channel.write(Lba(own as u64), Blocks(1), Buffer::from_slice(&block)).await;
        written.map_err(|status| format!("a write fails: {status:?}"))?;
        board.written[own].store(number, Ordering::Release);
        for (lba, written) in (0..).zip(&board.written) {
            let at_least = written.load(Ordering::Acquire);
            let read = channel.read(Lba(lba), Blocks(1), Buffer::new(512, 512)).await;
            let block = read.map_err(|status| format!("a read fails: {status:?}"))?;
            let found = u64::from_le_bytes(block.bytes()[..8].try_into().expect("8 bytes"));
            if found < at_least {
                return Err(format!("block {lba} is {found}, though {at_least} had been written"));
            }
        }
        board.rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

#[test]
fn no_reactor_reads_old_data_while_a_disk_leaves() {
    let options = Options { cores: CoreSet::allowed(), ..Options::default() };
    let reactors = Reactors::start(&options).unwrap();
    for round in 0..8 {
        let (env, board) = (env(), Arc::<Board>::default());
        let mirror = env.registry().open("mirror", Access::Shared, "tasks", |_| ()).unwrap();
        let ended = Arc::new(std::sync::Mutex::new(Vec::new()));
        let tasks = board.written.len();
        for (handle, own) in reactors.handles().iter().cycle().zip(0..tasks) {
            block_on(mirror.prepare(handle)).unwrap();
            let (mirror, board, ended) = (mirror.clone(), Arc::clone(&board), Arc::clone(&ended));
            let start = move |cx: &mut aryk_reactor::Cx| {
                let thread = cx.add_thread("task", CoreSet::allowed());
                let channel = AsyncChannel::open(&mirror, thread, cx).unwrap();
                let task = async move {
                    let end = work(&channel, &board, own).await;
                    drop((channel, mirror));
                    ended.lock().unwrap().push(end);
                };
                cx.local().spawn(task).detach();
            };
            block_on(handle.call(start)).unwrap();
        }
        let go_on = |rounds: u64| {
            let until = board.rounds.load(Ordering::Relaxed) + rounds;
            while board.rounds.load(Ordering::Relaxed) < until && ended.lock().unwrap().is_empty() {
                std::thread::yield_now();
            }
        };
        go_on(64);
        assert_eq!(block_on(env.registry().remove(["a", "b"][round % 2])), Ok(()));
        go_on(64);
        board.stop.store(true, Ordering::Release);
        while ended.lock().unwrap().len() < tasks {
            std::thread::yield_now();
        }
        assert_eq!(*ended.lock().unwrap(), vec![Ok(()); tasks]);
        assert!(env.registry().find("mirror").is_ok());
    }
}
