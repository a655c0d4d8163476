//! What a guest sees of its memory while a read is carried out: old bytes or plaintext, and no ciphertext.

use super::*;
use aryk_bdev::{Channel, Completion, Device, Geometry, Limits, OpenError};
use aryk_reactor::{Cx, RootId};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const LEN: usize = 64 << 10;
const BLOCK: usize = 512;
/// The plaintext of every byte: ciphertext has other bytes too.
const PLAIN: u8 = 0x55;
/// What [`aryk_bdev_conformance::Opener::read`] fills memory with.
const BEFORE: u8 = 0xdd;

/// The store of a [`Held`] disk.
#[derive(Default)]
struct State {
    data: Vec<u8>,
    /// Requests that moved their data and are not completed.
    held: Vec<Completion>,
    holds: bool,
}

/// A disk that moves the data of a request when it gets the request, and can keep the completion.
#[derive(Clone)]
struct Held(Arc<Mutex<State>>);

impl Held {
    fn held(&self) -> usize {
        self.0.lock().unwrap().held.len()
    }

    fn hold(&self, holds: bool) {
        self.0.lock().unwrap().holds = holds;
    }
}

impl Device for Held {
    fn product(&self) -> &'static str {
        "held"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BLOCK as u32, Blocks((LEN / BLOCK) as u64));
        Geometry { block_size, physical_block_size: block_size, blocks, optimal_io_blocks: Blocks::ZERO }
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read, Op::Write])
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(HeldChannel { disk: self.clone(), root }))
    }
}

struct HeldChannel {
    disk: Held,
    root: RootId,
}

impl Channel for HeldChannel {
    fn submit(&mut self, io: &aryk_bdev::Io, cx: &mut Cx) {
        let mut state = self.disk.0.lock().unwrap();
        let start = io.lba.0 as usize * BLOCK;
        let data = &mut state.data[start..][..io.data.len() as usize];
        match io.op {
            Op::Read => io.data.write(0, data),
            _ => io.data.read(0, data),
        }
        state.held.push(Completion { tag: io.tag, status: Status::Ok });
        cx.wake(self.root);
    }

    fn abort(&mut self, _: aryk_bdev::Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut state = self.disk.0.lock().unwrap();
        match state.holds {
            true => cx.wake(self.root),
            false => out.append(&mut state.held),
        }
    }
}

/// An encrypted disk over a disk that can hold completions. All of its bytes are [`PLAIN`].
fn stack(pool_bytes: usize, bench: &mut Bench) -> (Stack, Held) {
    let base = Held(Arc::new(Mutex::new(State { data: vec![0; LEN], ..State::default() })));
    let stack = Stack(Env::default());
    stack.registry().register(Identity::named("base"), Arc::new(base.clone())).unwrap();
    let stack = stack.crypto("disk", "base", TweakMode::SimpleLba, pool_bytes);
    let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, LEN as u32);
    disk.write(0, &[PLAIN; LEN], Shape::Single, bench);
    assert_eq!(disk.finish(bench).status, Status::Ok);
    disk.close(bench);
    assert!(base.0.lock().unwrap().data.iter().filter(|byte| **byte != PLAIN).count() > LEN / 2);
    (stack, base)
}

#[test]
fn the_base_reads_to_memory_that_is_not_the_guests() {
    for (shape, pool_bytes) in
        [Shape::Single, Shape::Odd].into_iter().flat_map(|shape| [(shape, POOL_BYTES), (shape, 0)])
    {
        let mut bench = Bench::new();
        let (stack, base) = stack(pool_bytes, &mut bench);
        let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, LEN as u32);
        base.hold(true);
        let read = disk.read(0, (LEN / BLOCK) as u64, shape, &mut bench);
        bench.until("the base has moved the data", || base.held() == 1);
        assert!(disk.view(read).bytes() == [BEFORE; LEN], "{shape:?}: the guest's memory is as before");
        base.hold(false);
        assert!(disk.finish(&mut bench).data == [PLAIN; LEN]);
        disk.close(&mut bench);
    }
}

#[test]
fn a_guest_that_watches_its_memory_sees_no_ciphertext() {
    let mut bench = Bench::new();
    let (stack, _base) = stack(POOL_BYTES, &mut bench);
    let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, LEN as u32);
    for shape in [Shape::Single, Shape::Odd] {
        for _ in 0..100 {
            let read = disk.read(0, (LEN / BLOCK) as u64, shape, &mut bench);
            let (view, is_done) = (disk.view(read), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let watcher = scope.spawn(|| {
                    // Bounded: the other thread may have panicked.
                    for _ in 0..1_000_000 {
                        if is_done.load(Ordering::Acquire) {
                            break;
                        }
                        let bytes = view.bytes();
                        assert!(bytes.iter().all(|byte| matches!(*byte, BEFORE | PLAIN)), "{shape:?}");
                    }
                });
                let outcome = disk.finish(&mut bench);
                is_done.store(true, Ordering::Release);
                watcher.join().unwrap();
                assert!(outcome.data == [PLAIN; LEN]);
            });
        }
    }
    disk.close(&mut bench);
}
