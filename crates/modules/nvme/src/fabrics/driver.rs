//! The I/O queues of a controller on one reactor, one for each path, which the channels of all its namespaces there share.
//! Reactor context.
//!
//! A request is at the controller, waits in a FIFO, waits for another attempt, waits for the end of changes that a lost
//! connection may still make, or is held because its own connection was lost ([`State`]). A turn looks at each connection once at
//! most, and sends what the requests of the turn have added by one call. Data is copied once on its way: from the guest's memory
//! to the connection's output, from the connection's input to the guest's memory. On the usual path a request needs no allocation
//! and no lock.
//!
//! `loss` has the steps after a lost connection, which the thread sends to each reactor as messages; `guard` the blocks that a
//! lost connection may still change. `route` chooses the paths of requests, `live` is a connection, `answers` takes what it
//! receives, `link` what carries a connection.

mod answers;
mod guard;
mod link;
mod live;
mod loss;
mod rdma;
mod route;
mod sealed;
mod tcp;
mod traffic;

pub(super) use guard::{Extent, Guard};
pub(super) use link::Carrier;
pub(super) use live::Live;
pub(super) use loss::{close, cut, drain, fail, give, hold, open, replay, settle, stop};
pub(super) use route::{Choice, PathTable, best_paths, bits};
pub use route::{PATHS_MAX, Policy};
pub(super) use traffic::Traffic;
pub use traffic::{Carried, PathTraffic};

use super::control::Command;
use super::disk::Namespace;
use super::rdma::Lost;
use super::shared::Shared;
use crate::driver::refused;
use aryk_bdev::{Channel, Completion, CreditPool, Io, Op, Status, Tag};
use aryk_dma::Sgl;
use aryk_nvme::io::{BadRequest, Commands, Range};
use aryk_nvme::replay::History;
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::status::Status as NvmeStatus;
use aryk_nvme_fabrics::Transfer;
use aryk_rdma::Ending;
use aryk_reactor::{Armed, Clock, Cx, Driver, DriverId, DriverKey, DriverRef, Handle, Nanos, RootId};
use aryk_slots::{Key, Slots};
use aryk_tls::TlsError;
use live::Running;
use route::Route;
use sealed::Sealing;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tcp::Buffers;
use traffic::ChannelCounts;

/// The shortest time between two system calls that find nothing to read, or no room to write.
const FRUITLESS: Duration = Duration::from_micros(2);
/// Changes of blocks that a queue remembers, to decide after a loss which writes are safe to submit again.
const HISTORY: usize = 1024;
/// Time between two attempts of a request to whose namespace no path gives access.
const ACCESS_INTERVAL: Duration = Duration::from_millis(50);
/// The largest deallocation is a range of this many bytes: see `disk`.
const RANGE_LEN: u32 = 16;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the FIFO.
    Waiting,
    /// Waits until no lost connection can change its blocks any more.
    Guarded,
    /// Waits for its next attempt.
    Delayed,
    /// The controller has so many commands of it, by this path; the status of those that ended.
    AtController { path: usize, left: u8, status: Status },
    /// The connection was lost while the controller had it, which the thread has not asked for yet.
    Lost,
    /// The connection was lost, and the thread will say what all reactors have changed since.
    Held,
    /// As `Held`; it may be submitted again once no lost connection can execute it any more.
    Unproven,
}

#[derive(Debug)]
struct Request {
    io: Io,
    channel: Key,
    state: State,
    /// Attempts after the first.
    attempts: u16,
    /// Its submitter no longer needs it: it is not tried again.
    is_aborted: bool,
    /// A change that was held, and is submitted again: later changes of its blocks wait for its end.
    is_replayed: bool,
    /// Losses while the controller had it.
    losses: u8,
    /// Times of its first attempt that may have had an effect (0 before) and of the last.
    first_attempt: u64,
    last_attempt: u64,
    /// Since when it has had no access to its namespace; 0: it has not been refused.
    refused_since: u64,
    /// Its place in the order of all requests.
    number: u64,
}

/// A channel of a namespace.
struct Opened {
    root: RootId,
    namespace: Arc<Namespace>,
    /// The commands of the namespace, as it was when the channel last had to look.
    commands: Commands,
    route: Route,
    completions: Vec<Completion>,
    counts: Arc<ChannelCounts>,
}

impl Opened {
    /// The path of the next request. `version` counts the changes of what paths are for namespaces.
    #[inline]
    fn next_path(&mut self, lives: &[Option<Box<Live>>; PATHS_MAX], version: u64) -> Option<usize> {
        if !self.route.is_of(version) {
            let connected = bits((0..PATHS_MAX).filter(|path| lives[*path].is_some()));
            self.route.make(&self.namespace.paths, connected, version);
        }
        self.route.next(|path| lives[path].as_ref().map_or(0, |live| live.free.len()))
    }
}

/// What happens to requests while no path is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Absence {
    /// Requests wait.
    Wait,
    /// Requests fail until a path is connected again.
    Fail,
    /// Requests fail for ever.
    Removed,
}

/// Which requests are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// Those that change no block of the guard.
    Guarded,
    /// None: the thread asks all reactors what a lost connection has left.
    Closed,
}

/// How an attempt to start a request ended.
enum Start {
    AtController,
    /// It must wait, and so must those behind it.
    Blocked,
    /// No path gives access to its namespace.
    Inaccessible,
    Ended(Status),
}

/// Why a connection is lost.
#[derive(Debug, thiserror::Error)]
enum Loss {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the target has closed the connection")]
    Closed,
    #[error("the target violates the protocol: {0}")]
    Violation(aryk_nvme_fabrics::tcp::Fatal),
    #[error("the target has ended the connection: {0}")]
    Terminated(aryk_nvme_fabrics::tcp::Fatal),
    #[error("TLS: {0}")]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Rdma(#[from] Lost),
    #[error("the controller has lost its state: {0}")]
    State(NvmeStatus),
    #[error("a request was not answered in time")]
    Silent,
}

/// See the [module](self).
pub(super) struct QueueDriver {
    shared: Arc<Shared>,
    handle: Handle,
    id: DriverId,
    /// The connections, by path.
    lives: [Option<Box<Live>>; PATHS_MAX],
    absence: Absence,
    gate: Gate,
    guard: Guard,
    requests: Slots<Request>,
    channels: Slots<Opened>,
    /// Requests in the state [`State::Waiting`], in order.
    waiting: VecDeque<Key>,
    /// Requests in the state [`State::Guarded`], in order.
    guarded: Vec<Key>,
    /// Requests in the state [`State::Delayed`].
    delayed: Vec<(Nanos, Key)>,
    credits: CreditPool,
    history: History,
    /// When a change completed last.
    last_change: u64,
    buffers: Rc<Buffers>,
    /// The buffers of connections with TLS.
    sealing: Option<Rc<Sealing>>,
    /// Requests so far.
    count: u64,
    has_late_timer: bool,
    /// Changes that were at a controller when its connection was lost, by path, since the thread last asked.
    unsettled: Vec<(usize, Extent)>,
    /// The ends of closed connections whose target may access the memory of requests until then. Requests that were lost do not
    /// end before.
    endings: Vec<Ending>,
    /// The round in which requests were submitted again, and how many of them have not ended.
    round: u64,
    replayed: u32,
}

/// Calls `f` with the driver of a controller on this reactor, if there is one.
fn with_driver<R>(key: DriverKey, cx: &mut Cx, f: impl FnOnce(&mut QueueDriver, &mut Cx) -> R) -> Option<R> {
    let driver = cx.driver::<QueueDriver, ()>(key, |_, _| Err(())).ok()?;
    let mut borrowed = driver.activate(cx);
    Some(f(&mut borrowed, cx))
}

impl QueueDriver {
    fn new(shared: &Arc<Shared>, id: DriverId, depth: u16, cx: &mut Cx) -> Self {
        let depth = u32::from(depth);
        let is_failing = shared.is_failing.load(Ordering::Acquire);
        let mut driver = Self {
            shared: Arc::clone(shared),
            handle: cx.handle().clone(),
            id,
            lives: Default::default(),
            absence: if is_failing { Absence::Fail } else { Absence::Wait },
            gate: Gate::Closed,
            guard: Guard::default(),
            requests: Slots::new(depth),
            channels: Slots::new(8),
            waiting: VecDeque::with_capacity(depth as usize),
            guarded: Vec::new(),
            delayed: Vec::new(),
            credits: CreditPool::new(depth),
            history: History::new(HISTORY),
            last_change: 0,
            buffers: cx.local_state(),
            sealing: None,
            count: 0,
            has_late_timer: false,
            unsettled: Vec::new(),
            endings: Vec::new(),
            round: 0,
            replayed: 0,
        };
        let (gate, guard) = shared.gate();
        guard.into_iter().for_each(|guard| driver.set_guard(guard));
        let prepared = shared.take_prepared(cx.handle());
        let queues = prepared.iter().map(|(_, live)| (live.path, live.life, live.qid)).collect();
        shared.send(Command::Began { reactor: cx.handle().clone(), gate, queues });
        prepared.into_iter().for_each(|(_, live)| driver.install(live, cx));
        driver
    }

    fn open_channel(&mut self, namespace: &Arc<Namespace>, root: RootId) -> Key {
        let (namespace, commands) = (Arc::clone(namespace), namespace.commands());
        let (route, completions, counts) = (Route::new(), Vec::new(), namespace.traffic.open());
        self.channels.add(Opened { root, namespace, commands, route, completions, counts })
    }

    fn close_channel(&mut self, channel: Key) {
        let mut of_channel = self.requests.iter().filter(|(_, request)| request.channel == channel);
        assert!(of_channel.next().is_none(), "a channel is closed when nothing is in flight");
        if let Some(channel) = self.channels.remove(channel) {
            channel.namespace.traffic.close(&channel.counts);
        }
    }

    #[inline]
    fn submit(&mut self, channel: Key, io: &Io, cx: &mut Cx) {
        self.count += 1;
        assert!(!self.requests.is_full(), "the caller holds a credit");
        let key = self.requests.add(Request {
            io: *io,
            channel,
            state: State::Waiting,
            attempts: 0,
            is_aborted: false,
            is_replayed: false,
            losses: 0,
            first_attempt: 0,
            last_attempt: 0,
            refused_since: 0,
            number: self.count,
        });
        if self.waiting.is_empty() {
            self.try_start(key, cx);
        } else {
            self.waiting.push_back(key);
        }
    }

    /// Starts a request, or leaves it where it waits for that. Returns whether those behind it may be tried.
    #[inline]
    fn try_start(&mut self, key: Key, cx: &mut Cx) -> bool {
        if self.gate != Gate::Open && !self.passes_gate(key) {
            return self.gate != Gate::Closed;
        }
        match self.start(key, cx) {
            Start::AtController => true,
            Start::Ended(status) => {
                self.finish(key, status, cx);
                true
            }
            Start::Inaccessible => {
                self.await_access(key, ACCESS_INTERVAL, cx);
                true
            }
            Start::Blocked => {
                self.waiting.push_front(key);
                false
            }
        }
    }

    /// Whether the gate lets a request pass; otherwise the request is left where it waits.
    #[cold]
    fn passes_gate(&mut self, key: Key) -> bool {
        if self.gate == Gate::Closed {
            self.waiting.push_front(key);
            return false;
        }
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let nsid = self.channels.get(request.channel).expect("it has requests").namespace.nsid();
        let io = &request.io;
        let is_apart = !io.op.is_change() || !self.guard.overlaps(nsid, io.lba.0, io.blocks.0);
        let fails = self.absence != Absence::Wait && self.lives.iter().all(Option::is_none);
        let passes = is_apart || request.is_replayed || fails;
        if !passes {
            request.state = State::Guarded;
            self.guarded.push(key);
        }
        passes
    }

    /// Completes the requests with this tag that the controller does not have; the others are not tried again.
    fn abort(&mut self, channel: Key, tag: Tag, cx: &mut Cx) {
        let is_meant = |request: &Request| request.channel == channel && request.io.tag == tag;
        let keys: Vec<Key> =
            self.requests.iter().filter(|(_, request)| is_meant(request)).map(|(key, _)| key).collect();
        for key in keys {
            let request = self.requests.get_mut(key).expect("just found");
            match request.state {
                // Step 2 after a loss ends those that a lost connection may execute.
                State::AtController { .. } | State::Lost | State::Held => {
                    request.is_aborted = true;
                    continue;
                }
                State::Waiting => self.waiting.retain(|&waiting| waiting != key),
                State::Guarded => self.guarded.retain(|&guarded| guarded != key),
                State::Delayed => self.delayed.retain(|&(_, delayed)| delayed != key),
                // Its blocks stay in the guard.
                State::Unproven => {}
            }
            self.finish(key, Status::Aborted, cx);
        }
    }

    fn take(&mut self, channel: Key, out: &mut Vec<Completion>) {
        let channel = self.channels.get_mut(channel).expect("a channel is there until it is closed");
        out.append(&mut channel.completions);
    }

    /// Adds a request's commands to the output of a path.
    #[inline]
    fn start(&mut self, key: Key, cx: &mut Cx) -> Start {
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let channel = self.channels.get_mut(request.channel).expect("it has requests");
        let Some(path) = channel.next_path(&self.lives, self.shared.version()) else {
            return self.start_without_path(key);
        };
        let live = self.lives[path].as_mut().expect("a path of a route is connected");
        let io = &request.io;
        let count = if io.op == Op::CompareAndWrite { 2 } else { 1 };
        if live.free.len() < count {
            if live.commands.len() < count {
                return Start::Ended(Status::Unsupported);
            }
            return Start::Blocked;
        }
        if io.op == Op::Flush && !live.has_write_cache {
            return Start::Ended(Status::Ok);
        }
        let fua = io.fua && live.has_write_cache;
        let entries = entries(&channel.commands, io, fua).or_else(|_| {
            // The namespace may have grown.
            channel.commands = channel.namespace.commands();
            entries(&channel.commands, io, fua)
        });
        let (entries, transfer) = match entries {
            Ok(entries) => entries,
            Err(error) => return Start::Ended(refused(error)),
        };
        let Some(way) = live.link.way(count, transfer, io) else {
            return match live.link.can_have(count, transfer) {
                true => Start::Blocked,
                false => Start::Ended(Status::Unsupported),
            };
        };
        for (entry, is_second) in entries.into_iter().zip([false, true]).take(count) {
            let cid = live.free.pop().expect("there are enough");
            live.commands[usize::from(cid)] = Some(Running { key, is_second });
            live.link.submit(cid, entry, transfer, way, (io, is_second));
        }
        request.state = State::AtController { path, left: count as u8, status: Status::Ok };
        request.last_attempt = cx.now().0;
        if request.first_attempt == 0 {
            // A request that follows the end of another in the same turn was submitted after it.
            request.first_attempt = request.last_attempt.max(self.last_change + 1);
        }
        if !self.has_late_timer {
            self.watch_late(cx);
        }
        Start::AtController
    }

    /// What a request does whose namespace has no path.
    #[cold]
    fn start_without_path(&mut self, key: Key) -> Start {
        if self.lives.iter().any(Option::is_some) {
            return Start::Inaccessible;
        }
        match self.absence {
            Absence::Wait => Start::Blocked,
            Absence::Fail => Start::Ended(self.fail_away(key)),
            Absence::Removed => Start::Ended(Status::Removed),
        }
    }

    /// Has a request tried again later.
    fn delay(&mut self, key: Key, delay: Duration, cx: &mut Cx) {
        self.requests.get_mut(key).expect("the caller has a request").state = State::Delayed;
        let (at, driver) = (cx.now().after(delay), self.id);
        self.delayed.push((at, key));
        cx.call_at(at, move |cx| cx.wake_driver(driver));
    }

    /// Starts requests that wait, in order.
    fn start_waiting(&mut self, cx: &mut Cx) {
        let now = cx.now();
        while let Some(i) = self.delayed.iter().position(|&(at, _)| at <= now) {
            let (_, key) = self.delayed.swap_remove(i);
            let request = self.requests.get_mut(key).expect("a delayed request");
            request.state = State::Waiting;
            // A change that is submitted again comes before the new ones.
            if request.is_replayed { self.waiting.push_front(key) } else { self.waiting.push_back(key) }
        }
        while let Some(key) = self.waiting.pop_front()
            && self.try_start(key, cx)
        {}
    }

    /// Ends a request.
    #[inline]
    fn finish(&mut self, key: Key, status: Status, cx: &mut Cx) {
        let request = self.requests.remove(key).expect("a request ends once");
        let channel = self.channels.get_mut(request.channel).expect("it has requests");
        if channel.completions.is_empty() {
            cx.wake(channel.root);
        }
        channel.completions.push(Completion { tag: request.io.tag, status });
        if request.is_replayed {
            self.ended_replayed();
        }
    }

    /// Looks now and then whether the controller has had a request for too long.
    #[cold]
    fn watch_late(&mut self, cx: &mut Cx) {
        self.has_late_timer = true;
        let key = self.shared.key;
        let at = cx.now().after(self.shared.config.patience / 4);
        cx.call_at(at, move |cx| {
            with_driver(key, cx, |driver, cx| driver.look_for_late(cx));
        });
    }

    fn look_for_late(&mut self, cx: &mut Cx) {
        self.has_late_timer = false;
        let oldest = cx.now().0.saturating_sub(self.shared.config.patience.as_nanos() as u64);
        for path in 0..PATHS_MAX {
            let is_late = |request: &Request| match request.state {
                State::AtController { path: its, .. } => its == path && request.last_attempt < oldest,
                _ => false,
            };
            if self.lives[path].is_some() && self.requests.iter().any(|(_, request)| is_late(request)) {
                self.lose(path, &Loss::Silent, cx);
            }
        }
        if self.commands_in_flight() > 0 {
            self.watch_late(cx);
        }
    }

    fn commands_in_flight(&self) -> u32 {
        self.lives.iter().flatten().map(|live| live.in_flight()).sum()
    }
}

/// The commands of a request, and the data of each. The second entry is that of a fused operation.
#[inline]
fn entries(commands: &Commands, io: &Io, fua: bool) -> Result<([SubmissionEntry; 2], Transfer), BadRequest> {
    let (lba, blocks, len) = (io.lba.0, io.blocks.0, io.data.len());
    let (entry, transfer) = match io.op {
        Op::Read => (commands.read(lba, blocks)?, Transfer::ToHost(len)),
        Op::Write => (commands.write(lba, blocks, fua)?, Transfer::ToController(len)),
        Op::Compare => (commands.compare(lba, blocks)?, Transfer::ToController(len)),
        Op::Flush => (commands.flush(), Transfer::None),
        Op::WriteZeroes => (commands.write_zeroes(lba, blocks, io.may_unmap, fua)?, Transfer::None),
        Op::Unmap => {
            let range = Range { slba: lba, blocks: u32::try_from(blocks).unwrap_or(u32::MAX) };
            (commands.deallocate(&[range], |_| {})?, Transfer::ToController(RANGE_LEN))
        }
        Op::CompareAndWrite => {
            let [compare, write] = commands.compare_and_write(lba, blocks, fua)?;
            let fused = [compare.with_fuse(Fuse::First), write.with_fuse(Fuse::Second)];
            return Ok((fused, Transfer::ToController(len / 2)));
        }
        Op::Copy => return Err(BadRequest::Unsupported("Copy")),
    };
    Ok(([entry; 2], transfer))
}

/// Copies the data of a request's command, from an offset on.
#[inline]
fn read_data(io: &Io, is_second: bool, offset: u32, to: &mut [u8]) {
    match io.op {
        Op::Unmap => to.copy_from_slice(&range(io)[offset as usize..][..to.len()]),
        _ if is_second => io.data.read(io.data.len() / 2 + offset, to),
        _ => io.data.read(offset, to),
    }
}

/// As [`read_data`], all of the data at once.
#[inline]
fn copy_data(io: &Io, is_second: bool, to: &Sgl) {
    match io.op {
        Op::Unmap => to.write(0, &range(io)),
        _ if is_second => io.data.slice(io.data.len() / 2, to.len()).copy_to(to),
        _ => io.data.first(to.len()).copy_to(to),
    }
}

/// The data of a deallocation.
fn range(io: &Io) -> [u8; RANGE_LEN as usize] {
    let mut range = [0; RANGE_LEN as usize];
    range[4..8].copy_from_slice(&(io.blocks.0 as u32).to_le_bytes());
    range[8..].copy_from_slice(&io.lba.0.to_le_bytes());
    range
}

impl Driver for QueueDriver {
    fn reap(&mut self, _: u32, cx: &mut Cx) -> u32 {
        if !self.delayed.is_empty() {
            self.start_waiting(cx);
        }
        let mut count = 0;
        for path in 0..PATHS_MAX {
            let Some(live) = &mut self.lives[path] else { continue };
            if !live.link.is_due(cx) {
                continue;
            }
            count += self.receive(path, cx).unwrap_or_else(|loss| {
                self.lose(path, &loss, cx);
                1
            });
        }
        if count > 0 && !self.waiting.is_empty() {
            self.start_waiting(cx);
        }
        count
    }

    fn flush(&mut self, cx: &mut Cx) {
        for path in 0..PATHS_MAX {
            if let Err(loss) = self.send(path, cx) {
                self.lose(path, &loss, cx);
            }
        }
    }

    fn arm(&mut self, cx: &mut Cx) -> Armed {
        let mut armed = Armed::Yes;
        for path in 0..PATHS_MAX {
            let Some(live) = &mut self.lives[path] else { continue };
            match live.link.arm(self.id, cx) {
                Ok(true) => {}
                Ok(false) => armed = Armed::Busy,
                Err(loss) => self.lose(path, &loss, cx),
            }
        }
        armed
    }

    fn in_flight(&self) -> u32 {
        self.commands_in_flight()
    }

    fn name(&self) -> String {
        format!("nvme-{} {}", self.shared.config.transport, self.shared.config.name)
    }
}

impl Drop for QueueDriver {
    fn drop(&mut self) {
        self.shared.keep_departed(std::mem::take(&mut self.unsettled), Clock::Monotonic.now());
        self.shared.send(Command::Gone(self.handle.clone()));
    }
}

/// One opener's use of a reactor's queue. The reactor keeps the queue as long as it has channels.
pub(super) struct RemoteChannel {
    driver: DriverRef<QueueDriver>,
    /// The channel's key in the driver.
    key: Key,
}

impl RemoteChannel {
    pub(super) fn open(shared: &Arc<Shared>, namespace: &Arc<Namespace>, root: RootId, cx: &mut Cx) -> Self {
        let depth = namespace.depth();
        let made =
            cx.driver(shared.key, |id, cx| Ok::<_, Infallible>(QueueDriver::new(shared, id, depth, cx)));
        let driver = made.unwrap_or_else(|never| match never {});
        let key = driver.activate(cx).open_channel(namespace, root);
        Self { driver, key }
    }
}

impl Channel for RemoteChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.driver.activate(cx).submit(self.key, io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.driver.activate(cx).abort(self.key, tag, cx);
    }

    #[inline]
    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.driver.borrow_mut().take(self.key, out);
    }

    fn credits(&self) -> Option<CreditPool> {
        Some(self.driver.borrow().credits.clone())
    }
}

impl Drop for RemoteChannel {
    fn drop(&mut self) {
        self.driver.borrow_mut().close_channel(self.key);
    }
}
