//! Single requests.

use crate::{Bench, Features, Fixture, Opener, Shape, contents};
use aryk_bdev::{Access, Blocks, Op, Status};

/// The largest request of this check, in bytes.
const BYTES_MAX: u32 = 256 * 1024;

/// Each operation, from the first block to the last, of one block and of many, aligned and not, with memory of each
/// shape.
///
/// # Panics
/// If the disk fails the check.
pub fn every_operation_at_every_alignment<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 2, BYTES_MAX);
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let (geometry, ops) = (bdev.geometry(), bdev.device().ops());
    let most = u64::from(BYTES_MAX / geometry.block_size);
    let mut seed = 0;
    for blocks in [1, 2, 3, 7, 8, 9, 31, 64, most] {
        let last = geometry.blocks.0.checked_sub(blocks).expect("the disk is large enough");
        for lba in [0, 1, 5, 8, last / 2, last - 1, last] {
            for shape in Shape::ALL {
                seed += 1;
                let mut at =
                    At { disk: &mut disk, bench: &mut bench, lba, blocks, block_size: geometry.block_size };
                at.check(shape, seed, fixture.features());
                if ops.contains(Op::Unmap) && shape == Shape::Odd {
                    at.cleared(Op::Unmap, seed, fixture.features());
                }
                if shape == Shape::Halves {
                    at.cleared(Op::WriteZeroes, seed, Features { unmap_zeroes: true, ..fixture.features() });
                }
            }
        }
    }
    disk.close(&mut bench);
}

/// Reads, writes and write-zeroes that are durable when they complete. A front-end whose guest has no flush sends reads so, too.
///
/// # Panics
/// If the disk fails the check.
pub fn durable_requests<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 2, BYTES_MAX);
    let block_size = fixture.registry().find(fixture.name()).expect("it is registered").geometry().block_size;
    disk.set_fua(true);
    for (seed, (lba, blocks)) in (1..).zip([(0, 1), (5, 2), (8, 8), (3, u64::from(BYTES_MAX / block_size))]) {
        let data = contents(seed, lba, blocks, block_size);
        let mut at = At { disk: &mut disk, bench: &mut bench, lba, blocks, block_size };
        at.disk.write(lba, &data, Shape::Odd, at.bench);
        assert_eq!(at.disk.finish(at.bench).status, Status::Ok, "durable write of {blocks} blocks at {lba}");
        at.reads(Shape::Single, &data, fixture.features());
        at.cleared(Op::WriteZeroes, seed, Features { unmap_zeroes: true, ..fixture.features() });
    }
    disk.close(&mut bench);
}

/// Some blocks of a disk.
struct At<'a> {
    disk: &'a mut Opener,
    bench: &'a mut Bench,
    lba: u64,
    blocks: u64,
    block_size: u32,
}

impl At<'_> {
    fn check(&mut self, shape: Shape, seed: u64, features: Features) {
        let data = contents(seed, self.lba, self.blocks, self.block_size);
        self.disk.write(self.lba, &data, shape, self.bench);
        assert_eq!(self.disk.finish(self.bench).status, Status::Ok, "write {shape:?} {seed}");
        self.disk.command(Op::Flush, 0, 0, self.bench);
        assert_eq!(self.disk.finish(self.bench).status, Status::Ok, "flush");
        // With another shape than the write's.
        let other = Shape::ALL[seed as usize % Shape::ALL.len()];
        for shape in [shape, other] {
            self.reads(shape, &data, features);
        }
    }

    fn reads(&mut self, shape: Shape, expected: &[u8], features: Features) {
        self.disk.read(self.lba, self.blocks, shape, self.bench);
        let outcome = self.disk.finish(self.bench);
        let what = format!("{} blocks at {} as {shape:?}", self.blocks, self.lba);
        assert_eq!(outcome.status, Status::Ok, "read of {what}");
        assert!(!features.data || outcome.data == expected, "read of {what} gives other data");
    }

    fn cleared(&mut self, op: Op, seed: u64, features: Features) {
        self.disk.command(op, self.lba, self.blocks, self.bench);
        assert_eq!(self.disk.finish(self.bench).status, Status::Ok, "{op:?} {seed}");
        if features.unmap_zeroes {
            self.reads(Shape::Single, &contents(0, self.lba, self.blocks, self.block_size), features);
        }
    }
}

/// Requests beyond the disk's end, without blocks, with data of the wrong length, or for an operation that the disk
/// lacks.
///
/// # Panics
/// If the disk fails the check.
pub fn bounds_and_bad_requests<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let mut bench = Bench::new();
    let mut disk = bench.open(fixture.registry(), fixture.name(), Access::Exclusive, 2, BYTES_MAX);
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let (geometry, ops) = (bdev.geometry(), bdev.device().ops());
    let Blocks(end) = geometry.blocks;
    let block = vec![1; geometry.block_size as usize];
    let outside = [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2), (u64::MAX / 2, 1), (1, end)];
    let mut expect = |status, submit: &mut dyn FnMut(&mut Opener, &mut Bench) -> u64| {
        submit(&mut disk, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, status);
    };
    for (lba, blocks) in outside {
        for op in [Op::Unmap, Op::WriteZeroes].into_iter().filter(|&op| op != Op::Unmap || ops.contains(op)) {
            expect(Status::OutOfRange, &mut |disk, bench| disk.command(op, lba, blocks, bench));
        }
        for op in [Op::Read, Op::Write].into_iter().filter(|_| blocks < 3) {
            let data = block.repeat(blocks as usize);
            expect(Status::OutOfRange, &mut |disk, bench| {
                disk.with_data(op, lba, blocks, Shape::Single, &data, bench)
            });
        }
    }
    for (lba, blocks) in [(0, u64::MAX), (1, u64::MAX)] {
        expect(Status::OutOfRange, &mut |disk, bench| disk.command(Op::WriteZeroes, lba, blocks, bench));
    }
    for op in [Op::Read, Op::Write, Op::WriteZeroes] {
        expect(Status::Invalid, &mut |disk, bench| disk.command(op, 0, 0, bench));
    }
    for op in [Op::Read, Op::Write, Op::WriteZeroes] {
        let wrong = if op.has_data() { 2 } else { 1 };
        expect(Status::Invalid, &mut |disk, bench| disk.with_data(op, 0, wrong, Shape::Odd, &block, bench));
    }
    expect(Status::Invalid, &mut |disk, bench| disk.command(Op::Flush, 0, 1, bench));
    for op in
        Op::ALL.into_iter().filter(|&op| !ops.contains(op) && op != Op::WriteZeroes && !op.is_compound())
    {
        expect(Status::Unsupported, &mut |disk, bench| disk.command(op, 0, 1, bench));
    }
    expect(Status::Ok, &mut |disk, bench| disk.write(end - 1, &block, Shape::Single, bench));
    disk.close(&mut bench);
}
