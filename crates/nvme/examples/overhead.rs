//! Compares the driver with a bare loop that only writes submission entries and reads completion entries, on model controllers.
//!
//!     cargo run --release -p aryk-nvme --example overhead [SECONDS [calls]]
//!
//! Two comparisons of 4 KiB reads, in turns of some milliseconds, so that both meet the same computer: the time in the driver's
//! calls alone, with the controller in the same thread; and commands per second, with a controller that runs on another core
//! (not with `calls`, for a profiler).

use aryk_dma::{DmaPin, Mapping};
use aryk_nvme::controller::{Controller, Event, Options, PairRequest};
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::QueuePair;
use aryk_nvme_model::{Config, Data, Model, NamespaceConfig, SubmissionEntry, admin, nvm};
use aryk_pci::{Function, Registers, Width};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PAGE: u64 = 4096;
const BLOCKS: u64 = 1 << 16;
/// Entries of the bare loop's queues.
const ENTRIES: u64 = 256;
/// Pages of the bare loop's memory: admin queues, I/O submission queue, I/O completion queue, data.
const ADMIN_CQ: u64 = PAGE;
const IO_SQ: u64 = 2 * PAGE;
const IO_CQ: u64 = 6 * PAGE;
const DATA: u64 = 8 * PAGE;
/// Batches of one turn.
const TURN: u32 = 2000;

/// One of the compared programs.
trait Host {
    fn model(&self) -> &Arc<Model>;
    /// Submits `count` reads, by one doorbell.
    fn submit(&mut self, count: u64);
    /// Takes the completions, and returns their number.
    fn reap(&mut self) -> u64;
}

fn model() -> Result<Arc<Model>> {
    let namespaces = vec![(1, NamespaceConfig::new(BLOCKS, 1, 1))];
    // As most drives, without shadow doorbells.
    Ok(Model::new("overhead", Config { data: Data::Null, oacs: 0, namespaces, ..Config::default() })?)
}

/// Writes entries and reads entries.
struct Bare {
    model: Arc<Model>,
    memory: DmaPin,
    _mapping: Arc<Mapping>,
    iova: u64,
    doorbells: Registers,
    tail: u64,
    head: u64,
    phase: u8,
    lba: u32,
}

impl Bare {
    fn new() -> Result<Self> {
        let model = model()?;
        let mapping = Arc::new(Mapping::in_file(DATA + ENTRIES * PAGE)?);
        let range = mapping.dma_range(0, mapping.len()).ok_or("a range")?;
        let iova = model.map(&range)?;
        let memory = range.pin().ok_or("memory")?;
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
            assert!(memory.write(64 * i as u64, entry.as_bytes()));
            doorbells.write(0, i as u32 + 1);
            model.step(0);
        }
        Ok(Self { model, memory, _mapping: mapping, iova, doorbells, tail: 0, head: 0, phase: 1, lba: 0 })
    }
}

impl Host for Bare {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    #[inline(never)]
    fn submit(&mut self, count: u64) {
        for _ in 0..count {
            let mut entry =
                SubmissionEntry { opcode: nvm::READ, nsid: 1.into(), ..SubmissionEntry::default() };
            entry.cid = (self.tail as u16).into();
            entry.cdw10 = self.lba.into();
            self.lba = (self.lba + 1) % BLOCKS as u32;
            entry.dptr[..8].copy_from_slice(&(self.iova + DATA + self.tail * PAGE).to_le_bytes());
            assert!(self.memory.write(IO_SQ + 64 * self.tail, entry.as_bytes()));
            self.tail = (self.tail + 1) % ENTRIES;
        }
        self.doorbells.write(8, self.tail as u32);
    }

    #[inline(never)]
    fn reap(&mut self) -> u64 {
        let mut count = 0;
        loop {
            let mut entry = [0; 16];
            assert!(self.memory.read(IO_CQ + 16 * self.head, &mut entry));
            if entry[14] & 1 != self.phase {
                break;
            }
            assert_eq!((entry[14] & !1, entry[15]), (0, 0), "a failed read");
            self.head = (self.head + 1) % ENTRIES;
            self.phase ^= u8::from(self.head == 0);
            count += 1;
        }
        if count > 0 {
            self.doorbells.write(12, self.head as u32);
        }
        count
    }
}

/// Uses the driver.
struct Driver {
    model: Arc<Model>,
    pair: QueuePair,
    commands: Commands,
    iova: u64,
    lba: u64,
    now: u64,
    _controller: Controller,
    _mapping: Arc<Mapping>,
}

impl Driver {
    fn new(depth: u16) -> Result<Self> {
        let model = model()?;
        let function: Arc<dyn Function> = Arc::clone(&model) as _;
        let mut controller = Controller::attach(Arc::clone(&function), Options::default(), 0)?;
        let mut now = 0;
        let pair = loop {
            model.step(now);
            match controller.poll(now) {
                Some(Event::Ready) => drop(controller.create_pair(PairRequest { depth, vector: None })?),
                Some(Event::QueueCreated(pair)) => break *pair,
                Some(Event::Ended(end)) => return Err(format!("{end:?}").into()),
                _ => {}
            }
            now += 1000;
        };
        let namespace = controller.namespaces()[0].namespace.clone()?;
        let commands = Commands::new(&namespace, controller.info().ok_or("it is ready")?);
        let mapping = Arc::new(Mapping::in_file(u64::from(depth) * PAGE)?);
        let iova = function.map(&mapping.dma_range(0, mapping.len()).ok_or("a range")?)?;
        Ok(Self { model, pair, commands, iova, lba: 0, now, _controller: controller, _mapping: mapping })
    }
}

impl Host for Driver {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    #[inline(never)]
    fn submit(&mut self, count: u64) {
        for token in 0..count {
            let entry = self.commands.read(self.lba, 1).expect("the block is in the namespace");
            self.lba = (self.lba + 1) % BLOCKS;
            let data = [Piece { iova: self.iova + token * PAGE, len: PAGE as u32 }];
            self.pair.submit(entry, &data, token, self.now).expect("the pair has a free slot");
        }
        self.pair.flush();
    }

    #[inline(never)]
    fn reap(&mut self) -> u64 {
        let count = self.pair.reap(u16::MAX, |done| assert!(done.status.is_success(), "a failed read"));
        count.expect("the model is correct").into()
    }
}

#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
fn clock() -> Instant {
    Instant::now()
}

/// The time in the host's calls for `TURN` batches of `depth` commands.
fn busy(host: &mut dyn Host, depth: u64) -> Duration {
    let mut spent = Duration::ZERO;
    for _ in 0..TURN / depth as u32 + 1 {
        let start = clock();
        host.submit(depth);
        spent += start.elapsed();
        host.model().step(u64::MAX / 2);
        let start = clock();
        let count = host.reap();
        spent += start.elapsed();
        assert_eq!(count, depth);
    }
    spent / (TURN / depth as u32 + 1) / depth as u32
}

/// Time of a command with `depth` in flight, of a controller that runs.
fn through(host: &mut dyn Host, depth: u64) -> Duration {
    let (mut free, mut done, start) = (depth, 0, clock());
    let wanted = u64::from(TURN) * 20;
    while done < wanted {
        if free > 0 {
            host.submit(free);
        }
        free = host.reap();
        done += free;
    }
    while free < depth {
        free += host.reap();
    }
    start.elapsed() / wanted as u32
}

/// The median of both, and of their ratio.
fn compare(
    seconds: f64,
    depth: u64,
    measure: fn(&mut dyn Host, u64) -> Duration,
    runs: bool,
) -> Result<[f64; 3]> {
    let (mut bare, mut driver) = (Bare::new()?, Driver::new(depth as u16)?);
    let (mut samples, start) = (Vec::new(), clock());
    while samples.is_empty() || start.elapsed().as_secs_f64() < seconds {
        let mut times = [0.0; 2];
        let hosts: [&mut dyn Host; 2] = [&mut bare, &mut driver];
        for (time, host) in times.iter_mut().zip(hosts) {
            let model = Arc::clone(host.model());
            let running = if runs { Some(model.run()?) } else { None };
            *time = measure(host, depth).as_nanos() as f64;
            drop(running);
        }
        samples.push([times[0], times[1], times[1] / times[0]]);
    }
    Ok(std::array::from_fn(|i| {
        let mut values: Vec<f64> = samples.iter().map(|sample| sample[i]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }))
}

fn main() -> Result<()> {
    let seconds = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse())?;
    let is_calls_only = std::env::args().nth(2).is_some_and(|text| text == "calls");
    println!("| 4 KiB reads | bare ns | driver ns | ratio |\n| --- | --- | --- | --- |");
    for depth in [1, 32, 128] {
        let [bare, driver, ratio] = compare(seconds, depth, busy, false)?;
        println!("| in the calls, QD{depth} | {bare:.0} | {driver:.0} | {ratio:.2} |");
        if is_calls_only {
            continue;
        }
        let [bare, driver, ratio] = compare(seconds, depth, through, true)?;
        println!("| with a controller on another core, QD{depth} | {bare:.0} | {driver:.0} | {ratio:.2} |");
    }
    Ok(())
}
