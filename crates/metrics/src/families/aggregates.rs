//! Families that groups, controllers and reactors have in common: the sums of their disks' counts. Any context; pure.

use super::{FamilySource, counter, latencies_of, of};
use crate::exposition::{Family, Kind, Text};
use crate::{ControllerCounts, Group, Reactor, Snapshot};
use aryk_bdev::{Coarse, Op, OpSummary, Summary, TimeLayer};
use std::borrow::Cow;

/// A set of disks with summed counts: a group, a controller or a reactor.
pub trait Aggregate: Sized + 'static {
    /// The label with the set's name.
    const LABEL: &'static str;

    /// All sets of this kind in a snapshot.
    fn all(snapshot: &Snapshot) -> &[Self];
    /// The set's name.
    fn name(&self) -> Cow<'_, str>;
    /// The sum of its disks' counts; `None` where the sum equals one disk's counts, which are reported of the disk already.
    fn counts(&self) -> Option<&Summary>;
}

impl Aggregate for Group {
    const LABEL: &'static str = "group";

    fn all(snapshot: &Snapshot) -> &[Self] {
        &snapshot.groups
    }

    fn name(&self) -> Cow<'_, str> {
        (&self.name).into()
    }

    fn counts(&self) -> Option<&Summary> {
        Some(&self.counts)
    }
}

impl Aggregate for ControllerCounts {
    const LABEL: &'static str = "controller";

    fn all(snapshot: &Snapshot) -> &[Self] {
        &snapshot.controllers
    }

    fn name(&self) -> Cow<'_, str> {
        (&self.controller.name).into()
    }

    fn counts(&self) -> Option<&Summary> {
        (self.controller.kind != "blk").then_some(&self.counts)
    }
}

impl Aggregate for Reactor {
    const LABEL: &'static str = "core";

    fn all(snapshot: &Snapshot) -> &[Self] {
        &snapshot.reactors
    }

    fn name(&self) -> Cow<'_, str> {
        self.core.to_string().into()
    }

    fn counts(&self) -> Option<&Summary> {
        Some(&self.counts)
    }
}

/// Completed requests by operation.
pub const fn ops<U: Aggregate>(name: &'static str) -> FamilySource {
    let family = counter(name, "Requests of its disks that completed without failure.");
    FamilySource {
        family,
        objects: count::<U>,
        write: |f, snapshot, i, t| write_ops::<U>(f, snapshot, i, t, |op| op.ops),
    }
}

/// Bytes by operation.
pub const fn bytes<U: Aggregate>(name: &'static str) -> FamilySource {
    let help = "Bytes of its disks' requests that completed without failure.";
    let family = of(Kind::Counter, "bytes", name, help);
    FamilySource {
        family,
        objects: count::<U>,
        write: |f, snapshot, i, t| write_ops::<U>(f, snapshot, i, t, |op| op.bytes.0),
    }
}

/// Failed requests by operation.
pub const fn errors<U: Aggregate>(name: &'static str) -> FamilySource {
    let family = counter(name, "Requests of its disks that failed.");
    FamilySource {
        family,
        objects: count::<U>,
        write: |f, snapshot, i, t| write_ops::<U>(f, snapshot, i, t, |op| op.errors),
    }
}

/// Latencies of reads and of writes.
pub const fn latencies<U: Aggregate>(name: &'static str) -> FamilySource {
    let family = of(Kind::Histogram, "seconds", name, "How long its disks' requests took.");
    FamilySource { family, objects: count::<U>, write: write_latencies::<U> }
}

/// Times by layer.
pub const fn layers<U: Aggregate>(name: &'static str) -> FamilySource {
    let help = "How long its disks' requests were in each layer; `throttle` and `queue` count only requests that waited there.";
    FamilySource {
        family: of(Kind::Histogram, "seconds", name, help),
        objects: count::<U>,
        write: write_layers::<U>,
    }
}

fn count<U: Aggregate>(snapshot: &Snapshot) -> usize {
    U::all(snapshot).len()
}

fn write_ops<U: Aggregate>(
    family: &Family,
    snapshot: &Snapshot,
    index: usize,
    text: &mut Text,
    count: fn(&OpSummary) -> u64,
) {
    let aggregate = &U::all(snapshot)[index];
    let Some(counts) = aggregate.counts() else { return };
    let name = aggregate.name();
    for op in [Op::Read, Op::Write] {
        text.count(family, &[(U::LABEL, &name), ("op", op.name())], count(counts.op(op)));
    }
}

fn write_latencies<U: Aggregate>(family: &Family, snapshot: &Snapshot, index: usize, text: &mut Text) {
    let aggregate = &U::all(snapshot)[index];
    let Some(counts) = aggregate.counts() else { return };
    latencies_of(family, (U::LABEL, &aggregate.name()), counts, text);
}

fn write_layers<U: Aggregate>(family: &Family, snapshot: &Snapshot, index: usize, text: &mut Text) {
    let aggregate = &U::all(snapshot)[index];
    let Some(counts) = aggregate.counts() else { return };
    let name = aggregate.name();
    for layer in TimeLayer::ALL {
        let times = counts.layer(layer);
        let buckets = (&Coarse::BOUNDS_LOG2[..], &times.times.counts()[..]);
        text.histogram(family, &[(U::LABEL, &name), ("layer", layer.name())], buckets, times.sum_ns);
    }
}
