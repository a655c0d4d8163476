//! Open loops: requests follow a Poisson schedule, independent of the back-end's speed. They measure the processor time
//! and latency of a request at low rates: the cost of sleeping.

use crate::backend::{self, BackEnd, Policy};
use crate::frontend::FrontEnd;
use crate::plot::{Data, Plot};
use crate::process::Process;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::{Settings, null};
use crate::workload::Workload;
use anyhow::Result;

/// Requests per second, and the names of the rates.
const RATES: [(f64, &str); 3] = [(1e3, "1k"), (1e4, "10k"), (1e5, "100k")];

/// 4 KiB reads, with as many in flight as the schedule requires.
pub const WORKLOAD: Workload = Workload::random(0, 4 << 10, 128);

/// The measured values of one side.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Processor time of the whole process per request, in µs.
    pub cpu: Runs,
    /// Median latency, in µs.
    pub p50: Runs,
    /// The 99th percentile, in µs.
    pub p99: Runs,
}

impl Figures {
    /// Adds a run of a back-end that is stopped before and after.
    pub fn run(&mut self, settings: &Settings, back_end: &BackEnd, rate: f64) -> Result<()> {
        back_end.process.resume()?;
        let mut front_end = FrontEnd::connect(&back_end.socket, settings.queues, WORKLOAD)?;
        front_end.open(rate, settings.warm_up)?;
        let before = back_end.process.cpu()?;
        let open = front_end.open(rate, settings.span)?;
        let cpu = back_end.process.cpu()? - before;
        drop(front_end);
        back_end.process.pause()?;
        self.cpu.push(cpu.as_secs_f64() * 1e6 / open.requests as f64);
        self.p50.push(open.latency.value_at_quantile(0.5) as f64 / 1e3);
        self.p99.push(open.latency.value_at_quantile(0.99) as f64 / 1e3);
        Ok(())
    }

    fn named(&self) -> [(&'static str, &Runs); 3] {
        [("processor time per request", &self.cpu), ("latency p50", &self.p50), ("latency p99", &self.p99)]
    }
}

/// Starts `arykd` with a null disk, once for each policy, and stops the processes.
pub fn aryks(settings: &Settings, name: &str, policies: &[Policy]) -> Result<Vec<BackEnd>> {
    let start = |policy: &Policy| {
        let dir = settings.sockets.path().join(format!("{name}-{}", policy.name()));
        let aryk = backend::aryk(&settings.arykd, *policy, &null(), &dir)?;
        aryk.process.pause()?;
        Ok(aryk)
    };
    policies.iter().map(start).collect()
}

/// Measures the selected curves.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let wanted: Vec<_> =
        RATES.into_iter().filter(|(_, name)| settings.wants(&format!("open/{name}"))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let policies = [Policy::Interrupt, Policy::Adaptive, Policy::Poll];
    let aryks = aryks(settings, "open", &policies)?;
    let peer = backend::peer(&null(), "threads", &settings.sockets.path().join("open-peer"))?;
    peer.process.pause()?;
    aryks.iter().map(|aryk| &aryk.process).chain([&peer.process]).for_each(|process: &Process| {
        report.command(&process.command);
    });
    let columns = ["requests/s", "back-end", "processor µs per request", "p50 µs", "p99 µs"];
    let mut curves: Vec<_> = policies
        .map(|policy| format!("arykd, {}", policy.name()))
        .into_iter()
        .chain(["qemu-storage-daemon".to_owned()])
        .map(|side| (side, Vec::new()))
        .collect();
    let mut section = Section::new("Open loop: null", INTRO, columns.map(str::to_owned).to_vec());
    for (rate, name) in wanted {
        let mut ours = vec![Figures::default(); aryks.len()];
        let mut theirs = Figures::default();
        for _ in 0..settings.runs {
            for (aryk, figures) in aryks.iter().zip(&mut ours) {
                figures.run(settings, aryk, rate)?;
            }
            theirs.run(settings, &peer, rate)?;
        }
        for (policy, figures) in policies.iter().zip(&ours) {
            let case = format!("open/{name}/{}", policy.name());
            for ((metric, ours), (_, theirs)) in figures.named().into_iter().zip(theirs.named()) {
                report.records.push(Record::new(&case, metric, "µs", ours, theirs));
            }
        }
        for ((side, points), figures) in curves.iter_mut().zip(ours.iter().chain([&theirs])) {
            let cells = figures.named().map(|(_, runs)| cell(runs, number));
            section.row([name.to_owned(), side.clone()].into_iter().chain(cells).collect());
            points.extend(figures.p50.median().zip(figures.cpu.median()).map(|(p50, cpu)| (p50, cpu, name)));
        }
    }
    section.plot(Plot {
        name: "trade",
        title: "What latency costs: 1k, 10k and 100k requests per second".to_owned(),
        axis: "median latency, µs".to_owned(),
        data: Data::Trades { axis: "processor µs per request", curves },
    });
    report.section(section);
    Ok(())
}

const INTRO: &str = "4 KiB random reads on a Poisson schedule. Processor time is that of all threads of the back-end's \
    process, kernel included; latency counts from the request's scheduled time, in a front-end that polls.";
