//! The keep-alive timer of an association. NVMe 2.0 §3.9. Any context; the time is a parameter, in nanoseconds since any start.

use aryk_nvme::spec::status::Code;

/// KAS: the granularity of the timer, in units of 100 ms.
pub const GRANULARITY: u16 = 10;
const GRANULARITY_MS: u32 = GRANULARITY as u32 * 100;
/// The longest timeout that a controller accepts, in milliseconds: an hour.
const TIMEOUT_MS_MAX: u32 = 3_600_000;

/// The timer. The controller restarts it with each Keep Alive command; when it expires, the association ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    timeout_ms: u32,
    deadline: Option<u64>,
}

impl KeepAlive {
    /// A timer of `timeout_ms` (KATO), rounded up to the granularity; 0 stands for none.
    ///
    /// # Errors
    /// The timeout is longer than an hour.
    pub const fn new(timeout_ms: u32, now: u64) -> Result<Self, Code> {
        if timeout_ms > TIMEOUT_MS_MAX {
            return Err(Code::KEEP_ALIVE_INVALID);
        }
        let mut timer = Self { timeout_ms: timeout_ms.next_multiple_of(GRANULARITY_MS), deadline: None };
        timer.restart(now);
        Ok(timer)
    }

    /// KATO, rounded up; 0 for none.
    pub const fn timeout_ms(&self) -> u32 {
        self.timeout_ms
    }

    /// Starts the timeout again.
    pub const fn restart(&mut self, now: u64) {
        self.deadline = match self.timeout_ms {
            0 => None,
            ms => Some(now.saturating_add(ms as u64 * 1_000_000)),
        };
    }

    /// The time at which the timer expires, if it is not restarted.
    pub const fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Whether the timer has expired.
    pub const fn is_expired(&self, now: u64) -> bool {
        match self.deadline {
            Some(deadline) => now >= deadline,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_timer_expires_unless_it_is_restarted() {
        let mut timer = KeepAlive::new(1500, 7).unwrap();
        assert_eq!((timer.timeout_ms(), timer.deadline()), (2000, Some(2 * SECOND + 7)));
        assert!(!timer.is_expired(2 * SECOND + 6) && timer.is_expired(2 * SECOND + 7));
        timer.restart(SECOND);
        assert!(!timer.is_expired(3 * SECOND - 1) && timer.is_expired(3 * SECOND));
    }

    #[test]
    fn no_timeout_never_expires_and_an_endless_one_is_refused() {
        let timer = KeepAlive::new(0, 0).unwrap();
        assert!(timer.deadline().is_none() && !timer.is_expired(u64::MAX));
        assert_eq!(KeepAlive::new(TIMEOUT_MS_MAX, u64::MAX - 1).unwrap().deadline(), Some(u64::MAX));
        assert_eq!(KeepAlive::new(u32::MAX, 0), Err(Code::KEEP_ALIVE_INVALID));
    }
}
