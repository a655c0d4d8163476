//! Flushes of the base disk, shared by all that wait for one. Any context.
//!
//! One flush is in flight at a time. What begins to wait meanwhile gets the next one, together.

use aryk_volume::{OpId, StoreError};

/// What waits for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    Engine(OpId),
    Journal,
}

#[derive(Debug, Default)]
pub(crate) struct Flushes {
    waiting: Vec<Waiter>,
    running: Vec<Waiter>,
    /// Writes that have completed, and of these the writes that the running flush and the last completed one cover.
    written: u64,
    running_covers: u64,
    covered: u64,
    /// The first failure. The kernel reports a loss of data once, so no later flush says anything about earlier writes.
    failure: Option<StoreError>,
}

impl Flushes {
    /// A write has completed.
    pub(crate) const fn note_write(&mut self) {
        self.written += 1;
    }

    /// Whether a completed write may not be durable.
    pub(crate) const fn is_needed(&self) -> bool {
        self.written > self.covered || self.failure.is_some()
    }

    pub(crate) const fn failure(&self) -> Option<StoreError> {
        self.failure
    }

    pub(crate) fn wait(&mut self, waiter: Waiter) {
        self.waiting.push(waiter);
    }

    /// Whether a flush is to be started now; it counts as started.
    pub(crate) fn try_start(&mut self) -> bool {
        let starts = self.running.is_empty() && !self.waiting.is_empty();
        if starts {
            std::mem::swap(&mut self.running, &mut self.waiting);
            self.running_covers = self.written;
        }
        starts
    }

    /// The flush in flight has ended: returns what waited for it.
    pub(crate) fn finish(&mut self, result: Result<(), StoreError>) -> Vec<Waiter> {
        match result {
            Ok(()) => self.covered = self.running_covers,
            Err(error) => {
                self.failure.get_or_insert(error);
            }
        }
        std::mem::take(&mut self.running)
    }
}
