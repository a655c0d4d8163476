//! The atomics of a bucket under every order of execution that loom distinguishes.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p aryk-qos --release --test loom`
#![cfg(loom)]
#![expect(dead_code, reason = "the models use only a part of the files")]

mod sync {
    pub use loom::sync::atomic::{AtomicU64, Ordering};
}
#[path = "../src/bucket.rs"]
mod bucket;
#[path = "../src/share.rs"]
mod share;
#[path = "../src/tariff.rs"]
mod tariff;

use bucket::{Bucket, LEASES, SLACK};
use loom::thread;
use share::Share;
use std::sync::Arc;
use std::time::Duration;
use tariff::Cost;

const NOW: u64 = 1_000_000_000;

fn bucket() -> Arc<Bucket> {
    Arc::new(Bucket::new(Cost { request: 1 << 32, byte: 0 }, Duration::ZERO, 0))
}

/// Two reactors together take all available tokens: no more, and nothing is lost.
#[test]
fn no_token_is_sold_twice() {
    loom::model(|| {
        let bucket = bucket();
        let take = |bucket: &Bucket| {
            let mut taken = 0;
            for _ in 0..2 {
                taken += bucket.take(SLACK / 8, SLACK / 4, NOW).unwrap_or(0);
            }
            taken
        };
        let other = Arc::clone(&bucket);
        let there = thread::spawn(move || take(&other));
        let here = take(&bucket);
        let sum = here + there.join().unwrap();
        assert_eq!(bucket.free_from(NOW), NOW - SLACK + sum);
    });
}

/// Returning and taking at the same time keeps the sum.
#[test]
fn returned_tokens_are_available_again() {
    loom::model(|| {
        let bucket = bucket();
        assert_eq!(bucket.take(SLACK / 2, 0, NOW), Ok(SLACK / 2));
        let other = Arc::clone(&bucket);
        let there = thread::spawn(move || other.give_back(SLACK / 2));
        assert_eq!(bucket.take(SLACK / 4, 0, NOW), Ok(SLACK / 4));
        there.join().unwrap();
        assert_eq!(bucket.free_from(NOW), NOW - SLACK + SLACK / 4);
    });
}

/// Reactors together never hold more than the lease limit.
#[test]
fn leases_stay_within_their_bound() {
    loom::model(|| {
        let bucket = bucket();
        let other = Arc::clone(&bucket);
        let want = |bucket: &Bucket| {
            let first = bucket.lease(0, 0, LEASES * 3 / 4);
            assert!(bucket.leased() <= LEASES);
            bucket.lease(first, first / 2, LEASES) + first / 2
        };
        let there = thread::spawn(move || want(&other));
        let here = want(&bucket);
        let both = here + there.join().unwrap();
        assert!(both <= LEASES);
        assert_eq!(bucket.leased(), both);
    });
}

/// A reactor finds no tokens while another reactor leases the room that the first reactor's lease had.
#[test]
fn a_take_that_fails_leaves_the_bound_of_leases() {
    loom::model(|| {
        let bucket = bucket();
        let mut share = Share::<(), ()>::new(Arc::clone(&bucket));
        assert!(share.take(1 << 16, LEASES, NOW));
        assert!(bucket.leased() > LEASES / 2);
        let other = Arc::clone(&bucket);
        let there = thread::spawn(move || {
            let leased = other.lease(0, 0, LEASES);
            drop(other.take(SLACK, 0, NOW));
            leased
        });
        share.take(LEASES << 17, 0, NOW);
        let leased = there.join().unwrap();
        assert!(bucket.leased() <= LEASES, "{} ns", bucket.leased());
        drop(share);
        assert_eq!(bucket.leased(), leased);
    });
}

/// A change of price while reactors take tokens loses none of the taken tokens.
#[test]
fn a_price_change_during_take_loses_no_tokens() {
    loom::model(|| {
        let bucket = bucket();
        let other = Arc::clone(&bucket);
        let there = thread::spawn(move || other.take(4 * SLACK, 0, NOW).is_ok());
        bucket.set(Cost { request: 2 << 32, byte: 0 }, Duration::ZERO, NOW);
        assert!(there.join().unwrap());
        // The bucket's debt is 3 SLACK, or twice as much if tokens were taken before the change.
        let debt = bucket.free_from(NOW) - NOW;
        assert!(debt == 3 * SLACK || debt == 6 * SLACK, "{debt}");
    });
}
