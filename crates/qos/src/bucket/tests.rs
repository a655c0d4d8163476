//! Tests of the bucket against a simple one that counts tokens.

use super::*;
use crate::Limits;
use proptest::prelude::*;

/// Tokens, filled step by step: the definition of a token bucket.
struct Naive {
    /// In request-nanoseconds: a token is 1,000,000,000 of them.
    tokens: i128,
    most: i128,
    rate: i128,
    at: u64,
}

impl Naive {
    fn new(rate: u64, burst_ms: u64, now: u64) -> Self {
        let most = i128::from(rate) * i128::from(burst_ms * 1_000_000 + SLACK);
        Self { tokens: 0, most, rate: rate.into(), at: now }
    }

    fn take(&mut self, now: u64, requests: u64) -> bool {
        let filled = self.tokens + self.rate * i128::from(now - self.at);
        (self.tokens, self.at) = (filled.min(self.most), now);
        let may = self.tokens >= 0;
        if may {
            self.tokens -= i128::from(requests) * 1_000_000_000;
        }
        may
    }
}

proptest! {
    #[test]
    fn the_bucket_admits_what_a_token_bucket_admits(
        // Rates at which a request costs whole nanoseconds, so that both buckets are exact.
        rate in prop::sample::select(vec![1u64, 10, 1000, 8000, 50_000, 1_000_000, 1_000_000_000]),
        burst_ms in 0u64..3000,
        steps in prop::collection::vec((0u64..2_000_000_000, 1u64..50), 1..200),
    ) {
        let limits = Limits { ios: rate, ..Limits::default() };
        let cost = limits.costs().unwrap()[0].1;
        let start = 5_000_000_000;
        let bucket = Bucket::new(cost, Duration::from_millis(burst_ms), start);
        let mut naive = Naive::new(rate, burst_ms, start);
        let mut now = start;
        for (gap, requests) in steps {
            now += gap * gap / 2_000_000_000;
            let need = nanos_up(cost.of(0)) * requests;
            let taken = bucket.take(need, 0, now);
            prop_assert_eq!(taken.is_ok(), naive.take(now, requests));
            if let Err(again) = taken {
                prop_assert!(bucket.take(need, 0, again - 1).is_err());
            }
        }
    }
}

#[test]
fn extra_tokens_are_limited_to_the_available_ones() {
    let cost = Limits { ios: 1000, ..Limits::default() }.costs().unwrap()[0].1;
    let bucket = Bucket::new(cost, Duration::ZERO, 0);
    // Half a millisecond is available: a request is admitted, and no extra tokens.
    assert_eq!(bucket.take(1_000_000, 5_000_000, 500_000), Ok(1_000_000));
    assert_eq!(bucket.take(1, 0, 900_000), Err(1_000_000));
    // Unused tokens accumulate up to the slack only.
    assert_eq!(bucket.take(100_000, 5_000_000, 50_000_000), Ok(SLACK));
    bucket.give_back(SLACK - 100_000);
    assert_eq!(bucket.take(100_000, 0, 50_000_000), Ok(100_000));
}

#[test]
fn a_debt_keeps_its_number_of_requests_when_the_price_changes() {
    let cost = |ios| Limits { ios, ..Limits::default() }.costs().unwrap()[0].1;
    let bucket = Bucket::new(cost(1), Duration::ZERO, 0);
    assert!(bucket.take(60_000_000_000, 0, 0).is_ok());
    bucket.set(cost(1000), Duration::ZERO, 0);
    assert_eq!(bucket.free_from(0), 60_000_000);
    bucket.set(cost(1), Duration::ZERO, 10_000_000);
    assert_eq!(bucket.free_from(0), 50_010_000_000);
}

#[test]
fn nothing_overflows() {
    let bucket = Bucket::new(Cost { request: u64::MAX, byte: u64::MAX }, crate::BURST_MAX, u64::MAX);
    let need = nanos_up(bucket.cost().of(u64::MAX));
    assert!(bucket.take(need, u64::MAX, u64::MAX).is_ok());
    assert!(bucket.take(need, u64::MAX, 0).is_err());
    bucket.set(Cost { request: 1, byte: 0 }, Duration::ZERO, 0);
    bucket.set(Cost { request: u64::MAX, byte: u64::MAX }, Duration::ZERO, 0);
    assert!(bucket.free_from(0) >= 1 << 62);
}

#[test]
fn leases_are_bounded_together() {
    let bucket = Bucket::new(Cost::default(), Duration::ZERO, 0);
    assert_eq!(bucket.lease(0, 0, 700_000), 700_000);
    assert_eq!(bucket.lease(0, 0, 700_000), LEASES - 700_000);
    assert_eq!(bucket.lease(700_000, 100_000, LEASES), 600_000);
    assert_eq!(bucket.leased(), LEASES);
}
