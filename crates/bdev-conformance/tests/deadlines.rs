//! Requests that miss their deadline, in virtual time.

use aryk_bdev::{Access, Bdev, Blocks, Deadline, Env, Identity, OnDeadline, Op, OpSet, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, contents};
use aryk_bdev_error::{Fault, Injection};
use aryk_reactor::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A disk that holds requests on demand, and a clock that the test moves.
struct Rig {
    env: Env,
    bdev: Arc<Bdev>,
    nanos: Arc<AtomicU64>,
    bench: Bench,
    disk: Opener,
}

impl Rig {
    fn new() -> Self {
        let env = Env::default();
        let malloc = aryk_bdev_malloc::Config {
            identity: Identity::named("base"),
            block_size: 512,
            physical_block_size: 512,
            blocks: Blocks(1024),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, malloc).expect("it can be made");
        let error = aryk_bdev_error::Config { identity: Identity::named("disk"), base: "base".to_owned() };
        aryk_bdev_error::create(&env, error).expect("it can be made");
        let bdev = env.registry().find("disk").expect("it is registered");
        let nanos = Arc::new(AtomicU64::new(1_000_000));
        let mut bench = Bench::at(Clock::Virtual(Arc::clone(&nanos)));
        let disk = bench.open(env.registry(), "disk", Access::Exclusive, 400, 512);
        Self { env, bdev, nanos, bench, disk }
    }

    fn hold(&self, op: Op, count: u32) {
        let injection = Injection { fault: Fault::Pending, ops: OpSet::of(&[op]), count, queue_depth: 0 };
        aryk_bdev_error::inject(self.env.registry(), "disk", injection).expect("the disk is there");
    }

    fn limit(&mut self, ms: u64, action: OnDeadline) {
        let deadline = Deadline { after: Duration::from_millis(ms), action };
        self.bench.wait("a deadline", self.bdev.set_deadline(Some(deadline)));
        self.pass(0);
    }

    /// Moves the clock; returns the requests that complete.
    fn pass(&mut self, ms: u64) -> Vec<(u64, Status)> {
        self.nanos.fetch_add(ms * 1_000_000, Ordering::Relaxed);
        for _ in 0..30 {
            self.bench.turn();
        }
        self.disk.completed().into_iter().map(|o| (o.id, o.status)).collect()
    }

    fn read(&mut self, lba: u64) -> u64 {
        self.disk.read(lba, 1, Shape::Single, &mut self.bench)
    }

    fn overdue(&mut self) -> u64 {
        self.bench.wait("statistics", self.bdev.stats()).overdue
    }

    fn end(mut self) {
        self.disk.abort_all(&mut self.bench);
        self.disk.drain(&mut self.bench);
        self.disk.close(&mut self.bench);
    }
}

#[test]
fn a_late_request_is_counted_once_and_goes_on() {
    let mut rig = Rig::new();
    rig.limit(100, OnDeadline::Report);
    rig.hold(Op::Read, 1);
    rig.read(0);
    assert_eq!(rig.pass(99), []);
    assert_eq!(rig.overdue(), 0);
    assert_eq!(rig.pass(1), []);
    assert_eq!(rig.overdue(), 1);
    assert_eq!(rig.pass(5000), []);
    assert_eq!(rig.overdue(), 1);
    // Later requests have their own deadlines.
    rig.hold(Op::Read, 2);
    rig.read(1);
    rig.pass(50);
    rig.read(2);
    rig.pass(50);
    assert_eq!(rig.overdue(), 2);
    rig.pass(49);
    assert_eq!(rig.overdue(), 2);
    rig.pass(1);
    assert_eq!(rig.overdue(), 3);
    rig.end();
}

#[test]
fn a_late_request_is_aborted_and_no_other() {
    let mut rig = Rig::new();
    rig.limit(100, OnDeadline::Abort);
    rig.hold(Op::Read, 2);
    let first = rig.read(0);
    rig.pass(60);
    let second = rig.read(1);
    let quick = rig.read(2);
    assert_eq!(rig.pass(39), [(quick, Status::Ok)]);
    assert_eq!(rig.pass(1), [(first, Status::Aborted)]);
    assert_eq!(rig.pass(59), []);
    assert_eq!(rig.pass(1), [(second, Status::Aborted)]);
    assert_eq!(rig.overdue(), 2);
    rig.end();
}

#[test]
fn a_late_request_has_the_disk_reset() {
    let mut rig = Rig::new();
    rig.limit(100, OnDeadline::Reset);
    rig.hold(Op::Write, 3);
    let data = contents(1, 0, 1, 512);
    let first = rig.disk.write(0, &data, Shape::Single, &mut rig.bench);
    rig.pass(50);
    let others = [1, 2].map(|lba| rig.disk.write(lba, &data, Shape::Single, &mut rig.bench));
    let mut ended = rig.pass(50);
    ended.sort_unstable_by_key(|e| e.0);
    assert_eq!(ended, [first, others[0], others[1]].map(|id| (id, Status::Aborted)), "a reset aborts all");
    assert_eq!(rig.overdue(), 1);
    let again = rig.read(0);
    assert_eq!(rig.pass(0), [(again, Status::Ok)]);
    rig.end();
}

#[test]
fn a_compare_and_write_that_waits_for_its_blocks_is_aborted_too() {
    let mut rig = Rig::new();
    rig.limit(100, OnDeadline::Report);
    rig.hold(Op::Write, 1);
    let data = contents(1, 0, 2, 512);
    let held = rig.disk.write(0, &data[..512], Shape::Single, &mut rig.bench);
    rig.pass(50);
    let waits =
        rig.disk.with_data(Op::CompareAndWrite, 0, 1, Shape::Single, &[0; 512].repeat(2), &mut rig.bench);
    assert_eq!(rig.pass(10), []);
    rig.limit(70, OnDeadline::Abort);
    // The request that it waited for has ended: it continues.
    assert_eq!(rig.pass(10), [(held, Status::Aborted), (waits, Status::Ok)]);
    rig.hold(Op::Write, 1);
    rig.bench.wait("no deadline", rig.bdev.set_deadline(None));
    rig.disk.write(0, &data[..512], Shape::Single, &mut rig.bench);
    rig.pass(0);
    rig.limit(10_000, OnDeadline::Abort);
    let waits = rig.disk.copy(0, 5, 1, &mut rig.bench);
    rig.pass(0);
    rig.disk.abort(waits, &mut rig.bench);
    assert_eq!(rig.pass(0), [(waits, Status::Aborted)]);
    rig.end();
}

#[test]
fn a_deadline_is_for_channels_to_come_and_for_requests_in_flight() {
    let mut rig = Rig::new();
    rig.hold(Op::Read, 3);
    let before = rig.read(0);
    rig.pass(500);
    rig.limit(1000, OnDeadline::Abort);
    let bench = &mut rig.bench;
    let mut other = bench.open(rig.env.registry(), "disk", Access::Read, 4, 512);
    let theirs = other.read(1, 1, Shape::Single, bench);
    assert_eq!(rig.pass(500), [(before, Status::Aborted)]);
    assert_eq!(other.completed().len(), 0);
    rig.pass(500);
    let ended: Vec<_> = other.completed().into_iter().map(|o| (o.id, o.status)).collect();
    assert_eq!(ended, [(theirs, Status::Aborted)]);
    rig.bench.wait("no deadline", rig.bdev.set_deadline(None));
    rig.read(0);
    assert_eq!(rig.pass(1_000_000), []);
    other.close(&mut rig.bench);
    rig.end();
}
