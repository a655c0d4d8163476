//! The queue's implementation of [`DeviceQueue`], by which the code shared by all devices starts, moves and stops it. Reactor
//! context.

use crate::events::{Events, PendingEvents};
use crate::manage::Manager;
use crate::queue::{Queue, Role, Targets};
use crate::requests::Requests;
use aryk_bdev::OpenError;
use aryk_reactor::{Cx, RootId};
use aryk_vhost_device::{DeviceQueue, GuestQueue, Move, Parts};

/// A queue's role without its channels. A request queue opens its channels again on each reactor.
pub enum PortableRole {
    Control(Manager),
    Event(Events),
    Request,
}

impl DeviceQueue for Queue {
    type Role = PortableRole;
    type Disks = Targets;
    type Left = Option<PendingEvents>;

    fn new(id: RootId, parts: Parts, duty: PortableRole, cx: &mut Cx) -> std::io::Result<Self> {
        let role = match duty {
            PortableRole::Control(manager) => Role::Control(manager),
            PortableRole::Event(events) => Role::Event(events),
            PortableRole::Request => Role::Request(Requests::new(parts.ring.size())),
        };
        Ok(Self { guest: GuestQueue::new(id, parts, cx)?, role, order: None })
    }

    fn open(&mut self, targets: &Targets, cx: &mut Cx) -> Result<(), OpenError> {
        match self.role {
            Role::Request(_) => self.attach_all(targets, cx),
            Role::Control(_) | Role::Event(_) => Ok(()),
        }
    }

    fn close(&mut self) {
        if let Role::Request(requests) = &mut self.role {
            requests.close();
        }
    }

    fn guest(&mut self) -> &mut GuestQueue {
        &mut self.guest
    }

    fn order(&mut self) -> &mut Option<Move<Self>> {
        &mut self.order
    }

    fn into_parts(self) -> (GuestQueue, PortableRole) {
        let duty = match self.role {
            Role::Control(manager) => PortableRole::Control(manager),
            Role::Event(events) => PortableRole::Event(events),
            Role::Request(_) => PortableRole::Request,
        };
        (self.guest, duty)
    }

    fn give_up(&mut self, cx: &mut Cx) {
        match &mut self.role {
            Role::Control(manager) => manager.give_up(&mut self.guest, cx),
            Role::Event(_) => {}
            Role::Request(requests) => requests.give_up(&self.guest, cx),
        }
        self.guest.publish(cx);
        cx.wake(self.guest.id);
    }

    /// Only request queues hold guest memory for long: task management is answered soon, and the event queue takes a buffer
    /// only to fill it at once.
    fn leave_removed_memory(&mut self, cx: &mut Cx) -> bool {
        let Self { guest, role, .. } = self;
        let Role::Request(requests) = role else { return true };
        guest.leave_removed_memory(|uses_it| {
            requests.abort_those(uses_it, cx);
            requests.are_revocable(uses_it)
        })
    }

    fn is_revocable(&self) -> bool {
        match &self.role {
            Role::Control(_) => false,
            Role::Event(_) => true,
            Role::Request(requests) => requests.are_revocable(&|_| true),
        }
    }

    fn take_left(&mut self) -> Option<PendingEvents> {
        match &mut self.role {
            Role::Event(events) => Some(events.take_pending()),
            Role::Control(_) | Role::Request(_) => None,
        }
    }
}
