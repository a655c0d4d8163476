//! Reads 4 KiB at random places of a drive's first namespace, with a fixed number of commands in flight, and prints the time: all
//! of it, and what the polls without a completion took.
//!
//!     cargo run --release -p aryk-nvme --example load -- 0000:3d:00.0 32 1000000
//!
//! The loop does per turn what a reactor does: it reads the clock once, reaps, submits again, looks after late commands, and
//! rings the doorbell once. Where an instruction takes one nanosecond (QEMU's `-icount shift=0`), the times are counts of
//! instructions.

mod attached;

use std::error::Error;
use std::sync::Arc;

use aryk_dma::Mapping;
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::QueuePair;
use attached::{Attached, Clock};

/// Bytes of a request.
const LEN: u32 = 4096;
/// Polls that measure one poll without a completion.
const EMPTY_POLLS: u64 = 1_000_000;
/// Polls without a completion after which the drive has failed.
const POLLS_MAX: u64 = 1 << 36;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, depth, requests] = &words[..] else {
        return Err("usage: load ADDRESS|SOCKET DEPTH REQUESTS".into());
    };
    let (depth, requests) = (depth.parse()?, requests.parse()?);
    let function = attached::open(name)?;
    let memory = Arc::new(Mapping::in_file(u64::from(LEN) * u64::from(depth))?);
    let iova = function.map(&memory.dma_range(0, memory.len()).ok_or("no memory")?)?;

    let mut drive = Attached::new(&function, depth)?;
    let info = drive.controller.info().ok_or("not identified")?;
    let listed = drive.controller.namespaces().first().ok_or("the drive has no namespace")?;
    let namespace = listed.namespace.as_ref().map_err(Clone::clone)?;
    let blocks = u64::from(LEN / namespace.block_size());
    let commands = Commands::new(namespace, info);
    let places = commands.blocks() / blocks;
    let clock = drive.clock;
    let mut load =
        Load { pair: &mut drive.pair, commands, iova, blocks, places, random: fastrand::Rng::with_seed(1) };

    let empty = load.empty_poll(clock)?;
    // Warms caches up.
    load.run(depth, u64::from(depth) * 16, clock)?;
    let before = load.pair.counters().doorbells();
    let (time, empty_polls) = load.run(depth, requests, clock)?;
    let doorbells = load.pair.counters().doorbells() - before;
    println!(
        "requests {requests} ns {time} empty_polls {empty_polls} empty_poll_ns {empty:.3} doorbells {doorbells}"
    );

    drive.end()?;
    function.unmap(iova, memory.len())?;
    Ok(())
}

/// Reads on one queue pair.
struct Load<'a> {
    pair: &'a mut QueuePair,
    commands: Commands,
    /// The data: [`LEN`] bytes for each token.
    iova: u64,
    /// Blocks of a request, and requests that fit the namespace.
    blocks: u64,
    places: u64,
    random: fastrand::Rng,
}

impl Load<'_> {
    /// Nanoseconds of a poll without a completion, while a command is in flight.
    fn empty_poll(&mut self, clock: Clock) -> Result<f64, Box<dyn Error>> {
        let mut done = Vec::with_capacity(1);
        // Without its doorbell, the drive does not see the command.
        self.submit(0, clock.now())?;
        let start = clock.now();
        let polls = self.poll(&mut done, EMPTY_POLLS)?;
        let time = clock.now() - start;
        if polls != EMPTY_POLLS || !done.is_empty() {
            return Err("a command completed that the drive should not see".into());
        }
        self.pair.flush();
        self.poll(&mut done, POLLS_MAX)?;
        Ok(time as f64 / EMPTY_POLLS as f64)
    }

    /// Executes `requests`, and returns the nanoseconds and the polls without a completion.
    fn run(&mut self, depth: u16, requests: u64, clock: Clock) -> Result<(u64, u64), Box<dyn Error>> {
        let mut done: Vec<u64> = Vec::with_capacity(depth.into());
        let (mut submitted, mut completed, mut empty) = (0, 0, 0);
        let start = clock.now();
        done.extend(0..u64::from(depth));
        loop {
            let now = clock.now();
            for token in done.drain(..).take((requests - submitted).min(depth.into()) as usize) {
                self.submit(token, now)?;
                submitted += 1;
            }
            if self.pair.next_late().is_some_and(|time| time <= now) {
                return Err("a command is late".into());
            }
            self.pair.flush();
            if completed == requests {
                return Ok((clock.now() - start, empty));
            }
            empty += self.poll(&mut done, POLLS_MAX)?;
            completed += done.len() as u64;
        }
    }

    /// Polls until a command has completed, up to `limit` times. Returns the number of polls that found nothing.
    #[inline(never)]
    fn poll(&mut self, done: &mut Vec<u64>, limit: u64) -> Result<u64, Box<dyn Error>> {
        let mut failed = None;
        for polls in 0..limit {
            let count = self.pair.reap(u16::MAX, |completed| {
                if !completed.status.is_success() {
                    failed = Some(completed.status);
                }
                done.push(completed.token);
            })?;
            if let Some(status) = failed {
                return Err(format!("a read failed: {status:?}").into());
            }
            if count > 0 {
                return Ok(polls);
            }
        }
        Ok(limit)
    }

    fn submit(&mut self, token: u64, now: u64) -> Result<(), Box<dyn Error>> {
        let read = self.commands.read(self.random.u64(..self.places) * self.blocks, self.blocks)?;
        self.pair.submit(
            read,
            &[Piece { iova: self.iova + token * u64::from(LEN), len: LEN }],
            token,
            now,
        )?;
        Ok(())
    }
}
