//! The clients of the root of a pool: channels of its reactor, and branches on other reactors. Reactor context.

use super::Running;
use crate::branch::{Answer, Command};
use crate::inbox::{Client, Inbox, Submitted};
use aryk_bdev::{RING_BATCH, RingReceiver, RingSender, Status, Tag};
use aryk_reactor::{Bell, Cx};
use aryk_slots::{Key, Slots};
use aryk_volume::Extents;
use aryk_volume_store::{DiskOp, DiskRequest};
use std::rc::Rc;

/// The smallest write of the store that a branch executes: for fewer bytes, the messages cost more than the write.
const WRITE_MIN: u32 = 16 << 10;
/// The most bytes that a branch owes ([`Link::owed_bytes`]): older debts are forgotten.
const OWED_MAX: i64 = 8 << 20;

/// The root's end of the rings between it and a branch.
struct Link {
    commands: RingReceiver<Command>,
    /// `None` once the pool has ended.
    answers: Option<RingSender<Answer>>,
    bell: Bell,
    /// Requests of the branch that the root has.
    requests: u32,
    /// Bytes that its requests have written, less those that it has written to the base for the root.
    owed_bytes: i64,
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
        let answers = Some(answers);
        self.branches.add(Link { commands, answers, bell, requests: 0, owed_bytes: 0 });
    }

    /// Takes what branches have sent, of which the inbox gets the requests. `running` is `None` once the pool has ended.
    pub(super) fn poll_branches(&mut self, mut running: Option<&mut Running>, cx: &mut Cx) {
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
                let Some(Running { engine, store }) = &mut running else { continue };
                match command {
                    Command::Submit { volume, io } => inbox.submit(Submitted { client, volume, io }, cx),
                    Command::Abort { tag, volume } => {
                        for _ in 0..inbox.abort(client, tag, volume, cx) {
                            link.answer(Answer::Completed { tag, status: Status::Aborted });
                        }
                    }
                    Command::Release { extents, damaged_blocks } => engine.give_back(extents, damaged_blocks),
                    Command::Written(done) => store.completed(done),
                }
            }
        }
        for key in over {
            branches.remove(key);
        }
    }

    /// Notes that the root has taken a request from the inbox, which writes so many bytes.
    pub(super) fn note_taken(&mut self, client: Client, written_bytes: u64) {
        if let Client::Branch(branch) = client {
            let link = self.branch(branch);
            link.requests += 1;
            link.owed_bytes = (link.owed_bytes + written_bytes as i64).min(OWED_MAX);
        }
    }

    /// Has a branch execute a write of the store, if one owes it. Returns what the root has to do itself.
    pub(super) fn hand_out(&mut self, op: DiskOp) -> Option<DiskOp> {
        match op.request {
            DiskRequest::Write { offset, buffer, len } if len >= WRITE_MIN => {
                let owes = |link: &&mut Link| link.requests > 0 && link.owed_bytes > 0;
                let mut links = self.branches.iter_mut().map(|(_, link)| link);
                let Some(link) = links.find(owes) else {
                    let request = DiskRequest::Write { offset, buffer, len };
                    return Some(DiskOp { tag: op.tag, request });
                };
                link.owed_bytes -= i64::from(len);
                link.answer(Answer::Write { tag: op.tag, offset, buffer, len });
                None
            }
            request => Some(DiskOp { tag: op.tag, request }),
        }
    }

    /// Ends a request that the root has taken.
    pub(super) fn complete(&mut self, client: Client, tag: Tag, status: Status, cx: &mut Cx) {
        match client {
            Client::Channel(channel) => self.inbox.complete(channel, tag, status, cx),
            Client::Branch(branch) => {
                let link = self.branch(branch);
                link.requests -= 1;
                link.answer(Answer::Completed { tag, status });
            }
        }
    }

    /// Tells a branch where the data of a request is.
    pub(super) fn located(&mut self, branch: Key, tag: Tag, extents: Extents) {
        let link = self.branch(branch);
        link.requests -= 1;
        link.answer(Answer::Located { tag, extents });
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
