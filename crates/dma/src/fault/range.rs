//! A range that one thread changes and a signal handler on any other reads as a whole. Any context.
//!
//! A sequence lock: its writer makes the generation odd, changes the parts, makes it even again. A reader takes the parts only if it sees the same even generation
//! before and after. It never tries again: see [`Range::get`].

use crate::sync::{AtomicUsize, Ordering, fence};

/// Part of the address space, whose file has pages of a size of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte's address.
    pub base: usize,
    /// Bytes.
    pub len: usize,
    /// Bytes of a page of the file: what can be mapped anew is a multiple of it.
    pub page: usize,
}

impl Span {
    /// Whether a byte is in it.
    pub fn has(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < self.len
    }
}

/// A place for a span, or none.
#[derive(Debug, Default)]
pub struct Range {
    /// Odd while the rest is being changed.
    generation: AtomicUsize,
    base: AtomicUsize,
    /// 0 while there is none.
    len: AtomicUsize,
    page: AtomicUsize,
}

impl Range {
    /// Changes it. For one thread at a time: who owns it.
    pub fn set(&self, span: Option<Span>) {
        let Span { base, len, page } = span.unwrap_or(Span { base: 0, len: 0, page: 0 });
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(1), Ordering::Relaxed);
        // Whoever sees a part of what follows sees the odd generation, too.
        fence(Ordering::Release);
        self.base.store(base, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(2), Ordering::Release);
    }

    /// What was set last. `None`, too, while it is being changed: one that a reader has a claim to (because it uses memory in the span) is not, so a reader need not
    /// wait for it.
    pub fn get(&self) -> Option<Span> {
        let before = self.generation.load(Ordering::Acquire);
        let base = self.base.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_whole = before.is_multiple_of(2) && self.generation.load(Ordering::Relaxed) == before;
        (is_whole && len > 0).then_some(Span { base, len, page })
    }
}
