//! What all queues of a controller have in common: the guest's ring, its memory, and what is called or counted. Reactor context.

use aryk_dma::{MemTable, SgTable};
use aryk_reactor::{Cx, Layer, RootId, ThreadId, WatchId};
use aryk_vhost_device::{Alarm, Errors, Trouble};
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::{Chain, ConfigError, PopError, Virtqueue};
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

/// The line between a queue and its guest.
pub(crate) struct Line {
    pub id: RootId,
    thread: ThreadId,
    pub index: u16,
    pub ring: Virtqueue,
    pub keeps_in_flight: bool,
    log: Option<QueueLog>,
    pub sgs: SgTable,
    call: Option<EventFd>,
    watch: Option<WatchId>,
    alarmed: bool,
    alarm: Alarm,
    errors: Arc<Errors>,
    faults_seen: u64,
}

/// Scratch that all queues of a reactor share.
pub(crate) struct Scratch(pub RefCell<Chain>);

impl Default for Scratch {
    fn default() -> Self {
        Self(RefCell::new(Chain::new(aryk_virtqueue::SIZE_MAX)))
    }
}

impl Line {
    /// A line on the calling reactor, already kicked: there may be requests that came before.
    pub fn new(id: RootId, parts: Parts, cx: &mut Cx) -> std::io::Result<Self> {
        let watch = parts.kick.map(|fd| cx.watch(fd, id)).transpose()?;
        cx.name_object(Layer::Frontend, id.trace_number(), Some(&parts.name));
        cx.kick(id);
        // A guest that waits for a predecessor's call is not to wait for ever.
        if let Some(call) = &parts.call {
            cx.signal(call.as_fd());
        }
        Ok(Self {
            id,
            thread: parts.thread,
            index: parts.index,
            sgs: SgTable::new(parts.ring.size(), parts.memory),
            ring: parts.ring,
            keeps_in_flight: parts.keeps_in_flight,
            log: parts.log,
            call: parts.call,
            watch,
            alarmed: false,
            alarm: parts.alarm,
            errors: parts.errors,
            faults_seen: aryk_dma::faults(),
        })
    }

    /// The next chain, into `chain`; those that are none are given back.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Option<u16> {
        loop {
            match self.ring.pop(self.sgs.memory(), chain) {
                Ok(head) => return head,
                Err(PopError::Chain { head, .. }) => {
                    self.errors.bad_chains.fetch_add(1, Ordering::Relaxed);
                    self.ring.push_used(head, 0);
                }
                Err(PopError::Queue(error)) => {
                    self.errors.broken_queues.fetch_add(1, Ordering::Relaxed);
                    self.raise(Trouble::Broken(self.index, error));
                    return None;
                }
            }
        }
    }

    /// Gives back a chain whose answer has no place; its slot is in use.
    #[cold]
    pub fn give_up(&mut self, head: u16) {
        self.errors.unanswerable.fetch_add(1, Ordering::Relaxed);
        self.sgs.end(head);
        self.ring.push_used(head, 0);
    }

    /// Gives back a chain, of which so many bytes were written; its slot is in use.
    #[inline]
    pub fn give_back(&mut self, head: u16, written: u32) {
        if let Some(log) = &self.log {
            self.sgs.mark_dirty(head, &log.log);
        }
        self.sgs.end(head);
        self.ring.push_used(head, written);
    }

    /// Shows the guest what was given back.
    pub fn publish(&mut self, cx: &mut Cx) {
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

    /// The guest's memory has changed, and the ring lies here in it. Requests in flight keep the memory that they have.
    pub fn set_memory(&mut self, memory: Arc<MemTable>, rings: Rings) -> Result<(), ConfigError> {
        self.ring.set_areas(rings.desc, rings.driver, rings.device)?;
        self.sgs.set_memory(memory);
        Ok(())
    }

    /// Notes that the ring was written to.
    #[inline]
    pub fn log_ring(&self) {
        if let Some(log) = &self.log {
            log.mark_ring();
        }
    }

    pub const fn is_alarmed(&self) -> bool {
        self.alarmed
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

    /// Nobody kicks: it is polled for ever.
    pub const fn is_polled(&self) -> bool {
        self.watch.is_none()
    }

    /// Leaves the reactor; where a successor goes on.
    pub fn leave(&mut self, cx: &mut Cx) -> u32 {
        self.forget(cx);
        cx.remove_root(self.id);
        cx.remove_thread(self.thread);
        self.ring.base()
    }

    /// Is kicked no more, and known by no name.
    pub fn forget(&mut self, cx: &mut Cx) {
        if let Some(watch) = self.watch.take() {
            cx.unwatch(watch);
        }
        cx.name_object(Layer::Frontend, self.id.trace_number(), None);
    }
}
