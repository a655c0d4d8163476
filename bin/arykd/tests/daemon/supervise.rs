//! The supervisor: restarts of the daemon, forwarded signals, and the daemon's end without it.

use crate::front_end::FrontEnd;
use crate::harness::{ARYKD, Daemon, run_in, wait_for};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SUPERVISED: &[&str] = &["--supervise", "--state-dir", "DIR/state"];

/// The longest permitted time between a daemon's death and its successor's first reply; generous for busy test machines. A free
/// one takes 20 ms.
const GAP_MAX: Duration = Duration::from_secs(1);

#[expect(clippy::disallowed_methods, reason = "the test measures a real daemon")]
fn now() -> Instant {
    Instant::now()
}

fn daemon_of(supervisor: &Daemon) -> Pid {
    try_daemon_of(supervisor).expect("the daemon answers")
}

fn try_daemon_of(supervisor: &Daemon) -> Option<Pid> {
    let reactors = supervisor.try_call("framework_get_reactors", json!({}))?.unwrap();
    Pid::from_raw(i32::try_from(reactors["pid"].as_i64().unwrap()).unwrap())
}

/// Kills the daemon. Returns how long no daemon replied.
fn kill(supervisor: &Daemon, daemon: Pid) -> Duration {
    let started = now();
    kill_process(daemon, Signal::KILL).unwrap();
    loop {
        if try_daemon_of(supervisor).is_some_and(|successor| successor != daemon) {
            return started.elapsed();
        }
        assert!(started.elapsed() < Duration::from_secs(30));
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

#[test]
fn a_killed_daemon_is_restarted_at_once() {
    let mut supervisor = Daemon::start(SUPERVISED);
    supervisor.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    let mut gaps = Vec::new();
    for _ in 0..3 {
        let daemon = daemon_of(&supervisor);
        assert_ne!(daemon.as_raw_nonzero().get().unsigned_abs(), supervisor.pid());
        gaps.push(kill(&supervisor, daemon));
        assert_eq!(supervisor.call("bdev_get_bdevs", json!({})).unwrap()[0]["name"], "n");
    }
    gaps.sort();
    eprintln!("from kill -9 to the first reply: {gaps:?}");
    assert!(gaps[0] < GAP_MAX, "{gaps:?}");
    let daemon = daemon_of(&supervisor);
    assert_eq!(supervisor.signal_and_wait("TERM", Duration::from_secs(20)), Some(0));
    assert!(test_kill_process(daemon).is_err(), "it has ended before");
}

#[test]
fn a_daemon_that_ends_in_order_is_not_restarted() {
    let mut supervisor = Daemon::start(SUPERVISED);
    supervisor.call("spdk_kill_instance", json!({"sig_name": "SIGTERM"})).unwrap();
    assert_eq!(supervisor.wait(Duration::from_secs(20)), Some(0));
}

#[test]
fn a_daemon_does_not_outlive_its_supervisor() {
    let mut supervisor = Daemon::start(SUPERVISED);
    let daemon = daemon_of(&supervisor);
    supervisor.kill();
    let started = now();
    while test_kill_process(daemon).is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20), "the daemon outlives its supervisor");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    supervisor.restart();
    kill(&supervisor, daemon_of(&supervisor));
}

#[test]
fn a_daemon_that_cannot_start_is_retried() {
    let mut supervisor = Daemon::start(SUPERVISED);
    let store = supervisor.dir().join("state/state.redb");
    let whole = std::fs::read(&store).unwrap();
    std::fs::write(&store, "damaged").unwrap();
    kill_process(daemon_of(&supervisor), Signal::KILL).unwrap();
    assert_eq!(supervisor.wait(Duration::from_millis(300)), None, "the supervisor goes on");
    // In one step: a daemon that starts in between would find an empty store, and begin a new one.
    let copy = supervisor.dir().join("copy");
    std::fs::write(&copy, whole).unwrap();
    std::fs::rename(&copy, &store).unwrap();
    supervisor.wait_until_ready();
    assert_eq!(supervisor.signal_and_wait("INT", Duration::from_secs(20)), Some(0));
}

#[test]
fn it_needs_a_state_directory() {
    let output = run_in(TempDir::new().unwrap().path(), &["--supervise"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--state-dir"));
}

/// The panic is at a crash point: tests are built with them (see `dev-dependencies`).
#[test]
fn a_panic_of_a_reactor_restarts_the_daemon() {
    let dir = TempDir::new().unwrap();
    let (socket, log, disk) = (dir.path().join("rpc"), dir.path().join("log"), dir.path().join("disk"));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let mut supervisor = Command::new(ARYKD)
        .arg("-r")
        .arg(&socket)
        .arg("-S")
        .arg(dir.path().join("vhost"))
        .args(["--supervise", "--state-dir"])
        .arg(dir.path().join("state"))
        .env("ARYK_CRASH_STEP", "submitted:20:panic")
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    wait_for("the daemon is up", || UnixStream::connect(&socket).is_ok());
    let call = |method: &str, params: serde_json::Value| crate::log::call(&socket, &[(method, params)]);
    call("bdev_uring_create", json!({"name": "d", "filename": disk, "block_size": 512}));
    call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "d"}));
    let meeting = dir.path().join("vhost/c");
    let mut vm = FrontEnd::connect(&meeting);
    for block in 0..19 {
        vm.write(block * 512, &[block as u8 + 1; 512]).unwrap();
    }
    // The daemon panics while this request is in flight.
    vm.start_read(0, 512);
    let printed = || std::fs::read_to_string(&log).unwrap();
    wait_for("the supervisor says why", || printed().contains("another is started"));
    drop(vm);
    let died = printed().lines().find(|line| line.contains("another is started")).unwrap().to_owned();
    for part in
        ["SIGABRT", "panic in thread reactor_", "on purpose, at the step submitted", "crates/crash-point"]
    {
        assert!(died.contains(part), "{part}: {died}");
    }
    assert!(printed().contains("the daemon aborts"), "{}", printed());
    wait_for("the successor is there", || FrontEnd::open(&meeting, false).is_ok());
    let mut vm = FrontEnd::connect(&meeting);
    for block in 0..10 {
        assert_eq!(vm.read(block * 512, 512).unwrap(), [block as u8 + 1; 512]);
    }
    assert!(Command::new("kill").arg(supervisor.id().to_string()).status().unwrap().success());
    assert!(supervisor.wait().unwrap().success());
}
