//! One virtqueue of a controller, on its reactor: a line to the guest, and one of three roles. Reactor context.

use crate::events::{Events, News, Waiting};
use crate::line::{Line, Parts, Scratch};
use crate::manage::Manager;
use crate::requests::Requests;
use aryk_crash_point::{Step, step};
use aryk_dma::MemTable;
use aryk_reactor::{Armed, Cx, Root, RootId};
use aryk_vhost_device::Pace;
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::ConfigError;
use futures_channel::oneshot;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Chains taken from the ring in one poll.
const BATCH: u32 = 64;

/// How long requests have to complete once their queue is to stop. Then they are aborted, for the front-end, and with it the guest, stands still
/// while it waits for the queue's end.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// What a queue is for.
pub(crate) enum Role {
    /// Task management.
    Control(Manager),
    /// What guests are told unasked.
    Event(Events),
    /// Commands.
    Request(Requests),
}

/// The queue. A root of its reactor from start to stop.
pub struct Queue {
    line: Line,
    role: Role,
    pace: Pace,
    scratch: Rc<Scratch>,
    stopping: Option<oneshot::Sender<u32>>,
}

impl Queue {
    /// A queue on the calling reactor.
    pub(crate) fn start(id: RootId, parts: Parts, role: Role, cx: &mut Cx) -> std::io::Result<Self> {
        let line = Line::new(id, parts, cx)?;
        step(Step::Started);
        let (pace, scratch) = (Pace::new(cx.now()), cx.local_state::<Scratch>());
        Ok(Self { line, role, pace, scratch, stopping: None })
    }

    /// Takes requests no more; when the last has completed, the queue is gone and its base known: where a successor goes on. A disk that does not
    /// complete them within [`STOP_GRACE`] is asked to give them up; those that it does then stay in flight for the successor, if an in-flight region
    /// knows of them, and fail otherwise.
    pub fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        let (sender, receiver) = oneshot::channel();
        self.stopping = Some(sender);
        let id = self.line.id;
        cx.wake(id);
        cx.call_at(cx.now().after(STOP_GRACE), move |cx| {
            if let Some(queue) = cx.root::<Self>(id) {
                queue.borrow_mut().give_up(cx);
            }
        });
        receiver
    }

    fn give_up(&mut self, cx: &mut Cx) {
        match &mut self.role {
            Role::Control(manager) => manager.give_up(&mut self.line),
            Role::Event(_) => {}
            Role::Request(requests) => requests.give_up(&self.line, cx),
        }
        self.line.publish(cx);
        cx.wake(self.line.id);
    }

    /// The commands' side of it, and its line.
    ///
    /// # Panics
    /// If it has another role.
    pub(crate) fn requests(&mut self) -> (&mut Requests, &mut Line) {
        let Role::Request(requests) = &mut self.role else { unreachable!("asked of request queues only") };
        (requests, &mut self.line)
    }

    /// The task management's side of it, and its line.
    ///
    /// # Panics
    /// If it has another role.
    pub(crate) fn manager(&mut self) -> (&mut Manager, &mut Line) {
        let Role::Control(manager) = &mut self.role else { unreachable!("asked of the control queue only") };
        (manager, &mut self.line)
    }

    /// The guest is to be told of a target. Whether this queue will: one that is to stop will not.
    ///
    /// # Panics
    /// If it has another role than that.
    pub(crate) fn post(&mut self, news: News, target: u8, cx: &mut Cx) -> bool {
        let Role::Event(events) = &mut self.role else { unreachable!("asked of the event queue only") };
        let takes = self.stopping.is_none();
        if takes {
            events.post(news, target);
            cx.wake(self.line.id);
        }
        takes
    }

    /// What the guest has not been told, if that is the queue's role.
    pub(crate) fn take_waiting(&mut self) -> Option<Waiting> {
        match &mut self.role {
            Role::Event(events) => Some(events.take_waiting()),
            Role::Control(_) | Role::Request(_) => None,
        }
    }

    /// It has just been started, but cannot be: lets go of everything but its place on the reactor.
    pub(crate) fn abandon(&mut self, cx: &mut Cx) {
        if let Role::Request(requests) = &mut self.role {
            requests.close();
        }
        self.line.forget(cx);
    }

    /// As [`Line::set_call`].
    pub fn set_call(&mut self, call: Option<EventFd>, cx: &mut Cx) {
        self.line.set_call(call, cx);
    }

    /// As [`Line::set_log`].
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.line.set_log(log);
    }

    /// As [`Line::set_memory`].
    pub fn set_memory(&mut self, memory: Arc<MemTable>, rings: Rings) -> Result<(), ConfigError> {
        self.line.set_memory(memory, rings)
    }

    const fn takes_requests(&self) -> bool {
        self.stopping.is_none() && !self.line.is_alarmed()
    }

    /// Takes new chains off the ring and starts them; whether there were any.
    fn take_requests(&mut self, cx: &mut Cx) -> bool {
        if !self.takes_requests() {
            return false;
        }
        if let Role::Event(events) = &mut self.role {
            let scratch = Rc::clone(&self.scratch);
            let mut chain = scratch.0.borrow_mut();
            return events.send(&mut self.line, &mut chain);
        }
        let now = cx.now();
        if now < self.pace.next_look() {
            cx.stay_awake_until(self.pace.next_look());
            return false;
        }
        let scratch = Rc::clone(&self.scratch);
        let mut chain = scratch.0.borrow_mut();
        let mut taken = 0;
        if self.line.ring.available().is_ok() {
            self.line.ring.prefetch_first(self.line.sgs.memory());
        }
        while taken < BATCH
            && let Some(head) = self.line.pop(&mut chain)
        {
            match &mut self.role {
                Role::Request(requests) => requests.start(head, &mut chain, &mut self.line, cx),
                Role::Control(manager) => manager.start(head, &mut chain, &mut self.line, cx),
                Role::Event(_) => unreachable!("seen above"),
            }
            taken += 1;
            self.line.ring.prefetch_next(self.line.sgs.memory());
        }
        if taken > 0 {
            self.pace.found(now, taken);
        }
        taken > 0
    }

    /// What waits for requests to complete: stopping, and disks that were taken away.
    fn settle(&mut self, cx: &mut Cx) {
        if let Role::Request(requests) = &mut self.role {
            requests.settle();
        }
        if self.line.sgs.in_use() > 0 {
            return;
        }
        if let Some(stopped) = self.stopping.take() {
            if let Role::Request(requests) = &mut self.role {
                requests.close();
            }
            let _ = stopped.send(self.line.leave(cx));
        }
    }
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut worked = self.take_requests(cx);
        if let Role::Request(requests) = &mut self.role {
            // All that a pending wake-up is about is looked at now; what the poll itself sends on may wake us again.
            cx.clear_wake(self.line.id);
            worked |= requests.take_outcomes(&mut self.line, cx);
        }
        if worked {
            self.line.publish(cx);
        }
        self.line.look_for_lost_memory();
        self.settle(cx);
        worked
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.line.ring.disable_kicks();
        self.line.log_ring();
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        // Free buffers for events are nothing to do.
        let waits = matches!(&self.role, Role::Event(events) if !events.has_some());
        let stays =
            self.takes_requests() && (self.line.ring.enable_kicks() && !waits || self.line.is_polled());
        self.line.log_ring();
        if stays { Armed::Busy } else { Armed::Yes }
    }
}
