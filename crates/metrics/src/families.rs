//! All metrics, family by family: the names that dashboards and alerts depend on. Any context; pure.

use crate::exposition::{Family, Kind, Label, Text};
use crate::{ControllerCounts, Disk, Group, Reactor, Snapshot};
use aryk_bdev::{Coarse, Op, RateLimits, Summary, TimeLayer};
use std::time::UNIX_EPOCH;

mod aggregates;
mod hosts;
mod nvme;
mod pools;
mod rbd;
mod remotes;

/// A family, and how to read its samples from a snapshot: the number of objects, and the samples of one object.
pub struct FamilySource {
    pub family: Family,
    pub objects: fn(&Snapshot) -> usize,
    pub write: fn(&Family, &Snapshot, usize, &mut Text),
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

fn disks(snapshot: &Snapshot) -> usize {
    snapshot.disks.len()
}

fn groups(snapshot: &Snapshot) -> usize {
    snapshot.groups.len()
}

fn controllers(snapshot: &Snapshot) -> usize {
    snapshot.controllers.len()
}

fn reactors(snapshot: &Snapshot) -> usize {
    snapshot.reactors.len()
}

fn memory_clients(snapshot: &Snapshot) -> usize {
    snapshot.memory_clients.len()
}

const fn one(_: &Snapshot) -> usize {
    1
}

/// The operations that are reported of a disk: reads and writes always, others if the disk has done any.
fn reported_ops(disk: &Disk) -> impl Iterator<Item = Op> + '_ {
    let is_reported = |op: &Op| {
        let counts = disk.counts.op(*op);
        matches!(op, Op::Read | Op::Write) || counts.ops + counts.errors > 0
    };
    Op::ALL.into_iter().filter(is_reported)
}

/// All families, in the order of the output.
pub const ALL: &[FamilySource] = &[
    FamilySource {
        family: info("aryk_build", "The daemon's version."),
        objects: one,
        write: |f, _, _, t| t.count(f, &[("version", env!("CARGO_PKG_VERSION"))], 1),
    },
    FamilySource {
        family: of(Kind::Gauge, "seconds", "aryk_look_seconds", "How long it took to gather these values."),
        objects: one,
        write: |f, snapshot, _, t| t.seconds(f, &[], snapshot.took.as_nanos() as u64),
    },
    FamilySource {
        family: info("aryk_disk", "The kind of the disk."),
        objects: disks,
        write: |f, snapshot, i, t| {
            t.count(f, &[("disk", &snapshot.disks[i].name), ("kind", snapshot.disks[i].product)], 1);
        },
    },
    FamilySource {
        family: of(Kind::Gauge, "bytes", "aryk_disk_size_bytes", "The size of the disk."),
        objects: disks,
        write: |f, snapshot, i, t| t.count(f, &[("disk", &snapshot.disks[i].name)], snapshot.disks[i].size.0),
    },
    FamilySource {
        family: counter("aryk_disk_ops", "Requests that completed without failure."),
        objects: disks,
        write: |f, snapshot, i, t| write_ops(f, &snapshot.disks[i], t, |disk, op| disk.counts.op(op).ops),
    },
    FamilySource {
        family: of(
            Kind::Counter,
            "bytes",
            "aryk_disk_bytes",
            "Bytes of the requests that completed without failure.",
        ),
        objects: disks,
        write: |f, snapshot, i, t| write_ops(f, &snapshot.disks[i], t, |disk, op| disk.counts.op(op).bytes.0),
    },
    FamilySource {
        family: counter("aryk_disk_errors", "Requests that failed."),
        objects: disks,
        write: |f, snapshot, i, t| write_ops(f, &snapshot.disks[i], t, |disk, op| disk.counts.op(op).errors),
    },
    FamilySource {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_disk_last_failure_timestamp_seconds",
            "When the disk's store last failed a request, in seconds since 1970, and why.",
        ),
        objects: disks,
        write: |f, snapshot, i, t| {
            let disk = &snapshot.disks[i];
            if let Some(failure) = &disk.last_failure {
                let since = failure.at.duration_since(UNIX_EPOCH).unwrap_or_default();
                let errno = failure.errno.to_string();
                let labels = [("disk", &*disk.name), ("op", failure.op.name()), ("errno", &*errno)];
                t.seconds(f, &labels, since.as_nanos() as u64);
            }
        },
    },
    FamilySource {
        family: of(
            Kind::Histogram,
            "seconds",
            "aryk_disk_latency_seconds",
            "How long requests took, from their submission to the block layer to their completion.",
        ),
        objects: disks,
        write: write_latencies,
    },
    FamilySource {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_disk_latency_max_seconds",
            "The longest latency of a request since the counts were reset.",
        ),
        objects: disks,
        write: |f, snapshot, i, t| {
            let disk = &snapshot.disks[i];
            for op in [Op::Read, Op::Write] {
                t.seconds(f, &[("disk", &disk.name), ("op", op.name())], disk.counts.op(op).latency_ns_max);
            }
        },
    },
    FamilySource {
        family: of(
            Kind::Counter,
            "seconds",
            "aryk_disk_layer_seconds",
            "The time that all requests together spent in each layer.",
        ),
        objects: disks,
        write: |f, snapshot, i, t| {
            let disk = &snapshot.disks[i];
            for layer in TimeLayer::ALL {
                let labels = [("disk", &*disk.name), ("layer", layer.name())];
                t.seconds(f, &labels, disk.counts.layer(layer).sum_ns);
            }
        },
    },
    FamilySource {
        family: gauge("aryk_disk_in_flight_max", "The highest number of requests in flight, lately."),
        objects: disks,
        write: |f, snapshot, i, t| {
            t.count(f, &[("disk", &snapshot.disks[i].name)], snapshot.disks[i].in_flight_max)
        },
    },
    FamilySource {
        family: gauge("aryk_disk_in_flight", "Requests in flight."),
        objects: disks,
        write: |f, snapshot, i, t| {
            t.count(f, &[("disk", &snapshot.disks[i].name)], snapshot.disks[i].counts.in_flight)
        },
    },
    FamilySource {
        family: gauge("aryk_disk_waiting", "Requests in flight that wait in the block layer."),
        objects: disks,
        write: |f, snapshot, i, t| {
            t.count(f, &[("disk", &snapshot.disks[i].name)], snapshot.disks[i].counts.waiting)
        },
    },
    FamilySource {
        family: counter("aryk_disk_overdue", "Requests that took longer than the disk's deadline."),
        objects: disks,
        write: |f, snapshot, i, t| {
            t.count(f, &[("disk", &snapshot.disks[i].name)], snapshot.disks[i].counts.overdue)
        },
    },
    FamilySource {
        family: gauge("aryk_disk_limit", "The disk's own limits per second, by kind of limit."),
        objects: disks,
        write: |f, snapshot, i, t| {
            write_limits(f, ("disk", &snapshot.disks[i].name), &snapshot.disks[i].limits, t)
        },
    },
    FamilySource {
        family: info("aryk_group", "A group of disks that share limits."),
        objects: groups,
        write: |f, snapshot, i, t| {
            let group = &snapshot.groups[i];
            let parent = group.parent.as_deref().unwrap_or_default();
            t.count(f, &[("group", &group.name), ("parent", parent)], 1);
        },
    },
    FamilySource {
        family: gauge("aryk_group_disks", "Disks in the group and in its subgroups."),
        objects: groups,
        write: |f, snapshot, i, t| {
            t.count(f, &[("group", &snapshot.groups[i].name)], snapshot.groups[i].disks as u64)
        },
    },
    FamilySource {
        family: gauge(
            "aryk_group_limit",
            "The limits per second that the group's disks share, by kind of limit.",
        ),
        objects: groups,
        write: |f, snapshot, i, t| {
            write_limits(f, ("group", &snapshot.groups[i].name), &snapshot.groups[i].limits, t)
        },
    },
    FamilySource {
        family: gauge("aryk_group_disk", "1: this disk is directly in this group, not in a subgroup."),
        objects: disks,
        write: |f, snapshot, i, t| {
            let disk = &snapshot.disks[i];
            if let Some(group) = &disk.group {
                t.count(f, &[("group", group), ("disk", &disk.name)], 1);
            }
        },
    },
    aggregates::ops::<Group>("aryk_group_ops"),
    aggregates::bytes::<Group>("aryk_group_bytes"),
    aggregates::errors::<Group>("aryk_group_request_errors"),
    aggregates::latencies::<Group>("aryk_group_latency_seconds"),
    aggregates::layers::<Group>("aryk_group_layer_seconds"),
    FamilySource {
        family: info("aryk_controller", "The kind of the controller."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            let controller = &snapshot.controllers[i].controller;
            t.count(f, &[("controller", &controller.name), ("kind", controller.kind)], 1);
        },
    },
    FamilySource {
        family: gauge("aryk_controller_disk", "1: this controller offers this disk to its VM."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            let controller = &snapshot.controllers[i].controller;
            for disk in &controller.disks {
                t.count(f, &[("controller", &controller.name), ("disk", disk)], 1);
            }
        },
    },
    FamilySource {
        family: gauge("aryk_controller_connected", "1 if a front-end is connected to the controller."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            let controller = &snapshot.controllers[i].controller;
            t.count(f, &[("controller", &controller.name)], controller.connected.into());
        },
    },
    FamilySource {
        family: gauge("aryk_controller_queues", "Queues of the controller that are running."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            t.count(
                f,
                &[("controller", &snapshot.controllers[i].controller.name)],
                snapshot.controllers[i].controller.queues,
            );
        },
    },
    FamilySource {
        family: counter("aryk_controller_sessions", "Sessions of front-ends so far."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            t.count(
                f,
                &[("controller", &snapshot.controllers[i].controller.name)],
                snapshot.controllers[i].controller.sessions,
            );
        },
    },
    FamilySource {
        family: counter(
            "aryk_controller_failed_sessions",
            "Sessions that ended with an error, not with a disconnect by the front-end.",
        ),
        objects: controllers,
        write: |f, snapshot, i, t| {
            t.count(
                f,
                &[("controller", &snapshot.controllers[i].controller.name)],
                snapshot.controllers[i].controller.failed_sessions,
            );
        },
    },
    FamilySource {
        family: counter("aryk_controller_errors", "Protocol errors of the guest and the front-end, by kind."),
        objects: controllers,
        write: |f, snapshot, i, t| {
            let controller = &snapshot.controllers[i].controller;
            for (kind, count) in controller.errors {
                t.count(f, &[("controller", &controller.name), ("kind", kind)], count);
            }
        },
    },
    aggregates::ops::<ControllerCounts>("aryk_controller_ops"),
    aggregates::bytes::<ControllerCounts>("aryk_controller_bytes"),
    aggregates::errors::<ControllerCounts>("aryk_controller_request_errors"),
    aggregates::latencies::<ControllerCounts>("aryk_controller_latency_seconds"),
    aggregates::layers::<ControllerCounts>("aryk_controller_layer_seconds"),
    nvme::READY,
    nvme::TEMPERATURE,
    nvme::RESETS,
    nvme::ABORTS,
    nvme::RETRIES,
    nvme::WARNINGS,
    nvme::ERRORS,
    nvme::COMMANDS,
    nvme::DOORBELLS,
    nvme::IN_FLIGHT,
    nvme::POOL,
    remotes::CONNECTED,
    remotes::LOSSES,
    remotes::RESUBMITTED,
    remotes::FAILED,
    rbd::BLOCKLISTED,
    rbd::DISKS,
    rbd::OPENS,
    rbd::QUARANTINED,
    rbd::ERRORS,
    hosts::QUEUES,
    hosts::REQUESTS,
    hosts::BYTES,
    hosts::LATENCIES,
    hosts::FAILED,
    pools::WRITABLE,
    pools::MEMBERS,
    pools::SIZE,
    pools::FREE,
    pools::PROVISIONED,
    pools::SPACE,
    pools::USER,
    pools::WRITTEN,
    pools::READ,
    pools::LOOKUPS,
    pools::BACKLOG,
    pools::DEBT,
    pools::WAITING,
    pools::PRICE,
    pools::GATHERED,
    pools::DAMAGED,
    pools::SCRUB_READ,
    pools::SCRUB_DAMAGED,
    pools::SCRUBBED,
    pools::MEMBER_SPACE,
    pools::COUNTED,
    FamilySource {
        family: of(Kind::Counter, "seconds", "aryk_reactor_seconds", "The reactor's time, by state."),
        objects: reactors,
        write: |f, snapshot, i, t| {
            let (core, stats) = (snapshot.reactors[i].core.to_string(), &snapshot.reactors[i].stats);
            for (state, time) in [("busy", stats.busy), ("idle", stats.idle), ("asleep", stats.sleeping)] {
                t.seconds(f, &[("core", &core), ("state", state)], time.as_nanos() as u64);
            }
        },
    },
    FamilySource {
        family: counter("aryk_reactor_turns", "Turns of the reactor."),
        objects: reactors,
        write: |f, snapshot, i, t| {
            t.count(f, &[("core", &snapshot.reactors[i].core.to_string())], snapshot.reactors[i].stats.turns);
        },
    },
    FamilySource {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_reactor_longest_turn_seconds",
            "The longest turn of the reactor, lately: nothing else runs on its core during a turn.",
        ),
        objects: reactors,
        write: |f, snapshot, i, t| {
            let reactor = &snapshot.reactors[i];
            t.seconds(f, &[("core", &reactor.core.to_string())], reactor.longest_turn.as_nanos() as u64);
        },
    },
    FamilySource {
        family: gauge("aryk_reactor_members", "Queues and pollers on the reactor."),
        objects: reactors,
        write: |f, snapshot, i, t| {
            t.count(f, &[("core", &snapshot.reactors[i].core.to_string())], snapshot.reactors[i].members);
        },
    },
    FamilySource {
        family: of(Kind::Gauge, "bytes", "aryk_guest_memory_bytes", "Guest memory that is mapped."),
        objects: one,
        write: |f, snapshot, _, t| t.count(f, &[], snapshot.mapped.0),
    },
    FamilySource {
        family: gauge("aryk_guest_memory_regions", "Mappings of guest memory."),
        objects: one,
        write: |f, snapshot, _, t| t.count(f, &[], snapshot.mapped.1),
    },
    FamilySource {
        family: of(
            Kind::Gauge,
            "bytes",
            "aryk_guest_memory_revoked_bytes",
            "Addresses of guest memory that was released before the last requests that use it.",
        ),
        objects: one,
        write: |f, snapshot, _, t| t.count(f, &[], snapshot.revoked.0),
    },
    FamilySource {
        family: gauge(
            "aryk_reclaim_pending",
            "Mappings and memory files that wait to be unmapped and closed.",
        ),
        objects: one,
        write: |f, snapshot, _, t| t.count(f, &[], snapshot.reclaiming.pending),
    },
    FamilySource {
        family: of(
            Kind::Gauge,
            "seconds",
            "aryk_reclaim_delay_max_seconds",
            "The longest time from the last use of such a mapping to its unmapping.",
        ),
        objects: one,
        write: |f, snapshot, _, t| t.seconds(f, &[], snapshot.reclaiming.delay_max.as_nanos() as u64),
    },
    FamilySource {
        family: gauge(
            "aryk_memory_client_regions",
            "Regions of guest memory that the device, or group of devices, registers, has registered, or unregisters.",
        ),
        objects: memory_clients,
        write: |f, snapshot, i, t| {
            let client = &snapshot.memory_clients[i];
            let states = [
                ("registering", client.registering),
                ("registered", client.registered),
                ("unregistering", client.unregistering),
            ];
            for (state, regions) in states {
                t.count(f, &[("client", &client.name), ("state", state)], regions);
            }
        },
    },
    FamilySource {
        family: counter("aryk_memory_client_failures", "Registrations of guest memory that failed."),
        objects: memory_clients,
        write: |f, snapshot, i, t| {
            let client = &snapshot.memory_clients[i];
            t.count(f, &[("client", &client.name)], client.failed);
        },
    },
    FamilySource {
        family: counter(
            "aryk_memory_client_declined",
            "Regions of guest memory that were not registered because the operator wants that.",
        ),
        objects: memory_clients,
        write: |f, snapshot, i, t| {
            let client = &snapshot.memory_clients[i];
            t.count(f, &[("client", &client.name)], client.declined);
        },
    },
    FamilySource {
        family: counter(
            "aryk_memory_client_late",
            "Times that the wait for registrations of guest memory was given up.",
        ),
        objects: memory_clients,
        write: |f, snapshot, i, t| {
            let client = &snapshot.memory_clients[i];
            t.count(f, &[("client", &client.name)], client.late);
        },
    },
    FamilySource {
        family: counter(
            "aryk_memory_client_bounced_pieces",
            "Pieces of requests' memory that went through bounce buffers, because they were not registered.",
        ),
        objects: memory_clients,
        write: |f, snapshot, i, t| {
            let client = &snapshot.memory_clients[i];
            t.count(f, &[("client", &client.name)], client.bounced);
        },
    },
    aggregates::ops::<Reactor>("aryk_reactor_ops"),
    aggregates::bytes::<Reactor>("aryk_reactor_bytes"),
    aggregates::errors::<Reactor>("aryk_reactor_request_errors"),
    aggregates::latencies::<Reactor>("aryk_reactor_latency_seconds"),
    aggregates::layers::<Reactor>("aryk_reactor_layer_seconds"),
];

/// Writes the limits that are set.
fn write_limits(family: &Family, whose: Label<'_>, limits: &RateLimits, text: &mut Text) {
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

fn write_ops(family: &Family, disk: &Disk, text: &mut Text, count: impl Fn(&Disk, Op) -> u64) {
    for op in reported_ops(disk) {
        text.count(family, &[("disk", &disk.name), ("op", op.name())], count(disk, op));
    }
}

fn write_latencies(family: &Family, snapshot: &Snapshot, index: usize, text: &mut Text) {
    let disk = &snapshot.disks[index];
    latencies_of(family, ("disk", &disk.name), &disk.counts, text);
}

/// Writes the latencies of reads and of writes, by operation.
fn latencies_of(family: &Family, of: Label<'_>, counts: &Summary, text: &mut Text) {
    for (op, latencies) in [(Op::Read, &counts.reads), (Op::Write, &counts.writes)] {
        write_times(family, &[of, ("op", op.name())], latencies, counts.op(op).latency_ns, text);
    }
}

/// Writes times, whose sum is `sum_ns`, as a histogram.
fn write_times(family: &Family, labels: &[Label<'_>], times: &Coarse, sum_ns: u64, text: &mut Text) {
    text.histogram(family, labels, (&Coarse::BOUNDS_LOG2, times.counts()), sum_ns);
}
