//! vhost-user messages as a front-end sends them, one after the other. Test tool, the front-end's thread.
//!
//! A peer that is gone, or slow, gives an error: it is expected to be killed in the middle of a message.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Requests by number: "Front-end message types".
pub mod code {
    #![expect(missing_docs, reason = "each is the specification's message of that name")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const ADD_MEM_REG: u32 = 37;
}

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Longer than any answer may take here, shorter than what a test waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a back-end.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    /// REPLY_ACK is negotiated.
    pub acknowledged: bool,
}

/// Integers of mixed widths as they lie in a message.
macro_rules! payload {
    ($($value:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend($value.to_ne_bytes());)*
        bytes
    }};
}
pub(crate) use payload;

impl Wire {
    /// Speaks through `stream`.
    ///
    /// # Errors
    /// It is no socket that can be waited for.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream, acknowledged: false })
    }

    /// For waiting until the peer hangs up.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends a request that has no reply of its own, and sees that it was taken.
    ///
    /// # Errors
    /// The peer is gone, or refuses.
    pub fn tell(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = if self.acknowledged { NEED_REPLY } else { 0 };
        self.send(code, flags, payload, fds)?;
        if self.acknowledged {
            let (answer, _) = self.reply(code)?;
            ensure!(answer == 0_u64.to_ne_bytes(), "request {code} was refused: {answer:?}");
        }
        Ok(())
    }

    /// Sends a request and returns its reply.
    ///
    /// # Errors
    /// The peer is gone.
    pub fn ask(&self, code: u32, payload: &[u8]) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        self.send(code, 0, payload, &[])?;
        self.reply(code)
    }

    /// As [`Wire::ask`], for a reply of one integer.
    ///
    /// # Errors
    /// The peer is gone, or replies with something else.
    pub fn ask_u64(&self, code: u32) -> Result<u64> {
        let (bytes, _) = self.ask(code, &[])?;
        let bytes = bytes.try_into().map_err(|b| anyhow::anyhow!("request {code}: a reply of {b:?}"))?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn send(&self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let message = [payload![code, VERSION | flags, payload.len() as u32], payload.to_vec()].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(control.push(SendAncillaryMessage::ScmRights(fds)), "too many file descriptors");
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)
            .with_context(|| format!("sending request {code}"))?;
        ensure!(sent == message.len(), "request {code} was sent in part");
        Ok(())
    }

    fn reply(&self, code: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let fd = self.read(&mut header).with_context(|| format!("the reply to {code}"))?;
        let field = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().expect("4 bytes"));
        if field(0) != code || field(4) & (3 | REPLY) != VERSION | REPLY || field(8) > 4096 {
            bail!("a reply to {code} with the header {header:?}");
        }
        let mut payload = vec![0; field(8) as usize];
        let late = self.read(&mut payload)?;
        Ok((payload, fd.or(late)))
    }

    fn read(&self, bytes: &mut [u8]) -> Result<Option<OwnedFd>> {
        let mut fd = None;
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut bytes[done..])];
            let n = recvmsg(&self.stream, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                    fd = fds.next().or(fd);
                }
            }
            ensure!(n > 0, "the back-end has hung up");
            done += n;
        }
        Ok(fd)
    }
}
