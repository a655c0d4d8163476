//! What is told, family by family: the names that dashboards and alerts are written against. Any context; pure.

use crate::exposition::{Family, Kind, Label, Text};
use crate::{Disk, Group, Look, Reactor, Seat};
use aryk_bdev::{Coarse, Op, RateLimits, Summary, TimeLayer};
use std::time::UNIX_EPOCH;

mod unions;

/// A family, and how its samples are had from a look: how many objects have some, and those of one of them.
pub struct Told {
    pub family: Family,
    pub objects: fn(&Look) -> usize,
    pub tell: fn(&Family, &Look, usize, &mut Text),
}

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, unit: "", help }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, unit: "", help }
}

const fn info(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Info, unit: "", help }
}

const fn of(kind: Kind, unit: &'static str, name: &'static str, help: &'static str) -> Family {
    Family { name, kind, unit, help }
}

fn disks(look: &Look) -> usize {
    look.disks.len()
}

fn groups(look: &Look) -> usize {
    look.groups.len()
}

fn controllers(look: &Look) -> usize {
    look.controllers.len()
}

fn reactors(look: &Look) -> usize {
    look.reactors.len()
}

const fn one(_: &Look) -> usize {
    1
}

/// The operations that are told of a disk: those that every disk does, and what else it has done.
fn told_ops(disk: &Disk) -> impl Iterator<Item = Op> + '_ {
    let is_told = |op: &Op| {
        let counts = disk.counts.op(*op);
        matches!(op, Op::Read | Op::Write) || counts.ops + counts.errors > 0
    };
    Op::ALL.into_iter().filter(is_told)
}

/// All of them, in their order.
pub const ALL: &[Told] = &[
    Told {
        family: info("aryk_build", "The daemon's version."),
        objects: one,
        tell: |f, _, _, t| t.count(f, &[("version", env!("CARGO_PKG_VERSION"))], 1),
    },
    Told {
        family: of(Kind::Gauge, "seconds", "aryk_look_seconds", "How long it took to gather all this."),
        objects: one,
        tell: |f, look, _, t| t.seconds(f, &[], look.took.as_nanos() as u64),
    },
    Told {
        family: info("aryk_disk", "What kind of disk it is."),
        objects: disks,
        tell: |f, look, i, t| {
            t.count(f, &[("disk", &look.disks[i].name), ("kind", look.disks[i].product)], 1);
        },
    },
    Told {
        family: of(Kind::Gauge, "bytes", "aryk_disk_size_bytes", "How large the disk is."),
        objects: disks,
        tell: |f, look, i, t| t.count(f, &[("disk", &look.disks[i].name)], look.disks[i].size),
    },
    Told {
        family: counter("aryk_disk_ops", "Requests that completed without failure."),
        objects: disks,
        tell: |f, look, i, t| tell_ops(f, &look.disks[i], t, |disk, op| disk.counts.op(op).ops),
    },
    Told {
        family: of(
            Kind::Counter,
            "bytes",
            "aryk_disk_bytes",
            "Bytes of the requests that completed without failure.",
        ),
        objects: disks,
        tell: |f, look, i, t| tell_ops(f, &look.disks[i], t, |disk, op| disk.counts.op(op).bytes),
    },
    Told {
        family: counter("aryk_disk_errors", "Requests that failed."),
        objects: disks,
        tell: |f, look, i, t| tell_ops(f, &look.disks[i], t, |disk, op| disk.counts.op(op).errors),
    },
    Told {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_disk_last_failure_timestamp_seconds",
            "When the disk's store last failed a request, in seconds since 1970, and why.",
        ),
        objects: disks,
        tell: |f, look, i, t| {
            let disk = &look.disks[i];
            if let Some(failure) = &disk.last_failure {
                let since = failure.at.duration_since(UNIX_EPOCH).unwrap_or_default();
                let errno = failure.errno.to_string();
                let labels = [("disk", &*disk.name), ("op", failure.op.name()), ("errno", &*errno)];
                t.seconds(f, &labels, since.as_nanos() as u64);
            }
        },
    },
    Told {
        family: of(
            Kind::Histogram,
            "seconds",
            "aryk_disk_latency_seconds",
            "How long requests took, from the front-end's handing them down to its having them back.",
        ),
        objects: disks,
        tell: tell_latencies,
    },
    Told {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_disk_latency_max_seconds",
            "The longest that a request took since the counts were set to zero.",
        ),
        objects: disks,
        tell: |f, look, i, t| {
            let disk = &look.disks[i];
            for op in [Op::Read, Op::Write] {
                t.seconds(f, &[("disk", &disk.name), ("op", op.name())], disk.counts.op(op).latency_ns_max);
            }
        },
    },
    Told {
        family: of(
            Kind::Counter,
            "seconds",
            "aryk_disk_layer_seconds",
            "Where the time of requests went: all of them together, by layer.",
        ),
        objects: disks,
        tell: |f, look, i, t| {
            let disk = &look.disks[i];
            for layer in TimeLayer::ALL {
                let labels = [("disk", &*disk.name), ("layer", layer.name())];
                t.seconds(f, &labels, disk.counts.layer(layer).sum_ns);
            }
        },
    },
    Told {
        family: gauge("aryk_disk_in_flight_max", "The most requests that were in flight, lately."),
        objects: disks,
        tell: |f, look, i, t| t.count(f, &[("disk", &look.disks[i].name)], look.disks[i].in_flight_max),
    },
    Told {
        family: gauge("aryk_disk_in_flight", "Requests that are in flight."),
        objects: disks,
        tell: |f, look, i, t| t.count(f, &[("disk", &look.disks[i].name)], look.disks[i].counts.in_flight),
    },
    Told {
        family: gauge("aryk_disk_waiting", "Requests in flight that wait in the block layer."),
        objects: disks,
        tell: |f, look, i, t| t.count(f, &[("disk", &look.disks[i].name)], look.disks[i].counts.waiting),
    },
    Told {
        family: counter("aryk_disk_overdue", "Requests that took longer than the disk's deadline allows."),
        objects: disks,
        tell: |f, look, i, t| t.count(f, &[("disk", &look.disks[i].name)], look.disks[i].counts.overdue),
    },
    Told {
        family: gauge("aryk_disk_limit", "What the disk itself may do in a second, by kind of limit."),
        objects: disks,
        tell: |f, look, i, t| tell_limits(f, ("disk", &look.disks[i].name), &look.disks[i].limits, t),
    },
    Told {
        family: info("aryk_group", "Disks that are limited together."),
        objects: groups,
        tell: |f, look, i, t| {
            let group = &look.groups[i];
            let parent = group.parent.as_deref().unwrap_or_default();
            t.count(f, &[("group", &group.name), ("parent", parent)], 1);
        },
    },
    Told {
        family: gauge("aryk_group_disks", "Disks in the group, and in the groups in it."),
        objects: groups,
        tell: |f, look, i, t| t.count(f, &[("group", &look.groups[i].name)], look.groups[i].disks as u64),
    },
    Told {
        family: gauge("aryk_group_limit", "What its disks may do in a second together, by kind of limit."),
        objects: groups,
        tell: |f, look, i, t| tell_limits(f, ("group", &look.groups[i].name), &look.groups[i].limits, t),
    },
    Told {
        family: gauge("aryk_group_disk", "1: this disk is in this group, and not in one within it."),
        objects: disks,
        tell: |f, look, i, t| {
            let disk = &look.disks[i];
            if let Some(group) = &disk.group {
                t.count(f, &[("group", group), ("disk", &disk.name)], 1);
            }
        },
    },
    unions::ops::<Group>("aryk_group_ops"),
    unions::bytes::<Group>("aryk_group_bytes"),
    unions::errors::<Group>("aryk_group_request_errors"),
    unions::latencies::<Group>("aryk_group_latency_seconds"),
    unions::layers::<Group>("aryk_group_layer_seconds"),
    Told {
        family: info("aryk_controller", "What kind of controller it is."),
        objects: controllers,
        tell: |f, look, i, t| {
            let controller = &look.controllers[i].controller;
            t.count(f, &[("controller", &controller.name), ("kind", controller.kind)], 1);
        },
    },
    Told {
        family: gauge("aryk_controller_disk", "1: through this controller a machine reaches this disk."),
        objects: controllers,
        tell: |f, look, i, t| {
            let controller = &look.controllers[i].controller;
            for disk in &controller.disks {
                t.count(f, &[("controller", &controller.name), ("disk", disk)], 1);
            }
        },
    },
    Told {
        family: gauge("aryk_controller_connected", "Whether the controller's machine is connected."),
        objects: controllers,
        tell: |f, look, i, t| {
            let controller = &look.controllers[i].controller;
            t.count(f, &[("controller", &controller.name)], controller.connected.into());
        },
    },
    Told {
        family: gauge("aryk_controller_queues", "Queues of the machine that are served."),
        objects: controllers,
        tell: |f, look, i, t| {
            t.count(
                f,
                &[("controller", &look.controllers[i].controller.name)],
                look.controllers[i].controller.queues,
            );
        },
    },
    Told {
        family: counter("aryk_controller_sessions", "Times that a machine has connected."),
        objects: controllers,
        tell: |f, look, i, t| {
            t.count(
                f,
                &[("controller", &look.controllers[i].controller.name)],
                look.controllers[i].controller.sessions,
            );
        },
    },
    Told {
        family: counter(
            "aryk_controller_failed_sessions",
            "Sessions that ended by an error, not by the machine's leaving.",
        ),
        objects: controllers,
        tell: |f, look, i, t| {
            t.count(
                f,
                &[("controller", &look.controllers[i].controller.name)],
                look.controllers[i].controller.failed_sessions,
            );
        },
    },
    Told {
        family: counter("aryk_controller_errors", "What the machine did wrong, by kind."),
        objects: controllers,
        tell: |f, look, i, t| {
            let controller = &look.controllers[i].controller;
            for (kind, count) in controller.errors {
                t.count(f, &[("controller", &controller.name), ("kind", kind)], count);
            }
        },
    },
    unions::ops::<Seat>("aryk_controller_ops"),
    unions::bytes::<Seat>("aryk_controller_bytes"),
    unions::errors::<Seat>("aryk_controller_request_errors"),
    unions::latencies::<Seat>("aryk_controller_latency_seconds"),
    unions::layers::<Seat>("aryk_controller_layer_seconds"),
    Told {
        family: of(Kind::Counter, "seconds", "aryk_reactor_seconds", "Where the reactor's time went."),
        objects: reactors,
        tell: |f, look, i, t| {
            let (core, stats) = (look.reactors[i].core.to_string(), &look.reactors[i].stats);
            for (state, time) in [("busy", stats.busy), ("idle", stats.idle), ("asleep", stats.sleeping)] {
                t.seconds(f, &[("core", &core), ("state", state)], time.as_nanos() as u64);
            }
        },
    },
    Told {
        family: counter("aryk_reactor_turns", "Turns that the reactor made."),
        objects: reactors,
        tell: |f, look, i, t| {
            t.count(f, &[("core", &look.reactors[i].core.to_string())], look.reactors[i].stats.turns);
        },
    },
    Told {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_reactor_longest_turn_seconds",
            "The longest that the reactor was at one turn, lately: nothing else on its core ran meanwhile.",
        ),
        objects: reactors,
        tell: |f, look, i, t| {
            let reactor = &look.reactors[i];
            t.seconds(f, &[("core", &reactor.core.to_string())], reactor.longest_turn.as_nanos() as u64);
        },
    },
    Told {
        family: gauge("aryk_reactor_members", "Queues and pollers that the reactor serves."),
        objects: reactors,
        tell: |f, look, i, t| {
            t.count(f, &[("core", &look.reactors[i].core.to_string())], look.reactors[i].members);
        },
    },
    Told {
        family: of(Kind::Gauge, "bytes", "aryk_guest_memory_bytes", "Memory of front-ends that is mapped."),
        objects: one,
        tell: |f, look, _, t| t.count(f, &[], look.mapped.0),
    },
    Told {
        family: gauge("aryk_guest_memory_regions", "Mappings that it is in."),
        objects: one,
        tell: |f, look, _, t| t.count(f, &[], look.mapped.1),
    },
    Told {
        family: gauge(
            "aryk_reclaim_pending",
            "Mappings and memory files that wait to be unmapped and closed.",
        ),
        objects: one,
        tell: |f, look, _, t| t.count(f, &[], look.reclaiming.pending),
    },
    Told {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_reclaim_delay_max_seconds",
            "The longest that one of them has taken, from when nobody used it any more.",
        ),
        objects: one,
        tell: |f, look, _, t| t.seconds(f, &[], look.reclaiming.delay_max.as_nanos() as u64),
    },
    unions::ops::<Reactor>("aryk_reactor_ops"),
    unions::bytes::<Reactor>("aryk_reactor_bytes"),
    unions::errors::<Reactor>("aryk_reactor_request_errors"),
    unions::latencies::<Reactor>("aryk_reactor_latency_seconds"),
    unions::layers::<Reactor>("aryk_reactor_layer_seconds"),
];

/// The limits that are set.
fn tell_limits(family: &Family, whose: Label<'_>, limits: &RateLimits, text: &mut Text) {
    let all = [
        ("ops", limits.ios),
        ("read_ops", limits.read_ios),
        ("write_ops", limits.write_ios),
        ("bytes", limits.bytes),
        ("read_bytes", limits.read_bytes),
        ("write_bytes", limits.write_bytes),
    ];
    for (of, limit) in all.into_iter().filter(|(_, limit)| *limit > 0) {
        text.count(family, &[whose, ("of", of)], limit);
    }
}

fn tell_ops(family: &Family, disk: &Disk, text: &mut Text, count: impl Fn(&Disk, Op) -> u64) {
    for op in told_ops(disk) {
        text.count(family, &[("disk", &disk.name), ("op", op.name())], count(disk, op));
    }
}

fn tell_latencies(family: &Family, look: &Look, index: usize, text: &mut Text) {
    let disk = &look.disks[index];
    latencies_of(family, ("disk", &disk.name), &disk.counts, text);
}

/// Latencies of reads and of writes, by operation.
fn latencies_of(family: &Family, of: Label<'_>, counts: &Summary, text: &mut Text) {
    for (op, latencies) in [(Op::Read, &counts.reads), (Op::Write, &counts.writes)] {
        let buckets = (&Coarse::BOUNDS_LOG2[..], &latencies.counts()[..]);
        text.histogram(family, &[of, ("op", op.name())], buckets, counts.op(op).latency_ns);
    }
}
