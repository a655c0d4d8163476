//! Families of the hosts that use shared disks. Any context; pure.

use super::{FamilySource, counter, gauge, of, write_times};
use crate::Snapshot;
use crate::exposition::{Family, Kind, Label, Text};
use crate::inventory::Host;
use aryk_bdev::Coarse;

fn hosts(snapshot: &Snapshot) -> usize {
    snapshot.hosts.len()
}

/// Has `write` write a sample with the labels of a host, and of an operation.
fn with_labels(snapshot: &Snapshot, i: usize, op: Option<&'static str>, write: impl FnOnce(&[Label<'_>])) {
    let Host { subsystem, name, controller, .. } = &snapshot.hosts[i];
    let controller = controller.to_string();
    let labels = [("subsystem", subsystem.as_str()), ("host", name), ("controller", &controller)];
    match op {
        None => write(&labels),
        Some(op) => write(&[labels[0], labels[1], labels[2], ("op", op)]),
    }
}

fn write(
    family: &Family,
    snapshot: &Snapshot,
    i: usize,
    text: &mut Text,
    op: Option<&'static str>,
    count: u64,
) {
    with_labels(snapshot, i, op, |labels| text.count(family, labels, count));
}

pub const QUEUES: FamilySource = FamilySource {
    family: gauge("aryk_host_queues", "I/O queues of the host."),
    objects: hosts,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, None, snapshot.hosts[i].queues),
};

pub const REQUESTS: FamilySource = FamilySource {
    family: counter("aryk_host_requests", "Requests of the host that have ended."),
    objects: hosts,
    write: |f, snapshot, i, t| {
        for (op, work) in snapshot.hosts[i].work() {
            write(f, snapshot, i, t, Some(op), work.requests);
        }
    },
};

pub const BYTES: FamilySource = FamilySource {
    family: of(Kind::Counter, "bytes", "aryk_host_bytes", "Bytes that the host has read and written."),
    objects: hosts,
    write: |f, snapshot, i, t| {
        let Host { reads, writes, .. } = &snapshot.hosts[i];
        for (op, work) in [("read", reads), ("write", writes)] {
            write(f, snapshot, i, t, Some(op), work.bytes);
        }
    },
};

pub const LATENCIES: FamilySource = FamilySource {
    family: of(
        Kind::Histogram,
        "seconds",
        "aryk_host_latency_seconds",
        "Time from the arrival of the host's commands to the ends of their requests.",
    ),
    objects: hosts,
    write: |f, snapshot, i, t| {
        for (op, work) in snapshot.hosts[i].work() {
            let mut times = Coarse::default();
            times.merge_fine(&work.latencies);
            with_labels(snapshot, i, Some(op), |labels| write_times(f, labels, &times, work.latency_ns, t));
        }
    },
};

pub const FAILED: FamilySource = FamilySource {
    family: counter("aryk_host_failed_requests", "Requests of the host that have failed."),
    objects: hosts,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, None, snapshot.hosts[i].failed),
};
