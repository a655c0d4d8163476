//! Limits of hosts: what one host may transfer, by all its queues.

use crate::host::{Connection, Options};
use crate::target::{Running, SUBSYSTEM, until};
use aryk_bdev::RateLimits;
use aryk_nvme::spec::opcode::io;
use aryk_nvme_fabrics::nqn::Nqn;
use std::time::{Duration, Instant};

/// Commands that a queue of 16 entries has at the same time.
const DEPTH: usize = 15;

fn limit(target: &Running, host: Option<u8>, ios: u64) {
    target.run(async move |target| {
        let host: Option<Nqn> = host.map(|host| format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap());
        let limits = RateLimits { ios, ..RateLimits::default() };
        target.limit_hosts(SUBSYSTEM, host.as_ref(), limits).await.unwrap();
    });
}

/// A host with two I/O queues.
fn connect(target: &Running, host: u8) -> (Connection, [Connection; 2]) {
    let (admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, host);
    let open = |qid| Connection::io(target.address, Options::default(), id, qid, host).unwrap();
    (admin_queue, [1, 2].map(open))
}

/// Starts as many reads as a queue has room for.
fn fill(queue: &mut Connection) {
    for _ in 0..DEPTH {
        queue.start(io::READ, 0, 1);
    }
}

/// The reads that the target has done for a host.
fn reads(target: &Running, host: u8) -> u64 {
    let name: Nqn = format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap();
    let hosts = target.run(async |target| target.hosts());
    hosts.into_iter().filter(|(_, info)| info.host == name).map(|(_, info)| info.traffic.reads.requests).sum()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "limits are about real time")]
fn a_limited_host_leaves_the_disk_to_others() {
    let target = Running::start_on(2);
    limit(&target, Some(1), 2);
    let (mut limited, mut other) = (connect(&target, 1), connect(&target, 2));
    until(|| target.queues() == 4);
    let begun = Instant::now();
    for queue in &mut limited.1 {
        fill(queue);
    }
    for _ in 0..100 {
        other.1.iter_mut().for_each(|queue| drop(queue.read(0, 1).unwrap()));
    }
    // Both queues together: 2 a second, and one request of each queue.
    let done = reads(&target, 1);
    assert!(done as f64 <= begun.elapsed().as_secs_f64() * 2.0 + 4.0, "{done}");
    assert_eq!(reads(&target, 2), 200);
    let info = target.list().remove(0);
    assert_eq!(info.controllers.iter().map(|host| host.limits.ios).max(), Some(2));
    // What waits goes when the limit does.
    limit(&target, Some(1), 0);
    let lifted = Instant::now();
    for queue in &mut limited.1 {
        assert_eq!(queue.finish(DEPTH).len(), DEPTH);
    }
    assert!(lifted.elapsed() < Duration::from_secs(10), "30 requests at 2 a second take 15 s");
    target.stop();
}

#[test]
#[expect(clippy::disallowed_methods, reason = "limits are about real time")]
fn each_host_has_the_limits_for_itself_and_a_limited_host_can_go() {
    let target = Running::start();
    let mut hosts = [1, 2].map(|host| connect(&target, host));
    until(|| target.queues() == 4);
    limit(&target, None, 100);
    let begun = Instant::now();
    for (_, [queue, _]) in &mut hosts {
        fill(queue);
    }
    for (_, [queue, _]) in &mut hosts {
        queue.finish(DEPTH);
    }
    assert!(begun.elapsed() >= Duration::from_millis(100), "15 requests, of which 2 may go at once");
    // Requests that wait do not hold up the end of their host.
    limit(&target, None, 1);
    let [mut first, _second] = hosts;
    for queue in &mut first.1 {
        fill(queue);
    }
    until(|| reads(&target, 1) > DEPTH as u64);
    drop(first);
    until(|| target.list()[0].controllers.len() == 1);
    let (_admin_queue, [mut queue, _]) = connect(&target, 1);
    assert_eq!(target.list()[0].controllers.iter().map(|host| host.limits.ios).min(), Some(1));
    limit(&target, Some(1), 1_000_000);
    for _ in 0..50 {
        queue.read(0, 1).unwrap();
    }
    target.stop();
}

#[test]
#[expect(clippy::disallowed_methods, reason = "limits are about real time")]
fn a_host_that_connects_again_still_pays() {
    let target = Running::start();
    target.run(async |target| {
        let limits = RateLimits { bytes: 64 << 10, ..RateLimits::default() };
        target.limit_hosts(SUBSYSTEM, None, limits).await.unwrap();
    });
    let (admin_queue, [mut queue, other]) = connect(&target, 1);
    // What takes two seconds goes at once, and others wait for it.
    let begun = Instant::now();
    queue.read(0, 32).unwrap();
    drop((admin_queue, queue, other));
    until(|| target.list()[0].controllers.is_empty());
    let (_admin_queue, [mut queue, _]) = connect(&target, 1);
    queue.read(0, 1).unwrap();
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(1500), "{waited:?}");
    target.stop();
}
