//! The queue pair of a controller on one reactor, which the channels of all its namespaces there share. Reactor context.
//!
//! A request is at the controller, waits in a FIFO, or waits for a retry ([`State`]). Requests wait while the pair is being
//! reset, while the controller is away, while there are no bounce buffers, and while a fused request has no second place; nothing
//! else makes them wait, since the block layer gives a reactor no more requests than the pair takes. On the usual path a request
//! needs no allocation and no lock.
//!
//! The functions at the end of this file are the steps of a reset, which the control thread sends to each reactor.

use crate::RANGES_MAX;
use crate::control::Command;
use crate::namespace::Namespace;
use crate::pool::{Pages, Pool};
use crate::shared::{PairStats, Shared};
use crate::status::{Outcome, decide, errno};
use aryk_bdev::{
    Attachment, Completion, CreditPool, DeviceError, Failure, Io, MemoryLookup, Op, Status, Tag,
};
use aryk_nvme::data::Piece;
use aryk_nvme::io::{BadRequest, Commands, CopyRange, DeallocateRange, Range};
use aryk_nvme::queue::{Completed, DmaEnded, Fate, Late, QueuePair, Restart, SubmitError, Unfinished};
use aryk_nvme::replay::{self, Change, History};
use aryk_pci::VectorMask;
use aryk_reactor::{Armed, Cx, Driver, DriverId, DriverKey, DriverRef, Nanos, RootId};
use aryk_slots::{Key, Slots};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Bytes that one reap copies out of bounce buffers: the completions behind them wait for the next turn.
const COPY_MAX: u64 = 1 << 20;
/// Completions that are taken from the queue at a time.
const BATCH: u16 = 32;
/// Changes of blocks that a pair remembers, to decide after a reset which writes are safe to submit again.
const HISTORY: usize = 1024;
/// The shortest time between two looks at late commands.
const LATE_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Late commands that one look reports.
const LATE_MAX: u16 = 32;

/// Whether requests are started. After a reset, the requests that are submitted again come first, on all reactors: a new change
/// of their blocks must not be overtaken by an old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// So many requests that a reset kept have not ended; only they are started.
    Replaying(u32),
    /// Other reactors are not as far.
    Closed,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In one of the FIFOs.
    Waiting,
    /// Waits for its next attempt.
    Delayed,
    /// The controller has so many commands of it; the status of those that ended.
    AtController(u8, Status),
}

struct Request {
    io: Io,
    channel: Key,
    state: State,
    attempts: u8,
    /// Its submitter no longer needs it: it is not tried again.
    is_aborted: bool,
    /// A reset has kept it, and it has not ended since.
    is_kept: bool,
    /// Time of its first attempt; 0 before.
    first_attempt: u64,
    /// Its bounce buffer.
    pages: Pages,
}

/// A channel of a namespace.
struct Opened {
    root: RootId,
    namespace: Arc<Namespace>,
    /// The commands of the namespace, as it was when the channel last had to look.
    commands: Commands,
    /// `None` if the controller gets bounce buffers only.
    lookup: Option<MemoryLookup>,
    completions: Vec<Completion>,
}

/// What a pair has while its controller is there.
pub(crate) struct Live {
    pub(crate) pair: QueuePair,
    pub(crate) pool: Pool,
    /// Masks the pair's interrupt; `None` if the pair has none, or it cannot be masked.
    pub(crate) mask: Option<VectorMask>,
    /// The registration of guests' memory, if the controller accesses that.
    pub(crate) memory: Option<Arc<Attachment>>,
    /// CRDT1 to CRDT3.
    pub(crate) retry_delays: [u16; 3],
    pub(crate) has_write_cache: bool,
    pub(crate) stats: Arc<PairStats>,
}

/// Whether the controller is there.
enum Life {
    Live(Box<Live>),
    /// Requests wait.
    Away,
    /// Requests fail.
    Closed,
}

/// How an attempt to start a request ended.
enum Start {
    AtController,
    /// It must wait for the pair.
    Blocked,
    /// It must wait for a bounce buffer.
    NoPages,
    Ended(Status),
}

pub(crate) struct PairDriver {
    shared: Arc<Shared>,
    id: DriverId,
    life: Life,
    gate: Gate,
    /// The reactor is being removed: no channel is opened any more.
    is_leaving: bool,
    is_armed: bool,
    requests: Slots<Request>,
    channels: Slots<Opened>,
    /// Requests in the state [`State::Waiting`], in order.
    waiting: VecDeque<Key>,
    /// Requests in the state [`State::Waiting`] that need bounce buffers, in order. They do not hold up the others.
    starved: VecDeque<Key>,
    /// Bytes copied to and from bounce buffers since the last reap.
    copied: u64,
    /// Commands at the last publication.
    published: u64,
    /// Requests in the state [`State::Delayed`].
    delayed: Vec<(Nanos, Key)>,
    credits: CreditPool,
    history: History,
    /// When a change completed last that a flush makes durable.
    last_change: u64,
    has_late_timer: bool,
    /// Lists that are empty between two calls.
    pieces: [Vec<Piece>; 2],
    completed: Vec<Completed>,
}

impl PairDriver {
    fn new(shared: Arc<Shared>, id: DriverId, live: Box<Live>) -> Self {
        let depth = u32::from(live.pair.depth());
        Self {
            shared,
            id,
            gate: Gate::Open,
            is_leaving: false,
            is_armed: false,
            requests: Slots::new(depth),
            channels: Slots::new(8),
            waiting: VecDeque::with_capacity(depth as usize),
            starved: VecDeque::with_capacity(depth as usize),
            copied: 0,
            published: 0,
            delayed: Vec::new(),
            credits: CreditPool::new(depth),
            history: History::new(HISTORY),
            last_change: 0,
            has_late_timer: false,
            pieces: [Vec::with_capacity(512), Vec::with_capacity(512)],
            completed: Vec::with_capacity(usize::from(BATCH)),
            life: Life::Live(live),
        }
    }

    /// The credits of the pair.
    pub(crate) fn credits(&self) -> CreditPool {
        self.credits.clone()
    }

    pub(crate) fn open(&mut self, namespace: &Arc<Namespace>, commands: Commands, root: RootId) -> Key {
        let lookup = match &self.life {
            Life::Live(live) => live.memory.as_ref().map(|memory| memory.lookup()),
            Life::Away | Life::Closed => None,
        };
        let namespace = Arc::clone(namespace);
        self.channels.add(Opened { root, namespace, commands, lookup, completions: Vec::new() })
    }

    pub(crate) fn close(&mut self, channel: Key) {
        let mut of_channel = self.requests.iter().filter(|(_, request)| request.channel == channel);
        assert!(of_channel.next().is_none(), "a channel is closed when nothing is in flight");
        self.channels.remove(channel);
    }

    /// Starts a request, or lets it wait.
    #[inline]
    pub(crate) fn submit(&mut self, channel: Key, io: &Io, cx: &mut Cx) {
        let request = Request {
            io: *io,
            channel,
            state: State::Waiting,
            attempts: 0,
            is_aborted: false,
            is_kept: false,
            first_attempt: 0,
            pages: Pages::NONE,
        };
        let key = self.requests.insert(request).unwrap_or_else(|_| unreachable!("the caller holds a credit"));
        if !self.waiting.is_empty() || self.gate != Gate::Open {
            return self.waiting.push_back(key);
        }
        match self.start(key, cx) {
            Start::AtController => {}
            Start::Blocked => self.waiting.push_back(key),
            Start::NoPages => self.starved.push_back(key),
            Start::Ended(status) => self.finish(key, status, cx),
        }
    }

    /// Completes the requests with this tag that wait; those at the controller are not tried again.
    pub(crate) fn abort(&mut self, channel: Key, tag: Tag, cx: &mut Cx) {
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
                State::Waiting => {
                    self.waiting.retain(|&waiting| waiting != key);
                    self.starved.retain(|&starved| starved != key);
                }
                State::Delayed => self.delayed.retain(|&(_, delayed)| delayed != key),
            }
            self.finish(key, Status::Aborted, cx);
        }
    }

    /// Moves a channel's completions to the end of `out`.
    #[inline]
    pub(crate) fn take(&mut self, channel: Key, out: &mut Vec<Completion>) {
        let channel = self.channels.get_mut(channel).expect("a channel is there until it is closed");
        out.append(&mut channel.completions);
    }

    /// Submits a request's command. A command that is submitted again reads its data again.
    #[inline]
    fn start(&mut self, key: Key, cx: &mut Cx) -> Start {
        let live = match &mut self.life {
            Life::Live(live) if live.pair.is_running() => live,
            Life::Live(_) | Life::Away => return Start::Blocked,
            Life::Closed => return Start::Ended(Status::Removed),
        };
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let channel = self.channels.get_mut(request.channel).expect("it has requests");
        let commands = if request.io.op == Op::CompareAndWrite { 2 } else { 1 };
        if live.pair.in_flight() + commands > live.pair.depth() {
            return Start::Blocked;
        }
        // A request that needs pages does not overtake those that wait for them.
        let may_take_pages = self.starved.front().is_none_or(|&first| first == key);
        let (now, pieces, copied) = (cx.now().0, &mut self.pieces, &mut self.copied);
        let mut attempt = Attempt { request, channel, live, key, now, pieces, may_take_pages, copied };
        let start = match attempt.run().or_else(|_| attempt.run_again()) {
            Ok(start) => start,
            Err(error) => Start::Ended(refused(error)),
        };
        if matches!(start, Start::AtController) {
            attempt.request.state = State::AtController(commands as u8, Status::Ok);
            if attempt.request.first_attempt == 0 {
                attempt.request.first_attempt = now;
            }
            self.shared.wake_idle();
            if !self.has_late_timer {
                self.watch_late(cx);
            }
        }
        start
    }

    /// Ends a request.
    #[inline]
    fn finish(&mut self, key: Key, status: Status, cx: &mut Cx) {
        let request = self.requests.remove(key).expect("a request ends once");
        if let Life::Live(live) = &mut self.life {
            live.pool.put(request.pages);
        }
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

    /// So many requests that a reset kept have not ended.
    fn set_kept(&mut self, left: u32) {
        self.gate = if left == 0 { Gate::Closed } else { Gate::Replaying(left) };
        if left == 0
            && let Life::Live(live) = &self.life
        {
            self.shared.send(Command::Replayed(live.pair.qid()));
        }
    }

    /// Starts requests that wait, in order, until one must go on waiting, or enough was copied for a turn.
    fn start_waiting(&mut self, cx: &mut Cx) {
        let now = cx.now();
        while let Some(i) = self.delayed.iter().position(|&(at, _)| at <= now) {
            let (_, key) = self.delayed.swap_remove(i);
            let request = self.requests.get_mut(key).expect("a delayed request");
            request.state = State::Waiting;
            // A request that a reset kept comes before the new ones.
            if request.is_kept { self.waiting.push_front(key) } else { self.waiting.push_back(key) }
        }
        while let Some(&key) = self.starved.front()
            && self.copied < COPY_MAX
        {
            match self.start(key, cx) {
                Start::Blocked | Start::NoPages => break,
                Start::AtController => drop(self.starved.pop_front()),
                Start::Ended(status) => {
                    self.starved.pop_front();
                    self.finish(key, status, cx);
                }
            }
        }
        while let Some(&key) = self.waiting.front()
            && self.copied < COPY_MAX
            && self.may_start(key)
        {
            let start = self.start(key, cx);
            if matches!(start, Start::Blocked) {
                break;
            }
            self.waiting.pop_front();
            match start {
                Start::NoPages => self.starved.push_back(key),
                Start::Ended(status) => self.finish(key, status, cx),
                Start::AtController | Start::Blocked => {}
            }
        }
    }

    /// Whether the gate lets a request pass.
    fn may_start(&self, key: Key) -> bool {
        match self.gate {
            Gate::Open => true,
            Gate::Replaying(_) => self.requests.get(key).is_some_and(|request| request.is_kept),
            Gate::Closed => false,
        }
    }

    /// Takes the answer to a command.
    #[inline]
    fn complete(&mut self, completed: &Completed, now: Nanos, cx: &mut Cx) {
        let Life::Live(live) = &mut self.life else { unreachable!("a pair that reaps is there") };
        let key = Key::from_raw(completed.token);
        let request = self.requests.get_mut(key).expect("a command in flight is of a request");
        let State::AtController(left, earlier) = request.state else {
            unreachable!("a command in flight is at the controller");
        };
        if request.io.op.is_change() {
            let channel = self.channels.get(request.channel).expect("it has requests");
            self.history.add(Change {
                nsid: channel.namespace.nsid(),
                slba: request.io.lba.0,
                blocks: request.io.blocks.0,
                completed: now.0,
            });
            if !request.io.fua {
                self.last_change = now.0;
            }
        }
        let outcome = decide(completed.status, live.retry_delays);
        if outcome == Outcome::Done(Status::Ok) && left == 1 && earlier.is_ok() {
            match request.io.op {
                Op::Read if !request.pages.is_empty() => {
                    live.pool.empty(&request.pages, &request.io.data);
                    self.copied += u64::from(request.io.data.len());
                }
                Op::Flush => self.shared.flushed(completed.submitted),
                _ => {}
            }
            return self.finish(key, Status::Ok, cx);
        }
        self.complete_otherwise(key, completed, outcome, cx);
    }

    /// Takes an answer that is a failure, or one of two.
    #[cold]
    fn complete_otherwise(&mut self, key: Key, completed: &Completed, outcome: Outcome, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let State::AtController(left, earlier) = request.state else {
            unreachable!("the caller has checked")
        };
        let channel = self.channels.get(request.channel).expect("it has requests");
        let status = match outcome {
            Outcome::Done(status) => status,
            Outcome::Retry(delay, _)
                if left == 1
                    && earlier.is_ok()
                    && !request.is_aborted
                    && request.attempts < self.shared.retries =>
            {
                request.attempts += 1;
                request.state = State::Delayed;
                self.shared.counters.retried.fetch_add(1, Ordering::Relaxed);
                let at = cx.now().after(Duration::from_nanos(delay));
                self.give_pages_back(key);
                self.delayed.push((at, key));
                let driver = self.id;
                cx.call_at(at, move |cx| cx.wake_driver(driver));
                return;
            }
            Outcome::Retry(_, status) => status,
            Outcome::Reset(status) => {
                self.shared.send(Command::LostState { status: completed.status });
                status
            }
        };
        if !matches!(status, Status::Ok | Status::Miscompare | Status::Aborted) {
            let Io { op, lba, blocks, .. } = request.io;
            let code = completed.status.code();
            let device =
                DeviceError { code: code.0, is_final: completed.status.is_final(), name: code.name() };
            let failure = Failure::now(op, lba, blocks, errno(status)).with_device(device);
            channel.namespace.failed(failure);
        }
        let status = worse(earlier, status);
        if left > 1 {
            request.state = State::AtController(left - 1, status);
        } else {
            self.finish(key, status, cx);
        }
    }

    fn give_pages_back(&mut self, key: Key) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let pages = std::mem::replace(&mut request.pages, Pages::NONE);
        if let Life::Live(live) = &mut self.life {
            live.pool.put(pages);
        }
    }

    /// Looks for late commands when the oldest may be late.
    #[cold]
    fn watch_late(&mut self, cx: &mut Cx) {
        let Life::Live(live) = &self.life else { return };
        let Some(at) = live.pair.next_late() else { return };
        self.has_late_timer = true;
        // More commands may be late than one look reports.
        let at = Nanos(at).max(cx.now().after(LATE_INTERVAL_MIN));
        let key = self.shared.key;
        cx.call_at(at, move |cx| {
            with_driver(key, cx, |driver, cx| {
                driver.has_late_timer = false;
                driver.report_late(cx);
                driver.watch_late(cx);
            });
        });
    }

    fn report_late(&mut self, cx: &mut Cx) {
        let Life::Live(live) = &mut self.life else { return };
        let qid = live.pair.qid();
        let shared = &self.shared;
        live.pair.late(cx.now().0, LATE_MAX, |Late { cid, waited, step, .. }| {
            shared.send(Command::Late { qid, cid, waited, step });
        });
    }

    fn publish(&mut self) {
        let Life::Live(live) = &self.life else { return };
        let counters = live.pair.counters();
        live.stats.publish(counters, live.pair.in_flight(), self.last_change, &live.pool);
        self.published = counters.submitted;
    }
}

/// The result of two commands of one request. The second of two fused commands is aborted if the first fails.
const fn worse(one: Status, other: Status) -> Status {
    match (one, other) {
        (Status::Ok, status) | (status, Status::Ok) => status,
        (Status::Aborted, status) => status,
        (status, _) => status,
    }
}

/// The status of a request that the driver refuses.
const fn refused(error: BadRequest) -> Status {
    match error {
        BadRequest::OutOfRange { .. } => Status::OutOfRange,
        BadRequest::Unsupported(_) => Status::Unsupported,
        // The limits have just changed.
        BadRequest::TooManyBlocks { .. } | BadRequest::Ranges { .. } => Status::Invalid,
    }
}

/// One attempt to start a request.
struct Attempt<'a> {
    request: &'a mut Request,
    channel: &'a mut Opened,
    live: &'a mut Live,
    key: Key,
    now: u64,
    pieces: &'a mut [Vec<Piece>; 2],
    may_take_pages: bool,
    copied: &'a mut u64,
}

impl Attempt<'_> {
    /// Tries again with what the controller says of the namespace now: it may have grown.
    #[cold]
    fn run_again(&mut self) -> Result<Start, BadRequest> {
        self.channel.commands = self.channel.namespace.commands();
        self.run()
    }

    #[inline]
    fn run(&mut self) -> Result<Start, BadRequest> {
        let Io { op, lba, blocks, fua, may_unmap, .. } = self.request.io;
        let (lba, blocks) = (lba.0, blocks.0);
        let fua = fua && self.live.has_write_cache;
        let commands = &self.channel.commands;
        let entry = match op {
            Op::Read => commands.read(lba, blocks)?,
            Op::Write => commands.write(lba, blocks, fua)?,
            Op::Compare => commands.compare(lba, blocks)?,
            Op::Flush if !self.live.has_write_cache => return Ok(Start::Ended(Status::Ok)),
            Op::Flush => return Ok(self.submit(commands.flush(), 0)),
            Op::WriteZeroes => {
                let entry = commands.write_zeroes(lba, blocks, may_unmap, fua)?;
                return Ok(self.submit(entry, 0));
            }
            Op::Unmap | Op::Copy => return self.run_ranges(),
            Op::CompareAndWrite => return self.run_fused(fua),
        };
        let data = self.request.io.data;
        if self.find_pieces(0, &data) {
            match self.live.pair.submit(entry, &self.pieces[0], self.key.raw(), self.now) {
                Err(SubmitError::Unfit(_)) => {}
                result => return Ok(started(result)),
            }
        }
        if !self.take_pages(data.len()) {
            return Ok(Start::NoPages);
        }
        if op != Op::Read {
            self.live.pool.fill(&self.request.pages, 0, &data);
            *self.copied += u64::from(data.len());
        }
        Ok(self.submit(entry, data.len()))
    }

    /// Submits a command whose data is the first `len` bytes of the bounce buffer.
    fn submit(&mut self, entry: aryk_nvme::spec::entry::SubmissionEntry, len: u32) -> Start {
        let pieces = &mut self.pieces[0];
        pieces.clear();
        if len > 0 {
            self.live.pool.pieces(&self.request.pages, 0, len, pieces);
        }
        started(self.live.pair.submit(entry, pieces, self.key.raw(), self.now))
    }

    /// Finds where the controller accesses the data; `false` if it cannot.
    #[inline]
    fn find_pieces(&mut self, list: usize, data: &aryk_dma::Sgl) -> bool {
        let Some(lookup) = &mut self.channel.lookup else { return false };
        let pieces = &mut self.pieces[list];
        pieces.clear();
        for piece in data.pieces() {
            let Some(place) = lookup.translate(&piece) else { return false };
            pieces.push(Piece { iova: place.value + place.offset, len: piece.len() as u32 });
        }
        true
    }

    /// Takes a bounce buffer for `len` bytes; `false` if there is none now.
    fn take_pages(&mut self, len: u32) -> bool {
        debug_assert!(self.request.pages.is_empty(), "a request that waits has no buffer");
        match self.may_take_pages.then(|| self.live.pool.take(len)).flatten() {
            Some(pages) => self.request.pages = pages,
            None => return false,
        }
        true
    }

    /// Dataset Management and Copy: their data is a list of ranges.
    fn run_ranges(&mut self) -> Result<Start, BadRequest> {
        let Io { op, lba, blocks, source, .. } = self.request.io;
        let commands = self.channel.commands;
        let (first, each, entry_len) = match op {
            Op::Unmap => (lba.0, commands.deallocate_max().1.into(), size_of::<DeallocateRange>() as u32),
            _ => (source.0, u64::from(commands.copy_max().1), size_of::<CopyRange>() as u32),
        };
        let mut ranges = [Range { slba: 0, blocks: 0 }; RANGES_MAX];
        let Some(count) = split(first, blocks.0, each, &mut ranges) else {
            return Ok(Start::Ended(Status::Invalid));
        };
        let ranges = &ranges[..count];
        let len = count as u32 * entry_len;
        if !self.take_pages(len) {
            return Ok(Start::NoPages);
        }
        let (pool, pages) = (&self.live.pool, &self.request.pages);
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            pool.write(pages, at, bytes);
            at += entry_len;
        };
        let entry = match op {
            Op::Unmap => commands.deallocate(ranges, |range| put(range.as_bytes())),
            _ => commands.copy(ranges, lba.0, |range| put(range.as_bytes())),
        };
        match entry {
            Ok(entry) => Ok(self.submit(entry, len)),
            Err(error) => {
                self.live.pool.put(std::mem::replace(&mut self.request.pages, Pages::NONE));
                Err(error)
            }
        }
    }

    /// A fused compare and write: the first half of the data is compared, the second written.
    fn run_fused(&mut self, fua: bool) -> Result<Start, BadRequest> {
        let Io { lba, blocks, data, .. } = self.request.io;
        let entries = self.channel.commands.compare_and_write(lba.0, blocks.0, fua)?;
        let half = data.len() / 2;
        let halves = [data.slice(0, half), data.slice(half, half)];
        let tokens = [self.key.raw(); 2];
        if self.find_pieces(0, &halves[0]) && self.find_pieces(1, &halves[1]) {
            let lists = [&self.pieces[0][..], &self.pieces[1][..]];
            match self.live.pair.submit_fused(entries, lists, tokens, self.now) {
                Err(SubmitError::Unfit(_)) => {}
                result => return Ok(started(result)),
            }
        }
        // The second half begins on a page of its own.
        let start = half.next_multiple_of(self.live.pool.page() as u32);
        if !self.take_pages(start + half) {
            return Ok(Start::NoPages);
        }
        *self.copied += u64::from(data.len());
        let (pool, pages) = (&self.live.pool, &self.request.pages);
        for (list, (start, data)) in [0, start].into_iter().zip(&halves).enumerate() {
            pool.fill(pages, start, data);
            self.pieces[list].clear();
            pool.pieces(pages, start, half, &mut self.pieces[list]);
        }
        let lists = [&self.pieces[0][..], &self.pieces[1][..]];
        Ok(started(self.live.pair.submit_fused(entries, lists, tokens, self.now)))
    }
}

/// Splits blocks into ranges of at most `each` blocks, and returns the number of ranges; `None` if they are too many, because the
/// limits have just changed.
fn split(first: u64, blocks: u64, each: u64, ranges: &mut [Range; RANGES_MAX]) -> Option<usize> {
    let (mut slba, mut left, mut count) = (first, blocks, 0);
    while left > 0 && count < RANGES_MAX {
        let part = left.min(each.max(1));
        ranges[count] = Range { slba, blocks: part as u32 };
        (slba, left, count) = (slba + part, left - part, count + 1);
    }
    (left == 0).then_some(count)
}

fn started<T>(result: Result<T, SubmitError>) -> Start {
    match result {
        Ok(_) => Start::AtController,
        // The caller has checked both.
        Err(SubmitError::Full | SubmitError::Stopped) => unreachable!("the pair runs and has room"),
        // Bounce buffers are aligned pages, and a request is no longer than a list.
        Err(SubmitError::Unfit(_)) => Start::Ended(Status::Medium),
    }
}

impl Driver for PairDriver {
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32 {
        let mut count = 0;
        self.copied = 0;
        while count < budget && self.copied < COPY_MAX {
            let Life::Live(live) = &mut self.life else { break };
            if self.is_armed {
                self.is_armed = false;
                live.mask.iter().for_each(VectorMask::mask);
            }
            let limit = (budget - count).min(BATCH.into()) as u16;
            let mut completed = std::mem::take(&mut self.completed);
            let had_error = live.pair.error().is_some();
            let error = live.pair.reap(limit, |one| completed.push(one)).err().filter(|_| !had_error);
            if completed.is_empty() && error.is_none() {
                self.completed = completed;
                break;
            }
            // Not earlier than any of these completions.
            let now = cx.refresh_now();
            for one in &completed {
                self.complete(one, now, cx);
            }
            let taken = completed.len() as u32;
            count += taken;
            completed.clear();
            self.completed = completed;
            if let Some(error) = error {
                self.shared.send(Command::QueueError(error));
            }
            if taken < u32::from(limit) {
                break;
            }
        }
        if !self.waiting.is_empty() || !self.delayed.is_empty() || !self.starved.is_empty() {
            self.start_waiting(cx);
        }
        if count > 0 {
            self.publish();
        }
        count
    }

    #[inline]
    fn flush(&mut self, _: &mut Cx) {
        if let Life::Live(live) = &mut self.life {
            live.pair.flush();
            if live.pair.counters().submitted != self.published {
                self.publish();
            }
        }
    }

    fn arm(&mut self, _: &mut Cx) -> Armed {
        let Life::Live(live) = &mut self.life else { return Armed::Yes };
        if live.pair.in_flight() == 0 {
            return Armed::Yes;
        }
        let Some(mask) = &live.mask else { return Armed::Busy };
        mask.unmask();
        fence(Ordering::SeqCst);
        if live.pair.has_completion() {
            mask.mask();
            return Armed::Busy;
        }
        self.is_armed = true;
        Armed::Yes
    }

    fn in_flight(&self) -> u32 {
        match &self.life {
            Life::Live(live) => live.pair.in_flight().into(),
            Life::Away | Life::Closed => 0,
        }
    }

    fn name(&self) -> String {
        format!("nvme {}", self.shared.name)
    }
}

/// The queue pairs of a reactor. They stay also while no channel uses them.
#[derive(Default)]
struct Pairs(RefCell<HashMap<DriverKey, DriverRef<PairDriver>>>);

fn find(key: DriverKey, cx: &mut Cx) -> Option<DriverRef<PairDriver>> {
    cx.local_state::<Pairs>().0.borrow().get(&key).cloned()
}

/// The pair of a controller on this reactor, for a new channel; `None` if the reactor is not prepared, or is being removed.
pub(crate) fn find_for_channel(key: DriverKey, cx: &mut Cx) -> Option<DriverRef<PairDriver>> {
    find(key, cx).filter(|driver| !driver.borrow().is_leaving)
}

/// Calls `f` with the pair of a controller; `None` if the reactor has none.
fn with_driver<T>(key: DriverKey, cx: &mut Cx, f: impl FnOnce(&mut PairDriver, &mut Cx) -> T) -> Option<T> {
    let driver = find(key, cx)?;
    let mut driver = driver.activate(cx);
    Some(f(&mut driver, cx))
}

/// Gives a reactor a pair: its first, or the one of a controller that has come back. With `is_gated`, a new pair starts requests
/// when [`open`] is called. `interrupt` is watched from now on.
///
/// # Errors
/// The interrupt cannot be watched; the reactor has returned the pair ([`Command::Retired`]).
pub(crate) fn install(
    shared: &Arc<Shared>,
    live: Box<Live>,
    interrupt: Option<OwnedFd>,
    is_gated: bool,
    cx: &mut Cx,
) -> std::io::Result<()> {
    let key = shared.key;
    let mut live = Some(live);
    let Ok(driver) = cx.driver(key, |id, _| {
        let mut driver = PairDriver::new(Arc::clone(shared), id, live.take().expect("taken once"));
        driver.gate = if is_gated { Gate::Closed } else { Gate::Open };
        Ok::<_, Infallible>(driver)
    });
    if let Some(fd) = interrupt
        && let Err(error) = cx.watch_driver(fd, driver.id())
    {
        let mut pair = driver.activate(cx);
        if let Some(live) = live.or_else(|| pair.take_live()) {
            shared.send(Command::Retired(live));
        }
        return Err(error);
    }
    if let Some(live) = live {
        let mut pair = driver.activate(cx);
        for (_, channel) in pair.channels.iter_mut() {
            channel.lookup = live.memory.as_ref().map(|memory| memory.lookup());
            channel.commands = channel.namespace.commands();
        }
        pair.life = Life::Live(live);
        pair.begin_replay(cx);
    }
    cx.local_state::<Pairs>().0.borrow_mut().insert(key, driver);
    Ok(())
}

/// Step 1 of a reset: no more submissions.
pub(crate) fn quiesce(shared: &Shared, qid: u16, cx: &mut Cx) {
    with_driver(shared.key, cx, |driver, _| {
        if let Life::Live(live) = &mut driver.life {
            live.pair.quiesce();
        }
    });
    shared.send(Command::Quiesced(qid));
}

/// Step 2, after the end of DMA: takes the completions that came in time. Returns what the pair has changed.
pub(crate) fn reap_last(shared: &Shared, qid: u16, cx: &mut Cx) {
    let history = with_driver(shared.key, cx, |driver, cx| {
        while driver.reap(u32::from(u16::MAX), cx) > 0 {}
        Box::new(driver.history.clone())
    });
    let history = history.unwrap_or_else(|| Box::new(History::new(1)));
    shared.send(Command::Reaped { qid, history });
}

/// Step 3: requests that may have taken effect and cannot be submitted again without being seen fail; the others wait. A pair
/// that does not come back is returned to the control thread, which unmaps its memory.
pub(crate) fn rewind(
    shared: &Shared,
    proof: DmaEnded,
    histories: &[Box<History>],
    is_end: bool,
    cx: &mut Cx,
) {
    let qid = proof.qid();
    let rewound = with_driver(shared.key, cx, |driver, cx| {
        driver.rewind(proof, histories, cx);
        if is_end {
            driver.retire();
        }
    });
    shared.send(Command::Rewound { qid, is_end: is_end || rewound.is_none() });
}

/// The controller has ended after a pair was rewound: the pair is returned to the control thread.
pub(crate) fn retire(shared: &Shared, qid: u16, cx: &mut Cx) {
    with_driver(shared.key, cx, |driver, _| driver.retire());
    shared.send(Command::Rewound { qid, is_end: true });
}

impl PairDriver {
    fn take_live(&mut self) -> Option<Box<Live>> {
        match std::mem::replace(&mut self.life, Life::Away) {
            Life::Live(live) => Some(live),
            other => {
                self.life = other;
                None
            }
        }
    }

    fn retire(&mut self) {
        self.is_armed = false;
        self.channels.iter_mut().for_each(|(_, channel)| channel.lookup = None);
        if let Some(live) = self.take_live() {
            assert_eq!(live.pair.in_flight(), 0, "a pair is rewound before it is retired");
            self.shared.send(Command::Retired(live));
        }
    }

    fn rewind(&mut self, proof: DmaEnded, histories: &[Box<History>], cx: &mut Cx) {
        let Life::Live(live) = &mut self.life else { return };
        let histories: Vec<&History> = histories.iter().map(|history| &**history).collect();
        let (mut kept, mut failed) = (Vec::new(), Vec::new());
        let requests = &self.requests;
        live.pair.rewind(proof, |unfinished| {
            let key = Key::from_raw(unfinished.token);
            // The first attempt may have taken effect as well as the last.
            let submitted = requests.get(key).map_or(0, |request| request.first_attempt);
            let unfinished = Unfinished { submitted, ..*unfinished };
            let fate = replay::decide(&unfinished, &histories);
            if fate == Fate::Resubmit {
                kept.push(key)
            } else {
                failed.push(key)
            }
            // A command that is submitted again is made anew: its bounce buffer and its list may be elsewhere.
            Fate::Fail
        });
        self.is_armed = false;
        self.gate = Gate::Closed;
        let starved = std::mem::take(&mut self.starved);
        self.waiting.extend(starved);
        for key in failed {
            self.fail_by_reset(key, cx);
        }
        for key in kept.into_iter().rev() {
            self.give_pages_back(key);
            let request = self.requests.get_mut(key).expect("it was in flight");
            if request.is_aborted {
                self.finish(key, Status::Aborted, cx);
                continue;
            }
            (request.state, request.is_kept) = (State::Waiting, true);
            self.shared.counters.resubmitted.fetch_add(1, Ordering::Relaxed);
            self.waiting.push_front(key);
        }
        self.publish();
    }

    /// Ends a request that may have taken effect, and must not take effect again.
    fn fail_by_reset(&mut self, key: Key, cx: &mut Cx) {
        // The second command of a fused pair.
        let Some(request) = self.requests.get(key) else { return };
        let Io { op, lba, blocks, .. } = request.io;
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        namespace.failed(Failure::now(op, lba, blocks, errno(Status::Aborted)));
        self.shared.counters.failed_by_reset.fetch_add(1, Ordering::Relaxed);
        self.finish(key, Status::Medium, cx);
    }

    /// Starts the requests that resets kept; new ones wait until all reactors have done so.
    fn begin_replay(&mut self, cx: &mut Cx) {
        let kept = self.requests.iter().filter(|(_, request)| request.is_kept).count();
        self.set_kept(kept as u32);
        self.start_waiting(cx);
    }
}

/// Step 4: the pair runs again. `mask` is its interrupt's, which a reset unmasks.
pub(crate) fn resume(
    key: DriverKey,
    restart: Restart,
    mask: Option<VectorMask>,
    retry_delays: [u16; 3],
    cx: &mut Cx,
) {
    with_driver(key, cx, |driver, cx| {
        let now = cx.now().0;
        let Life::Live(live) = &mut driver.life else { return };
        live.pair.resume(restart, now);
        mask.iter().for_each(VectorMask::mask);
        (live.mask, live.retry_delays) = (mask, retry_delays);
        for (_, channel) in driver.channels.iter_mut() {
            channel.commands = channel.namespace.commands();
        }
        driver.begin_replay(cx);
    });
}

/// Step 5: all reactors have submitted again what they kept, and it has ended.
pub(crate) fn open(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        // Another reset may have begun.
        if driver.gate == Gate::Closed {
            driver.gate = Gate::Open;
            driver.requests.iter_mut().for_each(|(_, request)| request.is_kept = false);
            driver.start_waiting(cx);
        }
    });
}

/// The controller has paused: the time of the commands in flight begins now.
pub(crate) fn restart_clock(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        if let Life::Live(live) = &mut driver.life {
            live.pair.restart_clock(cx.now().0);
        }
    });
}

/// The controller does not come back: requests fail from now on, and the reactor keeps no pair.
pub(crate) fn remove(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        assert!(!matches!(driver.life, Life::Live(_)), "a pair is retired before it is removed");
        driver.life = Life::Closed;
        let delayed = std::mem::take(&mut driver.delayed);
        driver.waiting.extend(delayed.into_iter().map(|(_, key)| key));
        let starved = std::mem::take(&mut driver.starved);
        driver.waiting.extend(starved);
        while let Some(key) = driver.waiting.pop_front() {
            driver.finish(key, Status::Removed, cx);
        }
        driver.gate = Gate::Open;
    });
    let removed: Option<DriverRef<PairDriver>> = cx.local_state::<Pairs>().0.borrow_mut().remove(&key);
    drop(removed);
}

/// Lets no channel use the pair any more, if none does. Returns whether that is so.
pub(crate) fn leave_if_unused(key: DriverKey, cx: &mut Cx) -> bool {
    let left = with_driver(key, cx, |driver, _| {
        driver.is_leaving = driver.channels.is_empty();
        driver.is_leaving
    });
    left.unwrap_or(true)
}
