//! Which disks should share a client of the cluster: eight disks of one `arykd`, with one client for all, one for each four, and
//! one for each disk. The front-end keeps requests in flight on all disks.

use super::Run;
use crate::backend;
use crate::fleet::{self, Blk, DEPTH, Fleet, Numbers, Topology};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::settings::Settings;
use anyhow::Result;
use aryk_ceph_tests::{Cluster, cluster::POOL};
use aryk_front_end::Operation;
use serde_json::json;

/// Disks, each with a front-end.
const DISKS: usize = 8;
/// Bytes of each image, of which the front-end uses a part.
const IMAGE_BYTES: u64 = 4 << 20;
/// Disks for each client, in the order of the columns.
const ARRANGEMENTS: [usize; 3] = [DISKS, aryk_bdev_rbd::DISKS_EACH, 1];

/// Measures all arrangements, in turns.
pub(super) fn measure(settings: &Settings, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let names = ARRANGEMENTS.map(|disks| match disks {
        DISKS => "one for all".to_owned(),
        1 => "one for each disk".to_owned(),
        disks => format!("one for each {disks} disks, as by default"),
    });
    let mut columns = vec!["workload".to_owned()];
    columns.extend(names.clone());
    columns.extend(names.iter().map(|name| format!("{name}: µs per request")));
    columns.push("core to core, ns".to_owned());
    let intro = format!(
        "Requests per second of {DISKS} disks together, 4 KiB at random places, {DEPTH} in flight on each, and microseconds of \
         processor time per request of the whole daemon, as median (least–greatest). Each round has a new daemon for each \
         arrangement. By default, disks of one user and configuration have one client for each {each}, up to {shared} clients, among which \
         more disks are divided. A client has some 40 descriptors, one more for each OSD, and a dozen threads: one for each of 3,000 disks \
         would be 120,000 descriptors and 36,000 threads, more than most hosts permit to a process. `cluster_name` gives a disk a client of \
         its own, or one that it shares with some, and a cluster has up to {most} clients of a daemon.",
        each = aryk_bdev_rbd::DISKS_EACH,
        shared = aryk_bdev_rbd::SHARED_MAX,
        most = aryk_bdev_rbd::CLIENTS_MAX
    );
    let mut section = Section::new("Disks that share a client", &intro, columns);
    let case = |name: &str| format!("rbd/clients/{name}-4k");
    let mut workloads = vec![("randread", Operation::Read), ("randwrite", Operation::Write)];
    workloads.retain(|(name, _)| settings.wants(&case(name)));
    if workloads.is_empty() {
        return Ok(());
    }
    for disk in 0..DISKS {
        super::fill(settings, cluster, &image(disk), IMAGE_BYTES)?;
    }
    for (name, operation) in workloads {
        let case = case(name);
        let rounds = rounds::run_comparable(settings.runs, || {
            let mut round = [Run::default(); ARRANGEMENTS.len()];
            for (run, of_client) in round.iter_mut().zip(ARRANGEMENTS) {
                *run = run_with(settings, cluster, of_client, operation, report)?;
            }
            Ok(round)
        })?;
        let runs = |side: usize, of: fn(&Run) -> f64| {
            rounds.each.iter().map(|round| of(&round[side])).collect::<Runs>()
        };
        for (side, name) in names.iter().enumerate().skip(1) {
            for (metric, unit, of) in super::METRICS {
                let metric = format!("{metric}, one client for all, peer {name}");
                report.records.push(Record::new(&case, &metric, unit, &runs(0, of), &runs(side, of)));
            }
        }
        let sides = 0..ARRANGEMENTS.len();
        let mut row = vec![format!("{name}-4k")];
        row.extend(sides.clone().map(|side| cell(&runs(side, |run| run.rate), number)));
        row.extend(sides.map(|side| cell(&runs(side, |run| run.cpu / 1e3), number)));
        row.push(rounds.round_trip.as_nanos().to_string());
        section.row(row);
    }
    report.section(section);
    Ok(())
}

fn image(disk: usize) -> String {
    format!("shared{disk}")
}

/// Runs a daemon with a client for each `of_client` disks.
fn run_with(
    settings: &Settings,
    cluster: &Cluster,
    of_client: usize,
    operation: Operation,
    report: &mut Report,
) -> Result<Run> {
    let dir = super::directory(settings, &format!("clients-{of_client}"))?;
    let (process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, &dir, None)?;
    report.command(&process.command);
    for disk in 0..DISKS {
        let client = format!("client{}", disk / of_client);
        if disk % of_client == 0 {
            rpc.call("bdev_rbd_register_cluster", json!({"name": client, "config_file": cluster.conf()}))?;
        }
        let params = json!({
            "name": fleet::disk(disk, 0), "cluster_name": client, "pool_name": POOL, "rbd_name": image(disk), "block_size": 512,
        });
        rpc.call("bdev_rbd_create", params)?;
        Blk::create(&mut rpc, disk, 1)?;
    }
    let numbers = Numbers { controllers: DISKS, disks: 1, per_vm: DISKS };
    let mut fleet = Fleet::<Blk>::attach(&dir, numbers)?;
    fleet.set_operation(operation);
    fleet.load(0..DISKS, settings.warm_up)?;
    let before = process.cpu()?;
    let (requests, elapsed) = fleet.load(0..DISKS, settings.span)?;
    let used = process.cpu()?.saturating_sub(before);
    let requests = requests.iter().sum::<u64>() as f64;
    let run = Run { rate: requests / elapsed.as_secs_f64(), cpu: used.as_nanos() as f64 / requests };
    anyhow::ensure!(fleet.are_connected(), "the daemon has disconnected a front-end");
    drop(fleet);
    // The exclusive locks of a killed client's images would keep the next one waiting for 30 s.
    process.end()?;
    Ok(run)
}
