//! Two daemons that reach the disk of one pool, as on two hosts.

use super::*;
use aryk_bdev::{Channel, Completion, Device, Geometry, Io, Io as Request, Limits, OpSet, OpenError, Tag};
use aryk_dma::Mapping;
use aryk_reactor::{Cx, RootId};
use aryk_volume_store::{CLAIM_BYTES, CLAIM_PLACE, Claim, ClaimPace, Holder};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u32 = 512;

/// A disk that other hosts reach.
struct SharedDisk {
    memory: Arc<Mapping>,
    /// Whether it compares and writes at once.
    is_atomic: bool,
    /// Whether it does not complete writes now.
    is_held: Arc<AtomicBool>,
}

impl Device for SharedDisk {
    fn product(&self) -> &'static str {
        "shared"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: BLOCK,
            physical_block_size: BLOCK,
            blocks: Blocks(self.memory.len() / u64::from(BLOCK)),
            optimal_io_blocks: Blocks::ZERO,
        }
    }

    fn limits(&self) -> Limits {
        Limits { is_shared: true, compare_and_write_blocks: Blocks(1), ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        if self.is_atomic { OpSet::PLAIN.with(Op::CompareAndWrite) } else { OpSet::PLAIN }
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (memory, is_held) = (Arc::clone(&self.memory), Arc::clone(&self.is_held));
        Ok(Box::new(SharedChannel { root, memory, is_held, submitted: VecDeque::new(), aborted: Vec::new() }))
    }
}

struct SharedChannel {
    root: RootId,
    memory: Arc<Mapping>,
    is_held: Arc<AtomicBool>,
    submitted: VecDeque<Io>,
    aborted: Vec<Tag>,
}

impl Channel for SharedChannel {
    fn submit(&mut self, io: &Request, cx: &mut Cx) {
        self.submitted.push_back(*io);
        cx.wake(self.root);
    }

    /// Requests to the pool can be aborted; those to the claim take effect as late as they may.
    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        if self.submitted.iter().any(|io| io.tag == tag && io.lba.to_bytes(BLOCK).0 != CLAIM_PLACE) {
            self.submitted.retain(|io| io.tag != tag);
            self.aborted.push(tag);
            cx.wake(self.root);
        }
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        out.extend(self.aborted.drain(..).map(|tag| Completion { tag, status: Status::Aborted }));
        let is_held = self.is_held.load(Ordering::SeqCst);
        let (now, later) = self
            .submitted
            .drain(..)
            .partition(|io| !is_held || !matches!(io.op, Op::Write | Op::CompareAndWrite));
        self.submitted = later;
        if is_held {
            cx.wake(self.root);
        }
        for io in Vec::from_iter::<VecDeque<Io>>(now) {
            let (offset, len) = (io.lba.to_bytes(BLOCK).0, io.blocks.to_bytes(BLOCK).0);
            let mut status = Status::Ok;
            match io.op {
                Op::Read => io.data.load_from(&self.memory, offset),
                Op::Write => io.data.store_to(&self.memory, offset),
                Op::Unmap | Op::WriteZeroes => self.memory.zero(offset, len),
                Op::CompareAndWrite => {
                    let mut wanted = vec![0; len as usize];
                    io.data.read(0, &mut wanted);
                    let mut found = Buffer::new(len as usize, 4096);
                    found.lend().first(len as u32).load_from(&self.memory, offset);
                    found.reclaim();
                    if found.bytes()[..len as usize] == wanted {
                        io.data.slice(len as u32, len as u32).store_to(&self.memory, offset);
                    } else {
                        status = Status::Miscompare;
                    }
                }
                _ => {}
            }
            out.push(Completion { tag: io.tag, status });
        }
    }
}

/// Intervals that a test can wait for, also beside other tests.
const PACE: ClaimPace = ClaimPace {
    beat: Duration::from_millis(50),
    lease: Duration::from_secs(2),
    watch: Duration::from_millis(4500),
    look: Duration::from_millis(100),
    hurry: Duration::from_millis(600),
    settle: Duration::from_secs(1),
};

#[expect(clippy::disallowed_methods, reason = "nothing else happens meanwhile")]
fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

#[expect(clippy::disallowed_methods, reason = "the tests measure time")]
fn now() -> Instant {
    Instant::now()
}

/// Two daemons, `0` and `1`, each with a disk of its number. Both disks are the same memory. The suite's pools are those of the
/// first.
struct Hosts {
    stack: Stack,
    other: Pools,
    memory: Arc<Mapping>,
    /// Whether the disk of each holds writes back.
    are_held: [Arc<AtomicBool>; 2],
}

impl Hosts {
    fn new(is_atomic: bool) -> Self {
        let mut stack = Stack::new(512);
        let memory = Arc::new(Mapping::anonymous(BASE).expect("there is memory"));
        let are_held = <[Arc<AtomicBool>; 2]>::default();
        for (name, is_held) in ["0", "1"].into_iter().zip(&are_held) {
            let (memory, is_held) = (Arc::clone(&memory), Arc::clone(is_held));
            let disk = SharedDisk { memory, is_atomic, is_held };
            stack.env.registry().register(Identity::named(name), Arc::new(disk)).expect("it is new");
        }
        stack.pools = Self::daemon(1);
        Self { stack, other: Self::daemon(2), memory, are_held }
    }

    /// A daemon on a host of its own.
    fn daemon(number: u128) -> Pools {
        let holder = Holder {
            boot: Uuid::from_u128(number),
            host: format!("host{number}"),
            ..Holder::of_this_process()
        };
        let mut pools = Pools::default();
        (pools.holder, pools.pace) = (holder, PACE);
        pools
    }

    /// The first daemon makes a pool with a volume.
    fn create(&self) -> Arc<Pool> {
        let new = NewPool { segment_bytes: Some(8 << 20), ..NewPool::named("p", "0") };
        let pool = block_on(self.stack.pools.create(&self.stack.env, new)).expect("it can be made");
        self.while_renewed(&pool, || self.stack.volume("v", Origin::Empty));
        pool
    }

    fn open(&self, pools: &Pools, disk: &str) -> Result<Arc<Pool>, Error> {
        block_on(pools.open(&self.stack.env, disk, Settings::default(), |_| Vec::new()))
    }

    /// Writes 4 KiB at the start of a disk.
    fn try_write(&self, disk: &Bdev, byte: u8) -> Result<(), Status> {
        self.stack.on_owner(disk, async move |channel: AsyncChannel| {
            channel.write(Lba(0), Blocks(8), Buffer::from_slice(&[byte; 4096])).await.map(drop)
        })
    }

    fn claim(&self) -> Option<Claim> {
        let mut buffer = Buffer::new(CLAIM_BYTES, 4096);
        buffer.lend().first(CLAIM_BYTES as u32).load_from(&self.memory, CLAIM_PLACE);
        buffer.reclaim();
        Claim::parse(&buffer.bytes()[..CLAIM_BYTES])
    }

    /// All that the disk has, but the claim. Nothing is written to it by a daemon that has nothing to do.
    fn image(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(BASE as usize);
        let mut buffer = Buffer::new(MIB as usize, 4096);
        for offset in (0..BASE).step_by(MIB as usize) {
            buffer.lend().first(MIB as u32).load_from(&self.memory, offset);
            buffer.reclaim();
            all.extend_from_slice(buffer.bytes());
        }
        all[CLAIM_PLACE as usize..][..CLAIM_BYTES].fill(0);
        all
    }

    /// Runs `f` while the claim of the pool is renewed.
    fn while_renewed<R>(&self, pool: &Pool, f: impl FnOnce() -> R) -> R {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(block_on(pool.renew_claim()).is_some());
                    sleep(PACE.beat);
                }
            });
            let result = f();
            is_over.store(true, Ordering::Relaxed);
            result
        })
    }
}

#[test]
fn a_pool_in_use_is_refused_on_another_host() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let pool = hosts.create();
        let disk = pool.find("v").unwrap().disk.unwrap();
        let refused = hosts.while_renewed(&pool, || hosts.open(&hosts.other, "1"));
        let host = "host1".to_owned();
        let in_use = Error::InUse { disk: "1".to_owned(), host, pid: std::process::id() };
        assert_eq!(refused.map(drop), Err(in_use.clone()));
        // Nor can it be destroyed there.
        let new = NewPool { force: true, ..NewPool::named("q", "1") };
        let refused = hosts.while_renewed(&pool, || block_on(hosts.other.create(&hosts.stack.env, new)));
        assert_eq!(refused.map(drop), Err(in_use));
        hosts.while_renewed(&pool, || hosts.stack.write(&disk, 0, &[7; 4096]));
        assert_eq!(pool.health(), Health::Ready);
    }
}

#[test]
fn a_pool_that_was_given_back_is_opened_at_once() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let pool = hosts.create();
        block_on(hosts.stack.pools.close(&pool));
        assert!(hosts.claim().unwrap().is_released);
        let begin = now();
        let pool = hosts.open(&hosts.other, "1").expect("it is free");
        assert!(begin.elapsed() < PACE.watch, "{:?}", begin.elapsed());
        assert_eq!(hosts.claim().unwrap().host, "host2");
        block_on(hosts.other.close(&pool));
    }
}

#[test]
fn a_daemon_that_stopped_renewing_loses_the_pool_and_writes_nothing_more() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let pool = hosts.create();
        let disk = pool.find("v").unwrap().disk.unwrap();
        hosts.while_renewed(&pool, || hosts.stack.write(&disk, 0, &[7; 4096]));
        let successor = hosts.open(&hosts.other, "1").expect("its claim does not change");
        // The claim of the successor is not renewed, so it writes nothing more. The old daemon goes on, and does not know yet.
        sleep(PACE.lease);
        let image = hosts.image();
        let (sent, refused) = std::sync::mpsc::channel();
        let stack = &hosts.stack;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let written = hosts.try_write(&disk, 9);
                sent.send(written).expect("the test waits");
            });
            // It waits for the lease.
            let early = refused.recv_timeout(Duration::from_millis(300));
            assert!(early.is_err(), "{early:?}");
            assert!(hosts.image() == image, "the old daemon has written");
            assert_eq!(block_on(pool.renew_claim()), None);
            assert_eq!(refused.recv(), Ok(Err(Status::Medium)));
        });
        assert_eq!(pool.health(), Health::TakenOver);
        assert!(hosts.image() == image, "the old daemon has written");
        let written = stack.on_owner(&disk, async |channel: AsyncChannel| {
            let read = channel.read(Lba(0), Blocks(8), Buffer::new(4096, 4096)).await.map(drop);
            (channel.write(Lba(0), Blocks(8), Buffer::from_slice(&[9; 4096])).await.map(drop), read)
        });
        assert_eq!(written, (Err(Status::Medium), Err(Status::Medium)));
        assert!(hosts.image() == image, "the old daemon has written");
        // Giving it back changes nothing either: it is the successor's.
        block_on(hosts.stack.pools.close(&pool));
        assert!(hosts.image() == image, "the old daemon has written");
        // Both daemons of the test have one list of disks.
        block_on(hosts.stack.env.registry().remove(disk.name())).expect("it can be removed");
        // The claim of the successor is old by now.
        block_on(hosts.other.close(&successor));
        let successor = hosts.open(&hosts.other, "1").expect("it is its own");
        let of_successor = successor.find("v").unwrap().disk.unwrap();
        hosts.while_renewed(&successor, || {
            assert_eq!(hosts.stack.read(&of_successor, 0, 4096), [7; 4096]);
            let report = block_on(successor.check(true, false)).expect("it can be checked");
            assert!(report.is_clean(), "{report:?}");
        });
        block_on(hosts.other.close(&successor));
    }
}

#[test]
fn a_pool_that_was_taken_over_is_not_deleted_by_the_daemon_that_lost_it() {
    let hosts = Hosts::new(true);
    let pool = hosts.create();
    let successor = hosts.open(&hosts.other, "1").expect("its claim does not change");
    assert_eq!(block_on(pool.renew_claim()), None);
    assert_eq!(block_on(hosts.stack.pools.delete(&hosts.stack.env, &pool)), Err(Error::TakenOver));
    block_on(hosts.other.close(&successor));
    let again = hosts.open(&hosts.other, "1").expect("it is there");
    block_on(hosts.other.delete(&hosts.stack.env, &again)).expect("it is this daemon's");
    assert_eq!(hosts.open(&hosts.other, "1").map(drop), Err(Error::NoPoolOn("1".to_owned())));
    assert!(hosts.claim().is_some_and(|claim| claim.is_released));
}

/// The attempt waits until the claim of another daemon is old.
#[test]
fn a_second_attempt_to_open_or_create_a_pool_is_refused() {
    for is_created in [false, true] {
        let hosts = Hosts::new(true);
        let _pool = hosts.create();
        let attempt = || {
            if !is_created {
                return hosts.open(&hosts.other, "1");
            }
            let new = NewPool { force: true, ..NewPool::named("q", "1") };
            block_on(hosts.other.create(&hosts.stack.env, new))
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(attempt);
            sleep(PACE.lease);
            for _ in 0..2 {
                match attempt().map(drop) {
                    Err(Error::PoolExists(name)) if is_created => assert_eq!(name, "q"),
                    Err(Error::Busy(_)) if !is_created => {}
                    other => panic!("{other:?}"),
                }
            }
            let pool = first.join().expect("it does not panic").expect("the old claim does not change");
            block_on(hosts.other.close(&pool));
        });
    }
}

#[test]
fn a_claim_is_released_while_it_is_renewed() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let mut hold = crate::part::BaseHold::new(&hosts.stack.env, "0", "the test").unwrap();
        let taken = hold.take_claim(&hosts.stack.env, Uuid::from_u128(9), &hosts.stack.pools.holder, PACE);
        block_on(taken).unwrap();
        let (claim, base) = (Arc::clone(hold.claim().unwrap()), hold.descriptor());
        block_on(claim.renew_during(&base, async {
            // A few beats.
            while hosts.claim().unwrap().beat < 4 {
                hosts.stack.env.reactors().handles()[0].call(|_| ()).await.unwrap();
            }
            claim.release(base.clone()).await;
        }));
        assert!(hosts.claim().unwrap().is_released);
    }
}

/// The write of a beat takes effect after another daemon has taken the pool over.
#[test]
fn a_late_beat_does_not_give_a_lost_pool_back() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let pool = hosts.create();
        let disk = pool.find("v").unwrap().disk.unwrap();
        hosts.are_held[0].store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let beat = scope.spawn(|| block_on(pool.renew_claim()));
            let successor = hosts.open(&hosts.other, "1").expect("its claim does not change");
            hosts.are_held[0].store(false, Ordering::SeqCst);
            let _ = beat.join().expect("it does not panic");
            assert_eq!(block_on(pool.renew_claim()), None);
            let written = hosts.try_write(&disk, 9);
            assert_eq!(written, Err(Status::Medium));
            block_on(hosts.other.close(&successor));
        });
    }
}

#[test]
fn what_the_disk_has_at_the_end_of_the_lease_is_aborted_and_submitted_again() {
    for is_lost in [false, true] {
        let hosts = Hosts::new(true);
        let pool = hosts.create();
        let disk = pool.find("v").unwrap().disk.unwrap();
        hosts.are_held[0].store(true, Ordering::SeqCst);
        let (sent, written) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let written = hosts.try_write(&disk, 7);
                sent.send(written).expect("the test waits");
            });
            sleep(PACE.lease + Duration::from_secs(1));
            assert_eq!(pool.health(), Health::Waiting);
            // Nothing is left that could be written from now on.
            hosts.are_held[0].store(false, Ordering::SeqCst);
            let early = written.recv_timeout(Duration::from_millis(300));
            assert!(early.is_err(), "{early:?}");
            if is_lost {
                let successor = hosts.open(&hosts.other, "1").expect("its claim does not change");
                assert_eq!(block_on(pool.renew_claim()), None);
                assert_eq!(written.recv(), Ok(Err(Status::Medium)));
                block_on(hosts.other.close(&successor));
            } else {
                assert_eq!(hosts.while_renewed(&pool, || written.recv()), Ok(Ok(())));
                assert_eq!(hosts.while_renewed(&pool, || hosts.stack.read(&disk, 0, 4096)), [7; 4096]);
            }
        });
    }
}

#[test]
fn a_pool_that_waits_with_requests_ends() {
    for is_removed in [false, true] {
        let hosts = Hosts::new(true);
        let pool = hosts.create();
        let disk = pool.find("v").unwrap().disk.unwrap();
        hosts.are_held[0].store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let written = scope.spawn(|| hosts.try_write(&disk, 7));
            sleep(PACE.lease + Duration::from_secs(1));
            assert_eq!(pool.health(), Health::Waiting);
            if is_removed {
                block_on(hosts.stack.env.registry().remove("0")).expect("it can be removed");
            } else {
                block_on(hosts.stack.pools.close(&pool));
            }
            assert!(written.join().expect("it does not panic").is_err());
        });
    }
}

#[test]
fn a_daemon_that_was_stopped_for_a_while_goes_on() {
    let hosts = Hosts::new(true);
    let pool = hosts.create();
    let disk = pool.find("v").unwrap().disk.unwrap();
    sleep(PACE.lease);
    let (sent, written) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            hosts.stack.write(&disk, 0, &[7; 4096]);
            sent.send(()).expect("the test waits");
        });
        let early = written.recv_timeout(Duration::from_millis(200));
        assert!(early.is_err(), "the claim is old, and the disk was used");
        hosts.while_renewed(&pool, || written.recv().expect("it is written"));
    });
    assert_eq!(hosts.while_renewed(&pool, || hosts.stack.read(&disk, 0, 4096)), [7; 4096]);
}

#[test]
fn the_claim_of_a_dead_process_of_the_same_host_is_taken_over_at_once() {
    let mut hosts = Hosts::new(true);
    let mut child = std::process::Command::new("true").spawn().expect("it can be run");
    child.wait().expect("it ends");
    let (pid, pools) = (child.id(), &mut hosts.stack.pools);
    pools.holder.pid = pid;
    hosts.other.holder = Holder { daemon: Uuid::new_v4(), pid: std::process::id(), ..pools.holder.clone() };
    let old = hosts.create();
    let begin = now();
    let pool = hosts.open(&hosts.other, "1").expect("its daemon is dead");
    assert!(begin.elapsed() < PACE.watch, "{:?}", begin.elapsed());
    block_on(hosts.other.close(&pool));
    block_on(hosts.stack.pools.close(&old));
}

#[test]
fn of_daemons_that_open_a_pool_at_the_same_time_one_gets_it() {
    for is_atomic in [false, true] {
        let hosts = Hosts::new(is_atomic);
        let pool = hosts.create();
        block_on(hosts.stack.pools.close(&pool));
        for _ in 0..3 {
            let ended = AtomicUsize::new(0);
            let opened: Vec<_> = std::thread::scope(|scope| {
                let (hosts, ended) = (&hosts, &ended);
                let open = |pools, disk| {
                    scope.spawn(move || {
                        let opened = hosts.open(pools, disk);
                        ended.fetch_add(1, Ordering::Relaxed);
                        while let Ok(pool) = &opened
                            && ended.load(Ordering::Relaxed) < 2
                        {
                            assert!(block_on(pool.renew_claim()).is_some());
                            sleep(PACE.beat);
                        }
                        opened
                    })
                };
                let both = [open(&hosts.stack.pools, "0"), open(&hosts.other, "1")];
                both.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
            });
            let count = opened.iter().filter(|pool| pool.is_ok()).count();
            assert_eq!(count, 1, "{opened:?}");
            for (pool, pools) in opened.into_iter().zip([&hosts.stack.pools, &hosts.other]) {
                match pool {
                    Ok(pool) => block_on(pools.close(&pool)),
                    Err(error) => assert!(matches!(error, Error::InUse { .. }), "{error}"),
                }
            }
        }
    }
}
