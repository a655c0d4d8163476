//! What an operator's options change.

use super::recovery::{READ, WRITE, impatient, open, read_all, slow, with, write_all};
use crate::{OnTimeout, Phase, WITHOUT_LIMIT};
use aryk_bdev::Status;
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_nvme::admin::get_feature;
use aryk_nvme::controller::{ResetReason, SECOND};
use aryk_nvme::queue::Timeouts;
use aryk_nvme::spec::feature::{ARBITRATION, Arbitration, Select};
use aryk_nvme_model as model;
use aryk_nvme_model::{Action, Config, Queue, Rule};

#[test]
fn a_late_command_resets_the_controller_at_once_if_the_operator_wants_that() {
    let on = with(slow(), |attach| {
        impatient(attach);
        attach.on_timeout = OnTimeout::Reset;
    });
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let stick = Rule { skip: 9, ..Rule::once(Queue::Io, WRITE, Action::Stick { is_abortable: true }) };
    on.model.with(|model| model.faults().add(stick));
    write_all(&mut disk, 7, &mut bench);
    assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status.is_ok()));
    let controller = on.controllers.find("nv").unwrap();
    let counts = controller.counts();
    assert_eq!((counts.aborts, counts.resets, counts.failed_by_reset), (0, 1, 0));
    assert_eq!(controller.info().last_reset.unwrap().reason, ResetReason::CommandTimeout);
    read_all(&mut disk, 7, &mut bench);
    disk.close(&mut bench);
}

#[test]
fn a_late_command_is_only_logged_if_the_operator_wants_that() {
    let on = with(slow(), |attach| {
        attach.options.io = Timeouts { command: SECOND / 5, grace: SECOND / 5 };
        attach.on_timeout = OnTimeout::Log;
    });
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    // Later than an abort and a reset would be.
    let delay = Rule { skip: 9, ..Rule::once(Queue::Io, WRITE, Action::Delay(2_000_000_000)) };
    on.model.with(|model| model.faults().add(delay));
    write_all(&mut disk, 7, &mut bench);
    assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status.is_ok()));
    let controller = on.controllers.find("nv").unwrap();
    let counts = controller.counts();
    assert_eq!((counts.aborts, counts.resets, counts.retried), (0, 0, 0));
    assert_eq!(controller.info().phase, Phase::Ready);
    disk.close(&mut bench);
}

#[test]
fn a_command_is_tried_again_as_often_as_the_operator_wants() {
    // Namespace Not Ready, after which the drive wants no delay.
    let fail = Action::Fail(model::Status::new(0, 0x82).retryable(0));
    let run = |retries, times| {
        let on = with(Config::default(), |attach| attach.retries = retries);
        let mut bench = Bench::new();
        let mut disk = open(&on, &mut bench);
        on.model.with(|model| model.faults().add(Rule { times, ..Rule::once(Queue::Io, READ, fail) }));
        disk.read(0, 1, Shape::Single, &mut bench);
        let status = disk.finish(&mut bench).status;
        disk.close(&mut bench);
        (status, on.controllers.find("nv").unwrap().counts().retried)
    };
    assert_eq!(run(0, 1), (Status::Medium, 0));
    assert_eq!(run(2, 2), (Status::Ok, 2));
    assert_eq!(run(2, 3), (Status::Medium, 2));
    assert_eq!(run(WITHOUT_LIMIT, 300), (Status::Ok, 300));
}

#[test]
fn arbitration_is_set_at_each_start_with_the_weights_that_the_controller_has() {
    let wanted = Arbitration { burst: 3, low: 1, medium: 2, high: 255 };
    for (arbitration, weighted_round_robin, value) in
        [(None, true, 5), (Some(wanted), false, 3), (Some(wanted), true, 0xff02_0103)]
    {
        let config = Config { weighted_round_robin, ..Config::default() };
        let on = with(config, |attach| attach.options.arbitration = arbitration);
        let controller = on.controllers.find("nv").unwrap();
        let current = || {
            let answer = block_on(controller.admin(get_feature(ARBITRATION, 0, Select::Current, 0))).unwrap();
            answer.status.is_success().then_some(answer.result)
        };
        assert_eq!(current(), Some(value));
        // A reset of the controller makes it forget the value.
        block_on(controller.reset()).unwrap();
        assert_eq!(current(), Some(value));
    }
}

#[test]
fn a_controller_that_refuses_arbitration_is_used_without() {
    const SET_FEATURES: u8 = 9;
    let model = model::Model::new("model", Config::default()).unwrap();
    // The feature that is set after the number of queues, and asynchronous events.
    let refuse = Action::Fail(model::Status::new(1, 0x0e));
    model.with(|model| {
        model.faults().add(Rule { skip: 3, ..Rule::once(Queue::Admin, SET_FEATURES, refuse) });
    });
    let running = model.run().unwrap();
    let controllers = crate::Controllers::default();
    let function: std::sync::Arc<dyn aryk_pci::Function> = std::sync::Arc::<model::Model>::clone(&model);
    let mut config = crate::Config::new("nv", crate::Location::Model(function));
    config.options.arbitration = Some(Arbitration { burst: 3, low: 0, medium: 0, high: 0 });
    let disks = block_on(controllers.attach(&aryk_bdev::Env::default(), config)).unwrap();
    assert_eq!(disks.len(), 1);
    let controller = controllers.find("nv").unwrap();
    let answer = block_on(controller.admin(get_feature(ARBITRATION, 0, Select::Current, 0))).unwrap();
    assert_eq!(answer.result, 5, "what the controller has by itself");
    block_on(controllers.detach("nv")).unwrap();
    drop(running);
}
