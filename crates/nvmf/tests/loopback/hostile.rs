//! Hosts that break the rules, or do nothing that they should: other hosts do not wait for them, and the target goes on.

use crate::raw::{Raw, capsule, capsule_with, command, pdu};
use crate::target::{BLOCK, Running, until};
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::log;
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::tcp::{Fatal, FatalStatus, H2cData, Header, R2t};
use aryk_nvmf::Limits;
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};

/// Abort of a command of the admin queue.
fn abort(cid: u16, of: u16) -> Vec<u8> {
    capsule(command(cid, admin::ABORT, u64::from(of) << 16, 1, 0))
}

fn event_request(cid: u16) -> Vec<u8> {
    capsule(command(cid, admin::ASYNC_EVENT_REQUEST, 0, 1, 0))
}

#[test]
fn an_aborted_event_request_may_have_the_identifier_of_its_abort() {
    let target = Running::start();
    let (mut queue, _) = Raw::admin(target.address);
    // The first request leaves its slot, the lowest, to the second Abort.
    queue.send(&[event_request(1), event_request(7), abort(9, 1)].concat());
    let mut done: Vec<(u16, Code)> = Vec::new();
    let mut collect = |queue: &mut Raw, count| {
        let completions = (0..count).map(|_| queue.completion().expect("the connection goes on"));
        done.extend(completions.map(|entry| (entry.cid(), entry.status().code())));
    };
    collect(&mut queue, 2);
    queue.send(&abort(7, 7));
    collect(&mut queue, 2);
    done.sort_by_key(|(cid, code)| (*cid, code.0));
    let aborted = Code::ABORT_REQUESTED;
    assert_eq!(done, [(1, aborted), (7, Code::SUCCESS), (7, aborted), (9, Code::SUCCESS)]);
    target.stop();
}

#[test]
fn requests_for_events_end_with_a_reset() {
    let target = Running::start();
    let (mut queue, _) = Raw::admin(target.address);
    // Each reset drops four of them, from a queue of 32 entries.
    for _ in 0..20 {
        queue.send(&(1..=4).map(event_request).collect::<Vec<_>>().concat());
        queue.set_configuration(0);
        assert_eq!(queue.try_enable(), Code::SUCCESS);
    }
    target.stop();
}

#[test]
fn an_abort_ends_a_write_whose_data_has_not_come() {
    let target = Running::start();
    let (mut queue, id) = Raw::admin(target.address);
    let mut io_queue = Raw::io(target.address, id, 1, 16);
    io_queue.send(&capsule(command(5, io::WRITE, 0, 4, 4 * BLOCK as u32)));
    let Some((Header::R2t(R2t { tag, len, .. }), _)) = io_queue.receive() else { panic!("no R2T") };
    let results = [(1, 5), (1, 6), (2, 5), (0, 5)].map(|(sqid, cid)| {
        queue.send(&capsule(command(1, admin::ABORT, sqid | cid << 16, 1, 0)));
        queue.completion().unwrap().result()
    });
    assert_eq!(results, [0, 1, 1, 1]);
    let data = H2cData { cid: 5, tag, offset: 0, len, is_last: true };
    io_queue.send(&pdu(&Header::H2cData(data), &vec![0xee; len as usize]));
    let completion = io_queue.completion().unwrap();
    assert_eq!((completion.cid(), completion.status().code()), (5, Code::ABORT_REQUESTED));
    let read = io_queue.run(command(6, io::READ, 0, 4, 4 * BLOCK as u32));
    assert_eq!(read, (Code::SUCCESS, vec![0; 4 * BLOCK]));
    target.stop();
}

#[test]
fn a_block_is_compared_and_written_as_one_operation() {
    let target = Running::start();
    let (_queue, id) = Raw::admin(target.address);
    let mut io_queue = Raw::io(target.address, id, 1, 16);
    let mut try_swap = |from: u8, to: u8| {
        let half = |cid, opcode, fuse, byte| {
            let entry = command(cid, opcode, 3, 1, 0).with_fuse(fuse);
            capsule_with(entry, &[byte; BLOCK])
        };
        let halves = [half(1, io::COMPARE, Fuse::First, from), half(2, io::WRITE, Fuse::Second, to)];
        io_queue.send(&halves.concat());
        let codes = [(); 2].map(|()| io_queue.completion().unwrap().status().code());
        let (_, block) = io_queue.run(command(3, io::READ, 3, 1, BLOCK as u32));
        (codes, block[0])
    };
    let (fine, differs) = ([Code::SUCCESS; 2], [Code::COMPARE_FAILURE, Code::FUSED_FAILED]);
    assert_eq!(try_swap(0, 7), (fine, 7));
    assert_eq!(try_swap(0, 8), (differs, 7));
    assert_eq!(try_swap(7, 9), (fine, 9));
    target.stop();
}

#[test]
fn hosts_that_close_in_the_middle_leave_nothing() {
    let target = Running::start();
    let (_queue, id) = Raw::admin(target.address);
    let write = command(1, io::WRITE, 0, 2, 0);
    let session = [
        capsule_with(write, &[1; 2 * BLOCK]),
        capsule(command(2, io::WRITE, 0, 32, 32 * BLOCK as u32)),
        capsule(command(3, io::READ, 0, 32, 32 * BLOCK as u32)),
        capsule(command(4, io::WRITE, 0, 4, 4 * BLOCK as u32)),
        pdu(
            &Header::H2cData(H2cData { cid: 2, tag: 1, offset: 0, len: BLOCK as u32, is_last: false }),
            &[1; BLOCK],
        ),
    ]
    .concat();
    for (qid, end) in (0..session.len()).step_by(97).enumerate() {
        // Of all queues, some are still connected.
        let mut queue = Raw::io(target.address, id, 1 + qid as u16 % 100, 16);
        queue.send(&session[..end]);
        drop(queue);
        if qid % 50 == 49 {
            until(|| target.queues() == 0);
        }
    }
    until(|| target.queues() == 0);
    let mut queue = Raw::io(target.address, id, 1, 16);
    assert_eq!(queue.run(command(1, io::READ, 0, 1, BLOCK as u32)).0, Code::SUCCESS);
    target.stop();
}

#[test]
fn commands_with_wrong_lengths_and_blocks_fail_and_the_queue_goes_on() {
    let target = Running::start();
    let (_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    let block = BLOCK as u32;
    let keyed = SubmissionEntry::new(io::READ, 1).with_cid(1).with_sgl([0, 0x40 << 56 | 4096]);
    let other = |nsid| SubmissionEntry::new(io::READ, nsid).with_cid(1).with_sgl([0, 0x5a << 56 | 4096]);
    for (entry, code) in [
        (command(1, io::READ, u64::MAX, 1, block), Code::LBA_OUT_OF_RANGE),
        (command(1, io::READ, u64::MAX - 1, 2, 2 * block), Code::LBA_OUT_OF_RANGE),
        (command(1, io::WRITE, 0, 65_536, u32::MAX), Code::INVALID_FIELD),
        (command(1, io::READ, 0, 1, 0), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::WRITE, 0, 1, 0), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::WRITE, 0, 1, 4095), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::WRITE_ZEROES, 60, 65_536, 0), Code::LBA_OUT_OF_RANGE),
        (command(1, io::DATASET_MANAGEMENT, 0, 1, 8), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::VERIFY, 0, 1, block), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::COPY, 0, 1, 0), Code::SGL_DATA_LENGTH_INVALID),
        (command(1, io::COPY, 0, 128, u32::MAX), Code::INVALID_FIELD),
        (command(1, io::COPY, 0, 129, 4128), Code::COMMAND_SIZE_LIMIT),
        (command(1, io::VERIFY, u64::MAX, 1, 0), Code::LBA_OUT_OF_RANGE),
        (command(1, io::VERIFY, 0, 65_536, 0), Code::LBA_OUT_OF_RANGE),
        (keyed, Code::SGL_TYPE_INVALID),
        (other(0), Code::INVALID_NAMESPACE_OR_FORMAT),
        (other(2), Code::INVALID_NAMESPACE_OR_FORMAT),
        (other(u32::MAX), Code::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        assert_eq!(queue.run(entry), (code, Vec::new()), "{entry:?}");
    }
    // Commands in flight may have one identifier: that is the host's affair.
    queue.send(&capsule(command(7, io::READ, 0, 1, block)).repeat(10));
    (0..10).for_each(|_| assert_eq!(queue.completion().unwrap().cid(), 7));
    // One command more than the queue has entries, all of which wait for data.
    queue.send(&capsule(command(7, io::WRITE, 0, 4, 4 * block)).repeat(17));
    let mut last = None;
    while let Some((header, _)) = queue.receive() {
        last = Some(header);
    }
    let limit = Fatal::of(FatalStatus::LIMIT_EXCEEDED);
    assert!(matches!(last, Some(Header::TermReq { fatal, .. }) if fatal == limit), "{last:?}");
    target.stop();
}

#[test]
fn an_address_that_has_all_its_connections_leaves_room_for_others() {
    let target = Running::start();
    target.run(async |target| target.set_limits(Limits { unconnected: 100, ..target.limits() }));
    let many: Vec<TcpStream> = (0..150).map(|_| TcpStream::connect(target.address).unwrap()).collect();
    let is_refused = |host: &TcpStream| {
        host.set_nonblocking(true).unwrap();
        matches!({ host }.read(&mut [0; 1]), Ok(0))
    };
    let refused = || many.iter().filter(|host| is_refused(host)).count();
    until(|| refused() == 50);
    assert!(many[..50].iter().all(is_refused), "the oldest have made room");
    let (mut other, _) = Raw::admin_from(Ipv4Addr::new(127, 0, 0, 2), target.address);
    other.send(&abort(1, 1));
    assert!(other.completion().is_some());
    until(|| refused() == 51);
    let (mut same, _) = Raw::admin(target.address);
    same.send(&abort(1, 1));
    assert!(same.completion().is_some());
    target.stop();
}

#[test]
fn a_controller_ends_although_its_host_does_not_read_replies() {
    let target = Running::start();
    let (mut queue, _) = Raw::admin(target.address);
    // More than the sockets' buffers have room for: the target waits for the host.
    let len = 128_u32 << 10;
    let page = u64::from(log::SMART) | u64::from(len / 4 - 1) << 16;
    queue.send(&capsule(command(1, admin::GET_LOG_PAGE, page, 1, len)).repeat(30).repeat(10));
    let (mut unread, mut stable) = (0, 0);
    until(|| {
        let now = queue.unread();
        stable = if now == unread { stable + 1 } else { 0 };
        unread = now;
        unread > 0 && stable == 50
    });
    // The next controller of the host begins after the earlier one, and the reply comes before the host's patience ends.
    let (mut next, _) = Raw::admin(target.address);
    next.send(&abort(1, 1));
    assert!(next.completion().is_some());
    target.stop();
}
