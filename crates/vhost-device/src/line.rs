//! What all queues have in common, block or SCSI: the guest's ring, its memory, and what is called or counted. Reactor context.
//!
//! A queue is a [`Line`] and what becomes of the chains that it brings. It names a chain by its head, which is also the
//! slot of its scatter list, from [`Line::take`] to [`Line::give_back`].

use crate::{Alarm, Errors, Pace, Trouble};
use aryk_crash_point::{Step, step};
use aryk_dma::{MemTable, SgTable};
use aryk_reactor::{Armed, Cx, Layer, Moving, RootId, ThreadId, Traced, WatchId};
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::{Chain, ConfigError, Popped, Virtqueue};
use futures_channel::oneshot;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Chains taken from the ring in one poll.
const BATCH: u32 = 64;

/// Descriptors looked at in one poll, and those of one chain more: chains may have very different lengths, and each
/// descriptor costs. One whose buffer crosses regions of memory counts as one for each of these, too.
const DESCRIPTORS: u32 = 1024;

/// Pieces of memory that requests in flight have in all, and those of one request more: a change of the guest's memory goes
/// through all of them at one time. The queue takes
/// no more chains meanwhile. With pages of 4 KiB they are 64 MiB.
const PIECES: u32 = 1 << 14;

/// Words of a dirty log, and pieces of lists, that are gone through in one poll, and those of one request more. A request
/// of 4 GiB takes as many.
const MARKS: u64 = 1 << 14;

/// How long requests have to complete once their queue is to stop. Then they are aborted, for the front-end, and with it
/// the guest, stands still while it waits for the queue's end.
pub const STOP_GRACE: Duration = Duration::from_secs(2);

/// The parts of a queue that is to start.
pub struct Parts {
    /// For the watchdog and the trace.
    pub name: String,
    /// Its place among the controller's queues.
    pub index: u16,
    /// Whose time its work is.
    pub thread: ThreadId,
    /// The guest's ring.
    pub ring: Virtqueue,
    /// Whether what is in flight outlives the queue: an in-flight region knows of it.
    pub keeps_in_flight: bool,
    /// Where it is noted what is written to the guest's memory, while the guest migrates.
    pub log: Option<QueueLog>,
    /// The guest's memory.
    pub memory: Arc<MemTable>,
    /// What the guest is called by; `None`: it polls.
    pub call: Option<EventFd>,
    /// `None`: the guest does not kick, the ring is to be polled.
    pub kick: Option<OwnedFd>,
    /// Where the guest's mistakes are counted.
    pub errors: Arc<Errors>,
    /// Who hears of trouble.
    pub alarm: Alarm,
}

/// What makes the parts of a queue anew, on a thread.
pub type MakeParts = Box<dyn FnOnce(ThreadId) -> Parts + Send>;

/// The line between a queue and its guest.
pub struct Line {
    /// The queue as a root of its reactor.
    pub id: RootId,
    thread: ThreadId,
    /// Its place among the controller's queues.
    pub index: u16,
    /// The guest's ring.
    pub ring: Virtqueue,
    /// Whether what is in flight outlives the queue.
    pub keeps_in_flight: bool,
    log: Option<QueueLog>,
    /// How many of [`MARKS`] this poll has used.
    marked: u64,
    /// What is given back in later polls, when it has been noted.
    owed: VecDeque<Owed>,
    /// What chains in flight move, by head.
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
    /// Chains that a predecessor left in flight, and that were not taken yet.
    replays: usize,
    /// It was parked because requests in flight have too many [`PIECES`]: nobody kicks it for the chains that wait.
    waits_for_room: bool,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("index", &self.index).finish_non_exhaustive()
    }
}

/// Why a queue takes no more requests.
enum Leaving {
    /// It stops.
    Stop(oneshot::Sender<u32>),
    /// It goes to another reactor.
    Move,
}

/// A chain whose request is over, and which is not given back yet: as [`Line::give_back`].
#[derive(Debug)]
struct Owed {
    head: u16,
    written: u32,
    touched: Range<u32>,
}

/// Scratch that all queues of a reactor share.
struct Scratch(RefCell<Chain>);

impl Default for Scratch {
    fn default() -> Self {
        Self(RefCell::new(Chain::default()))
    }
}

impl Line {
    /// A line on the calling reactor, already kicked: there may be requests that came before.
    ///
    /// # Errors
    /// The kick cannot be watched.
    pub fn new(id: RootId, parts: Parts, cx: &mut Cx) -> std::io::Result<Self> {
        let watch = parts.kick.map(|fd| cx.watch(fd, id)).transpose()?;
        cx.name_object(Layer::Frontend, id.trace_number(), Some(&parts.name));
        cx.kick(id);
        aryk_crash_point::step(aryk_crash_point::Step::Started);
        // A guest that waits for a predecessor's call is not to wait for ever.
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
            owed: VecDeque::new(),
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

    /// Takes new chains off the ring, of which `start` makes requests; whether there were any.
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
        let scratch = Rc::clone(&self.scratch);
        let mut chain = scratch.0.borrow_mut();
        let (mut taken, mut descriptors) = (0, 0);
        if self.ring.available().is_ok() {
            self.ring.prefetch_first(self.sgs.memory());
        }
        while taken < BATCH && descriptors < DESCRIPTORS && self.has_room() {
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
        }
        if taken > 0 {
            self.pace.found(now, taken);
        }
        taken > 0
    }

    /// Takes the next chain off the ring, if there is one; whether there was.
    pub fn take_one(&mut self, start: impl FnOnce(&mut Self, u16, &mut Chain)) -> bool {
        if !self.takes_requests() {
            return false;
        }
        let scratch = Rc::clone(&self.scratch);
        let mut chain = scratch.0.borrow_mut();
        match self.pop(&mut chain) {
            Popped::Chain(head) => start(self, head, &mut chain),
            popped => {
                if !self.refuse(popped) {
                    return false;
                }
            }
        }
        self.replays = self.replays.saturating_sub(1);
        true
    }

    /// Whether the chain that is being taken is one that a predecessor left in flight: what it asks for may have been done.
    #[inline]
    pub const fn is_replay(&self) -> bool {
        self.replays > 0
    }

    /// The next chain, into `chain`.
    // Always: as a function of its own it costs a SCSI host, whose requests are long, 30 instructions each.
    #[inline(always)]
    fn pop(&mut self, chain: &mut Chain) -> Popped {
        self.ring.pop(self.sgs.memory(), chain)
    }

    /// Handles what was popped and is no valid chain: completes a malformed chain, reports a broken queue. Returns whether
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

    /// Gives back a chain whose answer has no place; its slot is in use.
    #[cold]
    pub fn give_up(&mut self, head: u16) {
        self.errors.unanswerable.fetch_add(1, Ordering::Relaxed);
        self.sgs.end(head);
        self.ring.push_used(head, 0);
    }

    /// Completes a chain, of which `written` bytes were written; its slot is in use. `touched` receives the length of the
    /// slot's list, and returns the range of it that may have been written.
    // Always inlined: a device type completes requests in one place.
    #[inline(always)]
    pub fn give_back(&mut self, head: u16, written: u32, touched: impl FnOnce(u32) -> Range<u32>) {
        if self.log.is_some() && !self.note(head, written, touched(self.sgs.len_of(head))) {
            return;
        }
        self.sgs.end(head);
        self.ring.push_used(head, written);
    }

    /// As [`Line::give_back`], for a request whose list ends in a byte for its status, and with which the number of bytes that it
    /// writes was stored: `written` receives that number, and returns how many of them were written.
    #[inline(always)]
    pub fn answer(&mut self, head: u16, status: u8, written: impl FnOnce(u32) -> u32) {
        if self.log.is_some() {
            // Which bytes were written is noted before the slot is free.
            let most = self.sgs.put_last_byte(head, status);
            step(Step::Answered);
            return self.give_back_noted(head, written(most), most);
        }
        let most = self.sgs.end_with_last_byte(head, status);
        step(Step::Answered);
        self.ring.push_used(head, written(most));
    }

    /// Gives back a request that may have written the last `most` bytes of its list.
    #[cold]
    fn give_back_noted(&mut self, head: u16, written: u32, most: u32) {
        self.give_back(head, written, |all| all.saturating_sub(most)..all);
    }

    /// Notes what was written of a chain that is to be given back; whether that can be now.
    #[cold]
    fn note(&mut self, head: u16, written: u32, touched: Range<u32>) -> bool {
        let Some(log) = &self.log else { return true };
        let now = self.marked < MARKS;
        if now {
            self.marked += self.sgs.mark_dirty(head, touched, &log.log);
        } else {
            self.owed.push_back(Owed { head, written, touched });
        }
        now
    }

    /// At the beginning of each poll: gives back what an earlier poll had no time to note; whether there was any.
    #[inline]
    pub fn give_back_owed(&mut self, cx: &mut Cx) -> bool {
        self.marked > 0 && self.go_on_noting(cx)
    }

    #[cold]
    fn go_on_noting(&mut self, cx: &mut Cx) -> bool {
        self.marked = 0;
        let owed = self.owed.len();
        while self.marked < MARKS
            && let Some(Owed { head, written, touched }) = self.owed.pop_front()
        {
            self.give_back(head, written, |_| touched);
        }
        if !self.owed.is_empty() {
            cx.wake(self.id);
        }
        owed > self.owed.len()
    }

    /// Notes that the first `len` bytes that a chain lets be written were written; its slot does not know of them.
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

    /// Shows the guest what was given back.
    #[inline]
    pub fn publish(&mut self, cx: &mut Cx) {
        if !self.owed.is_empty() {
            cx.wake(self.id);
        }
        if self.waits_for_room && self.has_room() {
            self.waits_for_room = false;
            cx.kick(self.id);
        }
        let call_wanted = self.ring.publish();
        self.log_ring();
        if let Some(call) = self.call.as_ref().filter(|_| call_wanted) {
            cx.signal(call.as_fd());
        }
    }

    /// Has another descriptor to call the guest by. What it may have missed on the old one is made good.
    pub fn set_call(&mut self, call: Option<EventFd>, cx: &mut Cx) {
        self.call = call;
        if let Some(call) = &self.call {
            cx.signal(call.as_fd());
        }
    }

    /// From now on what is written to the guest's memory is noted there, or nowhere.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.log = log;
        // Something may have been written that nobody has noted.
        self.log_ring();
    }

    /// The guest's memory has changed, and the ring lies here in it. Requests in flight whose memory was removed keep it.
    ///
    /// # Errors
    /// It does not lie there as a ring must.
    pub fn set_memory(&mut self, memory: Arc<MemTable>, rings: Rings) -> Result<(), ConfigError> {
        self.ring.set_areas(rings.desc, rings.driver, rings.device)?;
        self.sgs.set_memory(memory);
        Ok(())
    }

    /// Memory that was removed from the guest is waited for: has `abort` ask whoever has them to give up the requests that
    /// use it, and tell which those are, by head. Those that are given up fail, for it was the guest that took its memory
    /// away.
    pub fn leave_removed_memory(&mut self, abort: impl FnOnce(&dyn Fn(u16) -> bool)) {
        let requests = self.sgs.old_users().count();
        if requests > 0 {
            tracing::warn!(queue = self.index, requests, "requests that use removed memory are aborted");
            abort(&|head| self.sgs.is_old_user(head));
        }
    }

    /// Notes that the ring was written to.
    #[inline]
    fn log_ring(&self) {
        if let Some(log) = &self.log {
            log.mark_ring();
        }
    }

    /// Whether requests in flight have so few pieces that there may be more.
    #[inline]
    const fn has_room(&self) -> bool {
        self.sgs.long_pieces() < PIECES
    }

    /// Whether new chains are looked for.
    pub const fn takes_requests(&self) -> bool {
        self.leaving.is_none() && !self.alarmed
    }

    /// Takes requests no more; what [`Line::leave`] will say.
    pub fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        let (sender, receiver) = oneshot::channel();
        self.leaving = Some(Leaving::Stop(sender));
        cx.wake(self.id);
        receiver
    }

    /// Whether it is to stop.
    pub const fn is_stopping(&self) -> bool {
        matches!(self.leaving, Some(Leaving::Stop(_)))
    }

    /// Whether it is to stop, or to go to another reactor.
    #[inline]
    pub const fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Takes requests no more, to go to another reactor; whether it will.
    pub fn begin_move(&mut self) -> bool {
        let goes = self.takes_requests();
        if goes {
            self.leaving = Some(Leaving::Move);
        }
        goes
    }

    /// Takes requests again, for it does not move.
    pub fn go_on(&mut self, cx: &mut Cx) {
        self.leaving = None;
        cx.kick(self.id);
    }

    /// What its trace records are about.
    #[inline]
    pub const fn traced(&self) -> Traced {
        Traced::new(Layer::Frontend, self.id.trace_number())
    }

    /// Its thread.
    pub const fn thread(&self) -> ThreadId {
        self.thread
    }

    /// Leaves the reactor for another, where it is a root no more: its thread, and what makes it anew on that.
    pub fn pack(mut self, cx: &mut Cx) -> (Moving, MakeParts) {
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

    /// If a page fault somewhere has hit a hole in somebody's memory file: was it in ours?
    #[inline]
    pub fn look_for_lost_memory(&mut self) {
        let faults = aryk_dma::faults();
        if faults != self.faults_seen {
            self.faults_seen = faults;
            if self.sgs.memory().is_poisoned() || self.ring.is_poisoned() {
                self.raise(Trouble::MemoryLost);
            }
        }
    }

    /// It is polled, and the guest need not kick.
    pub fn promoted(&mut self) {
        self.ring.disable_kicks();
        self.log_ring();
    }

    /// It is polled no more, unless chains wait that are `wanted`, or the guest never kicks. One that can take none is polled
    /// when a request is given back.
    pub fn park(&mut self, wanted: bool) -> Armed {
        let polled_for_ever = self.watch.is_none();
        self.waits_for_room = !self.has_room();
        let may_take = self.takes_requests() && !self.waits_for_room;
        let stays = may_take && (self.ring.enable_kicks() && wanted || polled_for_ever);
        self.log_ring();
        if stays { Armed::Busy } else { Armed::Yes }
    }

    /// Leaves the reactor, and says where a successor goes on. It is to stop, and nothing runs.
    pub fn leave(&mut self, cx: &mut Cx) {
        self.forget(cx);
        cx.remove_root(self.id);
        cx.remove_thread(self.thread);
        if let Some(Leaving::Stop(stopped)) = self.leaving.take() {
            // The session may have gone.
            let _ = stopped.send(self.ring.base());
        }
    }

    /// Is kicked no more, and known by no name.
    pub fn forget(&mut self, cx: &mut Cx) {
        drop(self.unwatch(cx));
    }

    fn unwatch(&mut self, cx: &mut Cx) -> Option<OwnedFd> {
        cx.name_object(Layer::Frontend, self.id.trace_number(), None);
        cx.unwatch(self.watch.take()?)
    }
}
