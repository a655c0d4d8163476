//! A socket that carries messages with descriptors. Control context.

use super::message::{FDS_MAX, HEADER, Header};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// A received message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Why no message can be sent or received any more.
#[derive(Debug)]
pub(super) enum Broken {
    /// The peer closed the connection between two messages.
    Closed,
    /// The peer breaks the protocol.
    Invalid(&'static str),
    Os(Errno),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "the connection was closed"),
            Self::Invalid(what) => write!(f, "it breaks the protocol: {what}"),
            Self::Os(errno) => write!(f, "the connection failed: {errno}"),
        }
    }
}

/// Bytes of one system call: the timeout of a socket begins again with each part that the peer has read.
const PART: usize = 64 << 10;

/// One end of a connection. Messages are sent whole by any thread, and received by one thread.
#[derive(Debug)]
pub(super) struct Connection {
    socket: UnixStream,
    sending: Mutex<()>,
    timeout: Duration,
}

impl Connection {
    /// A message that cannot be sent within `timeout`, because the peer reads none, breaks the connection.
    pub(super) fn new(socket: UnixStream, timeout: Duration) -> std::io::Result<Self> {
        socket.set_write_timeout(Some(timeout))?;
        Ok(Self { socket, sending: Mutex::new(()), timeout })
    }

    /// Ends the connection: calls in other threads return.
    pub(super) fn shut_down(&self) {
        // ENOTCONN: it is over.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Sends a message: a header, which has the length, and the parts of its body.
    pub(super) fn send(
        &self,
        header: &Header,
        body: [&[u8]; 2],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Broken> {
        let _sending = self.sending.lock().expect("no thread panics while holding it");
        let until = now() + self.timeout;
        let [first, second] = body;
        let mut bytes = Vec::with_capacity(HEADER + first.len() + second.len());
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(first);
        bytes.extend_from_slice(second);
        let mut fds = fds;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Broken::Os(Errno::TOOBIG));
            }
            let part = &rest[..rest.len().min(PART)];
            let sent = sendmsg(&self.socket, &[IoSlice::new(part)], &mut control, SendFlags::NOSIGNAL);
            match sent {
                // A peer that reads a byte now and then holds up nobody for longer than one that reads none.
                Ok(n) if n < rest.len() && now() >= until => return Err(Broken::Os(Errno::TIMEDOUT)),
                Ok(n) => (rest, fds) = (&rest[n..], &[]),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(Broken::Closed),
                Err(errno) => return Err(Broken::Os(errno)),
            }
        }
        Ok(())
    }

    /// The socket, to wait for a message.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives a message. Only one thread receives.
    pub(super) fn receive(&self) -> Result<Message, Broken> {
        let (mut head, mut fds) = ([0; HEADER], Vec::new());
        self.fill(&mut head, &mut fds, true)?;
        let header = Header::read_from_bytes(&head).expect("a header's length");
        let len = header.body().ok_or(Broken::Invalid("a message of an impossible size"))?;
        let mut body = vec![0; len];
        self.fill(&mut body, &mut fds, false)?;
        Ok(Message { header, body, fds })
    }

    fn fill(&self, out: &mut [u8], fds: &mut Vec<OwnedFd>, may_end: bool) -> Result<(), Broken> {
        let mut filled = 0;
        while filled < out.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut out[filled..])];
            let received = recvmsg(self.socket.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
            // Descriptors are owned from here on, also those of a message that is refused.
            let rights = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(rights) => Some(rights),
                _ => None,
            });
            fds.extend(rights.flatten());
            match received {
                Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX => {
                    return Err(Broken::Invalid("a message with too many descriptors"));
                }
                Ok(message) if message.bytes == 0 => {
                    let is_between = may_end && filled == 0;
                    return Err(if is_between {
                        Broken::Closed
                    } else {
                        Broken::Invalid("a part of a message")
                    });
                }
                Ok(message) => filled += message.bytes,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(Broken::Closed),
                Err(errno) => return Err(Broken::Os(errno)),
            }
        }
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "a peer is another process, in real time")]
pub(super) fn now() -> Instant {
    Instant::now()
}
