//! How much of peers' memory the process maps at most. Any context.
//!
//! A memory file costs its owner nothing while it is empty, but whoever maps it pays with address space, of which a process has 128 TiB, and with one of the
//! mappings that the kernel counts (`vm.max_map_count`). Without either the next allocation fails, and with it the process. So what peers can have us map is
//! counted from the mapping to the unmapping, and has an end before that of the process.

use crate::MapError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What may be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes for one peer: of all that it has announced at a time.
    pub peer: u64,
    /// Bytes in all.
    pub process: u64,
    /// Mappings in all.
    pub mappings: u64,
}

/// Bytes of a mapping for which the last eighth of the process's limits is kept: who takes much does not take the last from those who take little.
const SMALL: u64 = 64 << 30;

struct Budget {
    peer: AtomicU64,
    process: AtomicU64,
    mappings: AtomicU64,
    /// What is mapped.
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
    /// A guest of 12 TiB has room, also while its regions are exchanged for others; and so have we, in 128 TiB. Three quarters of the mappings that Linux gives a
    /// process unless told otherwise.
    pub const DEFAULT: Self = Self { peer: 16 << 40, process: 112 << 40, mappings: 65_530 / 4 * 3 };

    /// Those of this process.
    pub fn get() -> Self {
        let Budget { peer, process, mappings, .. } = &BUDGET;
        Self { peer: peer.load(Relaxed), process: process.load(Relaxed), mappings: mappings.load(Relaxed) }
    }

    /// Makes them those of this process. What is mapped stays.
    pub fn set(self) {
        BUDGET.peer.store(self.peer, Relaxed);
        BUDGET.process.store(self.process, Relaxed);
        BUDGET.mappings.store(self.mappings, Relaxed);
    }
}

/// Bytes, and mappings, of peers' memory that the process has now.
pub fn mapped() -> (u64, u64) {
    (BUDGET.bytes.load(Relaxed), BUDGET.count.load(Relaxed))
}

/// Who gave mappings ([`crate::Mapping::given_by`]). Knows how much of what was given is not needed any more, and not unmapped
/// yet either: a peer that is to announce
/// more waits for that, lest it has us hold what it gave up as often as it likes.
#[derive(Clone, Debug, Default)]
pub struct Peer(Arc<GivenUp>);

#[derive(Debug, Default)]
struct GivenUp {
    bytes: AtomicU64,
    mappings: AtomicU64,
}

impl Peer {
    /// Bytes, and mappings, that wait to be unmapped.
    pub fn given_up(&self) -> (u64, u64) {
        (self.0.bytes.load(Relaxed), self.0.mappings.load(Relaxed))
    }

    /// A mapping of `len` bytes waits to be unmapped.
    pub(crate) fn gives_up(&self, len: u64) -> Waiting {
        self.0.bytes.fetch_add(len, Relaxed);
        self.0.mappings.fetch_add(1, Relaxed);
        Waiting { peer: self.clone(), len }
    }
}

/// A mapping that its peer has given up, until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    peer: Peer,
    len: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.peer.0.bytes.fetch_sub(self.len, Relaxed);
        self.peer.0.mappings.fetch_sub(1, Relaxed);
    }
}

/// A mapping that counts, until it is dropped.
#[derive(Debug)]
pub(crate) struct Charge(u64);

impl Charge {
    /// Counts a mapping of `len` bytes.
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
            BUDGET.bytes.fetch_sub(len, Relaxed);
            return Err(MapError::TooMany { max: part(limits.mappings) });
        }
        Ok(Self(len))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        BUDGET.bytes.fetch_sub(self.0, Relaxed);
        BUDGET.count.fetch_sub(1, Relaxed);
    }
}
