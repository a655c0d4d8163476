//! A part of `cargo xtask bench qos`: a limit shared by more reactors than there are cores.
//!
//! `arykd` has one reactor per core, so these reactors run within the bench process: each on a thread of its own, on the
//! cores that the kernel chooses, with a closed loop on a channel of the same null disk.

use crate::process::unpinned;
use anyhow::{Context, Result};
use aryk_bdev::{Access, Bdev, BdevChannel, Blocks, Completion, Env, Identity, Io, Lba, Op, Registry, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_qos::Limits;
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Nanos, Reactor, Root, RootId, SleepPolicy};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LEN: u32 = 4096;
const BLOCK: u32 = 512;

/// Requests completed by all loops, per time window.
struct Counts {
    start: Nanos,
    window: Duration,
    windows: Box<[AtomicU64]>,
}

impl Counts {
    fn is_over(&self, now: Nanos) -> bool {
        now > self.start.after(self.window * self.windows.len() as u32)
    }

    fn add(&self, requests: usize, now: Nanos) {
        if now >= self.start {
            let at = now.since(self.start).as_nanos() / self.window.as_nanos();
            if let Some(window) = self.windows.get(at as usize) {
                window.fetch_add(requests as u64, Ordering::Relaxed);
            }
        }
    }
}

/// A closed loop.
struct Load {
    channel: BdevChannel,
    buffer: Buffer,
    /// The buffer, which all requests share: a null disk does not touch it.
    data: Sgl,
    counts: Arc<Counts>,
    completions: Vec<Completion>,
}

impl Load {
    fn submit(&mut self, tag: Tag, cx: &mut Cx) {
        let data = self.data;
        let io = Io {
            tag,
            op: Op::Read,
            fua: false,
            may_unmap: false,
            lba: Lba::ZERO,
            blocks: Blocks((LEN / BLOCK).into()),
            source: Lba::ZERO,
            data,
        };
        self.channel.submit(io, cx);
    }
}

impl Root for Load {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.channel.poll(cx, &mut completions);
        let now = cx.now();
        self.counts.add(completions.len(), now);
        let worked = !completions.is_empty();
        for Completion { tag, .. } in completions.drain(..) {
            if !self.counts.is_over(now) {
                self.submit(tag, cx);
            }
        }
        self.completions = completions;
        worked
    }
}

/// A disk's limit, and the reactors that share it.
#[derive(Clone, Copy, Debug)]
pub struct Crowd {
    /// The limit in requests per second.
    pub limit: u64,
    /// Number of reactors, each with its own channel.
    pub reactors: u16,
    /// Requests in flight on each channel.
    pub depth: u64,
}

impl Crowd {
    /// Runs the loops; returns the requests of all reactors in each of `windows` windows after `warm_up`.
    pub fn run(self, warm_up: Duration, window: Duration, windows: usize) -> Result<Vec<u64>> {
        let env = Env::default();
        let (block_size, physical_block_size) = (BLOCK, BLOCK);
        let identity = Identity::named("crowd");
        let config =
            aryk_bdev_null::Config { identity, block_size, physical_block_size, blocks: Blocks(1 << 20) };
        let bdev = aryk_bdev_null::create(&env, config)?;
        let now = Clock::Monotonic.now();
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(bdev.set_qos_limits(Limits { ios: self.limit, ..Limits::default() }, now))?;
        let windows = (0..windows).map(|_| AtomicU64::new(0)).collect();
        let counts = Arc::new(Counts { start: now.after(warm_up), window, windows });
        let run = || {
            std::thread::scope(|scope| {
                let begin = |number| {
                    let (registry, bdev, counts) = (env.registry(), &bdev, &counts);
                    scope.spawn(move || self.run_reactor(number, registry, bdev, counts))
                };
                let threads: Vec<_> = (0..self.reactors).map(begin).collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
            })
        };
        unpinned(run)??;
        Ok(counts.windows.iter().map(|window| window.load(Ordering::Relaxed)).collect())
    }

    /// Runs one reactor with a loop, from its first request to its last.
    fn run_reactor(self, number: u16, registry: &Registry, bdev: &Bdev, counts: &Arc<Counts>) -> Result<()> {
        let mut reactor = Reactor::new(number, SleepPolicy::Adaptive, Engine::Auto, Clock::Monotonic)?;
        let cx = reactor.cx();
        let thread = cx.add_thread("load", CoreSet::from_iter([number]));
        let descriptor = registry.open(bdev.name(), Access::Shared, "load", |_| ())?;
        let make = |root: RootId, cx: &mut Cx| -> Result<Load> {
            let channel = descriptor.open_channel(root, cx)?;
            let mut buffer = Buffer::new(LEN as usize, LEN as usize);
            let mut load = Load {
                channel,
                data: buffer.lend(),
                buffer,
                counts: Arc::clone(counts),
                completions: Vec::new(),
            };
            (0..self.depth).for_each(|tag| load.submit(Tag(tag), cx));
            Ok(load)
        };
        let root = cx.add_root(thread, "load", make)?.id();
        loop {
            reactor.step();
            let cx = reactor.cx();
            let load = cx.root::<Load>(root).context("the root is there")?;
            let is_idle = load.borrow().channel.in_flight() == 0;
            drop(load);
            if counts.is_over(cx.now()) && is_idle {
                let mut load = cx.take_root::<Load>(root).context("the root is there")?;
                load.buffer.reclaim();
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Crowd;
    use std::time::Duration;

    #[test]
    fn many_reactors_keep_within_one_limit() {
        let crowd = Crowd { limit: 2000, reactors: 3, depth: 4 };
        let counts = std::iter::repeat_with(|| {
            let windows = crowd.run(Duration::from_millis(20), Duration::from_millis(20), 5).unwrap();
            // At most 200, one for each reactor, and 2 ms' worth.
            let count: u64 = windows.iter().sum();
            assert!(count <= 207, "{windows:?}");
            count
        });
        // On a busy test machine, the reactors may not run for the time of a whole measurement.
        assert!(counts.take(20).any(|count| count > 0));
    }
}
