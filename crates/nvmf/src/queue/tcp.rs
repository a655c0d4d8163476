//! A queue whose connection is one of TCP. Reactor context.

use super::commands::Slot;
use super::link::{Carrier, Link};
use super::sealed::Sealed;
use super::{IoQueue, give_back};
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::Fuse;
use aryk_nvme_fabrics::tcp::{Fatal, Piece, Queue, Received};
use aryk_reactor::{Cx, Nanos, RootId, WatchId};
use aryk_tls::Session;
use rustix::event::{Timespec, epoll};
use std::cell::RefCell;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Bytes that one poll reads.
const READ_MAX: usize = 256 << 10;
/// Pieces that one system call writes.
const PIECES_MAX: usize = 64;
/// Bytes that one poll writes.
pub(super) const WRITE_MAX: usize = 512 << 10;

/// Where sockets are read to: all queues of a reactor have one buffer.
struct Input(RefCell<Vec<u8>>);

impl Default for Input {
    fn default() -> Self {
        Self(RefCell::new(vec![0; READ_MAX]))
    }
}

/// What tells that a full socket has room again.
struct Room {
    epoll: OwnedFd,
    watch: WatchId,
}

/// The connection.
pub(super) struct Tcp {
    pub socket: TcpStream,
    watch: WatchId,
    room: Option<Room>,
    /// The socket has no room for the output.
    pub is_blocked: bool,
    pub sealed: Option<Sealed>,
    pub queue: Queue,
    /// What was received behind Connect.
    rest: Vec<u8>,
    /// When the socket has last taken output.
    pub sent_at: Nanos,
    input: Rc<Input>,
}

impl Tcp {
    pub fn new(
        (socket, tls): (TcpStream, Option<Session>),
        queue: Queue,
        rest: Vec<u8>,
        root: RootId,
        cx: &mut Cx,
    ) -> io::Result<Self> {
        let watch = cx.watch(socket.as_fd().try_clone_to_owned()?, root)?;
        let sealed = tls.map(|session| Sealed::new(session, cx));
        let input = cx.local_state();
        Ok(Self {
            socket,
            watch,
            room: None,
            is_blocked: false,
            sealed,
            queue,
            rest,
            sent_at: cx.now(),
            input,
        })
    }

    pub fn has_output(&self) -> bool {
        !self.queue.is_output_empty() || self.sealed.as_ref().is_some_and(Sealed::has_unsent)
    }

    /// The connection for another reactor. Nothing is unsent, and the socket is not watched.
    pub fn into_carrier(self) -> Carrier {
        let Self { socket, sealed, queue, rest, .. } = self;
        Carrier::Tcp { socket, tls: sealed.map(Sealed::into_session), queue, rest }
    }

    /// The host sees the end at once.
    pub fn shut_down(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub fn unwatch(&mut self, cx: &mut Cx) {
        cx.unwatch(self.watch);
        if let Some(Room { watch, .. }) = self.room.take() {
            cx.unwatch(watch);
        }
    }
}

impl IoQueue {
    /// Reads the socket once.
    pub(super) fn receive_tcp(&mut self, cx: &mut Cx) -> bool {
        let Link::Tcp(tcp) = &mut self.link else { return false };
        if !self.has_begun || self.is_closing || tcp.is_blocked {
            return false;
        }
        let rest = std::mem::take(&mut tcp.rest);
        if !rest.is_empty() {
            self.take(&rest, cx);
            cx.wake(self.root);
            return true;
        }
        let input = Rc::clone(&tcp.input);
        let mut bytes = input.0.borrow_mut();
        match tcp.socket.read(&mut bytes) {
            Ok(0) => self.close(cx),
            Ok(len) => {
                match tcp.sealed {
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

    pub(super) fn take(&mut self, mut input: &[u8], cx: &mut Cx) {
        while let Link::Tcp(tcp) = &mut self.link
            && !self.is_closing
        {
            match tcp.queue.receive(&mut input) {
                Ok(None) => return,
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    // The second half of a fused operation is added to the data of the first.
                    let halves = if entry.fuse() == Some(Fuse::First) { 2 } else { 1 };
                    let room = halves * data_len as usize;
                    let data = (room > 0).then(|| self.pool.take_for_capsule(room));
                    let place = usize::from(slot.0);
                    if place >= self.slots.len() {
                        self.add_slots(place);
                    }
                    self.slots[place] = Slot::new(entry, data_len, data);
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

    /// Adds slots, so that there is one at `place`. The host has more commands at a time than ever before.
    #[cold]
    fn add_slots(&mut self, place: usize) {
        let count = (place + 1).next_power_of_two().min(self.entries.into());
        self.slots.resize_with(count, Slot::free);
    }

    /// Ends the connection with a reason.
    fn terminate(&mut self, fatal: Fatal, cx: &mut Cx) {
        limited!(self.lines, warn, ?fatal, "a host has violated the protocol: its connection ends");
        if let Link::Tcp(tcp) = &mut self.link {
            tcp.queue.terminate(fatal);
        }
        self.send(cx);
        self.close(cx);
    }

    /// Writes the output, as far as the socket takes it.
    pub(super) fn send_tcp(&mut self, cx: &mut Cx) -> bool {
        let Link::Tcp(tcp) = &mut self.link else { return false };
        let was_blocked = std::mem::take(&mut tcp.is_blocked);
        let mut left = WRITE_MAX;
        while let Link::Tcp(tcp) = &mut self.link
            && tcp.has_output()
            && !self.is_closing
            && !tcp.is_blocked
        {
            if left == 0 {
                cx.wake(self.root);
                break;
            }
            let written = match tcp.sealed {
                Some(_) => self.write_sealed(left, cx),
                None => self.write_some(left, cx),
            };
            match written {
                Ok(len) => left -= len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
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
        if was_blocked && self.link.waiting_since().is_none() {
            // The socket does not report again the input that has arrived meanwhile.
            cx.wake(self.root);
        }
        left < WRITE_MAX
    }

    /// Writes up to `max` bytes with one system call.
    fn write_some(&mut self, max: usize, cx: &mut Cx) -> io::Result<usize> {
        let Self { link: Link::Tcp(tcp), slots, pool, share, waiting, root, .. } = self else { return Ok(0) };
        let Tcp { queue, socket, sent_at, .. } = tcp;
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
        let Link::Tcp(tcp) = &mut self.link else { return Ok(()) };
        tcp.is_blocked = true;
        if let Some(Room { epoll, .. }) = &tcp.room {
            // The next report is one only if the last one has been taken.
            let mut reports = [epoll::Event { flags: epoll::EventFlags::empty(), data }];
            epoll::wait(epoll, &mut reports, Some(&Timespec::default()))?;
            epoll::modify(epoll, &tcp.socket, data, event)?;
        } else {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let watch = cx.watch(epoll.try_clone()?, self.root)?;
            epoll::add(&epoll, &tcp.socket, data, event)?;
            tcp.room = Some(Room { epoll, watch });
        }
        let since = tcp.sent_at;
        self.await_host(since, cx);
        Ok(())
    }
}
