//! Rounds that can be compared. The two cores of a virtual machine may be neighbours now, and on different chips a second
//! later; what they share by memory then differs by a factor of eight, and every result by up to four. So the
//! distance is measured before and after each round: one in which it changed says nothing, and only rounds at one
//! distance are compared.

use crate::process::{self, BACK_END_CORE};
use anyhow::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Rounds that are made at most, for each that is wanted.
const TRIES: usize = 3;

/// Rounds at one distance.
#[derive(Debug)]
pub struct Rounds<T> {
    /// How long a cache line took from core to core and back.
    pub round_trip: Duration,
    /// What each gave.
    pub each: Vec<T>,
}

/// Makes rounds until there are `wanted` at one distance, or, when that takes too many, as many at one distance as there are.
pub fn alike<T>(wanted: usize, mut round: impl FnMut() -> Result<T>) -> Result<Rounds<T>> {
    let mut kinds: Vec<Rounds<T>> = Vec::new();
    for made in 1.. {
        let before = round_trip();
        let result = round()?;
        let after = round_trip();
        let last = made >= TRIES * wanted;
        // The last counts in any case, if nothing else does.
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

/// Whether two measurements are of one distance.
fn is_near(a: Duration, b: Duration) -> bool {
    a.max(b) < a.min(b) * 2
}

/// How long a cache line takes from the calling thread's core to the back ends' and back, at best.
pub fn round_trip() -> Duration {
    const ROUNDS: u32 = 500;
    const BATCHES: u32 = 10;
    let line = Arc::new(AtomicU32::new(0));
    let theirs = Arc::clone(&line);
    // Whoever sees the other's number answers with the next: ours are odd.
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
    let pinned = answering.join().expect("it only counts");
    pinned.expect("the bench's own thread could be pinned");
    best
}

#[cfg(test)]
mod tests {
    use super::{alike, is_near};
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
        let rounds = alike(2, || {
            made += 1;
            Ok(made)
        });
        let rounds = rounds.unwrap();
        assert!((1..=2).contains(&rounds.each.len()) && made <= 6, "{made} rounds gave {:?}", rounds.each);
    }
}
