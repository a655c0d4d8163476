//! A pool on a disk that several daemons reach: one of them has it.

use super::front_end::FrontEnd;
use super::harness::{Daemon, wait_for};
use super::remote::{NQN, port};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// A daemon that uses the disk of another one as `far`.
fn host(target: SocketAddr) -> Daemon {
    let host = Daemon::start(&["--state-dir", "DIR/state"]);
    host.aryk(&["disk", "create", "far", "--nvme-tcp", &target.to_string(), "--subsystem", NQN]).unwrap();
    host
}

fn connect(host: &Daemon) -> FrontEnd {
    let path = host.dir().join("vhost/p-vm");
    wait_for("the controller", || FrontEnd::open(&path, false).is_ok());
    FrontEnd::connect(&path)
}

/// The states of the daemon's pools.
fn states(host: &Daemon) -> Vec<Value> {
    let pools = host.call("aryk_pools_get", json!({})).unwrap();
    pools.as_array().unwrap().iter().map(|pool| pool["state"].clone()).collect()
}

/// The refusal of a daemon to open a pool that another one has.
fn expect_refusal(host: &Daemon, holder: &Daemon) {
    let holder = format!("in use by the daemon with process ID {}", holder.pid());
    // The search of the disk that has appeared may watch the claim still.
    wait_for("the refusal", || {
        let (_, refusal) = host.aryk(&["pool", "open", "--disk", "far"]).unwrap_err();
        assert!(refusal.contains(&holder) || refusal.contains("already"), "{refusal}");
        refusal.contains(&holder)
    });
    assert!(states(host).is_empty());
}

/// Opens the pool, unless a search of the disk does at the same time.
fn open(host: &Daemon) {
    wait_for("the pool", || {
        let opened = host.aryk(&["pool", "open", "--disk", "far"]);
        opened.is_ok() || states(host) == ["ready"]
    });
}

#[test]
fn a_pool_on_a_disk_of_several_hosts_is_open_in_one_daemon() {
    let address = SocketAddr::from(([127, 0, 0, 1], port()));
    let target = Daemon::start(&["--state-dir", "DIR/state"]);
    target.aryk(&["disk", "create", "data", "--file", "data.img", "--size", "512M"]).unwrap();
    target.aryk(&["share", "data", "--listen", &address.to_string(), "--nqn", NQN]).unwrap();
    let mut first = host(address);
    first.aryk(&["pool", "create", "p", "--disk", "far"]).unwrap();
    first.aryk(&["volume", "create", "p/vm", "--size", "64M"]).unwrap();
    first.aryk(&["attach", "p/vm"]).unwrap();
    let mut vm = connect(&first);
    vm.write(0, &[1; 4096]).unwrap();
    let mut second = host(address);
    expect_refusal(&second, &first);
    let (_, refusal) = second.aryk(&["pool", "create", "q", "--disk", "far", "--overwrite"]).unwrap_err();
    assert!(refusal.contains("in use by the daemon"), "{refusal}");
    vm.write(4096, &[2; 4096]).unwrap();
    vm.flush().unwrap();
    assert_eq!(states(&first), ["ready"]);

    // It is dead for certain, since it is a process of the same host.
    first.kill();
    drop(vm);
    open(&second);
    second.aryk(&["attach", "p/vm"]).unwrap();
    let mut vm = connect(&second);
    assert_eq!(vm.read(0, 8192).unwrap(), [[1; 4096], [2; 4096]].concat());
    vm.write(0, &[3; 4096]).unwrap();
    first.restart();
    expect_refusal(&first, &second);
    vm.write(4096, &[4; 4096]).unwrap();
    vm.flush().unwrap();
    drop(vm);

    // One that ends gives the pool back.
    assert_eq!(second.signal_and_wait("TERM", Duration::from_secs(30)), Some(0));
    open(&first);
    let mut vm = connect(&first);
    assert_eq!(vm.read(0, 8192).unwrap(), [[3; 4096], [4; 4096]].concat());
}
