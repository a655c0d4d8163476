//! A guest and its front-end: it keeps queues full, checks all that comes back, and meets one back-end after the other. Test tool, one
//! thread.
//!
//! What is in its rings stays there while no back-end is connected, as a guest's requests do.

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
use crate::load::{self, SECTORS, Wish};
use crate::memory::Memory;
use crate::random::Random;
use crate::requests::{self, Answered, Kept};
use crate::session::{self, Inflight};
use crate::shape::{Mode, Shape};

/// The longest that a request may take, restarts apart.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long a wait for a call may be before the rings are looked at without one.
const CALL_WAIT: Duration = Duration::from_millis(100);
/// How much later the call of a completion may come.
const CALL_LATE: Duration = Duration::from_secs(1);
/// How often a back-end's socket is tried, and a running one is asked whether it is there.
const LOOK: Duration = Duration::from_millis(1);
/// After how many requests another depth is chosen.
const DEPTH_CHANGE: u64 = 500;

/// The back-end did what it must not, or not what it must.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// Which rule.
    pub kind: Kind,
    /// What was seen.
    pub detail: String,
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A read saw what it must not.
    WrongValue,
    /// A completion of what was not outstanding.
    NotOutstanding,
    /// A request was answered by an error, or with a wrong length.
    Failed,
    /// A request was not answered.
    Unanswered,
    /// A completion was not announced.
    NotCalled,
    /// The back-end ended on its own, or could not be met.
    Session,
    /// The file holds what it must not.
    File,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.detail)
    }
}

#[derive(Debug)]
struct Outstanding {
    kept: Kept,
    /// For a unit that wants to be asked again.
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

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Completed.
    pub requests: u64,
    /// Of them reads.
    pub reads: u64,
    /// Sectors that were compared.
    pub sectors_checked: u64,
    /// Sessions that were established.
    pub sessions: u64,
    /// Attempts that a back-end's death cut short.
    pub sessions_cut: u64,
    /// Requests that a unit wanted to be asked again: once for each back-end at most.
    pub attentions: u64,
}

/// See the module.
#[derive(Debug)]
pub struct FrontEnd {
    shape: Shape,
    random: Random,
    memory: Memory,
    queues: Vec<Queue>,
    checker: Checker,
    inflight: Option<Inflight>,
    path: PathBuf,
    listener: Option<UnixListener>,
    session: Option<Session>,
    /// When the socket was looked at last.
    looked: Instant,
    depth: u64,
    /// When the back-end that answers now was met.
    met: Instant,
    /// Why the last attempt to meet one failed.
    refusal: Option<String>,
    /// When a completion was seen last.
    pub last_completion: Instant,
    /// The longest time between two completions while requests were outstanding.
    pub longest_gap: Duration,
    /// The first completion of the session that runs.
    pub first_of_session: Option<Instant>,
    /// What happened so far.
    pub counts: Counts,
}

impl FrontEnd {
    /// A front-end that meets its back-ends at `path`.
    ///
    /// # Errors
    /// The kernel gives no memory, or no socket.
    pub fn new(shape: &Shape, mut random: Random, path: &Path) -> Result<Self> {
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
            looked: now,
            met: now,
            refusal: None,
            last_completion: now,
            longest_gap: Duration::ZERO,
            first_of_session: None,
            counts: Counts::default(),
        })
    }

    /// What is outstanding.
    #[must_use]
    pub fn running(&self) -> usize {
        self.queues.iter().map(Queue::running).sum()
    }

    /// The first of its queues that carries requests.
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

    /// One turn: meets, reaps, submits if it is to, and waits for a moment if there was nothing to do.
    ///
    /// # Errors
    /// A violation.
    pub fn turn(&mut self, submit: bool) -> Result<(), Violation> {
        self.look()?;
        let mut work = self.reap()?;
        if submit {
            work += self.submit_wishes();
        }
        self.check_answers()?;
        if work == 0 { self.wait() } else { Ok(()) }
    }

    /// Sees whether the back-end is gone, or a new one there.
    fn look(&mut self) -> Result<(), Violation> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        if self.session.as_ref().is_some_and(|session| session.wire().has_ended()) {
            self.session = None;
        }
        if self.session.is_none() {
            // What the last one has completed is its own.
            self.reap()?;
            if let Some(stream) = self.meet() {
                self.establish(stream);
            }
        }
        Ok(())
    }

    fn meet(&mut self) -> Option<UnixStream> {
        let met = match &self.listener {
            None => UnixStream::connect(&self.path),
            Some(listener) => listener.accept().map(|(stream, _)| stream),
        };
        match met {
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
                self.met = Instant::now();
                self.first_of_session = None;
                self.counts.sessions += 1;
            }
            Err(error) => {
                // It may have been killed meanwhile. One that refuses for good is found by `check_answers`.
                self.counts.sessions_cut += 1;
                self.refusal = Some(format!("{error:#}"));
            }
        }
    }

    /// Takes all completions; how many there were.
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
            Answered::Well => queue.free.push(slot),
            Answered::Attention
                if self.counts.attentions < self.counts.sessions + self.counts.sessions_cut =>
            {
                self.counts.attentions += 1;
                requests::unanswer(&self.memory, place);
                queue.ring.add(slot, &done.pieces, self.shape.indirect.then_some(place.table));
                queue.outstanding[usize::from(slot)] = Some(done);
                self.publish(index);
                return Ok(());
            }
            Answered::Attention => {
                let what = format!("{:?}: one attention more than there were sessions", done.kept);
                return Err(violation(Kind::Failed, what));
            }
            Answered::Badly(said) => {
                let what = format!("{:?}: answered {said:?}, {len} bytes written", done.kept);
                return Err(violation(Kind::Failed, what));
            }
        }
        self.counts.requests += 1;
        match done.kept {
            Kept::Flush => {}
            Kept::Write(write) => self.checker.complete_write(&write),
            Kept::Read(read) => {
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

    /// Fills the queues up; how many requests that were.
    fn submit_wishes(&mut self) -> u64 {
        let mut submitted = 0;
        for index in self.first_queue()..self.queues.len() {
            while (self.queues[index].running() as u64) < self.depth {
                let wish = load::draw(&mut self.random, &self.shape);
                if !self.submit(index, &wish) {
                    break;
                }
                submitted += 1;
                if self.random.below(DEPTH_CHANGE) == 0 {
                    self.depth = 1 + self.random.below(self.shape.depth.into());
                }
            }
            self.publish(index);
        }
        submitted
    }

    fn publish(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        if queue.ring.publish() {
            // Full is as good: the device has not looked yet.
            let _ = rustix::io::write(&queue.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Puts a request into a ring, without showing it yet; whether there was room.
    fn submit(&mut self, index: usize, wish: &Wish) -> bool {
        let queue = &mut self.queues[index];
        let Some(&slot) = queue.free.last() else { return false };
        let place = self.memory.slot(index as u16, slot);
        // Header, answer and data.
        let needed = if self.shape.indirect { 1 } else { load::PARTS_MAX + 2 };
        if queue.ring.room() < needed {
            return false;
        }
        let (memory, checker) = (&self.memory, &mut self.checker);
        let (pieces, kept) = requests::prepare(&mut self.random, memory, checker, wish, place, &self.shape);
        queue.free.pop();
        queue.ring.add(slot, &pieces, self.shape.indirect.then_some(place.table));
        queue.outstanding[usize::from(slot)] = Some(Outstanding { kept, pieces, since: Instant::now() });
        true
    }

    /// Whether a request waits for longer than it may, whoever is there to answer.
    fn check_answers(&self) -> Result<(), Violation> {
        let Some(oldest) = self.oldest() else { return Ok(()) };
        let waited = oldest.elapsed();
        if waited < PATIENCE || (self.connected() && self.met.elapsed() < PATIENCE) {
            return Ok(());
        }
        let (running, refusal) = (self.running(), self.refusal.as_deref().unwrap_or("none"));
        let state = if self.connected() { "connected" } else { "nobody is connected" };
        let detail = format!(
            "the oldest of {running} requests waits for {waited:.1?}, {state}; last refusal: {refusal}"
        );
        Err(violation(Kind::Unanswered, detail))
    }

    /// Waits for a call, or for the back-end to come or go.
    fn wait(&mut self) -> Result<(), Violation> {
        for queue in &mut self.queues {
            let mut count = [0; 8];
            // Nothing there is as good.
            let _ = rustix::io::read(&queue.call, &mut count);
            queue.ring.arm();
        }
        if self.any_ready() {
            return Ok(());
        }
        let timeout = if self.connected() { CALL_WAIT } else { LOOK };
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

    /// Whether something happened within `timeout`.
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

    /// Submits nothing more, and returns when all is answered.
    ///
    /// # Errors
    /// A violation.
    pub fn drain(&mut self) -> Result<(), Violation> {
        while self.running() > 0 {
            self.turn(false)?;
        }
        Ok(())
    }

    /// Reads the whole area through the device. Nothing may run.
    ///
    /// # Errors
    /// A violation.
    pub fn read_back(&mut self) -> Result<(), Violation> {
        let (first, mut next) = (self.first_queue(), 0);
        while next < SECTORS {
            let range = next..next + 8;
            if self.submit(first, &Wish::Read(range)) {
                next += 8;
            } else {
                self.publish(first);
                self.turn(false)?;
            }
        }
        self.publish(first);
        self.drain()
    }

    /// Compares the file with what may be in it. Nothing may run.
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
