//! Random sequences of requests, aborts and resets, compared with a model.

use crate::model::Model;
use crate::{Bench, Features, Fixture, Opener, Outcome, Probe, Shape, contents, fill};
use aryk_bdev::{Access, Bdev, Blocks, Identity, Limits, Op, Registry, Status};
use proptest::prelude::{BoxedStrategy, Strategy, any, prop_oneof};
use proptest::sample::select;
use proptest::test_runner::{Config, TestError, TestRunner};
use std::collections::HashMap;
use std::sync::Arc;

/// Number of blocks that this check uses, and of the largest request.
const AREA: u64 = 96;
const BLOCKS_MAX: u64 = 40;

#[derive(Clone, Debug)]
enum Step {
    Request {
        op: Op,
        lba: u64,
        blocks: u64,
        shape: Shape,
    },
    /// Aborts the request that was submitted this many requests before the last.
    Abort {
        back: u64,
    },
    Turn,
    Drain,
    Reset,
    Reopen,
}

fn step() -> BoxedStrategy<Step> {
    let shapes = select(vec![Shape::Single, Shape::Odd, Shape::Halves, Shape::Crossing]);
    let ops = select(vec![
        Op::Read,
        Op::Read,
        Op::Write,
        Op::Write,
        Op::Write,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Flush,
    ]);
    let request = (ops, 0..AREA, 1..=BLOCKS_MAX, shapes).prop_map(|(op, lba, blocks, shape)| {
        let blocks = blocks.min(AREA - lba);
        Step::Request { op, lba, blocks, shape }
    });
    prop_oneof![
        24 => request,
        2 => (0..6u64).prop_map(|back| Step::Abort { back }),
        4 => any::<bool>().prop_map(|_| Step::Turn),
        2 => any::<bool>().prop_map(|_| Step::Drain),
        1 => any::<bool>().prop_map(|_| Step::Reset),
        1 => any::<bool>().prop_map(|_| Step::Reopen),
    ]
    .boxed()
}

/// Limits of the run: the device's own, or narrow ones.
fn limits(own: Limits) -> BoxedStrategy<Limits> {
    let narrow = (1..5u32, 1..9u64, 3..6u32, 1..9u64, 1..9u64, 0..9u64);
    let narrow = narrow.prop_map(move |(depth, transfer, segments, unmap, write_zeroes, boundary)| Limits {
        depth,
        transfer_blocks: Blocks(transfer),
        segments,
        unmap_blocks: Blocks(unmap),
        write_zeroes_blocks: Blocks(write_zeroes),
        boundary_blocks: Blocks(boundary),
        ..own
    });
    prop_oneof![proptest::strategy::Just(own), narrow].boxed()
}

/// Sequences of requests that overlap or not, with aborts, resets and new openers in between: a read returns the data of
/// the last write.
///
/// # Panics
/// If the disk fails the check, with the shortest failing sequence.
pub fn any_sequence<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let sequences = proptest::collection::vec(step(), 1..120);
    let config = Config { cases: 48, failure_persistence: None, ..Config::default() };
    let result =
        TestRunner::new(config).run(&(limits(bdev.device().limits()), sequences), |(limits, steps)| {
            run(&bdev, limits, &steps, fixture.features());
            Ok(())
        });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, (limits, steps))) => panic!("{why}\nbehind {limits:?}: {steps:#?}"),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

struct Sent {
    op: Op,
    lba: u64,
    blocks: u64,
    seed: u64,
}

struct Run {
    bench: Bench,
    registry: Registry,
    disk: Option<Opener>,
    model: Model,
    in_flight: HashMap<u64, Sent>,
    last: u64,
    seed: u64,
    block_size: u32,
    features: Features,
}

fn run(bdev: &Arc<Bdev>, limits: Limits, steps: &[Step], features: Features) {
    let probe = Probe::new(Arc::clone(bdev.device()), limits, bdev.device().ops());
    let registry = Registry::new();
    let probe = registry.register(Identity::named("probe"), Arc::new(probe)).expect("it is the only one");
    let (bench, block_size) = (Bench::new(), bdev.geometry().block_size);
    let (model, in_flight) = (Model::default(), HashMap::new());
    let mut run =
        Run { bench, registry, disk: None, model, in_flight, last: 0, seed: 0, block_size, features };
    run.open();
    run.request(Op::WriteZeroes, 0, AREA, Shape::Single);
    run.drain();
    for step in steps {
        match *step {
            Step::Request { op: Op::Unmap, .. } if !bdev.device().ops().contains(Op::Unmap) => {}
            Step::Request { op, lba, blocks, shape } => run.request(op, lba, blocks, shape),
            Step::Abort { back } => {
                let id = run.last.saturating_sub(back);
                run.disk.as_mut().expect("open").abort(id, &mut run.bench);
            }
            Step::Turn => {
                run.bench.turn();
                run.look();
            }
            Step::Drain => run.drain(),
            Step::Reset => assert!(run.bench.wait("a reset", probe.reset())),
            Step::Reopen => run.reopen(),
        }
    }
    run.drain();
    run.request(Op::Read, 0, AREA, Shape::Single);
    run.drain();
    run.reopen();
    run.close();
}

impl Run {
    fn open(&mut self) {
        let bytes = AREA as u32 * self.block_size;
        self.disk = Some(self.bench.open(&self.registry, "probe", Access::Exclusive, 130, bytes));
        (self.in_flight, self.last) = (HashMap::new(), 0);
    }

    fn reopen(&mut self) {
        self.close();
        self.open();
    }

    fn close(&mut self) {
        self.drain();
        self.disk.take().expect("open").close(&mut self.bench);
    }

    /// Submits a request, after the requests that it overlaps with have completed, if they or it change data.
    fn request(&mut self, op: Op, lba: u64, blocks: u64, shape: Shape) {
        let overlaps =
            |s: &Sent| (op.is_change() || s.op.is_change()) && s.lba < lba + blocks && lba < s.lba + s.blocks;
        if self.in_flight.values().any(overlaps) {
            self.drain();
        }
        self.seed += 1;
        let (disk, bench) = (self.disk.as_mut().expect("open"), &mut self.bench);
        self.last = match op {
            Op::Read => disk.read(lba, blocks, shape, bench),
            Op::Write => disk.write(lba, &contents(self.seed, lba, blocks, self.block_size), shape, bench),
            Op::Flush => disk.command(op, 0, 0, bench),
            _ => disk.command(op, lba, blocks, bench),
        };
        self.in_flight.insert(self.last, Sent { op, lba, blocks, seed: self.seed });
    }

    fn drain(&mut self) {
        let outcomes = self.disk.as_mut().expect("open").drain(&mut self.bench);
        outcomes.into_iter().for_each(|outcome| self.completed(&outcome));
        assert!(self.in_flight.is_empty());
    }

    fn look(&mut self) {
        let outcomes = self.disk.as_mut().expect("open").completed();
        outcomes.into_iter().for_each(|outcome| self.completed(&outcome));
    }

    fn completed(&mut self, outcome: &Outcome) {
        let Sent { op, lba, blocks, seed } = self.in_flight.remove(&outcome.id).expect("it was in flight");
        let done = outcome.status.is_ok();
        assert!(done || outcome.status == Status::Aborted, "{op:?} ends with {:?}", outcome.status);
        for (lba, i) in (lba..lba + blocks).zip(0..) {
            match (op, done) {
                (Op::Write, true) => self.model.holds(lba, seed),
                (Op::Write, false) => self.model.may_hold_also(lba, seed),
                (Op::WriteZeroes, true) => self.model.holds(lba, 0),
                (Op::Unmap, true) if self.features.unmap_zeroes => self.model.holds(lba, 0),
                (Op::WriteZeroes, false) | (Op::Unmap, _) => self.model.may_hold_also(lba, 0),
                (Op::Read, true) if self.features.data => self.was_read(lba, i, outcome),
                _ => {}
            }
        }
    }

    fn was_read(&mut self, lba: u64, index: usize, outcome: &Outcome) {
        let size = self.block_size as usize;
        let data = &outcome.data[index * size..][..size];
        let mut block = vec![0; size];
        let seeds = self.model.may_hold(lba);
        let found = seeds.iter().copied().find(|&seed| {
            fill(seed, lba, &mut block);
            block == data
        });
        let seed = found.unwrap_or_else(|| panic!("block {lba} holds none of {seeds:?}"));
        self.model.holds(lba, seed);
    }
}
