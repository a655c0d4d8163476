//! vhost-user messages as a front-end sends them, one at a time. Runs on any one thread, which waits for the replies.
//!
//! A peer that is gone, slow, or sends invalid messages gives an error.

use crate::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A message of the section "Front-end message types".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    code: u32,
    name: &'static str,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! requests {
    ($($name:ident = $code:literal),* $(,)?) => {
        impl Request {
            $(
                #[doc = concat!("Message ", $code, ".")]
                pub const $name: Self = Self { code: $code, name: stringify!($name) };
            )*
        }
    };
}

requests! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    GET_CONFIG = 24,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
}

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Upper bound of a reply's payload, in bytes.
const PAYLOAD_MAX: u32 = 4096;

/// A connection to a back-end.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    /// Whether REPLY_ACK is negotiated.
    pub acknowledged: bool,
}

/// Builds a message's payload from integers of mixed widths.
#[macro_export]
macro_rules! payload {
    ($($value:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend($value.to_ne_bytes());)*
        bytes
    }};
}

impl Wire {
    /// Uses `stream`; each message may take as long as `patience`.
    ///
    /// # Errors
    /// The timeouts of the socket cannot be set.
    pub fn new(stream: UnixStream, patience: Duration) -> Result<Self, Error> {
        let set_up = || {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(patience))
        };
        set_up().map_err(|error: std::io::Error| Error::Os {
            what: "setting up the socket",
            source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        Ok(Self { stream, acknowledged: false })
    }

    /// The socket, for waiting until the peer closes it.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether the peer has closed the connection, or sent an unsolicited message.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
    }

    /// Sends a request that has no reply of its own. With REPLY_ACK, waits until the peer has accepted it.
    ///
    /// # Errors
    /// The connection broke, or the peer refuses the request.
    pub fn send(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let flags = if self.acknowledged { NEED_REPLY } else { 0 };
        self.write(request, flags, payload, fds)?;
        if self.acknowledged && self.reply_u64(request)? != 0 {
            return Err(Error::Refused(request));
        }
        Ok(())
    }

    /// Sends a request and returns its reply.
    ///
    /// # Errors
    /// The connection broke.
    pub fn ask(&self, request: Request, payload: &[u8]) -> Result<(Vec<u8>, Option<OwnedFd>), Error> {
        self.ask_with(request, payload, &[])
    }

    /// As [`Wire::ask`], with file descriptors.
    ///
    /// # Errors
    /// The connection broke.
    pub fn ask_with(
        &self,
        request: Request,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Vec<u8>, Option<OwnedFd>), Error> {
        self.write(request, 0, payload, fds)?;
        self.reply(request)
    }

    /// As [`Wire::ask`], for a reply of one integer.
    ///
    /// # Errors
    /// The connection broke, or the reply is not one integer.
    pub fn ask_u64(&self, request: Request) -> Result<u64, Error> {
        self.write(request, 0, &[], &[])?;
        self.reply_u64(request)
    }

    fn reply_u64(&self, request: Request) -> Result<u64, Error> {
        let (bytes, _) = self.reply(request)?;
        let wrong = |bytes: Vec<u8>| Error::Reply { request, what: format!("{} bytes", bytes.len()) };
        Ok(u64::from_ne_bytes(bytes.try_into().map_err(wrong)?))
    }

    fn write(
        &self,
        request: Request,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let header = payload![request.code, VERSION | flags, payload.len() as u32];
        let message = [&header, payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "too many file descriptors");
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(n) if n == message.len() => Ok(()),
            Ok(_) => Err(Error::Silent(request)),
            Err(error) => Err(broken(request, error)),
        }
    }

    fn reply(&self, request: Request) -> Result<(Vec<u8>, Option<OwnedFd>), Error> {
        let mut header = [0; 12];
        let fd = self.read(request, &mut header)?;
        let field = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().expect("4 bytes"));
        let [code, flags, len] = [field(0), field(4), field(8)];
        if code != request.code || flags & (3 | REPLY) != VERSION | REPLY || len > PAYLOAD_MAX {
            let what = format!("message {code}, flags {flags:#x}, {len} bytes");
            return Err(Error::Reply { request, what });
        }
        let mut payload = vec![0; len as usize];
        let late = self.read(request, &mut payload)?;
        Ok((payload, fd.or(late)))
    }

    fn read(&self, request: Request, bytes: &mut [u8]) -> Result<Option<OwnedFd>, Error> {
        let mut fd = None;
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut bytes[done..])];
            let received = recvmsg(&self.stream, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC);
            let n = received.map_err(|error| broken(request, error))?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                    fd = fds.next().or(fd);
                }
            }
            if n == 0 {
                return Err(Error::HungUp);
            }
            done += n;
        }
        Ok(fd)
    }
}

fn broken(request: Request, error: Errno) -> Error {
    match error {
        Errno::AGAIN => Error::Silent(request),
        Errno::PIPE | Errno::CONNRESET => Error::HungUp,
        source => Error::Os { what: "communicating with the back-end", source },
    }
}
