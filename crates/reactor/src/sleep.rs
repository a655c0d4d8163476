//! When a reactor with nothing to do goes to sleep. Pure decisions; reactor context.

use crate::Nanos;
use std::str::FromStr;
use std::time::Duration;

/// What a reactor does when there is no work: its own policy, or that of a root ([`crate::Cx::set_sleep_policy`]). The order is
/// that of the processor time that they take, the least first.
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
    /// Its name, as options have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }
}

impl SleepPolicy {
    /// Whether to park a promoted root or a driver with this policy that was without work for so long, and was polled in vain so
    /// often.
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

/// The longest time to poll for before sleeping, and the longest gap that polling may bridge, while a disk owes an answer: about
/// what a fast one takes.
const SPIN_MAX: Duration = Duration::from_micros(200);
/// The same while nothing is owed, and the next request may be long in coming: polling for longer than a few sleeps and wake-ups
/// cost would burn more than it saves. (With 200 µs here, 10,000 requests a second cost twice as much CPU, for the same
/// median latency.)
const SPIN_UNOWED_MAX: Duration = Duration::from_micros(50);
/// The first step of a window that grows.
const SPIN_START: Duration = Duration::from_micros(10);

/// A promoted root without work for this long is parked, though the reactor polls on.
const PARK_AFTER: Duration = SPIN_MAX;
/// The root is not parked before so many polls without work, which cost about as much as a kick. Where turns are long,
/// since many roots have work, the next request is only a few turns away: without this, each request of a VM would cost a
/// kick just when the reactor has the least time for it.
const PARK_AFTER_POLLS: u32 = 64;
/// The same where polling is what is wanted: long enough to spare nearly every kick, and not for ever, as a turn's cost is
/// to follow the disks in use.
const PARK_AFTER_POLL: Duration = Duration::from_millis(10);

/// The window of polling before sleep, as KVM's halt polling adapts its own: a gap that a longer window would have bridged
/// doubles it; a gap that none could have bridged ends polling until the gaps are short again. There are two windows, for
/// the two kinds of gap: while a disk owes an answer, and while none does. Work with the policy [`SleepPolicy::Interrupt`] is
/// not to be polled on for: the windows do not learn of it.
#[derive(Debug)]
pub(crate) struct Spin {
    owed: Window,
    unowed: Window,
    /// Whether a disk owed an answer when the last turn with work ended.
    is_owed: bool,
    /// When the last turn with work to poll on for ended.
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

    /// The window was too short for this gap.
    fn missed(&mut self, gap: Duration) {
        self.now = if gap > self.max { Duration::ZERO } else { (self.now * 2).clamp(SPIN_START, self.max) };
    }
}

impl Spin {
    pub const fn new(now: Nanos) -> Self {
        let (owed, unowed) = (Window::new(SPIN_MAX), Window::new(SPIN_UNOWED_MAX));
        Self { owed, unowed, is_owed: false, last_work: now }
    }

    /// There was work to poll on for in the turn that began at `now`. `slept`: the first since a sleep.
    pub fn worked(&mut self, now: Nanos, slept: bool) {
        let gap = now.since(self.last_work);
        if slept {
            let window = if self.is_owed { &mut self.owed } else { &mut self.unowed };
            window.missed(gap);
        }
        self.last_work = now;
    }

    /// A turn with work to poll on for has ended, and disks owe answers or not.
    pub const fn ended(&mut self, now: Nanos, is_owed: bool) {
        self.last_work = now;
        self.is_owed = is_owed;
    }

    /// Whether an idle reactor that may sleep is to sleep now.
    pub fn is_over(&self, now: Nanos) -> bool {
        let window = if self.is_owed { &self.owed } else { &self.unowed };
        now.since(self.last_work) >= window.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of work `gap` apart; the window for such gaps in the end.
    fn after(gap: Duration, is_owed: bool, spin: &mut Spin) -> Duration {
        let mut now = spin.last_work;
        let window = |spin: &Spin| if is_owed { spin.owed.now } else { spin.unowed.now };
        for _ in 0..20 {
            spin.ended(now, is_owed);
            let slept = gap >= window(spin);
            now = now.after(gap);
            spin.worked(now, slept);
        }
        window(spin)
    }

    #[test]
    fn each_window_follows_its_gaps() {
        let micros = Duration::from_micros;
        for (is_owed, bridged, max) in [(true, micros(100), SPIN_MAX), (false, micros(40), SPIN_UNOWED_MAX)] {
            let mut spin = Spin::new(Nanos(0));
            assert_eq!(after(micros(1000), is_owed, &mut spin), Duration::ZERO);
            let window = after(bridged, is_owed, &mut spin);
            assert!(window > bridged && window <= max, "{window:?}");
            // The other kind of gap changes nothing.
            after(micros(1000), !is_owed, &mut spin);
            assert_eq!(after(micros(1), is_owed, &mut spin), window);
            assert_eq!(after(max + micros(1), is_owed, &mut spin), Duration::ZERO);
            assert!(after(micros(5), is_owed, &mut spin) >= SPIN_START);
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
