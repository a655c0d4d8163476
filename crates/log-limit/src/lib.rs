//! How often a line of the log may be written, where a guest, a front-end or a failing disk decides how often there is a reason. Any context: no lock, no
//! allocation, one look at the clock.
//!
//! ```
//! use aryk_log_limit::{LogLimit, limited};
//! use std::time::Duration;
//!
//! // Ten at once, then one in five seconds.
//! let lines = LogLimit::new(10, Duration::from_secs(5));
//! limited!(lines, warn, disk = "vm1", "a write failed");
//! ```
//!
//! A line that is written says as `left_out` how many were not since the last; if no more come, whoever owns the limit asks now and then for what is
//! [`overdue`](LogLimit::overdue), and writes a line of its own. So what a limit is for is one matter (a disk's failures, a controller's sessions):
//! of two matters that share one, the frequent one silences the other.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// For the macro.
#[doc(hidden)]
pub use tracing;

/// Writes a line by `tracing`, if the limit admits one: `limited!(limit, warn, field = value, "text {}", argument)`.
#[macro_export]
macro_rules! limited {
    ($limit:expr, $level:ident, $($line:tt)+) => {
        if let Some(admitted) = $limit.admit() {
            $crate::tracing::$level!(left_out = admitted.left_out(), $($line)+);
        }
    };
}

/// A limit of one kind of line: some at once, then one each period.
#[derive(Debug)]
pub struct LogLimit {
    period_ns: u64,
    /// How far `paid_until_ns` may be ahead of the time.
    ahead_ns: u64,
    /// The time, of the monotonic clock, up to which lines have used up their periods.
    paid_until_ns: AtomicU64,
    left_out: AtomicU64,
}

/// A line may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted(u64);

impl Admitted {
    /// Lines left out since the last one that was admitted, if there were any.
    pub fn left_out(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

impl LogLimit {
    /// `burst` lines at once, at least one, and after that one each `period`.
    pub const fn new(burst: u32, period: Duration) -> Self {
        let period_ns = period.as_nanos() as u64;
        let burst = if burst == 0 { 1 } else { burst as u64 };
        Self {
            period_ns,
            ahead_ns: period_ns.saturating_mul(burst - 1),
            paid_until_ns: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Whether a line may be written now; if not, it is counted.
    pub fn admit(&self) -> Option<Admitted> {
        self.admit_at(now_ns())
    }

    /// Lines left out that no line has told of.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }

    /// How many lines were left out, if some were, and one that says so may be written now: it is to be, for they count as told.
    pub fn overdue(&self) -> Option<u64> {
        self.overdue_at(now_ns())
    }

    fn overdue_at(&self, now_ns: u64) -> Option<u64> {
        if self.left_out() == 0 || !self.pay(now_ns) {
            return None;
        }
        // Another line may have told of them meanwhile.
        Admitted(self.left_out.swap(0, Relaxed)).left_out()
    }

    /// Uses up a period for a line of now, if there is one.
    fn pay(&self, now_ns: u64) -> bool {
        let pay = |until: u64| {
            let from = until.max(now_ns);
            (from - now_ns <= self.ahead_ns).then(|| from.saturating_add(self.period_ns))
        };
        self.paid_until_ns.fetch_update(Relaxed, Relaxed, pay).is_ok()
    }

    fn admit_at(&self, now_ns: u64) -> Option<Admitted> {
        if !self.pay(now_ns) {
            self.left_out.fetch_add(1, Relaxed);
            return None;
        }
        // Most often there are none, and a line of a cache that many cores read stays where it is.
        let left_out = if self.left_out() == 0 { 0 } else { self.left_out.swap(0, Relaxed) };
        Some(Admitted(left_out))
    }
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_burst_and_then_one_each_period() {
        let limit = LogLimit::new(3, Duration::from_secs(5));
        let start = 1000 * SECOND;
        let admitted = |at: u64| limit.admit_at(start + at).map(Admitted::left_out);
        assert_eq!([admitted(0), admitted(1), admitted(2)], [Some(None); 3]);
        assert_eq!([admitted(3), admitted(SECOND), admitted(5 * SECOND - 1)], [None; 3]);
        assert_eq!(limit.left_out(), 3);
        assert_eq!([admitted(5 * SECOND), admitted(5 * SECOND)], [Some(Some(3)), None]);
        // In 100 s 20 periods come back, of which it keeps three.
        assert_eq!(admitted(105 * SECOND), Some(Some(1)));
        assert_eq!([admitted(105 * SECOND), admitted(105 * SECOND)], [Some(None); 2]);
        assert_eq!(admitted(105 * SECOND), None);
    }

    #[test]
    fn what_is_left_out_is_told_when_no_more_comes() {
        let limit = LogLimit::new(1, Duration::from_secs(5));
        let start = 1000 * SECOND;
        assert_eq!(limit.overdue_at(start), None);
        assert!(limit.admit_at(start).is_some());
        assert!([1, 2, 3].iter().all(|&at| limit.admit_at(start + at).is_none()));
        // Not before its period is over, once, and for a period of its own.
        assert_eq!(limit.overdue_at(start + 5 * SECOND - 1), None);
        assert_eq!(limit.left_out(), 3);
        assert_eq!(limit.overdue_at(start + 5 * SECOND), Some(3));
        assert_eq!(limit.overdue_at(start + 100 * SECOND), None);
        assert_eq!(limit.admit_at(start + 10 * SECOND - 1), None);
        assert_eq!(limit.overdue_at(start + 10 * SECOND), Some(1));
    }

    #[test]
    fn threads_share_one_limit() {
        let limit = LogLimit::new(100, Duration::from_secs(3600));
        let admitted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let count = (0..1000).filter(|_| limit.admit().is_some()).count();
                    admitted.fetch_add(count as u64, Relaxed);
                });
            }
        });
        assert_eq!((admitted.load(Relaxed), limit.left_out()), (100, 3900));
    }

    #[test]
    fn one_at_least_however_small_the_burst() {
        let limit = LogLimit::new(0, Duration::from_secs(3600));
        limited!(limit, debug, "said");
        limited!(limit, debug, which = 2, "not {}", "said");
        assert_eq!(limit.left_out(), 1);
    }
}
