//! Errors that an operator injects.

use super::OnModel;
use crate::{Commands, Dma, Injection};
use aryk_bdev::{Access, Op, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, contents};
use aryk_nvme::admin;
use aryk_nvme::spec::opcode::{admin as admin_opcode, io};
use aryk_nvme::spec::status::{Code, Status as DeviceStatus};
use aryk_nvme_model::Config;
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;

fn error(code: Code) -> DeviceStatus {
    DeviceStatus::new(code.0)
}

fn into(opcode: u8, code: Code, withheld: Option<Duration>, times: u32) -> Injection {
    Injection { opcode, status: error(code), withheld, times }
}

fn start() -> (OnModel, Bench, Opener) {
    let on = OnModel::new(Config::default(), Dma::Pin);
    let mut bench = Bench::new();
    let disk = bench.open(on.env.registry(), "nvn1", Access::Exclusive, 128, 8 * BLOCK);
    (on, bench, disk)
}

fn write(seed: u64, disk: &mut Opener, bench: &mut Bench) -> Status {
    disk.write(8, &contents(seed, 8, 4, BLOCK), Shape::Crossing, bench);
    disk.finish(bench).status
}

fn read(disk: &mut Opener, bench: &mut Bench) -> (Status, Vec<u8>) {
    disk.read(8, 4, Shape::Odd, bench);
    let outcome = disk.finish(bench);
    (outcome.status, outcome.data)
}

#[test]
fn requests_get_the_injected_status_as_often_as_wanted() {
    let (on, mut bench, mut disk) = start();
    let controller = on.controllers.find("nv").unwrap();
    let old = contents(1, 8, 4, BLOCK);
    assert_eq!(write(1, &mut disk, &mut bench), Status::Ok);
    let mut expected = 0;
    for withheld in [None, Some(Duration::ZERO)] {
        for (opcode, code) in [
            (io::WRITE, Code::WRITE_FAULT),
            (io::READ, Code::UNRECOVERED_READ_ERROR),
            (io::FLUSH, Code::WRITE_FAULT),
        ] {
            let injection = into(opcode, code, withheld, 2);
            bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
        }
        for status in [Status::Medium, Status::Medium, Status::Ok] {
            assert_eq!(write(2, &mut disk, &mut bench), status);
            // Only a command that was withheld has no effect.
            let data = on.model.with(|model| model.data(1, 8, 4).map(<[u8]>::to_vec)).unwrap();
            let has_written = withheld.is_none() || status.is_ok();
            assert_eq!(data == contents(2, 8, 4, BLOCK), has_written);
            disk.command(Op::Flush, 0, 0, &mut bench);
            assert_eq!(disk.finish(&mut bench).status, status);
            let (got, data) = read(&mut disk, &mut bench);
            assert_eq!((got, status.is_ok() && data != contents(2, 8, 4, BLOCK)), (status, false));
            expected += if status.is_ok() { 0 } else { 3 };
        }
        let failure = on.disks[0].device().last_failure().unwrap();
        assert_eq!(failure.device.unwrap().code, Code::UNRECOVERED_READ_ERROR.0);
        assert_eq!(controller.counts().injected, expected);
        disk.write(8, &old, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    }
    disk.close(&mut bench);
}

#[test]
fn an_injected_status_is_tried_again_and_leads_to_a_reset_as_the_drives_would() {
    let (on, mut bench, mut disk) = start();
    let controller = on.controllers.find("nv").unwrap();
    for withheld in [None, Some(Duration::ZERO)] {
        let before = controller.counts();
        let injection = into(io::READ, Code::NAMESPACE_NOT_READY, withheld, 3);
        bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
        assert_eq!(read(&mut disk, &mut bench).0, Status::Ok);
        let counts = controller.counts();
        assert_eq!((counts.retried - before.retried, counts.injected - before.injected), (3, 3));
        let injection = into(io::READ, Code::CID_CONFLICT, withheld, 1);
        bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
        assert_eq!(read(&mut disk, &mut bench).0, Status::Aborted);
        bench.until("the reset", || controller.counts().resets > before.resets);
        // Requests wait for the end of the reset. An injection outlives it.
        let injection = into(io::WRITE, Code::WRITE_FAULT, withheld, 1);
        bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
        assert_eq!(read(&mut disk, &mut bench).0, Status::Ok);
        assert_eq!(write(3, &mut disk, &mut bench), Status::Medium);
        assert_eq!(write(3, &mut disk, &mut bench), Status::Ok);
    }
    disk.close(&mut bench);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test is about a delay")]
fn a_withheld_request_waits_and_can_be_aborted() {
    let (on, mut bench, mut disk) = start();
    let controller = on.controllers.find("nv").unwrap();
    let late = Duration::from_millis(60);
    let inject = |withheld, bench: &mut Bench| {
        let injection = into(io::WRITE, Code::WRITE_FAULT, Some(withheld), 1);
        bench.wait("the injection", controller.inject(Commands::Io, injection)).unwrap();
    };
    inject(late, &mut bench);
    let began = Instant::now();
    assert_eq!((write(1, &mut disk, &mut bench), began.elapsed() >= late), (Status::Medium, true));
    inject(Duration::from_secs(3600), &mut bench);
    disk.write(8, &contents(1, 8, 4, BLOCK), Shape::Single, &mut bench);
    (0..100).for_each(|_| _ = bench.turn());
    assert_eq!(disk.in_flight(), 1);
    disk.abort_all(&mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Aborted);
    // An injection that was not used up ends.
    inject(late, &mut bench);
    bench.wait("the end", controller.end_injection(Commands::Io, io::WRITE)).unwrap();
    assert_eq!((write(1, &mut disk, &mut bench), controller.counts().injected), (Status::Ok, 2));
    disk.close(&mut bench);
}

#[test]
fn admin_commands_get_the_injected_status_too() {
    let (on, mut bench, disk) = start();
    let controller = on.controllers.find("nv").unwrap();
    let identify = |bench: &mut Bench| {
        let answer = bench.wait("the answer", controller.admin(admin::identify_controller())).unwrap();
        (answer.status.code(), answer.data.len(), answer.data.iter().all(|byte| *byte == 0))
    };
    for withheld in [None, Some(Duration::from_millis(20))] {
        let injection = into(admin_opcode::IDENTIFY, Code::INTERNAL_ERROR, withheld, 1);
        bench.wait("the injection", controller.inject(Commands::Admin, injection)).unwrap();
        assert_eq!(identify(&mut bench), (Code::INTERNAL_ERROR, 4096, withheld.is_some()));
        assert_eq!(identify(&mut bench), (Code::SUCCESS, 4096, false));
    }
    assert_eq!(controller.counts().injected, 2);
    disk.close(&mut bench);
}
