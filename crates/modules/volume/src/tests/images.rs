//! Volumes on disks of other modules.

use super::*;
use aryk_bdev::Error as Refused;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::task::Poll;

const IMAGE: u64 = MIB;

/// A pool, and the disk `image` with a pattern.
fn stack() -> Stack {
    let stack = Stack::new(512).malloc("base", 512, BASE).pool();
    add_image(&stack);
    stack
}

fn pattern(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| (at / 512) as u8 ^ at as u8).collect()
}

fn add_image(stack: &Stack) {
    let config = aryk_bdev_malloc::Config {
        identity: Identity { uuid: Uuid::from_u128(7), ..Identity::named("image") },
        block_size: 512,
        physical_block_size: 512,
        blocks: Blocks(IMAGE / 512),
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(&stack.env, config).expect("it can be made");
    let image = stack.env.registry().find("image").expect("it was made");
    stack.write(&image, 0, &pattern(0, IMAGE));
}

fn overlay(stack: &Stack, name: &str) -> (Member, Arc<Bdev>) {
    let member = stack.volume(name, Origin::Disk("image".to_owned()));
    let disk = member.disk.clone().expect("it has a disk");
    (member, disk)
}

#[test]
fn an_overlay_shows_its_image_where_it_was_not_written() {
    let stack = stack();
    let (member, disk) = overlay(&stack, "o");
    assert_eq!(stack.the_pool().parent(&member), Parent::Image(member.image().unwrap()));
    assert_eq!(stack.read(&disk, 0, IMAGE), pattern(0, IMAGE));
    assert_eq!(stack.read(&disk, IMAGE, 65536), vec![0; 65536], "it is larger than its image");
    // Part of a block of the index: the rest of it comes from the image.
    stack.write(&disk, 512 * 9, &[5; 512]);
    // A zero hides the image.
    stack.command(&disk, Op::WriteZeroes, 65536, 8192);
    let mut expected = pattern(0, IMAGE);
    expected[512 * 9..512 * 10].fill(5);
    expected[65536..65536 + 8192].fill(0);
    assert_eq!(stack.read(&disk, 0, IMAGE), expected);
    assert_eq!(stack.read(&disk, 512 * 7, 512 * 9), expected[512 * 7..512 * 16]);

    // Clones and snapshots of it show the image, too.
    let snapshot = vec![(member.id, "s".to_owned(), Uuid::new_v4())];
    let snapshot = block_on(stack.the_pool().snapshot(snapshot)).unwrap().remove(0);
    let clone = stack.volume("c", Origin::Snapshot(snapshot.id));
    assert_eq!(stack.read(clone.disk.as_ref().unwrap(), 0, IMAGE), expected);
    assert_eq!(clone.image(), member.image());
    // After inflation it does without the image.
    block_on(stack.the_pool().inflate(clone.id)).unwrap();
    assert_eq!(stack.the_pool().find("c").unwrap().image(), None);
    assert_eq!(stack.read(clone.disk.as_ref().unwrap(), 0, IMAGE), expected);
}

#[test]
fn nobody_writes_to_an_image_while_volumes_depend_on_it() {
    let stack = stack();
    let open = |access| stack.env.registry().open("image", access, "another", |_| ()).map(drop);
    let writer = stack.env.registry().open("image", Access::Shared, "another", |_| ()).unwrap();
    let new = || stack.new_volume("o", Origin::Disk("image".to_owned()));
    let refused = block_on(stack.the_pool().create_volume(new())).unwrap_err();
    assert!(matches!(refused, Error::Registry(Refused::Claimed { .. })), "{refused}");
    drop(writer);
    let (member, _) = overlay(&stack, "o");
    let claimed = Refused::Claimed { name: "image".into(), owner: "volumes of the pool p".into() };
    assert_eq!(open(Access::Shared), Err(claimed.clone()));
    assert_eq!(open(Access::Exclusive), Err(claimed));
    assert_eq!(open(Access::Read), Ok(()));
    // Another overlay has the same image.
    let (other, _) = overlay(&stack, "other");
    for member in [member, other] {
        block_on(stack.env.registry().remove(&member.uuid().to_string())).unwrap();
        block_on(stack.the_pool().delete(member.id)).unwrap();
    }
    // The image is free when the space of the last one is.
    let free = (0..500).any(|_| {
        block_on(stack.the_pool().refresh()).unwrap();
        std::thread::park_timeout(std::time::Duration::from_millis(10));
        open(Access::Exclusive).is_ok()
    });
    assert!(free);
}

#[test]
fn overlays_go_and_come_back_with_their_image() {
    let stack = stack();
    let (_, disk) = overlay(&stack, "o");
    stack.write(&disk, 4096, &[5; 4096]);
    drop(disk);
    block_on(stack.env.registry().remove("image")).unwrap();
    stack.pools.forget_removed_disks();
    let waiting = stack.the_pool().find("o").unwrap();
    assert!(waiting.disk.is_none() && stack.the_pool().is_degraded(&waiting));
    assert!(stack.the_pool().waits_for(Uuid::from_u128(7)));
    // Another disk of that name is not the image.
    let stack = stack.malloc("image", 512, IMAGE);
    block_on(stack.the_pool().refresh()).unwrap();
    assert!(stack.the_pool().find("o").unwrap().disk.is_none());
    block_on(stack.env.registry().remove("image")).unwrap();
    add_image(&stack);
    block_on(stack.the_pool().refresh()).unwrap();
    let disk = stack.the_pool().find("o").unwrap().disk.expect("its image is there");
    let mut expected = pattern(0, IMAGE);
    expected[4096..8192].fill(5);
    assert_eq!(stack.read(&disk, 0, IMAGE), expected);
}

#[test]
fn what_cannot_be_an_image_is_refused() {
    let stack = stack().malloc("large", 4096, IMAGE);
    let create = |new: NewVolume| block_on(stack.the_pool().create_volume(new)).unwrap_err();
    let refused = create(stack.new_volume("o", Origin::Disk("large".to_owned())));
    assert!(refused.to_string().contains("blocks are larger"), "{refused}");
    let own = stack.volume("v", Origin::Empty).uuid().to_string();
    let refused = create(stack.new_volume("o", Origin::Disk(own)));
    assert!(refused.to_string().contains("same pool"), "{refused}");
    let small = NewVolume { bytes: Bytes(IMAGE / 2), ..stack.new_volume("o", Origin::Disk("image".into())) };
    assert!(matches!(create(small), Error::Command(_)));
    assert!(stack.env.registry().open("image", Access::Exclusive, "another", |_| ()).is_ok(), "it is free");
}

/// The disk `image` completes no read, until it is aborted.
#[test]
fn requests_that_wait_for_a_hung_image_can_be_aborted() {
    const HOUR_US: u64 = 3_600_000_000;
    let stack = Stack::new(512).malloc("base", 512, BASE).malloc("slow", 512, IMAGE).pool();
    let config = aryk_bdev_delay::Config {
        identity: Identity::named("image"),
        base: "slow".to_owned(),
        avg_read_us: HOUR_US,
        p99_read_us: HOUR_US,
        avg_write_us: 0,
        p99_write_us: 0,
    };
    aryk_bdev_delay::create(&stack.env, config).expect("it can be made");
    let (_, disk) = overlay(&stack, "o");
    let all_ended = stack.on_owner(&disk, async |channel| {
        for is_write in [false, true] {
            let request = async {
                let buffer = Buffer::from_slice(&[5; 512]);
                match is_write {
                    // The rest of the block comes from the image.
                    true => channel.write(Lba(9), Blocks(1), buffer).await.map(drop),
                    false => channel.read(Lba(17), Blocks(1), buffer).await.map(drop),
                }
            };
            let mut request = pin!(request);
            let is_pending = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending())).await;
            // What needs no image goes on, and ends after the image has got the request.
            let written = channel.write(Lba(1024), Blocks(8), Buffer::from_slice(&[6; 4096])).await.map(drop);
            if !is_pending || written.is_err() {
                return false;
            }
            channel.abort_all();
            // The image completes what is aborted as without the abort. A write has no effect.
            let expected = if is_write { Err(Status::Aborted) } else { Ok(()) };
            if request.await != expected {
                return false;
            }
        }
        true
    });
    assert!(all_ended);
    assert_eq!(stack.read(&disk, 1024 * 512, 4096), [6; 4096]);
}
