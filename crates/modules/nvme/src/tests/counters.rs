//! The counters that operators read.

use super::OnModel;
use crate::Dma;
use aryk_bdev::{Access, Status};
use aryk_bdev_conformance::{Bench, Shape};
use aryk_nvme_model::{Config, Timing};

#[test]
fn polls_and_doorbells_of_both_queues_are_counted_apart() {
    let timing = Timing { io: 2_000_000..=2_000_000, ..Timing::IMMEDIATE };
    let on = OnModel::new(Config { timing, oacs: 0, ..Config::default() }, Dma::Pin);
    let mut bench = Bench::new();
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 4096);
    let controller = on.controllers.find("nv").unwrap();
    let pair = || controller.counts().pairs[0];
    let before = pair();
    for lba in 0..8 {
        disk.read(lba, 1, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    }
    let one_by_one = pair();
    let grown = |of: fn(&crate::PairCounts) -> u64| of(&one_by_one) - of(&before);
    assert_eq!((grown(|pair| pair.sq_doorbells), grown(|pair| pair.cq_doorbells)), (8, 8));
    // Each read took 2 ms, in which the reactor polled without result.
    let (polls, idle) = (grown(|pair| pair.polls), grown(|pair| pair.idle_polls));
    assert!(idle >= 8 && polls >= idle + 8, "{polls} polls, {idle} idle");
    for lba in 0..8 {
        disk.read(lba, 1, Shape::Single, &mut bench);
    }
    assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status.is_ok()));
    let batch = pair();
    assert_eq!(batch.sq_doorbells - one_by_one.sq_doorbells, 1, "one for the batch");
    assert_eq!((batch.queued, batch.submitted - before.submitted), (0, 16));
    // Requests wait while the controller is disabled.
    bench.wait("the shutdown", controller.disable()).unwrap();
    disk.read(0, 1, Shape::Single, &mut bench);
    bench.wait("the start", controller.enable()).unwrap();
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    let after = pair();
    assert_eq!((after.queued, after.submitted - batch.submitted), (1, 1));
    assert!(after.polls > batch.polls && after.cq_doorbells > batch.cq_doorbells, "{after:?}, {batch:?}");
    disk.close(&mut bench);
}
