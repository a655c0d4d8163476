//! Requests of a controller that does not serve them now: its disks report it to their observers, and requests fail after a while
//! where the configuration says so. Control context.

use super::{Thread, now};
use crate::Phase;
use aryk_log_limit::limited;
use aryk_reactor::Nanos;
use std::time::Duration;

/// Disks report a reset that takes longer. Most resets take less, and their requests are only slow.
const RESET_PATIENCE: Duration = Duration::from_secs(1);

/// How far the requests that wait for the controller are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stall {
    /// When they began to wait; `None` if none has to.
    since: Option<Nanos>,
    /// When the controller was away; `None` if it is not.
    away_since: Option<Nanos>,
    /// The disks have reported that they are away.
    is_told: bool,
    /// Requests fail until the controller is back.
    are_failing: bool,
}

impl Stall {
    /// Whether no request has to wait.
    pub(super) const fn is_over(&self) -> bool {
        self.since.is_none()
    }
}

impl Thread {
    /// Tells observers that requests wait or go on, and makes requests fail, as far as that is due. Returns the time until more
    /// is due; `None` if nothing is.
    pub(super) fn follow_stall(&mut self) -> Option<Duration> {
        let phase = self.shared.info().phase;
        let patience = match phase {
            Phase::Away | Phase::Disabled => Duration::ZERO,
            Phase::Starting | Phase::Resetting => RESET_PATIENCE,
            Phase::Ready if self.pairs.failing_for(now()).is_some() => RESET_PATIENCE,
            Phase::Ready => {
                self.end_stall();
                return None;
            }
            // The disks go.
            Phase::Stopping | Phase::Ended => return None,
        };
        let now = now();
        let away_since = if phase == Phase::Away { self.stall.away_since.or(Some(now)) } else { None };
        self.stall.away_since = away_since;
        let waited = now.since(*self.stall.since.get_or_insert(now));
        if waited >= patience {
            self.stall.is_told = true;
            // A disk may have been created since the last time.
            self.tell_observers(true);
        }
        let away = away_since.map(|since| now.since(since)).filter(|_| !self.stall.are_failing);
        let fail_after = self.config.fast_fail.zip(away);
        if fail_after.is_some_and(|(after, away)| away >= after) {
            self.stall.are_failing = true;
            let controller = &self.shared.name;
            limited!(
                self.lines,
                error,
                controller,
                ?waited,
                "the NVMe controller is away: its requests fail until it is back"
            );
            self.pairs.fail_requests(&self.shared);
        }
        let until =
            |(after, since): (Duration, Duration)| after.checked_sub(since).filter(|left| !left.is_zero());
        [until((patience, waited)), fail_after.and_then(until)].into_iter().flatten().min()
    }

    fn end_stall(&mut self) {
        if std::mem::take(&mut self.stall).is_told {
            self.tell_observers(false);
        }
    }

    fn tell_observers(&self, is_stalled: bool) {
        self.disks.set_stalled(is_stalled);
    }
}
