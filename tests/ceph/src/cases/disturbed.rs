//! Disks that are used, deleted and created while the cluster does not answer, excludes the client, or changes the image.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::json;

use super::{CLIENT, Case, Site, image};
use crate::cluster::POOL;
use crate::vm::{PATIENCE, Request, Seen, Vm};

/// A call, or the turn of another disk, that waits for the cluster takes longer than this; one that does not, takes less, also on
/// a busy test machine.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// A controller with waiting requests is deleted in less, and a disk too: its requests are aborted after 10 s, and its handle has
/// 5 s to close.
pub(super) const DETACHED: Duration = Duration::from_secs(6);
pub(super) const DELETED: Duration = Duration::from_secs(20);
const EBUSY: i64 = -16;
/// How long a load runs before and after a disturbance.
const CALM: Duration = Duration::from_millis(500);
const MIB: u64 = 1 << 20;

pub(super) const CASES: [Case; 6] = [
    Case { name: "disturbed/deleted-while-stopped", body: deleted_while_stopped },
    Case { name: "disturbed/left-while-stopped", body: left_while_stopped },
    Case { name: "disturbed/monitor", body: monitor },
    Case { name: "disturbed/shrunk", body: shrunk },
    Case { name: "disturbed/pool-deleted", body: pool_deleted },
    Case { name: "disturbed/excluded", body: excluded },
];

/// Runs loads on `vms` while `body` runs; returns what each load saw.
pub(super) fn under_load<T>(
    vms: &mut [&mut Vm],
    body: impl FnOnce() -> Result<T>,
) -> Result<(Vec<Result<Seen>>, T)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loads: Vec<_> = vms.iter_mut().map(|vm| scope.spawn(|| vm.load(PATIENCE, &stop))).collect();
        std::thread::sleep(CALM);
        let result = body();
        std::thread::sleep(CALM);
        stop.store(true, Ordering::Relaxed);
        let seen = loads.into_iter().map(|load| load.join().expect("a load does not panic")).collect();
        Ok((seen, result?))
    })
}

/// Makes calls that concern all disks; returns how long the longest took.
pub(super) fn longest_call(daemon: &Daemon) -> Result<Duration> {
    let methods = ["bdev_get_bdevs", "bdev_rbd_get_clusters_info", "aryk_stats_get", "vhost_get_controllers"];
    methods
        .iter()
        .try_fold(Duration::ZERO, |longest, method| Ok(longest.max(daemon.call(method, &json!({}))?.1)))
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

/// Disks whose requests are in flight are deleted while no OSD answers, with and without a VM: the calls end without the cluster,
/// the VM gets errors, and nothing else waits. Until the cluster has ended the requests, the images take no new disk.
fn deleted_while_stopped(site: &Site<'_>) -> Result<()> {
    const NAMES: [&str; 2] = ["detached", "in-use"];
    let daemon = site.client(&[])?;
    let mut vms = Vec::new();
    for name in NAMES {
        vms.push(Vm::connect(&site.disk(&daemon, name, "4M")?)?);
    }
    let stopped = site.cluster().stop_osds()?;
    for vm in &mut vms {
        vm.submit(0, Request::Write { at: 0, data: &[9; 4096] });
        vm.submit(1, Request::Read { at: MIB, len: 4096 });
    }
    std::thread::sleep(CALM);
    for vm in &mut vms {
        ensure!(vm.take()?.is_none(), "a request completed while all OSDs were stopped");
    }
    let (_, detached) = daemon.call("vhost_delete_controller", &json!({"ctrlr": NAMES[0]}))?;
    let (deleted, longest) = delete_all(&daemon, &NAMES)?;
    println!(
        "the controller was deleted in {detached:?}, the disks in {deleted:?}, longest other call {longest:?}"
    );
    ensure!(
        detached < DETACHED && deleted.iter().all(|took| *took < DELETED),
        "the calls waited for the cluster"
    );
    ensure!(longest < SOON, "calls wait for disks that are being deleted: {longest:?}");
    for _ in 0..2 {
        ensure!(vms[1].wait()?.1 != 0, "a request of a deleted disk succeeded without an OSD");
    }
    let client = daemon.rpc("bdev_rbd_get_clusters_info", &json!({"name": CLIENT}))?;
    ensure!(client["quarantined"] == NAMES.len(), "{client}");
    for name in NAMES {
        let (code, text) = site.refused("bdev_rbd_create", &image(name))?;
        ensure!(code == EBUSY && text.contains("removed disk"), "{code}, {text}");
    }
    drop(stopped);
    // A detached disk's VM, and the controller of the other, have gone with it.
    vms.clear();
    daemon.rpc("vhost_delete_controller", &json!({"ctrlr": NAMES[1]}))?;
    for name in NAMES {
        wait_until("the image to take a disk", PATIENCE, || {
            Ok(daemon.rpc("bdev_rbd_create", &image(name)).ok())
        })?;
        let mut vm = Vm::connect(&daemon.attach(name, &[])?)?;
        vm.succeed(Request::Write { at: 0, data: &[8; 4096] })?;
        ensure!(vm.read(0, 4096)? == [8; 4096], "a write of the deleted disk came later");
    }
    daemon.stop()
}

/// Deletes disks at the same time. Returns how long each deletion took, and the longest call beside them.
fn delete_all(daemon: &Daemon, names: &[&str]) -> Result<(Vec<Duration>, Duration)> {
    std::thread::scope(|scope| {
        let delete = |name: &str| daemon.call("bdev_rbd_delete", &json!({"name": name}));
        let deletions: Vec<_> = names.iter().map(|&name| scope.spawn(move || delete(name))).collect();
        let mut longest = Duration::ZERO;
        while !deletions.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            longest = longest.max(longest_call(daemon)?);
            std::thread::sleep(Duration::from_millis(50));
        }
        let took = deletions.into_iter().map(|deletion| deletion.join().expect("the calls do not panic"));
        Ok((took.map(|call| Ok(call?.1)).collect::<Result<_>>()?, longest))
    })
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
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
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
