//! A disk of another host under verified writes, while its connections are cut: in the middle of PDUs, and some again while the
//! host connects.
//!
//! `ARYK_CUTS` sets the number of rounds instead of twenty, and `ARYK_CUTS_SEED` their seed; `cargo xtask cuts` sets both. The
//! test prints how long the VM had no completion after a cut.

use super::metrics::scrape;
use super::proxy::Link;
use super::remote::{Pair, controller, losses};
use super::verified::{DEPTH, VerifiedDisk};
use fastrand::Rng;
use serde_json::json;
use std::time::Duration;

/// Bytes after which the first cut of a round comes: in the requests in flight, or some later ones.
const WITHIN: u64 = 64 << 10;
/// Bytes of the host's next connections after which a second one comes: in the handshake, or in the requests that are submitted
/// again.
const AGAIN_WITHIN: u64 = 8 << 10;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// The longest time without a completion in each round, in order of length.
fn gaps_of(mut gaps: Vec<Duration>) -> String {
    if gaps.is_empty() {
        return "none".to_owned();
    }
    gaps.sort_unstable();
    let at = |percent: usize| gaps[(gaps.len() * percent / 100).min(gaps.len() - 1)].as_millis();
    format!("p50 {} ms, p99 {} ms, longest {} ms", at(50), at(99), at(100))
}

#[test]
fn verified_writes_survive_cuts() {
    let (rounds, seed) = (from_environment("ARYK_CUTS", 20), from_environment("ARYK_CUTS_SEED", 1));
    let mut random = Rng::with_seed(seed);
    let pair = Pair::start();
    let mut disk = VerifiedDisk::start(&pair.socket(), seed);
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        // More than the host may have received before the cut.
        disk.run(2 * u64::from(DEPTH) + random.u64(0..50));
        let is_again = random.u8(0..4) == 0;
        let again = is_again.then(|| random.u64(1..AGAIN_WITHIN));
        let cuts = pair.proxy.cuts() + 1 + u64::from(is_again);
        disk.take_longest();
        pair.proxy.set(Link::Breaks([random.u64(1..WITHIN)].into_iter().chain(again).collect()));
        while pair.proxy.cuts() < cuts {
            disk.run(1);
        }
        disk.run(2 * u64::from(DEPTH));
        let of_kind = if is_again { &mut twice } else { &mut once };
        of_kind.push(disk.take_longest());
        assert!(losses(&pair.host) >= round, "a cut that the host has not noticed");
    }
    let requests = disk.finish();
    let (losses, controller) = (losses(&pair.host), controller(&pair.host));
    println!(
        "{rounds} rounds, {} cuts, seed {seed}: {losses} losses, {} of {requests} requests submitted again, 0 violations\n\
         without a completion after one cut: {}\n\
         after two: {}",
        pair.proxy.cuts(),
        controller["resubmitted"],
        gaps_of(once),
        gaps_of(twice),
    );
    let metrics = scrape(pair.host.port());
    let path = [("nvme", "far"), ("path", &*pair.proxy.address().to_string())];
    assert_eq!(metrics.value("aryk_remote_path_losses_total", &path), Some(losses as f64));
    let of_controller = |name| metrics.value(name, &path[..1]);
    assert_eq!(of_controller("aryk_remote_resubmitted_requests_total"), controller["resubmitted"].as_f64());
    assert_eq!(of_controller("aryk_remote_failed_requests_total"), Some(0.0));
    assert!(controller["resubmitted"].as_u64() > Some(0));
    assert_eq!(controller["remote"]["ends_earlier"], json!(true));
}
