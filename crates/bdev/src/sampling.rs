//! How deep a disk's queues are, sampled at a fixed period. Control context; the samples are taken by a task of one reactor.
//!
//! Only disks that are sampled cost anything: a timer each, and a message to each reactor that has channels of the disk,
//! once in a period.

use crate::Bdev;
use crate::bdev::lock;
use aryk_reactor::{Cx, Gone, Handle, Local, Nanos, Task};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// The samples since sampling began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueDepth {
    /// Between two samples.
    pub period: Duration,
    /// Requests in flight, at the last sample.
    pub depth: u64,
    /// Time for which there were some, as far as samples can tell.
    pub busy: Duration,
    /// The same, times their number: over a time, its growth is the mean depth.
    pub weighted: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// Tells a task that another has taken its place.
    generation: u64,
    now: Option<QueueDepth>,
    /// The poller that takes the samples, and its reactor.
    sampler: Option<(Handle, Task<()>)>,
}

/// A disk's.
#[derive(Debug, Default)]
pub(crate) struct Sampling(Mutex<State>);

impl Sampling {
    fn restart(&self, period: Option<Duration>) -> u64 {
        let mut state = lock(&self.0);
        state.generation += 1;
        state.sampler = None;
        let zero = Duration::ZERO;
        state.now = period.map(|period| QueueDepth { period, depth: 0, busy: zero, weighted: zero });
        state.generation
    }

    /// Counts a sample, `since` after the last; whether there are to be more.
    fn record(&self, generation: u64, depth: u64, since: Duration) -> bool {
        let mut state = lock(&self.0);
        if state.generation != generation {
            return false;
        }
        let Some(now) = &mut state.now else { return false };
        now.depth = depth;
        if depth > 0 {
            now.busy = now.busy.saturating_add(since);
            now.weighted =
                now.weighted.saturating_add(since.saturating_mul(u32::try_from(depth).unwrap_or(u32::MAX)));
        }
        true
    }
}

impl Bdev {
    /// The samples, if the disk is sampled.
    pub fn queue_depth(&self) -> Option<QueueDepth> {
        lock(&self.sampling().0).now
    }

    /// Has the disk be sampled by the reactor `on`, from the beginning, or ends that.
    ///
    /// # Errors
    /// [`Gone`] if that reactor has ended.
    pub async fn sample_queue_depth(
        self: &Arc<Self>,
        period: Option<Duration>,
        on: &Handle,
    ) -> Result<(), Gone> {
        let generation = self.sampling().restart(period);
        let Some(period) = period else { return Ok(()) };
        self.start_sampling(generation, period, on).await
    }

    /// Has another reactor do what `from` does of that, which is about to end.
    ///
    /// # Errors
    /// [`Gone`] if that reactor has ended.
    pub async fn move_sampling(self: &Arc<Self>, from: &Handle, to: &Handle) -> Result<(), Gone> {
        let (generation, period) = {
            let mut state = lock(&self.sampling().0);
            let Some(now) = state.now.filter(|_| state.sampler.as_ref().is_some_and(|(on, _)| on == from))
            else {
                return Ok(());
            };
            state.generation += 1;
            state.sampler = None;
            (state.generation, now.period)
        };
        self.start_sampling(generation, period, to).await
    }

    async fn start_sampling(
        self: &Arc<Self>,
        generation: u64,
        period: Duration,
        on: &Handle,
    ) -> Result<(), Gone> {
        let bdev = Arc::downgrade(self);
        let start = move |cx: &mut Cx| {
            let (local, now) = (cx.local().clone(), cx.now());
            cx.local().spawn(sample(bdev, generation, period, local, now))
        };
        let task = on.call(start).await?;
        let mut state = lock(&self.sampling().0);
        // If another one was started in between, this one is dropped.
        if state.generation == generation {
            state.sampler = Some((on.clone(), task));
        }
        Ok(())
    }
}

async fn sample(bdev: Weak<Bdev>, generation: u64, period: Duration, local: Local, start: Nanos) {
    let mut last = start;
    loop {
        local.sleep(period).await;
        let Some(bdev) = bdev.upgrade().filter(|b| !b.is_removing()) else { return };
        let depth = bdev.for_each_channel(|cell, _| u64::from(cell.in_flight())).await.into_iter().sum();
        let now = local.with(|cx| cx.now()).await;
        if !bdev.sampling().record(generation, depth, now.since(last)) {
            return;
        }
        last = now;
    }
}
