//! Measures the model itself: nanoseconds per command in a step, and commands per second of a thread that runs the model
//! against a bare loop that only writes submission entries and reads completion entries.
//!
//! A driver's cost is measured against that loop: what remains is the driver's.

use anyhow::{Context as _, Result, ensure};
use aryk_dma::{DmaPin, Mapping};
use aryk_nvme_model::{Config, Data, Model, NamespaceConfig, SubmissionEntry, admin, nvm};
use aryk_pci::{Function as _, Registers, Width};
use clap::Parser;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes as _;

const ENTRIES: u32 = 256;
const PAGE: u64 = 4096;
/// Pages of the queues: admin submission and completion, then those of the I/O queue pair.
const ADMIN_SQ: u64 = 0;
const ADMIN_CQ: u64 = PAGE;
const IO_SQ: u64 = 2 * PAGE;
const IO_CQ: u64 = 6 * PAGE;
const DATA: u64 = 8 * PAGE;

/// Measures the model NVMe controller.
#[derive(Debug, Parser)]
struct Args {
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Move data instead of only checking where it would go
    #[arg(long)]
    data: bool,
    /// Only steps, without a thread: for a profiler
    #[arg(long)]
    step_only: bool,
}

struct Host {
    model: Arc<Model>,
    memory: DmaPin,
    iova: u64,
    doorbells: Registers,
    tail: u32,
    head: u32,
    phase: u8,
}

impl Host {
    fn new(args: &Args) -> Result<Self> {
        let config = Config {
            namespaces: vec![(1, NamespaceConfig::new(1 << 16, 1, 1))],
            data: if args.data { Data::KeptDurable } else { Data::Null },
            ..Config::default()
        };
        let model = Model::new("rate", config)?;
        let mapping = Arc::new(Mapping::anonymous(2 << 20)?);
        let range = mapping.dma_range(0, 2 << 20).context("a range of the memory")?;
        let iova = model.map(&range)?;
        let memory = range.pin().context("the memory")?;
        let doorbells = model.map_registers(0x1000, 0x1000)?;
        model.set_bus_master(true)?;
        let mut host = Self { model, memory, iova, doorbells, tail: 0, head: 0, phase: 1 };
        host.start()?;
        Ok(host)
    }

    /// Enables the controller and creates the I/O queue pair.
    fn start(&mut self) -> Result<()> {
        let model = &self.model;
        model.write_register(0x24, Width::Four, 31 << 16 | 31)?;
        model.write_register(0x28, Width::Eight, self.iova + ADMIN_SQ)?;
        model.write_register(0x30, Width::Eight, self.iova + ADMIN_CQ)?;
        model.write_register(0x14, Width::Four, 6 << 16 | 4 << 20 | 1)?;
        model.step(0);
        let size = 1 | (ENTRIES - 1) << 16;
        for (i, (opcode, cdw11, at)) in
            [(admin::CREATE_CQ, 1, IO_CQ), (admin::CREATE_SQ, 1 << 16 | 1, IO_SQ)].into_iter().enumerate()
        {
            let mut entry = SubmissionEntry { opcode, ..SubmissionEntry::default() };
            (entry.cdw10, entry.cdw11) = (size.into(), cdw11.into());
            entry.dptr[..8].copy_from_slice(&(self.iova + at).to_le_bytes());
            ensure!(self.memory.write(ADMIN_SQ + 64 * i as u64, entry.as_bytes()));
            self.doorbells.write(0, i as u32 + 1);
            self.model.step(0);
        }
        ensure!(self.model.with(|controller| controller.io_queues()) == 1, "no I/O queue");
        Ok(())
    }

    /// Writes a read of one block, without the doorbell.
    fn submit(&mut self, random: u32) {
        let slot = self.tail;
        let mut entry = SubmissionEntry { opcode: nvm::READ, nsid: 1.into(), ..SubmissionEntry::default() };
        entry.cid = (slot as u16).into();
        entry.cdw10 = (random & 0xffff).into();
        let data = self.iova + DATA + u64::from(slot) * PAGE;
        entry.dptr[..8].copy_from_slice(&data.to_le_bytes());
        assert!(self.memory.write(IO_SQ + 64 * u64::from(slot), entry.as_bytes()));
        self.tail = (slot + 1) % ENTRIES;
    }

    /// Takes all completions, and rings the doorbell once.
    fn reap(&mut self) -> u32 {
        let mut count = 0;
        loop {
            let mut status = [0; 2];
            assert!(self.memory.read(IO_CQ + 16 * u64::from(self.head) + 14, &mut status));
            if status[0] & 1 != self.phase {
                break;
            }
            assert_eq!((status[0] & !1, status[1]), (0, 0), "a failed read");
            self.head += 1;
            if self.head == ENTRIES {
                self.head = 0;
                self.phase ^= 1;
            }
            count += 1;
        }
        if count > 0 {
            self.doorbells.write(12, self.head);
        }
        count
    }

    /// Rings the doorbell of the submission queue.
    fn ring(&self) {
        self.doorbells.write(8, self.tail);
    }
}

#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
fn main() -> Result<()> {
    let args = Args::parse();
    let duration = Duration::from_secs_f64(args.seconds);
    println!("{:>6} {:>22} {:>26}", "depth", "ns per command, step", "commands/s, thread + loop");
    for depth in [1, 32, 128] {
        let mut host = Host::new(&args)?;
        let mut random = fastrand::Rng::with_seed(1);
        let (mut spent, mut commands, start) = (Duration::ZERO, 0, Instant::now());
        while start.elapsed() < duration {
            for _ in 0..depth {
                host.submit(random.u32(..));
            }
            host.ring();
            let before = Instant::now();
            host.model.step(0);
            spent += before.elapsed();
            commands += host.reap();
        }
        let step_ns = spent.as_nanos() as f64 / f64::from(commands);

        if args.step_only {
            println!("{depth:>6} {step_ns:>22.1} {commands:>26} commands");
            continue;
        }
        let running = host.model.run()?;
        let (mut commands, mut in_flight, start) = (0_u64, 0, Instant::now());
        while start.elapsed() < duration {
            let free = depth - in_flight;
            for _ in 0..free {
                host.submit(random.u32(..));
            }
            if free > 0 {
                host.ring();
            }
            let done = host.reap();
            in_flight = depth - done;
            commands += u64::from(done);
        }
        let rate = commands as f64 / start.elapsed().as_secs_f64();
        drop(running);
        println!("{depth:>6} {step_ns:>22.1} {rate:>26.0}");
        let violations = host.model.with(|controller| controller.violations().count);
        ensure!(violations == 0, "{violations} violations");
    }
    Ok(())
}
