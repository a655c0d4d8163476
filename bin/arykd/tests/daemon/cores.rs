//! Reactors come and go during verified I/O.

#![expect(clippy::disallowed_methods, reason = "the VMs need time for I/O")]

use super::harness::{Daemon, code, wait_for};
use super::moving::{core_of, disk, put, threads};
use super::vm::Vm;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

fn change(daemon: &Daemon, what: &str, core: u64) -> Result<Value, Value> {
    daemon.call(&format!("aryk_core_{what}"), json!({"core": core}))
}

/// Cores with a reactor.
fn cores(daemon: &Daemon) -> Vec<u64> {
    let all = daemon.call("framework_get_reactors", json!({})).unwrap();
    all["reactors"].as_array().unwrap().iter().map(|reactor| reactor["lcore"].as_u64().unwrap()).collect()
}

/// The daemon's reactor threads.
fn reactor_threads(daemon: &Daemon) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
    };
    tasks.map(name).filter(|name| name.starts_with("reactor_")).count()
}

fn operations(daemon: &Daemon, disk: &str) -> u64 {
    let stats = daemon.call("bdev_get_iostat", json!({"name": disk})).unwrap();
    let disk = &stats["bdevs"][0];
    disk["num_read_ops"].as_u64().unwrap() + disk["num_write_ops"].as_u64().unwrap()
}

/// Adds a core, moves all queues there, and removes the other; repeatedly.
fn swap_cores(daemon: &Daemon, ids: &[u64]) {
    let mut before = 0;
    for round in 0..20_u64 {
        let (new, old) = ((round + 1) % 2, round % 2);
        change(daemon, "add", new).unwrap();
        assert_eq!((cores(daemon), reactor_threads(daemon)), (vec![0, 1], 2));
        put(daemon, ids[0], new).unwrap();
        change(daemon, "remove", old).unwrap();
        assert_eq!(cores(daemon), [new]);
        // The kernel lists a thread for a moment after it has been joined.
        wait_for("one reactor is left", || reactor_threads(daemon) == 1);
        assert!(ids.iter().all(|&id| core_of(daemon, id) == new));
        let now = operations(daemon, "b");
        assert!(now >= before, "the counts of a removed core are still reported: {now}, {before}");
        before = now;
        wait_for("the VM goes on", || operations(daemon, "b") > before);
        // The next reply may be 50 ms old.
        thread::sleep(Duration::from_millis(60));
        let reported = daemon.call("aryk_stats_get", json!({})).unwrap();
        let reported = reported["disks"].as_array().unwrap().iter().find(|disk| disk["name"] == "b").unwrap();
        let reported = reported["read_ops"].as_u64().unwrap() + reported["write_ops"].as_u64().unwrap();
        assert!(reported >= before, "{reported} of {before}");
    }
}

#[test]
fn cores_come_and_go_under_verified_io() {
    let daemon = Daemon::start(&["-m", "0x1"]);
    // Requests stay in flight for a while, so that samples see some.
    disk(&daemon, "m");
    let delay = json!({"base_bdev_name": "m", "name": "b", "avg_read_latency": 100, "p99_read_latency": 100,
        "avg_write_latency": 100, "p99_write_latency": 100});
    daemon.call("bdev_delay_create", delay).unwrap();
    disk(&daemon, "s");
    let controller = json!({"ctrlr": "b", "dev_name": "b", "num_queues": 2});
    daemon.call("vhost_create_blk_controller", controller).unwrap();
    daemon.call("vhost_create_scsi_controller", json!({"ctrlr": "s"})).unwrap();
    let target = json!({"ctrlr": "s", "scsi_target_num": 0, "bdev_name": "s"});
    daemon.call("vhost_scsi_controller_add_target", target).unwrap();
    daemon.call("bdev_set_qos_limit", json!({"name": "b", "rw_ios_per_sec": 1_000_000})).unwrap();
    daemon.call("bdev_set_qd_sampling_period", json!({"name": "b", "period": 1000})).unwrap();
    let mut blk = Vm::blk(&daemon.dir().join("vhost/b"), 2);
    let mut scsi = Vm::scsi(&daemon.dir().join("vhost/s"), 1);
    let ids = [threads(&daemon, "b."), threads(&daemon, "s.")].concat();
    let stop = AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let running = [scope.spawn(|| blk.run(&stop)), scope.spawn(|| scsi.run(&stop))];
        let done = catch_unwind(AssertUnwindSafe(|| swap_cores(&daemon, &ids)));
        stop.store(true, Ordering::Relaxed);
        let seen = running.map(|vm| vm.join().unwrap().unwrap());
        done.unwrap_or_else(|panic| resume_unwind(panic));
        seen
    });
    println!("{seen:?}");
    assert!(seen.iter().all(|seen| seen.checked > 100), "{seen:?}");
    assert!(!blk.has_ended() && !scsi.has_ended());
    let disk = daemon.call("bdev_get_iostat", json!({"name": "b"})).unwrap()["bdevs"][0].take();
    assert!(disk["io_time"].as_u64().unwrap() > 0, "it is still sampled: {disk}");
    drop((blk, scsi));
    daemon.end();
}

#[test]
fn invalid_changes_of_cores_are_refused() {
    let daemon = Daemon::start(&["-m", "0x3"]);
    assert_eq!(code(change(&daemon, "add", 1)), -17);
    assert_eq!(code(change(&daemon, "add", 1000)), -22);
    assert_eq!(code(change(&daemon, "remove", 7)), -19);
    change(&daemon, "remove", 0).unwrap();
    assert_eq!(code(change(&daemon, "remove", 1)), -16, "the last reactor must stay");
    assert_eq!(code(change(&daemon, "remove", 0)), -19);
    let reported = daemon.aryk(&["reactor", "add", "0", "--json"]).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&reported).unwrap()["reactors"].as_array().unwrap().len(), 2);
    // A reactor whose queue cannot leave in time stays, and accepts new queues again.
    disk(&daemon, "slow");
    let delay = json!({"base_bdev_name": "slow", "name": "d", "avg_read_latency": 7_000_000, "p99_read_latency": 7_000_000,
        "avg_write_latency": 7_000_000, "p99_write_latency": 7_000_000});
    daemon.call("bdev_delay_create", delay).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "stuck", "dev_name": "d"})).unwrap();
    let mut stuck = Vm::blk(&daemon.dir().join("vhost/stuck"), 1);
    let id = threads(&daemon, "stuck.")[0];
    put(&daemon, id, 0).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let running = scope.spawn(|| stuck.run(&stop));
        daemon.wait_until_busy("d");
        let refused = change(&daemon, "remove", 0);
        let left = (cores(&daemon), core_of(&daemon, id));
        stop.store(true, Ordering::Relaxed);
        assert_eq!((code(refused), left), (-110, (vec![0, 1], 0)));
        running.join().unwrap().unwrap();
    });
    change(&daemon, "remove", 0).unwrap();
    assert_eq!(core_of(&daemon, id), 1);
    drop(stuck);
    daemon.end();
}

#[test]
fn cores_are_the_same_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let state = state.to_str().unwrap();
    let mut daemon = Daemon::start_in(dir, &["-m", "0x1", "--state-dir", state]);
    change(&daemon, "add", 1).unwrap();
    daemon.kill_and_restart();
    assert_eq!(cores(&daemon), [0, 1]);
    change(&daemon, "remove", 0).unwrap();
    daemon.kill_and_restart();
    assert_eq!(cores(&daemon), [1]);
    // The initial state again.
    change(&daemon, "add", 0).unwrap();
    change(&daemon, "remove", 1).unwrap();
    daemon.kill_and_restart();
    assert_eq!(cores(&daemon), [0]);
    // Another `-m` sets the cores; the changes made by RPC apply in addition.
    change(&daemon, "add", 1).unwrap();
    daemon.kill();
    daemon.restart_with(&["-m", "0x2", "--state-dir", state]);
    assert_eq!(cores(&daemon), [1]);
    daemon.kill();
    daemon.restart_with(&["-m", "0x1", "--state-dir", state]);
    assert_eq!(cores(&daemon), [0]);
}
