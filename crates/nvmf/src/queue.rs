//! An I/O queue: a root that owns a connection, and has a channel of each namespace. Reactor context.
//!
//! A poll takes what has completed, starts what has waited for a buffer, reads the socket once, and writes the output: the
//! replies of a turn leave together. What a host makes a queue hold is bounded by the queue's entries, and the data of commands
//! by its share of the reactor's [`Pool`]. A host that does not read its replies is not read from either.

mod disks;

use crate::pool::{Pool, Share, TRANSFER_MAX, Taken};
use crate::status;
use aryk_bdev::{Blocks, Completion, Descriptor, Io, Lba, Op, OpenError, Status, Tag};
use aryk_dma::Sgl as Memory;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::command::{self, Command};
use aryk_nvme_fabrics::io::{Checked, Request, Rules};
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{Fatal, Piece, Queue, Received, SlotId};
use aryk_reactor::{Cx, Nanos, Root, RootId, ThreadId, WatchId};
use disks::Disks;
use futures_channel::oneshot;
use rustix::event::epoll;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::rc::Rc;

/// Bytes that one poll reads.
const READ_MAX: usize = 256 << 10;
/// Pieces that one system call writes.
const PIECES_MAX: usize = 64;
/// System calls that write in one poll.
const WRITES_MAX: u32 = 4;

/// Where sockets are read to: all queues of a reactor have one buffer.
struct Input(RefCell<Vec<u8>>);

impl Default for Input {
    fn default() -> Self {
        Self(RefCell::new(vec![0; READ_MAX]))
    }
}

/// Where a command is.
#[derive(Debug)]
enum Stage {
    /// Its slot is free, or its capsule arrives, or its completion is being sent.
    Idle,
    /// It waits for a buffer.
    Waiting(Checked, u32),
    /// Its data arrives by an R2T, which was sent at this time.
    Requested(Checked, u32, Nanos),
    /// The disk has it. A discard has several ranges, and ends with the first failure among them.
    Running { op: Op, len: u32, left: u32, status: Status },
}

#[derive(Debug)]
struct Slot {
    entry: SubmissionEntry,
    capsule_len: u32,
    data: Option<Taken>,
    stage: Stage,
    /// The number of the namespace against which it was checked.
    number: u64,
}

impl Slot {
    const fn new(entry: SubmissionEntry, capsule_len: u32, data: Option<Taken>) -> Self {
        Self { entry, capsule_len, data, stage: Stage::Idle, number: 0 }
    }
}

/// A connection that becomes an I/O queue.
pub(crate) struct Connected {
    pub socket: TcpStream,
    pub queue: Queue,
    pub entries: u16,
    /// How long the host has to send data that it was asked for, and to read a reply.
    pub patience: Nanos,
    /// What was received behind Connect.
    pub rest: Vec<u8>,
}

/// A namespace for a queue.
#[derive(Clone)]
pub(crate) struct Opened {
    pub nsid: u32,
    /// Its number among all namespaces of the target: a later one may have the same identifier.
    pub number: u64,
    pub rules: Rules,
    pub descriptor: Descriptor,
}

/// The root.
pub(crate) struct IoQueue {
    root: RootId,
    thread: ThreadId,
    socket: TcpStream,
    watch: WatchId,
    /// Tells when a full socket has room again.
    room: Option<WatchId>,
    patience: Nanos,
    /// When the socket has last taken output.
    sent_at: Nanos,
    /// When the queue looks whether its host keeps it waiting.
    look_at: Option<Nanos>,
    queue: Queue,
    rest: Vec<u8>,
    slots: Vec<Slot>,
    /// Commands that wait for a buffer.
    waiting: VecDeque<SlotId>,
    disks: Disks,
    pool: Rc<Pool>,
    share: Share,
    input: Rc<Input>,
    completions: Vec<Completion>,
    /// Connect has been answered; before that, nothing is read.
    has_begun: bool,
    /// No more input is read: the queue ends when its disks have completed what they have.
    is_closing: bool,
    ended: Option<oneshot::Sender<()>>,
}

impl Root for IoQueue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut has_worked = self.complete(cx);
        has_worked |= self.start_waiting(cx);
        has_worked |= self.receive(cx);
        has_worked |= self.send(cx);
        self.look_at_host(cx);
        self.finish(cx);
        has_worked
    }
}

impl IoQueue {
    pub fn new(
        connected: Connected,
        namespaces: Vec<Opened>,
        ended: oneshot::Sender<()>,
        (root, thread): (RootId, ThreadId),
        cx: &mut Cx,
    ) -> io::Result<Self> {
        let Connected { socket, queue, entries, patience, rest } = connected;
        let watch = cx.watch(socket.as_fd().try_clone_to_owned()?, root)?;
        let free = || Slot::new(SubmissionEntry::new(0, 0), 0, None);
        let mut made = Self {
            root,
            thread,
            socket,
            watch,
            room: None,
            patience,
            sent_at: cx.now(),
            look_at: None,
            queue,
            rest,
            slots: (0..entries).map(|_| free()).collect(),
            waiting: VecDeque::new(),
            disks: Disks::default(),
            pool: cx.local_state(),
            share: Share::default(),
            input: cx.local_state(),
            completions: Vec::new(),
            has_begun: false,
            is_closing: false,
            ended: Some(ended),
        };
        for namespace in namespaces {
            // A disk that cannot be opened is one that is being removed: its commands fail.
            let nsid = namespace.nsid;
            if let Err(error) = made.add(namespace, cx) {
                tracing::warn!(nsid, %error, "a queue of a host cannot open a namespace");
            }
        }
        Ok(made)
    }

    /// Answers Connect, whose slot is `id`.
    pub fn begin(&mut self, id: SlotId, disables_flow_control: bool, controller: u16, cx: &mut Cx) {
        self.queue.connect(self.slots.len() as u16, disables_flow_control);
        self.queue.complete(id, NvmeStatus::new(0), controller.into());
        self.has_begun = true;
        cx.kick(self.root);
    }

    /// Adds a namespace, unless the queue has it.
    pub fn add(&mut self, opened: Opened, cx: &mut Cx) -> Result<(), OpenError> {
        self.disks.add(opened, self.root, cx)
    }

    /// Has namespaces, named by identifier and number, follow other rules, as after a resize.
    pub fn update(&mut self, rules: &[(u32, u64, Rules)]) {
        for &(nsid, number, rules) in rules {
            if let Some(disk) = self.disks.get_mut(nsid, number) {
                disk.rules = rules;
            }
        }
    }

    /// Removes a namespace: its commands are aborted, and later ones fail. `closed` is told when its channel is closed, and
    /// dropped if there is no such namespace.
    pub fn remove(&mut self, nsid: u32, number: u64, closed: oneshot::Sender<()>, cx: &mut Cx) {
        self.disks.remove(nsid, number, closed, cx);
        cx.wake(self.root);
    }

    /// Ends the queue.
    pub fn close(&mut self, cx: &mut Cx) {
        if !self.is_closing {
            self.is_closing = true;
            // The host sees the end at once.
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
            self.disks.abort_all(cx);
        }
        cx.wake(self.root);
    }

    /// Takes what the disks have completed.
    fn complete(&mut self, cx: &mut Cx) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        // All that a wake can be for is done in this poll.
        let has_event = cx.clear_wake(self.root);
        self.disks.poll(has_event, cx, &mut completions);
        let has_any = !completions.is_empty();
        for completion in completions.drain(..) {
            self.complete_one(completion);
        }
        self.completions = completions;
        self.disks.close_idle();
        has_any
    }

    fn complete_one(&mut self, completion: Completion) {
        let id = SlotId(completion.tag.0 as u16);
        let slot = &mut self.slots[usize::from(id.0)];
        let Stage::Running { op, len, left, status } = &mut slot.stage else {
            unreachable!("the disk completes what it has, once")
        };
        *status = status.or(completion.status);
        *left -= 1;
        if *left > 0 {
            return;
        }
        let (op, len, status) = (*op, *len, *status);
        slot.stage = Stage::Idle;
        if let Some(data) = slot.data.as_mut().filter(|_| op.has_data()) {
            data.buffer.reclaim();
        }
        match &slot.data {
            Some(data) if op == Op::Read && status.is_ok() => {
                self.queue.complete_with_data(id, &data.buffer.bytes()[..len as usize], 0);
            }
            _ => self.queue.complete(id, status::of(status, op), 0),
        }
    }

    /// Starts commands that have waited for a buffer.
    fn start_waiting(&mut self, cx: &mut Cx) -> bool {
        let mut has_any = false;
        while let Some(&id) = self.waiting.front() {
            let slot = &mut self.slots[usize::from(id.0)];
            let Stage::Waiting(checked, len) = slot.stage else { unreachable!("it waits") };
            let Some(data) = self.pool.take(&mut self.share, len as usize, self.root) else { break };
            slot.data = Some(data);
            self.waiting.pop_front();
            self.go_on(id, checked, len, cx);
            has_any = true;
        }
        has_any
    }

    /// Reads the socket once.
    fn receive(&mut self, cx: &mut Cx) -> bool {
        if !self.has_begun || self.is_closing || self.is_blocked() {
            return false;
        }
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.take(&rest, cx);
            cx.wake(self.root);
            return true;
        }
        let input = Rc::clone(&self.input);
        let mut bytes = input.0.borrow_mut();
        match self.socket.read(&mut bytes) {
            Ok(0) => self.close(cx),
            Ok(len) => {
                self.take(&bytes[..len], cx);
                if len == bytes.len() {
                    cx.wake(self.root);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == ErrorKind::Interrupted => cx.wake(self.root),
            Err(error) => {
                tracing::debug!(%error, "a queue of a host has lost its connection");
                self.close(cx);
            }
        }
        true
    }

    /// Whether the socket has no room for the output.
    const fn is_blocked(&self) -> bool {
        self.room.is_some()
    }

    fn take(&mut self, mut input: &[u8], cx: &mut Cx) {
        while !self.is_closing {
            match self.queue.receive(&mut input) {
                Ok(None) => return,
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    let data = (data_len > 0).then(|| self.pool.take_for_capsule(data_len as usize));
                    self.slots[usize::from(slot.0)] = Slot::new(entry, data_len, data);
                }
                Ok(Some(Received::Data { slot, offset, bytes })) => {
                    let data = self.slots[usize::from(slot.0)].data.as_mut().expect("data was expected");
                    data.buffer.write(offset as usize, bytes);
                }
                Ok(Some(Received::Ready { slot, is_intact })) => self.execute(slot, is_intact, cx),
                Ok(Some(Received::Terminated(fatal))) => {
                    tracing::warn!(?fatal, "a host has ended its connection");
                    self.close(cx);
                }
                Err(fatal) => self.terminate(fatal, cx),
            }
        }
    }

    /// Ends the connection with a reason.
    fn terminate(&mut self, fatal: Fatal, cx: &mut Cx) {
        tracing::warn!(?fatal, "a host has violated the protocol: its connection ends");
        self.queue.terminate(fatal);
        self.send(cx);
        self.close(cx);
    }

    fn fail(&mut self, id: SlotId, code: Code) {
        self.queue.complete(id, status::refusal(code), 0);
    }

    /// Executes a command, or goes on with one whose data has arrived.
    fn execute(&mut self, id: SlotId, is_intact: bool, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        let stage = std::mem::replace(&mut slot.stage, Stage::Idle);
        if !is_intact {
            return self.queue.complete(id, Code::TRANSIENT_TRANSPORT_ERROR.status(), 0);
        }
        if let Stage::Requested(checked, len, _) = stage {
            return self.start(id, checked, len, cx);
        }
        match Self::check(&self.disks, &slot.entry, slot.capsule_len) {
            Ok(None) => self.queue.complete(id, NvmeStatus::new(0), 0),
            Ok(Some((checked, len, number))) => {
                slot.number = number;
                let needs_buffer = len > 0 && slot.data.is_none();
                if !needs_buffer {
                    return self.start(id, checked, len, cx);
                }
                // Those that wait come first.
                let data = match self.waiting.is_empty() {
                    true => self.pool.take(&mut self.share, len as usize, self.root),
                    false => None,
                };
                if let Some(data) = data {
                    slot.data = Some(data);
                    self.go_on(id, checked, len, cx);
                } else {
                    slot.stage = Stage::Waiting(checked, len);
                    self.waiting.push_back(id);
                }
            }
            Err(code) => self.fail(id, code),
        }
    }

    /// Checks a command. Returns the bytes of its data, and the number of its namespace. `None`: there is nothing to do for it.
    fn check(
        disks: &Disks,
        entry: &SubmissionEntry,
        capsule_len: u32,
    ) -> Result<Option<(Checked, u32, u64)>, Code> {
        if entry.opcode() == command::OPCODE {
            return match Command::decode(entry)? {
                Command::Disconnect { .. } => Ok(None),
                _ => Err(Code::INVALID_FIELD),
            };
        }
        let sgl = Sgl::decode(entry)?;
        sgl.check(capsule_len, TRANSFER_MAX as u32)?;
        let disk = disks.get(entry.nsid()).ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)?;
        let checked = disk.rules.check(entry, sgl.len())?;
        Ok(Some((checked, sgl.len(), disk.number)))
    }

    /// Goes on with a command that has got its buffer.
    fn go_on(&mut self, id: SlotId, checked: Checked, len: u32, cx: &mut Cx) {
        if checked.request.takes_data() {
            self.slots[usize::from(id.0)].stage = Stage::Requested(checked, len, cx.now());
            self.queue.request_data(id, 0, len);
            self.await_host(cx.now(), cx);
        } else {
            self.start(id, checked, len, cx);
        }
    }

    /// Gives a command to its disk. The namespace may have gone or shrunk meanwhile; then the block layer refuses it.
    fn start(&mut self, id: SlotId, checked: Checked, len: u32, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        let Some(disk) = self.disks.get_mut(slot.entry.nsid(), slot.number) else {
            return self.fail(id, Code::INVALID_NAMESPACE_OR_FORMAT);
        };
        let io = |op, lba, blocks: u32| Io {
            tag: Tag(id.0.into()),
            op,
            fua: false,
            may_unmap: false,
            lba: Lba(lba),
            blocks: Blocks(blocks.into()),
            source: Lba::ZERO,
            data: Memory::EMPTY,
        };
        let io = match checked.request {
            Request::Read(range) => io(Op::Read, range.lba, range.blocks),
            Request::Write { range, fua } => Io { fua, ..io(Op::Write, range.lba, range.blocks) },
            Request::Compare(range) => io(Op::Compare, range.lba, range.blocks),
            Request::WriteZeroes { range, fua, may_deallocate } => {
                Io { fua, may_unmap: may_deallocate, ..io(Op::WriteZeroes, range.lba, range.blocks) }
            }
            Request::Flush => io(Op::Flush, 0, 0),
            Request::Hint => return self.queue.complete(id, NvmeStatus::new(0), 0),
            Request::Deallocate { .. } => return self.deallocate(id, cx),
        };
        debug_assert!(!io.op.has_data() || u64::from(len) == io.blocks.0 << disk.block_shift);
        let data = match slot.data.as_mut().filter(|_| io.op.has_data()) {
            Some(data) => data.buffer.lend().first(len),
            None => Memory::EMPTY,
        };
        slot.stage = Stage::Running { op: io.op, len, left: 1, status: Status::Ok };
        disk.channel.submit(Io { data, ..io }, cx);
    }

    /// Discards ranges: those before one that cannot be are discarded.
    fn deallocate(&mut self, id: SlotId, cx: &mut Cx) {
        let slot = &mut self.slots[usize::from(id.0)];
        let disk = self.disks.get_mut(slot.entry.nsid(), slot.number).expect("the caller has found it");
        let rules = disk.rules;
        let data = slot.data.as_ref().map_or(&[][..], |data| data.buffer.bytes());
        let listed = &data[..data.len().min(16 * (1 + (slot.entry.cdw(10) & 0xff) as usize))];
        let mut code = None;
        let mut left = 0;
        for range in rules.ranges(listed) {
            match range {
                Ok(range) => {
                    let io = Io {
                        tag: Tag(id.0.into()),
                        op: Op::Unmap,
                        fua: false,
                        may_unmap: true,
                        lba: Lba(range.lba),
                        blocks: Blocks(range.blocks.into()),
                        source: Lba::ZERO,
                        data: Memory::EMPTY,
                    };
                    disk.channel.submit(io, cx);
                    left += 1;
                }
                Err(failed) => {
                    code = Some(failed);
                    break;
                }
            }
        }
        let status = code.map_or(Status::Ok, |_| Status::OutOfRange);
        match (left, code) {
            (0, None) => self.queue.complete(id, NvmeStatus::new(0), 0),
            (0, Some(code)) => self.fail(id, code),
            _ => slot.stage = Stage::Running { op: Op::Unmap, len: 0, left, status },
        }
    }

    /// Writes the output, as far as the socket takes it.
    fn send(&mut self, cx: &mut Cx) -> bool {
        if let Some(watch) = self.room.take() {
            cx.unwatch(watch);
        }
        let mut has_sent = false;
        for _ in 0..WRITES_MAX {
            if self.queue.is_output_empty() || self.is_closing {
                return has_sent;
            }
            match self.write_some(cx) {
                Ok(()) => has_sent = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if let Err(error) = self.await_room(cx) {
                        tracing::warn!(%error, "cannot wait for a host that does not read its replies");
                        self.close(cx);
                    }
                    return has_sent;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "a queue of a host has lost its connection");
                    self.close(cx);
                }
            }
        }
        cx.wake(self.root);
        has_sent
    }

    fn write_some(&mut self, cx: &mut Cx) -> io::Result<()> {
        let Self { queue, slots, socket, pool, share, waiting, root, sent_at, .. } = self;
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let mut count = 0;
        for (place, piece) in pieces.iter_mut().zip(queue.output()) {
            *place = match piece {
                Piece::Bytes(bytes) => IoSlice::new(bytes),
                Piece::Data { slot, offset, len } => {
                    let data = slots[usize::from(slot.0)].data.as_ref().expect("kept until it is sent");
                    IoSlice::new(&data.buffer.bytes()[offset as usize..][..len as usize])
                }
            };
            count += 1;
        }
        let len = socket.write_vectored(&pieces[..count])?;
        *sent_at = cx.now();
        queue.sent(len, |id| {
            if let Some(data) = slots[usize::from(id.0)].data.take() {
                let own = (!waiting.is_empty()).then_some(*root);
                pool.give_back(share, data).into_iter().chain(own).for_each(|root| cx.wake(root));
            }
        });
        Ok(())
    }

    /// Has the root woken when the socket has room.
    fn await_room(&mut self, cx: &mut Cx) -> io::Result<()> {
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = epoll::EventFlags::OUT | epoll::EventFlags::ONESHOT;
        epoll::add(&room, &self.socket, epoll::EventData::new_u64(0), event)?;
        self.room = Some(cx.watch(room, self.root)?);
        self.await_host(self.sent_at, cx);
        Ok(())
    }

    /// Has the queue look at its host when it has waited for it since `since` for long.
    fn await_host(&mut self, since: Nanos, cx: &mut Cx) {
        if self.look_at.is_none() {
            let at = Nanos(since.0 + self.patience.0);
            self.look_at = Some(at);
            cx.wake_at(self.root, at);
        }
    }

    /// Ends the queue if its host has kept it waiting for too long: the buffers that it holds are those of other hosts, too.
    fn look_at_host(&mut self, cx: &mut Cx) {
        if self.look_at.is_none_or(|at| cx.now() < at) {
            return;
        }
        self.look_at = None;
        let requested = self.slots.iter().filter_map(|slot| match slot.stage {
            Stage::Requested(_, _, since) => Some(since),
            _ => None,
        });
        let Some(since) = requested.chain(self.room.map(|_| self.sent_at)).min() else { return };
        if cx.now().0 >= since.0 + self.patience.0 {
            tracing::warn!("a host neither sends data nor reads replies for long: its connection ends");
            self.close(cx);
        } else {
            self.await_host(since, cx);
        }
    }

    /// Ends the queue, if it is closing and its disks have nothing.
    fn finish(&mut self, cx: &mut Cx) {
        if !self.is_closing || self.disks.has_requests() {
            return;
        }
        let Some(ended) = self.ended.take() else { return };
        self.pool.forget(self.root);
        cx.unwatch(self.watch);
        if let Some(watch) = self.room.take() {
            cx.unwatch(watch);
        }
        for data in self.slots.iter_mut().filter_map(|slot| slot.data.take()) {
            if let Some(root) = self.pool.give_back(&mut self.share, data) {
                cx.wake(root);
            }
        }
        self.disks.close();
        let _ = ended.send(());
        let (root, thread) = (self.root, self.thread);
        cx.local().defer(move |cx| {
            cx.remove_root(root);
            cx.remove_thread(thread);
        });
    }
}
