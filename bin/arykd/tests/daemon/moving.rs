//! Queues move between reactors during their VMs' I/O. `ARYK_MOVES` sets the number of moves instead of a few hundred.

#![expect(clippy::disallowed_methods, reason = "the test measures time")]

use super::harness::Daemon;
use super::vm::Vm;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

fn moves() -> usize {
    std::env::var("ARYK_MOVES").map_or(300, |moves| moves.parse().unwrap())
}

/// Ids of the threads whose names begin with `name`.
pub fn threads(daemon: &Daemon, name: &str) -> Vec<u64> {
    let all = daemon.call("thread_get_stats", json!({})).unwrap();
    let all = all["threads"].as_array().unwrap().iter();
    let ours = all.filter(|thread| {
        thread["name"].as_str().unwrap().starts_with(name) && thread["name"] != "app_thread"
    });
    ours.map(|thread| thread["id"].as_u64().unwrap()).collect()
}

/// The core of a thread. During a move the thread is on neither core, or appears on one after that core was read: the function
/// retries.
pub fn core_of(daemon: &Daemon, id: u64) -> u64 {
    let is_on = |reactor: &&Value| {
        reactor["lw_threads"].as_array().unwrap().iter().any(|thread| thread["id"].as_u64() == Some(id))
    };
    let begun = Instant::now();
    loop {
        let all = daemon.call("framework_get_reactors", json!({})).unwrap();
        if let Some(reactor) = all["reactors"].as_array().unwrap().iter().find(is_on) {
            return reactor["lcore"].as_u64().unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the thread {id} is on no core");
    }
}

/// Restricts a thread to one core.
pub fn put(daemon: &Daemon, id: u64, core: u64) -> Result<Value, Value> {
    daemon.call("thread_set_cpumask", json!({"id": id, "cpumask": format!("{:#x}", 1 << core)}))
}

fn two_cores() -> Daemon {
    Daemon::start(&["-m", "0x3"])
}

/// A disk of 1 MiB.
pub fn disk(daemon: &Daemon, name: &str) {
    let params = json!({"name": name, "num_blocks": 2048, "block_size": 512});
    daemon.call("bdev_malloc_create", params).unwrap();
}

#[test]
fn queues_move_under_verified_io() {
    let daemon = two_cores();
    disk(&daemon, "m0");
    disk(&daemon, "m1");
    let controller = json!({"ctrlr": "b", "dev_name": "m0", "num_queues": 2});
    daemon.call("vhost_create_blk_controller", controller).unwrap();
    daemon.call("vhost_create_scsi_controller", json!({"ctrlr": "s"})).unwrap();
    let target = json!({"ctrlr": "s", "scsi_target_num": 0, "bdev_name": "m1"});
    daemon.call("vhost_scsi_controller_add_target", target).unwrap();
    let mut blk = Vm::blk(&daemon.dir().join("vhost/b"), 2);
    let mut scsi = Vm::scsi(&daemon.dir().join("vhost/s"), 1);
    let ids = [threads(&daemon, "b."), threads(&daemon, "s.")].concat();
    assert_eq!(ids.len(), 5, "two queues of one VM, three of the other: {ids:?}");
    let stop = AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let running = [scope.spawn(|| blk.run(&stop)), scope.spawn(|| scsi.run(&stop))];
        for round in 0..moves() as u64 {
            for &id in &ids {
                put(&daemon, id, (round + id) % 2).unwrap();
            }
        }
        for &id in &ids {
            assert_eq!(core_of(&daemon, id), (moves() as u64 - 1 + id) % 2);
        }
        stop.store(true, Ordering::Relaxed);
        running.map(|vm| vm.join().unwrap().unwrap())
    });
    println!("{} moves: {seen:?}", moves() * ids.len());
    for seen in seen {
        assert!(seen.checked > 1_000, "{seen:?}");
    }
    assert!(!blk.has_ended() && !scsi.has_ended());
    drop((blk, scsi));
    for ctrlr in ["b", "s"] {
        // The daemon must first notice that the VM has disconnected.
        let delete = || daemon.call("vhost_delete_controller", json!({"ctrlr": ctrlr}));
        while let Err(error) = delete() {
            assert_eq!(error["message"], "Device or resource busy", "{error}");
            thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(threads(&daemon, "").is_empty(), "a queue is left over");
    daemon.end();
}

#[test]
fn a_stuck_queue_does_not_move_and_does_not_delay_others() {
    let daemon = two_cores();
    disk(&daemon, "slow");
    disk(&daemon, "m");
    let kinds = ["avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency"];
    let mut delay = json!({"base_bdev_name": "slow", "name": "d"});
    // All requests complete together, long after the moves that are refused because of them.
    kinds.iter().for_each(|kind| delay[kind] = json!(3_000_000));
    daemon.call("bdev_delay_create", delay).unwrap();
    for (ctrlr, dev_name) in [("stuck", "d"), ("well", "m")] {
        daemon.call("vhost_create_blk_controller", json!({"ctrlr": ctrlr, "dev_name": dev_name})).unwrap();
    }
    let mut stuck = Vm::blk(&daemon.dir().join("vhost/stuck"), 1);
    let mut well = Vm::blk(&daemon.dir().join("vhost/well"), 1);
    let [held, free] = ["stuck.", "well."].map(|name| threads(&daemon, name)[0]);
    // Both queues on one core.
    put(&daemon, held, 0).unwrap();
    put(&daemon, free, 0).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let running = [scope.spawn(|| stuck.run(&stop)), scope.spawn(|| well.run(&stop))];
        daemon.wait_until_busy("d");
        for core in [1, 1, 1] {
            let began = Instant::now();
            let refused = put(&daemon, held, core).unwrap_err();
            assert_eq!(refused["code"], -110, "{refused}");
            assert!(began.elapsed() < Duration::from_secs(2), "the deadline is a tenth of a second");
            put(&daemon, free, core).unwrap();
            put(&daemon, free, 0).unwrap();
            assert_eq!(core_of(&daemon, held), 0);
        }
        for kind in ["avg_read", "p99_read", "avg_write", "p99_write"] {
            let update = json!({"delay_bdev_name": "d", "latency_type": kind, "latency_us": 0});
            daemon.call("bdev_delay_update_latency", update).unwrap();
        }
        // The requests in flight still have their old delay.
        let moved = (0..200).any(|_| put(&daemon, held, 1).is_ok());
        assert!(moved, "the queue of a working disk moves");
        assert_eq!(core_of(&daemon, held), 1);
        thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
        for vm in running {
            let seen = vm.join().unwrap().unwrap();
            assert!(seen.checked > 10, "{seen:?}");
        }
    });
    drop((stuck, well));
    daemon.end();
}

#[test]
fn invalid_cores_are_refused() {
    let daemon = two_cores();
    disk(&daemon, "m");
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "b", "dev_name": "m"})).unwrap();
    let _vm = Vm::blk(&daemon.dir().join("vhost/b"), 1);
    let id = threads(&daemon, "b.")[0];
    for (id, core, code) in [(id, 5, -22), (id + 1_000, 0, -32602), (0, 0, -32602)] {
        assert_eq!(put(&daemon, id, core).unwrap_err()["code"], code);
    }
    let empty = daemon.call("thread_set_cpumask", json!({"id": id, "cpumask": "0x0"}));
    assert!(empty.is_err());
    put(&daemon, id, 1).unwrap();
    assert_eq!(core_of(&daemon, id), 1);
}
