//! Families of the controllers of other hosts. Any context; pure.

use super::{FamilySource, counter, gauge};
use crate::Snapshot;
use crate::exposition::{Family, Text};
use crate::inventory::RemotePath;

fn remotes(snapshot: &Snapshot) -> usize {
    snapshot.remotes.len()
}

fn write_paths(f: &Family, snapshot: &Snapshot, i: usize, t: &mut Text, value: fn(&RemotePath) -> u64) {
    let remote = &snapshot.remotes[i];
    for path in &remote.paths {
        t.count(f, &[("nvme", &remote.name), ("path", &path.address.to_string())], value(path));
    }
}

pub const CONNECTED: FamilySource = FamilySource {
    family: gauge("aryk_remote_path_connected", "1 if the path to the other host is connected."),
    objects: remotes,
    write: |f, snapshot, i, t| write_paths(f, snapshot, i, t, |path| path.is_connected.into()),
};

pub const LOSSES: FamilySource = FamilySource {
    family: counter("aryk_remote_path_losses", "Times that the connections of the path were lost."),
    objects: remotes,
    write: |f, snapshot, i, t| write_paths(f, snapshot, i, t, |path| path.losses),
};

pub const RESUBMITTED: FamilySource = FamilySource {
    family: counter("aryk_remote_resubmitted_requests", "Requests that were submitted again after a loss."),
    objects: remotes,
    write: |f, snapshot, i, t| {
        let remote = &snapshot.remotes[i];
        t.count(f, &[("nvme", &remote.name)], remote.resubmitted);
    },
};

pub const FAILED: FamilySource = FamilySource {
    family: counter(
        "aryk_remote_failed_requests",
        "Requests that failed after a loss, because to submit them again could have brought old data back.",
    ),
    objects: remotes,
    write: |f, snapshot, i, t| {
        let remote = &snapshot.remotes[i];
        t.count(f, &[("nvme", &remote.name)], remote.failed);
    },
};
