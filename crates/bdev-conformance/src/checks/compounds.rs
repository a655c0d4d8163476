//! Compare, compare-and-write and copy, on one channel.

use crate::probe::unshared;
use crate::{Bench, Fixture, Opener, Probe, Shape, contents};
use aryk_bdev::{Access, Blocks, Identity, Limits, Op, Registry, Status};
use std::sync::Arc;

/// The largest request of these checks, in bytes: several of the block layer's chunks.
const BYTES_MAX: u32 = 256 * 1024;

/// A disk that is open behind narrow limits or its own.
struct Rig {
    bench: Bench,
    disk: Opener,
    block_size: u32,
    has_data: bool,
}

impl Rig {
    /// Runs `check` behind each of some limits.
    fn each<F: Fixture>(make: &impl Fn() -> F, mut check: impl FnMut(&mut Self)) {
        let fixture = make();
        let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
        let own = Limits { is_shared: false, ..bdev.device().limits() };
        let narrow =
            Limits { depth: 2, transfer_blocks: Blocks(5), segments: 4, boundary_blocks: Blocks(8), ..own };
        // If the device implements them, it gets small compound requests, and the others are split into reads and writes.
        let narrow = Limits {
            compare_blocks: own.compare_blocks.min(Blocks(3)),
            compare_and_write_blocks: own.compare_and_write_blocks.min(Blocks(3)),
            copy_blocks: own.copy_blocks.min(Blocks(3)),
            ..narrow
        };
        for limits in [own, narrow] {
            let probe = Probe::new(Arc::clone(bdev.device()), limits, bdev.device().ops());
            let registry = Registry::new();
            registry.register(Identity::named("probe"), Arc::new(probe)).expect("it is the only one");
            let mut bench = Bench::new();
            let disk = bench.open(&registry, "probe", Access::Exclusive, 8, BYTES_MAX);
            let block_size = bdev.geometry().block_size;
            let mut rig = Self { bench, disk, block_size, has_data: fixture.features().data };
            check(&mut rig);
            let Self { mut bench, disk, .. } = rig;
            disk.close(&mut bench);
        }
    }

    fn blocks_max(&self) -> u64 {
        u64::from(BYTES_MAX / self.block_size)
    }

    fn write(&mut self, lba: u64, data: &[u8]) {
        self.disk.write(lba, data, Shape::Single, &mut self.bench);
        assert_eq!(self.disk.finish(&mut self.bench).status, Status::Ok);
    }

    fn read(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        self.disk.read(lba, blocks, Shape::Single, &mut self.bench);
        let outcome = self.disk.finish(&mut self.bench);
        assert_eq!(outcome.status, Status::Ok);
        outcome.data
    }

    fn with_data(&mut self, op: Op, lba: u64, blocks: u64, shape: Shape, data: &[u8]) -> Status {
        self.disk.with_data(op, lba, blocks, shape, data, &mut self.bench);
        let outcome = self.disk.finish(&mut self.bench);
        assert_eq!(outcome.data, data, "{op:?} changed its submitter's memory");
        outcome.status
    }

    /// Checks a status: where the disk stores no data, an operation that compares may miscompare.
    fn expect(&self, got: Status, expected: Status) {
        let may_differ = !self.has_data && [Status::Ok, Status::Miscompare].contains(&got);
        assert!(got == expected || may_differ, "{got:?}, not {expected:?}");
    }
}

/// Compares accept equal data, and find every differing byte, with memory of each shape and of many chunks.
///
/// # Panics
/// If the disk fails the check.
pub fn compares<F: Fixture>(make: &impl Fn() -> F) {
    Rig::each(make, |rig| {
        for (seed, blocks) in [(1, 1), (2, 7), (3, rig.blocks_max())] {
            let lba = 3 * seed;
            let data = contents(seed, lba, blocks, rig.block_size);
            rig.write(lba, &data);
            for shape in [Shape::Single, Shape::Odd, Shape::Halves] {
                let same = rig.with_data(Op::Compare, lba, blocks, shape, &data);
                rig.expect(same, Status::Ok);
                for wrong in [0, data.len() / 2, data.len() - 1] {
                    let mut other = data.clone();
                    other[wrong] ^= 0x10;
                    let differs = rig.with_data(Op::Compare, lba, blocks, shape, &other);
                    rig.expect(differs, Status::Miscompare);
                }
            }
            assert!(!rig.has_data || rig.read(lba, blocks) == data, "a compare changes nothing");
        }
    });
}

/// Compare-and-writes write if and only if all data was equal, also several at one time; invalid ones are refused. Disks that
/// other hosts may change refuse those that they do not do themselves.
///
/// # Panics
/// If the disk fails the check.
pub fn compare_and_write<F: Fixture>(make: &impl Fn() -> F) {
    Rig::each(make, |rig| {
        let size = rig.block_size;
        for (seed, blocks) in [(1, 1), (2, 9), (3, rig.blocks_max() / 2)] {
            let lba = 5 * seed;
            let [old, new] = [seed, seed + 10].map(|seed| contents(seed, lba, blocks, size));
            rig.write(lba, &old);
            let mut wrong = [&old[..], &new[..]].concat();
            wrong[old.len() - 1] ^= 1;
            for shape in [Shape::Odd, Shape::Halves] {
                let status = rig.with_data(Op::CompareAndWrite, lba, blocks, shape, &wrong);
                rig.expect(status, Status::Miscompare);
                assert!(!rig.has_data || rig.read(lba, blocks) == old, "nothing is written");
            }
            let right = [&old[..], &new[..]].concat();
            let status = rig.with_data(Op::CompareAndWrite, lba, blocks, Shape::Odd, &right);
            rig.expect(status, Status::Ok);
            assert!(!rig.has_data || rig.read(lba, blocks) == new, "all is written");
            assert!(!rig.has_data || rig.read(lba - 1, 1) != rig.read(lba, 1));
        }
        // Of several at one time that expect the same data, one succeeds.
        let (old, new) = (contents(1, 40, 2, size), contents(2, 40, 2, size));
        rig.write(40, &old);
        for _ in 0..8 {
            let data = [&old[..], &new[..]].concat();
            rig.disk.with_data(Op::CompareAndWrite, 40, 2, Shape::Single, &data, &mut rig.bench);
        }
        let outcomes = rig.disk.drain(&mut rig.bench);
        let done = outcomes.iter().filter(|o| o.status == Status::Ok).count();
        assert!(!rig.has_data || done == 1, "{done} of 8 succeeded");
        let block = vec![1; size as usize];
        assert_eq!(rig.with_data(Op::CompareAndWrite, 0, 1, Shape::Single, &block), Status::Invalid);
        assert_eq!(rig.with_data(Op::Compare, 0, 2, Shape::Single, &block), Status::Invalid);
        assert_eq!(rig.with_data(Op::Compare, u64::MAX, 1, Shape::Single, &block), Status::OutOfRange);
    });
    refused_if_shared(&make());
}

fn refused_if_shared(fixture: &impl Fixture) {
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let (limits, ops) = (bdev.device().limits(), bdev.device().ops());
    let most = limits.compare_and_write_max(ops).0;
    if !limits.is_shared || most >= 8 {
        return;
    }
    let block_size = bdev.geometry().block_size;
    let mut bench = Bench::new();
    let mut disk = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 8, 16 * block_size);
    let data = vec![0; 2 * (most as usize + 1) * block_size as usize];
    disk.with_data(Op::CompareAndWrite, 0, most + 1, Shape::Single, &data, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Unsupported);
    if !ops.contains(Op::Copy) {
        disk.copy(0, 8, 1, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Unsupported);
    }
    disk.close(&mut bench);
}

/// Copies of few blocks and many, to places before, after and overlapping their source.
///
/// # Panics
/// If the disk fails the check.
pub fn copies<F: Fixture>(make: &impl Fn() -> F) {
    Rig::each(make, |rig| {
        let size = rig.block_size;
        let many = rig.blocks_max() / 2;
        let cases = [(0, 8, 3), (9, 2, 1), (10, 13, 7), (13, 10, 7), (4, 4, 9), (1, 2, many), (2, 1, many)];
        for (seed, (source, lba, blocks)) in (1..).zip(cases) {
            let area = source.max(lba) + blocks + 1;
            let mut expected = contents(seed, 0, area, size);
            rig.write(0, &expected);
            rig.disk.copy(source, lba, blocks, &mut rig.bench);
            assert_eq!(rig.disk.finish(&mut rig.bench).status, Status::Ok);
            let at = |lba: u64| (lba * u64::from(size)) as usize;
            expected.copy_within(at(source)..at(source + blocks), at(lba));
            let is_right = rig.read(0, area) == expected;
            assert!(!rig.has_data || is_right, "{blocks} blocks from {source} to {lba}");
        }
        for (source, lba) in [(u64::MAX, 0), (0, u64::MAX), (u64::MAX / 2, 0)] {
            rig.disk.copy(source, lba, 2, &mut rig.bench);
            assert_eq!(rig.disk.finish(&mut rig.bench).status, Status::OutOfRange);
        }
        rig.disk.copy(0, 1, 0, &mut rig.bench);
        assert_eq!(rig.disk.finish(&mut rig.bench).status, Status::Invalid);
    });
}

/// Many requests of all kinds in flight over the same blocks, some aborted, with resets and closing in between: each
/// completes once, and the disk works afterwards.
///
/// # Panics
/// If the disk fails the check.
pub fn compounds_under_aborts_and_resets<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let unshared = unshared(&fixture);
    let (registry, name) = unshared
        .as_ref()
        .map_or_else(|| (fixture.registry(), fixture.name()), |registry| (registry, "probe"));
    let bdev = registry.find(name).expect("it is registered");
    let block_size = bdev.geometry().block_size;
    for round in 0..6 {
        let mut bench = Bench::new();
        let mut disk = bench.open(registry, name, Access::Exclusive, 64, 16 * block_size);
        for i in 0..16 {
            let data = contents(i, i, 8, block_size);
            disk.with_data(Op::CompareAndWrite, i, 4, Shape::Odd, &data, &mut bench);
            disk.write(i + 2, &data, Shape::Single, &mut bench);
            disk.with_data(Op::Compare, i, 8, Shape::Halves, &data, &mut bench);
            disk.copy(i, 20 - i, 8, &mut bench);
        }
        for _ in 0..3 * round {
            bench.turn();
        }
        match round % 3 {
            0 => (0..64).step_by(3).for_each(|id| disk.abort(id, &mut bench)),
            1 => disk.abort_all(&mut bench),
            _ => assert!(bench.wait("a reset", bdev.reset())),
        }
        let outcomes = disk.drain(&mut bench);
        assert_eq!(outcomes.len(), 64);
        for outcome in outcomes {
            assert!([Status::Ok, Status::Aborted, Status::Miscompare].contains(&outcome.status));
        }
        // No request that was held off or waited has left anything behind.
        let data = contents(round, 4, 8, block_size);
        disk.write(4, &data, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.copy(4, 40, 8, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.with_data(Op::Compare, 40, 8, Shape::Odd, &data, &mut bench);
        let status = disk.finish(&mut bench).status;
        assert!(!fixture.features().data || status == Status::Ok, "{status:?} in round {round}");
        disk.close(&mut bench);
        let stats = bench.wait("statistics", bdev.stats());
        assert_eq!((stats.in_flight, stats.waiting), (0, 0));
        if round == 5 {
            let copies = stats.op(Op::Copy);
            assert!(copies.ops >= 6 && copies.ops + copies.errors == 6 * 17);
            assert_eq!(copies.bytes, Blocks(copies.ops * 8).to_bytes(block_size));
        }
    }
}
