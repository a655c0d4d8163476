//! `cargo xtask bench nvme`: the NVMe driver compared with a bare loop that only writes submission entries and reads completion
//! entries, each on a model controller of its own.
//!
//! Two measurements, in turns of both sides: commands per second with a controller that polls on the other core, and the time in
//! the calls alone, with a controller that this thread steps between them.

use crate::driver::{BLOCK, BLOCKS, Driven, Request, model};
use crate::process::{BACK_END_CORE, FRONT_END_CORE, pin};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::{Rounds, run_comparable};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use aryk_dma::{DmaPin, Mapping};
use aryk_nvme_model::{Model, SubmissionEntry, admin, nvm};
use aryk_pci::{Function, Registers, Width};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Requests that a workload repeats.
const REQUESTS: usize = 4096;
/// Entries of the bare loop's queues.
const ENTRIES: u64 = 256;
/// The bare loop's memory: admin queues, I/O submission queue, I/O completion queue, a page of PRP list for each entry, data.
const ADMIN_CQ: u64 = BLOCK;
const IO_SQ: u64 = 2 * BLOCK;
const IO_CQ: u64 = 6 * BLOCK;
const LISTS: u64 = 8 * BLOCK;
const DATA: u64 = LISTS + ENTRIES * BLOCK;
/// Time of a command through the driver, as a multiple of the bare loop's, and nanoseconds in the calls.
const RATIO_AIM: f64 = 1.2;
const BUSY_AIM: f64 = 70.0;

/// One of the two sides.
trait Host {
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
        self.pair.counters().doorbells
    }
}

/// Writes entries and reads entries.
struct Bare {
    model: Arc<Model>,
    memory: DmaPin,
    iova: u64,
    doorbells: Registers,
    /// PRP2 of each entry, and the number of blocks.
    blocks: u64,
    tail: u64,
    head: u64,
    phase: u8,
    rung: u64,
    _mapping: Arc<Mapping>,
}

impl Bare {
    fn new(len: u64) -> Result<Self> {
        let model = model()?;
        let mapping = Arc::new(Mapping::in_file(DATA + ENTRIES * len)?);
        let range = mapping.dma_range(0, mapping.len()).context("a range of the memory")?;
        let iova = model.map(&range)?;
        let memory = range.pin().context("the memory")?;
        let doorbells = model.map_registers(0x1000, 0x1000)?;
        model.set_bus_master(true)?;
        model.write_register(0x24, Width::Four, 31 << 16 | 31)?;
        model.write_register(0x28, Width::Eight, iova)?;
        model.write_register(0x30, Width::Eight, iova + ADMIN_CQ)?;
        model.write_register(0x14, Width::Four, 6 << 16 | 4 << 20 | 1)?;
        model.step(0);
        let size = 1 | (ENTRIES as u32 - 1) << 16;
        let queues = [(admin::CREATE_CQ, 1, IO_CQ), (admin::CREATE_SQ, 1 << 16 | 1, IO_SQ)];
        for (i, (opcode, cdw11, at)) in queues.into_iter().enumerate() {
            let mut entry = SubmissionEntry { opcode, ..SubmissionEntry::default() };
            (entry.cdw10, entry.cdw11) = (size.into(), cdw11.into());
            entry.dptr[..8].copy_from_slice(&(iova + at).to_le_bytes());
            ensure!(memory.write(64 * i as u64, entry.as_bytes()));
            doorbells.write(0, i as u32 + 1);
            model.step(0);
        }
        let blocks = len / BLOCK;
        for entry in 0..ENTRIES {
            let pages: Vec<u64> = (1..blocks).map(|i| iova + DATA + entry * len + i * BLOCK).collect();
            ensure!(memory.write(LISTS + entry * BLOCK, pages.as_bytes()));
        }
        let (tail, head, phase, rung) = (0, 0, 1, 0);
        Ok(Self { model, memory, iova, doorbells, blocks, tail, head, phase, rung, _mapping: mapping })
    }
}

impl Host for Bare {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    #[inline(never)]
    fn submit(&mut self, requests: &[Request]) {
        for request in requests {
            let opcode = if request.is_write { nvm::WRITE } else { nvm::READ };
            let mut entry = SubmissionEntry { opcode, nsid: 1.into(), ..SubmissionEntry::default() };
            entry.cid = (self.tail as u16).into();
            (entry.cdw10, entry.cdw12) = ((request.lba as u32).into(), (self.blocks as u32 - 1).into());
            let data = self.iova + DATA + self.tail * self.blocks * BLOCK;
            entry.dptr[..8].copy_from_slice(&data.to_le_bytes());
            entry.dptr[8..].copy_from_slice(&(self.iova + LISTS + self.tail * BLOCK).to_le_bytes());
            assert!(self.memory.write(IO_SQ + 64 * self.tail, entry.as_bytes()));
            self.tail = (self.tail + 1) % ENTRIES;
        }
        self.doorbells.write(8, self.tail as u32);
        self.rung += 1;
    }

    #[inline(never)]
    fn reap(&mut self) -> usize {
        let mut count = 0;
        loop {
            let mut entry = [0; 16];
            assert!(self.memory.read(IO_CQ + 16 * self.head, &mut entry));
            if entry[14] & 1 != self.phase {
                break;
            }
            assert_eq!((entry[14] & !1, entry[15]), (0, 0), "a failed command");
            self.head = (self.head + 1) % ENTRIES;
            self.phase ^= u8::from(self.head == 0);
            count += 1;
        }
        if count > 0 {
            self.doorbells.write(12, self.head as u32);
            self.rung += 1;
        }
        count
    }

    fn doorbells(&self) -> u64 {
        self.rung
    }
}

/// The results of both sides in one round: the bare loop's, then the driver's.
struct Round {
    /// Nanoseconds of a command.
    times: [f64; 2],
    /// Nanoseconds in the calls, of a command.
    busy: [f64; 2],
    /// Writes to doorbells, of a command.
    doorbells: [f64; 2],
}

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = [
        "workload",
        "driver, ns a command",
        "bare loop",
        "ratio",
        "driver: ns in the calls",
        "bare loop's",
        "driver: doorbells a command",
        "core to core, ns",
    ];
    let mut section = Section::new("The NVMe driver alone", INTRO, columns.map(str::to_owned).to_vec());
    for workload in workloads() {
        let name = format!("nvme/{}", workload.name());
        if settings.wants(&name) {
            let rounds = run_comparable(settings.runs, || round(settings.span, &workload))?;
            section.row(row(&name, &workload, &rounds, report));
        }
    }
    report.section(section);
    Ok(())
}

const INTRO: &str = "Medians (least–greatest) of a model controller that moves no data: with the controller on another core, from the submission of a \
    command to its completion, and the time in the driver's calls alone, with a controller in the same thread. The ratio is of the medians.";

fn workloads() -> Vec<Workload> {
    let small = [0, 100, 30]
        .iter()
        .flat_map(|writes| [1, 32, 128].map(|depth| Workload::random(*writes, 4 << 10, depth)));
    small.chain([1, 32].map(|depth| Workload::random(0, 128 << 10, depth))).collect()
}

fn row(name: &str, workload: &Workload, rounds: &Rounds<Round>, report: &mut Report) -> Vec<String> {
    let runs = |of: &dyn Fn(&Round) -> [f64; 2]| {
        [0, 1].map(|side| rounds.each.iter().map(|round| of(round)[side]).collect::<Runs>())
    };
    let [bare, driver] = runs(&|round| round.times);
    let record = Record::new(name, "time of a command, peer a bare loop", "ns", &driver, &bare);
    let ratio = record.ratio.map_or(String::new(), |ratio| format!("{ratio:.2} (aim {RATIO_AIM})"));
    report.records.push(record);
    let [bare_busy, busy] = runs(&|round| round.busy);
    report.records.push(Record::new(name, "time in the calls, peer a bare loop", "ns", &busy, &bare_busy));
    let [_, doorbells] = runs(&|round| round.doorbells);
    let aim = if workload.depth == 128 { format!(" (aim {BUSY_AIM})") } else { String::new() };
    vec![
        workload.name(),
        cell(&driver, number),
        cell(&bare, number),
        ratio,
        cell(&busy, number) + &aim,
        cell(&bare_busy, number),
        cell(&doorbells, |value| format!("{value:.2}")),
        rounds.round_trip.as_nanos().to_string(),
    ]
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
    let hosts: [&mut dyn Host; 2] = [&mut bare, &mut driver];
    let mut round = Round { times: [0.0; 2], busy: [0.0; 2], doorbells: [0.0; 2] };
    for (side, host) in hosts.into_iter().enumerate() {
        round.busy[side] = in_the_calls(host, &requests, depth, span / 4)?;
        (round.times[side], round.doorbells[side]) = with_a_controller(host, &requests, depth, span)?;
    }
    Ok(round)
}

/// Nanoseconds in the calls, of a command, with `depth` commands a batch.
fn in_the_calls(host: &mut dyn Host, requests: &[Request], depth: usize, span: Duration) -> Result<f64> {
    let (mut spent, mut done, mut next, start) = (Duration::ZERO, 0, 0, Instant::now());
    while start.elapsed() < span {
        let before = Instant::now();
        host.submit(&requests[next..next + depth]);
        spent += before.elapsed();
        host.model().step(0);
        let before = Instant::now();
        let count = host.reap();
        spent += before.elapsed();
        ensure!(count == depth, "{count} commands completed");
        (done, next) = (done + count, (next + depth) % REQUESTS);
    }
    Ok(spent.as_secs_f64() * 1e9 / done as f64)
}

/// Nanoseconds and doorbells of a command, with `depth` commands in flight at a controller on the other core.
fn with_a_controller(
    host: &mut dyn Host,
    requests: &[Request],
    depth: usize,
    span: Duration,
) -> Result<(f64, f64)> {
    // The model's thread inherits this thread's core.
    pin(BACK_END_CORE)?;
    let running = Arc::clone(host.model()).run()?;
    pin(FRONT_END_CORE)?;
    let (mut free, mut done, mut next) = (depth, 0, 0);
    let (doorbells, start) = (host.doorbells(), Instant::now());
    while start.elapsed() < span {
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
    while free < depth {
        free += host.reap();
    }
    drop(running);
    Ok((took.as_secs_f64() * 1e9 / done as f64, doorbells as f64 / done as f64))
}

#[cfg(test)]
mod tests {
    use super::{round, workloads};
    use std::time::Duration;

    #[test]
    fn both_sides_complete_every_workload() {
        for workload in workloads() {
            let round = round(Duration::from_millis(20), &workload).unwrap();
            let figures = [round.times, round.busy, round.doorbells];
            let is_sound = figures.as_flattened().iter().all(|&figure| figure > 0.0 && figure.is_finite());
            assert!(is_sound, "{}: {figures:?}", workload.name());
        }
    }
}
