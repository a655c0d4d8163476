//! The I/O queue of a controller on one reactor, which the channels of all its namespaces there share. Reactor context.
//!
//! A request is at the controller, waits in a FIFO, waits for another attempt, or is held because its connection was lost
//! ([`State`]). A turn reads the socket once at most, and writes what the requests of the turn have added. Data is copied once on
//! its way: from the guest's memory to the socket's output, from the socket's input to the guest's memory. On the usual path a
//! request needs no allocation and no lock.
//!
//! `loss` has the steps after a lost connection, which the thread sends to each reactor as messages.

mod loss;
mod sealed;

pub(super) use loss::{Stopped, close, fail, give, open, resume, stop};

use super::connection::Parts;
use super::control::Command;
use super::disk::Namespace;
use super::shared::Shared;
use crate::driver::{refused, worse};
use crate::status::{Outcome, RETRY_DELAY_MIN, decide, decide_harmless, errno};
use aryk_bdev::{Channel, Completion, CreditPool, DeviceError, Failure, Io, Op, Status, Tag};
use aryk_nvme::io::{BadRequest, Commands, Range};
use aryk_nvme::replay::{Change, History};
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::tcp::{HostQueue, HostReceived, Transfer};
use aryk_reactor::{Armed, Cx, Driver, DriverId, DriverKey, DriverRef, Handle, Nanos, RootId, WatchId};
use aryk_slots::{Key, Slots};
use aryk_tls::{Session, TlsError};
use rustix::event::epoll;
use sealed::Sealing;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Bytes that one turn reads, and that one system call writes.
const BUFFER: usize = 256 << 10;
/// System calls that write in one turn.
const WRITES_MAX: u32 = 4;
/// The shortest time between two system calls that find nothing to read, or no room to write.
const FRUITLESS: Duration = Duration::from_micros(2);
/// Changes of blocks that a queue remembers, to decide after a loss which writes are safe to submit again.
const HISTORY: usize = 1024;
/// The largest deallocation is a range of this many bytes: see `disk`.
const RANGE_LEN: u32 = 16;

/// The buffers of sockets: all queues of a reactor share them.
struct Buffers {
    input: RefCell<Vec<u8>>,
    output: RefCell<Vec<u8>>,
}

impl Default for Buffers {
    fn default() -> Self {
        let buffer = || RefCell::new(vec![0; BUFFER]);
        Self { input: buffer(), output: buffer() }
    }
}

/// A command in flight: its request, and which of the request's commands it is.
#[derive(Clone, Copy, Debug)]
struct Running {
    key: Key,
    is_second: bool,
}

/// A connected queue.
#[derive(Debug)]
pub(crate) struct Live {
    socket: TcpStream,
    tls: Option<Session>,
    queue: HostQueue,
    generation: u64,
    retry_delays: [u16; 3],
    has_write_cache: bool,
    watch: Option<WatchId>,
    /// Tells when a full socket has room again.
    room: Option<WatchId>,
    /// Output that the socket has not taken.
    unsent: VecDeque<u8>,
    commands: Box<[Option<Running>]>,
    /// Command identifiers that are free.
    free: Vec<u16>,
    /// When the socket is read and written next, if it had nothing or no room.
    read_at: Nanos,
    write_at: Nanos,
}

impl Live {
    /// A connection whose queue takes `depth` commands at a time.
    pub(super) fn new(
        (socket, tls, queue): Parts,
        depth: u16,
        generation: u64,
        retry_delays: [u16; 3],
        has_write_cache: bool,
    ) -> Self {
        Self {
            socket,
            tls,
            queue,
            generation,
            retry_delays,
            has_write_cache,
            watch: None,
            room: None,
            unsent: VecDeque::new(),
            commands: vec![None; usize::from(depth)].into(),
            free: (0..depth).rev().collect(),
            read_at: Nanos(0),
            write_at: Nanos(0),
        }
    }

    fn in_flight(&self) -> u32 {
        (self.commands.len() - self.free.len()) as u32
    }
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the FIFO.
    Waiting,
    /// Waits for its next attempt.
    Delayed,
    /// The controller has so many commands of it; the status of those that ended.
    AtController(u8, Status),
    /// The connection was lost while the controller had it.
    Held,
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
    /// A loss has kept it, and it has not ended since.
    is_kept: bool,
    /// Losses during its repetition after a loss.
    replays: u8,
    /// Times of its first attempt (0 before) and of the last.
    first_attempt: u64,
    last_attempt: u64,
    /// Its place in the order of all requests.
    number: u64,
}

/// A channel of a namespace.
struct Opened {
    root: RootId,
    namespace: Arc<Namespace>,
    /// The commands of the namespace, as it was when the channel last had to look.
    commands: Commands,
    completions: Vec<Completion>,
}

/// Whether there is a connection.
enum Life {
    Live(Box<Live>),
    /// Requests wait.
    Away,
    /// Requests fail until there is one again.
    Failing,
    /// Requests fail.
    Closed,
}

/// Whether requests are started. After a loss, the requests that are submitted again come first, on all reactors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// So many requests that a loss kept have not ended; only they are started.
    Replaying(u32),
    /// Other reactors are not as far.
    Closed,
}

/// How an attempt to start a request ended.
enum Start {
    AtController,
    /// It must wait.
    Blocked,
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
    life: Life,
    gate: Gate,
    requests: Slots<Request>,
    channels: Slots<Opened>,
    /// Requests in the state [`State::Waiting`], in order.
    waiting: VecDeque<Key>,
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
    is_armed: bool,
    /// A change was at the controller when the connection was lost, since the thread last asked.
    has_unsettled: bool,
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
        let mut driver = Self {
            shared: Arc::clone(shared),
            handle: cx.handle().clone(),
            id,
            life: if shared.is_failing.load(Ordering::Acquire) { Life::Failing } else { Life::Away },
            gate: Gate::Open,
            requests: Slots::new(depth),
            channels: Slots::new(8),
            waiting: VecDeque::with_capacity(depth as usize),
            delayed: Vec::new(),
            credits: CreditPool::new(depth),
            history: History::new(HISTORY),
            last_change: 0,
            buffers: cx.local_state(),
            sealing: None,
            count: 0,
            has_late_timer: false,
            is_armed: false,
            has_unsettled: false,
        };
        match shared.take_prepared(cx.handle()) {
            Some(live) => driver.install(live, cx),
            None => shared.send(Command::Wanted(cx.handle().clone())),
        }
        driver
    }

    fn open_channel(&mut self, namespace: &Arc<Namespace>, root: RootId) -> Key {
        let (namespace, commands) = (Arc::clone(namespace), namespace.commands());
        self.channels.add(Opened { root, namespace, commands, completions: Vec::new() })
    }

    fn close_channel(&mut self, channel: Key) {
        let mut of_channel = self.requests.iter().filter(|(_, request)| request.channel == channel);
        assert!(of_channel.next().is_none(), "a channel is closed when nothing is in flight");
        self.channels.remove(channel);
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
            is_kept: false,
            replays: 0,
            first_attempt: 0,
            last_attempt: 0,
            number: self.count,
        });
        if !self.waiting.is_empty() || !self.may_start(key) {
            return self.waiting.push_back(key);
        }
        match self.start(key, cx) {
            Start::AtController => {}
            Start::Blocked => self.waiting.push_back(key),
            Start::Ended(status) => self.finish(key, status, cx),
        }
    }

    /// Completes the requests with this tag that the controller does not have; the others are not tried again.
    fn abort(&mut self, channel: Key, tag: Tag, cx: &mut Cx) {
        let is_meant = |request: &Request| request.channel == channel && request.io.tag == tag;
        let keys: Vec<Key> =
            self.requests.iter().filter(|(_, request)| is_meant(request)).map(|(key, _)| key).collect();
        for key in keys {
            let request = self.requests.get_mut(key).expect("just found");
            match request.state {
                State::AtController(..) => {
                    request.is_aborted = true;
                    continue;
                }
                State::Waiting => self.waiting.retain(|&waiting| waiting != key),
                State::Delayed => self.delayed.retain(|&(_, delayed)| delayed != key),
                State::Held => {}
            }
            self.finish(key, Status::Aborted, cx);
        }
    }

    fn take(&mut self, channel: Key, out: &mut Vec<Completion>) {
        let channel = self.channels.get_mut(channel).expect("a channel is there until it is closed");
        out.append(&mut channel.completions);
    }

    /// Whether the gate lets a request pass.
    fn may_start(&self, key: Key) -> bool {
        match self.gate {
            Gate::Open => true,
            Gate::Replaying(_) => self.requests.get(key).is_some_and(|request| request.is_kept),
            Gate::Closed => matches!(self.life, Life::Failing | Life::Closed),
        }
    }

    /// Adds a request's commands to the output.
    #[inline]
    fn start(&mut self, key: Key, cx: &mut Cx) -> Start {
        let live = match &mut self.life {
            Life::Live(live) => live,
            Life::Away => return Start::Blocked,
            Life::Failing => return self.fail_away(key),
            Life::Closed => return Start::Ended(Status::Removed),
        };
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let channel = self.channels.get_mut(request.channel).expect("it has requests");
        let io = &request.io;
        let count = if io.op == Op::CompareAndWrite { 2 } else { 1 };
        if live.free.len() < count {
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
        for (entry, is_second) in entries.into_iter().zip([false, true]).take(count) {
            let cid = live.free.pop().expect("there are enough");
            live.commands[usize::from(cid)] = Some(Running { key, is_second });
            live.queue.submit(cid, entry, transfer);
        }
        request.state = State::AtController(count as u8, Status::Ok);
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

    /// Starts requests that wait, in order.
    fn start_waiting(&mut self, cx: &mut Cx) {
        let now = cx.now();
        while let Some(i) = self.delayed.iter().position(|&(at, _)| at <= now) {
            let (_, key) = self.delayed.swap_remove(i);
            let request = self.requests.get_mut(key).expect("a delayed request");
            request.state = State::Waiting;
            // A request that a loss kept comes before the new ones.
            if request.is_kept { self.waiting.push_front(key) } else { self.waiting.push_back(key) }
        }
        while let Some(&key) = self.waiting.front()
            && self.may_start(key)
        {
            match self.start(key, cx) {
                Start::Blocked => break,
                Start::AtController => drop(self.waiting.pop_front()),
                Start::Ended(status) => {
                    self.waiting.pop_front();
                    self.finish(key, status, cx);
                }
            }
        }
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
        if request.is_kept
            && let Gate::Replaying(left) = self.gate
        {
            self.set_kept(left - 1);
        }
    }

    /// Reads the socket once. Returns the number of commands that ended, at least 1 if there was input.
    fn receive(&mut self, cx: &mut Cx) -> Result<u32, Loss> {
        let Life::Live(live) = &mut self.life else { return Ok(0) };
        let buffers = Rc::clone(&self.buffers);
        let mut buffer = buffers.input.borrow_mut();
        let len = match live.socket.read(&mut buffer) {
            Ok(0) => return Err(Loss::Closed),
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                live.read_at = cx.now().after(FRUITLESS);
                return Ok(0);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        match live.tls {
            Some(_) => self.open(&buffer[..len], cx),
            None => self.take_input(&buffer[..len], cx),
        }
        .map(|count| count.max(1))
    }

    /// Takes plain input. Returns the number of commands that ended.
    fn take_input(&mut self, mut input: &[u8], cx: &mut Cx) -> Result<u32, Loss> {
        let (mut count, mut received_at) = (0, None);
        loop {
            let Life::Live(live) = &mut self.life else { return Ok(count) };
            match live.queue.receive(&mut input).map_err(Loss::Violation)? {
                None => return Ok(count),
                Some(HostReceived::Data { cid, offset, bytes }) => {
                    let running = live.commands[usize::from(cid)].expect("the queue has the command");
                    let request = self.requests.get(running.key).expect("it is at the controller");
                    request.io.data.write(offset, bytes);
                }
                Some(HostReceived::Completed { cid, status, is_intact, .. }) => {
                    count += 1;
                    let running = live.commands[usize::from(cid)].take().expect("the queue had the command");
                    live.free.push(cid);
                    let now = *received_at.get_or_insert_with(|| cx.refresh_now());
                    self.complete(running, status, is_intact, now, cx)?;
                }
                Some(HostReceived::Terminated(fatal)) => return Err(Loss::Terminated(fatal)),
                Some(HostReceived::Established) => unreachable!("the queue was established in control"),
            }
        }
    }

    #[inline]
    fn complete(
        &mut self,
        Running { key, is_second }: Running,
        answer: NvmeStatus,
        is_intact: bool,
        now: Nanos,
        cx: &mut Cx,
    ) -> Result<(), Loss> {
        let request = self.requests.get_mut(key).expect("it is at the controller");
        let State::AtController(left, earlier) = request.state else {
            unreachable!("a command in flight is of a request at the controller")
        };
        let is_last = left == 1 || is_second;
        if is_last && request.io.op.is_change() {
            let channel = self.channels.get(request.channel).expect("it has requests");
            let (slba, blocks) = (request.io.lba.0, request.io.blocks.0);
            self.last_change = now.0;
            self.history.add(Change { nsid: channel.namespace.nsid(), slba, blocks, completed: now.0 });
        }
        if answer.is_success() && is_intact && left == 1 && earlier.is_ok() {
            self.finish(key, Status::Ok, cx);
            return Ok(());
        }
        self.complete_otherwise(key, answer, is_intact, cx)
    }

    /// Takes an answer that is a failure, or one of two.
    #[cold]
    fn complete_otherwise(
        &mut self,
        key: Key,
        answer: NvmeStatus,
        is_intact: bool,
        cx: &mut Cx,
    ) -> Result<(), Loss> {
        let Life::Live(live) = &self.life else { return Ok(()) };
        let answer = match is_intact || !answer.is_success() {
            true => answer,
            false => Code::TRANSIENT_TRANSPORT_ERROR.status(),
        };
        let delay_max = self.shared.config.patience.as_nanos() as u64;
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let State::AtController(left, earlier) = request.state else { return Ok(()) };
        let mut outcome = decide(answer, live.retry_delays, delay_max);
        if !request.io.op.is_change() {
            outcome = decide_harmless(answer, live.retry_delays, delay_max, outcome);
        }
        if answer.code() == Code::TRANSIENT_TRANSPORT_ERROR && request.io.op != Op::CompareAndWrite {
            // Data was damaged on its way: reads and writes alike may be done again.
            outcome = Outcome::Retry(RETRY_DELAY_MIN, Status::Medium);
        }
        let may_retry = left == 1
            && earlier.is_ok()
            && request.io.op != Op::CompareAndWrite
            && !request.is_aborted
            && request.attempts < self.shared.config.retries;
        let (status, mut loss) = match outcome {
            Outcome::Done(status) => (status, None),
            Outcome::Retry(delay, _) if may_retry => {
                request.attempts += 1;
                self.shared.retried.fetch_add(1, Ordering::Relaxed);
                request.state = State::Delayed;
                let at = cx.now().after(Duration::from_nanos(delay));
                self.delayed.push((at, key));
                let driver = self.id;
                cx.call_at(at, move |cx| cx.wake_driver(driver));
                return Ok(());
            }
            Outcome::Retry(_, status) => (status, None),
            Outcome::Reset(status) => (status, Some(Loss::State(answer))),
        };
        let status = worse(earlier, status);
        if left > 1 {
            request.state = State::AtController(left - 1, status);
            return loss.take().map_or(Ok(()), Err);
        }
        if !matches!(status, Status::Ok | Status::Miscompare | Status::Aborted) {
            let io = request.io;
            let device = DeviceError {
                code: answer.code().0,
                is_final: answer.is_final(),
                crd: answer.crd(),
                name: answer.code().name(),
                lba: None,
            };
            let failure = Failure::now(io.op, io.lba, io.blocks, errno(status)).with_device(device);
            self.channels.get(request.channel).expect("it has requests").namespace.failed(failure);
        }
        self.finish(key, status, cx);
        loss.take().map_or(Ok(()), Err)
    }

    /// Writes what the queue has to send, as far as the socket takes it.
    fn send(&mut self, cx: &mut Cx) -> Result<(), Loss> {
        let Life::Live(live) = &mut self.life else { return Ok(()) };
        if cx.now() < live.write_at {
            return Ok(());
        }
        for _ in 0..WRITES_MAX {
            if !live.unsent.is_empty() {
                let (bytes, _) = live.unsent.as_slices();
                let Some(len) = write(&mut live.socket, bytes)? else {
                    live.write_at = cx.now().after(FRUITLESS);
                    return Ok(());
                };
                live.unsent.drain(..len);
                continue;
            }
            if !live.queue.has_output() {
                return Ok(());
            }
            let (requests, commands) = (&self.requests, &live.commands);
            let mut output = self.buffers.output.borrow_mut();
            let filled = live.queue.encode(&mut output, |cid, offset, to| {
                let running = commands[usize::from(cid)].expect("the queue has the command");
                let request = requests.get(running.key).expect("it is at the controller");
                read_data(&request.io, running.is_second, offset, to);
            });
            if let (Some(session), Some(sealing)) = (&mut live.tls, &self.sealing) {
                let records = sealing.seal(session, &output[..filled])?;
                let len = write(&mut live.socket, &records)?.unwrap_or(0);
                live.unsent.extend(&records[len..]);
                continue;
            }
            let len = write(&mut live.socket, &output[..filled])?.unwrap_or(0);
            live.unsent.extend(&output[len..filled]);
        }
        Ok(())
    }

    /// Has the driver woken when the socket has room.
    fn await_room(&mut self, cx: &mut Cx) -> io::Result<()> {
        let Life::Live(live) = &mut self.life else { return Ok(()) };
        if live.unsent.is_empty() || live.room.is_some() {
            return Ok(());
        }
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = epoll::EventFlags::OUT | epoll::EventFlags::ONESHOT;
        epoll::add(&room, &live.socket, epoll::EventData::new_u64(0), event)?;
        live.room = Some(cx.watch_driver(room, self.id)?);
        Ok(())
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
        let Life::Live(live) = &self.life else { return };
        if live.in_flight() == 0 {
            return;
        }
        let oldest = cx.now().0.saturating_sub(self.shared.config.patience.as_nanos() as u64);
        let is_late = |request: &Request| {
            matches!(request.state, State::AtController(..)) && request.last_attempt < oldest
        };
        if self.requests.iter().any(|(_, request)| is_late(request)) {
            return self.lose(&Loss::Silent, cx);
        }
        self.watch_late(cx);
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
        Op::Unmap => {
            let mut range = [0; RANGE_LEN as usize];
            range[4..8].copy_from_slice((io.blocks.0 as u32).to_le().as_bytes());
            range[8..].copy_from_slice(io.lba.0.to_le().as_bytes());
            to.copy_from_slice(&range[offset as usize..][..to.len()]);
        }
        _ if is_second => io.data.read(io.data.len() / 2 + offset, to),
        _ => io.data.read(offset, to),
    }
}

/// Writes once; `None` if the socket has no room.
fn write(socket: &mut TcpStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    match socket.write(bytes) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Driver for QueueDriver {
    fn reap(&mut self, _: u32, cx: &mut Cx) -> u32 {
        let is_woken = std::mem::take(&mut self.is_armed);
        if !self.delayed.is_empty() {
            self.start_waiting(cx);
        }
        let now = cx.now();
        let Life::Live(live) = &mut self.life else { return 0 };
        if let Some(room) = live.room.take() {
            cx.unwatch(room);
            live.write_at = Nanos(0);
        }
        if !is_woken && now < live.read_at {
            return 0;
        }
        let count = match self.receive(cx) {
            Ok(count) => count,
            Err(loss) => {
                self.lose(&loss, cx);
                1
            }
        };
        if count > 0 && !self.waiting.is_empty() {
            self.start_waiting(cx);
        }
        count
    }

    fn flush(&mut self, cx: &mut Cx) {
        if let Err(loss) = self.send(cx) {
            self.lose(&loss, cx);
        }
    }

    fn arm(&mut self, cx: &mut Cx) -> Armed {
        if let Err(error) = self.await_room(cx) {
            self.lose(&error.into(), cx);
        }
        let Life::Live(live) = &mut self.life else { return Armed::Yes };
        if live.unsent.is_empty() && live.queue.has_output() {
            return Armed::Busy;
        }
        // What comes from here on wakes the driver.
        match live.socket.peek(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.is_armed = true;
                Armed::Yes
            }
            _ => {
                live.read_at = Nanos(0);
                Armed::Busy
            }
        }
    }

    fn in_flight(&self) -> u32 {
        match &self.life {
            Life::Live(live) => live.in_flight(),
            Life::Away | Life::Failing | Life::Closed => 0,
        }
    }

    fn name(&self) -> String {
        format!("nvme-tcp {}", self.shared.config.name)
    }
}

impl Drop for QueueDriver {
    fn drop(&mut self) {
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

/// Has a driver woken by the input of its socket.
fn watch(live: &mut Live, id: DriverId, cx: &mut Cx) -> io::Result<()> {
    live.watch = Some(cx.watch_driver(live.socket.as_fd().try_clone_to_owned()?, id)?);
    Ok(())
}
