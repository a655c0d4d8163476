//! Hosts that break the rules, or do nothing that they should: they hold up nobody, and the target goes on.

use crate::raw::{Raw, capsule, command};
use crate::target::Running;
use aryk_nvme::spec::opcode::admin;
use aryk_nvme::spec::status::Code;

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
