//! Few requests: what each costs a target that sleeps in between, and one that polls.

use super::Target;
use crate::backend::Policy;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::Result;

/// Requests per second.
const RATE: f64 = 1e4;
/// The most of a polling target's processor time.
const AIM: f64 = 0.5;
const POLICIES: [Policy; 3] = [Policy::Interrupt, Policy::Adaptive, Policy::Poll];

const INTRO: &str = "4 KiB reads, 10,000 a second on a Poisson schedule. Processor time is that of all threads of the process, kernel \
    included; latency counts from the scheduled time, in a host that polls.";

pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("nvmf/rare") {
        return Ok(());
    }
    let columns =
        ["sleep policy", "processor µs per request", "p50 µs", "p99 µs", "of `poll`'s processor time"];
    let mut section = Section::new("10,000 requests a second", INTRO, columns.map(str::to_owned).to_vec());
    let mut targets = Vec::new();
    for policy in POLICIES {
        targets.push(Target::start(settings, policy.name(), policy)?);
    }
    let mut figures: [[Runs; 3]; POLICIES.len()] = Default::default();
    for _ in 0..settings.runs {
        for (target, figures) in targets.iter_mut().zip(&mut figures) {
            run(settings, target, figures)?;
        }
    }
    let polling = figures[POLICIES.len() - 1][0].clone();
    for (policy, [cpu, p50, p99]) in POLICIES.iter().zip(&figures) {
        let case = format!("nvmf/rare/{}", policy.name());
        report.records.push(Record::new(&case, "processor time per request, peer poll", "µs", cpu, &polling));
        report.records.push(Record::new(&case, "latency p50", "µs", p50, &Runs::default()));
        report.records.push(Record::new(&case, "latency p99", "µs", p99, &Runs::default()));
        let part = cpu.over(&polling);
        let aim = match part.median() {
            _ if *policy == Policy::Poll => "",
            Some(part) if part <= AIM => " (aim: at most 0.5)",
            _ => " (aim: at most 0.5, **missed**)",
        };
        let cells = [cpu, p50, p99].map(|runs| cell(runs, number));
        let part = cell(&part, number) + aim;
        section.row([policy.name().to_owned()].into_iter().chain(cells).chain([part]).collect());
    }
    report.section(section);
    Ok(())
}

fn run(settings: &Settings, target: &mut Target, [cpu, p50, p99]: &mut [Runs; 3]) -> Result<()> {
    target.with_queue(Workload::random(0, 4 << 10, 128), false, |target, queue| {
        queue.open_loop(RATE, settings.warm_up)?;
        let before = target.process.cpu()?;
        let (requests, latency) = queue.open_loop(RATE, settings.span)?;
        let used = target.process.cpu()? - before;
        cpu.push(used.as_secs_f64() * 1e6 / requests as f64);
        p50.push(latency.value_at_quantile(0.5) as f64 / 1e3);
        p99.push(latency.value_at_quantile(0.99) as f64 / 1e3);
        Ok(())
    })
}
