//! Rate limit for log lines whose causes a guest, a front-end or a failing disk can repeat at will. Any context: no lock, no
//! allocation, one read of the clock.
//!
//! ```
//! use aryk_log_limit::{LogLimit, limited};
//! use std::time::Duration;
//!
//! // A burst of ten lines, then one every five seconds.
//! let lines = LogLimit::new(10, Duration::from_secs(5));
//! limited!(lines, warn, disk = "vm1", "a write failed");
//! ```
//!
//! A written line reports in `left_out` how many lines were dropped since the last one. If no more lines come, the owner of the
//! limit checks from time to time for [`overdue`](LogLimit::overdue) drops and writes a line about them. So each limit is for one
//! subject (a disk's failures, a controller's sessions): where two subjects share a limit, the frequent one silences the other.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Used by the macro.
#[doc(hidden)]
pub use tracing;

/// Writes a line with `tracing` if the limit admits it: `limited!(limit, warn, field = value, "text {}", argument)`.
#[macro_export]
macro_rules! limited {
    ($limit:expr, $level:ident, $($line:tt)+) => {
        if let Some(admitted) = $limit.admit() {
            $crate::tracing::$level!(left_out = admitted.left_out(), $($line)+);
        }
    };
}

/// Limit for one kind of line: a burst, then one per period.
#[derive(Debug)]
pub struct LogLimit {
    period_ns: u64,
    /// How far `spent_until_ns` may be ahead of the present time.
    ahead_ns: u64,
    /// The time, on the monotonic clock, up to which lines have used up their periods.
    spent_until_ns: AtomicU64,
    left_out: AtomicU64,
}

/// Permission to write one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted(u64);

impl Admitted {
    /// Lines dropped since the last admitted one; `None` if there were none.
    pub fn left_out(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

impl LogLimit {
    /// Admits `burst` lines at once (0 counts as 1), then one per `period`.
    pub const fn new(burst: u32, period: Duration) -> Self {
        let period_ns = period.as_nanos() as u64;
        let burst = if burst == 0 { 1 } else { burst as u64 };
        Self {
            period_ns,
            ahead_ns: period_ns.saturating_mul(burst - 1),
            spent_until_ns: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Admits a line now, or counts it as dropped.
    pub fn admit(&self) -> Option<Admitted> {
        self.admit_at(now_ns())
    }

    /// Dropped lines that no written line has reported yet.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }

    /// The number of dropped lines, if there are any and a line may be written now. The caller must write that line: the drops
    /// count as reported.
    pub fn overdue(&self) -> Option<u64> {
        self.overdue_at(now_ns())
    }

    fn overdue_at(&self, now_ns: u64) -> Option<u64> {
        if self.left_out() == 0 || !self.try_spend(now_ns) {
            return None;
        }
        // Another line may have reported them since the check above.
        Admitted(self.left_out.swap(0, Relaxed)).left_out()
    }

    /// Uses up one period for a line at `now_ns`, if one is free.
    fn try_spend(&self, now_ns: u64) -> bool {
        let spend = |until: u64| {
            let from = until.max(now_ns);
            (from - now_ns <= self.ahead_ns).then(|| from.saturating_add(self.period_ns))
        };
        self.spent_until_ns.fetch_update(Relaxed, Relaxed, spend).is_ok()
    }

    fn admit_at(&self, now_ns: u64) -> Option<Admitted> {
        if !self.try_spend(now_ns) {
            self.left_out.fetch_add(1, Relaxed);
            return None;
        }
        // In most calls no line was dropped, and then the cache line, which many cores read, is not written.
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
        // In 100 s 20 periods are refilled, of which the limit keeps three.
        assert_eq!(admitted(105 * SECOND), Some(Some(1)));
        assert_eq!([admitted(105 * SECOND), admitted(105 * SECOND)], [Some(None); 2]);
        assert_eq!(admitted(105 * SECOND), None);
    }

    #[test]
    fn drops_are_reported_when_no_more_lines_come() {
        let limit = LogLimit::new(1, Duration::from_secs(5));
        let start = 1000 * SECOND;
        assert_eq!(limit.overdue_at(start), None);
        assert!(limit.admit_at(start).is_some());
        assert!([1, 2, 3].iter().all(|&at| limit.admit_at(start + at).is_none()));
        // Drops are reported after their period is over, once, and the report uses a period of its own.
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
    fn a_burst_of_zero_admits_one() {
        let limit = LogLimit::new(0, Duration::from_secs(3600));
        limited!(limit, debug, "written");
        limited!(limit, debug, which = 2, "not {}", "written");
        assert_eq!(limit.left_out(), 1);
    }
}
