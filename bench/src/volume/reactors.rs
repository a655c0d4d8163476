//! A volume under load from one reactor, and from two: what the second reactor adds.

use crate::process::{BACK_END_CORE, FRONT_END_CORE, unpinned};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::run_comparable;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result, bail, ensure};
use aryk_bdev::{
    Access, Bdev, BdevChannel, Blocks, Bytes, Completion, Descriptor, Env, Identity, Io, Lba, Op, Registry,
    Status, Tag,
};
use aryk_bdev_volume::{NewPool, NewVolume, Origin, Pools, WhenFull};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{CoreSet, Cx, Handle, Options, Reactors, Root, SleepPolicy};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a block of the volume.
const BLOCK: u32 = 4096;
/// Bytes of the base and of the volume.
const BASE: u64 = 2 << 30;
const VOLUME: u64 = 512 << 20;
/// Bytes of a write that fills the volume.
const FILL: u64 = 1 << 20;
/// The least throughput of two reactors, as a multiple of that of one.
const AIM: f64 = 1.7;

const INTRO: &str = "4 KiB requests at random, 64 in flight on each reactor, of a filled volume of 512 MiB in a pool of 2 GiB over memory: \
    thousand requests per second. The requests are made in the reactors themselves: one, or that and a second one. A pool with one \
    shard runs on the first reactor; of two shards, the second one runs on the second reactor if there is one.";

/// Measures the selected cases.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = ["workload", "shards", "one reactor", "two reactors", "ratio", "of these on the second"];
    let title = "A volume on two reactors";
    let mut section = Section::new(title, INTRO, columns.map(str::to_owned).to_vec());
    let workloads = [0, 30, 100].map(|writes| Workload::random(writes, BLOCK, 64));
    for (workload, shards) in workloads.iter().flat_map(|workload| [(workload, 1), (workload, 2)]) {
        let name = format!("volume/reactors/{shards}/{}", workload.name());
        if !settings.wants(&name) {
            continue;
        }
        let rounds = run_comparable(settings.runs, || round(settings.span, workload, shards))?;
        let runs = |of: fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
        let (one, two) = (runs(|round| round.one), runs(|round| round.two));
        let record = Record::new(&name, "throughput of two reactors, peer one", "IOPS", &two, &one);
        let ratio = record.ratio.map_or("—".to_owned(), |ratio| format!("{} (aim {AIM})", number(ratio)));
        report.records.push(record);
        let rate = |runs: &Runs| cell(runs, |rate| number(rate / 1e3));
        let share = runs(|round| round.second * 100.0);
        section.row(vec![
            workload.name(),
            shards.to_string(),
            rate(&one),
            rate(&two),
            ratio,
            cell(&share, |share| format!("{share:.0}%")),
        ]);
    }
    report.section(section);
    Ok(())
}

struct Round {
    /// Requests per second.
    one: f64,
    two: f64,
    /// The share of the second reactor.
    second: f64,
}

fn round(span: Duration, workload: &Workload, shards: u32) -> Result<Round> {
    let cores = [BACK_END_CORE, FRONT_END_CORE].map(|core| core as u16);
    let one = unpinned(|| Stack::start(&cores[..1], shards))??.load(workload, span)?[0];
    let [first, second] = unpinned(|| Stack::start(&cores, shards))??.load(workload, span)?[..] else {
        bail!("two reactors need two cores")
    };
    Ok(Round { one, two: first + second, second: second / (first + second) })
}

/// A volume, and the reactors of its pool and of the load.
struct Stack {
    env: Env,
    disk: Arc<Bdev>,
    /// The reactor of the pool's first shard first.
    handles: Vec<Handle>,
    pools: Pools,
    // Dropped last.
    _reactors: Reactors,
}

impl Drop for Stack {
    fn drop(&mut self) {
        // A pool ends in order, or its reactor is dropped with requests.
        block_on(async {
            let removed = self.env.registry().remove(self.disk.name()).await;
            for pool in self.pools.list().iter().filter(|_| removed.is_ok()) {
                self.pools.close(pool).await;
            }
        });
    }
}

impl Stack {
    fn start(cores: &[u16], shards: u32) -> Result<Self> {
        let cores = CoreSet::from_iter(cores.iter().copied());
        let reactors = Reactors::start(&Options { cores, policy: SleepPolicy::Poll, ..Options::default() })?;
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let base = aryk_bdev_malloc::Config {
            identity: Identity::named("base"),
            block_size: BLOCK,
            physical_block_size: BLOCK,
            blocks: Blocks(BASE / u64::from(BLOCK)),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, base)?;
        let pools = Pools::default();
        block_on(pools.create(&env, NewPool { shards, ..NewPool::named("p", "base") }))?;
        let pool = pools.find("p").context("the pool is open")?;
        let new = NewVolume {
            name: "v".to_owned(),
            uuid: uuid::Uuid::new_v4(),
            bytes: Bytes(VOLUME),
            block_size: BLOCK,
            origin: Origin::Empty,
            when_full: WhenFull::Wait,
            is_thick: false,
        };
        let disk = block_on(pool.create_volume(new))?.disk.context("the volume has a disk")?;
        let mut handles = env.reactors().handles();
        handles.sort_by_key(|handle| handle.core() != pool.cores()[0]);
        let stack = Self { env, disk, handles, pools, _reactors: reactors };
        let fill = Workload::sequential(100, FILL as u32, 4);
        let filling = stack.begin(&stack.handles[0], &fill)?;
        while filling.done.load(Ordering::Relaxed) < VOLUME / FILL {
            std::thread::sleep(Duration::from_millis(1));
        }
        stack.end(vec![filling])?;
        Ok(stack)
    }

    /// Requests per second of each reactor, while all have load.
    fn load(&self, workload: &Workload, span: Duration) -> Result<Vec<f64>> {
        let loads =
            self.handles.iter().map(|handle| self.begin(handle, workload)).collect::<Result<Vec<_>>>()?;
        std::thread::sleep(span / 4);
        let counts = |loads: &[Load]| -> Vec<u64> {
            loads.iter().map(|load| load.done.load(Ordering::Relaxed)).collect()
        };
        let (before, start) = (counts(&loads), Instant::now());
        std::thread::sleep(span);
        let (after, took) = (counts(&loads), start.elapsed().as_secs_f64());
        self.end(loads)?;
        Ok(before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / took).collect())
    }

    fn begin(&self, handle: &Handle, workload: &Workload) -> Result<Load> {
        let descriptor = self.env.registry().open(self.disk.name(), Access::Shared, "the load", |_| ())?;
        block_on(descriptor.prepare(handle))?;
        let load = Load { handle: handle.clone(), done: Arc::default(), stops: Arc::default() };
        let (done, stops, workload) = (Arc::clone(&load.done), Arc::clone(&load.stops), *workload);
        block_on(handle.call(move |cx| Loader::start(descriptor, workload, done, stops, cx)))??;
        Ok(load)
    }

    fn end(&self, loads: Vec<Load>) -> Result<()> {
        loads.iter().for_each(|load| load.stops.store(true, Ordering::Relaxed));
        for load in loads {
            // The loader removes its root when nothing is in flight.
            while Arc::strong_count(&load.stops) > 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
            ensure!(
                load.done.load(Ordering::Relaxed) < u64::MAX / 2,
                "requests have failed on {:?}",
                load.handle
            );
        }
        Ok(())
    }
}

/// A load on one reactor.
struct Load {
    handle: Handle,
    /// Requests that have completed; huge when one has failed.
    done: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
}

/// The root that makes a load.
struct Loader {
    root: aryk_reactor::RootId,
    thread: aryk_reactor::ThreadId,
    channel: BdevChannel,
    workload: Workload,
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
        workload: Workload,
        done: Arc<AtomicU64>,
        stops: Arc<AtomicBool>,
        cx: &mut Cx,
    ) -> Result<()> {
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
                workload,
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
        let Workload { block, write_percent, sequential, .. } = self.workload;
        let blocks = u64::from(block / BLOCK);
        let places = VOLUME / u64::from(block);
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
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime without drivers can be built").block_on(future)
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, round};
    use crate::workload::Workload;
    use std::time::Duration;

    #[test]
    fn both_reactors_have_load() {
        if aryk_reactor::CoreSet::allowed().iter().count() < 2 {
            return;
        }
        for writes in [0, 30, 100] {
            let round = round(Duration::from_millis(50), &Workload::random(writes, BLOCK, 64), 2).unwrap();
            assert!(round.one > 0.0 && round.two > 0.0 && (0.01..0.99).contains(&round.second));
        }
    }
}
