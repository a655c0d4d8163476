//! A namespace that shrinks while VMs use it.

use super::OnModel;
use super::recovery::{BLOCK, open, slow, with};
use aryk_bdev::{Blocks, Event, Status};
use aryk_bdev_conformance::{Bench, Shape, contents};
use aryk_nvme_model::{Config, NamespaceConfig};

/// Blocks of the namespace, before and after.
const OLD: u64 = 4096;
const NEW: u64 = 1024;
/// Blocks of a request.
const EACH: u64 = 4;

/// Submits a write to the first blocks of every 64 of the old size. Returns each write's ID and first block.
fn write_everywhere(
    seed: u64,
    disk: &mut aryk_bdev_conformance::Opener,
    bench: &mut Bench,
) -> Vec<(u64, u64)> {
    let firsts = (0..OLD).step_by(64);
    firsts
        .map(|lba| (disk.write(lba, &contents(seed, lba, EACH, BLOCK), Shape::Crossing, bench), lba))
        .collect()
}

#[test]
fn requests_beyond_the_new_end_fail_and_others_go_on() {
    let namespaces = vec![(1, NamespaceConfig::new(OLD, 1, 1))];
    let on = with(Config { namespaces, ..slow() }, |_| ());
    let controller = on.controllers.find("nv").unwrap();
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    for (id, _) in write_everywhere(1, &mut disk, &mut bench) {
        let outcomes = disk.drain(&mut bench);
        assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{id}");
    }

    // The drive shrinks with requests in flight; then the daemon hears of it, while more requests come.
    let written = write_everywhere(2, &mut disk, &mut bench);
    on.model.with(|model| model.resize_namespace(1, NEW));
    let mut outcomes = disk.drain(&mut bench);
    let mut blocks = written;
    for seed in 3.. {
        blocks.extend(write_everywhere(seed, &mut disk, &mut bench));
        outcomes.extend(disk.drain(&mut bench));
        if on.disks[0].blocks() == Blocks(NEW) {
            break;
        }
        assert!(seed < 100_000, "the disk is resized");
    }
    for (id, lba) in &blocks {
        let status = outcomes.iter().find(|outcome| outcome.id == *id).unwrap().status;
        match lba + EACH <= NEW {
            true => assert_eq!(status, Status::Ok, "block {lba}"),
            false => assert!(matches!(status, Status::Ok | Status::OutOfRange), "block {lba}: {status:?}"),
        }
    }
    let failed = outcomes.iter().filter(|outcome| outcome.status == Status::OutOfRange).count();
    assert!(failed > 0, "requests beyond the new end");
    assert_eq!(controller.counts().resets, 0);
    assert!(disk.events().contains(&Event::Resized { blocks: Blocks(NEW) }));

    // From now on the drive sees no request beyond its end, also none that crosses it.
    let submitted = controller.counts().submitted;
    for (lba, count) in [(NEW, 1), (OLD - 1, 1), (NEW - 1, 2), (NEW - 2, EACH)] {
        disk.read(lba, count, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::OutOfRange, "block {lba}");
    }
    disk.read(NEW - 1, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    OnModel::until("the read to be counted", || controller.counts().submitted == submitted + 1);
    disk.close(&mut bench);
}
