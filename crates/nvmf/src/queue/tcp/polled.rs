//! A socket of TCP that its queue reads and writes by system calls, when the reactor finds it ready. Reactor context.
//!
//! Sockets with TLS are polled in any case: what is encrypted goes from a buffer that all queues share straight to the socket. A
//! ring would keep such a buffer for each connection until its send completes.

use super::{Input, Means, Tcp, WRITE_MAX};
use crate::queue::link::Link;
use crate::queue::sealed::Sealed;
use crate::queue::{IoQueue, give_back};
use aryk_nvme_fabrics::tcp::Piece;
use aryk_reactor::{Cx, RootId, WatchId};
use aryk_tls::Session;
use rustix::event::{Timespec, epoll};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Pieces that one system call writes.
const PIECES_MAX: usize = 64;

/// What tells that a full socket has room again.
struct Room {
    epoll: OwnedFd,
    watch: WatchId,
}

/// The socket.
pub(in crate::queue) struct Polled {
    pub socket: TcpStream,
    watch: WatchId,
    room: Option<Room>,
    /// The socket has no room for the output.
    pub is_blocked: bool,
    pub sealed: Option<Sealed>,
    input: Rc<Input>,
}

impl Polled {
    pub fn new(socket: TcpStream, tls: Option<Session>, root: RootId, cx: &mut Cx) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let watch = cx.watch(socket.as_fd().try_clone_to_owned()?, root)?;
        let sealed = tls.map(|session| Sealed::new(session, cx));
        Ok(Self { socket, watch, room: None, is_blocked: false, sealed, input: cx.local_state() })
    }

    pub fn has_unsent(&self) -> bool {
        self.sealed.as_ref().is_some_and(Sealed::has_unsent)
    }

    pub fn unwatch(&mut self, cx: &mut Cx) {
        cx.unwatch(self.watch);
        if let Some(Room { watch, .. }) = self.room.take() {
            cx.unwatch(watch);
        }
    }
}

impl IoQueue {
    const fn polled(&mut self) -> Option<&mut Polled> {
        match &mut self.link {
            Link::Tcp(Tcp { means: Means::Polled(polled), .. }) => Some(polled),
            _ => None,
        }
    }

    /// Reads the socket once.
    pub(super) fn receive_polled(&mut self, cx: &mut Cx) -> bool {
        let Some(polled) = self.polled() else { return false };
        if polled.is_blocked {
            return false;
        }
        let input = Rc::clone(&polled.input);
        let mut bytes = input.0.borrow_mut();
        match polled.socket.read(&mut bytes) {
            Ok(0) => self.close(cx),
            Ok(len) => {
                match polled.sealed {
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

    /// Writes the output, as far as the socket takes it.
    pub(super) fn send_polled(&mut self, cx: &mut Cx) -> bool {
        let Some(polled) = self.polled() else { return false };
        let was_blocked = std::mem::take(&mut polled.is_blocked);
        let mut left = WRITE_MAX;
        while self.link.has_output()
            && !self.is_closing
            && let Some(polled) = self.polled()
            && !polled.is_blocked
        {
            if left == 0 {
                cx.wake(self.root);
                break;
            }
            let written = match polled.sealed {
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
        let Tcp { queue, sent_at, means: Means::Polled(Polled { socket, .. }), .. } = tcp else {
            return Ok(0);
        };
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
        let Link::Tcp(Tcp { means: Means::Polled(polled), sent_at, .. }) = &mut self.link else {
            return Ok(());
        };
        polled.is_blocked = true;
        if let Some(Room { epoll, .. }) = &polled.room {
            // The next report is one only if the last one has been taken.
            let mut reports = [epoll::Event { flags: epoll::EventFlags::empty(), data }];
            epoll::wait(epoll, &mut reports, Some(&Timespec::default()))?;
            epoll::modify(epoll, &polled.socket, data, event)?;
        } else {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let watch = cx.watch(epoll.try_clone()?, self.root)?;
            epoll::add(&epoll, &polled.socket, data, event)?;
            polled.room = Some(Room { epoll, watch });
        }
        let since = *sent_at;
        self.await_host(since, cx);
        Ok(())
    }
}
