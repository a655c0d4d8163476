//! Disks under load while the cluster does not answer, excludes the client, or changes the image.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::json;

use super::{CLIENT, Case, Site, image};
use crate::cluster::POOL;
use crate::vm::{PATIENCE, Request, Seen, Vm};

/// How long the cluster does not answer.
const STOPPED: Duration = Duration::from_secs(3);
/// A call, or the turn of another disk, that waits for the cluster takes longer than this; one that does not, takes less, also on
/// a busy test machine.
const SOON: Duration = Duration::from_secs(1);
/// How long a load runs before and after a disturbance.
const CALM: Duration = Duration::from_millis(500);
const MIB: u64 = 1 << 20;

pub(super) const CASES: [Case; 7] = [
    Case { name: "disturbed/stopped", body: stopped },
    Case { name: "disturbed/deleted-while-stopped", body: deleted_while_stopped },
    Case { name: "disturbed/left-while-stopped", body: left_while_stopped },
    Case { name: "disturbed/monitor", body: monitor },
    Case { name: "disturbed/shrunk", body: shrunk },
    Case { name: "disturbed/pool-deleted", body: pool_deleted },
    Case { name: "disturbed/excluded", body: excluded },
];

/// Runs loads on `vms` while `body` runs; returns what each load saw.
fn under_load<T>(vms: &mut [&mut Vm], body: impl FnOnce() -> Result<T>) -> Result<(Vec<Result<Seen>>, T)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loads: Vec<_> = vms.iter_mut().map(|vm| scope.spawn(|| vm.load(&stop))).collect();
        std::thread::sleep(CALM);
        let result = body();
        std::thread::sleep(CALM);
        stop.store(true, Ordering::Relaxed);
        let seen = loads.into_iter().map(|load| load.join().expect("a load does not panic")).collect();
        Ok((seen, result?))
    })
}

/// Makes calls that concern all disks; returns how long the longest took.
fn longest_call(daemon: &Daemon) -> Result<Duration> {
    let methods = ["bdev_get_bdevs", "bdev_rbd_get_clusters_info", "aryk_stats_get", "vhost_get_controllers"];
    methods
        .iter()
        .try_fold(Duration::ZERO, |longest, method| Ok(longest.max(daemon.call(method, &json!({}))?.1)))
}

/// While no OSD answers, another disk of the same reactor and the daemon's calls go on. Afterwards no request is lost.
fn stopped(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut stuck = Vm::connect(&site.disk(&daemon, "stopped", "4M")?)?;
    daemon.aryk(&["disk", "create", "memory", "--memory", "--size", "1M"])?;
    let mut other = Vm::connect(&daemon.attach("memory", &[])?)?;
    let (seen, call) = under_load(&mut [&mut stuck, &mut other], || {
        let _stopped = site.cluster().stop_osds()?;
        let (began, mut longest) = (Instant::now(), Duration::ZERO);
        while began.elapsed() < STOPPED {
            longest = longest.max(longest_call(&daemon)?);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(longest)
    })?;
    let [stuck_seen, other_seen] = <[_; 2]>::try_from(seen).expect("of two VMs");
    let (stuck_seen, other_seen) =
        (stuck_seen.context("the stuck disk")?, other_seen.context("the other disk")?);
    println!("longest call {call:?}, longest wait of the other disk {:?}", other_seen.longest);
    ensure!(stuck_seen.longest > STOPPED / 2, "the OSDs were not stopped: {stuck_seen:?}");
    ensure!(call < SOON, "a call took {call:?}");
    ensure!(other_seen.longest < SOON, "another disk waited: {other_seen:?}");
    stuck.check_image(&site.cluster().content("stopped")?)?;
    daemon.stop()
}

/// A VM goes while no OSD answers: its session ends, which releases its memory. The next VM connects, and its requests follow
/// those of the first.
fn left_while_stopped(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let socket = site.disk(&daemon, "left", "4M")?;
    let mut vm = Vm::connect(&socket)?;
    let stopped = site.cluster().stop_osds()?;
    vm.submit(0, Request::Write { at: 0, data: &[9; 4096] });
    vm.submit(1, Request::Read { at: MIB, len: 4096 });
    std::thread::sleep(CALM);
    ensure!(vm.take()?.is_none(), "a request completed while all OSDs were stopped");
    drop(vm);
    wait_until("the session's end", PATIENCE, || {
        let controllers = daemon.rpc("vhost_get_controllers", &json!({"name": "left"}))?;
        Ok((controllers[0]["sessions"] == json!([])).then_some(()))
    })?;
    let mut next = Vm::connect(&socket)?;
    next.submit(0, Request::Read { at: 0, len: 4096 });
    std::thread::sleep(CALM);
    ensure!(next.take()?.is_none(), "a request completed while all OSDs were stopped");
    drop(stopped);
    ensure!(next.wait()? == (0, 0), "the next VM's read failed");
    ensure!(next.data(0, 4096) == [9; 4096], "the write of the first VM came after the read of the next");
    daemon.stop()
}

/// A disk whose requests are in flight is detached and deleted while no OSD answers: only the deletion waits for the requests.
/// Afterwards it can be created again.
fn deleted_while_stopped(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "deleted", "4M")?)?;
    let stopped = site.cluster().stop_osds()?;
    vm.submit(0, Request::Write { at: 0, data: &[9; 4096] });
    vm.submit(1, Request::Read { at: MIB, len: 4096 });
    std::thread::sleep(CALM);
    ensure!(vm.take()?.is_none(), "a request completed while all OSDs were stopped");
    std::thread::scope(|scope| {
        let deleted = scope.spawn(|| {
            daemon.rpc("vhost_delete_controller", &json!({"ctrlr": "deleted"}))?;
            daemon.rpc("bdev_rbd_delete", &json!({"name": "deleted"}))
        });
        std::thread::sleep(STOPPED);
        let longest = longest_call(&daemon);
        drop(stopped);
        deleted.join().expect("the calls do not panic")?;
        let longest = longest?;
        ensure!(longest < SOON, "calls wait for a disk that is being deleted: {longest:?}");
        Ok(())
    })?;
    daemon.rpc("bdev_rbd_create", &image("deleted"))?;
    let mut vm = Vm::connect(&daemon.attach("deleted", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[8; 4096] })?;
    ensure!(vm.read(0, 4096)? == [8; 4096], "the disk has other data than was written");
    daemon.stop()
}

/// A cluster is registered while its monitor does not answer: only that call waits, and it succeeds in the end.
fn monitor(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    let stopped = site.cluster().stop_monitor()?;
    let cluster = json!({"name": CLIENT, "config_file": site.cluster().conf()});
    std::thread::scope(|scope| {
        let registered = scope.spawn(|| daemon.rpc("bdev_rbd_register_cluster", &cluster));
        std::thread::sleep(CALM);
        let longest = longest_call(&daemon);
        let waits = !registered.is_finished();
        drop(stopped);
        registered.join().expect("the call does not panic")?;
        ensure!(waits, "a cluster was registered without its monitor");
        let longest = longest?;
        ensure!(longest < SOON, "a call took {longest:?}");
        Ok(())
    })?;
    let mut vm = Vm::connect(&site.disk(&daemon, "monitor", "4M")?)?;
    let (seen, ()) = under_load(&mut [&mut vm], || {
        // Disks go on without the monitor.
        let _stopped = site.cluster().stop_monitor()?;
        std::thread::sleep(CALM);
        Ok(())
    })?;
    seen.into_iter().try_for_each(|seen| seen.map(drop))?;
    daemon.stop()
}

/// Another client shrinks the image under load: requests within the new size go on, those behind it fail.
fn shrunk(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "shrunk", "16M")?)?;
    vm.succeed(Request::Write { at: 12 * MIB, data: &[1; 4096] })?;
    let (seen, ()) = under_load(&mut [&mut vm], || {
        let spec = format!("{POOL}/shrunk");
        site.cluster().rbd(&["resize", "--no-progress", "--allow-shrink", "--size", "8M", &spec]).map(drop)
    })?;
    seen.into_iter().try_for_each(|seen| seen.map(drop))?;
    wait_until("the disk's new size", PATIENCE, || Ok((vm.size()? == 8 * MIB).then_some(())))?;
    ensure!(
        vm.execute(Request::Read { at: 12 * MIB, len: 4096 })?.is_err(),
        "a read behind the new end succeeded"
    );
    ensure!(vm.execute(Request::Write { at: 12 * MIB, data: &[2; 512] })?.is_err(), "so did a write");
    let image = site.cluster().content("shrunk")?;
    ensure!(image.len() as u64 == 8 * MIB, "the image has {} bytes", image.len());
    vm.check_image(&image)?;
    daemon.stop()
}

/// The pool of an image is deleted under load: requests fail, and the disk can be deleted.
fn pool_deleted(site: &Site<'_>) -> Result<()> {
    const OTHER: &str = "doomed";
    let daemon = site.client(&[])?;
    site.cluster().create_pool(OTHER)?;
    site.cluster().rbd(&["create", "--size", "4M", &format!("{OTHER}/image")])?;
    let disk = json!({"name": OTHER, "cluster_name": CLIENT, "pool_name": OTHER, "rbd_name": "image", "block_size": 512});
    daemon.rpc("bdev_rbd_create", &disk)?;
    let mut vm = Vm::connect(&daemon.attach(OTHER, &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    let delete = ["osd", "pool", "delete", OTHER, OTHER, "--yes-i-really-really-mean-it"];
    site.cluster().ceph(&delete)?;
    let written = vm.execute(Request::Write { at: 0, data: &[2; 4096] })?;
    ensure!(written.is_err(), "a write to a deleted pool succeeded");
    ensure!(longest_call(&daemon)? < SOON, "calls wait for a deleted pool");
    daemon.rpc("vhost_delete_controller", &json!({"ctrlr": OTHER}))?;
    daemon.rpc("bdev_rbd_delete", &json!({"name": OTHER}))?;
    // The client goes on with its other pools.
    let mut vm = Vm::connect(&site.disk(&daemon, "survivor", "4M")?)?;
    vm.succeed(Request::Write { at: 0, data: &[3; 4096] })?;
    daemon.stop()
}

/// The cluster excludes the client (blocklist): requests fail, and a disk that is created again works.
fn excluded(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "excluded", "4M")?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    let address = address(&daemon)?;
    site.cluster().ceph(&["osd", "blocklist", "add", &address])?;
    let failed = wait_until("a request to fail", PATIENCE, || {
        Ok(vm.execute(Request::Write { at: 4096, data: &[2; 4096] })?.err())
    })?;
    println!("requests of an excluded client end with status {}", failed.0);
    daemon.rpc("vhost_delete_controller", &json!({"ctrlr": "excluded"}))?;
    daemon.rpc("bdev_rbd_delete", &json!({"name": "excluded"}))?;
    daemon.rpc("bdev_rbd_create", &image("excluded"))?;
    let mut vm = Vm::connect(&daemon.attach("excluded", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[4; 4096] })?;
    site.cluster().ceph(&["osd", "blocklist", "rm", &address])?;
    daemon.stop()
}

/// The address of the daemon's client, as the cluster knows it.
fn address(daemon: &Daemon) -> Result<String> {
    let cluster = daemon.rpc("bdev_rbd_get_clusters_info", &json!({"name": CLIENT}))?;
    Ok(cluster["addresses"].as_str().context("a client without addresses")?.to_owned())
}
