//! The dynamic scheduler moves queues during verified I/O: away from a busy core, and together when load is low.

#![expect(clippy::disallowed_methods, reason = "a scheduler needs time to see loads")]

use super::harness::{Daemon, code};
use super::moving::{core_of, disk, put, threads};
use super::vm::Vm;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const VMS: usize = 3;

fn scheduler(daemon: &Daemon) -> Value {
    daemon.call("framework_get_scheduler", json!({})).unwrap()
}

/// Waits until the threads run on this number of cores.
fn wait_for_cores(daemon: &Daemon, ids: &[u64], cores: usize) {
    let begun = Instant::now();
    let used = || ids.iter().map(|&id| core_of(daemon, id)).collect::<BTreeSet<_>>();
    while used().len() != cores {
        assert!(begun.elapsed() < PATIENCE, "on {:?}: {}", used(), scheduler(daemon));
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn load_is_spread_and_gathered_when_it_ends() {
    let daemon = Daemon::start(&["-m", "0x3"]);
    let names: Vec<String> = (0..VMS).map(|i| format!("c{i}")).collect();
    let mut vms = Vec::new();
    for name in &names {
        disk(&daemon, name);
        daemon.call("vhost_create_blk_controller", json!({"ctrlr": name, "dev_name": name})).unwrap();
        vms.push(Vm::blk(&daemon.dir().join("vhost").join(name), 1));
    }
    let ids = threads(&daemon, "c");
    assert_eq!(ids.len(), VMS);
    for &id in &ids {
        put(&daemon, id, 0).unwrap();
        daemon.call("thread_set_cpumask", json!({"id": id, "cpumask": "0x3"})).unwrap();
    }
    // Low limits, because VMs and reactors share the cores here.
    let dynamic = json!({"name": "dynamic", "period": 100_000, "core_limit": 10, "core_busy": 15});
    daemon.call("framework_set_scheduler", dynamic).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let running: Vec<_> = vms.iter_mut().map(|vm| scope.spawn(|| vm.run(&stop))).collect();
        wait_for_cores(&daemon, &ids, 2);
        stop.store(true, Ordering::Relaxed);
        for vm in running {
            let seen = vm.join().unwrap().unwrap();
            assert!(seen.checked > 100, "{seen:?}");
        }
    });
    wait_for_cores(&daemon, &ids, 1);
    let reported = scheduler(&daemon);
    assert!(reported["moves"].as_u64().unwrap() >= 2, "{reported}");
    // The queues still work.
    stop.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let running: Vec<_> = vms.iter_mut().map(|vm| scope.spawn(|| vm.run(&stop))).collect();
        thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
        running.into_iter().for_each(|vm| assert!(vm.join().unwrap().unwrap().checked > 0));
    });
    assert!(vms.iter().all(|vm| !vm.has_ended()));
    drop(vms);
    daemon.end();
}

#[test]
fn the_scheduler_is_the_same_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let mut daemon = Daemon::start_in(dir, &["-m", "0x3", "--state-dir", state.to_str().unwrap()]);
    assert_eq!(scheduler(&daemon)["scheduler_name"], "static");
    let set = |params: Value| daemon.call("framework_set_scheduler", params);
    set(json!({"name": "dynamic", "period": 2_000_000, "load_limit": 5, "core_busy": 90})).unwrap();
    set(json!({"name": "dynamic", "core_limit": 60})).unwrap();
    assert_eq!(code(set(json!({"name": "governor"}))), -32603);
    assert_eq!(code(set(json!({"name": "dynamic", "load_limit": 200}))), -32603);
    let before = scheduler(&daemon);
    let settings = ["scheduler_name", "scheduler_period", "load_limit", "core_limit", "core_busy"]
        .map(|s| before[s].clone());
    assert_eq!(json!(settings), json!(["dynamic", 2_000_000, 5, 60, 90]));
    let params =
        json!({"name": "dynamic", "period": 2_000_000, "load_limit": 5, "core_limit": 60, "core_busy": 90});
    let saved = daemon.call("framework_get_config", json!({"name": "scheduler"})).unwrap();
    assert_eq!(saved, json!([{"method": "framework_set_scheduler", "params": params}]));
    daemon.kill_and_restart();
    assert_eq!(scheduler(&daemon), before);
    let shown =
        daemon.aryk(&["scheduler", "set", "dynamic", "--period", "500ms", "--core-limit", "70"]).unwrap();
    assert!(shown.contains("500ms") && shown.contains("70%") && shown.contains("90%"), "{shown}");
    daemon.call("framework_set_scheduler", json!({"name": "static"})).unwrap();
    daemon.kill_and_restart();
    assert_eq!(scheduler(&daemon)["scheduler_name"], "static");
}
