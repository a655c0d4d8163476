//! The time that requests spend in each layer. A channel writes it in reactor context; any thread merges copies of it.
//!
//! Most requests go to their module at once, and all of their latency is the module's: of them nothing is counted here.
//! Those that waited are counted apart, once as what they took and once as what of it was the module's, and the module's
//! latencies of all are had by taking the ones for the others. So a request that waits for nothing costs nothing here.

use crate::{Coarse, Histogram, Op, Stats};

/// Where a request can spend its time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TimeLayer {
    /// Held up by the limits of its disk, or of a group.
    Throttle,
    /// In its channel's queue: for a credit, for blocks that others have to themselves, for a reset.
    Queue,
    /// In the module, until a poll brings its completion.
    Module,
    /// From there until the guest has been told, at the end of the turn.
    FrontEnd,
}

impl TimeLayer {
    /// All of them, as a request passes them.
    pub const ALL: [Self; 4] = [Self::Throttle, Self::Queue, Self::Module, Self::FrontEnd];

    /// The name of the layer.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Throttle => "throttle",
            Self::Queue => "queue",
            Self::Module => "module",
            Self::FrontEnd => "front-end",
        }
    }
}

/// Times spent in one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// All together, in nanoseconds.
    pub sum_ns: u64,
    /// By request, in nanoseconds.
    pub histogram: Histogram,
}

impl Times {
    fn record(&mut self, ns: u64, times: u64) {
        self.sum_ns += ns * times;
        self.histogram.record_times(ns, times);
    }

    fn merge(&mut self, other: &Self) {
        self.sum_ns += other.sum_ns;
        self.histogram.merge(&other.histogram);
    }
}

/// What a channel counts of the layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layers {
    throttle: Times,
    queue: Times,
    front_end: Times,
    /// Of those that waited: their latencies, and the modules' parts of these.
    waited: Times,
    waited_at_module: Times,
}

impl Layers {
    /// A request leaves the limits, after so long.
    pub fn throttled(&mut self, ns: u64) {
        self.throttle.record(ns, 1);
    }

    /// A request leaves the queue, after so long.
    pub fn queued(&mut self, ns: u64) {
        self.queue.record(ns, 1);
    }

    /// A request that had waited completes.
    pub fn completed(&mut self, latency_ns: u64, waited_ns: u64) {
        self.waited.record(latency_ns, 1);
        self.waited_at_module.record(latency_ns.saturating_sub(waited_ns), 1);
    }

    /// Counts requests whose completions the guest was notified of `ns` nanoseconds after they had completed.
    pub fn told(&mut self, ns: u64, requests: u64) {
        self.front_end.record(ns, requests);
    }

    pub fn merge(&mut self, other: &Self) {
        self.throttle.merge(&other.throttle);
        self.queue.merge(&other.queue);
        self.front_end.merge(&other.front_end);
        self.waited.merge(&other.waited);
        self.waited_at_module.merge(&other.waited_at_module);
    }

    /// For how long requests waited in all, of those that have completed.
    pub const fn waited_ns(&self) -> u64 {
        self.waited.sum_ns - self.waited_at_module.sum_ns
    }

    /// Adds the module's times of all requests, whose latencies these are.
    pub fn add_module(&self, to: &mut Coarse, latencies: [&Histogram; Op::ALL.len()]) {
        latencies.into_iter().for_each(|latencies| to.merge_fine(latencies));
        to.remove_fine(&self.waited.histogram);
        to.merge_fine(&self.waited_at_module.histogram);
    }

    /// The times of a layer whose times are counted here.
    pub const fn times(&self, layer: TimeLayer) -> Option<&Times> {
        match layer {
            TimeLayer::Throttle => Some(&self.throttle),
            TimeLayer::Queue => Some(&self.queue),
            TimeLayer::Module => None,
            TimeLayer::FrontEnd => Some(&self.front_end),
        }
    }
}

impl Stats {
    /// The times that requests spent in `layer`.
    pub fn times(&self, layer: TimeLayer) -> Times {
        if let Some(times) = self.layers.times(layer) {
            return times.clone();
        }
        let mut histogram = self.latencies(None).since(&self.layers.waited.histogram);
        histogram.merge(&self.layers.waited_at_module.histogram);
        Times { sum_ns: self.latency_ns() - self.layers.waited_ns(), histogram }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;
    use crate::{Status, Summary};

    #[test]
    fn what_waited_is_told_from_what_the_module_took() {
        let mut stats = Stats::default();
        stats.record(Op::Read, Bytes(512), Status::Ok, 1_000);
        stats.layers.throttled(2_000);
        stats.layers.queued(3_000);
        stats.record(Op::Write, Bytes(512), Status::Ok, 9_000);
        stats.layers.completed(9_000, 5_000);
        stats.layers.told(10, 2);
        let mut twice = stats.clone();
        twice.merge(&stats);
        let of = |layer| (twice.times(layer).sum_ns, twice.times(layer).histogram.total());
        assert_eq!(of(TimeLayer::Module), (2 * 5_000, 4));
        assert_eq!(of(TimeLayer::Throttle), (4_000, 2));
        assert_eq!((of(TimeLayer::Queue), of(TimeLayer::FrontEnd)), ((6_000, 2), (40, 4)));
        let mut summary = Summary::default();
        summary.add(&twice);
        for layer in TimeLayer::ALL {
            let mut coarse = Coarse::default();
            coarse.merge_fine(&twice.times(layer).histogram);
            assert_eq!((summary.layer(layer).sum_ns, summary.layer(layer).times), (of(layer).0, coarse));
        }
        let module = stats.times(TimeLayer::Module).histogram;
        assert!((4_000..4_600).contains(&module.quantile(1.0)) && module.quantile(0.5) < 1_200, "{module:?}");
    }
}
