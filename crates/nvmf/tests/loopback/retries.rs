//! Commands that a host may try again, and how long it is told to wait (ACRE, CRD and CRDT).

use crate::raw::{Raw, capsule, capsule_with, command};
use crate::target::{BLOCK, BLOCKS, Running, SUBSYSTEM};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature;
use aryk_nvme::spec::identify::{IdentifyController, cns};
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Limits};
use zerocopy::FromBytes;

const DELAYS: [u16; 3] = [1, 5, 20];

/// An admin command that returns `len` bytes.
fn reading(opcode: u8, cdw10: u32, len: u32) -> SubmissionEntry {
    SubmissionEntry::new(opcode, 0).with_cdw10_11(cdw10, 0).with_sgl(Sgl::Transport { len }.encode())
}

/// Sets Host Behavior Support with this ACRE.
fn enable(admin_queue: &mut Raw, acre: u8) -> Code {
    let mut page = [0; feature::HOST_BEHAVIOR_LEN];
    page[0] = acre;
    let set = SubmissionEntry::new(admin::SET_FEATURES, 0);
    let set = set.with_cid(9).with_cdw10_11(feature::HOST_BEHAVIOR_SUPPORT.into(), 0);
    admin_queue.send(&capsule_with(set, &page));
    admin_queue.completion().unwrap().status().code()
}

fn read(queue: &mut Raw, lba: u64) -> Status {
    queue.send(&capsule(command(1, io::READ, lba, 1, BLOCK as u32)));
    queue.completion().unwrap().status()
}

#[test]
fn a_host_that_asks_for_it_is_told_how_long_to_wait() {
    let target = Running::start();
    target.run(async |target| {
        target.set_limits(Limits { retry_delays: DELAYS, ..Limits::default() });
    });
    let address = Address::tcp(target.address);
    let set_state = |state| {
        target.run(async move |target| target.set_state(SUBSYSTEM, address, None, state).await.unwrap());
    };
    let (mut admin_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    let (code, page) = admin_queue.run(reading(admin::IDENTIFY, cns::CONTROLLER.into(), 4096));
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!((code, page.crdt.map(|delay| delay.get())), (Code::SUCCESS, DELAYS));

    set_state(AnaState::Change);
    for (acre, enabled, crd) in [
        (0, Code::SUCCESS, 0),
        (1, Code::SUCCESS, 2),
        // The host has set nothing.
        (2, Code::INVALID_FIELD, 2),
        (0, Code::SUCCESS, 0),
        (1, Code::SUCCESS, 2),
    ] {
        assert_eq!(enable(&mut admin_queue, acre), enabled);
        let get = reading(admin::GET_FEATURES, feature::HOST_BEHAVIOR_SUPPORT.into(), 512);
        let (code, page) = admin_queue.run(get);
        assert_eq!((code, page.len(), page[0]), (Code::SUCCESS, 512, u8::from(crd > 0)));
        let status = read(&mut queue, 0);
        assert_eq!((status.code(), status.crd(), status.is_final()), (Code::ANA_TRANSITION, crd, false));
    }
    // A queue that begins later knows it.
    let mut later = Raw::io(target.address, id, 2, 16);
    set_state(AnaState::Inaccessible);
    assert_eq!(read(&mut later, 0).crd(), 3);
    set_state(AnaState::Optimized);
    assert!(read(&mut later, 0).is_success());
    let outside = read(&mut later, BLOCKS as u64);
    assert_eq!((outside.code(), outside.crd(), outside.is_final()), (Code::LBA_OUT_OF_RANGE, 0, true));
    // A reset ends it.
    assert_eq!(admin_queue.set_configuration(0), Code::SUCCESS);
    assert_eq!(admin_queue.try_enable(), Code::SUCCESS);
    let mut queue = Raw::io(target.address, id, 1, 16);
    set_state(AnaState::Inaccessible);
    assert_eq!((read(&mut queue, 0).code(), read(&mut queue, 0).crd()), (Code::ANA_INACCESSIBLE, 0));
    target.stop();
}
