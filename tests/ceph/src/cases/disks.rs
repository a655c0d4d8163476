//! Disks of `arykd` in images of the cluster, as operators use them: by `aryk`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::daemon::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::{Value, json};

use super::{Case, Lab, Site};
use crate::cluster::POOL;

/// How long the daemon may take to follow a change of the cluster.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) const CASES: [Case; 2] =
    [Case { name: "disks/killed", body: killed }, Case { name: "disks/stopped", body: stopped }];

fn start(lab: &Lab, directory: &Path) -> Result<Daemon> {
    let state = directory.join("state");
    std::fs::create_dir_all(&state)?;
    Daemon::start(&lab.bin, directory, &["--state-dir", state.to_str().context("a path")?])
}

/// Creates a disk of 64 MiB in a new image of the same name.
fn create(lab: &Lab, daemon: &Daemon, disk: &str) -> Result<()> {
    let (image, conf) = (format!("{POOL}/{disk}"), lab.cluster.conf());
    let conf = conf.to_str().context("a path")?;
    daemon.aryk(&["disk", "create", disk, "--rbd", &image, "--create", "64M", "--conf", conf]).map(drop)
}

fn blocks(daemon: &Daemon, disk: &str) -> Result<u64> {
    let found = daemon.rpc("bdev_get_bdevs", &json!({"name": disk}))?;
    found[0]["num_blocks"].as_u64().context("a disk without a size")
}

fn addresses(daemon: &Daemon) -> Result<String> {
    let clusters: Value = daemon.rpc("bdev_rbd_get_clusters_info", &json!({}))?;
    Ok(clusters[0]["addresses"].as_str().context("no client")?.to_owned())
}

/// Data that was written before the daemon is killed is there afterwards; the killed daemon's client is excluded. Other clients'
/// resizes are followed.
fn killed(site: &Site<'_>) -> Result<()> {
    let (lab, directory) = (site.lab, site.directory);
    let daemon = start(lab, directory)?;
    create(lab, &daemon, "killed")?;
    let socket = daemon.attach("killed", &[])?;
    let socket = socket.to_str().context("a path")?;
    daemon.aryk(&["bench", socket, "--rw", "write", "--verify", "--destroy", "--time", "2s"])?;
    let first = addresses(&daemon)?;
    daemon.kill();
    let daemon = start(lab, directory)?;
    ensure!(addresses(&daemon)? != first, "the new daemon has the client of the killed one");
    let excluded = lab.cluster.ceph(&["osd", "blocklist", "ls"])?;
    ensure!(excluded.contains(&first), "{first} is not excluded: {excluded}");
    daemon.aryk(&["bench", socket, "--rw", "read", "--verify", "--time", "2s"])?;
    lab.cluster.rbd(&["resize", "--no-progress", "--size", "128M", &format!("{POOL}/killed")])?;
    wait_until("the disk to follow its image", PATIENCE, || {
        Ok((blocks(&daemon, "killed")? == (128 << 20) / 512).then_some(()))
    })?;
    daemon.aryk(&["disk", "resize", "killed", "192M"])?;
    let info = lab.cluster.rbd(&["info", "--format", "json", &format!("{POOL}/killed")])?;
    ensure!(serde_json::from_str::<Value>(&info)?["size"] == 192 << 20, "{info}");
    daemon.aryk(&["disk", "remove", "--force", "killed"])?;
    let watchers = lab.cluster.rbd(&["status", &format!("{POOL}/killed")])?;
    ensure!(watchers.contains("Watchers: none"), "a removed disk leaves its image open: {watchers}");
    daemon.stop()
}

/// While the OSDs are stopped, requests wait, and calls are answered; then the requests go on.
fn stopped(site: &Site<'_>) -> Result<()> {
    let (lab, directory) = (site.lab, site.directory);
    let daemon = start(lab, directory)?;
    create(lab, &daemon, "waiting")?;
    let socket = daemon.attach("waiting", &[])?;
    let socket = socket.to_str().context("a path")?;
    let stopped = lab.cluster.stop_osds()?;
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| daemon.aryk(&["bench", socket, "--requests", "10"]));
        std::thread::sleep(Duration::from_secs(1));
        let (_, took) = daemon.call("bdev_get_bdevs", &json!({"name": "waiting"}))?;
        ensure!(took < Duration::from_secs(5), "a call took {took:?} while the OSDs were stopped");
        ensure!(!bench.is_finished(), "requests completed while all OSDs were stopped");
        drop(stopped);
        bench.join().expect("the thread does not panic").map(drop)
    })?;
    daemon.stop()
}
