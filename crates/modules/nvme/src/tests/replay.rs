//! Requests that resets submit again, and those that wait for them.

use super::odd::Odd;
use super::recovery::{BLOCK, READ, WRITE, impatient, open, read_all, slow, with, write_all};
use crate::{Config as Attach, Controllers, Dma, Location, Phase};
use aryk_bdev::{Access, Env, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on, contents};
use aryk_nvme_model::{Action, Config, Model, Queue, Rule};
use std::sync::Arc;
use std::time::Duration;

/// Every command with an opcode sticks until a reset.
fn stick_always(opcode: u8) -> Rule {
    Rule { times: u64::MAX, ..Rule::once(Queue::Io, opcode, Action::Stick { is_abortable: false }) }
}

#[test]
fn a_command_that_is_never_answered_fails_and_others_go_on() {
    let on = with(Config { volatile_write_cache: false, ..slow() }, |attach| {
        impatient(attach);
        // The test's limits are shorter than the time after which a controller counts as stable.
        attach.options.attempts = 100;
    });
    let mut bench = Bench::new();
    let mut open = || bench.open(on.env.registry(), "nvn1", Access::Shared, 64, 8 * BLOCK);
    let (mut stuck, mut other) = (open(), open());
    on.model.with(|model| model.faults().add(stick_always(READ)));
    stuck.read(0, 1, Shape::Single, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    let mut written = 0;
    let outcome = loop {
        if let Some(outcome) = stuck.completed().pop() {
            break outcome;
        }
        other.write(8 + written % 64, &contents(1, 8 + written % 64, 1, BLOCK), Shape::Single, &mut bench);
        assert_eq!(other.finish(&mut bench).status, Status::Ok);
        written += 1;
    };
    assert_eq!(outcome.status, Status::Medium);
    let counts = controller.counts();
    assert_eq!(counts.failed_by_reset, 1);
    // A write of a test that other programs keep from running may be late as well.
    assert!(counts.resets >= 3 && counts.resubmitted >= 2, "{counts:?}");
    assert!(on.disks[0].device().last_failure().is_some());
    bench.until("the end of the reset", || controller.info().phase == Phase::Ready);
    other.write(8, &contents(2, 8, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(other.finish(&mut bench).status, Status::Ok);
    stuck.close(&mut bench);
    other.close(&mut bench);
}

#[test]
fn a_caller_may_reset_the_controller_often() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    on.model.with(|model| model.faults().add(stick_always(READ)));
    disk.read(0, 1, Shape::Single, &mut bench);
    for _ in 0..5 {
        bench.wait("the reset", controller.reset()).unwrap();
    }
    on.model.with(|model| model.faults().clear());
    bench.wait("the reset", controller.reset()).unwrap();
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

/// A model behind a function that may refuse mappings, with a disk.
struct Refusing {
    model: Arc<Model>,
    function: Arc<Odd>,
    env: Env,
    controllers: Controllers,
    _running: aryk_nvme_model::Running,
}

impl Refusing {
    fn new(change: impl FnOnce(&mut Attach)) -> Self {
        let model = Model::new("model", Config { volatile_write_cache: false, ..slow() }).unwrap();
        let running = model.run().unwrap();
        let function = Arc::new(Odd::slow(&model));
        let location = Location::Model(Arc::<Odd>::clone(&function));
        let (env, controllers) = (Env::default(), Controllers::default());
        let mut config = Attach { dma: Dma::Pin, bounce_bytes: 2 << 20, ..Attach::new("nv", location) };
        change(&mut config);
        block_on(controllers.attach(&env, config)).unwrap();
        Self { model, function, env, controllers, _running: running }
    }
}

#[test]
fn requests_without_bounce_buffers_stay_before_new_ones_over_a_second_reset() {
    let on = Refusing::new(|attach| attach.grace = Duration::from_secs(60));
    let mut bench = Bench::new();
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 8 * BLOCK);
    let controller = on.controllers.find("nv").unwrap();
    on.model.with(|model| model.faults().add(stick_always(WRITE)));
    // 3.2 MiB, in guests' memory; the bounce buffers have 2 MiB.
    for i in 0..100 {
        disk.write(8 * i, &contents(1, 8 * i, 8, BLOCK), Shape::Single, &mut bench);
    }
    bench.until("the writes to be in flight", || controller.counts().pairs[0].in_flight == 100);
    *on.function.refused.lock().unwrap() = (3 << 20)..u64::MAX;
    on.model.with(|model| model.pull_out());
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    for i in 100..110 {
        disk.write(8 * i, &contents(1, 8 * i, 4, BLOCK), Shape::Single, &mut bench);
    }
    on.model.with(|model| model.plug_in());
    bench.until("some of the writes to be in flight again", || {
        controller.counts().pairs.iter().any(|pair| pair.qid.is_some() && pair.in_flight == 64)
    });
    on.model.with(|model| model.faults().clear());
    bench.wait("the second reset", controller.reset()).unwrap();
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len(), 110);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()));
    read_all(&mut disk, 1, &mut bench);
    disk.close(&mut bench);
    bench.wait("the detach", on.controllers.detach("nv")).unwrap();
    assert_eq!(on.model.with(|model| model.violations().count), 0);
}

/// Pulls the drive out with writes in flight, and plugs it in again while there is no memory for bounce buffers.
fn come_back_without_memory(on: &Refusing, bench: &mut Bench) -> Opener {
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 64, 8 * BLOCK);
    let controller = on.controllers.find("nv").unwrap();
    write_all(&mut disk, 1, bench);
    *on.function.refused.lock().unwrap() = (2 << 20)..(2 << 20) + 1;
    on.model.with(|model| model.pull_out());
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    on.model.with(|model| model.plug_in());
    bench.until("the failure to be reported", || {
        let failure = controller.info().last_failure;
        failure.is_some_and(|text| text.starts_with("core 0 gets no queue pair: "))
    });
    disk
}

#[test]
fn a_pair_that_cannot_be_created_is_tried_again() {
    let on = Refusing::new(|attach| attach.grace = Duration::from_secs(60));
    let mut bench = Bench::new();
    let mut disk = come_back_without_memory(&on, &mut bench);
    *on.function.refused.lock().unwrap() = 0..0;
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()));
    read_all(&mut disk, 1, &mut bench);
    disk.close(&mut bench);
    bench.wait("the detach", on.controllers.detach("nv")).unwrap();
}

#[test]
fn a_controller_whose_pair_cannot_be_created_ends_after_the_grace_time() {
    let on = Refusing::new(|attach| attach.grace = Duration::from_secs(1));
    let mut bench = Bench::new();
    let mut disk = come_back_without_memory(&on, &mut bench);
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().any(|outcome| !outcome.status.is_ok()));
    disk.close(&mut bench);
    bench.until("the controller to end", || on.controllers.list().is_empty());
    *on.function.refused.lock().unwrap() = 0..0;
    let again = Attach::new("nv", Location::Model(Arc::<Odd>::clone(&on.function)));
    bench.wait("another attach", on.controllers.attach(&on.env, again)).unwrap();
    bench.wait("the detach", on.controllers.detach("nv")).unwrap();
}
