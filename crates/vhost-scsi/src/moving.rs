//! The move of a queue to another reactor; see [`aryk_vhost_device::Movable`]. Reactor context.

use crate::events::Events;
use crate::manage::Manager;
use crate::queue::{Queue, Role, Targets};
use crate::requests::Requests;
use aryk_reactor::{Cx, Moving, RootRef};
use aryk_vhost_device::{Line, MakeParts, Movable, Move, StartFailure};

/// The state of a role between two reactors. A request queue opens its channels again.
pub enum Duty {
    Control(Manager),
    Event(Events),
    Request,
}

/// The state of a queue between two reactors.
pub struct Detached {
    thread: Moving,
    parts: MakeParts,
    duty: Duty,
}

impl Movable for Queue {
    type Detached = Detached;
    type Disks = Targets;

    fn line(&mut self) -> &mut Line {
        &mut self.line
    }

    fn order(&mut self) -> &mut Option<Move<Self>> {
        &mut self.order
    }

    fn pack(self, cx: &mut Cx) -> Detached {
        let (thread, parts) = self.line.pack(cx);
        let duty = match self.role {
            Role::Control(manager) => Duty::Control(manager),
            Role::Event(events) => Duty::Event(events),
            Role::Request(_) => Duty::Request,
        };
        Detached { thread, parts, duty }
    }

    fn unpack(
        detached: Detached,
        disks: &Targets,
        cx: &mut Cx,
    ) -> Result<RootRef<Self>, StartFailure<Detached>> {
        let Detached { thread, parts, duty } = detached;
        let name = thread.name().to_owned();
        let thread = cx.adopt_thread(thread);
        let parts = parts(thread);
        let started = cx.add_root(thread, &name, |id, cx| {
            let role = match duty {
                Duty::Control(manager) => Role::Control(manager),
                Duty::Event(events) => Role::Event(events),
                Duty::Request => Role::Request(Requests::new(parts.ring.size())),
            };
            let mut queue = Self::start(id, parts, role, cx).map_err(StartFailure::Lost)?;
            let opened = match queue.role {
                Role::Request(_) => queue.attach_all(disks, cx),
                Role::Control(_) | Role::Event(_) => Ok(()),
            };
            match opened {
                Ok(()) => Ok(queue),
                Err(why) => {
                    queue.requests().0.close();
                    Err(StartFailure::Open(Box::new(queue), why.to_string()))
                }
            }
        });
        started.map_err(|failure| match failure {
            // The queue is not a root any more, but its thread is still on this reactor.
            StartFailure::Open(queue, why) => StartFailure::Open(Box::new(queue.pack(cx)), why),
            StartFailure::Lost(error) => {
                cx.remove_thread(thread);
                StartFailure::Lost(error)
            }
        })
    }
}
