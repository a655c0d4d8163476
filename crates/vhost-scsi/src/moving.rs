//! What a queue takes along to another reactor; see [`aryk_vhost_device::Movable`]. Reactor context.

use crate::events::Events;
use crate::manage::Manager;
use crate::queue::{Queue, Role, Targets};
use crate::requests::Requests;
use aryk_reactor::{Cx, Moving, RootRef};
use aryk_vhost_device::{Line, MakeParts, Movable, Move, Stranded};

/// What a role takes along: commands have their channels anew.
pub enum Duty {
    Control(Manager),
    Event(Events),
    Request,
}

/// A queue between two reactors.
pub struct Luggage {
    thread: Moving,
    parts: MakeParts,
    duty: Duty,
}

impl Movable for Queue {
    type Luggage = Luggage;
    type Disks = Targets;

    fn line(&mut self) -> &mut Line {
        &mut self.line
    }

    fn order(&mut self) -> &mut Option<Move<Self>> {
        &mut self.order
    }

    fn pack(self, cx: &mut Cx) -> Luggage {
        let (thread, parts) = self.line.pack(cx);
        let duty = match self.role {
            Role::Control(manager) => Duty::Control(manager),
            Role::Event(events) => Duty::Event(events),
            Role::Request(_) => Duty::Request,
        };
        Luggage { thread, parts, duty }
    }

    fn unpack(luggage: Luggage, disks: &Targets, cx: &mut Cx) -> Result<RootRef<Self>, Stranded<Luggage>> {
        let Luggage { thread, parts, duty } = luggage;
        let name = thread.name().to_owned();
        let thread = cx.adopt_thread(thread);
        let parts = parts(thread);
        let started = cx.add_root(thread, &name, |id, cx| {
            let role = match duty {
                Duty::Control(manager) => Role::Control(manager),
                Duty::Event(events) => Role::Event(events),
                Duty::Request => Role::Request(Requests::new(parts.ring.size())),
            };
            let mut queue = Self::start(id, parts, role, cx).map_err(Stranded::Lost)?;
            let opened = match queue.role {
                Role::Request(_) => queue.attach_all(disks, cx),
                Role::Control(_) | Role::Event(_) => Ok(()),
            };
            match opened {
                Ok(()) => Ok(queue),
                Err(why) => {
                    queue.requests().0.close();
                    Err(Stranded::Shut(Box::new(queue), why.to_string()))
                }
            }
        });
        started.map_err(|stranded| match stranded {
            // It is no root any more, but its thread is still here.
            Stranded::Shut(queue, why) => Stranded::Shut(Box::new(queue.pack(cx)), why),
            Stranded::Lost(error) => {
                cx.remove_thread(thread);
                Stranded::Lost(error)
            }
        })
    }
}
