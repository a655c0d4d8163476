//! Many disks at once, as their VMs use them: the project's own front-end, with one session per controller and one memfd
//! for all controllers of a VM. One thread, which polls.

use anyhow::{Context, Result, ensure};
use aryk_front_end::{
    Builder, Format, Layout, Memory, Operation, Queue, Session, Shape, Wanted, blk, feature, protocol, scsi,
};
use serde_json::json;
use std::collections::HashSet;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::rpc::Rpc;

/// Bytes of a request.
const LEN: u32 = 4096;
/// Requests in flight per loaded disk.
pub const DEPTH: u16 = 16;
/// Descriptors of a ring: three per request.
const RING: u16 = 64;
/// Blocks of 512 bytes per disk.
const BLOCKS: u64 = 2048;
/// Timeout of each reply.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Loop turns between two readings of the clock.
const TURNS_PER_CLOCK_READ: u32 = 64;

/// The store of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// No store.
    Null,
    /// Memory.
    Memory,
}

impl Backing {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Memory => "memory",
        }
    }

    const fn module(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Memory => "malloc",
        }
    }
}

/// The size of a topology.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Number of controllers, each with a front-end of its own.
    pub controllers: usize,
    /// Disks per controller.
    pub disks: usize,
    /// Controllers per VM.
    pub per_vm: usize,
}

impl Numbers {
    /// Number of all disks.
    pub const fn total(self) -> usize {
        self.controllers * self.disks
    }

    /// Number of all VMs.
    pub const fn vms(self) -> usize {
        self.controllers.div_ceil(self.per_vm)
    }
}

/// A type of controller.
pub trait Topology {
    /// The builder of its requests.
    type Requests: Builder + Copy;
    /// The name in tables.
    const NAME: &'static str;
    /// Queues before the first request queue.
    const FIXED: u16;
    /// The full size of the topology.
    const ALL: Numbers;

    /// Creates the builder of a disk's requests.
    fn requests() -> Self::Requests;

    /// Creates a controller for disks that exist.
    fn create(rpc: &mut Rpc, controller: usize, disks: usize) -> Result<()>;

    /// Sends the commands that a loaded disk needs before its first read.
    fn probe(queue: &mut Queue<Self::Requests>) -> Result<()>;
}

/// vhost-user-blk: a controller for each disk.
#[derive(Debug)]
pub struct Blk;

impl Topology for Blk {
    type Requests = blk::Requests;
    const NAME: &'static str = "blk";
    const FIXED: u16 = 0;
    const ALL: Numbers = Numbers { controllers: 3072, disks: 1, per_vm: 64 };

    fn requests() -> blk::Requests {
        blk::Requests
    }

    fn create(rpc: &mut Rpc, controller: usize, _: usize) -> Result<()> {
        let params = json!({"ctrlr": name(controller), "dev_name": disk(controller, 0)});
        rpc.call("vhost_create_blk_controller", params).map(drop)
    }

    fn probe(_: &mut Queue<blk::Requests>) -> Result<()> {
        Ok(())
    }
}

/// vhost-user-scsi: eight targets for each controller.
#[derive(Debug)]
pub struct Scsi;

impl Topology for Scsi {
    type Requests = scsi::Requests;
    const NAME: &'static str = "scsi";
    const FIXED: u16 = scsi::FIXED_QUEUES;
    const ALL: Numbers = Numbers { controllers: 48 * 8, disks: 8, per_vm: 8 };

    fn requests() -> scsi::Requests {
        scsi::Requests::new(0, 0)
    }

    fn create(rpc: &mut Rpc, controller: usize, disks: usize) -> Result<()> {
        let ctrlr = name(controller);
        rpc.call("vhost_create_scsi_controller", json!({"ctrlr": ctrlr}))?;
        for target in 0..disks {
            let bdev = disk(controller, target);
            let params = json!({"ctrlr": ctrlr, "scsi_target_num": target, "bdev_name": bdev});
            rpc.call("vhost_scsi_controller_add_target", params)?;
        }
        Ok(())
    }

    fn probe(queue: &mut Queue<scsi::Requests>) -> Result<()> {
        queue.probe(TIMEOUT)?;
        Ok(())
    }
}

/// Creates a QoS group for each VM, with the VM's disks in it, without limits.
pub fn group<T: Topology>(rpc: &mut Rpc, numbers: Numbers) -> Result<()> {
    for controller in 0..numbers.controllers {
        let group = vm_group(controller / numbers.per_vm);
        if controller % numbers.per_vm == 0 {
            rpc.call("bdev_qos_group_create", json!({"name": group}))?;
        }
        for target in 0..numbers.disks {
            let bdev = disk(controller, target);
            rpc.call("bdev_qos_group_add_bdev", json!({"name": group, "bdev_name": bdev}))?;
        }
    }
    Ok(())
}

/// Limits each disk of these VMs, and each of the VMs, to a number of requests per second; 0 means no limit.
pub fn limit(
    rpc: &mut Rpc,
    numbers: Numbers,
    vms: impl Iterator<Item = usize>,
    (of_disk, of_vm): (u64, u64),
) -> Result<()> {
    for number in vms {
        for controller in (number * numbers.per_vm..numbers.controllers).take(numbers.per_vm) {
            for target in 0..numbers.disks {
                let params = json!({"name": disk(controller, target), "rw_ios_per_sec": of_disk});
                rpc.call("bdev_set_qos_limit", params)?;
            }
        }
        let params = json!({"name": vm_group(number), "rw_ios_per_sec": of_vm});
        rpc.call("bdev_qos_group_set_limit", params)?;
    }
    Ok(())
}

/// Removes all disks from the groups, and deletes the groups.
pub fn ungroup(rpc: &mut Rpc, numbers: Numbers) -> Result<()> {
    (0..numbers.vms())
        .try_for_each(|number| rpc.call("bdev_qos_group_delete", json!({"name": vm_group(number)})).map(drop))
}

fn vm_group(number: usize) -> String {
    format!("vm{number}")
}

fn name(controller: usize) -> String {
    format!("c{controller}")
}

/// The name of a controller's disk.
pub fn disk(controller: usize, target: usize) -> String {
    format!("d{controller}.{target}")
}

/// Creates all disks and controllers, each after the reply to the call before.
pub fn create<T: Topology>(rpc: &mut Rpc, numbers: Numbers, backing: Backing) -> Result<()> {
    let method = format!("bdev_{}_create", backing.module());
    for controller in 0..numbers.controllers {
        for target in 0..numbers.disks {
            let name = disk(controller, target);
            rpc.call(&method, json!({"name": name, "num_blocks": BLOCKS, "block_size": 512}))?;
        }
        T::create(rpc, controller, numbers.disks)?;
    }
    Ok(())
}

/// Waits until the daemon reports no attached front-end.
pub fn wait_until_detached(rpc: &mut Rpc) -> Result<()> {
    let start = Instant::now();
    loop {
        let all = rpc.call("vhost_get_controllers", json!({}))?;
        let all = all.as_array().context("vhost_get_controllers lists controllers")?;
        if all.iter().all(|one| one["sessions"].as_array().is_some_and(Vec::is_empty)) {
            return Ok(());
        }
        ensure!(start.elapsed() < TIMEOUT, "the daemon still reports front-ends that have disconnected");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Deletes all controllers and disks.
pub fn delete(rpc: &mut Rpc, numbers: Numbers, backing: Backing) -> Result<()> {
    let method = format!("bdev_{}_delete", backing.module());
    for controller in 0..numbers.controllers {
        rpc.call("vhost_delete_controller", json!({"ctrlr": name(controller)}))?;
        for target in 0..numbers.disks {
            rpc.call(&method, json!({"name": disk(controller, target)}))?;
        }
    }
    let left = rpc.call("bdev_get_bdevs", json!({}))?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "the daemon lists disks after all were deleted");
    Ok(())
}

/// The front-end of a controller.
struct Attached<B> {
    queue: Queue<B>,
    /// The queues before the request queue, which carry no load.
    _fixed: Vec<Queue<B>>,
    session: Session,
    /// Shared with the other controllers of its VM.
    _memory: Rc<Memory>,
    looked: bool,
}

/// All front-ends of a daemon. Dropping the fleet closes their sockets.
pub struct Fleet<T: Topology> {
    attached: Vec<Attached<T::Requests>>,
    random: u64,
    operation: Operation,
}

impl<T: Topology> Fleet<T> {
    /// Connects to all controllers in `dir`.
    pub fn attach(dir: &Path, numbers: Numbers) -> Result<Self> {
        let shape = Shape { format: Format::Split, size: RING, event_idx: true };
        let layout = Layout { shape, slots: DEPTH, len: LEN, indirect: false };
        let bare = Layout { slots: 0, ..layout };
        let [space, bare_space] = [layout, bare].map(|layout| layout.space::<T::Requests>());
        let each = space + u64::from(T::FIXED) * bare_space;
        let mut attached = Vec::with_capacity(numbers.controllers);
        let mut memory = None;
        for controller in 0..numbers.controllers {
            let place = controller % numbers.per_vm;
            if place == 0 {
                memory = Some(Rc::new(Memory::new(each * numbers.per_vm as u64)?));
            }
            let memory = memory.clone().expect("the first controller of a VM creates its memory");
            let at = place as u64 * each;
            let fixed =
                |i: u16| Queue::new(T::requests(), &memory, i, at + space + u64::from(i) * bare_space, bare);
            let fixed: Vec<_> = (0..T::FIXED).map(fixed).collect::<Result<_, _>>()?;
            let queue = Queue::new(T::requests(), &memory, T::FIXED, at, layout)?;
            let name = name(controller);
            let session = session::<T>(&dir.join(&name), &memory, &fixed, &queue);
            let session = session.with_context(|| format!("attaching to {name}"))?;
            attached.push(Attached { queue, _fixed: fixed, session, _memory: memory, looked: false });
        }
        Ok(Self { attached, random: 1, operation: Operation::Read })
    }

    /// Sets what requests do, which is reading at first.
    pub const fn set_operation(&mut self, operation: Operation) {
        self.operation = operation;
    }

    /// Keeps requests in flight for `span` on one disk of each of the controllers `chosen`; returns the completed requests of
    /// each, and the elapsed time.
    pub fn load(
        &mut self,
        chosen: impl Iterator<Item = usize>,
        span: Duration,
    ) -> Result<(Vec<u64>, Duration)> {
        let chosen: HashSet<_> = chosen.collect();
        let all = self.attached.iter_mut().enumerate();
        let mut loaded: Vec<_> = all.filter_map(|(i, disk)| chosen.contains(&i).then_some(disk)).collect();
        for disk in loaded.iter_mut().filter(|disk| !disk.looked) {
            T::probe(&mut disk.queue)?;
            disk.looked = true;
        }
        let (mut random, operation) = (self.random, self.operation);
        let mut place = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % (BLOCKS * 512 / u64::from(LEN)) * u64::from(LEN)
        };
        let start = Instant::now();
        for disk in &mut loaded {
            (0..DEPTH).for_each(|slot| disk.queue.submit(slot, operation, place()));
            disk.queue.publish();
        }
        let mut done = vec![0_u64; loaded.len()];
        while start.elapsed() < span {
            turns(&mut loaded, &mut place, &mut done, Some(operation))?;
        }
        let elapsed = start.elapsed();
        let all = u64::from(DEPTH) * loaded.len() as u64;
        let mut drained = vec![0_u64; loaded.len()];
        while drained.iter().sum::<u64>() < all {
            turns(&mut loaded, &mut place, &mut drained, None)?;
            ensure!(start.elapsed() < span + TIMEOUT, "requests were not completed in time");
        }
        self.random = self.random.wrapping_add(1);
        Ok((done, elapsed))
    }

    /// Whether the daemon keeps all connections open.
    pub fn are_connected(&self) -> bool {
        self.attached.iter().all(|disk| !disk.session.wire().has_ended())
    }
}

/// Takes completions, counts them by disk, and submits as many new requests that do `next`.
fn turns<B: Builder>(
    loaded: &mut [&mut Attached<B>],
    place: &mut impl FnMut() -> u64,
    done: &mut [u64],
    next: Option<Operation>,
) -> Result<()> {
    for _ in 0..TURNS_PER_CLOCK_READ {
        for (disk, done) in loaded.iter_mut().zip(&mut *done) {
            let before = *done;
            while let Some(request) = disk.queue.take()? {
                *done += 1;
                if let Some(operation) = next {
                    disk.queue.submit(request.slot, operation, place());
                }
            }
            if next.is_some() && *done != before {
                disk.queue.publish();
            }
        }
    }
    Ok(())
}

fn session<T: Topology>(
    socket: &Path,
    memory: &Memory,
    fixed: &[Queue<T::Requests>],
    queue: &Queue<T::Requests>,
) -> Result<Session> {
    let queues = T::FIXED + 1;
    let session = Session::connect(
        socket,
        &Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL | feature::EVENT_IDX,
            optional: 0,
            protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
            optional_protocol: 0,
            queues,
            patience: TIMEOUT,
        },
    )?;
    session.set_features()?;
    session.share(memory)?;
    for queue in fixed.iter().chain([queue]) {
        session.start(&queue.announced())?;
    }
    session.enable(queues)?;
    Ok(session)
}
