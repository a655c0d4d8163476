//! The block that a drive names for an error of its medium.

use super::OnModel;
use crate::Dma;
use aryk_bdev::{Access, Blocks, Lba, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, contents};
use aryk_nvme_model::{Action, Config, Queue, Rule};
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
const GET_LOG_PAGE: u8 = 2;

fn start() -> (OnModel, Bench, Opener) {
    let on = OnModel::new(Config::default(), Dma::Pin);
    let mut bench = Bench::new();
    let disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 16 * BLOCK);
    (on, bench, disk)
}

/// The block of the last failure, as the operator and as the submitter of a request learns it.
fn failed(on: &OnModel, lba: u64, blocks: u64) -> [Option<u64>; 2] {
    let device = on.disks[0].device();
    let reported = device.last_failure().and_then(|failure| failure.device?.lba);
    [reported, device.failed_block(Lba(lba), Blocks(blocks))].map(|lba| lba.map(|lba| lba.0))
}

#[test]
fn the_failed_block_of_each_request_is_known_when_it_ends() {
    let (on, mut bench, mut disk) = start();
    // Three requests fail at the same time; the others do not wait for that.
    for lba in [13, 107, 215] {
        on.model.with(|model| model.damage(1, lba, 3));
    }
    let ids: Vec<u64> = (0..32).map(|i| disk.read(16 * i, 16, Shape::Crossing, &mut bench)).collect();
    for outcome in disk.drain(&mut bench) {
        let index = ids.iter().position(|id| *id == outcome.id).unwrap() as u64;
        let bad = [(0, 13), (6, 107), (13, 215)].into_iter().find(|(of, _)| *of == index);
        assert_eq!(outcome.status, if bad.is_some() { Status::Medium } else { Status::Ok }, "{index}");
        assert_eq!(failed(&on, 16 * index, 16)[1], bad.map(|(_, lba)| lba), "{index}");
    }
    // The block is that of the part of the request that failed.
    disk.read(8, 16, Shape::Single, &mut bench);
    assert_eq!((disk.finish(&mut bench).status, failed(&on, 8, 16)), (Status::Medium, [Some(13); 2]));
    // A request of one block needs no log.
    on.model.with(|model| model.faults().add(Rule::once(Queue::Admin, GET_LOG_PAGE, Action::Delay(0))));
    let faults = on.model.with(|model| model.counts().faults);
    disk.read(14, 1, Shape::Single, &mut bench);
    assert_eq!((disk.finish(&mut bench).status, failed(&on, 14, 1)), (Status::Medium, [None; 2]));
    assert_eq!(on.model.with(|model| model.counts().faults), faults);
    // A block that is written again is good.
    disk.write(0, &contents(1, 0, 16, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.read(0, 16, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test is about a delay")]
fn a_request_does_not_wait_for_ever_for_its_block() {
    let (on, mut bench, mut disk) = start();
    on.model.with(|model| model.damage(1, 5, 1));
    let read = |disk: &mut Opener, bench: &mut Bench| {
        let began = Instant::now();
        disk.read(0, 16, Shape::Single, bench);
        assert_eq!(disk.finish(bench).status, Status::Medium);
        began.elapsed()
    };
    // A controller that does not answer in time.
    let late = Rule::once(Queue::Admin, GET_LOG_PAGE, Action::Delay(1_500_000_000));
    on.model.with(|model| model.faults().add(late));
    let took = read(&mut disk, &mut bench);
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert_eq!(failed(&on, 0, 16), [None; 2]);
    // One that has no such log.
    let refuse = Action::Fail(aryk_nvme_model::Status::new(1, 9));
    on.model.with(|model| model.faults().add(Rule::once(Queue::Admin, GET_LOG_PAGE, refuse)));
    read(&mut disk, &mut bench);
    assert_eq!(failed(&on, 0, 16), [None; 2]);
    // One whose log is of no use.
    on.model.with(|model| model.faults().hostile.logs = true);
    (0..20).for_each(|_| _ = read(&mut disk, &mut bench));
    assert!(failed(&on, 0, 16)[1].is_none_or(|lba| lba < 16));
    on.model.with(|model| model.faults().hostile.logs = false);
    read(&mut disk, &mut bench);
    assert_eq!(failed(&on, 0, 16), [Some(5); 2]);
    // A request that waits can be aborted.
    on.model.with(|model| model.faults().add(late));
    let failures = || on.model.with(|model| model.counts().failures);
    let before = failures();
    disk.read(0, 16, Shape::Single, &mut bench);
    bench.until("the failure", || failures() > before);
    (0..100).for_each(|_| _ = bench.turn());
    disk.abort_all(&mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Aborted);
    disk.close(&mut bench);
}
