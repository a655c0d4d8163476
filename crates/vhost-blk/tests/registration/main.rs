//! Tests that add and remove guests' memory while a device that accesses it by DMA serves requests: through a front-end's
//! messages and an IOMMU that is slow, fails, or does not answer.

mod guest;
mod nvme;

use aryk_bdev::{Blocks, Env, MemoryClientInfo};
use aryk_bdev_conformance::{Behaviour, Container, Iommu, create_dma_disk};
use aryk_front_end::{Error, Memory, Operation};
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

/// The back-end: two controllers, `a` and `b`, each with a disk, and one IOMMU for both.
struct Host {
    directory: tempfile::TempDir,
    env: Env,
    iommu: Iommu,
    controllers: Controllers,
    /// Dropped last.
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
        let container =
            Container::attach(env.memory(), iommu.clone()).await.expect("the memory has no other client");
        let directory = tempfile::tempdir().expect("a directory");
        let memory = env.memory().clone();
        let controllers = Controllers::new(directory.path(), 1024, memory, Rc::clone(&reactors));
        for name in ["a", "b"] {
            let disk = format!("disk-{name}");
            create_dma_disk(&env, &disk, Blocks(1 << 15), Arc::clone(&container))
                .expect("create a test disk");
            let link = Link::Listen(SocketOptions::default());
            let options = Options { name: name.to_owned(), cores: None, queues: 1, link, delay: false };
            let created = aryk_vhost_blk::create(&controllers, env.registry(), options, &disk, false);
            created.expect("create a test disk");
        }
        Self { directory, env, iommu, controllers, _reactors: reactors }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn guest(&self, name: &str) -> Guest {
        let socket = self.socket(name);
        run_blocking(move || Guest::connect(&socket, SOON).expect("a session")).await
    }

    fn client(&self) -> MemoryClientInfo {
        self.env.memory().clients().remove(0)
    }

    /// Ends the back-end, and checks the device's accesses.
    async fn end(self) {
        self.controllers.delete_all().await;
        until("the end of all mappings", || self.iommu.mapped() == 0).await;
        for disk in ["disk-a", "disk-b"] {
            let removed = tokio::time::timeout(SOON, self.env.registry().remove(disk)).await;
            removed.expect("no disk is open").expect("the disk exists");
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

/// Runs blocking code on its own thread, as a guest would run.
fn run_blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> impl Future<Output = T> {
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

/// Adds regions, writes and reads with them, and removes them while reads are in flight.
fn plug_and_unplug(guest: &mut Guest, rounds: u64) {
    for round in 0..rounds {
        let (at, byte, offset) = (round % 5, round as u8, round % 8 * LEN);
        let (from, to) = (region(), region());
        guest.plug(at, &from).expect("add a region");
        guest.plug(at + 10, &to).expect("add a region");
        fill(&from, byte);
        guest.run(Operation::Write, at, offset);
        guest.run(Operation::Read, at + 10, offset);
        assert!(is_full_of(&to, byte), "round {round}");
        // The reply to the removal waits for the reads that the device has started. The other reads no longer find the memory,
        // and fail.
        for slot in 0..8 {
            guest.submit(slot, Operation::Read, at + 10, offset);
        }
        guest.unplug(at + 10, &to).expect("remove a region");
        for _ in 0..8 {
            assert!(guest.take(SOON).is_some());
        }
        guest.unplug(at, &from).expect("remove a region");
    }
}

#[test]
fn regions_added_and_removed_under_load_are_registered_during_each_access() {
    run(async {
        let host = Host::new(Behaviour { delay_us_max: 3000, fails_every: 7, ..Behaviour::default() }).await;
        let (mut a, mut b) = (host.guest("a").await, host.guest("b").await);
        let a = run_blocking(move || {
            plug_and_unplug(&mut a, 60);
            a
        });
        let b = run_blocking(move || {
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
fn requests_in_unregistered_regions_use_bounce_buffers_and_are_counted() {
    run(async {
        let host = Host::new(Behaviour { fails_every: 1, ..Behaviour::default() }).await;
        let mut guest = host.guest("a").await;
        let guest = run_blocking(move || {
            let memory = region();
            guest.plug(0, &memory).expect("add a region");
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
        let plugged = without.iter().find(|without| without.len == LEN).expect("the region has no mapping");
        assert_eq!((&*plugged.owner, plugged.bounced), ("a", 2));
        drop(guest);
        host.end().await;
    });
}

#[test]
fn a_region_is_unregistered_after_the_last_request_that_uses_it() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let guest = host.guest("a").await;
        let memory = region();
        let (mut guest, memory) = run_blocking(move || {
            guest.plug(0, &memory).expect("add a region");
            (guest, memory)
        })
        .await;
        host.iommu.hold_requests(true);
        guest.submit(0, Operation::Read, 0, 0);
        until("the request to reach the device", || host.iommu.in_flight() == 1).await;
        let removing = run_blocking(move || {
            guest.unplug(0, &memory).expect("remove a region");
            (guest, memory)
        });
        tokio::pin!(removing);
        // Longer than the second after which the back-end requests an abort, which this device cannot do.
        let early = tokio::time::timeout(Duration::from_millis(1500), &mut removing).await;
        assert!(early.is_err(), "the device still writes to the region");
        assert_eq!((host.iommu.mapped(), host.iommu.accesses().ended), (2, 0));
        host.iommu.hold_requests(false);
        let (mut guest, memory) = removing.await;
        assert_eq!(run_blocking(move || guest.take(SOON)).await, Some(true));
        drop(memory);
        until("the end of the registration", || host.iommu.accesses().ended >= 1).await;
        host.end().await;
    });
}

#[test]
fn a_hanging_registration_delays_only_its_own_front_end_until_its_timeout() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let (a, mut b) = (host.guest("a").await, host.guest("b").await);
        host.env.memory().set_patience(Duration::from_secs(2));
        host.iommu.set_behaviour(Behaviour { holds_registrations: true, ..Behaviour::default() });
        let plugging = run_blocking(move || {
            let memory = region();
            a.plug(0, &memory).expect("add a region");
            (a, memory)
        });
        tokio::pin!(plugging);
        until("the registration", || host.iommu.held() > 0).await;
        // Meanwhile the other session is served.
        let other = run_blocking(move || {
            b.restart().expect("the queue starts");
            b
        });
        let b = tokio::select! {
            biased;
            b = other => b,
            _ = &mut plugging => panic!("the reply came before the registration and before its timeout"),
        };
        let (mut a, memory) = plugging.await;
        assert_eq!((host.client().registering, host.client().late), (1, 1));
        // Requests use the region without its IOMMU mapping (by bounce buffers) until the mapping is ready.
        let a = run_blocking(move || {
            a.run(Operation::Read, 0, 0);
            a
        })
        .await;
        assert_eq!(host.iommu.accesses().bounced, 1);
        host.iommu.release();
        until("the mapping", || host.client().registering == 0).await;
        let mut a = a;
        let a = run_blocking(move || {
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

/// How often this process, which is the guest and the back-end, maps a region.
fn mappings_of(region: &Memory) -> usize {
    let inode = rustix::fs::fstat(region.fd()).expect("an open file").st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

#[test]
fn memory_of_a_disconnected_front_end_stays_mapped_until_its_registration_ends() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let socket = host.socket("a");
        let a =
            run_blocking(move || Guest::connect(&socket, Duration::from_secs(1)).expect("a session")).await;
        host.iommu.set_behaviour(Behaviour { holds_registrations: true, ..Behaviour::default() });
        let memory = run_blocking(move || {
            let memory = region();
            assert!(
                matches!(a.plug(0, &memory), Err(Error::Silent(_))),
                "the front-end disconnects before the reply"
            );
            memory
        })
        .await;
        assert_eq!((host.iommu.held(), mappings_of(&memory)), (1, 2));
        host.iommu.set_behaviour(Behaviour::default());
        // The next front-end is served far sooner than after the ten seconds of patience.
        let began = tokio::time::Instant::now();
        let mut next = host.guest("a").await;
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        let next = run_blocking(move || {
            let memory = region();
            next.plug(1, &memory).expect("add a region");
            next.run(Operation::Read, 1, 0);
            next.unplug(1, &memory).expect("remove a region");
            next
        })
        .await;
        assert_eq!(host.client().registering, 1, "the first registration is still in progress");
        assert_eq!(mappings_of(&memory), 2, "the back-end still maps its memory");
        let ended = host.iommu.accesses().ended;
        host.iommu.release();
        until("the end of the registration", || host.iommu.accesses().ended > ended).await;
        drop((next, memory));
        host.end().await;
    });
}

#[test]
fn a_front_end_with_too_many_regions_being_unregistered_waits() {
    run(async {
        let host = Host::new(Behaviour::default()).await;
        let socket = host.socket("a");
        host.iommu.set_behaviour(Behaviour { holds_ends: true, ..Behaviour::default() });
        let rounds = run_blocking(move || {
            let guest = Guest::connect(&socket, Duration::from_secs(2)).expect("a session");
            for round in 0..3000 {
                let memory = region();
                match guest.plug(0, &memory) {
                    Ok(()) => guest.unplug(0, &memory).expect("a removal is answered at once"),
                    Err(Error::Silent(_)) => return round,
                    Err(error) => panic!("{error}"),
                }
            }
            3000
        })
        .await;
        // A guest may have 509 regions, and as many regions whose unregistration is in progress.
        assert!((900..1100).contains(&rounds), "{rounds} regions");
        assert_eq!(host.client().unregistering, rounds);
        // The front-end has disconnected. Its successor has the same limit, and other front-ends have their own.
        let b = host.guest("b").await;
        let b = run_blocking(move || {
            b.plug(0, &region()).expect("add a region");
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
