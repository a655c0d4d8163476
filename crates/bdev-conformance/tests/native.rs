//! A disk that executes compound operations itself: within its limits it gets them unchanged; larger ones are split into
//! reads and writes.

#![expect(clippy::unwrap_used, reason = "what a test sets up is there, or the test fails")]

use aryk_bdev::{
    Access, Blocks, Channel, Completion, Device, Env, Geometry, Identity, Io, Lba, Limits, Op, OpSet,
    OpenError, Outbox, Registry, Status, Tag,
};
use aryk_bdev_conformance::{Bench, Features, Fixture, Probe, Shape, conformance, contents};
use aryk_dma::Sgl;
use aryk_reactor::{Cx, RootId};
use std::sync::{Arc, Mutex};

const BLOCK: u32 = 512;
const BLOCKS: Blocks = Blocks(8192);

/// A memory disk with a lock that makes each operation atomic.
struct Native {
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Device for Native {
    fn product(&self) -> &'static str {
        "native"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK, BLOCKS)
    }

    fn limits(&self) -> Limits {
        Limits { depth: 16, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::ALL
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NativeChannel { bytes: Arc::clone(&self.bytes), outbox: Outbox::new(root) }))
    }
}

struct NativeChannel {
    bytes: Arc<Mutex<Vec<u8>>>,
    outbox: Outbox,
}

fn copy_of(data: Sgl) -> Vec<u8> {
    let mut copy = vec![0; data.len() as usize];
    data.read(0, &mut copy);
    copy
}

impl Channel for NativeChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let mut bytes = self.bytes.lock().unwrap();
        let at = |lba: Lba| lba.to_bytes(BLOCK).0 as usize;
        let blocks = at(io.lba)..at(io.lba + io.blocks);
        let mut status = Status::Ok;
        match io.op {
            Op::Read => io.data.write(0, &bytes[blocks]),
            Op::Write => io.data.read(0, &mut bytes[blocks]),
            Op::Flush => {}
            Op::Unmap | Op::WriteZeroes => bytes[blocks].fill(0),
            Op::Compare => {
                if copy_of(io.data) != bytes[blocks] {
                    status = Status::Miscompare;
                }
            }
            Op::CompareAndWrite => {
                let halves = copy_of(io.data);
                let (expected, new) = halves.split_at(halves.len() / 2);
                if *expected == bytes[blocks.clone()] {
                    bytes[blocks].copy_from_slice(new);
                } else {
                    status = Status::Miscompare;
                }
            }
            Op::Copy => bytes.copy_within(at(io.source)..at(io.source + io.blocks), blocks.start),
        }
        self.outbox.push(io.tag, status, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.outbox.take(out);
    }
}

fn native() -> Native {
    Native { bytes: Arc::new(Mutex::new(vec![0; BLOCKS.to_bytes(BLOCK).0 as usize])) }
}

struct Stack(Env);

impl Fixture for Stack {
    fn registry(&self) -> &Registry {
        self.0.registry()
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: true }
    }
}

fn stack(name: &str) -> Stack {
    let env = Env::default();
    env.registry().register(Identity::named(name), Arc::new(native())).unwrap();
    Stack(env)
}

mod alone {
    use super::*;
    conformance!(|| stack("disk"));
}

mod behind_a_delay {
    use super::*;
    conformance!(|| {
        let stack = stack("base");
        let config = aryk_bdev_delay::Config {
            identity: Identity::named("disk"),
            base: "base".to_owned(),
            avg_read_us: 20,
            p99_read_us: 50,
            avg_write_us: 20,
            p99_write_us: 50,
        };
        aryk_bdev_delay::create(&stack.0, config).unwrap();
        stack
    });
}

/// Source and target of a copy are both translated to the part's base.
#[test]
fn parts_of_it_copy_within_themselves() {
    let stack = stack("base");
    let mut bench = Bench::new();
    let config = aryk_bdev_split::Config { base: "base".to_owned(), count: 4, bytes: None };
    let parts = bench.wait("parts", aryk_bdev_split::create(&stack.0, config)).unwrap();
    let mut disk = bench.open(stack.0.registry(), parts[2].name(), Access::Exclusive, 4, BLOCK);
    disk.write(9, &contents(1, 9, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.copy(9, 3, 1, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.read(3, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, contents(1, 9, 1, BLOCK));
    disk.close(&mut bench);
}

#[test]
fn what_it_does_itself_reaches_it_as_it_is() {
    let limits = Limits { compare_and_write_blocks: Blocks(2), copy_blocks: Blocks(2), ..native().limits() };
    let seen = |limits: Limits, op: Op, blocks: u64| {
        let probe = Probe::new(Arc::new(native()), limits, OpSet::ALL);
        let log = probe.log();
        let registry = Registry::new();
        registry.register(Identity::named("disk"), Arc::new(probe)).unwrap();
        let mut bench = Bench::new();
        let mut disk = bench.open(&registry, "disk", Access::Exclusive, 4, 8 * BLOCK);
        match op {
            Op::Copy => disk.copy(100, 0, blocks, &mut bench),
            _ => disk.with_data(
                op,
                0,
                blocks,
                Shape::Single,
                &vec![0; 2 * blocks as usize * BLOCK as usize],
                &mut bench,
            ),
        };
        let status = disk.finish(&mut bench).status;
        disk.close(&mut bench);
        let ops: Vec<Op> = log.lock().unwrap().seen.iter().map(|seen| seen.op).collect();
        (status, ops)
    };
    for op in [Op::CompareAndWrite, Op::Copy] {
        assert_eq!(seen(limits, op, 2), (Status::Ok, vec![op]));
        assert_eq!(seen(limits, op, 3), (Status::Ok, vec![Op::Read, Op::Write]));
        // On a store that several hosts share, no operation is split into reads and writes that other hosts could
        // interleave.
        let shared = Limits { is_shared: true, ..limits };
        assert_eq!(seen(shared, op, 2), (Status::Ok, vec![op]));
        assert_eq!(seen(shared, op, 3), (Status::Unsupported, vec![]));
    }
}
