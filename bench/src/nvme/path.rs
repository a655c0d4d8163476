//! The path of a VM's request to an NVMe controller: a guest's ring, vhost-blk, the block layer, the NVMe module and its
//! driver, in one reactor. The guest is in the reactor's thread, and works between the turns.

use super::run_beside;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::run_comparable;
use crate::settings::Settings;
use crate::stack::{Case, Module, Stack};
use crate::turns;
use crate::workload::Workload;
use anyhow::Result;
use aryk_reactor::Clock;
use std::time::Duration;

/// Nanoseconds of a request in the turns of one round.
struct Round {
    /// With the controller on another core.
    beside: f64,
    /// Stepped.
    stepped: f64,
    /// To a null disk.
    null: f64,
}

/// A workload's results, in nanoseconds of a request.
#[derive(Debug)]
pub struct Figures {
    /// The workload.
    pub workload: Workload,
    /// With the controller on another core.
    pub beside: Runs,
    /// Stepped.
    pub stepped: Runs,
    /// To a null disk.
    pub null: Runs,
}

const INTRO: &str = "Nanoseconds of a request in a reactor's turns: from the guest's available ring through vhost-user-blk, the block layer, \
    the NVMe module and its driver to the doorbell, and from the completion entry to the used ring. Everything is in one process: a reactor \
    with the real clock polls a split queue (three descriptors a request) of a guest whose memory the controller accesses by itself. \
    Between two turns the same thread is the guest: it takes the answers and makes as many new requests available. The time of each turn \
    that had work counts, without the guest's and without the model's. Where the model is stepped, the thread steps it between two turns. \
    *null* is a disk without a device, measured in the same way. What this leaves out: a front-end on another core, whose cache lines the \
    reactor would fetch, and the interrupt to the guest.";

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<Vec<Figures>> {
    let columns =
        ["workload", "NVMe, the controller on another core", "NVMe, stepped", "null", "core to core, ns"];
    let title = "vhost-user-blk to NVMe: busy time";
    let mut section = Section::new(title, INTRO, columns.map(str::to_owned).to_vec());
    let mut all = Vec::new();
    for workload in workloads() {
        let name = format!("path/nvme/{}", workload.name());
        if !settings.wants(&name) {
            continue;
        }
        let rounds = run_comparable(settings.runs, || round(settings.span, &workload))?;
        let runs = |of: fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
        let figures = Figures {
            workload,
            beside: runs(|round| round.beside),
            stepped: runs(|round| round.stepped),
            null: runs(|round| round.null),
        };
        let metric = "busy time, the controller on another core, peer a null disk";
        report.records.push(Record::new(&name, metric, "ns", &figures.beside, &figures.null));
        let metric = "busy time, peer a null disk";
        report.records.push(Record::new(&name, metric, "ns", &figures.stepped, &figures.null));
        let cells = [&figures.beside, &figures.stepped, &figures.null].map(|runs| cell(runs, number));
        println!("{name}: {} ns busy, stepped {}, null {}", cells[0], cells[1], cells[2]);
        let distance = rounds.round_trip.as_nanos().to_string();
        section.row(std::iter::once(figures.workload.name()).chain(cells).chain([distance]).collect());
        all.push(figures);
    }
    report.section(section);
    Ok(all)
}

fn workloads() -> Vec<Workload> {
    let small = [0, 100, 30]
        .iter()
        .flat_map(|writes| [1, 32, 128].map(|depth| Workload::random(*writes, 4 << 10, depth)));
    small.chain([Workload::random(0, 128 << 10, 32)]).collect()
}

fn round(span: Duration, workload: &Workload) -> Result<Round> {
    let measured = |module, how| {
        let mut stack = Stack::start(Case::of(module, workload), Clock::Monotonic)?;
        let nanos = busy(&mut stack, workload, how, span / 2);
        stack.end().and(nanos)
    };
    Ok(Round {
        beside: measured(Module::Nvme, Controller::Beside)?,
        stepped: measured(Module::Nvme, Controller::Stepped)?,
        null: measured(Module::Null, Controller::Stepped)?,
    })
}

/// Where the model of a controller runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Controller {
    /// On the other core.
    Beside,
    /// Between the turns.
    Stepped,
}

/// Nanoseconds of a request in the turns that have work.
fn busy(stack: &mut Stack, workload: &Workload, how: Controller, span: Duration) -> Result<f64> {
    let model = stack.model().cloned();
    let (beside, stepped) = match how {
        Controller::Beside => (model, None),
        Controller::Stepped => (None, model),
    };
    let _running = beside.as_ref().map(run_beside).transpose()?;
    turns::busy(stack, workload, span, || {
        if let Some(model) = &stepped {
            model.step(0);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{round, workloads};
    use std::time::Duration;

    #[test]
    fn every_workload_runs() {
        for workload in workloads() {
            let round = round(Duration::from_millis(20), &workload).unwrap();
            let figures = [round.beside, round.stepped, round.null];
            assert!(
                figures.iter().all(|&figure| figure.is_finite() && figure > 0.0),
                "{}: {figures:?}",
                workload.name()
            );
        }
    }
}
