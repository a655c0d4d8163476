//! The branch of a pool: its root on a reactor that has channels of its volumes, and is not that of the pool. Reactor context.
//!
//! A branch sends requests to the root of the pool. For a read, the answer says where the data is, and the branch reads it from
//! the base, verifies it, and copies it to the memory of the request: the root does not touch it. The branch tells the root when
//! it has read the segments, which the root has pinned for it. The root executes all other requests, and reads of which a part is
//! on a foreign disk. It composes the frames of writes, and has branches write large ones to the base: each as many bytes as its
//! channels have written.
//!
//! Two rings connect a branch with the root ([`aryk_bdev::ring`]). A branch ends with the last channel; then it drops its end of
//! the ring. If the pool ends, the root drops its own end first: nothing accesses the memory of requests then, except the branch.
//!
//! When the root moves to another reactor, it takes its ends of the rings along. On the reactor that it leaves, a branch gets its
//! channels, with their requests; on the reactor to which it comes, it gets those of the branch (`owner/moving.rs`).

use crate::READ_BYTES;
use crate::claim::Right;
use crate::device::VolumeKey;
use crate::disk::{Disk, Ended};
use crate::inbox::{Client, Inbox, Inboxes, Submitted};
use crate::owner::Owner;
use crate::part::Place;
use aryk_bdev::{Io, Op, OpenError, RING_BATCH, RingReceiver, RingSender, Status, Tag, ring};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Bell, CoreSet, Cx, Hold, Root, RootId, ThreadId};
use aryk_slots::{Key, Slots};
use aryk_volume::{Extents, ReadEnd, ReadId, Reader, VolumeId};
use aryk_volume_store::{DiskDone, DiskTag};
use std::rc::Rc;
use std::sync::Arc;

/// Entries of each ring.
const RING: usize = 1024;
/// Requests that one poll sends to the root, and bytes of them.
const POLL_REQUESTS: u32 = 256;
const POLL_BYTES: u64 = 1 << 20;
/// The initial room for requests in flight; the table grows for more.
const REQUESTS: u32 = 256;

/// A message of a branch to the root. The tag of a request is its key at the branch.
pub(crate) enum Command {
    Submit { volume: VolumeKey, io: Io },
    Abort { tag: Tag, volume: VolumeId },
    Release { extents: Extents, damaged_blocks: u64 },
    Written(DiskDone),
}

/// A message of the root to a branch.
pub(crate) enum Answer {
    Completed {
        tag: Tag,
        status: Status,
    },
    Located {
        tag: Tag,
        extents: Extents,
    },
    /// A write of the store. The root has a request of the branch meanwhile, so that the branch does not end before it has this.
    Write {
        tag: DiskTag,
        offset: u64,
        buffer: Buffer,
        len: u32,
    },
    /// Where the root is from now on.
    Home(Box<Home>),
}

/// Where the root is, for a branch.
pub(crate) struct Home {
    /// Keeps the reactor of the root from ending.
    pub owner: Hold,
    pub bell: Bell,
    pub root: RootId,
    /// How the root identifies the branch.
    pub link: Key,
}

/// The root's ends of the rings between it and a branch.
pub(crate) struct Ends {
    pub commands: RingReceiver<Command>,
    pub answers: RingSender<Answer>,
    /// Of the branch.
    pub bell: Bell,
}

/// A request of a channel.
pub(crate) struct InFlight {
    pub channel: Key,
    pub tag: Tag,
    /// Bytes of a read.
    read_bytes: u64,
    /// The first unit of the volume.
    unit: u64,
    data: Sgl,
    stage: Stage,
    /// Whether its channel has aborted it.
    pub is_aborted: bool,
}

/// Where a request is.
enum Stage {
    Root,
    /// The reader, by this key.
    Reader(Key),
}

/// The root of a branch.
pub(crate) struct Branch {
    root: RootId,
    thread: ThreadId,
    place: Arc<Place>,
    inbox: Rc<Inbox>,
    /// `None` once the branch has ended.
    open: Option<Open>,
    reader: Reader,
    requests: Slots<InFlight>,
    batch: Vec<Answer>,
    /// Bytes of reads in flight.
    read_bytes: u64,
    /// Of the root, as far as the branch knows where it is.
    bell: Bell,
    /// Keeps the reactor of the root from ending.
    _owner: Hold,
    /// The root that has come to this reactor, which gets the channels, and how it identifies the branch.
    heir: Option<(RootId, Key)>,
    is_giving_up: bool,
}

/// A request of a branch to the base.
enum Work {
    Read(ReadId),
    /// For the root.
    Write(DiskTag),
}

/// The connections of a branch: to the base, and to the root.
struct Open {
    disk: Disk<Work>,
    commands: RingSender<Command>,
    answers: RingReceiver<Answer>,
}

impl Branch {
    /// Starts the branch of a pool on this reactor. Requests wait until the root knows of it.
    pub fn start(place: &Arc<Place>, owner: Hold, cx: &mut Cx) -> Result<Rc<Inbox>, OpenError> {
        let (branch, ends) = Self::add(place, owner, None, cx)?;
        let inbox = Rc::clone(&cx.root::<Self>(branch).expect("just added").borrow().inbox);
        cx.local_state::<Inboxes>().add(place.number, Rc::clone(&inbox));
        connect(Arc::clone(place), ends, cx);
        Ok(inbox)
    }

    /// Adds a branch, for the channels of an inbox if there is one: it takes their requests when the inbox says so.
    fn add(
        place: &Arc<Place>,
        owner: Hold,
        inbox: Option<Rc<Inbox>>,
        cx: &mut Cx,
    ) -> Result<(RootId, Ends), OpenError> {
        let base = place.base()?;
        let (commands, roots_commands) = ring(RING);
        let (roots_answers, answers) = ring(RING);
        let bell = Bell::new(cx.handle());
        let name = format!("volumes on {}", base.bdev().name());
        let thread = cx.add_thread(name.clone(), CoreSet::from_iter([cx.handle().core()]));
        let place = Arc::clone(place);
        let made = cx.add_root(thread, &name, |root, cx| {
            let disk = Disk::new(base.open_channel(root, cx)?, place.shard);
            cx.answer_bell(&bell, root);
            Ok::<_, OpenError>(Self {
                root,
                thread,
                bell: place.signals.bell(),
                place,
                inbox: inbox.unwrap_or_else(|| Rc::new(Inbox::new(root))),
                open: Some(Open { disk, commands, answers }),
                reader: Reader::default(),
                requests: Slots::new(REQUESTS),
                batch: Vec::new(),
                read_bytes: 0,
                _owner: owner,
                heir: None,
                is_giving_up: false,
            })
        });
        let root = made.inspect_err(|_| cx.remove_thread(thread))?;
        Ok((root.id(), Ends { commands: roots_commands, answers: roots_answers, bell }))
    }

    /// Passes what was located to the base, and takes what the base has ended.
    fn read(&mut self, cx: &mut Cx) {
        let Some(Open { disk, commands, .. }) = &mut self.open else { return };
        loop {
            let mut is_quiet = true;
            while let Some(Ended { tag, buffer, result }) = disk.next_ended() {
                match tag {
                    Work::Read(id) => {
                        self.reader.completed(id, buffer.expect("reads have buffers"), result);
                    }
                    Work::Write(tag) => commands.stage(Command::Written(DiskDone { tag, buffer, result })),
                }
            }
            while let Some(read) = self.reader.next_read() {
                is_quiet = false;
                disk.read(Work::Read(read.id), read.offset, read.data, read.len, cx);
            }
            if is_quiet {
                return;
            }
        }
    }

    /// Takes answers of the root. Returns how many, of which [`RING_BATCH`] is the most.
    fn take_answers(&mut self, cx: &mut Cx) -> usize {
        let Some(Open { disk, commands, answers }) = &mut self.open else { return 0 };
        let count = answers.receive(&mut self.batch);
        for answer in self.batch.drain(..) {
            match answer {
                Answer::Completed { tag, status } => {
                    let request = self.requests.remove(Key::from_raw(tag.0)).expect("it is answered once");
                    self.read_bytes -= request.read_bytes;
                    self.inbox.complete(request.channel, request.tag, status, cx);
                }
                Answer::Home(home) => {
                    let Home { owner, bell, root, link } = *home;
                    if *owner == *cx.handle() {
                        self.heir = Some((root, link));
                    }
                    (self.bell, self._owner) = (bell, owner);
                    // The bell that the branch has rung until now wakes no root any more.
                    self.bell.ring();
                }
                Answer::Write { tag, offset, buffer, len } => {
                    disk.write(Work::Write(tag), offset, buffer, len, cx);
                }
                Answer::Located { tag, extents } => {
                    let key = Key::from_raw(tag.0);
                    let request = self.requests.get_mut(key).expect("it is answered once");
                    if request.is_aborted {
                        self.read_bytes -= request.read_bytes;
                        self.inbox.complete(request.channel, request.tag, Status::Aborted, cx);
                        self.requests.remove(key);
                        commands.stage(Command::Release { extents, damaged_blocks: 0 });
                    } else {
                        let read =
                            self.reader.start(aryk_volume::Tag(tag.0), request.unit, request.data, extents);
                        request.stage = Stage::Reader(read);
                    }
                }
            }
        }
        count
    }

    /// Ends the requests whose data was read.
    fn take_ends(&mut self, cx: &mut Cx) {
        let Some(Open { commands, .. }) = &mut self.open else { return };
        while let Some(end) = self.reader.next_end() {
            match end {
                ReadEnd::Request { tag, status } => {
                    let request = self.requests.remove(Key::from_raw(tag.0)).expect("it ends once");
                    self.read_bytes -= request.read_bytes;
                    let status = match status {
                        aryk_volume::Status::Ok => Status::Ok,
                        aryk_volume::Status::Aborted => Status::Aborted,
                        _ => Status::Medium,
                    };
                    self.inbox.complete(request.channel, request.tag, status, cx);
                }
                ReadEnd::Extents { extents, damaged_blocks } => {
                    commands.stage(Command::Release { extents, damaged_blocks });
                }
            }
        }
    }

    /// Sends requests of the channels to the root, up to the budget of a poll. Returns whether there are more that can be sent.
    fn send_requests(&mut self) -> bool {
        let Some(Open { commands, .. }) = &mut self.open else { return false };
        let mut bytes = 0;
        for _ in 0..POLL_REQUESTS {
            // A disk that does not answer must not fill memory with what is aborted.
            if self.read_bytes + self.reader.abandoned_bytes() >= READ_BYTES {
                return false;
            }
            if bytes >= POLL_BYTES {
                break;
            }
            let Some(Submitted { client: Client::Channel(channel), volume, io }) = self.inbox.take() else {
                return false;
            };
            let len = u64::from(io.data.len());
            bytes += len;
            let request = InFlight::of(channel, volume, &io, false);
            self.read_bytes += request.read_bytes;
            let key = self.requests.add(request);
            commands.stage(Command::Submit { volume, io: Io { tag: Tag(key.raw()), ..io } });
        }
        !self.inbox.is_empty()
    }

    /// Ends what channels have aborted: at the root, or in the reader at once, whatever the base does.
    fn abort_requests(&mut self) {
        let Some(Open { commands, .. }) = &mut self.open else { return };
        let aborted = self.inbox.take_aborted();
        if aborted.is_empty() {
            return;
        }
        for (key, request) in self.requests.iter_mut().filter(|(_, request)| !request.is_aborted) {
            let Some(&volume) = aborted.get(&(Client::Channel(request.channel), request.tag)) else {
                continue;
            };
            request.is_aborted = true;
            match request.stage {
                Stage::Root => commands.stage(Command::Abort { tag: Tag(key.raw()), volume }),
                Stage::Reader(read) => self.reader.abort(read),
            }
        }
    }

    /// The root has ended: so do all requests, when the memory of each is no longer used.
    fn fail(&mut self, cx: &mut Cx) {
        self.inbox.end(cx);
        let keys: Vec<Key> = self.requests.iter().map(|(key, _)| key).collect();
        for key in keys {
            let request = self.requests.remove(key).expect("just found");
            if let Stage::Reader(read) = request.stage {
                self.reader.abandon(read);
            }
            self.inbox.complete(request.channel, request.tag, Status::Removed, cx);
        }
        self.read_bytes = 0;
    }

    /// Gives the base back, and removes the root.
    fn end(&mut self, cx: &mut Cx) {
        cx.local_state::<Inboxes>().remove(self.place.number, &self.inbox);
        // Channels that are open get no more from it.
        self.inbox.end(cx);
        self.open = None;
        // The root sees that the ring was dropped, also if the branch does not know yet where it is.
        self.place.signals.bell().ring();
        self.remove(cx);
    }

    fn remove(&self, cx: &Cx) {
        let (root, thread) = (self.root, self.thread);
        cx.local().defer(move |cx| {
            cx.remove_root(root);
            cx.remove_thread(thread);
        });
    }

    /// Whether the base has nothing of the branch.
    fn is_idle(&self) -> bool {
        self.reader.is_idle() && self.open.as_ref().is_none_or(|open| open.disk.is_idle())
    }
}

/// Makes a branch known to the root of its pool, wherever the root is. If the pool has ended, the branch sees that its rings were
/// dropped.
fn connect(place: Arc<Place>, ends: Ends, cx: &mut Cx) {
    let bell = ends.bell.clone();
    match place.root() {
        Some((owner, root)) if *owner == *cx.handle() => {
            if let Some(owner) = cx.root::<Owner>(root) {
                return owner.borrow_mut().receive(
                    Box::new(|owner, cx| owner.add_branch(ends, cx)),
                    false,
                    cx,
                );
            }
        }
        Some((owner, _)) => {
            return cx.post(&owner.clone(), move |cx| {
                // The reactor stays until the root was asked.
                let _owner = owner;
                connect(place, ends, cx);
            });
        }
        None => {}
    }
    drop(ends);
    bell.ring();
}

/// A branch that takes over the channels of the root when the root leaves this reactor.
pub(crate) struct Successor {
    branch: RootId,
    ends: Ends,
}

impl Successor {
    /// Adds the branch. Until [`Successor::start`] it does nothing.
    pub fn new(place: &Arc<Place>, inbox: &Rc<Inbox>, owner: Hold, cx: &mut Cx) -> Result<Self, OpenError> {
        let (branch, ends) = Branch::add(place, owner, Some(Rc::clone(inbox)), cx)?;
        Ok(Self { branch, ends })
    }

    /// Removes the branch: the root stays.
    pub fn remove(self, cx: &Cx) {
        if let Some(branch) = cx.root::<Branch>(self.branch) {
            let mut branch = branch.borrow_mut();
            branch.open = None;
            branch.remove(cx);
        }
    }

    /// Has the branch take over the channels. `take` gets the root's ends of its rings, and a function that takes a request that
    /// the root has, and returns its tag from now on.
    pub fn start(self, owner: Hold, cx: &mut Cx, take: impl FnOnce(Ends, &mut dyn FnMut(InFlight) -> Tag)) {
        let branch = cx.root::<Branch>(self.branch).expect("it is there until it has no channel");
        let mut branch = branch.borrow_mut();
        (branch.bell, branch._owner) = (branch.place.signals.bell(), owner);
        let Branch { requests, read_bytes, .. } = &mut *branch;
        take(self.ends, &mut |request| {
            *read_bytes += request.read_bytes;
            Tag(requests.add(request).raw())
        });
        branch.inbox.set_root(self.branch, cx);
    }
}

impl InFlight {
    /// A request of a channel that the root has.
    pub fn of(channel: Key, volume: VolumeKey, io: &Io, is_aborted: bool) -> Self {
        Self {
            channel,
            tag: io.tag,
            read_bytes: if io.op == Op::Read { io.data.len().into() } else { 0 },
            unit: io.lba.0 * u64::from(volume.block_units),
            data: io.data,
            stage: Stage::Root,
            is_aborted,
        }
    }
}

/// Gives the channels of a branch to the root of the pool, which has come to this reactor, if the base has nothing of the branch.
fn give_up(branch: RootId, cx: &mut Cx) {
    let Some(of_branch) = cx.root::<Branch>(branch) else { return };
    let mut it = of_branch.borrow_mut();
    it.is_giving_up = false;
    // If the root has ended, the branch does, too.
    let Some((root, link)) = it.heir else { return };
    let Some(owner) = cx.root::<Owner>(root) else { return };
    let mut owner = owner.borrow_mut();
    if owner.engine().is_none() {
        // The pool ends, and tells the branch when it has.
        return;
    }
    loop {
        let has_sent = it.open.as_mut().is_some_and(|open| open.commands.send());
        let has_received = owner.exchange(link, cx);
        let has_taken = it.take_answers(cx) > 0;
        if !has_sent && !has_received && !has_taken {
            break;
        }
    }
    it.read(cx);
    it.take_ends(cx);
    let has_commands = it.open.as_ref().is_none_or(|open| !open.commands.is_empty());
    if has_commands || !it.is_idle() || it.open.as_ref().is_none_or(|open| open.answers.is_abandoned()) {
        return cx.wake(branch);
    }
    let requests = std::mem::replace(&mut it.requests, Slots::new(0));
    it.open = None;
    it.remove(cx);
    owner.inherit(link, requests, Rc::clone(&it.inbox), cx);
}

impl Root for Branch {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let Some(Open { disk, answers, .. }) = &mut self.open else { return false };
        if self.inbox.root() != self.root {
            // The root of the pool has not left yet.
            return false;
        }
        // Read before the ring: all answers are then in the ring.
        let has_ended = answers.is_abandoned();
        disk.poll(Right::Valid, cx);
        self.read(cx);
        let mut has_more = self.take_answers(cx) == RING_BATCH;
        self.read(cx);
        self.take_ends(cx);
        if has_ended && !has_more {
            self.fail(cx);
            self.take_ends(cx);
        }
        self.abort_requests();
        self.take_ends(cx);
        has_more |= !has_ended && self.heir.is_none() && self.send_requests();
        if self.heir.is_some() && self.is_idle() && !has_ended && !has_more && !self.is_giving_up {
            self.is_giving_up = true;
            // When neither root runs.
            let root = self.root;
            cx.call_at(cx.now(), move |cx| give_up(root, cx));
        }
        let Some(Open { disk, commands, .. }) = &mut self.open else { return false };
        if commands.send() {
            self.bell.ring();
        }
        let is_over = self.requests.is_empty() && self.reader.is_idle() && disk.is_idle();
        let has_no_users = self.inbox.has_no_channels() && !self.inbox.has_heir();
        if is_over && (has_ended || (has_no_users && commands.is_empty())) {
            self.end(cx);
        } else if has_more || (!commands.is_empty() && !has_ended) {
            // The root makes room in its next turn.
            cx.wake(self.root);
        }
        true
    }
}
