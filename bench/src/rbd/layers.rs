//! What each layer of a cloud's disk adds to a request, above the store: a queue of a SCSI controller, a group of limits, and an
//! encrypted disk, in one process and one thread ([`crate::stack`]).

use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::run_comparable;
use crate::settings::Settings;
use crate::stack::{Case, Module, Stack};
use crate::turns;
use crate::workload::Workload;
use anyhow::Result;
use aryk_reactor::Clock;
use std::time::Duration;

/// The rate for which the cores are computed, and the cores that are published for SPDK's stack.
const RATE: f64 = 288_000.0;
const PUBLISHED: f64 = 7.0;

/// The disks below the layers: without data, and in memory, each with the module that encrypts it.
const STORES: [(&str, Module, Module); 2] =
    [("null", Module::Null, Module::CryptoOverNull), ("memory", Module::Memory, Module::Crypto)];
/// The stacks, from the shortest to the whole one.
const LAYERS: [&str; 4] =
    ["vhost-user-blk", "vhost-user-scsi instead", "and a QoS group", "and an encrypted disk"];

const INTRO: &str = "Nanoseconds of a request in a reactor's turns, in one process, with the store taken as given: a null disk, or a \
    disk in memory, in place of a Ceph image. 4 KiB at random places, 70% reads. Each row adds a layer to the row above: a SCSI \
    controller's queue instead of a block device's; limits of the disk and its group that the load does not reach; AES-256-XTS with \
    sectors of 512 bytes. Between two turns the same thread is the guest. With one request in flight, each request also pays for a \
    whole turn of the reactor.";

/// Measures each layer.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    for (store, plain, encrypted) in STORES {
        for depth in [1, 32] {
            let workload = Workload { write_percent: 30, ..Workload::random(0, 4 << 10, depth) };
            let name = format!("rbd/layers/{store}/{}", workload.name());
            if settings.wants(&name) {
                one(settings, &name, store, [plain, encrypted], &workload, report)?;
            }
        }
    }
    Ok(())
}

/// The stacks of one store, in the order of [`LAYERS`].
const fn cases([plain, encrypted]: [Module; 2], workload: &Workload) -> [Case; LAYERS.len()] {
    let scsi = Case::of(plain, workload).behind_scsi();
    [
        Case::of(plain, workload),
        scsi,
        scsi.with_limits(),
        Case::of(encrypted, workload).behind_scsi().with_limits(),
    ]
}

fn one(
    settings: &Settings,
    name: &str,
    store: &str,
    modules: [Module; 2],
    workload: &Workload,
    report: &mut Report,
) -> Result<()> {
    let columns = ["layer", "ns per request", "added", "cores for 288,000 requests per second"];
    let title = format!("The layers above the store: {store}, {}", workload.name());
    let mut section = Section::new(&title, INTRO, columns.map(str::to_owned).to_vec());
    let rounds = run_comparable(settings.runs, || round(settings.span / 5, modules, workload))?;
    let runs = |layer: usize| rounds.each.iter().map(|round| round[layer]).collect::<Runs>();
    for (layer, label) in LAYERS.iter().enumerate() {
        let busy = runs(layer);
        let added = match layer {
            0 => "–".to_owned(),
            layer => cell(&busy.minus(&runs(layer - 1)), number),
        };
        let cores = cell(&busy.scaled(RATE / 1e9), number);
        let is_whole = layer + 1 == LAYERS.len();
        let cores = if is_whole { format!("{cores} (published for SPDK: {PUBLISHED})") } else { cores };
        section.row(vec![(*label).to_owned(), cell(&busy, number), added, cores]);
        report.records.push(Record::new(name, &format!("busy time, {label}"), "ns", &busy, &Runs::default()));
    }
    report.section(section);
    Ok(())
}

/// Nanoseconds of a request in each stack.
fn round(span: Duration, modules: [Module; 2], workload: &Workload) -> Result<[f64; LAYERS.len()]> {
    let mut round = [0.0; LAYERS.len()];
    for (nanos, case) in round.iter_mut().zip(cases(modules, workload)) {
        let mut stack = Stack::start(case, Clock::Monotonic)?;
        let busy = turns::busy(&mut stack, workload, span, || {});
        *nanos = stack.end().and(busy)?;
    }
    Ok(round)
}

#[cfg(test)]
mod tests {
    use super::{STORES, round};
    use crate::workload::Workload;
    use std::time::Duration;

    #[test]
    fn every_stack_runs() {
        for (store, plain, encrypted) in STORES {
            for depth in [1, 32] {
                let workload = Workload { write_percent: 30, ..Workload::random(0, 4 << 10, depth) };
                let round = round(Duration::from_millis(10), [plain, encrypted], &workload).unwrap();
                assert!(
                    round.iter().all(|nanos| nanos.is_finite() && *nanos > 0.0),
                    "{store}, {depth}: {round:?}"
                );
            }
        }
    }
}
