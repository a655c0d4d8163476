//! `cargo xtask bench scsi`: disks of a SCSI host compared with block devices. One `arykd` has the same disk twice, once
//! behind each front-end type, and `aryk bench` measures them in turns: both send the same requests from the same core to
//! the same reactor. The placement of a process' memory changes the result by up to a tenth, so each round starts a new
//! daemon.

use crate::backend;
use crate::frontends::bench;
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::rpc::Rpc;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result};
use serde_json::json;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The throughput of SCSI that is aimed for, as a share of a block device's, from this number of requests in flight on.
const AIM: f64 = 0.9;
const AIM_DEPTH: usize = 32;

/// The two sides, in the order of all arrays here: the socket's name, and the arguments of `aryk bench`.
const SIDES: [(&str, &[&str]); 2] = [("scsi", &["--scsi"]), ("blk", &[])];

/// Bytes of a null disk.
const NULL_SIZE: u64 = 1 << 40;
/// The workload that fills a disk.
const FILL: Workload = Workload::sequential(100, 128 << 10, 8);

/// A daemon with both disks.
struct Both {
    process: Process,
    rpc: Rpc,
    dir: PathBuf,
}

/// The results of both sides, and the front-end's ceiling.
struct Round {
    rates: [f64; 2],
    /// Busy time of the reactor per request, in ns.
    busy: [f64; 2],
    ceilings: [f64; 2],
}

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let aryk = backend::build_program("aryk")?;
    for case in ["null", "memory"] {
        let wants = |workload: &Workload| settings.wants(&format!("scsi/{case}/{}", workload.name()));
        let workloads: Vec<_> = workloads(case).into_iter().filter(wants).collect();
        if workloads.is_empty() {
            continue;
        }
        let columns = [
            "workload",
            "scsi",
            "blk",
            "ratio",
            "scsi: busy ns per request",
            "blk's",
            "front-end's ceiling, scsi",
            "blk",
            "core to core, ns",
        ];
        let mut section =
            Section::new(&format!("SCSI and block: {case}"), INTRO, columns.map(str::to_owned).to_vec());
        for workload in workloads {
            section.row(compare(settings, case, &workload, &aryk, report)?);
        }
        report.section(section);
    }
    Ok(())
}

const INTRO: &str = "Thousand requests per second, as median (least–greatest), one queue, a new daemon for each run; the ratio is of the medians. The ceilings are \
    the front-end's own for each kind of request, against a thread that answers at once.";

fn workloads(case: &str) -> Vec<Workload> {
    let writes: &[u32] = if case == "null" { &[0] } else { &[0, 100] };
    let all = |percent: &u32| [1, 32, 128].map(|depth| Workload::random(*percent, 4 << 10, depth));
    writes.iter().flat_map(all).collect()
}

/// Starts a daemon with a disk of this kind behind each front-end type; each disk has been used, and filled if it stores
/// data.
fn start(settings: &Settings, case: &str, aryk: &Path) -> Result<Both> {
    let dir = settings.sockets.path().join(format!("scsi-{case}"));
    if dir.exists() {
        // The previous daemon's sockets would be mistaken for this daemon's.
        std::fs::remove_dir_all(&dir)?;
    }
    let (mut process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, &dir, None)?;
    let (method, size) = match case {
        "null" => ("bdev_null_create", NULL_SIZE),
        _ => ("bdev_malloc_create", settings.size()),
    };
    for (side, _) in SIDES {
        rpc.call(method, json!({"name": side, "num_blocks": size / 512, "block_size": 512}))?;
    }
    let controller = json!({"ctrlr": "scsi", "num_queues": 1});
    rpc.call("vhost_create_scsi_controller", controller)?;
    let target = json!({"ctrlr": "scsi", "scsi_target_num": 0, "bdev_name": "scsi"});
    rpc.call("vhost_scsi_controller_add_target", target)?;
    rpc.call("vhost_create_blk_controller", json!({"ctrlr": "blk", "dev_name": "blk"}))?;
    for (side, option) in SIDES {
        let socket = dir.join(side);
        process.wait_for(&socket)?;
        let requests = (settings.size() / u64::from(FILL.block)).to_string();
        let block = FILL.block.to_string();
        let fill = ["--destroy", "--bs", &block, "--requests", &requests];
        bench(aryk, &FILL, &arguments(&socket, &[&fill, option].concat()))?;
    }
    Ok(Both { process, rpc, dir })
}

fn arguments<'a>(socket: &'a Path, more: &'a [&'a str]) -> Vec<&'a OsStr> {
    std::iter::once(socket.as_os_str()).chain(more.iter().map(OsStr::new)).collect()
}

/// Measures one workload on both sides in turn, and adds the table's row.
fn compare(
    settings: &Settings,
    case: &str,
    workload: &Workload,
    aryk: &Path,
    report: &mut Report,
) -> Result<Vec<String>> {
    let rounds = rounds::run_comparable(settings.runs, || {
        let mut both = start(settings, case, aryk)?;
        report.command(&both.process.command);
        round(settings, workload, aryk, &mut both)
    })?;
    let runs = |of: &dyn Fn(&Round) -> [f64; 2]| {
        [0, 1].map(|side| rounds.each.iter().map(|round| of(round)[side]).collect::<Runs>())
    };
    let name = format!("scsi/{case}/{}", workload.name());
    let [scsi, blk] = runs(&|round| round.rates);
    let record = Record::new(&name, "throughput, peer our own vhost-user-blk", "IOPS", &scsi, &blk);
    let aim = if workload.depth < AIM_DEPTH { String::new() } else { format!(" (aim {AIM})") };
    let ratio = record.ratio.map_or(String::new(), number) + &aim;
    report.records.push(record);
    let show = |rate: f64| number(rate / 1e3);
    let mut row = vec![workload.name(), cell(&scsi, show), cell(&blk, show), ratio];
    let busy = runs(&|round| round.busy);
    row.extend(busy.iter().map(|side| cell(side, number)));
    report.records.push(Record::new(&name, "busy time per request", "ns", &busy[0], &busy[1]));
    row.extend(runs(&|round| round.ceilings).iter().map(|side| cell(side, show)));
    row.push(rounds.round_trip.as_nanos().to_string());
    Ok(row)
}

fn round(settings: &Settings, workload: &Workload, aryk: &Path, both: &mut Both) -> Result<Round> {
    let time = format!("{}ms", settings.span.as_millis());
    both.process.pause()?;
    let mut round = Round { rates: [0.0; 2], busy: [0.0; 2], ceilings: [0.0; 2] };
    for (i, (side, option)) in SIDES.into_iter().enumerate() {
        both.process.resume()?;
        let before = both.rpc.busy()?;
        let write: &[&str] = if workload.write_percent > 0 { &["--destroy"] } else { &[] };
        let more = [&["--time", &time], option, write].concat();
        let socket = both.dir.join(side);
        let said = bench(aryk, workload, &arguments(&socket, &more))?;
        let after = both.rpc.busy()?;
        both.process.pause()?;
        round.rates[i] = said["iops"].as_f64().context("no rate")?;
        round.busy[i] = (after - before) / said["requests"].as_f64().context("no count")?;
        let ceiling: Vec<_> = ["--ceiling"].iter().chain(option).map(OsStr::new).collect();
        let said = bench(aryk, workload, &ceiling)?;
        round.ceilings[i] = said["ceiling"]["iops"].as_f64().context("no ceiling")?;
    }
    Ok(round)
}
