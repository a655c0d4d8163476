//! What the paths of a disk have carried. The reactor of a channel counts; any thread reads.

use super::PATHS_MAX;
use crate::shared::lock;
use aryk_bdev::Op;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The requests of one kind that a path has completed without failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Requests.
    pub ops: u64,
    /// Bytes that they were about.
    pub bytes: u64,
    /// The sum of their latencies, in nanoseconds. A latency begins when the path gets the request.
    pub latency_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_ns_max: u64,
    /// The shortest latency, in nanoseconds; `None` before the first.
    pub latency_ns_min: Option<u64>,
}

impl AddAssign for Carried {
    fn add_assign(&mut self, other: Self) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.latency_ns += other.latency_ns;
        self.latency_ns_max = self.latency_ns_max.max(other.latency_ns_max);
        let both = [self.latency_ns_min, other.latency_ns_min];
        self.latency_ns_min = both.into_iter().flatten().min();
    }
}

/// What a path has carried for a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathTraffic {
    /// Reads.
    pub reads: Carried,
    /// Writes.
    pub writes: Carried,
    /// Deallocations.
    pub unmaps: Carried,
}

impl AddAssign for PathTraffic {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.unmaps += other.unmaps;
    }
}

#[derive(Debug, Default)]
struct Counts {
    ops: AtomicU64,
    bytes: AtomicU64,
    latency_ns: AtomicU64,
    latency_ns_max: AtomicU64,
    /// The complement of the shortest latency: its maximum is kept by one comparison, from 0 on.
    shortness: AtomicU64,
}

impl Counts {
    #[inline]
    fn add(&self, bytes: u64, latency_ns: u64) {
        // One thread writes, so no count is lost.
        let add =
            |count: &AtomicU64, n: u64| count.store(count.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        let raise = |most: &AtomicU64, to: u64| {
            // By a branch, which is nearly always the same.
            if to > most.load(Ordering::Relaxed) {
                most.store(to, Ordering::Relaxed);
            }
        };
        add(&self.ops, 1);
        add(&self.bytes, bytes);
        add(&self.latency_ns, latency_ns);
        raise(&self.latency_ns_max, latency_ns);
        raise(&self.shortness, !latency_ns);
    }

    fn get(&self) -> Carried {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let ops = count(&self.ops);
        Carried {
            ops,
            bytes: count(&self.bytes),
            latency_ns: count(&self.latency_ns),
            latency_ns_max: count(&self.latency_ns_max),
            latency_ns_min: (ops > 0).then(|| !count(&self.shortness)),
        }
    }

    fn clear(&self) {
        let all = [&self.ops, &self.bytes, &self.latency_ns, &self.latency_ns_max, &self.shortness];
        all.into_iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }
}

/// The counts of a channel, by path, for reads, writes and deallocations.
#[derive(Debug, Default)]
pub(super) struct ChannelCounts([[Counts; 3]; PATHS_MAX]);

impl ChannelCounts {
    /// Counts a request that a path has completed. Only the channel's reactor calls this.
    #[inline]
    pub(super) fn add(&self, path: usize, op: Op, bytes: u64, latency_ns: u64) {
        let [reads, writes, unmaps] = &self.0[path];
        match op {
            Op::Read => reads.add(bytes, latency_ns),
            Op::Write => writes.add(bytes, latency_ns),
            Op::Unmap => unmaps.add(bytes, latency_ns),
            _ => {}
        }
    }

    fn get(&self, path: usize) -> PathTraffic {
        let [reads, writes, unmaps] = &self.0[path];
        PathTraffic { reads: reads.get(), writes: writes.get(), unmaps: unmaps.get() }
    }
}

/// The counts of all channels of a disk.
#[derive(Debug, Default)]
pub(crate) struct Traffic(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    open: Vec<Arc<ChannelCounts>>,
    /// What channels that are closed have counted, by path.
    closed: [PathTraffic; PATHS_MAX],
}

impl Traffic {
    /// The counts of a new channel.
    pub(super) fn open(&self) -> Arc<ChannelCounts> {
        let counts = Arc::<ChannelCounts>::default();
        lock(&self.0).open.push(Arc::clone(&counts));
        counts
    }

    /// A channel is closed.
    pub(super) fn close(&self, counts: &Arc<ChannelCounts>) {
        let mut known = lock(&self.0);
        known.open.retain(|open| !Arc::ptr_eq(open, counts));
        for (path, closed) in known.closed.iter_mut().enumerate() {
            *closed += counts.get(path);
        }
    }

    /// What a path has carried.
    pub(crate) fn of(&self, path: usize) -> PathTraffic {
        let known = lock(&self.0);
        let mut sum = known.closed[path];
        known.open.iter().for_each(|counts| sum += counts.get(path));
        sum
    }

    /// Another path gets the number of one that is gone, and on which no reactor has a request.
    pub(crate) fn forget(&self, path: usize) {
        let mut known = lock(&self.0);
        known.closed[path] = PathTraffic::default();
        known.open.iter().flat_map(|counts| &counts.0[path]).for_each(Counts::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_their_channels_and_end_with_their_path() {
        let traffic = Traffic::default();
        let (one, other) = (traffic.open(), traffic.open());
        one.add(0, Op::Read, 512, 5);
        one.add(0, Op::Read, 512, 3);
        other.add(0, Op::Read, 4096, 9);
        other.add(1, Op::Unmap, 8192, 0);
        other.add(1, Op::Flush, 0, 1);
        let reads =
            Carried { ops: 3, bytes: 5120, latency_ns: 17, latency_ns_max: 9, latency_ns_min: Some(3) };
        let unmaps = Carried { ops: 1, bytes: 8192, latency_ns_min: Some(0), ..Carried::default() };
        let expected = || {
            assert_eq!(traffic.of(0), PathTraffic { reads, ..PathTraffic::default() });
            assert_eq!(traffic.of(1), PathTraffic { unmaps, ..PathTraffic::default() });
        };
        expected();
        traffic.close(&other);
        expected();
        traffic.forget(0);
        assert_eq!(traffic.of(0), PathTraffic::default());
        assert_eq!(traffic.of(1).unmaps, unmaps);
        one.add(0, Op::Write, 512, 5);
        assert_eq!((traffic.of(0).writes.ops, traffic.of(0).reads.ops), (1, 0));
    }
}
