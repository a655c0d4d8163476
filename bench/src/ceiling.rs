//! The front-end's own ceiling: how fast it can go at all, against a back end that does nothing but answer.
//!
//! A result that comes close to this says little about the back end. The answering thread rests after each burst for a
//! while, as a back end does that works; which rest is best for the front-end is found by trying.

use crate::closed;
use crate::frontend::FrontEnd;
use crate::report::{Record, Report, Runs, Section, number};
use crate::settings::Settings;
use crate::target::Target;
use crate::workload::{self, Workload};
use anyhow::Result;
use std::time::Duration;

/// What rests are tried, in µs, where there is more than one request in flight.
const RESTS: [u64; 5] = [0, 2, 5, 10, 20];
const QUICK_RESTS: [u64; 2] = [0, 5];

/// The most that the front-end has been seen to do.
#[derive(Debug, Default)]
pub struct Ceilings(Vec<(Workload, f64)>);

impl Ceilings {
    /// Finds the ceilings of all workloads that are about to be measured.
    pub fn measure(settings: &Settings, report: &mut Report) -> Result<Self> {
        let wanted = |workload: &Workload| {
            settings.wants(&format!("ceiling/{}", workload.name()))
                || closed::CASES.iter().any(|case| closed::wanted(settings, case).contains(workload))
        };
        let workloads: Vec<_> = workload::all().into_iter().filter(wanted).collect();
        if workloads.is_empty() {
            return Ok(Self::default());
        }
        let target = Target::start(settings.sockets.path().join("ceiling"), settings.queues)?;
        let columns = ["workload", "thousand requests per second", "rest after a burst, µs"];
        let mut section = Section::new("The front-end's ceiling", INTRO, columns.map(str::to_owned).to_vec());
        let mut all = Vec::new();
        for workload in workloads {
            let rests: &[u64] = match (workload.depth, settings.quick) {
                (1, _) => &[0],
                (_, true) => &QUICK_RESTS,
                (_, false) => &RESTS,
            };
            let mut best = (0.0, 0);
            for &rest in rests {
                target.rest_after_bursts(Duration::from_micros(rest));
                let mut front_end = FrontEnd::connect(target.socket(), settings.queues)?;
                front_end.closed(&workload, settings.warm_up)?;
                let rate = front_end.closed(&workload, settings.span / 2)?.rate();
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
            all.push((workload, best.0));
        }
        report.section(section);
        Ok(Self(all))
    }

    /// A back end, whatever it is, has been seen to get this many requests per second out of the front-end.
    pub fn seen(&mut self, workload: &Workload, rate: f64) {
        if let Some((_, most)) = self.0.iter_mut().find(|(known, _)| known == workload) {
            *most = most.max(rate);
        }
    }

    /// Requests per second, if the workload was measured.
    pub fn of(&self, workload: &Workload) -> Option<f64> {
        self.0.iter().find(|(known, _)| known == workload).map(|&(_, rate)| rate)
    }
}

const INTRO: &str = "Against a polled target in the bench's own process that takes requests and gives them back, without \
    looking at their data.";
