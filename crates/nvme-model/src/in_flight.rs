//! Commands that the controller fetched and will execute later. Context: the holder of the controller.
//!
//! A fixed number of slots, and a heap of the times at which they are due. A command that never ends is not in the heap.

use crate::config::Nanos;
use crate::faults::Fate;
use crate::wire::SubmissionEntry;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A fetched command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) sqid: u16,
    pub(crate) entry: SubmissionEntry,
    /// The second command of a fused operation.
    pub(crate) second: Option<SubmissionEntry>,
    pub(crate) fate: Fate,
}

impl Held {
    fn has(&self, sqid: u16, cid: u16) -> bool {
        self.sqid == sqid
            && (self.entry.cid.get() == cid || self.second.is_some_and(|second| second.cid.get() == cid))
    }
}

#[derive(Debug)]
pub(crate) struct InFlight {
    /// Each with the number of its command, which tells a slot's commands apart.
    slots: Vec<Option<(u64, Held)>>,
    free: Vec<u32>,
    due: BinaryHeap<Reverse<(Nanos, u64, u32)>>,
    next_number: u64,
    len: usize,
}

impl InFlight {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            slots: vec![None; capacity],
            free: (0..capacity as u32).rev().collect(),
            due: BinaryHeap::with_capacity(capacity),
            next_number: 0,
            len: 0,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn room(&self) -> usize {
        self.free.len()
    }

    /// Adds a command that is due at a time, or never. There must be room.
    pub(crate) fn add(&mut self, held: Held, due: Option<Nanos>) {
        let Some(slot) = self.free.pop() else { return };
        let number = self.next_number;
        self.next_number += 1;
        self.slots[slot as usize] = Some((number, held));
        self.len += 1;
        let Some(due) = due else { return };
        if self.due.len() >= 2 * self.slots.len() {
            // Commands that were aborted before their time.
            let slots = &self.slots;
            self.due.retain(|Reverse((_, number, slot))| is_of(slots, *slot, *number));
        }
        self.due.push(Reverse((due, number, slot)));
    }

    /// The next time at which a command may be due.
    pub(crate) fn next_due(&self) -> Nanos {
        self.due.peek().map_or(Nanos::MAX, |Reverse((due, _, _))| *due)
    }

    /// Takes the next command that is due at `now`.
    pub(crate) fn take_due(&mut self, now: Nanos) -> Option<Held> {
        loop {
            let Reverse((due, number, slot)) = *self.due.peek()?;
            if due > now {
                return None;
            }
            self.due.pop();
            if is_of(&self.slots, slot, number) {
                return self.free_slot(slot);
            }
        }
    }

    /// Takes the command with this identifier.
    pub(crate) fn take(&mut self, sqid: u16, cid: u16) -> Option<Held> {
        let has = |slot: &Option<(u64, Held)>| slot.as_ref().is_some_and(|(_, held)| held.has(sqid, cid));
        let slot = self.slots.iter().position(has)?;
        self.free_slot(slot as u32)
    }

    /// The fate of the command with this identifier.
    pub(crate) fn fate(&self, sqid: u16, cid: u16) -> Option<Fate> {
        let (_, held) = self.slots.iter().flatten().find(|(_, held)| held.has(sqid, cid))?;
        Some(held.fate)
    }

    /// Takes any command of a queue.
    pub(crate) fn take_of(&mut self, sqid: u16) -> Option<Held> {
        let slot = self.slots.iter().position(|s| s.as_ref().is_some_and(|(_, held)| held.sqid == sqid))?;
        self.free_slot(slot as u32)
    }

    /// Takes any command.
    pub(crate) fn take_any(&mut self) -> Option<Held> {
        let slot = self.slots.iter().position(Option::is_some)?;
        self.free_slot(slot as u32)
    }

    pub(crate) fn clear(&mut self) {
        if self.len > 0 {
            *self = Self::new(self.slots.len());
        }
        self.due.clear();
    }

    fn free_slot(&mut self, slot: u32) -> Option<Held> {
        let (_, held) = self.slots[slot as usize].take()?;
        self.free.push(slot);
        self.len -= 1;
        Some(held)
    }
}

fn is_of(slots: &[Option<(u64, Held)>], slot: u32, number: u64) -> bool {
    slots[slot as usize].as_ref().is_some_and(|(of, _)| *of == number)
}
