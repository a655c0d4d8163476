//! The front-end: crate `blkio`'s polled vhost-user-blk driver on the calling thread. The crate is no part of the
//! project, so that every back-end is measured by the same independent front-end.
//!
//! Runs on the main thread, which is pinned to the front-end's core. All requests share one region of memory; request
//! slot `i` owns its `i`th block. A queue's requests are the slots that are `i` modulo the number of queues.

use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use fastrand::Rng;
use hdrhistogram::Histogram;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Descriptors in each queue: three for each of up to 170 requests.
const QUEUE_SIZE: i32 = 512;
/// Bytes in a request that fills a disk.
const FILL_LEN: u32 = 128 << 10;
/// Turns of the closed loop between two readings of the clock.
const TURNS_PER_CLOCK_READ: u32 = 64;
/// Timeout of a request, after which it counts as lost.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Whether requests are in flight, and a count that grows with each completion, both for [`watch`].
static RUNNING: AtomicBool = AtomicBool::new(false);
static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// The result of a closed loop.
#[derive(Clone, Copy, Debug)]
pub struct Closed {
    /// Requests completed.
    pub requests: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
}

impl Closed {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// The result of an open loop.
#[derive(Debug)]
pub struct Open {
    /// Requests completed.
    pub requests: u64,
    /// Latency from each request's scheduled time, in ns.
    pub latency: Histogram<u64>,
}

/// A connection to a back-end, with its queues and memory.
pub struct FrontEnd {
    // Dropped before the driver, whose memory the queues use.
    queues: Vec<Blkioq>,
    _driver: Blkio,
    memory: usize,
    workload: Workload,
    capacity: u64,
    random: Rng,
    completions: Vec<MaybeUninit<Completion>>,
}

impl FrontEnd {
    /// Connects to a disk's vhost-user socket, with memory for one workload.
    pub fn connect(socket: &Path, queues: usize, workload: Workload) -> Result<Self> {
        let connect = || -> blkio::Result<Self> {
            let mut driver = Blkio::new("virtio-blk-vhost-user")?;
            driver.set_str("path", &socket.to_string_lossy())?;
            driver.connect()?;
            driver.set_i32("num-queues", 0)?;
            driver.set_i32("num-poll-queues", queues as i32)?;
            driver.set_i32("queue-size", QUEUE_SIZE)?;
            let capacity = driver.get_u64("capacity")?;
            let queues = driver.start()?.poll_queues;
            let region = driver.alloc_mem_region(workload.depth * workload.block as usize)?;
            driver.map_mem_region(&region)?;
            fill(region.addr, region.len);
            let completions = std::iter::repeat_with(MaybeUninit::uninit).take(workload.depth).collect();
            let random = Rng::with_seed(capacity);
            Ok(Self { queues, _driver: driver, memory: region.addr, workload, capacity, random, completions })
        };
        connect().with_context(|| format!("connecting to {}", socket.display()))
    }

    /// Writes the whole of a disk once.
    pub fn fill(socket: &Path) -> Result<()> {
        let mut front_end = Self::connect(socket, 1, Workload::sequential(100, FILL_LEN, 8))?;
        let blocks = front_end.capacity / u64::from(FILL_LEN);
        front_end.count(blocks).map(drop)
    }

    /// Keeps the workload's number of requests in flight until so many have completed, or a few more.
    pub fn count(&mut self, requests: u64) -> Result<Closed> {
        self.run(|done, _| done < requests)
    }

    /// Keeps the workload's number of requests in flight for `span`.
    pub fn closed(&mut self, span: Duration) -> Result<Closed> {
        self.run(|_, elapsed| elapsed < span)
    }

    /// Keeps requests in flight while `go_on(completed, elapsed)` is true, then waits for those in flight.
    fn run(&mut self, go_on: impl Fn(u64, Duration) -> bool) -> Result<Closed> {
        let start = Instant::now();
        let workload = self.workload;
        let mut cursor = Cursor::new(&workload, self.capacity);
        let mut left = workload.depth;
        for slot in 0..workload.depth {
            self.submit(&mut cursor, slot);
        }
        let (mut requests, mut turns, mut going) = (0, 0, true);
        // blkio can wait for one queue, which is the tightest loop, but not for several.
        let wait = usize::from(self.queues.len() == 1);
        RUNNING.store(true, Ordering::Relaxed);
        while left > 0 {
            for queue in 0..self.queues.len() {
                let count = self.queues[queue].do_io(&mut self.completions, wait, None, None)?;
                for i in 0..count {
                    let slot = self.completed(i)?;
                    if going {
                        self.submit(&mut cursor, slot);
                    } else {
                        left -= 1;
                    }
                }
                requests += count as u64;
                if wait == 1 && left == 0 {
                    break;
                }
            }
            turns += 1;
            PROGRESS.store(requests, Ordering::Relaxed);
            if turns % TURNS_PER_CLOCK_READ == 0 {
                going = going && go_on(requests, start.elapsed());
            }
        }
        RUNNING.store(false, Ordering::Relaxed);
        Ok(Closed { requests, elapsed: start.elapsed() })
    }

    /// Sends requests on a Poisson schedule of `rate` per second for `span`; a delayed request is sent late, never
    /// skipped. A request's latency counts from its scheduled time.
    pub fn open(&mut self, rate: f64, span: Duration) -> Result<Open> {
        let workload = self.workload;
        let mut cursor = Cursor::new(&workload, self.capacity);
        let mut latency = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        let mut free: Vec<usize> = (0..workload.depth).collect();
        let mut intended = vec![Duration::ZERO; workload.depth];
        let start = Instant::now();
        let mut due = self.gap(rate);
        RUNNING.store(true, Ordering::Relaxed);
        while due < span || free.len() < workload.depth {
            let now = start.elapsed();
            while due <= now.min(span) {
                let Some(slot) = free.pop() else { break };
                intended[slot] = due;
                self.submit(&mut cursor, slot);
                due += self.gap(rate);
            }
            for queue in 0..self.queues.len() {
                let count = self.queues[queue].do_io(&mut self.completions, 0, None, None)?;
                if count == 0 {
                    continue;
                }
                let heard = start.elapsed();
                for i in 0..count {
                    let slot = self.completed(i)?;
                    latency.saturating_record((heard - intended[slot]).as_nanos() as u64);
                    free.push(slot);
                }
            }
            PROGRESS.store(latency.len(), Ordering::Relaxed);
        }
        RUNNING.store(false, Ordering::Relaxed);
        Ok(Open { requests: latency.len(), latency })
    }

    /// As [`FrontEnd::open`], but sleeps while no request is in flight, and counts latency from the submission, or from
    /// the scheduled time if all slots were in use: for a core that is shared.
    pub fn paced(&mut self, rate: f64, span: Duration) -> Result<Open> {
        let workload = self.workload;
        let mut cursor = Cursor::new(&workload, self.capacity);
        let mut latency = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        let mut free: Vec<usize> = (0..workload.depth).collect();
        let mut sent = vec![Duration::ZERO; workload.depth];
        let start = Instant::now();
        let (mut due, mut behind) = (self.gap(rate), false);
        while due < span || free.len() < workload.depth {
            let now = start.elapsed();
            if free.len() == workload.depth && now < due {
                std::thread::sleep(due - now);
                continue;
            }
            if due <= now && due < span {
                if let Some(slot) = free.pop() {
                    sent[slot] = if behind { due } else { now };
                    self.submit(&mut cursor, slot);
                    due += self.gap(rate);
                } else {
                    behind = true;
                }
            } else {
                behind = false;
            }
            let count = self.queues[0].do_io(&mut self.completions, 0, None, None)?;
            let heard = start.elapsed();
            for i in 0..count {
                let slot = self.completed(i)?;
                latency.saturating_record((heard - sent[slot]).as_nanos() as u64);
                free.push(slot);
            }
        }
        Ok(Open { requests: latency.len(), latency })
    }

    /// The time to the next request of a Poisson process.
    fn gap(&mut self, rate: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.random.f64()).ln() / rate)
    }

    fn submit(&mut self, cursor: &mut Cursor, slot: usize) {
        let start = cursor.next(&mut self.random);
        let address = self.memory + slot * cursor.block as usize;
        let count = self.queues.len();
        let queue = &mut self.queues[slot % count];
        let len = cursor.block as usize;
        if self.random.u32(..100) < cursor.write_percent {
            queue.write(start, address as *const u8, len, slot, ReqFlags::empty());
        } else {
            queue.read(start, address as *mut u8, len, slot, ReqFlags::empty());
        }
    }

    /// The slot of the last `do_io`'s completion `i`.
    #[expect(unsafe_code, reason = "blkio gives completions in uninitialized memory")]
    fn completed(&self, i: usize) -> Result<usize> {
        // SAFETY: `do_io` returned more than `i`, having written as many completions.
        let completion = unsafe { self.completions[i].assume_init_ref() };
        ensure!(completion.ret == 0, "a request failed with error {}", -completion.ret);
        Ok(completion.user_data)
    }
}

/// The place of a workload's next request.
struct Cursor {
    block: u64,
    blocks: u64,
    write_percent: u32,
    sequential: Option<u64>,
}

impl Cursor {
    fn new(workload: &Workload, capacity: u64) -> Self {
        let block = u64::from(workload.block);
        let sequential = workload.sequential.then_some(0);
        Self { block, blocks: capacity / block, write_percent: workload.write_percent, sequential }
    }

    fn next(&mut self, random: &mut Rng) -> u64 {
        let at = match &mut self.sequential {
            None => random.u64(..self.blocks),
            Some(next) => {
                let at = *next;
                *next = (at + 1) % self.blocks;
                at
            }
        };
        at * self.block
    }
}

/// Writes every byte of a region with different data, so that the kernel allocates each page.
#[expect(unsafe_code, reason = "blkio gives its memory as an address")]
fn fill(address: usize, len: usize) {
    for (i, offset) in (0..len).step_by(8).enumerate() {
        let word = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // SAFETY: blkio has just mapped the region for us, page-aligned, and no other code knows it.
        unsafe { std::ptr::with_exposed_provenance_mut::<u64>(address + offset).write(word) };
    }
}

/// Starts a thread that ends the process when requests are not completed: the closed loop waits inside `blkio`, which
/// checks no timeout.
pub fn watch() {
    std::thread::spawn(|| {
        let mut seen = None;
        loop {
            std::thread::sleep(TIMEOUT);
            let now = PROGRESS.load(Ordering::Relaxed);
            if RUNNING.load(Ordering::Relaxed) && seen == Some(now) {
                eprintln!("no request was completed for {TIMEOUT:?}: ending the bench");
                std::process::exit(1);
            }
            seen = Some(now);
        }
    });
}
