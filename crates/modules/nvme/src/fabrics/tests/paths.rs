//! Several paths to one subsystem: requests take the best ones, survive the loss of one, and never appear behind later ones.

use super::loss::{open, pause, verify};
use super::proxy::Proxy;
use super::target::{BLOCK, Running, SUBSYSTEM};
use super::{OnTarget, block_on, config, until};
use crate::fabrics::{
    PathInfo, PathTraffic, Policy, RemoteConfig, RemoteController, RemoteControllers, RemoteError,
    RemotePhase,
};
use aryk_bdev::{Access, Env, Op, Status};
use aryk_bdev_conformance::{Bench, Shape, contents};
use aryk_nvme::admin;
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme::spec::log::{self, SmartLog};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_reactor::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A disk with two paths, each through a proxy.
struct Two {
    on: OnTarget,
    proxies: [Arc<Proxy>; 2],
    controller: Arc<RemoteController>,
}

impl Two {
    fn new(change: impl FnOnce(&mut RemoteConfig)) -> Self {
        let target = Running::start();
        let proxies = [target.address, target.other].map(|address| Arc::new(Proxy::start(address)));
        let address = proxies[0].address;
        let on = OnTarget::at(target, address, |config| {
            config.reconnect_delay = Duration::from_millis(5);
            change(config);
        });
        block_on(on.controllers.add_path("nv", proxies[1].address, None)).unwrap();
        let controller = on.controllers.find("nv").unwrap();
        Self { on, proxies, controller }
    }

    fn path(&self, number: usize) -> PathInfo {
        self.controller.info().paths.into_iter().find(|path| path.number == number).unwrap()
    }

    /// The path that an opener's next read takes.
    fn path_of_read(&self, disk: &mut aryk_bdev_conformance::Opener, bench: &mut Bench) -> Vec<u64> {
        let before = self.passed();
        disk.read(0, 1, Shape::Single, bench);
        assert_eq!(disk.finish(bench).status, Status::Ok);
        let after = self.passed();
        before.iter().zip(after).map(|(before, after)| after - before).collect()
    }

    /// Bytes of data that each proxy has passed on to the host, in blocks.
    fn passed(&self) -> [u64; 2] {
        [0, 1].map(|i| self.proxies[i].passed() / u64::from(BLOCK))
    }
}

#[test]
fn the_loss_of_a_path_is_not_seen() {
    let two = Two::new(|config| config.keep_alive = Duration::from_millis(200));
    let (mut bench, mut random) = (Bench::new(), fastrand::Rng::with_seed(2));
    let mut disk = open(&mut bench, &two.on);
    let progress = AtomicU64::new(0);
    for round in 0..4 {
        verify(&mut bench, &mut disk, 300, &mut random, &progress);
        let (lost, other) = (round % 2, 1 - round % 2);
        two.proxies[lost].refuse(true);
        verify(&mut bench, &mut disk, 600, &mut random, &progress);
        bench.until("the loss", || !two.path(lost).is_connected);
        assert!(two.path(other).is_connected && !two.on.disk.is_stalled());
        two.proxies[lost].refuse(false);
        bench.until("the path to be back", || two.path(lost).is_connected);
    }
    let info = two.controller.info();
    assert_eq!(info.failed_by_loss, 0, "no block had two requests at a time");
    disk.close(&mut bench);
}

#[test]
fn requests_survive_cuts_of_all_paths() {
    for policy in [Policy::ActivePassive, Policy::RoundRobin(3), Policy::QueueDepth] {
        let two = Two::new(|_| {});
        block_on(two.controller.set_policy(1, policy)).unwrap();
        let (mut bench, mut random) = (Bench::new(), fastrand::Rng::with_seed(23));
        let mut disk = open(&mut bench, &two.on);
        let progress = Arc::new(AtomicU64::new(0));
        verify(&mut bench, &mut disk, 300, &mut random, &progress);
        let is_over = Arc::new(AtomicBool::new(false));
        let cutter = {
            let (is_over, progress) = (Arc::clone(&is_over), Arc::clone(&progress));
            let (proxies, controller) = (two.proxies.clone(), Arc::clone(&two.controller));
            let mut random = fastrand::Rng::with_seed(29);
            std::thread::spawn(move || {
                let mut before = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let now = progress.load(Ordering::Relaxed);
                    let any = controller.info().paths.iter().any(|path| path.is_connected);
                    if any && now >= before + 4 {
                        before = now;
                        proxies[random.usize(0..2)].cut();
                    }
                    pause(Duration::from_millis(random.u64(1..15)));
                }
            })
        };
        while two.controller.info().losses < 40 {
            verify(&mut bench, &mut disk, 200, &mut random, &progress);
        }
        is_over.store(true, Ordering::Relaxed);
        cutter.join().unwrap();
        verify(&mut bench, &mut disk, 500, &mut random, &progress);
        let info = two.controller.info();
        assert!(info.paths.iter().all(|path| path.losses > 0), "{info:?}");
        assert_eq!(info.failed_by_loss, 0, "no block had two requests at a time");
        disk.close(&mut bench);
    }
}

#[test]
fn a_late_change_of_a_lost_path_does_not_land_behind_later_ones() {
    let keep_alive = Duration::from_millis(500);
    let two = Two::new(|config| {
        config.keep_alive = keep_alive;
        config.patience = Duration::from_millis(1500);
    });
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &two.on);
    disk.write(0, &contents(1, 0, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    // The first write stays in the proxy, whose connection to the target stays open.
    two.proxies[0].silence(true);
    let stuck = disk.write(5, &contents(2, 5, 1, BLOCK), Shape::Single, &mut bench);
    bench.until("the loss", || !two.path(0).is_connected);
    two.proxies[0].refuse_only();
    let lost_at = Clock::Monotonic.now();
    // The path takes other requests at once, and reads of the block.
    let other = disk.write(9, &contents(3, 9, 1, BLOCK), Shape::Single, &mut bench);
    let read = disk.read(5, 1, Shape::Single, &mut bench);
    let later = disk.write(5, &contents(4, 5, 1, BLOCK), Shape::Single, &mut bench);
    let mut ended = Vec::new();
    while ended.len() < 4 {
        bench.turn();
        for outcome in disk.completed() {
            assert_eq!(outcome.status, Status::Ok);
            let since = Clock::Monotonic.now().0 - lost_at.0;
            ended.push((outcome.id, Duration::from_nanos(since)));
        }
    }
    let at = |id| ended.iter().position(|(of, _)| *of == id).unwrap();
    assert!(at(other).max(at(read)) < at(stuck) && at(stuck) < at(later), "{ended:?}");
    assert!(ended[at(other)].1 < keep_alive, "it waits for nothing: {ended:?}");
    assert!(ended[at(stuck)].1 >= keep_alive, "the target may still execute it: {ended:?}");
    // What the proxy kept arrives at last, and changes nothing.
    two.proxies[0].silence(false);
    pause(Duration::from_millis(50));
    disk.read(5, 1, Shape::Single, &mut bench);
    let outcome = disk.finish(&mut bench);
    assert!(outcome.status == Status::Ok && outcome.data == contents(4, 5, 1, BLOCK));
    disk.close(&mut bench);
}

/// The daemon of a host has died while a write was on its way: its successor comes by another address.
#[test]
fn a_late_change_of_a_predecessor_does_not_land_behind_those_of_its_successor() {
    let target = Running::start();
    let (proxy, other) = (Proxy::start(target.address), target.other);
    let on = OnTarget::at(target, proxy.address, |config| config.reconnect_delay = Duration::from_millis(5));
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    bench.until("the queue", || on.target.queues() == 1);
    // The proxy keeps the write and the connections, as a network does.
    proxy.silence(true);
    let before = proxy.taken();
    disk.write(5, &contents(1, 5, 1, BLOCK), Shape::Single, &mut bench);
    bench.until("the write to be on its way", || proxy.taken() > before + 1000);
    proxy.refuse_only();

    let (env, controllers) = (Env::default(), RemoteControllers::default());
    block_on(controllers.attach(&env, config(other))).unwrap();
    let mut of_successor = bench.open(env.registry(), "disk", aryk_bdev::Access::Shared, 32, 64 << 10);
    of_successor.write(5, &contents(2, 5, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(of_successor.finish(&mut bench).status, Status::Ok);
    assert_eq!(on.target.run(async |target: aryk_nvmf::Target| target.hosts().len()), 1);
    proxy.silence(false);
    bench.until("the loss", || on.controllers.find("nv").unwrap().info().losses > 0);
    of_successor.read(5, 1, Shape::Single, &mut bench);
    let outcome = of_successor.finish(&mut bench);
    assert!(outcome.status == Status::Ok && outcome.data == contents(2, 5, 1, BLOCK));
    of_successor.close(&mut bench);
    block_on(controllers.detach("nv")).unwrap();
    proxy.refuse(false);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

#[test]
fn requests_take_the_paths_that_the_target_and_the_operator_want() {
    let two = Two::new(|_| {});
    let target = [two.on.target.address, two.on.target.other];
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &two.on);
    bench.until("both queues", || [0, 1].into_iter().all(|path| two.path(path).queues.len() == 1));
    assert_eq!(two.path_of_read(&mut disk, &mut bench), [1, 0]);
    let of_second = two.path(1).controller_id;
    block_on(two.controller.prefer(1, of_second)).unwrap();
    assert_eq!(two.path_of_read(&mut disk, &mut bench), [0, 1]);
    assert!(two.path(1).access[0].is_preferred);
    // The target's word comes first.
    two.on.target.set_access(target[1], AnaState::NonOptimized);
    until("the news", || two.path(1).access[0].state == AnaState::NonOptimized);
    assert_eq!(two.path_of_read(&mut disk, &mut bench), [1, 0]);
    two.on.target.set_access(target[0], AnaState::Inaccessible);
    until("the news", || two.path(0).access[0].state == AnaState::Inaccessible);
    assert_eq!(two.path_of_read(&mut disk, &mut bench), [0, 1]);
    // Without any access, requests wait.
    two.on.target.set_access(target[1], AnaState::Change);
    disk.read(0, 1, Shape::Single, &mut bench);
    until("the news", || two.path(1).access[0].state == AnaState::Change);
    (0..1000).for_each(|_| _ = bench.turn());
    assert_eq!(disk.in_flight(), 1);
    two.on.target.set_access(target[0], AnaState::Optimized);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    two.on.target.set_access(target[1], AnaState::Optimized);
    until("the news", || two.path(1).access[0].state == AnaState::Optimized);
    block_on(two.controller.set_policy(1, Policy::RoundRobin(1))).unwrap();
    let taken: Vec<_> = (0..4).map(|_| two.path_of_read(&mut disk, &mut bench)).collect();
    assert!(taken[0] != taken[1] && taken[0] == taken[2] && taken[1] == taken[3], "{taken:?}");
    let none = block_on(two.controller.prefer(1, 0xfff0)).unwrap_err();
    assert!(matches!(none, RemoteError::NoSuchPath(_)), "{none}");
    disk.close(&mut bench);
}

#[test]
fn paths_are_removed_and_added_under_load() {
    let two = Two::new(|_| {});
    let (mut bench, mut random) = (Bench::new(), fastrand::Rng::with_seed(31));
    let mut disk = open(&mut bench, &two.on);
    let progress = AtomicU64::new(0);
    for round in 0..4 {
        verify(&mut bench, &mut disk, 100, &mut random, &progress);
        let leaving = round % 2;
        for i in 0..8 {
            disk.write(2000 + i, &contents(round as u64, 2000 + i, 1, BLOCK), Shape::Single, &mut bench);
        }
        bench.wait("the removal", two.controller.remove_path(leaving)).unwrap();
        assert!(disk.drain(&mut bench).iter().all(|outcome| outcome.status == Status::Ok));
        let last = bench.wait("a refusal", two.controller.remove_path(1 - leaving)).unwrap_err();
        assert!(matches!(last, RemoteError::NoSuchPath(_)), "{last}");
        verify(&mut bench, &mut disk, 100, &mut random, &progress);
        let address = two.proxies[leaving].address;
        bench.wait("the path", two.on.controllers.add_path("nv", address, None)).unwrap();
        let twice = bench.wait("a refusal", two.on.controllers.add_path("nv", address, None)).unwrap_err();
        assert!(matches!(twice, RemoteError::PathExists { .. }), "{twice}");
    }
    assert_eq!(two.controller.info().losses, 0);
    disk.close(&mut bench);
}

#[test]
fn what_a_path_carries_is_counted_until_the_path_is_removed() {
    let two = Two::new(|_| {});
    block_on(two.controller.set_policy(1, Policy::RoundRobin(1))).unwrap();
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &two.on);
    let core = bench.cx().handle().core();
    bench.until("both queues", || two.controller.info().current_paths(1, core) == [0, 1]);
    for lba in 0..4 {
        disk.write(lba, &contents(1, lba, 1, BLOCK), Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    }
    for lba in 0..8 {
        disk.read(lba, 2, Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    }
    disk.command(Op::Unmap, 0, 4, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    // A request that fails is not counted.
    disk.read(u64::MAX / 2, 1, Shape::Single, &mut bench);
    assert_ne!(disk.finish(&mut bench).status, Status::Ok);
    let expected = |all: &[(PathInfo, PathTraffic)]| {
        let kinds = |of: PathTraffic| [of.reads, of.writes, of.unmaps];
        let counts = |of: PathTraffic| kinds(of).map(|carried| (carried.ops, carried.bytes));
        let block = u64::from(BLOCK);
        assert_eq!(counts(all[0].1), [(4, 8 * block), (2, 2 * block), (0, 0)]);
        assert_eq!(counts(all[1].1), [(4, 8 * block), (2, 2 * block), (1, 4 * block)]);
        for carried in all.iter().flat_map(|(_, of)| kinds(*of)).filter(|carried| carried.ops > 0) {
            let shortest = carried.latency_ns_min.unwrap();
            let all = shortest * carried.ops..=carried.latency_ns_max * carried.ops;
            assert!(shortest > 0 && all.contains(&carried.latency_ns), "{carried:?}");
        }
    };
    let traffic = |bench: &mut Bench| bench.wait("the counts", two.controller.traffic(1)).unwrap();
    expected(&traffic(&mut bench));
    // A loss changes nothing, and neither does the end of a channel.
    two.proxies[0].cut();
    bench.until("the loss", || two.path(0).losses == 1 && two.path(0).is_connected);
    expected(&traffic(&mut bench));
    disk.close(&mut bench);
    expected(&traffic(&mut bench));
    bench.wait("the removal", two.controller.remove_path(0)).unwrap();
    let address = two.proxies[0].address;
    bench.wait("the path", two.on.controllers.add_path("nv", address, None)).unwrap();
    let after = traffic(&mut bench);
    assert_eq!((after[0].1, after[1].1.reads.ops), (PathTraffic::default(), 4));
    assert!(bench.wait("a refusal", two.controller.traffic(2)).is_err());
}

#[test]
fn a_client_reads_the_health_of_a_controller_by_a_path_that_is_connected() {
    let two = Two::new(|_| {});
    let read = |page| {
        let command = admin::get_log(page, u32::MAX, 0, size_of::<SmartLog>(), true);
        block_on(two.controller.admin(command))
    };
    let health =
        |answer: AdminAnswer| SmartLog::decode(&answer.data).is_some_and(|_| answer.status.is_success());
    assert!(health(read(log::SMART).unwrap()));
    assert!(!read(0xc0).unwrap().status.is_success(), "a page that there is not");
    two.proxies[0].refuse(true);
    until("the loss", || !two.path(0).is_connected);
    assert!(health(read(log::SMART).unwrap()));
    two.proxies[1].refuse(true);
    until("the loss", || !two.path(1).is_connected);
    assert!(matches!(read(log::SMART), Err(RemoteError::Away(_))));
}

#[test]
fn a_path_to_another_subsystem_is_refused() {
    let two = Two::new(|_| {});
    let mut other = Running::start();
    other.run(async |target: aryk_nvmf::Target| {
        target.remove_subsystem(SUBSYSTEM).await.unwrap();
        let named = aryk_nvmf::NewSubsystem::named(SUBSYSTEM.parse().unwrap());
        let serial = "other".to_owned();
        target.add_subsystem(aryk_nvmf::NewSubsystem { allow_any_host: true, serial, ..named }).unwrap();
    });
    let any = "127.0.0.1:0".parse().unwrap();
    let listen = async move |target: aryk_nvmf::Target| {
        target
            .listen(SUBSYSTEM, aryk_nvmf::Address::tcp(any), AnaState::Optimized, aryk_nvmf::Channel::Plain)
            .await
            .unwrap()
            .socket
    };
    let address = other.run(listen);
    let refused = block_on(two.on.controllers.add_path("nv", address, None)).unwrap_err();
    assert!(refused.to_string().contains("its serial number is 'other'"), "{refused}");
    assert_eq!(two.controller.info().paths.len(), 2);
    other.stop();
}

#[test]
fn a_controller_is_attached_by_any_of_its_paths() {
    let target = Running::start();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (address, other) = (target.address, target.other);
    let on = OnTarget::at(target, nobody, |config| {
        config.further = vec![(address, None), (other, None)];
        config.policies.insert(1, Policy::QueueDepth);
        config.reconnect_delay = Duration::from_millis(5);
    });
    let controller = on.controllers.find("nv").unwrap();
    let connected = || controller.info().paths.iter().map(|path| path.is_connected).collect::<Vec<_>>();
    until("the other paths", || connected() == [false, true, true]);
    let info = controller.info();
    assert!(info.paths[1].access[0].policy == Policy::QueueDepth, "{info:?}");
    let mut bench = Bench::new();
    let mut disk = open(&mut bench, &on);
    let core = bench.cx().handle().core();
    bench.until("both queues", || controller.info().current_paths(1, core) == [1, 2]);
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

#[test]
fn a_namespace_that_goes_while_a_path_is_lost_takes_its_disk_with_it() {
    let two = Two::new(|_| {});
    two.proxies[0].refuse(true);
    until("the loss", || !two.path(0).is_connected);
    two.on.target.run(async |target: aryk_nvmf::Target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
    });
    until("the disk to go", || two.on.env.registry().find("disk").is_err());
}

#[test]
fn a_loss_that_drops_an_order_to_read_the_access_leaves_room_for_the_next() {
    let two = Two::new(|_| {});
    // The path is lost before its task has the order.
    assert!(two.controller.shared.ask_access(0) && !two.controller.shared.ask_access(0));
    let losses = two.path(0).losses;
    two.proxies[0].cut();
    until("the path to be back", || two.path(0).losses > losses && two.path(0).is_connected);
    until("room for an order", || two.controller.shared.ask_access(0));
}

#[test]
fn a_controller_that_is_being_connected_has_its_paths() {
    // It accepts, and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let controllers = RemoteControllers::default();
    let mut config = config(address);
    config.connect_patience = Duration::from_millis(500);
    std::thread::scope(|scope| {
        let attached = scope.spawn(|| block_on(controllers.attach(&Env::default(), config)).is_ok());
        until("the attempt", || controllers.find("nv").is_ok());
        let info = controllers.find("nv").unwrap().info();
        let [path] = &info.paths[..] else { panic!("{info:?}") };
        assert!(path.address == address && !path.is_connected && info.phase == RemotePhase::Connecting);
        assert!(!attached.join().unwrap());
    });
}

/// The thread learns of a loss before it learns of a driver that has a request at the lost controller.
#[test]
fn requests_of_a_driver_that_begins_during_a_loss_go_on() {
    let two = Two::new(|_| {});
    let (mut bench, mut other) = (Bench::new(), Bench::new());
    let disk = open(&mut bench, &two.on);
    let prepared = other.prepare(two.on.env.registry(), "disk", Access::Shared, 4, 64 << 10);
    let has_all = || [0, 1].iter().all(|path| two.path(*path).queues.len() == 2);
    bench.until("both paths", || {
        other.turn();
        has_all()
    });
    // The thread waits for the first reactor in step 2 of the loss of a path.
    two.proxies[1].refuse(true);
    while two.controller.shared.gate().0 < 2 {
        for reactor in [&mut bench, &mut other] {
            let since = Clock::Monotonic.now();
            reactor.until("step 1", || Clock::Monotonic.now().since(since) > Duration::from_millis(10));
        }
    }
    // The other path is about to be lost when the second reactor begins with it.
    two.controller.reset();
    two.proxies[0].silence(true);
    let mut late = other.open_prepared(prepared);
    let taken = two.proxies[0].taken();
    late.write(5, &contents(3, 5, 1, BLOCK), Shape::Single, &mut other);
    other.until("the command to leave", || two.proxies[0].taken() > taken);
    let mut both = |what: &str, is_done: &mut dyn FnMut() -> bool| {
        bench.until(what, || {
            other.turn();
            is_done()
        });
    };
    both("step 2 of both losses", &mut || two.controller.shared.gate().0 == 4);
    two.proxies[0].silence(false);
    let mut outcomes = Vec::new();
    both("the end of the request", &mut || {
        outcomes.append(&mut late.completed());
        !outcomes.is_empty()
    });
    assert_eq!(outcomes[0].status, Status::Ok);
    late.close(&mut other);
    disk.close(&mut bench);
}
