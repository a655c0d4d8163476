//! An operator's calls of a controller, also two at once, and their answers.

use super::OnModel;
use crate::{Config as Attach, Dma, Error, Phase};
use aryk_bdev::{Access, Env, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_nvme::admin::{Erase, format};
use aryk_nvme_model::{Config, Data, Timing};
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Waker};
use std::time::Duration;

const BLOCK: u32 = 4096;

fn with(config: Config, change: impl FnOnce(&mut Attach)) -> OnModel {
    OnModel::with(Env::default(), config, |attach| {
        attach.dma = Dma::Pin;
        change(attach);
    })
}

/// Sends the command of a call, whose answer comes later.
fn send<T>(call: &mut Pin<&mut impl Future<Output = T>>) {
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn enabling_is_answered_when_the_controller_is_ready() {
    let timing = Timing { shutdown: 100_000_000, enable: 100_000_000, ..Timing::IMMEDIATE };
    let on = with(Config { timing, data: Data::KeptDurable, ..Config::default() }, |_| ());
    let controller = on.controllers.find("nv").unwrap();
    let phase = || controller.info().phase;
    let error = block_on(controller.enable()).unwrap_err();
    assert_eq!(error.to_string(), "the controller nv is not disabled");
    block_on(controller.disable()).unwrap();
    assert_eq!(phase(), Phase::Disabled);
    block_on(controller.enable()).unwrap();
    assert_eq!(phase(), Phase::Ready);
    assert!(matches!(block_on(controller.enable()), Err(Error::NotDisabled(_))));

    // Enabled before it is shut down: both calls are answered.
    let both = async { tokio::join!(controller.disable(), controller.enable()) };
    let (disabled, enabled) = block_on(both);
    disabled.unwrap();
    enabled.unwrap();
    assert_eq!(phase(), Phase::Ready);

    // Disabled before it is ready.
    block_on(controller.disable()).unwrap();
    let both = async { tokio::join!(controller.enable(), controller.disable()) };
    let (enabled, disabled) = block_on(both);
    let error = enabled.unwrap_err();
    assert_eq!(error.to_string(), "the controller nv does not start: it was disabled");
    disabled.unwrap();
    assert_eq!(phase(), Phase::Disabled);
    block_on(controller.enable()).unwrap();
}

#[test]
fn a_controller_that_does_not_start_again_fails_the_call() {
    let config = Config { volatile_write_cache: false, data: Data::KeptDurable, ..Config::default() };
    let on = with(config, |attach| attach.grace = Duration::from_secs(60));
    let controller = on.controllers.find("nv").unwrap();
    block_on(controller.disable()).unwrap();
    on.model.with(|model| model.pull_out());
    let error = block_on(controller.enable()).unwrap_err();
    assert!(matches!(error, Error::NotEnabled { .. }), "{error}");
    // The disks of the controller wait.
    on.model.with(|model| model.plug_in());
    OnModel::until("the controller to be ready", || controller.info().phase == Phase::Ready);
}

#[test]
fn a_second_command_that_changes_namespaces_is_refused_while_the_first_runs() {
    let timing = Timing { format: 300_000_000, ..Timing::IMMEDIATE };
    let config = Config { timing, volatile_write_cache: false, data: Data::KeptDurable, ..Config::default() };
    let on = with(config, |_| ());
    let controller = on.controllers.find("nv").unwrap();
    let format = || controller.admin(format(1, 1, Erase::None));
    let mut first = pin!(format());
    send(&mut first);
    let error = block_on(format()).unwrap_err().to_string();
    assert_eq!(error, "a format of namespace 1 is running: repeat the command after its end");
    assert_eq!(controller.counts().resets, 0, "the first goes on");
    assert!(block_on(first).unwrap().status.is_success());
    OnModel::until("the reset", || {
        controller.counts().resets == 1 && controller.info().phase == Phase::Ready
    });

    // A format whose controller goes does not forbid the next one.
    let mut lost = pin!(format());
    send(&mut lost);
    on.model.with(|model| model.pull_out());
    assert!(matches!(block_on(lost), Err(Error::NotReady(_))));
    OnModel::until("the loss to be noticed", || controller.info().phase == Phase::Away);
    on.model.with(|model| model.plug_in());
    OnModel::until("the return", || controller.info().phase == Phase::Ready);
    assert!(block_on(format()).unwrap().status.is_success());
}

#[test]
fn pieces_that_no_command_can_address_count_as_copied() {
    for (sgls, copied) in [(0, 2), (Config::default().sgls, 0)] {
        let on = with(Config { sgls, ..Config::default() }, |_| ());
        let mut bench = Bench::new();
        let mut disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 8, 8 * BLOCK);
        let bounced = || on.env.memory().clients()[0].bounced;
        disk.read(0, 1, Shape::Single, &mut bench);
        assert_eq!((disk.finish(&mut bench).status, bounced()), (Status::Ok, 0));
        disk.read(0, 1, Shape::Halves, &mut bench);
        assert_eq!((disk.finish(&mut bench).status, bounced()), (Status::Ok, copied), "SGLs {sgls:#x}");
        disk.close(&mut bench);
    }
}
