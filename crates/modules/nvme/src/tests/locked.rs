//! A drive that encrypts itself, and is locked (TCG Opal).

use super::OnModel;
use crate::{Dma, Phase};
use aryk_bdev::{Access, Op, Status};
use aryk_bdev_conformance::{Bench, Shape, contents};
use aryk_nvme_model::Config;

const BLOCK: u32 = 4096;

#[test]
fn requests_to_a_locked_drive_fail_by_that_name_until_it_is_unlocked() {
    let on = OnModel::new(Config { locking: Some(true), ..Config::default() }, Dma::Pin);
    let controller = on.controllers.find("nv").unwrap();
    let locking = || controller.info().controller.unwrap().locking.unwrap();
    assert_eq!((on.disks.len(), controller.info().phase), (1, Phase::Ready), "the attach succeeds");
    assert!(locking().is_enabled && locking().is_locked);
    let mut bench = Bench::new();
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 8 * BLOCK);
    let data = contents(1, 0, 4, BLOCK);
    disk.read(0, 4, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::AccessDenied);
    disk.write(0, &data, Shape::Crossing, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::AccessDenied);
    for op in [Op::Unmap, Op::WriteZeroes] {
        disk.command(op, 0, 4, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::AccessDenied, "{op:?}");
    }
    let failure = on.disks[0].device().last_failure().unwrap().device.unwrap();
    assert_eq!((failure.code, failure.name), (0x286, "the drive is locked (TCG Opal): unlock it first"));
    let counts = controller.counts();
    assert_eq!((counts.retried, counts.resets), (0, 0));

    on.model.with(|model| model.set_locked(false));
    disk.write(0, &data, Shape::Crossing, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.read(0, 4, Shape::Single, &mut bench);
    let read = disk.finish(&mut bench);
    assert_eq!((read.status, read.data == data), (Status::Ok, true));
    bench.wait("the reset", controller.reset()).unwrap();
    assert!(locking().is_enabled && !locking().is_locked);
    disk.close(&mut bench);
}

#[test]
fn a_drive_that_does_not_encrypt_itself_is_not_locked() {
    let on = OnModel::new(Config::default(), Dma::Pin);
    assert_eq!(on.controllers.find("nv").unwrap().info().controller.unwrap().locking, None);
}
