//! Closed loops: a fixed number of requests in flight, as fast as they come back. `arykd` and its peers take turns, so
//! that what else the machine does meets all of them.

use crate::backend::{self, BackEnd, Store};
use crate::ceiling::Ceilings;
use crate::fio;
use crate::frontend::FrontEnd;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use crate::workload::{self, Workload};
use anyhow::Result;
use std::path::PathBuf;

/// The stores, in order.
pub const CASES: [&str; 3] = ["null", "memory", "file"];

/// What is measured beside `arykd`.
#[derive(Debug)]
enum Peer {
    Daemon(&'static str, BackEnd),
    Fio(PathBuf),
}

impl Peer {
    const fn name(&self) -> &'static str {
        match self {
            Self::Daemon(name, _) => name,
            Self::Fio(_) => "fio io_uring",
        }
    }

    /// Requests per second.
    fn run(&mut self, settings: &Settings, workload: &Workload) -> Result<f64> {
        match self {
            Self::Daemon(_, daemon) => Ok(run(settings, daemon, workload)?.rate),
            Self::Fio(file) => fio::rate(workload, file, settings.warm_up, settings.span),
        }
    }
}

struct Run {
    /// Requests per second.
    rate: f64,
    /// Work of the daemon's reactors for each, in ns; if it has any.
    busy: Option<f64>,
}

/// The ratios that are aimed for, in the order of [`peers`].
fn aims(case: &str, workload: &Workload) -> &'static [f64] {
    match (case, workload.sequential, workload.depth) {
        ("null", false, 1) => &[4.0],
        ("null", false, 32) => &[2.6],
        ("null", false, 128) => &[2.5],
        ("memory", false, 32) => &[8.0],
        ("file", false, 32) => &[1.3, 0.95],
        _ => &[],
    }
}

/// The busy time per request that is aimed for, in ns.
fn busy_aim(case: &str, workload: &Workload) -> Option<f64> {
    match (case, workload.sequential, workload.depth) {
        (_, true, _) | (_, _, 1) => None,
        ("null", ..) => Some(250.0),
        ("memory", ..) => Some(600.0),
        _ => None,
    }
}

/// The workloads of a case that were asked for.
pub fn wanted(settings: &Settings, case: &str) -> Vec<Workload> {
    let wants = |workload: &Workload| settings.wants(&format!("{case}/{}", workload.name()));
    workload::all().into_iter().filter(wants).collect()
}

/// Measures all that was asked for on one kind of store.
pub fn measure(settings: &Settings, case: &str, ceilings: &mut Ceilings, report: &mut Report) -> Result<()> {
    let workloads = wanted(settings, case);
    if workloads.is_empty() {
        return Ok(());
    }
    let store = settings.store(case)?;
    let dir = settings.sockets.path();
    let mut aryk =
        backend::aryk(&settings.arykd, settings.policy, &store, &dir.join(format!("aryk-{case}")))?;
    if matches!(store, Store::Memory { .. }) {
        FrontEnd::connect(&aryk.socket, 1)?.fill_disk()?;
    }
    let mut peers = peers(settings, case, &store)?;
    report.command(&aryk.process.command);
    aryk.process.pause()?;
    let mut columns = vec!["workload".to_owned(), "arykd".to_owned()];
    for peer in &peers {
        columns.extend([peer.name().to_owned(), "ratio".to_owned()]);
        match peer {
            Peer::Daemon(_, daemon) => {
                report.command(&daemon.process.command);
                daemon.process.pause()?;
            }
            Peer::Fio(file) => {
                report.command(&fio::command(&workloads[0], file, settings.warm_up, settings.span));
            }
        }
    }
    columns.extend(["busy ns per request", "front-end's ceiling"].map(str::to_owned));
    let mut section = Section::new(&format!("Closed loop: {case}"), INTRO, columns);
    for workload in &workloads {
        let row = compare(settings, case, workload, &mut aryk, &mut peers, ceilings, report)?;
        section.row(row);
    }
    report.section(section);
    Ok(())
}

const INTRO: &str = "Thousand requests per second (128 KiB: GB/s), as median (least–greatest). A ratio counts where the \
    front-end can do at least 1.3 times the result; elsewhere the front-end is what was measured.";

fn peers(settings: &Settings, case: &str, store: &Store) -> Result<Vec<Peer>> {
    let daemon = |name, aio| {
        let dir = settings.sockets.path().join(format!("peer-{case}-{aio}"));
        backend::peer(store, aio, &dir).map(|daemon| Peer::Daemon(name, daemon))
    };
    Ok(match store {
        Store::Null { .. } => vec![daemon("qemu-storage-daemon", "threads")?],
        // Its default, and what is faster.
        Store::Memory { .. } => {
            vec![
                daemon("qemu-storage-daemon", "threads")?,
                daemon("qemu-storage-daemon, io_uring", "io_uring")?,
            ]
        }
        Store::File { path, .. } => vec![daemon("qemu-storage-daemon", "io_uring")?, Peer::Fio(path.clone())],
    })
}

/// One workload on all sides in turn; the table's row.
fn compare(
    settings: &Settings,
    case: &str,
    workload: &Workload,
    aryk: &mut BackEnd,
    peers: &mut [Peer],
    ceilings: &mut Ceilings,
    report: &mut Report,
) -> Result<Vec<String>> {
    let (mut ours, mut busy) = (Runs::default(), Runs::default());
    let mut theirs = vec![Runs::default(); peers.len()];
    for _ in 0..settings.runs {
        let done = run(settings, aryk, workload)?;
        ours.push(done.rate);
        done.busy.into_iter().for_each(|ns| busy.push(ns));
        for (peer, runs) in peers.iter_mut().zip(&mut theirs) {
            runs.push(peer.run(settings, workload)?);
        }
    }
    let name = format!("{case}/{}", workload.name());
    let (unit, factor, shown) = units(workload);
    let show = |rate: f64| number(rate * shown);
    let fastest = theirs.iter().chain([&ours]).filter_map(Runs::spread).map(|[_, most]| most);
    fastest.for_each(|rate| ceilings.seen(workload, rate));
    let ceiling = ceilings.of(workload);
    let bound = ceiling.zip(ours.median()).is_some_and(|(most, ours)| most < 1.3 * ours);
    let mut row = vec![workload.name(), cell(&ours, show)];
    for (i, (peer, runs)) in peers.iter().zip(&theirs).enumerate() {
        let metric = format!("throughput, peer {}", peer.name());
        let mut record = Record::new(&name, &metric, unit, &ours.scaled(factor), &runs.scaled(factor));
        if bound {
            record.ratio = None;
        }
        let aim = aims(case, workload).get(i).map_or(String::new(), |aim| format!(" (aim {aim})"));
        let ratio = record.ratio.map_or("front-end bound".to_owned(), number);
        row.extend([cell(runs, show), ratio + &aim]);
        report.records.push(record);
    }
    let aim = busy_aim(case, workload);
    let cell = cell(&busy, number) + &aim.map_or(String::new(), |aim| format!(" (aim {aim})"));
    row.extend([cell, ceiling.map_or("–".to_owned(), show)]);
    if aim.is_some() {
        report.records.push(Record::new(&name, "busy time per request", "ns", &busy, &Runs::default()));
    }
    Ok(row)
}

/// The unit of a workload's throughput; how many of it a request is, and how many of what the table shows.
const fn units(workload: &Workload) -> (&'static str, f64, f64) {
    if workload.sequential {
        ("B/s", workload.block as f64, workload.block as f64 / 1e9)
    } else {
        ("IOPS", 1.0, 1e-3)
    }
}

/// One run against one daemon; it holds still before and after.
fn run(settings: &Settings, back_end: &mut BackEnd, workload: &Workload) -> Result<Run> {
    back_end.process.resume()?;
    let mut front_end = FrontEnd::connect(&back_end.socket, settings.queues)?;
    front_end.closed(workload, settings.warm_up)?;
    let before = back_end.busy()?;
    let closed = front_end.closed(workload, settings.span)?;
    let after = back_end.busy()?;
    drop(front_end);
    back_end.process.pause()?;
    let busy = before.zip(after).map(|(before, after)| (after - before) / closed.requests as f64);
    Ok(Run { rate: closed.rate(), busy })
}
