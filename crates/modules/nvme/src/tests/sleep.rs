//! Reactors with a drive: interrupts only while they sleep, and fewer queue pairs than reactors.

use super::OnModel;
use crate::Dma;
use aryk_bdev::{Access, AsyncChannel, Blocks, Env, Lba, Registry};
use aryk_bdev_conformance::{block_on, contents};
use aryk_dma::Buffer;
use aryk_nvme_model::{Action, Config, Queue, Rule, Timing};
use aryk_reactor::{CoreSet, Handle, Options, Reactors, SleepPolicy};
use std::sync::Arc;
use tokio::sync::oneshot;

pub(super) const REQUESTS: usize = 30;
/// Opcode of Create I/O Completion Queue.
const CREATE_CQ: u8 = 5;
/// Opcode of Write.
const WRITE: u8 = 1;

/// Writes and reads blocks of its own, one after the other, on a reactor.
pub(super) fn exercise(on: &OnModel, handle: &Handle, first: u64) -> oneshot::Receiver<()> {
    let descriptor = on.env.registry().open("nvn1", Access::Shared, "the test", |_| ()).unwrap();
    block_on(descriptor.prepare(handle)).unwrap();
    let (done, result) = oneshot::channel();
    let start = handle.call(move |cx| {
        let thread = cx.add_thread("test", CoreSet::from_iter([cx.handle().core()]));
        let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
        let exercise = async move {
            for lba in (first..).take(REQUESTS) {
                let data = contents(lba + 1, lba, 1, 4096);
                let buffer = channel.write(Lba(lba), Blocks(1), Buffer::from_slice(&data)).await.unwrap();
                let read = channel.read(Lba(lba), Blocks(1), buffer).await.unwrap();
                assert!(read.bytes() == data);
            }
            drop(channel);
            done.send(()).unwrap();
        };
        cx.local().spawn(exercise).detach();
    });
    block_on(start).unwrap();
    result
}

/// Exercises a drive on a reactor of its own. Returns the interrupts of the drive, and the time that the
/// reactor was awake, in thousandths.
fn run(policy: SleepPolicy, latency: u64) -> (u64, u64) {
    let reactors = Reactors::start(&Options { policy, ..Options::default() }).unwrap();
    let env = Env::new(Arc::new(Registry::new()), &reactors);
    let on = OnModel::with(env, of_latency(latency), |attach| attach.dma = Dma::Pin);
    run_on(&on, &reactors)
}

/// A drive that takes this time for each request.
pub(super) fn of_latency(latency: u64) -> Config {
    Config { timing: Timing { io: latency..=latency, ..Timing::IMMEDIATE }, ..Config::default() }
}

/// As [`run`], on a drive and a reactor that are there.
pub(super) fn run_on(on: &OnModel, reactors: &Reactors) -> (u64, u64) {
    let handle = reactors.handles().remove(0);
    block_on(exercise(on, &handle, 0)).unwrap();
    let stats = handle.stats();
    let awake = stats.busy + stats.idle;
    let awake = awake.as_nanos() * 1000 / (awake + stats.sleeping).as_nanos().max(1);
    // Vector 0 is the admin queue's.
    let interrupts = (1..17).map(|vector| on.model.with(|model| model.interrupts(vector))).sum();
    (interrupts, awake as u64)
}

#[test]
fn a_reactor_that_polls_gets_no_interrupt() {
    let (interrupts, _) = run(SleepPolicy::Poll, 20_000);
    assert_eq!(interrupts, 0);
}

#[test]
fn a_reactor_that_sleeps_is_woken_by_each_completion() {
    let (interrupts, awake) = run(SleepPolicy::Interrupt, 5_000_000);
    // A masked vector may signal once more when it is unmasked.
    assert!((2 * REQUESTS as u64..=4 * REQUESTS as u64).contains(&interrupts), "{interrupts} interrupts");
    assert!(awake < 500, "awake for {awake} of 1000");
}

/// Two reactors that run, and a controller for them.
fn on_two_reactors(config: Config) -> (Reactors, OnModel) {
    let (reactors, env) = two_reactors();
    (reactors, OnModel::with(env, config, |attach| attach.dma = Dma::Pin))
}

pub(super) fn two_reactors() -> (Reactors, Env) {
    let cores = CoreSet::allowed();
    assert!(cores.iter().count() > 1, "a test of two reactors");
    let options = Options { cores: cores.iter().take(2).collect(), ..Options::default() };
    let reactors = Reactors::start(&options).unwrap();
    let env = Env::new(Arc::new(Registry::new()), &reactors);
    (reactors, env)
}

#[test]
fn a_reactor_that_is_removed_during_a_replay_holds_up_no_other() {
    let (reactors, on) = on_two_reactors(Config::default());
    let handles = reactors.handles();
    for (handle, first) in handles.iter().zip([0, 1000]) {
        block_on(exercise(&on, handle, first)).unwrap();
    }
    let controller = on.controllers.find("nv").unwrap();
    let of_first = || controller.counts().pairs[0];
    // The first reactor replays a write; a second later, the queues of the second reactor are created.
    on.model.with(|model| {
        let stick = Action::Stick { is_abortable: false };
        model.faults().add(Rule::once(Queue::Io, WRITE, stick));
        let delay = Action::Delay(1_000_000_000);
        model.faults().add(Rule { skip: 1, ..Rule::once(Queue::Admin, CREATE_CQ, delay) });
    });
    let mut running = exercise(&on, &handles[0], 0);
    OnModel::until("a write to be in flight", || of_first().in_flight == 1);
    // The drive takes commands in order: it has taken the write when later ones are completed.
    block_on(exercise(&on, &handles[0], 500)).unwrap();
    let completed = of_first().completed;
    let reset = std::thread::spawn({
        let controller = Arc::clone(&controller);
        move || block_on(controller.reset())
    });
    // If the reset creates the queues in the other order, the requests after the replay follow at once.
    OnModel::until("the replay", || of_first().completed > completed);
    reactors.begin_to_leave(handles[1].core()).unwrap();
    reset.join().unwrap().unwrap();
    OnModel::until("the requests after the replay", || running.try_recv().is_ok());
    assert_eq!(controller.counts().resubmitted, 1);
    OnModel::until("the second reactor to be without a pair", || {
        controller.counts().pairs.iter().filter(|pair| pair.qid.is_some()).count() == 1
    });
}

/// Writes a block on a reactor. The receiver gets whether the write succeeded.
fn write(on: &OnModel, handle: &Handle, lba: u64, seed: u64) -> oneshot::Receiver<bool> {
    let descriptor = on.env.registry().open("nvn1", Access::Shared, "the test", |_| ()).unwrap();
    block_on(descriptor.prepare(handle)).unwrap();
    let (done, result) = oneshot::channel();
    let start = handle.call(move |cx| {
        let thread = cx.add_thread("test", CoreSet::from_iter([cx.handle().core()]));
        let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
        let write = async move {
            let buffer = Buffer::from_slice(&contents(seed, lba, 1, 4096));
            let is_written = channel.write(Lba(lba), Blocks(1), buffer).await.is_ok();
            drop(channel);
            done.send(is_written).unwrap();
        };
        cx.local().spawn(write).detach();
    });
    block_on(start).unwrap();
    result
}

#[test]
fn a_write_that_a_removed_reactor_has_overtaken_is_not_repeated() {
    let (reactors, on) = on_two_reactors(Config::default());
    let controller = on.controllers.find("nv").unwrap();
    let handles = reactors.handles();
    let is_on_drive = |seed| {
        on.model.with(|model| model.data(1, 7, 1).is_some_and(|data| data == contents(seed, 7, 1, 4096)))
    };
    let lose = Rule::once(Queue::Io, WRITE, Action::Lose { after: 0 });
    on.model.with(|model| model.faults().add(lose));
    let old = write(&on, &handles[0], 7, 1);
    OnModel::until("the old write to happen, without its completion", || is_on_drive(1));
    assert!(block_on(write(&on, &handles[1], 7, 2)).unwrap());
    reactors.begin_to_leave(handles[1].core()).unwrap();
    OnModel::until("the pair to be removed", || {
        controller.counts().pairs.iter().filter(|pair| pair.qid.is_some()).count() == 1
    });
    block_on(controller.reset()).unwrap();
    assert!(!block_on(old).unwrap());
    assert_eq!(controller.counts().failed_by_reset, 1);
    assert!(is_on_drive(2), "the acknowledged data stays");
}

#[test]
fn reactors_share_the_queue_pairs_of_a_drive_that_has_few() {
    let (reactors, on) = on_two_reactors(Config { io_queues: 1, ..Config::default() });
    let handles = reactors.handles();
    let running: Vec<_> =
        handles.iter().zip([0, 1000]).map(|(handle, first)| exercise(&on, handle, first)).collect();
    running.into_iter().for_each(|running| block_on(running).unwrap());
    let pairs = on.controllers.find("nv").unwrap().counts().pairs;
    assert_eq!(pairs.len(), 1);
    OnModel::until("all requests to be counted", || {
        on.controllers.find("nv").unwrap().counts().pairs[0].completed == 4 * REQUESTS as u64
    });
}
