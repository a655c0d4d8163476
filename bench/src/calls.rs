//! `cargo xtask bench rpc`: the duration of RPC calls, and their effect on I/O latency.
//!
//! The daemon's reactor has the back-end's core. The daemon's control thread, the RPC client and the front-end share the
//! other core. So that the front-end measures the reactor and not its neighbours, the front-end runs at real-time
//! priority (SCHED_FIFO), and sleeps while no request is in flight.

use crate::backend::{self, BackEnd, Policy};
use crate::frontend::FrontEnd;
use crate::open::WORKLOAD;
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rpc::Rpc;
use crate::settings::{Settings, null};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Disks that are created.
const DISKS: usize = 3_000;
/// Requests per second to the measured disk.
const RATE: f64 = 5_000.0;
/// Length of a measured window; a warm-up of the same length precedes it. The hypervisor takes a core away for
/// milliseconds, several times a second: few longer windows are free of that, and a percentile needs at least as many
/// requests as this window has.
const WINDOW: Duration = Duration::from_millis(100);
/// Windows per run.
const WINDOWS: usize = 20;
/// Aims in seconds: creating all disks one after another, creating them pipelined, and listing them; then the ratio by
/// which calls may lengthen I/O.
const AIMS: [f64; 3] = [1.5, 0.4, 0.05];
const AIM_IO: f64 = 1.2;

/// Measures the calls, then I/O while calls run.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    calls(settings, report)?;
    // On a thread of its own, because the measurement changes the thread's scheduling.
    std::thread::scope(|scope| {
        let measuring = scope.spawn(|| beside_io(settings, report));
        measuring.join().expect("measuring does not panic")
    })
}

/// Durations of one daemon's calls, in seconds.
#[derive(Debug, Default)]
struct Times {
    one_by_one: Runs,
    pipelined: Runs,
    list: Runs,
}

fn calls(settings: &Settings, report: &mut Report) -> Result<()> {
    let (mut forgetful, mut keeping) = (Times::default(), Times::default());
    for run in 0..settings.runs {
        for (times, keeps) in [(&mut forgetful, false), (&mut keeping, true)] {
            let dir = settings.files.path().join(format!("rpc-{run}-{keeps}"));
            let (one_by_one, command) = one_by_one(settings, &dir.join("a"), keeps)?;
            if run == 0 {
                report.command(&command);
            }
            times.one_by_one.push(one_by_one);
            let (pipelined, list) = pipelined(settings, &dir.join("b"), keeps)?;
            times.pipelined.push(pipelined);
            times.list.push(list);
        }
    }
    let columns = ["calls", "arykd", "arykd --state-dir", "aim"].map(str::to_owned).to_vec();
    let mut section = Section::new("Calls", CALLS_INTRO, columns);
    let rows = [
        (format!("{DISKS} bdev_null_create, each after the last one's reply"), "one-by-one"),
        (format!("{DISKS} bdev_null_create, pipelined"), "pipelined"),
        (format!("bdev_get_bdevs of {DISKS} disks"), "list"),
    ];
    let ours = [&forgetful.one_by_one, &forgetful.pipelined, &forgetful.list];
    let kept = [&keeping.one_by_one, &keeping.pipelined, &keeping.list];
    for (((what, name), aim), (ours, kept)) in rows.into_iter().zip(AIMS).zip(ours.into_iter().zip(kept)) {
        for (case, runs) in [(format!("rpc/{name}"), ours), (format!("rpc/{name}/state-dir"), kept)] {
            report.records.push(Record::new(&case, "time", "s", runs, &Runs::default()));
        }
        let shown = |runs: &Runs| cell(&runs.scaled(1e3), number);
        section.row(vec![what, shown(ours), shown(kept), format!("≤ {}", number(aim * 1e3))]);
    }
    report.section(section);
    Ok(())
}

const CALLS_INTRO: &str = "Milliseconds, as median (least–greatest), each in a daemon of its own.";

fn create(n: usize) -> Value {
    json!({"name": format!("n{n}"), "block_size": 512, "num_blocks": 2048})
}

fn start(settings: &Settings, dir: &Path, keeps: bool) -> Result<(Process, Rpc)> {
    std::fs::create_dir_all(dir)?;
    let state = keeps.then(|| dir.join("state"));
    backend::arykd(&settings.arykd, Policy::Adaptive, dir, state.as_deref())
}

/// Creates all disks one after another; returns the duration and the daemon's command line.
fn one_by_one(settings: &Settings, dir: &Path, keeps: bool) -> Result<(f64, String)> {
    let (process, mut rpc) = start(settings, dir, keeps)?;
    let began = Instant::now();
    for n in 0..DISKS {
        rpc.call("bdev_null_create", create(n))?;
    }
    Ok((began.elapsed().as_secs_f64(), process.command.clone()))
}

/// Creates all disks pipelined and lists them; returns both durations.
fn pipelined(settings: &Settings, dir: &Path, keeps: bool) -> Result<(f64, f64)> {
    let (_process, _rpc) = start(settings, dir, keeps)?;
    let pipe = Pipe::connect(&dir.join("rpc.sock"))?;
    let began = Instant::now();
    pipe.call_all("bdev_null_create", (0..DISKS).map(create))?;
    let made = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let line = pipe.call_raw("bdev_get_bdevs")?;
    let listed = began.elapsed().as_secs_f64();
    let list: Value = serde_json::from_str(&line)?;
    let count = list["result"].as_array().map(Vec::len);
    ensure!(count == Some(DISKS), "bdev_get_bdevs gives {count:?} disks of {DISKS}");
    Ok((made, listed))
}

/// A connection with pipelined calls.
struct Pipe(UnixStream);

impl Pipe {
    fn connect(socket: &Path) -> Result<Self> {
        let connected = UnixStream::connect(socket);
        Ok(Self(connected.with_context(|| format!("connecting to {}", socket.display()))?))
    }

    /// Sends all calls and receives the replies at the same time.
    fn call_all(&self, method: &str, params: impl Iterator<Item = Value>) -> Result<()> {
        let calls: Vec<String> = (0..)
            .zip(params)
            .map(|(n, params): (usize, _)| {
                json!({"jsonrpc": "2.0", "id": n, "method": method, "params": params}).to_string()
            })
            .collect();
        let count = calls.len();
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || (&self.0).write_all(calls.concat().as_bytes()));
            for line in BufReader::new(&self.0).lines().take(count) {
                let line = line?;
                ensure!(!line.contains("\"error\""), "{method}: {line}");
            }
            Ok(writing.join().expect("writing does not panic")?)
        })
    }

    /// Makes one call and returns the line of the reply.
    fn call_raw(&self, method: &str) -> Result<String> {
        (&self.0).write_all(json!({"jsonrpc": "2.0", "id": 0, "method": method}).to_string().as_bytes())?;
        let mut line = String::new();
        BufReader::new(&self.0).read_line(&mut line)?;
        Ok(line)
    }
}

/// The load on the calls' core during the I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SideLoad {
    Nothing,
    /// A busy loop on the calls' core: shows the part of a difference that the test machine causes, not the calls.
    Loop,
    Calls,
}

fn beside_io(settings: &Settings, report: &mut Report) -> Result<()> {
    let dir = settings.files.path().join("rpc-io");
    let aryk = backend::aryk(&settings.arykd, Policy::Adaptive, &null(), &dir)?;
    report.command(&aryk.process.command);
    raise_priority()?;
    let sides = [SideLoad::Nothing, SideLoad::Loop, SideLoad::Calls];
    let mut runs: [[Runs; 2]; 3] = Default::default();
    for _ in 0..settings.runs * WINDOWS {
        for (side, [p50, p99]) in sides.into_iter().zip(&mut runs) {
            let latency = run_beside(&aryk, &dir.join("rpc.sock"), side)?;
            p50.push(latency.value_at_quantile(0.5) as f64 / 1e3);
            p99.push(latency.value_at_quantile(0.99) as f64 / 1e3);
        }
    }
    let [quiet, looped, busy] = runs;
    for (index, metric) in ["latency p50", "latency p99"].into_iter().enumerate() {
        report.records.push(Record::new("rpc/io", metric, "µs", &busy[index], &quiet[index]));
        report.records.push(Record::new("rpc/io/loop", metric, "µs", &looped[index], &quiet[index]));
    }
    let columns = ["beside the I/O", "p50 µs", "p99 µs", "p99 to quiet", "p99 to the loop's", "aim"];
    let mut section = Section::new("I/O beside calls", IO_INTRO, columns.map(str::to_owned).to_vec());
    let names = ["nothing", "a loop on the calls' core", "calls without a pause"];
    for (name, [p50, p99]) in names.into_iter().zip([&quiet, &looped, &busy]) {
        let aim = if name == names[2] { format!("≤ {AIM_IO}") } else { String::new() };
        let cells = [p50.clone(), p99.clone(), p99.over(&quiet[1]), p99.over(&looped[1])];
        let cells = cells.map(|runs| cell(&runs, number));
        section.row([vec![name.to_owned()], cells.to_vec(), vec![aim]].concat());
    }
    report.section(section);
    Ok(())
}

const IO_INTRO: &str = "5,000 4 KiB reads a second of a null disk, on a Poisson schedule, each timed from its submission. The calls \
    create 3,000 disks, pipelined, list them ten times, and delete them, in a loop. Percentiles are of windows of 100 ms, 20 for each run, shown as \
    median (least–greatest); ratios are of neighbouring windows.";

/// Gives the calling thread, whose I/O is timed, real-time priority on its shared core.
fn raise_priority() -> Result<()> {
    schedule("--fifo", "1").context("the right to SCHED_FIFO is needed, as root has it")
}

/// Returns the calling thread to normal priority: its parent runs at real-time priority.
fn restore_priority() -> Result<()> {
    schedule("--other", "0")
}

fn schedule(policy: &str, priority: &str) -> Result<()> {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let status = Command::new("chrt").args([policy, "--pid", priority, &thread]).status();
    ensure!(status.context("running chrt")?.success(), "chrt {policy} fails");
    Ok(())
}

fn run_beside(aryk: &BackEnd, rpc: &Path, side: SideLoad) -> Result<hdrhistogram::Histogram<u64>> {
    let mut front_end = FrontEnd::connect(&aryk.socket, 1, WORKLOAD)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            restore_priority()?;
            match side {
                SideLoad::Nothing => Ok(()),
                SideLoad::Loop => {
                    spin(&stop);
                    Ok(())
                }
                SideLoad::Calls => call(rpc, &stop),
            }
        });
        let warm_up = front_end.paced(RATE, WINDOW);
        let open = warm_up.and_then(|_| front_end.paced(RATE, WINDOW));
        stop.store(true, Ordering::Relaxed);
        beside.join().expect("calls do not panic")?;
        Ok(open?.latency)
    })
}

fn spin(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

/// Completes its last round before it returns, so that each window starts with the same disks.
fn call(socket: &Path, stop: &AtomicBool) -> Result<()> {
    let pipe = Pipe::connect(socket)?;
    while !stop.load(Ordering::Relaxed) {
        pipe.call_all("bdev_null_create", (0..DISKS).map(create))?;
        for _ in 0..10 {
            pipe.call_raw("bdev_get_bdevs")?;
        }
        pipe.call_all("bdev_null_delete", (0..DISKS).map(|n| json!({"name": format!("n{n}")})))?;
    }
    Ok(())
}
