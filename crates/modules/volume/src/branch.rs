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

use crate::READ_BYTES;
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
}

/// A request of a channel.
struct InFlight {
    channel: Key,
    tag: Tag,
    /// Bytes of a read.
    read_bytes: u64,
    /// The first unit of the volume.
    unit: u64,
    data: Sgl,
    stage: Stage,
    /// Whether its channel has aborted it.
    is_aborted: bool,
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
    /// Keeps the reactor of the pool from ending before the root knows of this branch.
    _owner: Hold,
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
        let base = place.base()?;
        let (commands, roots_commands) = ring(RING);
        let (roots_answers, answers) = ring(RING);
        let bell = Bell::new(cx.handle());
        let name = format!("volumes on {}", base.bdev().name());
        let thread = cx.add_thread(name.clone(), CoreSet::from_iter([cx.handle().core()]));
        let (of_branch, reactor) = (Arc::clone(place), owner.clone());
        let made = cx.add_root(thread, &name, |root, cx| {
            let disk = Disk::new(base.open_channel(root, cx)?, of_branch.shard);
            cx.answer_bell(&bell, root);
            Ok::<_, OpenError>(Self {
                root,
                thread,
                place: of_branch,
                inbox: Rc::new(Inbox::new(root)),
                open: Some(Open { disk, commands, answers }),
                reader: Reader::default(),
                requests: Slots::new(REQUESTS),
                batch: Vec::new(),
                read_bytes: 0,
                _owner: owner,
            })
        });
        let root = made.inspect_err(|_| cx.remove_thread(thread))?;
        let inbox = Rc::clone(&cx.root::<Self>(root.id()).expect("just added").borrow().inbox);
        cx.local_state::<Inboxes>().add(place.number, Rc::clone(&inbox));
        let number = place.number;
        cx.post(&reactor, move |cx| {
            let owner = cx.local_state::<Inboxes>().find(number);
            match owner.and_then(|inbox| cx.root::<Owner>(inbox.root())) {
                Some(owner) => owner.borrow_mut().add_branch(roots_commands, roots_answers, bell, cx),
                None => {
                    drop((roots_commands, roots_answers));
                    bell.ring();
                }
            }
        });
        Ok(inbox)
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

    /// Takes answers of the root. Returns whether there may be more.
    fn take_answers(&mut self, cx: &mut Cx) -> bool {
        let Some(Open { disk, commands, answers }) = &mut self.open else { return false };
        let count = answers.receive(&mut self.batch);
        for answer in self.batch.drain(..) {
            match answer {
                Answer::Completed { tag, status } => {
                    let request = self.requests.remove(Key::from_raw(tag.0)).expect("it is answered once");
                    self.read_bytes -= request.read_bytes;
                    self.inbox.complete(request.channel, request.tag, status, cx);
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
        count == RING_BATCH
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
            let read_bytes = if io.op == Op::Read { len } else { 0 };
            self.read_bytes += read_bytes;
            bytes += len;
            let key = self.requests.add(InFlight {
                channel,
                tag: io.tag,
                read_bytes,
                unit: io.lba.0 * u64::from(volume.block_units),
                data: io.data,
                stage: Stage::Root,
                is_aborted: false,
            });
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
        cx.local_state::<Inboxes>().remove(self.place.number);
        // Channels that are open get no more from it.
        self.inbox.end(cx);
        self.open = None;
        // The root sees that the ring was dropped.
        self.place.bell.ring();
        let (root, thread) = (self.root, self.thread);
        cx.local().defer(move |cx| {
            cx.remove_root(root);
            cx.remove_thread(thread);
        });
    }
}

impl Root for Branch {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let Some(Open { disk, answers, .. }) = &mut self.open else { return false };
        // Read before the ring: all answers are then in the ring.
        let has_ended = answers.is_abandoned();
        disk.poll(cx);
        self.read(cx);
        let mut has_more = self.take_answers(cx);
        self.read(cx);
        self.take_ends(cx);
        if has_ended && !has_more {
            self.fail(cx);
            self.take_ends(cx);
        }
        self.abort_requests();
        self.take_ends(cx);
        has_more |= !has_ended && self.send_requests();
        let Some(Open { disk, commands, .. }) = &mut self.open else { return false };
        if commands.send() {
            self.place.bell.ring();
        }
        let is_over = self.requests.is_empty() && self.reader.is_idle() && disk.is_idle();
        if is_over && (has_ended || (self.inbox.has_no_channels() && commands.is_empty())) {
            self.end(cx);
        } else if has_more || (!commands.is_empty() && !has_ended) {
            // The root makes room in its next turn.
            cx.wake(self.root);
        }
        true
    }
}
