//! Limits of the peers' memory that the process maps. Any context.
//!
//! An empty memory file costs its owner nothing, but a mapping of it costs the mapping process address space (a process has 128
//! TiB) and one of the mappings that the kernel counts (`vm.max_map_count`). When either is used up, the next allocation fails,
//! and with it the process. So memory that peers make this process map is counted from its mapping to its unmapping, and
//! limited below the process's own limits.

use crate::MapError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The limits of mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum of one peer: bytes of all memory that it has announced at one time.
    pub peer: u64,
    /// The maximum of all peers together, in bytes.
    pub process: u64,
    /// The maximum number of mappings of all peers.
    pub mappings: u64,
}

/// Only mappings up to this size, in bytes, may use the last eighth of the process's limits, so that peers with much memory
/// leave some of it to peers with little.
const SMALL: u64 = 64 << 30;
const _: () = {
    let Limits { peer, process, .. } = Limits::DEFAULT;
    assert!(SMALL < peer && 2 * peer <= process / 8 * 7, "two peers of the maximum size fit");
    assert!(process < 128 << 40, "the limits stay below the address space of a process");
};

struct Budget {
    peer: AtomicU64,
    process: AtomicU64,
    mappings: AtomicU64,
    /// Mapped bytes.
    bytes: AtomicU64,
    count: AtomicU64,
}

static BUDGET: Budget = Budget {
    peer: AtomicU64::new(Limits::DEFAULT.peer),
    process: AtomicU64::new(Limits::DEFAULT.process),
    mappings: AtomicU64::new(Limits::DEFAULT.mappings),
    bytes: AtomicU64::new(0),
    count: AtomicU64::new(0),
};

impl Limits {
    /// A guest of 12 TiB fits, even while its regions are replaced by others; and the total fits into 128 TiB. The number
    /// of mappings is three quarters of a process's default limit in Linux.
    pub const DEFAULT: Self = Self { peer: 16 << 40, process: 112 << 40, mappings: 65_530 / 4 * 3 };

    /// The limits of this process.
    pub fn get() -> Self {
        let Budget { peer, process, mappings, .. } = &BUDGET;
        Self { peer: peer.load(Relaxed), process: process.load(Relaxed), mappings: mappings.load(Relaxed) }
    }

    /// Sets the limits of this process. Existing mappings stay.
    pub fn set(self) {
        BUDGET.peer.store(self.peer, Relaxed);
        BUDGET.process.store(self.process, Relaxed);
        BUDGET.mappings.store(self.mappings, Relaxed);
    }
}

/// Bytes and number of the peers' mappings in this process.
pub fn mapped() -> (u64, u64) {
    (BUDGET.bytes.load(Relaxed), BUDGET.count.load(Relaxed))
}

/// The peer that shared mappings ([`crate::Mapping::given_by`]). Counts its mappings that are no longer used and not unmapped
/// yet. A peer that announces more memory waits for them, so it cannot make the process hold more and more unused memory.
#[derive(Clone, Debug, Default)]
pub struct Peer(Arc<AwaitingUnmap>);

#[derive(Debug, Default)]
struct AwaitingUnmap {
    bytes: AtomicU64,
    mappings: AtomicU64,
}

impl Peer {
    /// Bytes and number of the mappings that wait to be unmapped.
    pub fn awaiting_unmap(&self) -> (u64, u64) {
        (self.0.bytes.load(Relaxed), self.0.mappings.load(Relaxed))
    }

    /// Records that a mapping of `len` bytes waits to be unmapped.
    pub(crate) fn add_awaiting_unmap(&self, len: u64) -> Waiting {
        self.0.bytes.fetch_add(len, Relaxed);
        self.0.mappings.fetch_add(1, Relaxed);
        Waiting { peer: self.clone(), len }
    }
}

/// A mapping that waits to be unmapped; the record ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    peer: Peer,
    len: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        subtract(&self.peer.0.bytes, self.len);
        subtract(&self.peer.0.mappings, 1);
    }
}

/// Subtracts a part that the counter has counted.
fn subtract(counter: &AtomicU64, part: u64) {
    let before = counter.fetch_sub(part, Relaxed);
    assert!(before >= part, "{part} are no longer used, but only {before} were counted");
}

/// A mapping's share of the limits, until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge(u64);

impl Charge {
    /// Charges a mapping of `len` bytes.
    pub fn new(len: u64) -> Result<Self, MapError> {
        let limits = Limits::get();
        let part = |max: u64| if len <= SMALL { max } else { max / 8 * 7 };
        let add = |counter: &AtomicU64, more: u64, max: u64| {
            let sum = |now: u64| now.checked_add(more).filter(|&sum| sum <= max);
            counter.fetch_update(Relaxed, Relaxed, sum)
        };
        add(&BUDGET.bytes, len, part(limits.process)).map_err(|mapped| MapError::NoRoom {
            len,
            mapped,
            max: part(limits.process),
        })?;
        let charged = add(&BUDGET.count, 1, part(limits.mappings));
        if charged.is_err() {
            subtract(&BUDGET.bytes, len);
            return Err(MapError::TooMany { max: part(limits.mappings) });
        }
        Ok(Self(len))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        subtract(&BUDGET.bytes, self.0);
        subtract(&BUDGET.count, 1);
    }
}
