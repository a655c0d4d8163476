//! The whole path of a request within one process and one thread: a guest's ring, a queue of vhost-blk or vhost-scsi, the
//! block layer and a module, polled by a reactor in virtual time. Nothing waits and nothing is random, so that the
//! instructions of a request can be counted.
//!
//! The NVMe module drives a model controller, which executes its commands between two turns of the reactor. Only the turns count
//! there ([`TURNS`]).

use anyhow::{Context, Result, bail, ensure};
use aryk_bdev::{Access, Bdev, Blocks, Bytes, Env, Identity, QosGroups, Registry};
use aryk_bdev_nvme::{Controllers, Dma, Location};
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use aryk_nvme_model::{Data, Model, NamespaceConfig};
use aryk_qos::{IOS_MAX, Limits};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Nanos, Reactor, SleepPolicy};
use aryk_scsi::{Port, Units};
use aryk_vhost_blk::{Disk, Queue};
use aryk_vhost_device::{Errors, Parts};
use aryk_vhost_scsi::Targets;
use aryk_virtqueue::{Config, Format, Virtqueue, avail_len, desc_len, used_idx, used_len};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// Descriptors in the queue.
const SIZE: u16 = 256;
/// The layout of the guest's memory.
const GUEST: u64 = 0x1_0000_0000;
const MEMORY_LEN: u64 = 16 << 20;
const AVAIL: u64 = 64 << 10;
const USED: u64 = 128 << 10;
const HEADERS: u64 = 1 << 20;
const DATA: u64 = 2 << 20;
/// Bytes of a request without its data, and the offset of a SCSI host's response in them.
const SPACE: u64 = 192;
const ANSWER_AT: u64 = 64;
/// Bytes of a request's data.
const BLOCK: u64 = 4096;
/// Bytes of the disk.
const DISK: u64 = 64 << 20;
/// Descriptor flags (virtio 1.2, section 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// VIRTIO_BLK_T_IN and VIRTIO_BLK_T_OUT (section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;
/// The virtual time of a turn.
const TURN: Duration = Duration::from_micros(1);
/// The function whose instructions count where a model of a device runs between the turns.
pub const TURNS: [&str; 1] = ["*stack::turn*"];
/// Turns without an answer before the run fails.
const TURNS_MAX: u32 = 1_000;

/// The module of a case's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// No data.
    Null,
    /// Memory of this process.
    Memory,
    /// A model NVMe controller, which moves no data.
    Nvme,
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
}

impl Case {
    /// Requests in flight.
    pub const fn depth(&self) -> u32 {
        self.depth as u32
    }

    /// The module.
    pub const fn module(&self) -> Module {
        self.module
    }
}

/// The base of all cases: reads of a null block device without limits, 32 in flight.
const NULL_READ: Case =
    Case { name: "", scsi: false, module: Module::Null, write: false, limited: false, depth: 32 };

/// All cases.
pub const CASES: [Case; 13] = [
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
    let mut guest = Guest::new(case)?;
    let now = Arc::new(AtomicU64::new(0));
    let clock = Clock::Virtual(Arc::clone(&now));
    let mut reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Auto, clock)?;
    let drive = match case.module {
        Module::Nvme => Some(Drive::new()?),
        Module::Null | Module::Memory => None,
    };
    let env = Env::default();
    let started = start_queue(&mut reactor, case, &guest, &env, drive.as_ref());
    let ran = started.and_then(|()| {
        for _ in 0..batches {
            guest.offer();
            let mut turns = 0;
            while !guest.is_answered() {
                now.store(Nanos(now.load(Ordering::Relaxed)).after(TURN).0, Ordering::Relaxed);
                turn(&mut reactor);
                if let Some(drive) = &drive {
                    drive.model.step(0);
                }
                turns += 1;
                ensure!(turns < TURNS_MAX, "requests were not completed");
            }
        }
        guest.check()
    });
    // The queue's channel first, then the controller.
    drop(reactor);
    drive.map_or(Ok(()), Drive::end)?;
    ran
}

#[inline(never)]
fn turn(reactor: &mut Reactor) {
    reactor.turn();
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
        wait(reactor, env.registry().memory().add(guest.memory.regions(), "bench"));
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

fn disk(env: &Env, has_memory: bool) -> Result<Arc<Bdev>> {
    let identity = Identity::named("d0");
    let (block_size, physical_block_size, blocks) = (512, 512, Bytes(DISK).whole_blocks(512));
    Ok(if has_memory {
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
        None => disk(env, case.module == Module::Memory)?,
    };
    if case.limited {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(limit(env.registry(), &bdev))?;
    }
    let disk = env.registry().open(bdev.name(), Access::Exclusive, "bench", |_| {})?;
    let cx = reactor.cx();
    let thread = cx.add_thread("bench", CoreSet::from_iter([0]));
    let parts = Parts {
        name: "guest.q0".to_owned(),
        index: 0,
        thread,
        ring: guest.ring()?,
        keeps_in_flight: false,
        log: None,
        memory: Arc::clone(&guest.memory),
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

/// The guest's side: its memory, and the minimal driver that sends the same requests repeatedly.
struct Guest {
    memory: Arc<MemTable>,
    desc: GuestArea,
    avail: GuestArea,
    used: GuestArea,
    scsi: bool,
    depth: u16,
    /// Requests made available so far.
    offered: u16,
}

impl Guest {
    fn new(case: Case) -> Result<Self> {
        let mapping = Arc::new(Mapping::anonymous(MEMORY_LEN)?);
        let region = Region { guest_addr: GUEST, user_addr: GUEST, len: MEMORY_LEN, offset: 0, mapping };
        let memory = Arc::new(MemTable::new(vec![region])?);
        let area = |at, len| memory.area_at_guest(GUEST + at, len).context("the queue is in guest memory");
        let guest = Self {
            desc: area(0, desc_len(SIZE))?,
            avail: area(AVAIL, avail_len(SIZE, true))?,
            used: area(USED, used_len(SIZE, true))?,
            memory: Arc::clone(&memory),
            scsi: case.scsi,
            depth: case.depth,
            offered: 0,
        };
        for request in 0..u64::from(case.depth) {
            guest.lay_out(request, case)?;
        }
        Ok(guest)
    }

    /// Writes a request and its descriptors.
    fn lay_out(&self, request: u64, case: Case) -> Result<()> {
        let header = GUEST + HEADERS + SPACE * request;
        // Far apart, as a guest's random requests are.
        let sector = request * 977 * (BLOCK / 512) % (DISK / 512);
        let data = (GUEST + DATA + BLOCK * request, BLOCK as u32, if case.write { 0 } else { WRITE });
        let chain = if case.scsi {
            // READ and WRITE (16) for target 0, unit 0.
            let mut command = [0; 51];
            command[..3].copy_from_slice(&[1, 0, 0x40]);
            command[19] = if case.write { 0x8a } else { 0x88 };
            command[21..29].copy_from_slice(&sector.to_be_bytes());
            command[29..33].copy_from_slice(&(BLOCK as u32 / 512).to_be_bytes());
            self.memory.write(header, &command)?;
            let (head, answer) = ((header, 51, 0), (header + ANSWER_AT, 108, WRITE));
            if case.write { [head, data, answer] } else { [head, answer, data] }
        } else {
            self.memory.write(header, &if case.write { OUT } else { IN })?;
            self.memory.write(header + 8, &sector)?;
            [(header, 16, 0), data, (header + 16, 1, WRITE)]
        };
        for (i, (addr, len, direction)) in (0_u16..).zip(chain) {
            let index = 3 * request as u16 + i;
            let at = GUEST + 16 * u64::from(index);
            self.memory.write(at, &addr)?;
            self.memory.write(at + 8, &len)?;
            self.memory.write(at + 12, &(direction | if i < 2 { NEXT } else { 0 }))?;
            self.memory.write(at + 14, &(index + 1))?;
        }
        Ok(())
    }

    fn ring(&self) -> Result<Virtqueue> {
        Ok(Virtqueue::new(Config {
            format: Format::Split,
            size: SIZE,
            desc: self.desc.clone(),
            driver: self.avail.clone(),
            device: self.used.clone(),
            event_idx: true,
            indirect: false,
            base: 0,
            inflight: None,
        })?)
    }

    /// Makes all requests available once more. All of them must have been completed.
    fn offer(&mut self) {
        for request in 0..self.depth {
            let place = usize::from(self.offered.wrapping_add(request) % SIZE);
            self.avail.store_u16(4 + 2 * place, 3 * request, Ordering::Relaxed);
        }
        self.offered = self.offered.wrapping_add(self.depth);
        self.avail.store_u16(2, self.offered, Ordering::Release);
    }

    fn is_answered(&self) -> bool {
        used_idx(&self.used) == self.offered
    }

    /// Checks that all of the last requests succeeded.
    fn check(&self) -> Result<()> {
        for request in 0..u64::from(self.depth) {
            let header = GUEST + HEADERS + SPACE * request;
            // A block device's status, or a SCSI host's status and response.
            let at = if self.scsi { header + ANSWER_AT + 10 } else { header + 16 };
            let status: [u8; 2] = self.memory.read(at)?;
            if status[..1 + usize::from(self.scsi)].iter().any(|byte| *byte != 0) {
                bail!("request {request} has status {status:?}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{CASES, run};

    #[test]
    fn every_case_runs() {
        for case in CASES {
            run(case.name, 100).unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        }
        assert!(run("none/such", 1).is_err());
    }
}
