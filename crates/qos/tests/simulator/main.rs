//! Tests of accuracy and fairness in virtual time. Runs depend on seeds only.

mod sim;

use aryk_qos::{Direction, LEASES, Lane, Limiter, Limits, SLACK, Share};
use fastrand::Rng;
use sim::{Clockwork, Load, MILLI, SECOND, Sim, excess, jain};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// How late reactors are, in nanoseconds, on a host with enough cores.
const LATE: u64 = 80_000;

const LOAD: Load = Load { reactor: 0, depth: 32, bytes: 4096, latency: 80_000, direction: Direction::Read };

fn limiter(limits: Limits) -> Limiter {
    let mut limiter = Limiter::new();
    limiter.set(limits, SECOND).expect("possible limits");
    limiter
}

fn ios(ios: u64) -> Limiter {
    limiter(Limits { ios, ..Limits::default() })
}

/// Checks the upper bound: no window admits more than its length, the burst, a request of each lane, slack and leases.
fn check_bound(sim: &Sim, lanes: usize, burst: Duration, cost: f64) {
    let most = excess(sim.admitted.iter(), |_| cost);
    let bound = burst.as_nanos() as f64 + lanes as f64 * cost + (SLACK + LEASES) as f64;
    assert!(most <= bound + 1.0, "{most} > {bound}");
}

/// Checks the throughput of saturating loads on `reactors` reactors under a limit: each window of `window` must admit at least
/// `least`.
fn saturate(rate: u64, reactors: usize, lanes: usize, window: u64, least: f64) {
    let disk = ios(rate);
    let mut sim = Sim::new(rate + lanes as u64, LATE);
    for lane in 0..lanes {
        sim.open(&[&disk], Load { reactor: lane % reactors, ..LOAD });
    }
    sim.run_for(10 * MILLI);
    let start = sim.now;
    let windows = (3 * SECOND / window).min(30);
    sim.run_for(windows * window);
    let expected = rate as f64 * window as f64 / SECOND as f64;
    for i in 0..windows {
        let count = sim.count(start + i * window, start + (i + 1) * window);
        let floor = (expected * least).min(expected - 1.0);
        assert!(count as f64 >= floor.floor(), "{rate}/s, {reactors} reactors, {lanes} lanes: {count}");
    }
    check_bound(&sim, lanes, Duration::ZERO, SECOND as f64 / rate as f64);
}

#[test]
fn a_saturated_limit_is_met() {
    for rate in [1000, 6000, 33_333, 100_000] {
        for (reactors, lanes) in [(1, 1), (1, 3), (2, 2), (2, 5)] {
            saturate(rate, reactors, lanes, SECOND, 0.99);
            saturate(rate, reactors, lanes, 100 * MILLI, 0.95);
        }
        saturate(rate, 4, 8, SECOND, 0.97);
        saturate(rate, 4, 8, 100 * MILLI, 0.85);
    }
    for rate in [1, 7, 10, 100, 999] {
        for (reactors, lanes) in [(1, 1), (2, 2)] {
            saturate(rate, reactors, lanes, SECOND, 0.99);
        }
    }
}

#[test]
fn a_byte_limit_holds_for_requests_larger_than_the_bucket() {
    for (bytes, reactors) in [(4096, 1), (128 << 10, 2), (4 << 20, 1), (64 << 20, 2)] {
        let disk = limiter(Limits { read_bytes: 100 << 20, ..Limits::default() });
        let mut sim = Sim::new(bytes, LATE);
        for reactor in 0..reactors {
            sim.open(&[&disk], Load { reactor, bytes, ..LOAD });
        }
        sim.run_for(10 * SECOND);
        let cost = bytes as f64 / (100 << 20) as f64 * SECOND as f64;
        check_bound(&sim, reactors, Duration::ZERO, cost);
        let moved = sim.admitted.len() as u64 * bytes;
        assert!(moved as f64 >= 0.99 * (1000u64 << 20) as f64, "{moved} of {bytes}");
    }
}

#[test]
fn combined_limits_are_met_at_their_ends() {
    for (bytes, rate) in [(4096, 3000.0), (4 << 20, 125.0 / 4.0)] {
        let disk = limiter(Limits { ios: 3000, bytes: 125 << 20, combined: true, ..Limits::default() });
        let mut sim = Sim::new(bytes, LATE);
        sim.open(&[&disk], Load { bytes, ..LOAD });
        sim.run_for(10 * SECOND);
        let expected = 10.0 * rate;
        let count = sim.admitted.len() as f64;
        assert!(count >= 0.99 * expected && count <= 1.01 * expected + 2.0, "{bytes}: {count}");
    }
}

#[test]
fn a_burst_is_saved_up_and_no_more() {
    let burst = Duration::from_secs(2);
    let disk = limiter(Limits { ios: 1000, burst, ..Limits::default() });
    let mut sim = Sim::new(1, LATE);
    sim.run_for(60 * SECOND);
    let start = sim.now;
    sim.open(&[&disk], LOAD);
    sim.run_for(SECOND);
    let first = sim.count(start - 1, sim.now);
    assert!((2990..=3010).contains(&first), "{first}");
    sim.run_for(SECOND);
    let second = sim.count(start + SECOND, sim.now);
    assert!((990..=1005).contains(&second), "{second}");
    check_bound(&sim, 1, burst, MILLI as f64);
}

#[test]
fn equal_loads_of_a_group_get_equal_shares() {
    for (rate, per_reactor) in [
        (6000, vec![4, 4]),
        (6000, vec![7, 1]),
        (6000, vec![60, 4]),
        (50_000, vec![3, 1, 2, 10]),
        (500, vec![5, 2]),
    ] {
        let group = ios(rate);
        let disks: Vec<Limiter> = (0..per_reactor.iter().sum()).map(|_| ios(rate)).collect();
        let mut sim = Sim::new(rate, LATE);
        let reactors = per_reactor.iter().enumerate().flat_map(|(r, &n)| std::iter::repeat_n(r, n));
        for (reactor, disk) in reactors.zip(&disks) {
            sim.open(&[disk, &group], Load { reactor, ..LOAD });
        }
        sim.run_for(SECOND);
        let start = sim.now;
        sim.run_for(5 * SECOND);
        let counts = sim.counts(start);
        let total: u64 = counts.iter().sum();
        assert!(jain(&counts) >= 0.98, "{per_reactor:?}: {} {counts:?}", jain(&counts));
        assert!(total as f64 >= 0.97 * 5.0 * rate as f64, "{total}");
        check_bound(&sim, disks.len(), Duration::ZERO, SECOND as f64 / rate as f64);
    }
}

#[test]
fn a_load_of_depth_1_is_not_starved_by_deep_queues() {
    for other in [0, 1] {
        let group = ios(4000);
        let mut sim = Sim::new(7, LATE);
        sim.open(&[&group], Load { depth: 1, ..LOAD });
        sim.open(&[&group], Load { reactor: other, depth: 128, ..LOAD });
        sim.open(&[&group], Load { reactor: 1, depth: 128, ..LOAD });
        sim.run_for(5 * SECOND);
        let counts = sim.counts(SECOND);
        assert!(counts[0] >= counts[1] / 2, "{counts:?}");
        assert!(counts.iter().sum::<u64>() >= 19_800, "{counts:?}");
    }
}

#[test]
fn loads_of_small_and_large_requests_get_equal_bytes() {
    let group = limiter(Limits { bytes: 200 << 20, ..Limits::default() });
    let mut sim = Sim::new(3, LATE);
    sim.open(&[&group], Load { bytes: 4096, depth: 64, ..LOAD });
    sim.open(&[&group], Load { bytes: 1 << 20, ..LOAD });
    sim.open(&[&group], Load { bytes: 64 << 10, reactor: 1, ..LOAD });
    sim.run_for(5 * SECOND);
    let counts = sim.counts(SECOND);
    let moved = [counts[0] * 4096, counts[1] << 20, counts[2] * (64 << 10)];
    assert!(jain(&moved) >= 0.98, "{moved:?}");
}

#[test]
fn the_limit_of_each_level_holds() {
    let parent = ios(5000);
    let groups = [ios(4000), ios(2000)];
    let disks = [ios(300), ios(10_000), ios(10_000), ios(10_000)];
    let mut sim = Sim::new(5, LATE);
    for (i, disk) in disks.iter().enumerate() {
        sim.open(&[disk, &groups[i / 2], &parent], Load { reactor: i % 2, ..LOAD });
    }
    sim.run_for(SECOND);
    let start = sim.now;
    sim.run_for(4 * SECOND);
    let counts = sim.counts(start);
    let total: u64 = counts.iter().sum();
    assert!((19_700..=20_020).contains(&total), "{counts:?}");
    assert!(counts[0] >= 1150 && counts[0] <= 1204, "{counts:?}");
    assert!(counts[2] + counts[3] <= 8010, "{counts:?}");
}

#[test]
fn readers_continue_while_writers_wait() {
    let disk = limiter(Limits { read_ios: 5000, write_ios: 100, ..Limits::default() });
    let mut sim = Sim::new(5, LATE);
    sim.open(&[&disk], LOAD);
    sim.open(&[&disk], Load { direction: Direction::Write, ..LOAD });
    sim.run_for(4 * SECOND);
    let counts = sim.counts(SECOND);
    assert!(counts[0] >= 19_800 && counts[1] >= 396 && counts[1] <= 402, "{counts:?}");
}

/// Where no lane waits, reactors lease ahead. A reactor that becomes idle keeps its lease, and the other reactor still gets its
/// share.
#[test]
fn leasing_ahead_takes_no_share_of_other_reactors() {
    let group = ios(100_000);
    let mut sim = Sim::new(13, LATE);
    // Together a quarter of the limit.
    let loads = [0, 1].map(|reactor| sim.open(&[&group], Load { reactor, depth: 1, ..LOAD }));
    sim.run_for(SECOND);
    let leased = group.buckets()[0].1.leased();
    assert!((10_000..=LEASES / 4).contains(&leased), "{leased}");
    loads.into_iter().for_each(|who| sim.stop(who));
    let start = sim.now;
    sim.open(&[&group], Load { reactor: 1, ..LOAD });
    sim.run_for(SECOND);
    let count = sim.count(start, sim.now);
    assert!(count >= 99_000, "{count}");
    check_bound(&sim, 3, Duration::ZERO, 10_000.0);
}

/// Prepaid requests of lanes count as leased; when limits change, they are returned.
#[test]
fn prepaid_requests_count_as_leased() {
    let mut group = ios(1_000_000);
    let disks: Vec<Limiter> = (0..8).map(|_| ios(500_000)).collect();
    let mut sim = Sim::new(17, LATE);
    for (i, disk) in disks.iter().enumerate() {
        // Together a quarter of the limit.
        sim.open(&[disk, &group], Load { reactor: i % 2, depth: 4, latency: 128_000, ..LOAD });
    }
    let mut most = 0;
    for _ in 0..1000 {
        sim.run_for(10_000);
        most = most.max(group.buckets()[0].1.leased());
    }
    assert!((LEASES / 8..=LEASES).contains(&most), "{most}");
    check_bound(&sim, 8, Duration::ZERO, 1000.0);
    group.set(Limits { ios: 100, ..Limits::default() }, sim.now).unwrap();
    sim.wake_all();
    let start = sim.now;
    sim.run_for(SECOND);
    let count = sim.count(start, sim.now);
    assert!((98..=110).contains(&count), "{count}");
    drop(sim);
    let buckets = disks.iter().chain([&group]).flat_map(|limiter| limiter.buckets());
    buckets.for_each(|(_, bucket)| assert_eq!((bucket.leased(), bucket.waiting()), (0, 0)));
}

/// With requests prepaid for one size, requests of other sizes cost their own price, and the total is exact.
#[test]
fn requests_of_changing_sizes_cost_their_own_price() {
    let disk = limiter(Limits { bytes: 1 << 40, ..Limits::default() });
    let bucket = &disk.buckets()[0].1;
    let share = Rc::new(RefCell::new(Share::new(Arc::clone(bucket))));
    let (mut lane, mut wheel) = (Lane::new(0, vec![share]), Clockwork::default());
    let (mut random, mut moved, now) = (Rng::with_seed(19), 0, 2 * SECOND);
    let before = bucket.free_from(now);
    for i in 0..10_000 {
        // One size for long periods, then another each time.
        let size = if i / 1000 % 2 == 0 { 4096 } else { 4096 << random.u64(..5) };
        assert!(lane.ask(size, 0, now, &mut wheel), "after {moved} bytes");
        lane.settle(false, now, &mut wheel);
        moved += size;
    }
    assert!(bucket.leased() <= LEASES);
    drop(lane);
    let (taken, cost) = (bucket.free_from(now) - before, moved * SECOND / (1 << 40));
    assert!((cost..=cost + 10).contains(&taken), "{taken} for {cost}");
    assert_eq!(bucket.leased(), 0);
}

#[test]
fn changes_take_effect_at_once() {
    let mut disk = ios(10);
    let mut sim = Sim::new(5, LATE);
    sim.open(&[&disk], LOAD);
    sim.open(&[&disk], Load { reactor: 1, ..LOAD });
    sim.run_for(SECOND + 5 * MILLI);
    let mut random = Rng::with_seed(11);
    for rate in [100_000, 20, 5000, 1, 50_000] {
        disk.set(Limits { ios: rate, ..Limits::default() }, sim.now).unwrap();
        sim.wake_all();
        let start = sim.now;
        sim.run_for(SECOND + random.u64(..10 * MILLI));
        let expected = rate as f64 * (sim.now - start) as f64 / SECOND as f64;
        let count = sim.count(start, sim.now) as f64;
        assert!(count >= (0.98 * expected - 2.0) && count <= 1.002 * expected + 3.0, "{rate}: {count}");
    }
}

#[test]
fn a_thousand_limit_changes_admit_no_extra_requests() {
    let mut disk = ios(1000);
    let mut sim = Sim::new(6, LATE);
    sim.open(&[&disk], LOAD);
    let start = sim.now;
    for i in 0..1000 {
        disk.set(Limits { ios: 1000 + i % 2, ..Limits::default() }, sim.now).unwrap();
        sim.wake_all();
        sim.run_for(3 * MILLI + 1);
    }
    let count = sim.count(start, sim.now);
    assert!((2970..=3010).contains(&count), "{count}");
}

#[test]
fn a_lane_that_leaves_blocks_no_other() {
    let (group, other) = (ios(1000), ios(1000));
    let mut sim = Sim::new(9, LATE);
    for i in 0..20 {
        sim.open(&[&group], Load { reactor: i % 2, ..LOAD });
    }
    let mut random = Rng::with_seed(4);
    for who in 0..19 {
        sim.run_for(random.u64(..20 * MILLI));
        if who % 2 == 0 { sim.stop(who) } else { sim.move_to(who, &[&other]) }
    }
    let start = sim.now;
    sim.run_for(SECOND);
    let counts = sim.counts(start);
    assert!(counts[19] >= 990, "{counts:?}");
    assert!(counts[..19].iter().sum::<u64>() >= 990, "{counts:?}");
    let buckets = group.buckets();
    assert_eq!(buckets[0].1.waiting(), 1);
    sim.stop(19);
    assert_eq!((buckets[0].1.waiting(), buckets[0].1.leased()), (0, 0));
}
