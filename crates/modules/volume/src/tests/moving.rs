//! Moves of the shards of pools between reactors while their volumes are used.

use super::*;
use aryk_bdev_delay::Kind;
use aryk_reactor::{Cx, Handle, MOVE_PATIENCE, MoveError};
use futures_channel::oneshot;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a stripe.
const STRIPE: u64 = 16 * MIB;
/// Bytes of the volumes.
const SIZE: u64 = 5 * STRIPE + 4 * MIB;
/// Bytes of the part of a volume that a task writes to. It begins half of that before the middle, or the end, of a stripe.
const REGION: u64 = MIB;
/// The patience of moves that must succeed.
const LONG: Duration = Duration::from_secs(60);

/// A pool of so many shards on two reactors, over a disk whose latency can be set, with a volume.
fn stack(shards: u32) -> Stack {
    let stack = Stack::on(512, 2).slow_base(1024 * MIB);
    let stack = Stack { shards, volume: Bytes(SIZE), ..stack };
    stack.pool().with_volume()
}

fn set_latency(stack: &Stack, us: u64) {
    for kind in [Kind::AvgRead, Kind::P99Read, Kind::AvgWrite, Kind::P99Write] {
        aryk_bdev_delay::set_latency(stack.registry(), "base", kind, us).expect("it is there");
    }
}

/// Moves a shard to a reactor.
fn move_to(pool: &Pool, stack: &Stack, shard: usize, core: u16, patience: Duration) -> Result<(), MoveError> {
    let to = stack.env.reactors().hold_for_arrival(core).expect("the reactor stays");
    block_on(pool.prepare_move(shard, &to))?;
    block_on(pool.move_shard(shard, to, patience))
}

/// Moves a shard to the other reactor.
fn move_on(pool: &Pool, stack: &Stack, shard: usize) -> Result<(), MoveError> {
    let here = pool.cores()[shard];
    let mut others = stack.env.reactors().handles().into_iter().map(|reactor| reactor.core());
    let there = others.find(|core| *core != here).expect("there are two reactors");
    let moved = move_to(pool, stack, shard, there, LONG);
    assert!(moved.is_err() || pool.cores()[shard] == there);
    moved
}

fn check(pool: &Pool) {
    let report = block_on(pool.check(true, false)).expect("it can be checked");
    assert!(report.is_clean(), "{report:?}");
}

/// What the tasks of a test share.
#[derive(Default)]
struct Load {
    is_over: AtomicBool,
    requests: AtomicU64,
}

/// Ends the load, also where a test fails.
struct Over<'a>(&'a Load);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Writes to a part of a volume and reads from it until the load is over, with a few requests at the same time as others' tasks.
/// Returns the first request that has failed.
async fn write_and_verify(channel: AsyncChannel, number: u64, load: &Load) -> Result<(), Status> {
    let mut random = fastrand::Rng::with_seed(number);
    let first = number * (STRIPE / 2) + (STRIPE / 2) - REGION / 2;
    let at = |block: usize| Lba(first / 512 + block as u64);
    // The number that each block has.
    let mut model = vec![0_u64; (REGION / 512) as usize];
    let read = async |model: &[u64], block: usize, blocks: usize| {
        let buffer = Buffer::new(blocks * 512, 4096);
        let data = channel.read(at(block), Blocks(blocks as u64), buffer).await?;
        for (place, bytes) in data.bytes().chunks(512).enumerate() {
            let (is, should_be) = (&bytes[..8], model[block + place].to_le_bytes());
            assert!(bytes.chunks(8).all(|part| part == is), "block {} has parts of two", block + place);
            assert_eq!(*is, should_be, "task {number}, block {}", block + place);
        }
        Ok::<_, Status>(())
    };
    let mut round = 0;
    while !load.is_over.load(Ordering::Relaxed) {
        round += 1;
        let block = random.usize(..model.len());
        let blocks = random.usize(1..=128).min(model.len() - block);
        let (lba, count) = (at(block), Blocks(blocks as u64));
        match random.u32(..10) {
            0 => channel.command(Op::Flush, Lba::ZERO, Blocks::ZERO).await?,
            1 => {
                channel.command(Op::WriteZeroes, lba, count).await?;
                model[block..block + blocks].fill(0);
            }
            2..6 => read(&model[..], block, blocks).await?,
            _ => {
                let stamp: u64 = (number << 40) | round;
                channel
                    .write(lba, count, Buffer::from_slice(&stamp.to_le_bytes().repeat(64 * blocks)))
                    .await?;
                model[block..block + blocks].fill(stamp);
            }
        }
        load.requests.fetch_add(1, Ordering::Relaxed);
    }
    for block in (0..model.len()).step_by(64) {
        read(&model[..], block, 64).await?;
    }
    Ok(())
}

type Ending = oneshot::Receiver<Result<(), Status>>;

impl Stack {
    /// Starts a task on the calling reactor.
    fn load_here(descriptor: &aryk_bdev::Descriptor, number: u64, load: &Arc<Load>, cx: &mut Cx) -> Ending {
        let (sender, ended) = oneshot::channel();
        let thread = cx.add_thread("test", CoreSet::allowed());
        let channel = AsyncChannel::open(descriptor, thread, cx).expect("it can be opened");
        let (local, load) = (cx.local().clone(), Arc::clone(load));
        let task = async move {
            let result = write_and_verify(channel, number, &load).await;
            while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                local.sleep(Duration::from_micros(100)).await;
            }
            local.with(move |cx| cx.remove_thread(thread)).await;
            // The test may have failed.
            let _ = sender.send(result);
        };
        cx.local().spawn(task).detach();
        ended
    }

    fn open_suite_disk(&self) -> aryk_bdev::Descriptor {
        let opened = self.env.registry().open(&self.name, Access::Shared, "the test", |_| ());
        opened.expect("it can be opened")
    }

    /// Starts tasks on a reactor.
    fn load_on(&self, reactor: &Handle, numbers: std::ops::Range<u64>, load: &Arc<Load>) -> Vec<Ending> {
        let (descriptor, load) = (self.open_suite_disk(), Arc::clone(load));
        block_on(descriptor.prepare(reactor)).expect("it can be prepared");
        let start = move |cx: &mut Cx| -> Vec<Ending> {
            numbers.map(|number| Self::load_here(&descriptor, number, &load, cx)).collect()
        };
        block_on(reactor.call(start)).expect("the reactor runs")
    }

    /// Runs `f` while tasks on two reactors of the pool and on a third one use the volume. Returns how they have ended.
    fn under_load(&self, f: impl FnOnce(&Load)) -> Vec<Result<(), Status>> {
        let load = Arc::new(Load::default());
        let reactors = self.env.reactors().handles();
        let mut endings = self.load_on(&reactors[0], 0..3, &load);
        endings.extend(self.load_on(&reactors[1], 3..6, &load));
        std::thread::scope(|scope| {
            let third = scope.spawn(|| {
                let mut bench = Bench::new();
                let descriptor = self.open_suite_disk();
                let reactor = bench.cx().handle().clone();
                bench.wait("its preparation", descriptor.prepare(&reactor)).expect("it can be prepared");
                let mut endings: Vec<Ending> =
                    (6..9).map(|number| Self::load_here(&descriptor, number, &load, bench.cx())).collect();
                drop(descriptor);
                let mut results = Vec::new();
                while !endings.is_empty() {
                    if !bench.turn() {
                        std::thread::yield_now();
                    }
                    endings.retain_mut(|ending| match ending.try_recv().expect("a task has a result") {
                        Some(result) => {
                            results.push(result);
                            false
                        }
                        None => true,
                    });
                }
                results
            });
            let over = Over(&load);
            f(&load);
            drop(over);
            let mut results: Vec<_> =
                endings.into_iter().map(|ending| block_on(ending).expect("a task ends")).collect();
            results.extend(third.join().expect("it does not panic"));
            results
        })
    }
}

/// Waits until so many requests more have completed.
fn await_requests(load: &Load, more: u64) {
    let before = load.requests.load(Ordering::Relaxed);
    while load.requests.load(Ordering::Relaxed) < before + more {
        std::thread::yield_now();
    }
}

#[test]
fn a_shard_moves_and_its_volumes_are_used_on_all_reactors() {
    let stack = stack(1);
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made");
    let disk = volume.disk.clone().expect("it has a disk");
    for round in 1..8_u8 {
        // By a channel of the first reactor: of the pool's own, or of another one, in turn.
        stack.write(&disk, 4096, &[round; 65536]);
        move_on(&pool, &stack, 0).expect("it can move");
        assert_eq!(stack.read(&disk, 4096, 65536), [round; 65536], "round {round}");
        let snapshot = vec![(volume.id, format!("s{round}"), Uuid::new_v4())];
        block_on(pool.snapshot(snapshot)).expect("it can be taken");
    }
    for round in 1..8_u8 {
        let snapshot = pool.find(&format!("s{round}")).expect("it was made").disk.expect("it has a disk");
        assert_eq!(stack.read(&snapshot, 4096, 65536), [round; 65536], "round {round}");
    }
    // To where it is.
    move_to(&pool, &stack, 0, pool.cores()[0], LONG).expect("it is there");
    check(&pool);
    let of_pool = |handle: &Handle| {
        let threads = block_on(handle.call(|cx| cx.thread_stats())).expect("the reactor runs");
        threads.into_iter().filter(|thread| thread.name == "volumes on base").count()
    };
    // The root is left, and no branch.
    let count = || stack.env.reactors().handles().iter().map(of_pool).sum::<usize>();
    Bench::new().until("the branches to end", || count() == 1);
}

fn moves_under_load(shards: u32, latency_us: u64) {
    let stack = stack(shards);
    let pool = stack.the_pool();
    let id = pool.find("v").expect("it was made").id;
    set_latency(&stack, latency_us);
    let results = stack.under_load(|load| {
        std::thread::scope(|scope| {
            // A command that takes long goes on where the shard is.
            let checking = scope.spawn(|| (0..3).for_each(|_| check(&pool)));
            for round in 0.. {
                await_requests(load, 30);
                move_on(&pool, &stack, round % shards as usize).expect("it can move");
                if round % 10 == 5 && round < 60 {
                    let snapshot = vec![(id, format!("s{round}"), Uuid::new_v4())];
                    block_on(pool.snapshot(snapshot)).expect("it can be taken");
                }
                if round >= 60 && checking.is_finished() {
                    break;
                }
            }
        });
    });
    assert_eq!(results, vec![Ok(()); 9]);
    check(&pool);
}

#[test]
fn a_shard_moves_under_load() {
    moves_under_load(1, 0);
    moves_under_load(1, 300);
}

#[test]
fn each_of_two_shards_moves_under_load() {
    moves_under_load(2, 0);
    moves_under_load(2, 300);
}

#[test]
fn a_base_is_removed_while_shards_move() {
    for (round, shards) in [1, 2, 1, 2, 1, 2].into_iter().enumerate() {
        let stack = stack(shards);
        let pool = stack.the_pool();
        set_latency(&stack, 200);
        let results = stack.under_load(|load| {
            std::thread::scope(|scope| {
                let moves = scope.spawn(|| {
                    (0..).map(|n| move_on(&pool, &stack, n % shards as usize)).find_map(Result::err)
                });
                await_requests(load, 50 * (round as u64 + 1));
                block_on(stack.env.registry().remove("base")).expect("it can be removed");
                let end = moves.join().expect("it does not panic");
                assert!(matches!(end, Some(MoveError::Ending | MoveError::Open(_))), "{end:?}");
            });
        });
        assert!(results.iter().all(|end| matches!(end, Err(Status::Removed))), "{results:?}");
        assert!(pool.has_ended());
        assert!(stack.env.registry().find("base").is_err());
    }
}

#[test]
fn a_pool_is_deleted_while_its_shards_move() {
    for _ in 0..10 {
        let stack = stack(2);
        let pool = stack.the_pool();
        block_on(stack.env.registry().remove(&stack.name)).expect("it can be removed");
        std::thread::scope(|scope| {
            let moves = scope.spawn(|| {
                (0..).map(|n| move_on(&pool, &stack, n % 2)).find_map(Result::err).expect("it ends")
            });
            while pool.cores()[0] != pool.cores()[1] {
                std::thread::yield_now();
            }
            block_on(stack.pools.delete(&stack.env, &pool)).expect("it can be deleted");
            assert_eq!(moves.join().expect("it does not panic"), MoveError::Ending);
        });
        assert_eq!(stack.env.registry().find("base").expect("it is there").writers(), 0);
    }
}

#[test]
fn a_shard_whose_base_does_not_answer_stays_and_its_requests_are_aborted_at_once() {
    let stack = stack(1);
    let pool = stack.the_pool();
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    disk.write(0, &[1; 65536], Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, 1, &mut bench)[0].status, Status::Ok);
    set_latency(&stack, 4_000_000);
    disk.write(0, &[2; 4096], Shape::Single, &mut bench);
    disk.write(17, &[3; 512], Shape::Single, &mut bench);
    // What was never written needs no base: when it was read, the pool has all requests before it.
    disk.read(4096, 8, Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, 1, &mut bench)[0].status, Status::Ok);
    let here = pool.cores();
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| {
            let other = stack.env.reactors().handles().into_iter().find(|other| other.core() != here[0]);
            move_to(&pool, &stack, 0, other.expect("there are two").core(), MOVE_PATIENCE)
        });
        bench.until("the end of the move", || moving.is_finished());
        assert_eq!(moving.join().expect("it does not panic"), Err(MoveError::TooSlow));
        let again = scope.spawn(|| {
            loop {
                let moved = move_on(&pool, &stack, 0);
                if moved != Err(MoveError::Moving) {
                    return moved;
                }
            }
        });
        // The second move waits for the base: a third one is refused.
        let refused = scope.spawn(|| {
            loop {
                let other = stack.env.reactors().handles().into_iter().find(|other| other.core() != here[0]);
                let moved = move_to(&pool, &stack, 0, other.expect("there are two").core(), Duration::ZERO);
                if moved != Err(MoveError::TooSlow) {
                    return moved;
                }
            }
        });
        bench.until("the refusal", || refused.is_finished() || again.is_finished());
        disk.abort_all(&mut bench);
        let ended = ends(&mut disk, 2, &mut bench);
        assert!(ended.iter().all(|ended| ended.status == Status::Aborted), "{ended:?}");
        assert!(!again.is_finished(), "the abort has not waited for the base");
        set_latency(&stack, 0);
        bench.until("the end of the second move", || again.is_finished() && refused.is_finished());
        assert_eq!(again.join().expect("it does not panic"), Ok(()));
        assert_eq!(refused.join().expect("it does not panic"), Err(MoveError::Moving));
    });
    assert_ne!(pool.cores(), here);
    disk.read(17, 1, Shape::Single, &mut bench);
    let data = ends(&mut disk, 1, &mut bench).remove(0).data;
    assert!(data == [1; 512] || data == [3; 512]);
    disk.close(&mut bench);
}

#[test]
fn a_shard_with_volumes_on_another_disk_moves_under_load() {
    let stack = Stack::on(512, 2).malloc("base", 512, 1024 * MIB).malloc("image", 512, SIZE);
    let mut stack = Stack { volume: Bytes(SIZE), ..stack }.pool();
    stack.name = stack.volume("o", Origin::Disk("image".to_owned())).uuid().to_string();
    let pool = stack.the_pool();
    let results = stack.under_load(|load| {
        for _ in 0..40 {
            await_requests(load, 20);
            move_on(&pool, &stack, 0).expect("it can move");
        }
    });
    assert_eq!(results, vec![Ok(()); 9]);
    check(&pool);
}

/// A read that waits in the engine, where it only looks for the data for a branch, becomes one of the root's reactor.
#[test]
fn a_read_that_waits_for_an_aborted_write_goes_on_after_a_move_to_its_reactor() {
    let stack = stack(1);
    let pool = stack.the_pool();
    let volume = pool.find("v").expect("it was made").disk.expect("it has a disk");
    let [here, there] = [1, 0].map(|number: usize| stack.env.reactors().handles()[number].core());
    move_to(&pool, &stack, 0, here, LONG).expect("it can move");
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), &stack.name, Access::Shared, 8, 1 << 20);
    disk.write(0, &[1; 65536], Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, 1, &mut bench)[0].status, Status::Ok);
    set_latency(&stack, 3_000_000);
    // The branch of the third reactor writes it to the base, so that it does not keep the root.
    disk.write(0, &[2; 65536], Shape::Single, &mut bench);
    disk.read(4096, 8, Shape::Single, &mut bench);
    assert_eq!(ends(&mut disk, 1, &mut bench)[0].status, Status::Ok);
    disk.abort_all(&mut bench);
    assert_eq!(ends(&mut disk, 1, &mut bench)[0].status, Status::Aborted);
    std::thread::scope(|scope| {
        let (started, waits) = oneshot::channel();
        let (stack, volume) = (&stack, &volume);
        let reading = scope.spawn(move || {
            stack.on_owner(volume, async move |channel| {
                let buffer = || Buffer::new(65536, 4096);
                let mut read = std::pin::pin!(channel.read(Lba(0), Blocks(128), buffer()));
                let is_ready =
                    std::future::poll_fn(|cx| std::task::Poll::Ready(read.as_mut().poll(cx).is_ready()));
                assert!(!is_ready.await, "it waits for the write");
                // What was never written needs no base: the pool has the requests before it.
                channel.read(Lba(4096), Blocks(128), buffer()).await.expect("it can be read");
                let _ = started.send(());
                read.await.map(|data| data.bytes().to_vec())
            })
        });
        bench.wait("the read to reach the pool", waits).expect("it does");
        let moving = scope.spawn(|| move_to(&pool, stack, 0, there, LONG));
        bench.until("the end of the move", || moving.is_finished());
        assert_eq!(moving.join().expect("it does not panic"), Ok(()));
        bench.until("the end of the read", || reading.is_finished());
        let data = reading.join().expect("it does not panic").expect("it can be read");
        assert!(data.iter().all(|byte| *byte == data[0]) && matches!(data[0], 1 | 2));
    });
    disk.close(&mut bench);
}
