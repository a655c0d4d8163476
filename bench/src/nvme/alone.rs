//! The NVMe driver alone, compared with a bare loop, each on a model controller of its own, in turns.

use super::bare::Bare;
use super::run_beside;
use crate::driver::{BLOCK, BLOCKS, Driven, Request};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::{Rounds, run_comparable};
use crate::settings::Settings;
use crate::turns::Stopwatch;
use crate::workload::Workload;
use anyhow::{Result, ensure};
use aryk_nvme_model::Model;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that a workload repeats.
const REQUESTS: usize = 4096;
/// Turns of both sides in a round.
const TURNS: u32 = 4;
/// Commands of a turn at least, on a computer whose other load leaves the controller no time.
const COMMANDS_MIN: usize = 1000;

/// One of the two sides.
pub trait Host {
    /// The controller.
    fn model(&self) -> &Arc<Model>;
    /// Submits commands, by one doorbell.
    fn submit(&mut self, requests: &[Request]);
    /// Takes the completions, and returns their number.
    fn reap(&mut self) -> usize;
    /// Writes to doorbells so far.
    fn doorbells(&self) -> u64;
}

impl Host for Driven {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn submit(&mut self, requests: &[Request]) {
        Self::submit(self, requests);
    }

    fn reap(&mut self) -> usize {
        Self::reap(self)
    }

    fn doorbells(&self) -> u64 {
        self.pair.counters().doorbells()
    }
}

/// What one side did in a round, for a command.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    /// Nanoseconds, with the controller on the other core.
    time: f64,
    /// Writes to doorbells, with the controller on the other core.
    doorbells: f64,
    /// Nanoseconds in the calls, with the controller on the other core.
    busy_beside: f64,
    /// Nanoseconds in the calls, stepped.
    busy: f64,
}

/// A workload's results.
#[derive(Debug)]
pub struct Figures {
    /// The workload.
    pub workload: Workload,
    /// Time of a command through the driver, as a multiple of the bare loop's in the same round.
    pub ratio: Runs,
    /// Nanoseconds in the driver's calls, of a command, with the controller on the other core.
    pub busy_beside: Runs,
    /// The same, stepped.
    pub busy: Runs,
    /// The bare loop's, stepped.
    pub bare_busy: Runs,
}

const TIMES: &str = "From the submission of a command to the moment when the measuring thread has its completion, divided by the requests in \
    flight: random reads, writes, and 70% reads. The controller is on the other core. The ratio is that of the driver's time to the bare \
    loop's in the same round, in which both take turns. The driver writes the PRP list of a command of 128 KiB for each command, 31 entries \
    in four cache lines, which the controller fetches from this core. The bare loop has written its lists once, before the measurement, \
    and does not pay for that.";

const BUSY: &str = "Nanoseconds of a command in `submit`, `flush` and `reap`. A bare loop that writes submission entries and reads \
    completion entries, and checks nothing, is in the last columns.";

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<Vec<Figures>> {
    let columns = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let times =
        ["workload", "driver, ns", "bare loop, ns", "ratio", "doorbells per command", "core to core, ns"];
    let busy = ["workload", "other core: driver", "stepped: driver", "other core: bare", "stepped: bare"];
    let mut times = Section::new("The driver alone: time of a command", TIMES, columns(&times));
    let mut busy = Section::new("The driver alone: busy time", BUSY, columns(&busy));
    let mut all = Vec::new();
    for workload in workloads() {
        let name = format!("nvme/{}", workload.name());
        if !settings.wants(&name) {
            continue;
        }
        let rounds = run_comparable(settings.runs, || round(settings.span, &workload))?;
        let figures = add_rows(&name, workload, &rounds, [&mut times, &mut busy], report);
        println!(
            "{name}: {} of the bare loop's time, {} ns busy",
            cell(&figures.ratio, number),
            cell(&figures.busy_beside, number)
        );
        all.push(figures);
    }
    report.section(times);
    report.section(busy);
    Ok(all)
}

fn workloads() -> Vec<Workload> {
    let small = [0, 100, 30]
        .iter()
        .flat_map(|writes| [1, 32, 128].map(|depth| Workload::random(*writes, 4 << 10, depth)));
    small.chain([1, 32].map(|depth| Workload::random(0, 128 << 10, depth))).collect()
}

/// The results of both sides in one round: the bare loop's, then the driver's.
type Round = [Side; 2];

fn add_rows(
    name: &str,
    workload: Workload,
    rounds: &Rounds<Round>,
    [times, busy]: [&mut Section; 2],
    report: &mut Report,
) -> Figures {
    let runs = |of: &dyn Fn(&Side) -> f64| {
        [0, 1].map(|side| rounds.each.iter().map(|round| of(&round[side])).collect::<Runs>())
    };
    let [bare_time, time] = runs(&|side| side.time);
    let [_, doorbells] = runs(&|side| side.doorbells);
    let [bare_beside, busy_beside] = runs(&|side| side.busy_beside);
    let [bare_busy, driver_busy] = runs(&|side| side.busy);
    for (metric, driver, bare) in [
        ("time of a command, peer a bare loop", &time, &bare_time),
        ("busy time, the controller on another core, peer a bare loop", &busy_beside, &bare_beside),
        ("busy time, peer a bare loop", &driver_busy, &bare_busy),
    ] {
        report.records.push(Record::new(name, metric, "ns", driver, bare));
    }
    let ratio = time.over(&bare_time);
    times.row(vec![
        workload.name(),
        cell(&time, number),
        cell(&bare_time, number),
        cell(&ratio, number),
        cell(&doorbells, |value| format!("{value:.2}")),
        rounds.round_trip.as_nanos().to_string(),
    ]);
    let all = [&busy_beside, &driver_busy, &bare_beside, &bare_busy];
    busy.row(std::iter::once(workload.name()).chain(all.map(|runs| cell(runs, number))).collect());
    Figures { workload, ratio, busy_beside, busy: driver_busy, bare_busy }
}

fn round(span: Duration, workload: &Workload) -> Result<Round> {
    let (len, depth) = (u64::from(workload.block), workload.depth);
    let mut random = fastrand::Rng::with_seed(1);
    let requests: Vec<_> = (0..REQUESTS + depth)
        .map(|_| Request {
            lba: random.u64(..=BLOCKS - len / BLOCK),
            is_write: random.u32(..100) < workload.write_percent,
        })
        .collect();
    let (mut bare, mut driver) = (Bare::new(len)?, Driven::new(len, false, depth as u16)?);
    let mut round = Round::default();
    for _ in 0..TURNS {
        let hosts: [&mut dyn Host; 2] = [&mut bare, &mut driver];
        for (host, side) in hosts.into_iter().zip(&mut round) {
            let (time, doorbells) = with_a_controller(host, &requests, depth, span / TURNS)?;
            let busy_beside = busy_with_a_controller(host, &requests, depth, span / TURNS / 4)?;
            let busy = busy_stepped(host, &requests, depth, span / TURNS / 4)?;
            side.time += time / f64::from(TURNS);
            side.doorbells += doorbells / f64::from(TURNS);
            side.busy_beside += busy_beside / f64::from(TURNS);
            side.busy += busy / f64::from(TURNS);
        }
    }
    Ok(round)
}

/// Nanoseconds in the calls, of a command, with `depth` commands a batch.
fn busy_stepped(host: &mut dyn Host, requests: &[Request], depth: usize, span: Duration) -> Result<f64> {
    let (mut watch, mut done, mut next, start) = (Stopwatch::new(), 0, 0, Instant::now());
    while start.elapsed() < span || done < COMMANDS_MIN {
        watch.call(|| {
            host.submit(&requests[next..next + depth]);
            true
        });
        host.model().step(0);
        let mut count = 0;
        watch.call(|| {
            count = host.reap();
            true
        });
        ensure!(count == depth, "{count} commands completed");
        (done, next) = (done + count, (next + depth) % REQUESTS);
    }
    Ok(watch.nanos() / done as f64)
}

/// Nanoseconds and doorbells of a command, with `depth` commands in flight at a controller on the other core.
fn with_a_controller(
    host: &mut dyn Host,
    requests: &[Request],
    depth: usize,
    span: Duration,
) -> Result<(f64, f64)> {
    let running = run_beside(host.model())?;
    let (mut free, mut done, mut next) = (depth, 0, 0);
    let (doorbells, start) = (host.doorbells(), Instant::now());
    while start.elapsed() < span || done < COMMANDS_MIN {
        // The clock is read rarely.
        for _ in 0..64 {
            if free > 0 {
                host.submit(&requests[next..next + free]);
                next = (next + free) % REQUESTS;
            }
            free = host.reap();
            done += free;
        }
    }
    let (took, doorbells) = (start.elapsed(), host.doorbells() - doorbells);
    drain(host, depth - free);
    drop(running);
    Ok((took.as_secs_f64() * 1e9 / done as f64, doorbells as f64 / done as f64))
}

/// Nanoseconds in the calls, of a command, with `depth` commands in flight at a controller on the other core.
fn busy_with_a_controller(
    host: &mut dyn Host,
    requests: &[Request],
    depth: usize,
    span: Duration,
) -> Result<f64> {
    let running = run_beside(host.model())?;
    let (mut watch, mut free, mut done, mut next) = (Stopwatch::new(), depth, 0, 0);
    let start = Instant::now();
    while start.elapsed() < span || done < COMMANDS_MIN {
        watch.call(|| {
            if free > 0 {
                host.submit(&requests[next..next + free]);
            }
            free > 0
        });
        next = (next + free) % REQUESTS;
        watch.call(|| {
            free = host.reap();
            free > 0
        });
        done += free;
    }
    drain(host, depth - free);
    drop(running);
    Ok(watch.nanos() / done as f64)
}

/// Waits for the commands in flight.
fn drain(host: &mut dyn Host, mut in_flight: usize) {
    while in_flight > 0 {
        in_flight -= host.reap();
    }
}

#[cfg(test)]
mod tests {
    use super::{round, workloads};
    use std::time::Duration;

    #[test]
    fn both_sides_complete_every_workload() {
        for workload in workloads() {
            for side in round(Duration::from_millis(40), &workload).unwrap() {
                let figures = [side.time, side.doorbells, side.busy_beside, side.busy];
                assert!(figures.iter().all(|figure| figure.is_finite()), "{}: {side:?}", workload.name());
                assert!(side.time > 0.0 && side.doorbells > 0.0, "{}: {side:?}", workload.name());
            }
        }
    }
}
