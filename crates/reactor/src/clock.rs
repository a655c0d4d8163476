//! The clock of reactors. Any context.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A time, in nanoseconds since an arbitrary start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The time `d` after `self`; the largest time if that overflows.
    #[must_use]
    pub const fn after(self, d: Duration) -> Self {
        let nanos = d.as_nanos();
        let nanos = if nanos > u64::MAX as u128 { u64::MAX } else { nanos as u64 };
        Self(self.0.saturating_add(nanos))
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.ns_since(earlier))
    }

    /// As [`Nanos::since`], in nanoseconds: without the division and the multiplication of a [`Duration`].
    #[inline]
    pub const fn ns_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The source of a reactor's time.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The system's monotonic clock.
    #[default]
    Monotonic,
    /// A time that stands still until a test moves it.
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    /// Whether the clock is virtual: then no thread may wait for its time to pass.
    pub const fn is_virtual(&self) -> bool {
        matches!(self, Self::Virtual(_))
    }

    /// The time now.
    #[inline]
    pub fn now(&self) -> Nanos {
        match self {
            Self::Monotonic => {
                let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                Nanos(t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned())
            }
            Self::Virtual(nanos) => Nanos(nanos.load(Ordering::Relaxed)),
        }
    }
}
