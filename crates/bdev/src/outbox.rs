//! Completions of a module that wait until its channel is polled. Reactor context.

use crate::{Completion, Status, Tag};
use aryk_reactor::{Cx, RootId};

/// Completions that wait for a channel's next poll.
#[derive(Debug)]
pub struct Outbox(aryk_reactor::Outbox<Completion>);

impl Outbox {
    /// Creates an empty outbox, which wakes `root`.
    pub const fn new(root: RootId) -> Self {
        Self(aryk_reactor::Outbox::new(root))
    }

    /// The root that the outbox wakes.
    pub const fn root(&self) -> RootId {
        self.0.root()
    }

    /// Adds a completion, and wakes the root.
    #[inline]
    pub fn push(&mut self, tag: Tag, status: Status, cx: &mut Cx) {
        self.0.push(Completion { tag, status }, cx);
    }

    /// Moves all completions to the end of `out`.
    #[inline]
    pub fn take(&mut self, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}
