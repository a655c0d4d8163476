//! A target and a host, made of the parts of this crate, over TCP on the loopback interface: a thread for each connection of the
//! target, blocking sockets, and a namespace in memory.
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod host;
mod target;

use aryk_nvme::spec::identify::{IdentifyController, cns, text};
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::register::{Cc, Shutdown};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::connect::ANY_CONTROLLER;
use aryk_nvme_fabrics::discovery::{Entry, Header, RECORD_LEN};
use aryk_nvme_fabrics::nqn;
use aryk_nvme_fabrics::status;
use aryk_nvme_fabrics::tcp::{Fatal, FatalStatus};
use host::{Connection, Options};
use target::{BLOCK, SUBSYSTEM, Target};
use zerocopy::FromBytes;

/// Digests of headers and of data, and whether the host disables flow control of its submission queues.
const VARIANTS: [(bool, bool, bool); 4] =
    [(false, false, false), (true, false, true), (false, true, false), (true, true, true)];

fn pattern(blocks: usize, seed: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| (i * 31 + i / BLOCK + seed) as u8).collect()
}

#[test]
fn a_host_writes_and_reads_through_two_queues() {
    for (header_digest, data_digest, disables_flow_control) in VARIANTS {
        let target = Target::start();
        let options = Options { header_digest, data_digest, disables_flow_control, alignment: 3 };
        let (mut admin_queue, id) = Connection::admin(target.address, options, SUBSYSTEM, 1);
        let page = admin_queue.identify(cns::CONTROLLER, 0);
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!((page.cntlid.get(), text(&page.mn)), (id, "Test".to_owned()));
        assert_eq!(admin_queue.identify(cns::ACTIVE_NAMESPACES, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);

        let mut queues = [1, 2].map(|qid| Connection::io(target.address, options, id, qid, 1).unwrap());
        // In the capsule, and by R2T in one and in several PDUs.
        for (lba, blocks) in [(0, 1), (1, 2), (3, 8), (11, 32)] {
            let data = pattern(blocks, lba);
            queues[lba % 2].write(lba as u64, &data).unwrap();
            assert!(queues[(lba + 1) % 2].read(lba as u64, blocks).unwrap() == data, "{lba}");
        }
        assert!(queues[0].read(0, 3).unwrap() == [pattern(1, 0), pattern(2, 1)].concat());
        queues[0].command(io::FLUSH, 0, 1, &[], 0).unwrap();

        // More commands at once than the queue's PDUs have room for in one turn.
        let reads: Vec<u16> = (0..15).map(|i| queues[0].start(io::READ, i, 1)).collect();
        let mut done = queues[0].finish(reads.len());
        done.sort();
        assert!(done.iter().map(|(cid, _)| *cid).eq(reads));
        assert!(done[11].1 == pattern(32, 11)[..BLOCK]);

        let outside = queues[0].read(target::BLOCKS as u64, 1);
        assert_eq!(outside, Err(Code::LBA_OUT_OF_RANGE));
        assert_eq!(queues[0].command(0x7e, 0, 1, &[], 0), Err(Code::INVALID_OPCODE));
        assert_eq!(queues[1].write(target::BLOCKS as u64, &pattern(1, 0)), Err(Code::LBA_OUT_OF_RANGE));
        assert!(queues[1].read(0, 1).unwrap() == pattern(1, 0), "the queue goes on");

        let down = Cc::enabled(4096, false).with_shutdown(Shutdown::Normal);
        assert!(admin_queue.configure(down).is_shut_down());
        assert!(!admin_queue.configure(down.disabled()).is_ready());
    }
}

#[test]
fn a_host_finds_the_subsystem_by_discovery() {
    let target = Target::start();
    let (mut queue, _) = Connection::admin(target.address, Options::default(), nqn::DISCOVERY, 1);
    let page = queue.log(0x70, 0, 2 * RECORD_LEN);
    assert_eq!(Header::decode(&page).unwrap().entries, 1);
    let entry = Entry::decode(page[RECORD_LEN..].try_into().unwrap()).unwrap();
    assert_eq!((entry.subsystem.as_str(), entry.address.as_str()), (SUBSYSTEM, "127.0.0.1"));
    assert_eq!(entry.service, target.address.port().to_string());
}

#[test]
fn wrong_hosts_and_queues_are_refused() {
    let target = Target::start();
    let refused = Connection::try_admin(target.address, Options::default(), "nqn.2016-06.io.spdk:other", 1);
    assert_eq!(refused.err(), Some(status::INVALID_PARAMETERS));
    let (mut queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    assert_eq!(queue.command(admin::CREATE_SQ, 0, 1, &[], 0), Err(Code::INVALID_OPCODE));
    for (id, qid, host, code) in [
        (id, 3, 1, status::INVALID_PARAMETERS),
        (id, 1, 2, status::INVALID_PARAMETERS),
        (id + 1, 1, 1, status::INVALID_PARAMETERS),
        (ANY_CONTROLLER, 1, 1, status::INVALID_PARAMETERS),
    ] {
        let refused = Connection::io(target.address, Options::default(), id, qid, host);
        assert_eq!(refused.err(), Some(code), "{id} {qid} {host}");
    }
    let _first = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let second = Connection::io(target.address, Options::default(), id, 1, 1);
    assert_eq!(second.err(), Some(Code::COMMAND_SEQUENCE_ERROR));
}

#[test]
fn a_wrong_pdu_ends_the_connection_with_its_reason() {
    let target = Target::start();
    let options = Options { header_digest: true, ..Options::default() };
    let (mut queue, _) = Connection::admin(target.address, options, SUBSYSTEM, 1);
    // Data arrives for a slot without an R2T.
    let fatal = queue.send_unrequested_data();
    assert_eq!(fatal, Fatal { status: FatalStatus::INVALID_FIELD, information: 10 });
}

#[test]
fn data_beyond_what_was_requested_ends_the_connection() {
    let target = Target::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let fatal = queue.send_excessive_data();
    assert_eq!(fatal, Fatal { status: FatalStatus::DATA_OUT_OF_RANGE, information: 0 });
}
