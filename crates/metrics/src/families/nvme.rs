//! Families of the NVMe controllers that the daemon drives itself. Any context; pure.

use super::{FamilySource, counter, gauge, of};
use crate::Snapshot;
use crate::exposition::{Family, Kind, Text};
use crate::inventory::Nvme;

fn controllers(snapshot: &Snapshot) -> usize {
    snapshot.nvme.len()
}

fn write(family: &Family, snapshot: &Snapshot, i: usize, text: &mut Text, value: fn(&Nvme) -> u64) {
    let nvme = &snapshot.nvme[i];
    text.count(family, &[("nvme", &nvme.name)], value(nvme));
}

pub const READY: FamilySource = FamilySource {
    family: gauge("aryk_nvme_ready", "1 if the NVMe controller serves requests; 0 while they wait for it."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.is_ready.into()),
};

pub const TEMPERATURE: FamilySource = FamilySource {
    family: of(Kind::Gauge, "celsius", "aryk_nvme_temperature_celsius", "The temperature of the NVMe drive."),
    objects: controllers,
    write: |f, snapshot, i, t| {
        if snapshot.nvme[i].celsius.is_some() {
            write(f, snapshot, i, t, |nvme| nvme.celsius.unwrap_or_default());
        }
    },
};

pub const RESETS: FamilySource = FamilySource {
    family: counter("aryk_nvme_resets", "Resets of the NVMe controller."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.resets),
};

pub const ABORTS: FamilySource = FamilySource {
    family: counter("aryk_nvme_aborts", "NVMe commands that were aborted because they were late."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.aborts),
};

pub const RETRIES: FamilySource = FamilySource {
    family: counter("aryk_nvme_retries", "NVMe commands that were tried again, as the controller asked."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.retries),
};

pub const WARNINGS: FamilySource = FamilySource {
    family: counter(
        "aryk_nvme_warnings",
        "Errors and health warnings that the NVMe controller reported by itself.",
    ),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.warnings),
};

pub const ERRORS: FamilySource = FamilySource {
    family: counter(
        "aryk_nvme_errors",
        "I/O commands that the NVMe controller answered by an error, by the type of its status code.",
    ),
    objects: controllers,
    write: |f, snapshot, i, t| {
        let nvme = &snapshot.nvme[i];
        for (of, count) in &nvme.errors {
            t.count(f, &[("nvme", &nvme.name), ("type", of)], *count);
        }
    },
};

pub const COMMANDS: FamilySource = FamilySource {
    family: counter("aryk_nvme_commands", "I/O commands that were submitted to the NVMe controller."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.commands),
};

pub const DOORBELLS: FamilySource = FamilySource {
    family: counter(
        "aryk_nvme_doorbells",
        "Writes to the doorbell registers of the NVMe controller's I/O queues.",
    ),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.doorbells),
};

pub const IN_FLIGHT: FamilySource = FamilySource {
    family: gauge("aryk_nvme_in_flight", "I/O commands in flight at the NVMe controller."),
    objects: controllers,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |nvme| nvme.in_flight),
};

pub const POOL: FamilySource = FamilySource {
    family: gauge(
        "aryk_nvme_pool_pages",
        "Pages of bounce buffers of the NVMe controller, and the fewest that were free.",
    ),
    objects: controllers,
    write: |f, snapshot, i, t| {
        let nvme = &snapshot.nvme[i];
        for (state, pages) in [("all", nvme.pool_pages), ("free_min", nvme.pool_free_min)] {
            t.count(f, &[("nvme", &nvme.name), ("state", state)], pages);
        }
    },
};
