//! Rounds that can be compared. The two cores of a virtual machine may be neighbours now, and on different chips a second
//! later; communication through shared memory then differs by a factor of eight, and every result by up to four. So the
//! distance is measured before and after each round: a round in which the distance changed is dropped, and only rounds at
//! the same distance are compared.

use crate::process::{self, BACK_END_CORE};
use anyhow::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Upper bound of rounds, per wanted round.
const TRIES: usize = 3;

/// Rounds at the same distance.
#[derive(Debug)]
pub struct Rounds<T> {
    /// The round trip of a cache line from core to core and back.
    pub round_trip: Duration,
    /// The result of each round.
    pub each: Vec<T>,
}

/// Runs rounds until `wanted` of them have the same distance. At the upper bound, returns the largest group at one
/// distance.
pub fn run_comparable<T>(wanted: usize, mut round: impl FnMut() -> Result<T>) -> Result<Rounds<T>> {
    let mut kinds: Vec<Rounds<T>> = Vec::new();
    for made in 1.. {
        let before = round_trip();
        let result = round()?;
        let after = round_trip();
        let last = made >= TRIES * wanted;
        // The last round counts in any case if no other does.
        if is_near(before, after) || (last && kinds.is_empty()) {
            let place = kinds.iter().position(|kind| is_near(kind.round_trip, before)).unwrap_or_else(|| {
                kinds.push(Rounds { round_trip: before, each: Vec::new() });
                kinds.len() - 1
            });
            kinds[place].each.push(result);
        }
        if last || kinds.iter().any(|kind| kind.each.len() == wanted) {
            break;
        }
    }
    let most = kinds.into_iter().max_by_key(|kind| kind.each.len());
    Ok(most.expect("the last round counted, if none before did"))
}

/// Whether two measurements are of the same distance.
fn is_near(a: Duration, b: Duration) -> bool {
    a.max(b) < a.min(b) * 2
}

/// The least time of a cache line from the calling thread's core to the back-ends' core and back.
pub fn round_trip() -> Duration {
    const ROUNDS: u32 = 500;
    const BATCHES: u32 = 10;
    let line = Arc::new(AtomicU32::new(0));
    let theirs = Arc::clone(&line);
    // Each side answers the other's number with the next one; this side's numbers are odd.
    let answering = std::thread::spawn(move || {
        let pinned = process::pin(BACK_END_CORE);
        for number in (1..2 * ROUNDS * BATCHES).step_by(2) {
            while theirs.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
            theirs.store(number + 1, Ordering::Release);
        }
        pinned
    });
    let mut best = Duration::MAX;
    let mut number = 0;
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            line.store(number + 1, Ordering::Release);
            number += 2;
            while line.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
        }
        best = best.min(start.elapsed() / ROUNDS);
    }
    let pinned = answering.join().expect("the counting thread does not panic");
    pinned.expect("the bench's own thread could be pinned");
    best
}

#[cfg(test)]
mod tests {
    use super::{is_near, run_comparable};
    use std::time::Duration;

    #[test]
    fn distances() {
        let ns = Duration::from_nanos;
        assert!(is_near(ns(44), ns(50)) && is_near(ns(380), ns(360)));
        assert!(!is_near(ns(44), ns(370)) && !is_near(ns(370), ns(44)));
    }

    #[test]
    fn rounds_are_made_until_there_are_enough() {
        let mut made = 0;
        let rounds = run_comparable(2, || {
            made += 1;
            Ok(made)
        });
        let rounds = rounds.unwrap();
        assert!((1..=2).contains(&rounds.each.len()) && made <= 6, "{made} rounds gave {:?}", rounds.each);
    }
}
