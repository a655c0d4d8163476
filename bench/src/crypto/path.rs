//! What encryption adds to a request: the path from a guest's ring through vhost-blk and the block layer to a disk in memory,
//! with and without a crypto disk in between.

use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::run_comparable;
use crate::settings::Settings;
use crate::stack::{Case, Module, SECTOR, Stack};
use crate::turns::{self, Stopwatch};
use crate::workload::Workload;
use anyhow::Result;
use aryk_aes_xts::{Key, SectorSize, Tweaks};
use aryk_reactor::Clock;
use std::time::{Duration, Instant};

/// What the added time aims to be at most, as a multiple of the cipher's.
const AIM: f64 = 1.2;

const INTRO: &str = "Nanoseconds of a request in a reactor's turns, in one process: a queue of vhost-user-blk, the block layer, and a \
    disk in memory, with and without a crypto disk (AES-256-XTS, sectors of 512 bytes). Between two turns the same thread is the guest. \
    *cipher* is the time of one call of `aryk-aes-xts` for as many bytes, in the same round, on buffers that are as large and as many: \
    a write is encrypted from the guest's buffers to a pooled one, a read is decrypted from a pooled one to the guest's. What is added \
    beyond the cipher is one more channel, and the copy between the disk and a pooled buffer instead of the guest's.";

/// Nanoseconds of a request in one round.
struct Round {
    plain: f64,
    encrypted: f64,
    cipher: f64,
}

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = ["workload", "memory", "crypto over memory", "added", "cipher", "added / cipher"];
    let title = "vhost-user-blk to memory: busy time";
    let mut section = Section::new(title, INTRO, columns.map(str::to_owned).to_vec());
    for workload in workloads() {
        let name = format!("path/crypto/{}", workload.name());
        if !settings.wants(&name) {
            continue;
        }
        let rounds = run_comparable(settings.runs, || round(settings.span / 5, &workload))?;
        let runs = |of: fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
        let (plain, encrypted) = (runs(|round| round.plain), runs(|round| round.encrypted));
        let (added, cipher) = (encrypted.minus(&plain), runs(|round| round.cipher));
        report.records.push(Record::new(
            &name,
            "busy time added, peer the cipher alone",
            "ns",
            &added,
            &cipher,
        ));
        let cells = [&plain, &encrypted, &added, &cipher].map(|runs| cell(runs, number));
        let ratio = format!("{} (aim {AIM})", cell(&added.over(&cipher), number));
        section.row([workload.name()].into_iter().chain(cells).chain([ratio]).collect());
    }
    report.section(section);
    Ok(())
}

fn workloads() -> Vec<Workload> {
    // 256 KiB in flight at most: a turn that is longer than an interruption would count as one.
    let sizes = [(4 << 10, 32), (128 << 10, 2)];
    sizes
        .into_iter()
        .flat_map(|(block, depth)| [0, 100].map(|writes| Workload::random(writes, block, depth)))
        .collect()
}

fn round(span: Duration, workload: &Workload) -> Result<Round> {
    let measured = |module| {
        let mut stack = Stack::start(Case::of(module, workload), Clock::Monotonic)?;
        let touched = turns::touch(&mut stack, workload);
        let nanos = touched.and_then(|()| turns::busy(&mut stack, workload, span, || {}));
        stack.end().and(nanos)
    };
    Ok(Round {
        plain: measured(Module::Memory)?,
        encrypted: measured(Module::Crypto)?,
        cipher: cipher(span, workload)?,
    })
}

/// Nanoseconds of the cipher for a request.
fn cipher(span: Duration, workload: &Workload) -> Result<f64> {
    let (key, sector) = (Key::new(&crate::stack::KEY)?, SectorSize::new(SECTOR as usize)?);
    let (len, writes) = (workload.block as usize, workload.write_percent == 100);
    let (mut pooled, mut guest) = (vec![1; len], vec![2; len * workload.depth]);
    let (mut watch, mut requests, start) = (Stopwatch::new(), 0_u32, Instant::now());
    let mut pass = || {
        for buffer in guest.chunks_exact_mut(len) {
            let tweaks = Tweaks { start: u128::from(requests) << 10, step: 1 };
            if writes {
                key.encrypt(sector, tweaks, buffer, &mut pooled)?;
            } else {
                key.decrypt(sector, tweaks, &pooled, buffer)?;
            }
            requests += 1;
        }
        anyhow::Ok(())
    };
    let mut done = Ok(());
    while done.is_ok() && start.elapsed() < span {
        watch.call(|| {
            done = pass();
            true
        });
    }
    done?;
    Ok(watch.nanos() / f64::from(requests))
}

#[cfg(test)]
mod tests {
    use super::{round, workloads};
    use std::time::Duration;

    #[test]
    fn every_workload_runs() {
        for workload in workloads() {
            let round = round(Duration::from_millis(20), &workload).unwrap();
            let figures = [round.plain, round.encrypted, round.cipher];
            assert!(
                figures.iter().all(|figure| figure.is_finite() && *figure > 0.0),
                "{}: {figures:?}",
                workload.name()
            );
        }
    }
}
