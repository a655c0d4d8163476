//! What I/O queues have done for their hosts. A queue's reactor counts; control reads.

use aryk_bdev::{Op, Status};
use aryk_reactor::Nanos;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// The requests of disks that were made for a host, each when it has ended. The time of a request, in nanoseconds, begins when
/// its command arrives, or when the command's request before has ended: it has the time in which the command waits for a buffer
/// and for its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Reads, and Verify.
    pub reads: u64,
    /// Bytes of reads.
    pub read_bytes: u64,
    /// Time of reads.
    pub read_ns: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of writes.
    pub written_bytes: u64,
    /// Time of writes.
    pub write_ns: u64,
    /// Requests of other kinds.
    pub others: u64,
    /// Time of those.
    pub other_ns: u64,
    /// Those among all that have failed.
    pub failed: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.read_ns += other.read_ns;
        self.writes += other.writes;
        self.written_bytes += other.written_bytes;
        self.write_ns += other.write_ns;
        self.others += other.others;
        self.other_ns += other.other_ns;
        self.failed += other.failed;
    }
}

/// The counts of a queue.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    write_ns: AtomicU64,
    others: AtomicU64,
    other_ns: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    /// Counts a request that has ended after this time. Only the queue's reactor calls this.
    pub(crate) fn add(&self, op: Op, bytes: u32, status: Status, took: Nanos) {
        // One thread writes, so no count is lost.
        let add =
            |count: &AtomicU64, n: u64| count.store(count.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        match op {
            Op::Read => {
                add(&self.reads, 1);
                add(&self.read_bytes, bytes.into());
                add(&self.read_ns, took.0);
            }
            Op::Write => {
                add(&self.writes, 1);
                add(&self.written_bytes, bytes.into());
                add(&self.write_ns, took.0);
            }
            _ => {
                add(&self.others, 1);
                add(&self.other_ns, took.0);
            }
        }
        if !status.is_ok() {
            add(&self.failed, 1);
        }
    }

    pub(crate) fn get(&self) -> Traffic {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic {
            reads: count(&self.reads),
            read_bytes: count(&self.read_bytes),
            read_ns: count(&self.read_ns),
            writes: count(&self.writes),
            written_bytes: count(&self.written_bytes),
            write_ns: count(&self.write_ns),
            others: count(&self.others),
            other_ns: count(&self.other_ns),
            failed: count(&self.failed),
        }
    }
}
