//! The interval between polls of a busy queue's ring. Pure decisions; reactor context.
//!
//! Each poll of a ring that the guest is filling takes a cache line away from the guest's core, and each completion takes
//! one back. Under load it is therefore better to poll less often and take more requests at a time: on a memory-speed disk a
//! rest of some microseconds between polls gave half as much throughput again. With one request in flight, however, every
//! rest is lost time, and the best rest depends on the guest, its depth and its speed. So trials find the pace: while
//! requests come fast, the queue now and then tries a longer or shorter rest, and keeps it if more requests came through.
//! The step follows the measured time between polls. A trial in which requests keep coming one at a time ends at once, and so
//! does one that is half as slow again. What a failed trial lost decides when the next one may begin: trials cost one percent
//! of the time at most.

use aryk_reactor::Nanos;

/// The longest rest, in nanoseconds.
const REST_MAX: u64 = 12_000;
/// The shortest and the longest step between rests.
const STEP_MIN: u64 = 250;
const STEP_MAX: u64 = 4_000;
/// Number of widths of a step: half of the time between polls, and each width twice the one before. A small step may gain
/// nothing where a wider one does: gathering begins when the guest makes several requests between two polls. So after a
/// failure the next step is wider, and after the widest the first.
const WIDTHS: u32 = 4;
/// Requests in one measurement.
const WINDOW: u32 = 512;
/// A measurement that takes longer than this is of a queue too slow to gather.
const WINDOW_TIME_MAX: u64 = 3_000_000;
/// Measurements between trials, at least and at most.
const HOLD: u32 = 24;
const HOLD_MAX: u64 = 10_000;
/// Polls after which a trial with one request at each is given up.
const LONELY_LOOKS: u32 = 8;
/// A trial must be better by one part in this many.
const GAIN: u64 = 32;
/// Trials may cost one part in this many of the time.
const COST: u64 = 100;
const _: () = assert!(STEP_MIN <= STEP_MAX && STEP_MAX <= REST_MAX, "a step leads to a rest in bounds");
const _: () =
    assert!(LONELY_LOOKS < WINDOW && HOLD as u64 <= HOLD_MAX && GAIN > 1, "the trials of the file's head");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The rest stays as it is for so many more measurements.
    Hold(u32),
    /// The rest before was this, and a measurement took this long with it.
    Trial { before: u64, took: u64 },
}

/// The pace of one queue. Times are nanoseconds.
#[derive(Debug)]
pub struct Pace {
    rest: u64,
    phase: Phase,
    /// Whether the next trial is of a longer rest.
    longer: bool,
    /// How wide the next step is: below [`WIDTHS`].
    width: u32,
    next_look: Nanos,
    started: Nanos,
    /// When a trial has failed, because it has taken too long.
    give_up_at: Nanos,
    requests: u32,
    looks: u32,
}

impl Pace {
    /// The pace of a queue that starts now.
    pub const fn new(now: Nanos) -> Self {
        Self {
            rest: 0,
            phase: Phase::Hold(0),
            longer: true,
            width: 0,
            next_look: now,
            started: now,
            give_up_at: Nanos(u64::MAX),
            requests: 0,
            looks: 0,
        }
    }

    /// When the ring is to be polled next.
    #[inline]
    pub const fn next_look(&self) -> Nanos {
        self.next_look
    }

    /// A poll at time `now` found `requests`, at least one.
    #[inline]
    pub fn found(&mut self, now: Nanos, requests: u32) {
        self.requests += requests;
        self.looks += 1;
        let is_lonely = self.looks == LONELY_LOOKS && self.requests == LONELY_LOOKS;
        if self.requests >= WINDOW || is_lonely || now >= self.give_up_at {
            self.measured(now);
        }
        self.next_look = Nanos(now.0 + self.rest);
    }

    #[cold]
    fn measured(&mut self, now: Nanos) {
        let took = now.ns_since(self.started);
        match self.phase {
            _ if self.requests >= WINDOW && took > WINDOW_TIME_MAX => self.settle(0, 0),
            Phase::Trial { before, took: before_took } if self.requests >= WINDOW => {
                if took * GAIN < before_took * (GAIN - 1) {
                    self.try_next(took);
                } else {
                    self.fail(before, took.saturating_sub(before_took), before_took);
                }
            }
            Phase::Trial { before, took: before_took } if now >= self.give_up_at => {
                let usual = before_took * u64::from(self.requests) / u64::from(WINDOW);
                self.fail(before, took.saturating_sub(usual), before_took);
            }
            // Eight polls in a row found one request each.
            Phase::Hold(_) | Phase::Trial { .. } if self.requests < WINDOW => {
                if self.rest == 0 {
                    return;
                }
                // A wider step may gather where this one did not.
                self.width = (self.width + 1) % WIDTHS;
                self.settle(0, HOLD);
            }
            Phase::Hold(0) => self.try_next(took),
            Phase::Hold(left) => self.phase = Phase::Hold(left - 1),
            Phase::Trial { .. } => unreachable!("a trial of a whole window, or of less"),
        }
        (self.started, self.requests, self.looks) = (now, 0, 0);
        self.give_up_at = match self.phase {
            Phase::Trial { took, .. } => Nanos(now.0 + took + took / 2),
            Phase::Hold(_) => Nanos(u64::MAX),
        };
        debug_assert!(self.rest <= REST_MAX, "a rest of {} ns", self.rest);
        debug_assert!(self.width < WIDTHS, "width {} of {WIDTHS}", self.width);
    }

    /// Tries another rest, after a measurement with this one that took so long.
    fn try_next(&mut self, took: u64) {
        let (before, between) = (self.rest, took / u64::from(self.looks.max(1)));
        let step = ((between << self.width) / 2).clamp(STEP_MIN, STEP_MAX);
        if before == 0 {
            self.longer = true;
        } else if before >= REST_MAX {
            self.longer = false;
        }
        self.rest = if self.longer { (before + step).min(REST_MAX) } else { before.saturating_sub(step) };
        self.phase = Phase::Trial { before, took };
    }

    /// A trial was no better, and lost `lost`; a measurement with the rest before takes `took`. The next trial begins when
    /// that loss is a small part of the time between the two.
    fn fail(&mut self, before: u64, lost: u64, took: u64) {
        // Each step is tried both ways.
        if !self.longer || before == 0 {
            self.width = (self.width + 1) % WIDTHS;
        }
        self.longer = !self.longer;
        let hold = (lost * COST).div_ceil(took.max(1)).min(HOLD_MAX);
        self.settle(before, HOLD.max(hold as u32));
    }

    const fn settle(&mut self, rest: u64, hold: u32) {
        self.rest = rest;
        self.phase = Phase::Hold(hold);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest with `depth` requests in flight, on a core of its own: it notices an answer `notice` ns after, and needs
    /// `each` ns to make a request. A look costs `look` ns of the queue's time and, as it takes the line away, of the
    /// guest's. Returns requests per second over the second half, and the pace.
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
        assert!(pace.rest <= STEP_MAX && rate > 0.9 * alone, "{rate} of {alone}");
    }

    #[test]
    fn a_deep_queue_is_gathered() {
        let (rate, pace) = run(32, 300, 200, 400, 2_000_000);
        assert!(pace.rest >= 2_000, "{pace:?}");
        // Without rests the guest loses 400 ns for each request to our looks.
        assert!(rate > 1.5 * 1e9 / 600.0, "{rate}");
    }

    #[test]
    fn a_slow_queue_never_rests() {
        let mut pace = Pace::new(Nanos(0));
        for i in 1..100_000 {
            pace.found(Nanos(i * 50_000), 4);
            assert_eq!(pace.rest, 0);
        }
    }

    /// The part of its time that a queue loses to rests, if requests come `each` at a time, `between` apart, however long it
    /// rests: all rests are lost.
    fn lost(each: u32, between: u64) -> f64 {
        let (mut pace, mut now, mut rested) = (Pace::new(Nanos(0)), 0, 0);
        for _ in 0..2_000_000 {
            now += between;
            if pace.next_look().0 > now - between {
                let rest = pace.next_look().0 - (now - between);
                (now, rested) = (now + rest, rested + rest);
            }
            pace.found(Nanos(now), each);
        }
        rested as f64 / now as f64
    }

    #[test]
    fn trials_cost_one_percent_at_most() {
        for (each, between) in [(2, 400), (4, 300), (16, 1_000), (32, 2_900), (64, 2_900), (32, 500)] {
            let part = lost(each, between);
            assert!(part <= 0.01, "{each} requests each {between} ns: {part}");
            assert!(part > 0.0, "it tries");
        }
    }

    #[test]
    fn steps_become_wider_until_one_gains() {
        let mut pace = Pace::new(Nanos(0));
        let (mut now, mut tried) = (0, Vec::new());
        while tried.len() < 5 {
            now = (now + 1_000).max(pace.next_look().0);
            let was = pace.rest;
            pace.found(Nanos(now), 32);
            if pace.rest > was {
                tried.push(pace.rest);
            }
        }
        assert_eq!(tried, [500, 1_000, 2_000, 4_000, 500]);
    }

    #[test]
    fn a_step_follows_the_time_between_polls() {
        for (between, step) in [(200, STEP_MIN), (1_000, 500), (2_900, 1_450), (60_000, STEP_MAX)] {
            let mut pace = Pace::new(Nanos(0));
            for i in 1..=WINDOW / 32 {
                pace.found(Nanos(u64::from(i) * between), 32);
            }
            assert_eq!((pace.rest, matches!(pace.phase, Phase::Trial { before: 0, .. })), (step, true));
        }
    }
}
