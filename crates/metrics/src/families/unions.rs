//! Families that groups, controllers and reactors have alike: what their disks did. Any context; pure.

use super::{Told, counter, latencies_of, of};
use crate::exposition::{Family, Kind, Text};
use crate::{Group, Look, Reactor, Seat};
use aryk_bdev::{Coarse, Op, OpSummary, Summary, TimeLayer};
use std::borrow::Cow;

/// What disks belong to.
pub trait Union: Sized + 'static {
    /// The label that names it.
    const LABEL: &'static str;

    /// All of them.
    fn all(look: &Look) -> &[Self];
    /// Its name.
    fn name(&self) -> Cow<'_, str>;
    /// What its disks did; `None` if that is told of one of them already.
    fn counts(&self) -> Option<&Summary>;
}

impl Union for Group {
    const LABEL: &'static str = "group";

    fn all(look: &Look) -> &[Self] {
        &look.groups
    }

    fn name(&self) -> Cow<'_, str> {
        (&self.name).into()
    }

    fn counts(&self) -> Option<&Summary> {
        Some(&self.counts)
    }
}

impl Union for Seat {
    const LABEL: &'static str = "controller";

    fn all(look: &Look) -> &[Self] {
        &look.controllers
    }

    fn name(&self) -> Cow<'_, str> {
        (&self.controller.name).into()
    }

    fn counts(&self) -> Option<&Summary> {
        (self.controller.kind != "blk").then_some(&self.counts)
    }
}

impl Union for Reactor {
    const LABEL: &'static str = "core";

    fn all(look: &Look) -> &[Self] {
        &look.reactors
    }

    fn name(&self) -> Cow<'_, str> {
        self.core.to_string().into()
    }

    fn counts(&self) -> Option<&Summary> {
        Some(&self.counts)
    }
}

/// Requests by operation.
pub const fn ops<U: Union>(name: &'static str) -> Told {
    let family = counter(name, "Requests of its disks that completed without failure.");
    Told { family, objects: count::<U>, tell: |f, look, i, t| tell_ops::<U>(f, look, i, t, |op| op.ops) }
}

/// Bytes by operation.
pub const fn bytes<U: Union>(name: &'static str) -> Told {
    let help = "Bytes of its disks' requests that completed without failure.";
    let family = of(Kind::Counter, "bytes", name, help);
    Told { family, objects: count::<U>, tell: |f, look, i, t| tell_ops::<U>(f, look, i, t, |op| op.bytes) }
}

/// Failures by operation.
pub const fn errors<U: Union>(name: &'static str) -> Told {
    let family = counter(name, "Requests of its disks that failed.");
    Told { family, objects: count::<U>, tell: |f, look, i, t| tell_ops::<U>(f, look, i, t, |op| op.errors) }
}

/// Latencies of reads and of writes.
pub const fn latencies<U: Union>(name: &'static str) -> Told {
    let family = of(Kind::Histogram, "seconds", name, "How long its disks' requests took.");
    Told { family, objects: count::<U>, tell: tell_latencies::<U> }
}

/// Times by layer.
pub const fn layers<U: Union>(name: &'static str) -> Told {
    let help = "How long its disks' requests were in each layer; of `throttle` and `queue`, those that waited there.";
    Told { family: of(Kind::Histogram, "seconds", name, help), objects: count::<U>, tell: tell_layers::<U> }
}

fn count<U: Union>(look: &Look) -> usize {
    U::all(look).len()
}

fn tell_ops<U: Union>(
    family: &Family,
    look: &Look,
    index: usize,
    text: &mut Text,
    count: fn(&OpSummary) -> u64,
) {
    let union = &U::all(look)[index];
    let Some(counts) = union.counts() else { return };
    let name = union.name();
    for op in [Op::Read, Op::Write] {
        text.count(family, &[(U::LABEL, &name), ("op", op.name())], count(counts.op(op)));
    }
}

fn tell_latencies<U: Union>(family: &Family, look: &Look, index: usize, text: &mut Text) {
    let union = &U::all(look)[index];
    let Some(counts) = union.counts() else { return };
    latencies_of(family, (U::LABEL, &union.name()), counts, text);
}

fn tell_layers<U: Union>(family: &Family, look: &Look, index: usize, text: &mut Text) {
    let union = &U::all(look)[index];
    let Some(counts) = union.counts() else { return };
    let name = union.name();
    for layer in TimeLayer::ALL {
        let times = counts.layer(layer);
        let buckets = (&Coarse::BOUNDS_LOG2[..], &times.times.counts()[..]);
        text.histogram(family, &[(U::LABEL, &name), ("layer", layer.name())], buckets, times.sum_ns);
    }
}
