//! A reactor's part of a bucket: its lease, and the lanes that wait for more. Reactor context.
//!
//! **Leases.** A reactor takes more tokens from the bucket than the current request costs, so that the next requests need no
//! atomic operation. While lanes wait on this reactor, the extra is at most what the waiting requests cost, and at most this
//! reactor's share (by waiting lanes) of the total that may be leased; when no lane waits any more, the rest is returned. While
//! no lane waits on any reactor, the extra is an [`AHEAD`]th of the available tokens. The nearer the limit, the smaller that
//! is, so a limit that is not reached costs next to nothing. Lanes borrow a part of it ([`crate::Lane`]), in equal parts.
//!
//! **Turns.** Waiting lanes form a ring. The first lane asks until its deficit is used up, and then goes to the end; each time
//! that a lane comes to the front, it gets a quantum. So requests of all sizes are weighed by their cost.
//!
//! **Pace.** Reactors poll at different moments, and a reactor that polls more often would get more. So each reactor keeps its
//! own time: taking tokens moves that time forward by their cost, times the number of all waiting lanes, divided by the number
//! of lanes that wait on this reactor. While that time is ahead of the clock, the reactor leaves available tokens to the other
//! reactors, unless no reactor takes them for [`LEFT_OVER`].

use crate::bucket::{Bucket, LEASES, SLACK, nanos_up};
use crate::tariff::FRACTION;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Minimum time between two reads of a sold-out bucket, in nanoseconds: at high rates, a reactor takes the tokens of this whole
/// time at once.
const GRAIN: u64 = 100_000;
/// Any reactor may take tokens that no reactor has taken for this time, in nanoseconds. The time is well below
/// [`crate::SLACK`], after which tokens are lost.
const LEFT_OVER: u64 = 250_000;
/// Upper bound of the distance between a reactor's pace and the clock, in nanoseconds. Shortfalls from before that are
/// forgotten.
const PACE_SPAN: u64 = 20_000_000;
/// The fraction of a bucket's tokens that a reactor leases while no lane waits, and the largest fraction of the total
/// that may be leased.
const AHEAD: u64 = 8;
/// The largest fraction of a lease that a lane may borrow.
const LENT: u64 = 4;
/// The request that a lane's quantum pays for, in bytes.
const QUANTUM: u64 = 4 << 10;
const _: () = assert!(2 * LEFT_OVER <= SLACK, "tokens are left over long before they are lost");
const _: () = assert!(2 * GRAIN <= LEFT_OVER, "a reactor reads the bucket again before tokens are left over");
const _: () = assert!(LENT > 1, "a loan leaves a part of the lease");
/// Upper bound of the rounding errors of a lease and its loans, in nanoseconds: fractions are kept, but not reserved.
const ROUNDING: u64 = 16;

/// Wakes lanes.
pub trait Wheel {
    /// Identifies the waiter that owns a lane.
    type Waiter;
    /// Identifies a pending wake-up.
    type Timer;

    /// Wakes the waiter now.
    fn wake(&mut self, waiter: Self::Waiter);

    /// Wakes the waiter at a time in nanoseconds.
    fn wake_at(&mut self, waiter: Self::Waiter, at: u64) -> Self::Timer;

    /// Cancels a wake-up that is still pending.
    fn cancel(&mut self, timer: Self::Timer);
}

struct Waiting<W> {
    lane: u64,
    who: W,
    /// The remaining cost of this turn, in 2^-16 ns; below zero, the excess that it has taken.
    deficit: i64,
}

struct Alarm<T> {
    lane: u64,
    at: u64,
    timer: T,
}

/// A reactor's part of a bucket. See the file's head.
pub struct Share<W, T> {
    bucket: Arc<Bucket>,
    version: u64,
    /// Bytes and cost of the last request: most requests have one size.
    last: (u64, u64),
    /// The lease: the cost that the reactor may spend without reading the bucket, in 2^-16 ns.
    lease: u64,
    /// Upper bound of the part of the lease that lanes have borrowed, in 2^-16 ns.
    lent: u64,
    /// The part of lease and loans that the bucket has recorded, in nanoseconds.
    reserved: u64,
    /// The reactor's own time; see **Pace** at the head of this file.
    pace: u64,
    /// No tokens are available before this time.
    not_before: u64,
    ring: VecDeque<Waiting<W>>,
    alarm: Option<Alarm<T>>,
}

impl<W, T> fmt::Debug for Share<W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("Share");
        s.field("bucket", &self.bucket).field("waiting", &self.ring.len()).finish_non_exhaustive()
    }
}

impl<W: Copy, T> Share<W, T> {
    /// Creates a share of `bucket`, without a lease.
    pub fn new(bucket: Arc<Bucket>) -> Self {
        Self {
            version: bucket.version(),
            last: (0, bucket.cost().of(0)),
            bucket,
            lease: 0,
            lent: 0,
            reserved: 0,
            pace: 0,
            not_before: 0,
            ring: VecDeque::new(),
            alarm: None,
        }
    }

    /// The bucket.
    pub const fn bucket(&self) -> &Arc<Bucket> {
        &self.bucket
    }

    /// The cost of a request of `bytes` bytes.
    #[inline]
    pub(crate) fn cost(&mut self, bytes: u64) -> u64 {
        if self.last.0 != bytes {
            self.last = (bytes, self.bucket.cost().of(bytes));
        }
        self.last.1
    }

    /// Takes the cost of a request from the lease. Returns `false` if the lease is too small, lanes wait, or the price has
    /// changed.
    #[inline]
    pub(crate) fn spend(&mut self, bytes: u64) -> bool {
        let cost = self.cost(bytes);
        let is_paid = self.lease >= cost && self.ring.is_empty() && self.version == self.bucket.version();
        if is_paid {
            self.lease -= cost;
        }
        is_paid
    }

    /// Takes back the cost of a request for which another bucket's lease was too small.
    pub(crate) fn take_back(&mut self, bytes: u64) {
        self.lease += self.cost(bytes);
    }

    /// The number of requests of this size that may be prepaid for one of `lanes` lanes.
    pub(crate) fn payable(&mut self, bytes: u64, lanes: u64) -> u64 {
        let part = ((LEASES / AHEAD) << FRACTION) / lanes;
        part.min(self.lease / LENT) / self.cost(bytes).max(1)
    }

    /// Prepays as many requests as [`Share::payable`] allowed; returns the cost of each.
    pub(crate) fn lend(&mut self, bytes: u64, requests: u64) -> u64 {
        let cost = self.cost(bytes);
        debug_assert!(cost * requests <= self.lease / LENT, "a lane borrows more than its part of the lease");
        self.lease -= cost * requests;
        self.lent += cost * requests;
        self.check_invariants();
        cost
    }

    /// Returns whether `lane` may take this cost now, and records when to ask again if not.
    #[inline]
    pub(crate) fn try_admit(&mut self, lane: u64, cost: u64, now: u64) -> bool {
        if self.version != self.bucket.version() {
            self.follow_change();
        }
        if self.ring.front().is_some_and(|first| first.lane != lane) {
            return false;
        }
        self.lease >= cost || (self.not_before <= now && self.has_tokens(now))
    }

    #[cold]
    fn follow_change(&mut self) {
        self.version = self.bucket.version();
        self.last = (0, self.bucket.cost().of(0));
        self.not_before = 0;
        self.pace = 0;
        self.return_lease();
    }

    /// Whether the bucket has tokens for this reactor. If not, records when to read the bucket again.
    fn has_tokens(&mut self, now: u64) -> bool {
        let begin = self.bucket.free_from(now);
        let others_wait = self.bucket.waiting() > self.ring.len() as u64;
        let again = if begin > now {
            begin
        } else if others_wait && self.pace > now && begin + LEFT_OVER > now {
            self.pace.min(begin + LEFT_OVER)
        } else {
            return true;
        };
        self.not_before = again.max(now + GRAIN);
        false
    }

    /// Takes the cost that [`Share::try_admit`] admitted; `behind` requests of its lane wait behind it. Returns `false` if
    /// another reactor took the tokens first.
    #[inline]
    pub(crate) fn take(&mut self, cost: u64, behind: u64, now: u64) -> bool {
        if let Some(rest) = self.lease.checked_sub(cost) {
            self.lease = rest;
            return true;
        }
        let need = nanos_up(cost - self.lease);
        let waits_here = behind + (self.ring.len() as u64).saturating_sub(1);
        let here = self.ring.len().max(1) as u64;
        let waiting = self.bucket.waiting();
        let everywhere = waiting.max(here);
        let room = now.saturating_sub(self.bucket.free_from(now)).saturating_sub(need);
        let extra = if waits_here > 0 {
            nanos_up(cost).saturating_mul(waits_here).min(LEASES * here / everywhere).min(room)
        } else if waiting == 0 && room.min(LEASES) / AHEAD >= need {
            room.min(LEASES) / AHEAD
        } else {
            // Lanes of other reactors wait for the tokens, or the extra would not pay for another request of this cost.
            0
        };
        let (before, kept) = (self.reserved, self.kept());
        let extra = if extra > 0 || before > kept { self.bucket.lease(before, kept, extra) } else { 0 };
        let Ok(taken) = self.bucket.take(need, extra, now) else {
            // Another reactor may have the room that the unspent lease had, so the lease cannot be recorded again.
            self.reserved = kept + extra;
            self.return_lease();
            self.not_before = now + GRAIN;
            return false;
        };
        debug_assert!(
            (need..=need + extra).contains(&taken),
            "{taken} ns were taken, not {need} to {extra} more"
        );
        self.reserved = kept + taken - need;
        if self.reserved < kept + extra {
            self.bucket.lease(kept + extra, self.reserved, 0);
        }
        self.lease = self.lease + (taken << FRACTION) - cost;
        let step = if everywhere == here {
            taken.min(1 << 60)
        } else {
            (u128::from(taken) * u128::from(everywhere) / u128::from(here)).min(1 << 60) as u64
        };
        let span = PACE_SPAN.max(2 * step);
        self.pace = self.pace.clamp(now.saturating_sub(span), now + span) + step;
        self.check_invariants();
        true
    }

    /// Returns the taken cost, because another bucket had no tokens.
    pub(crate) fn give_back(&mut self, cost: u64) {
        self.lease += cost;
        self.return_lease();
    }

    /// Adds a waiting lane. `debt` is its debt from its last wait.
    pub(crate) fn join(&mut self, lane: u64, who: W, debt: i64) {
        debug_assert!(self.ring.iter().all(|s| s.lane != lane), "a lane has one place in the ring");
        self.bucket.begin_waiting();
        self.ring.push_back(Waiting { lane, who, deficit: debt.min(0) });
        self.next_turn();
        self.check_invariants();
    }

    /// Removes a waiting lane and returns its debt.
    pub(crate) fn leave(&mut self, lane: u64) -> i64 {
        let at = self.ring.iter().position(|s| s.lane == lane).expect("the lane waits in this ring");
        let left = self.ring.remove(at).expect("just found");
        self.bucket.end_waiting(1);
        self.next_turn();
        self.check_invariants();
        left.deficit.min(0)
    }

    /// Records that the first lane, which is `lane`, has taken this cost.
    pub(crate) fn served(&mut self, lane: u64, cost: u64) {
        let first = self.ring.front_mut().expect("the lane waits in this ring");
        debug_assert_eq!(first.lane, lane, "only the first lane of the ring takes tokens");
        first.deficit = first.deficit.saturating_sub_unsigned(cost);
        if first.deficit <= 0 {
            self.ring.rotate_left(1);
            self.next_turn();
        }
        self.check_invariants();
    }

    /// Brings a lane that may take tokens to the front.
    fn next_turn(&mut self) {
        if self.ring.front().is_none_or(|first| first.deficit > 0) {
            return;
        }
        let quantum = self.bucket.cost().of(QUANTUM).clamp(1, i64::MAX as u64) as i64;
        for _ in 0..self.ring.len() {
            let first = self.ring.front_mut().expect("the ring is not empty");
            first.deficit = first.deficit.saturating_add(quantum);
            if first.deficit > 0 {
                return;
            }
            self.ring.rotate_left(1);
        }
        // All lanes owe more than a quantum: apply as many rounds as the smallest debt needs at once.
        let least = self.ring.iter().map(|s| s.deficit).max().expect("the ring is not empty");
        let rounds = least.unsigned_abs() / quantum.unsigned_abs() + 1;
        let gain = i64::try_from(rounds).unwrap_or(i64::MAX).saturating_mul(quantum);
        self.ring.iter_mut().for_each(|s| s.deficit = s.deficit.saturating_add(gain));
        let first = self.ring.iter().position(|s| s.deficit > 0).expect("the lane with the smallest debt");
        self.ring.rotate_left(first);
    }

    /// Schedules the wake-up of the first lane, and returns tokens that no lane waits for.
    pub(crate) fn settle(&mut self, now: u64, wheel: &mut impl Wheel<Waiter = W, Timer = T>) {
        let Some(first) = self.ring.front() else {
            self.return_lease();
            if let Some(alarm) = self.alarm.take() {
                wheel.cancel(alarm.timer);
            }
            return;
        };
        let (lane, who) = (first.lane, first.who);
        let is_empty = self.lease >> FRACTION == 0;
        if self.not_before <= now && is_empty && self.bucket.free_from(now) > now {
            self.has_tokens(now);
        }
        let at = self.not_before;
        if self.alarm.as_ref().is_some_and(|alarm| alarm.lane == lane && alarm.at == at && at > now) {
            return;
        }
        if let Some(alarm) = self.alarm.take() {
            wheel.cancel(alarm.timer);
        }
        debug_assert!(self.alarm.is_none(), "a share has one alarm, and it is cancelled before the next");
        if at > now {
            self.alarm = Some(Alarm { lane, at, timer: wheel.wake_at(who, at) });
        } else {
            wheel.wake(who);
        }
    }
}

impl<W, T> Share<W, T> {
    /// Takes back a lane's loan, of which `left` is unused.
    pub(crate) fn end_loan(&mut self, lent: u64, left: u64) {
        debug_assert!(
            left <= lent && lent <= self.lent,
            "{left} are left of a loan of {lent}, in {}",
            self.lent
        );
        self.lent -= lent;
        self.lease += left;
        self.check_invariants();
    }

    /// Checks, in debug builds, the invariants between two changes.
    #[inline]
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let held = (self.lease + self.lent) >> FRACTION;
        assert!(
            held <= self.reserved + ROUNDING,
            "{held} ns are leased or lent, but {} recorded",
            self.reserved
        );
        let leased = self.bucket.leased();
        assert!(self.reserved <= leased, "{} ns of the bucket's {leased} are leased here", self.reserved);
        let (here, everywhere) = (self.ring.len() as u64, self.bucket.waiting());
        assert!(here <= everywhere, "{here} lanes wait here, and {everywhere} on all reactors");
        let first = self.ring.front().map(|first| first.deficit);
        assert!(first.is_none_or(|deficit| deficit > 0), "the first lane may take nothing: {first:?}");
    }

    /// The part of the reservation that covers the lanes' loans, in nanoseconds.
    fn kept(&self) -> u64 {
        // The rounded loans may add up to more than the reservation.
        (self.lent >> FRACTION).min(self.reserved)
    }

    fn return_lease(&mut self) {
        let whole = self.lease >> FRACTION;
        if whole > 0 {
            self.lease -= whole << FRACTION;
            self.bucket.give_back(whole);
        }
        let kept = self.kept();
        if self.reserved > kept {
            self.bucket.lease(self.reserved, kept, 0);
            self.reserved = kept;
        }
        self.check_invariants();
    }
}

impl<W, T> Drop for Share<W, T> {
    fn drop(&mut self) {
        self.return_lease();
        // Each lane holds its shares, and leaves the ring before it is dropped.
        let is_unused = self.ring.is_empty() && self.lent == 0 && self.reserved == 0;
        assert!(is_unused || std::thread::panicking(), "a share is dropped with lanes or loans");
    }
}
