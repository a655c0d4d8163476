//! Controllers whose interrupts cannot be masked: a second queue pair for requests in flight while a reactor sleeps.

use super::OnModel;
use super::odd::Odd;
use super::recovery::{BLOCK, READ, WRITE, slow};
use super::sleep::{REQUESTS, exercise, of_latency, run_on, two_reactors};
use crate::driver::find_for_channel;
use crate::{AttachedController, Config as Attach, Dma, Location, PairCounts, Phase};
use aryk_bdev::{Access, Env, Registry, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on, contents};
use aryk_nvme_model::{Action, Config, Queue, Rule};
use aryk_reactor::{Armed, Driver, Options, Reactors, SleepPolicy};
use std::sync::Arc;

/// Opcode of Create I/O Completion Queue.
const CREATE_CQ: u8 = 5;

/// A controller that accepts so many interrupts, none of which can be masked.
fn with_interrupts(max: usize, env: Env, config: Config) -> OnModel {
    let odd = |model: &_| Arc::new(Odd::without_masks(model, max));
    OnModel::behind(env, config, odd, |attach| attach.dma = Dma::Pin)
}

fn on_model(config: Config) -> OnModel {
    with_interrupts(usize::MAX, Env::default(), config)
}

/// Exercises a drive on a reactor of its own. Returns the interrupts of queue pairs.
fn run(policy: SleepPolicy, latency: u64, interrupts_max: usize) -> (u64, Vec<PairCounts>) {
    let reactors = Reactors::start(&Options { policy, ..Options::default() }).unwrap();
    let env = Env::new(Arc::new(Registry::new()), &reactors);
    let on = with_interrupts(interrupts_max, env, of_latency(latency));
    let (interrupts, _) = run_on(&on, &reactors);
    (interrupts, on.controllers.find("nv").unwrap().counts().pairs)
}

#[test]
fn a_reactor_that_polls_gets_no_interrupt() {
    let (interrupts, pairs) = run(SleepPolicy::Poll, 20_000, usize::MAX);
    assert_eq!(interrupts, 0);
    let second = pairs.get(1).map_or(0, |pair| pair.submitted);
    assert_eq!((pairs[0].submitted, second), (2 * REQUESTS as u64, 0));
}

#[test]
fn a_reactor_that_sleeps_is_woken_by_each_completion_of_its_second_pair() {
    for policy in [SleepPolicy::Interrupt, SleepPolicy::Adaptive] {
        let reactors = Reactors::start(&Options { policy, ..Options::default() }).unwrap();
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let on = with_interrupts(usize::MAX, env, of_latency(5_000_000));
        let controller = on.controllers.find("nv").unwrap();
        run_on(&on, &reactors);
        OnModel::until("the second pair", || controller.counts().pairs.len() == 2);
        let before = controller.counts().pairs[1].submitted;
        let (interrupts, awake) = run_on(&on, &reactors);
        let pairs = controller.counts().pairs;
        assert_eq!(pairs[0].submitted + pairs[1].submitted, 4 * REQUESTS as u64);
        assert!(pairs[1].submitted - before > REQUESTS as u64, "{policy:?}: {pairs:?}");
        assert_eq!(interrupts, pairs[1].submitted, "{policy:?}");
        assert!(awake < 900, "{policy:?}: awake for {awake} of 1000");
    }
}

#[test]
fn a_host_that_refuses_several_interrupts_gets_one() {
    let (interrupts, pairs) = run(SleepPolicy::Interrupt, 100_000, 1);
    assert_eq!((interrupts, pairs.len()), (0, 1));
    assert_eq!(pairs[0].submitted, 2 * REQUESTS as u64);
}

#[test]
fn cores_without_a_second_pair_poll() {
    // Two queue pairs for two cores; three: one core has two.
    for (io_queues, expected) in [(1, 1), (2, 2), (3, 3), (4, 4)] {
        let (reactors, env) = two_reactors();
        let on = with_interrupts(usize::MAX, env, Config { io_queues, ..Config::default() });
        let handles = reactors.handles();
        let running: Vec<_> =
            handles.iter().zip([0, 1000]).map(|(handle, first)| exercise(&on, handle, first)).collect();
        running.into_iter().for_each(|running| block_on(running).unwrap());
        let pairs = || on.controllers.find("nv").unwrap().counts().pairs;
        OnModel::until("the queue pairs", || pairs().len() == expected);
        OnModel::until("all requests to be counted", || {
            pairs().iter().map(|pair| pair.completed).sum::<u64>() == 4 * REQUESTS as u64
        });
        assert_eq!(pairs().iter().filter(|pair| pair.qid.is_some()).count(), expected);
    }
}

/// What a reactor does before it sleeps. Returns the answers of both drivers.
fn try_to_sleep(controller: &AttachedController, bench: &mut Bench) -> [Armed; 2] {
    let shared = &controller.shared;
    [shared.key, shared.waking_key].map(|key| {
        let driver = find_for_channel(key, bench.cx()).unwrap();
        let mut driver = driver.borrow_mut();
        driver.flush(bench.cx());
        driver.arm(bench.cx())
    })
}

/// A command with this opcode is never answered.
fn stick(on: &OnModel, opcode: u8) {
    let rule = Rule::once(Queue::Io, opcode, Action::Stick { is_abortable: false });
    on.model.with(|model| model.faults().add(rule));
}

/// The status of the next request that ends.
fn next(disk: &mut Opener, bench: &mut Bench) -> Status {
    let mut ended = None;
    bench.until("a request to end", || {
        ended = disk.completed().pop();
        ended.is_some()
    });
    ended.unwrap().status
}

fn read(disk: &mut Opener, bench: &mut Bench) {
    disk.read(500, 1, Shape::Single, bench);
    assert_eq!(next(disk, bench), Status::Ok);
}

/// A disk on the bench's reactor, with a write in flight on the first pair, which has kept the reactor from sleeping, so that
/// requests go to the second.
fn open_sleepy(on: &OnModel, bench: &mut Bench) -> (Opener, Arc<AttachedController>) {
    let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 200, 8 * BLOCK);
    let controller = on.controllers.find("nv").unwrap();
    stick(on, WRITE);
    disk.write(0, &contents(1, 0, 4, BLOCK), Shape::Crossing, bench);
    // The drive takes commands in order: it has taken the write when a later read is completed.
    read(&mut disk, bench);
    assert_eq!(controller.counts().pairs[0].in_flight, 1);
    assert_eq!(try_to_sleep(&controller, bench), [Armed::Busy, Armed::Yes]);
    // The second pair may not be there yet.
    for _ in 0..100_000 {
        read(&mut disk, bench);
        if controller.counts().pairs.get(1).is_some_and(|pair| pair.submitted > 0) {
            return (disk, controller);
        }
    }
    panic!("no request goes to the second pair: {:?}", controller.counts());
}

#[test]
fn requests_go_to_the_first_pair_again_when_the_reactor_no_longer_sleeps() {
    let on = on_model(slow());
    let mut bench = Bench::new();
    let (mut disk, controller) = open_sleepy(&on, &mut bench);
    let submitted = |pair: usize| controller.counts().pairs[pair].submitted;
    // While it sleeps now and then, they go to the second.
    let before = submitted(0);
    for _ in 0..100 {
        read(&mut disk, &mut bench);
        try_to_sleep(&controller, &mut bench);
    }
    assert_eq!(submitted(0), before);
    for _ in 0..100 {
        read(&mut disk, &mut bench);
    }
    assert_eq!((submitted(0) - before, submitted(1) >= 164), (36, true));
    // The reactor cannot sleep again.
    assert_eq!(try_to_sleep(&controller, &mut bench), [Armed::Busy, Armed::Yes]);
    read(&mut disk, &mut bench);
    assert_eq!(submitted(0) - before, 36);
    // A completion that comes first is not slept through.
    disk.read(1, 1, Shape::Single, &mut bench);
    while try_to_sleep(&controller, &mut bench)[1] == Armed::Yes {}
    assert_eq!(next(&mut disk, &mut bench), Status::Ok);
    bench.wait("the reset", controller.reset()).unwrap();
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

/// A disk with a write in flight on each pair.
fn open_busy(on: &OnModel, bench: &mut Bench) -> (Opener, Arc<AttachedController>) {
    let (mut disk, controller) = open_sleepy(on, bench);
    stick(on, WRITE);
    disk.write(8, &contents(1, 8, 4, BLOCK), Shape::Crossing, bench);
    read(&mut disk, bench);
    assert!(controller.counts().pairs.iter().all(|pair| pair.in_flight == 1));
    (disk, controller)
}

/// Both writes end, and the disk serves on.
fn finish(mut disk: Opener, bench: &mut Bench) {
    let outcomes = disk.drain(bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()));
    for lba in [0, 8] {
        disk.read(lba, 4, Shape::Single, bench);
        let outcome = disk.finish(bench);
        assert_eq!((outcome.status, outcome.data == contents(1, lba, 4, BLOCK)), (Status::Ok, true));
    }
    disk.close(bench);
}

#[test]
fn a_reset_submits_the_requests_of_both_pairs_again() {
    let on = on_model(slow());
    let mut bench = Bench::new();
    let (disk, controller) = open_busy(&on, &mut bench);
    bench.wait("the reset", controller.reset()).unwrap();
    finish(disk, &mut bench);
    let counts = controller.counts();
    assert_eq!((counts.resubmitted, counts.failed_by_reset), (2, 0));
    assert!(counts.pairs.iter().all(|pair| pair.qid.is_some() && pair.in_flight == 0));
}

#[test]
fn a_write_that_the_other_pair_has_overtaken_is_not_repeated() {
    let on = on_model(slow());
    let mut bench = Bench::new();
    let (mut disk, controller) = open_sleepy(&on, &mut bench);
    disk.write(2, &contents(2, 2, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(next(&mut disk, &mut bench), Status::Ok);
    bench.wait("the reset", controller.reset()).unwrap();
    assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    assert_eq!(controller.counts().failed_by_reset, 1);
    disk.close(&mut bench);
}

#[test]
fn a_late_command_of_the_second_pair_is_aborted_there() {
    let odd = |model: &_| Arc::new(Odd::without_masks(model, usize::MAX));
    let on = OnModel::behind(Env::default(), slow(), odd, |attach| {
        attach.dma = Dma::Pin;
        attach.options.io.command = aryk_nvme::controller::SECOND;
    });
    let mut bench = Bench::new();
    let (mut disk, controller) = open_sleepy(&on, &mut bench);
    let rule = Rule::once(Queue::Io, READ, Action::Stick { is_abortable: true });
    on.model.with(|model| model.faults().add(rule));
    disk.read(1, 1, Shape::Single, &mut bench);
    bench.until("both commands to be late", || controller.counts().aborts == 2);
    assert_eq!(next(&mut disk, &mut bench), Status::Ok, "the read is submitted again");
    assert_eq!(controller.counts().retried, 1);
    bench.wait("the reset", controller.reset()).unwrap();
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

#[test]
fn requests_of_both_pairs_wait_for_a_drive_that_comes_back() {
    for has_second in [true, false] {
        let on = on_model(Config { volatile_write_cache: false, ..slow() });
        let mut bench = Bench::new();
        let (mut disk, controller) = open_busy(&on, &mut bench);
        on.model.with(|model| model.pull_out());
        bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
        disk.write(16, &contents(1, 16, 4, BLOCK), Shape::Crossing, &mut bench);
        on.model.with(|model| {
            let fail = Action::Fail(aryk_nvme_model::Status::new(1, 0));
            let refuse = Rule { skip: 1, ..Rule::once(Queue::Admin, CREATE_CQ, fail) };
            if !has_second {
                model.faults().add(refuse);
            }
            model.plug_in();
        });
        finish(disk, &mut bench);
        let counts = controller.counts();
        assert_eq!((counts.resubmitted, counts.failed_by_reset, counts.pairs.len()), (2, 0, 2));
        let is_there = |pair: usize| controller.counts().pairs[pair].qid.is_some();
        assert!(is_there(0));
        let failure = || controller.info().last_failure.unwrap_or_default();
        if has_second {
            OnModel::until("the second pair", || is_there(1));
        } else {
            OnModel::until("the second pair to be refused", || {
                failure().starts_with("core 0 gets no queue pair with interrupts: the controller creates no")
            });
        }
    }
}

#[test]
fn requests_of_both_pairs_fail_with_a_drive_that_does_not_come_back() {
    let odd = |model: &_| Arc::new(Odd::without_masks(model, usize::MAX));
    let on = OnModel::behind(Env::default(), slow(), odd, |attach| {
        attach.dma = Dma::Pin;
        attach.grace = std::time::Duration::ZERO;
    });
    let mut bench = Bench::new();
    let (mut disk, _) = open_busy(&on, &mut bench);
    on.model.with(|model| model.pull_out());
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.iter().map(|outcome| outcome.status).collect::<Vec<_>>(), [Status::Removed; 2]);
    disk.close(&mut bench);
    bench.until("the removal", || on.controllers.list().is_empty());
    let function: Arc<dyn aryk_pci::Function> = Arc::<aryk_nvme_model::Model>::clone(&on.model);
    on.model.with(|model| model.plug_in());
    block_on(on.controllers.attach(&on.env, Attach::new("nv", Location::Model(function)))).unwrap();
}

#[test]
fn a_reactor_that_is_removed_gives_both_pairs_back() {
    let (reactors, env) = two_reactors();
    let on = with_interrupts(usize::MAX, env, Config::default());
    let handles = reactors.handles();
    for (handle, first) in handles.iter().zip([0, 1000]) {
        block_on(exercise(&on, handle, first)).unwrap();
    }
    let controller = on.controllers.find("nv").unwrap();
    let there = || controller.counts().pairs.iter().filter(|pair| pair.qid.is_some()).count();
    OnModel::until("two pairs on each core", || there() == 4);
    reactors.begin_to_leave(handles[1].core()).unwrap();
    OnModel::until("the pairs of one core to be deleted", || there() == 2);
    block_on(exercise(&on, &handles[0], 0)).unwrap();
    block_on(controller.reset()).unwrap();
    assert_eq!(there(), 2);
}
