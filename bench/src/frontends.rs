//! Compares two front-ends, `aryk bench` and `blkio`, in turns, against the same `arykd` with a null disk, and against a
//! target without a disk. A front-end's own ceiling hides faster results of a back-end.

use crate::backend::{self, BackEnd};
use crate::ceiling::Ceilings;
use crate::frontend::FrontEnd;
use crate::process::{self, FRONT_END_CORE};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::settings::{Settings, null};
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// The workloads that the command line selects.
pub fn wanted(settings: &Settings) -> Vec<Workload> {
    let all = [1, 32, 128].map(|depth| Workload::random(0, 4 << 10, depth));
    all.into_iter().filter(|workload| settings.wants(&format!("front-end/{}", workload.name()))).collect()
}

/// The results of one round, in requests per second.
struct Round {
    ours: f64,
    blkio: f64,
    our_ceiling: f64,
    blkio_ceiling: f64,
}

/// Measures the selected workloads.
pub fn measure(settings: &Settings, ceilings: &Ceilings, report: &mut Report) -> Result<()> {
    let workloads = wanted(settings);
    if workloads.is_empty() {
        return Ok(());
    }
    let aryk = backend::build_program("aryk")?;
    let back_end = backend::aryk(
        &settings.arykd,
        settings.policy,
        &null(),
        &settings.sockets.path().join("front-ends"),
    )?;
    back_end.process.pause()?;
    report.command(&back_end.process.command);
    let columns = [
        "workload",
        "aryk bench",
        "blkio",
        "ratio",
        "aryk bench's ceiling",
        "blkio's",
        "ratio",
        "core to core, ns",
    ];
    let mut section = Section::new("Front-ends: null", INTRO, columns.map(str::to_owned).to_vec());
    for workload in workloads {
        let rounds =
            rounds::run_comparable(settings.runs, || round(settings, &aryk, &back_end, &workload, ceilings))?;
        let runs = |of: &dyn Fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
        let case = format!("front-end/{}", workload.name());
        let pairs = [
            ("throughput, front-end blkio", runs(&|round| round.ours), runs(&|round| round.blkio)),
            (
                "ceiling, front-end blkio",
                runs(&|round| round.our_ceiling),
                runs(&|round| round.blkio_ceiling),
            ),
        ];
        let mut row = vec![workload.name()];
        for (metric, ours, blkio) in pairs {
            let record = Record::new(&case, metric, "IOPS", &ours, &blkio);
            let show = |rate: f64| number(rate / 1e3);
            row.extend([cell(&ours, show), cell(&blkio, show), record.ratio.map_or(String::new(), number)]);
            report.records.push(record);
        }
        row.push(rounds.round_trip.as_nanos().to_string());
        section.row(row);
    }
    report.section(section);
    Ok(())
}

fn round(
    settings: &Settings,
    aryk: &Path,
    back_end: &BackEnd,
    workload: &Workload,
    ceilings: &Ceilings,
) -> Result<Round> {
    back_end.process.resume()?;
    let time = format!("{}ms", settings.span.as_millis());
    let ours = bench(aryk, workload, &[back_end.socket.as_ref(), "--time".as_ref(), time.as_ref()])?;
    let mut front_end = FrontEnd::connect(&back_end.socket, 1, *workload)?;
    front_end.closed(settings.warm_up)?;
    let blkio = front_end.closed(settings.span)?.rate();
    drop(front_end);
    back_end.process.pause()?;
    let ceiling = bench(aryk, workload, &["--ceiling".as_ref()])?;
    Ok(Round {
        ours: ours["iops"].as_f64().context("no rate")?,
        blkio,
        our_ceiling: ceiling["ceiling"]["iops"].as_f64().context("no ceiling")?,
        blkio_ceiling: ceilings.measure_again(settings, workload)?,
    })
}

/// Runs `aryk bench` for a workload; returns its JSON result.
pub fn bench(aryk: &Path, workload: &Workload, args: &[&OsStr]) -> Result<Value> {
    let (core, depth) = (FRONT_END_CORE.to_string(), workload.depth.to_string());
    let mut command = Command::new(aryk);
    command.args(["--json", "bench", "--rw", workload.rw(), "--cpu", &core, "--qd", &depth]).args(args);
    let output = process::unpinned(|| command.output())??;
    ensure!(output.status.success(), "aryk bench: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

const INTRO: &str = "Thousand requests per second, as median (least–greatest). `aryk bench` measures every request's latency \
    at the same time, `blkio` here none. The ceilings are each front-end's own, against a thread that answers at once.";
