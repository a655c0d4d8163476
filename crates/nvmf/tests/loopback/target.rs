//! A target with one subsystem, one disk in memory, and two hosts that may connect.

use aryk_bdev::{Blocks, Env, Identity, Registry};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, Limits, NewNamespace, NewSubsystem, SubsystemInfo, Target};
use aryk_reactor::{CoreSet, Engine, Options, Reactors, SleepPolicy};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

pub const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
pub const BLOCK: usize = 4096;
pub const BLOCKS: usize = 64;
pub const IN_CAPSULE_MAX: u32 = 8192;

type Call = Box<dyn AsyncCall + Send>;

/// A call of the target, on its thread.
trait AsyncCall {
    fn call(self: Box<Self>, target: Target) -> std::pin::Pin<Box<dyn Future<Output = ()>>>;
}

impl<F: AsyncFnOnce(Target) + 'static> AsyncCall for F {
    fn call(self: Box<Self>, target: Target) -> std::pin::Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(async move { self(target).await })
    }
}

/// Names the way in which the target reaches the sockets of I/O queues.
pub const FORM: &str = "ARYK_TEST_SOCKETS";

/// The kernel interface of the reactors, and whether sends make no copy.
fn form() -> (Engine, bool) {
    match std::env::var(FORM).as_deref() {
        Err(_) => (Engine::Auto, false),
        Ok("zero-copy") => (Engine::IoUring, true),
        Ok("epoll") => (Engine::Epoll, false),
        Ok(form) => panic!("{form}"),
    }
}

/// A running target.
pub struct Running {
    pub address: SocketAddr,
    env: Env,
    calls: UnboundedSender<Call>,
    thread: JoinHandle<()>,
    reactors: Reactors,
}

impl Running {
    /// A target on one reactor.
    pub fn start() -> Self {
        Self::start_on(1)
    }

    /// A target on this many reactors.
    pub fn start_on(count: usize) -> Self {
        let cores = CoreSet::allowed().iter().take(count).collect();
        let (engine, zero_copy) = form();
        let options = Options { cores, policy: SleepPolicy::Interrupt, engine, ..Options::default() };
        let reactors = Reactors::start(&options).unwrap();
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let config = aryk_bdev_malloc::Config {
            identity: Identity::named("disk"),
            block_size: BLOCK as u32,
            physical_block_size: BLOCK as u32,
            blocks: Blocks(BLOCKS as u64),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, config).unwrap();
        let (calls, mut asked) = unbounded_channel::<Call>();
        let (sender, started) = std::sync::mpsc::channel();
        let of_target = env.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            LocalSet::new().block_on(&runtime, async move {
                let target = Target::new(of_target);
                target.set_limits(Limits { zero_copy, ..Limits::default() });
                let new = NewSubsystem { has_ana: true, ..NewSubsystem::named(SUBSYSTEM.parse().unwrap()) };
                target.add_subsystem(new).unwrap();
                for host in [1, 2] {
                    let name = format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap();
                    target.add_host(SUBSYSTEM, name, None).unwrap();
                }
                target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap();
                let any = "127.0.0.1:0".parse().unwrap();
                let address = target
                    .listen(SUBSYSTEM, Address::tcp(any), AnaState::Optimized, Channel::Plain)
                    .await
                    .unwrap();
                sender.send(address.socket).unwrap();
                while let Some(call) = asked.recv().await {
                    call.call(target.clone()).await;
                }
            });
        });
        let address = started.recv().unwrap();
        Self { address, env, calls, thread, reactors }
    }

    /// Runs a call of the target, and waits for its end.
    pub fn run<R: Send + 'static>(&self, f: impl AsyncFnOnce(Target) -> R + Send + 'static) -> R {
        let (sender, result) = std::sync::mpsc::channel();
        let call = async move |target| sender.send(f(target).await).unwrap();
        assert!(self.calls.send(Box::new(call)).is_ok());
        result.recv().unwrap()
    }

    pub fn list(&self) -> Vec<SubsystemInfo> {
        self.run(async |target| target.list())
    }

    /// The number of I/O queues.
    pub fn queues(&self) -> usize {
        self.list().iter().flat_map(|of| &of.controllers).map(|host| host.queues.len()).sum()
    }

    pub const fn reactors(&self) -> &Reactors {
        &self.reactors
    }

    pub const fn env(&self) -> &Env {
        &self.env
    }

    pub fn resize_disk(&self, blocks: Blocks) {
        self.env.registry().resized("disk", blocks).unwrap();
    }

    /// Removes the disk, once no namespace uses it.
    pub fn remove_disk(&self) {
        let env = self.env.clone();
        self.run(async move |_| env.registry().remove("disk").await.unwrap());
    }

    /// Disconnects all hosts, and ends.
    pub fn stop(self) {
        self.run(async |target| {
            // A test may have removed it.
            let _ = target.remove_subsystem(SUBSYSTEM).await;
        });
        drop(self.calls);
        self.thread.join().unwrap();
    }
}

/// Waits until something happens on another thread.
#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
pub fn until(mut is_done: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("not within 10 s");
}
