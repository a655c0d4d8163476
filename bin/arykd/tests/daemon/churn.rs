//! Disks come and go during verified I/O to others: random calls of four clients, each with a known expected result.
//!
//! `ARYK_CHURN` sets the number of calls instead of two hundred, and `ARYK_CHURN_SEED` their seed; `cargo xtask churn` sets both.
//! Each client uses names of its own, so that its calls determine the expected replies. At the end no disk, thread, descriptor or
//! memory is left over.

#![expect(clippy::disallowed_methods, reason = "the test reports the latency of the others")]

use super::harness::Daemon;
use super::moving::{disk, threads};
use super::vm::{Seen, Vm};
use fastrand::Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: usize = 4;
/// Disks and groups of a client.
const DISKS: u64 = 6;
const GROUPS: u64 = 2;
const EXISTS: i64 = -17;
const BUSY: i64 = -16;
const NO_DEVICE: i64 = -19;
/// Rounds of calls, at most, until one leaves nothing over.
const ROUNDS: u32 = 3;
/// How long the daemon may take to notice a disconnected VM.
const PATIENCE: Duration = Duration::from_secs(30);

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// A client's knowledge of one of its disks.
#[derive(Default)]
struct DiskState {
    exists: bool,
    /// Whether its controller exists, with the disk or without.
    attached: bool,
    group: Option<String>,
    target: bool,
}

/// A client with a connection of its own.
struct Client {
    number: usize,
    connection: aryk_rpc_client::Client,
    random: Rng,
    dir: PathBuf,
    disks: BTreeMap<u64, DiskState>,
    groups: BTreeMap<u64, bool>,
    /// Duration of the longest call.
    slowest: Duration,
}

impl Client {
    fn new(daemon: &Daemon, number: usize, seed: u64) -> Self {
        Self {
            number,
            connection: aryk_rpc_client::Client::connect(&daemon.socket()).unwrap(),
            random: Rng::with_seed(seed.wrapping_mul(31).wrapping_add(number as u64)),
            dir: daemon.dir().to_owned(),
            disks: (0..DISKS).map(|disk| (disk, DiskState::default())).collect(),
            groups: (0..GROUPS).map(|group| (group, false)).collect(),
            slowest: Duration::ZERO,
        }
    }

    /// Calls a method. Returns the error code, or 0.
    fn call(&mut self, method: &str, params: Value) -> i64 {
        let begun = Instant::now();
        let reply = self.connection.call(method, &params).expect("the daemon answers");
        self.slowest = self.slowest.max(begun.elapsed());
        reply.err().map_or(0, |error| error["code"].as_i64().unwrap())
    }

    /// Calls a method, and checks the code.
    #[track_caller]
    fn expect(&mut self, code: i64, method: &str, params: Value) {
        let printed = self.call(method, params.clone());
        // Methods of controllers have one code for all errors.
        let code = if code != 0 && method.starts_with("vhost_") { -32602 } else { code };
        assert_eq!(printed, code, "client {}: {method} {params}", self.number);
    }

    fn disk(&self, disk: u64) -> String {
        format!("d{}-{disk}", self.number)
    }

    fn group(&self, group: u64) -> String {
        format!("g{}-{group}", self.number)
    }

    /// Does one random action.
    fn act(&mut self) {
        let index = self.random.u64(..DISKS);
        let known = self.disks.remove(&index).unwrap();
        let known = match self.random.u64(..20) {
            0..5 => self.create(index, known),
            5..8 => self.attach(index, known),
            8..10 => self.limit(index, known),
            10..13 => self.regroup(index, known),
            13..15 => self.plug(index, known),
            15..17 => self.detach(index, known),
            17 => self.use_disk(index, known),
            _ => self.delete(index, known),
        };
        self.disks.insert(index, known);
        if self.random.u64(..10) == 0 {
            self.change_group();
        }
    }

    fn create(&mut self, index: u64, known: DiskState) -> DiskState {
        let name = self.disk(index);
        let code = if known.exists { EXISTS } else { 0 };
        let blocks = json!({"name": name, "num_blocks": 2048, "block_size": 512});
        match self.random.u64(..4) {
            0 => self.expect(code, "bdev_null_create", blocks),
            1 => {
                let file = self.dir.join(&name);
                let params = json!({"name": name, "filename": file, "block_size": 512});
                // The daemon finds an existing disk before it opens the file.
                if !known.exists {
                    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
                }
                self.expect(code, "bdev_uring_create", params);
            }
            _ => self.expect(code, "bdev_malloc_create", blocks),
        }
        DiskState { exists: true, ..known }
    }

    fn delete(&mut self, index: u64, known: DiskState) -> DiskState {
        let name = self.disk(index);
        let modules = ["malloc", "null", "uring"];
        let codes = modules.map(|module| self.call(&format!("bdev_{module}_delete"), json!({"name": name})));
        let mut expected = codes;
        expected.sort_unstable();
        let deleted = [NO_DEVICE, NO_DEVICE, if known.exists { 0 } else { NO_DEVICE }];
        assert_eq!(expected, deleted, "client {}: delete {name}: {codes:?}", self.number);
        // The controller stays, without the disk.
        DiskState { exists: false, group: None, target: false, ..known }
    }

    fn attach(&mut self, index: u64, known: DiskState) -> DiskState {
        let name = self.disk(index);
        let code = match () {
            () if known.attached => EXISTS,
            () if known.exists => 0,
            () => NO_DEVICE,
        };
        self.expect(
            code,
            "vhost_create_blk_controller",
            json!({"ctrlr": name, "dev_name": name, "num_queues": 1}),
        );
        DiskState { attached: known.attached || known.exists, ..known }
    }

    fn detach(&mut self, index: u64, known: DiskState) -> DiskState {
        let name = self.disk(index);
        let code = if known.attached { 0 } else { NO_DEVICE };
        self.expect(code, "vhost_delete_controller", json!({"ctrlr": name}));
        DiskState { attached: false, ..known }
    }

    fn limit(&mut self, index: u64, known: DiskState) -> DiskState {
        let rate = self.random.u64(..3) * self.random.u64(..100_000);
        let params = json!({"name": self.disk(index), "rw_ios_per_sec": rate, "r_mbytes_per_sec": self.random.u64(..1000)});
        self.expect(if known.exists { 0 } else { NO_DEVICE }, "bdev_set_qos_limit", params);
        known
    }

    fn regroup(&mut self, index: u64, known: DiskState) -> DiskState {
        let group = self.random.u64(..GROUPS + 1);
        let (name, there) = match self.groups.get(&group) {
            Some(&there) => (self.group(group), there),
            None => ("all".to_owned(), true),
        };
        let params = json!({"name": name, "bdev_name": self.disk(index)});
        if there && known.group.as_ref() == Some(&name) {
            self.expect(0, "bdev_qos_group_remove_bdev", params);
            return DiskState { group: None, ..known };
        }
        let code = if there && known.exists { 0 } else { NO_DEVICE };
        self.expect(code, "bdev_qos_group_add_bdev", params);
        if code == 0 { DiskState { group: Some(name), ..known } } else { known }
    }

    fn change_group(&mut self) {
        let index = self.random.u64(..GROUPS);
        let (name, there) = (self.group(index), self.groups[&index]);
        let is_used = self.disks.values().any(|known| known.group.as_ref() == Some(&name));
        if there && self.random.u64(..2) == 0 {
            let code = if is_used { BUSY } else { 0 };
            self.expect(code, "bdev_qos_group_delete", json!({"name": name}));
            self.groups.insert(index, is_used);
        } else if there {
            let rate = 1_000 + self.random.u64(..100_000);
            self.expect(0, "bdev_qos_group_set_limit", json!({"name": name, "rw_ios_per_sec": rate}));
        } else {
            self.expect(0, "bdev_qos_group_create", json!({"name": name, "parent": "all"}));
            self.groups.insert(index, true);
        }
    }

    /// Plugs the disk into a SCSI controller with a running VM, or unplugs it. Each client has one target there.
    fn plug(&mut self, index: u64, known: DiskState) -> DiskState {
        let target = self.number + 1;
        let params = json!({"ctrlr": "scsi", "scsi_target_num": target});
        if known.target {
            self.expect(0, "vhost_scsi_controller_remove_target", params);
            return DiskState { target: false, ..known };
        }
        let taken = self.disks.values().any(|other| other.target);
        let code = match () {
            () if !known.exists => NO_DEVICE,
            () if taken => EXISTS,
            () => 0,
        };
        let mut params = params;
        params["bdev_name"] = json!(self.disk(index));
        self.expect(code, "vhost_scsi_controller_add_target", params);
        DiskState { target: known.exists && !taken, ..known }
    }

    /// A VM connects, does some I/O, and disconnects.
    fn use_disk(&mut self, index: u64, known: DiskState) -> DiskState {
        if !(known.attached && known.exists) {
            return known;
        }
        let name = self.disk(index);
        // Without a limit, which could take long.
        self.expect(
            0,
            "bdev_set_qos_limit",
            json!({"name": name, "rw_ios_per_sec": 0, "r_mbytes_per_sec": 0}),
        );
        let mut vm = Vm::blk(&self.dir.join("vhost").join(&name), 1);
        let mut probe = || vm.run(&AtomicBool::new(true));
        // The controller may belong to a deleted disk of the same name: then it has no disk, and the VM gets an error.
        drop(probe());
        drop(vm);
        let begun = Instant::now();
        while self.call("vhost_delete_controller", json!({"ctrlr": name})) == BUSY {
            assert!(
                begun.elapsed() < PATIENCE,
                "{name}: the daemon does not notice that the VM has disconnected"
            );
            thread::sleep(Duration::from_millis(2));
        }
        DiskState { attached: false, ..known }
    }

    /// Removes all objects of the client.
    fn clean_up(&mut self) {
        for index in 0..DISKS {
            let mut known = self.disks.remove(&index).unwrap();
            if known.attached {
                known = self.detach(index, known);
            }
            if known.exists {
                known = self.delete(index, known);
            }
            self.disks.insert(index, known);
        }
        for (index, there) in std::mem::take(&mut self.groups) {
            if there {
                self.expect(0, "bdev_qos_group_delete", json!({"name": self.group(index)}));
            }
            self.groups.insert(index, false);
        }
    }
}

/// The objects and resources of a daemon.
#[derive(Debug, PartialEq, Eq)]
struct Inventory {
    descriptors: usize,
    disks: usize,
    groups: usize,
    controllers: usize,
    threads: usize,
}

fn inventory(daemon: &Daemon) -> Inventory {
    let count = |method: &str| daemon.call(method, json!({})).unwrap().as_array().unwrap().len();
    Inventory {
        disks: count("bdev_get_bdevs"),
        groups: count("bdev_qos_groups_get"),
        controllers: count("vhost_get_controllers"),
        threads: threads(daemon, "").len(),
        descriptors: std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count(),
    }
}

/// The inventory after the daemon has closed ended connections: the expected one, or the last stable one.
fn settled(daemon: &Daemon, expected: Option<&Inventory>) -> Inventory {
    let mut last = inventory(daemon);
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(50));
        let now = inventory(daemon);
        if *expected.unwrap_or(&last) == now {
            return now;
        }
        last = now;
    }
    last
}

/// Bytes of anonymous memory.
fn memory(daemon: &Daemon) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<i64>().unwrap() * 1024
}

/// Makes this many calls over all clients. Returns the duration of the longest.
fn churn(daemon: &Daemon, calls: u64, seed: u64) -> Duration {
    let left = AtomicU64::new(calls);
    let client = |number: usize| {
        let mut client = Client::new(daemon, number, seed);
        while left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            client.act();
        }
        client.clean_up();
        client.slowest
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).max().unwrap()
    })
}

/// Runs the VMs during `work`. Returns their observations.
fn run_during<R>(vms: &mut (Blk, Scsi), work: impl FnOnce() -> R) -> ([Seen; 2], R) {
    let stop = AtomicBool::new(false);
    let (blk, scsi) = vms;
    thread::scope(|scope| {
        let running = [scope.spawn(|| blk.run(&stop)), scope.spawn(|| scsi.run(&stop))];
        let done = catch_unwind(AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        let seen = running.map(|vm| vm.join().unwrap().unwrap());
        (seen, done.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

type Blk = Vm<aryk_front_end::blk::Requests>;
type Scsi = Vm<aryk_front_end::scsi::Requests>;

fn bystanders(daemon: &Daemon) -> (Blk, Scsi) {
    disk(daemon, "blk");
    disk(daemon, "scsi");
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "blk", "dev_name": "blk"})).unwrap();
    daemon.call("vhost_create_scsi_controller", json!({"ctrlr": "scsi"})).unwrap();
    let target = json!({"ctrlr": "scsi", "scsi_target_num": 0, "bdev_name": "scsi"});
    daemon.call("vhost_scsi_controller_add_target", target).unwrap();
    daemon.call("bdev_qos_group_create", json!({"name": "all"})).unwrap();
    let limit = json!({"name": "all", "rw_ios_per_sec": 10_000_000});
    daemon.call("bdev_qos_group_set_limit", limit).unwrap();
    daemon.call("bdev_qos_group_add_bdev", json!({"name": "all", "bdev_name": "blk"})).unwrap();
    let socket = |name: &str| Path::join(daemon.dir(), "vhost").join(name);
    (Vm::blk(&socket("blk"), 2), Vm::scsi(&socket("scsi"), 1))
}

#[test]
fn disks_come_and_go_under_load() {
    let (calls, seed) = (from_environment("ARYK_CHURN", 200), from_environment("ARYK_CHURN_SEED", 1));
    let daemon = Daemon::start(&["-m", "0x3"]);
    let mut vms = bystanders(&daemon);
    let (alone, ()) = run_during(&mut vms, || thread::sleep(Duration::from_secs(1)));
    let stall = |seen: [Seen; 2]| seen.map(|seen| seen.longest).into_iter().max().unwrap();
    let warm_up = 200.max(calls / 10);
    run_during(&mut vms, || churn(&daemon, warm_up, seed + 1));
    let (mut before, mut had) = (settled(&daemon, None), memory(&daemon));
    // Lists and pools may have grown in a round, once; a leak grows in each.
    for round in 1..=ROUNDS {
        let (seen, slowest) = run_during(&mut vms, || churn(&daemon, calls, seed));
        let (after, has) = (settled(&daemon, Some(&before)), memory(&daemon));
        let grown = has - had;
        println!(
            "churn: {calls} calls, seed {seed}: longest stall of others {:?}, without calls {:?}; slowest call {slowest:?}; {} KiB more",
            stall(seen),
            stall(alone),
            grown / 1024
        );
        assert!(seen.iter().all(|seen| seen.checked > 0), "{seen:?}");
        if after == before && grown < (4 << 20) + calls as i64 * 64 {
            break;
        }
        assert!(
            round < ROUNDS,
            "round {round} left something, too: {before:?}, {after:?}, {grown} bytes more"
        );
        (before, had) = (after, has);
    }
    assert!(!vms.0.has_ended() && !vms.1.has_ended());
    drop(vms);
    daemon.call("spdk_get_version", json!({})).unwrap();
}
