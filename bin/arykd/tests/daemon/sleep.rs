//! Sleep policies of controllers, by the processor time that the daemon uses.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, wait_for};
use crate::moving::{put, threads};
use serde_json::{Value, json};
use std::time::Duration;

/// The daemon's processor time so far.
fn used(daemon: &Daemon) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    // Linux reports hundredths of a second here, on all architectures.
    Duration::from_millis(ticks * 10)
}

/// Whether the daemon polls, though it has no work. Other tests use the processors too.
fn polls(daemon: &Daemon) -> bool {
    let before = used(daemon);
    std::thread::park_timeout(Duration::from_millis(400));
    used(daemon) - before >= Duration::from_millis(60)
}

fn policy(daemon: &Daemon) -> Value {
    daemon.call("vhost_get_controllers", json!({"name": "d"})).unwrap()[0]["sleep_policy"].take()
}

/// A daemon with a controller `d`, and its front-end.
fn attached(flags: &[&str]) -> (Daemon, FrontEnd) {
    let daemon = Daemon::start(flags);
    daemon.aryk(&["disk", "create", "d", "--null", "--size", "1M"]).unwrap();
    daemon.aryk(&["attach", "d"]).unwrap();
    let front_end = connected(&daemon);
    (daemon, front_end)
}

fn connected(daemon: &Daemon) -> FrontEnd {
    let mut front_end = FrontEnd::connect(&daemon.dir().join("vhost/d"));
    front_end.read(0, 512).unwrap();
    front_end
}

#[test]
fn a_controller_has_its_own_sleep_policy_and_keeps_it() {
    let (mut daemon, front_end) = attached(&["--state-dir", "DIR/state"]);
    assert_eq!(policy(&daemon), "default");
    wait_for("an idle daemon", || !polls(&daemon));
    let said = daemon.aryk(&["controller", "set", "d", "--sleep-policy", "poll"]).unwrap();
    assert!(said.contains("sleep policy of controller d: poll"), "{said}");
    assert_eq!(policy(&daemon), "poll");
    wait_for("a daemon that polls", || polls(&daemon));
    drop(front_end);
    daemon.kill_and_restart();
    assert_eq!(policy(&daemon), "poll");
    wait_for("an idle daemon: no VM is connected", || !polls(&daemon));
    let front_end = connected(&daemon);
    wait_for("a daemon that polls after its restart", || polls(&daemon));
    daemon.aryk(&["controller", "set", "d", "--sleep-policy", "default"]).unwrap();
    wait_for("an idle daemon", || !polls(&daemon));
    daemon.aryk(&["controller", "set", "d", "--sleep-policy", "poll"]).unwrap();
    drop(front_end);
    daemon.aryk(&["detach", "d"]).unwrap();
    let saved = daemon.call("save_config", json!({})).unwrap().to_string();
    assert!(!saved.contains("sleep_policy"), "{saved}");
    let none = json!({"ctrlr": "d", "policy": "poll"});
    assert_eq!(code(daemon.call("aryk_controller_set_sleep_policy", none)), -19);
}

#[test]
fn a_queue_takes_its_sleep_policy_to_another_core() {
    let (daemon, mut front_end) = attached(&["-m", "0x3"]);
    daemon.aryk(&["controller", "set", "d", "--sleep-policy", "poll"]).unwrap();
    for core in [1, 0, 1] {
        put(&daemon, threads(&daemon, "d.q0")[0], core).unwrap();
        front_end.read(0, 512).unwrap();
        wait_for("a daemon that polls", || polls(&daemon));
    }
    daemon.aryk(&["controller", "set", "d", "--sleep-policy", "interrupt"]).unwrap();
    wait_for("an idle daemon", || !polls(&daemon));
}

#[test]
fn under_a_daemon_that_polls_a_controller_may_sleep_only_with_its_reactor() {
    let (daemon, _front_end) = attached(&["--sleep-policy", "poll"]);
    daemon.aryk(&["controller", "set", "d", "--sleep-policy", "interrupt"]).unwrap();
    wait_for("a daemon that polls", || polls(&daemon));
}
