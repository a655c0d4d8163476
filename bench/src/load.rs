//! Load that is made in a reactor, on a disk of the same process: a reactor has no front-end between itself and the disk.
//!
//! A tool, and roots in reactor context.

use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use aryk_bdev::{Access, BdevChannel, Blocks, Completion, Descriptor, Env, Io, Lba, Op, Status, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{CoreSet, Cx, Handle, Root};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A load on one reactor.
#[derive(Debug)]
pub struct Load {
    handle: Handle,
    /// Requests that have completed; huge when one has failed.
    done: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
}

impl Load {
    /// Begins a load on the first `bytes` of a disk, on the reactor of `handle`.
    ///
    /// # Errors
    /// The disk cannot be opened there.
    pub fn begin(env: &Env, disk: &str, handle: &Handle, workload: Workload, bytes: u64) -> Result<Self> {
        let descriptor = env.registry().open(disk, Access::Shared, "the load", |_| ())?;
        let block = env.registry().find(disk).context("a disk that is open")?.geometry().block_size;
        block_on(descriptor.prepare(handle))?;
        let load = Self { handle: handle.clone(), done: Arc::default(), stops: Arc::default() };
        let (done, stops) = (Arc::clone(&load.done), Arc::clone(&load.stops));
        let plan = Plan { workload, bytes, block };
        block_on(handle.call(move |cx| Loader::start(descriptor, plan, done, stops, cx)))??;
        Ok(load)
    }

    /// Requests that have completed.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// Requests per second of each load in `span`, which begins after `warm_up`.
pub fn rates(loads: &[Load], warm_up: Duration, span: Duration) -> Vec<f64> {
    std::thread::sleep(warm_up);
    let counts = || loads.iter().map(Load::done).collect::<Vec<_>>();
    let (before, start) = (counts(), Instant::now());
    std::thread::sleep(span);
    let (after, took) = (counts(), start.elapsed().as_secs_f64());
    before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / took).collect()
}

/// Ends loads, and waits for their requests.
///
/// # Errors
/// A request has failed.
pub fn end(loads: Vec<Load>) -> Result<()> {
    loads.iter().for_each(|load| load.stops.store(true, Ordering::Relaxed));
    for load in loads {
        // The loader removes its root when nothing is in flight.
        while Arc::strong_count(&load.stops) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ensure!(load.done() < u64::MAX / 2, "requests have failed on {:?}", load.handle);
    }
    Ok(())
}

/// What a load does: its workload, on so many bytes of a disk with blocks of so many bytes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    workload: Workload,
    bytes: u64,
    block: u32,
}

/// The root that makes a load.
struct Loader {
    root: aryk_reactor::RootId,
    thread: aryk_reactor::ThreadId,
    channel: BdevChannel,
    plan: Plan,
    buffers: Vec<(Buffer, Sgl)>,
    completions: Vec<Completion>,
    in_flight: usize,
    next: u64,
    random: fastrand::Rng,
    done: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
}

impl Loader {
    fn start(
        descriptor: Descriptor,
        plan: Plan,
        done: Arc<AtomicU64>,
        stops: Arc<AtomicBool>,
        cx: &mut Cx,
    ) -> Result<()> {
        let Plan { workload, .. } = plan;
        let thread = cx.add_thread("load", CoreSet::from_iter([cx.handle().core()]));
        let root = cx.add_root(thread, "load", |root, cx| {
            let buffers = (0..workload.depth).map(|_| {
                let mut buffer = Buffer::new(workload.block as usize, 4096);
                let data = buffer.lend().first(workload.block);
                (buffer, data)
            });
            Ok::<_, aryk_bdev::OpenError>(Self {
                root,
                thread,
                channel: descriptor.open_channel(root, cx)?,
                plan,
                buffers: buffers.collect(),
                completions: Vec::new(),
                in_flight: 0,
                next: 0,
                random: fastrand::Rng::with_seed(u64::from(cx.handle().core())),
                done,
                stops,
            })
        })?;
        let loader = cx.root::<Self>(root.id()).context("just added")?;
        let mut loader = loader.borrow_mut();
        for slot in 0..workload.depth {
            loader.submit(slot, cx);
        }
        Ok(())
    }

    fn submit(&mut self, slot: usize, cx: &mut Cx) {
        let Workload { block, write_percent, sequential, .. } = self.plan.workload;
        let blocks = u64::from(block / self.plan.block);
        let places = self.plan.bytes / u64::from(block);
        let place = if sequential { self.next % places } else { self.random.u64(..places) };
        self.next += 1;
        let io = Io {
            tag: Tag(slot as u64),
            op: if self.random.u32(..100) < write_percent { Op::Write } else { Op::Read },
            fua: false,
            may_unmap: false,
            lba: Lba(place * blocks),
            blocks: Blocks(blocks),
            source: Lba::ZERO,
            data: self.buffers[slot].1,
        };
        self.channel.submit(io, cx);
        self.in_flight += 1;
    }
}

impl Root for Loader {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.channel.poll(cx, &mut completions);
        let stops = self.stops.load(Ordering::Relaxed);
        let count = completions.len();
        for Completion { tag, status } in completions.drain(..) {
            self.in_flight -= 1;
            let more = if status == Status::Ok { 1 } else { u64::MAX / 2 };
            self.done.fetch_add(more, Ordering::Relaxed);
            if !stops {
                self.submit(tag.0 as usize, cx);
            }
        }
        self.completions = completions;
        if stops && self.in_flight == 0 {
            self.buffers.iter_mut().for_each(|(buffer, _)| buffer.reclaim());
            let (root, thread) = (self.root, self.thread);
            cx.local().defer(move |cx| {
                cx.remove_root(root);
                cx.remove_thread(thread);
            });
        }
        count > 0
    }
}

/// Waits for a future on this thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime without drivers can be built").block_on(future)
}
