//! Notifications to a service manager, which the test simulates.

use crate::harness::ARYKD;
use aryk_rpc_client::Client;
use serde_json::{Value, json};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that notifies `manager`; killed when dropped.
struct Service(Child);

impl Service {
    fn start(dir: &Path, manager: &str, flags: &[&str]) -> Self {
        let mut daemon = Command::new(ARYKD);
        daemon.arg("-r").arg(dir.join("rpc.sock")).arg("-S").arg(dir.join("vhost")).args(flags);
        daemon.env("NOTIFY_SOCKET", manager).env("WATCHDOG_USEC", "200000").stdout(Stdio::null());
        Self(daemon.spawn().unwrap())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn next(manager: &UnixDatagram) -> String {
    let mut state = [0; 4096];
    let len = manager.recv(&mut state).expect("the daemon tells something");
    String::from_utf8(state[..len].to_vec()).unwrap()
}

/// Waits for a line, after watchdog notifications only.
fn wait_for(manager: &UnixDatagram, line: &str) {
    loop {
        let state = next(manager);
        if state.lines().any(|l| l == line) {
            return;
        }
        assert_eq!(state, "WATCHDOG=1", "before {line}");
    }
}

/// A call on the socket, which must exist: no retry is needed.
fn call(dir: &Path, method: &str) -> Value {
    Client::connect(&dir.join("rpc.sock")).expect("it is ready").result(method, &json!({})).unwrap()
}

fn listen(address: &SocketAddr) -> UnixDatagram {
    let manager = UnixDatagram::bind_addr(address).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    manager
}

fn signal(pid: u64, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
}

#[test]
fn the_manager_is_notified_of_start_and_end() {
    for is_abstract in [false, true] {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("notify");
        let name = format!("aryk-notify-test-{}", std::process::id());
        let (address, reported) = match is_abstract {
            false => (SocketAddr::from_pathname(&path).unwrap(), path.to_str().unwrap().to_owned()),
            true => (SocketAddr::from_abstract_name(&name).unwrap(), format!("@{name}")),
        };
        let manager = listen(&address);
        let mut service =
            Service::start(dir.path(), &reported, &["--allow-dir", dir.path().to_str().unwrap()]);
        wait_for(&manager, "READY=1");
        assert!(call(dir.path(), "spdk_get_version")["version"].is_string());
        wait_for(&manager, "WATCHDOG=1");
        wait_for(&manager, "WATCHDOG=1");
        signal(service.0.id().into(), "TERM");
        wait_for(&manager, "STOPPING=1");
        assert!(service.0.wait().unwrap().success());
    }
}

#[test]
fn each_daemon_of_a_supervisor_notifies_the_manager() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("notify");
    let manager = listen(&SocketAddr::from_pathname(&path).unwrap());
    let state = dir.path().join("state");
    let flags = ["--supervise", "--state-dir", state.to_str().unwrap()];
    let service = Service::start(dir.path(), path.to_str().unwrap(), &flags);
    for _ in 0..2 {
        wait_for(&manager, "READY=1");
        let daemon = call(dir.path(), "framework_get_reactors")["pid"].as_u64().unwrap();
        assert_ne!(daemon, u64::from(service.0.id()));
        signal(daemon, "KILL");
    }
    wait_for(&manager, "READY=1");
    signal(service.0.id().into(), "TERM");
    wait_for(&manager, "STOPPING=1");
}
