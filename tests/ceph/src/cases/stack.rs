//! All layers of a cloud's disks at once: VMs with SCSI controllers, QoS groups, encrypted disks, images of the cluster. The VMs
//! have a verified load on every disk while layers fail, change, come and go.
//!
//! `ARYK_STACK_VMS` and `ARYK_STACK_DISKS` set the number of VMs, and of disks per VM (2 to 8).

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::{Value, json};

use super::{Case, Site};
use crate::Cluster;
use crate::cluster::POOL;
use crate::scsi::{self, PATIENCE, Progress, SLOTS, Vm};

/// The cluster's name for the daemon.
const CLIENT: &str = "stack";
const MIB: u64 = 1 << 20;
/// Size of the images, and of the one that grows.
const SIZE_MIB: u64 = 4;
const GROWN_MIB: u64 = 8;
/// Latency that the slow disk adds to each request, in microseconds.
const SLOW_US: u64 = 200_000;
/// Number of times that a fast disk must be faster than the slow one, and requests of the slow disk for that comparison.
const FASTER: u64 = 2;
const SLOW_REQUESTS: u64 = 10;
/// Number of further requests after which a disk works.
const WORKS: u64 = 3 * SLOTS as u64;
/// How long the cluster does not answer.
const STOPPED: Duration = Duration::from_secs(3);
/// Duration of a measurement of a rate.
const MEASURED: Duration = Duration::from_secs(2);
/// The limit of a group is the rate without a limit, divided by this.
const LIMITED: u64 = 8;

pub(super) const CASES: [Case; 1] = [Case { name: "stack/faults", body: faults }];

/// What the VMs have, and how far they are.
struct Stack<'a> {
    cluster: &'a Cluster,
    bin: &'a Path,
    directory: &'a Path,
    /// By VM.
    progress: &'a [Progress],
}

/// The number in a variable.
fn number(variable: &str, default: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable}={text}")),
        Err(_) => Ok(default),
    }
}

fn faults(site: &Site<'_>) -> Result<()> {
    let (vms, disks) = (number("ARYK_STACK_VMS", 2)?, number("ARYK_STACK_DISKS", 4)?);
    ensure!((2..=8).contains(&disks) && vms > 0, "{vms} VMs with {disks} disks");
    let cluster = site.cluster();
    let progress: Vec<_> = (0..vms).map(|_| Progress::new(disks)).collect();
    let stack = Stack { cluster, bin: &site.lab.bin, directory: site.directory, progress: &progress };
    let daemon = stack.start()?;
    daemon.rpc("bdev_rbd_register_cluster", &json!({"name": CLIENT, "config_file": cluster.conf()}))?;
    let mut guests = Vec::new();
    for vm in 0..vms {
        guests.push(Vm::connect(vm, disks, &stack.build(&daemon, vm, disks)?)?);
    }
    let daemon = stack.under_load(&mut guests, daemon)?;
    for (number, vm) in guests.iter_mut().enumerate() {
        vm.verify().with_context(|| format!("VM {number} after the load"))?;
    }
    let grown = guests[0].read(0, GROWN_MIB * MIB - 4096)?;
    ensure!(grown.len() == 4096, "the last block of the grown disk has {} bytes", grown.len());
    let written: usize = guests.iter().map(Vm::written).sum();
    drop(guests);
    daemon.stop()?;
    stack.check_images(disks)?;
    println!("{written} blocks of {vms} VMs with {disks} disks each are as they were written");
    Ok(())
}

/// The names of a VM's layers.
fn group(vm: usize) -> String {
    format!("vm{vm}")
}

fn disk(vm: usize, target: usize) -> String {
    format!("vm{vm}-{target}")
}

/// Whether a disk is the slow one: the last of the first VM.
const fn is_slow(vm: usize, target: usize, disks: usize) -> bool {
    vm == 0 && target == disks - 1
}

impl Stack<'_> {
    /// Starts a daemon, or the successor of a killed one.
    fn start(&self) -> Result<Daemon> {
        let state = self.directory.join("state").display().to_string();
        Daemon::start(self.bin, self.directory, &["--state-dir", &state])
    }

    /// Creates a VM's controller with all layers below; returns its socket.
    fn build(&self, daemon: &Daemon, vm: usize, disks: usize) -> Result<PathBuf> {
        let vm_name = group(vm);
        daemon.rpc("bdev_qos_group_create", &json!({"name": vm_name}))?;
        daemon.rpc("vhost_create_scsi_controller", &json!({"ctrlr": vm_name}))?;
        for target in 0..disks {
            let name = disk(vm, target);
            let image = format!("{name}-image");
            self.cluster.create_image(&name, &format!("{SIZE_MIB}M"))?;
            let rbd = json!({
                "name": image, "cluster_name": CLIENT, "pool_name": POOL, "rbd_name": name, "block_size": 512,
            });
            daemon.rpc("bdev_rbd_create", &rbd)?;
            // Each disk has a key of its own, whose two halves differ.
            let half = |side: u64| format!("{:064x}", side << 32 | (vm * 8 + target) as u64);
            let key = json!({"name": name, "cipher": "AES_XTS", "key": half(1), "key2": half(2)});
            daemon.rpc("accel_crypto_key_create", &key)?;
            let crypto = json!({"name": name, "base_bdev_name": image, "key_name": name});
            daemon.rpc("bdev_crypto_create", &crypto)?;
            let top = if is_slow(vm, target, disks) { slow(daemon, &name)? } else { name };
            daemon.rpc("bdev_qos_group_add_bdev", &json!({"name": vm_name, "bdev_name": top}))?;
            add_target(daemon, vm, target, &top)?;
        }
        Ok(self.directory.join("vhost").join(vm_name))
    }

    /// Runs all loads while the layers are disturbed; returns the daemon that serves at the end.
    fn under_load(&self, guests: &mut [Vm], daemon: Daemon) -> Result<Daemon> {
        std::thread::scope(|scope| {
            let loads: Vec<_> = guests
                .iter_mut()
                .zip(self.progress)
                .map(|(vm, progress)| scope.spawn(move || vm.load(progress)))
                .collect();
            let result = self.disturb(daemon);
            let end = if result.is_ok() { Progress::stop } else { Progress::abandon };
            self.progress.iter().for_each(end);
            // A load that has failed says more than the wait that it ended.
            loads
                .into_iter()
                .map(|load| load.join().expect("a load does not panic"))
                .fold(result, |result, ended| ended.and(result))
        })
    }

    fn disturb(&self, daemon: Daemon) -> Result<Daemon> {
        self.await_work("at the start")?;
        self.slow_among_fast()?;
        self.limits(&daemon).context("limits")?;
        self.hot_plug(&daemon).context("hot plug")?;
        self.stop_cluster(&daemon).context("a cluster that does not answer")?;
        self.grow(&daemon).context("a larger image")?;
        let groups = self::groups(&daemon)?;
        daemon.kill();
        let daemon = self.start()?;
        self.await_work("after kill -9")?;
        let restored = self::groups(&daemon)?;
        ensure!(restored == groups, "groups {restored:?} instead of {groups:?}");
        Ok(daemon)
    }

    /// Waits until each disk has completed some more requests.
    fn await_work(&self, when: &str) -> Result<()> {
        let all = || self.progress.iter().flat_map(Progress::done).collect::<Vec<_>>();
        let before = all();
        wait_until(&format!("all disks to work {when}"), PATIENCE, || {
            ensure!(!self.progress.iter().any(Progress::has_failed), "a load failed {when}");
            let works = all().iter().zip(&before).all(|(now, before)| now - before >= WORKS);
            Ok(works.then_some(()))
        })
    }

    /// A slow disk delays no other disk of its VM.
    fn slow_among_fast(&self) -> Result<()> {
        let before = self.progress[0].done();
        let done =
            || -> Vec<u64> { self.progress[0].done().iter().zip(&before).map(|(a, b)| a - b).collect() };
        let done = wait_until("the slow disk's requests", PATIENCE, || {
            Ok(Some(done()).filter(|done| done.last().is_some_and(|&slow| slow >= SLOW_REQUESTS)))
        })?;
        println!("requests of fast disks, and of the slow one: {done:?}");
        let (slow, fast) = done.split_last().context("no disks")?;
        ensure!(fast.iter().all(|fast| *fast >= FASTER * slow), "fast disks wait for the slow one: {done:?}");
        Ok(())
    }

    /// The requests per second of the first VM.
    fn rate(&self) -> u64 {
        let sum = || self.progress[0].done().iter().sum::<u64>();
        let (began, before) = (Instant::now(), sum());
        std::thread::sleep(MEASURED);
        ((sum() - before) as f64 / began.elapsed().as_secs_f64()) as u64
    }

    /// The limit of a group binds all disks of its VM together.
    fn limits(&self, daemon: &Daemon) -> Result<()> {
        let unlimited = self.rate();
        let limit = (unlimited / LIMITED).max(1);
        let set = |limit: u64| {
            daemon.rpc("bdev_qos_group_set_limit", &json!({"name": group(0), "rw_ios_per_sec": limit}))
        };
        set(limit)?;
        // Requests that had completed before are counted late.
        let slack = self.slots();
        let rate = wait_until("the group to reach its limit", PATIENCE, || {
            let rate = self.rate();
            ensure!(rate <= limit + limit / 10 + slack, "{rate} requests/s with a limit of {limit}");
            Ok((rate >= limit / 2).then_some(rate))
        })?;
        println!("{unlimited} requests/s without a limit, {rate} with a limit of {limit}");
        set(0)?;
        set_lasting_limit(daemon)?;
        self.await_work("after the limits")
    }

    /// Requests in flight of the first VM, at most.
    fn slots(&self) -> u64 {
        (self.progress[0].targets().len() * SLOTS) as u64
    }

    /// The first VM's disk 1 is unplugged under load, and plugged again: no other disk fails, and its data is there.
    fn hot_plug(&self, daemon: &Daemon) -> Result<()> {
        let counters = &self.progress[0].targets()[1];
        counters.may_be_missing.store(true, Ordering::Relaxed);
        daemon
            .rpc("vhost_scsi_controller_remove_target", &json!({"ctrlr": group(0), "scsi_target_num": 1}))?;
        wait_until("requests to a missing disk", PATIENCE, || {
            Ok((counters.missing.load(Ordering::Relaxed) > WORKS).then_some(()))
        })?;
        let name = disk(0, 1);
        let top = if is_slow(0, 1, self.progress[0].targets().len()) { slow_name(&name) } else { name };
        add_target(daemon, 0, 1, &top)?;
        let works = self.await_work("after the plug");
        counters.may_be_missing.store(false, Ordering::Relaxed);
        works?;
        self.await_work("after the plug, without an error")
    }

    /// While no OSD answers, the daemon does, and no request fails.
    fn stop_cluster(&self, daemon: &Daemon) -> Result<()> {
        let sum = || self.progress.iter().flat_map(Progress::done).sum::<u64>();
        let stopped = self.cluster.stop_osds()?;
        let (began, before) = (Instant::now(), sum());
        let mut calls = 0;
        while began.elapsed() < STOPPED {
            for method in ["bdev_get_bdevs", "vhost_get_controllers", "bdev_rbd_get_clusters_info"] {
                daemon.call(method, &json!({})).context(method)?;
                calls += 1;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // Requests of which the daemon had the result already may complete.
        let (completed, most) = (sum() - before, self.slots() * self.progress.len() as u64);
        drop(stopped);
        ensure!(completed <= most, "{completed} requests completed without an OSD");
        println!("{calls} calls were answered while no OSD was");
        self.await_work("after the OSDs go on")
    }

    /// The first VM's disk 0 grows under load, and the VM is told.
    fn grow(&self, daemon: &Daemon) -> Result<()> {
        let image = format!("{}-image", disk(0, 0));
        daemon.rpc("bdev_rbd_resize", &json!({"name": image, "new_size": GROWN_MIB}))?;
        let counters = &self.progress[0].targets()[0];
        wait_until("the VM to see the new size", PATIENCE, || {
            Ok((counters.resized.load(Ordering::Relaxed) > 0).then_some(()))
        })?;
        self.await_work("after the growth")
    }

    /// The images have what the VMs wrote as ciphertext only.
    fn check_images(&self, disks: usize) -> Result<()> {
        for (vm, target) in (0..self.progress.len()).flat_map(|vm| (0..disks).map(move |target| (vm, target)))
        {
            let name = disk(vm, target);
            let bytes = self.cluster.content(&name)?;
            ensure!(bytes[..4096].iter().any(|&byte| byte != 0), "{name} has no data");
            ensure!(!scsi::has_plaintext(&bytes), "{name} has plaintext");
        }
        Ok(())
    }
}

/// The QoS groups: name, limits, and disks in the order of their names.
fn groups(daemon: &Daemon) -> Result<Vec<(Value, Value, Vec<String>)>> {
    let mut groups = Vec::new();
    for group in daemon.rpc("bdev_qos_groups_get", &json!({}))?.as_array().context("no list of groups")? {
        let mut disks: Vec<String> = serde_json::from_value(group["bdevs"].clone())?;
        disks.sort();
        groups.push((group["name"].clone(), group["assigned_rate_limits"].clone(), disks));
    }
    Ok(groups)
}

/// A limit that the load does not reach, which a successor restores.
fn set_lasting_limit(daemon: &Daemon) -> Result<()> {
    daemon.rpc("bdev_qos_group_set_limit", &json!({"name": group(0), "rw_ios_per_sec": 1_000_000})).map(drop)
}

fn slow_name(disk: &str) -> String {
    format!("{disk}-slow")
}

/// Creates a slow disk on top of a disk; returns its name.
fn slow(daemon: &Daemon, base: &str) -> Result<String> {
    let name = slow_name(base);
    let mut params = json!({"name": name, "base_bdev_name": base});
    for latency in ["avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency"] {
        params[latency] = json!(SLOW_US);
    }
    daemon.rpc("bdev_delay_create", &params)?;
    Ok(name)
}

fn add_target(daemon: &Daemon, vm: usize, target: usize, disk: &str) -> Result<Value> {
    let params = json!({"ctrlr": group(vm), "scsi_target_num": target, "bdev_name": disk});
    daemon.rpc("vhost_scsi_controller_add_target", &params)
}
