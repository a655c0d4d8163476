//! One virtqueue of a controller, on its reactor: the guest's side, and one of three roles. Reactor context.

use crate::events::{Events, News};
use crate::manage::Manager;
use crate::moving::Duty;
use crate::requests::Requests;
use crate::wire::TARGETS;
use aryk_bdev::OpenError;
use aryk_reactor::{Armed, Cx, Root, RootId};
use aryk_scsi::Nexus;
use aryk_vhost_device::{DeviceQueue, GuestQueue, Move, Parts, StartError};
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
    pub(crate) guest: GuestQueue,
    pub(crate) role: Role,
    pub(crate) order: Option<Move<Self>>,
}

impl Queue {
    /// A queue for commands to these targets, on the calling reactor.
    ///
    /// # Errors
    /// A disk cannot be opened, or the kernel refuses.
    pub fn of_commands(id: RootId, parts: Parts, targets: Targets, cx: &mut Cx) -> Result<Self, StartError> {
        Self::begin(id, parts, Duty::Request, &targets, cx)
    }

    /// Opens a channel on each disk of a queue for commands.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub(crate) fn attach_all(&mut self, targets: &Targets, cx: &mut Cx) -> Result<(), OpenError> {
        for (target, nexus) in (0..).zip(targets) {
            let Some(nexus) = nexus else { continue };
            let (requests, guest) = self.requests();
            match requests.attach(target, Arc::clone(nexus), guest, cx) {
                // A disk that is just being removed is one that is gone.
                Ok(()) | Err(OpenError::Removed) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The commands of a request queue, and the guest's side.
    ///
    /// # Panics
    /// If it has another role.
    pub(crate) fn requests(&mut self) -> (&mut Requests, &mut GuestQueue) {
        let Role::Request(requests) = &mut self.role else { unreachable!("asked of request queues only") };
        (requests, &mut self.guest)
    }

    /// The task manager of the control queue, and the guest's side.
    ///
    /// # Panics
    /// If it has another role.
    pub(crate) fn manager(&mut self) -> (&mut Manager, &mut GuestQueue) {
        let Role::Control(manager) = &mut self.role else { unreachable!("asked of the control queue only") };
        (manager, &mut self.guest)
    }

    /// The guest is to be told of a target. Whether this queue will: one that is to stop will not.
    ///
    /// # Panics
    /// If it has another role than that.
    pub(crate) fn post(&mut self, news: News, target: u8, cx: &mut Cx) -> bool {
        let Role::Event(events) = &mut self.role else { unreachable!("asked of the event queue only") };
        let takes = !self.guest.is_stopping();
        if takes {
            events.post(news, target);
            cx.wake(self.guest.id);
        }
        takes
    }

    /// Takes new chains off the ring and starts them; whether there were any.
    fn take_requests(&mut self, cx: &mut Cx) -> bool {
        let Self { guest, role, .. } = self;
        match role {
            Role::Request(requests) => cx.without_wakes(guest.id, |cx| {
                guest.take(cx, |guest, head, chain, cx| requests.start(head, chain, guest, cx))
            }),
            Role::Control(manager) => {
                guest.take(cx, |guest, head, chain, cx| manager.start(head, chain, guest, cx))
            }
            Role::Event(events) => {
                let sent = events.send(guest);
                if sent && events.has_some() {
                    cx.wake(guest.id);
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
        if self.guest.sgs.in_use() > 0 {
            return;
        }
        if !self.guest.is_leaving() {
            return;
        }
        if let Role::Request(requests) = &mut self.role {
            requests.close();
        }
        if self.guest.is_stopping() {
            self.guest.leave(cx);
        } else if let Some(order) = &mut self.order {
            order.begin_transfer(self.guest.id, cx);
        }
    }
}

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut worked = self.guest.complete_unlogged(cx);
        worked |= self.take_requests(cx);
        if let Role::Request(requests) = &mut self.role {
            worked |= requests.take_outcomes(&mut self.guest, cx);
        }
        if worked {
            self.guest.publish(cx);
        }
        self.guest.check_for_lost_memory();
        self.settle(cx);
        worked
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.guest.promoted();
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        // Free buffers for events are nothing to do.
        let waits = matches!(&self.role, Role::Event(events) if !events.has_some());
        self.guest.park(!waits)
    }
}
