//! How soon a large pool with many volumes and snapshots opens.

use super::create_volume;
use crate::backend::{self, Store};
use crate::frontend::FrontEnd;
use crate::process::Process;
use crate::report::{Report, Section, number};
use crate::rpc::Rpc;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Result, ensure};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

const INTRO: &str = "A pool of 15 TiB over a sparse file, with volumes of 10 TiB and 10 snapshots of each; before each snapshot, blocks of its volume \
    were written at random. The time is that from the call that creates the disk below until the daemon lists all volumes and snapshots.";

const POOL: u64 = 15 << 40;
const VOLUME: u64 = 10 << 40;
const SNAPSHOTS: u32 = 10;
/// Blocks that are written before each snapshot.
const BLOCKS: u64 = 200;
/// The longest time until the pool is open.
const AIM: Duration = Duration::from_secs(5);

/// Measures the case, if it is selected.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("volume/many") {
        return Ok(());
    }
    let volumes = if settings.quick { 2 } else { 100 };
    let path = settings.files.path().join("many");
    File::create(&path)?.set_len(POOL)?;
    let (base, dir) = (Store::File { path }, settings.sockets.path().join("many"));
    let (mut process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, &dir, None)?;
    backend::create_disk(&mut rpc, "base", &base, &dir)?;
    rpc.call("aryk_pool_create", json!({"name": "p", "base_bdev_name": "base", "force": true}))?;
    for number in 0..volumes {
        fill(&mut process, &mut rpc, &dir, number)?;
    }
    process.end()?;
    let disks = volumes * (SNAPSHOTS + 1);
    let columns = ["after", "volumes", "snapshots", "ms"].map(str::to_owned);
    let mut section = Section::new("Opening a pool of 15 TiB", INTRO, columns.to_vec());
    for (end, later) in [("a clean end", "first"), ("`kill -9`", "second")] {
        let (time, mut rpc, process) = open(settings, &base, &dir, disks)?;
        let missed = if time > AIM { " **missed**" } else { "" };
        let time = format!("{} (aim {}){missed}", number(time.as_secs_f64() * 1e3), AIM.as_millis());
        section.row(vec![end.to_owned(), volumes.to_string(), (volumes * SNAPSHOTS).to_string(), time]);
        create_volume(&mut rpc, later, VOLUME)?;
        // Kills it.
        drop(process);
    }
    report.section(section);
    Ok(())
}

/// Creates a volume, and takes its snapshots.
fn fill(process: &mut Process, rpc: &mut Rpc, dir: &Path, number: u32) -> Result<()> {
    let name = format!("v{number}");
    create_volume(rpc, &name, VOLUME)?;
    rpc.call("vhost_create_blk_controller", json!({"ctrlr": name, "dev_name": format!("p/{name}")}))?;
    let socket = dir.join(&name);
    process.wait_for(&socket)?;
    let mut writes = FrontEnd::connect(&socket, 1, Workload::random(100, 4 << 10, 32))?;
    for snapshot in 0..SNAPSHOTS {
        writes.count(BLOCKS)?;
        let snapshot = format!("{name}-{snapshot}");
        rpc.call("bdev_lvol_snapshot", json!({"lvol_name": format!("p/{name}"), "snapshot_name": snapshot}))?;
    }
    drop(writes);
    rpc.call("vhost_delete_controller", json!({"ctrlr": name})).map(drop)
}

/// Starts a daemon on the pool. Returns the time until it lists so many volumes and snapshots.
fn open(settings: &Settings, base: &Store, dir: &Path, disks: u32) -> Result<(Duration, Rpc, Process)> {
    let (process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, dir, None)?;
    let start = Instant::now();
    backend::create_disk(&mut rpc, "base", base, dir)?;
    loop {
        let listed = rpc.call("bdev_lvol_get_lvols", json!({"lvs_name": "p"}));
        let listed = listed.ok().and_then(|listed| listed.as_array().map(Vec::len)).unwrap_or(0);
        let time = start.elapsed();
        if listed >= disks as usize {
            return Ok((time, rpc, process));
        }
        ensure!(time < 20 * AIM, "{listed} of {disks} volumes and snapshots were listed");
        std::thread::yield_now();
    }
}
