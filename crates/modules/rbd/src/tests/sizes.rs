//! Sizes of disks, when several clients change them.

use super::{BLOCK, OnStub, config, create, pool, until};
use crate::{Error, Resized, Size, disk_of, resize};
use aryk_bdev::{Blocks, Bytes};
use aryk_bdev_conformance::block_on;
use aryk_librbd_stub::add_image;
use rustix::io::Errno;
use std::sync::Arc;

#[test]
fn a_size_of_a_removed_disk_is_not_that_of_a_disk_with_its_name() {
    let stub = OnStub::new(BLOCK, 256);
    let removed = Arc::clone(disk_of(&stub.disk).unwrap());
    stub.remove();
    let pool = pool();
    add_image(&pool, "image", 512 << 12);
    let other = create(&stub.clusters, &stub.env, config(&pool, BLOCK)).unwrap();
    let late = removed.set_blocks(Blocks(7));
    assert!(matches!(late, Err(Error::Bdev(aryk_bdev::Error::NotFound(_)))), "{late:?}");
    assert_eq!(other.blocks(), Blocks(512));
}

#[test]
fn a_disk_follows_another_clients_resize_that_came_during_its_own() {
    let stub = OnStub::new(BLOCK, 256);
    stub.image.script(|script| {
        script.holds_resizes = true;
        script.fail_resizes = Errno::IO.raw_os_error();
    });
    let resized = Arc::clone(&stub.disk);
    let resizer =
        std::thread::spawn(move || block_on(resize(&resized, Size::GrowTo(Bytes(2 << 20)))).is_err());
    until("librbd resizes", || stub.image.resizing() == 1);
    stub.image.resize(3 << 20);
    stub.image.release();
    assert!(resizer.join().unwrap(), "the resize fails");
    until("the disk follows", || stub.disk.blocks() == Blocks(768));
}

#[test]
fn a_disk_whose_image_has_shrunk_in_part_gets_the_size_of_its_image() {
    let stub = OnStub::new(BLOCK, 256);
    stub.image.script(|script| script.fail_resizes = Errno::IO.raw_os_error());
    let Resized::Shrinking(shrinking) =
        block_on(resize(&stub.disk, Size::Exactly(Bytes(128 << 12)))).unwrap()
    else {
        panic!("not shrunk");
    };
    let settled = block_on(shrinking.settle());
    stub.image.resize(200 << 12);
    assert!(block_on(settled.cut()).is_err());
    assert_eq!(stub.disk.blocks(), Blocks(200));
}
