//! How often a busy queue looks at its ring. Pure decisions; reactor context.
//!
//! Each look at a ring that the guest is filling takes a cache line away from the guest's core, and each answer takes one back. Under load it is therefore
//! better to look less often and take more at a time: on a memory-speed disk a rest of some microseconds between looks gave half as much
//! throughput again. With one request in flight, however, every rest is lost time, and how long is best depends on the guest, its depth and
//! its speed. So the pace is found by trying: while requests come fast, the queue now and then tries the next longer or shorter rest for a while, and keeps it
//! if more requests came through. A trial in which requests keep coming one at a time ends at once: there is nothing to gather.

use aryk_reactor::Nanos;
use std::time::Duration;

/// One step of the rest.
const STEP: Duration = Duration::from_micros(2);
/// The longest rest, in steps.
const STEPS_MAX: u32 = 6;
/// Requests in one measurement.
const WINDOW: u32 = 512;
/// A measurement that takes longer than this is of a queue too slow to gather.
const WINDOW_TIME_MAX: Duration = Duration::from_millis(3);
/// Measurements between trials.
const HOLD: u32 = 24;
/// Looks after which a trial with one request at each is given up.
const LONELY_LOOKS: u32 = 8;
/// A trial must be better by one part in this many.
const GAIN: u64 = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The rest stays as it is for so many more measurements.
    Hold(u32),
    /// The rest before was this, and a measurement took this long with it.
    Trial { before: u32, took: Duration },
}

/// The pace of one queue.
#[derive(Debug)]
pub struct Pace {
    steps: u32,
    phase: Phase,
    /// Whether the next trial is of a longer rest.
    longer: bool,
    next_look: Nanos,
    started: Nanos,
    requests: u32,
    looks: u32,
}

impl Pace {
    /// Of a queue that starts now.
    pub const fn new(now: Nanos) -> Self {
        Self {
            steps: 0,
            phase: Phase::Hold(0),
            longer: true,
            next_look: now,
            started: now,
            requests: 0,
            looks: 0,
        }
    }

    /// When the ring is to be looked at next.
    #[inline]
    pub const fn next_look(&self) -> Nanos {
        self.next_look
    }

    /// A look at time `now` found `requests`, at least one.
    #[inline]
    pub fn found(&mut self, now: Nanos, requests: u32) {
        self.requests += requests;
        self.looks += 1;
        if self.requests >= WINDOW || (self.looks == LONELY_LOOKS && self.requests == LONELY_LOOKS) {
            self.measured(now);
        }
        self.next_look = now.after(STEP * self.steps);
    }

    fn measured(&mut self, now: Nanos) {
        let took = now.since(self.started);
        if self.requests < WINDOW {
            // Eight looks in a row found one request each.
            if self.steps > 0 {
                self.settle(0, HOLD);
                self.restart(now);
            }
            return;
        }
        let slow = took > WINDOW_TIME_MAX;
        match self.phase {
            _ if slow => self.settle(0, 0),
            Phase::Hold(0) => self.try_next(took),
            Phase::Hold(left) => self.phase = Phase::Hold(left - 1),
            Phase::Trial { before, took: before_took } => {
                let gained = took.as_nanos() as u64 * GAIN < before_took.as_nanos() as u64 * (GAIN - 1);
                if gained {
                    self.try_next(took);
                } else {
                    self.longer = !self.longer;
                    self.settle(before, HOLD);
                }
            }
        }
        self.restart(now);
    }

    fn try_next(&mut self, took: Duration) {
        let before = self.steps;
        if before == 0 {
            self.longer = true;
        } else if before == STEPS_MAX {
            self.longer = false;
        }
        self.steps = if self.longer { before + 1 } else { before - 1 };
        self.phase = Phase::Trial { before, took };
    }

    const fn settle(&mut self, steps: u32, hold: u32) {
        self.steps = steps;
        self.phase = Phase::Hold(hold);
    }

    const fn restart(&mut self, now: Nanos) {
        self.started = now;
        self.requests = 0;
        self.looks = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest with `depth` requests in flight, on a core of its own: it notices an answer `notice` ns after, and needs `each` ns to make a request. A look
    /// costs `look` ns of the queue's time and, as it takes the line away, of the guest's. Returns requests per second over the second half, and the pace.
    fn run(depth: u32, notice: u64, each: u64, look: u64, looks: u32) -> (f64, Pace) {
        let mut pace = Pace::new(Nanos(0));
        let (mut now, mut guest_at, mut ready, mut owed) = (0u64, 0u64, depth, 0u32);
        let (mut done, mut half) = (0u64, (0u64, 0u64));
        for i in 0..looks {
            now = (now + look).max(pace.next_look().0);
            // The guest turns the answers it owes into requests, one after another.
            while owed > 0 && guest_at + each <= now {
                guest_at += each;
                owed -= 1;
                ready += 1;
            }
            if ready > 0 {
                pace.found(Nanos(now), ready);
                now += u64::from(ready) * 50;
                if owed == 0 {
                    guest_at = now + notice;
                }
                guest_at += look;
                (done, owed, ready) = (done + u64::from(ready), owed + ready, 0);
            }
            if i == looks / 2 {
                half = (now, done);
            }
        }
        ((done - half.1) as f64 * 1e9 / (now - half.0) as f64, pace)
    }

    #[test]
    fn one_request_at_a_time_is_never_kept_waiting() {
        let (rate, pace) = run(1, 400, 300, 100, 2_000_000);
        let alone = 1e9 / (400.0 + 300.0 + 100.0 + 50.0);
        assert!(pace.steps <= 1 && rate > 0.9 * alone, "{rate} of {alone}");
    }

    #[test]
    fn a_deep_queue_is_gathered() {
        let (rate, pace) = run(32, 300, 200, 400, 2_000_000);
        assert!(pace.steps >= 2 || matches!(pace.phase, Phase::Trial { before: 2.., .. }), "{pace:?}");
        // Without rests the guest loses 400 ns for each request to our looks.
        assert!(rate > 1.5 * 1e9 / 600.0, "{rate}");
    }

    #[test]
    fn a_slow_queue_never_rests() {
        let mut pace = Pace::new(Nanos(0));
        for i in 1..100_000 {
            pace.found(Nanos(i * 50_000), 4);
            assert_eq!(pace.steps, 0);
        }
    }
}
