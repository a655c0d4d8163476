//! When a pool is at rest: no request has been under way for a while. Any context; pure.

use aryk_reactor::Nanos;
use std::time::Duration;

/// The time without a request after which a pool is at rest.
const REST: Duration = Duration::from_millis(100);

/// The consequence of a turn of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Nothing,
    /// There is to be another turn at this time.
    TurnAt(Nanos),
    /// The pool is at rest from now on.
    Rest,
}

/// Watches for the rest of a pool, with one timer for all requests of a while. A pool at rest has none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    /// When the pool is at rest, if no request comes; `None`: it is at rest.
    due: Option<Nanos>,
    /// When the timer wakes the pool to look at that: not after `due`.
    turn: Nanos,
}

impl Rest {
    /// A pool is at rest in its first turn without a request.
    pub const fn new() -> Self {
        Self { due: Some(Nanos(0)), turn: Nanos(0) }
    }

    /// Notes a turn at the time `now`, in which the pool is in use ([`aryk_volume::Pool::is_in_use`], or the opening) or not.
    pub fn note_turn(&mut self, is_in_use: bool, now: Nanos) -> Next {
        let is_watched = self.due.is_some() && now < self.turn;
        if is_in_use {
            self.due = Some(now.after(REST));
        }
        match self.due {
            Some(due) if !is_watched && due > now => {
                self.turn = due;
                Next::TurnAt(due)
            }
            Some(_) if !is_watched => {
                self.due = None;
                Next::Rest
            }
            _ => Next::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_pool_rests_a_while_after_its_latest_request_with_few_timers() {
        let mut rest = Rest::new();
        let mut turn = |is_in_use, ms: u64| rest.note_turn(is_in_use, Nanos(ms * MS));
        assert_eq!(turn(false, 1000), Next::Rest, "the first turn");
        assert_eq!(turn(false, 1001), Next::Nothing);
        assert_eq!(turn(true, 1010), Next::TurnAt(Nanos(1110 * MS)));
        assert!((1011..1110).all(|ms| turn(true, ms) == Next::Nothing), "the timer is there");
        assert_eq!(turn(true, 1110), Next::TurnAt(Nanos(1210 * MS)));
        assert_eq!(turn(true, 1150), Next::Nothing);
        assert_eq!(turn(false, 1160), Next::Nothing);
        assert_eq!(turn(false, 1210), Next::TurnAt(Nanos(1250 * MS)), "the latest request was at 1150");
        assert_eq!(turn(false, 1250), Next::Rest);
        assert_eq!(turn(false, 9000), Next::Nothing, "a pool at rest has no timer");
    }
}
