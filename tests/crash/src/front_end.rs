//! A guest and its front-end: keeps queues full, checks all completions, and connects to one back-end after the other.
//! Test tool, one thread.
//!
//! Requests in the rings stay there while no back-end is connected, like a guest's requests.

use std::fmt;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aryk_front_end::{Announced, Piece, Ring, Session};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::checker::Checker;
use crate::content::{self, SECTOR};
use crate::load::{self, IoRequest, SECTORS};
use crate::memory::Memory;
use crate::requests::{self, Outcome, Pending};
use crate::session::{self, Inflight};
use crate::shape::{Mode, Shape};
use fastrand::Rng;

/// Upper bound of a request's duration, apart from restarts.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a wait for a call, after which the rings are polled without one.
const CALL_WAIT: Duration = Duration::from_millis(100);
/// Allowed delay between a completion and its call.
const CALL_LATE: Duration = Duration::from_secs(1);
/// Interval of attempts to connect to a back-end, and of checks that a connected one is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Number of requests after which the depth changes.
const DEPTH_CHANGE: u64 = 500;

/// The back-end violated a rule.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// The rule.
    pub kind: Kind,
    /// What happened.
    pub detail: String,
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A read returned a value that it must not return.
    WrongValue,
    /// The back-end completed a chain that was not outstanding.
    NotOutstanding,
    /// A request failed, or was completed with a wrong length.
    Failed,
    /// A request was not completed in time.
    Unanswered,
    /// A completion came without a call.
    NotCalled,
    /// The back-end ended by itself, or could not be connected.
    Session,
    /// The key of the encrypted disk was not rotated to the end.
    Rotation,
    /// The file has a content that it must not have.
    File,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.detail)
    }
}

#[derive(Debug)]
struct Outstanding {
    kept: Pending,
    /// Pending to submit the request again after a unit attention.
    pieces: Vec<Piece>,
    since: Instant,
}

#[derive(Debug)]
struct Queue {
    ring: Ring,
    outstanding: Vec<Option<Outstanding>>,
    free: Vec<u16>,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Queue {
    const fn running(&self) -> usize {
        self.outstanding.len() - self.free.len()
    }
}

/// Counters of the run so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Completed requests.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Sectors whose content was checked.
    pub sectors_checked: u64,
    /// Established sessions.
    pub sessions: u64,
    /// Attempts that failed because the back-end died.
    pub sessions_cut: u64,
    /// Requests that ended with a unit attention and were submitted again: at most one per back-end.
    pub attentions: u64,
}

/// A guest and its front-end; see the module.
#[derive(Debug)]
pub struct FrontEnd {
    shape: Shape,
    random: Rng,
    memory: Memory,
    queues: Vec<Queue>,
    checker: Checker,
    inflight: Option<Inflight>,
    path: PathBuf,
    listener: Option<UnixListener>,
    session: Option<Session>,
    /// When the socket was last checked.
    socket_checked: Instant,
    depth: u64,
    /// When the connected back-end was connected.
    connected_at: Instant,
    /// Why the last attempt to connect failed.
    refusal: Option<String>,
    /// When the last completion was seen.
    pub last_completion: Instant,
    /// The longest time between two completions while requests were outstanding.
    pub longest_gap: Duration,
    /// When the first completion of the current session was seen.
    pub first_of_session: Option<Instant>,
    /// Counters of the run so far.
    pub counts: Counts,
}

impl FrontEnd {
    /// Creates a front-end that connects to its back-ends at `path`.
    ///
    /// # Errors
    /// The kernel refuses memory or a socket.
    pub fn new(shape: &Shape, mut random: Rng, path: &Path) -> Result<Self> {
        let count = shape.first_queue() + shape.queues;
        let memory = Memory::new(count, shape.depth)?;
        let mut queues = Vec::new();
        for index in 0..count {
            let at = memory.ring(index);
            let mut ring = Ring::new(shape.ring(), memory.guest(), at);
            let mut order: Vec<u16> = (0..shape.size).collect();
            random.shuffle(&mut order);
            ring.set_order(&order);
            let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let depth = if index < shape.first_queue() { 0 } else { shape.depth };
            let outstanding = (0..depth).map(|_| None).collect();
            let free = (0..depth).collect();
            queues.push(Queue { ring, outstanding, free, kick: event()?, call: event()? });
        }
        let listener = match shape.mode {
            Mode::Server => None,
            Mode::Client => {
                let listener = UnixListener::bind(path).context("listening for arykd")?;
                listener.set_nonblocking(true)?;
                Some(listener)
            }
        };
        let now = Instant::now();
        Ok(Self {
            depth: shape.depth.into(),
            shape: shape.clone(),
            random,
            memory,
            queues,
            checker: Checker::new(SECTORS),
            inflight: None,
            path: path.to_owned(),
            listener,
            session: None,
            socket_checked: now,
            connected_at: now,
            refusal: None,
            last_completion: now,
            longest_gap: Duration::ZERO,
            first_of_session: None,
            counts: Counts::default(),
        })
    }

    /// Number of outstanding requests.
    #[must_use]
    pub fn running(&self) -> usize {
        self.queues.iter().map(Queue::running).sum()
    }

    /// The first queue that carries requests.
    fn first_queue(&self) -> usize {
        self.shape.first_queue().into()
    }

    /// When the oldest outstanding request was submitted.
    #[must_use]
    pub fn oldest(&self) -> Option<Instant> {
        self.queues.iter().flat_map(|queue| &queue.outstanding).flatten().map(|o| o.since).min()
    }

    /// Whether a back-end is connected, as far as is known.
    #[must_use]
    pub const fn connected(&self) -> bool {
        self.session.is_some()
    }

    /// One turn: connects, reaps completions, submits requests if `submit`, and waits a moment if there was nothing to
    /// do.
    ///
    /// # Errors
    /// A violation.
    pub fn turn(&mut self, submit: bool) -> Result<(), Violation> {
        self.check_session()?;
        let mut work = self.reap()?;
        if submit {
            work += self.submit_requests();
        }
        self.check_answers()?;
        if work == 0 { self.wait() } else { Ok(()) }
    }

    /// Checks whether the back-end is gone, or a new one can be connected.
    fn check_session(&mut self) -> Result<(), Violation> {
        if self.socket_checked.elapsed() < POLL_INTERVAL {
            return Ok(());
        }
        self.socket_checked = Instant::now();
        if self.session.as_ref().is_some_and(|session| session.wire().has_ended()) {
            self.session = None;
        }
        if self.session.is_none() {
            // The previous back-end's completions still count for it.
            self.reap()?;
            if let Some(stream) = self.connect() {
                self.establish(stream);
            }
        }
        Ok(())
    }

    fn connect(&mut self) -> Option<UnixStream> {
        let stream = match &self.listener {
            None => UnixStream::connect(&self.path),
            Some(listener) => listener.accept().map(|(stream, _)| stream),
        };
        match stream {
            Ok(stream) => Some(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => {
                self.refusal = Some(error.to_string());
                None
            }
        }
    }

    fn establish(&mut self, stream: UnixStream) {
        let announced: Vec<_> = self
            .queues
            .iter()
            .zip(0..)
            .map(|(queue, index)| Announced {
                index,
                size: self.shape.size,
                ring: &queue.ring,
                kick: queue.kick.as_fd(),
                call: queue.call.as_fd(),
            })
            .collect();
        match session::establish(stream, &self.shape, SECTORS, &self.memory, &announced, &mut self.inflight) {
            Ok(session) => {
                self.session = Some(session);
                self.connected_at = Instant::now();
                self.first_of_session = None;
                self.counts.sessions += 1;
            }
            Err(error) => {
                // The back-end may have been killed. One that refuses permanently is found by `check_answers`.
                self.counts.sessions_cut += 1;
                self.refusal = Some(format!("{error:#}"));
            }
        }
    }

    /// Takes all completions; returns their number.
    fn reap(&mut self) -> Result<u64, Violation> {
        let mut taken = 0;
        for index in 0..self.queues.len() {
            loop {
                let next = self.queues[index].ring.take();
                let next =
                    next.map_err(|wrong| violation(Kind::NotOutstanding, format!("queue {index}: {wrong}")))?;
                let Some((slot, len)) = next else { break };
                self.complete(index, slot, len)?;
                taken += 1;
            }
        }
        if taken > 0 {
            let now = Instant::now();
            self.longest_gap = self.longest_gap.max(now - self.last_completion);
            self.last_completion = now;
            if self.session.is_some() {
                self.first_of_session.get_or_insert(now);
            }
        }
        Ok(taken)
    }

    fn complete(&mut self, index: usize, slot: u16, len: u32) -> Result<(), Violation> {
        let queue = &mut self.queues[index];
        let done = queue.outstanding[usize::from(slot)].take().expect("the ring knows what is outstanding");
        let place = self.memory.slot(index as u16, slot);
        match requests::answered(&self.memory, &done.kept, place, len, &self.shape) {
            Outcome::Success => queue.free.push(slot),
            Outcome::Attention
                if self.counts.attentions < self.counts.sessions + self.counts.sessions_cut =>
            {
                self.counts.attentions += 1;
                requests::reset_status(&self.memory, place);
                queue.ring.add(slot, &done.pieces, self.shape.indirect.then_some(place.table));
                queue.outstanding[usize::from(slot)] = Some(done);
                self.publish(index);
                return Ok(());
            }
            Outcome::Attention => {
                let what = format!("{:?}: one attention more than there were sessions", done.kept);
                return Err(violation(Kind::Failed, what));
            }
            Outcome::Failure(said) => {
                let what = format!("{:?}: answered {said:?}, {len} bytes written", done.kept);
                return Err(violation(Kind::Failed, what));
            }
        }
        self.counts.requests += 1;
        match done.kept {
            Pending::Flush => {}
            Pending::Write(write) => self.checker.complete_write(&write),
            Pending::Read(read) => {
                let sectors = read.sectors();
                self.counts.reads += 1;
                self.counts.sectors_checked += sectors.end - sectors.start;
                let memory = &self.memory;
                let contents = (0..)
                    .zip(sectors)
                    .map(|(i, sector)| content::identify(sector, &memory.sector(place.data, i)));
                let seen = self.checker.complete_read(&read, contents);
                seen.map_err(|wrong| violation(Kind::WrongValue, format!("queue {index}: {wrong}")))?;
            }
        }
        Ok(())
    }

    /// Fills the queues; returns the number of submitted requests.
    fn submit_requests(&mut self) -> u64 {
        let mut submitted = 0;
        for index in self.first_queue()..self.queues.len() {
            while (self.queues[index].running() as u64) < self.depth {
                let request = load::draw(&mut self.random, &self.shape);
                if !self.submit(index, &request) {
                    break;
                }
                submitted += 1;
                if self.random.u64(..DEPTH_CHANGE) == 0 {
                    self.depth = 1 + self.random.u64(..u64::from(self.shape.depth));
                }
            }
            self.publish(index);
        }
        submitted
    }

    fn publish(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        if queue.ring.publish() {
            // EAGAIN, a full counter, is harmless: the device has not read the earlier kicks yet.
            let _ = rustix::io::write(&queue.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Puts a request into a ring, without making it visible; returns whether there was space.
    fn submit(&mut self, index: usize, request: &IoRequest) -> bool {
        let queue = &mut self.queues[index];
        let Some(&slot) = queue.free.last() else { return false };
        let place = self.memory.slot(index as u16, slot);
        // Header, answer and data.
        let needed = if self.shape.indirect { 1 } else { load::PARTS_MAX + 2 };
        if queue.ring.room() < needed {
            return false;
        }
        let (memory, checker) = (&self.memory, &mut self.checker);
        let (pieces, kept) =
            requests::prepare(&mut self.random, memory, checker, request, place, &self.shape);
        queue.free.pop();
        queue.ring.add(slot, &pieces, self.shape.indirect.then_some(place.table));
        queue.outstanding[usize::from(slot)] = Some(Outstanding { kept, pieces, since: Instant::now() });
        true
    }

    /// Checks that no request waits longer than allowed, with or without a connected back-end.
    fn check_answers(&self) -> Result<(), Violation> {
        let Some(oldest) = self.oldest() else { return Ok(()) };
        let waited = oldest.elapsed();
        if waited < TIMEOUT || (self.connected() && self.connected_at.elapsed() < TIMEOUT) {
            return Ok(());
        }
        let (running, refusal) = (self.running(), self.refusal.as_deref().unwrap_or("none"));
        let state = if self.connected() { "connected" } else { "not connected" };
        let detail = format!(
            "the oldest of {running} requests waits for {waited:.1?}, {state}; last refusal: {refusal}"
        );
        Err(violation(Kind::Unanswered, detail))
    }

    /// Waits for a call, or for the back-end to connect or disconnect.
    fn wait(&mut self) -> Result<(), Violation> {
        for queue in &mut self.queues {
            let mut count = [0; 8];
            // EAGAIN is harmless: there was no call.
            let _ = rustix::io::read(&queue.call, &mut count);
            queue.ring.arm();
        }
        if self.any_ready() {
            return Ok(());
        }
        let timeout = if self.connected() { CALL_WAIT } else { POLL_INTERVAL };
        if self.poll(timeout)? || !self.connected() || !self.any_ready() {
            return Ok(());
        }
        if self.poll(CALL_LATE)? {
            return Ok(());
        }
        Err(violation(Kind::NotCalled, format!("no call within {CALL_LATE:?} of a completion")))
    }

    fn any_ready(&self) -> bool {
        self.queues.iter().any(|queue| queue.ring.is_ready())
    }

    /// Waits for an event; returns whether one came within `timeout`.
    fn poll(&self, timeout: Duration) -> Result<bool, Violation> {
        let mut fds: Vec<_> =
            self.queues.iter().map(|queue| PollFd::new(&queue.call, PollFlags::IN)).collect();
        let hang_up = self.session.as_ref().map(|session| session.wire().fd());
        fds.extend(hang_up.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout =
            Timespec { tv_sec: timeout.as_secs().cast_signed(), tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(n) => Ok(n > 0),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(violation(Kind::Session, format!("poll: {error}"))),
        }
    }

    /// Submits nothing more, and returns when all requests are complete.
    ///
    /// # Errors
    /// A violation.
    pub fn drain(&mut self) -> Result<(), Violation> {
        while self.running() > 0 {
            self.turn(false)?;
        }
        Ok(())
    }

    /// Reads the whole area through the device. No request may be in flight.
    ///
    /// # Errors
    /// A violation.
    pub fn read_back(&mut self) -> Result<(), Violation> {
        let (first, mut next) = (self.first_queue(), 0);
        while next < SECTORS {
            let range = next..next + 8;
            if self.submit(first, &IoRequest::Read(range)) {
                next += 8;
            } else {
                self.publish(first);
                self.turn(false)?;
            }
        }
        self.publish(first);
        self.drain()
    }

    /// Compares the file's content with the allowed contents. No request may be in flight.
    ///
    /// # Errors
    /// A violation, as [`Kind::File`].
    pub fn check_file(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        for (sector, bytes) in (0..SECTORS).zip(bytes.chunks_exact(SECTOR)) {
            let content = content::identify(sector, bytes.try_into().expect("a sector"));
            let seen = self.checker.check_at_rest(sector, content);
            seen.map_err(|wrong| violation(Kind::File, wrong.to_string()))?;
        }
        Ok(())
    }
}

pub(crate) const fn violation(kind: Kind, detail: String) -> Violation {
    Violation { kind, detail }
}
