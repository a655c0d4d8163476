//! The cluster itself: what the other cases rely on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::wait_until;

use super::{Case, Site};
use crate::cluster::POOL;
use crate::{Cluster, Kind, Store};

/// How long the system may take to end killed processes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the images.
const LEN: usize = 1 << 20;

pub(super) const CASES: [Case; 3] = [
    Case { name: "cluster/stopped", body: stopped },
    Case { name: "cluster/killed", body: killed },
    Case { name: "cluster/abandoned", body: abandoned },
];

/// Imports an image of one repeated byte.
fn import(cluster: &Cluster, image: &str, byte: u8) -> Result<()> {
    let file = tempfile::NamedTempFile::new_in(cluster.directory())?;
    std::fs::write(file.path(), vec![byte; LEN])?;
    let path = file.path().to_str().context("a path")?;
    cluster.rbd(&["import", "--no-progress", path, &format!("{POOL}/{image}")]).map(drop)
}

fn check(cluster: &Cluster, image: &str, byte: u8) -> Result<()> {
    let content = cluster.content(image)?;
    ensure!(content == vec![byte; LEN], "{image} has {} bytes, or others than {byte}", content.len());
    Ok(())
}

/// A client waits while the OSDs are stopped, and goes on afterwards.
fn stopped(site: &Site<'_>) -> Result<()> {
    let cluster = site.cluster();
    import(cluster, "imported", 7)?;
    let stopped = cluster.stop_osds()?;
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let read = check(cluster, "imported", 7);
            has_ended.store(true, Ordering::Relaxed);
            read
        });
        std::thread::sleep(Duration::from_secs(1));
        let waited = !has_ended.load(Ordering::Relaxed);
        drop(stopped);
        reader.join().expect("the reader does not panic")?;
        ensure!(waited, "an image was read while all OSDs were stopped");
        Ok(())
    })
}

/// With two copies, an OSD may be killed; all OSDs may be killed, and come back with their objects. Users have keys.
fn killed(_: &Site<'_>) -> Result<()> {
    let kind = Kind { osds: 2, copies: 2, store: Store::File, authenticated: true };
    let mut cluster = Cluster::start(&kind)?;
    cluster.create_user("vms", POOL)?;
    import(&cluster, "killed", 3)?;
    cluster.kill_osd(0)?;
    cluster.await_up(1)?;
    check(&cluster, "killed", 3)?;
    cluster.kill_osd(1)?;
    cluster.start_osd(0)?;
    cluster.start_osd(1)?;
    cluster.await_up(2)?;
    check(&cluster, "killed", 3)?;
    cluster.check_alive()
}

/// No daemon outlives the thread that started its cluster, even if the cluster is not dropped.
fn abandoned(_: &Site<'_>) -> Result<()> {
    let started = std::thread::spawn(|| -> Result<_> {
        let cluster = Cluster::start(&Kind::SMALL)?;
        let (directory, pids) = (cluster.directory().to_owned(), cluster.pids());
        std::mem::forget(cluster);
        Ok((directory, pids))
    });
    let (directory, pids) = started.join().expect("the thread does not panic")?;
    let runs = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie has ended; this process does not wait for it.
        stat.rsplit_once(')').is_some_and(|(_, fields)| !fields.trim_start().starts_with('Z'))
    };
    wait_until("the daemons to end", PATIENCE, || Ok((!pids.iter().any(runs)).then_some(())))?;
    std::fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())
}
