//! A reactor that a check polls itself, and openers on it.

use crate::data::Shape;
use aryk_bdev::{
    Access, BdevChannel, Blocks, Completion, Descriptor, Event, Io, Lba, Op, Registry, Status, Tag,
};
use aryk_dma::{Mapping, MemTable, Region, SgTable, Sgl};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, Root, RootId, SleepPolicy, ThreadId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// Idle turns after which a check fails; each lets other threads run first.
const IDLE_TURNS_MAX: u32 = 20_000_000;

/// Turns that modules get at the end.
const LAST_TURNS_MAX: u32 = 1_000_000;

/// One reactor on the calling thread.
#[derive(Debug)]
pub struct Bench {
    reactor: Reactor,
    thread: ThreadId,
    /// Roots and pollers of the reactor, besides openers and what modules have.
    members: u64,
    openers: u32,
}

/// Modules end what they have on the reactor after the last channel was closed.
impl Drop for Bench {
    fn drop(&mut self) {
        let handle = self.cx().handle().clone();
        for _ in 0..LAST_TURNS_MAX {
            let has_more = self.openers == 0 && handle.members() > self.members;
            if !has_more || std::thread::panicking() {
                break;
            }
            std::thread::yield_now();
            self.turn();
        }
    }
}

impl Bench {
    /// Creates a reactor with the system's clock.
    ///
    /// # Panics
    /// If the kernel refuses resources of a reactor.
    pub fn new() -> Self {
        Self::at(Clock::Monotonic)
    }

    /// Creates a reactor with another clock.
    ///
    /// # Panics
    /// As [`Bench::new`].
    pub fn at(clock: Clock) -> Self {
        Self::on(Engine::Auto, clock)
    }

    /// Creates a reactor with another kernel interface.
    ///
    /// # Panics
    /// As [`Bench::new`].
    pub fn on(engine: Engine, clock: Clock) -> Self {
        let mut reactor = Reactor::new(0, SleepPolicy::Poll, engine, clock).expect("a reactor starts");
        let thread = reactor.cx().add_thread("bench", CoreSet::from_iter([0]));
        let members = reactor.cx().handle().members();
        Self { reactor, thread, members, openers: 0 }
    }

    /// The reactor's state.
    pub const fn cx(&mut self) -> &mut Cx {
        self.reactor.cx()
    }

    /// The thread of everything on the reactor.
    pub const fn thread(&self) -> ThreadId {
        self.thread
    }

    /// Runs one turn.
    pub fn turn(&mut self) -> bool {
        self.reactor.turn()
    }

    /// Runs turns until `is_done`.
    ///
    /// # Panics
    /// If the reactor stays idle too long.
    pub fn until(&mut self, what: &str, mut is_done: impl FnMut() -> bool) {
        let mut idle = 0;
        while !is_done() {
            if self.turn() {
                continue;
            }
            idle += 1;
            assert!(idle < IDLE_TURNS_MAX, "idle while waiting for {what}");
            std::thread::yield_now();
        }
    }

    /// Runs turns until `future` is ready.
    ///
    /// # Panics
    /// As [`Bench::until`].
    pub fn wait<T>(&mut self, what: &str, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut result = None;
        let mut poll = || match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => {
                result = Some(value);
                true
            }
            Poll::Pending => false,
        };
        self.until(what, &mut poll);
        result.expect("it was ready")
    }

    /// Opens a disk, with a channel, and with memory for `requests` requests of up to `bytes` bytes.
    ///
    /// # Panics
    /// If the disk cannot be opened.
    pub fn open(
        &mut self,
        registry: &Registry,
        name: &str,
        access: Access,
        requests: u16,
        bytes: u32,
    ) -> Opener {
        let prepared = self.prepare(registry, name, access, requests, bytes);
        self.open_prepared(prepared)
    }

    /// As [`Bench::open`], without a channel: the disk is ready for one.
    ///
    /// # Panics
    /// As [`Bench::open`].
    pub fn prepare(
        &mut self,
        registry: &Registry,
        name: &str,
        access: Access,
        requests: u16,
        bytes: u32,
    ) -> Prepared {
        let events = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&events);
        let listener = move |event| told.lock().expect("no one panics holding it").push(event);
        let descriptor = registry.open(name, access, "the bench", listener).expect("the disk can be opened");
        let block_size = descriptor.bdev().geometry().block_size;
        let memory = GuestMemory::new(requests, Shape::room(bytes));
        let registered = registry.memory().add(memory.table.regions(), "the bench");
        self.wait("the memory to be registered", registered);
        let reactor = self.cx().handle().clone();
        self.wait("the reactor to be prepared", descriptor.prepare(&reactor)).expect("it can be prepared");
        Prepared { events, descriptor, memory, block_size }
    }

    /// Opens the channel of a disk that is ready for it. Runs no turn.
    ///
    /// # Panics
    /// If the channel cannot be opened.
    pub fn open_prepared(&mut self, prepared: Prepared) -> Opener {
        let Prepared { events, descriptor, memory, block_size } = prepared;
        let root = self.cx_root(&descriptor);
        Opener {
            root,
            events,
            descriptor: Some(descriptor),
            memory,
            block_size,
            next: 0,
            fua: false,
            sent: HashMap::new(),
        }
    }

    fn cx_root(&mut self, descriptor: &Descriptor) -> Rc<RefCell<Queue>> {
        let thread = self.thread;
        let made = self.cx().add_root(thread, "opener", |id, cx| {
            let channel = descriptor.open_channel(id, cx)?;
            Ok::<_, aryk_bdev::OpenError>(Queue { id, channel, scratch: Vec::new(), completed: Vec::new() })
        });
        let id = made.expect("a channel can be opened").id();
        self.openers += 1;
        self.cx().root(id).expect("just added")
    }
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

/// A disk that is ready for a channel on a bench's reactor.
pub struct Prepared {
    events: Arc<Mutex<Vec<Event>>>,
    descriptor: Descriptor,
    memory: GuestMemory,
    block_size: u32,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("descriptor", &self.descriptor).finish_non_exhaustive()
    }
}

/// The part of an opener that the reactor polls.
struct Queue {
    id: RootId,
    channel: BdevChannel,
    scratch: Vec<Completion>,
    completed: Vec<Completion>,
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.channel.poll(cx, &mut self.scratch);
        let worked = !self.scratch.is_empty();
        self.completed.append(&mut self.scratch);
        worked
    }
}

/// A guest's memory, with a slot for each request.
struct GuestMemory {
    table: Arc<MemTable>,
    lists: SgTable,
    free: Vec<u16>,
    room: u64,
}

/// The content of memory outside of segments.
const CANARY: u8 = 0xee;

impl GuestMemory {
    fn new(requests: u16, room: u32) -> Self {
        let room = u64::from(room).next_multiple_of(4096);
        let mapping = Arc::new(Mapping::anonymous(room * u64::from(requests)).expect("there is memory"));
        let len = mapping.len();
        let region = Region { guest_addr: 0, user_addr: 0, len, offset: 0, mapping };
        let table = Arc::new(MemTable::new(vec![region]).expect("one region is a table"));
        let lists = SgTable::new(requests, Arc::clone(&table));
        Self { table, lists, free: (0..requests).rev().collect(), room }
    }

    fn write(&self, slot: u16, segments: &[(u32, u32)], bytes: &[u8]) {
        let mut left = bytes;
        for &(offset, len) in segments {
            let (now, rest) = left.split_at(len as usize);
            self.table.write_bytes(self.addr(slot, offset), now).expect("in the slot's room");
            left = rest;
        }
    }

    fn read(&self, slot: u16, segments: &[(u32, u32)]) -> Vec<u8> {
        self.view(slot, segments).bytes()
    }

    fn view(&self, slot: u16, segments: &[(u32, u32)]) -> View {
        let segments = segments.iter().map(|&(offset, len)| (self.addr(slot, offset), len)).collect();
        View { table: Arc::clone(&self.table), segments }
    }

    /// The bytes around each segment, one before and one after.
    fn around(segments: &[(u32, u32)]) -> impl Iterator<Item = u32> + '_ {
        segments.iter().flat_map(|&(offset, len)| [offset.checked_sub(1), Some(offset + len)]).flatten()
    }

    fn addr(&self, slot: u16, offset: u32) -> u64 {
        u64::from(slot) * self.room + u64::from(offset)
    }
}

/// The result of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The request's number.
    pub id: u64,
    /// The request's status.
    pub status: Status,
    /// The content of its memory: of a read, the data read.
    pub data: Vec<u8>,
}

/// The memory of a request in flight, as the guest sees it. Any thread may look.
#[derive(Clone, Debug)]
pub struct View {
    table: Arc<MemTable>,
    /// Addresses and lengths of the segments.
    segments: Vec<(u64, u32)>,
}

impl View {
    /// The bytes that the memory has now.
    ///
    /// # Panics
    /// Never: the memory lives as long as its table.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(addr, len) in &self.segments {
            let start = bytes.len();
            bytes.resize(start + len as usize, 0);
            self.table.read_bytes(addr, &mut bytes[start..]).expect("in the slot's room");
        }
        bytes
    }

    /// Fills the memory, as a guest may that does not wait for its request.
    ///
    /// # Panics
    /// Never: the memory lives as long as its table.
    pub fn fill(&self, byte: u8) {
        for &(addr, len) in &self.segments {
            self.table.write_bytes(addr, &vec![byte; len as usize]).expect("in the slot's room");
        }
    }
}

/// A submitted request.
struct Sent {
    slot: Option<u16>,
    segments: Vec<(u32, u32)>,
    op: Op,
}

/// A disk that is open on a [`Bench`]. Numbers its requests, and panics if a request completes that it did not submit, or
/// completes twice.
pub struct Opener {
    root: Rc<RefCell<Queue>>,
    events: Arc<Mutex<Vec<Event>>>,
    /// `None` after the descriptor was dropped, while the channel may still be open.
    descriptor: Option<Descriptor>,
    memory: GuestMemory,
    block_size: u32,
    next: u64,
    /// Whether the next requests are durable when they complete.
    fua: bool,
    sent: HashMap<u64, Sent>,
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.root.borrow().channel.fmt(f)
    }
}

impl Opener {
    /// Lets the next requests carry `fua`, as all reads and writes of a guest without a write cache do.
    pub const fn set_fua(&mut self, fua: bool) {
        self.fua = fua;
    }

    /// Submits a read.
    pub fn read(&mut self, lba: u64, blocks: u64, shape: Shape, bench: &mut Bench) -> u64 {
        let bytes = blocks as u32 * self.block_size;
        self.with_data(Op::Read, lba, blocks, shape, &vec![0xdd; bytes as usize], bench)
    }

    /// Submits a write of `data`.
    pub fn write(&mut self, lba: u64, data: &[u8], shape: Shape, bench: &mut Bench) -> u64 {
        let blocks = data.len() as u64 / u64::from(self.block_size);
        self.with_data(Op::Write, lba, blocks, shape, data, bench)
    }

    /// Submits a request without data.
    pub fn command(&mut self, op: Op, lba: u64, blocks: u64, bench: &mut Bench) -> u64 {
        let sent = Sent { slot: None, segments: Vec::new(), op };
        self.submit(
            sent,
            Io {
                tag: Tag(0),
                op,
                fua: false,
                may_unmap: false,
                lba: Lba(lba),
                blocks: Blocks(blocks),
                source: Lba::ZERO,
                data: Sgl::EMPTY,
            },
            bench,
        )
    }

    /// Submits a copy of `blocks` blocks from `source` to `lba`.
    pub fn copy(&mut self, source: u64, lba: u64, blocks: u64, bench: &mut Bench) -> u64 {
        let (op, sent) = (Op::Copy, Sent { slot: None, segments: Vec::new(), op: Op::Copy });
        self.submit(
            sent,
            Io {
                tag: Tag(0),
                op,
                fua: false,
                may_unmap: false,
                lba: Lba(lba),
                blocks: Blocks(blocks),
                source: Lba(source),
                data: Sgl::EMPTY,
            },
            bench,
        )
    }

    /// Submits a request with this data, independent of its number of blocks.
    ///
    /// # Panics
    /// If there are more requests in flight than memory for them.
    pub fn with_data(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        shape: Shape,
        data: &[u8],
        bench: &mut Bench,
    ) -> u64 {
        let segments = shape.segments(data.len() as u32, self.block_size);
        let slot = self.memory.free.pop().expect("no more requests than announced");
        for around in GuestMemory::around(&segments) {
            self.memory.write(slot, &[(around, 1)], &[CANARY]);
        }
        self.memory.write(slot, &segments, data);
        self.memory.lists.begin(slot);
        for &(offset, len) in &segments {
            let addr = self.memory.addr(slot, offset);
            self.memory.lists.push(slot, addr, len).expect("in the slot's room");
        }
        let data = self.memory.lists.sgl(slot);
        let sent = Sent { slot: Some(slot), segments, op };
        self.submit(
            sent,
            Io {
                tag: Tag(0),
                op,
                fua: false,
                may_unmap: false,
                lba: Lba(lba),
                blocks: Blocks(blocks),
                source: Lba::ZERO,
                data,
            },
            bench,
        )
    }

    fn submit(&mut self, sent: Sent, io: Io, bench: &mut Bench) -> u64 {
        let id = self.next;
        self.next += 1;
        self.sent.insert(id, sent);
        self.root.borrow_mut().channel.submit(Io { tag: Tag(id), fua: self.fua, ..io }, bench.cx());
        id
    }

    /// Aborts a request.
    pub fn abort(&mut self, id: u64, bench: &mut Bench) {
        self.root.borrow_mut().channel.abort(Tag(id), bench.cx());
    }

    /// Aborts all requests.
    pub fn abort_all(&mut self, bench: &mut Bench) {
        self.root.borrow_mut().channel.abort_all(bench.cx());
    }

    /// The requests that completed since the last call, in order.
    ///
    /// # Panics
    /// If a request completed that was not in flight, or memory outside of a request's segments was written.
    pub fn completed(&mut self) -> Vec<Outcome> {
        let completed = std::mem::take(&mut self.root.borrow_mut().completed);
        completed.into_iter().map(|c| self.outcome(c)).collect()
    }

    fn outcome(&mut self, completion: Completion) -> Outcome {
        let id = completion.tag.0;
        let sent = self.sent.remove(&id).expect("what completes was in flight");
        let mut data = Vec::new();
        if let Some(slot) = sent.slot {
            self.memory.lists.end(slot);
            data = self.memory.read(slot, &sent.segments);
            for around in GuestMemory::around(&sent.segments) {
                let inside = sent.segments.iter().any(|&(at, len)| around >= at && around < at + len);
                let byte = self.memory.read(slot, &[(around, 1)]);
                assert!(inside || byte == [CANARY], "{:?} wrote outside of its segments", sent.op);
            }
            self.memory.free.push(slot);
        }
        Outcome { id, status: completion.status, data }
    }

    /// Waits until all requests have completed.
    ///
    /// # Panics
    /// As [`Opener::completed`], and if it takes too long.
    pub fn drain(&mut self, bench: &mut Bench) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let root = Rc::clone(&self.root);
        while !self.sent.is_empty() {
            bench.until("a request to complete", || !root.borrow().completed.is_empty());
            outcomes.extend(self.completed());
        }
        outcomes
    }

    /// Waits for the only request in flight.
    ///
    /// # Panics
    /// If not exactly one request is in flight, or as [`Opener::drain`].
    pub fn finish(&mut self, bench: &mut Bench) -> Outcome {
        let mut outcomes = self.drain(bench);
        assert_eq!(outcomes.len(), 1, "{outcomes:?}");
        outcomes.remove(0)
    }

    /// The memory of a request in flight.
    ///
    /// # Panics
    /// If the request is not in flight, or has no data.
    pub fn view(&self, id: u64) -> View {
        let sent = &self.sent[&id];
        let slot = sent.slot.expect("the request has data");
        self.memory.view(slot, &sent.segments)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// The events that the opener received.
    ///
    /// # Panics
    /// Only if a listener has panicked.
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().expect("no one panics holding it").clone()
    }

    /// Drops the disk's descriptor, while its channel stays open.
    pub fn drop_descriptor(&mut self) {
        self.descriptor = None;
    }

    /// Closes the channel, and the disk.
    ///
    /// # Panics
    /// If requests are in flight.
    pub fn close(self, bench: &mut Bench) {
        assert_eq!(self.in_flight(), 0, "requests are in flight");
        let id = self.root.borrow().id;
        bench.cx().remove_root(id);
        bench.openers -= 1;
    }
}
