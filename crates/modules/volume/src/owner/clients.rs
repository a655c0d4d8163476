//! The clients of the root of a pool: channels of its reactor, and branches on other reactors. Reactor context.

use super::Running;
use crate::branch::{Answer, Command, Ends, Home};
use crate::inbox::{Client, Inbox, Submitted};
use aryk_bdev::{RING_BATCH, RingReceiver, RingSender, Status, Tag};
use aryk_reactor::{Bell, Cx, Hold};
use aryk_slots::{Key, Slots};
use aryk_volume::Extents;
use aryk_volume_store::{DiskOp, DiskRequest};
use std::rc::Rc;

/// The smallest write of the store that a branch executes: for fewer bytes, the messages cost more than the write.
const WRITE_MIN: u32 = 16 << 10;
/// The most bytes that a branch owes ([`Link::owed_bytes`]): older debts are forgotten.
const OWED_MAX: i64 = 8 << 20;

/// The root's end of the rings between it and a branch.
pub(super) struct Link {
    commands: RingReceiver<Command>,
    /// `None` once the pool has ended.
    answers: Option<RingSender<Answer>>,
    bell: Bell,
    /// Requests of the branch that the root has.
    requests: u32,
    /// Bytes that its requests have written, less those that it has written to the base for the root.
    owed_bytes: i64,
    /// The branch is on the reactor of the root, and gives its channels to the root.
    is_leaving: bool,
}

/// The clients of a root.
pub(super) struct Clients {
    pub(super) inbox: Rc<Inbox>,
    pub(super) branches: Slots<Link>,
    batch: Vec<Command>,
}

impl Clients {
    pub(super) fn new(inbox: Rc<Inbox>) -> Self {
        Self { inbox, branches: Slots::new(8), batch: Vec::new() }
    }

    pub(super) fn add_branch(&mut self, ends: Ends) -> Key {
        self.branches.add(Link::new(ends))
    }

    /// Tells a branch where the root is.
    pub(super) fn tell_home(&mut self, branch: Key, owner: Hold, bell: Bell, cx: &Cx) {
        let root = self.inbox.root();
        let link = self.branch(branch);
        link.is_leaving = link.bell.handle() == cx.handle();
        link.answer(Answer::Home(Box::new(Home { owner, bell, root, link: branch })));
    }

    /// Passes on all that is on its way between the root and a branch of its reactor. Returns whether there was anything.
    pub(super) fn exchange(&mut self, branch: Key, running: &mut Running, cx: &mut Cx) -> bool {
        let Self { inbox, branches, batch } = self;
        let Some(link) = branches.get_mut(branch) else { return false };
        let mut is_busy = false;
        while link.commands.receive(batch) > 0 {
            is_busy = true;
            link.execute(Client::Branch(branch), batch, inbox, Some(running), cx);
        }
        is_busy |= link.answers.as_mut().is_some_and(RingSender::send);
        is_busy || link.answers.as_ref().is_some_and(|answers| !answers.is_empty())
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
            link.execute(client, batch, inbox, running.as_deref_mut(), cx);
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
                let owes = |link: &&mut Link| link.requests > 0 && link.owed_bytes > 0 && !link.is_leaving;
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
    pub(super) fn new(Ends { commands, answers, bell }: Ends) -> Self {
        let answers = Some(answers);
        Self { commands, answers, bell, requests: 0, owed_bytes: 0, is_leaving: false }
    }

    /// Counts a request of the branch that the root has got otherwise than from the inbox.
    pub(super) const fn add_request(&mut self) {
        self.requests += 1;
    }

    /// Executes what a branch has sent, of which the inbox gets the requests. `running` is `None` once the pool has ended.
    fn execute(
        &mut self,
        client: Client,
        batch: &mut Vec<Command>,
        inbox: &Inbox,
        mut running: Option<&mut Running>,
        cx: &mut Cx,
    ) {
        for command in batch.drain(..) {
            let Some(Running { engine, store }) = &mut running else { continue };
            match command {
                Command::Submit { volume, io } => inbox.submit(Submitted { client, volume, io }, cx),
                Command::Abort { tag, volume } => {
                    for _ in 0..inbox.abort(client, tag, volume, cx) {
                        self.answer(Answer::Completed { tag, status: Status::Aborted });
                    }
                }
                Command::Release { extents, damaged_blocks } => engine.give_back(extents, damaged_blocks),
                Command::Written(done) => store.completed(done),
            }
        }
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(answers) = &mut self.answers {
            answers.stage(answer);
        }
    }
}
