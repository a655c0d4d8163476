//! Guests' memory comes and goes while a device that accesses it by itself serves requests: by way of a front-end's messages, and
//! an IOMMU that takes its time, fails, or does not answer.

mod guest;

use aryk_bdev::{Env, MemoryClientInfo};
use aryk_bdev_conformance::{Behaviour, Container, Iommu, create_dma_disk};
use aryk_front_end::{Error, Operation};
use aryk_reactor::{CoreSet, Engine, Options as ReactorOptions, Reactors, SleepPolicy};
use aryk_vhost_device::{Controllers, Link, Options};
use aryk_vhost_user::SocketOptions;
use guest::{Guest, LEN, fill, is_full_of, region};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

const SOON: Duration = Duration::from_secs(20);

/// The daemon's side: two controllers, `a` and `b`, each with a disk below one IOMMU.
struct Host {
    directory: tempfile::TempDir,
    env: Env,
    iommu: Iommu,
    controllers: Controllers,
    /// The last to go.
    _reactors: Rc<Reactors>,
}

impl Host {
    async fn new(behaviour: Behaviour) -> Self {
        aryk_dma::install_fault_handler();
        let options = ReactorOptions {
            cores: "0x3".parse::<CoreSet>().expect("a mask"),
            policy: SleepPolicy::Adaptive,
            engine: Engine::Auto,
            watchdog: Duration::from_secs(60),
        };
        let reactors = Rc::new(Reactors::start(&options).expect("reactors start"));
        let env = Env::new(Arc::default(), &reactors);
        let iommu = Iommu::new(behaviour);
        let container = Container::attach(env.memory(), iommu.clone()).await.expect("the first client");
        let directory = tempfile::tempdir().expect("a directory");
        let memory = env.memory().clone();
        let controllers = Controllers::new(directory.path(), 1024, memory, Rc::clone(&reactors));
        for name in ["a", "b"] {
            let disk = format!("disk-{name}");
            create_dma_disk(&env, &disk, 1 << 15, Arc::clone(&container)).expect("it can be made");
            let link = Link::Listen(SocketOptions::default());
            let options = Options { name: name.to_owned(), cores: None, queues: 1, link, delay: false };
            let created = aryk_vhost_blk::create(&controllers, env.registry(), options, &disk, false);
            created.expect("it can be made");
        }
        Self { directory, env, iommu, controllers, _reactors: reactors }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn guest(&self, name: &str) -> Guest {
        let socket = self.socket(name);
        apart(move || Guest::connect(&socket, SOON).expect("a session")).await
    }

    fn client(&self) -> MemoryClientInfo {
        self.env.memory().clients().remove(0)
    }

    /// Ends everything, and checks the accesses.
    async fn end(self) {
        self.controllers.delete_all().await;
        until("the memory to leave", || self.iommu.mapped() == 0).await;
        for disk in ["disk-a", "disk-b"] {
            let removed = tokio::time::timeout(SOON, self.env.registry().remove(disk)).await;
            removed.expect("no device is busy").expect("it is registered");
        }
        assert_eq!(self.iommu.accesses().violations, 0);
        assert!(self.env.memory().clients().is_empty(), "the IOMMU is detached with the last disk");
    }
}

async fn until(what: &str, is_done: impl Fn() -> bool) {
    let wait = async {
        while !is_done() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.unwrap_or_else(|_| panic!("waited too long for {what}"));
}

/// Runs what blocks on a thread of its own, as a guest is on one.
fn apart<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> impl Future<Output = T> {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::spawn(move || drop(sender.send(f())));
    async {
        let result = receiver.await;
        let ended = thread.join();
        result
            .unwrap_or_else(|_| std::panic::resume_unwind(ended.expect_err("it has ended without a result")))
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// Plugs regions, writes and reads with them, and unplugs them while reads are in flight.
fn plug_and_unplug(guest: &mut Guest, rounds: u64) {
    for round in 0..rounds {
        let (at, byte, offset) = (round % 5, round as u8, round % 8 * LEN);
        let (from, to) = (region(), region());
        guest.plug(at, &from).expect("there is room");
        guest.plug(at + 10, &to).expect("there is room");
        fill(&from, byte);
        guest.run(Operation::Write, at, offset);
        guest.run(Operation::Read, at + 10, offset);
        assert!(is_full_of(&to, byte), "round {round}");
        // The reply to the removal waits for the reads that the device has. The others find no memory, and fail.
        for slot in 0..8 {
            guest.submit(slot, Operation::Read, at + 10, offset);
        }
        guest.unplug(at + 10, &to).expect("it is there");
        for _ in 0..8 {
            assert!(guest.take(SOON).is_some());
        }
        guest.unplug(at, &from).expect("it is there");
    }
}

#[test]
fn regions_come_and_go_under_requests_and_each_access_finds_its_memory_registered() {
    run(async {
        let host = Host::new(Behaviour { delay_us_max: 3000, fails_every: 7, ..Behaviour::default() }).await;
        let (mut a, mut b) = (host.guest("a").await, host.guest("b").await);
        let a = apart(move || {
            plug_and_unplug(&mut a, 60);
            a
        });
        let b = apart(move || {
            plug_and_unplug(&mut b, 60);
            b
        });
        drop(tokio::join!(a, b));
        let (accesses, client) = (host.iommu.accesses(), host.client());
        assert!(accesses.direct > 150, "{accesses:?}");
        assert!(client.failed >= 240 / 7, "{client:?}");
        assert_eq!(client.bounced, accesses.bounced, "{client:?}");
        assert!(accesses.bounced > 20 && client.late == 0, "{accesses:?} {client:?}");
        host.end().await;
    });
}

#[test]
fn without_a_registration_requests_use_bounce_buffers_and_are_counted_by_region() {
    run(async {
        let host = Host::new(Behaviour { fails_every: 1, ..Behaviour::default() }).await;
        let mut guest = host.guest("a").await;
        let guest = apart(move || {
            let memory = region();
            guest.plug(0, &memory).expect("there is room");
            fill(&memory, 7);
            guest.run(Operation::Write, 0, 0);
            fill(&memory, 0);
            guest.run(Operation::Read, 0, 0);
            assert!(is_full_of(&memory, 7));
            guest
        })
        .await;
        let (accesses, client) = (host.iommu.accesses(), host.client());
        assert_eq!((accesses.direct, accesses.bounced), (0, 2));
        assert_eq!((client.failed, client.registered, client.bounced), (2, 0, 2));
        let without = host.env.memory().without_value(9);
        let plugged = without.iter().find(|without| without.len == LEN).expect("it has no value");
        assert_eq!((&*plugged.owner, plugged.bounced), ("a", 2));
        drop(guest);
        host.end().await;
    });
}

#[test]
fn a_region_is_removed_after_the_requests_that_use_it_and_unregistered_after_that() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let guest = host.guest("a").await;
        let memory = region();
        let (mut guest, memory) = apart(move || {
            guest.plug(0, &memory).expect("there is room");
            (guest, memory)
        })
        .await;
        host.iommu.hold_requests(true);
        guest.submit(0, Operation::Read, 0, 0);
        until("the device to have the request", || host.iommu.in_flight() == 1).await;
        let removing = apart(move || {
            guest.unplug(0, &memory).expect("it is there");
            (guest, memory)
        });
        tokio::pin!(removing);
        // Longer than the second after which the daemon asks for an abort, which this device cannot do.
        let early = tokio::time::timeout(Duration::from_millis(1500), &mut removing).await;
        assert!(early.is_err(), "the device still writes to the region");
        assert_eq!((host.iommu.mapped(), host.iommu.accesses().ended), (2, 0));
        host.iommu.hold_requests(false);
        let (mut guest, memory) = removing.await;
        assert_eq!(apart(move || guest.take(SOON)).await, Some(true));
        drop(memory);
        until("the end of the registration", || host.iommu.accesses().ended >= 1).await;
        host.end().await;
    });
}

#[test]
fn a_registration_that_hangs_holds_up_its_front_end_with_patience_and_nothing_else() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let (a, mut b) = (host.guest("a").await, host.guest("b").await);
        host.env.memory().set_patience(Duration::from_secs(2));
        host.iommu.set_behaviour(Behaviour { holds_registrations: true, ..Behaviour::default() });
        let plugging = apart(move || {
            let memory = region();
            a.plug(0, &memory).expect("there is room");
            (a, memory)
        });
        tokio::pin!(plugging);
        until("the registration", || host.iommu.held() > 0).await;
        // Meanwhile the other session goes on.
        let other = apart(move || {
            b.restart().expect("it can be started");
            b
        });
        let b = tokio::select! {
            biased;
            b = other => b,
            _ = &mut plugging => panic!("the reply came before the registration, and before the patience was over"),
        };
        let (mut a, memory) = plugging.await;
        assert_eq!((host.client().registering, host.client().late), (1, 1));
        // The region is used without its value, until the value is there.
        let a = apart(move || {
            a.run(Operation::Read, 0, 0);
            a
        })
        .await;
        assert_eq!(host.iommu.accesses().bounced, 1);
        host.iommu.release();
        until("the value", || host.client().registering == 0).await;
        let mut a = a;
        let a = apart(move || {
            a.run(Operation::Read, 0, 0);
            a
        })
        .await;
        assert_eq!((host.iommu.accesses().bounced, host.iommu.accesses().direct), (1, 1));
        host.iommu.set_behaviour(Behaviour::default());
        drop((a, b, memory));
        host.end().await;
    });
}

#[test]
fn a_front_end_that_leaves_during_a_registration_is_succeeded_and_its_memory_stays_until_that_is_over() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let socket = host.socket("a");
        let a = apart(move || Guest::connect(&socket, Duration::from_secs(1)).expect("a session")).await;
        host.iommu.set_behaviour(Behaviour { holds_registrations: true, ..Behaviour::default() });
        let memory = apart(move || {
            let memory = region();
            assert!(matches!(a.plug(0, &memory), Err(Error::Silent(_))), "it leaves before the reply");
            memory
        })
        .await;
        assert_eq!(host.iommu.held(), 1);
        let before = aryk_dma::mapped().1;
        host.iommu.set_behaviour(Behaviour::default());
        // The next front-end is served, far sooner than after the ten seconds of patience.
        let began = tokio::time::Instant::now();
        let mut next = host.guest("a").await;
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        let next = apart(move || {
            let memory = region();
            next.plug(1, &memory).expect("there is room");
            next.run(Operation::Read, 1, 0);
            next.unplug(1, &memory).expect("it is there");
            next
        })
        .await;
        assert_eq!(host.client().registering, 1, "the first is not over");
        assert!(aryk_dma::mapped().1 >= before, "its memory is still mapped");
        let ended = host.iommu.accesses().ended;
        host.iommu.release();
        until("the end of the registration", || host.iommu.accesses().ended > ended).await;
        drop((next, memory));
        host.end().await;
    });
}

#[test]
fn a_front_end_whose_memory_is_not_given_back_waits_before_it_makes_the_daemon_hold_more_than_its_share() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let socket = host.socket("a");
        host.iommu.set_behaviour(Behaviour { holds_ends: true, ..Behaviour::default() });
        let rounds = apart(move || {
            let guest = Guest::connect(&socket, Duration::from_secs(2)).expect("a session");
            for round in 0..3000 {
                let memory = region();
                match guest.plug(0, &memory) {
                    Ok(()) => guest.unplug(0, &memory).expect("a removal is not held up"),
                    Err(Error::Silent(_)) => return round,
                    Err(error) => panic!("{error}"),
                }
            }
            3000
        })
        .await;
        // A guest may have 509 regions, and as many that are being given back.
        assert!((900..1100).contains(&rounds), "{rounds} regions");
        assert_eq!(host.client().unregistering, rounds);
        // The front-end has left. Its successor has the same share, and others have theirs.
        let b = host.guest("b").await;
        let b = apart(move || {
            b.plug(0, &region()).expect("there is room");
            b
        })
        .await;
        host.iommu.set_behaviour(Behaviour::default());
        host.iommu.release();
        let a = host.guest("a").await;
        drop((a, b));
        host.end().await;
    });
}
