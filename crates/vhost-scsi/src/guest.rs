//! The guest's side of a SCSI host, for fuzzers: guest memory with one ring of each kind, and two disks, on a reactor that the
//! fuzzer steps.

use crate::events::{Events, PendingEvents, TargetEvent};
use crate::manage::Manager;
use crate::moving::PortableRole;
use crate::queue::{Queue, Targets};
use aryk_bdev::{Access, Registry};
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, RootRef, SleepPolicy};
use aryk_scsi::{Nexus, Port, Units};
use aryk_vhost_device::{DeviceQueue, Errors, Parts};
use aryk_virtqueue::{Config, Format, Virtqueue, avail_len, desc_len, used_len};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of guest memory.
pub const MEMORY: u64 = 256 * 1024;
/// Entries in each ring.
pub const SIZE: u16 = 16;
/// Queues: task management, events, commands.
pub const QUEUES: u16 = 3;
/// The distance between two queues' rings. The rings' guest addresses are also offsets into the guest memory.
const RINGS: u64 = 0x1000;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;
/// The first byte of memory that is free for requests.
pub const FREE: u64 = RINGS * QUEUES as u64;
/// Targets that have disks at first, in the order of the disks.
pub const TARGETS: [u8; 2] = [0, 5];

/// The guest, its disks, and the reactor between them.
pub struct Guest {
    /// All guest memory.
    pub memory: GuestArea,
    /// Errors that the guest has caused.
    pub errors: Arc<Errors>,
    queues: Vec<RootRef<Queue>>,
    nexuses: Vec<Arc<Nexus>>,
    reactor: Reactor,
    next_avail: [u16; QUEUES as usize],
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("errors", &self.errors).finish_non_exhaustive()
    }
}

impl Guest {
    /// Creates a guest with these two disks of a registry.
    pub fn new(registry: &Registry, disks: [&str; 2]) -> Self {
        let mapping = Arc::new(Mapping::anonymous(MEMORY).expect("memory"));
        let region = Region { guest_addr: 0, user_addr: 0, len: MEMORY, offset: 0, mapping };
        let memory = Arc::new(MemTable::new(vec![region]).expect("one region"));
        let whole = memory.area_at_guest(0, MEMORY).expect("inside");
        let open =
            |name| registry.open(name, Access::Exclusive, "test", |_| ()).expect("the disk can be opened");
        let nexuses: Vec<_> = disks
            .map(|name| Units::default().nexus(open(name), Port { initiator: 0x3000, target: 1 }, 0))
            .into();
        let mut targets = Targets::default();
        for (target, nexus) in TARGETS.into_iter().zip(&nexuses) {
            targets[usize::from(target)] = Some(Arc::clone(nexus));
        }
        let mut reactor =
            Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).expect("a reactor");
        let errors = Arc::<Errors>::default();
        let start = |index| start(reactor.cx(), index, &memory, targets.clone(), &errors);
        let queues = (0..QUEUES).map(start).collect();
        Self { memory: whole, errors, queues, nexuses, reactor, next_avail: [0; QUEUES as usize] }
    }

    /// Writes a descriptor.
    pub fn describe(&self, queue: u16, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = (RINGS * u64::from(queue)) as usize + 16 * usize::from(index);
        self.memory.write(at, &addr);
        self.memory.write(at + 8, &len);
        self.memory.write(at + 12, &flags);
        self.memory.write(at + 14, &next);
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, queue: u16, head: u16) {
        let avail = (RINGS * u64::from(queue) + AVAIL) as usize;
        let next = &mut self.next_avail[usize::from(queue)];
        self.memory.store_u16(avail + 4 + 2 * usize::from(*next % SIZE), head, Ordering::Relaxed);
        *next = next.wrapping_add(1);
        self.memory.store_u16(avail + 2, *next, Ordering::Release);
    }

    /// Runs one turn of the reactor.
    pub fn turn(&mut self) {
        self.reactor.turn();
    }

    /// Posts an event of a target: disk added, removed, resized or changed.
    pub fn post(&mut self, which: usize, target: u8) {
        let event =
            [TargetEvent::Unplugged, TargetEvent::Plugged, TargetEvent::Resized, TargetEvent::Changed]
                [which % 4];
        self.with(1, |queue, cx| queue.post(event, target, cx));
    }

    /// Detaches the disk of one of [`TARGETS`], or attaches it again.
    pub fn plug(&mut self, which: usize, is_there: bool) {
        let (target, nexus) = (TARGETS[which], is_there.then(|| Arc::clone(&self.nexuses[which])));
        let disk = nexus.clone();
        self.with(0, |queue, _| queue.manager().0.set_target(target, disk));
        self.with(2, |queue, cx| {
            let (requests, guest) = queue.requests();
            requests.detach(target, guest, cx);
            if let Some(nexus) = nexus {
                requests.attach(target, nexus, guest, cx).expect("the disk can be opened");
            }
        });
    }

    fn with<T>(&mut self, queue: usize, f: impl FnOnce(&mut Queue, &mut Cx) -> T) -> T {
        let cx = self.reactor.cx();
        let queue = cx.root::<Queue>(self.queues[queue].id()).expect("the queue runs until `stop`");
        f(&mut queue.borrow_mut(), cx)
    }

    /// Stops all queues.
    pub fn stop(mut self) {
        for index in (0..self.queues.len()).rev() {
            let mut stopped = self.with(index, Queue::stop);
            let has_stopped = (0..1_000_000).any(|_| {
                self.turn();
                matches!(stopped.try_recv(), Ok(Some(_)))
            });
            assert!(has_stopped, "queue {index} does not stop");
        }
    }
}

fn start(
    cx: &mut Cx,
    index: u16,
    memory: &Arc<MemTable>,
    targets: Targets,
    errors: &Arc<Errors>,
) -> RootRef<Queue> {
    let base = RINGS * u64::from(index);
    let area = |at, len| memory.area_at_guest(base + at, len).expect("inside");
    let ring = Virtqueue::new(Config {
        format: Format::Split,
        size: SIZE,
        desc: area(0, desc_len(SIZE)),
        driver: area(AVAIL, avail_len(SIZE, false)),
        device: area(USED, used_len(SIZE, false)),
        event_idx: false,
        indirect: true,
        base: 0,
        inflight: None,
    });
    let thread = cx.add_thread("queue", CoreSet::default());
    let parts = Parts {
        index,
        name: "queue".to_owned(),
        thread,
        ring: ring.expect("the ring is valid"),
        keeps_in_flight: false,
        log: None,
        memory: Arc::clone(memory),
        call: None,
        kick: None,
        errors: Arc::clone(errors),
        alarm: Box::new(|_| ()),
    };
    let queue = cx.add_root(thread, "queue", |id, cx| match index {
        0 => Queue::begin(id, parts, PortableRole::Control(Manager::new(targets.clone())), &targets, cx),
        1 => {
            let events = Events::new(u64::MAX, PendingEvents::default());
            Queue::begin(id, parts, PortableRole::Event(events), &targets, cx)
        }
        _ => Queue::of_commands(id, parts, targets, cx),
    });
    queue.expect("the disks can be opened")
}
