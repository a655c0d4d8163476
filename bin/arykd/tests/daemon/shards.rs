//! Pools with several shards in the real daemon: over `kill -9` during changes, and without a daemon.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, wait_for};
use aryk_reactor::CoreSet;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a stripe.
const STRIPE: u64 = 16 << 20;
const PIECE: usize = 64 << 10;

/// A daemon on two cores with the pool `p`, which has two shards, and the volume `p/vm`, which is attached.
fn start() -> Daemon {
    let cores: u64 = CoreSet::allowed().iter().take(2).map(|core| 1 << core).sum();
    let daemon = Daemon::start(&["--state-dir", "DIR/state", "-m", &format!("{cores:#x}")]);
    let file = daemon.dir().join("store.img").display().to_string();
    daemon.aryk(&["disk", "create", "store", "--file", &file, "--size", "1G"]).unwrap();
    daemon.aryk(&["pool", "create", "p", "--disk", "store", "--shards", "2"]).unwrap();
    daemon.aryk(&["volume", "create", "p/vm", "--size", "80M"]).unwrap();
    daemon.aryk(&["attach", "p/vm"]).unwrap();
    daemon
}

fn connect(daemon: &Daemon, controller: &str) -> FrontEnd {
    wait_for("the controller", || daemon.dir().join("vhost").join(controller).exists());
    FrontEnd::connect(&daemon.dir().join("vhost").join(controller))
}

/// The places that are written: in each stripe, and over the end of each.
fn places() -> Vec<u64> {
    (0..5).flat_map(|stripe| [stripe * STRIPE, (stripe + 1) * STRIPE - (PIECE / 2) as u64]).take(9).collect()
}

fn write_all(vm: &mut FrontEnd, byte: u8) {
    for at in places() {
        vm.write(at, &[byte; PIECE]).unwrap();
    }
    vm.flush().unwrap();
}

fn verify(vm: &mut FrontEnd, byte: u8) {
    for at in places() {
        assert_eq!(vm.read(at, PIECE).unwrap(), [byte; PIECE], "at {at}");
    }
}

#[test]
fn shards_run_on_reactors_of_their_own() {
    let daemon = start();
    let pools = daemon.call("aryk_pools_get", json!({})).unwrap();
    let cores: BTreeSet<u64> =
        pools[0]["cores"].as_array().unwrap().iter().map(|core| core.as_u64().unwrap()).collect();
    assert_eq!(cores.len(), 2, "{pools}");
    let shown = daemon.aryk(&["pool", "show", "p"]).unwrap();
    assert!(shown.contains("on cores "), "{shown}");
    let mut vm = connect(&daemon, "p-vm");
    write_all(&mut vm, 1);
    daemon.aryk(&["snapshot", "create", "p/vm@a"]).unwrap();
    write_all(&mut vm, 2);
    daemon.aryk(&["volume", "clone", "p/vm@a", "clone"]).unwrap();
    daemon.aryk(&["attach", "p/clone"]).unwrap();
    verify(&mut connect(&daemon, "p-clone"), 1);
    verify(&mut vm, 2);
    let spaces = daemon.call("aryk_volume_get_space", json!({"pool": "p"})).unwrap();
    let sum: u64 = spaces.as_array().unwrap().iter().map(|of| of["own_bytes"].as_u64().unwrap()).sum();
    // Each place over the end of a stripe shares a half with the next one.
    assert_eq!(sum, 7 * PIECE as u64, "what the volume has written again");
    let error = daemon.aryk(&["pool", "create", "q", "--disk", "store", "--shards", "3"]).unwrap_err().1;
    assert!(error.contains("1, 2, 4, 8 or 16"), "{error}");
}

/// Ends what runs beside a test, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes and deletes snapshots until the daemon is gone.
fn churn(daemon: &Daemon, is_over: &AtomicBool) {
    for n in 0.. {
        let create = json!({"lvol_name": "p/vm", "snapshot_name": format!("s{n}")});
        let clone = json!({"snapshot_name": format!("p/s{n}"), "clone_name": format!("c{n}")});
        let steps = [
            ("bdev_lvol_snapshot", create),
            ("bdev_lvol_clone", clone),
            ("bdev_lvol_resize", json!({"name": format!("p/c{n}"), "size_in_mib": 100 + n % 50})),
            ("bdev_lvol_delete", json!({"name": format!("p/s{n}")})),
            ("bdev_lvol_delete", json!({"name": format!("p/c{n}")})),
        ];
        for (method, params) in steps {
            if is_over.load(Ordering::Relaxed) || daemon.try_call(method, params).is_none() {
                return;
            }
        }
    }
}

#[test]
fn changes_that_kill_9_interrupts_are_whole_afterwards() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    write_all(&mut vm, 255);
    drop(vm);
    let mut seen = BTreeSet::new();
    for round in 0..12_u8 {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| churn(&daemon, &is_over));
            let over = Over(&is_over);
            let mut vm = connect(&daemon, "p-vm");
            verify(&mut vm, if round == 0 { 255 } else { round - 1 });
            // The changes go on meanwhile.
            (0..fastrand::u32(1..20)).for_each(|_| write_all(&mut vm, round));
            drop(over);
            let pid = Pid::from_raw(daemon.pid().cast_signed()).unwrap();
            kill_process(pid, Signal::KILL).unwrap();
        });
        daemon.kill_and_restart();
        // A busy computer may take longer than a restart waits.
        wait_for("the pool", || daemon.call("aryk_pools_get", json!({})).unwrap() != json!([]));
        let volumes = daemon.call("aryk_volumes_get", json!({})).unwrap();
        for volume in volumes.as_array().unwrap() {
            assert_eq!(volume["has_disk"], true, "{volume}");
            let alias = volume["alias"].as_str().unwrap().to_owned();
            seen.insert(alias.clone());
            if alias != "p/vm" {
                daemon.call("bdev_lvol_delete", json!({"name": alias})).unwrap();
            }
        }
        let checked = daemon.aryk(&["pool", "check", "p"]).unwrap();
        assert!(checked.contains("No damage"), "{checked}");
    }
    verify(&mut connect(&daemon, "p-vm"), 11);
    assert!(seen.len() > 1, "no change was interrupted: {seen:?}");
}

#[test]
fn all_shards_are_checked_without_a_daemon() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    // So much that the end of the log, which a check does not read, has not all of it.
    for piece in (0..1280).chain(880..1280) {
        vm.write(piece * PIECE as u64, &[(piece % 200) as u8 + 1; PIECE]).unwrap();
    }
    vm.flush().unwrap();
    drop(vm);
    daemon.kill();
    let store = daemon.dir().join("store.img").display().to_string();
    let whole = daemon.aryk(&["pool", "check", "--offline", &store]).unwrap();
    assert!(whole.contains("No damage"), "{whole}");
    // A byte of a block of each shard changes.
    let file = std::fs::File::options().read(true).write(true).open(&store).unwrap();
    let bytes = file.metadata().unwrap().len();
    let mut damaged = BTreeSet::new();
    let mut block = [0; 4096];
    for at in (0..bytes).step_by(4096) {
        file.read_exact_at(&mut block, at).unwrap();
        let shard = at / (32 << 20) % 2;
        if block.iter().all(|&byte| byte == 7) && damaged.insert(shard) {
            file.write_all_at(&[8], at + 100).unwrap();
        }
    }
    assert_eq!(damaged.len(), 2);
    let (code, text) = daemon.aryk(&["pool", "check", "--offline", &store]).unwrap_err();
    assert_eq!(code, 1, "{text}");
    let output = daemon.run_aryk(&["--json", "pool", "check", "--offline", &store]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let volumes: Vec<_> = report["damage"].as_array().unwrap().iter().map(|of| &of["volume"]).collect();
    assert_eq!(volumes, ["p/vm", "p/vm"], "{report}");
}
