//! Rates per second between two snapshots: the numbers of the web page. Any context; pure.

use crate::{Disk, Group, Snapshot};
use aryk_bdev::{Coarse, Op, Summary, TimeLayer};
use serde::Serialize;
use std::collections::HashMap;

/// A disk and its rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DiskRate {
    pub name: String,
    pub kind: &'static str,
    #[serde(flatten)]
    pub rate: Rate,
}

/// A group, the summed rates of its disks, and its limits per second; 0 means no limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupRate {
    name: String,
    parent: Option<String>,
    disks: usize,
    most_ops: u64,
    most_bytes: u64,
    #[serde(flatten)]
    pub rate: Rate,
}

/// Rates per second of one or more disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rate {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub others: u64,
    pub errors: u64,
    /// All failed requests so far.
    pub errors_ever: u64,
    /// Mean latency in nanoseconds.
    pub mean_ns: Option<u64>,
    /// Nanoseconds per second that all requests together spent in each layer.
    pub throttle: u64,
    pub queue: u64,
    pub module: u64,
    pub front_end: u64,
    pub in_flight: u64,
    #[serde(skip)]
    latency_ns: u64,
}

impl Rate {
    pub const fn ops(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    fn between(before: Option<&Summary>, now: &Summary, seconds: f64) -> Self {
        let grown = before.map_or(*now, |before| now.since(before));
        let per_second = |count: u64| (count as f64 / seconds).round() as u64;
        let layer = |layer| per_second(grown.layer(layer).sum_ns);
        let (read, write) = (grown.op(Op::Read), grown.op(Op::Write));
        let mut rate = Self {
            reads: per_second(read.ops),
            read_bytes: per_second(read.bytes.0),
            writes: per_second(write.ops),
            write_bytes: per_second(write.bytes.0),
            others: per_second(grown.total(|op| op.ops) - read.ops - write.ops),
            errors: per_second(grown.total(|op| op.errors)),
            errors_ever: now.total(|op| op.errors),
            mean_ns: None,
            throttle: layer(TimeLayer::Throttle),
            queue: layer(TimeLayer::Queue),
            module: layer(TimeLayer::Module),
            front_end: layer(TimeLayer::FrontEnd),
            in_flight: now.in_flight,
            latency_ns: per_second(grown.total(|op| op.latency_ns)),
        };
        rate.mean_ns = rate.latency_ns.checked_div(rate.ops());
        rate
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
        self.others += other.others;
        self.errors += other.errors;
        self.errors_ever += other.errors_ever;
        self.throttle += other.throttle;
        self.queue += other.queue;
        self.module += other.module;
        self.front_end += other.front_end;
        self.in_flight += other.in_flight;
        self.latency_ns += other.latency_ns;
        self.mean_ns = self.latency_ns.checked_div(self.ops());
    }
}

/// A reactor's use of time, as fractions of 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    core: u16,
    busy: f64,
    idle: f64,
    asleep: f64,
    longest_turn_ns: u64,
    members: u64,
}

/// The rates between two snapshots.
#[derive(Debug)]
pub struct Rates {
    /// The time between the two; `None` if there was no earlier snapshot, so that no rate is known.
    pub seconds: Option<f64>,
    pub disks: Vec<DiskRate>,
    pub groups: Vec<GroupRate>,
    pub total: Rate,
    pub reactors: Vec<Share>,
    /// Requests that completed between the two, by latency.
    pub latencies: [u64; Coarse::BUCKETS],
    /// Connected front-ends.
    pub vms: usize,
}

impl Rates {
    /// Computes the rates between `before` and `now`.
    pub fn between(before: Option<&Snapshot>, now: &Snapshot) -> Self {
        let known = before.map(|before| now.seconds_since(before));
        // Without an earlier snapshot all rates are zero.
        let (before, seconds) = (before.unwrap_or(now), known.unwrap_or(1.0));
        let old: HashMap<_, _> = before.disks.iter().map(|disk| (&*disk.name, &disk.counts)).collect();
        let disk = |disk: &Disk| DiskRate {
            name: disk.name.clone(),
            kind: disk.product,
            rate: Rate::between(old.get(&*disk.name).copied(), &disk.counts, seconds),
        };
        let disks: Vec<_> = now.disks.iter().map(disk).collect();
        let mut total = Rate::default();
        disks.iter().for_each(|disk| total.add(&disk.rate));
        let group = |group: &Group| {
            let old = before.groups.iter().find(|old| old.name == group.name).map(|old| &old.counts);
            GroupRate {
                name: group.name.clone(),
                parent: group.parent.clone(),
                disks: group.disks,
                most_ops: group.limits.ios,
                most_bytes: group.limits.bytes,
                rate: Rate::between(old, &group.counts, seconds),
            }
        };
        let groups = now.groups.iter().map(group).collect();
        let (was, is) = (latency_counts(before), latency_counts(now));
        let reactors = now.reactors.iter().map(|reactor| {
            let old = before.reactors.iter().find(|r| r.core == reactor.core).map(|r| r.stats);
            let (old, new) = (old.unwrap_or_default(), reactor.stats);
            let times = [
                new.busy.saturating_sub(old.busy),
                new.idle.saturating_sub(old.idle),
                new.sleeping.saturating_sub(old.sleeping),
            ];
            let all = times.iter().map(|t| t.as_secs_f64()).sum::<f64>().max(1e-9);
            let [busy, idle, asleep] = times.map(|t| t.as_secs_f64() / all);
            let longest_turn_ns = reactor.longest_turn.as_nanos() as u64;
            Share { core: reactor.core, busy, idle, asleep, longest_turn_ns, members: reactor.members }
        });
        Self {
            seconds: known,
            reactors: reactors.collect(),
            latencies: std::array::from_fn(|i| is[i].saturating_sub(was[i])),
            vms: now.controllers.iter().filter(|of_controller| of_controller.controller.connected).count(),
            disks,
            groups,
            total,
        }
    }
}

/// The counts of all reads and writes of all disks, by latency.
fn latency_counts(snapshot: &Snapshot) -> [u64; Coarse::BUCKETS] {
    let mut sum = Coarse::default();
    for disk in &snapshot.disks {
        sum.merge(&disk.counts.reads);
        sum.merge(&disk.counts.writes);
    }
    *sum.counts()
}
