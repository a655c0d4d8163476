//! What each layer of a cloud's disk adds to a request in a reactor: a queue of a SCSI controller, a group of limits, an
//! encrypted disk and a Ceph image, in one process ([`crate::stack`]).

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
const LAYERS: [&str; 5] = [
    "vhost-user-blk",
    "vhost-user-scsi instead",
    "and a QoS group",
    "and an encrypted disk",
    "and a Ceph image instead of the store",
];

const INTRO: &str = "Nanoseconds of a request in a reactor's turns, in one process. 4 KiB at random places, 70% reads. Each row adds a \
    layer to the row above: a SCSI controller's queue instead of a block device's; limits of the disk and its group that the load does \
    not reach; AES-256-XTS with sectors of 512 bytes; at last the module `rbd`, whose image takes the place of the null disk, or of the \
    disk in memory. Its store is taken as given: a substitute for librbd, in memory, on the other core. So that row has what the \
    reactor does for a Ceph image (the ring of requests, the doorbell of the link's thread, the list of results), and nothing of the \
    link's thread and of librbd, which have cores of their own. Results can come one by one there, as from a cluster, \
    where a null disk and memory complete all requests of a turn at once. Between two turns the same thread is the guest. With \
    one request in flight, each request pays for whole turns of the reactor: for one, or with the image for two.";

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
        Case::of(Module::CryptoOverRbd, workload).behind_scsi().with_limits(),
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
