//! One virtqueue of a controller, on its reactor: a line to the guest, and one of three roles. Reactor context.

use crate::controller::StartError;
use crate::events::{Events, News, Waiting};
use crate::manage::Manager;
use crate::requests::Requests;
use crate::wire::TARGETS;
use aryk_bdev::OpenError;
use aryk_dma::MemTable;
use aryk_reactor::{Armed, Cx, Root, RootId};
use aryk_scsi::Nexus;
use aryk_vhost_device::{Line, Move, Parts, STOP_GRACE};
use aryk_vhost_user::{EventFd, QueueLog, Rings};
use aryk_virtqueue::ConfigError;
use futures_channel::oneshot;
use std::sync::Arc;

/// Disks by target.
pub type Targets = [Option<Arc<Nexus>>; TARGETS as usize];

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
    pub(crate) line: Line,
    pub(crate) role: Role,
    pub(crate) order: Option<Move<Self>>,
}

impl Queue {
    /// A queue for commands to these targets, on the calling reactor.
    ///
    /// # Errors
    /// A disk cannot be opened, or the kernel refuses.
    pub fn of_commands(id: RootId, parts: Parts, targets: Targets, cx: &mut Cx) -> Result<Self, StartError> {
        let requests = Requests::new(parts.ring.size());
        let mut queue = Self::start(id, parts, Role::Request(requests), cx)?;
        if let Err(error) = queue.attach_all(&targets, cx) {
            queue.abandon(cx);
            return Err(error.into());
        }
        Ok(queue)
    }

    /// Opens a channel on each disk of a queue for commands.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub(crate) fn attach_all(&mut self, targets: &Targets, cx: &mut Cx) -> Result<(), OpenError> {
        for (target, nexus) in (0..).zip(targets) {
            let Some(nexus) = nexus else { continue };
            let (requests, line) = self.requests();
            match requests.attach(target, Arc::clone(nexus), line, cx) {
                // A disk that is just being removed is one that is gone.
                Ok(()) | Err(OpenError::Removed) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// A queue on the calling reactor.
    pub(crate) fn start(id: RootId, parts: Parts, role: Role, cx: &mut Cx) -> std::io::Result<Self> {
        Ok(Self { line: Line::new(id, parts, cx)?, role, order: None })
    }

    /// Takes requests no more; when the last has completed, the queue is gone and its base known: where a successor goes
    /// on. A disk that does not complete them within [`STOP_GRACE`] is asked to give them up; those that it does then stay
    /// in flight for the successor, if an in-flight region knows of them, and fail otherwise.
    pub fn stop(&mut self, cx: &mut Cx) -> oneshot::Receiver<u32> {
        let (receiver, id) = (self.line.stop(cx), self.line.id);
        cx.call_at(cx.now().after(STOP_GRACE), move |cx| {
            if let Some(queue) = cx.root::<Self>(id) {
                queue.borrow_mut().give_up(cx);
            }
        });
        receiver
    }

    fn give_up(&mut self, cx: &mut Cx) {
        match &mut self.role {
            Role::Control(manager) => manager.give_up(&mut self.line, cx),
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
        let takes = !self.line.is_stopping();
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
    fn abandon(&mut self, cx: &mut Cx) {
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

    /// As [`Line::leave_removed_memory`]. Task management is answered soon, and buffers for events are taken when there are some.
    pub fn leave_removed_memory(&mut self, cx: &mut Cx) {
        let Self { line, role, .. } = self;
        if let Role::Request(requests) = role {
            line.leave_removed_memory(|uses_it| requests.abort_those(uses_it, cx));
        }
    }

    /// Takes new chains off the ring and starts them; whether there were any.
    fn take_requests(&mut self, cx: &mut Cx) -> bool {
        let Self { line, role, .. } = self;
        match role {
            Role::Request(requests) => {
                line.take(cx, |line, head, chain, cx| requests.start(head, chain, line, cx))
            }
            Role::Control(manager) => {
                line.take(cx, |line, head, chain, cx| manager.start(head, chain, line, cx))
            }
            Role::Event(events) => {
                let sent = events.send(line);
                if sent && events.has_some() {
                    cx.wake(line.id);
                }
                sent
            }
        }
    }

    /// What waits for requests to complete: stopping, moving, and disks that were taken away.
    fn settle(&mut self, cx: &mut Cx) {
        if let Role::Request(requests) = &mut self.role {
            requests.settle();
        }
        if self.line.sgs.in_use() > 0 {
            return;
        }
        if !self.line.is_leaving() {
            return;
        }
        if let Role::Request(requests) = &mut self.role {
            requests.close();
        }
        if self.line.is_stopping() {
            self.line.leave(cx);
        } else if let Some(order) = &mut self.order {
            order.is_quiet(self.line.id, cx);
        }
    }
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut worked = self.line.give_back_owed(cx);
        worked |= self.take_requests(cx);
        if let Role::Request(requests) = &mut self.role {
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
        self.line.promoted();
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        // Free buffers for events are nothing to do.
        let waits = matches!(&self.role, Role::Event(events) if !events.has_some());
        self.line.park(!waits)
    }
}
