//! The counts of a channel. Its owner writes them in reactor context; any thread merges copies of them.

use crate::layers::Layers;
use crate::{Bytes, Histogram, Op, Status};
use std::time::Duration;

/// Counts of one kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Requests that completed without failure.
    pub ops: u64,
    /// Bytes that they were about.
    pub bytes: Bytes,
    /// Requests that failed. Those that failed before they began have no latency.
    pub errors: u64,
    /// The sum of all latencies, in nanoseconds.
    pub latency_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_ns_max: u64,
    /// The complement of the shortest latency, in nanoseconds: its maximum is kept by one comparison, from 0 on.
    shortness: u64,
    /// All latencies, in nanoseconds.
    pub latencies: Histogram,
}

impl OpStats {
    fn record(&mut self, bytes: Bytes, status: Status, latency_ns: u64) {
        if status.is_ok() {
            self.ops += 1;
            self.bytes += bytes;
        } else {
            self.errors += 1;
        }
        self.latency_ns += latency_ns;
        // By branches, which are nearly always the same.
        if latency_ns > self.latency_ns_max {
            self.latency_ns_max = latency_ns;
        }
        if !latency_ns > self.shortness {
            self.shortness = !latency_ns;
        }
        self.latencies.record(latency_ns);
    }

    /// The shortest latency, in nanoseconds; `None` before the first.
    pub fn latency_ns_min(&self) -> Option<u64> {
        (self.shortness > 0).then_some(!self.shortness)
    }

    fn merge(&mut self, other: &Self) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.latency_ns += other.latency_ns;
        self.latency_ns_max = self.latency_ns_max.max(other.latency_ns_max);
        self.shortness = self.shortness.max(other.shortness);
        self.latencies.merge(&other.latencies);
    }
}

/// What of the counts is set to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// All.
    All,
    /// The shortest and longest latencies.
    Extremes,
    /// Requests that failed.
    Errors,
}

/// Counts of all operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    ops: [OpStats; Op::ALL.len()],
    pub(crate) layers: Layers,
    /// Requests that took longer than the disk's deadline, whether they succeeded or failed.
    pub overdue: u64,
    /// Requests that the disk's limits, or its groups', have held up.
    pub throttled_ios: u64,
    /// For how long, in nanoseconds, all of them together.
    pub throttled_ns: u64,
    /// Requests that have been submitted and not yet completed, at the time of reading.
    pub in_flight: u64,
    /// Those of them that wait in the block layer.
    pub waiting: u64,
}

impl Stats {
    /// The counts of `op`.
    pub const fn op(&self, op: Op) -> &OpStats {
        &self.ops[op as usize]
    }

    /// Sets counts to zero.
    pub(crate) fn clear(&mut self, what: Clear) {
        match what {
            Clear::All => *self = Self::default(),
            Clear::Extremes => {
                self.ops.iter_mut().for_each(|op| (op.latency_ns_max, op.shortness) = (0, 0));
            }
            Clear::Errors => self.ops.iter_mut().for_each(|op| op.errors = 0),
        }
    }

    /// The sum of the latencies of all operations, in nanoseconds.
    pub(crate) fn latency_ns(&self) -> u64 {
        self.ops.iter().map(|op| op.latency_ns).sum()
    }

    /// The latencies of `op`, or of all operations.
    pub fn latencies(&self, op: Option<Op>) -> Histogram {
        let mut sum = Histogram::default();
        let wanted = Op::ALL.into_iter().filter(|&o| op.is_none_or(|op| op == o));
        wanted.for_each(|op| sum.merge(&self.op(op).latencies));
        sum
    }

    /// Counts a request that failed before it began.
    pub(crate) fn refuse(&mut self, op: Op) {
        self.ops[op as usize].errors += 1;
    }

    /// A request has completed: so many bytes, so long after it was submitted.
    #[inline]
    pub fn record(&mut self, op: Op, bytes: Bytes, status: Status, latency_ns: u64) {
        self.ops[op as usize].record(bytes, status, latency_ns);
    }

    pub(crate) fn throttled(&mut self, time: Duration) {
        self.throttled_ios += 1;
        self.throttled_ns += time.as_nanos() as u64;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.merge(theirs);
        }
        self.layers.merge(&other.layers);
        self.overdue += other.overdue;
        self.throttled_ios += other.throttled_ios;
        self.throttled_ns += other.throttled_ns;
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_counts_are_cleared() {
        let counted = || {
            let mut stats = Stats::default();
            stats.record(Op::Read, Bytes(512), Status::Ok, 7);
            stats.refuse(Op::Read);
            stats
        };
        let seen = |what| {
            let mut stats = counted();
            stats.clear(what);
            let read = stats.op(Op::Read);
            (read.ops, read.errors, read.latency_ns_max, read.latency_ns_min())
        };
        assert_eq!(seen(Clear::Extremes), (1, 1, 0, None));
        assert_eq!(seen(Clear::Errors), (1, 0, 7, Some(7)));
        assert_eq!(seen(Clear::All), (0, 0, 0, None));
    }
}
