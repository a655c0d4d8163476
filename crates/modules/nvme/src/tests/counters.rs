//! The counters that operators read.

use super::OnModel;
use crate::{Commands, Dma, Injection};
use aryk_bdev::{Access, Status};
use aryk_bdev_conformance::{Bench, Shape};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::{CodeType, Status as DeviceStatus};
use aryk_nvme_model as model;
use aryk_nvme_model::{Action, Config, Queue, Rule, Timing};

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

#[test]
fn errors_are_counted_by_the_type_of_their_status_also_those_of_pairs_that_are_gone() {
    let on = OnModel::new(Config::default(), Dma::Pin);
    let mut bench = Bench::new();
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 4096);
    let controller = on.controllers.find("nv").unwrap();
    let mut expected = [0; CodeType::ALL.len()];
    // Each with DNR: Internal Error, Conflicting Attributes, Unrecovered Read Error, Internal Path Error, unknown ones.
    for (of, (sct, sc)) in [(0, 6), (1, 0x80), (2, 0x81), (3, 0), (7, 0xc0), (5, 1)].into_iter().enumerate() {
        let action = Action::Fail(model::Status::new(sct, sc));
        let times = of as u64 + 1;
        on.model.with(|model| model.faults().add(Rule { times, ..Rule::once(Queue::Io, io::READ, action) }));
        for _ in 0..times {
            disk.read(0, 1, Shape::Single, &mut bench);
            assert_eq!(disk.finish(&mut bench).status, Status::Medium, "SCT {sct}");
        }
        expected[of] = times;
        assert_eq!(controller.counts().errors, expected);
    }
    // A command that is tried again counts each time; one with an injected error counts as with the controller's.
    let retried = Action::Fail(model::Status::new(0, 0x82).retryable(0));
    on.model.with(|model| model.faults().add(Rule { times: 3, ..Rule::once(Queue::Io, io::READ, retried) }));
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    for withheld in [None, Some(std::time::Duration::ZERO)] {
        let injection = Injection { opcode: io::WRITE, status: DeviceStatus::new(0x280), withheld, times: 1 };
        bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
        disk.write(0, &[0; 4096], Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    }
    (expected[0], expected[2]) = (expected[0] + 3, expected[2] + 2);
    assert_eq!(controller.counts().errors, expected);
    bench.wait("the shutdown", controller.disable()).unwrap();
    bench.wait("the start", controller.enable()).unwrap();
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!((disk.finish(&mut bench).status, controller.counts().errors), (Status::Ok, expected));
    disk.close(&mut bench);
}
