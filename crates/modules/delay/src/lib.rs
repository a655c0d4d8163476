//! The delay disk: forwards requests to a base disk, and holds each read or write that the base has completed for a configured
//! time. Control context; its channels run in reactor context.
//!
//! One read and one write in a hundred are held for the p99 latency, all others for the average. Other operations are not held.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, Channel, Completion, Decorator, Env, Error, Identity, Io, Op, OpenError,
    Registry, Status, Tag,
};
use aryk_reactor::{Cx, Nanos, RootId, TimerId};
use aryk_slots::{Key, Slots};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A kind of latency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The latency of most reads.
    AvgRead,
    /// The latency of one read in a hundred.
    P99Read,
    /// The latency of most writes.
    AvgWrite,
    /// The latency of one write in a hundred.
    P99Write,
}

/// Configuration of a delay disk. Latencies are in microseconds, and are added to those of the base.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names and UUID of the disk.
    pub identity: Identity,
    /// The name of the base disk.
    pub base: String,
    /// The latency of most reads.
    pub avg_read_us: u64,
    /// The latency of one read in a hundred.
    pub p99_read_us: u64,
    /// The latency of most writes.
    pub avg_write_us: u64,
    /// The latency of one write in a hundred.
    pub p99_write_us: u64,
}

/// Creates a delay disk on top of another disk.
///
/// # Errors
/// As [`aryk_bdev::Registry::open`] and [`aryk_bdev::Registry::register`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(env.registry(), &config.base, &config.identity.name)?;
    let latencies = [config.avg_read_us, config.p99_read_us, config.avg_write_us, config.p99_write_us];
    let latencies = Arc::new(Latencies(latencies.map(AtomicU64::new)));
    env.registry().register(config.identity, Arc::new(Delay { base, latencies }))
}

/// Sets a latency, for reads and writes that are submitted from now on.
///
/// # Errors
/// [`Error::NotFound`] if `name` is not a delay disk.
pub fn set_latency(registry: &Registry, name: &str, kind: Kind, us: u64) -> Result<(), Error> {
    let bdev = registry.find(name)?;
    let delay = bdev.device_as::<Delay>().ok_or_else(|| Error::NotFound(name.to_owned()))?;
    delay.latencies.0[kind as usize].store(us, Ordering::Relaxed);
    Ok(())
}

/// The latencies in microseconds, by [`Kind`].
struct Latencies([AtomicU64; 4]);

struct Delay {
    base: Base,
    latencies: Arc<Latencies>,
}

impl Decorator for Delay {
    fn product(&self) -> &'static str {
        "delay"
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(DelayChannel {
            base: self.base.open_channel(root, cx)?,
            latencies: Arc::clone(&self.latencies),
            root,
            requests: Slots::new(Decorator::limits(self).depth),
            reads: 0,
            writes: 0,
            held: BinaryHeap::new(),
            timer: None,
            from_base: Vec::new(),
        }))
    }
}

struct Request {
    tag: Tag,
    latency: Duration,
    /// Set when the base has completed the request.
    status: Option<Status>,
}

struct DelayChannel {
    base: BdevChannel,
    latencies: Arc<Latencies>,
    root: RootId,
    requests: Slots<Request>,
    reads: u64,
    writes: u64,
    /// Completed requests with the time until which they are held. Entries of requests that were released early are skipped.
    held: BinaryHeap<Reverse<(Nanos, u64)>>,
    /// The timer for the first entry of `held`.
    timer: Option<(Nanos, TimerId)>,
    from_base: Vec<Completion>,
}

impl Channel for DelayChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let request = Request { tag: io.tag, latency: self.latency(io.op), status: None };
        // The base's depth may have grown since the channel was opened.
        let key = self.requests.add(request);
        self.base.submit(Io { tag: Tag(key.raw()), ..*io }, cx);
    }

    /// Releases a request that the base has completed at once, with the base's status.
    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        for (key, request) in self.requests.iter_mut().filter(|(_, r)| r.tag == tag) {
            request.latency = Duration::ZERO;
            if request.status.is_none() {
                self.base.abort(Tag(key.raw()), cx);
            } else {
                self.held.push(Reverse((cx.now(), key.raw())));
                cx.wake(self.root);
            }
        }
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.base.poll(cx, &mut self.from_base);
        for completion in self.from_base.drain(..) {
            let request = self.requests.get_mut(Key::from_raw(completion.tag.0)).expect("completed once");
            request.status = Some(completion.status);
            self.held.push(Reverse((cx.now().after(request.latency), completion.tag.0)));
        }
        while let Some(&Reverse((until, key))) = self.held.peek() {
            if until > cx.now() {
                break;
            }
            self.held.pop();
            if let Some(Request { tag, status, .. }) = self.requests.remove(Key::from_raw(key)) {
                out.push(Completion { tag, status: status.expect("the base has completed held requests") });
            }
        }
        self.set_timer(cx);
    }
}

impl DelayChannel {
    fn latency(&mut self, op: Op) -> Duration {
        let (count, avg, p99) = match op {
            Op::Read => (&mut self.reads, Kind::AvgRead, Kind::P99Read),
            Op::Write => (&mut self.writes, Kind::AvgWrite, Kind::P99Write),
            _ => return Duration::ZERO,
        };
        *count += 1;
        let kind = if count.is_multiple_of(100) { p99 } else { avg };
        Duration::from_micros(self.latencies.0[kind as usize].load(Ordering::Relaxed))
    }

    fn set_timer(&mut self, cx: &mut Cx) {
        let first = self.held.peek().map(|&Reverse((until, _))| until);
        if self.timer.map(|(at, _)| at) == first {
            return;
        }
        if let Some((_, id)) = self.timer.take() {
            cx.cancel_timer(id);
        }
        self.timer = first.map(|at| (at, cx.wake_at(self.root, at)));
    }
}
