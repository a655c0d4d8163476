//! Back-pressure: which changes wait while the backlog is long, and in which order. Any context.
//!
//! The *backlog* is the log whose entries no flush has merged yet. While it is below a quarter of the limit, changes go at once,
//! and nothing is counted. Above, a change pays for its bytes with *credit*: each byte that a flush merges is a byte of credit.
//! The price rises from nothing to one byte for each byte, at three eighths of the limit: from there on, changes go as fast as
//! flushes merge. Credit of times without demand is kept, up to a sixteenth of the limit.
//!
//! Changes that cannot pay wait in the ring of volumes, which take turns by bytes (deficit round robin). In each period from the
//! begin of one flush to that of the next, each volume has a *share* for which it pays nothing and does not wait: all shares
//! together are a sixteenth of the limit. So a volume that writes little does not notice one that writes as fast as it can.
//!
//! The backlog stays below half of the limit, 3/8 + 1/16 + 1/16, and one change. The log itself becomes shorter at the end of a
//! flush only. Until then it has, beside the backlog, what the flush has merged, which is less than half of the limit, too.

use crate::active::Op;
use crate::pool::Pool;
use crate::{BLOCK, UNIT};
use aryk_slots::Key;

/// The price of one byte for each byte.
const WHOLE: u64 = 256;

/// Bytes that a volume may have admitted when it has its turn, and by which it has more at its next turn.
const QUANTUM: u64 = 256 << 10;

/// A change counts for so many quanta at most when volumes take turns.
const QUANTA_MAX: u64 = 16;

/// Changes that one turn admits, or looks at.
const LOOKS_PER_TURN: u32 = 4096;

/// What changes pay.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Bytes of the log that are not flushed, at most.
    limit: u64,
    /// Bytes of the log whose entries are merged, of [`crate::log::Log::written_bytes`].
    merged: u64,
    /// Bytes that changes may pay with; negative by less than a change.
    credit: i64,
    /// The number of the period.
    period: u64,
    /// What is left of all shares of the period.
    shares: u64,
    /// Volumes that have used their share, or tried to, in this period and in the one before.
    volumes: [u64; 2],
}

/// What a volume has used of its share.
#[derive(Debug, Default)]
pub(crate) struct Share {
    period: u64,
    bytes: u64,
}

impl Pressure {
    pub(crate) const fn new(limit: u64) -> Self {
        let reserve = limit / 16;
        Self { limit, merged: 0, credit: reserve as i64, period: 1, shares: reserve, volumes: [0; 2] }
    }

    /// The backlog from which on changes pay.
    pub(crate) const fn start(&self) -> u64 {
        self.limit / 4
    }

    /// What a byte costs at this backlog, in parts of [`WHOLE`].
    fn price(&self, backlog: u64) -> u64 {
        let above = backlog.saturating_sub(self.start());
        (above.saturating_mul(WHOLE) / (self.limit / 8).max(1)).min(WHOLE)
    }

    /// A flush begins.
    pub(crate) const fn begin_period(&mut self) {
        self.period += 1;
        self.shares = self.limit / 16;
        self.volumes = [0, self.volumes[0]];
    }

    /// A flush has merged the entries of the log up to here.
    pub(crate) fn merged_up_to(&mut self, bytes: u64) {
        let more = bytes.saturating_sub(self.merged);
        self.merged += more;
        self.credit = self.credit.saturating_add_unsigned(more).min((self.limit / 16) as i64);
    }

    /// Takes bytes from the share of a volume, if it has as many. One share is left for a volume that comes.
    fn take_share(&mut self, share: &mut Share, bytes: u64) -> bool {
        if share.period != self.period {
            *share = Share { period: self.period, bytes: 0 };
            self.volumes[0] += 1;
        }
        let all = (self.volumes[0] + 1).max(self.volumes[1]);
        let has = share.bytes + bytes <= self.limit / 16 / all && bytes <= self.shares;
        if has {
            share.bytes += bytes;
            self.shares -= bytes;
        }
        has
    }

    /// Pays for bytes, if there is credit.
    fn try_pay(&mut self, backlog: u64, bytes: u64) -> bool {
        let price = self.price(backlog);
        if price > 0 && self.credit <= 0 {
            return false;
        }
        self.credit -= (bytes * price / WHOLE) as i64;
        true
    }
}

impl Pool {
    /// Bytes of the log that no flush has merged.
    fn backlog(&self) -> u64 {
        self.log.written_bytes - self.pressure.merged + self.log.queued_bytes
    }

    /// What a byte that is written costs now: percent of a byte that is merged.
    pub(crate) fn price_percent(&self) -> u64 {
        self.pressure.price(self.backlog()) * 100 / WHOLE
    }

    /// Bytes that a change adds to the log. Zeroes need little.
    pub(crate) fn log_bytes_of(&self, key: Key) -> u64 {
        let request = self.requests.get(key).expect("the change is under way");
        if request.op == Op::Zero { 4 * u64::from(BLOCK) } else { request.units * u64::from(UNIT) }
    }

    /// Whether the log stays below its limit with so many more bytes. A change that is larger than the rest of the limit goes
    /// when the backlog is short.
    pub(crate) fn is_below_limit(&self, bytes: u64) -> bool {
        let unflushed = self.unflushed_bytes();
        // An eighth is for the headers of frames, which are whole blocks.
        let queued = (self.log.queued_bytes + bytes) / 8 * 9 + u64::from(self.settings.frame_bytes_max);
        unflushed + queued <= self.pressure.limit || self.backlog() <= self.pressure.start()
    }

    /// Whether a change that has just arrived, for which the log has room, goes at once. It has paid then.
    pub(crate) fn try_pass(&mut self, key: Key) -> bool {
        let backlog = self.backlog();
        if self.ring.is_empty() && self.pressure.price(backlog) == 0 {
            return true;
        }
        let (bytes, volume) = (self.log_bytes_of(key), self.requests.get(key).expect("under way").volume);
        let runtime = self.runtimes.get_mut(&volume).expect("the volume exists while it has requests");
        self.pressure.take_share(&mut runtime.share, bytes)
            || self.ring.is_empty() && self.pressure.try_pay(backlog, bytes)
    }

    /// Gives waiting changes their turn. Returns whether more may go without input.
    pub(crate) fn admit_waiting(&mut self) -> bool {
        for _ in 0..LOOKS_PER_TURN {
            let Some(&volume) = self.ring.front() else { return false };
            let key = *self.runtimes[&volume].queue.front().expect("a volume in the ring has a request");
            if !self.can_admit(key) {
                return false;
            }
            let cost = self.log_bytes_of(key);
            if !self.has_turn(cost) {
                self.ring.rotate_left(1);
                continue;
            }
            if !self.has_unreserved(key) {
                self.ring.pop_front();
                self.reserves.parked.push_back(volume);
                continue;
            }
            let backlog = self.backlog();
            if !self.pressure.try_pay(backlog, cost) {
                return false;
            }
            self.admit_first(cost);
            self.admit(key);
        }
        !self.ring.is_empty()
    }

    /// Whether the first volume of the ring may have a change of this cost admitted.
    fn has_turn(&mut self, cost: u64) -> bool {
        let runtime = self.runtimes.get_mut(&self.ring[0]).expect("the volume exists while it has requests");
        let cost = cost.min(QUANTA_MAX * QUANTUM);
        if runtime.deficit < cost {
            runtime.deficit += QUANTUM;
        }
        runtime.deficit >= cost
    }

    /// Takes the first change of the first volume of the ring out of it.
    fn admit_first(&mut self, cost: u64) {
        let runtime = self.runtimes.get_mut(&self.ring[0]).expect("the volume exists while it has requests");
        runtime.deficit = runtime.deficit.saturating_sub(cost);
        runtime.queue.pop_front();
        self.waiting -= 1;
        match runtime.queue.front().copied() {
            None => {
                runtime.is_in_ring = false;
                self.ring.pop_front();
            }
            Some(next) => {
                let deficit = runtime.deficit;
                if deficit < self.log_bytes_of(next).min(QUANTA_MAX * QUANTUM) {
                    self.ring.rotate_left(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_price_rises_from_nothing_to_one_for_one() {
        let pressure = Pressure::new(256 * MIB);
        let prices = [0, 64, 72, 80, 96, 200].map(|backlog| pressure.price(backlog * MIB));
        assert_eq!(prices, [0, 0, WHOLE / 4, WHOLE / 2, WHOLE, WHOLE]);
    }

    #[test]
    fn changes_go_as_fast_as_flushes_merge_when_the_credit_is_used() {
        let mut pressure = Pressure::new(256 * MIB);
        let full = 96 * MIB;
        let mut paid = 0;
        while pressure.try_pay(full, MIB) {
            paid += 1;
        }
        assert_eq!(paid, 16, "the credit of the beginning");
        for merged in 1..=100 {
            pressure.merged_up_to(merged * MIB);
            assert!(pressure.try_pay(full, MIB), "a byte for each that is merged");
            assert!(!pressure.try_pay(full, MIB), "and no more");
        }
        assert!(pressure.try_pay(64 * MIB, MIB), "below the start nothing is paid");
        // A change that is larger than all credit goes, and what follows waits until it is paid.
        pressure.merged_up_to(101 * MIB);
        assert!(pressure.try_pay(full, 40 * MIB));
        pressure.merged_up_to(140 * MIB);
        assert!(!pressure.try_pay(full, 1));
        pressure.merged_up_to(141 * MIB);
        assert!(pressure.try_pay(full, 1));
    }

    #[test]
    fn each_volume_has_a_share_and_one_is_left() {
        let mut pressure = Pressure::new(256 * MIB);
        let mut shares: Vec<Share> = (0..100).map(|_| Share::default()).collect();
        let take_all = |pressure: &mut Pressure, share: &mut Share| {
            let mut taken = 0;
            while pressure.take_share(share, 4096) {
                taken += 4096;
            }
            taken
        };
        assert_eq!(take_all(&mut pressure, &mut shares[0]), 8 * MIB, "half of all");
        assert!(take_all(&mut pressure, &mut shares[1]) >= 5 * MIB, "a third");
        for _ in 0..3 {
            pressure.begin_period();
            let all: Vec<u64> = shares.iter_mut().map(|share| take_all(&mut pressure, share)).collect();
            assert!(all.iter().sum::<u64>() <= 16 * MIB);
        }
        pressure.begin_period();
        let all: Vec<u64> = shares.iter_mut().map(|share| take_all(&mut pressure, share)).collect();
        let part = 16 * MIB / 101 / 4096 * 4096;
        assert!(all.iter().all(|&taken| taken >= part), "{all:?}");
    }
}
