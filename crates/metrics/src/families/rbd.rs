//! Families of the clients of Ceph clusters. Any context; pure.

use super::{FamilySource, counter, gauge};
use crate::Snapshot;
use crate::exposition::{Family, Text};
use crate::inventory::RbdClient;

fn clients(snapshot: &Snapshot) -> usize {
    snapshot.rbd.len()
}

fn write(family: &Family, snapshot: &Snapshot, i: usize, text: &mut Text, value: fn(&RbdClient) -> u64) {
    let client = &snapshot.rbd[i];
    text.count(family, &[("rbd", &client.name)], value(client));
}

pub const BLOCKLISTED: FamilySource = FamilySource {
    family: gauge("aryk_rbd_blocklisted", "1 if the Ceph cluster has excluded the client: its disks fail."),
    objects: clients,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |client| client.is_blocklisted.into()),
};

pub const DISKS: FamilySource = FamilySource {
    family: gauge("aryk_rbd_disks", "Disks that use the Ceph client."),
    objects: clients,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |client| client.disks),
};

pub const OPENS: FamilySource = FamilySource {
    family: counter("aryk_rbd_opens", "Images that the Ceph client has opened, or could not open."),
    objects: clients,
    write: |f, snapshot, i, t| {
        let client = &snapshot.rbd[i];
        for (result, count) in [("ok", client.opens), ("failed", client.failed_opens)] {
            t.count(f, &[("rbd", &client.name), ("result", result)], count);
        }
    },
};

pub const QUARANTINED: FamilySource = FamilySource {
    family: counter(
        "aryk_rbd_quarantined",
        "Images that librbd did not close in time, and that are left to it.",
    ),
    objects: clients,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |client| client.quarantined),
};

pub const ERRORS: FamilySource = FamilySource {
    family: counter("aryk_rbd_errors", "Requests that librbd has failed, by the meaning of the errno."),
    objects: clients,
    write: |f, snapshot, i, t| {
        let client = &snapshot.rbd[i];
        for (of, count) in &client.errors {
            t.count(f, &[("rbd", &client.name), ("type", of)], *count);
        }
    },
};
