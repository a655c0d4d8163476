//! A connected I/O queue. Reactor context; the thread makes it.

use super::link::{Carrier, Link};
use aryk_slots::Key;

/// A command in flight: its request, and which of the request's commands it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) key: Key,
    pub(super) is_second: bool,
}

/// A connected queue.
#[derive(Debug)]
pub(crate) struct Live {
    pub(super) link: Link,
    /// The path, and the life of its controller to which the queue belongs.
    pub(super) path: usize,
    pub(super) life: u64,
    pub(super) qid: u16,
    pub(super) retry_delays: [u16; 3],
    pub(super) has_write_cache: bool,
    pub(super) commands: Box<[Option<Running>]>,
    /// Command identifiers that are free.
    pub(super) free: Vec<u16>,
}

impl Live {
    /// A connection whose queue takes `depth` commands at a time.
    pub(crate) fn new(
        carrier: Carrier,
        depth: u16,
        (path, life, qid): (usize, u64, u16),
        retry_delays: [u16; 3],
        has_write_cache: bool,
    ) -> Self {
        Self {
            link: Link::new(carrier),
            path,
            life,
            qid,
            retry_delays,
            has_write_cache,
            commands: vec![None; usize::from(depth)].into(),
            free: (0..depth).rev().collect(),
        }
    }

    /// The path to which the queue belongs.
    pub(crate) const fn path(&self) -> usize {
        self.path
    }

    pub(super) fn in_flight(&self) -> u32 {
        (self.commands.len() - self.free.len()) as u32
    }
}
