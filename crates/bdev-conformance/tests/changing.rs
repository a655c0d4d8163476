//! A disk whose limits, operations and read-only state change while it is open, with requests in flight and waiting.

use aryk_bdev::{Access, Blocks, Env, Event, Identity, Limits, Op, OpSet, Status};
use aryk_bdev_conformance::{Bench, Log, Opener, Probe, Properties, Seen, Shape, contents};
use aryk_bdev_error::{Fault, Injection};
use std::sync::{Arc, Mutex};

const BLOCKS: Blocks = Blocks(1024);

struct Rig {
    env: Env,
    bench: Bench,
    properties: Arc<Mutex<Properties>>,
    log: Arc<Mutex<Log>>,
}

impl Rig {
    /// `above` on `disk`, a probe of a disk of the error module, which is `held`.
    fn new(limits: Limits) -> Self {
        let env = Env::default();
        let malloc = aryk_bdev_malloc::Config {
            identity: Identity::named("store"),
            block_size: 512,
            physical_block_size: 512,
            blocks: BLOCKS,
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, malloc).expect("a disk of ours");
        let error = aryk_bdev_error::Config { identity: Identity::named("held"), base: "store".to_owned() };
        let held = aryk_bdev_error::create(&env, error).expect("a disk of ours");
        let probe = Probe::new(Arc::clone(held.device()), limits, OpSet::PLAIN);
        let (properties, log) = (probe.properties(), probe.log());
        env.registry().register(Identity::named("disk"), Arc::new(probe)).expect("a disk of ours");
        let above =
            aryk_bdev_passthru::Config { identity: Identity::named("above"), base: "disk".to_owned() };
        aryk_bdev_passthru::create(&env, above).expect("a disk of ours");
        Self { env, bench: Bench::new(), properties, log }
    }

    fn open(&mut self) -> Opener {
        self.bench.open(self.env.registry(), "above", Access::Shared, 64, 64 * 512)
    }

    /// Changes the probe's properties.
    fn change(&mut self, change: impl FnOnce(&mut Properties)) {
        change(&mut self.properties.lock().expect("no one panics holding it"));
        self.bench.wait("the change", self.env.registry().changed("disk")).expect("a disk of ours");
    }

    fn hold_writes(&self) {
        let injection =
            Injection { fault: Fault::Pending, ops: OpSet::of(&[Op::Write]), count: 64, queue_depth: 0 };
        aryk_bdev_error::inject(self.env.registry(), "held", injection).expect("a disk of ours");
    }

    /// Releases held requests.
    fn resume(&mut self) {
        self.bench
            .wait("to go on", aryk_bdev_error::resume(self.env.registry(), "held"))
            .expect("a disk of ours");
        let disk = self.env.registry().find("disk").expect("a disk of ours");
        self.bench.wait("a look", disk.wake_channels());
    }

    fn turns(&mut self) {
        for _ in 0..20 {
            self.bench.turn();
        }
    }

    /// The requests that the device received since the last call.
    fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.log.lock().expect("no one panics holding it").seen)
    }
}

fn all_done(disk: &mut Opener, bench: &mut Bench) {
    let outcomes = disk.drain(bench);
    assert!(outcomes.iter().all(|outcome| outcome.status == Status::Ok), "{outcomes:?}");
}

#[test]
fn a_depth_shrinks_and_grows_with_requests_in_flight() {
    let mut rig = Rig::new(Limits { depth: 8, ..Limits::default() });
    let mut disk = rig.open();
    rig.hold_writes();
    for lba in 0..20 {
        disk.write(lba, &contents(1, lba, 1, 512), Shape::Single, &mut rig.bench);
    }
    rig.turns();
    assert_eq!(rig.seen().len(), 8);
    rig.change(|p| p.limits.depth = 2);
    rig.turns();
    assert_eq!(rig.seen().len(), 0, "six more are in flight than the depth");
    assert_eq!(disk.events(), [Event::Changed]);
    rig.change(|p| p.limits.depth = 9);
    rig.turns();
    assert_eq!(rig.seen().len(), 1);
    rig.change(|p| p.limits.depth = 3);
    // The probe checks that no more requests arrive while three are in flight.
    rig.resume();
    all_done(&mut disk, &mut rig.bench);
    assert_eq!(rig.seen().len(), 11);
    rig.hold_writes();
    for lba in 0..20 {
        disk.write(lba, &contents(2, lba, 1, 512), Shape::Single, &mut rig.bench);
    }
    rig.turns();
    assert_eq!(rig.seen().len(), 3);
    rig.change(|p| p.limits.depth = 16);
    rig.turns();
    assert_eq!(rig.seen().len(), 13);
    rig.resume();
    all_done(&mut disk, &mut rig.bench);
    disk.read(0, 20, Shape::Single, &mut rig.bench);
    assert!(disk.finish(&mut rig.bench).data == contents(2, 0, 20, 512));
    disk.close(&mut rig.bench);
}

#[test]
fn waiting_requests_are_split_at_the_new_limits() {
    let mut rig = Rig::new(Limits { depth: 1, ..Limits::default() });
    let mut disk = rig.open();
    rig.hold_writes();
    for lba in [0, 8] {
        disk.write(lba, &contents(1, lba, 8, 512), Shape::Single, &mut rig.bench);
    }
    rig.turns();
    rig.change(|p| p.limits = Limits { depth: 1, transfer_blocks: Blocks(3), ..p.limits });
    rig.resume();
    all_done(&mut disk, &mut rig.bench);
    let blocks: Vec<_> = rig.seen().iter().map(|seen| (seen.lba.0, seen.blocks.0)).collect();
    assert_eq!(blocks, [(0, 8), (8, 3), (11, 3), (14, 2)]);
    disk.read(0, 16, Shape::Single, &mut rig.bench);
    assert!(disk.finish(&mut rig.bench).data == contents(1, 0, 16, 512));
    disk.close(&mut rig.bench);
}

#[test]
fn operations_go_and_come() {
    let mut rig = Rig::new(Limits::default());
    let mut disk = rig.open();
    let try_it = |disk: &mut Opener, op, rig: &mut Rig| {
        disk.command(op, 4, 4, &mut rig.bench);
        let status = disk.finish(&mut rig.bench).status;
        (status, rig.seen().iter().map(|seen| seen.op).collect::<Vec<_>>())
    };
    assert_eq!(try_it(&mut disk, Op::Unmap, &mut rig), (Status::Ok, vec![Op::Unmap]));
    rig.change(|p| p.ops = OpSet::of(&[Op::Read, Op::Write, Op::Flush]));
    assert_eq!(try_it(&mut disk, Op::Unmap, &mut rig), (Status::Unsupported, vec![]));
    assert_eq!(try_it(&mut disk, Op::WriteZeroes, &mut rig), (Status::Ok, vec![Op::Write]));
    rig.change(|p| p.ops = OpSet::PLAIN);
    assert_eq!(try_it(&mut disk, Op::Unmap, &mut rig), (Status::Ok, vec![Op::Unmap]));
    assert_eq!(try_it(&mut disk, Op::WriteZeroes, &mut rig), (Status::Ok, vec![Op::WriteZeroes]));
    disk.close(&mut rig.bench);
}

#[test]
fn a_disk_becomes_read_only_and_writable_again() {
    let mut rig = Rig::new(Limits::default());
    let mut disk = rig.open();
    let write = |disk: &mut Opener, seed, rig: &mut Rig| {
        disk.write(0, &contents(seed, 0, 4, 512), Shape::Single, &mut rig.bench);
        disk.finish(&mut rig.bench).status
    };
    for (is_read_only, seed, expected) in
        [(false, 1, Status::Ok), (true, 2, Status::ReadOnly), (false, 3, Status::Ok)]
    {
        rig.change(|p| p.is_read_only = is_read_only);
        assert_eq!(write(&mut disk, seed, &mut rig), expected);
        disk.copy(0, 8, 1, &mut rig.bench);
        assert_eq!(disk.finish(&mut rig.bench).status, expected);
        // A channel that is opened now has the same limits.
        let mut other = rig.open();
        assert_eq!(write(&mut other, seed, &mut rig), expected);
        other.read(0, 4, Shape::Single, &mut rig.bench);
        let holds = if is_read_only { seed - 1 } else { seed };
        assert!(other.finish(&mut rig.bench).data == contents(holds, 0, 4, 512));
        other.close(&mut rig.bench);
    }
    assert_eq!(disk.events(), [Event::Changed; 3]);
    disk.close(&mut rig.bench);
}
