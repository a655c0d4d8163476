//! What the channels of a pool's volumes on one reactor share with the pool: requests on their way in, completions on their way
//! out. Reactor context.
//!
//! A channel adds requests here, and a root takes them when it is polled: that of the pool, or its branch on another reactor. So
//! a channel may be called while the root runs, as when a volume is the base of a volume of another pool. When the pool's root
//! moves, another root takes the requests of the inbox; its channels do not notice.

use crate::device::VolumeKey;
use aryk_bdev::{Channel, Completion, Io, Outbox, Status, Tag};
use aryk_reactor::{Cx, Local, RootId};
use aryk_slots::{Key, Slots};
use aryk_volume::VolumeId;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// The inboxes of a reactor, by the numbers of their pools.
#[derive(Default)]
pub(crate) struct Inboxes(RefCell<HashMap<u64, Rc<Inbox>>>);

impl Inboxes {
    pub fn find(&self, pool: u64) -> Option<Rc<Inbox>> {
        self.0.borrow().get(&pool).cloned()
    }

    pub fn add(&self, pool: u64, inbox: Rc<Inbox>) {
        self.0.borrow_mut().insert(pool, inbox);
    }

    /// Removes the inbox of a pool, if it is this one.
    pub fn remove(&self, pool: u64, inbox: &Rc<Inbox>) {
        let mut inboxes = self.0.borrow_mut();
        if inboxes.get(&pool).is_some_and(|known| Rc::ptr_eq(known, inbox)) {
            inboxes.remove(&pool);
        }
    }
}

/// Whose a request is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Client {
    /// A channel of this reactor.
    Channel(Key),
    /// A branch, for a channel of another reactor.
    Branch(Key),
}

/// A request.
pub(crate) struct Submitted {
    pub client: Client,
    pub volume: VolumeKey,
    pub io: Io,
}

/// The requests that clients have aborted, and their volumes.
pub(crate) type Aborted = HashMap<(Client, Tag), VolumeId>;

/// The requests of all channels, and their completions.
pub(crate) struct Inbox {
    /// The root that takes the requests.
    root: Cell<RootId>,
    /// The root of the pool is about to come to this reactor, and will take the requests: the branch does not end before.
    has_heir: Cell<bool>,
    submitted: RefCell<VecDeque<Submitted>>,
    clients: RefCell<Slots<Outbox>>,
    /// The requests that the root has and that clients have aborted since it last looked, and their volumes.
    aborted: RefCell<Aborted>,
    /// The pool has ended: requests fail.
    has_ended: Cell<bool>,
}

impl Inbox {
    pub fn new(root: RootId) -> Self {
        Self {
            root: Cell::new(root),
            has_heir: Cell::new(false),
            submitted: RefCell::default(),
            clients: RefCell::new(Slots::new(8)),
            aborted: RefCell::default(),
            has_ended: Cell::new(false),
        }
    }

    /// The root that takes the requests.
    pub const fn root(&self) -> RootId {
        self.root.get()
    }

    /// Has another root take the requests.
    pub fn set_root(&self, root: RootId, cx: &mut Cx) {
        self.root.set(root);
        cx.wake(root);
    }

    /// Whether the root of the pool is about to come to this reactor.
    pub const fn has_heir(&self) -> bool {
        self.has_heir.get()
    }

    /// The root of the pool is about to come to this reactor, or does not come.
    pub fn set_heir(&self, has_heir: bool, cx: &mut Cx) {
        self.has_heir.set(has_heir);
        cx.wake(self.root());
    }

    /// Adds a request.
    pub fn submit(&self, submitted: Submitted, cx: &mut Cx) {
        self.submitted.borrow_mut().push_back(submitted);
        cx.wake(self.root());
    }

    /// Takes back requests with a tag that the root has not taken, or has it abort them. Returns how many were taken back.
    pub fn abort(&self, client: Client, tag: Tag, volume: VolumeId, cx: &mut Cx) -> usize {
        let mut submitted = self.submitted.borrow_mut();
        let before = submitted.len();
        submitted.retain(|s| s.client != client || s.io.tag != tag);
        let taken = before - submitted.len();
        if taken == 0 && !self.has_ended.get() {
            self.aborted.borrow_mut().insert((client, tag), volume);
            cx.wake(self.root());
        }
        taken
    }

    /// The next request.
    pub fn take(&self) -> Option<Submitted> {
        self.submitted.borrow_mut().pop_front()
    }

    pub fn is_empty(&self) -> bool {
        self.submitted.borrow().is_empty()
    }

    /// Whether no channel is open.
    pub fn has_no_channels(&self) -> bool {
        self.clients.borrow().is_empty()
    }

    /// Ends a request of a channel. That of a channel that was closed is forgotten.
    pub fn complete(&self, channel: Key, tag: Tag, status: Status, cx: &mut Cx) {
        if let Some(outbox) = self.clients.borrow_mut().get_mut(channel) {
            outbox.push(tag, status, cx);
        }
    }

    /// Takes the requests that clients have aborted since the last call, and their volumes.
    pub fn take_aborted(&self) -> Aborted {
        self.aborted.take()
    }

    /// Takes the requests of branches that wait, and what branches have aborted.
    pub fn take_of_branches(&self) -> (VecDeque<Submitted>, Aborted) {
        let is_of_branch = |client: Client| matches!(client, Client::Branch(_));
        let waiting = self.submitted.take();
        let (of_branches, of_channels) = waiting.into_iter().partition(|s| is_of_branch(s.client));
        *self.submitted.borrow_mut() = of_channels;
        let aborted = self.aborted.borrow_mut().extract_if(|(client, _), _| is_of_branch(*client)).collect();
        (of_branches, aborted)
    }

    /// Adds requests before those that wait, and aborts.
    pub fn add_before(&self, mut submitted: VecDeque<Submitted>, aborted: Aborted) {
        let mut waiting = self.submitted.borrow_mut();
        submitted.append(&mut waiting);
        *waiting = submitted;
        self.aborted.borrow_mut().extend(aborted);
    }

    /// Fails the requests of channels that wait, and all later ones.
    pub fn end(&self, cx: &mut Cx) {
        self.has_ended.set(true);
        while let Some(Submitted { client, io, .. }) = self.take() {
            if let Client::Channel(channel) = client {
                self.complete(channel, io.tag, Status::Removed, cx);
            }
        }
    }
}

/// A channel of a volume.
pub(crate) struct VolumeChannel {
    inbox: Rc<Inbox>,
    client: Key,
    volume: VolumeKey,
    local: Local,
}

impl VolumeChannel {
    /// Opens a channel whose completions wake `root`.
    pub fn open(inbox: Rc<Inbox>, volume: VolumeKey, root: RootId, cx: &mut Cx) -> Self {
        let client = inbox.clients.borrow_mut().add(Outbox::new(root));
        Self { inbox, client, volume, local: cx.local().clone() }
    }
}

impl Channel for VolumeChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        if self.inbox.has_ended.get() {
            self.inbox.complete(self.client, io.tag, Status::Removed, cx);
            return;
        }
        let client = Client::Channel(self.client);
        self.inbox.submit(Submitted { client, volume: self.volume, io: *io }, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        for _ in 0..self.inbox.abort(Client::Channel(self.client), tag, self.volume.id, cx) {
            self.inbox.complete(self.client, tag, Status::Aborted, cx);
        }
    }

    #[inline]
    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.inbox.clients.borrow_mut().get_mut(self.client).expect("it is there until the end").take(out);
    }
}

impl Drop for VolumeChannel {
    fn drop(&mut self) {
        let (inbox, client) = (Rc::clone(&self.inbox), self.client);
        // The channel may be dropped while the pool completes a request.
        self.local.defer(move |cx| {
            drop(inbox.clients.borrow_mut().remove(client));
            // A branch ends with its last channel.
            cx.wake(inbox.root());
        });
    }
}
