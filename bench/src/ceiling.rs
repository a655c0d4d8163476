//! The front-end's own ceiling: its request rate against a back-end that does nothing but answer.
//!
//! A result close to the ceiling says little about the back-end. The answering thread rests for a while after each burst,
//! as a back-end does that is at work; the best rest for the front-end is found by trial.

use crate::frontend::FrontEnd;
use crate::report::{Record, Report, Runs, Section, number};
use crate::settings::Settings;
use crate::target::Target;
use crate::workload::{self, Workload};
use crate::{closed, frontends};
use anyhow::{Context, Result};
use std::time::Duration;

/// The rests that are tried, in µs, for workloads with more than one request in flight.
const RESTS: [u64; 5] = [0, 2, 5, 10, 20];
const QUICK_RESTS: [u64; 2] = [0, 5];

/// The target, and the best rest per workload.
#[derive(Debug, Default)]
pub struct Ceilings {
    target: Option<Target>,
    rests: Vec<(Workload, Duration)>,
}

impl Ceilings {
    /// Measures the ceilings of all workloads of `cases` that the run includes.
    pub fn measure(settings: &Settings, cases: &[&str], report: &mut Report) -> Result<Self> {
        let wanted = |workload: &Workload| {
            settings.wants(&format!("ceiling/{}", workload.name()))
                || frontends::wanted(settings).contains(workload)
                || cases.iter().any(|case| closed::wanted(settings, case).contains(workload))
        };
        let workloads: Vec<_> = workload::all().into_iter().filter(wanted).collect();
        if workloads.is_empty() {
            return Ok(Self::default());
        }
        let target = Target::start(settings.sockets.path().join("ceiling"), settings.queues)?;
        let columns = ["workload", "thousand requests per second", "rest after a burst, µs"];
        let mut section = Section::new("The front-end's ceiling", INTRO, columns.map(str::to_owned).to_vec());
        let mut served_best = Vec::new();
        for workload in workloads {
            let rests: &[u64] = match (workload.depth, settings.quick) {
                (1, _) => &[0],
                (_, true) => &QUICK_RESTS,
                (_, false) => &RESTS,
            };
            let mut best = (0.0, 0);
            for &rest in rests {
                let rate = run(settings, &target, &workload, Duration::from_micros(rest))?;
                best = if rate > best.0 { (rate, rest) } else { best };
            }
            section.row(vec![workload.name(), number(best.0 / 1e3), best.1.to_string()]);
            let mut runs = Runs::default();
            runs.push(best.0);
            let case = format!("ceiling/{}", workload.name());
            report.records.push(Record::new(
                &case,
                "the front-end's ceiling",
                "IOPS",
                &Runs::default(),
                &runs,
            ));
            served_best.push((workload, Duration::from_micros(best.1)));
        }
        report.section(section);
        Ok(Self { target: Some(target), rests: served_best })
    }

    /// Measures the front-end's request rate once more, with the best rest known for the workload.
    pub fn measure_again(&self, settings: &Settings, workload: &Workload) -> Result<f64> {
        let target = self.target.as_ref().context("no ceiling was measured")?;
        let (_, rest) =
            self.rests.iter().find(|(known, _)| known == workload).context("an unknown workload")?;
        run(settings, target, workload, *rest)
    }
}

/// The front-end's request rate against the target.
fn run(settings: &Settings, target: &Target, workload: &Workload, rest: Duration) -> Result<f64> {
    target.rest_after_bursts(rest);
    let mut front_end = FrontEnd::connect(target.socket(), settings.queues, *workload)?;
    front_end.closed(settings.warm_up)?;
    Ok(front_end.closed(settings.span / 2)?.rate())
}

const INTRO: &str = "Against a polled target in the bench's own process that takes requests and completes them without \
    reading or writing their data.";
