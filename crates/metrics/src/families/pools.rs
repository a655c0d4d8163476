//! Families of the pools of volumes. Any context; pure.

use super::{FamilySource, counter, gauge, of};
use crate::Snapshot;
use crate::exposition::{Family, Kind, Text};
use crate::inventory::{Pool, PoolMember};

fn pools(snapshot: &Snapshot) -> usize {
    snapshot.pools.len()
}

fn write(family: &Family, snapshot: &Snapshot, i: usize, text: &mut Text, value: fn(&Pool) -> u64) {
    let pool = &snapshot.pools[i];
    text.count(family, &[("pool", &pool.name)], value(pool));
}

fn write_each(
    family: &Family,
    snapshot: &Snapshot,
    i: usize,
    text: &mut Text,
    label: &'static str,
    values: fn(&Pool) -> &[(&'static str, u64)],
) {
    let pool = &snapshot.pools[i];
    for (what, value) in values(pool) {
        text.count(family, &[("pool", &pool.name), (label, what)], *value);
    }
}

const fn bytes(name: &'static str, help: &'static str) -> Family {
    of(Kind::Gauge, "bytes", name, help)
}

const fn moved(name: &'static str, help: &'static str) -> Family {
    of(Kind::Counter, "bytes", name, help)
}

pub const WRITABLE: FamilySource = FamilySource {
    family: gauge("aryk_pool_writable", "1 if the pool can be written; 0 after a failure of its disk."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.is_writable.into()),
};

pub const MEMBERS: FamilySource = FamilySource {
    family: gauge("aryk_pool_members", "Volumes and snapshots of the pool."),
    objects: pools,
    write: |f, snapshot, i, t| {
        let pool = &snapshot.pools[i];
        for (kind, count) in [("volume", pool.volumes), ("snapshot", pool.snapshots)] {
            t.count(f, &[("pool", &pool.name), ("kind", kind)], count);
        }
    },
};

pub const SIZE: FamilySource = FamilySource {
    family: bytes("aryk_pool_size_bytes", "Space of the pool for data."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.total_bytes),
};

pub const FREE: FamilySource = FamilySource {
    family: bytes(
        "aryk_pool_free_bytes",
        "Space that is free, or will be when deleted data has been cleaned.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.free_bytes),
};

pub const PROVISIONED: FamilySource = FamilySource {
    family: bytes("aryk_pool_provisioned_bytes", "Sizes of all volumes of the pool."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.provisioned_bytes),
};

pub const SPACE: FamilySource = FamilySource {
    family: bytes("aryk_pool_space_bytes", "Space of the pool that is used, and for what."),
    objects: pools,
    write: |f, snapshot, i, t| write_each(f, snapshot, i, t, "of", |pool| &pool.space),
};

pub const USER: FamilySource = FamilySource {
    family: moved("aryk_pool_user_bytes", "Bytes that users have written to volumes and read from them."),
    objects: pools,
    write: |f, snapshot, i, t| {
        let pool = &snapshot.pools[i];
        for (op, bytes) in [("write", pool.user_write_bytes), ("read", pool.user_read_bytes)] {
            t.count(f, &[("pool", &pool.name), ("op", op)], bytes);
        }
    },
};

pub const WRITTEN: FamilySource = FamilySource {
    family: moved("aryk_pool_written_bytes", "Bytes that the pool has written to its disk, and for what."),
    objects: pools,
    write: |f, snapshot, i, t| write_each(f, snapshot, i, t, "for", |pool| &pool.written),
};

pub const READ: FamilySource = FamilySource {
    family: moved("aryk_pool_read_bytes", "Bytes that the pool has read from its disk, and for what."),
    objects: pools,
    write: |f, snapshot, i, t| write_each(f, snapshot, i, t, "for", |pool| &pool.read),
};

pub const LOOKUPS: FamilySource = FamilySource {
    family: counter("aryk_pool_cache_lookups", "Lookups of index pages in memory."),
    objects: pools,
    write: |f, snapshot, i, t| {
        let pool = &snapshot.pools[i];
        for (result, count) in [("hit", pool.cache_hits), ("miss", pool.cache_misses)] {
            t.count(f, &[("pool", &pool.name), ("result", result)], count);
        }
    },
};

pub const BACKLOG: FamilySource = FamilySource {
    family: bytes("aryk_pool_backlog_bytes", "Log of the pool that is not in the index yet."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.backlog_bytes),
};

pub const DEBT: FamilySource = FamilySource {
    family: bytes("aryk_pool_debt_bytes", "Index of the pool that is to be merged."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.debt_bytes),
};

pub const WAITING: FamilySource = FamilySource {
    family: gauge("aryk_pool_waiting_requests", "Requests that wait for space or for the backlog."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.waiting_requests),
};

pub const PRICE: FamilySource = FamilySource {
    family: gauge(
        "aryk_pool_write_price_percent",
        "Percent of a byte that the pool must have merged into its index for each byte that is written.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.price_percent),
};

pub const GATHERED: FamilySource = FamilySource {
    family: counter(
        "aryk_pool_gathered_ranges",
        "Ranges of 4 MiB whose blocks compaction has written in a row.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.gathered_ranges),
};

pub const DAMAGED: FamilySource = FamilySource {
    family: counter("aryk_pool_damaged_blocks", "Blocks whose data did not match its checksum."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.damaged_blocks),
};

pub const SCRUB_READ: FamilySource = FamilySource {
    family: moved("aryk_pool_scrub_read_bytes", "Bytes that the scrub has read."),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.scrub_read_bytes),
};

pub const SCRUB_DAMAGED: FamilySource = FamilySource {
    family: counter(
        "aryk_pool_scrub_damaged_blocks",
        "Blocks of data and pages of the index that the scrub has found damaged, in all passes.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| write(f, snapshot, i, t, |pool| pool.scrub_damaged_blocks),
};

pub const SCRUBBED: FamilySource = FamilySource {
    family: of(
        Kind::Gauge,
        "seconds",
        "aryk_pool_scrub_complete_timestamp_seconds",
        "Time at which the latest complete pass of the scrub began, in seconds since 1970.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| {
        let pool = &snapshot.pools[i];
        if let Some(since) = pool.scrub_complete_since {
            t.count(f, &[("pool", &pool.name)], since);
        }
    },
};

/// Pools may have thousands of members: each is an object of its own.
fn members(snapshot: &Snapshot) -> usize {
    snapshot.pools.iter().map(|pool| pool.members.len()).sum()
}

fn member(snapshot: &Snapshot, mut i: usize) -> Option<(&Pool, &PoolMember)> {
    for pool in &snapshot.pools {
        match pool.members.get(i) {
            Some(member) => return Some((pool, member)),
            None => i -= pool.members.len(),
        }
    }
    None
}

pub const MEMBER_SPACE: FamilySource = FamilySource {
    family: bytes(
        "aryk_volume_space_bytes",
        "Data of a volume or a snapshot: what becomes free if it is deleted, and what others keep in use, too.",
    ),
    objects: members,
    write: |f, snapshot, i, t| {
        let Some((pool, member)) = member(snapshot, i) else { return };
        for (of, bytes) in [("own", member.own_bytes), ("shared", member.shared_bytes)] {
            let labels =
                [("pool", &*pool.name), ("volume", &*member.name), ("kind", member.kind()), ("of", of)];
            t.count(f, &labels, bytes);
        }
    },
};

pub const COUNTED: FamilySource = FamilySource {
    family: of(
        Kind::Gauge,
        "seconds",
        "aryk_pool_counted_seconds",
        "Time since the space of volumes and snapshots was counted.",
    ),
    objects: pools,
    write: |f, snapshot, i, t| {
        let pool = &snapshot.pools[i];
        if let Some(ago) = pool.counted_ago {
            t.seconds(f, &[("pool", &pool.name)], ago.as_nanos() as u64);
        }
    },
};
