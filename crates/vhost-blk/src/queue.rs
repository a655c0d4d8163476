//! One virtqueue of one disk, on its reactor: from the guest's ring to the disk's channel and back. Reactor context.
//!
//! A request is named by the head of its descriptor chain, all the way: it is the slot of its scatter list, the tag of its [`aryk_bdev::Io`], and the
//! id of its used element. The ring sees to it that no head is in flight twice.

use crate::request::{Answer, Disk, Parsed, Unanswerable, write_status};
use aryk_bdev::{BdevChannel, Completion, Status, Tag};
use aryk_crash_point::{Step, step};
use aryk_dma::{MemTable, SgTable};
use aryk_reactor::{Armed, Cx, Layer, Point, Root, RootId, ThreadId, WatchId};
use aryk_vhost_device::{Alarm, Errors, Pace, Trouble};
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::{Chain, ConfigError, PopError, Virtqueue};
use futures_channel::oneshot;
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Requests taken from the ring in one poll.
const BATCH: u32 = 64;

/// How long requests have to complete once their queue is to stop. Then they are aborted, for the front-end, and with it the guest, stands still
/// while it waits for the queue's end.
const STOP_GRACE: Duration = Duration::from_secs(2);

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
    /// How requests are to be read.
    pub disk: Disk,
    /// What the guest is called by; `None`: it polls.
    pub call: Option<EventFd>,
    /// `None`: the guest does not kick, the ring is to be polled.
    pub kick: Option<OwnedFd>,
    /// Where the guest's mistakes are counted.
    pub errors: Arc<Errors>,
    /// Who hears of trouble.
    pub alarm: Alarm,
}

/// The queue. A root of its reactor from start to stop.
pub struct Queue {
    id: RootId,
    thread: ThreadId,
    index: u16,
    ring: Virtqueue,
    keeps_in_flight: bool,
    log: Option<QueueLog>,
    sgs: SgTable,
    disk: Disk,
    /// `None` when the disk has been removed: requests fail.
    channel: Option<BdevChannel>,
    /// Bytes that each request in flight writes to its guest, status included, by head.
    written: Box<[u32]>,
    completions: Vec<Completion>,
    scratch: Rc<Scratch>,
    call: Option<EventFd>,
    watch: Option<WatchId>,
    pace: Pace,
    closing_channel: bool,
    stopping: Option<oneshot::Sender<u32>>,
    /// Requests are being aborted so that it can stop.
    giving_up: bool,
    alarmed: bool,
    alarm: Alarm,
    errors: Arc<Errors>,
    faults_seen: u64,
}

/// Scratch that all queues of a reactor share.
struct Scratch(RefCell<Chain>);

impl Default for Scratch {
    fn default() -> Self {
        Self(RefCell::new(Chain::new(aryk_virtqueue::SIZE_MAX)))
    }
}

impl Queue {
    /// A queue on the calling reactor, already kicked: there may be requests that came before.
    pub fn start(
        id: RootId,
        parts: Parts,
        channel: Option<BdevChannel>,
        cx: &mut Cx,
    ) -> std::io::Result<Self> {
        let watch = parts.kick.map(|fd| cx.watch(fd, id)).transpose()?;
        let size = parts.ring.size();
        cx.name_object(Layer::Frontend, id.trace_number(), Some(&parts.name));
        cx.kick(id);
        step(Step::Started);
        // A guest that waits for a predecessor's call is not to wait for ever.
        if let Some(call) = &parts.call {
            cx.signal(call.as_fd());
        }
        Ok(Self {
            id,
            thread: parts.thread,
            index: parts.index,
            sgs: SgTable::new(size, parts.memory),
            ring: parts.ring,
            keeps_in_flight: parts.keeps_in_flight,
            log: parts.log,
            disk: parts.disk,
            channel,
            written: vec![0; size.into()].into(),
            completions: Vec::with_capacity(size.into()),
            scratch: cx.local_state::<Scratch>(),
            call: parts.call,
            watch,
            pace: Pace::new(cx.now()),
            closing_channel: false,
            stopping: None,
            giving_up: false,
            alarmed: false,
            alarm: parts.alarm,
            errors: parts.errors,
            faults_seen: aryk_dma::faults(),
        })
    }

    /// Takes requests no more; when the last has completed, the queue is gone and its base known: where a successor goes on. A disk that does not
    /// complete them within [`STOP_GRACE`] is asked to give them up; those that it does then stay in flight for the successor, if an in-flight region
    /// knows of them, and fail otherwise.
    pub fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        let (sender, receiver) = oneshot::channel();
        self.stopping = Some(sender);
        cx.wake(self.id);
        let id = self.id;
        cx.call_at(cx.now().after(STOP_GRACE), move |cx| {
            if let Some(queue) = cx.root::<Self>(id) {
                let mut queue = queue.borrow_mut();
                queue.giving_up = queue.keeps_in_flight;
                queue.abort_all(cx);
            }
        });
        receiver
    }

    /// Asks the disk to give up what it has not completed.
    pub fn abort_all(&mut self, cx: &mut Cx) {
        let requests = self.sgs.in_use();
        if let Some(channel) = self.channel.as_mut().filter(|_| requests > 0) {
            tracing::warn!(queue = self.index, requests, "the disk is slow: requests are aborted");
            channel.abort_all(cx);
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
    pub fn set_memory(&mut self, memory: Arc<MemTable>, rings: Rings) -> Result<(), ConfigError> {
        self.ring.set_areas(rings.desc, rings.driver, rings.device)?;
        self.sgs.set_memory(memory);
        Ok(())
    }

    /// Memory that was removed from the guest is waited for. The disk is asked to give up what uses it; what it does give up fails, for it was the
    /// guest that took its memory away.
    pub fn leave_removed_memory(&mut self, cx: &mut Cx) {
        let heads: Vec<u16> = self.sgs.old_users().collect();
        if let Some(channel) = self.channel.as_mut().filter(|_| !heads.is_empty()) {
            let requests = heads.len();
            tracing::warn!(queue = self.index, requests, "requests that use removed memory are aborted");
            heads.iter().for_each(|&head| channel.abort(Tag(head.into()), cx));
        }
    }

    /// The disk is being removed: what runs completes, the rest fails.
    pub fn lose_disk(&mut self, cx: &mut Cx) {
        self.closing_channel = true;
        cx.wake(self.id);
    }

    /// Takes new requests off the ring and starts them; whether there were any.
    fn take_requests(&mut self, cx: &mut Cx) -> bool {
        if !self.takes_requests() {
            return false;
        }
        let now = cx.now();
        if now < self.pace.next_look() {
            cx.stay_awake_until(self.pace.next_look());
            return false;
        }
        let scratch = Rc::clone(&self.scratch);
        let mut chain = scratch.0.borrow_mut();
        let mut taken = 0;
        if self.ring.available().is_ok() {
            self.ring.prefetch_first(self.sgs.memory());
        }
        while taken < BATCH {
            match self.ring.pop(self.sgs.memory(), &mut chain) {
                Ok(Some(head)) => self.start_request(head, &mut chain, cx),
                Ok(None) => break,
                Err(PopError::Chain { head, .. }) => {
                    self.errors.bad_chains.fetch_add(1, Ordering::Relaxed);
                    self.ring.push_used(head, 0);
                }
                Err(PopError::Queue(error)) => {
                    self.errors.broken_queues.fetch_add(1, Ordering::Relaxed);
                    self.raise(Trouble::Broken(self.index, error));
                    break;
                }
            }
            taken += 1;
            self.ring.prefetch_next(self.sgs.memory());
        }
        if taken > 0 {
            self.pace.found(now, taken);
        }
        taken > 0
    }

    const fn takes_requests(&self) -> bool {
        self.stopping.is_none() && !self.alarmed
    }

    #[inline]
    fn start_request(&mut self, head: u16, chain: &mut Chain, cx: &mut Cx) {
        match self.disk.parse(chain, head, &mut self.sgs) {
            Ok(Parsed::Submit(io)) => {
                self.written[usize::from(head)] =
                    1 + if io.op == aryk_bdev::Op::Read { io.data.len() } else { 0 };
                cx.trace(Layer::Frontend, Point::Submit, self.id.trace_number(), head.into());
                match &mut self.channel {
                    Some(channel) if !self.closing_channel => channel.submit(io, cx),
                    _ => self.finish(head, Answer::IoError),
                }
                step(Step::Submitted);
            }
            Ok(Parsed::Answer { answer, written }) => {
                if let Some(log) = &self.log {
                    chain.writable().iter().for_each(|piece| log.log.mark(piece.addr, piece.len.into()));
                }
                self.written[usize::from(head)] = 1 + written;
                self.finish(head, answer);
            }
            Err(Unanswerable) => {
                self.errors.unanswerable.fetch_add(1, Ordering::Relaxed);
                self.sgs.end(head);
                self.ring.push_used(head, 0);
            }
        }
    }

    #[inline]
    fn finish(&mut self, head: u16, answer: Answer) {
        write_status(self.sgs.sgl(head), answer);
        step(Step::Answered);
        if let Some(log) = &self.log {
            self.sgs.mark_dirty(head, &log.log);
        }
        self.sgs.end(head);
        let written = if answer == Answer::Ok { self.written[usize::from(head)] } else { 1 };
        self.ring.push_used(head, written);
    }

    /// Gives back what the disk has completed; whether there was any.
    fn take_completions(&mut self, cx: &mut Cx) -> bool {
        let Some(channel) = &mut self.channel else { return false };
        let mut completions = std::mem::take(&mut self.completions);
        // All that a pending wake-up is about is looked at now; what the poll itself sends on may wake us again.
        cx.clear_wake(self.id);
        channel.poll(cx, &mut completions);
        let worked = !completions.is_empty();
        for Completion { tag, status } in completions.drain(..) {
            let head = tag.0 as u16;
            cx.trace(Layer::Frontend, Point::Complete, self.id.trace_number(), head.into());
            if status == Status::Aborted && self.giving_up {
                self.sgs.end(head);
                continue;
            }
            step(Step::Completed);
            self.finish(head, status.into());
        }
        self.completions = completions;
        worked
    }

    /// Shows the guest what was given back.
    fn publish(&mut self, cx: &mut Cx) {
        let call_wanted = self.ring.publish();
        self.log_ring();
        if let Some(call) = self.call.as_ref().filter(|_| call_wanted) {
            cx.signal(call.as_fd());
        }
    }

    /// Notes that the ring was written to.
    #[inline]
    fn log_ring(&self) {
        if let Some(log) = &self.log {
            log.mark_ring();
        }
    }

    fn raise(&mut self, trouble: Trouble) {
        if !std::mem::replace(&mut self.alarmed, true) {
            (self.alarm)(trouble);
        }
    }

    /// A page fault somewhere has hit a hole in somebody's memory file: was it in ours?
    #[cold]
    fn look_for_lost_memory(&mut self, faults: u64) {
        self.faults_seen = faults;
        if self.sgs.memory().is_poisoned() || self.ring.is_poisoned() {
            self.raise(Trouble::MemoryLost);
        }
    }

    /// What waits for requests to complete: stopping, and leaving the disk.
    fn settle(&mut self, cx: &mut Cx) {
        if self.sgs.in_use() > 0 {
            return;
        }
        if (self.closing_channel || self.stopping.is_some())
            && let Some(channel) = self.channel.take()
        {
            drop(channel);
        }
        if let Some(stopped) = self.stopping.take() {
            if let Some(watch) = self.watch.take() {
                cx.unwatch(watch);
            }
            cx.name_object(Layer::Frontend, self.id.trace_number(), None);
            cx.remove_root(self.id);
            cx.remove_thread(self.thread);
            let _ = stopped.send(self.ring.base());
        }
    }

    const fn must_settle(&self) -> bool {
        self.stopping.is_some() || self.closing_channel
    }
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut worked = self.take_requests(cx);
        worked |= self.take_completions(cx);
        if worked {
            self.publish(cx);
        }
        let faults = aryk_dma::faults();
        if faults != self.faults_seen {
            self.look_for_lost_memory(faults);
        }
        if self.must_settle() {
            self.settle(cx);
        }
        worked
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.ring.disable_kicks();
        self.log_ring();
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        let polled_for_ever = self.watch.is_none();
        let stays = self.takes_requests() && (self.ring.enable_kicks() || polled_for_ever);
        self.log_ring();
        if stays { Armed::Busy } else { Armed::Yes }
    }
}

#[cfg(test)]
mod tests;
