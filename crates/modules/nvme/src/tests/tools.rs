//! Requests of the system's tools, without the kernel between them and the controller.

use super::OnModel;
use crate::control::tools::Owner;
use crate::{Dma, Error};
use aryk_bdev_conformance::block_on;
use aryk_cuse::{Access, AdminCommand, Answer, Caller, Completion, Data, Errno, NvmeDevice, PAGE, Request};
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
