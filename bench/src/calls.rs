//! `cargo xtask bench rpc`: what calls cost, and what I/O notices of them.
//!
//! The daemon's reactor has the back end's core. All else, the daemon's control thread, the client of its RPC and the front-end, shares the other one; so
//! that the front-end measures the reactor and not its neighbours, it goes before them (SCHED_FIFO), and sleeps while nothing is in flight.

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

/// Disks that are made.
const DISKS: usize = 3_000;
/// Requests a second of the disk that is watched.
const RATE: f64 = 5_000.0;
/// How long it is watched at a time, after it has run for as long. The machine below ours takes a core away for milliseconds, several times a second: few
/// longer spans have none of that, and a percentile needs as many requests as this one brings.
const WINDOW: Duration = Duration::from_millis(100);
/// Windows for each run that is wanted.
const WINDOWS: usize = 20;
/// Aims: seconds for all disks one after another, and pipelined; for their list; and by how much calls may lengthen I/O.
const AIMS: [f64; 3] = [1.5, 0.4, 0.05];
const AIM_IO: f64 = 1.2;

/// Measures calls, then I/O beside them.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    calls(settings, report)?;
    // On a thread of its own, which changes how it is scheduled.
    std::thread::scope(|scope| {
        let measuring = scope.spawn(|| beside_io(settings, report));
        measuring.join().expect("measuring does not panic")
    })
}

/// What one daemon's calls took, in seconds.
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

/// The time to make all, and the daemon's command.
fn one_by_one(settings: &Settings, dir: &Path, keeps: bool) -> Result<(f64, String)> {
    let (process, mut rpc) = start(settings, dir, keeps)?;
    let began = Instant::now();
    for n in 0..DISKS {
        rpc.call("bdev_null_create", create(n))?;
    }
    Ok((began.elapsed().as_secs_f64(), process.command.clone()))
}

/// The time to make all, and the time to list them.
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

/// A connection whose calls do not wait for each other.
struct Pipe(UnixStream);

impl Pipe {
    fn connect(socket: &Path) -> Result<Self> {
        let connected = UnixStream::connect(socket);
        Ok(Self(connected.with_context(|| format!("connecting to {}", socket.display()))?))
    }

    /// Sends all calls while it takes their replies.
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

    /// One call; the line that answers it.
    fn call_raw(&self, method: &str) -> Result<String> {
        (&self.0).write_all(json!({"jsonrpc": "2.0", "id": 0, "method": method}).to_string().as_bytes())?;
        let mut line = String::new();
        BufReader::new(&self.0).read_line(&mut line)?;
        Ok(line)
    }
}

/// What goes on beside the I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// A loop, on the core that the calls would have: what of a difference is the machine's.
    Loop,
    Calls,
}

fn beside_io(settings: &Settings, report: &mut Report) -> Result<()> {
    let dir = settings.files.path().join("rpc-io");
    let aryk = backend::aryk(&settings.arykd, Policy::Adaptive, &null(), &dir)?;
    report.command(&aryk.process.command);
    go_first()?;
    let sides = [Beside::Nothing, Beside::Loop, Beside::Calls];
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

const IO_INTRO: &str = "5,000 4 KiB reads a second of a null disk, on a Poisson schedule, each timed from its submission. The calls: \
    3,000 disks are made, pipelined, listed ten times, and removed, over and over. Percentiles are of windows of 100 ms, 20 for each run, shown as \
    median (least–greatest); ratios are of neighbouring ones.";

/// Has the calling thread, whose I/O is timed, go before what shares its core.
fn go_first() -> Result<()> {
    schedule("--fifo", "1").context("the right to SCHED_FIFO is needed, as root has it")
}

/// An ordinary thread again: it was started by one that goes first.
fn stand_back() -> Result<()> {
    schedule("--other", "0")
}

fn schedule(policy: &str, priority: &str) -> Result<()> {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let status = Command::new("chrt").args([policy, "--pid", priority, &thread]).status();
    ensure!(status.context("running chrt")?.success(), "chrt {policy} fails");
    Ok(())
}

fn run_beside(aryk: &BackEnd, rpc: &Path, side: Beside) -> Result<hdrhistogram::Histogram<u64>> {
    let mut front_end = FrontEnd::connect(&aryk.socket, 1, WORKLOAD)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            stand_back()?;
            match side {
                Beside::Nothing => Ok(()),
                Beside::Loop => {
                    spin(&stop);
                    Ok(())
                }
                Beside::Calls => call(rpc, &stop),
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

/// Finishes a round, so that each begins with the same disks.
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
