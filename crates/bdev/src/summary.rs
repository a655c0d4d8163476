//! What a disk has counted, in brief: small enough to be had of thousands of disks every second. Any context.

use crate::{Bytes, Coarse, Op, OpStats, Stats, TimeLayer};

/// Counts of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpSummary {
    /// Requests that completed without failure.
    pub ops: u64,
    /// Bytes that they were about.
    pub bytes: Bytes,
    /// Requests that failed.
    pub errors: u64,
    /// The sum of all latencies, in nanoseconds.
    pub latency_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_ns_max: u64,
}

impl OpSummary {
    fn add(&mut self, stats: &OpStats) {
        self.ops += stats.ops;
        self.bytes += stats.bytes;
        self.errors += stats.errors;
        self.latency_ns += stats.latency_ns;
        self.latency_ns_max = self.latency_ns_max.max(stats.latency_ns_max);
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            ops: since(self.ops, earlier.ops),
            bytes: Bytes(since(self.bytes.0, earlier.bytes.0)),
            errors: since(self.errors, earlier.errors),
            latency_ns: since(self.latency_ns, earlier.latency_ns),
            latency_ns_max: self.latency_ns_max,
        }
    }

    fn merge(&mut self, other: &Self) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.latency_ns += other.latency_ns;
        self.latency_ns_max = self.latency_ns_max.max(other.latency_ns_max);
    }
}

/// The growth of a count. A count that was set to zero in between started again from zero.
pub(crate) const fn since(now: u64, earlier: u64) -> u64 {
    match now.checked_sub(earlier) {
        Some(grown) => grown,
        None => now,
    }
}

/// Counts of all operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    ops: [OpSummary; Op::ALL.len()],
    /// Latencies of reads.
    pub reads: Coarse,
    /// Latencies of writes.
    pub writes: Coarse,
    /// Requests that were found to be over the disk's deadline.
    pub overdue: u64,
    /// Requests that have been submitted and not yet completed.
    pub in_flight: u64,
    /// Those of them that wait in the block layer.
    pub waiting: u64,
    /// The most that were in flight since they were last gathered; of several channels, added.
    pub in_flight_max: u64,
    layers: [LayerSummary; TimeLayer::ALL.len()],
}

/// Times spent in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSummary {
    /// All together, in nanoseconds.
    pub sum_ns: u64,
    /// By request.
    pub times: Coarse,
}

impl Summary {
    /// The counts of `op`.
    pub const fn op(&self, op: Op) -> &OpSummary {
        &self.ops[op as usize]
    }

    /// The sum of `of` over all operations.
    pub fn total(&self, of: impl Fn(&OpSummary) -> u64) -> u64 {
        self.ops.iter().map(of).sum()
    }

    /// The times spent in `layer`.
    pub const fn layer(&self, layer: TimeLayer) -> &LayerSummary {
        &self.layers[layer as usize]
    }

    /// Adds what `stats` has, but for the depths.
    pub fn add(&mut self, stats: &Stats) {
        for (mine, op) in self.ops.iter_mut().zip(Op::ALL) {
            mine.add(stats.op(op));
        }
        self.reads.merge_fine(&stats.op(Op::Read).latencies);
        self.writes.merge_fine(&stats.op(Op::Write).latencies);
        self.overdue += stats.overdue;
        let module = &mut self.layers[TimeLayer::Module as usize];
        module.sum_ns += stats.latency_ns() - stats.layers.waited_ns();
        stats.layers.add_module(&mut module.times, Op::ALL.map(|op| &stats.op(op).latencies));
        for layer in TimeLayer::ALL {
            if let Some(times) = stats.layers.times(layer) {
                let mine = &mut self.layers[layer as usize];
                mine.sum_ns += times.sum_ns;
                mine.times.merge_fine(&times.histogram);
            }
        }
    }

    /// The counts since the state `earlier`; the depths and the longest latencies are those of now.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            ops: std::array::from_fn(|i| self.ops[i].since(&earlier.ops[i])),
            reads: self.reads.since(&earlier.reads),
            writes: self.writes.since(&earlier.writes),
            overdue: since(self.overdue, earlier.overdue),
            layers: std::array::from_fn(|i| LayerSummary {
                sum_ns: since(self.layers[i].sum_ns, earlier.layers[i].sum_ns),
                times: self.layers[i].times.since(&earlier.layers[i].times),
            }),
            ..*self
        }
    }

    /// Keeps what it has counted, but not how much is in flight.
    pub const fn forget_depths(&mut self) {
        (self.in_flight, self.waiting, self.in_flight_max) = (0, 0, 0);
    }

    /// Adds what `other` has.
    pub fn merge(&mut self, other: &Self) {
        self.ops.iter_mut().zip(&other.ops).for_each(|(mine, theirs)| mine.merge(theirs));
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
        self.overdue += other.overdue;
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
        self.in_flight_max += other.in_flight_max;
        for (mine, theirs) in self.layers.iter_mut().zip(&other.layers) {
            mine.sum_ns += theirs.sum_ns;
            mine.times.merge(&theirs.times);
        }
    }
}
