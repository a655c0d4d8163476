//! Lost connections: requests wait, and are submitted again without an error, without a loss, and without old data.

use super::proxy::Proxy;
use super::target::{BLOCK, Running};
use super::{OnTarget, until};
use crate::fabrics::{RemoteConfig, RemoteError, RemotePhase};
use aryk_bdev::{Access, Blocks, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, contents};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A disk whose connections go through a proxy, with quick attempts to connect again.
fn through_proxy(change: impl FnOnce(&mut RemoteConfig)) -> (OnTarget, Arc<Proxy>) {
    let target = Running::start();
    let proxy = Arc::new(Proxy::start(target.address));
    let address = proxy.address;
    let on = OnTarget::at(target, address, |config| {
        config.reconnect_delay = Duration::from_millis(5);
        change(config);
    });
    (on, proxy)
}

pub(super) fn open(bench: &mut Bench, on: &OnTarget) -> Opener {
    bench.open(on.env.registry(), "disk", Access::Shared, 32, 64 << 10)
}

#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
pub(super) fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Writes and reads random blocks until `rounds` requests have succeeded, which are added to `progress`; each block has one
/// request at a time.
pub(super) fn verify(
    bench: &mut Bench,
    disk: &mut Opener,
    rounds: u64,
    random: &mut fastrand::Rng,
    progress: &AtomicU64,
) {
    const PLACES: u64 = 64;
    const LEN: u64 = 16;
    let mut seeds: HashMap<u64, u64> = HashMap::new();
    let mut in_flight: HashMap<u64, (u64, Option<u64>)> = HashMap::new();
    let mut done = 0;
    while done < rounds || !in_flight.is_empty() {
        while done + (in_flight.len() as u64) < rounds && in_flight.len() < 16 {
            let place = random.u64(0..PLACES);
            if in_flight.values().any(|(of, _)| *of == place) {
                break;
            }
            let blocks = 1 + place % LEN;
            if random.bool() {
                let seed = random.u64(..);
                let id = disk.write(place * LEN, &contents(seed, place, blocks, BLOCK), Shape::Odd, bench);
                in_flight.insert(id, (place, Some(seed)));
            } else {
                let id = disk.read(place * LEN, blocks, Shape::Single, bench);
                in_flight.insert(id, (place, None));
            }
        }
        bench.turn();
        for outcome in disk.completed() {
            assert_eq!(outcome.status, Status::Ok);
            let (place, written) = in_flight.remove(&outcome.id).expect("a request in flight");
            done += 1;
            progress.fetch_add(1, Ordering::Relaxed);
            match (written, seeds.get(&place)) {
                (Some(seed), _) => _ = seeds.insert(place, seed),
                (None, Some(&seed)) => {
                    assert!(
                        outcome.data == contents(seed, place, 1 + place % LEN, BLOCK),
                        "old data at {place}"
                    );
                }
                (None, None) => {}
            }
        }
    }
}

#[test]
fn requests_survive_cuts_without_an_error() {
    for digests in [false, true] {
        let (on, proxy) = through_proxy(|config| {
            (config.header_digest, config.data_digest) = (digests, digests);
        });
        let (mut bench, mut random) = (Bench::new(), fastrand::Rng::with_seed(19));
        let progress = Arc::new(AtomicU64::new(0));
        let mut disk = open(&mut bench, &on);
        verify(&mut bench, &mut disk, 1000, &mut random, &progress);
        let is_over = Arc::new(AtomicBool::new(false));
        let controller = on.controllers.find("nv").unwrap();
        let cutter = {
            let controller = Arc::clone(&controller);
            let (is_over, proxy, progress) =
                (Arc::clone(&is_over), Arc::clone(&proxy), Arc::clone(&progress));
            let mut random = fastrand::Rng::with_seed(7);
            std::thread::spawn(move || {
                let mut before = 0;
                while !is_over.load(Ordering::Relaxed) {
                    // A request fails after many losses in which it was submitted again: they are not to come without progress.
                    let now = progress.load(Ordering::Relaxed);
                    if controller.info().phase == RemotePhase::Ready && now >= before + 2 {
                        before = now;
                        proxy.cut();
                    }
                    pause(Duration::from_millis(random.u64(1..20)));
                }
            })
        };
        let before = controller.info().losses;
        while controller.info().losses < before + 25 {
            verify(&mut bench, &mut disk, 200, &mut random, &progress);
        }
        is_over.store(true, Ordering::Relaxed);
        cutter.join().unwrap();
        verify(&mut bench, &mut disk, 1000, &mut random, &progress);
        let info = controller.info();
        assert!(info.resubmitted > 0 && info.paths[0].ends_earlier, "{info:?}");
        assert_eq!(info.failed_by_loss, 0, "no block had two requests at a time");
        disk.close(&mut bench);
    }
}

#[test]
fn requests_fail_after_a_time_and_go_on_when_the_target_is_back() {
    let (on, proxy) = through_proxy(|config| config.fast_fail = Some(Duration::from_millis(200)));
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    disk.write(0, &contents(1, 0, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    proxy.refuse(true);
    let controller = on.controllers.find("nv").unwrap();
    bench.until("the loss", || controller.is_lost() && on.disk.is_stalled());
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    assert_eq!(controller.info().phase, RemotePhase::Failing);
    // Later ones fail at once.
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    proxy.refuse(false);
    bench.until("the target to be back", || controller.info().phase == RemotePhase::Ready);
    bench.until("the disk to go on", || !on.disk.is_stalled());
    disk.read(0, 1, Shape::Single, &mut bench);
    let outcome = disk.finish(&mut bench);
    assert!(outcome.status == Status::Ok && outcome.data == contents(1, 0, 1, BLOCK));
    disk.close(&mut bench);
}

#[test]
fn a_controller_that_stays_away_loses_its_disks() {
    let (on, proxy) = through_proxy(|config| config.loss_timeout = Some(Duration::from_millis(200)));
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    proxy.refuse(true);
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Removed);
    disk.close(&mut bench);
    // The removal waits until the reactor has closed its queue.
    bench.until("the end", || on.controllers.list().is_empty());
    assert!(on.env.registry().find("disk").is_err());
}

#[test]
fn a_disabled_controller_has_no_connection_and_its_requests_wait() {
    let (on, _proxy) = through_proxy(|config| {
        config.loss_timeout = Some(Duration::from_secs(3));
    });
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    let controller = on.controllers.find("nv").unwrap();
    assert!(matches!(bench.wait("a refusal", controller.enable()), Err(RemoteError::NotDisabled(_))));
    disk.write(5, &contents(3, 5, 2, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    for _ in 0..2 {
        bench.wait("the end of the connections", controller.disable()).unwrap();
        assert!(controller.is_lost() && on.disk.is_stalled());
    }
    assert_eq!(controller.info().phase, RemotePhase::Disabled);
    until("the target's controller to end", || {
        on.target.run(async |target: aryk_nvmf::Target| target.hosts().is_empty())
    });
    disk.read(5, 2, Shape::Single, &mut bench);
    // The time of a lost controller does not count.
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pause(Duration::from_millis(3300));
            is_over.store(true, Ordering::Relaxed);
        });
        bench.until("the time", || is_over.load(Ordering::Relaxed));
    });
    assert!(disk.in_flight() == 1 && on.env.registry().find("disk").is_ok());
    bench.wait("the order", controller.enable()).unwrap();
    let outcome = disk.finish(&mut bench);
    assert!(outcome.status == Status::Ok && outcome.data == contents(3, 5, 2, BLOCK));
    assert_eq!((controller.info().losses, controller.info().phase), (0, RemotePhase::Ready));
    bench.wait("the end of the connections", controller.disable()).unwrap();
    disk.close(&mut bench);
}

#[test]
fn a_silent_target_counts_as_lost() {
    let (on, proxy) = through_proxy(|config| config.patience = Duration::from_millis(400));
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    proxy.silence(true);
    disk.write(5, &contents(3, 5, 2, BLOCK), Shape::Single, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    bench.until("the loss", || controller.is_lost());
    proxy.silence(false);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    assert!(proxy.accepted() >= 4, "an admin queue and an I/O queue, twice");
    disk.close(&mut bench);
}

#[test]
fn a_reset_by_a_client_is_not_seen() {
    let (on, _proxy) = through_proxy(|_| {});
    let (mut bench, mut random) = (Bench::new(), fastrand::Rng::with_seed(3));
    let progress = AtomicU64::new(0);
    let mut disk = open(&mut bench, &on);
    let controller = on.controllers.find("nv").unwrap();
    for round in 1..=5 {
        controller.reset();
        verify(&mut bench, &mut disk, 300, &mut random, &progress);
        bench.until("the loss", || controller.info().losses >= round);
    }
    disk.close(&mut bench);
}

#[test]
fn a_namespace_that_goes_takes_its_disk_with_it() {
    let (on, _proxy) = through_proxy(|_| {});
    on.target.run(async |target: aryk_nvmf::Target| {
        target.remove_namespace(super::SUBSYSTEM, 1).await.unwrap();
    });
    until("the disk to go", || on.env.registry().find("disk").is_err());
    on.target.run(async |target: aryk_nvmf::Target| {
        target.add_namespace(super::SUBSYSTEM, "disk", aryk_nvmf::NewNamespace::default()).await.unwrap();
    });
    until("the disk to come back", || on.env.registry().find("disk").is_ok());
    assert_eq!(on.disk.blocks(), Blocks(65_536));
}

#[test]
fn the_target_has_one_queue_for_each_reactor_with_channels() {
    let (on, _proxy) = through_proxy(|_| {});
    let mut bench = Bench::new();
    let disks = [(); 3].map(|()| open(&mut bench, &on));
    assert_eq!(on.target.queues(), 1);
    disks.into_iter().for_each(|disk| disk.close(&mut bench));
    bench.until("the queue to end", || on.target.queues() == 0);
}

#[test]
fn requests_that_are_aborted_while_the_controller_is_away_end() {
    let (on, proxy) = through_proxy(|_| {});
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    proxy.refuse(true);
    let controller = on.controllers.find("nv").unwrap();
    bench.until("the loss", || controller.is_lost());
    // The first may be given to a connection whose loss the reactor has not seen; the second waits for the next connection.
    for _ in 0..2 {
        disk.write(0, &contents(1, 0, 1, BLOCK), Shape::Single, &mut bench);
        disk.abort_all(&mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Aborted);
    }
    disk.close(&mut bench);
    // The end does not wait for the target.
    bench.wait("the end", on.controllers.detach("nv")).unwrap();
}
