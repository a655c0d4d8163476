//! Faults injected by the `error` module, and latencies of the `delay` module.

use aryk_bdev::{Access, Blocks, Env, Identity, Op, OpSet, Registry, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, contents};
use aryk_bdev_delay::Kind;
use aryk_bdev_error::{Fault, Injection};
use aryk_reactor::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u32 = 512;

fn malloc(name: &str) -> Env {
    let env = Env::default();
    let config = aryk_bdev_malloc::Config {
        identity: Identity::named(name),
        block_size: BLOCK,
        physical_block_size: BLOCK,
        blocks: Blocks(1024),
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(&env, config).expect("it can be made");
    env
}

fn error() -> Env {
    let env = malloc("base");
    let config = aryk_bdev_error::Config { identity: Identity::named("disk"), base: "base".to_owned() };
    aryk_bdev_error::create(&env, config).expect("it can be made");
    env
}

fn inject(registry: &Registry, fault: Fault, ops: OpSet, count: u32, queue_depth: u32) {
    aryk_bdev_error::inject(registry, "disk", Injection { fault, ops, count, queue_depth })
        .expect("the disk is there");
}

fn statuses(disk: &mut Opener, bench: &mut Bench) -> Vec<Status> {
    let mut outcomes = disk.drain(bench);
    outcomes.sort_by_key(|o| o.id);
    outcomes.into_iter().map(|o| o.status).collect()
}

#[test]
fn failures_befall_as_many_requests_of_each_operation_as_told() {
    let env = error();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 8, BLOCK);
    inject(env.registry(), Fault::Failure, OpSet::of(&[Op::Read, Op::Flush]), 2, 0);
    inject(env.registry(), Fault::NoMem, OpSet::of(&[Op::Write]), 1, 0);
    for _ in 0..3 {
        disk.read(0, 1, Shape::Single, &mut bench);
        disk.write(0, &contents(1, 0, 1, BLOCK), Shape::Single, &mut bench);
        disk.command(Op::Flush, 0, 0, &mut bench);
        disk.command(Op::Unmap, 1, 1, &mut bench);
    }
    use Status::{Medium, NoSpace, Ok};
    let expected = [Medium, NoSpace, Medium, Ok, Medium, Ok, Medium, Ok, Ok, Ok, Ok, Ok];
    assert_eq!(statuses(&mut disk, &mut bench), expected);
    inject(env.registry(), Fault::Failure, OpSet::ALL, u32::MAX, 0);
    disk.command(Op::WriteZeroes, 1, 1, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Medium);
    aryk_bdev_error::clear(env.registry(), "disk").unwrap();
    disk.command(Op::WriteZeroes, 1, 1, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Ok);
    disk.close(&mut bench);
}

#[test]
fn failures_can_wait_for_a_queue_depth() {
    let env = error();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 8, BLOCK);
    inject(env.registry(), Fault::Failure, OpSet::of(&[Op::Read]), 2, 3);
    for lba in 0..6 {
        disk.read(lba, 1, Shape::Single, &mut bench);
    }
    use Status::{Medium, Ok};
    assert_eq!(statuses(&mut disk, &mut bench), [Ok, Ok, Ok, Medium, Medium, Ok]);
    disk.close(&mut bench);
}

#[test]
fn corruption_changes_one_byte_of_what_is_read_or_stored_and_none_of_the_submitters() {
    let env = error();
    let mut bench = Bench::new();
    let mut disk = bench.open(env.registry(), "disk", Access::Exclusive, 8, 20 * BLOCK);
    let data = contents(1, 0, 20, BLOCK);
    let mut wrong = data.clone();
    wrong[700] ^= 0x81;
    let fault = Fault::CorruptData { offset: 700, value: 0x81 };
    for (op, shape, stored) in [(Op::Read, Shape::Halves, &data), (Op::Write, Shape::Odd, &wrong)] {
        inject(env.registry(), fault, OpSet::of(&[op]), 1, 0);
        disk.write(0, &data, shape, &mut bench);
        assert_eq!(disk.finish(&mut bench).data, data, "the submitter's memory is its own");
        for expected in [&wrong, stored] {
            disk.read(0, 20, shape, &mut bench);
            assert_eq!(disk.finish(&mut bench).data, *expected, "{op:?}");
        }
    }
    // A shorter buffer has no such byte.
    inject(env.registry(), fault, OpSet::ALL, 1, 0);
    disk.write(0, &data[..512], Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    aryk_bdev_error::clear(env.registry(), "disk").unwrap();
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, data[..512]);
    disk.close(&mut bench);
}

#[test]
fn invalid_injections_are_refused() {
    let env = error();
    let nothing = Injection {
        fault: Fault::CorruptData { offset: 0, value: 0 },
        ops: OpSet::ALL,
        count: 1,
        queue_depth: 0,
    };
    assert_eq!(
        aryk_bdev_error::inject(env.registry(), "disk", nothing),
        Err(aryk_bdev_error::Error::CorruptsNothing)
    );
    assert!(aryk_bdev_error::clear(env.registry(), "base").is_err(), "not a disk of this module");
    assert!(aryk_bdev_delay::set_latency(env.registry(), "disk", Kind::AvgRead, 1).is_err());
    assert!(aryk_bdev_null::resize(env.registry(), "base", Blocks(1)).is_err());
}

/// A delay disk, in virtual time.
struct Delayed {
    env: Env,
    nanos: Arc<AtomicU64>,
    bench: Bench,
    disk: Opener,
}

impl Delayed {
    fn new() -> Self {
        let env = malloc("base");
        let config = aryk_bdev_delay::Config {
            identity: Identity::named("disk"),
            base: "base".to_owned(),
            avg_read_us: 100,
            p99_read_us: 1000,
            avg_write_us: 300,
            p99_write_us: 2000,
        };
        aryk_bdev_delay::create(&env, config).expect("it can be made");
        let nanos = Arc::new(AtomicU64::new(1));
        let mut bench = Bench::at(Clock::Virtual(Arc::clone(&nanos)));
        let disk = bench.open(env.registry(), "disk", Access::Exclusive, 400, BLOCK);
        Self { env, nanos, bench, disk }
    }

    /// Moves the clock by this many microseconds; returns the number of completions.
    fn after(&mut self, us: u64) -> usize {
        self.nanos.fetch_add(us * 1000, Ordering::Relaxed);
        for _ in 0..10 {
            self.bench.turn();
        }
        self.disk.completed().len()
    }

    fn submit(&mut self, reads: u64, writes: u64) {
        for lba in 0..reads {
            self.disk.read(lba, 1, Shape::Single, &mut self.bench);
        }
        for lba in reads..reads + writes {
            self.disk.write(lba, &[0; BLOCK as usize], Shape::Single, &mut self.bench);
        }
    }
}

#[test]
fn latencies_are_as_configured_one_in_a_hundred_longer() {
    let mut d = Delayed::new();
    d.submit(100, 100);
    assert_eq!([0, 99, 1].map(|us| d.after(us)), [0, 0, 99], "most reads take 100 µs");
    assert_eq!([199, 1].map(|us| d.after(us)), [0, 99], "most writes 300");
    assert_eq!([699, 1].map(|us| d.after(us)), [0, 1], "one read 1,000");
    assert_eq!([999, 1].map(|us| d.after(us)), [0, 1], "one write 2,000");
    d.disk.command(Op::Flush, 0, 0, &mut d.bench);
    assert_eq!(d.after(0), 1);
    d.disk.close(&mut d.bench);
}

#[test]
fn latencies_change_at_run_time_and_a_shorter_one_overtakes() {
    let mut d = Delayed::new();
    d.submit(1, 0);
    assert_eq!(d.after(0), 0);
    aryk_bdev_delay::set_latency(d.env.registry(), "disk", Kind::AvgRead, 10).unwrap();
    d.submit(1, 0);
    assert_eq!([0, 9, 1, 89, 1].map(|us| d.after(us)), [0, 0, 1, 0, 1]);
    d.disk.close(&mut d.bench);
}

#[test]
fn an_abort_releases_what_is_held() {
    let mut d = Delayed::new();
    d.submit(0, 3);
    assert_eq!(d.after(1), 0);
    d.disk.abort_all(&mut d.bench);
    assert_eq!(statuses(&mut d.disk, &mut d.bench), [Status::Ok; 3], "the base has done them");
    d.disk.close(&mut d.bench);
}
