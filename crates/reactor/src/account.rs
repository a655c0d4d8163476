//! A reactor's account of its time, and the work that it runs now. The reactor writes them; any thread may read them.

use crate::{Clock, Nanos};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The work that a reactor runs now, for its watchdog: a kind, and an index within the kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Running(u64);

impl Running {
    pub const MESSAGES: Self = Self(1 << 32);
    pub const TIMERS: Self = Self(2 << 32);
    pub const TASKS: Self = Self(3 << 32);
    pub const KERNEL: Self = Self(4 << 32);
    pub const SIGNALS: Self = Self(5 << 32);

    pub const fn root(index: u32) -> Self {
        Self(6 << 32 | index as u64)
    }

    pub const fn poller(index: u32) -> Self {
        Self(7 << 32 | index as u64)
    }

    pub const fn driver(index: u32) -> Self {
        Self(8 << 32 | index as u64)
    }

    /// A number that is unique on the reactor while the object exists.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The name of the kind, for work without a name of its own.
    pub const fn kind(self) -> &'static str {
        match self.0 >> 32 {
            1 => "a message",
            2 => "a timer",
            3 => "a task",
            4 => "its call to the kernel",
            5 => "signals to guests",
            6 => "a root",
            7 => "a poller",
            8 => "a driver",
            _ => "its own work",
        }
    }
}

/// Counters of one reactor, which is their only writer.
#[derive(Default, Debug)]
pub(crate) struct Account {
    turns: AtomicU64,
    busy_ns: AtomicU64,
    idle_ns: AtomicU64,
    sleeping_ns: AtomicU64,
    longest_turn_ns: AtomicU64,
    /// When the current turn began; 0 while the reactor sleeps.
    turn_began: AtomicU64,
    /// When the reactor fell asleep; 0 while it is awake.
    fell_asleep: AtomicU64,
    running: AtomicU64,
    members: AtomicU64,
}

/// How a reactor has spent its time since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReactorStats {
    /// Turns that the reactor has run.
    pub turns: u64,
    /// Time of turns with work.
    pub busy: Duration,
    /// Time of turns without work.
    pub idle: Duration,
    /// Time asleep.
    pub sleeping: Duration,
}

fn add(to: &AtomicU64, more: u64) {
    to.store(to.load(Ordering::Relaxed).wrapping_add(more), Ordering::Release);
}

impl Account {
    /// Begins the turn with this number at `now`, and adds the `ns` nanoseconds since the last settlement to the busy or the
    /// idle time.
    #[inline]
    pub fn begin_turn(&self, number: u64, now: Nanos, ns: u64, was_busy: bool) {
        self.settle(ns, was_busy);
        self.turns.store(number, Ordering::Relaxed);
        self.turn_began.store(now.0, Ordering::Relaxed);
    }

    #[inline]
    pub fn settle(&self, ns: u64, was_busy: bool) {
        add(if was_busy { &self.busy_ns } else { &self.idle_ns }, ns);
        if ns > self.longest_turn_ns.load(Ordering::Relaxed) {
            self.longest_turn_ns.store(ns, Ordering::Relaxed);
        }
    }

    /// Returns the longest turn since the last call. A turn that ends during the call may be missed.
    pub fn take_longest_turn(&self) -> Duration {
        Duration::from_nanos(self.longest_turn_ns.swap(0, Ordering::Relaxed))
    }

    pub fn fall_asleep(&self, now: Nanos) {
        debug_assert_eq!(self.fell_asleep.load(Ordering::Relaxed), 0, "the reactor is awake");
        self.turn_began.store(0, Ordering::Relaxed);
        self.fell_asleep.store(now.0, Ordering::Relaxed);
    }

    pub fn wake_up(&self, slept: Duration) {
        // In this order a reader may miss the sleep for a moment, but never counts the sleep twice.
        self.fell_asleep.store(0, Ordering::Relaxed);
        add(&self.sleeping_ns, slept.as_nanos() as u64);
    }

    #[inline]
    pub fn run(&self, what: Running) {
        self.running.store(what.0, Ordering::Relaxed);
    }

    pub fn running(&self) -> Running {
        Running(self.running.load(Ordering::Relaxed))
    }

    /// When the current turn began; `None` while the reactor sleeps.
    pub fn turn_began(&self) -> Option<Nanos> {
        Some(self.turn_began.load(Ordering::Relaxed)).filter(|&at| at > 0).map(Nanos)
    }

    pub fn add_members(&self, by: i64) {
        let now = self.members.load(Ordering::Relaxed).strict_add_signed(by);
        self.members.store(now, Ordering::Relaxed);
    }

    pub fn members(&self) -> u64 {
        self.members.load(Ordering::Relaxed)
    }

    pub fn read(&self, clock: &Clock) -> ReactorStats {
        let time = |t: &AtomicU64| Duration::from_nanos(t.load(Ordering::Acquire));
        let sleeping = time(&self.sleeping_ns);
        let asleep = Some(self.fell_asleep.load(Ordering::Acquire)).filter(|&at| at > 0);
        ReactorStats {
            turns: self.turns.load(Ordering::Relaxed),
            busy: time(&self.busy_ns),
            idle: time(&self.idle_ns),
            sleeping: sleeping + asleep.map_or(Duration::ZERO, |at| clock.now().since(Nanos(at))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_sleep_counts_while_it_lasts() {
        let time = Arc::new(AtomicU64::new(5));
        let clock = Clock::Virtual(Arc::clone(&time));
        let account = Account::default();
        account.begin_turn(1, Nanos(5), 3, true);
        assert_eq!(account.turn_began(), Some(Nanos(5)));
        account.fall_asleep(Nanos(5));
        assert_eq!(account.turn_began(), None);
        time.store(12, Ordering::Relaxed);
        let expected = ReactorStats {
            turns: 1,
            busy: Duration::from_nanos(3),
            idle: Duration::ZERO,
            sleeping: Duration::from_nanos(7),
        };
        assert_eq!(account.read(&clock), expected);
        account.settle(2, false);
        assert_eq!(account.take_longest_turn(), Duration::from_nanos(3));
        assert_eq!(account.take_longest_turn(), Duration::ZERO);
        let expected = ReactorStats { idle: Duration::from_nanos(2), ..expected };
        account.wake_up(Duration::from_nanos(7));
        assert_eq!(account.read(&clock), expected);
    }
}
