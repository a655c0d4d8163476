//! What I/O queues have done for their hosts. A queue's reactor counts; control reads.

use aryk_bdev::{Histogram, Op, SharedHistogram, Status};
use aryk_reactor::Nanos;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests of one kind. The time of a request, in nanoseconds, begins when its command arrives, or when the command's request
/// before has ended: it has the time in which the command waits for a buffer and for its data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// How many there were.
    pub requests: u64,
    /// The bytes that they were about.
    pub bytes: u64,
    /// The sum of their times.
    pub ns: u64,
    /// Their times.
    pub latencies: Histogram,
}

impl AddAssign for Done {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.ns += other.ns;
        self.latencies.merge(&other.latencies);
    }
}

/// The requests of disks that were made for a host, each when it has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Reads, and Verify.
    pub reads: Done,
    /// Writes.
    pub writes: Done,
    /// Requests of other kinds.
    pub others: Done,
    /// Those among all that have failed.
    pub failed: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.others += other.others;
        self.failed += other.failed;
    }
}

/// The counts of one kind of requests of a queue.
#[derive(Debug, Default)]
struct KindCounts {
    requests: AtomicU64,
    bytes: AtomicU64,
    ns: AtomicU64,
    latencies: SharedHistogram,
}

impl KindCounts {
    fn get(&self) -> Done {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Done {
            requests: count(&self.requests),
            bytes: count(&self.bytes),
            ns: count(&self.ns),
            latencies: self.latencies.get(),
        }
    }
}

/// The counts of a queue.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    reads: KindCounts,
    writes: KindCounts,
    others: KindCounts,
    failed: AtomicU64,
}

impl Counts {
    /// Counts a request that has ended after this time. Only the queue's reactor calls this.
    pub(crate) fn add(&self, op: Op, bytes: u32, status: Status, took: Nanos) {
        // One thread writes, so no count is lost.
        let add =
            |count: &AtomicU64, n: u64| count.store(count.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        let of_kind = match op {
            Op::Read => &self.reads,
            Op::Write => &self.writes,
            _ => &self.others,
        };
        add(&of_kind.requests, 1);
        add(&of_kind.bytes, bytes.into());
        add(&of_kind.ns, took.0);
        of_kind.latencies.record(took.0);
        if !status.is_ok() {
            add(&self.failed, 1);
        }
    }

    pub(crate) fn get(&self) -> Traffic {
        Traffic {
            reads: self.reads.get(),
            writes: self.writes.get(),
            others: self.others.get(),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }
}
