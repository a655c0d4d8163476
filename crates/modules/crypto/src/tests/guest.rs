//! What a guest sees of its memory while a read is carried out: old bytes or plaintext, and no ciphertext.

use super::held::{BLOCK, Held, LEN};
use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// The plaintext of every byte: ciphertext has other bytes too.
const PLAIN: u8 = 0x55;
/// What [`aryk_bdev_conformance::Opener::read`] fills memory with.
const BEFORE: u8 = 0xdd;

/// An encrypted disk over a disk that can hold completions. All of its bytes are [`PLAIN`].
fn stack(pool_bytes: PoolBytes, bench: &mut Bench) -> (Stack, Held) {
    let stack = Stack(Env::default());
    let base = Held::register(stack.registry(), "base");
    let stack = stack.crypto("disk", "base", TweakMode::SimpleLba, pool_bytes);
    let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, LEN as u32);
    disk.write(0, &[PLAIN; LEN], Shape::Single, bench);
    assert_eq!(disk.finish(bench).status, Status::Ok);
    disk.close(bench);
    assert!(base.data().iter().filter(|byte| **byte != PLAIN).count() > LEN / 2);
    (stack, base)
}

#[test]
fn the_base_reads_to_memory_that_is_not_the_guests() {
    for (shape, pool_bytes) in [Shape::Single, Shape::Odd]
        .into_iter()
        .flat_map(|shape| [(shape, POOL_BYTES), (shape, PoolBytes::default())])
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
