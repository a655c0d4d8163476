//! One virtqueue of a controller on its reactor: the guest's ring and one of three roles. Reactor context.

use crate::events::{Events, TargetEvent};
use crate::manage::Manager;
use crate::moving::PortableRole;
use crate::requests::Requests;
use crate::wire::TARGETS;
use aryk_bdev::OpenError;
use aryk_reactor::{Armed, Cx, Root, RootId};
use aryk_scsi::Nexus;
use aryk_vhost_device::{DeviceQueue, GuestQueue, Move, Parts, StartError};
use std::sync::Arc;

/// Disks by target.
pub type Targets = [Option<Arc<Nexus>>; TARGETS as usize];

/// The role of a queue.
pub(crate) enum Role {
    /// Task management.
    Control(Manager),
    /// Events for the guest.
    Event(Events),
    /// Commands.
    Request(Requests),
}

/// A virtqueue. A root of its reactor from start to stop.
pub struct Queue {
    pub(crate) guest: GuestQueue,
    pub(crate) role: Role,
    pub(crate) order: Option<Move<Self>>,
}

impl Queue {
    /// Creates a request queue for these targets on the calling reactor.
    ///
    /// # Errors
    /// A disk cannot be opened, or the kernel reports an error.
    pub fn of_commands(id: RootId, parts: Parts, targets: Targets, cx: &mut Cx) -> Result<Self, StartError> {
        Self::begin(id, parts, PortableRole::Request, &targets, cx)
    }

    /// Opens a channel on each disk of a queue for commands.
    ///
    /// # Errors
    /// A disk cannot be opened.
    pub(crate) fn attach_all(&mut self, targets: &Targets, cx: &mut Cx) -> Result<(), OpenError> {
        for (target, nexus) in (0..).zip(targets) {
            let Some(nexus) = nexus else { continue };
            let (requests, guest) = self.requests();
            match requests.attach(target, Arc::clone(nexus), guest, cx) {
                // A disk that is being removed counts as removed.
                Ok(()) | Err(OpenError::Removed) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The commands of a request queue, and its ring.
    ///
    /// # Panics
    /// The queue is not a request queue.
    pub(crate) fn requests(&mut self) -> (&mut Requests, &mut GuestQueue) {
        let Role::Request(requests) = &mut self.role else {
            unreachable!("only request queues have commands")
        };
        (requests, &mut self.guest)
    }

    /// The task manager of the control queue, and its ring.
    ///
    /// # Panics
    /// The queue is not the control queue.
    pub(crate) fn manager(&mut self) -> (&mut Manager, &mut GuestQueue) {
        let Role::Control(manager) = &mut self.role else {
            unreachable!("only the control queue has a manager")
        };
        (manager, &mut self.guest)
    }

    /// Adds an event of a target. Returns `false` if this queue is stopping and will not send it.
    ///
    /// # Panics
    /// The queue is not the event queue.
    pub(crate) fn post(&mut self, event: TargetEvent, target: u8, cx: &mut Cx) -> bool {
        let Role::Event(events) = &mut self.role else { unreachable!("only the event queue sends events") };
        let takes = !self.guest.is_stopping();
        if takes {
            events.post(event, target);
            cx.wake(self.guest.id);
        }
        takes
    }

    /// Takes new chains from the ring and starts them. Returns whether there were any.
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

    /// Carries out what had to wait for commands to complete: the stop or move of the queue, and the end of detached disks.
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
        // While no event waits, new buffers of the guest need no wake-up.
        let waits = matches!(&self.role, Role::Event(events) if !events.has_some());
        self.guest.park(!waits)
    }
}
