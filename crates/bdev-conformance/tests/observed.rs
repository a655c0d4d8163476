//! Reported queue depths and latencies, in virtual time.

use aryk_bdev::{Access, Bdev, Blocks, Env, Histogram, Identity, Op, QueueDepth, Recording, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape};
use aryk_reactor::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A disk whose reads take 100 µs and whose writes take 300 µs, and a clock that the test moves.
struct Rig {
    bdev: Arc<Bdev>,
    nanos: Arc<AtomicU64>,
    bench: Bench,
    disk: Opener,
}

impl Rig {
    fn new() -> Self {
        let env = Env::default();
        let identity = Identity::named("base");
        let null = aryk_bdev_null::Config {
            identity,
            block_size: 512,
            physical_block_size: 512,
            blocks: Blocks(1024),
        };
        aryk_bdev_null::create(&env, null).expect("it can be made");
        let delay = aryk_bdev_delay::Config {
            identity: Identity::named("disk"),
            base: "base".to_owned(),
            avg_read_us: 100,
            p99_read_us: 100,
            avg_write_us: 300,
            p99_write_us: 300,
        };
        let bdev = aryk_bdev_delay::create(&env, delay).expect("it can be made");
        let nanos = Arc::new(AtomicU64::new(1_000_000));
        let mut bench = Bench::at(Clock::Virtual(Arc::clone(&nanos)));
        let disk = bench.open(env.registry(), "disk", Access::Exclusive, 64, 512);
        Self { bdev, nanos, bench, disk }
    }

    /// Moves the clock in steps of a microsecond.
    fn pass(&mut self, us: u64) {
        for _ in 0..us {
            self.nanos.fetch_add(1000, Ordering::Relaxed);
            // A sample takes some turns: to the reactor, to the channels, and back.
            (0..6).for_each(|_| {
                self.bench.turn();
            });
        }
    }

    fn read(&mut self, count: u64) {
        for lba in 0..count {
            self.disk.read(lba, 1, Shape::Single, &mut self.bench);
        }
    }

    fn sample(&mut self, us: Option<u64>) {
        let on = self.bench.cx().handle().clone();
        let period = us.map(Duration::from_micros);
        assert!(self.bench.wait("sampling", self.bdev.sample_queue_depth(period, &on)).is_ok());
        (0..6).for_each(|_| {
            self.bench.turn();
        });
    }

    fn recorded(&mut self) -> Option<Histogram> {
        self.bench.wait("latencies", self.bdev.recorded()).map(|(_, histogram)| histogram)
    }
}

/// As exact as periods and steps allow.
fn is_about(got: Duration, us: u64) -> bool {
    got.abs_diff(Duration::from_micros(us)) <= Duration::from_micros(14)
}

#[test]
fn queue_depth_is_sampled_while_asked_for() {
    let mut rig = Rig::new();
    assert_eq!(rig.bdev.queue_depth(), None);
    rig.sample(Some(10));
    rig.pass(50);
    let zero = Duration::ZERO;
    let period = Duration::from_micros(10);
    assert_eq!(rig.bdev.queue_depth(), Some(QueueDepth { period, depth: 0, busy: zero, weighted: zero }));
    rig.read(3);
    rig.pass(50);
    assert_eq!(rig.bdev.queue_depth().unwrap().depth, 3);
    rig.pass(150);
    let now = rig.bdev.queue_depth().unwrap();
    assert_eq!(now.depth, 0);
    assert!(is_about(now.busy, 100) && is_about(now.weighted / 3, 100), "{now:?}");
    // Another period starts again, and replaces the first.
    rig.sample(Some(50));
    rig.read(1);
    rig.pass(20);
    assert_eq!(rig.bdev.queue_depth().unwrap().busy, zero, "the old period has no sampler");
    rig.pass(35);
    assert_eq!(rig.bdev.queue_depth().unwrap().depth, 1);
    rig.sample(None);
    rig.pass(200);
    assert_eq!(rig.bdev.queue_depth(), None);
    rig.disk.drain(&mut rig.bench);
    rig.disk.close(&mut rig.bench);
}

#[test]
fn sampling_ends_with_the_disk() {
    let mut rig = Rig::new();
    rig.sample(Some(10));
    rig.pass(30);
    rig.disk.close(&mut rig.bench);
    let weak = Arc::downgrade(&rig.bdev);
    drop(rig.bdev);
    // The registry is dropped already.
    for _ in 0..100 {
        rig.nanos.fetch_add(1000, Ordering::Relaxed);
        rig.bench.turn();
    }
    assert!(weak.upgrade().is_none(), "the sampler keeps the disk alive");
}

#[test]
fn latencies_are_recorded_from_when_that_was_asked_for_by_operation() {
    let mut rig = Rig::new();
    rig.read(5);
    rig.pass(101);
    assert_eq!(rig.recorded(), None);
    let all = Recording { op: None, min_ns: 1000, max_ns: 1_000_000_000 };
    rig.bench.wait("recording", rig.bdev.record_latencies(Some(all)));
    assert_eq!(rig.recorded().unwrap().total(), 0, "what was before does not count");
    rig.read(7);
    rig.disk.write(0, &[0; 512], Shape::Single, &mut rig.bench);
    rig.pass(301);
    let bucket = |h: &Histogram, us: u64| -> u64 {
        h.buckets().filter(|(from, to, _)| (*from..*to).contains(&(us * 1000))).map(|b| b.2).sum()
    };
    let both = rig.recorded().unwrap();
    assert_eq!((both.total(), bucket(&both, 100), bucket(&both, 300)), (8, 7, 1));
    let writes = Recording { op: Some(Op::Write), ..all };
    rig.bench.wait("recording", rig.bdev.record_latencies(Some(writes)));
    rig.read(7);
    rig.disk.write(0, &[0; 512], Shape::Single, &mut rig.bench);
    // A refused request takes no time, and is not counted.
    rig.disk.write(5000, &[0; 512], Shape::Single, &mut rig.bench);
    rig.pass(301);
    let counted = rig.recorded().unwrap();
    assert_eq!((counted.total(), bucket(&counted, 300)), (1, 1));
    let refused = rig.disk.completed().iter().filter(|o| o.status == Status::OutOfRange).count();
    assert_eq!(refused, 1);
    // Clearing statistics does not affect it.
    rig.bench.wait("clearing", rig.bdev.clear_stats(aryk_bdev::Clear::All));
    assert_eq!(rig.recorded().unwrap().total(), 0);
    rig.disk.write(0, &[0; 512], Shape::Single, &mut rig.bench);
    rig.pass(301);
    assert_eq!(rig.recorded().unwrap().total(), 1);
    rig.bench.wait("no recording", rig.bdev.record_latencies(None));
    assert_eq!(rig.recorded(), None);
    rig.disk.drain(&mut rig.bench);
    rig.disk.close(&mut rig.bench);
}
