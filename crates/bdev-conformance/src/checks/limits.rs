//! Depth and splitting.

use crate::{Bench, Fixture, Log, Opener, Probe, Shape, contents};
use aryk_bdev::{Access, Bdev, Blocks, Identity, Lba, Limits, Op, OpSet, Registry, Status};
use std::sync::{Arc, Mutex};

/// Four times as many requests in flight as the device accepts: all complete, and the device never has more than its
/// depth. A store that completes requests while others are submitted may have fewer than its depth at all times.
///
/// # Panics
/// If the disk fails the check.
pub fn more_in_flight_than_the_depth<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let depth = bdev.device().limits().depth.min(256);
    let limits = Limits { depth, ..bdev.device().limits() };
    let (registry, log) = probed(&bdev, limits, bdev.device().ops());
    let mut bench = Bench::new();
    let requests = (4 * depth) as u16;
    let block_size = bdev.geometry().block_size;
    let mut disk = bench.open(&registry, "probe", Access::Exclusive, requests, block_size);
    for round in 0..2 {
        let mut lbas = std::collections::HashMap::new();
        for i in 0..u64::from(requests) {
            let lba = i % bdev.blocks().0;
            let id = if round == 0 {
                disk.write(
                    lba,
                    &contents(i / bdev.blocks().0 + 1, lba, 1, block_size),
                    Shape::Odd,
                    &mut bench,
                )
            } else {
                disk.read(lba, 1, Shape::Single, &mut bench)
            };
            lbas.insert(id, lba);
        }
        let outcomes = disk.drain(&mut bench);
        assert_eq!(outcomes.len(), usize::from(requests));
        for outcome in &outcomes {
            assert_eq!(outcome.status, Status::Ok);
            let lba = lbas[&outcome.id];
            let is_written = outcome.data == contents(1, lba, 1, block_size);
            assert!(round == 0 || !fixture.features().data || is_written, "block {lba} holds other data");
        }
    }
    disk.close(&mut bench);
    let log = log.lock().expect("no one panics holding it");
    assert_eq!(log.seen.len(), 2 * usize::from(requests));
    let most = log.in_flight_max;
    assert!(most <= depth && most > depth / 2, "{most} requests in flight, at a depth of {depth}");
}

/// The device in a registry of its own, behind other limits.
fn probed(bdev: &Arc<Bdev>, limits: Limits, ops: OpSet) -> (Registry, Arc<Mutex<Log>>) {
    let probe = Probe::new(Arc::clone(bdev.device()), limits, ops);
    let log = probe.log();
    let registry = Registry::new();
    registry.register(Identity::named("probe"), Arc::new(probe)).expect("it is the only one");
    (registry, log)
}

/// The device behind each limit, narrow and alone, and behind all at once: requests are split as the limits require,
/// cover each block once, and carry the right data.
///
/// # Panics
/// If the disk fails the check.
pub fn tight_limits<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let own = bdev.device().limits();
    let all = Limits {
        depth: 2,
        transfer_blocks: Blocks(5),
        segments: 4,
        unmap_blocks: Blocks(7),
        write_zeroes_blocks: Blocks(3),
        boundary_blocks: Blocks(8),
        ..own
    };
    let each = [
        Limits { depth: 1, ..own },
        Limits { transfer_blocks: Blocks(3), ..own },
        Limits { segments: 3, ..own },
        Limits { unmap_blocks: Blocks(7), ..own },
        Limits { write_zeroes_blocks: Blocks(9), ..own },
        Limits { boundary_blocks: Blocks(4), ..own },
        all,
    ];
    for limits in each {
        for ops in [bdev.device().ops(), bdev.device().ops().without(Op::WriteZeroes)] {
            split(&bdev, limits, ops, &fixture);
        }
    }
}

/// Blocks of each request of this check.
const BLOCKS: u64 = 61;

fn split(bdev: &Arc<Bdev>, limits: Limits, ops: OpSet, fixture: &impl Fixture) {
    let (registry, log) = probed(bdev, limits, ops);
    let block_size = bdev.geometry().block_size;
    let mut bench = Bench::new();
    let mut disk = bench.open(&registry, "probe", Access::Exclusive, 4, BLOCKS as u32 * block_size);
    let has_data = fixture.features().data;
    let unmap_zeroes = fixture.features().unmap_zeroes;
    for (lba, shape) in [(0, Shape::Single), (3, Shape::Odd), (9, Shape::Halves), (2, Shape::Crossing)] {
        let mut run = |what: &str, submit: &mut dyn FnMut(&mut Opener, &mut Bench) -> u64| {
            log.lock().expect("no one panics holding it").seen.clear();
            submit(&mut disk, &mut bench);
            let outcome = disk.finish(&mut bench);
            assert_eq!(outcome.status, Status::Ok, "{what} at {lba} behind {limits:?}");
            covers(&log.lock().expect("no one panics holding it"), lba);
            outcome.data
        };
        let data = contents(lba + 1, lba, BLOCKS, block_size);
        run("write", &mut |disk, bench| disk.write(lba, &data, shape, bench));
        let read = run("read", &mut |disk, bench| disk.read(lba, BLOCKS, shape, bench));
        assert!(!has_data || read == data, "other data at {lba} behind {limits:?}");
        for (op, zeroes) in [(Op::Unmap, unmap_zeroes), (Op::WriteZeroes, true)] {
            if op == Op::Unmap && !ops.contains(op) {
                continue;
            }
            run(op.name(), &mut |disk, bench| disk.command(op, lba, BLOCKS, bench));
            let read = run("read", &mut |disk, bench| disk.read(lba, BLOCKS, shape, bench));
            let is_zero = read.iter().all(|&b| b == 0);
            assert!(!has_data || !zeroes || is_zero, "{op:?} leaves data at {lba} behind {limits:?}");
        }
    }
    disk.close(&mut bench);
}

/// Checks that the pieces of a request are contiguous.
fn covers(log: &Log, lba: u64) {
    let mut at = Lba(lba);
    for seen in &log.seen {
        assert_eq!(seen.lba, at, "{:?}", log.seen);
        at += seen.blocks;
    }
    assert_eq!(at, Lba(lba + BLOCKS), "{:?}", log.seen);
}
