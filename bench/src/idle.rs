//! Idle cost: the processor time of disks without I/O, and the latency of a request to a sleeping daemon.

use crate::backend::{self, BackEnd, Policy};
use crate::frontend::FrontEnd;
use crate::open::{self, Figures};
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::{Settings, null};
use anyhow::Result;
use serde_json::json;
use std::time::{Duration, Instant};

/// Wait before a daemon counts as idle.
const SETTLE: Duration = Duration::from_millis(500);
/// Number of disks in the larger case.
const DISKS: usize = 1_000;
/// Requests per second of the wake-up case: 4 ms apart, while the daemon polls for 200 µs at most before it sleeps.
const WAKE_RATE: f64 = 250.0;

/// Measures the selected cases.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if settings.wants("idle/attached-1") || settings.wants("idle/created-1000") {
        idle(settings, report)?;
    }
    if settings.wants("idle/wake") {
        wake(settings, report)?;
    }
    Ok(())
}

fn idle(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = ["what", "arykd, adaptive", "qemu-storage-daemon", "aim"].map(str::to_owned).to_vec();
    let intro = "Processor time in percent of one core, all threads, while the daemon receives neither calls nor requests.";
    let mut section = Section::new("Idle", intro, columns);
    let mut add = |case: &str, what: &str, ours: &Runs, theirs: &Runs| {
        report.records.push(Record::new(case, "processor time", "%", ours, theirs));
        let cells = [what.to_owned(), cell(ours, number), cell(theirs, number), "< 0.5".to_owned()];
        section.row(cells.to_vec());
    };
    let dir = settings.sockets.path();
    if settings.wants("idle/attached-1") {
        let aryk = backend::aryk(&settings.arykd, Policy::Adaptive, &null(), &dir.join("idle"))?;
        let ours = attached(settings, &aryk)?;
        drop(aryk);
        let theirs = attached(settings, &backend::peer(&null(), "threads", &dir.join("idle-peer"))?)?;
        add("idle/attached-1", "1 attached disk", &ours, &theirs);
    }
    if settings.wants("idle/created-1000") {
        let (process, mut rpc) =
            backend::arykd(&settings.arykd, Policy::Adaptive, &dir.join("idle-1000"), None)?;
        for i in 0..DISKS {
            let name = format!("d{i}");
            rpc.call("bdev_null_create", json!({"name": name, "num_blocks": 1 << 21, "block_size": 512}))?;
            rpc.call("vhost_create_blk_controller", json!({"ctrlr": name, "dev_name": name}))?;
        }
        let what = format!("{DISKS} created disks, each with a controller");
        add("idle/created-1000", &what, &watch(settings, &process)?, &Runs::default());
    }
    report.section(section);
    Ok(())
}

/// The idle processor time of a back-end with an attached disk that was used just before.
fn attached(settings: &Settings, back_end: &BackEnd) -> Result<Runs> {
    let mut front_end = FrontEnd::connect(&back_end.socket, 1, open::WORKLOAD)?;
    front_end.closed(settings.warm_up)?;
    watch(settings, &back_end.process)
}

fn watch(settings: &Settings, process: &Process) -> Result<Runs> {
    std::thread::sleep(SETTLE);
    let (start, before) = (Instant::now(), process.cpu()?);
    std::thread::sleep(settings.idle);
    let used = process.cpu()? - before;
    let mut runs = Runs::default();
    runs.push(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64());
    Ok(runs)
}

/// The latency of rare requests, each of which wakes the daemon, compared with a daemon that never sleeps.
fn wake(settings: &Settings, report: &mut Report) -> Result<()> {
    let sides = open::aryks(settings, "wake", &[Policy::Adaptive, Policy::Poll])?;
    let mut figures = vec![Figures::default(); sides.len()];
    for _ in 0..settings.runs {
        for (side, figures) in sides.iter().zip(&mut figures) {
            figures.run(settings, side, WAKE_RATE)?;
        }
    }
    let [adaptive, poll] = &figures[..] else { unreachable!("two sides") };
    let columns = ["latency µs", "asleep", "polling", "above polling", "aim"].map(str::to_owned).to_vec();
    let intro = "4 KiB reads, 250 a second, of a null disk of an `arykd` that sleeps in between (adaptive), and of one \
        that polls.";
    let mut section = Section::new("Waking up", intro, columns);
    let quantiles = [("p50", &adaptive.p50, &poll.p50, 60), ("p99", &adaptive.p99, &poll.p99, 200)];
    for (name, asleep, polling, aim) in quantiles {
        let above = asleep.minus(polling);
        let metric = format!("latency {name} above polling");
        report.records.push(Record::new("idle/wake", &metric, "µs", &above, &Runs::default()));
        let cells = [asleep, polling, &above].map(|runs| cell(runs, number));
        section.row([name.to_owned()].into_iter().chain(cells).chain([format!("≤ {aim}")]).collect());
    }
    report.section(section);
    Ok(())
}
