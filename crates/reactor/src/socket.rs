//! Connected sockets that the reactor's ring reads and writes. Reactor context.
//!
//! A socket has at most one receive and one send in the kernel. The receive goes on until it is stopped: what arrives is in
//! buffers of the ring, which the kernel takes when bytes arrive, so a socket that waits holds no memory. The reactor sleeps
//! although there are receives: they do not count as requests.
//!
//! All sockets of a reactor share the buffers, and one that gets more than others may have them all for a while. So a socket for
//! which there is no buffer can be read by a system call ([`Socket::read`]): it goes on, whatever others hold.
//!
//! **Invariant.** The descriptor, and the memory of a send, stay as they are until the kernel has neither a receive nor a send
//! ([`Socket::is_at_rest`]).

use crate::{Cx, RingClient, RootId};
use aryk_dma::Sgl;
use aryk_uring::{Completion, Filled, Tag};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The token of a socket's receive, of its send, and of the request to end the receive.
pub(crate) const RECEIVE: u64 = 0;
const SEND: u64 = 1;
const STOP: u64 = 2;

/// What has happened to a socket.
#[derive(Debug)]
pub enum SocketEvent {
    /// Bytes have arrived.
    Received(Filled),
    /// The receive has ended because there was no buffer. What has arrived stays in the socket: [`Socket::read`].
    Starved,
    /// The peer sends no more.
    Ended,
    /// The connection has failed.
    Failed(io::Error),
    /// The socket has taken the first bytes of the send, as many as `result` says.
    Sent {
        /// The number of bytes, or why the send has failed. 0: it was interrupted, or is to be made again with a copy.
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
    stop: Stop,
    is_sending: bool,
    /// The send is one without a copy.
    is_zero_copy: bool,
    /// The kernel has refused a send without a copy: others are made with a copy.
    copies: bool,
    /// A send without a copy has its result, and its memory is not free yet.
    has_result: bool,
}

/// The request to end the receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    No,
    /// The kernel has it.
    Asked,
    /// It has found the receive, which ends.
    Found,
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
            stop: Stop::No,
            is_sending: false,
            is_zero_copy: false,
            copies: false,
            has_result: false,
        })
    }

    /// Whether the kernel has neither a receive nor a send.
    pub const fn is_at_rest(&self) -> bool {
        !self.is_receiving && !self.is_sending && !matches!(self.stop, Stop::Asked)
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
        // A request to end the last receive must not find the next one.
        if self.is_receiving || self.stop == Stop::Asked {
            return;
        }
        match cx.receive(&self.client, self.fd.as_fd()) {
            Ok(()) => self.is_receiving = true,
            Err(_) => cx.wake(self.root),
        }
    }

    /// Has the kernel end the receive. Until it has, more may arrive; then the root is woken, and also if the kernel has found no
    /// receive that it can end now, to call this again.
    pub fn stop_receiving(&mut self, cx: &mut Cx) {
        if !self.is_receiving || self.stop != Stop::No {
            return;
        }
        let (stop, receive) = (self.tag(STOP), self.tag(RECEIVE));
        let asked = cx.ring().map(|mut ring| ring.cancel_with_result(stop, receive)).expect("the ring stays");
        match asked {
            Ok(()) => self.stop = Stop::Asked,
            Err(_) => cx.wake(self.root),
        }
    }

    /// Reads what has arrived, without waiting: 0 bytes are the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived; the connection's.
    ///
    /// # Panics
    /// If the kernel has a receive, which comes first.
    pub fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        assert!(!self.is_receiving, "the kernel has a receive");
        loop {
            match rustix::net::recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                Ok((len, _)) => return Ok(len),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
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
        let zero_copy = zero_copy && !self.copies;
        let mut ring = cx.ring().expect("the ring stays");
        self.is_sending = ring.send(tag, self.fd.as_fd(), lists, zero_copy).is_ok();
        drop(ring);
        self.is_zero_copy = zero_copy;
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
            match completion.tag.token {
                SEND => return Some(self.sent(completion)),
                STOP => self.stopped(completion.result),
                _ => {
                    if let Some(event) = self.received(completion, cx) {
                        return Some(event);
                    }
                }
            }
        }
    }

    /// The request to end the receive has completed.
    const fn stopped(&mut self, result: i32) {
        // It finds nothing if the receive has ended, or is at work just now: then the owner may ask again.
        self.stop = if result == 0 && self.is_receiving { Stop::Found } else { Stop::No };
    }

    fn received(&mut self, completion: Completion, cx: &Cx) -> Option<SocketEvent> {
        if !completion.more {
            self.is_receiving = false;
            if self.stop == Stop::Found {
                self.stop = Stop::No;
            }
        }
        let bytes = cx.claim(&completion);
        match OfReceive::of(completion.result) {
            OfReceive::Bytes => Some(SocketEvent::Received(bytes.expect("what arrives is in a buffer"))),
            OfReceive::End => Some(SocketEvent::Ended),
            OfReceive::Starved => Some(SocketEvent::Starved),
            // It goes on when the root calls `receive`.
            OfReceive::Pause => None,
            OfReceive::Failed(errno) => Some(SocketEvent::Failed(errno.into())),
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
        let result = match OfSend::of(result, self.is_zero_copy) {
            OfSend::Taken(len) => Ok(len),
            OfSend::Again => Ok(0),
            OfSend::WithCopy => {
                self.copies = true;
                Ok(0)
            }
            OfSend::Failed(errno) => Err(errno.into()),
        };
        SocketEvent::Sent { result, is_released: !more }
    }

    fn tag(&self, token: u64) -> Tag {
        Tag { client: self.client.number(), token }
    }
}

/// What the result of a receive means.
#[derive(Debug, PartialEq, Eq)]
enum OfReceive {
    Bytes,
    End,
    /// There was no buffer.
    Starved,
    /// The receive has ended although the connection goes on: it was stopped or interrupted.
    Pause,
    /// The connection has failed, or the kernel has no memory.
    Failed(Errno),
}

impl OfReceive {
    fn of(result: i32) -> Self {
        match result {
            1.. => Self::Bytes,
            0 => Self::End,
            _ => match Errno::from_raw_os_error(-result) {
                Errno::NOBUFS => Self::Starved,
                Errno::CANCELED | Errno::INTR | Errno::AGAIN => Self::Pause,
                errno => Self::Failed(errno),
            },
        }
    }
}

/// What the result of a send means.
#[derive(Debug, PartialEq, Eq)]
enum OfSend {
    Taken(u32),
    /// The socket has taken nothing, because the send was interrupted.
    Again,
    /// The process may lock no more memory, or the kernel has none for what is not copied.
    WithCopy,
    /// The connection has failed, or the kernel has no memory.
    Failed(Errno),
}

impl OfSend {
    fn of(result: i32, is_zero_copy: bool) -> Self {
        match u32::try_from(result) {
            Ok(len) => Self::Taken(len),
            Err(_) => match Errno::from_raw_os_error(result.saturating_neg()) {
                Errno::CANCELED | Errno::INTR | Errno::AGAIN => Self::Again,
                Errno::NOBUFS | Errno::NOMEM if is_zero_copy => Self::WithCopy,
                errno => Self::Failed(errno),
            },
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_told_apart() {
        use OfSend::{Again, Failed, Taken, WithCopy};
        let of = |errno: Errno| -errno.raw_os_error();
        for (result, meaning) in [
            (1, OfReceive::Bytes),
            (0, OfReceive::End),
            (of(Errno::NOBUFS), OfReceive::Starved),
            (of(Errno::CANCELED), OfReceive::Pause),
            (of(Errno::INTR), OfReceive::Pause),
            (of(Errno::NOMEM), OfReceive::Failed(Errno::NOMEM)),
            (of(Errno::CONNRESET), OfReceive::Failed(Errno::CONNRESET)),
        ] {
            assert_eq!(OfReceive::of(result), meaning);
        }
        for (result, [copied, not_copied]) in [
            (7, [Taken(7), Taken(7)]),
            (of(Errno::INTR), [Again, Again]),
            (of(Errno::CANCELED), [Again, Again]),
            (of(Errno::NOMEM), [Failed(Errno::NOMEM), WithCopy]),
            (of(Errno::NOBUFS), [Failed(Errno::NOBUFS), WithCopy]),
            (of(Errno::PIPE), [Failed(Errno::PIPE), Failed(Errno::PIPE)]),
        ] {
            assert_eq!([OfSend::of(result, false), OfSend::of(result, true)], [copied, not_copied]);
        }
    }
}
