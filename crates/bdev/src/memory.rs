//! Registration of guests' memory with the devices that access it by themselves: an IOMMU mapping for VFIO, a key for RDMA.
//! Control context: any thread but a reactor's, except [`MemoryLookup`], which is a channel's own, in reactor context.
//!
//! A [`MemoryClient`] is what has a table of its own of the memory that it may access: an IOMMU container, a protection domain.
//! Many devices may share one. A front-end announces each mapping of a guest's memory ([`Memory::add`]), and waits until every
//! client has registered it, or has failed to, or the patience is over. A client that attaches later first gets all mappings that
//! are there ([`Memory::attach`]). A request whose memory has no value for a client uses memory that the client's module has
//! registered itself: bounce buffers. A registration that failed is tried again when the client has unregistered something else,
//! which may have made room.
//!
//! **Invariants.** A client is asked to unregister a range once, after the last request that uses the range, or when it detaches.
//! The range stays mapped, and counted against its guest ([`aryk_dma::Limits`], [`aryk_dma::Peer`]), until all clients have
//! unregistered it, however long they take; a front-end does not wait for that. For one range and one client, `register` and
//! `unregister` never run at the same time.

mod executor;
mod lookup;
#[cfg(test)]
mod tests;

pub use lookup::{MemoryLookup, Place};

use crate::BoxFuture;
use crate::bdev::lock;
use aryk_dma::{DmaRange, HeldPages, Keeper, Mapping, Region};
use aryk_log_limit::{LogLimit, limited};
use executor::Executor;
use futures_channel::oneshot;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

/// Clients of a process: one for each NVMe controller or RDMA adapter. Each takes 16 bytes of each range.
pub const MEMORY_CLIENTS_MAX: usize = 32;

/// How long a front-end's reply waits for registrations, by default. A registration that takes longer goes on.
const PATIENCE: Duration = Duration::from_secs(10);

/// Log lines about one client: a burst, then one per period.
const LINES: u32 = 10;
const LINE_PERIOD: Duration = Duration::from_secs(5);

/// The value of a range for a client that has not registered it.
const NO_VALUE: u64 = u64::MAX;

/// Why a client has not registered a range.
#[derive(Debug)]
pub enum RegisterError {
    /// The operator wants the client to leave such memory out. That is no failure, and it is not tried again.
    Declined(&'static str),
    /// The registration failed. The text is written to the log.
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl RegisterError {
    /// A failed registration.
    pub fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Failed(error.into())
    }
}

/// A table of the memory that devices may access by themselves.
///
/// The futures run on one thread for all clients, which also runs while the control context is busy. So they must not block: a
/// client whose system calls take long makes them on a thread of its own. Calls for different ranges run at the same time, also
/// for those of different guests; a client that can make one at a time should give each guest its turn.
///
/// Registration makes the kernel allocate and pin all pages of the range, at the cost of this process: a client must limit what
/// it pins (`RLIMIT_MEMLOCK`), because a front-end may announce far more memory than the host has.
///
/// The client is also dropped on that thread.
pub trait MemoryClient: Send + Sync + 'static {
    /// The client, for people: `vfio 0000:3d:00.0`.
    fn name(&self) -> &str;

    /// Registers a range of whole pages, which are mapped at least until the future is ready. `owner` names the guest: all its
    /// ranges have the same. Returns the value for the data path: the range's address for the device (IOVA), or its key; anything
    /// but `u64::MAX`.
    ///
    /// # Errors
    /// The range stays without a value, and requests there use bounce buffers. A range whose registration has failed is
    /// registered again, one failed range at a time, after this client has unregistered another.
    fn register(&self, memory: DmaRange, owner: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>>;

    /// Ends the registration of a range. When the future is ready, no device accesses the range any more, and the range may be
    /// unmapped: a client that cannot be sure must never complete the future. `owner` and `value` are the registration's.
    fn unregister(&self, memory: DmaRange, owner: Arc<str>, value: u64) -> BoxFuture<'_, ()>;
}

/// Why a client cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// There are too many.
    #[error(
        "{MEMORY_CLIENTS_MAX} devices or groups of devices have guests' memory registered, and no more can"
    )]
    TooManyClients,
    /// The thread that runs registrations cannot be started.
    #[error("cannot start a thread for the registration of guests' memory: {0}")]
    Thread(#[from] std::io::Error),
}

/// All memory of guests, and the clients that register it. Cheap to clone.
#[derive(Clone, Default)]
pub struct Memory(Arc<Inner>);

struct Inner {
    /// By address. Locked for the time of a lookup or an insertion only.
    ranges: RwLock<BTreeMap<u64, Arc<Range>>>,
    /// Locked while a mapping is added or a client attached, so that each client gets each mapping once. A place is free when its
    /// client has unregistered everything, and no channel refers to it.
    clients: Mutex<[Weak<Client>; MEMORY_CLIENTS_MAX]>,
    executor: Executor,
    patience_ms: AtomicU64,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            ranges: RwLock::default(),
            clients: Mutex::default(),
            executor: Executor::default(),
            patience_ms: AtomicU64::new(PATIENCE.as_millis() as u64),
        }
    }
}

/// A range, and its values for all clients.
struct Range {
    memory: DmaRange,
    /// Whose memory it is.
    owner: Arc<str>,
    values: [AtomicU64; MEMORY_CLIENTS_MAX],
    /// Pieces of requests without a value.
    bounced: [AtomicU64; MEMORY_CLIENTS_MAX],
    /// The mapping was dropped: another range may get the same addresses.
    ended: AtomicBool,
    state: Mutex<RangeState>,
}

#[derive(Default)]
struct RangeState {
    registered: [Registration; MEMORY_CLIENTS_MAX],
    /// Clients that register the range, have it registered, or unregister it.
    users: u32,
    /// The pages, after the mapping was dropped.
    held: Option<HeldPages>,
}

/// How far a client is with a range.
#[derive(Default)]
enum Registration {
    /// Not begun, under way, or over.
    #[default]
    None,
    /// Registered, with this value.
    Done(Arc<Client>, u64),
    /// Failed, and in the client's [`Failed`] with this number of ends. The error's text.
    Failed(Arc<Client>, u64, String),
    /// The client leaves the range out.
    Declined(&'static str),
}

/// An attached client, until it has unregistered everything.
struct Client {
    index: usize,
    module: Option<Module>,
    memory: Memory,
    detaching: AtomicBool,
    /// Tickets of this client whose time is over, while their registrations are under way.
    overdue: AtomicU64,
    /// Locked after a [`Range::state`], if both are.
    failed: Mutex<Failed>,
    counters: Counters,
    lines: LogLimit,
}

/// The part of a client that its module owns. Fields are dropped in this order.
struct Module {
    client: Box<dyn MemoryClient>,
    _gone: oneshot::Sender<()>,
}

/// The ranges that a client has failed to register.
#[derive(Default)]
struct Failed {
    /// How often the client has unregistered a range, which may have made room.
    ends: u64,
    /// Live ranges, by the number of ends when their registration began, and by address.
    ranges: BTreeMap<(u64, u64), Arc<Range>>,
    /// One of them is being registered.
    is_retrying: bool,
}

#[derive(Default)]
struct Counters {
    registering: AtomicU64,
    registered: AtomicU64,
    unregistering: AtomicU64,
    failed: AtomicU64,
    declined: AtomicU64,
    late: AtomicU64,
    bounced: AtomicU64,
}

/// The state of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryClientInfo {
    /// The client's name.
    pub name: String,
    /// Ranges that it registers now.
    pub registering: u64,
    /// Registered ranges.
    pub registered: u64,
    /// Ranges that it unregisters now. They stay mapped.
    pub unregistering: u64,
    /// Registrations that have failed, in total.
    pub failed: u64,
    /// Ranges that it has left out because the operator wants that, in total.
    pub declined: u64,
    /// Times that a reply or a device waited for registrations longer than the patience, in total.
    pub late: u64,
    /// Pieces of requests that had no value, so that the device used bounce buffers, in total.
    pub bounced: u64,
}

/// A range without a value for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryWithout {
    /// The client's name.
    pub client: String,
    /// The front-end's controller.
    pub owner: String,
    /// Bytes.
    pub len: u64,
    /// Pieces of requests there.
    pub bounced: u64,
    /// Why; `None` while it is being registered.
    pub reason: Option<String>,
}

/// Registrations that a client began together: its holders.
pub(crate) struct Ticket {
    client: Arc<Client>,
    wait: Mutex<Wait>,
}

enum Wait {
    /// A reply or a device waits until all tickets with its sender have dropped it. `None` for a client that is overdue with
    /// earlier registrations, and for registrations that are tried again.
    Patient(Option<Arc<oneshot::Sender<()>>>),
    /// The patience is over.
    Overdue,
}

impl Ticket {
    /// The patience is over.
    fn expire(&self) {
        let wait = std::mem::replace(&mut *lock(&self.wait), Wait::Overdue);
        let Wait::Patient(sender) = wait else { return };
        let client = &self.client;
        client.overdue.fetch_add(1, Ordering::Relaxed);
        // Dropped at the end: the waiter then finds the counts.
        let Some(_sender) = sender else { return };
        client.counters.late.fetch_add(1, Ordering::Relaxed);
        limited!(
            client.lines,
            warn,
            registering = client.counters.registering.load(Ordering::Relaxed),
            "{} takes long to register guests' memory: until it has, requests there use bounce buffers",
            client.module().name()
        );
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if matches!(*lock(&self.wait), Wait::Overdue) {
            self.client.overdue.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("clients", &self.clients()).finish_non_exhaustive()
    }
}

impl Memory {
    /// Sets how long replies and devices wait for registrations, instead of ten seconds: up to an hour.
    pub fn set_patience(&self, patience: Duration) {
        let patience = patience.min(Duration::from_hours(1));
        self.0.patience_ms.store(patience.as_millis() as u64, Ordering::Relaxed);
    }

    /// Announces a guest's memory; mappings that were announced before are left out. The future is ready when every client has
    /// registered the others or has failed to, or when the patience is over. It does not wait for a client that is overdue with
    /// earlier registrations. Dropping it changes nothing else.
    ///
    /// A mapping leaves by being dropped. `owner` names the front-end's controller for people.
    pub fn add(&self, regions: &[Region], owner: &str) -> impl Future<Output = ()> + Send + use<> {
        let owner: Arc<str> = owner.into();
        let places = lock(&self.0.clients);
        let clients: Vec<Arc<Client>> =
            places.iter().filter_map(Weak::upgrade).filter(|client| !client.is_detaching()).collect();
        let insert = |region: &Region| self.0.insert(&region.mapping, &owner, self);
        let ranges: Vec<Arc<Range>> = regions.iter().filter_map(insert).collect();
        Self::begin(&clients, &ranges)
    }

    /// Attaches a client. The future is ready when the client has registered all memory that is there, or has failed to, or when
    /// the patience is over; so a device awaits it in [`crate::Device::prepare`] at the latest.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub async fn attach(&self, client: impl MemoryClient) -> Result<Attachment, MemoryError> {
        self.0.executor.start()?;
        let (attachment, settled) = self.attach_now(Box::new(client))?;
        settled.await;
        Ok(attachment)
    }

    fn attach_now(
        &self,
        client: Box<dyn MemoryClient>,
    ) -> Result<(Attachment, impl Future<Output = ()> + Send + use<>), MemoryError> {
        let mut places = lock(&self.0.clients);
        let free = places.iter().position(|place| place.strong_count() == 0);
        let index = free.ok_or(MemoryError::TooManyClients)?;
        let (sender, gone) = oneshot::channel();
        let client = Arc::new(Client {
            index,
            module: Some(Module { client, _gone: sender }),
            memory: self.clone(),
            detaching: AtomicBool::new(false),
            overdue: AtomicU64::new(0),
            failed: Mutex::default(),
            counters: Counters::default(),
            lines: LogLimit::new(LINES, LINE_PERIOD),
        });
        places[index] = Arc::downgrade(&client);
        let ranges: Vec<Arc<Range>> = self.0.ranges().values().cloned().collect();
        ranges.iter().for_each(|range| range.bounced[index].store(0, Ordering::Relaxed));
        let settled = Self::begin(std::slice::from_ref(&client), &ranges);
        Ok((Attachment { client: Some(client), gone }, settled))
    }

    /// Begins to register the ranges with the clients; returns the wait for it.
    fn begin(clients: &[Arc<Client>], ranges: &[Arc<Range>]) -> impl Future<Output = ()> + Send + use<> {
        let (sender, settled) = oneshot::channel();
        let sender = Arc::new(sender);
        for client in clients.iter().filter(|_| !ranges.is_empty()) {
            let ticket = client.ticket(Some(&sender));
            ranges.iter().for_each(|range| client.begin(range, &ticket));
        }
        // The sender only ends.
        async move { settled.await.unwrap_or_default() }
    }

    /// The attached clients, including those that still unregister.
    pub fn clients(&self) -> Vec<MemoryClientInfo> {
        let clients: Vec<_> = lock(&self.0.clients).iter().filter_map(Weak::upgrade).collect();
        clients.iter().map(|client| client.info()).collect()
    }

    /// Ranges without a value, at most `max`.
    pub fn without_value(&self, max: usize) -> Vec<MemoryWithout> {
        let clients: Vec<_> = lock(&self.0.clients).iter().filter_map(Weak::upgrade).collect();
        let ranges = self.0.ranges();
        let pairs = ranges.values().flat_map(|range| clients.iter().map(move |client| (range, client)));
        let without = pairs.filter(|(range, client)| range.value(client.index).is_none());
        let describe = |(range, client): (&Arc<Range>, &Arc<Client>)| MemoryWithout {
            client: client.module().name().to_owned(),
            owner: range.owner.to_string(),
            len: range.memory.len(),
            bounced: range.bounced[client.index].load(Ordering::Relaxed),
            reason: range.reason(client.index),
        };
        without.map(describe).take(max).collect()
    }
}

impl Inner {
    fn ranges(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<u64, Arc<Range>>> {
        self.ranges.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a range for a mapping, unless it has one.
    fn insert(&self, mapping: &Arc<Mapping>, owner: &Arc<str>, memory: &Memory) -> Option<Arc<Range>> {
        if mapping.has_keeper() {
            return None;
        }
        let pages = mapping.dma_pages();
        let addr = pages.addr();
        let range = Arc::new(Range {
            memory: pages,
            owner: Arc::clone(owner),
            values: std::array::from_fn(|_| AtomicU64::new(NO_VALUE)),
            bounced: std::array::from_fn(|_| AtomicU64::new(0)),
            ended: AtomicBool::new(false),
            state: Mutex::default(),
        });
        let keeper = KeptRange { range: Arc::clone(&range), memory: memory.clone() };
        if !mapping.set_keeper(Arc::new(keeper)) {
            return None;
        }
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.insert(addr, Arc::clone(&range));
        assert!(before.is_none(), "a range leaves before it is unmapped");
        Some(range)
    }

    fn remove(&self, addr: u64) {
        let removed = self.ranges.write().unwrap_or_else(PoisonError::into_inner).remove(&addr);
        assert!(removed.is_some(), "a range is there until its mapping is dropped");
    }
}

impl Range {
    #[inline]
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The value for the client with this index.
    #[inline]
    fn value(&self, client: usize) -> Option<u64> {
        let value = self.values[client].load(Ordering::Acquire);
        (value != NO_VALUE).then_some(value)
    }

    /// Why the client with this index has not registered the range.
    fn reason(&self, client: usize) -> Option<String> {
        match &lock(&self.state).registered[client] {
            Registration::None | Registration::Done(..) => None,
            Registration::Failed(_, _, error) => Some(error.clone()),
            Registration::Declined(reason) => Some((*reason).to_owned()),
        }
    }

    /// Ends a client's use; the last of an ended range lets it be unmapped.
    fn end_use(&self) {
        let released = {
            let mut state = lock(&self.state);
            assert!(state.users > 0, "a client ends each use of a range once");
            state.users -= 1;
            if state.users == 0 { state.held.take() } else { None }
        };
        if let Some(pages) = released {
            pages.release();
        }
    }
}

/// The end of a range, as its mapping sees it.
struct KeptRange {
    range: Arc<Range>,
    memory: Memory,
}

impl fmt::Debug for KeptRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.range.memory.fmt(f)
    }
}

impl Keeper for KeptRange {
    fn dropped(&self, pages: HeldPages) {
        let range = &self.range;
        self.memory.0.remove(range.memory.addr());
        let (registered, released) = {
            let mut state = lock(&range.state);
            range.ended.store(true, Ordering::Release);
            range.values.iter().for_each(|value| value.store(NO_VALUE, Ordering::Release));
            let registered = std::mem::take(&mut state.registered);
            if state.users > 0 {
                state.held = Some(pages);
                (registered, None)
            } else {
                (registered, Some(pages))
            }
        };
        registered.into_iter().for_each(|registration| registration.end(range));
        if let Some(pages) = released {
            pages.release();
        }
    }
}

impl Registration {
    /// Ends what was taken from a range.
    fn end(self, range: &Arc<Range>) {
        match self {
            Self::None | Self::Declined(_) => {}
            Self::Done(client, value) => client.unregister(range, value),
            Self::Failed(client, ends, _) => {
                lock(&client.failed).ranges.remove(&(ends, range.memory.addr()));
            }
        }
    }
}

impl Client {
    fn module(&self) -> &dyn MemoryClient {
        &*self.module.as_ref().expect("taken when this is dropped").client
    }

    fn is_detaching(&self) -> bool {
        self.detaching.load(Ordering::Acquire)
    }

    /// A ticket for registrations that begin now. The sender's receiver waits for them, unless the client is overdue.
    fn ticket(self: &Arc<Self>, sender: Option<&Arc<oneshot::Sender<()>>>) -> Arc<Ticket> {
        let sender = sender.filter(|_| self.overdue.load(Ordering::Relaxed) == 0).map(Arc::clone);
        let ticket = Arc::new(Ticket { client: Arc::clone(self), wait: Mutex::new(Wait::Patient(sender)) });
        let memory = &self.memory.0;
        let patience = Duration::from_millis(memory.patience_ms.load(Ordering::Relaxed));
        memory.executor.expire_after(patience, &ticket);
        ticket
    }

    /// Begins to register a range, unless it has ended.
    fn begin(self: &Arc<Self>, range: &Arc<Range>, ticket: &Arc<Ticket>) {
        let Some(ends) = self.begin_to_use(range) else { return };
        let (client, range, ticket) = (Arc::clone(self), Arc::clone(range), Arc::clone(ticket));
        self.memory.0.executor.spawn(async move {
            client.register(&range, ends).await;
            drop((range, ticket));
            client.retry_failed().await;
        });
    }

    /// Begins to use a range, unless it has ended; returns the ends until now.
    fn begin_to_use(&self, range: &Range) -> Option<u64> {
        let mut state = lock(&range.state);
        if range.has_ended() || self.is_detaching() {
            return None;
        }
        state.users += 1;
        let before = std::mem::take(&mut state.registered[self.index]);
        assert!(!matches!(before, Registration::Done(..)), "a registered range is not registered again");
        self.counters.registering.fetch_add(1, Ordering::Relaxed);
        Some(lock(&self.failed).ends)
    }

    async fn register(self: &Arc<Self>, range: &Arc<Range>, ends: u64) {
        let result = self.module().register(range.memory.clone(), Arc::clone(&range.owner)).await;
        self.counters.registering.fetch_sub(1, Ordering::Relaxed);
        match result {
            Ok(value) => self.settle(range, value),
            Err(RegisterError::Declined(reason)) => {
                self.remember_declined(range, reason);
                range.end_use();
            }
            Err(RegisterError::Failed(error)) => {
                self.count_failure(range, &*error);
                self.remember_failed(range, ends, error.to_string());
                range.end_use();
            }
        }
    }

    /// Handles the value of a registered range.
    fn settle(self: &Arc<Self>, range: &Arc<Range>, value: u64) {
        self.counters.registered.fetch_add(1, Ordering::Relaxed);
        let is_over = if value == NO_VALUE {
            self.count_failure(range, &"its value is reserved");
            true
        } else {
            let mut state = lock(&range.state);
            let is_over = range.has_ended() || self.is_detaching();
            if !is_over {
                let before = &state.registered[self.index];
                assert!(matches!(before, Registration::None), "a client registers a range once at a time");
                range.values[self.index].store(value, Ordering::Release);
                state.registered[self.index] = Registration::Done(Arc::clone(self), value);
            }
            is_over
        };
        if is_over {
            self.unregister(range, value);
        }
    }

    fn count_failure(&self, range: &Range, error: &dyn fmt::Display) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        limited!(
            self.lines,
            warn,
            owner = &*range.owner,
            bytes = range.memory.len(),
            "{} cannot register guest memory, so that requests there use bounce buffers: {error}",
            self.module().name()
        );
    }

    /// Counts a range that the client leaves out; the log has a line about the first.
    fn remember_declined(&self, range: &Range, reason: &'static str) {
        if self.counters.declined.fetch_add(1, Ordering::Relaxed) == 0 {
            let (owner, bytes) = (&*range.owner, range.memory.len());
            tracing::info!(owner, bytes, "{} uses bounce buffers: {reason}", self.module().name());
        }
        let mut state = lock(&range.state);
        if !range.has_ended() && !self.is_detaching() {
            state.registered[self.index] = Registration::Declined(reason);
        }
    }

    /// Keeps a range for another try. `ends` is the number of ends when its registration began.
    fn remember_failed(self: &Arc<Self>, range: &Arc<Range>, ends: u64, error: String) {
        let mut state = lock(&range.state);
        if !range.has_ended() && !self.is_detaching() {
            let before = &state.registered[self.index];
            assert!(matches!(before, Registration::None), "a client registers a range once at a time");
            state.registered[self.index] = Registration::Failed(Arc::clone(self), ends, error);
            lock(&self.failed).ranges.insert((ends, range.memory.addr()), Arc::clone(range));
        }
    }

    /// Registers again, one after another, the failed ranges for which an unregistration may have made room since.
    async fn retry_failed(self: &Arc<Self>) {
        if std::mem::replace(&mut lock(&self.failed).is_retrying, true) {
            return;
        }
        while let Some(range) = self.next_failed() {
            if let Some(ends) = self.begin_to_use(&range) {
                let _ticket = self.ticket(None);
                self.register(&range, ends).await;
            }
        }
    }

    /// Takes a failed range that should be tried again; if there is none, the retry ends.
    fn next_failed(&self) -> Option<Arc<Range>> {
        let mut failed = lock(&self.failed);
        let ends = failed.ends;
        let range =
            failed.ranges.first_entry().filter(|first| first.key().0 < ends).map(|first| first.remove());
        failed.is_retrying = range.is_some();
        range
    }

    /// Begins to unregister a range that has no value for the client any more.
    fn unregister(self: &Arc<Self>, range: &Arc<Range>, value: u64) {
        self.counters.registered.fetch_sub(1, Ordering::Relaxed);
        self.counters.unregistering.fetch_add(1, Ordering::Relaxed);
        let (client, range) = (Arc::clone(self), Arc::clone(range));
        self.memory.0.executor.spawn(async move {
            client.module().unregister(range.memory.clone(), Arc::clone(&range.owner), value).await;
            client.counters.unregistering.fetch_sub(1, Ordering::Relaxed);
            range.end_use();
            drop(range);
            lock(&client.failed).ends += 1;
            client.retry_failed().await;
        });
    }

    /// Begins to unregister everything.
    fn detach(&self) {
        // Before the ranges are visited: a registration that ends later sees it.
        self.detaching.store(true, Ordering::Release);
        let ranges: Vec<Arc<Range>> = self.memory.0.ranges().values().cloned().collect();
        for range in ranges {
            // No other client has the index while this client exists.
            let ours = {
                let mut state = lock(&range.state);
                range.values[self.index].store(NO_VALUE, Ordering::Release);
                std::mem::take(&mut state.registered[self.index])
            };
            ours.end(&range);
        }
    }

    fn info(&self) -> MemoryClientInfo {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { registering, registered, unregistering, failed, declined, late, bounced } =
            &self.counters;
        MemoryClientInfo {
            name: self.module().name().to_owned(),
            registering: get(registering),
            registered: get(registered),
            unregistering: get(unregistering),
            failed: get(failed),
            declined: get(declined),
            late: get(late),
            bounced: get(bounced),
        }
    }
}

impl Drop for Client {
    /// The end of a module's client may block, and the last holder may be a channel, on a reactor.
    fn drop(&mut self) {
        let module = self.module.take();
        self.memory.0.executor.spawn(async move { drop(module) });
    }
}

/// An attached client. Dropping it detaches the client in the background.
pub struct Attachment {
    /// `None` once it is detached.
    client: Option<Arc<Client>>,
    gone: oneshot::Receiver<()>,
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment").field("client", &self.client.as_ref().map(|c| c.info())).finish()
    }
}

impl Attachment {
    /// A lookup for one channel of the client's devices.
    ///
    /// # Panics
    /// Never: the client is attached.
    pub fn lookup(&self) -> MemoryLookup {
        MemoryLookup::new(Arc::clone(self.client.as_ref().expect("attached until it is dropped")))
    }

    /// Detaches the client, and waits until it has unregistered everything and every [`MemoryLookup`] is dropped: after the last
    /// channel of its devices is closed, in [`crate::Device::close`].
    pub async fn detach(mut self) {
        self.begin_to_detach();
        let _ = (&mut self.gone).await;
    }

    fn begin_to_detach(&mut self) {
        if let Some(client) = self.client.take() {
            client.detach();
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.begin_to_detach();
    }
}
