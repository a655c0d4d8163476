//! A token bucket that all reactors share. Any context; nothing waits.
//!
//! The bucket is one number: the time `until` up to which its tokens are sold. As the clock advances, the bucket fills without
//! any action. A reactor that takes tokens moves `until` forward by their cost; while `until` is later than now, no reactor
//! gets more tokens. A large request may move `until` far ahead: the bucket is then in debt until the clock reaches `until`.
//! While `until` is earlier than now, tokens are available, at most the burst and [`SLACK`].
//!
//! Costs are in 2^-16 ns. Leases keep the fractions; the bucket itself counts whole nanoseconds.

use crate::sync::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::tariff::{Cost, FRACTION};
use std::time::Duration;

/// How late reactors may be, in nanoseconds, and still use the whole limit: without it, a limit without burst would lose
/// the time between a request's turn and the reactor's poll.
pub const SLACK: u64 = 1_000_000;
/// Upper bound of the leases of all reactors together, in nanoseconds. With [`SLACK`], 0.2% of a second.
pub const LEASES: u64 = 1_000_000;
const _: () = assert!(500 * (SLACK + LEASES) == 1_000_000_000, "the two together are 0.2% of a second");

/// A token bucket. See the file's head.
#[derive(Debug)]
pub struct Bucket {
    /// The price. Only [`Bucket::set`] changes it.
    request: AtomicU64,
    byte: AtomicU64,
    burst: AtomicU64,
    /// Number of changes.
    version: AtomicU64,
    /// The bucket is sold out up to this time, in nanoseconds.
    until: AtomicU64,
    /// The leases of all reactors, in nanoseconds.
    leased: AtomicU64,
    /// Number of waiting lanes, on all reactors.
    waiting: AtomicU64,
}

const fn nanos(burst: Duration) -> u64 {
    // The largest burst is a day.
    burst.as_nanos() as u64
}

impl Bucket {
    /// Creates an empty bucket.
    pub fn new(cost: Cost, burst: Duration, now: u64) -> Self {
        Self {
            request: AtomicU64::new(cost.request),
            byte: AtomicU64::new(cost.byte),
            burst: AtomicU64::new(nanos(burst)),
            version: AtomicU64::new(0),
            until: AtomicU64::new(now),
            leased: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        }
    }

    /// The price of a request.
    #[inline]
    pub fn cost(&self) -> Cost {
        Cost { request: self.request.load(Relaxed), byte: self.byte.load(Relaxed) }
    }

    /// Number of changes of price and burst. A reactor that reads the price after a version gets the price of that version or a
    /// later one.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Acquire)
    }

    /// Sets another price and burst. A debt stays the same in requests or bytes; saved-up tokens are limited to the new
    /// burst.
    pub fn set(&self, cost: Cost, burst: Duration, now: u64) {
        const SIZE: u64 = 64 << 10;
        let (before, after) = (self.cost().of(SIZE).max(1), cost.of(SIZE));
        self.request.store(cost.request, Relaxed);
        self.byte.store(cost.byte, Relaxed);
        self.burst.store(nanos(burst), Relaxed);
        let rescale = |until: u64| {
            let debt = u128::from(until.saturating_sub(now)) * u128::from(after) / u128::from(before);
            let debt = u64::try_from(debt).unwrap_or(u64::MAX);
            if until > now { now.saturating_add(debt) } else { until }
        };
        self.update(rescale);
        self.version.fetch_add(1, Release);
    }

    fn update(&self, mut change: impl FnMut(u64) -> u64) {
        let mut is = self.until.load(Relaxed);
        while let Err(other) = self.until.compare_exchange_weak(is, change(is), Relaxed, Relaxed) {
            is = other;
        }
    }

    /// The time from which tokens are available: tokens are available now if it is at most `now`; otherwise they will be at
    /// that time.
    #[inline]
    pub fn free_from(&self, now: u64) -> u64 {
        self.begin(self.until.load(Relaxed), now)
    }

    fn begin(&self, until: u64, now: u64) -> u64 {
        until.max(now.saturating_sub(self.burst.load(Relaxed).saturating_add(SLACK)))
    }

    /// Takes `need` nanoseconds, going into debt if fewer are available, and as much of `extra` as is available beyond
    /// them. Returns the number taken.
    ///
    /// # Errors
    /// No tokens are available. The error is the time at which tokens will be available.
    #[inline]
    pub fn take(&self, need: u64, extra: u64, now: u64) -> Result<u64, u64> {
        let mut is = self.until.load(Relaxed);
        loop {
            let begin = self.begin(is, now);
            let room = now.checked_sub(begin).ok_or(begin)?;
            let taken = need.saturating_add(extra.min(room.saturating_sub(need)));
            let end = begin.saturating_add(taken);
            match self.until.compare_exchange_weak(is, end, Relaxed, Relaxed) {
                Ok(_) => return Ok(taken),
                Err(other) => is = other,
            }
        }
    }

    /// Returns tokens that were taken and not used.
    pub fn give_back(&self, unused: u64) {
        self.update(|until| until.saturating_sub(unused));
    }

    /// Replaces a reactor's lease of `before` by `kept`, and by as much of `more` in addition as all reactors together
    /// may hold. Returns that part of `more`.
    pub fn lease(&self, before: u64, kept: u64, more: u64) -> u64 {
        let mut is = self.leased.load(Relaxed);
        loop {
            debug_assert!(
                is >= before,
                "the bucket has recorded {is} ns of leases, but one reactor has {before} ns"
            );
            debug_assert!(kept <= before, "a reactor keeps {kept} ns of a lease of {before} ns");
            let others = is.saturating_sub(before) + kept;
            debug_assert!(
                others <= LEASES,
                "the leases of all reactors are {others} ns, more than their bound"
            );
            let more = more.min(LEASES.saturating_sub(others));
            match self.leased.compare_exchange_weak(is, others + more, Relaxed, Relaxed) {
                Ok(_) => return more,
                Err(other) => is = other,
            }
        }
    }

    /// The leases of all reactors, in nanoseconds.
    pub fn leased(&self) -> u64 {
        self.leased.load(Relaxed)
    }

    /// Number of waiting lanes, on all reactors.
    #[inline]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    pub(crate) fn begin_waiting(&self) {
        self.waiting.fetch_add(1, Relaxed);
    }

    pub(crate) fn end_waiting(&self, lanes: u64) {
        let before = self.waiting.fetch_sub(lanes, Relaxed);
        debug_assert!(before >= lanes, "{lanes} lanes end their wait, but only {before} have begun one");
    }
}

/// Whole nanoseconds that cover a cost.
#[inline]
pub(crate) const fn nanos_up(cost: u64) -> u64 {
    cost.div_ceil(1 << FRACTION)
}

#[cfg(all(test, not(loom)))]
#[path = "bucket/tests.rs"]
mod tests;
