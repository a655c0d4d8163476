//! Resets, late commands, and drives that go and come back, under verified I/O.

use super::OnModel;
use crate::{Config as Attach, Dma, Phase};
use aryk_bdev::{Access, Env, Op, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on, contents};
use aryk_nvme::controller::{ResetReason, SECOND};
use aryk_nvme::queue::Timeouts;
use aryk_nvme_model as model;
use aryk_nvme_model::{Action, Config, Data, NamespaceConfig, Queue, Rule, Timing};
use std::time::Duration;

pub(super) const BLOCK: u32 = 4096;
/// Opcodes of the NVM command set.
pub(super) const WRITE: u8 = 1;
pub(super) const READ: u8 = 2;
/// Dataset Management.
const DISCARD: u8 = 9;

/// A drive that takes some time for each request, in any order, and loses nothing.
pub(super) fn slow() -> Config {
    Config {
        data: Data::KeptDurable,
        timing: Timing { io: 20_000..=200_000, ..Timing::IMMEDIATE },
        ..Config::default()
    }
}

pub(super) fn with(config: Config, change: impl FnOnce(&mut Attach)) -> OnModel {
    OnModel::with(Env::default(), config, |attach| {
        attach.dma = Dma::Pin;
        change(attach);
    })
}

/// Limits that a test waits for. The thread of a model that other programs keep from running stays within them.
pub(super) fn impatient(attach: &mut Attach) {
    attach.options.io = Timeouts { command: SECOND / 2, grace: SECOND };
}

pub(super) fn open(on: &OnModel, bench: &mut Bench) -> Opener {
    bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 8 * BLOCK)
}

/// Submits writes to blocks of their own.
pub(super) fn write_all(disk: &mut Opener, seed: u64, bench: &mut Bench) {
    for i in 0..64 {
        disk.write(8 * i, &contents(seed, 8 * i, 4, BLOCK), Shape::Crossing, bench);
    }
}

pub(super) fn read_all(disk: &mut Opener, seed: u64, bench: &mut Bench) {
    for i in 0..64 {
        disk.read(8 * i, 4, Shape::Odd, bench);
        let outcome = disk.finish(bench);
        assert_eq!(
            (outcome.status, outcome.data == contents(seed, 8 * i, 4, BLOCK)),
            (Status::Ok, true),
            "{i}"
        );
    }
}

#[test]
fn a_reset_under_load_fails_no_request() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    for seed in 1..20 {
        // Every fourth reset finds commands in flight, however late it is.
        let delay = Rule { times: 64, ..Rule::once(Queue::Io, WRITE, Action::Delay(5_000_000_000)) };
        on.model.with(|model| (seed % 4 == 0).then(|| model.faults().add(delay)));
        write_all(&mut disk, seed, &mut bench);
        for _ in 0..seed * 3 {
            bench.turn();
        }
        on.model.with(|model| model.faults().clear());
        let reset = controller.reset();
        bench.wait("the reset", reset).unwrap();
        let outcomes = disk.drain(&mut bench);
        assert_eq!(outcomes.len(), 64);
        assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
        read_all(&mut disk, seed, &mut bench);
    }
    let (info, counts) = (controller.info(), controller.counts());
    assert_eq!((counts.resets, counts.failed_by_reset), (19, 0));
    assert!(counts.resubmitted > 0, "no reset found commands in flight");
    assert_eq!(info.phase, Phase::Ready);
    assert!(
        info.last_reset.is_some_and(|reset| reset.reason == ResetReason::Request && reset.took.is_some())
    );
    disk.close(&mut bench);
}

#[test]
fn a_late_command_is_aborted_and_then_the_controller_is_reset() {
    for is_abortable in [true, false] {
        let on = with(slow(), impatient);
        let mut bench = Bench::new();
        let mut disk = open(&on, &mut bench);
        let stick = Rule { skip: 9, ..Rule::once(Queue::Io, WRITE, Action::Stick { is_abortable }) };
        on.model.with(|model| model.faults().add(stick));
        write_all(&mut disk, 7, &mut bench);
        let outcomes = disk.drain(&mut bench);
        let failed: Vec<Status> =
            outcomes.iter().map(|outcome| outcome.status).filter(|status| !status.is_ok()).collect();
        let counts = on.controllers.find("nv").unwrap().counts();
        assert_eq!(counts.aborts, 1);
        if is_abortable {
            assert_eq!((failed, counts.resets), (vec![Status::Aborted], 0));
        } else {
            // No other command wrote the same blocks, so that the write is submitted again.
            assert_eq!((failed, counts.resets), (vec![], 1));
            read_all(&mut disk, 7, &mut bench);
        }
        disk.close(&mut bench);
    }
}

#[test]
fn a_late_read_that_was_aborted_is_submitted_again() {
    let on = with(slow(), |attach| {
        impatient(attach);
        attach.retries = 1;
    });
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    write_all(&mut disk, 7, &mut bench);
    disk.drain(&mut bench);
    let controller = on.controllers.find("nv").unwrap();
    let stick = |times| Rule { times, ..Rule::once(Queue::Io, READ, Action::Stick { is_abortable: true }) };
    on.model.with(|model| model.faults().add(stick(1)));
    disk.read(0, 4, Shape::Single, &mut bench);
    let outcome = disk.finish(&mut bench);
    assert_eq!((outcome.status, outcome.data == contents(7, 0, 4, BLOCK)), (Status::Ok, true));
    let counts = controller.counts();
    assert_eq!((counts.aborts, counts.retried, counts.resets), (1, 1, 0));
    // Not for ever.
    on.model.with(|model| model.faults().add(stick(2)));
    disk.read(0, 4, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Aborted);
    assert_eq!((controller.counts().aborts, controller.counts().resets), (3, 0));
    disk.close(&mut bench);
}

#[test]
fn a_write_that_another_has_overtaken_is_not_repeated() {
    let on = with(slow(), impatient);
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let stick = Rule::once(Queue::Io, WRITE, Action::Lose { after: 0 });
    on.model.with(|model| model.faults().add(stick));
    let first = disk.write(0, &contents(1, 0, 4, BLOCK), Shape::Single, &mut bench);
    OnModel::until("the first write to happen, without its completion", || {
        bench.turn();
        on.model.with(|model| model.data(1, 2, 1).is_some_and(|data| data == contents(1, 2, 1, BLOCK)))
    });
    let second = disk.write(2, &contents(2, 2, 1, BLOCK), Shape::Single, &mut bench);
    let outcomes = disk.drain(&mut bench);
    let status = |id| outcomes.iter().find(|outcome| outcome.id == id).unwrap().status;
    assert_eq!((status(second), status(first)), (Status::Ok, Status::Medium));
    disk.read(2, 1, Shape::Single, &mut bench);
    assert!(disk.finish(&mut bench).data == contents(2, 2, 1, BLOCK), "the acknowledged data stays");
    assert_eq!(on.controllers.find("nv").unwrap().counts().failed_by_reset, 1);
    disk.close(&mut bench);
}

#[test]
fn a_discard_is_repeated_unless_a_write_of_its_blocks_completed() {
    let on = with(slow(), impatient);
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let counts = || on.controllers.find("nv").unwrap().counts();
    let lose = || {
        on.model.with(|model| model.faults().add(Rule::once(Queue::Io, DISCARD, Action::Lose { after: 0 })))
    };
    write_all(&mut disk, 7, &mut bench);
    // What follows the end of a write in the same turn was not overtaken by it.
    disk.drain(&mut bench);
    lose();
    disk.command(Op::Unmap, 0, 4, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok, "nothing else has changed the blocks");
    assert_eq!((counts().resubmitted, counts().failed_by_reset), (1, 0));

    lose();
    let discard = disk.command(Op::Unmap, 8, 4, &mut bench);
    OnModel::until("the discard to happen, without its completion", || {
        bench.turn();
        on.model.with(|model| model.data(1, 10, 1).is_some_and(|data| data.iter().all(|&byte| byte == 0)))
    });
    let write = disk.write(10, &contents(2, 10, 1, BLOCK), Shape::Single, &mut bench);
    let outcomes = disk.drain(&mut bench);
    let status = |id| outcomes.iter().find(|outcome| outcome.id == id).unwrap().status;
    assert_eq!((status(write), status(discard)), (Status::Ok, Status::Medium));
    disk.read(10, 1, Shape::Single, &mut bench);
    assert!(disk.finish(&mut bench).data == contents(2, 10, 1, BLOCK), "the acknowledged data stays");
    assert_eq!((counts().resubmitted, counts().failed_by_reset), (1, 1));
    disk.close(&mut bench);
}

#[test]
fn a_read_that_fails_inside_the_drive_is_tried_again_and_a_write_is_not() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    for opcode in [READ, WRITE] {
        let fail = Rule::once(Queue::Io, opcode, Action::Fail(model::Status::new(0, 6).retryable(0)));
        on.model.with(|model| model.faults().add(fail));
    }
    disk.read(0, 4, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.write(0, &contents(1, 0, 4, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium, "whether it had an effect is not known");
    assert_eq!(on.controllers.find("nv").unwrap().counts().retried, 1);
    disk.close(&mut bench);
}

#[test]
fn media_errors_are_reported_as_such_and_kept_for_the_operator() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    on.model.with(|model| model.damage(1, 100, 1));
    disk.read(98, 4, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    let failure = on.disks[0].device().last_failure().unwrap();
    assert_eq!((failure.op, failure.lba.0, failure.blocks.0), (Op::Read, 98, 4));
    let device = failure.device.unwrap();
    assert_eq!((device.code, device.name), (0x281, "Unrecovered Read Error"));
    disk.close(&mut bench);
}

#[test]
fn a_status_that_allows_it_is_tried_again_after_the_controllers_delay() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    // Namespace Not Ready, with CRD 1: 100 ms.
    let status = model::Status::new(0, 0x82).retryable(1);
    let rule = Rule { times: 2, ..Rule::once(Queue::Io, READ, Action::Fail(status)) };
    on.model.with(|model| model.faults().add(rule));
    disk.read(5, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    assert_eq!(on.controllers.find("nv").unwrap().counts().retried, 2);
    let rule = Rule { times: 100, ..rule };
    on.model.with(|model| model.faults().add(rule));
    disk.read(5, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium, "not for ever");
    disk.close(&mut bench);
}

#[test]
fn a_drive_that_comes_back_in_time_takes_its_place() {
    let on = with(Config { volatile_write_cache: false, ..slow() }, |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    let mut completed = 0;
    for seed in 1..4 {
        write_all(&mut disk, seed, &mut bench);
        (0..30).for_each(|_| {
            bench.turn();
        });
        on.model.with(|model| model.pull_out());
        bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
        let now = controller.counts().pairs;
        assert!(now.len() == 1 && now[0].qid.is_none() && now[0].completed >= completed, "{now:?}");
        completed = now[0].completed;
        // New requests wait as well.
        let late = disk.read(8, 4, Shape::Single, &mut bench);
        (0..1000).for_each(|_| {
            bench.turn();
        });
        assert!(disk.completed().iter().all(|outcome| outcome.id != late && outcome.status.is_ok()));
        on.model.with(|model| model.plug_in());
        let outcomes = disk.drain(&mut bench);
        assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
        read_all(&mut disk, seed, &mut bench);
    }
    assert!(controller.info().last_failure.is_some_and(|text| text.contains("vanished")));
    // The counters go on where those of the pairs before ended.
    let counts = controller.counts();
    let [pair] = counts.pairs[..] else { panic!("{counts:?}") };
    assert!(pair.qid.is_some() && pair.completed > completed, "{counts:?}");
    assert_eq!(on.env.registry().list().len(), 1);
    disk.close(&mut bench);
}

#[test]
fn the_disks_of_a_drive_that_does_not_come_back_are_removed() {
    let on = with(slow(), |attach| attach.grace = Duration::from_millis(300));
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    write_all(&mut disk, 1, &mut bench);
    on.model.with(|model| model.pull_out());
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().any(|outcome| outcome.status == Status::Removed), "{outcomes:?}");
    disk.close(&mut bench);
    let bench = std::cell::RefCell::new(bench);
    OnModel::until("the removal", || {
        bench.borrow_mut().turn();
        on.env.registry().list().is_empty() && on.controllers.list().is_empty()
    });
    on.model.with(|model| model.plug_in());
    let env = on.env.clone();
    let function: std::sync::Arc<dyn aryk_pci::Function> = std::sync::Arc::<model::Model>::clone(&on.model);
    let again = on.controllers.attach(&env, Attach::new("nv", crate::Location::Model(function)));
    assert_eq!(block_on(again).unwrap().len(), 1);
}

#[test]
fn a_drive_that_comes_back_at_another_place_is_found_there() {
    let durable = || Config { volatile_write_cache: false, ..slow() };
    let on = with(durable(), |attach| attach.grace = Duration::from_secs(60));
    let elsewhere = |name: &str, config| {
        let model = model::Model::new(name, config).unwrap();
        let running = model.run().unwrap();
        let function: std::sync::Arc<dyn aryk_pci::Function> = std::sync::Arc::<model::Model>::clone(&model);
        (model, running, Attach { dma: Dma::Pin, ..Attach::new(name, crate::Location::Model(function)) })
    };
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    on.model.with(|model| model.pull_out());
    write_all(&mut disk, 5, &mut bench);
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);

    // Another drive is another controller; so is another port of the same.
    let (serial, controller_id) = ((4, b"OTHER".to_vec()), (78, vec![7, 0]));
    for (name, (offset, bytes)) in [("other", serial), ("port", controller_id)] {
        let (model, _running, attach) = elsewhere(name, durable());
        model.with(|model| model.faults().patch_identify(model::Patch { cns: 1, offset, bytes }));
        assert_eq!(bench.wait("an attach", on.controllers.attach(&on.env, attach)).unwrap().len(), 1);
        bench.wait("a detach", on.controllers.detach(name)).unwrap();
        assert_eq!(controller.info().phase, Phase::Away);
    }

    let (moved, running, attach) = elsewhere("new place", durable());
    let same_name = Attach { name: "nv".into(), ..attach.clone() };
    let error = bench.wait("an attach", on.controllers.attach(&on.env, same_name)).unwrap_err().to_string();
    assert!(
        error.contains("waits for its drive: if that is at new place now, attach it under any"),
        "{error}"
    );
    let error = bench.wait("the attach", on.controllers.attach(&on.env, attach)).unwrap_err().to_string();
    let text = "has moved: the controller nv goes on with it there";
    assert!(error.starts_with("the drive at new place (serial number '") && error.ends_with(text), "{error}");
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
    read_all(&mut disk, 5, &mut bench);
    let info = controller.info();
    assert_eq!((info.phase, info.location.as_str()), (Phase::Ready, "new place"));
    assert_eq!(on.controllers.list().len(), 1);
    assert!(on.env.registry().list().iter().all(|disk| disk.name() == "nvn1"));
    let block = moved.with(|model| model.data(1, 0, 1).map(<[u8]>::to_vec));
    assert_eq!(block, Some(contents(5, 0, 1, BLOCK)));
    disk.close(&mut bench);
    drop(bench);
    drop(on);
    assert_eq!(moved.with(|model| model.violations().count), 0);
    drop(running);
}

#[test]
fn a_drive_that_vanishes_during_a_reset_comes_back_too() {
    let timing = Timing { enable: 300_000_000, ..slow().timing };
    let on = with(Config { volatile_write_cache: false, timing, ..slow() }, |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    // One write is in flight whenever the reset begins.
    let stick = Rule::once(Queue::Io, WRITE, Action::Stick { is_abortable: false });
    on.model.with(|model| model.faults().add(stick));
    write_all(&mut disk, 5, &mut bench);
    (0..30).for_each(|_| {
        bench.turn();
    });
    on.model.with(|model| model.fail_fatally());
    bench.until("the reset to wait for the controller", || controller.counts().resubmitted > 0);
    on.model.with(|model| {
        model.pull_out();
        model.faults().clear();
    });
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    on.model.with(|model| model.plug_in());
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
    read_all(&mut disk, 5, &mut bench);
    disk.close(&mut bench);
}

#[test]
fn a_drive_that_may_have_lost_writes_does_not_come_back() {
    for flushes in [true, false] {
        let on = with(slow(), |attach| attach.grace = Duration::from_secs(60));
        let mut bench = Bench::new();
        let mut disk = open(&on, &mut bench);
        let controller = on.controllers.find("nv").unwrap();
        write_all(&mut disk, 5, &mut bench);
        disk.drain(&mut bench);
        if flushes {
            disk.command(Op::Flush, 0, 0, &mut bench);
            assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        }
        // The read does not end before the drive is gone.
        let stick = Rule::once(Queue::Io, READ, Action::Stick { is_abortable: false });
        on.model.with(|model| model.faults().add(stick));
        disk.read(0, 1, Shape::Single, &mut bench);
        on.model.with(|model| {
            model.pull_out();
            model.faults().clear();
        });
        bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
        on.model.with(|model| model.plug_in());
        let status = disk.finish(&mut bench).status;
        assert_eq!(status, if flushes { Status::Ok } else { Status::Removed });
        disk.close(&mut bench);
        if !flushes {
            assert!(controller.info().last_failure.is_some_and(|text| text.contains("may be lost")));
            let bench = std::cell::RefCell::new(bench);
            OnModel::until("the removal", || {
                bench.borrow_mut().turn();
                on.controllers.list().is_empty()
            });
            let function: std::sync::Arc<dyn aryk_pci::Function> =
                std::sync::Arc::<model::Model>::clone(&on.model);
            let again = Attach::new("nv", crate::Location::Model(function));
            block_on(on.controllers.attach(&on.env, again)).unwrap();
        }
    }
}

#[test]
fn a_removal_that_the_kernel_reports_after_the_drive_has_gone_may_lose_writes_too() {
    let on = with(slow(), |attach| attach.grace = Duration::from_secs(60));
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    write_all(&mut disk, 5, &mut bench);
    disk.drain(&mut bench);
    on.model.with(|model| model.pull_out());
    on.model.request_removal();
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    assert!(controller.info().may_have_lost_writes);
    disk.read(0, 1, Shape::Single, &mut bench);
    on.model.with(|model| model.plug_in());
    assert!(!disk.finish(&mut bench).status.is_ok());
    disk.close(&mut bench);
    bench.until("the removal", || on.controllers.list().is_empty());
    attach_again(&on);
}

#[test]
fn a_drive_that_is_shut_down_before_its_removal_comes_back() {
    let on = with(slow(), |attach| attach.grace = Duration::from_secs(60));
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    write_all(&mut disk, 5, &mut bench);
    on.model.request_removal();
    bench.until("the shutdown", || controller.info().phase == Phase::Away);
    assert!(!controller.info().may_have_lost_writes);
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()));
    read_all(&mut disk, 5, &mut bench);
    disk.close(&mut bench);
}

#[test]
fn a_flush_of_one_namespace_does_not_make_another_durable() {
    let namespaces = [1, 2].map(|nsid| (nsid, NamespaceConfig::new(1024, 1, nsid.into()))).to_vec();
    let config = Config { namespaces, ..slow() };
    let on = with(config, |attach| attach.grace = Duration::from_secs(60));
    let mut bench = Bench::new();
    let mut open = |name| bench.open(on.env.registry(), name, Access::Exclusive, 128, 8 * BLOCK);
    let (mut flushing, mut other) = (open("nvn1"), open("nvn2"));
    let controller = on.controllers.find("nv").unwrap();
    for disk in [&mut other, &mut flushing] {
        disk.write(0, &contents(1, 0, 4, 4096), Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    }
    let flush = |disk: &mut Opener, bench: &mut Bench| {
        disk.command(Op::Flush, 0, 0, bench);
        assert_eq!(disk.finish(bench).status, Status::Ok);
    };
    flush(&mut flushing, &mut bench);
    // A channel that is closed is not forgotten.
    other.close(&mut bench);
    let other = bench.open(on.env.registry(), "nvn2", Access::Exclusive, 128, 8 * BLOCK);
    on.model.with(|model| model.pull_out());
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    assert!(controller.info().may_have_lost_writes);
    other.close(&mut bench);
    flushing.close(&mut bench);
    on.model.with(|model| model.plug_in());
    bench.until("the removal", || on.controllers.list().is_empty());
    attach_again(&on);
}

/// Attaches the controller as an operator does.
fn attach_again(on: &OnModel) {
    let function: std::sync::Arc<dyn aryk_pci::Function> = std::sync::Arc::<model::Model>::clone(&on.model);
    let again = Attach::new("nv", crate::Location::Model(function));
    block_on(on.controllers.attach(&on.env, again)).unwrap();
}

#[test]
fn commands_that_change_namespaces_need_disks_that_nobody_uses() {
    let on = with(slow(), |_| ());
    let mut bench = Bench::new();
    let disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    let format = || aryk_nvme::admin::format(1, 0, aryk_nvme::admin::Erase::None);
    let error = block_on(controller.admin(format())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the admin command 0x80 may destroy data of a disk that is in use: nvn1 by the bench"
    );
    disk.close(&mut bench);
    bench.until("the disk to be closed", || on.disks[0].openers().is_empty());
    assert!(bench.wait("the format", controller.admin(format())).unwrap().status.is_success());
    bench.until("a disk with the new format", || {
        on.env.registry().find("nvn1").is_ok_and(|disk| disk.geometry().block_size == 512)
    });
}

#[test]
fn namespaces_come_go_and_grow() {
    let on = with(Config { namespaces: vec![(1, NamespaceConfig::new(1024, 1, 1))], ..slow() }, |_| ());
    let (registry, mut bench) = (on.env.registry(), Bench::new());
    on.model.with(|model| model.add_namespace(3, NamespaceConfig::new(2048, 0, 3)));
    OnModel::until("a new disk", || registry.find("nvn3").is_ok_and(|disk| disk.blocks().0 == 2048));
    on.model.with(|model| model.resize_namespace(3, 4096));
    OnModel::until("the new size", || registry.find("nvn3").is_ok_and(|disk| disk.blocks().0 == 4096));
    let mut disk = bench.open(registry, "nvn3", Access::Exclusive, 8, 8 * BLOCK);
    disk.write(4088, &contents(9, 4088, 8, 512), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    on.model.with(|model| model.remove_namespace(3));
    let bench = std::cell::RefCell::new(bench);
    OnModel::until("the removal to begin", || {
        bench.borrow_mut().turn();
        registry.find("nvn3").map_or(true, |disk| disk.is_removing())
    });
    disk.close(&mut bench.borrow_mut());
    OnModel::until("the removal", || {
        bench.borrow_mut().turn();
        registry.find("nvn3").is_err()
    });
    assert!(registry.find("nvn1").is_ok());
    let info = on.controllers.find("nv").unwrap().info();
    assert_eq!(info.namespaces.len(), 1);
}

#[test]
fn one_namespace_alone_can_be_a_disk_with_a_name_of_its_own() {
    let two = [(1, NamespaceConfig::new(1024, 1, 1)), (2, NamespaceConfig::new(512, 0, 2))];
    let on = with(Config { namespaces: two.to_vec(), ..slow() }, |attach| {
        attach.exposed = crate::Exposed::One { nsid: 2, disk: "data".into() };
    });
    let names: Vec<_> = on.env.registry().list().iter().map(|disk| disk.name().to_owned()).collect();
    assert_eq!(names, ["data"]);
    let function: std::sync::Arc<dyn aryk_pci::Function> = std::sync::Arc::<model::Model>::clone(&on.model);
    let config = |name| Attach::new(name, crate::Location::Model(std::sync::Arc::clone(&function)));
    let refused = |config| block_on(on.controllers.attach(&on.env, config)).unwrap_err().to_string();
    assert_eq!(refused(config("nv")), "there is a controller nv already");
    assert_eq!(refused(config("other")), "model is attached already, as nv");
    block_on(on.env.registry().remove("data")).unwrap();
    OnModel::until("the controller to be detached", || on.controllers.list().is_empty());
    let missing = crate::Exposed::One { nsid: 9, disk: "data".into() };
    let error = refused(Attach { exposed: missing, ..config("nv") });
    assert_eq!(error, "namespace 9 of nv: there is none");
    OnModel::until("the controller to end", || on.controllers.list().is_empty());
    block_on(on.controllers.attach(&on.env, config("nv"))).unwrap();
}
