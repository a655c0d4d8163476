//! What the channels of a pool's volumes share with the pool: requests on their way in, completions on their way out. Reactor
//! context, on the pool's reactor.
//!
//! A channel adds requests here, and the root of the pool takes them when it is polled: so a channel may be called while the root
//! runs, as when a volume is the base of a volume of another pool.

use crate::device::VolumeKey;
use aryk_bdev::{Channel, Completion, Io, Outbox, Status, Tag};
use aryk_reactor::{Cx, Local, RootId};
use aryk_slots::{Key, Slots};
use aryk_volume::VolumeId;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// The inboxes of the pools of a reactor, by the pools' numbers.
#[derive(Default)]
pub(crate) struct Inboxes(RefCell<HashMap<u64, Rc<Inbox>>>);

impl Inboxes {
    pub fn find(&self, pool: u64) -> Option<Rc<Inbox>> {
        self.0.borrow().get(&pool).cloned()
    }

    pub fn add(&self, pool: u64, inbox: Rc<Inbox>) {
        self.0.borrow_mut().insert(pool, inbox);
    }

    pub fn remove(&self, pool: u64) {
        self.0.borrow_mut().remove(&pool);
    }
}

/// A request of a channel.
pub(crate) struct Submitted {
    pub client: Key,
    pub volume: VolumeKey,
    pub io: Io,
}

/// The requests of all channels, and their completions.
pub(crate) struct Inbox {
    /// The root of the pool.
    root: RootId,
    submitted: RefCell<VecDeque<Submitted>>,
    clients: RefCell<Slots<Outbox>>,
    /// The requests that the pool has and that channels have aborted since it last looked, and their volumes.
    aborted: RefCell<HashMap<(Key, Tag), VolumeId>>,
    /// The pool has ended: requests fail.
    has_ended: Cell<bool>,
}

impl Inbox {
    pub fn new(root: RootId) -> Self {
        Self {
            root,
            submitted: RefCell::default(),
            clients: RefCell::new(Slots::new(8)),
            aborted: RefCell::default(),
            has_ended: Cell::new(false),
        }
    }

    /// The next request.
    pub fn take(&self) -> Option<Submitted> {
        self.submitted.borrow_mut().pop_front()
    }

    pub fn is_empty(&self) -> bool {
        self.submitted.borrow().is_empty()
    }

    /// Ends a request. That of a channel that was closed is forgotten.
    pub fn complete(&self, client: Key, tag: Tag, status: Status, cx: &mut Cx) {
        if let Some(outbox) = self.clients.borrow_mut().get_mut(client) {
            outbox.push(tag, status, cx);
        }
    }

    /// Takes the requests that channels have aborted since the last call, and their volumes.
    pub fn take_aborted(&self) -> HashMap<(Key, Tag), VolumeId> {
        self.aborted.take()
    }

    /// Fails the requests that wait, and all later ones.
    pub fn end(&self, cx: &mut Cx) {
        self.has_ended.set(true);
        while let Some(Submitted { client, io, .. }) = self.take() {
            self.complete(client, io.tag, Status::Removed, cx);
        }
    }
}

/// A channel of a volume, on the reactor of its pool.
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
        let submitted = Submitted { client: self.client, volume: self.volume, io: *io };
        self.inbox.submitted.borrow_mut().push_back(submitted);
        cx.wake(self.inbox.root);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let mut submitted = self.inbox.submitted.borrow_mut();
        let before = submitted.len();
        submitted.retain(|s| s.client != self.client || s.io.tag != tag);
        let taken = before - submitted.len();
        drop(submitted);
        for _ in 0..taken {
            self.inbox.complete(self.client, tag, Status::Aborted, cx);
        }
        if taken == 0 && !self.inbox.has_ended.get() {
            self.inbox.aborted.borrow_mut().insert((self.client, tag), self.volume.id);
            cx.wake(self.inbox.root);
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
        self.local.defer(move |_| drop(inbox.clients.borrow_mut().remove(client)));
    }
}
