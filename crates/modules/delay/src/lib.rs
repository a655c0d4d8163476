//! A disk that is another disk, with a slower store: a read or write that the base has completed is held for as long as
//! configured. Control context; its channels in reactor context.
//!
//! One read in a hundred, and one write, is held for the p99 latency, all others for the average. Other operations are not held.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, Channel, Completion, Decorator, Error, Identity, Io, Op, OpenError, Registry,
    Status, Tag,
};
use aryk_reactor::{Cx, Nanos, RootId, TimerId};
use aryk_slots::{Key, Slots};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Which latency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Of most reads.
    AvgRead,
    /// Of one read in a hundred.
    P99Read,
    /// Of most writes.
    AvgWrite,
    /// Of one write in a hundred.
    P99Write,
}

/// What it is to be. Latencies are in microseconds, and come on top of the base's.
#[derive(Clone, Debug)]
pub struct Config {
    /// By what it is found.
    pub identity: Identity,
    /// The disk that it is made of.
    pub base: String,
    /// Of most reads.
    pub avg_read_us: u64,
    /// Of one read in a hundred.
    pub p99_read_us: u64,
    /// Of most writes.
    pub avg_write_us: u64,
    /// Of one write in a hundred.
    pub p99_write_us: u64,
}

/// Makes one.
///
/// # Errors
/// As [`Registry::open`] and [`Registry::register`].
pub fn create(registry: &Registry, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(registry, &config.base, &config.identity.name)?;
    let latencies = [config.avg_read_us, config.p99_read_us, config.avg_write_us, config.p99_write_us];
    let latencies = Arc::new(Latencies(latencies.map(AtomicU64::new)));
    registry.register(config.identity, Arc::new(Delay { base, latencies }))
}

/// Sets a latency, for reads and writes that are submitted from now on.
///
/// # Errors
/// [`Error::NotFound`] if there is no such disk of this module.
pub fn set_latency(registry: &Registry, name: &str, kind: Kind, us: u64) -> Result<(), Error> {
    let bdev = registry.find(name)?;
    let delay = bdev.device_as::<Delay>().ok_or_else(|| Error::NotFound(name.to_owned()))?;
    delay.latencies.0[kind as usize].store(us, Ordering::Relaxed);
    Ok(())
}

/// In microseconds, by [`Kind`].
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
    /// Set when the base has completed it.
    status: Option<Status>,
}

struct DelayChannel {
    base: BdevChannel,
    latencies: Arc<Latencies>,
    root: RootId,
    requests: Slots<Request>,
    reads: u64,
    writes: u64,
    /// Until when which request is held. Those that were released early are passed over.
    held: BinaryHeap<Reverse<(Nanos, u64)>>,
    /// What wakes us for the first of them.
    timer: Option<(Nanos, TimerId)>,
    from_base: Vec<Completion>,
}

impl Channel for DelayChannel {
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        let request = Request { tag: io.tag, latency: self.latency(io.op), status: None };
        // The depth may have grown since it was opened.
        if self.requests.is_full() {
            self.requests.grow(self.requests.capacity());
        }
        let Ok(key) = self.requests.insert(request) else { unreachable!("it has room") };
        self.base.submit(Io { tag: Tag(key.raw()), ..io }, cx);
    }

    /// One that the base has completed is released at once, and says so.
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
                out.push(Completion { tag, status: status.expect("what is held has completed") });
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
