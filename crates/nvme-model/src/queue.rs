//! Submission and completion queues, as the controller sees them. Context: the holder of the controller.

use crate::wire::{CompletionEntry, SubmissionEntry};
use std::collections::VecDeque;

/// A submission queue. The host moves `tail` by its doorbell; the controller moves `head` when it fetches.
#[derive(Debug)]
pub(crate) struct SubmissionQueue {
    pub(crate) iova: u64,
    pub(crate) entries: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
    /// Value of the doorbell at the last poll.
    pub(crate) doorbell: u32,
    /// With shadow doorbells: whether the controller polls the shadow tail.
    pub(crate) is_awake: bool,
    /// The last impossible value of the shadow doorbell.
    pub(crate) bad_shadow: Option<u32>,
    pub(crate) cqid: u16,
    /// The first command of a fused operation, until the second is fetched.
    pub(crate) fused_first: Option<SubmissionEntry>,
    /// Commands that were fetched and not yet completed.
    pub(crate) held: u32,
    /// Identifiers of those commands, one bit for each.
    held_cids: Box<[u64; 1024]>,
}

impl SubmissionQueue {
    pub(crate) fn new(iova: u64, entries: u32, cqid: u16) -> Self {
        Self {
            iova,
            entries,
            head: 0,
            tail: 0,
            doorbell: 0,
            is_awake: true,
            bad_shadow: None,
            cqid,
            fused_first: None,
            held: 0,
            held_cids: Box::new([0; 1024]),
        }
    }

    /// Entries that the host submitted and the controller has not fetched.
    pub(crate) const fn available(&self) -> u32 {
        if self.tail >= self.head { self.tail - self.head } else { self.entries - self.head + self.tail }
    }

    pub(crate) const fn is_held(&self, cid: u16) -> bool {
        self.held != 0 && self.held_cids[cid as usize / 64] >> (cid % 64) & 1 != 0
    }

    pub(crate) const fn hold(&mut self, cid: u16) {
        self.held += 1;
        self.held_cids[cid as usize / 64] |= 1 << (cid % 64);
    }

    pub(crate) const fn release(&mut self, cid: u16) {
        let word = &mut self.held_cids[cid as usize / 64];
        let bit = 1 << (cid % 64);
        if *word & bit != 0 {
            *word &= !bit;
            self.held -= 1;
        }
    }
}

/// A completion queue. The controller moves `tail`; the host moves `head` by its doorbell.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) iova: u64,
    pub(crate) entries: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
    /// Value of the doorbell at the last poll.
    pub(crate) doorbell: u32,
    /// The last impossible value of the shadow doorbell.
    pub(crate) bad_shadow: Option<u32>,
    /// The Phase Tag of entries in this pass; it inverts when the tail wraps.
    pub(crate) phase: bool,
    /// MSI-X vector, if interrupts are enabled.
    pub(crate) vector: Option<u16>,
    /// Submission queues that use this queue.
    pub(crate) users: u32,
    /// Completions that wait for room. The controller fetches no command for this queue while there are any, so there
    /// are at most as many as commands in flight.
    pub(crate) waiting: VecDeque<CompletionEntry>,
}

impl CompletionQueue {
    pub(crate) fn new(iova: u64, entries: u32, vector: Option<u16>) -> Self {
        Self {
            iova,
            entries,
            head: 0,
            tail: 0,
            doorbell: 0,
            bad_shadow: None,
            phase: true,
            vector,
            users: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Entries that the host has not consumed.
    pub(crate) const fn used(&self) -> u32 {
        if self.tail >= self.head { self.tail - self.head } else { self.entries - self.head + self.tail }
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.used() + 1 >= self.entries
    }

    /// Whether the host may move the head to `head`: only over entries that were posted.
    pub(crate) const fn accepts_head(&self, head: u32) -> bool {
        if head >= self.entries {
            return false;
        }
        let moved = if head >= self.head { head - self.head } else { self.entries - self.head + head };
        moved <= self.used()
    }

    /// Takes the slot at the tail, and returns its index.
    pub(crate) const fn advance(&mut self) -> u32 {
        let slot = self.tail;
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
        slot
    }
}
