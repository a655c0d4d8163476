//! Encrypted disks whose base does not respond, beside one whose base does.

use super::held::{BLOCK, Held, LEN};
use super::*;

const STUCK: usize = 64;
/// Requests in flight of each, of [`LEN`] bytes: more than there are buffers for.
const STUCK_DEPTH: u16 = 24;
/// Requests in flight of the disk whose base responds, and their bytes.
const DEPTH: u16 = 32;
const BYTES: usize = 4096;

#[test]
fn stuck_disks_leave_another_its_queue_depth() {
    let mut bench = Bench::new();
    let stack = Stack(Env::default());
    let mut add = |name: String, requests: u16, bytes: usize| {
        let base = format!("{name}-base");
        let held = Held::register(stack.registry(), &base);
        let pool_bytes = PoolBytes { common: 4 << 20, ..POOL_BYTES };
        create_with_pool(&stack.0, config(&name, &base, TweakMode::SimpleLba), pool_bytes).unwrap();
        held.hold(true);
        (held, bench.open(stack.registry(), &name, Access::Exclusive, requests, bytes as u32))
    };
    let mut stuck: Vec<_> =
        (0..STUCK).map(|number| add(format!("stuck{number}"), STUCK_DEPTH, LEN)).collect();
    let (base, mut disk) = add("disk".to_owned(), DEPTH, BYTES);
    for (_, disk) in &mut stuck {
        for _ in 0..STUCK_DEPTH {
            disk.write(0, &[0x55; LEN], Shape::Single, &mut bench);
        }
    }
    // A turn sends some requests of each disk to its base.
    for _ in 0..1000 {
        bench.turn();
    }
    let held: Vec<_> = stuck.iter().map(|(base, _)| base.held()).collect();
    let (most, least) = (held.iter().max(), held.iter().min());
    assert_eq!(
        (most, least),
        (Some(&STUCK_DEPTH.into()), Some(&17)),
        "their reserves, and all common buffers"
    );
    let block = |number: u16| u64::from(number) * (BYTES / BLOCK) as u64 % (LEN / BLOCK) as u64;
    for number in 0..DEPTH {
        disk.write(block(number), &noise(7, BYTES), Shape::Single, &mut bench);
    }
    assert_eq!(base.held(), usize::from(DEPTH), "the base has all requests");
    base.hold(false);
    assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status.is_ok()));
    disk.close(&mut bench);
    for (base, mut disk) in stuck {
        base.hold(false);
        assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status.is_ok()));
        disk.close(&mut bench);
    }
}
