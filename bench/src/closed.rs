//! Closed loops: a fixed number of requests in flight, each replaced when it completes. `arykd` and its peers take turns,
//! so that other work on the test machine affects all of them.

use crate::backend::{self, BackEnd, Store};
use crate::ceiling::Ceilings;
use crate::fio;
use crate::frontend::FrontEnd;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::settings::Settings;
use crate::workload::{self, Workload};
use anyhow::Result;
use std::path::PathBuf;

/// The stores, in order.
pub const CASES: [&str; 3] = ["null", "memory", "file"];

/// The store of `cargo xtask bench crypto`.
pub const CRYPTO: &str = "crypto";

/// The peers of `arykd`.
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
    /// Busy time of the daemon's reactors per request, in ns; `None` for a daemon that does not report it.
    busy: Option<f64>,
}

/// The target ratios, in the order of [`peers`].
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

/// The target busy time per request, in ns.
fn busy_aim(case: &str, workload: &Workload) -> Option<f64> {
    match (case, workload.sequential, workload.depth) {
        (_, true, _) | (_, _, 1) => None,
        ("null", ..) => Some(250.0),
        ("memory", ..) => Some(600.0),
        _ => None,
    }
}

/// The workloads of a case that the command line selects.
pub fn wanted(settings: &Settings, case: &str) -> Vec<Workload> {
    let wants = |workload: &Workload| settings.wants(&format!("{case}/{}", workload.name()));
    workload::all().into_iter().filter(wants).collect()
}

/// Measures the selected workloads on one kind of store.
pub fn measure(settings: &Settings, case: &str, ceilings: &Ceilings, report: &mut Report) -> Result<()> {
    let workloads = wanted(settings, case);
    if workloads.is_empty() {
        return Ok(());
    }
    let store = settings.store(case)?;
    let dir = settings.sockets.path();
    let mut aryk =
        backend::aryk(&settings.arykd, settings.policy, &store, &dir.join(format!("aryk-{case}")))?;
    if matches!(store, Store::Memory { .. } | Store::Luks { .. }) {
        FrontEnd::fill(&aryk.socket)?;
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
    columns.extend(["busy ns per request", "front-end's ceiling", "core to core, ns"].map(str::to_owned));
    let intro = if case == CRYPTO { format!("{CRYPTO_INTRO} {INTRO}") } else { INTRO.to_owned() };
    let mut section = Section::new(&format!("Closed loop: {case}"), &intro, columns);
    for workload in &workloads {
        let row = compare(settings, case, workload, &mut aryk, &mut peers, ceilings, report)?;
        section.row(row);
    }
    report.section(section);
    Ok(())
}

const INTRO: &str = "Thousand requests per second (128 KiB: GB/s), as median (least–greatest). A ratio counts where the \
    front-end's ceiling is at least 1.3 times the result; elsewhere the front-end is what was measured. \
    In all rounds of a row, a cache line took about as long from core to core and back as the last column \
    says.";

const CRYPTO_INTRO: &str = "All sides but the last use one LUKS1 file in /dev/shm in turn (AES-256-XTS, sectors of 512 bytes), which \
    `qemu-img` has created. The last one is `arykd` with a crypto disk over memory of its own: the ratio shows the cost of the file.";

fn peers(settings: &Settings, case: &str, store: &Store) -> Result<Vec<Peer>> {
    let daemon = |name, aio| {
        let dir = settings.sockets.path().join(format!("peer-{case}-{aio}"));
        backend::peer(store, aio, &dir).map(|daemon| Peer::Daemon(name, daemon))
    };
    Ok(match store {
        Store::Null { .. } => vec![daemon("qemu-storage-daemon", "threads")?],
        // `qemu-storage-daemon`'s default engine, and the faster one.
        Store::Memory { .. } | Store::Encrypted { .. } | Store::Luks { .. } => {
            let mut peers = vec![
                daemon("qemu-storage-daemon", "threads")?,
                daemon("qemu-storage-daemon, io_uring", "io_uring")?,
            ];
            if matches!(store, Store::Luks { .. }) {
                let (memory, dir) = (Store::Encrypted { size: settings.size() }, settings.sockets.path());
                let aryk =
                    backend::aryk(&settings.arykd, settings.policy, &memory, &dir.join("aryk-encrypted"))?;
                FrontEnd::fill(&aryk.socket)?;
                peers.push(Peer::Daemon("arykd, encrypted memory", aryk));
            }
            peers
        }
        Store::File { path } => vec![daemon("qemu-storage-daemon", "io_uring")?, Peer::Fio(path.clone())],
    })
}

/// Measures one workload on all sides in turn, and adds the table's row.
fn compare(
    settings: &Settings,
    case: &str,
    workload: &Workload,
    aryk: &mut BackEnd,
    peers: &mut [Peer],
    ceilings: &Ceilings,
    report: &mut Report,
) -> Result<Vec<String>> {
    let rounds = rounds::run_comparable(settings.runs, || round(settings, workload, aryk, peers, ceilings))?;
    let runs = |of: &dyn Fn(&Round) -> Option<f64>| rounds.each.iter().filter_map(of).collect::<Runs>();
    let (ours, busy) = (runs(&|round| Some(round.ours.rate)), runs(&|round| round.ours.busy));
    let name = format!("{case}/{}", workload.name());
    let (unit, factor, shown) = units(workload);
    let show = |rate: f64| number(rate * shown);
    // The front-end's ceiling is at least the best result of any back-end.
    let fastest =
        |round: &Round| round.peers.iter().copied().fold(round.ceiling.max(round.ours.rate), f64::max);
    let ceiling = rounds.each.iter().map(fastest).fold(0.0, f64::max);
    let bound = ours.median().is_some_and(|ours| ceiling < 1.3 * ours);
    let mut row = vec![workload.name(), cell(&ours, show)];
    for (i, peer) in peers.iter().enumerate() {
        let theirs = runs(&|round| round.peers.get(i).copied());
        let metric = format!("throughput, peer {}", peer.name());
        let mut record = Record::new(&name, &metric, unit, &ours.scaled(factor), &theirs.scaled(factor));
        if bound {
            record.ratio = None;
        }
        let aim = aims(case, workload).get(i).map_or(String::new(), |aim| format!(" (aim {aim})"));
        let ratio = record.ratio.map_or("front-end bound".to_owned(), number);
        row.extend([cell(&theirs, show), ratio + &aim]);
        report.records.push(record);
    }
    let aim = busy_aim(case, workload);
    let cell = cell(&busy, number) + &aim.map_or(String::new(), |aim| format!(" (aim {aim})"));
    row.extend([cell, show(ceiling), rounds.round_trip.as_nanos().to_string()]);
    if aim.is_some() {
        report.records.push(Record::new(&name, "busy time per request", "ns", &busy, &Runs::default()));
    }
    Ok(row)
}

/// The results of one round, in which each side ran once.
struct Round {
    ours: Run,
    peers: Vec<f64>,
    /// The front-end's request rate without a disk.
    ceiling: f64,
}

fn round(
    settings: &Settings,
    workload: &Workload,
    aryk: &mut BackEnd,
    peers: &mut [Peer],
    ceilings: &Ceilings,
) -> Result<Round> {
    let ours = run(settings, aryk, workload)?;
    let peers = peers.iter_mut().map(|peer| peer.run(settings, workload)).collect::<Result<_>>()?;
    Ok(Round { ours, peers, ceiling: ceilings.measure_again(settings, workload)? })
}

/// The unit of a workload's throughput, the amount of one request in it, and the amount of one unit of the table in it.
const fn units(workload: &Workload) -> (&'static str, f64, f64) {
    if workload.sequential {
        ("B/s", workload.block as f64, workload.block as f64 / 1e9)
    } else {
        ("IOPS", 1.0, 1e-3)
    }
}

/// Runs one workload against one daemon, which is stopped before and after.
fn run(settings: &Settings, back_end: &mut BackEnd, workload: &Workload) -> Result<Run> {
    back_end.process.resume()?;
    let mut front_end = FrontEnd::connect(&back_end.socket, settings.queues, *workload)?;
    front_end.closed(settings.warm_up)?;
    let before = back_end.busy()?;
    let closed = front_end.closed(settings.span)?;
    let after = back_end.busy()?;
    drop(front_end);
    back_end.process.pause()?;
    let busy = before.zip(after).map(|(before, after)| (after - before) / closed.requests as f64);
    Ok(Run { rate: closed.rate(), busy })
}
