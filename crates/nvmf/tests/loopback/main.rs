//! The target on real reactors, over TCP on the loopback interface, with a host that is written apart from it.
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod authentication;
mod copy;
mod events;
#[path = "../../../nvme-fabrics/tests/loopback/host.rs"]
mod host;
mod hostile;
mod limits;
mod moving;
mod raw;
mod recovery;
mod reservations;
mod retries;
mod slow;
mod stuck;
mod target;
mod tls;

use aryk_nvme::spec::identify::{IdentifyController, cns, text};
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::register::{Cc, Shutdown};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::connect::ANY_CONTROLLER;
use aryk_nvme_fabrics::discovery::{self, Entry, RECORD_LEN};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvme_fabrics::tcp::{Fatal, FatalStatus, H2cData, Header};
use aryk_nvme_fabrics::{nqn, status};
use aryk_nvmf::{Address, Limits, NewNamespace, QUEUES_MAX};
use host::{Connection, Options};
use raw::{Raw, capsule, command, pdu};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use target::{BLOCK, BLOCKS, FORM, Running, SUBSYSTEM, until};
use zerocopy::FromBytes;

/// Digests of headers and of data, and whether the host disables flow control of its submission queues.
const VARIANTS: [(bool, bool, bool); 4] =
    [(false, false, false), (true, false, true), (false, true, false), (true, true, true)];

fn pattern(blocks: usize, seed: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| (i * 31 + i / BLOCK + seed) as u8).collect()
}

/// Runs the tests again, with each other form of the sockets.
#[test]
fn all_forms() {
    if std::env::var(FORM).is_ok() {
        return;
    }
    for form in ["zero-copy", "epoll"] {
        let program = std::env::current_exe().unwrap();
        let ended = std::process::Command::new(program).env(FORM, form).output().unwrap();
        assert!(ended.status.success(), "{form}: {}", String::from_utf8_lossy(&ended.stdout));
    }
}

#[test]
fn a_host_writes_and_reads_through_two_queues() {
    let target = Running::start();
    for (header_digest, data_digest, disables_flow_control) in VARIANTS {
        let options = Options { header_digest, data_digest, disables_flow_control, alignment: 3 };
        let (mut admin_queue, id) = Connection::admin(target.address, options, SUBSYSTEM, 1);
        let page = admin_queue.identify(cns::CONTROLLER, 0);
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!((page.cntlid.get(), text(&page.mn)), (id, "Aryk".to_owned()));
        assert_eq!(admin_queue.identify(cns::ACTIVE_NAMESPACES, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);

        let mut queues = [1, 2].map(|qid| Connection::io(target.address, options, id, qid, 1).unwrap());
        // In the capsule, and by R2T in one and in several PDUs.
        for (lba, blocks) in [(0, 1), (1, 2), (3, 8), (11, 32)] {
            let data = pattern(blocks, lba);
            queues[lba % 2].write(lba as u64, &data).unwrap();
            assert!(queues[(lba + 1) % 2].read(lba as u64, blocks).unwrap() == data, "{lba}");
        }
        queues[0].command(io::FLUSH, 0, 1, &[], 0).unwrap();

        // More commands at once than one write has pieces for.
        let reads: Vec<u16> = (0..15).map(|i| queues[0].start(io::READ, i, 1)).collect();
        let mut done = queues[0].finish(reads.len());
        done.sort();
        assert!(done.iter().map(|(cid, _)| *cid).eq(reads));
        assert!(done[11].1 == pattern(32, 11)[..BLOCK]);

        queues[0].command(io::WRITE_ZEROES, 0, 1, &[], 0).unwrap();
        assert!(queues[1].read(0, 1).unwrap() == [0; BLOCK]);
        assert_eq!(queues[0].command(io::COMPARE, 1, 2, &pattern(2, 1), 0), Ok(Vec::new()));
        assert_eq!(queues[0].command(io::COMPARE, 1, 2, &pattern(2, 9), 0), Err(Code::COMPARE_FAILURE));
        assert_eq!(queues[1].command(io::VERIFY, 11, 32, &[], 0), Ok(Vec::new()));
        assert_eq!(queues[1].command(io::VERIFY, 11, 33, &[], 0), Err(Code::INVALID_FIELD));
        let outside = queues[0].read(BLOCKS as u64, 1);
        assert_eq!(outside, Err(Code::LBA_OUT_OF_RANGE));
        assert_eq!(queues[0].command(0x7e, 0, 1, &[], 0), Err(Code::INVALID_OPCODE));
        assert_eq!(queues[1].write(BLOCKS as u64, &pattern(1, 0)), Err(Code::LBA_OUT_OF_RANGE));
        assert!(queues[1].read(1, 1).unwrap() == pattern(2, 1)[..BLOCK], "the queue goes on");

        let traffic = || target.run(async |target| target.hosts()[0].1.clone());
        let counted = traffic().traffic;
        // The data, the reads of one block, and Verify.
        assert_eq!(
            (counted.reads.requests, counted.reads.bytes),
            (4 + 17 + 1, (43 + 17 + 32) * BLOCK as u64)
        );
        assert_eq!((counted.writes.requests, counted.writes.bytes), (4, 43 * BLOCK as u64));
        // A flush, zeroes and two comparisons, of which one has failed.
        assert_eq!((counted.others.requests, counted.failed), (4, 1));
        // A write whose data comes by R2T takes more than a turn; what a memory disk completes in the same turn takes no time.
        assert!(counted.writes.ns > 0, "{counted:?}");
        for done in [&counted.reads, &counted.writes, &counted.others] {
            assert_eq!(done.latencies.total(), done.requests, "each has its latency");
        }
        let (longest, sum) = (counted.writes.latencies.quantile(1.0), counted.writes.ns);
        // A bucket's end is at most an eighth above what it has.
        assert!(longest >= sum / 4 && longest <= sum + sum / 8 + 1, "{counted:?}");
        let [queue, _other] = queues;
        drop(queue);
        until(|| traffic().queues.len() == 1);
        assert_eq!(traffic().traffic, counted, "what a queue has done stays when it ends");

        let down = Cc::enabled(4096, false).with_shutdown(Shutdown::Normal);
        assert!(admin_queue.configure(down).is_shut_down());
        assert!(!admin_queue.configure(down.disabled()).is_ready());
    }
    target.stop();
}

#[test]
fn each_command_has_one_r2t_and_several_commands_have_theirs_at_once() {
    let target = Running::start();
    // A command has at most so many.
    let blocks = 32;
    let len = (blocks * BLOCK) as u32;
    for max_r2t in [0, 15, u32::MAX] {
        let (_admin_queue, id) = Raw::admin(target.address);
        let mut queue = Raw::io_with(target.address, id, max_r2t);
        for cid in 1..=3 {
            queue.send(&capsule(command(cid, io::WRITE, 0, blocks as u32, len)));
        }
        let requested = [(); 3].map(|()| match queue.receive() {
            Some((Header::R2t(r2t), _)) => r2t,
            other => panic!("{other:?}"),
        });
        assert!(requested.iter().all(|r2t| (r2t.offset, r2t.len) == (0, len)), "{requested:?}");
        // No other R2T comes before the completion of a later command.
        queue.send(&capsule(command(9, io::FLUSH, 0, 1, 0)));
        let next = queue.receive();
        assert!(matches!(next, Some((Header::Response(entry), _)) if entry.cid() == 9), "{next:?}");
        for r2t in requested {
            let data = H2cData { cid: r2t.cid, tag: r2t.tag, offset: 0, len: len / 2, is_last: false };
            queue.send(&pdu(&Header::H2cData(data), &pattern(blocks / 2, 1)));
            let data = H2cData { offset: len / 2, is_last: true, ..data };
            queue.send(&pdu(&Header::H2cData(data), &pattern(blocks / 2, 2)));
            assert_eq!(queue.completion().map(|entry| entry.cid()), Some(r2t.cid));
        }
        let (code, read) = queue.run(command(4, io::READ, 0, blocks as u32, len));
        assert!(code == Code::SUCCESS && read == [pattern(blocks / 2, 1), pattern(blocks / 2, 2)].concat());
    }
    target.stop();
}

#[test]
fn a_host_finds_the_subsystem_by_discovery() {
    let target = Running::start();
    let (mut queue, _) = Connection::admin(target.address, Options::default(), nqn::DISCOVERY, 1);
    let page = queue.log(0x70, 0, 2 * RECORD_LEN);
    assert_eq!(discovery::Header::decode(&page).unwrap().entries, 1);
    let entry = Entry::decode(page[RECORD_LEN..].try_into().unwrap()).unwrap();
    assert_eq!((entry.subsystem.as_str(), entry.address.as_str()), (SUBSYSTEM, "127.0.0.1"));
    assert_eq!(entry.service, target.address.port().to_string());
    target.stop();
}

#[test]
fn wrong_hosts_and_queues_are_refused() {
    let target = Running::start();
    let refused = Connection::try_admin(target.address, Options::default(), "nqn.2016-06.io.spdk:other", 1);
    assert_eq!(refused.err(), Some(status::INVALID_PARAMETERS));
    let refused = Connection::try_admin(target.address, Options::default(), SUBSYSTEM, 3);
    assert_eq!(refused.err(), Some(status::INVALID_HOST));
    let (mut queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    assert_eq!(queue.command(admin::CREATE_SQ, 0, 1, &[], 0), Err(Code::INVALID_OPCODE));
    for (id, qid, host, code) in [
        (id, QUEUES_MAX + 1, 1, status::INVALID_PARAMETERS),
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
    target.stop();
}

#[test]
fn data_that_nobody_requested_ends_an_io_queue_and_no_other() {
    let target = Running::start();
    let (mut admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queues =
        [1, 2].map(|qid| Connection::io(target.address, Options::default(), id, qid, 1).unwrap());
    let fatal = queues[0].send_unrequested_data();
    assert_eq!(fatal, Fatal { status: FatalStatus::INVALID_FIELD, information: 10 });
    queues[1].write(0, &pattern(1, 0)).unwrap();
    assert_eq!(admin_queue.identify(cns::ACTIVE_NAMESPACES, 0)[..4], [1, 0, 0, 0]);
    target.stop();
}

#[test]
fn data_beyond_what_was_requested_is_not_written() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queues =
        [1, 2].map(|qid| Connection::io(target.address, Options::default(), id, qid, 1).unwrap());
    queues[1].write(0, &pattern(5, 3)).unwrap();
    let fatal = queues[0].send_excessive_data();
    assert_eq!(fatal, Fatal { status: FatalStatus::DATA_OUT_OF_RANGE, information: 0 });
    until(|| target.queues() == 1);
    assert!(queues[1].read(0, 5).unwrap() == pattern(5, 3));
    target.stop();
}

#[test]
fn writes_whose_data_does_not_come_hold_up_nobody() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut lazy = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let mut busy = Connection::io(target.address, Options::default(), id, 2, 1).unwrap();
    // The host leaves the R2Ts unanswered until `finish`.
    let writes: Vec<u16> = (0..15).map(|_| lazy.start(io::WRITE, 0, 32)).collect();
    for round in 0..200 {
        busy.write(40, &pattern(8, round)).unwrap();
        assert!(busy.read(40, 8).unwrap() == pattern(8, round));
    }
    assert_eq!(lazy.finish(writes.len()).len(), 15);
    target.stop();
}

#[test]
fn the_next_association_of_a_host_begins_when_the_earlier_one_has_ended() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let _queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    until(|| target.queues() == 1);
    let (_second, other) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    assert!(other != id && target.queues() == 0, "the earlier queue has ended");
    let (_third, _) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 2);
    assert_eq!(target.list()[0].controllers.len(), 2, "another host has another controller");
    target.stop();
}

#[test]
fn a_namespace_goes_and_comes_while_a_host_uses_it() {
    let target = Running::start();
    let (mut admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    queue.write(0, &pattern(1, 5)).unwrap();
    target.run(async |target| target.remove_namespace(SUBSYSTEM, 1).await.unwrap());
    assert_eq!(queue.read(0, 1), Err(Code::INVALID_NAMESPACE_OR_FORMAT));
    assert_eq!(admin_queue.identify(cns::ACTIVE_NAMESPACES, 0)[..4], [0; 4]);
    target.run(async |target| {
        assert_eq!(target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap(), 1);
    });
    assert!(queue.read(0, 1).unwrap() == pattern(1, 5));
    target.remove_disk();
    assert_eq!(queue.read(0, 1), Err(Code::INVALID_NAMESPACE_OR_FORMAT));
    target.stop();
}

#[test]
fn a_write_to_a_removed_namespace_does_not_reach_the_next_one() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut slow = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let mut other = Connection::io(target.address, Options::default(), id, 2, 1).unwrap();
    other.write(0, &pattern(1, 5)).unwrap();
    // The target requests the data of this write while other commands run. It comes when the namespace is another one.
    slow.start(io::WRITE, 0, 32);
    for _ in 0..20 {
        other.read(0, 1).unwrap();
    }
    target.run(async |target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
        assert_eq!(target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap(), 1);
    });
    for _ in 0..2 {
        assert!(slow.read(0, 1).unwrap() == pattern(1, 5));
    }
    target.stop();
}

#[test]
fn a_silent_connection_and_one_that_does_not_read_hold_up_nobody() {
    let target = Running::start();
    let _silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(target.address).unwrap()).collect();
    let mut garbage = TcpStream::connect(target.address).unwrap();
    garbage.write_all(&[0xff; 200]).unwrap();
    let mut answer = Vec::new();
    garbage.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.first(), Some(&3), "a C2HTermReq");

    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut lazy = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let mut busy = Connection::io(target.address, Options::default(), id, 2, 1).unwrap();
    // More data than the buffers of both sockets have: the host reads none of it.
    let reads: Vec<u16> = (0..15).map(|_| lazy.start(io::READ, 0, 32)).collect();
    for round in 0..200 {
        busy.write(40, &pattern(8, round)).unwrap();
        assert!(busy.read(40, 8).unwrap() == pattern(8, round));
    }
    // The lazy host goes on.
    assert_eq!(lazy.finish(reads.len()).len(), 15);
    target.stop();
}

#[test]
fn a_host_that_vanishes_leaves_nothing() {
    let target = Running::start();
    let (admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    // Data of a write is requested, and does not come.
    queue.start(io::WRITE, 0, 32);
    drop(queue);
    until(|| target.queues() == 0);
    drop(admin_queue);
    until(|| target.list()[0].controllers.is_empty());
    target.run(async |target| target.remove_subsystem(SUBSYSTEM).await.unwrap());
    assert!(TcpStream::connect_timeout(&target.address, Duration::from_secs(1)).is_err());
    target.remove_disk();
    target.stop();
}

#[test]
fn commands_follow_the_state_of_the_path() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let address = target.address;
    let set = |group, state| {
        target.run(async move |target| {
            target.set_state(SUBSYSTEM, Address::tcp(address), group, state).await.unwrap()
        });
    };
    for (group, state, read) in [
        (None, AnaState::Inaccessible, Err(Code::ANA_INACCESSIBLE)),
        (Some(1), AnaState::NonOptimized, Ok(vec![0; BLOCK])),
        (Some(2), AnaState::Inaccessible, Ok(vec![0; BLOCK])),
    ] {
        set(group, state);
        assert_eq!(queue.read(0, 1), read);
    }
    target.run(async |target| target.set_group(SUBSYSTEM, 1, 2).await.unwrap());
    assert_eq!(queue.read(0, 1), Err(Code::ANA_INACCESSIBLE));
    target.stop();
}

#[test]
fn hosts_see_a_hidden_namespace_as_long_as_it_is_shown_to_them() {
    let target = Running::start();
    target.run(async |target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
        let hidden = NewNamespace { is_hidden: true, ..NewNamespace::default() };
        target.add_namespace(SUBSYSTEM, "disk", hidden).await.unwrap();
    });
    let mut hosts = [1, 2].map(|host| {
        let (admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, host);
        (admin_queue, Connection::io(target.address, Options::default(), id, 1, host).unwrap())
    });
    let sees = |(admin_queue, queue): &mut (Connection, Connection)| {
        let is_listed = admin_queue.identify(cns::ACTIVE_NAMESPACES, 0)[0] == 1;
        assert_eq!(queue.read(0, 1).is_ok(), is_listed);
        is_listed
    };
    let host: nqn::Nqn = "nqn.2016-06.io.spdk:host2".parse().unwrap();
    assert_eq!(hosts.each_mut().map(sees), [false, false]);
    let shown = host.clone();
    target.run(async move |target| target.show_to(SUBSYSTEM, 1, shown).await.unwrap());
    assert_eq!(hosts.each_mut().map(sees), [false, true]);
    target.run(async move |target| target.hide_from(SUBSYSTEM, 1, &host).await.unwrap());
    assert_eq!(hosts.each_mut().map(sees), [false, false]);
    target.stop();
}

#[test]
fn a_host_that_may_not_connect_any_more_is_disconnected() {
    let target = Running::start();
    let address = target.address;
    let connect = |host| {
        let (admin_queue, id) = Connection::admin(address, Options::default(), SUBSYSTEM, host);
        (admin_queue, Connection::io(address, Options::default(), id, 1, host).unwrap())
    };
    let (_first, _second) = (connect(1), connect(2));
    let name: nqn::Nqn = "nqn.2016-06.io.spdk:host1".parse().unwrap();
    let removed = name.clone();
    target.run(async move |target| target.remove_host(SUBSYSTEM, &removed).await.unwrap());
    let connected: Vec<_> = target.list()[0].controllers.iter().map(|host| host.host.clone()).collect();
    assert_eq!(connected, ["nqn.2016-06.io.spdk:host2".parse().unwrap()]);
    assert_eq!(
        Connection::try_admin(address, Options::default(), SUBSYSTEM, 1).err(),
        Some(status::INVALID_HOST)
    );
    target.run(async |target| target.allow_any_host(SUBSYSTEM, true).await.unwrap());
    let _first = connect(1);
    assert_eq!(target.list()[0].controllers.len(), 2);
    target.run(async move |target| target.stop_listening(SUBSYSTEM, Address::tcp(address)).await.unwrap());
    assert!(target.list()[0].controllers.is_empty());
    assert!(TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err());
    target.stop();
}

#[test]
fn a_host_is_refused_beyond_the_number_of_connections() {
    let target = Running::start();
    target.run(async |target| target.set_limits(Limits { connections: 2, ..Limits::default() }));
    let (admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let refused = Connection::io(target.address, Options::default(), id, 2, 1);
    assert_eq!(refused.err(), Some(status::CONTROLLER_BUSY));
    queue.write(0, &pattern(1, 0)).unwrap();
    drop((queue, admin_queue));
    until(|| target.list()[0].controllers.is_empty());
    Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    target.stop();
}

#[test]
fn a_host_that_keeps_its_queue_waiting_loses_it() {
    let target = Running::start();
    let patience = Duration::from_millis(300);
    target.run(async move |target| target.set_limits(Limits { patience, ..Limits::default() }));
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut lazy = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let mut busy = Connection::io(target.address, Options::default(), id, 2, 1).unwrap();
    until(|| target.queues() == 2);
    lazy.start(io::WRITE, 0, 32);
    until(|| {
        busy.write(40, &pattern(8, 1)).unwrap();
        target.queues() == 1
    });
    let mut looks = 0;
    until(|| {
        looks += 1;
        looks > 2 * patience.as_millis()
    });
    assert!(busy.read(40, 8).unwrap() == pattern(8, 1), "an idle queue stays");
    target.stop();
}
