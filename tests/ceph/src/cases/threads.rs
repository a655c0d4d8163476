//! The cores on which threads of Ceph run.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use serde_json::json;

use super::{CLIENT, Case, Site, image};
use crate::vm::{Request, Vm};

pub(super) const CASES: [Case; 2] = [
    Case { name: "threads/cores", body: cores },
    Case { name: "threads/default-cores", body: default_cores },
];

/// Threads of the daemon's own, which may start at any time.
const OWN: [&str; 3] = ["tokio-rt-worker", "reclaim", "rbd_timer"];

/// The name and the cores of a thread.
type Thread = (String, String);

/// The threads of the daemon, by their ids.
fn threads(daemon: &Daemon) -> Result<BTreeMap<u32, Thread>> {
    let mut threads = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.pid()))? {
        let path = task?.path();
        let id = path.file_name().and_then(|name| name.to_str()?.parse().ok()).context("a thread's id")?;
        // A thread may have ended meanwhile.
        let Ok(status) = std::fs::read_to_string(path.join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim().to_owned()).with_context(|| format!("no {name}"))
        };
        threads.insert(id, (field("Name:")?, field("Cpus_allowed_list:")?));
    }
    Ok(threads)
}

/// Registers a client, and uses an image in all ways that start threads. Returns the threads that are new.
fn start_client(site: &Site<'_>, daemon: &Daemon, client: &str, mask: Option<&str>) -> Result<Vec<Thread>> {
    let before = threads(daemon)?;
    let mut cluster = json!({"name": client, "config_file": site.cluster().conf()});
    if let Some(mask) = mask {
        cluster["core_mask"] = json!(mask);
    }
    daemon.rpc("bdev_rbd_register_cluster", &cluster)?;
    let name = format!("threads-{client}");
    site.cluster().create_image(&name, "4M")?;
    let mut disk = image(&name);
    disk["cluster_name"] = json!(client);
    daemon.rpc("bdev_rbd_create", &disk)?;
    let mut vm = Vm::connect(&daemon.attach(&name, &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    vm.succeed(Request::Flush)?;
    ensure!(vm.read(0, 4096)? == [1; 4096], "the data is another");
    daemon.rpc("bdev_rbd_resize", &json!({"name": name, "new_size": 8}))?;
    daemon.rpc("bdev_rbd_get_image_info", &json!({"name": name}))?;
    let new = threads(daemon)?.into_iter().filter(|(id, _)| !before.contains_key(id));
    let new: Vec<_> = new.map(|(_, thread)| thread).filter(|(name, _)| !OWN.contains(&&**name)).collect();
    // A messenger, the finishers, the timers, the calls, the link.
    ensure!(new.len() >= 8, "only these threads are new: {new:?}");
    Ok(new)
}

fn check(threads: &[Thread], cores: &str) -> Result<()> {
    let wrong: Vec<_> = threads.iter().filter(|(_, found)| found != cores).collect();
    ensure!(wrong.is_empty(), "not on the cores {cores}: {wrong:?}");
    println!("{} threads of a client on the cores {cores}", threads.len());
    Ok(())
}

/// All threads of a client are on the cores of `--client-cpus`, or of its own mask. Core 0 is that of the reactor, from which the
/// daemon keeps all other threads.
fn cores(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&["--client-cpus", "0x1"])?;
    check(&start_client(site, &daemon, CLIENT, None)?, "0")?;
    let last = std::thread::available_parallelism()?.get() - 1;
    check(&start_client(site, &daemon, "masked", Some(&format!("{:#x}", 1 << last)))?, &last.to_string())?;
    daemon.stop()
}

/// Without an option, they are on all cores but those of reactors.
fn default_cores(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    let threads = start_client(site, &daemon, "unmasked", None)?;
    let on_reactor = |list: &str| list.split(',').any(|part| part.split('-').next() == Some("0"));
    let has_other_cores = std::thread::available_parallelism()?.get() > 1;
    let wrong: Vec<_> = threads.iter().filter(|(_, cores)| has_other_cores && on_reactor(cores)).collect();
    ensure!(wrong.is_empty(), "on the core of the reactor: {wrong:?}");
    daemon.stop()
}
