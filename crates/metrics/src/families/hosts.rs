//! Families of the hosts that use shared disks. Any context; pure.

use super::{FamilySource, counter, gauge, of};
use crate::Snapshot;
use crate::exposition::{Family, Kind, Text};
use crate::inventory::Host;

fn hosts(snapshot: &Snapshot) -> usize {
    snapshot.hosts.len()
}

fn write(
    family: &Family,
    snapshot: &Snapshot,
    i: usize,
    text: &mut Text,
    of: Option<&'static str>,
    count: u64,
) {
    let Host { subsystem, name, controller, .. } = &snapshot.hosts[i];
    let controller = controller.to_string();
    let labels = [("subsystem", subsystem.as_str()), ("host", name), ("controller", &controller)];
    match of {
        None => text.count(family, &labels, count),
        Some(op) => text.count(family, &[labels[0], labels[1], labels[2], ("op", op)], count),
    }
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
        let host = &snapshot.hosts[i];
        host.requests.iter().for_each(|(op, count)| write(f, snapshot, i, t, Some(op), *count));
    },
};

pub const BYTES: FamilySource = FamilySource {
    family: of(Kind::Counter, "bytes", "aryk_host_bytes", "Bytes that the host has read and written."),
    objects: hosts,
    write: |f, snapshot, i, t| {
        let host = &snapshot.hosts[i];
        host.bytes.iter().for_each(|(op, count)| write(f, snapshot, i, t, Some(op), *count));
    },
};

pub const FAILED: FamilySource = FamilySource {
    family: counter("aryk_host_failed_requests", "Requests of the host that have failed."),
    objects: hosts,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, None, snapshot.hosts[i].failed),
};
