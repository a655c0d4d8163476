//! The queue pair of a controller on one reactor, which the channels of all its namespaces there share. Reactor context. If the
//! controller's interrupts cannot be masked, a reactor has a second pair, with a driver of its own ([`waking`]).
//!
//! A request is at the controller, waits in a FIFO, or waits for a retry ([`State`]). Requests wait while the pair is being
//! reset, while the controller is away, while there are no bounce buffers, while a fused request has no second place, and, if
//! they empty blocks, while those before them empty many ([`emptying`]); nothing else makes them wait, since the block layer
//! gives a reactor no more requests than the pair takes. On the usual path a request needs no allocation and no lock.
//!
//! The functions at the end of this file are the steps of a reset, which the control thread sends to each reactor.

mod attempt;
mod emptying;
mod injected;
mod located;
mod reset;
mod waking;

pub(crate) use injected::set_injections;
pub(crate) use located::{LostBlock, located};

pub(crate) use reset::{
    Cause, fail_while_away, hold, install, leave_if_unused, open, quiesce, reap_last, remove, restart_clock,
    resume, retire, rewind,
};
pub(crate) use waking::prepare_waking;

use crate::WITHOUT_LIMIT;
use crate::control::Command;
use crate::namespace::Namespace;
use crate::pool::{Pages, Pool};
use crate::shared::{PairStats, Polls, Shared};
use crate::status::{Outcome, decide, decide_harmless, errno};
use aryk_bdev::{
    Attachment, Completion, CreditPool, DeviceError, Failure, Io, Lba, MemoryLookup, Op, Status, Tag,
};
use aryk_nvme::data::Piece;
use aryk_nvme::inject::Injections;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::{Completed, QueuePair};
use aryk_nvme::replay::{Change, History};
use aryk_nvme::spec::status::Status as DeviceStatus;
use aryk_pci::VectorMask;
use aryk_reactor::{Armed, Cx, Driver, DriverId, DriverKey, DriverRef, Nanos, RootId};
use aryk_slots::{Key, Slots};
use attempt::Attempt;
pub(crate) use attempt::refused;
use emptying::{Emptying, is_emptying};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

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
    /// The controller has so many commands of it; this status replaces the answer.
    Replaced(u8, DeviceStatus),
    /// Gets this status later, and the controller gets no command.
    Withheld(DeviceStatus),
    /// Has failed with this status, and waits for the block that the controller names.
    Locating(DeviceStatus),
}

struct Request {
    io: Io,
    channel: Key,
    state: State,
    /// Attempts after the first.
    attempts: u16,
    /// Its submitter no longer needs it: it is not tried again.
    is_aborted: bool,
    /// A reset has kept it, and it has not ended since.
    is_kept: bool,
    /// Resets after failures of the controller that have kept it.
    replays: u8,
    /// Time of its first attempt; 0 before.
    first_attempt: u64,
    /// Its bounce buffer.
    pages: Pages,
    /// Its bytes, if it discards or zeroes them, and that is in progress.
    emptying: u64,
}

/// A channel of a namespace.
struct Opened {
    root: RootId,
    /// In the driver of a waking pair: the key of the same channel in the reactor's other driver.
    twin: Option<Key>,
    namespace: Arc<Namespace>,
    /// The commands of the namespace, as it was when the channel last had to look.
    commands: Commands,
    /// `None` if the controller gets bounce buffers only.
    lookup: Option<MemoryLookup>,
    /// When a change completed last that a flush makes durable.
    last_change: Arc<AtomicU64>,
    completions: Vec<Completion>,
}

impl Opened {
    /// Reports a request that the controller has failed, and the block that it names.
    fn report(&self, io: &Io, answer: DeviceStatus, status: Status, lba: Option<Lba>) {
        let device = DeviceError {
            code: answer.code().0,
            is_final: answer.is_final(),
            crd: answer.crd(),
            name: self.namespace.name_of(answer),
            lba,
        };
        self.namespace.failed(Failure::now(io.op, io.lba, io.blocks, errno(status)).with_device(device));
    }
}

/// Whether completions wake a sleeping reactor.
pub(crate) enum Wake {
    /// They do not: the reactor polls while commands are in flight.
    Never,
    /// By the pair's interrupt, which is masked while the reactor polls.
    Masked(VectorMask),
    /// By the pair's interrupt, which cannot be masked.
    Always,
}

impl Wake {
    /// Masks the interrupt, if it can be masked.
    fn mask(&self) {
        if let Self::Masked(mask) = self {
            mask.mask();
        }
    }
}

/// What a pair has while its controller is there.
pub(crate) struct Live {
    pub(crate) pair: QueuePair,
    pub(crate) pool: Pool,
    pub(crate) wake: Wake,
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
    /// Requests fail until the controller is back.
    Failing,
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
    /// It must wait for the end of other discards and zeroes.
    NoRoom,
    Ended(Status),
}

pub(crate) struct PairDriver {
    shared: Arc<Shared>,
    /// That of the reactor's pair, or of its waking pair.
    key: DriverKey,
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
    emptying: Emptying,
    /// Bytes copied to and from bounce buffers since the last reap.
    copied: u64,
    /// Commands at the last publication.
    published: u64,
    polls: Polls,
    /// Errors that an operator injects.
    injections: Option<Arc<Injections>>,
    /// Requests in the states [`State::Delayed`], [`State::Withheld`] and [`State::Locating`].
    delayed: Vec<(Nanos, Key)>,
    credits: CreditPool,
    history: History,
    /// When a change completed last.
    last_change: u64,
    has_late_timer: bool,
    /// Lists that are empty between two calls.
    pieces: [Vec<Piece>; 2],
    completed: Vec<Completed>,
    /// The reactor could not sleep because of commands in flight here.
    keeps_awake: bool,
    /// Completions at the reactor's last attempt to sleep.
    completed_at_arm: u64,
    /// The pair's queue, if the control thread waits for the end of its commands ([`hold`]).
    held: Option<u16>,
}

impl PairDriver {
    fn new(shared: Arc<Shared>, key: DriverKey, id: DriverId, depth: u16, life: Life) -> Self {
        let depth = u32::from(depth);
        Self {
            injections: injected::of(&shared),
            shared,
            key,
            id,
            gate: Gate::Open,
            is_leaving: false,
            is_armed: false,
            requests: Slots::new(depth),
            channels: Slots::new(8),
            waiting: VecDeque::with_capacity(depth as usize),
            starved: VecDeque::with_capacity(depth as usize),
            emptying: Emptying::default(),
            copied: 0,
            published: 0,
            polls: Polls::default(),
            delayed: Vec::new(),
            credits: CreditPool::new(depth),
            history: History::new(HISTORY),
            last_change: 0,
            has_late_timer: false,
            pieces: [Vec::with_capacity(512), Vec::with_capacity(512)],
            completed: Vec::with_capacity(usize::from(BATCH)),
            life,
            keeps_awake: false,
            completed_at_arm: 0,
            held: None,
        }
    }

    /// The credits of the pair.
    pub(crate) fn credits(&self) -> CreditPool {
        self.credits.clone()
    }

    pub(crate) fn open(&mut self, namespace: &Arc<Namespace>, commands: Commands, root: RootId) -> Key {
        let lookup = match &self.life {
            Life::Live(live) => live.memory.as_ref().map(|memory| memory.lookup()),
            Life::Away | Life::Failing | Life::Closed => None,
        };
        let (namespace, last_change) = (Arc::clone(namespace), namespace.durability().add_channel());
        let completions = Vec::new();
        self.channels.add(Opened { root, twin: None, namespace, commands, lookup, last_change, completions })
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
            replays: 0,
            first_attempt: 0,
            pages: Pages::NONE,
            emptying: 0,
        };
        assert!(!self.requests.is_full(), "the caller holds a credit");
        // Its parts are stored in their place, where `insert` would copy the request.
        let key = self.requests.add(request);
        if !self.waiting.is_empty() || self.gate != Gate::Open {
            self.polls.queued += 1;
            return self.waiting.push_back(key);
        }
        match self.start(key, cx) {
            Start::AtController => {}
            Start::Blocked => {
                self.polls.queued += 1;
                self.waiting.push_back(key);
            }
            Start::NoPages => {
                self.polls.queued += 1;
                self.starved.push_back(key);
            }
            Start::NoRoom => {
                self.polls.queued += 1;
                self.emptying.waiting.push_back(key);
            }
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
                State::AtController(..) | State::Replaced(..) => {
                    request.is_aborted = true;
                    continue;
                }
                State::Waiting => {
                    self.waiting.retain(|&waiting| waiting != key);
                    self.starved.retain(|&starved| starved != key);
                    self.emptying.waiting.retain(|&emptying| emptying != key);
                }
                State::Delayed | State::Withheld(_) | State::Locating(_) => {
                    self.delayed.retain(|&(_, delayed)| delayed != key)
                }
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
    #[inline(always)]
    fn start(&mut self, key: Key, cx: &mut Cx) -> Start {
        if self.injections.is_some() {
            return self.start_with_injections(key, cx);
        }
        self.start_command(key, cx)
    }

    #[inline(always)]
    fn start_command(&mut self, key: Key, cx: &mut Cx) -> Start {
        let live = match &mut self.life {
            Life::Live(live) if live.pair.is_running() => live,
            Life::Live(_) | Life::Away => return Start::Blocked,
            Life::Failing => return self.fail_away(key),
            Life::Closed => return Start::Ended(Status::Removed),
        };
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let channel = self.channels.get_mut(request.channel).expect("it has requests");
        let commands = if request.io.op == Op::CompareAndWrite { 2 } else { 1 };
        if live.pair.in_flight() + commands > live.pair.depth() {
            return Start::Blocked;
        }
        if is_emptying(request.io.op) && request.emptying == 0 {
            let bytes = channel.commands.bytes(request.io.blocks.0);
            if !self.emptying.try_begin(key, bytes) {
                return Start::NoRoom;
            }
            request.emptying = bytes;
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
                // A request that follows the end of another in the same turn was submitted after it.
                attempt.request.first_attempt = now.max(self.last_change + 1);
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
        self.emptying.end(request.emptying);
        self.end(request, status, cx);
    }

    /// Ends a request that is no longer in the table.
    // Always inlined, so that only the parts that it needs are read from the table.
    #[inline(always)]
    fn end(&mut self, request: Request, status: Status, cx: &mut Cx) {
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
            match request.state {
                State::Withheld(status) => {
                    self.answer(key, status, cx);
                    continue;
                }
                State::Locating(status) => {
                    self.fail_at(key, status, None, cx);
                    continue;
                }
                State::Waiting | State::Delayed | State::AtController(..) | State::Replaced(..) => {}
            }
            request.state = State::Waiting;
            // A request that a reset kept comes before the new ones.
            if request.is_kept { self.waiting.push_front(key) } else { self.waiting.push_back(key) }
        }
        while let Some(&key) = self.starved.front()
            && self.copied < COPY_MAX
            && self.may_start(key)
        {
            match self.start(key, cx) {
                Start::Blocked | Start::NoPages | Start::NoRoom => break,
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
                Start::NoRoom => self.emptying.waiting.push_back(key),
                Start::Ended(status) => self.finish(key, status, cx),
                Start::AtController | Start::Blocked => {}
            }
        }
        self.start_emptying(cx);
    }

    /// Whether the gate lets a request pass.
    fn may_start(&self, key: Key) -> bool {
        match self.gate {
            Gate::Open => true,
            Gate::Replaying(_) => self.requests.get(key).is_some_and(|request| request.is_kept),
            Gate::Closed => false,
        }
    }

    /// Takes the answer to a command. `changed_at` is a time at which all answers of the batch had been taken from the queue: the
    /// first change of blocks in the batch reads the clock.
    #[inline]
    fn complete(&mut self, completed: &Completed, changed_at: &mut Option<Nanos>, cx: &mut Cx) {
        let Life::Live(live) = &mut self.life else { unreachable!("a pair that reaps is there") };
        let key = Key::from_raw(completed.token);
        let mut entry = self.requests.occupied(key).expect("a command in flight is of a request");
        let request = entry.value();
        if request.io.op.is_change() {
            let now = *changed_at.get_or_insert_with(|| cx.refresh_now());
            let channel = self.channels.get(request.channel).expect("it has requests");
            self.last_change = now.0;
            self.history.add(Change {
                nsid: channel.namespace.nsid(),
                slba: request.io.lba.0,
                blocks: request.io.blocks.0,
                completed: now.0,
            });
            if !request.io.fua {
                channel.last_change.store(now.0, Ordering::Relaxed);
            }
        }
        let State::AtController(left, earlier) = request.state else {
            return self.complete_replaced(key, cx);
        };
        let outcome = decide(completed.status, live.retry_delays, self.shared.retry_delay_max);
        if outcome == Outcome::Done(Status::Ok) && left == 1 && earlier.is_ok() {
            match request.io.op {
                Op::Read if !request.pages.is_empty() => {
                    live.pool.empty(&request.pages, &request.io.data);
                    self.copied += u64::from(request.io.data.len());
                }
                Op::Flush => {
                    let channel = self.channels.get(request.channel).expect("it has requests");
                    channel.namespace.durability().flushed(completed.submitted);
                }
                op if is_emptying(op) => self.emptying.end(request.emptying),
                _ => {}
            }
            let request = entry.remove();
            return self.end(request, Status::Ok, cx);
        }
        live.stats.count_error(completed.status);
        if outcome == Outcome::Done(Status::Medium) && self.locate(key, completed, cx) {
            return;
        }
        self.complete_otherwise(key, completed.status, outcome, cx);
    }

    /// Takes an answer that is a failure, or one of two.
    #[cold]
    fn complete_otherwise(&mut self, key: Key, answer: DeviceStatus, outcome: Outcome, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let State::AtController(left, earlier) = request.state else {
            unreachable!("the caller has checked")
        };
        let channel = self.channels.get(request.channel).expect("it has requests");
        let outcome = match &self.life {
            Life::Live(live) if !request.io.op.is_change() => {
                decide_harmless(answer, live.retry_delays, self.shared.retry_delay_max, outcome)
            }
            _ => outcome,
        };
        let status = match outcome {
            Outcome::Done(status) => status,
            Outcome::Retry(delay, _)
                if left == 1
                    && earlier.is_ok()
                    && !request.is_aborted
                    && (request.attempts < self.shared.retries || self.shared.retries == WITHOUT_LIMIT) =>
            {
                request.attempts = request.attempts.saturating_add(1);
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
                self.shared.send(Command::LostState { status: answer });
                status
            }
        };
        if !matches!(status, Status::Ok | Status::Miscompare | Status::Aborted) {
            channel.report(&request.io, answer, status, None);
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
        let key = self.key;
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
        live.pair.late(cx.now().0, LATE_MAX, |late| shared.send(Command::Late { qid, late }));
    }

    fn publish(&mut self) {
        let Life::Live(live) = &self.life else { return };
        let counters = live.pair.counters();
        live.stats.publish(counters, self.polls, live.pair.in_flight(), &live.pool);
        self.published = counters.submitted;
    }
}

/// The result of two commands of one request. The second of two fused commands is aborted if the first fails.
pub(crate) const fn worse(one: Status, other: Status) -> Status {
    match (one, other) {
        (Status::Ok, status) | (status, Status::Ok) => status,
        (Status::Aborted, status) => status,
        (status, _) => status,
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
                live.wake.mask();
            }
            let limit = (budget - count).min(BATCH.into()) as u16;
            let mut completed = std::mem::take(&mut self.completed);
            let had_error = live.pair.error().is_some();
            let error = live.pair.reap(limit, |one| completed.push(one)).err().filter(|_| !had_error);
            if completed.is_empty() && error.is_none() {
                self.completed = completed;
                break;
            }
            let mut changed_at = None;
            for one in &completed {
                self.complete(one, &mut changed_at, cx);
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
        let are_waiting = !self.waiting.is_empty() || !self.starved.is_empty();
        if are_waiting || !self.delayed.is_empty() || !self.emptying.waiting.is_empty() {
            self.start_waiting(cx);
        }
        self.polls.all += 1;
        if count > 0 {
            self.publish();
            self.report_if_held();
        } else {
            self.polls.idle += 1;
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
        // The idle polls since the last completion.
        self.publish();
        let Life::Live(live) = &mut self.life else { return Armed::Yes };
        self.completed_at_arm = live.pair.counters().completed;
        if live.pair.in_flight() == 0 {
            return Armed::Yes;
        }
        match &live.wake {
            Wake::Never => {
                self.keeps_awake = true;
                return Armed::Busy;
            }
            Wake::Masked(mask) => mask.unmask(),
            Wake::Always => {}
        }
        fence(Ordering::SeqCst);
        if live.pair.has_completion() {
            live.wake.mask();
            return Armed::Busy;
        }
        self.is_armed = true;
        Armed::Yes
    }

    fn in_flight(&self) -> u32 {
        match &self.life {
            Life::Live(live) => live.pair.in_flight().into(),
            Life::Away | Life::Failing | Life::Closed => 0,
        }
    }

    fn name(&self) -> String {
        format!("nvme {}", self.shared.name)
    }
}

/// The drivers of a reactor's queue pairs. They stay also while no channel uses them.
#[derive(Default)]
struct Pairs(RefCell<HashMap<DriverKey, DriverRef<PairDriver>>>);

fn find(key: DriverKey, cx: &mut Cx) -> Option<DriverRef<PairDriver>> {
    cx.local_state::<Pairs>().0.borrow().get(&key).cloned()
}

/// The driver with this key on this reactor, for a new channel; `None` if the reactor is not prepared, or is being removed.
pub(crate) fn find_for_channel(key: DriverKey, cx: &mut Cx) -> Option<DriverRef<PairDriver>> {
    find(key, cx).filter(|driver| !driver.borrow().is_leaving)
}

/// Calls `f` with the driver of a pair; `None` if the reactor has none.
fn with_driver<T>(key: DriverKey, cx: &mut Cx, f: impl FnOnce(&mut PairDriver, &mut Cx) -> T) -> Option<T> {
    let driver = find(key, cx)?;
    let mut driver = driver.activate(cx);
    Some(f(&mut driver, cx))
}
