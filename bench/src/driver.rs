//! The NVMe driver on a model controller, in one thread and virtual time: what the driver executes for a request, without the
//! controller. [`crate::nvme`] measures the driver's time.

use anyhow::{Context, Result, bail, ensure};
use aryk_dma::Mapping;
use aryk_nvme::controller::{Controller, Event, Options, PairRequest};
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::QueuePair;
use aryk_nvme_model::{Config, Data, Model, NamespaceConfig};
use aryk_pci::Function;
use std::sync::Arc;

/// The functions whose instructions are the driver's.
pub const COUNTED: [&str; 2] = ["*driver::Driven::submit*", "*driver::Driven::reap*"];
/// Blocks of the namespace.
pub const BLOCKS: u64 = 1 << 16;
/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Polls without an event before the run fails.
const POLLS_MAX: u32 = 10_000;

/// A counted case: a read of some bytes, and the commands in flight.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The name in the file of records.
    pub name: &'static str,
    /// Bytes of a command's data.
    len: u64,
    /// Data in pieces that only an SGL can describe.
    is_scattered: bool,
    /// Commands in flight.
    pub depth: u16,
}

/// All cases.
pub const CASES: [Case; 5] = [
    Case { name: "nvme/read-4k/qd1", len: BLOCK, is_scattered: false, depth: 1 },
    Case { name: "nvme/read-4k/qd32", len: BLOCK, is_scattered: false, depth: 32 },
    Case { name: "nvme/read-4k/qd128", len: BLOCK, is_scattered: false, depth: 128 },
    Case { name: "nvme/read-128k-prp-list/qd32", len: 32 * BLOCK, is_scattered: false, depth: 32 },
    Case { name: "nvme/read-128k-sgl/qd32", len: 32 * BLOCK, is_scattered: true, depth: 32 },
];

/// A command of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The first block.
    pub lba: u64,
    /// A write instead of a read.
    pub is_write: bool,
}

/// A controller with one queue pair, and memory for data.
pub struct Driven {
    /// The controller.
    pub model: Arc<Model>,
    /// Its queue pair.
    pub pair: QueuePair,
    commands: Commands,
    /// The data of each command.
    pieces: Vec<Vec<Piece>>,
    blocks: u64,
    // Dropped after the pair: ends the access to its memory.
    _controller: Controller,
    _memory: Arc<Mapping>,
}

impl Driven {
    /// Attaches [`model`], for `depth` commands of `len` bytes; scattered data needs SGLs.
    ///
    /// # Errors
    /// A controller that does not become ready, or a process without memory.
    pub fn new(len: u64, is_scattered: bool, depth: u16) -> Result<Self> {
        let model = model()?;
        let function: Arc<dyn Function> = Arc::clone(&model) as _;
        let mut controller = Controller::attach(Arc::clone(&function), Options::default(), 0)?;
        let pair = create_pair(&model, &mut controller, depth)?;
        let listed = controller.namespaces().first().context("the model has a namespace")?;
        let info = controller.info().context("the controller is ready")?;
        let commands = Commands::new(listed.namespace.as_ref().map_err(Clone::clone)?, info);
        let memory = Arc::new(Mapping::in_file(2 * len * u64::from(depth) + BLOCK)?);
        let iova = function.map(&memory.dma_range(0, memory.len()).context("a range of the memory")?)?;
        let data = (0..u64::from(depth)).map(|i| pieces(iova + 2 * i * len, len, is_scattered)).collect();
        let blocks = len / BLOCK;
        Ok(Self { model, pair, commands, pieces: data, blocks, _controller: controller, _memory: memory })
    }

    /// Submits commands, by one doorbell.
    #[inline(never)]
    pub fn submit(&mut self, requests: &[Request]) {
        for (token, (request, data)) in requests.iter().zip(&self.pieces).enumerate() {
            let entry = match request.is_write {
                false => self.commands.read(request.lba, self.blocks),
                true => self.commands.write(request.lba, self.blocks, false),
            };
            let entry = entry.expect("the blocks are in the namespace");
            self.pair.submit(entry, data, token as u64, 0).expect("the pair has a free slot");
        }
        self.pair.flush();
    }

    /// Takes the completions, and returns the number of commands that succeeded.
    #[inline(never)]
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        let reaped =
            self.pair.reap(u16::MAX, |completed| count += usize::from(completed.status.is_success()));
        reaped.map_or(0, |_| count)
    }
}

/// A model controller, which keeps no data and, as most drives, has no shadow doorbells.
///
/// # Errors
/// A process without memory or descriptors.
pub fn model() -> Result<Arc<Model>> {
    let namespaces = vec![(1, NamespaceConfig::new(BLOCKS, 1, 1))];
    Ok(Model::new("bench", Config { data: Data::Null, oacs: 0, namespaces, ..Config::default() })?)
}

/// The data of a command: one piece, or pieces of 4 KiB that begin within pages.
fn pieces(iova: u64, len: u64, is_scattered: bool) -> Vec<Piece> {
    if !is_scattered {
        return vec![Piece { iova, len: len as u32 }];
    }
    (0..len / BLOCK).map(|i| Piece { iova: iova + 512 + 2 * i * BLOCK, len: BLOCK as u32 }).collect()
}

fn create_pair(model: &Model, controller: &mut Controller, depth: u16) -> Result<QueuePair> {
    for now in 0..u64::from(POLLS_MAX) {
        model.step(now);
        match controller.poll(now) {
            Some(Event::Ready) => {
                controller.create_pair(PairRequest { depth, vector: None })?;
            }
            Some(Event::QueueCreated(pair)) => return Ok(*pair),
            Some(Event::Ended(end)) => bail!("the controller ended: {end:?}"),
            _ => {}
        }
    }
    bail!("the controller is not ready after {POLLS_MAX} polls")
}

/// Executes `batches` times as many commands as are in flight at a time.
pub fn run(case: &str, batches: u32) -> Result<()> {
    let case = CASES.into_iter().find(|known| known.name == case).context("no such case")?;
    let mut driven = Driven::new(case.len, case.is_scattered, case.depth)?;
    let lbas = (0..u64::from(case.depth)).map(|i| i * 977 % (BLOCKS - case.len / BLOCK));
    let requests: Vec<_> = lbas.map(|lba| Request { lba, is_write: false }).collect();
    for _ in 0..batches {
        driven.submit(&requests);
        driven.model.step(0);
        let count = driven.reap();
        ensure!(count == requests.len(), "{count} commands completed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{CASES, run};

    #[test]
    fn every_case_runs() {
        for case in CASES {
            run(case.name, 100).unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        }
        assert!(run("none/such", 1).is_err());
    }
}
