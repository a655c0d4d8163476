//! `cargo xtask bench qos`: how exact and how fair limits are in real time, and their effect on disks without limits.
//!
//! All VMs are queues of one polled front-end, the project's own, on one thread. With two reactors, one of them shares
//! the front-end's core.

use crate::backend::{self, Policy};
use crate::crowd::Crowd;
use crate::plot::{Data, Plot};
use crate::process::{BACK_END_CORE, FRONT_END_CORE, Process};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rpc::Rpc;
use crate::scanner;
use crate::settings::Settings;
use anyhow::{Context, Result, ensure};
use aryk_front_end::blk::Requests;
use aryk_front_end::{Format, Layout, Memory, Operation, Queue, Session, Shape, Wanted, feature, protocol};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Windows in which the lower bound is checked, in addition to the whole run.
const WINDOW: Duration = Duration::from_millis(100);
/// Sleep of the front-end when it finds no completion.
const REST: Duration = Duration::from_micros(50);
/// Bytes on each disk.
const DISK: u64 = 1 << 30;
/// Disks whose requests wait for their limits, beside a disk without limits.
const NEIGHBOURS: usize = 1000;
/// Pairs of turns with and without such neighbours, of a fifth of a measurement each: short turns see the same state of
/// the test machine.
const PAIRS: usize = 41;
/// Wait before a turn, in which waiting requests complete, or new requests reach their limits.
const SETTLE: Duration = Duration::from_millis(100);

/// A VM with one disk, in a closed loop.
struct Vm {
    queue: Queue<Requests>,
    _memory: Memory,
    _session: Session,
    depth: u16,
    len: u32,
    next: u64,
    wants: bool,
    in_flight: u16,
    started: Vec<Instant>,
    done: Done,
}

/// The results of a VM since the last call of `run`.
struct Done {
    requests: u64,
    windows: Vec<u64>,
    latency: Histogram<u64>,
}

impl Done {
    fn new() -> Self {
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are right");
        Self { requests: 0, windows: Vec::new(), latency }
    }
}

impl Vm {
    fn connect(socket: &Path, depth: u16, len: u32) -> Result<Self> {
        let wanted = Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL,
            optional: 0,
            protocol: protocol::CONFIG,
            optional_protocol: protocol::REPLY_ACK,
            queues: 1,
            patience: Duration::from_secs(30),
        };
        let session = Session::connect(socket, &wanted)?;
        let size = (3 * depth).next_power_of_two().max(16);
        let shape = Shape { format: Format::Split, size, event_idx: false };
        let layout = Layout { shape, slots: depth, len, indirect: false };
        let memory = Memory::new(layout.space::<Requests>())?;
        let queue = Queue::new(Requests, &memory, 0, 0, layout)?;
        session.set_features()?;
        session.share(&memory)?;
        session.start(&queue.announced())?;
        session.enable(1)?;
        let started = vec![Instant::now(); depth.into()];
        Ok(Self {
            queue,
            _memory: memory,
            _session: session,
            depth,
            len,
            next: 0,
            wants: false,
            in_flight: 0,
            started,
            done: Done::new(),
        })
    }

    fn submit(&mut self, slot: u16, now: Instant) {
        let offset = self.next * u64::from(self.len) % DISK;
        self.next += 1;
        self.started[usize::from(slot)] = now;
        self.queue.submit(slot, Operation::Read, offset);
        self.in_flight += 1;
    }

    fn begin(&mut self) {
        self.wants = true;
        let now = Instant::now();
        (0..self.depth).for_each(|slot| self.submit(slot, now));
        self.queue.publish();
    }

    /// Takes completions; returns whether there were any.
    fn turn(&mut self, start: Instant) -> Result<bool> {
        let mut worked = false;
        while let Some(done) = self.queue.take()? {
            let now = Instant::now();
            self.in_flight -= 1;
            self.done.requests += 1;
            let window = (now.saturating_duration_since(start).as_nanos() / WINDOW.as_nanos()) as usize;
            if self.done.windows.len() <= window {
                self.done.windows.resize(window + 1, 0);
            }
            self.done.windows[window] += 1;
            let latency = now.saturating_duration_since(self.started[usize::from(done.slot)]);
            self.done.latency.saturating_record(latency.as_nanos() as u64);
            if self.wants {
                self.submit(done.slot, now);
            }
            worked = true;
        }
        if worked {
            self.queue.publish();
        }
        Ok(worked)
    }
}

/// A daemon, and VMs attached to it.
struct Rig {
    process: Process,
    rpc: Rpc,
    dir: PathBuf,
    vms: Vec<Vm>,
}

impl Rig {
    fn start(settings: &Settings, name: &str, reactors: u16) -> Result<Self> {
        let dir = settings.sockets.path().join(name);
        if dir.exists() {
            // A daemon before this one may have left sockets, which would be mistaken for the new daemon's.
            std::fs::remove_dir_all(&dir)?;
        }
        let cores = if reactors == 1 { 1 << BACK_END_CORE } else { 1 << BACK_END_CORE | 1 << FRONT_END_CORE };
        let (process, rpc) = backend::arykd_on(&settings.arykd, cores, Policy::Adaptive, &dir, None)?;
        Ok(Self { process, rpc, dir, vms: Vec::new() })
    }

    fn add(&mut self, depth: u16, len: u32) -> Result<String> {
        let name = format!("d{}", self.vms.len());
        let disk = json!({"name": name, "num_blocks": DISK / 512, "block_size": 512});
        self.rpc.call("bdev_null_create", disk)?;
        self.rpc.call("vhost_create_blk_controller", json!({"ctrlr": name, "dev_name": name}))?;
        self.vms.push(Vm::connect(&self.dir.join(&name), depth, len)?);
        Ok(name)
    }

    fn limit(&mut self, name: &str, mut limits: Value) -> Result<()> {
        limits["name"] = json!(name);
        self.rpc.call("bdev_set_qos_limit", limits).map(drop)
    }

    /// Runs all VMs for `span`, and returns the results of each.
    fn run(&mut self, span: Duration) -> Result<Vec<Done>> {
        let start = Instant::now();
        self.vms.iter_mut().for_each(|m| m.done = Done::new());
        while start.elapsed() < span {
            let mut worked = false;
            for vm in &mut self.vms {
                worked |= vm.turn(start)?;
            }
            if !worked {
                std::thread::sleep(REST);
            }
        }
        Ok(self.vms.iter_mut().map(|m| std::mem::replace(&mut m.done, Done::new())).collect())
    }

    fn begin(&mut self) {
        self.vms.iter_mut().filter(|m| m.in_flight == 0).for_each(Vm::begin);
    }
}

/// Measures accuracy, then fairness, then the effect on neighbours.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    accuracy(settings, report)?;
    fairness(settings, report)?;
    neighbours(settings, report)?;
    scanner::measure(settings, report)
}

/// A limit, its load, and the expected requests per second.
struct Case {
    name: &'static str,
    limits: fn() -> Value,
    len: u32,
    expected: f64,
}

const CASES: [Case; 7] = [
    Case { name: "1000 IOPS", limits: || json!({"rw_ios_per_sec": 1000}), len: 4096, expected: 1000.0 },
    Case { name: "6000 IOPS", limits: || json!({"rw_ios_per_sec": 6000}), len: 4096, expected: 6000.0 },
    Case { name: "50000 IOPS", limits: || json!({"rw_ios_per_sec": 50_000}), len: 4096, expected: 5e4 },
    Case { name: "100 MiB/s", limits: || json!({"rw_mbytes_per_sec": 100}), len: 65_536, expected: 1600.0 },
    Case { name: "10 IOPS", limits: || json!({"rw_ios_per_sec": 10}), len: 4096, expected: 10.0 },
    Case { name: "combined, 4 KiB", limits: combined, len: 4096, expected: 3000.0 },
    Case { name: "combined, 4 MiB", limits: combined, len: 4 << 20, expected: 31.25 },
];

fn combined() -> Value {
    json!({"rw_ios_per_sec": 3000, "rw_mbytes_per_sec": 125, "combined": true})
}

const ACCURACY: &str = "One disk, 16 requests in flight (128 at 50,000 IOPS; 2 of 4 MiB), and its throughput in percent of its limit: over the whole of a run, and in its worst \
     tenth of a second (for limits that allow 100 requests or more in it). *combined* is 3,000 IOPS and 125 MiB/s on one scale. *shared*: the given number of reactors within one process, on \
     two cores that they share; each has a closed loop on a channel of one limited disk.";

/// Limits that reactors share: their name, requests per second, and the requests that each reactor has in flight.
const CROWDS: [(&str, u64, u64); 3] =
    [("1000 IOPS, shared", 1000, 16), ("6000 IOPS, shared", 6000, 16), ("50000 IOPS, shared", 50_000, 64)];

/// The table of how exact limits are, and its plots.
struct Accuracy {
    section: Section,
    whole: Vec<(String, Runs)>,
    worst: Vec<(String, Runs)>,
}

impl Accuracy {
    fn new() -> Self {
        let columns = ["limit", "reactors", "got, % of the limit", "worst 100 ms, %", "aim"];
        let section = Section::new("Accuracy", ACCURACY, columns.map(str::to_owned).to_vec());
        Self { section, whole: Vec::new(), worst: Vec::new() }
    }

    /// Adds one limit: each run's throughput in percent of it, and the worst window if the window has enough requests.
    fn add(&mut self, report: &mut Report, name: &str, reactors: u16, runs: &[[f64; 2]], aim: &str) {
        let whole: Runs = runs.iter().map(|[all, _]| all * 100.0).collect();
        let worst: Runs =
            runs.iter().filter(|[_, least]| least.is_finite()).map(|[_, least]| least * 100.0).collect();
        for (metric, runs) in [("whole", &whole), ("worst 100 ms", &worst)] {
            let case = format!("qos/accuracy/{name}/{reactors}");
            report.records.push(Record::new(&case, metric, "%", runs, &Runs::default()));
        }
        let cells = [
            name.to_owned(),
            reactors.to_string(),
            cell(&whole, number),
            cell(&worst, number),
            aim.to_owned(),
        ];
        self.section.row(cells.to_vec());
        let name = format!("{name}, {}", on(reactors));
        if worst.len() > 0 {
            self.worst.push((name.clone(), worst));
        }
        self.whole.push((name, whole));
    }

    fn add_to(mut self, report: &mut Report) {
        let plots = [
            ("whole", "whole runs", self.whole, 99.0),
            ("worst", "the worst tenth of a second", self.worst, 95.0),
        ];
        for (name, what, rows, aim) in plots.into_iter().filter(|(_, _, rows, _)| !rows.is_empty()) {
            let title = format!("Throughput of a disk in percent of its limit: {what}");
            let axis = "% of the limit; the line is the aim for one reactor and two".to_owned();
            self.section.plot(Plot { name, title, axis, data: Data::Spreads { rows, aim: Some(aim) } });
        }
        report.section(self.section);
    }
}

fn accuracy(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut accuracy = Accuracy::new();
    for reactors in [1, 2] {
        for case in CASES.iter().filter(|case| settings.wants(case.name)) {
            let run = |_| one_limit(settings, case, reactors, report);
            let runs = (0..settings.runs).map(run).collect::<Result<Vec<_>>>()?;
            accuracy.add(report, case.name, reactors, &runs, "≥ 99, ≥ 95");
        }
    }
    for (reactors, aim) in [(2, "≥ 99, ≥ 95"), (4, "≥ 97, ≥ 85")] {
        for (name, limit, depth) in CROWDS.into_iter().filter(|(name, ..)| settings.wants(name)) {
            let crowd = Crowd { limit, reactors, depth };
            let runs =
                (0..settings.runs).map(|_| shared_limit(settings, crowd)).collect::<Result<Vec<_>>>()?;
            accuracy.add(report, name, reactors, &runs, aim);
        }
    }
    accuracy.add_to(report);
    Ok(())
}

fn on(reactors: u16) -> String {
    if reactors == 1 { "1 reactor".to_owned() } else { format!("{reactors} reactors") }
}

/// The throughput of reactors that share a limit, as a fraction of it: of the whole run, and of the worst window.
fn shared_limit(settings: &Settings, crowd: Crowd) -> Result<[f64; 2]> {
    let windows = settings.span.as_nanos().div_ceil(WINDOW.as_nanos()) as usize;
    let counts = crowd.run(settings.warm_up.max(Duration::from_millis(200)), WINDOW, windows)?;
    let expected = crowd.limit as f64 * WINDOW.as_secs_f64();
    let least = counts.iter().min().map_or(f64::NAN, |&least| least as f64) / expected;
    Ok([counts.iter().sum::<u64>() as f64 / expected / windows as f64, least])
}

/// The throughput of one disk as a fraction of its limit: of the whole run, and of the worst window.
fn one_limit(settings: &Settings, case: &Case, reactors: u16, report: &mut Report) -> Result<[f64; 2]> {
    let mut rig = Rig::start(settings, &format!("accuracy-{reactors}"), reactors)?;
    report.command(&rig.process.command);
    // Covers the requests that the limit allows in two milliseconds, so that demand continues while the front-end is
    // delayed.
    let depth = match case.expected {
        _ if case.len > 1 << 20 => 2,
        expected if expected > 10_000.0 => 128,
        _ => 16,
    };
    let name = rig.add(depth, case.len)?;
    rig.limit(&name, (case.limits)())?;
    rig.begin();
    rig.run(settings.warm_up.max(Duration::from_millis(200)))?;
    let start = Instant::now();
    let done = rig.run(settings.span)?;
    let spent = start.elapsed().as_secs_f64();
    let count: u64 = done.iter().map(|d| d.requests).sum();
    let windows = (settings.span.as_nanos() / WINDOW.as_nanos()) as usize;
    let in_window = |i: usize| done.iter().filter_map(|d| d.windows.get(i)).sum::<u64>() as f64;
    let expected = case.expected * WINDOW.as_secs_f64();
    let least = (0..windows).map(in_window).fold(f64::INFINITY, f64::min) / expected;
    Ok([count as f64 / spent / case.expected, if expected >= 100.0 { least } else { f64::INFINITY }])
}

const FAIRNESS: &str = "Disks of one group of 6,000 IOPS, and the throughput of each. Jain's index is 1 when all have the same throughput.";

fn fairness(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = ["disks", "reactors", "the group got, %", "least and most of a disk, IOPS", "Jain's index"];
    let mut section = Section::new("Fairness", FAIRNESS, columns.map(str::to_owned).to_vec());
    let mut rows = Vec::new();
    let equal: &[u16] = &[32; 8];
    for (name, depths) in [("8 at QD32", equal), ("1 at QD1, 3 at QD128", &[1, 128, 128, 128])] {
        if !settings.wants(name) {
            continue;
        }
        for reactors in [1, 2] {
            let mut rig = Rig::start(settings, &format!("fairness-{}-{reactors}", depths.len()), reactors)?;
            rig.rpc.call("bdev_qos_group_create", json!({"name": "g"}))?;
            rig.rpc.call("bdev_qos_group_set_limit", json!({"name": "g", "rw_ios_per_sec": 6000}))?;
            for &depth in depths {
                let disk = rig.add(depth, 4096)?;
                rig.rpc.call("bdev_qos_group_add_bdev", json!({"name": "g", "bdev_name": disk}))?;
            }
            rig.begin();
            rig.run(Duration::from_millis(500))?;
            let (mut got, mut index, mut each) = (Runs::default(), Runs::default(), Runs::default());
            for _ in 0..settings.runs {
                let start = Instant::now();
                let counts: Vec<f64> = rig.run(settings.span)?.iter().map(|d| d.requests as f64).collect();
                let spent = start.elapsed().as_secs_f64();
                got.push(counts.iter().sum::<f64>() / spent / 60.0);
                let squares: f64 = counts.iter().map(|c| c * c).sum();
                index.push(counts.iter().sum::<f64>().powi(2) / (counts.len() as f64 * squares));
                counts.iter().for_each(|count| each.push(count / spent));
            }
            rows.push((format!("{name}, {}", on(reactors)), each.scaled(depths.len() as f64 / 60.0)));
            let [least, most] = each.spread().context("there are disks")?;
            report.records.push(Record::new(
                &format!("qos/fairness/{name}/{reactors}"),
                "Jain's index",
                "",
                &index,
                &Runs::default(),
            ));
            let each = format!("{} – {}", number(least), number(most));
            let cells =
                [name.to_owned(), reactors.to_string(), cell(&got, number), each, cell(&index, exact)];
            section.row(cells.to_vec());
        }
    }
    if !rows.is_empty() {
        section.plot(Plot {
            name: "fairness",
            title: "Throughput of each disk of a group".to_owned(),
            axis: "% of an equal part of the group's limit".to_owned(),
            data: Data::Spreads { rows, aim: None },
        });
    }
    report.section(section);
    Ok(())
}

fn exact(value: f64) -> String {
    format!("{value:.4}")
}

const BESIDE: &str = "A disk without limits, reading 4 KiB at QD1, while requests of 1,000 others wait for their limits (1 IOPS each), and while the same \
     1,000 are idle; in 41 turns of each of a fifth of the span above, medians and their spread; the ratio is of each turn and the turn after it.";

/// The effect of many disks with waiting requests on an unlimited disk.
fn neighbours(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("neighbours") {
        return Ok(());
    }
    let mut rig = Rig::start(settings, "neighbours", 1)?;
    rig.add(1, 4096)?;
    for _ in 0..NEIGHBOURS {
        rig.add(4, 4096)?;
    }
    let (mut held, mut free) = ([Runs::default(), Runs::default()], [Runs::default(), Runs::default()]);
    let pairs = if settings.quick { 1 } else { PAIRS };
    for _ in 0..pairs {
        let limits: fn() -> Value = || json!({"rw_ios_per_sec": 1});
        for n in 1..=NEIGHBOURS {
            rig.limit(&format!("d{n}"), limits())?;
        }
        rig.begin();
        rig.run(SETTLE)?;
        poll_first_vm(&mut rig, settings, &mut held)?;
        // The load ends, and removing the limits lets the waiting requests complete.
        rig.vms[1..].iter_mut().for_each(|m| m.wants = false);
        for n in 1..=NEIGHBOURS {
            rig.limit(&format!("d{n}"), json!({"rw_ios_per_sec": 0}))?;
        }
        let start = Instant::now();
        while rig.vms[1..].iter().any(|m| m.in_flight > 0) {
            ensure!(
                start.elapsed() < Duration::from_secs(10),
                "requests still wait after their limits were removed"
            );
            rig.run(SETTLE)?;
        }
        poll_first_vm(&mut rig, settings, &mut free)?;
    }
    let columns = ["of the unlimited disk", "1,000 waiting", "1,000 idle", "ratio", "aim"];
    let mut section = Section::new("Neighbours", BESIDE, columns.map(str::to_owned).to_vec());
    for (i, (what, aim)) in
        [("busy time, ns a request", "≤ 1.05"), ("p99, µs", "≤ 1.2")].into_iter().enumerate()
    {
        let record = Record::new(&format!("qos/neighbours/{what}"), what, "", &held[i], &free[i]);
        report.records.push(record);
        let ratio = held[i].over(&free[i]);
        let [ratio, held, free] = [&ratio, &held[i], &free[i]].map(|runs| cell(runs, number));
        let cells = [what.to_owned(), held, free, ratio, aim.to_owned()];
        section.row(cells.to_vec());
    }
    report.section(section);
    Ok(())
}

/// Polls the first VM alone: the reactor's busy time per request, and the latency.
fn poll_first_vm(rig: &mut Rig, settings: &Settings, [busy, p99]: &mut [Runs; 2]) -> Result<()> {
    let machine_busy = |rig: &mut Rig| -> Result<f64> {
        let reactors = rig.rpc.call("framework_get_reactors", json!({}))?;
        reactors["reactors"][0]["busy"].as_f64().context("a reactor reports no busy time")
    };
    rig.vms[0].done = Done::new();
    let (start, before) = (Instant::now(), machine_busy(rig)?);
    while start.elapsed() < settings.span / 5 {
        rig.vms[0].turn(start)?;
    }
    let worked = machine_busy(rig)? - before;
    let done = std::mem::replace(&mut rig.vms[0].done, Done::new());
    busy.push(worked / done.requests.max(1) as f64);
    p99.push(done.latency.value_at_quantile(0.99) as f64 / 1e3);
    Ok(())
}
