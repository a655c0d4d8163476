//! The use of requests' memory by librbd, which the memory's owner can end. Any context; nothing here waits.

use std::sync::atomic::{AtomicU64, Ordering};

/// Set once the memory is taken back.
const CLOSED: u64 = 1 << 63;

/// Counts the threads that read or write the memory of some requests now: librbd copies what it writes, and what it reads is
/// copied at the end of a request. Between these two, nothing uses the memory.
#[derive(Debug, Default)]
pub struct Gate(AtomicU64);

impl Gate {
    /// Takes the memory back: no thread begins to use it from now on.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether the memory was taken back, and no thread uses it any more.
    pub fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    /// Begins a use, unless the memory was taken back.
    pub(crate) fn enter(&self) -> bool {
        if self.0.fetch_add(1, Ordering::AcqRel) & CLOSED != 0 {
            self.leave();
            return false;
        }
        true
    }

    /// Ends a use. Whether the memory was taken back meanwhile.
    pub(crate) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_taken_back_is_used_no_more() {
        let gate = Gate::default();
        assert!(gate.enter() && !gate.leave() && gate.enter());
        gate.close();
        assert!(!gate.is_quiet() && !gate.enter());
        assert!(gate.leave() && gate.is_quiet() && !gate.enter() && gate.is_quiet());
    }
}
