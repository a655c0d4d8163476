//! Survives a peer that truncates the memory file that it shared with this process.
//!
//! An access to a page beyond a file's end raises SIGBUS. The handler finds the watched mapping that contains the address, maps
//! anonymous memory over the part around the address, and marks the mapping as poisoned. The access continues, and the
//! mapping's owner ends the peer's session at its next check. Any other SIGBUS stays fatal.
//!
//! The handler may run on any thread at any instruction, so it reads only atomics and makes one system call of bounded cost. It
//! does not replace the whole mapping, because removing some gigabytes of pages takes milliseconds.
//!
//! **Invariant.** The handler maps over nothing but the mapping whose access failed. It reads a span that contains the
//! failed address consistently ([`Range`]). The access keeps its mapping alive until the handler returns, so the entry of
//! that mapping does not change during that time; spans of other live mappings do not contain the address; and an entry's
//! span is removed before its addresses are unmapped, so no entry has a span of a dead mapping when its addresses are
//! reused.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

mod range;

use range::Range;
pub(crate) use range::Span;

/// A watched range. Entries are reused and never freed, because the handler may be reading any of them.
#[derive(Default)]
struct Entry {
    taken: AtomicBool,
    /// `None` while the entry is free.
    range: Range,
    poisoned: AtomicBool,
    /// How often a part of the range was replaced.
    replaced: AtomicU32,
    next: AtomicPtr<Entry>,
}

static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

/// How often a part of a mapping was replaced in this process.
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// The number of parts that are replaced one by one, per span and in all spans.
const PARTS_OF_SPAN: u32 = 8;
const PARTS_MAX: u32 = 1024;

/// Replaced parts of all spans, counting those that [`PARTS_MAX`] prevented: at most [`PARTS_OF_SPAN`] per span.
static PARTS: AtomicU32 = AtomicU32::new(0);

/// How often an access in this process has hit a hole in a peer's memory file. A caller that sees the number change
/// checks whether its mappings are poisoned.
#[inline]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Keeps a range watched until the guard is dropped.
#[derive(Debug)]
pub(crate) struct Guard(&'static Entry);

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("range", &self.range.get()).finish_non_exhaustive()
    }
}

impl Guard {
    /// Bytes of a page of the span.
    pub(crate) fn page(&self) -> u64 {
        self.0.range.get().map_or(crate::PAGE, |span| span.page as u64)
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.0.poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.range.set(None);
        let parts = self.0.replaced.swap(0, Ordering::Relaxed).min(PARTS_OF_SPAN);
        let before = PARTS.fetch_sub(parts, Ordering::Relaxed);
        assert!(before >= parts, "{parts} replaced parts end, but only {before} were counted");
        let was_taken = self.0.taken.swap(false, Ordering::Release);
        assert!(was_taken, "an entry has one guard");
    }
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    let mut next = ENTRIES.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: the list holds only leaked boxes, so a pointer in it is null or valid for ever.
        let entry: &'static Entry = unsafe { next.as_ref() }?;
        next = entry.next.load(Ordering::Acquire);
        Some(entry)
    })
}

/// Watches a span, which must be a mapping of the caller for as long as the guard lives.
pub(crate) fn watch(span: Span) -> Guard {
    let take =
        |e: &Entry| e.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let entry = entries().find(|e| take(e)).unwrap_or_else(add_entry);
    assert!(entry.range.get().is_none(), "an entry without a guard has no span");
    entry.poisoned.store(false, Ordering::Relaxed);
    entry.replaced.store(0, Ordering::Relaxed);
    entry.range.set(Some(span));
    Guard(entry)
}

fn add_entry() -> &'static Entry {
    let entry: &'static mut Entry = Box::leak(Box::default());
    entry.taken = AtomicBool::new(true);
    let entry: &'static Entry = entry;
    let mut head = ENTRIES.load(Ordering::Relaxed);
    loop {
        entry.next.store(head, Ordering::Relaxed);
        let new = std::ptr::from_ref(entry).cast_mut();
        match ENTRIES.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return entry,
            Err(now) => head = now,
        }
    }
}

/// Installs the handler for this process. Further calls are harmless.
///
/// # Panics
/// If the kernel refuses, which it does not do for a valid signal.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default handler.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for, and is async-signal-safe.
        let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
        assert_eq!(result, 0, "sigaction(SIGBUS)");
    });
}

extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler installed with SA_SIGINFO, and for SIGBUS it
    // carries an address.
    let address = unsafe { (*info).si_addr() } as usize;
    let hit = entries().find_map(|entry| Some((entry, entry.range.get().filter(|span| span.has(address))?)));
    if !hit.is_some_and(|(entry, span)| replace(entry, span, address)) {
        // SAFETY: restoring the default action is always allowed; the access is then tried again, and kills us.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

/// Maps anonymous memory over the part of the entry's span that contains `address`. Returns whether that succeeded.
///
/// Each replaced part can add two mappings to the process, whose number is limited. A peer that truncates much memory with many
/// requests in flight must not use them up. So only a few parts of one span are replaced separately, and a limited number in
/// all spans. After that, everything from the failed address to the span's end is replaced, because a truncated file has no
/// pages there.
fn replace(entry: &Entry, span: Span, address: usize) -> bool {
    /// Bytes replaced at a time, or a page of the file if that is larger.
    const WINDOW: usize = 256 << 10;
    let window = WINDOW.max(span.page);
    let (first, span_end) = (address - address % window, span.base + span.len);
    let start = first.max(span.base);
    let is_one_of_few = entry.replaced.fetch_add(1, Ordering::Relaxed) < PARTS_OF_SPAN
        && PARTS.fetch_add(1, Ordering::Relaxed) < PARTS_MAX;
    let end = if is_one_of_few { first.saturating_add(window).min(span_end) } else { span_end };
    // If there are no more mappings, replacing the whole span needs no additional one.
    let replaced = map_over(start, end - start) || map_over(span.base, span.len);
    entry.poisoned.store(true, Ordering::Release);
    FAULTS.fetch_add(1, Ordering::Release);
    replaced
}

/// Maps anonymous memory over whole pages of a live mapping of a file, which the caller keeps. Returns whether that succeeded.
pub(crate) fn map_over(base: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is of a live mapping of this process (the module's invariant, or the caller's) which only copies and
    // atomics reach, and libraries that copy, so other contents under it break nothing.
    let mapped = unsafe { libc::mmap(base as *mut c_void, len, prot, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

#[cfg(test)]
mod tests;
