//! A range that one thread changes and a signal handler on any other thread reads consistently. Any context.
//!
//! A sequence lock: the writer makes the generation odd, changes the parts, and makes it even again. A reader uses the
//! parts only if it sees the same even generation before and after. It never retries: see [`Range::get`].

use crate::sync::{AtomicUsize, Ordering, fence};

/// A part of the address space, and the page size of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte's address.
    pub base: usize,
    /// Length in bytes.
    pub len: usize,
    /// Page size of the file in bytes: only multiples of it can be replaced.
    pub page: usize,
}

impl Span {
    /// Whether the span contains an address.
    pub fn has(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < self.len
    }
}

/// A span, or none.
#[derive(Debug, Default)]
pub struct Range {
    /// Odd while the other fields are being changed.
    generation: AtomicUsize,
    base: AtomicUsize,
    /// 0 while there is no span.
    len: AtomicUsize,
    page: AtomicUsize,
}

impl Range {
    /// Changes the span. Only one thread at a time may call it: the owner.
    pub fn set(&self, span: Option<Span>) {
        let Span { base, len, page } = span.unwrap_or(Span { base: 0, len: 0, page: 0 });
        let generation = self.generation.load(Ordering::Relaxed);
        assert!(generation.is_multiple_of(2), "two threads change one range");
        self.generation.store(generation.wrapping_add(1), Ordering::Relaxed);
        // A reader that sees a part of the following changes sees the odd generation, too.
        fence(Ordering::Release);
        self.base.store(base, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(2), Ordering::Release);
    }

    /// The span that was set last. Also `None` while the span is being changed: the span of memory that the reader is using is
    /// never changed, so a reader need not wait.
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
