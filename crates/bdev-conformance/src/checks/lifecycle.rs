//! Opening, claims, aborts, resets, removal, resizing, statistics.

use crate::{Bench, Features, Fixture, Opener, Outcome, Shape, contents};
use aryk_bdev::{Access, Blocks, Deadline, Error, Event, OnDeadline, Op, OpenError, Status};
use std::time::Duration;

/// Number of requests that these checks keep in flight.
const LOAD: u64 = 300;

/// Opens the disk, and puts writes and reads in flight.
fn under_load(fixture: &impl Fixture, bench: &mut Bench) -> Opener {
    let block_size = block_size(fixture);
    let mut disk =
        bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 2 * LOAD as u16, block_size);
    load(&mut disk, block_size, bench);
    disk
}

fn load(disk: &mut Opener, block_size: u32, bench: &mut Bench) {
    for lba in 0..LOAD {
        if lba % 2 == 0 {
            disk.write(lba, &contents(lba + 1, lba, 1, block_size), Shape::Odd, bench);
        } else {
            disk.read(lba, 1, Shape::Single, bench);
        }
    }
}

fn block_size(fixture: &impl Fixture) -> u32 {
    fixture.registry().find(fixture.name()).expect("it is registered").geometry().block_size
}

/// Checks that all requests have succeeded, or failed with `failure`.
fn assert_each(outcomes: &[Outcome], failure: Status) {
    for outcome in outcomes {
        assert!(outcome.status.is_ok() || outcome.status == failure, "{:?}", outcome.status);
    }
}

/// Checks that the disk works: a read returns the written data.
fn assert_works(disk: &mut Opener, fixture: &impl Fixture, bench: &mut Bench) {
    let data = contents(77, 9, 3, block_size(fixture));
    // Three blocks take the memory of three requests of one block.
    disk.with_data(Op::Write, 9, 1, Shape::Single, &data[..data.len() / 3], bench);
    assert_eq!(disk.finish(bench).status, Status::Ok);
    disk.read(9, 1, Shape::Odd, bench);
    let outcome = disk.finish(bench);
    assert_eq!(outcome.status, Status::Ok);
    let Features { data: has_data, .. } = fixture.features();
    assert!(!has_data || outcome.data == data[..data.len() / 3]);
}

/// Aborts of one request, of some that wait, of one that does not exist, and of all: each request completes once, with
/// success or aborted.
///
/// # Panics
/// If the disk fails the check.
pub fn abort_under_load<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = under_load(&fixture, &mut bench);
    for id in [0, 1, LOAD - 1, LOAD / 2, LOAD - 1, 12_345] {
        disk.abort(id, &mut bench);
    }
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len() as u64, LOAD);
    assert_each(&outcomes, Status::Aborted);
    load(&mut disk, block_size(&fixture), &mut bench);
    bench.turn();
    disk.abort_all(&mut bench);
    assert_each(&disk.drain(&mut bench), Status::Aborted);
    assert_works(&mut disk, &fixture, &mut bench);
    disk.close(&mut bench);
}

/// A reset with requests in flight and more to come: each completes once, with success or aborted, and the disk works
/// afterwards.
///
/// # Panics
/// If the disk fails the check.
pub fn reset_under_load<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = under_load(&fixture, &mut bench);
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    for _ in 0..3 {
        let did = bench.wait("a reset", bdev.reset());
        assert!(did, "no other reset is under way");
        let outcomes = disk.drain(&mut bench);
        assert_eq!(outcomes.len() as u64, LOAD);
        assert_each(&outcomes, Status::Aborted);
        load(&mut disk, block_size(&fixture), &mut bench);
    }
    // A reset whose caller drops the future freezes nothing permanently.
    {
        let mut reset = std::pin::pin!(bdev.reset());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = reset.as_mut().poll(&mut context);
    }
    assert_each(&disk.drain(&mut bench), Status::Aborted);
    assert_works(&mut disk, &fixture, &mut bench);
    disk.close(&mut bench);
}

/// A deadline that all requests meet, and one that few meet, set and ended under load: each request completes once, late
/// ones are counted, and the disk works afterwards.
///
/// # Panics
/// If the disk fails the check.
pub fn deadlines<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let ample = Deadline { after: Duration::from_secs(3600), action: OnDeadline::Abort };
    bench.wait("a deadline", bdev.set_deadline(Some(ample)));
    let mut disk = under_load(&fixture, &mut bench);
    assert!(disk.drain(&mut bench).iter().all(|o| o.status.is_ok()));
    for action in [OnDeadline::Report, OnDeadline::Abort, OnDeadline::Reset] {
        load(&mut disk, block_size(&fixture), &mut bench);
        let short = Some(Deadline { after: Duration::from_nanos(1), action });
        bench.wait("a deadline", bdev.set_deadline(short));
        let outcomes = disk.drain(&mut bench);
        assert_eq!(outcomes.len() as u64, LOAD);
        match action {
            OnDeadline::Report => assert!(outcomes.iter().all(|o| o.status.is_ok())),
            OnDeadline::Abort | OnDeadline::Reset => assert_each(&outcomes, Status::Aborted),
        }
        bench.wait("no deadline", bdev.set_deadline(None));
    }
    // A reset that a deadline caused may still be in progress.
    while !bench.wait("a reset", bdev.reset()) {
        bench.turn();
    }
    assert_works(&mut disk, &fixture, &mut bench);
    disk.close(&mut bench);
}

/// Removal with requests in flight: they complete, new ones are refused, the opener is notified, and the disk disappears
/// when it is closed.
///
/// # Panics
/// If the disk fails the check.
pub fn removal_under_load<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = under_load(&fixture, &mut bench);
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let registry = fixture.registry();
    let mut removal = std::pin::pin!(registry.remove(fixture.name()));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(removal.as_mut().poll(&mut context).is_pending(), "it is open");
    assert!(bdev.is_removing());
    assert_eq!(disk.events(), [Event::Removed]);
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len() as u64, LOAD);
    assert!(outcomes.iter().all(|o| o.status.is_ok()), "requests in flight complete");
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Removed);
    let again = registry.open(fixture.name(), Access::Read, "another", |_| ());
    assert!(matches!(again, Err(Error::Busy(_))));
    assert!(removal.as_mut().poll(&mut context).is_pending(), "it is still open");
    disk.close(&mut bench);
    assert_eq!(bench.wait("the removal", removal), Ok(()));
    assert!(matches!(registry.find(fixture.name()), Err(Error::NotFound(_))));
}

/// Removal of a disk whose opener has dropped its descriptor, but has a channel open, waits for the channel.
///
/// # Panics
/// If the disk fails the check.
pub fn removal_waits_for_channels<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = under_load(&fixture, &mut bench);
    disk.drop_descriptor();
    let mut removal = std::pin::pin!(fixture.registry().remove(fixture.name()));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    for _ in 0..100 {
        assert!(removal.as_mut().poll(&mut context).is_pending(), "a channel is open");
        bench.turn();
    }
    assert_eq!(disk.drain(&mut bench).len() as u64, LOAD);
    assert!(removal.as_mut().poll(&mut context).is_pending(), "a channel is open");
    disk.close(&mut bench);
    assert_eq!(bench.wait("the removal", removal), Ok(()));
}

/// One exclusive writer, or several shared ones: claims exclude each other as documented, and end with their openers.
///
/// # Panics
/// If the disk fails the check.
pub fn claims<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let open = |access, owner: &str| fixture.registry().open(fixture.name(), access, owner, |_| ());
    let refused = |access, by: &str| match open(access, "refused") {
        Err(Error::Claimed { owner, .. }) => assert_eq!(owner, by),
        other => panic!("{access:?} gives {other:?}"),
    };
    let exclusive = open(Access::Exclusive, "one").expect("the disk has no other opener");
    refused(Access::Exclusive, "one");
    refused(Access::Shared, "one");
    let reader = open(Access::Read, "reader").expect("readers are always admitted");
    assert!(exclusive.is_writable() && !reader.is_writable());
    drop(exclusive);
    let shared =
        [open(Access::Shared, "two"), open(Access::Shared, "three")].map(|s| s.expect("writers may share"));
    refused(Access::Exclusive, "two");
    drop(shared);
    assert!(open(Access::Exclusive, "four").is_ok());
}

/// A reactor can be prepared repeatedly, also after a cancelled preparation; but not for a disk whose removal has begun.
///
/// # Panics
/// If the disk fails the check.
pub fn preparation<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let reactor = bench.cx().handle().clone();
    let registry = fixture.registry();
    let descriptor = registry
        .open(fixture.name(), Access::Shared, "another", |_| ())
        .expect("the disk has no exclusive opener");
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    // Ready at once or cancelled: later preparations must succeed either way.
    let _ = std::pin::pin!(descriptor.prepare(&reactor)).poll(&mut context);
    for _ in 0..2 {
        bench.wait("the reactor to be prepared", descriptor.prepare(&reactor)).expect("it can be prepared");
    }
    let mut disk = bench.open(registry, fixture.name(), Access::Shared, 1, block_size(&fixture));
    assert_works(&mut disk, &fixture, &mut bench);
    disk.close(&mut bench);
    let mut removal = std::pin::pin!(registry.remove(fixture.name()));
    assert!(removal.as_mut().poll(&mut context).is_pending(), "it is open");
    let late = bench.wait("the reactor to be prepared", descriptor.prepare(&reactor));
    assert_eq!(late, Err(OpenError::Removed));
    drop(descriptor);
    assert_eq!(bench.wait("the removal", removal), Ok(()));
}

/// An opener with read access cannot change the disk.
///
/// # Panics
/// If the disk fails the check.
pub fn read_only_opening<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let block_size = block_size(&fixture);
    let mut writer = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 1, block_size);
    let data = contents(5, 2, 1, block_size);
    writer.write(2, &data, Shape::Single, &mut bench);
    assert_eq!(writer.finish(&mut bench).status, Status::Ok);
    let mut reader = bench.open(fixture.registry(), fixture.name(), Access::Read, 1, block_size);
    reader.with_data(Op::Write, 2, 1, Shape::Single, &vec![0; block_size as usize], &mut bench);
    assert_eq!(reader.finish(&mut bench).status, Status::ReadOnly);
    for op in [Op::Unmap, Op::WriteZeroes] {
        reader.command(op, 2, 1, &mut bench);
        assert_eq!(reader.finish(&mut bench).status, Status::ReadOnly);
    }
    reader.read(2, 1, Shape::Single, &mut bench);
    let outcome = reader.finish(&mut bench);
    assert_eq!(outcome.status, Status::Ok);
    assert!(!fixture.features().data || outcome.data == data);
    reader.close(&mut bench);
    writer.close(&mut bench);
}

/// If the store can be resized: openers are notified, and the new bounds apply.
///
/// # Panics
/// If the disk fails the check.
pub fn resizing<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let mut bench = Bench::new();
    let block_size = block_size(&fixture);
    let mut disk = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 1, block_size);
    let old = bdev.blocks();
    let mut told = Vec::new();
    for (blocks, then) in [(old + Blocks(64), Status::Ok), (old, Status::OutOfRange)] {
        if !fixture.resize(blocks) {
            break;
        }
        told.push(Event::Resized { blocks });
        assert_eq!((bdev.blocks(), bdev.geometry().blocks), (blocks, blocks));
        disk.read(old.0, 1, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, then);
    }
    assert_eq!(disk.events(), told);
    disk.close(&mut bench);
}

/// If the store can be resized: it can be resized with requests in flight, and in the FIFO, on the remaining blocks: all
/// of them succeed, new blocks can be used at once, and requests to removed blocks are refused.
///
/// # Panics
/// If the disk fails the check.
pub fn resizing_under_load<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let mut bench = Bench::new();
    let mut disk = under_load(&fixture, &mut bench);
    let (old, block_size) = (bdev.blocks(), block_size(&fixture));
    for round in 0..4 {
        if !fixture.resize(old + Blocks(64)) {
            break;
        }
        let data = contents(round + 1, old.0 + 63, 1, block_size);
        let new = disk.write(old.0 + 63, &data, Shape::Odd, &mut bench);
        let outcomes = disk.drain(&mut bench);
        assert!(outcomes.iter().all(|o| o.status.is_ok()));
        assert!(outcomes.iter().any(|o| o.id == new));
        load(&mut disk, block_size, &mut bench);
        if bdev.device().limits().is_shared {
            disk.write(2 * LOAD, &data, Shape::Odd, &mut bench);
        } else {
            disk.copy(old.0 + 63, 2 * LOAD, 1, &mut bench);
        }
        assert!(disk.drain(&mut bench).iter().all(|o| o.status.is_ok()));
        load(&mut disk, block_size, &mut bench);
        assert!(fixture.resize(old));
        let gone = disk.read(old.0, 1, Shape::Single, &mut bench);
        for outcome in disk.drain(&mut bench) {
            let expected = if outcome.id == gone { Status::OutOfRange } else { Status::Ok };
            assert_eq!(outcome.status, expected);
        }
        disk.read(2 * LOAD, 1, Shape::Single, &mut bench);
        assert!(disk.finish(&mut bench).data == data || !fixture.features().data);
        load(&mut disk, block_size, &mut bench);
    }
    disk.drain(&mut bench);
    disk.close(&mut bench);
}

/// Counts of operations, bytes, failures and latencies are right, over two channels, and stay when the channels are
/// closed.
///
/// # Panics
/// If the disk fails the check.
pub fn statistics_add_up<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let mut bench = Bench::new();
    let block_size = block_size(&fixture);
    for round in 1..=2 {
        let mut a = bench.open(fixture.registry(), fixture.name(), Access::Shared, 40, block_size);
        let mut b = bench.open(fixture.registry(), fixture.name(), Access::Shared, 40, block_size);
        for i in 0..20 {
            a.write(i, &contents(1, i, 1, block_size), Shape::Single, &mut bench);
            b.read(i, 1, Shape::Single, &mut bench);
            b.read(u64::MAX, 1, Shape::Single, &mut bench);
        }
        a.drain(&mut bench);
        b.drain(&mut bench);
        for closed in [false, true] {
            let stats = bench.wait("statistics", bdev.stats());
            let (reads, writes) = (stats.op(Op::Read), stats.op(Op::Write));
            let bytes = Blocks(20 * round).to_bytes(block_size);
            assert_eq!((writes.ops, writes.bytes, writes.errors), (20 * round, bytes, 0), "closed: {closed}");
            assert_eq!((reads.ops, reads.bytes, reads.errors), (20 * round, bytes, 20 * round));
            assert_eq!((reads.latencies.total(), writes.latencies.total()), (20 * round, 20 * round));
            assert!(writes.latency_ns >= writes.latency_ns_max);
            assert!(writes.latency_ns_min().is_some_and(|min| min <= writes.latency_ns_max));
            assert_eq!((stats.in_flight, stats.waiting), (0, 0));
            if !closed {
                (a, b) = reopen(a, b, &fixture, &mut bench);
            }
        }
        a.close(&mut bench);
        b.close(&mut bench);
    }
    bench.wait("clearing", bdev.clear_stats(aryk_bdev::Clear::All));
    assert_eq!(bench.wait("statistics", bdev.stats()), aryk_bdev::Stats::default());
}

fn reopen(a: Opener, b: Opener, fixture: &impl Fixture, bench: &mut Bench) -> (Opener, Opener) {
    a.close(bench);
    b.close(bench);
    let mut open = || bench.open(fixture.registry(), fixture.name(), Access::Shared, 40, block_size(fixture));
    (open(), open())
}
