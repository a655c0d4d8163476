//! Requests to a device that another reactor owns. Reactor context.
//!
//! A device with fewer hardware queues than there are reactors, or with state that only one reactor may change, opens its own
//! channel on that reactor, the *owner*, and a [`ForwardChannel`] on each other reactor, a *client*. One link connects a client
//! to an owner, for any number of devices and channels:
//!
//! ```text
//! client                                                     owner
//! ForwardChannel ─┐                                     ┌─ Endpoint: the device's own channel
//! ForwardChannel ─┼─ Link ──── ring of commands ────────┼─ Endpoint
//! ForwardChannel ─┘       ◄─── ring of completions ─────┴─ Service
//! ```
//!
//! Each ring has one producer and one consumer. Once a turn, each side adds the entries of that turn to its ring, and then
//! rings the other side's [`Bell`]. A pool of credits bounds a link's requests ([`CreditPool`]), but for a few of each channel.
//! What exceeds the room of a ring waits at its sender, in order.
//!
//! Events of bases ([`Channel::base_event`]) are not sent over a link: a device that stays when one of its bases is removed
//! handles them at its owner.
//!
//! A link ends with its last channel. Until then the owner does not end, since the link has a root on it.

use crate::bdev_channel::credits::Credits;
use crate::ring::{RING_BATCH, RingReceiver, RingSender, ring};
use crate::{Bytes, Channel, Completion, CreditPool, Io, OpenError, Outbox, Status, Tag};
use aryk_reactor::{Bell, CoreSet, Cx, Handle, Hold, Local, Root, RootId, ThreadId};
use aryk_slots::{Key, Slots};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

/// The most requests in flight of a link that its channels share.
const CREDITS: u32 = 1024;

/// Requests that each channel may have beside the shared ones: a disk that does not respond must not stop the others of a link.
const OWN: u32 = 4;

/// Capacity of the ring of commands: each request, its abort, and some commands to open and close channels.
const COMMANDS: usize = 4 * CREDITS as usize;

/// A function that opens the device's own channel, on the owner.
pub type OpenOwn = Arc<dyn Fn(RootId, &mut Cx) -> Result<Box<dyn Channel>, OpenError> + Send + Sync>;

/// A command to the owner for a channel, with the channel's key at the client.
enum Command {
    Open(Key, OpenOwn),
    Submit(Key, Io),
    Abort(Key, Tag),
    Close(Key),
}

/// The completion of a request, with the key of its channel at the client.
#[derive(Clone)]
struct Answer(Key, Completion);

/// The links of a client, by owner. There are about as many as cores.
#[derive(Default)]
struct Links(RefCell<Vec<Rc<Link>>>);

/// A client's end of a link.
struct Link {
    owner: Handle,
    /// The owner's bell.
    bell: Bell,
    root: RootId,
    thread: ThreadId,
    credits: CreditPool,
    commands: RefCell<RingSender<Command>>,
    /// The completions of each channel.
    outboxes: RefCell<Slots<Outbox>>,
}

impl Link {
    /// Returns the link of this reactor to `owner`, and creates it if there is none.
    fn to(owner: &Handle, cx: &mut Cx) -> Rc<Self> {
        let links = cx.local_state::<Links>();
        if let Some(link) = links.0.borrow().iter().find(|link| link.owner == *owner) {
            return Rc::clone(link);
        }
        let (commands, owners_commands) = ring(COMMANDS);
        let (answers, our_answers) = ring(CREDITS as usize);
        let (bell, our_bell) = (Bell::new(owner), Bell::new(cx.handle()));
        let (client, core) = (cx.handle().core(), owner.core());
        let thread = cx.add_thread(format!("requests to core {core}"), CoreSet::from_iter([client]));
        let make = |root, cx: &mut Cx| {
            cx.answer_bell(&our_bell, root);
            let link = Rc::new(Self {
                owner: owner.clone(),
                bell: bell.clone(),
                root,
                thread,
                credits: CreditPool::own(CREDITS, OWN),
                commands: RefCell::new(commands),
                outboxes: RefCell::new(Slots::new(8)),
            });
            Ok::<_, Infallible>(Client { link, answers: our_answers, batch: Vec::new() })
        };
        let Ok(root) = cx.add_root(thread, &format!("requests to core {core}"), make);
        let link = Rc::clone(&cx.root::<Client>(root.id()).expect("just added").borrow().link);
        links.0.borrow_mut().push(Rc::clone(&link));
        let start = move |cx: &mut Cx| Service::start(client, owners_commands, answers, &bell, our_bell, cx);
        cx.post(owner, start);
        link
    }

    /// Sends a command at the end of this turn's work.
    fn command(&self, command: Command, cx: &mut Cx) {
        let mut commands = self.commands.borrow_mut();
        if commands.is_empty() {
            cx.wake(self.root);
        }
        commands.stage(command);
    }

    /// Whether no channel uses the link, and all commands are in the owner's ring.
    fn is_over(&self) -> bool {
        self.outboxes.borrow().is_empty() && self.commands.borrow().is_empty()
    }

    /// Ends the link, unless a channel was opened in between.
    fn end(this: Rc<Self>, cx: &mut Cx) {
        let links = cx.local_state::<Links>();
        let mut list = links.0.borrow_mut();
        let found = list.iter().position(|link| Rc::ptr_eq(link, &this));
        let Some(at) = found.filter(|_| this.is_over()) else { return };
        list.swap_remove(at);
        drop(list);
        cx.remove_root(this.root);
        cx.remove_thread(this.thread);
        let bell = this.bell.clone();
        // The owner sees that the producer of the ring was dropped.
        drop(this);
        bell.ring();
    }
}

/// The root of a client's end of a link.
struct Client {
    link: Rc<Link>,
    answers: RingReceiver<Answer>,
    batch: Vec<Answer>,
}

impl Root for Client {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let count = self.answers.receive(&mut self.batch);
        let mut outboxes = self.link.outboxes.borrow_mut();
        for Answer(channel, Completion { tag, status }) in self.batch.drain(..) {
            let outbox = outboxes.get_mut(channel).expect("a channel is closed after its last completion");
            outbox.push(tag, status, cx);
        }
        drop(outboxes);
        if count == RING_BATCH {
            cx.wake(self.link.root);
        }
        let has_sent = self.link.commands.borrow_mut().send();
        if has_sent {
            self.link.bell.ring();
        }
        if self.link.is_over() {
            let link = Rc::clone(&self.link);
            cx.local().defer(move |cx| Link::end(link, cx));
        }
        count > 0 || has_sent
    }
}

/// A channel that forwards its requests to another reactor, which executes them by the device's own channel.
pub struct ForwardChannel {
    link: Rc<Link>,
    key: Key,
    local: Local,
    /// Keeps the owner from ending before the link has a root on it.
    _owner: Hold,
}

impl fmt::Debug for ForwardChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a channel to {:?}", self.link.owner)
    }
}

impl ForwardChannel {
    /// Opens a channel on this reactor that forwards requests to the channel that `open` opens on `owner`. Requests wait until
    /// that channel is open; if it cannot be opened, each request fails with [`Status::Removed`].
    ///
    /// # Panics
    /// If `owner` is this reactor, which uses the device's own channel.
    pub fn open(owner: &Hold, open: OpenOwn, root: RootId, cx: &mut Cx) -> Self {
        assert!(**owner != *cx.handle(), "a reactor forwards nothing to itself");
        let link = Link::to(owner, cx);
        let key = link.outboxes.borrow_mut().add(Outbox::new(root));
        link.command(Command::Open(key, open), cx);
        Self { link, key, local: cx.local().clone(), _owner: owner.clone() }
    }
}

impl Channel for ForwardChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.link.command(Command::Submit(self.key, *io), cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.link.command(Command::Abort(self.key, tag), cx);
    }

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.link.outboxes.borrow_mut().get_mut(self.key).expect("it is there until the end").take(out);
    }

    fn credits(&self) -> Option<CreditPool> {
        Some(self.link.credits.clone())
    }
}

impl Drop for ForwardChannel {
    fn drop(&mut self) {
        let (link, key) = (Rc::clone(&self.link), self.key);
        self.local.defer(move |cx| {
            link.outboxes.borrow_mut().remove(key);
            link.command(Command::Close(key), cx);
        });
    }
}

/// The root of the owner's end of a link: executes commands, and sends completions.
struct Service {
    commands: RingReceiver<Command>,
    batch: Vec<Command>,
    answers: Rc<RefCell<RingSender<Answer>>>,
    /// The client's bell.
    bell: Bell,
    /// Endpoints by the indexes of their channels' keys.
    endpoints: Vec<Option<(Key, Endpoint)>>,
    root: RootId,
    thread: ThreadId,
}

#[derive(Clone)]
enum Endpoint {
    Open(RootId, Rc<RefCell<EndpointRoot>>),
    /// The device's channel could not be opened.
    Failed,
}

/// The device's own channel, for one channel of the client, and its root.
struct EndpointRoot {
    channel: Box<dyn Channel>,
    /// The credits that the channel shares with others at the owner, if any. The client enforces the channel's own depth.
    credits: Credits,
    /// Requests that wait for a credit.
    queue: VecDeque<Io>,
    completions: Vec<Completion>,
    key: Key,
    answers: Rc<RefCell<RingSender<Answer>>>,
    root: RootId,
    service: RootId,
}

impl Root for EndpointRoot {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.channel.poll(cx, &mut self.completions);
        let has_completed = !self.completions.is_empty();
        for _ in 0..self.completions.len() {
            self.credits.give_back(cx);
        }
        self.credits.begin_poll();
        while !self.queue.is_empty() && self.credits.try_take() {
            let io = self.queue.pop_front().expect("it is not empty");
            self.send(io, cx);
        }
        if self.queue.is_empty() {
            self.credits.decline(cx);
        } else if self.credits.is_out_of_bytes() {
            cx.wake(self.root);
        }
        if has_completed {
            let answers = self.completions.drain(..).map(|completion| Answer(self.key, completion));
            self.answers.borrow_mut().extend(answers);
            cx.wake(self.service);
        }
        has_completed
    }
}

impl EndpointRoot {
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        if self.queue.is_empty() && self.credits.try_take() {
            self.send(io, cx);
        } else {
            self.queue.push_back(io);
            if self.credits.is_out_of_bytes() {
                cx.wake(self.root);
            }
        }
    }

    /// Submits a request whose credit was taken.
    fn send(&mut self, io: Io, cx: &mut Cx) {
        self.credits.spend(Bytes(io.data.len().into()));
        self.channel.submit(&io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let queued = self.queue.len();
        self.queue.retain(|io| io.tag != tag);
        let answer = Answer(self.key, Completion { tag, status: Status::Aborted });
        let aborted = queued - self.queue.len();
        if aborted > 0 {
            self.answers.borrow_mut().extend(std::iter::repeat_n(answer, aborted));
            cx.wake(self.service);
            // A credit that was granted for an aborted request is used for another one.
            cx.wake(self.root);
        }
        self.channel.abort(tag, cx);
    }
}

impl Service {
    /// Starts the owner's end of a link from the reactor on core `client`.
    fn start(
        client: u16,
        commands: RingReceiver<Command>,
        answers: RingSender<Answer>,
        bell: &Bell,
        clients_bell: Bell,
        cx: &mut Cx,
    ) {
        let name = format!("requests of core {client}");
        let thread = cx.add_thread(&*name, CoreSet::from_iter([cx.handle().core()]));
        let make = |root, cx: &mut Cx| {
            cx.answer_bell(bell, root);
            Ok::<_, Infallible>(Self {
                commands,
                batch: Vec::new(),
                answers: Rc::new(RefCell::new(answers)),
                bell: clients_bell,
                endpoints: Vec::new(),
                root,
                thread,
            })
        };
        let Ok(_) = cx.add_root(thread, &name, make);
    }

    fn endpoint(&self, key: Key) -> &Endpoint {
        let found = self.endpoints[key.index() as usize].as_ref().filter(|(of, _)| *of == key);
        &found.expect("a channel is opened first and closed last").1
    }

    fn obey(&mut self, command: Command, cx: &mut Cx) {
        match command {
            Command::Open(key, open) => self.open(key, &open, cx),
            Command::Submit(key, io) => match self.endpoint(key) {
                Endpoint::Open(_, endpoint) => endpoint.borrow_mut().submit(io, cx),
                Endpoint::Failed => {
                    let completion = Completion { tag: io.tag, status: Status::Removed };
                    self.answers.borrow_mut().stage(Answer(key, completion));
                }
            },
            Command::Abort(key, tag) => match self.endpoint(key) {
                Endpoint::Open(_, endpoint) => endpoint.borrow_mut().abort(tag, cx),
                // The request has failed already.
                Endpoint::Failed => {}
            },
            Command::Close(key) => {
                if let Endpoint::Open(root, _) = *self.endpoint(key) {
                    cx.remove_root(root);
                }
                self.endpoints[key.index() as usize] = None;
            }
        }
    }

    fn open(&mut self, key: Key, open: &OpenOwn, cx: &mut Cx) {
        let (answers, service) = (Rc::clone(&self.answers), self.root);
        let make = |root, cx: &mut Cx| {
            let channel = open(root, cx)?;
            let credits = Credits::new(u32::MAX, channel.credits(), root, cx.local());
            let (queue, completions) = (VecDeque::new(), Vec::new());
            Ok::<_, OpenError>(EndpointRoot {
                channel,
                credits,
                queue,
                completions,
                key,
                answers,
                root,
                service,
            })
        };
        let endpoint = match cx.add_root(self.thread, "forwarded requests", make) {
            Ok(root) => Endpoint::Open(root.id(), cx.root(root.id()).expect("just added")),
            Err(error) => {
                tracing::warn!(%error, "a channel for another reactor's requests cannot be opened; they fail");
                Endpoint::Failed
            }
        };
        let index = key.index() as usize;
        if self.endpoints.len() <= index {
            self.endpoints.resize_with(index + 1, || None);
        }
        assert!(self.endpoints[index].is_none(), "a channel is closed before another has its place");
        self.endpoints[index] = Some((key, endpoint));
    }
}

impl Root for Service {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        // Read before the ring: all commands that the client added before it ended the link are then in the ring.
        let is_over = self.commands.is_abandoned();
        let mut batch = std::mem::take(&mut self.batch);
        let count = self.commands.receive(&mut batch);
        let mut has_made_room = false;
        for command in batch.drain(..) {
            has_made_room |= !matches!(command, Command::Submit(..));
            self.obey(command, cx);
        }
        self.batch = batch;
        let mut answers = self.answers.borrow_mut();
        let has_sent = answers.send();
        // The client takes some in its next turn.
        let has_no_room = !answers.is_empty();
        // Wakes the client for completions, or because its commands had no room.
        if has_sent || has_made_room {
            self.bell.ring();
        }
        if count == RING_BATCH || (has_no_room && !is_over) {
            cx.wake(self.root);
        } else if is_over {
            let (root, thread) = (self.root, self.thread);
            let endpoints = std::mem::take(&mut self.endpoints);
            cx.local().defer(move |cx| {
                // Endpoints that are still open, since the client's reactor has ended.
                for (_, endpoint) in endpoints.into_iter().flatten() {
                    if let Endpoint::Open(root, _) = endpoint {
                        cx.remove_root(root);
                    }
                }
                // An earlier poll may have deferred the same removal.
                if cx.root::<Self>(root).is_some() {
                    cx.remove_root(root);
                    cx.remove_thread(thread);
                }
            });
        }
        count > 0 || has_sent
    }
}
