//! Completions on their way from the driver that carries requests out to the channel that polls for them. Reactor context.

use crate::{Cx, RootId};

/// Completions that wait for a channel's next poll, in order of arrival.
#[derive(Debug)]
pub struct Outbox<T> {
    root: RootId,
    ready: Vec<T>,
}

impl<T> Outbox<T> {
    /// Creates an empty outbox, which wakes `root`.
    pub const fn new(root: RootId) -> Self {
        Self { root, ready: Vec::new() }
    }

    /// The root that the outbox wakes.
    pub const fn root(&self) -> RootId {
        self.root
    }

    /// Whether no completion waits.
    pub const fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Adds a completion, and wakes the root if it is the first one. With the others the root is already woken, since each of
    /// its polls takes all completions.
    #[inline]
    pub fn push(&mut self, completion: T, cx: &mut Cx) {
        if self.ready.is_empty() {
            cx.wake(self.root);
        }
        self.ready.push(completion);
    }

    /// Moves all completions to the end of `out`. An empty `out` changes places with the list, and nothing is copied.
    #[inline]
    pub fn take(&mut self, out: &mut Vec<T>) {
        if out.is_empty() {
            std::mem::swap(out, &mut self.ready);
        } else {
            out.append(&mut self.ready);
        }
    }
}
