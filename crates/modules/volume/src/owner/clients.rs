//! Who submits requests to the root of a pool: channels of its reactor, and branches on other reactors. Reactor context.

use crate::branch::{Answer, Command};
use crate::inbox::{Client, Inbox, Submitted};
use aryk_bdev::{RING_BATCH, RingReceiver, RingSender, Status, Tag};
use aryk_reactor::{Bell, Cx};
use aryk_slots::{Key, Slots};
use aryk_volume::{Extents, Pool as Engine};
use std::rc::Rc;

/// The root's end of the rings between it and a branch.
struct Link {
    commands: RingReceiver<Command>,
    /// `None` once the pool has ended.
    answers: Option<RingSender<Answer>>,
    bell: Bell,
}

/// The clients of a root.
pub(super) struct Clients {
    pub(super) inbox: Rc<Inbox>,
    branches: Slots<Link>,
    batch: Vec<Command>,
}

impl Clients {
    pub(super) fn new(inbox: Rc<Inbox>) -> Self {
        Self { inbox, branches: Slots::new(8), batch: Vec::new() }
    }

    pub(super) fn add_branch(
        &mut self,
        commands: RingReceiver<Command>,
        answers: RingSender<Answer>,
        bell: Bell,
    ) {
        self.branches.add(Link { commands, answers: Some(answers), bell });
    }

    /// Takes what branches have sent, of which the inbox gets the requests. Without an engine, the pool has ended.
    pub(super) fn poll_branches(&mut self, mut engine: Option<&mut Engine>, cx: &mut Cx) {
        let Self { inbox, branches, batch } = self;
        let mut over = Vec::new();
        for (key, link) in branches.iter_mut() {
            let client = Client::Branch(key);
            // Read before the ring: all commands are then in the ring.
            let is_over = link.commands.is_abandoned();
            if link.commands.receive(batch) == RING_BATCH {
                cx.wake(inbox.root());
            } else if is_over {
                over.push(key);
            }
            for command in batch.drain(..) {
                let Some(engine) = &mut engine else { continue };
                match command {
                    Command::Submit { volume, io } => inbox.submit(Submitted { client, volume, io }, cx),
                    Command::Abort { tag, volume } => {
                        for _ in 0..inbox.abort(client, tag, volume, cx) {
                            link.answer(Answer::Completed { tag, status: Status::Aborted });
                        }
                    }
                    Command::Release { extents, damaged_blocks } => engine.give_back(extents, damaged_blocks),
                }
            }
        }
        for key in over {
            branches.remove(key);
        }
    }

    /// Ends a request.
    pub(super) fn complete(&mut self, client: Client, tag: Tag, status: Status, cx: &mut Cx) {
        match client {
            Client::Channel(channel) => self.inbox.complete(channel, tag, status, cx),
            Client::Branch(branch) => self.branch(branch).answer(Answer::Completed { tag, status }),
        }
    }

    /// Tells a branch where the data of a request is.
    pub(super) fn located(&mut self, branch: Key, tag: Tag, extents: Extents) {
        self.branch(branch).answer(Answer::Located { tag, extents });
    }

    fn branch(&mut self, key: Key) -> &mut Link {
        self.branches.get_mut(key).expect("a branch ends after its requests")
    }

    /// Sends the answers of this turn.
    pub(super) fn send(&mut self, cx: &mut Cx) {
        for (_, link) in self.branches.iter_mut() {
            let Some(answers) = link.answers.as_mut().filter(|answers| !answers.is_empty()) else { continue };
            if answers.send() {
                link.bell.ring();
            }
            if !answers.is_empty() {
                // The branch makes room in its next turn.
                cx.wake(self.inbox.root());
            }
        }
    }

    /// Ends the branches: nothing of the root accesses the memory of their requests any more. Returns whether all have ended, and
    /// have given back the base.
    pub(super) fn end_branches(&mut self) -> bool {
        for (_, link) in self.branches.iter_mut() {
            if let Some(answers) = link.answers.take() {
                drop(answers);
                link.bell.ring();
            }
        }
        self.branches.is_empty()
    }
}

impl Link {
    fn answer(&mut self, answer: Answer) {
        if let Some(answers) = &mut self.answers {
            answers.stage(answer);
        }
    }
}
