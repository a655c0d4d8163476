//! The guest's side of a queue, for tests and fuzzers: guest memory with a ring, and a disk, on a reactor that the test steps.

use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{Access, Device, Registry};
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use aryk_reactor::{Clock, CoreSet, Engine, Reactor, RootRef, SleepPolicy};
use aryk_vhost_device::{DeviceQueue, Errors, Parts, Trouble};
use aryk_vhost_user::QueueLog;
use aryk_virtqueue::{Config, Format, Virtqueue, avail_len, desc_len, used_len};
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Bytes of guest memory.
pub const MEMORY: u64 = 256 * 1024;
/// Entries in the ring.
pub const SIZE: u16 = 16;
/// Addresses of the ring's parts: guest addresses that are also offsets into the guest memory.
pub const DESC: u64 = 0;
/// The available ring.
pub const AVAIL: u64 = 0x1000;
/// The used ring.
pub const USED: u64 = 0x2000;
/// The first byte of memory that is free for requests.
pub const FREE: u64 = 0x3000;

/// The guest, its disk, and the reactor between them.
pub struct Guest {
    /// All guest memory.
    pub memory: GuestArea,
    /// Errors that the guest has caused.
    pub errors: Arc<Errors>,
    /// The reason for which the queue gave up, if it did.
    pub trouble: Arc<Mutex<Option<Trouble>>>,
    pub(crate) queue: RootRef<Queue>,
    reactor: Reactor,
    next_avail: u16,
    next_used: u16,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("errors", &self.errors).finish_non_exhaustive()
    }
}

impl Guest {
    /// Creates a guest of `device`. If `flushes`, the guest has negotiated flushes.
    pub fn new(device: Arc<dyn Device>, flushes: bool) -> Self {
        Self::with_memory(device, flushes, Mapping::anonymous(MEMORY).expect("memory"))
    }

    /// As [`Guest::new`], with the caller's memory of [`MEMORY`] bytes or more.
    pub fn with_memory(device: Arc<dyn Device>, flushes: bool, mapping: Mapping) -> Self {
        let (len, mapping) = (mapping.len(), Arc::new(mapping));
        let region = Region { guest_addr: 0, user_addr: 0, len, offset: 0, mapping };
        Self::with_regions(device, flushes, vec![region])
    }

    /// As [`Guest::new`], with these regions, the first of which has [`MEMORY`] bytes or more from address 0 on.
    pub fn with_regions(device: Arc<dyn Device>, flushes: bool, regions: Vec<Region>) -> Self {
        let registry = Registry::new();
        let identity = aryk_bdev::Identity::named("disk");
        registry.register(identity, device).expect("the registry is empty");
        let descriptor =
            registry.open("disk", Access::Shared, "test", |_| ()).expect("the disk can be opened");
        let memory = Arc::new(MemTable::new(regions).expect("sound regions"));
        let area = |at, len| memory.area_at_guest(at, len).expect("inside");
        let ring = Virtqueue::new(Config {
            format: Format::Split,
            size: SIZE,
            desc: area(DESC, desc_len(SIZE)),
            driver: area(AVAIL, avail_len(SIZE, false)),
            device: area(USED, used_len(SIZE, false)),
            event_idx: false,
            indirect: true,
            base: 0,
            inflight: None,
        });
        let whole = area(0, MEMORY);
        let (errors, trouble) = (Arc::<Errors>::default(), Arc::<Mutex<Option<Trouble>>>::default());
        let said = Arc::clone(&trouble);
        let mut reactor =
            Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).expect("a reactor");
        let cx = reactor.cx();
        let thread = cx.add_thread("queue", CoreSet::default());
        let parts = Parts {
            index: 0,
            name: "queue".to_owned(),
            thread,
            ring: ring.expect("the ring is valid"),
            keeps_in_flight: false,
            log: None,
            memory,
            call: None,
            kick: None,
            errors: Arc::clone(&errors),
            alarm: Box::new(move |t| *said.lock().expect("not poisoned") = Some(t)),
        };
        let disk = Disk {
            block_size: descriptor.bdev().geometry().block_size,
            id: *b"a disk of the tests\0",
            write_through: !flushes,
        };
        let queue = cx.add_root(thread, "queue", |id, cx| {
            let channel = descriptor.open_channel(id, cx).expect("a channel");
            Ok::<_, Infallible>(
                Queue::start(id, parts, disk, Some(channel), cx).expect("no descriptor to watch"),
            )
        });
        let Ok(queue) = queue;
        Self { memory: whole, errors, trouble, queue, reactor, next_avail: 0, next_used: 0 }
    }

    /// Writes a descriptor.
    pub fn describe(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = DESC as usize + 16 * usize::from(index);
        self.memory.write(at, &addr);
        self.memory.write(at + 8, &len);
        self.memory.write(at + 12, &flags);
        self.memory.write(at + 14, &next);
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, head: u16) {
        let place = usize::from(self.next_avail % SIZE);
        self.memory.store_u16(AVAIL as usize + 4 + 2 * place, head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.memory.store_u16(AVAIL as usize + 2, self.next_avail, Ordering::Release);
    }

    /// Starts, replaces or ends the dirty log of the guest's memory.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        let (queue, cx) = (self.queue.id(), self.reactor.cx());
        cx.root::<Queue>(queue).expect("the queue runs until `stop`").borrow_mut().guest.set_log(log);
    }

    /// The number of requests in flight.
    pub fn in_flight(&mut self) -> u32 {
        let queue = self.reactor.cx().root::<Queue>(self.queue.id()).expect("the queue runs until `stop`");
        queue.borrow().guest.sgs.in_use()
    }

    /// Wakes the queue as the disk would: its next poll is in the next turn.
    pub fn wake(&mut self) {
        let queue = self.queue.id();
        self.reactor.cx().wake(queue);
    }

    /// Runs one turn of the reactor.
    pub fn turn(&mut self) {
        self.reactor.turn();
    }

    /// The next used element, if there is one: head and length.
    pub fn used(&mut self) -> Option<(u32, u32)> {
        if self.memory.load_u16(USED as usize + 2, Ordering::Acquire) == self.next_used {
            return None;
        }
        let at = USED as usize + 4 + 8 * usize::from(self.next_used % SIZE);
        self.next_used = self.next_used.wrapping_add(1);
        Some((self.memory.read(at), self.memory.read(at + 4)))
    }

    /// Runs turns until a chain is used.
    pub fn wait(&mut self) -> (u32, u32) {
        for _ in 0..1_000_000 {
            self.turn();
            if let Some(used) = self.used() {
                return used;
            }
        }
        panic!("no chain was used: {:?}", self.trouble);
    }

    /// Stops the queue. Returns the index of the next available chain.
    pub fn stop(mut self) -> u32 {
        let (queue, cx) = (self.queue.id(), self.reactor.cx());
        let queue = cx.root::<Queue>(queue).expect("the queue runs until `stop`");
        let mut stopped = queue.borrow_mut().stop(cx);
        drop(queue);
        for _ in 0..1_000_000 {
            self.turn();
            if let Ok(Some(base)) = stopped.try_recv() {
                return base;
            }
        }
        panic!("the queue does not stop");
    }
}
