//! The guest's side of a queue, the same for block and SCSI: the ring, the guest's memory, calls, kicks and error counters.
//! Reactor context.
//!
//! A device's queue owns a [`GuestQueue`] and processes the chains that it takes. A chain is named by its head, which is also the
//! slot of its scatter list, from [`GuestQueue::take`] to [`GuestQueue::complete`].

use crate::{Alarm, Errors, Pace, Trouble};
use aryk_crash_point::{Step, step};
use aryk_dma::{Mapping, MemTable, SgTable};
use aryk_reactor::{Armed, Cx, Layer, Moving, RootId, ThreadId, Traced, WatchId};
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::{Chain, ConfigError, Popped, Virtqueue};
use futures_channel::oneshot;
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes};

/// Chains taken from the ring in one poll.
const BATCH: u32 = 64;

/// Budget of descriptors read in one poll; the last chain may exceed it. Chains have very different lengths, and each descriptor
/// costs. A descriptor whose buffer spans several regions of memory also counts once for each region.
const DESCRIPTORS: u32 = 1024;

/// Upper bound of the pieces of memory of all requests in flight; the last request may exceed it. A change of the guest's memory
/// visits all pieces at one time. At the bound, the queue takes no more chains. With pages of 4 KiB, the bound is 64 MiB.
const PIECES: u32 = 1 << 14;
/// Checks of debug builds visit rings up to this size.
const CHECKED_SIZE: u16 = 256;

/// Budget of dirty log words and list pieces visited in one poll; the last request may exceed it. A request of 4 GiB needs as
/// many.
const MARKS: u64 = 1 << 14;
const _: () =
    assert!(BATCH <= DESCRIPTORS, "short chains are bounded by their number, long ones by their descriptors");

/// The time that requests have to complete after their queue began to stop. Then they are aborted, because the front-end, and
/// with it the guest, stands still while it waits for the end of the queue.
pub const STOP_GRACE: Duration = Duration::from_secs(2);

/// The parts of a queue that starts.
pub struct Parts {
    /// The name for the watchdog and the trace.
    pub name: String,
    /// The index among the controller's queues.
    pub index: u16,
    /// The thread that is charged for the queue's work.
    pub thread: ThreadId,
    /// The guest's ring.
    pub ring: Virtqueue,
    /// Whether an in-flight region records the chains in flight for a successor.
    pub keeps_in_flight: bool,
    /// The dirty log of writes to the guest's memory, while the guest migrates.
    pub log: Option<QueueLog>,
    /// The guest's memory.
    pub memory: Arc<MemTable>,
    /// The descriptor that interrupts the guest; `None`: the guest polls.
    pub call: Option<EventFd>,
    /// The descriptor that the guest kicks by; `None`: the guest does not kick, and the queue polls the ring.
    pub kick: Option<OwnedFd>,
    /// Counters of the guest's errors.
    pub errors: Arc<Errors>,
    /// Ends the session when the queue cannot go on.
    pub alarm: Alarm,
}

/// Makes the parts of a queue on another reactor, for a thread there.
pub type MakeParts = Box<dyn FnOnce(ThreadId) -> Parts + Send>;

/// The guest's side of a queue. See the file's head.
pub struct GuestQueue {
    /// The queue as a root of its reactor.
    pub id: RootId,
    thread: ThreadId,
    /// The index among the controller's queues.
    pub index: u16,
    /// The guest's ring.
    pub ring: Virtqueue,
    /// As [`Parts::keeps_in_flight`].
    pub keeps_in_flight: bool,
    log: Option<QueueLog>,
    /// The part of [`MARKS`] that this poll has used.
    marked: u64,
    /// Chains that later polls complete, when the dirty log has their writes.
    unlogged: VecDeque<Unlogged>,
    /// The scatter lists of the chains in flight, by head.
    pub sgs: SgTable,
    call: Option<EventFd>,
    watch: Option<WatchId>,
    pace: Pace,
    scratch: Rc<Scratch>,
    leaving: Option<Leaving>,
    alarmed: bool,
    alarm: Alarm,
    errors: Arc<Errors>,
    faults_seen: u64,
    /// Number of chains that a predecessor left in flight and that were not taken yet.
    replays: usize,
    /// The queue was parked because requests in flight have too many [`PIECES`]: no kick comes for the chains that wait.
    waits_for_room: bool,
}

impl fmt::Debug for GuestQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestQueue").field("index", &self.index).finish_non_exhaustive()
    }
}

/// The reason why a queue takes no more chains.
enum Leaving {
    /// The queue stops; the receiver gets the successor's base.
    Stop(oneshot::Sender<u32>),
    /// The queue moves to another reactor.
    Move,
}

/// A chain whose request has completed and whose writes are not in the dirty log yet: the parameters of
/// [`GuestQueue::complete`].
#[derive(Debug)]
struct Unlogged {
    head: u16,
    written: u32,
    touched: Range<u32>,
}

/// Scratch memory that all queues of a reactor share; `None` while one of them uses it.
#[derive(Default)]
struct Scratch(Cell<Option<Box<Chain>>>);

impl GuestQueue {
    /// Creates the guest's side of a queue on the calling reactor, and kicks it: there may be chains from before.
    ///
    /// # Errors
    /// The kick fd cannot be watched.
    pub fn new(id: RootId, parts: Parts, cx: &mut Cx) -> std::io::Result<Self> {
        let watch = parts.kick.map(|fd| cx.watch(fd, id)).transpose()?;
        cx.name_object(Layer::Frontend, id.trace_number(), Some(&parts.name));
        cx.kick(id);
        aryk_crash_point::step(aryk_crash_point::Step::Started);
        // A guest may wait for an interrupt that a predecessor failed to send.
        if let Some(call) = &parts.call {
            cx.signal(call.as_fd());
        }
        let replays = parts.ring.replays();
        Ok(Self {
            id,
            thread: parts.thread,
            index: parts.index,
            sgs: SgTable::new(parts.ring.size(), parts.memory),
            ring: parts.ring,
            keeps_in_flight: parts.keeps_in_flight,
            log: parts.log,
            marked: 0,
            unlogged: VecDeque::new(),
            call: parts.call,
            watch,
            pace: Pace::new(cx.now()),
            scratch: cx.local_state::<Scratch>(),
            leaving: None,
            alarmed: false,
            alarm: parts.alarm,
            errors: parts.errors,
            faults_seen: aryk_dma::faults(),
            replays,
            waits_for_room: false,
        })
    }

    /// Takes new chains off the ring and passes each to `start`, which makes a request of it. Returns whether there were any.
    #[inline]
    pub fn take(&mut self, cx: &mut Cx, mut start: impl FnMut(&mut Self, u16, &mut Chain, &mut Cx)) -> bool {
        if !self.takes_requests() || !self.has_room() {
            return false;
        }
        let now = cx.now();
        if now < self.pace.next_look() {
            cx.stay_awake_until(self.pace.next_look());
            return false;
        }
        if self.ring.available() == Ok(0) && self.replays == 0 {
            return false;
        }
        let mut chain = self.scratch.0.take().unwrap_or_default();
        let (mut taken, mut descriptors) = (0, 0);
        self.ring.prefetch_first(self.sgs.memory());
        // Chains that the guest adds meanwhile are for the next poll: another look at its index would take a cache line from it.
        loop {
            let popped = self.pop(&mut chain);
            descriptors += chain.cost();
            match popped {
                Popped::Chain(head) => start(self, head, &mut chain, cx),
                Popped::Nothing => break,
                other if self.refuse(other) => {}
                _ => break,
            }
            taken += 1;
            descriptors += self.sgs.take_parts();
            if self.replays > 0 {
                self.replays -= 1;
            }
            self.ring.prefetch_next(self.sgs.memory());
            if taken >= BATCH || descriptors >= DESCRIPTORS || !self.has_room() || !self.ring.may_know_more()
            {
                break;
            }
        }
        self.scratch.0.set(Some(chain));
        if taken > 0 {
            self.pace.found(now, taken);
        }
        taken > 0
    }

    /// Takes the next chain off the ring, if there is one; returns whether there was.
    pub fn take_one(&mut self, start: impl FnOnce(&mut Self, u16, &mut Chain)) -> bool {
        if !self.takes_requests() {
            return false;
        }
        let mut chain = self.scratch.0.take().unwrap_or_default();
        let found = match self.pop(&mut chain) {
            Popped::Chain(head) => {
                start(self, head, &mut chain);
                true
            }
            popped => self.refuse(popped),
        };
        self.scratch.0.set(Some(chain));
        self.replays = self.replays.saturating_sub(usize::from(found));
        found
    }

    /// Whether a predecessor left in flight the chain that is being taken: the predecessor may have carried out its request.
    #[inline]
    pub const fn is_replay(&self) -> bool {
        self.replays > 0
    }

    /// Pops the next chain into `chain`.
    // Always inlined: as a separate function it costs a SCSI host, whose requests are long, 30 instructions each.
    #[inline(always)]
    fn pop(&mut self, chain: &mut Chain) -> Popped {
        self.ring.pop(self.sgs.memory(), chain)
    }

    /// Handles a pop without a valid chain: completes a malformed chain, reports a broken queue. Returns whether
    /// there may be more chains.
    #[cold]
    fn refuse(&mut self, popped: Popped) -> bool {
        match popped {
            Popped::Chain(head) | Popped::Malformed(head) => {
                self.errors.bad_chains.fetch_add(1, Ordering::Relaxed);
                self.ring.push_used(head, 0);
                true
            }
            Popped::Broken => {
                self.errors.broken_queues.fetch_add(1, Ordering::Relaxed);
                if let Some(error) = self.ring.broken() {
                    self.raise(Trouble::Broken(self.index, error));
                }
                false
            }
            Popped::Nothing => false,
        }
    }

    /// Completes a chain that has no buffer for an answer; its slot is in use.
    #[cold]
    pub fn complete_unanswerable(&mut self, head: u16) {
        self.errors.unanswerable.fetch_add(1, Ordering::Relaxed);
        self.sgs.end(head);
        self.ring.push_used(head, 0);
    }

    /// Completes a chain, of which `written` bytes were written; its slot is in use. `touched` receives the length of the
    /// slot's list, and returns the range of it that may have been written.
    // Always inlined: a device type completes requests in one place.
    #[inline(always)]
    pub fn complete(&mut self, head: u16, written: u32, touched: impl FnOnce(u32) -> Range<u32>) {
        if self.log.is_some() && !self.log_writes(head, written, touched(self.sgs.len_of(head))) {
            return;
        }
        self.sgs.end(head);
        self.ring.push_used(head, written);
    }

    /// As [`GuestQueue::complete`], for a request whose list ends in a byte for its status, and with which the number of
    /// bytes that it writes was stored: `written` receives that number, and returns how many of them were written.
    #[inline(always)]
    pub fn answer(&mut self, head: u16, status: u8, written: impl FnOnce(u32) -> u32) {
        if self.log.is_some() {
            // The dirty log needs the list, so it is written before the slot is free.
            let most = self.sgs.put_last_byte(head, status);
            step(Step::Answered);
            return self.complete_tail(head, written(most), most);
        }
        let most = self.sgs.end_with_last_byte(head, status);
        step(Step::Answered);
        self.ring.push_used(head, written(most));
    }

    /// As [`GuestQueue::complete`], for a request whose list begins with the place of its answer. `answer` receives the length of
    /// the slot's list and the number stored with it, and returns the answer and the number of bytes written, which are the first
    /// of the list.
    #[inline(always)]
    pub fn answer_first<T: IntoBytes + Immutable>(
        &mut self,
        head: u16,
        answer: impl FnOnce(u32, u32) -> (T, u32),
    ) {
        if self.log.is_some() {
            // The dirty log needs the list, so it is written before the slot is free.
            let (answer, written) = answer(self.sgs.len_of(head), self.sgs.note_of(head));
            self.sgs.put_first(head, &answer);
            step(Step::Answered);
            return self.complete(head, written, |_| 0..written);
        }
        let mut written = 0;
        self.sgs.end_with_first(head, |len, note| {
            let (answer, bytes) = answer(len, note);
            written = bytes;
            answer
        });
        step(Step::Answered);
        self.ring.push_used(head, written);
    }

    /// Completes a request that may have written the last `most` bytes of its list.
    #[cold]
    fn complete_tail(&mut self, head: u16, written: u32, most: u32) {
        self.complete(head, written, |all| all.saturating_sub(most)..all);
    }

    /// Marks the writes of a completed chain in the dirty log. Returns false if this poll's budget is used up; then a later poll
    /// completes the chain.
    #[cold]
    fn log_writes(&mut self, head: u16, written: u32, touched: Range<u32>) -> bool {
        let Some(log) = &self.log else { return true };
        let now = self.marked < MARKS;
        if now {
            self.marked += self.sgs.mark_dirty(head, touched, &log.log);
        } else {
            self.unlogged.push_back(Unlogged { head, written, touched });
        }
        now
    }

    /// Called at the start of each poll: completes chains whose writes an earlier poll had no budget to log. Returns whether
    /// there were any.
    #[inline]
    pub fn complete_unlogged(&mut self, cx: &mut Cx) -> bool {
        self.marked > 0 && self.log_rest(cx)
    }

    #[cold]
    fn log_rest(&mut self, cx: &mut Cx) -> bool {
        self.marked = 0;
        let unlogged = self.unlogged.len();
        while self.marked < MARKS
            && let Some(Unlogged { head, written, touched }) = self.unlogged.pop_front()
        {
            self.complete(head, written, |_| touched);
        }
        if !self.unlogged.is_empty() {
            cx.wake(self.id);
        }
        unlogged > self.unlogged.len()
    }

    /// Marks in the dirty log the first `len` bytes of a chain's writable part, which are not in the list of its slot.
    #[inline]
    pub fn mark_written(&self, chain: &Chain, len: u32) {
        let Some(log) = &self.log else { return };
        let mut left = len;
        for piece in chain.writable() {
            if left == 0 {
                break;
            }
            let now = piece.len.min(left);
            log.log.mark(piece.addr, now.into());
            left -= now;
        }
    }

    /// Makes completed chains visible to the guest, and interrupts it if it needs that.
    #[inline]
    pub fn publish(&mut self, cx: &mut Cx) {
        if !self.unlogged.is_empty() {
            cx.wake(self.id);
        }
        if self.waits_for_room && self.has_room() {
            self.waits_for_room = false;
            cx.kick(self.id);
        }
        let call_wanted = self.ring.publish();
        self.log_ring();
        self.check_invariants();
        if let Some(call) = self.call.as_ref().filter(|_| call_wanted) {
            cx.signal(call.as_fd());
        }
    }

    /// Sets another descriptor that interrupts the guest, and signals it once, in case the guest missed a signal of the old one.
    pub fn set_call(&mut self, call: Option<EventFd>, cx: &mut Cx) {
        self.call = call;
        if let Some(call) = &self.call {
            cx.signal(call.as_fd());
        }
    }

    /// Sets the dirty log of writes to the guest's memory; `None`: the guest does not migrate.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.log = log;
        // The ring may have been written to before.
        self.log_ring();
    }

    /// Uses the guest's new memory, with the ring at these places in it. Requests in flight whose memory was removed keep that
    /// memory mapped.
    ///
    /// # Errors
    /// The places are invalid for a ring.
    pub fn set_memory(&mut self, memory: Arc<MemTable>, rings: Rings) -> Result<(), ConfigError> {
        self.ring.set_areas(rings.desc, rings.driver, rings.device)?;
        self.sgs.set_memory(memory);
        self.check_invariants();
        Ok(())
    }

    /// Calls `abort` if requests in flight use memory that was removed from the guest, and for which the front-end waits. `abort`
    /// receives a function that returns whether the request of a head uses such memory, and aborts these requests. They fail,
    /// because the guest removed their memory. Returns whether the memory may be replaced before that, which `abort` returns.
    pub fn leave_removed_memory(&mut self, abort: impl FnOnce(&dyn Fn(u16) -> bool) -> bool) -> bool {
        let requests = self.sgs.old_users().count();
        if requests == 0 {
            return true;
        }
        tracing::debug!(queue = self.index, requests, "requests that use removed memory are aborted");
        abort(&|head| self.sgs.is_old_user(head))
    }

    /// Leaves the front-end, which has gone, although requests are in flight: from now on, the queue touches neither the
    /// in-flight region, which keeps these requests for a successor, nor the ring, nor the descriptors of the front-end. The
    /// queue ends with its last request. `private` replaces the ring ([`aryk_virtqueue::private_len`]).
    ///
    /// # Errors
    /// `private` is too short; then nothing has changed.
    ///
    /// # Panics
    /// If the queue is not stopping.
    pub fn leave_front_end(&mut self, private: &Arc<Mapping>, cx: &mut Cx) -> Result<(), ConfigError> {
        assert!(self.is_stopping(), "queue {} leaves its front-end, but is not to stop", self.index);
        self.ring.leave(private)?;
        self.unregister(cx);
        (self.call, self.log) = (None, None);
        Ok(())
    }

    /// Marks the ring in the dirty log.
    #[inline]
    fn log_ring(&self) {
        if let Some(log) = &self.log {
            log.mark_ring();
        }
    }

    /// Whether requests in flight have fewer than [`PIECES`] pieces, so that the queue may take another chain.
    #[inline]
    const fn has_room(&self) -> bool {
        self.sgs.long_pieces() < PIECES
    }

    /// Whether the queue takes new chains.
    pub const fn takes_requests(&self) -> bool {
        self.leaving.is_none() && !self.alarmed
    }

    /// Stops to take chains. The receiver gets the base that [`GuestQueue::leave`] sends.
    ///
    /// # Panics
    /// If the queue is stopping or moving already: the controller waits for a move before it stops a queue.
    pub fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        assert!(self.leaving.is_none(), "queue {} stops twice, or while it moves", self.index);
        let (sender, receiver) = oneshot::channel();
        self.leaving = Some(Leaving::Stop(sender));
        cx.wake(self.id);
        receiver
    }

    /// Whether the queue is stopping.
    pub const fn is_stopping(&self) -> bool {
        matches!(self.leaving, Some(Leaving::Stop(_)))
    }

    /// Whether the queue is stopping or moving to another reactor.
    #[inline]
    pub const fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Stops to take chains, to move to another reactor. Returns false if the queue is stopping or broken; then nothing changes.
    pub fn begin_move(&mut self) -> bool {
        let goes = self.takes_requests();
        if goes {
            self.leaving = Some(Leaving::Move);
        }
        goes
    }

    /// Takes chains again, after a move was cancelled.
    pub fn resume(&mut self, cx: &mut Cx) {
        assert!(
            matches!(self.leaving, Some(Leaving::Move)),
            "queue {} resumes, but does not move",
            self.index
        );
        self.leaving = None;
        cx.kick(self.id);
    }

    /// The object of the queue's trace records.
    #[inline]
    pub const fn traced(&self) -> Traced {
        Traced::new(Layer::Frontend, self.id.trace_number())
    }

    /// The queue's thread.
    pub const fn thread(&self) -> ThreadId {
        self.thread
    }

    /// Takes the queue, which is not a root any more, off this reactor. Returns its thread, and a function that makes its parts
    /// on another reactor.
    pub fn pack(mut self, cx: &mut Cx) -> (Moving, MakeParts) {
        self.check_is_at_rest();
        assert_eq!(self.ring.in_flight(), 0, "queue {} leaves its reactor with chains in flight", self.index);
        assert!(!self.is_stopping(), "queue {} moves, but is to stop", self.index);
        let kick = self.unwatch(cx);
        let thread = cx.release_thread(self.thread);
        let (name, memory) = (thread.name().to_owned(), self.sgs.share_memory());
        let Self { index, ring, keeps_in_flight, log, call, alarm, errors, .. } = self;
        let parts = move |thread| Parts {
            name,
            index,
            thread,
            ring,
            keeps_in_flight,
            log,
            memory,
            call,
            kick,
            errors,
            alarm,
        };
        (thread, Box::new(parts))
    }

    fn raise(&mut self, trouble: Trouble) {
        if !std::mem::replace(&mut self.alarmed, true) {
            (self.alarm)(trouble);
        }
    }

    /// Ends the session if this guest's memory file was truncated. Checks that only after a page fault has hit a hole in some
    /// guest's file.
    #[inline]
    pub fn check_for_lost_memory(&mut self) {
        let faults = aryk_dma::faults();
        if faults != self.faults_seen {
            self.faults_seen = faults;
            if self.sgs.memory().is_poisoned() || self.ring.is_poisoned() {
                self.raise(Trouble::MemoryLost);
            }
        }
    }

    /// Disables kicks: the reactor polls the queue every turn.
    pub fn promoted(&mut self) {
        self.ring.disable_kicks();
        self.log_ring();
    }

    /// Enables kicks. Returns [`Armed::Busy`], and the reactor polls on, if chains wait that are `wanted`, or if the guest never
    /// kicks. A queue that can take no chain is polled again when a request completes.
    pub fn park(&mut self, wanted: bool) -> Armed {
        let polled_for_ever = self.watch.is_none();
        self.waits_for_room = !self.has_room();
        let may_take = self.takes_requests() && !self.waits_for_room;
        let stays = may_take && (self.ring.enable_kicks() && wanted || polled_for_ever);
        self.log_ring();
        self.check_invariants();
        if stays { Armed::Busy } else { Armed::Yes }
    }

    /// Removes the queue, which is stopping and has no requests in flight, from the reactor, and sends the successor's base.
    pub fn leave(&mut self, cx: &mut Cx) {
        self.check_is_at_rest();
        assert!(self.is_stopping(), "queue {} ends, but is not to stop", self.index);
        self.unregister(cx);
        cx.remove_root(self.id);
        cx.remove_thread(self.thread);
        if let Some(Leaving::Stop(stopped)) = self.leaving.take() {
            // The session may have ended.
            let _ = stopped.send(self.ring.base());
        }
    }

    /// Ends the watch of kicks, and removes the queue's name from the trace.
    pub fn unregister(&mut self, cx: &mut Cx) {
        drop(self.unwatch(cx));
    }

    /// Checks that no request of the queue is in flight.
    fn check_is_at_rest(&self) {
        self.check_invariants();
        let (requests, unlogged) = (self.sgs.in_use(), self.unlogged.len());
        assert!(
            requests == 0 && unlogged == 0,
            "queue {} has {requests} requests, {unlogged} unlogged",
            self.index
        );
    }

    /// Checks, in debug builds, what holds between two polls. Visits the whole ring, so long rings are not checked.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) || self.ring.size() > CHECKED_SIZE {
            return;
        }
        let Self { ring, sgs, unlogged, marked, waits_for_room, .. } = self;
        let (requests, chains) = (sgs.in_use(), ring.in_flight());
        assert!(requests <= chains, "{requests} slots are in use, but only {chains} chains are in flight");
        assert!(unlogged.len() <= requests as usize, "a chain that waits for the log keeps its slot");
        assert!(
            unlogged.is_empty() || *marked > 0,
            "no later poll completes the chains that wait for the log"
        );
        assert!(!waits_for_room || requests > 0, "a queue waits for room, but no request will complete");
    }

    fn unwatch(&mut self, cx: &mut Cx) -> Option<OwnedFd> {
        cx.name_object(Layer::Frontend, self.id.trace_number(), None);
        cx.unwatch(self.watch.take()?)
    }
}
