//! Hosts that must prove who they are.

use crate::raw::{Raw, command};
use crate::target::{BLOCK, Running, SUBSYSTEM, until};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::chap::{self, Action, Allowed, Failure, Group, Hash, Host, Parties, Secret, Secrets};
use aryk_nvme_fabrics::command::Command;
use aryk_nvme_fabrics::connect::ANY_CONTROLLER;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::status;
use aryk_nvmf::{HostKeys, Limits};
use std::sync::Arc;
use std::time::Duration;

const HOST: &str = "nqn.2016-06.io.spdk:host1";
const OF_HOST: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OF_SUBSYSTEM: &str =
    "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";
/// The host authenticates next.
const REQUIRED: u32 = 1 << 17;

fn secrets(host: &str, controller: Option<&str>) -> Arc<Secrets> {
    let parse = |text: &str| Secret::parse(text.as_bytes()).unwrap();
    Arc::new(Secrets { host: parse(host), controller: controller.map(parse) })
}

/// A host with these secrets.
fn host(secrets: Arc<Secrets>, group: Group) -> Host {
    let parties = Parties { host: HOST.parse().unwrap(), subsystem: SUBSYSTEM.parse().unwrap() };
    Host::new(secrets, parties, 5, &Allowed { hashes: vec![Hash::Sha256], groups: vec![group] })
}

fn right(group: Group) -> Host {
    host(secrets(OF_HOST, Some(OF_SUBSYSTEM)), group)
}

/// A target whose host 1 must authenticate.
fn start() -> Running {
    let target = Running::start();
    let keys = HostKeys {
        secrets: secrets(OF_HOST, Some(OF_SUBSYSTEM)),
        key: "key".into(),
        controller_key: Some("other".into()),
    };
    target.run(async |target| target.add_host(SUBSYSTEM, HOST.parse().unwrap(), Some(keys)).unwrap());
    target
}

/// An admin queue whose host has authenticated, with its controller's identifier.
fn admin(target: &Running) -> (Raw, u16) {
    let (mut queue, status, result) = Raw::start(target.address, 0, ANY_CONTROLLER);
    assert!(status.is_success() && result & REQUIRED != 0);
    assert_eq!(queue.prove(right(Group::Ffdhe3072)), Some(Action::Done));
    assert_eq!(queue.try_enable(), Code::SUCCESS);
    (queue, result as u16)
}

#[test]
fn a_host_that_has_authenticated_uses_its_disk() {
    let target = start();
    let (mut queue, id) = admin(&target);
    let (mut io_queue, status, result) = Raw::start(target.address, 1, id);
    assert!(status.is_success() && result == u32::from(id) | REQUIRED);
    // Nothing is read before.
    let read = || command(1, io::READ, 0, 1, BLOCK as u32);
    assert_eq!(io_queue.run(read()).0, status::AUTHENTICATION_REQUIRED);
    assert_eq!(target.queues(), 0);
    assert_eq!(io_queue.prove(right(Group::Null)), Some(Action::Done));
    assert_eq!(io_queue.run(read()), (Code::SUCCESS, vec![0; BLOCK]));
    assert_eq!(target.queues(), 1);
    // Once more, with a secret that the subsystem has got meanwhile.
    let keys = HostKeys { secrets: secrets(OF_SUBSYSTEM, None), key: "new".into(), controller_key: None };
    target.run(async |target| target.add_host(SUBSYSTEM, HOST.parse().unwrap(), Some(keys)).unwrap());
    assert_eq!(queue.prove(host(secrets(OF_SUBSYSTEM, None), Group::Null)), Some(Action::Done));
    assert_eq!(io_queue.run(read()).0, Code::SUCCESS);
    assert_eq!(queue.prove(right(Group::Null)), Some(Action::Failed(Failure::Failed)));
    assert_eq!(io_queue.receive(), None, "a host that fails loses its controller");
    target.stop();
}

#[test]
fn a_host_authenticates_again_on_a_queue_that_it_uses() {
    let target = start();
    let (mut queue, id) = admin(&target);
    let mut queues = [1, 2].map(|qid| {
        let (mut io_queue, ..) = Raw::start(target.address, qid, id);
        assert_eq!(io_queue.prove(right(Group::Null)), Some(Action::Done));
        io_queue
    });
    let read = || command(1, io::READ, 0, 1, BLOCK as u32);
    for group in [Group::Null, Group::Ffdhe2048] {
        for io_queue in &mut queues {
            assert_eq!(io_queue.run(read()), (Code::SUCCESS, vec![0; BLOCK]));
            assert_eq!(io_queue.prove(right(group)), Some(Action::Done));
        }
    }
    // With a secret that the subsystem has got meanwhile, beside a host that is still used to the earlier one.
    let keys = HostKeys { secrets: secrets(OF_SUBSYSTEM, None), key: "new".into(), controller_key: None };
    target.run(async |target| target.add_host(SUBSYSTEM, HOST.parse().unwrap(), Some(keys)).unwrap());
    let [first, second] = &mut queues;
    assert_eq!(first.prove(host(secrets(OF_SUBSYSTEM, None), Group::Null)), Some(Action::Done));
    assert_eq!(second.prove(right(Group::Null)), Some(Action::Failed(Failure::Failed)));
    assert_eq!(second.receive(), None, "it has lost this queue");
    until(|| target.queues() == 1);
    assert_eq!(first.run(read()), (Code::SUCCESS, vec![0; BLOCK]));
    assert_eq!(queue.try_enable(), Code::SUCCESS, "the controller goes on");
    assert_eq!(target.run(async |target| target.failed_authentications()), 1);
    target.stop();
}

#[test]
fn a_host_that_fails_and_does_not_ask_loses_its_queue() {
    let target = start();
    target.run(async |target| {
        target.set_limits(Limits { patience: Duration::from_millis(500), ..target.limits() })
    });
    let (mut queue, id) = admin(&target);
    let (mut io_queue, ..) = Raw::start(target.address, 1, id);
    assert_eq!(io_queue.prove(right(Group::Null)), Some(Action::Done));
    let read = || command(1, io::READ, 0, 1, BLOCK as u32);
    assert_eq!(io_queue.run(read()).0, Code::SUCCESS);
    io_queue.prove_unasked(host(secrets(OF_SUBSYSTEM, None), Group::Null));
    assert_eq!(io_queue.run(read()).0, status::AUTHENTICATION_REQUIRED);
    assert_eq!(io_queue.receive(), None);
    until(|| target.queues() == 0);
    assert_eq!(target.run(async |target| target.failed_authentications()), 1);
    assert_eq!(queue.try_enable(), Code::SUCCESS, "the controller goes on");
    // A controller that fails can do nothing, too, until its host has asked.
    queue.prove_unasked(host(secrets(OF_SUBSYSTEM, None), Group::Null));
    assert_eq!(queue.try_enable(), status::AUTHENTICATION_REQUIRED);
    let receive = Command::AuthenticationReceive { protocol: chap::PROTOCOL, len: 2048 };
    let entry = receive.encode().with_sgl(Sgl::Transport { len: 2048 }.encode());
    assert_eq!(queue.run(entry).0, Code::SUCCESS);
    assert_eq!(queue.receive(), None);
    until(|| target.run(async |target| target.failed_authentications()) == 2);
    target.stop();
}

#[test]
fn a_host_without_keys_need_not_authenticate() {
    let target = Running::start();
    let (_queue, id) = Raw::admin(target.address);
    let mut io_queue = Raw::io(target.address, id, 1, 16);
    let receive = Command::AuthenticationReceive { protocol: chap::PROTOCOL, len: 2048 };
    for len in [2048, 8192] {
        let entry = receive.encode().with_sgl(Sgl::Transport { len }.encode());
        assert_eq!(io_queue.run(entry), (Code::INVALID_FIELD, Vec::new()));
    }
    assert_eq!(io_queue.run(command(1, io::READ, 0, 1, BLOCK as u32)).0, Code::SUCCESS);
    target.stop();
}

#[test]
fn a_host_that_has_not_authenticated_can_do_nothing_and_ends_nothing() {
    let target = start();
    let (_queue, id) = admin(&target);
    let (mut io_queue, ..) = Raw::start(target.address, 1, id);
    assert_eq!(io_queue.prove(right(Group::Null)), Some(Action::Done));
    for _ in 0..3 {
        let (mut liar, status, result) = Raw::start(target.address, 0, ANY_CONTROLLER);
        assert!(status.is_success() && result & REQUIRED != 0);
        assert_eq!(liar.try_enable(), status::AUTHENTICATION_REQUIRED);
        let failed = Some(Action::Failed(Failure::Failed));
        assert_eq!(liar.prove(host(secrets(OF_SUBSYSTEM, None), Group::Null)), failed);
        assert_eq!(liar.receive(), None, "the connection has ended");
    }
    // A queue of the controller, too.
    let (mut liar, ..) = Raw::start(target.address, 2, id);
    assert!(liar.prove(host(secrets(OF_SUBSYSTEM, None), Group::Null)) != Some(Action::Done));
    until(|| target.run(async |target| target.failed_authentications()) == 4);
    let read = command(1, io::READ, 0, 1, BLOCK as u32);
    assert_eq!(io_queue.run(read).0, Code::SUCCESS, "the true host goes on");
    // And ends when it connects again.
    let (_queue, next) = admin(&target);
    assert_eq!(io_queue.receive(), None);
    assert_ne!(next, id);
    target.stop();
}

#[test]
fn a_host_wants_proof_of_the_subsystem() {
    let target = start();
    let (mut queue, ..) = Raw::start(target.address, 0, ANY_CONTROLLER);
    let failed = Some(Action::Failed(Failure::Failed));
    assert_eq!(queue.prove(host(secrets(OF_HOST, Some(OF_HOST)), Group::Ffdhe2048)), failed);
    assert_eq!(queue.receive(), None);
    until(|| target.run(async |target| target.failed_authentications()) == 1);
    target.stop();
}
