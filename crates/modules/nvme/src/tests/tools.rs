//! Requests of the system's tools, without the kernel between them and the controller.

use super::OnModel;
use crate::control::tools::Owner;
use crate::{Dma, Error};
use aryk_bdev as bdev;
use aryk_bdev_conformance::{Bench, block_on};
use aryk_cuse::{Access, AdminCommand, Answer, Caller, Completion, Data, Errno, NvmeDevice, PAGE, Request};
use aryk_nvme::admin::{self, Command};
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme_model::{Config, Patch};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const IDENTIFY: u8 = 6;
const GET_LOG_PAGE: u8 = 2;

fn owner(on: &OnModel) -> Owner {
    Owner(Arc::clone(&on.controllers.find("nv").unwrap().shared))
}

fn send(owner: &Owner, request: Request) -> Result<Completion, Errno> {
    let (sender, receiver) = channel();
    let answer = Answer::new(move |outcome| sender.send(outcome).unwrap());
    owner.serve(request, Caller { uid: 0, gid: 0, pid: 1 }, answer);
    receiver.recv_timeout(Duration::from_secs(20)).expect("an answer")
}

fn read(opcode: u8, cdw10: u32, len: usize) -> Request {
    let data = Data::FromController(len);
    Request::Admin(AdminCommand { opcode, nsid: 0, cdw10_15: [cdw10, 0, 0, 0, 0, 0], data })
}

#[test]
fn a_tool_reads_and_resets_and_hears_of_the_end() {
    let on = OnModel::new(Config { mdts: 1, ..Config::default() }, Dma::Pin);
    let tool = owner(&on);
    let serial = on.controllers.find("nv").unwrap().info().controller.unwrap().serial;
    let identified = send(&tool, read(IDENTIFY, 1, PAGE)).unwrap();
    assert_eq!((identified.status, identified.data.len()), (0, PAGE));
    assert!(identified.data[4..24].starts_with(serial.as_bytes()));
    // Invalid Log Page, with SCT 1 and DNR.
    let refused = send(&tool, read(GET_LOG_PAGE, 0xbf | 127 << 16, PAGE)).unwrap();
    assert_eq!(refused.status & 0x7ff, 0x109);
    // Longer than MDTS.
    assert_eq!(send(&tool, read(GET_LOG_PAGE, 2, 4 * PAGE)), Err(Errno::MSGSIZE));

    // A namespace that has another size, of which the controller reports no event.
    let size = [8192_u64, 8192, 8192].map(u64::to_le_bytes).concat();
    on.model.with(|model| model.faults().patch_identify(Patch { cns: 0, offset: 0, bytes: size }));
    assert_eq!(on.disks[0].blocks().0, 16_384);
    assert_eq!(send(&tool, Request::Rescan), Ok(Completion::default()));
    assert_eq!(on.disks[0].blocks().0, 8192);
    assert_eq!(send(&tool, Request::Reset), Ok(Completion::default()));
    assert_eq!(on.controllers.find("nv").unwrap().counts().resets, 1);
    assert_eq!(send(&tool, read(IDENTIFY, 1, PAGE)).unwrap().status, 0);
    drop(on);
    assert_eq!(send(&tool, read(IDENTIFY, 1, PAGE)), Err(Errno::IO));
}

#[test]
fn without_cuse_the_error_names_the_module() {
    let on = OnModel::new(Config::default(), Dma::Pin);
    let controller = on.controllers.find("nv").unwrap();
    assert!(!block_on(controller.unregister_tools()));
    if Path::new("/dev/cuse").exists() {
        return;
    }
    let error = block_on(controller.register_tools(Access::Read)).unwrap_err();
    assert!(matches!(error, Error::Tools(_)) && error.to_string().contains("modprobe cuse"), "{error}");
}

/// A command without data, as a tool sends it.
fn change(opcode: u8, cdw10: u32) -> Request {
    let data = if opcode & 1 == 1 { Data::ToController(vec![0; PAGE]) } else { Data::None };
    Request::Admin(AdminCommand { opcode, nsid: 1, cdw10_15: [cdw10, 0, 0, 0, 0, 0], data })
}

#[test]
fn no_caller_destroys_data_of_a_disk_in_use() {
    let on = OnModel::new(Config { volatile_write_cache: false, ..Config::default() }, Dma::Pin);
    let (tool, controller) = (owner(&on), on.controllers.find("nv").unwrap());
    let rpc = |opcode: u8, cdw10: u32| {
        let entry = SubmissionEntry::new(opcode, 1).with_cdw10_11(cdw10, 0);
        let command = Command { entry, data: admin::Data::None, patience: admin::Patience::Normal };
        block_on(controller.admin(command))
    };
    // Format, Security Send, Sanitize, and a command of the vendor.
    let destructive = [(0x80, 1), (0x81, 0), (0x84, 2), (0xc0, 0)];
    let mut bench = Bench::new();
    let disk = bench.open(on.env.registry(), "nvn1", bdev::Access::Exclusive, 8, 4096);
    for (opcode, cdw10) in destructive {
        assert_eq!(send(&tool, change(opcode, cdw10)), Err(Errno::BUSY), "{opcode:#x}");
        let error = rpc(opcode, cdw10).unwrap_err().to_string();
        let text = format!("the admin command {opcode:#04x} may destroy data of a disk that is in use: nvn1");
        assert!(error.starts_with(&text), "{error}");
    }
    // The temperature threshold reaches the drive: Feature Not Namespace Specific.
    assert_eq!(send(&tool, change(0x09, 0x04)).unwrap().status & 0x7ff, 0x10f);
    // The number of queues, Delete I/O Submission Queue, and Namespace Management would break the driver.
    for (opcode, cdw10) in [(0x09, 0x07), (0x00, 1), (0x0d, 1)] {
        assert_eq!(send(&tool, change(opcode, cdw10)), Err(Errno::PERM), "{opcode:#x}");
        assert!(matches!(rpc(opcode, cdw10), Err(Error::Forbidden(_))), "{opcode:#x}");
    }
    disk.close(&mut bench);
    // Invalid Command Opcode: they reach the drive, which does not have them.
    for (opcode, cdw10) in [(0x81, 0), (0xc0, 0)] {
        assert_eq!(send(&tool, change(opcode, cdw10)).unwrap().status & 0x7ff, 1, "{opcode:#x}");
        assert_eq!(rpc(opcode, cdw10).unwrap().status.code().0, 1, "{opcode:#x}");
    }
    assert_eq!(send(&tool, change(0x80, 1)).unwrap().status, 0);
}

#[test]
fn the_controller_gets_as_much_memory_as_its_command_transfers() {
    let on = OnModel::new(Config::default(), Dma::Pin);
    let controller = on.controllers.find("nv").unwrap();
    let send = |opcode: u8, cdw10: u32, data: admin::Data| {
        let entry = SubmissionEntry::new(opcode, 0).with_cdw10_11(cdw10, 0);
        block_on(controller.admin(Command { entry, data, patience: admin::Patience::Normal }))
    };
    let reason = |answer: Result<_, Error>| answer.map(|_: AdminAnswer| ()).unwrap_err().to_string();
    let smart = |bytes: u32| 2 | (bytes / 4 - 1) << 16;
    let wrong = reason(send(GET_LOG_PAGE, smart(8192), admin::Data::FromController(4096)));
    assert_eq!(wrong, "the data of the admin command 0x02: the command transfers 8192 bytes, not 4096");
    let wrong = reason(send(GET_LOG_PAGE, smart(512), admin::Data::None));
    assert_eq!(wrong, "the data of the admin command 0x02: the command transfers 512 bytes, not 0");
    let wrong = reason(send(GET_LOG_PAGE, smart(512), admin::Data::ToController(vec![0; 512])));
    assert_eq!(wrong, "the data of the admin command 0x02: the controller writes the data");
    let wrong = reason(send(0x11, 2047, admin::Data::ToController(vec![0; 4096])));
    assert_eq!(wrong, "the data of the admin command 0x11: the command transfers 8192 bytes, not 4096");
    // The answer is as long as the caller wants, also where the controller writes more.
    for len in [0, 512, 4096] {
        let data = if len == 0 { admin::Data::None } else { admin::Data::FromController(len) };
        let answer = send(IDENTIFY, 1, data).unwrap();
        assert_eq!((answer.status.code().0, answer.data.len()), (0, len));
    }
    let answer = send(GET_LOG_PAGE, smart(512), admin::Data::FromController(512)).unwrap();
    assert_eq!((answer.status.code().0, answer.data.len()), (0, 512));
}
