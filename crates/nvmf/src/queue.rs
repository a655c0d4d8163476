//! An I/O queue: a root that owns a connection, and has a channel of each namespace. Reactor context.
//!
//! A poll takes what has completed, starts what has waited for a buffer, reads the socket once, and writes the output: the
//! replies of a turn leave together. What a host makes a queue hold is bounded by the queue's entries, and the data of commands
//! by its share of the reactor's [`Pool`]. A host that does not read its replies is not read from either.

mod commands;
mod copy;
mod disks;
mod fused;
mod reserve;
mod sealed;

use crate::pool::{Pool, Share, Taken};
use crate::reservation::Asker;
use crate::traffic::Counts;
use aryk_bdev::{Completion, Descriptor, OpenError};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::spec::entry::Fuse;
use aryk_nvme::spec::status::Status as NvmeStatus;
use aryk_nvme_fabrics::io::Rules;
use aryk_nvme_fabrics::tcp::{Fatal, Piece, Queue, Received, SlotId};
use aryk_reactor::{Cx, Nanos, Root, RootId, ThreadId, WatchId};
use aryk_tls::Session;
use commands::{Slot, Stage};
use disks::Disks;
use fused::FirstHalf;
use futures_channel::oneshot;
use reserve::Drain;
pub(crate) use reserve::Loss;
use rustix::event::{Timespec, epoll};
use sealed::Sealed;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that one poll reads.
const READ_MAX: usize = 256 << 10;
/// Pieces that one system call writes.
const PIECES_MAX: usize = 64;
/// Bytes that one poll writes.
const WRITE_MAX: usize = 512 << 10;

/// Bytes of data whose digests one poll computes for reads, and those of one more.
const DIGESTED_MAX: usize = 1 << 20;

/// Where sockets are read to: all queues of a reactor have one buffer.
struct Input(RefCell<Vec<u8>>);

impl Default for Input {
    fn default() -> Self {
        Self(RefCell::new(vec![0; READ_MAX]))
    }
}

/// A connection that becomes an I/O queue.
pub(crate) struct Connected {
    pub socket: TcpStream,
    /// The connection uses TLS.
    pub tls: Option<Session>,
    pub queue: Queue,
    pub entries: u16,
    /// How long the host has to send data that it was asked for, and to read a reply.
    pub patience: Nanos,
    /// What was received behind Connect.
    pub rest: Vec<u8>,
    /// Limits the lines about what hosts do.
    pub lines: Arc<LogLimit>,
    /// What the queue does is counted here.
    pub counts: Arc<Counts>,
    /// The way to control, which executes the commands of reservations.
    pub asker: Asker,
}

/// What tells that a full socket has room again.
struct Room {
    epoll: OwnedFd,
    watch: WatchId,
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
    room: Option<Room>,
    /// The socket has no room for the output.
    is_blocked: bool,
    sealed: Option<Sealed>,
    queue: Queue,
    rest: Vec<u8>,
    slots: Vec<Slot>,
    /// Commands that wait for a buffer.
    waiting: VecDeque<SlotId>,
    /// The command before the next one, if that is the first half of a fused operation.
    first_half: FirstHalf,
    patience: Nanos,
    /// When the socket has last taken output.
    sent_at: Nanos,
    /// When the queue looks whether its host keeps it waiting.
    look_at: Option<Nanos>,
    disks: Disks,
    pool: Rc<Pool>,
    share: Share,
    input: Rc<Input>,
    /// What the disks have completed and the queue has not taken yet.
    completions: Vec<Completion>,
    counts: Arc<Counts>,
    asker: Asker,
    /// Commands that control has.
    asked: u16,
    /// Commands that a reservation forbids, and that the disks still have.
    drains: Vec<Drain>,
    /// Connect has been answered; before that, nothing is read.
    has_begun: bool,
    /// No more input is read: the queue ends when its disks have completed what they have.
    is_closing: bool,
    ended: Option<oneshot::Sender<()>>,
    lines: Arc<LogLimit>,
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
        let Connected { socket, tls, queue, entries, patience, rest, lines, counts, asker } = connected;
        let watch = cx.watch(socket.as_fd().try_clone_to_owned()?, root)?;
        let mut made = Self {
            root,
            thread,
            socket,
            watch,
            room: None,
            is_blocked: false,
            sealed: tls.map(|session| Sealed::new(session, cx)),
            queue,
            rest,
            slots: (0..entries).map(|_| Slot::free()).collect(),
            waiting: VecDeque::new(),
            first_half: FirstHalf::None,
            patience,
            sent_at: cx.now(),
            look_at: None,
            disks: Disks::default(),
            pool: cx.local_state(),
            share: Share::default(),
            input: cx.local_state(),
            completions: Vec::new(),
            counts,
            asker,
            asked: 0,
            drains: Vec::new(),
            has_begun: false,
            is_closing: false,
            ended: Some(ended),
            lines,
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

    /// Answers Connect, whose slot is `id`, unless that has been done.
    pub fn begin(&mut self, id: Option<SlotId>, disables_flow_control: bool, controller: u16, cx: &mut Cx) {
        if let Some(id) = id {
            self.queue.connect(self.slots.len() as u16, disables_flow_control);
            self.queue.complete(id, NvmeStatus::new(0), controller.into());
        }
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

    /// Reads the socket once.
    fn receive(&mut self, cx: &mut Cx) -> bool {
        if !self.has_begun || self.is_closing || self.is_blocked {
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
                match self.sealed {
                    Some(_) => self.open(&bytes[..len], cx),
                    None => self.take(&bytes[..len], cx),
                }
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

    fn take(&mut self, mut input: &[u8], cx: &mut Cx) {
        while !self.is_closing {
            match self.queue.receive(&mut input) {
                Ok(None) => return,
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    // The second half of a fused operation is added to the data of the first.
                    let halves = if entry.fuse() == Some(Fuse::First) { 2 } else { 1 };
                    let room = halves * data_len as usize;
                    let data = (room > 0).then(|| self.pool.take_for_capsule(room));
                    self.slots[usize::from(slot.0)] = Slot::new(entry, data_len, data);
                }
                Ok(Some(Received::Data { slot, offset, bytes })) => {
                    let data = self.slots[usize::from(slot.0)].data.as_mut().expect("data was expected");
                    data.buffer.write(offset as usize, bytes);
                }
                Ok(Some(Received::Ready { slot, is_intact })) => self.execute(slot, is_intact, cx),
                Ok(Some(Received::Terminated(fatal))) => {
                    limited!(self.lines, warn, ?fatal, "a host has ended its connection");
                    self.close(cx);
                }
                Err(fatal) => self.terminate(fatal, cx),
            }
        }
    }

    /// Ends the connection with a reason.
    fn terminate(&mut self, fatal: Fatal, cx: &mut Cx) {
        limited!(self.lines, warn, ?fatal, "a host has violated the protocol: its connection ends");
        self.queue.terminate(fatal);
        self.send(cx);
        self.close(cx);
    }

    fn has_output(&self) -> bool {
        !self.queue.is_output_empty() || self.sealed.as_ref().is_some_and(Sealed::has_unsent)
    }

    /// Writes the output, as far as the socket takes it.
    fn send(&mut self, cx: &mut Cx) -> bool {
        let was_blocked = std::mem::take(&mut self.is_blocked);
        let mut left = WRITE_MAX;
        while self.has_output() && !self.is_closing && !self.is_blocked {
            if left == 0 {
                cx.wake(self.root);
                break;
            }
            let written = match self.sealed {
                Some(_) => self.write_sealed(left, cx),
                None => self.write_some(left, cx),
            };
            match written {
                Ok(len) => left -= len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.is_blocked = true;
                    if let Err(error) = self.await_room(cx) {
                        tracing::warn!(%error, "cannot wait for a host that does not read its replies");
                        self.close(cx);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "a queue of a host has lost its connection");
                    self.close(cx);
                }
            }
        }
        if was_blocked && !self.is_blocked {
            // The socket does not report again the input that has arrived meanwhile.
            cx.wake(self.root);
        }
        left < WRITE_MAX
    }

    /// Writes up to `max` bytes with one system call.
    fn write_some(&mut self, max: usize, cx: &mut Cx) -> io::Result<usize> {
        let Self { queue, slots, socket, pool, share, waiting, root, sent_at, .. } = self;
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let (mut count, mut left) = (0, max);
        for (place, piece) in pieces.iter_mut().zip(queue.output()) {
            let bytes = match piece {
                Piece::Bytes(bytes) => bytes,
                Piece::Data { slot, offset, len } => {
                    let data = slots[usize::from(slot.0)].data.as_ref().expect("kept until it is sent");
                    &data.buffer.bytes()[offset as usize..][..len as usize]
                }
            };
            *place = IoSlice::new(&bytes[..bytes.len().min(left)]);
            left -= place.len();
            count += 1;
            if left == 0 {
                break;
            }
        }
        let len = socket.write_vectored(&pieces[..count])?;
        *sent_at = cx.now();
        queue.sent(len, |id| {
            if let Some(data) = slots[usize::from(id.0)].data.take() {
                give_back(pool, share, data, waiting, *root, cx);
            }
        });
        Ok(len)
    }

    /// Has the root woken when the socket has room.
    fn await_room(&mut self, cx: &mut Cx) -> io::Result<()> {
        let event = epoll::EventFlags::OUT | epoll::EventFlags::ONESHOT;
        let data = epoll::EventData::new_u64(0);
        if let Some(Room { epoll, .. }) = &self.room {
            // The next report is one only if the last one has been taken.
            let mut reports = [epoll::Event { flags: epoll::EventFlags::empty(), data }];
            epoll::wait(epoll, &mut reports, Some(&Timespec::default()))?;
            epoll::modify(epoll, &self.socket, data, event)?;
        } else {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let watch = cx.watch(epoll.try_clone()?, self.root)?;
            epoll::add(&epoll, &self.socket, data, event)?;
            self.room = Some(Room { epoll, watch });
        }
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
            Stage::Requested { since, .. } => Some(since),
            _ => None,
        });
        let Some(since) = requested.chain(self.is_blocked.then_some(self.sent_at)).min() else { return };
        if cx.now().0 >= since.0 + self.patience.0 {
            limited!(
                self.lines,
                warn,
                "a host neither sends data nor reads replies for long: its connection ends"
            );
            self.close(cx);
        } else {
            self.await_host(since, cx);
        }
    }

    /// Ends the queue, if it is closing and its disks have nothing.
    fn finish(&mut self, cx: &mut Cx) {
        if !self.is_closing || self.disks.has_requests() || !self.completions.is_empty() {
            return;
        }
        let Some(ended) = self.ended.take() else { return };
        self.pool.forget(self.root);
        cx.unwatch(self.watch);
        if let Some(Room { watch, .. }) = self.room.take() {
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

/// Gives a buffer back, and wakes what may go on with it.
fn give_back(
    pool: &Pool,
    share: &mut Share,
    data: Taken,
    waiting: &VecDeque<SlotId>,
    own: RootId,
    cx: &mut Cx,
) {
    let own = (!waiting.is_empty()).then_some(own);
    pool.give_back(share, data).into_iter().chain(own).for_each(|root| cx.wake(root));
}

#[cfg(test)]
mod tests;
