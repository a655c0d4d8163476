//! The other part of `cargo xtask bench scale`: limits on all disks and all machines, at work or not, and looks at all of it.
//!
//! Eight disks of each machine are used. First half of the machines have limits that nobody reaches, and work in turns with the others; then each machine
//! is held to its rate.

use crate::backend::{self, Policy};
use crate::fleet::{self, Backing, Fleet, Numbers, Topology};
use crate::plot::{Of, Plot};
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

/// Disks of a machine that are used.
const USED: usize = 8;
/// Limits that nobody reaches.
const LOOSE: (u64, u64) = (10_000_000, 100_000_000);
/// What a machine is held to, and each of its disks by itself.
const RATE: u64 = 6000;
const OF_A_DISK: u64 = 3000;
/// Turns of each half of the machines in a run, of a tenth of a measurement each: neighbours in time see the same machine.
const TURNS: u32 = 10;
/// Turns with scrapes, and without.
const PAIRS: usize = 11;
/// Scrapes in a second, while they are measured.
const SCRAPES: u32 = 4;

/// The tables of both topologies.
pub struct Tables {
    loose: Section,
    binding: Section,
    looks: Section,
    /// Of limits that nobody reaches, run by run in percent.
    shares: Vec<(String, Runs)>,
    /// What each machine got, in percent of its limit.
    machines: Vec<(String, Runs)>,
}

impl Tables {
    /// Empty ones.
    pub fn new() -> Self {
        let section = |title, text: &str, columns: &[&str]| {
            Section::new(title, text, columns.iter().map(|&name| name.to_owned()).collect())
        };
        Self {
            loose: section(
                "Limits that nobody reaches",
                "Thousands of 4 KiB random reads a second of eight disks of each of 24 machines, 16 in flight each, and what a reactor works for a request: of machines \
                 without any limit, and of as many with one on each disk and one on each machine's group. All are there at one time, and work in turns of a tenth of what is said \
                 above: in each run ten of each, and ten more after they have exchanged their limits. A run's share is the geometric mean of both medians, of each turn and the one before it.",
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
                "Machines at their limits",
                "The same load, where each machine's group is held to 6,000 requests a second and each disk to 3,000: what machines get, in percent of that. `limit` is how \
                 long it took to make the groups, put all disks into them and limit all, by calls one after the other's reply.",
                &["disks", "sleep policy", "all machines", "least", "most", "reactor busy, %", "limit, s"],
            ),
            looks: section(
                "Looking at all of it",
                "A scrape of all metrics by a UNIX socket, and what a reactor works for a request while there are four a second, beside none.",
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
            machines: Vec::new(),
        }
    }

    /// Into the report.
    pub fn tell(mut self, report: &mut Report) {
        if !self.shares.is_empty() {
            self.loose.plot(Plot {
                name: "loose",
                title: "Limits that nobody reaches".to_owned(),
                axis: "% of the throughput without limits; the line is the aim".to_owned(),
                of: Of::Spreads { rows: self.shares, aim: Some(95.0) },
            });
            self.binding.plot(Plot {
                name: "machines",
                title: "What each of the machines gets".to_owned(),
                axis: "% of its 6,000 requests a second".to_owned(),
                of: Of::Spreads { rows: self.machines, aim: None },
            });
        }
        [self.loose, self.binding, self.looks].into_iter().for_each(|section| report.section(section));
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
    fn machines(&self) -> Range<usize> {
        0..self.numbers.machines()
    }

    /// Every other machine: those with an even number, or as many with an odd one.
    fn half(&self, odd: usize) -> impl Iterator<Item = usize> + use<T> {
        (odd..self.numbers.machines() / 2 * 2).step_by(2)
    }

    /// What eight disks of each of the `machines` did, by machine; its time, and the time that the reactor worked, in ns.
    fn load(
        &mut self,
        machines: impl Iterator<Item = usize>,
        span: Duration,
    ) -> Result<(Vec<f64>, f64, f64)> {
        let of_a_machine = self.numbers.of_a_machine;
        let used = machines.flat_map(|machine| (machine * of_a_machine..).take(USED));
        let before = self.rpc.busy()?;
        let (done, elapsed) = self.fleet.load(used, span)?;
        let busy = self.rpc.busy()? - before;
        let machines = done.chunks(USED).map(|disks| disks.iter().sum::<u64>() as f64).collect();
        Ok((machines, elapsed.as_secs_f64(), busy))
    }
}

/// Measures one topology.
pub fn measure<T: Topology>(settings: &Settings, report: &mut Report, tables: &mut Tables) -> Result<()> {
    // What holds the data changes what limits cost beside it, and nothing else.
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
        rig.load(rig.machines(), settings.warm_up)?;
        let start = Instant::now();
        fleet::group::<T>(&mut rig.rpc, numbers)?;
        let grouped = start.elapsed().as_secs_f64();
        let names = [format!("{}, {}", T::NAME, backing.name()), policy.name().to_owned()];
        loose(settings, report, tables, &case, &names, &mut rig)?;
        if backing == Backing::Null {
            binding(settings, report, tables, &case, &names, (&mut rig, grouped))?;
            fleet::limit(&mut rig.rpc, numbers, 0..numbers.machines(), (0, 0))?;
            looks(settings, report, &mut tables.looks, &case, &names, &mut rig)?;
        }
        ensure!(rig.fleet.are_well(), "a session of {case} has ended");
        let Rig { fleet, mut rpc, .. } = rig;
        drop(fleet);
        fleet::wait_until_detached(&mut rpc)?;
        fleet::delete(&mut rpc, numbers, backing)?;
        fleet::ungroup(&mut rpc, numbers)?;
    }
    Ok(())
}

/// Thousands of requests a second and the reactor's time for one, turn by turn: of the half without limits, and of the one that has some.
fn in_turns<T: Topology>(settings: &Settings, rig: &mut Rig<T>, limited: usize) -> Result<[[Runs; 2]; 2]> {
    let halves = [1 - limited, limited];
    for (half, limits) in halves.into_iter().zip([(0, 0), LOOSE]) {
        let machines = rig.half(half);
        fleet::limit(&mut rig.rpc, rig.numbers, machines, limits)?;
    }
    rig.load(rig.machines(), settings.warm_up / 2)?;
    let mut turns = <[[Runs; 2]; 2]>::default();
    for _ in 0..TURNS {
        for (half, [rates, busy]) in halves.into_iter().zip(&mut turns) {
            let (machines, seconds, worked) = rig.load(rig.half(half), settings.span / TURNS)?;
            let requests: f64 = machines.iter().sum();
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
    report.records.push(Record::new(case, "limits that nobody reaches", "1000/s", &all, &none));
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
    let machines = rig.machines();
    fleet::limit(&mut rig.rpc, rig.numbers, machines, (OF_A_DISK, RATE))?;
    let limited = start.elapsed().as_secs_f64() + grouped;
    rig.load(rig.machines(), settings.warm_up)?;
    let [mut all, mut each, mut busy] = <[Runs; 3]>::default();
    for _ in 0..settings.runs {
        let (machines, seconds, worked) = rig.load(rig.machines(), settings.span)?;
        busy.push(100.0 * worked / 1e9 / seconds);
        let percent = |requests: f64| 100.0 * requests / seconds / RATE as f64;
        all.push(percent(machines.iter().sum::<f64>() / machines.len() as f64));
        machines.into_iter().for_each(|requests| each.push(percent(requests)));
    }
    report.records.push(Record::new(case, "each machine, of its limit", "%", &each, &Runs::default()));
    let [least, most] = each.spread().unwrap_or([f64::NAN; 2]);
    let cells = vec![cell(&all, number), number(least), number(most), cell(&busy, number), number(limited)];
    tables.binding.row([names.to_vec(), cells].concat());
    tables.machines.push((names.join(", "), each));
    Ok(())
}

fn looks<T: Topology>(
    settings: &Settings,
    report: &mut Report,
    section: &mut Section,
    case: &str,
    names: &[String; 2],
    rig: &mut Rig<T>,
) -> Result<()> {
    let (mut bytes, mut times) = (Runs::default(), Runs::default());
    for _ in 0..settings.runs {
        // Those that come soon after others share their look.
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
            let (machines, _, worked) = rig.load(rig.machines(), settings.span)?;
            busy.push(worked / machines.iter().sum::<f64>());
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

/// Bytes of a scrape.
fn scrape(socket: &PathBuf) -> Result<usize> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "a scrape was refused");
    Ok(answer.len())
}
