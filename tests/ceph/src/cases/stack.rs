//! All layers of a cloud's disks at once: VMs with SCSI controllers, QoS groups, encrypted disks, images of the cluster. The VMs
//! have a verified load on every disk while layers fail, change, come and go.
//!
//! `ARYK_STACK_VMS`, `ARYK_STACK_CONTROLLERS` and `ARYK_STACK_DISKS` set the number of VMs, of controllers per VM, and of disks
//! per controller (2 to 8). A VM has one QoS group for all its disks. In this file, a *guest* is one controller with its load:
//! those of a VM follow each other.

mod leaving;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::{Signal, wait_until};
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};

use super::disturbed::SOON;
use super::{Case, Site, number};
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
/// When the daemon is killed after the beginning of a call.
const DELAYS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(8)];
/// The aim of a call's duration; and its upper bound on a busy test machine.
const CALL: Duration = Duration::from_millis(100);
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
    /// By guest.
    progress: &'a [Progress],
    /// Guests per VM.
    controllers: usize,
}

fn faults(site: &Site<'_>) -> Result<()> {
    let (vms, controllers) = (number("ARYK_STACK_VMS", 2)?, number("ARYK_STACK_CONTROLLERS", 2)?);
    let disks = number("ARYK_STACK_DISKS", 3)?;
    ensure!(
        (2..=8).contains(&disks) && vms > 0 && controllers > 0,
        "{vms} VMs, {controllers} controllers, {disks} disks"
    );
    let cluster = site.cluster();
    let progress: Vec<_> = (0..vms * controllers).map(|_| Progress::new(disks)).collect();
    let stack =
        Stack { cluster, bin: &site.lab.bin, directory: site.directory, progress: &progress, controllers };
    let daemon = stack.start()?;
    daemon.rpc("bdev_rbd_register_cluster", &json!({"name": CLIENT, "config_file": cluster.conf()}))?;
    let mut guests = Vec::new();
    for vm in 0..vms {
        daemon.rpc("bdev_qos_group_create", &json!({"name": group(vm)}))?;
    }
    for guest in 0..vms * controllers {
        guests.push(Vm::connect(guest, disks, &stack.build(&daemon, guest, disks)?)?);
    }
    let daemon = stack.under_load(&mut guests, daemon)?;
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.verify().with_context(|| format!("guest {number} after the load"))?;
    }
    let grown = guests[0].read(0, GROWN_MIB * MIB - 4096)?;
    ensure!(grown.len() == 4096, "the last block of the grown disk has {} bytes", grown.len());
    let written: usize = guests.iter().map(Vm::written).sum();
    drop(guests);
    daemon.stop()?;
    stack.check_images(disks)?;
    println!(
        "{written} blocks of {vms} VMs with {controllers} × {disks} disks each are as they were written"
    );
    Ok(())
}

/// The names of layers.
fn group(vm: usize) -> String {
    format!("vm{vm}")
}

fn controller(guest: usize) -> String {
    format!("guest{guest}")
}

fn disk(guest: usize, target: usize) -> String {
    format!("guest{guest}-{target}")
}

/// Whether a disk is the slow one: the last of the first guest.
const fn is_slow(guest: usize, target: usize, disks: usize) -> bool {
    guest == 0 && target == disks - 1
}

impl Stack<'_> {
    /// Starts a daemon, or the successor of a killed one.
    fn start(&self) -> Result<Daemon> {
        let state = self.directory.join("state").display().to_string();
        Daemon::start(self.bin, self.directory, &["--state-dir", &state])
    }

    /// Creates a guest's controller with all layers below; returns its socket.
    fn build(&self, daemon: &Daemon, guest: usize, disks: usize) -> Result<PathBuf> {
        daemon.rpc("vhost_create_scsi_controller", &json!({"ctrlr": controller(guest)}))?;
        for target in 0..disks {
            let name = disk(guest, target);
            let image = format!("{name}-image");
            self.cluster.create_image(&name, &format!("{SIZE_MIB}M"))?;
            let rbd = json!({
                "name": image, "cluster_name": CLIENT, "pool_name": POOL, "rbd_name": name, "block_size": 512,
            });
            daemon.rpc("bdev_rbd_create", &rbd)?;
            // Each disk has a key of its own, whose two halves differ.
            let half = |side: u64| format!("{:064x}", side << 32 | (guest * 8 + target) as u64);
            let key = json!({"name": name, "cipher": "AES_XTS", "key": half(1), "key2": half(2)});
            daemon.rpc("accel_crypto_key_create", &key)?;
            let crypto = json!({"name": name, "base_bdev_name": image, "key_name": name});
            daemon.rpc("bdev_crypto_create", &crypto)?;
            let top = if is_slow(guest, target, disks) { slow(daemon, &name)? } else { name };
            let vm = group(guest / self.controllers);
            daemon.rpc("bdev_qos_group_add_bdev", &json!({"name": vm, "bdev_name": top}))?;
            add_target(daemon, guest, target, &top)?;
        }
        Ok(self.directory.join("vhost").join(controller(guest)))
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
        let daemon = self.kill_in_limits(daemon).context("kill -9 while a limit is set")?;
        self.hot_plug(&daemon).context("hot plug")?;
        let daemon = self.kill_in_plug(daemon).context("kill -9 in a hot plug")?;
        self.stop_cluster(&daemon).context("a cluster that does not answer")?;
        self.leave_stuck(&daemon).context("what goes while the cluster does not answer")?;
        let daemon = self.kill_in_stop(daemon).context("kill -9 while the cluster does not answer")?;
        self.grow(&daemon, GROWN_MIB).context("a larger image")?;
        let daemon = self.kill_in_growth(daemon).context("kill -9 in a growth")?;
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

    /// The guests of the first VM.
    fn first_vm(&self) -> &[Progress] {
        &self.progress[..self.controllers]
    }

    /// The requests per second of the first VM.
    fn rate(&self) -> u64 {
        let sum = || self.first_vm().iter().flat_map(Progress::done).sum::<u64>();
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
        (self.controllers * self.progress[0].targets().len() * SLOTS) as u64
    }

    /// Kills the daemon `delay` after the beginning of a call, whose result counts for nothing, and starts its successor.
    fn kill_during(&self, daemon: Daemon, delay: Duration, method: &str, params: &Value) -> Result<Daemon> {
        std::thread::scope(|scope| {
            let call = scope.spawn(|| drop(daemon.call(method, params)));
            std::thread::sleep(delay);
            let pid = Pid::from_raw(daemon.pid().cast_signed()).context("a daemon without an id")?;
            kill_process(pid, Signal::KILL)?;
            call.join().expect("a call does not panic");
            Ok::<_, anyhow::Error>(())
        })?;
        daemon.kill();
        self.start()
    }

    fn kill_in_limits(&self, daemon: Daemon) -> Result<Daemon> {
        let params = json!({"name": group(0), "rw_ios_per_sec": 2_000_000});
        let daemon = self.kill_during(daemon, DELAYS[0], "bdev_qos_group_set_limit", &params)?;
        self.await_work("after kill -9 while a limit is set")?;
        set_lasting_limit(&daemon)?;
        Ok(daemon)
    }

    /// Kills the daemon while a disk is being unplugged, and while it is being plugged.
    fn kill_in_plug(&self, daemon: Daemon) -> Result<Daemon> {
        let counters = &self.progress[0].targets()[1];
        counters.may_be_missing.store(true, Ordering::Relaxed);
        let mut target = json!({"ctrlr": controller(0), "scsi_target_num": 1});
        let daemon = self.kill_during(daemon, DELAYS[0], "vhost_scsi_controller_remove_target", &target)?;
        // It may have been removed, or not.
        let _ = daemon.rpc("vhost_scsi_controller_remove_target", &target);
        target["bdev_name"] = json!(self.first_name(1));
        let daemon = self.kill_during(daemon, DELAYS[1], "vhost_scsi_controller_add_target", &target)?;
        let _ = daemon.rpc("vhost_scsi_controller_add_target", &target);
        let works = self.await_work("after kill -9 in a hot plug");
        counters.may_be_missing.store(false, Ordering::Relaxed);
        works?;
        self.await_work("after the hot plug, without an error")?;
        Ok(daemon)
    }

    /// Kills the daemon while no OSD answers. Its successor cannot open the images until they do.
    fn kill_in_stop(&self, daemon: Daemon) -> Result<Daemon> {
        let stopped = self.cluster.stop_osds()?;
        std::thread::sleep(DELAYS[1]);
        daemon.kill();
        let daemon = self.start()?;
        let (_, took) = daemon.call("bdev_get_bdevs", &json!({}))?;
        ensure!(took < SOON, "a call took {took:?} while the successor could not open its images");
        drop(stopped);
        self.await_work("after kill -9 while the OSDs were stopped")?;
        Ok(daemon)
    }

    fn kill_in_growth(&self, daemon: Daemon) -> Result<Daemon> {
        let params = json!({"name": format!("{}-image", disk(0, 0)), "new_size": GROWN_MIB + 1});
        let daemon = self.kill_during(daemon, DELAYS[1], "bdev_rbd_resize", &params)?;
        self.await_work("after kill -9 in a growth")?;
        // The image has grown, or not, and its disk has its size.
        self.grow(&daemon, GROWN_MIB + 1)?;
        Ok(daemon)
    }

    /// The topmost disk of a target of the first guest.
    fn first_name(&self, target: usize) -> String {
        let name = disk(0, target);
        if is_slow(0, target, self.progress[0].targets().len()) { slow_name(&name) } else { name }
    }

    /// The first VM's disk 1 is unplugged under load, and plugged again: no other disk fails, and its data is there.
    fn hot_plug(&self, daemon: &Daemon) -> Result<()> {
        let counters = &self.progress[0].targets()[1];
        counters.may_be_missing.store(true, Ordering::Relaxed);
        daemon.rpc(
            "vhost_scsi_controller_remove_target",
            &json!({"ctrlr": controller(0), "scsi_target_num": 1}),
        )?;
        wait_until("requests to a missing disk", PATIENCE, || {
            Ok((counters.missing.load(Ordering::Relaxed) > WORKS).then_some(()))
        })?;
        add_target(daemon, 0, 1, &self.first_name(1))?;
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
        let mut calls = Vec::new();
        while began.elapsed() < STOPPED {
            for method in ["bdev_get_bdevs", "vhost_get_controllers", "bdev_rbd_get_clusters_info"] {
                calls.push(daemon.call(method, &json!({})).context(method)?.1);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // Requests of which the daemon had the result already may complete.
        let (completed, most) =
            (sum() - before, self.slots() * (self.progress.len() / self.controllers) as u64);
        drop(stopped);
        ensure!(completed <= most, "{completed} requests completed without an OSD");
        calls.sort_unstable();
        let (median, longest) = (calls[calls.len() / 2], calls[calls.len() - 1]);
        println!("{} calls while no OSD answered took {median:?}, {longest:?} at most", calls.len());
        ensure!(median < CALL && longest < SOON, "calls waited for the cluster: {median:?}, {longest:?}");
        self.await_work("after the OSDs go on")
    }

    /// The first VM's disk 0 grows under load, and the VM is told.
    fn grow(&self, daemon: &Daemon, size: u64) -> Result<()> {
        let image = format!("{}-image", disk(0, 0));
        let counters = &self.progress[0].targets()[0];
        let blocks = || -> Result<u64> {
            let found = daemon.rpc("bdev_get_bdevs", &json!({"name": disk(0, 0)}))?;
            found[0]["num_blocks"].as_u64().context("a disk without a size")
        };
        let (seen, was_grown) = (counters.resized.load(Ordering::Relaxed), blocks()? * 512 == size * MIB);
        daemon.rpc("bdev_rbd_resize", &json!({"name": image, "new_size": size}))?;
        wait_until("the VM to see the new size", PATIENCE, || {
            let is_told = was_grown || counters.resized.load(Ordering::Relaxed) > seen;
            Ok((is_told && blocks()? * 512 == size * MIB).then_some(()))
        })?;
        self.await_work("after the growth")
    }

    /// The images have what the VMs wrote as ciphertext only.
    fn check_images(&self, disks: usize) -> Result<()> {
        let all = (0..self.progress.len()).flat_map(|guest| (0..disks).map(move |target| (guest, target)));
        for (guest, target) in all {
            let name = disk(guest, target);
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

fn add_target(daemon: &Daemon, guest: usize, target: usize, disk: &str) -> Result<Value> {
    let params = json!({"ctrlr": controller(guest), "scsi_target_num": target, "bdev_name": disk});
    daemon.rpc("vhost_scsi_controller_add_target", &params)
}
