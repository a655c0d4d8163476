//! The whole path of a request within one process and one thread: a guest's ring, a queue of vhost-blk or vhost-scsi, the
//! block layer and a module, polled by a reactor in virtual time. Nothing waits and nothing is random, so that the
//! instructions of a request can be counted.
//!
//! The NVMe module drives a model controller, which executes its commands between two turns of the reactor. Only the turns count
//! there ([`TURNS`]).
//!
//! The rbd module has a substitute for librbd, which completes requests on threads of its own, on the other core. So its cases
//! have no number of instructions, only the time of the turns.

mod guest;

use crate::process;
use crate::workload::Workload;
use anyhow::{Context, Result, anyhow, ensure};
use aryk_bdev::{Access, Bdev, Blocks, Bytes, Env, Identity, QosGroups, Registry};
use aryk_bdev_crypto::{Area, Key, TweakMode};
use aryk_bdev_nvme::{Controllers, Dma, Location};
use aryk_bdev_rbd::{Cluster, ClusterConfig, Clusters, Spec};
use aryk_nvme_model::{Data, Model, NamespaceConfig};
use aryk_qos::{IOS_MAX, Limits};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Nanos, Reactor, SleepPolicy};
use aryk_scsi::{Port, Units};
use aryk_vhost_blk::{Disk, Queue};
use aryk_vhost_device::{Errors, Parts};
use aryk_vhost_scsi::Targets;
pub use guest::{Guest, Request};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// Bytes of a counted request's data.
const BLOCK: u64 = 4096;
/// Bytes of the disk.
pub const DISK: u64 = 64 << 20;
/// Bytes in a block of disks in memory.
pub const SECTOR: u32 = 512;
/// The key of encrypted disks.
pub const KEY: [u8; 64] = {
    let mut key = [1; 64];
    key[63] = 2;
    key
};
/// The virtual time of a turn.
const TURN: Duration = Duration::from_micros(1);
/// The function whose instructions count where a model of a device runs between the turns.
const TURNS: [&str; 1] = ["*stack::turn*"];
/// The disk of an image, and its pool.
const IMAGE: &str = "image";
const POOL: &str = "bench";
/// Turns without an answer before the run fails.
const TURNS_MAX: u32 = 1_000;

/// The module of a case's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// No data.
    Null,
    /// Memory of this process.
    Memory,
    /// Memory of this process, encrypted by [`KEY`].
    Crypto,
    /// No data, encrypted by [`KEY`].
    CryptoOverNull,
    /// A model NVMe controller, which moves no data.
    Nvme,
    /// An image of a substitute for librbd.
    Rbd,
    /// An image of a substitute for librbd, encrypted by [`KEY`].
    CryptoOverRbd,
}

/// A counted case: a front-end type, a module, a direction, a depth.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The name in the file of records.
    pub name: &'static str,
    scsi: bool,
    module: Module,
    write: bool,
    /// The disk and its group have limits that the load does not reach.
    limited: bool,
    depth: u16,
    /// Bytes of a request's data.
    len: u64,
}

impl Case {
    /// Requests in flight.
    pub const fn depth(&self) -> u32 {
        self.depth as u32
    }

    /// Patterns of the functions whose instructions count; empty for all.
    pub const fn counted(&self) -> &'static [&'static str] {
        if matches!(self.module, Module::Nvme) { &TURNS } else { &[] }
    }

    /// A block device of a module, for a workload. [`Guest::exchange`] chooses the direction of each request.
    pub const fn of(module: Module, workload: &Workload) -> Self {
        Self { module, depth: workload.depth as u16, len: workload.block as u64, ..NULL_READ }
    }

    /// The case with a SCSI controller's queue in place of a block device's.
    pub const fn behind_scsi(self) -> Self {
        Self { scsi: true, ..self }
    }

    /// The case with limits of the disk and its group that the load does not reach.
    pub const fn with_limits(self) -> Self {
        Self { limited: true, ..self }
    }
}

/// The base of all cases: reads of a null block device without limits, 32 in flight.
const NULL_READ: Case =
    Case { name: "", scsi: false, module: Module::Null, write: false, limited: false, depth: 32, len: BLOCK };

/// All cases.
pub const CASES: [Case; 15] = [
    Case { name: "crypto/memory/read-4k/qd32", module: Module::Crypto, ..NULL_READ },
    Case { name: "crypto/memory/write-4k/qd32", module: Module::Crypto, write: true, ..NULL_READ },
    Case { name: "limited/null/read-4k/qd32", limited: true, ..NULL_READ },
    Case { name: "null/read-4k/qd1", depth: 1, ..NULL_READ },
    Case { name: "null/read-4k/qd32", ..NULL_READ },
    Case { name: "memory/read-4k/qd1", module: Module::Memory, depth: 1, ..NULL_READ },
    Case { name: "memory/read-4k/qd32", module: Module::Memory, ..NULL_READ },
    Case { name: "memory/write-4k/qd32", module: Module::Memory, write: true, ..NULL_READ },
    Case { name: "path/nvme/read-4k/qd1", module: Module::Nvme, depth: 1, ..NULL_READ },
    Case { name: "path/nvme/read-4k/qd32", module: Module::Nvme, ..NULL_READ },
    Case { name: "path/nvme/write-4k/qd32", module: Module::Nvme, write: true, ..NULL_READ },
    Case { name: "scsi/null/read-4k/qd1", scsi: true, depth: 1, ..NULL_READ },
    Case { name: "scsi/null/read-4k/qd32", scsi: true, ..NULL_READ },
    Case { name: "scsi/memory/read-4k/qd32", scsi: true, module: Module::Memory, ..NULL_READ },
    Case { name: "scsi/memory/write-4k/qd32", scsi: true, module: Module::Memory, write: true, ..NULL_READ },
];

/// Executes `batches` times as many requests as are in flight at a time.
pub fn run(case: &str, batches: u32) -> Result<()> {
    let case = CASES.into_iter().find(|known| known.name == case).context("no such case")?;
    let now = Arc::new(AtomicU64::new(0));
    let mut stack = Stack::start(case, Clock::Virtual(Arc::clone(&now)))?;
    let ran = stack.run_batches(batches, &now, turn);
    stack.end()?;
    ran
}

/// A reactor with a queue, the queue's guest, and the controller of the NVMe module.
pub struct Stack {
    /// The guest.
    pub guest: Guest,
    reactor: Reactor,
    drive: Option<Drive>,
    // Has the disk.
    env: Env,
}

impl Stack {
    /// Creates the disk of a case, and starts a queue for it.
    ///
    /// # Errors
    /// A process without memory or descriptors.
    pub fn start(case: Case, clock: Clock) -> Result<Self> {
        let guest = Guest::new(case)?;
        let mut reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Auto, clock)?;
        let drive = matches!(case.module, Module::Nvme).then(Drive::new).transpose()?;
        let env = Env::default();
        let started = start_queue(&mut reactor, case, &guest, &env, drive.as_ref());
        let stack = Self { guest, reactor, drive, env };
        match started {
            Ok(()) => Ok(stack),
            Err(error) => stack.end().and(Err(error)),
        }
    }

    /// Runs a turn of the reactor; returns whether there was any work in it.
    #[inline]
    pub fn turn(&mut self) -> bool {
        turn(&mut self.reactor)
    }

    /// The controller of the NVMe module.
    pub fn model(&self) -> Option<&Arc<Model>> {
        self.drive.as_ref().map(|drive| &drive.model)
    }

    /// Ends the queue, and the image or the controller.
    ///
    /// # Errors
    /// The image cannot be removed, or the controller cannot be detached.
    pub fn end(self) -> Result<()> {
        // The queue's channel first, then the image or the controller.
        drop(self.reactor);
        if self.env.registry().find(IMAGE).is_ok() {
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            runtime.block_on(self.env.registry().remove(IMAGE))?;
        }
        self.drive.map_or(Ok(()), Drive::end)
    }

    fn run_batches(
        &mut self,
        batches: u32,
        now: &AtomicU64,
        mut turn: impl FnMut(&mut Reactor) -> bool,
    ) -> Result<()> {
        for _ in 0..batches {
            self.guest.offer();
            let mut turns = 0;
            while !self.guest.is_answered() {
                now.store(Nanos(now.load(Ordering::Relaxed)).after(TURN).0, Ordering::Relaxed);
                turn(&mut self.reactor);
                if let Some(model) = self.model() {
                    model.step(0);
                }
                turns += 1;
                ensure!(turns < TURNS_MAX, "requests were not completed");
            }
        }
        self.guest.check_all()
    }
}

#[inline(never)]
fn turn(reactor: &mut Reactor) -> bool {
    reactor.turn()
}

/// A controller of the NVMe module.
struct Drive {
    model: Arc<Model>,
    controllers: Controllers,
    runtime: tokio::runtime::Runtime,
}

impl Drive {
    fn new() -> Result<Self> {
        let namespaces = vec![(1, NamespaceConfig::new(DISK / 512, 0, 1))];
        // As most drives, without shadow doorbells.
        let config = aryk_nvme_model::Config { data: Data::Null, oacs: 0, namespaces, ..Default::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        Ok(Self { model: Model::new("bench", config)?, controllers: Controllers::default(), runtime })
    }

    /// Attaches the controller, registers the guest's memory, and prepares the reactor, while a thread runs the model.
    fn attach(&self, env: &Env, guest: &Guest, reactor: &mut Reactor) -> Result<Arc<Bdev>> {
        let running = self.model.run()?;
        let _entered = self.runtime.enter();
        let function: Arc<dyn aryk_pci::Function> = Arc::clone(&self.model) as _;
        let mut config = aryk_bdev_nvme::Config::new("nv", Location::Model(function));
        config.dma = Dma::Pin;
        let disks = wait(reactor, self.controllers.attach(env, config))?;
        let disk = disks.into_iter().next().context("the model has a namespace")?;
        wait(reactor, env.registry().memory().add(guest.memory().regions(), "bench"));
        let descriptor = env.registry().open(disk.name(), Access::Shared, "bench", |_| {})?;
        let handle = reactor.handle().clone();
        wait(reactor, descriptor.prepare(&handle))?;
        drop(running);
        Ok(disk)
    }

    fn end(self) -> Result<()> {
        let _running = self.model.run()?;
        Ok(self.runtime.block_on(self.controllers.detach("nv"))?)
    }
}

/// Waits for a future whose work is partly the reactor's.
fn wait<T>(reactor: &mut Reactor, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())) {
            return value;
        }
        reactor.turn();
        std::thread::yield_now();
    }
}

/// A disk of an empty image, with the threads of its client and of the substitute for librbd on the other core.
fn image(env: &Env) -> Result<Arc<Bdev>> {
    aryk_librbd_stub::add_image(POOL, IMAGE, DISK);
    let clusters = Clusters::with_library(aryk_librbd_stub::library());
    let cores = Some(CoreSet::from_iter([process::BACK_END_CORE as u16]));
    let cluster = Cluster::Shared(ClusterConfig { cores, ..ClusterConfig::default() });
    let spec = Spec { pool: POOL.to_owned(), namespace: None, image: IMAGE.to_owned(), snapshot: None };
    let config = aryk_bdev_rbd::Config {
        identity: Identity::named(IMAGE),
        spec,
        block_size: SECTOR,
        read_only: false,
        size: None,
        predecessors: Vec::new(),
    };
    let create = async {
        Ok(aryk_bdev_rbd::create(aryk_bdev_rbd::connect(&clusters, &cluster).await?, env, config).await?)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    // The substitute's thread starts with the first request, and inherits the core of the thread that submits it.
    let on_core = || {
        process::pin(process::BACK_END_CORE)?;
        runtime.block_on(create)
    };
    std::thread::scope(|scope| scope.spawn(on_core).join())
        .map_err(|_| anyhow!("the image cannot be opened"))?
}

fn disk(env: &Env, module: Module) -> Result<Arc<Bdev>> {
    let identity = Identity::named("d0");
    let (block_size, physical_block_size, blocks) = (SECTOR, SECTOR, Bytes(DISK).whole_blocks(SECTOR));
    let below = match module {
        Module::Rbd => return image(env),
        Module::Crypto => Some(Module::Memory),
        Module::CryptoOverNull => Some(Module::Null),
        Module::CryptoOverRbd => Some(Module::Rbd),
        Module::Null | Module::Memory | Module::Nvme => None,
    };
    if let Some(below) = below {
        let base = disk(env, below)?.name().to_owned();
        let (identity, key) = (Identity::named("encrypted"), Arc::new(Key::new(&KEY)?));
        let config = aryk_bdev_crypto::Config {
            identity,
            product: "crypto",
            base,
            area: Area::default(),
            key,
            tweak_mode: TweakMode::SimpleLba,
            passes_discards: false,
        };
        return Ok(aryk_bdev_crypto::create(env, config)?);
    }
    Ok(if module == Module::Memory {
        let optimal_io_blocks = Blocks::ZERO;
        let config =
            aryk_bdev_malloc::Config { identity, block_size, physical_block_size, blocks, optimal_io_blocks };
        aryk_bdev_malloc::create(env, config)?
    } else {
        let config = aryk_bdev_null::Config { identity, block_size, physical_block_size, blocks };
        aryk_bdev_null::create(env, config)?
    })
}

async fn limit(registry: &Registry, bdev: &Bdev) -> Result<()> {
    let limits = Limits { ios: IOS_MAX, ..Limits::default() };
    let groups = QosGroups::new();
    groups.create("g", None)?;
    groups.set_limits(registry, "g", limits, Nanos(0)).await?;
    groups.add(registry, "g", bdev.name()).await?;
    Ok(bdev.set_qos_limits(limits, Nanos(0)).await?)
}

fn start_queue(
    reactor: &mut Reactor,
    case: Case,
    guest: &Guest,
    env: &Env,
    drive: Option<&Drive>,
) -> Result<()> {
    let bdev = match drive {
        Some(drive) => drive.attach(env, guest, reactor)?,
        None => disk(env, case.module)?,
    };
    if case.limited {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(limit(env.registry(), &bdev))?;
    }
    let disk = env.registry().open(bdev.name(), Access::Exclusive, "bench", |_| {})?;
    let handle = reactor.handle().clone();
    wait(reactor, disk.prepare(&handle))?;
    let cx = reactor.cx();
    let thread = cx.add_thread("bench", CoreSet::from_iter([0]));
    let parts = Parts {
        name: "guest.q0".to_owned(),
        index: 0,
        thread,
        ring: guest.ring()?,
        keeps_in_flight: false,
        log: None,
        memory: Arc::clone(guest.memory()),
        call: None,
        kick: None,
        errors: Arc::new(Errors::default()),
        alarm: Box::new(|trouble| panic!("{trouble}")),
    };
    if case.scsi {
        // The unit answers its first command with a unit attention, without executing it.
        let nexus = Units::default().nexus(disk, Port { initiator: 3 << 60, target: 1 }, 0);
        let mut targets = Targets::default();
        targets[0] = Some(nexus);
        let queue = |id, cx: &mut Cx| aryk_vhost_scsi::Queue::of_commands(id, parts, targets, cx);
        return Ok(cx.add_root(thread, "bench", queue).map(drop)?);
    }
    let description = Disk { block_size: 512, id: [0; 20], write_through: false };
    cx.add_root(thread, "bench", |id, cx| {
        let channel = disk.open_channel(id, cx)?;
        anyhow::Ok(Queue::start(id, parts, description, Some(channel), cx)?)
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, CASES, Case, Module, NULL_READ, Stack, run, turn};
    use allocation_counter::measure;
    use aryk_reactor::Clock;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_case_runs() {
        for case in CASES {
            run(case.name, 100).unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        }
        assert!(run("none/such", 1).is_err());
    }

    #[test]
    fn a_request_of_a_guest_allocates_nothing() {
        let counted = measure(|| drop(std::hint::black_box(Vec::<u8>::with_capacity(1))));
        assert_eq!(counted.count_total, 1, "it counts");
        let modules = [
            (Module::Nvme, BLOCK),
            (Module::Memory, BLOCK),
            (Module::Crypto, BLOCK),
            (Module::Crypto, 128 << 10),
        ];
        let shapes = [(1, false), (1, true), (32, false), (32, true)];
        for ((module, len), (depth, write)) in
            modules.into_iter().flat_map(|of| shapes.map(|shape| (of, shape)))
        {
            let case = Case { module, len, depth, write, ..NULL_READ };
            let now = Arc::new(AtomicU64::new(0));
            let mut stack = Stack::start(case, Clock::Virtual(Arc::clone(&now))).unwrap();
            stack.run_batches(1_000, &now, turn).unwrap();
            let mut allocations = 0;
            // Without those of the model, which runs between the turns.
            let ran = stack.run_batches(1_000, &now, |reactor| {
                let mut did_work = false;
                allocations += measure(|| did_work = turn(reactor)).count_total;
                did_work
            });
            ran.and(stack.end()).unwrap();
            assert_eq!(allocations, 0, "{module:?}, {len} bytes, {depth} in flight, writes: {write}");
        }
    }
}
