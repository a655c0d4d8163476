//! When a reactor with nothing to do goes to sleep. Pure decisions; reactor context.

use crate::Nanos;
use std::str::FromStr;
use std::time::Duration;

/// What a reactor does when there is no work.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SleepPolicy {
    /// It never sleeps: the lowest latency, and all of its core's time.
    Poll,
    /// It polls for about as long as the recent gaps between requests were, then sleeps.
    #[default]
    Adaptive,
    /// It sleeps at once.
    Interrupt,
}

impl SleepPolicy {
    /// Its name, as options have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
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

/// The longest time to poll for before sleeping, and the longest gap that polling may bridge.
const SPIN_MAX: Duration = Duration::from_micros(200);
/// The first step of a window that grows.
const SPIN_START: Duration = Duration::from_micros(10);

/// A promoted root without work for this long is parked, though the reactor polls on.
const PARK_AFTER: Duration = SPIN_MAX;
/// The same where polling is what is wanted: long enough to spare nearly every kick, and not for ever, as a turn's cost is
/// to follow the disks in use.
const PARK_AFTER_POLL: Duration = Duration::from_millis(10);

/// The window of polling before sleep, as KVM's halt polling adapts its own: a gap that a longer window would have bridged
/// doubles it; a gap that none could have bridged ends polling until the gaps are short again.
#[derive(Debug)]
pub(crate) struct Spin {
    policy: SleepPolicy,
    window: Duration,
    /// When the last turn with work ended.
    last_work: Nanos,
}

impl Spin {
    pub const fn new(policy: SleepPolicy, now: Nanos) -> Self {
        Self { policy, window: Duration::ZERO, last_work: now }
    }

    /// How long a promoted root may be without work before it is parked.
    pub const fn park_after(&self) -> Duration {
        match self.policy {
            SleepPolicy::Poll => PARK_AFTER_POLL,
            SleepPolicy::Adaptive => PARK_AFTER,
            SleepPolicy::Interrupt => Duration::ZERO,
        }
    }

    /// There was work in the turn that began at `now`. `slept`: the first since a sleep.
    pub fn worked(&mut self, now: Nanos, slept: bool) {
        let gap = now.since(self.last_work);
        if slept && self.policy == SleepPolicy::Adaptive {
            self.window =
                if gap > SPIN_MAX { Duration::ZERO } else { (self.window * 2).clamp(SPIN_START, SPIN_MAX) };
        }
        self.last_work = now;
    }

    /// A turn with work has ended.
    pub const fn ended(&mut self, now: Nanos) {
        self.last_work = now;
    }

    /// Whether an idle reactor is to sleep now.
    pub fn is_over(&self, now: Nanos) -> bool {
        match self.policy {
            SleepPolicy::Poll => false,
            SleepPolicy::Interrupt => true,
            SleepPolicy::Adaptive => now.since(self.last_work) >= self.window,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of requests `gap` apart, each after the end of the last one's work; the window in the end.
    fn after(gap: Duration, spin: &mut Spin) -> Duration {
        let mut now = spin.last_work;
        for _ in 0..20 {
            let slept = gap >= spin.window;
            now = now.after(gap);
            spin.worked(now, slept);
        }
        spin.window
    }

    #[test]
    fn the_window_follows_the_gaps() {
        let mut spin = Spin::new(SleepPolicy::Adaptive, Nanos(0));
        assert_eq!(after(Duration::from_millis(1), &mut spin), Duration::ZERO);
        let window = after(Duration::from_micros(100), &mut spin);
        assert!(window > Duration::from_micros(100) && window <= SPIN_MAX, "{window:?}");
        assert_eq!(after(Duration::from_millis(1), &mut spin), Duration::ZERO);
        assert!(after(Duration::from_micros(5), &mut spin) >= SPIN_START);
    }

    #[test]
    fn policies() {
        let at = |policy: SleepPolicy, nanos| Spin::new(policy, Nanos(0)).is_over(Nanos(nanos));
        assert!(!at(SleepPolicy::Poll, u64::MAX));
        assert!(at(SleepPolicy::Interrupt, 0) && at(SleepPolicy::Adaptive, 0));
        assert_eq!("adaptive".parse(), Ok(SleepPolicy::Adaptive));
        assert!("never".parse::<SleepPolicy>().is_err());
    }
}
