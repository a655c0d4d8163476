//! Memory of a VM that an NVMe controller still uses: the region that is removed, and the VM that goes. The memory stays mapped
//! for the controller until the command has ended, and another VM of the same controller sees nothing of that.

use super::guest::{Guest, LEN, fill, is_full_of, region};
use super::{SOON, run, run_blocking, until};
use aryk_bdev::Env;
use aryk_bdev_nvme::{Config, Controllers as Drives, Dma, Location, OnTimeout};
use aryk_front_end::Operation;
use aryk_nvme_model::{Action, Data, Model, NamespaceConfig, Queue, Rule, Running};
use aryk_reactor::{CoreSet, Engine, Options as ReactorOptions, Reactors, SleepPolicy};
use aryk_vhost_device::{Controllers, Link, Options};
use aryk_vhost_user::SocketOptions;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const READ: u8 = 2;

/// A drive with a namespace for each of the controllers `a` and `b`. It accesses the VMs' memory by itself.
struct Host {
    directory: tempfile::TempDir,
    env: Env,
    model: Arc<Model>,
    drives: Drives,
    controllers: Controllers,
    _running: Running,
    /// Dropped last.
    _reactors: Rc<Reactors>,
}

impl Host {
    async fn new(change: impl FnOnce(&mut Config)) -> Self {
        aryk_dma::install_fault_handler();
        let options = ReactorOptions {
            cores: "0x3".parse::<CoreSet>().expect("a mask"),
            policy: SleepPolicy::Adaptive,
            engine: Engine::Auto,
            watchdog: Duration::from_secs(60),
        };
        let reactors = Rc::new(Reactors::start(&options).expect("reactors start"));
        let env = Env::new(Arc::default(), &reactors);
        let namespaces = [1, 2].map(|nsid| (nsid, NamespaceConfig::new(1 << 15, 0, nsid.into())));
        let model = aryk_nvme_model::Config {
            namespaces: namespaces.into(),
            data: Data::Kept,
            ..aryk_nvme_model::Config::default()
        };
        let model = Model::new("model", model).expect("memory");
        let running = model.run().expect("a thread");
        let drives = Drives::default();
        let mut config = Config::new("nv", Location::Model(Arc::<Model>::clone(&model)));
        config.dma = Dma::Pin;
        change(&mut config);
        drives.attach(&env, config).await.expect("attach the model");
        let directory = tempfile::tempdir().expect("a directory");
        let memory = env.memory().clone();
        let controllers = Controllers::new(directory.path(), 1024, memory, Rc::clone(&reactors));
        for (name, disk) in [("a", "nvn1"), ("b", "nvn2")] {
            let link = Link::Listen(SocketOptions::default());
            let options = Options { name: name.to_owned(), cores: None, queues: 1, link, delay: false };
            aryk_vhost_blk::create(&controllers, env.registry(), options, disk, false).expect("a controller");
        }
        Self { directory, env, model, drives, controllers, _running: running, _reactors: reactors }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn guest(&self, name: &str) -> Guest {
        let socket = self.socket(name);
        run_blocking(move || Guest::connect(&socket, SOON).expect("a session")).await
    }

    /// A guest that is used all the time, each of whose requests takes less than a second, until `is_over`.
    fn other_guest(&self, is_over: tokio::sync::oneshot::Receiver<()>) -> impl Future<Output = u64> {
        let (socket, mut is_over) = (self.socket("b"), is_over);
        run_blocking(move || {
            let mut guest = Guest::connect(&socket, SOON).expect("a session");
            let memory = region();
            guest.plug(0, &memory).expect("add a region");
            let mut rounds = 0;
            while is_over.try_recv().is_err() {
                for operation in [Operation::Write, Operation::Read] {
                    fill(&memory, if operation == Operation::Write { rounds as u8 } else { 0xee });
                    guest.submit(0, operation, 0, rounds % 8 * LEN);
                    assert_eq!(guest.take(Duration::from_secs(1)), Some(true), "{operation:?} {rounds}");
                    assert!(is_full_of(&memory, rounds as u8));
                }
                rounds += 1;
            }
            rounds
        })
    }

    fn on_next_read(&self, action: Action) {
        let rule = Rule { nsid: Some(1), ..Rule::once(Queue::Io, READ, action) };
        self.model.with(|model| model.faults().add(rule));
    }

    /// Mappings of the drive's IOMMU, and whether the drive has a command of the guest `a`.
    fn mappings(&self) -> usize {
        self.model.with(|model| model.mappings())
    }

    fn resets(&self) -> u64 {
        self.drives.list()[0].counts().resets
    }

    fn registered(&self) -> u64 {
        self.env.memory().clients().remove(0).registered
    }

    /// Ends the back-end, and checks the drive's accesses.
    async fn end(self) {
        let client = self.env.memory().clients().remove(0);
        assert_eq!((client.bounced, client.failed), (0, 0), "the drive accesses all memory by itself");
        self.controllers.delete_all().await;
        self.drives.detach("nv").await.expect("the controller is there");
        let violations = self.model.with(|model| model.violations().clone());
        assert_eq!(violations.count, 0, "{:?}", violations.first);
        // The guests' memory is unregistered in the background.
        until("the end of all mappings", || self.mappings() == 0).await;
    }
}

/// Waits until the guest's command is at the drive, without a change of the mappings.
async fn until_held(host: &Host) {
    until("the command at the drive", || host.model.with(|model| model.held_commands()) > 0).await;
}

#[test]
fn a_removed_region_stays_mapped_for_the_drive_until_its_last_command_has_ended() {
    run(async {
        let host = Host::new(|_| {}).await;
        let mut guest = host.guest("a").await;
        let memory = region();
        let (mut guest, memory) = run_blocking(move || {
            guest.plug(0, &memory).expect("add a region");
            fill(&memory, 7);
            guest.run(Operation::Write, 0, 0);
            fill(&memory, 0);
            (guest, memory)
        })
        .await;
        let (over, is_over) = tokio::sync::oneshot::channel();
        let other = host.other_guest(is_over);
        until("the other guest's memory", || host.registered() == 4).await;
        let mappings = host.mappings();
        // The drive writes to the region long after the request for its removal.
        host.on_next_read(Action::Delay(2_500_000_000));
        guest.submit(0, Operation::Read, 0, 0);
        until_held(&host).await;
        let removing = run_blocking(move || {
            guest.unplug(0, &memory).expect("remove a region");
            (guest, memory)
        });
        tokio::pin!(removing);
        let early = tokio::time::timeout(Duration::from_millis(1800), &mut removing).await;
        assert!(early.is_err(), "the drive still writes to the region");
        assert_eq!((host.mappings(), host.registered(), host.resets()), (mappings, 4, 0));
        let (mut guest, memory) = removing.await;
        assert!(is_full_of(&memory, 7), "the drive had access to the region");
        let answer = run_blocking(move || (guest.take(SOON), guest)).await;
        assert_eq!(answer.0, Some(true));
        until("the end of the mapping", || host.mappings() == mappings - 1).await;
        assert_eq!((host.registered(), host.resets()), (3, 0));
        over.send(()).expect("the other guest runs");
        let rounds = other.await;
        assert!(rounds > 100, "the other guest waited: {rounds} rounds");
        drop((answer, memory));
        host.end().await;
    });
}

/// A guest with a command that the drive does not end disconnects. `resets` is how often the drive is reset after the time limit.
fn a_guest_goes(is_abortable: bool, on_timeout: OnTimeout, resets: u64) {
    run(async move {
        let limit = Duration::from_secs(3);
        let host = Host::new(|config| {
            config.options.io.command = limit.as_nanos() as u64;
            config.on_timeout = on_timeout;
        })
        .await;
        let guest = host.guest("a").await;
        let memory = region();
        let mut guest = run_blocking(move || {
            guest.plug(0, &memory).expect("add a region");
            guest
        })
        .await;
        let (over, is_over) = tokio::sync::oneshot::channel();
        let other = host.other_guest(is_over);
        until("the other guest's memory", || host.registered() == 4).await;
        let mappings = host.mappings();
        host.on_next_read(Action::Stick { is_abortable });
        let began = tokio::time::Instant::now();
        guest.submit(0, Operation::Read, 0, 0);
        until_held(&host).await;
        drop(guest);
        while began.elapsed() < limit - Duration::from_millis(500) {
            assert_eq!((host.mappings(), host.registered(), host.resets()), (mappings, 4, 0));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        until("the end of both mappings", || host.mappings() == mappings - 2).await;
        assert!(began.elapsed() >= limit, "before the time limit: {:?}", began.elapsed());
        assert_eq!((host.registered(), host.resets()), (2, resets));
        over.send(()).expect("the other guest runs");
        let rounds = other.await;
        assert!(rounds > 100, "the other guest waited: {rounds} rounds");
        // A successor of the guest is served.
        let mut guest = host.guest("a").await;
        let guest = run_blocking(move || {
            let memory = region();
            guest.plug(0, &memory).expect("add a region");
            guest.run(Operation::Read, 0, 0);
            guest
        });
        drop(guest.await);
        host.end().await;
    });
}

#[test]
fn memory_of_a_guest_that_goes_stays_mapped_until_the_drive_has_aborted_its_command() {
    a_guest_goes(true, OnTimeout::Abort, 0);
}

#[test]
fn memory_of_a_guest_that_goes_stays_mapped_until_the_drive_is_reset() {
    a_guest_goes(false, OnTimeout::Reset, 1);
}
