//! What happens when a peer truncates the memory file that it shared with us.
//!
//! Touching a page beyond a file's end raises SIGBUS. The handler finds which watched mapping the address
//! belongs to, maps anonymous memory over what lies around it and marks the mapping poisoned: the access goes on, and the session that
//! gave the memory is ended by its owner at the next look. Any other SIGBUS is as fatal as ever.
//!
//! The handler may run on any thread at any instruction, so it reads only atomics and makes one system call, of bounded cost: not all of the mapping is replaced,
//! for to take some gigabytes of pages out takes milliseconds.
//!
//! **Invariant.** The handler maps over nothing but the mapping whose access failed. A span that holds the failed address is read as a whole ([`Range`]). The access
//! keeps its mapping alive until the handler returns, so the one entry of that mapping does not change meanwhile; spans of other live mappings do not hold the
//! address; and an entry's span is taken out before its addresses are unmapped, so a span of a dead mapping is in no entry by the time its addresses are another's.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

mod range;

use range::Range;
pub(crate) use range::Span;

/// One watched range. Entries are reused and never freed: the handler may be reading any of them.
#[derive(Default)]
struct Entry {
    taken: AtomicBool,
    /// None while the entry is free.
    range: Range,
    poisoned: AtomicBool,
    /// How often part of it has been replaced.
    replaced: AtomicU32,
    next: AtomicPtr<Entry>,
}

static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

/// How often memory has been replaced.
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Parts of one span, and of all, that are replaced each by itself.
const PARTS_OF_SPAN: u32 = 8;
const PARTS_MAX: u32 = 1024;

/// Parts of all spans that were replaced, or that would have been but for [`PARTS_MAX`]: of each span at most [`PARTS_OF_SPAN`].
static PARTS: AtomicU32 = AtomicU32::new(0);

/// How often, in this process, an access has hit a hole in a peer's memory file. Whoever sees it change asks its own mappings
/// whether they are poisoned.
#[inline]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Keeps a range watched until it is dropped.
#[derive(Debug)]
pub(crate) struct Guard(&'static Entry);

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("range", &self.range.get()).finish_non_exhaustive()
    }
}

impl Guard {
    pub(crate) fn is_poisoned(&self) -> bool {
        self.0.poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.range.set(None);
        PARTS.fetch_sub(self.0.replaced.swap(0, Ordering::Relaxed).min(PARTS_OF_SPAN), Ordering::Relaxed);
        self.0.taken.store(false, Ordering::Release);
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

/// Watches a span, which must be a mapping of the caller's for as long as the guard lives.
pub(crate) fn watch(span: Span) -> Guard {
    let take =
        |e: &Entry| e.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let entry = entries().find(|e| take(e)).unwrap_or_else(add_entry);
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

/// Installs the handler for this process. Once is enough; more is harmless.
///
/// # Panics
/// If the kernel refuses, which it does for no valid signal.
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

/// Maps anonymous memory over the part of the entry's span that `address` is in; whether that worked.
///
/// Each part can make two mappings more, of which a process has no end of either: who truncates much memory with many requests in flight is not to take the
/// last. So there are a few parts of one span, and not many of all; then all behind the address goes too: of a file that ends before it, there are no pages to
/// be taken out.
fn replace(entry: &Entry, span: Span, address: usize) -> bool {
    /// Bytes replaced at a time, or a page of the file if that is larger.
    const WINDOW: usize = 256 << 10;
    let window = WINDOW.max(span.page);
    let (first, span_end) = (address - address % window, span.base + span.len);
    let start = first.max(span.base);
    let is_one_of_few = entry.replaced.fetch_add(1, Ordering::Relaxed) < PARTS_OF_SPAN
        && PARTS.fetch_add(1, Ordering::Relaxed) < PARTS_MAX;
    let end = if is_one_of_few { first.saturating_add(window).min(span_end) } else { span_end };
    // Where there are no more mappings to be had, all of it still takes the place of one.
    let replaced = map_over(start, end - start) || map_over(span.base, span.len);
    entry.poisoned.store(true, Ordering::Release);
    FAULTS.fetch_add(1, Ordering::Release);
    replaced
}

fn map_over(base: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is of a live mapping of this process (the module's invariant) which only copies and
    // atomics reach, so other contents under it break nothing.
    let mapped = unsafe { libc::mmap(base as *mut c_void, len, prot, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

#[cfg(test)]
mod tests;
