//! A drive that is away: its disks report it, and requests fail where the configuration says so.

use super::OnModel;
use super::recovery::{open, read_all, slow, with, write_all};
use crate::{Config as Attach, Location, Phase};
use aryk_bdev::{Change, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_nvme_model::{Action, Config, Model, Queue, Rule};
use aryk_pci::Function;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A drive that loses nothing when it goes.
fn durable() -> Config {
    Config { volatile_write_cache: false, ..slow() }
}

/// The changes that the disks report to an observer from now on.
fn observed(on: &OnModel) -> Arc<Mutex<Vec<Change>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let observer = Arc::clone(&told);
    on.env.registry().observe(move |change, _| observer.lock().unwrap().push(change));
    told
}

#[test]
fn observers_are_told_that_requests_wait_and_go_on() {
    let on = with(durable(), |_| ());
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let told = observed(&on);
    let controller = on.controllers.find("nv").unwrap();
    for round in 1..3 {
        on.model.with(|model| model.pull_out());
        bench.until("the disk to be stalled", || on.disks[0].is_stalled());
        assert_eq!(controller.info().phase, Phase::Away);
        write_all(&mut disk, round, &mut bench);
        on.model.with(|model| model.plug_in());
        let outcomes = disk.drain(&mut bench);
        assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
        bench.until("the disk to go on", || !on.disks[0].is_stalled());
    }
    assert_eq!(*told.lock().unwrap(), [Change::Stalled, Change::Resumed].repeat(2));
    // So does an operator's pause.
    let (disable, enable) = (controller.disable(), controller.enable());
    bench.wait("the controller to be disabled", disable).unwrap();
    bench.until("the disk to be stalled", || on.disks[0].is_stalled());
    bench.wait("the controller to be enabled", enable).unwrap();
    bench.until("the disk to go on", || !on.disks[0].is_stalled());
    read_all(&mut disk, 2, &mut bench);
    disk.close(&mut bench);
}

#[test]
fn the_time_between_attempts_delays_neither_the_end_of_the_grace_time_nor_a_detach() {
    for grace in [Duration::from_millis(300), Duration::from_secs(3600)] {
        let on = with(durable(), |attach| {
            (attach.grace, attach.return_interval) = (grace, Duration::from_secs(3600));
        });
        let mut bench = Bench::new();
        let controller = on.controllers.find("nv").unwrap();
        on.model.with(|model| model.pull_out());
        bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
        if grace > Duration::from_secs(1) {
            bench.wait("the detach", on.controllers.detach("nv")).unwrap();
        }
        bench.until("the end of the controller", || on.controllers.list().is_empty());
        assert!(on.env.registry().list().is_empty());
        on.model.with(|model| model.plug_in());
        let location = Location::Model(Arc::<Model>::clone(&on.model) as Arc<dyn Function>);
        block_on(on.controllers.attach(&on.env, Attach::new("nv", location))).unwrap();
    }
}

#[test]
fn requests_fail_where_the_time_for_that_is_over_until_the_drive_is_back() {
    let on = with(durable(), |attach| {
        attach.grace = Duration::from_secs(600);
        attach.fast_fail = Some(Duration::from_millis(200));
    });
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    for round in 1..4 {
        // Requests at the drive, and those that come while it is away.
        let stick = Rule { times: 8, ..Rule::once(Queue::Io, 1, Action::Delay(5_000_000_000)) };
        on.model.with(|model| model.faults().add(stick));
        write_all(&mut disk, round, &mut bench);
        (0..30).for_each(|_| {
            bench.turn();
        });
        on.model.with(|model| {
            model.faults().clear();
            model.pull_out();
        });
        let outcomes = disk.drain(&mut bench);
        let failed = outcomes.iter().filter(|outcome| !outcome.status.is_ok()).count();
        assert!(failed > 0, "some requests had not ended");
        assert!(
            outcomes.iter().all(|outcome| matches!(outcome.status, Status::Ok | Status::Medium)),
            "{outcomes:?}"
        );
        // The daemon still waits for the drive.
        assert_eq!((controller.info().phase, on.disks[0].is_stalled()), (Phase::Away, true));
        disk.read(0, 4, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Medium, "at once");
        assert!(on.disks[0].device().last_failure().is_some());

        on.model.with(|model| model.plug_in());
        bench.until("the drive to be back", || !on.disks[0].is_stalled());
        write_all(&mut disk, 10 * round, &mut bench);
        let mut again: Vec<_> = disk.drain(&mut bench);
        // Until the queue pair is there.
        while again.iter().any(|outcome| outcome.status == Status::Medium) {
            write_all(&mut disk, 10 * round, &mut bench);
            again = disk.drain(&mut bench);
        }
        assert!(again.iter().all(|outcome| outcome.status.is_ok()), "{again:?}");
        read_all(&mut disk, 10 * round, &mut bench);
    }
    disk.close(&mut bench);
}
