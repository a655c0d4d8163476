//! A target in this process, with one subsystem and one disk in memory.

use aryk_bdev::{Blocks, Env, Identity, Registry};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, NewNamespace, NewSubsystem, Target};
use aryk_reactor::{CoreSet, Options, Reactors, SleepPolicy};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

pub(super) const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
pub(super) const HOST: &str = "nqn.2016-06.io.spdk:host1";
pub(super) const BLOCK: u32 = 4096;
/// Blocks of the disk, and those for which there is memory: it may grow.
pub(super) const BLOCKS: Blocks = Blocks(65_536);
const ROOM: Blocks = Blocks(BLOCKS.0 + 64);

type Call = Box<dyn FnOnce(Target) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// A running target.
pub(super) struct Running {
    pub(super) address: SocketAddr,
    /// Where else it listens.
    pub(super) other: SocketAddr,
    env: Env,
    calls: Option<UnboundedSender<Call>>,
    thread: Option<JoinHandle<()>>,
    _reactors: Reactors,
}

impl Running {
    pub(super) fn start() -> Self {
        let core = CoreSet::allowed().iter().next().unwrap();
        let cores = CoreSet::from_iter([core]);
        let options = Options { cores, policy: SleepPolicy::Interrupt, ..Options::default() };
        let reactors = Reactors::start(&options).unwrap();
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let config = aryk_bdev_malloc::Config {
            identity: Identity::named("disk"),
            block_size: BLOCK,
            physical_block_size: BLOCK,
            blocks: ROOM,
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, config).unwrap();
        env.registry().resized("disk", BLOCKS).unwrap();
        let (calls, mut asked) = unbounded_channel::<Call>();
        let (sender, started) = std::sync::mpsc::channel();
        let of_target = env.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            LocalSet::new().block_on(&runtime, async move {
                let target = Target::new(of_target);
                let named = NewSubsystem::named(SUBSYSTEM.parse().unwrap());
                let new = NewSubsystem { allow_any_host: true, has_ana: true, ..named };
                target.add_subsystem(new).unwrap();
                target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap();
                let any = "127.0.0.1:0".parse().unwrap();
                let listen = async || {
                    target
                        .listen(SUBSYSTEM, Address::tcp(any), AnaState::Optimized, Channel::Plain)
                        .await
                        .unwrap()
                        .socket
                };
                let (address, other) = (listen().await, listen().await);
                sender.send((address, other)).unwrap();
                while let Some(call) = asked.recv().await {
                    call(target.clone()).await;
                }
                target.close().await;
            });
        });
        let (address, other) = started.recv().unwrap();
        Self { address, other, env, calls: Some(calls), thread: Some(thread), _reactors: reactors }
    }

    /// Runs a call of the target, and waits for its end.
    pub(super) fn run<R, F>(&self, call: impl FnOnce(Target) -> F + Send + 'static) -> R
    where
        R: Send + 'static,
        F: Future<Output = R> + 'static,
    {
        let (sender, result) = std::sync::mpsc::channel();
        let call: Call = Box::new(move |target| {
            let called = call(target);
            Box::pin(async move { sender.send(called.await).unwrap() })
        });
        assert!(self.calls.as_ref().unwrap().send(call).is_ok());
        result.recv().unwrap()
    }

    /// Sets the access to the namespace for hosts that come through a listener.
    pub(super) fn set_access(&self, listener: SocketAddr, state: AnaState) {
        self.run(async move |target: Target| {
            target.set_state(SUBSYSTEM, Address::tcp(listener), None, state).await.unwrap();
        });
    }

    /// Resizes the disk.
    pub(super) fn resize(&self, blocks: Blocks) {
        assert!(blocks <= ROOM);
        self.env.registry().resized("disk", blocks).unwrap();
    }

    /// The number of I/O queues.
    pub(super) fn queues(&self) -> usize {
        let list = self.run(async |target: Target| target.list());
        list.iter().flat_map(|of| &of.controllers).map(|host| host.queues.len()).sum()
    }

    /// Ends the target.
    pub(super) fn stop(&mut self) {
        drop(self.calls.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}
