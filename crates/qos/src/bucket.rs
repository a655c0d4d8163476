//! A token bucket that all reactors share. Any context; nothing waits.
//!
//! It is sold out up to a time, `until`; as the clock goes on, it fills by itself. Whoever takes moves that time on by what he takes; once it has
//! passed the present, nobody gets more. A large request may move it far: the bucket is in debt, and the clock pays. While the time lags behind, there is
//! something to take, but no more than the burst and [`SLACK`].
//!
//! Costs are in 2^-16 ns, of which leases keep the fractions; the bucket itself counts whole nanoseconds.

use crate::sync::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::tariff::{Cost, FRACTION};
use std::time::Duration;

/// How late reactors may be, in nanoseconds, and still sell all: without it, a limit without burst would lose the time between a request's turn and the
/// reactor's look at it.
pub const SLACK: u64 = 1_000_000;
/// How much all reactors together may hold leased, in nanoseconds. With [`SLACK`], 0.2% of a second.
pub const LEASES: u64 = 1_000_000;

/// A token bucket. See the file's head.
#[derive(Debug)]
pub struct Bucket {
    /// The price, which only [`Bucket::set`] changes.
    request: AtomicU64,
    byte: AtomicU64,
    burst: AtomicU64,
    /// Counts the changes.
    version: AtomicU64,
    /// Sold out up to this time, in nanoseconds.
    until: AtomicU64,
    /// What reactors hold leased, in nanoseconds.
    leased: AtomicU64,
    /// Lanes that wait, on all reactors.
    waiting: AtomicU64,
}

const fn nanos(burst: Duration) -> u64 {
    // A day at most.
    burst.as_nanos() as u64
}

impl Bucket {
    /// A bucket that begins empty.
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

    /// Counts the changes of price and burst. Who has seen a version sees its price, or a later one's.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Acquire)
    }

    /// Has another price from now on. A debt stays the same in requests or bytes; what was saved up stays within the new burst.
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

    /// Where what can be taken at `now` begins: there is something if that is not later than `now`, and otherwise there will be then.
    #[inline]
    pub fn free_from(&self, now: u64) -> u64 {
        self.begin(self.until.load(Relaxed), now)
    }

    fn begin(&self, until: u64, now: u64) -> u64 {
        until.max(now.saturating_sub(self.burst.load(Relaxed).saturating_add(SLACK)))
    }

    /// Takes `need` nanoseconds, by going into debt if they are more than there are, and of `extra` as many as there are besides. Returns how many it
    /// took.
    ///
    /// # Errors
    /// When there will be something, if there is nothing.
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

    /// Gives back what was taken and not used.
    pub fn give_back(&self, unused: u64) {
        self.update(|until| until.saturating_sub(unused));
    }

    /// A reactor that held `before` leased is to hold `kept`, and as much of `more` besides as all may hold together. Returns how much of that.
    pub fn lease(&self, before: u64, kept: u64, more: u64) -> u64 {
        let mut is = self.leased.load(Relaxed);
        loop {
            let others = is - before + kept;
            let more = more.min(LEASES.saturating_sub(others));
            match self.leased.compare_exchange_weak(is, others + more, Relaxed, Relaxed) {
                Ok(_) => return more,
                Err(other) => is = other,
            }
        }
    }

    /// What all reactors hold leased, in nanoseconds.
    pub fn leased(&self) -> u64 {
        self.leased.load(Relaxed)
    }

    /// Lanes that wait, on all reactors.
    #[inline]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    pub(crate) fn begin_waiting(&self) {
        self.waiting.fetch_add(1, Relaxed);
    }

    pub(crate) fn end_waiting(&self, lanes: u64) {
        self.waiting.fetch_sub(lanes, Relaxed);
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
