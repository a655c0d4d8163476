//! The decision when a reactor without work goes to sleep. Pure functions; reactor context.

use crate::Nanos;
use std::str::FromStr;
use std::time::Duration;

/// What a reactor does when there is no work: its own policy, or that of a root ([`crate::Cx::set_sleep_policy`]). The policies
/// are in order of the processor time that they take, the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum SleepPolicy {
    /// The reactor sleeps at once.
    Interrupt,
    /// The reactor polls for about as long as the recent gaps between requests were, then sleeps.
    #[default]
    Adaptive,
    /// The reactor never sleeps: the lowest latency, and all of its core's time.
    Poll,
}

impl SleepPolicy {
    /// The policy's name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }
}

impl SleepPolicy {
    /// Whether to park a promoted root or a driver with this policy that has had no work for the time `idle` and in the last
    /// `polls` polls.
    pub(crate) fn is_to_park(self, idle: Duration, polls: u32) -> bool {
        match self {
            Self::Poll => idle >= PARK_AFTER_POLL,
            Self::Adaptive => idle >= PARK_AFTER && polls >= PARK_AFTER_POLLS,
            Self::Interrupt => true,
        }
    }
}

impl FromStr for SleepPolicy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let all = [Self::Poll, Self::Adaptive, Self::Interrupt];
        let found = all.into_iter().find(|p| p.name() == s);
        found.ok_or_else(|| format!("`{s}` is no sleep policy: poll, adaptive or interrupt"))
    }
}

/// The longest time to poll for before sleeping, and the longest gap that polling may bridge, while requests are in flight:
/// about the latency of a fast disk.
const SPIN_MAX: Duration = Duration::from_micros(200);
/// As [`SPIN_MAX`], while no requests are in flight, and the next request may come late: polling for longer than the cost of a
/// few sleeps and wake-ups would take more time than it saves. (With 200 µs here, 10,000 requests a second cost twice as much
/// CPU, for the same median latency.)
const SPIN_MAX_WITHOUT_REQUESTS: Duration = Duration::from_micros(50);
/// The first step of a window that grows.
const SPIN_START: Duration = Duration::from_micros(10);

/// A promoted root without work for this long is parked, though the reactor polls on.
const PARK_AFTER: Duration = SPIN_MAX;
/// A root is not parked before this many polls without work, which cost about as much as a kick. Where turns are long
/// because many roots have work, the next request is only a few turns away: without this bound, each request of a VM would
/// cost a kick just when the reactor has the least time for it.
const PARK_AFTER_POLLS: u32 = 64;
/// As [`PARK_AFTER`], with the policy [`SleepPolicy::Poll`]: long enough to avoid nearly every kick, but bounded, so that a
/// turn's cost depends on the disks in use only.
const PARK_AFTER_POLL: Duration = Duration::from_millis(10);
const _: () = {
    let [start, without, with] =
        [SPIN_START.as_nanos(), SPIN_MAX_WITHOUT_REQUESTS.as_nanos(), SPIN_MAX.as_nanos()];
    assert!(start < without && without < with, "the windows grow from their start to their bounds");
    assert!(PARK_AFTER.as_nanos() < PARK_AFTER_POLL.as_nanos(), "the policy `poll` parks later");
};

/// The window: how long the reactor polls before it sleeps. It adapts like that of KVM's halt polling: a gap between two turns
/// with work that a longer window would have bridged doubles the window; a gap longer than the window's maximum sets it to zero,
/// until the gaps are short again. There are two windows for the two kinds of gap: with requests in flight, and without. Work
/// with the policy [`SleepPolicy::Interrupt`] does not count here, since the reactor does not poll after it.
#[derive(Debug)]
pub(crate) struct Spin {
    with_requests: Window,
    without_requests: Window,
    /// Whether requests were in flight when [`Spin::is_over`] was asked last: selects the window that the next wake-up adjusts.
    has_requests: bool,
    /// When the last turn with work ended.
    last_work: Nanos,
}

#[derive(Debug)]
struct Window {
    now: Duration,
    max: Duration,
}

impl Window {
    const fn new(max: Duration) -> Self {
        Self { now: Duration::ZERO, max }
    }

    /// Adapts the window, which was too short for `gap`.
    fn missed(&mut self, gap: Duration) {
        self.now = if gap > self.max { Duration::ZERO } else { (self.now * 2).clamp(SPIN_START, self.max) };
        debug_assert!(self.now <= self.max, "a window of {:?}, beyond {:?}", self.now, self.max);
    }
}

impl Spin {
    pub const fn new(now: Nanos) -> Self {
        Self {
            with_requests: Window::new(SPIN_MAX),
            without_requests: Window::new(SPIN_MAX_WITHOUT_REQUESTS),
            has_requests: false,
            last_work: now,
        }
    }

    /// Records the beginning of the first turn with work after a sleep.
    pub fn woke(&mut self, now: Nanos) {
        let gap = now.since(self.last_work);
        let window = if self.has_requests { &mut self.with_requests } else { &mut self.without_requests };
        window.missed(gap);
    }

    /// Records the end of a turn with work.
    #[inline]
    pub const fn worked_until(&mut self, now: Nanos) {
        self.last_work = now;
    }

    /// Whether the window for reactors with or without requests in flight has passed: an idle reactor that may sleep sleeps now.
    pub fn is_over(&mut self, now: Nanos, has_requests: bool) -> bool {
        self.has_requests = has_requests;
        let window = if has_requests { &self.with_requests } else { &self.without_requests };
        now.since(self.last_work) >= window.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs 20 turns with work, `gap` apart; returns the window for such gaps after them.
    fn after(gap: Duration, has_requests: bool, spin: &mut Spin) -> Duration {
        let mut now = spin.last_work;
        let window = |spin: &Spin| {
            if has_requests { spin.with_requests.now } else { spin.without_requests.now }
        };
        for _ in 0..20 {
            spin.worked_until(now);
            now = now.after(gap);
            if spin.is_over(now, has_requests) {
                spin.woke(now);
            }
        }
        window(spin)
    }

    #[test]
    fn each_window_follows_its_gaps() {
        let micros = Duration::from_micros;
        let kinds = [(true, micros(100), SPIN_MAX), (false, micros(40), SPIN_MAX_WITHOUT_REQUESTS)];
        for (has_requests, bridged, max) in kinds {
            let mut spin = Spin::new(Nanos(0));
            assert_eq!(after(micros(1000), has_requests, &mut spin), Duration::ZERO);
            let window = after(bridged, has_requests, &mut spin);
            assert!(window > bridged && window <= max, "{window:?}");
            // The other kind of gap changes nothing.
            after(micros(1000), !has_requests, &mut spin);
            assert_eq!(after(micros(1), has_requests, &mut spin), window);
            assert_eq!(after(max + micros(1), has_requests, &mut spin), Duration::ZERO);
            assert!(after(micros(5), has_requests, &mut spin) >= SPIN_START);
        }
    }

    #[test]
    fn policies() {
        assert!(SleepPolicy::Interrupt < SleepPolicy::Adaptive && SleepPolicy::Adaptive < SleepPolicy::Poll);
        let parks = |policy: SleepPolicy, idle| policy.is_to_park(idle, PARK_AFTER_POLLS);
        assert!(parks(SleepPolicy::Interrupt, Duration::ZERO));
        assert!(parks(SleepPolicy::Adaptive, PARK_AFTER) && !parks(SleepPolicy::Adaptive, PARK_AFTER / 2));
        assert!(parks(SleepPolicy::Poll, PARK_AFTER_POLL) && !parks(SleepPolicy::Poll, PARK_AFTER));
        assert_eq!("adaptive".parse(), Ok(SleepPolicy::Adaptive));
        assert!("never".parse::<SleepPolicy>().is_err());
    }
}
