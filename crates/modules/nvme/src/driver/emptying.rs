//! Requests that empty blocks: discards and zeroes. Reactor context.
//!
//! Drives take a time for them that grows with the bytes, some of them that of writes. With a full queue of them, the last
//! would be late, and the reset would delay all VMs of the drive. So a pair has a limited number of bytes of them in progress,
//! and the others wait here, behind one another, without holding up reads and writes.

use super::{COPY_MAX, Gate, PairDriver, Start};
use aryk_bdev::Op;
use aryk_reactor::Cx;
use aryk_slots::Key;
use std::collections::VecDeque;

/// Bytes that a pair discards and zeroes at one time: those of two discards.
const BYTES_MAX: u64 = 2 * crate::namespace::UNMAP_MAX;

/// Whether an operation empties blocks.
pub(super) const fn is_emptying(op: Op) -> bool {
    matches!(op, Op::Unmap | Op::WriteZeroes)
}

/// The discards and zeroes of a pair.
#[derive(Default)]
pub(super) struct Emptying {
    /// Bytes of those in progress: from their first attempt until they end.
    bytes: u64,
    /// Those before their first attempt, in order.
    pub(super) waiting: VecDeque<Key>,
}

impl Emptying {
    /// Counts a request as in progress, if there is room for it. A single request has room always.
    pub(super) fn try_begin(&mut self, key: Key, bytes: u64) -> bool {
        let is_next = self.waiting.front().is_none_or(|&first| first == key);
        let has_room = self.bytes == 0 || self.bytes + bytes <= BYTES_MAX;
        if is_next && has_room {
            self.bytes += bytes;
        }
        is_next && has_room
    }

    /// Counts a request of another pair, which is in progress here from now on.
    pub(super) fn take_over(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// A request has ended, or has left the pair. `bytes` are 0 if it was not in progress.
    pub(super) fn end(&mut self, bytes: u64) {
        self.bytes -= bytes;
    }
}

impl PairDriver {
    /// Starts discards and zeroes that wait, in order, until one must go on waiting.
    pub(super) fn start_emptying(&mut self, cx: &mut Cx) {
        while self.gate == Gate::Open
            && self.copied < COPY_MAX
            && let Some(&key) = self.emptying.waiting.front()
        {
            let start = self.start(key, cx);
            if matches!(start, Start::Blocked | Start::NoRoom) {
                break;
            }
            self.emptying.waiting.pop_front();
            match start {
                Start::NoPages => self.starved.push_back(key),
                Start::Ended(status) => self.finish(key, status, cx),
                Start::AtController | Start::Blocked | Start::NoRoom => {}
            }
        }
    }
}
