//! `cargo xtask bench scale`: thousands of disks on one daemon, most of them idle.
//!
//! The topology is a public cloud's: 48 VMs of 64 disks, over vhost-user-scsi (8 controllers × 8 targets each) or
//! vhost-user-blk (64 controllers). The bench measures the cost of the attached disks for the few that are used, their
//! cost while all are idle, and the time to create and delete them.

use crate::backend::{self, Policy};
use crate::fleet::{self, Backing, Blk, DEPTH, Fleet, Numbers, Scsi, Topology};
use crate::limited;
use crate::plot::{Data, Plot};
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rpc::Rpc;
use crate::settings::Settings;
use anyhow::{Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Disks under load.
const ACTIVE: usize = 10;
/// Runs that are compared in pairs.
pub const PAIRS: usize = 11;
/// Wait before a daemon counts as idle.
const SETTLE: Duration = Duration::from_secs(1);

/// Measures both topologies.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    // Three descriptors per queue.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    let mut tables = Tables::new(numbers::<Blk>(settings).total());
    topology::<Blk>(settings, report, &mut tables)?;
    topology::<Scsi>(settings, report, &mut tables)?;
    let mut limited = limited::Tables::new();
    limited::measure::<Blk>(settings, report, &mut limited)?;
    limited::measure::<Scsi>(settings, report, &mut limited)?;
    tables.add_to(report);
    limited.add_to(report);
    Ok(())
}

struct Tables {
    throughput: Section,
    /// In percent, turn by turn.
    shares: Vec<(String, Runs)>,
    cost: Section,
}

impl Tables {
    fn new(disks: usize) -> Self {
        let columns = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let loaded = format!(
            "Thousands of 4 KiB random reads a second of {ACTIVE} disks, {DEPTH} in flight each: of a daemon without other disks, and of a daemon with {disks} attached \
             disks, in turns; and the daemon's processor time for each request, which other work on the test machine changes less. Both shares of \
             the medians are to be ≥ 95 %."
        );
        let cost = "Each call follows the reply to the call before, on one connection; `attach` is the whole negotiation of a front-end until its queues run. Memory is \
            the daemon's anonymous memory (RssAnon), above that of a daemon without disks; the memory that it shares with the guests is the guests'.";
        Self {
            throughput: Section::new(
                "A few disks among thousands",
                &loaded,
                columns(&[
                    "disks",
                    "sleep policy",
                    "alone",
                    "among all",
                    "share %",
                    "ns alone",
                    "ns among all",
                    "share %",
                ]),
            ),
            cost: Section::new(
                "The cost of thousands of disks",
                cost,
                columns(&["what", "blk or scsi", "measured", "aim"]),
            ),
            shares: Vec::new(),
        }
    }

    fn add_to(mut self, report: &mut Report) {
        if !self.shares.is_empty() {
            self.throughput.plot(Plot {
                name: "few",
                title: "Ten disks among all, compared with ten alone".to_owned(),
                axis: "% of the throughput of ten alone in the turn before; the line is the aim".to_owned(),
                data: Data::Spreads { rows: self.shares, aim: Some(95.0) },
            });
        }
        report.section(self.throughput);
        report.section(self.cost);
    }
}

fn topology<T: Topology>(settings: &Settings, report: &mut Report, tables: &mut Tables) -> Result<()> {
    let cases = [
        (Policy::Adaptive, Backing::Null),
        (Policy::Poll, Backing::Null),
        (Policy::Adaptive, Backing::Memory),
        (Policy::Poll, Backing::Memory),
    ];
    for (policy, backing) in cases {
        let case = format!("scale/{}/{}/{}", T::NAME, backing.name(), policy.name());
        if !settings.wants(&case) {
            continue;
        }
        let few = Numbers { controllers: ACTIVE, disks: 1, per_vm: 1 };
        let alone = Side::<T>::start(settings, policy, backing, few, &format!("{case}-alone"))?;
        let among = Side::<T>::start(settings, policy, backing, numbers::<T>(settings), &case)?;
        report.command(&among.process.command);
        compare(settings, report, tables, &case, [alone, among])?;
    }
    Ok(())
}

/// The topology's size, smaller in a quick run.
pub const fn numbers<T: Topology>(settings: &Settings) -> Numbers {
    let all = T::ALL;
    if settings.quick { Numbers { controllers: all.controllers / 16, ..all } } else { all }
}

/// A daemon, and the front-ends attached to it.
struct Side<T: Topology> {
    fleet: Fleet<T>,
    process: Process,
    rpc: Rpc,
    numbers: Numbers,
    backing: Backing,
    policy: Policy,
    /// Seconds to create disks and controllers.
    created: f64,
    attached: f64,
    /// Memory in bytes and number of descriptors of all disks.
    memory: u64,
    descriptors: usize,
}

impl<T: Topology> Side<T> {
    fn start(
        settings: &Settings,
        policy: Policy,
        backing: Backing,
        numbers: Numbers,
        case: &str,
    ) -> Result<Self> {
        let dir: PathBuf = settings.sockets.path().join(case.replace('/', "-"));
        let (process, mut rpc) = backend::arykd(&settings.arykd, policy, &dir, None)?;
        let before = (process.memory()?, process.descriptors()?);
        let start = Instant::now();
        fleet::create::<T>(&mut rpc, numbers, backing)?;
        let created = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let fleet = Fleet::attach(&dir, numbers)?;
        let attached = start.elapsed().as_secs_f64();
        let memory = process.memory()?.saturating_sub(before.0);
        let descriptors = process.descriptors()? - before.1;
        Ok(Self { fleet, process, rpc, numbers, backing, policy, created, attached, memory, descriptors })
    }

    /// Throughput of the used disks in thousand requests per second, and the daemon's processor time per request, in ns.
    /// The daemon is stopped before and after.
    fn load(&mut self, settings: &Settings) -> Result<(f64, f64)> {
        self.process.resume()?;
        self.fleet.load(0..ACTIVE, settings.warm_up)?;
        let before = self.process.cpu_by_thread()?;
        let (requests, elapsed) = self.fleet.load(0..ACTIVE, settings.span)?;
        let used = self.process.cpu_since(&before)?;
        self.process.pause()?;
        let requests = requests.iter().sum::<u64>() as f64;
        Ok((requests / 1e3 / elapsed.as_secs_f64(), used.as_nanos() as f64 / requests))
    }

    /// Processor time in percent of a core without calls or requests.
    fn idle(&self, settings: &Settings) -> Result<f64> {
        std::thread::sleep(SETTLE);
        let (start, before) = (Instant::now(), self.process.cpu_by_thread()?);
        std::thread::sleep(settings.idle);
        let used = self.process.cpu_since(&before)?;
        Ok(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64())
    }
}

fn compare<T: Topology>(
    settings: &Settings,
    report: &mut Report,
    tables: &mut Tables,
    case: &str,
    [mut alone, mut among]: [Side<T>; 2],
) -> Result<()> {
    alone.process.pause()?;
    let tells_cost = among.backing == Backing::Null && among.policy == Policy::Adaptive;
    let idle = if tells_cost { among.idle(settings)? } else { f64::NAN };
    among.process.pause()?;
    let mut runs = [<[Runs; 2]>::default(), <[Runs; 2]>::default()];
    let pairs = if settings.quick { settings.runs } else { PAIRS };
    for _ in 0..pairs {
        for (side, [rates, times]) in [&mut alone, &mut among].into_iter().zip(&mut runs) {
            let (rate, time) = side.load(settings)?;
            rates.push(rate);
            times.push(time);
        }
    }
    among.process.resume()?;
    ensure!(among.fleet.are_connected(), "a session of {case} has ended");
    let [[few, few_time], [many, many_time]] = runs;
    report.records.push(Record::new(case, "10 disks among all", "1000/s", &many, &few));
    report.records.push(Record::new(case, "10 disks among all, processor time", "ns", &many_time, &few_time));
    let share = |ours: &Runs, alone: &Runs| {
        ours.median().zip(alone.median()).map_or(f64::NAN, |(a, b)| 100.0 * a / b)
    };
    let cells = [
        format!("{}, {}", T::NAME, among.backing.name()),
        among.policy.name().to_owned(),
        cell(&few, number),
        cell(&many, number),
        number(share(&many, &few)),
        cell(&few_time, number),
        cell(&many_time, number),
        number(share(&few_time, &many_time)),
    ];
    tables.shares.push((format!("{}, {}", cells[0], cells[1]), many.over(&few).scaled(100.0)));
    tables.throughput.row(cells.to_vec());
    if tells_cost {
        cost(report, tables, case, idle, among)?;
    }
    Ok(())
}

/// The cost of all disks, after they have been used.
fn cost<T: Topology>(
    report: &mut Report,
    tables: &mut Tables,
    case: &str,
    idle: f64,
    side: Side<T>,
) -> Result<()> {
    let Side { fleet, process, mut rpc, numbers, backing, created, attached, memory, descriptors, .. } = side;
    let start = Instant::now();
    drop(fleet);
    fleet::wait_until_detached(&mut rpc)?;
    let detached = start.elapsed().as_secs_f64();
    let start = Instant::now();
    fleet::delete(&mut rpc, numbers, backing)?;
    let deleted = start.elapsed().as_secs_f64();
    let total = numbers.total();
    let each = |all: f64| all / total as f64;
    let rows = [
        (format!("create {total} disks and their controllers"), "s", created, "create + attach < 10"),
        (format!("attach to {} controllers", numbers.controllers), "s", attached, ""),
        ("processor time, all attached and idle".to_owned(), "% of a core", idle, "< 2"),
        ("memory".to_owned(), "KiB a disk", each(memory as f64 / 1024.0), "≤ 1024"),
        ("descriptors".to_owned(), "a disk", each(descriptors as f64), ""),
        ("detach".to_owned(), "s", detached, ""),
        ("delete controllers and disks".to_owned(), "s", deleted, "< 10"),
    ];
    for (what, unit, value, aim) in rows {
        let runs: Runs = std::iter::once(value).collect();
        report.records.push(Record::new(case, &what, unit, &runs, &Runs::default()));
        let value = format!("{} {unit}", number(value));
        tables.cost.row(vec![what, T::NAME.to_owned(), value, aim.to_owned()]);
    }
    drop(process);
    Ok(())
}
