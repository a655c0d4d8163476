//! Two drivers of one NVMe controller, of which the first is killed with commands in flight.
//!
//!     cargo run -p aryk-nvme --example fence -- flood 0000:3d:00.0 write
//!     cargo run -p aryk-nvme --example fence -- succeed 0000:3d:00.0 17
//!
//! `flood` submits 128 commands, each for 4 KiB of the first 512 KiB, and waits to be killed. `succeed` opens the controller as
//! soon as it can, and does nothing until it gets a line; then it writes bytes 17 to the same blocks, and is quiet for a
//! while. It fails if its memory changes meanwhile, or the blocks have other data in the end.
#![expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aryk_dma::{GuestArea, Mapping};
use aryk_nvme::controller::{Controller, End, Event, Options, PairRequest};
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::QueuePair;
use aryk_nvme::spec::register::Shutdown;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Address, Function, PciError};

/// Commands, and bytes of each.
const COMMANDS: u64 = 128;
const LEN: u32 = 4096;
/// Time for which nothing must happen.
const QUIET: Duration = Duration::from_millis(1200);
/// Every byte of the first driver's data.
const FLOOD: u8 = 0xf1;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["flood", address, "read"] => flood(address.parse()?, false),
        ["flood", address, "write"] => flood(address.parse()?, true),
        ["succeed", address, byte] => succeed(address.parse()?, byte.parse()?),
        _ => Err("usage: fence flood ADDRESS [read | write] | fence succeed ADDRESS BYTE".into()),
    }
}

fn flood(address: Address, is_write: bool) -> Result<(), Box<dyn Error>> {
    let mut driver = Driver::start(Arc::new(Vfio::new().open(address)?), FLOOD)?;
    driver.submit(is_write)?;
    let mut completed = 0;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(300) {
        completed += driver.reap()?;
    }
    println!("flooding {} {:#x}", COMMANDS - completed, driver.iova);
    loop {
        driver.reap()?;
    }
}

fn succeed(address: Address, byte: u8) -> Result<(), Box<dyn Error>> {
    let vfio = Vfio::new();
    let function = loop {
        match vfio.open(address) {
            // The predecessor is not gone yet.
            Err(PciError::InUse { .. }) => std::thread::sleep(Duration::from_millis(1)),
            opened => break opened?,
        }
    };
    let mut driver = Driver::start(Arc::new(function), byte)?;
    println!("opened {:#x}", driver.iova);
    driver.watch_memory()?;
    println!("quiet");
    std::io::stdin().read_line(&mut String::new())?;
    driver.run(true)?;
    println!("written");
    driver.watch_memory()?;
    fill(&driver.memory, !byte);
    driver.run(false)?;
    driver.check_memory()?;
    println!("own data");
    driver.stop()
}

/// A driver of the whole controller.
struct Driver {
    function: Arc<dyn Function>,
    controller: Controller,
    pair: QueuePair,
    commands: Commands,
    memory: Arc<Mapping>,
    /// Every byte of the memory.
    byte: u8,
    iova: u64,
    begin: Instant,
}

impl Driver {
    /// Fills memory, and starts the controller after that: DMA of a predecessor would be found from here on.
    fn start(function: Arc<dyn Function>, byte: u8) -> Result<Self, Box<dyn Error>> {
        let memory = Arc::new(Mapping::anonymous(COMMANDS * u64::from(LEN))?);
        let iova = function.map(&memory.dma_range(0, memory.len()).ok_or("no memory")?)?;
        fill(&memory, byte);
        let begin = Instant::now();
        let mut controller = Controller::attach(Arc::clone(&function), Options::default(), 0)?;
        wait(&mut controller, begin, |event| matches!(event, Event::Ready).then_some(()))?;
        controller.create_pair(PairRequest { depth: COMMANDS as u16, vector: None })?;
        let pair = *wait(&mut controller, begin, |event| match event {
            Event::QueueCreated(pair) => Some(pair),
            _ => None,
        })?;
        let info = controller.info().ok_or("not identified")?;
        let namespace = controller.namespaces().first().ok_or("no namespace")?.namespace.as_ref();
        let commands = Commands::new(namespace.map_err(|reason| reason.to_string())?, info);
        Ok(Self { function, controller, pair, commands, memory, byte, iova, begin })
    }

    fn submit(&mut self, is_write: bool) -> Result<(), Box<dyn Error>> {
        let blocks = u64::from(LEN) / 512;
        for i in 0..COMMANDS {
            let entry = if is_write {
                self.commands.write(i * blocks, blocks, false)?
            } else {
                self.commands.read(i * blocks, blocks)?
            };
            let piece = Piece { iova: self.iova + i * u64::from(LEN), len: LEN };
            self.pair.submit(entry, &[piece], i, now(self.begin))?;
        }
        self.pair.flush();
        Ok(())
    }

    /// Takes completions; returns their number.
    fn reap(&mut self) -> Result<u64, Box<dyn Error>> {
        let (mut count, mut failed) = (0, None);
        self.pair.reap(COMMANDS as u16, |completed| {
            count += 1;
            failed = failed.or(Some(completed.status).filter(|status| !status.is_success()));
        })?;
        failed.map_or_else(|| Ok(count), |status| Err(status.to_string().into()))
    }

    /// Submits all commands, and waits until they are completed.
    fn run(&mut self, is_write: bool) -> Result<(), Box<dyn Error>> {
        self.submit(is_write)?;
        let mut completed = 0;
        while completed < COMMANDS {
            completed += self.reap()?;
        }
        Ok(())
    }

    /// Checks for a while that nothing changes the memory.
    fn watch_memory(&self) -> Result<(), Box<dyn Error>> {
        let begin = Instant::now();
        while begin.elapsed() < QUIET {
            self.check_memory()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<(), Box<dyn Error>> {
        let mut bytes = vec![0; self.memory.len() as usize];
        GuestArea::new(&self.memory, 0, self.memory.len()).ok_or("no memory")?.read_bytes(0, &mut bytes);
        match bytes.iter().position(|byte| *byte != self.byte) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of the memory is {:#x}", bytes[at]).into()),
        }
    }

    fn stop(mut self) -> Result<(), Box<dyn Error>> {
        self.controller.shut_down(Shutdown::Normal, now(self.begin));
        self.controller.queue_quiesced(self.pair.qid());
        let is_end = |event| matches!(event, Event::Ended(End::Stopped { .. })).then_some(());
        wait(&mut self.controller, self.begin, is_end)?;
        Ok(self.function.unmap(self.iova, self.memory.len())?)
    }
}

fn fill(memory: &Arc<Mapping>, byte: u8) {
    let range = memory.dma_range(0, memory.len()).expect("the whole memory");
    assert!(range.write(0, &vec![byte; memory.len() as usize]), "the memory is mapped");
}

fn now(begin: Instant) -> u64 {
    begin.elapsed().as_nanos() as u64
}

/// Polls the controller until `find` finds an event.
fn wait<T>(
    controller: &mut Controller,
    begin: Instant,
    find: impl Fn(Event) -> Option<T>,
) -> Result<T, Box<dyn Error>> {
    loop {
        match controller.poll(now(begin)) {
            Some(Event::Ended(End::Failed(failure))) => return Err(failure.into()),
            Some(event) => {
                if let Some(found) = find(event) {
                    return Ok(found);
                }
            }
            None => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}
