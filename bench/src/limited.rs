//! The second part of `cargo xtask bench scale`: limits on all disks and all VMs, first not reached and then in effect,
//! and metrics scrapes of all disks.
//!
//! Eight disks of each VM are used. First, half of the VMs have limits that their load does not reach, and run in turns
//! with the other half; then each VM runs at its limit.

use crate::backend::{self, Policy};
use crate::fleet::{self, Backing, Fleet, Numbers, Topology};
use crate::plot::{Data, Plot};
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rpc::Rpc;
use crate::scale::numbers;
use crate::settings::Settings;
use anyhow::{Result, ensure};
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Disks per VM that are used.
const USED: usize = 8;
/// Limits that the load does not reach.
const LOOSE: (u64, u64) = (10_000_000, 100_000_000);
/// The limit of a VM, and of each of its disks.
const RATE: u64 = 6000;
const OF_A_DISK: u64 = 3000;
/// Turns per run of each half of the VMs; a turn takes a tenth of a measurement, so that both halves see the same state
/// of the test machine.
const TURNS: u32 = 10;
/// Pairs of turns with and without scrapes.
const PAIRS: usize = 11;
/// Scrapes per second.
const SCRAPES: u32 = 4;

/// The tables of both topologies.
pub struct Tables {
    loose: Section,
    binding: Section,
    scrapes: Section,
    /// Throughput with limits that are not reached, in percent of that without limits, per run.
    shares: Vec<(String, Runs)>,
    /// Throughput of each VM, in percent of its limit.
    vms: Vec<(String, Runs)>,
}

impl Tables {
    /// Creates empty tables.
    pub fn new() -> Self {
        let section = |title, text: &str, columns: &[&str]| {
            Section::new(title, text, columns.iter().map(|&name| name.to_owned()).collect())
        };
        Self {
            loose: section(
                "Overhead of limits that are not hit",
                "Thousands of 4 KiB random reads a second of eight disks of each of 24 VMs, 16 in flight each, and the reactor's busy time per request: of VMs \
                 without any limit, and of as many VMs with a limit on each disk and one on each VM's group. All VMs are attached at the same time, and run in turns of a tenth of the span \
                 above: ten turns each per run, and ten more after both halves have exchanged their limits. A run's share is the geometric mean of both medians of the ratio of each turn to the turn before it.",
                &[
                    "disks",
                    "sleep policy",
                    "none",
                    "all",
                    "share % (aim 95)",
                    "busy ns, none",
                    "busy ns, all",
                ],
            ),
            binding: section(
                "VMs at their limits",
                "The same load, with a limit of 6,000 requests a second on each VM's group and of 3,000 on each disk: the VMs' throughput, in percent of their limits. `limit` is the \
                 time to create the groups, add all disks and limit all, each call after the reply to the call before.",
                &["disks", "sleep policy", "all VMs", "least", "most", "reactor busy, %", "limit, s"],
            ),
            scrapes: section(
                "Metrics scrapes of all disks",
                "A scrape of all metrics over a UNIX socket, and the reactor's busy time per request with four scrapes a second and with none.",
                &[
                    "disks",
                    "sleep policy",
                    "MB (aim 16)",
                    "ms (aim 250)",
                    "busy ns, none",
                    "busy ns, scraped",
                ],
            ),
            shares: Vec::new(),
            vms: Vec::new(),
        }
    }

    /// Adds the tables and plots to the report.
    pub fn add_to(mut self, report: &mut Report) {
        if !self.shares.is_empty() {
            self.loose.plot(Plot {
                name: "loose",
                title: "Overhead of limits that are not hit".to_owned(),
                axis: "% of the throughput without limits; the line is the aim".to_owned(),
                data: Data::Spreads { rows: self.shares, aim: Some(95.0) },
            });
            self.binding.plot(Plot {
                name: "vms",
                title: "Throughput of each VM".to_owned(),
                axis: "% of its 6,000 requests a second".to_owned(),
                data: Data::Spreads { rows: self.vms, aim: None },
            });
        }
        [self.loose, self.binding, self.scrapes].into_iter().for_each(|section| report.section(section));
    }
}

/// A daemon with all disks attached.
struct Rig<T: Topology> {
    fleet: Fleet<T>,
    _process: Process,
    rpc: Rpc,
    numbers: Numbers,
    metrics: PathBuf,
}

impl<T: Topology> Rig<T> {
    fn vms(&self) -> Range<usize> {
        0..self.numbers.vms()
    }

    /// Every other VM: those with an even number, or as many with an odd number.
    fn half(&self, odd: usize) -> impl Iterator<Item = usize> + use<T> {
        (odd..self.numbers.vms() / 2 * 2).step_by(2)
    }

    /// Loads eight disks of each of the VMs; returns the requests per VM, the elapsed time and the reactor's busy time,
    /// in ns.
    fn load(&mut self, vms: impl Iterator<Item = usize>, span: Duration) -> Result<(Vec<f64>, f64, f64)> {
        let per_vm = self.numbers.per_vm;
        let used = vms.flat_map(|vm| (vm * per_vm..).take(USED));
        let before = self.rpc.busy()?;
        let (done, elapsed) = self.fleet.load(used, span)?;
        let busy = self.rpc.busy()? - before;
        let vms = done.chunks(USED).map(|disks| disks.iter().sum::<u64>() as f64).collect();
        Ok((vms, elapsed.as_secs_f64(), busy))
    }
}

/// Measures one topology.
pub fn measure<T: Topology>(settings: &Settings, report: &mut Report, tables: &mut Tables) -> Result<()> {
    // The store changes only how large the overhead of limits is beside it.
    let cases =
        [(Backing::Null, Policy::Adaptive), (Backing::Null, Policy::Poll), (Backing::Memory, Policy::Poll)];
    for (backing, policy) in cases {
        let case = format!("limited/{}/{}/{}", T::NAME, backing.name(), policy.name());
        if !settings.wants(&case) {
            continue;
        }
        let dir = settings.sockets.path().join(case.replace('/', "-"));
        let (process, mut rpc) = backend::arykd(&settings.arykd, policy, &dir, None)?;
        report.command(&process.command);
        let numbers = numbers::<T>(settings);
        fleet::create::<T>(&mut rpc, numbers, backing)?;
        let fleet = Fleet::attach(&dir, numbers)?;
        let metrics = dir.join(backend::METRICS);
        let mut rig = Rig::<T> { fleet, _process: process, rpc, numbers, metrics };
        rig.load(rig.vms(), settings.warm_up)?;
        let start = Instant::now();
        fleet::group::<T>(&mut rig.rpc, numbers)?;
        let grouped = start.elapsed().as_secs_f64();
        let names = [format!("{}, {}", T::NAME, backing.name()), policy.name().to_owned()];
        loose(settings, report, tables, &case, &names, &mut rig)?;
        if backing == Backing::Null {
            binding(settings, report, tables, &case, &names, (&mut rig, grouped))?;
            fleet::limit(&mut rig.rpc, numbers, 0..numbers.vms(), (0, 0))?;
            scrapes(settings, report, &mut tables.scrapes, &case, &names, &mut rig)?;
        }
        ensure!(rig.fleet.are_connected(), "a session of {case} has ended");
        let Rig { fleet, mut rpc, .. } = rig;
        drop(fleet);
        fleet::wait_until_detached(&mut rpc)?;
        fleet::delete(&mut rpc, numbers, backing)?;
        fleet::ungroup(&mut rpc, numbers)?;
    }
    Ok(())
}

/// Throughput in thousand requests per second and busy time per request, turn by turn: of the half without limits, and of
/// the half with limits.
fn in_turns<T: Topology>(settings: &Settings, rig: &mut Rig<T>, limited: usize) -> Result<[[Runs; 2]; 2]> {
    let halves = [1 - limited, limited];
    for (half, limits) in halves.into_iter().zip([(0, 0), LOOSE]) {
        let vms = rig.half(half);
        fleet::limit(&mut rig.rpc, rig.numbers, vms, limits)?;
    }
    rig.load(rig.vms(), settings.warm_up / 2)?;
    let mut turns = <[[Runs; 2]; 2]>::default();
    for _ in 0..TURNS {
        for (half, [rates, busy]) in halves.into_iter().zip(&mut turns) {
            let (vms, seconds, worked) = rig.load(rig.half(half), settings.span / TURNS)?;
            let requests: f64 = vms.iter().sum();
            rates.push(requests / seconds / 1e3);
            busy.push(worked / requests);
        }
    }
    Ok(turns)
}

fn loose<T: Topology>(
    settings: &Settings,
    report: &mut Report,
    tables: &mut Tables,
    case: &str,
    names: &[String; 2],
    rig: &mut Rig<T>,
) -> Result<()> {
    let mut sides = [<[Runs; 2]>::default(), <[Runs; 2]>::default()];
    let mut share = Runs::default();
    for _ in 0..settings.runs {
        let mut product = 1.0;
        for limited in [0, 1] {
            let [none, all] = in_turns(settings, rig, limited)?;
            product *= all[0].over(&none[0]).median().expect("there were turns");
            for (side, turns) in sides.iter_mut().zip([none, all]) {
                let medians = turns.iter().map(|turns| turns.median().expect("there were turns"));
                side.iter_mut().zip(medians).for_each(|(runs, median)| runs.push(median));
            }
        }
        share.push(100.0 * f64::sqrt(product));
    }
    let [[none, none_busy], [all, all_busy]] = sides;
    report.records.push(Record::new(case, "limits that are not hit", "1000/s", &all, &none));
    tables.shares.push((names.join(", "), share.clone()));
    let cells = [none, all, share, none_busy, all_busy].map(|runs| cell(&runs, number));
    tables.loose.row([&names[..], &cells].concat());
    Ok(())
}

fn binding<T: Topology>(
    settings: &Settings,
    report: &mut Report,
    tables: &mut Tables,
    case: &str,
    names: &[String; 2],
    (rig, grouped): (&mut Rig<T>, f64),
) -> Result<()> {
    let start = Instant::now();
    let vms = rig.vms();
    fleet::limit(&mut rig.rpc, rig.numbers, vms, (OF_A_DISK, RATE))?;
    let limited = start.elapsed().as_secs_f64() + grouped;
    rig.load(rig.vms(), settings.warm_up)?;
    let [mut all, mut each, mut busy] = <[Runs; 3]>::default();
    for _ in 0..settings.runs {
        let (vms, seconds, worked) = rig.load(rig.vms(), settings.span)?;
        busy.push(100.0 * worked / 1e9 / seconds);
        let percent = |requests: f64| 100.0 * requests / seconds / RATE as f64;
        all.push(percent(vms.iter().sum::<f64>() / vms.len() as f64));
        vms.into_iter().for_each(|requests| each.push(percent(requests)));
    }
    report.records.push(Record::new(case, "each VM, of its limit", "%", &each, &Runs::default()));
    let [least, most] = each.spread().unwrap_or([f64::NAN; 2]);
    let cells = vec![cell(&all, number), number(least), number(most), cell(&busy, number), number(limited)];
    tables.binding.row([names.to_vec(), cells].concat());
    tables.vms.push((names.join(", "), each));
    Ok(())
}

fn scrapes<T: Topology>(
    settings: &Settings,
    report: &mut Report,
    section: &mut Section,
    case: &str,
    names: &[String; 2],
    rig: &mut Rig<T>,
) -> Result<()> {
    let (mut bytes, mut times) = (Runs::default(), Runs::default());
    for _ in 0..settings.runs {
        // The daemon answers scrapes in quick succession from the same collection.
        std::thread::sleep(Duration::from_secs(1) / SCRAPES);
        let start = Instant::now();
        bytes.push(scrape(&rig.metrics)? as f64 / 1e6);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut sides = [Runs::default(), Runs::default()];
    for _ in 0..if settings.quick { 1 } else { PAIRS } {
        for (is_scraped, busy) in [false, true].into_iter().zip(&mut sides) {
            let metrics = rig.metrics.clone();
            let count =
                if is_scraped { (settings.span.as_secs_f64() * f64::from(SCRAPES)) as u32 } else { 0 };
            let scraper = std::thread::spawn(move || -> Result<()> {
                for _ in 0..count {
                    scrape(&metrics)?;
                    std::thread::sleep(Duration::from_secs(1) / SCRAPES);
                }
                Ok(())
            });
            let (vms, _, worked) = rig.load(rig.vms(), settings.span)?;
            busy.push(worked / vms.iter().sum::<f64>());
            scraper.join().expect("it does not panic")?;
        }
    }
    let [none, scraped] = sides;
    report.records.push(Record::new(case, "scrape", "ms", &times, &Runs::default()));
    report.records.push(Record::new(case, "busy while scraped", "ns", &scraped, &none));
    let cells = [bytes, times, none, scraped].map(|runs| cell(&runs, number));
    section.row([names.to_vec(), cells.to_vec()].concat());
    Ok(())
}

/// Scrapes the metrics; returns the bytes of the reply.
fn scrape(socket: &PathBuf) -> Result<usize> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "a scrape was refused");
    Ok(answer.len())
}
