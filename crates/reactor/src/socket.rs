//! Connected sockets that the reactor's ring reads and writes. Reactor context.
//!
//! A socket has at most one receive and one send in the kernel. The receive goes on until it is stopped: what arrives is in
//! buffers of the ring, which the kernel takes when bytes arrive, so a socket that waits holds no memory. The reactor sleeps
//! although there are receives: they do not count as requests.
//!
//! **Invariant.** The descriptor, and the memory of a send, stay as they are until the kernel has neither a receive nor a send
//! ([`Socket::is_at_rest`]).

use crate::{Cx, RingClient, RootId};
use aryk_dma::Sgl;
use aryk_uring::{Completion, Filled, Tag};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The token of a socket's receive, and that of its send.
pub(crate) const RECEIVE: u64 = 0;
const SEND: u64 = 1;

/// What has happened to a socket.
#[derive(Debug)]
pub enum SocketEvent {
    /// Bytes have arrived.
    Received(Filled),
    /// The peer sends no more.
    Ended,
    /// The connection has failed.
    Failed(io::Error),
    /// The socket has taken the first bytes of the send, as many as `result` says.
    Sent {
        /// The number of bytes, or why the send has failed.
        result: io::Result<u32>,
        /// The memory of the send is free. If not, [`SocketEvent::Released`] follows.
        is_released: bool,
    },
    /// The memory of the send is free.
    Released,
}

/// A connected socket. See the head of the file.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    root: RootId,
    client: RingClient,
    /// What the kernel has completed; the first `taken` have been reported.
    completions: Vec<Completion>,
    taken: usize,
    is_receiving: bool,
    is_stopping: bool,
    is_sending: bool,
    /// A send without a copy has its result, and its memory is not free yet.
    has_result: bool,
}

impl Socket {
    /// A connected socket that blocks, whose events wake `root`.
    ///
    /// # Errors
    /// The descriptor, if the reactor has no ring, or one that does not support sockets.
    pub fn open(fd: OwnedFd, root: RootId, cx: &mut Cx) -> Result<Self, OwnedFd> {
        if !cx.has_ring_sockets() {
            return Err(fd);
        }
        Ok(Self {
            fd,
            root,
            client: cx.open_ring_client(root),
            completions: Vec::new(),
            taken: 0,
            is_receiving: false,
            is_stopping: false,
            is_sending: false,
            has_result: false,
        })
    }

    /// Whether the kernel has neither a receive nor a send.
    pub const fn is_at_rest(&self) -> bool {
        !self.is_receiving && !self.is_sending
    }

    /// Whether the kernel has a send.
    pub const fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// Whether a send has its result, but its memory is not free yet.
    pub const fn awaits_release(&self) -> bool {
        self.has_result
    }

    /// The socket's descriptor.
    ///
    /// # Panics
    /// If the socket is not at rest.
    pub fn into_fd(self) -> OwnedFd {
        assert!(self.is_at_rest(), "the kernel has a receive or a send");
        self.fd
    }

    /// Has the kernel receive, unless it does. If the ring has no room, the root is woken to call this again.
    #[inline]
    pub fn receive(&mut self, cx: &mut Cx) {
        if self.is_receiving {
            return;
        }
        match cx.receive(&self.client, self.fd.as_fd()) {
            Ok(()) => self.is_receiving = true,
            Err(_) => cx.wake(self.root),
        }
    }

    /// Has the kernel end the receive. Until it has, more may arrive; then the root is woken.
    pub fn stop_receiving(&mut self, cx: &mut Cx) {
        if !self.is_receiving || self.is_stopping {
            return;
        }
        let tag = self.tag(RECEIVE);
        let stopped = cx.ring().map(|mut ring| ring.cancel(tag)).expect("the ring stays");
        match stopped {
            Ok(()) => self.is_stopping = true,
            Err(_) => cx.wake(self.root),
        }
    }

    /// Sends the lists, in this order, at the end of the turn; their memory is free after [`SocketEvent::Sent`] or
    /// [`SocketEvent::Released`]. Returns false if the ring has no room: then the root is woken, to try again.
    ///
    /// # Panics
    /// If the kernel has a send, or the lists have more than 1024 pieces.
    #[must_use]
    pub fn send(&mut self, lists: &[Sgl], zero_copy: bool, cx: &mut Cx) -> bool {
        assert!(!self.is_sending, "a socket has one send");
        let tag = self.tag(SEND);
        let mut ring = cx.ring().expect("the ring stays");
        self.is_sending = ring.send(tag, self.fd.as_fd(), lists, zero_copy).is_ok();
        drop(ring);
        if !self.is_sending {
            cx.wake(self.root);
        }
        self.is_sending
    }

    /// The next event that has happened. `None`: all have been reported. The order is the kernel's: what a peer sends in answer
    /// to a send comes after the end of the send.
    #[inline]
    pub fn next_event(&mut self, cx: &Cx) -> Option<SocketEvent> {
        loop {
            if self.taken == self.completions.len() {
                self.completions.clear();
                self.taken = 0;
                self.client.take(&mut self.completions);
            }
            let completion = *self.completions.get(self.taken)?;
            self.taken += 1;
            if completion.tag.token == SEND {
                return Some(self.sent(completion));
            }
            if !completion.more {
                (self.is_receiving, self.is_stopping) = (false, false);
            }
            let bytes = cx.claim(&completion);
            match completion.result {
                1.. => return Some(SocketEvent::Received(bytes.expect("what arrives is in a buffer"))),
                0 => return Some(SocketEvent::Ended),
                // It goes on when the root calls `receive`.
                result if is_pause(result) => {}
                result => return Some(SocketEvent::Failed(io::Error::from_raw_os_error(-result))),
            }
        }
    }

    fn sent(&mut self, Completion { result, more, .. }: Completion) -> SocketEvent {
        // The last completion of a send without a copy has no result.
        let is_last_of_two = std::mem::replace(&mut self.has_result, more);
        if !more {
            self.is_sending = false;
        }
        if is_last_of_two {
            return SocketEvent::Released;
        }
        let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        SocketEvent::Sent { result, is_released: !more }
    }

    fn tag(&self, token: u64) -> Tag {
        Tag { client: self.client.number(), token }
    }
}

/// Whether a receive has ended although the connection goes on: no buffer was free, or it was stopped or interrupted.
fn is_pause(result: i32) -> bool {
    use rustix::io::Errno;
    let pauses = [Errno::NOBUFS, Errno::CANCELED, Errno::INTR, Errno::AGAIN];
    pauses.into_iter().any(|errno| errno.raw_os_error() == -result)
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
