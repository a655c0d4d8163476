//! The limit of this front-end: the same loop against a thread of our own that completes each request at once without I/O.
//!
//! A result close to this limit says little about the back-end. The thread pauses after each burst, like a back-end at work;
//! several pauses are tried, and the best result counts.

use super::args::{BenchArgs, Unit};
use super::load::{Load, Pace, Progress};
use super::rig::Rig;
use super::workload::Source;
use super::{affinity, blocks_of};
use crate::error::Error;
use aryk_dma::{GuestArea, MemTable};
use aryk_front_end::{Builder, Format, Memory, Shape, blk, feature, scsi};
use aryk_virtqueue::{Chain, Config, Popped, Virtqueue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Pauses to try, in ns, if there is more than one request in flight.
const RESTS: [u64; 5] = [0, 1_000, 2_000, 5_000, 10_000];
/// Duration of each trial.
const SPAN: Duration = Duration::from_millis(200);
/// Bytes of the simulated disk, unless --area is given.
const DISK: u64 = 1 << 40;

/// The highest rate in requests per second. The loop runs on the first of the two cores.
pub fn measure(args: &BenchArgs, patience: Duration, cores: (usize, usize)) -> Result<f64, Error> {
    affinity::pin(cores.0)?;
    let rests = if args.qd == 1 { &RESTS[..1] } else { &RESTS };
    let mut best = 0.0_f64;
    for rest in rests {
        let rate = match args.scsi {
            Some(Unit { target, lun }) => {
                let requests = scsi::Requests::new(target, lun);
                with_rest(requests, answer_command, args, patience, cores.1, *rest)?
            }
            None => with_rest(blk::Requests, answer_request, args, patience, cores.1, *rest)?,
        };
        best = best.max(rate);
    }
    Ok(best)
}

/// Writes a successful status into a chain.
type Answer = fn(&mut Chain, &MemTable);

fn with_rest<B: Builder + Copy>(
    builder: B,
    well: Answer,
    args: &BenchArgs,
    patience: Duration,
    core: usize,
    rest: u64,
) -> Result<f64, Error> {
    let features = feature::INDIRECT | feature::EVENT_IDX;
    let mut rig = Rig::bare(builder, args, features)?;
    let memory = rig.memory.table().expect("one region is a table");
    let queues = rig.queues.iter().map(|queue| device(&rig.memory, rig.layout.shape, queue.announced().ring));
    let queues: Vec<_> = queues.collect();
    let stop = AtomicBool::new(false);
    let (up, is_up) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let pinned = affinity::pin(core);
            // The loop's thread waits for this message.
            let _ = up.send(pinned);
            answer(queues, well, &memory, &stop, Duration::from_nanos(rest));
        });
        let mut run = || {
            is_up.recv().unwrap_or(Ok(()))?;
            let time = SPAN.as_nanos() as u64;
            let pace = Pace { time, requests: u64::MAX, rate: None, patience };
            let source = Source::new(args.rw, blocks_of(args, DISK), 1);
            Load::new(&mut rig, source, pace, &Progress::default()).run()
        };
        let measured = run();
        stop.store(true, Ordering::Relaxed);
        Ok(measured?.rate())
    })
}

/// The device side of a ring.
fn device(memory: &Memory, shape: Shape, ring: &aryk_front_end::Ring) -> Virtqueue {
    let parts = ring.parts();
    let table = memory.table().expect("one region is a table");
    let area = |at: u64, len: u64| -> GuestArea {
        table.area_at_guest(Memory::guest_addr(at), len).expect("the ring lies in the memory")
    };
    let size = shape.size;
    let (format, desc, driver, device) = match shape.format {
        Format::Split => (
            aryk_virtqueue::Format::Split,
            aryk_virtqueue::desc_len(size),
            aryk_virtqueue::avail_len(size, shape.event_idx),
            aryk_virtqueue::used_len(size, shape.event_idx),
        ),
        Format::Packed => (aryk_virtqueue::Format::Packed, aryk_virtqueue::desc_len(size), 4, 4),
    };
    let config = Config {
        format,
        size,
        desc: area(parts.desc, desc),
        driver: area(parts.driver, driver),
        device: area(parts.device, device),
        event_idx: shape.event_idx,
        indirect: true,
        base: ring.base(),
        inflight: None,
    };
    Virtqueue::new(config).expect("the ring is valid")
}

/// The status of a block request is the last byte.
fn answer_request(chain: &mut Chain, memory: &MemTable) {
    if let Some(status) = chain.take_last_writable() {
        memory.write(status, &0_u8).expect("our own addresses are in our memory");
    }
}

/// The response of a SCSI command is the first writable descriptor; sense data is not needed.
fn answer_command(chain: &mut Chain, memory: &MemTable) {
    if let Some(answer) = chain.writable().first() {
        memory.write(answer.addr, &[0_u8; 12]).expect("our own addresses are in our memory");
    }
}

/// Completes all requests with success until `stop`.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]
fn answer(mut queues: Vec<Virtqueue>, well: Answer, memory: &MemTable, stop: &AtomicBool, rest: Duration) {
    let mut chains: Vec<_> = queues.iter().map(|_| Chain::default()).collect();
    queues.iter_mut().for_each(Virtqueue::disable_kicks);
    while !stop.load(Ordering::Relaxed) {
        let mut count = 0;
        for (queue, chain) in queues.iter_mut().zip(&mut chains) {
            while let Popped::Chain(head) = queue.pop(memory, chain) {
                let len = chain.writable_len() as u32;
                well(chain, memory);
                queue.push_used(head, len);
                count += 1;
            }
            // The driver polls: it needs no interrupt.
            let _ = queue.publish();
        }
        if count > 1 && !rest.is_zero() {
            let start = Instant::now();
            while start.elapsed() < rest {
                std::hint::spin_loop();
            }
        }
        std::hint::spin_loop();
    }
}
