//! Limits of disks and groups, in virtual time.

use aryk_bdev::{Access, Bdev, Blocks, Env, Error, Event, Identity, Op, QosGroups, RateLimits, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape};
use aryk_reactor::{Clock, Nanos};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Rig {
    env: Env,
    groups: QosGroups,
    nanos: Arc<AtomicU64>,
    bench: Bench,
    disks: Vec<Opener>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

impl Rig {
    fn new(disks: usize) -> Self {
        let env = Env::default();
        let nanos = Arc::new(AtomicU64::new(1_000_000_000));
        let mut bench = Bench::at(Clock::Virtual(Arc::clone(&nanos)));
        let open = |name: &&str| {
            let malloc = aryk_bdev_malloc::Config {
                identity: Identity::named(*name),
                block_size: 512,
                physical_block_size: 512,
                blocks: Blocks(1024),
                optimal_io_blocks: Blocks::ZERO,
            };
            aryk_bdev_malloc::create(&env, malloc).expect("it can be made");
            bench.open(env.registry(), name, Access::Exclusive, 400, 4096)
        };
        let disks = NAMES[..disks].iter().map(open).collect();
        Self { env, groups: QosGroups::new(), nanos, bench, disks }
    }

    fn bdev(&self, disk: usize) -> Arc<Bdev> {
        self.env.registry().find(NAMES[disk]).expect("it is there")
    }

    fn now(&self) -> Nanos {
        Nanos(self.nanos.load(Ordering::Relaxed))
    }

    fn limit(&mut self, disk: usize, limits: RateLimits) {
        let (bdev, now) = (self.bdev(disk), self.now());
        self.bench.wait("limits", bdev.set_qos_limits(limits, now)).expect("they can be set");
        self.turns();
    }

    fn limit_group(&mut self, name: &str, limits: RateLimits) {
        let set = self.groups.set_limits(self.env.registry(), name, limits, self.now());
        self.bench.wait("limits", set).expect("they can be set");
        self.turns();
    }

    fn add(&mut self, group: &str, disk: usize) {
        let add = self.groups.add(self.env.registry(), group, NAMES[disk]);
        self.bench.wait("membership", add).expect("it can be added");
        self.turns();
    }

    fn turns(&mut self) {
        for _ in 0..30 {
            self.bench.turn();
        }
    }

    /// Moves the clock, in steps like a reactor's readings of it.
    fn pass(&mut self, ms: u64) {
        for _ in 0..ms * 10 {
            self.nanos.fetch_add(100_000, Ordering::Relaxed);
            for _ in 0..4 {
                self.bench.turn();
            }
        }
        self.turns();
    }

    /// The statuses of a disk's completed requests.
    fn completed(&mut self, disk: usize) -> Vec<Status> {
        self.disks[disk].completed().into_iter().map(|o| o.status).collect()
    }

    fn count(&mut self, disk: usize) -> usize {
        let completed = self.completed(disk);
        assert!(completed.iter().all(|s| s.is_ok()), "{completed:?}");
        completed.len()
    }

    fn read(&mut self, disk: usize, count: u64) {
        for lba in 0..count {
            self.disks[disk].read(lba, 1, Shape::Single, &mut self.bench);
        }
        self.turns();
    }

    fn end(mut self) {
        for disk in &mut self.disks {
            disk.abort_all(&mut self.bench);
            disk.drain(&mut self.bench);
        }
        for disk in self.disks {
            disk.close(&mut self.bench);
        }
    }
}

fn ios(ios: u64) -> RateLimits {
    RateLimits { ios, ..RateLimits::default() }
}

#[test]
fn a_limit_holds_and_is_changed_at_once() {
    let mut rig = Rig::new(1);
    rig.limit(0, ios(1000));
    rig.read(0, 300);
    assert!(rig.count(0) <= 2);
    rig.pass(100);
    let count = rig.count(0);
    assert!((98..=102).contains(&count), "{count}");
    rig.limit(0, ios(10));
    rig.count(0);
    rig.pass(100);
    assert!(rig.count(0) <= 2);
    rig.limit(0, ios(2000));
    rig.pass(50);
    let count = rig.count(0);
    assert!((95..=103).contains(&count), "{count}");
    // Without a limit, all waiting requests go.
    rig.limit(0, RateLimits::default());
    rig.turns();
    rig.count(0);
    assert_eq!(rig.disks[0].in_flight(), 0);
    let stats = rig.bench.wait("statistics", rig.bdev(0).stats());
    assert!(stats.throttled_ios >= 298 && stats.throttled_ns >= 298 * 50_000_000, "{stats:?}");
    assert_eq!(stats.waiting, 0);
    rig.end();
}

#[test]
fn bytes_count_and_a_large_request_is_paid_off() {
    let mut rig = Rig::new(1);
    rig.limit(0, RateLimits { bytes: 409_600, ..RateLimits::default() });
    for _ in 0..3 {
        rig.disks[0].write(0, &[1; 4096], Shape::Single, &mut rig.bench);
    }
    rig.turns();
    assert_eq!(rig.count(0), 1);
    rig.pass(8);
    assert_eq!(rig.count(0), 0);
    rig.pass(2);
    assert_eq!(rig.count(0), 1);
    rig.pass(10);
    assert_eq!(rig.count(0), 1);
    rig.end();
}

#[test]
fn a_limit_of_bytes_counts_what_moves_none() {
    // The charge is the number of bytes for zeroes, and that of a small request for the others.
    for (op, blocks, ms) in [(Op::WriteZeroes, 16, 20), (Op::Unmap, 1000, 10), (Op::Flush, 0, 10)] {
        let mut rig = Rig::new(1);
        rig.limit(0, RateLimits { write_bytes: 409_600, ..RateLimits::default() });
        for _ in 0..3 {
            rig.disks[0].command(op, 0, blocks, &mut rig.bench);
        }
        rig.turns();
        assert_eq!(rig.count(0), 1, "{op:?}");
        for _ in 0..2 {
            rig.pass(ms - 2);
            assert_eq!(rig.count(0), 0, "{op:?} is not paid for yet");
            rig.pass(2);
            assert_eq!(rig.count(0), 1, "{op:?}");
        }
        rig.end();
    }
}

#[test]
fn reads_do_not_wait_behind_writes() {
    let mut rig = Rig::new(1);
    rig.limit(0, RateLimits { write_ios: 10, ..RateLimits::default() });
    for _ in 0..10 {
        rig.disks[0].write(0, &[1; 512], Shape::Single, &mut rig.bench);
    }
    rig.read(0, 100);
    assert_eq!(rig.count(0), 101);
    // The queues are merged; nothing is lost.
    rig.limit(0, ios(100));
    rig.pass(100);
    assert_eq!(rig.count(0), 9);
    rig.end();
}

#[test]
fn compound_requests_wait_too() {
    let mut rig = Rig::new(1);
    rig.limit(0, ios(100));
    rig.disks[0].write(7, &[1; 512], Shape::Single, &mut rig.bench);
    rig.disks[0].copy(7, 9, 1, &mut rig.bench);
    rig.disks[0].write(9, &[2; 512], Shape::Single, &mut rig.bench);
    rig.disks[0].command(Op::Flush, 0, 0, &mut rig.bench);
    rig.turns();
    assert_eq!(rig.count(0), 1);
    for _ in 0..3 {
        rig.pass(10);
        assert_eq!(rig.count(0), 1);
    }
    // A fence does not wait for requests that have not started.
    rig.limit(0, RateLimits { write_bytes: 512, ..RateLimits::default() });
    rig.disks[0].write(7, &[1; 512], Shape::Single, &mut rig.bench);
    rig.disks[0].copy(7, 9, 1, &mut rig.bench);
    rig.disks[0].write(9, &[3; 512], Shape::Single, &mut rig.bench);
    rig.pass(1000);
    assert_eq!(rig.count(0), 2);
    rig.pass(2000);
    assert_eq!(rig.count(0), 1);
    rig.end();
}

#[test]
fn waiting_requests_can_be_aborted_and_block_no_other() {
    let mut rig = Rig::new(2);
    rig.groups.create("g", None).unwrap();
    rig.limit_group("g", ios(100));
    rig.add("g", 0);
    rig.add("g", 1);
    rig.read(0, 10);
    rig.disks[0].copy(0, 9, 1, &mut rig.bench);
    rig.read(1, 10);
    rig.pass(20);
    rig.completed(0);
    rig.completed(1);
    rig.disks[0].abort_all(&mut rig.bench);
    rig.turns();
    let aborted = rig.completed(0);
    assert!(aborted.len() >= 8 && aborted.iter().all(|&s| s == Status::Aborted), "{aborted:?}");
    rig.pass(50);
    let count = rig.count(1);
    assert!((4..=6).contains(&count), "{count}");
    rig.end();
}

#[test]
fn a_reset_passes_over_what_waits() {
    let mut rig = Rig::new(1);
    rig.limit(0, ios(1000));
    rig.read(0, 10);
    let bdev = rig.bdev(0);
    assert!(rig.bench.wait("a reset", bdev.reset()));
    rig.pass(20);
    assert_eq!(rig.count(0), 10);
    rig.end();
}

#[test]
fn waiting_requests_fail_when_their_disk_is_removed() {
    let mut rig = Rig::new(1);
    rig.limit(0, ios(1));
    rig.read(0, 10);
    let env = rig.env.clone();
    let there = Arc::clone(env.registry());
    let removal = std::thread::spawn(move || {
        let mut future = std::pin::pin!(there.remove("a"));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        while future.as_mut().poll(&mut cx).is_pending() {
            std::thread::yield_now();
        }
    });
    let disk = &rig.disks[0];
    rig.bench.until("news", || disk.events() == [Event::Removed]);
    let mut statuses = Vec::new();
    while statuses.len() < 10 {
        rig.turns();
        statuses.extend(rig.completed(0));
    }
    let removed = statuses.iter().filter(|&&s| s == Status::Removed).count();
    assert!(removed >= 8, "{statuses:?}");
    rig.end();
    removal.join().unwrap();
    assert!(env.registry().find("a").is_err());
}

#[test]
fn a_group_holds_its_disks_together() {
    let mut rig = Rig::new(3);
    rig.groups.create("outer", None).unwrap();
    rig.groups.create("inner", Some("outer")).unwrap();
    rig.limit_group("inner", ios(1000));
    for disk in 0..2 {
        rig.add("inner", disk);
        rig.read(disk, 400);
    }
    rig.read(2, 100);
    assert_eq!(rig.count(2), 100);
    rig.count(0);
    rig.count(1);
    rig.pass(100);
    let (a, b) = (rig.count(0), rig.count(1));
    assert!(a.abs_diff(b) <= 2 && (98..=102).contains(&(a + b)), "{a} {b}");
    // The outer limit applies from now on.
    rig.limit_group("outer", ios(200));
    rig.pass(100);
    let both = rig.count(0) + rig.count(1);
    assert!((19..=23).contains(&both), "{both}");
    // A disk leaves, and has no limit any more.
    let remove = rig.groups.remove(rig.env.registry(), "inner", "a");
    rig.bench.wait("membership", remove).unwrap();
    rig.turns();
    rig.count(0);
    assert_eq!(rig.disks[0].in_flight(), 0);
    rig.end();
}

#[test]
fn groups_that_cannot_be() {
    let mut rig = Rig::new(1);
    let (groups, no_group) = (&rig.groups, |name: &str| Error::NoGroup(name.to_owned()));
    assert_eq!(groups.create("g", Some("g")).unwrap_err(), no_group("g"));
    groups.create("g", None).unwrap();
    assert_eq!(groups.create("g", None).unwrap_err(), Error::GroupExists("g".to_owned()));
    for (name, parent) in [("2", "g"), ("3", "2"), ("4", "3")] {
        groups.create(name, Some(parent)).unwrap();
    }
    assert_eq!(groups.create("5", Some("4")).unwrap_err(), Error::GroupDepth("5".to_owned()));
    let in_use = |by: &str| Error::GroupInUse { group: "g".to_owned(), by: by.to_owned() };
    assert_eq!(groups.delete(rig.env.registry(), "g").unwrap_err(), in_use("group '2'"));
    for name in ["4", "3", "2"] {
        groups.delete(rig.env.registry(), name).unwrap();
    }
    assert_eq!(groups.delete(rig.env.registry(), "2").unwrap_err(), no_group("2"));
    rig.add("g", 0);
    assert_eq!(rig.groups.delete(rig.env.registry(), "g").unwrap_err(), in_use("disk 'a'"));
    rig.groups.create("h", None).unwrap();
    let wrong = rig.groups.remove(rig.env.registry(), "h", "a");
    let not_in = Error::NotInGroup { disk: "a".to_owned(), group: "h".to_owned() };
    assert_eq!(rig.bench.wait("an error", wrong).unwrap_err(), not_in);
    rig.add("h", 0);
    rig.groups.delete(rig.env.registry(), "g").unwrap();
    rig.end();
}

#[test]
fn channels_that_are_opened_again_keep_their_limits_and_their_requests() {
    let mut rig = Rig::new(2);
    rig.bench.wait("a group", async { rig.groups.create("g", None) }).expect("it can be created");
    rig.limit_group("g", ios(1000));
    rig.add("g", 0);
    rig.add("g", 1);
    for disk in 0..2 {
        for _ in 0..100 {
            rig.disks[disk].read(0, 1, Shape::Single, &mut rig.bench);
        }
    }
    let mut counts = [0; 2];
    for round in 0..20 {
        let bdev = rig.bdev(round % 2);
        assert_eq!(rig.bench.wait("other channels", bdev.reopen_channels()), Ok(()));
        rig.pass(20);
        for (disk, count) in counts.iter_mut().enumerate() {
            *count += rig.count(disk);
        }
    }
    assert_eq!(counts, [100; 2], "all have gone, and none twice");
    rig.end();
}
