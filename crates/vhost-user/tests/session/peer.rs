//! A scripted front-end, and a guest's memory.

use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;
pub const NEED_REPLY: u32 = 8;
/// A queue's size in these tests.
pub const SIZE: u32 = 8;
/// The size of the guest memory for each queue's rings, in bytes.
pub const RING_SPACE: u64 = 4096;

/// Integers of mixed widths as the bytes of a message.
#[macro_export]
macro_rules! bytes {
    ($($value:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend($value.to_ne_bytes());)*
        bytes
    }};
}

pub struct FrontEnd {
    stream: UnixStream,
}

impl FrontEnd {
    /// Creates a front-end, and the back-end's side of its socket.
    pub fn pair() -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        (Self { stream: ours }, theirs)
    }

    pub async fn connect(path: &std::path::Path) -> Self {
        Self { stream: UnixStream::connect(path).await.expect("connect") }
    }

    /// A front-end on an accepted connection.
    pub fn accepted(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Sends a request without NEED_REPLY.
    pub fn send(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_raw(&message(code, 1, payload), fds);
    }

    /// Sends bytes.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_send_raw(bytes, fds).expect("send"), bytes.len());
    }

    /// Sends bytes and descriptors, unless the socket is full or the back-end has disconnected.
    pub fn try_send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags)
    }

    /// The next `n` bytes.
    pub async fn bytes(&self, n: usize) -> Vec<u8> {
        self.read(n).await.expect("bytes")
    }

    /// The payload of the next reply, which must be to `code`.
    pub async fn reply(&self, code: u32) -> Vec<u8> {
        let header = self.read(12).await.expect("a reply");
        let field = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().expect("4 bytes"));
        assert_eq!((field(0), field(4)), (code, 5), "request and flags of the reply");
        self.read(field(8) as usize).await.expect("a payload")
    }

    /// The payload of the next reply, which must be to `code`, and the fd that comes with it.
    pub async fn reply_with_fd(&self, code: u32) -> (Vec<u8>, OwnedFd) {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let receive = || {
            let mut parts = [IoSliceMut::new(&mut header)];
            Ok(rustix::net::recvmsg(&self.stream, &mut parts, &mut control, flags)?)
        };
        let got = self.stream.async_io(tokio::io::Interest::READABLE, receive).await.expect("recvmsg");
        let field = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().expect("4 bytes"));
        assert_eq!((got.bytes, field(0), field(4)), (12, code, 5), "request and flags of the reply");
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (self.read(field(8) as usize).await.expect("a payload"), fd.expect("an fd"))
    }

    /// A request with a reply of one integer.
    pub async fn ask(&self, code: u32) -> u64 {
        self.send(code, &[], &[]);
        self.reply_u64(code).await
    }

    pub async fn reply_u64(&self, code: u32) -> u64 {
        u64::from_ne_bytes(self.reply(code).await.try_into().expect("8 bytes"))
    }

    /// Sends a request with NEED_REPLY; returns whether it succeeded.
    pub async fn try_send(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send_raw(&message(code, 1 | NEED_REPLY, payload), fds);
        self.reply_u64(code).await == 0
    }

    /// Waits until all requests sent have been handled.
    pub async fn sync(&self) {
        self.ask(code::GET_QUEUE_NUM).await;
    }

    /// Sends QEMU's first messages, with all features.
    pub async fn negotiate(&self) {
        let features = self.ask(code::GET_FEATURES).await;
        let protocol = self.ask(code::GET_PROTOCOL_FEATURES).await;
        self.send(code::SET_PROTOCOL_FEATURES, &bytes![protocol], &[]);
        self.send(code::SET_OWNER, &[], &[]);
        self.send(code::SET_FEATURES, &bytes![features], &[]);
    }

    /// Sends the whole setup of queue `index` of `guest`, but does not start it.
    pub fn describe_queue(&self, guest: &Guest, index: u32, base: u32) {
        self.send(code::SET_VRING_NUM, &bytes![index, SIZE], &[]);
        self.send(code::SET_VRING_BASE, &bytes![index, base], &[]);
        self.send(code::SET_VRING_ADDR, &guest.ring_addr(index), &[]);
        self.send(code::SET_VRING_CALL, &bytes![u64::from(index)], &[eventfd().as_fd()]);
    }

    /// Starts and enables queue `index`.
    pub fn start_queue(&self, index: u32) {
        self.send(code::SET_VRING_KICK, &bytes![u64::from(index)], &[eventfd().as_fd()]);
        self.send(code::SET_VRING_ENABLE, &bytes![index, 1_u32], &[]);
    }

    /// Negotiates, sends `guest`'s memory, and starts queue 0.
    pub async fn with_queue(&self, guest: &Guest) {
        self.negotiate().await;
        self.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        self.describe_queue(guest, 0, 0);
        self.start_queue(0);
        self.sync().await;
    }

    /// Stops a queue; returns its next available index.
    pub async fn get_base(&self, index: u32) -> u32 {
        self.send(code::GET_VRING_BASE, &bytes![index, 0_u32], &[]);
        let reply = self.reply(code::GET_VRING_BASE).await;
        assert_eq!(reply[..4], index.to_ne_bytes());
        u32::from_ne_bytes(reply[4..].try_into().expect("4 bytes"))
    }

    /// Waits for the back-end to hang up.
    pub async fn closed(&self) {
        assert_eq!(self.read(1).await, None, "an unexpected reply");
    }

    /// `n` bytes, or `None` at the end of the stream.
    async fn read(&self, n: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; n];
        let mut stream = Reader(&self.stream);
        let read = stream.read_exact(&mut bytes);
        tokio::time::timeout(Duration::from_secs(50), read).await.expect("no reply").ok().map(|_| bytes)
    }
}

/// `UnixStream` reads through a shared reference only after a readiness check.
struct Reader<'a>(&'a UnixStream);

impl tokio::io::AsyncRead for Reader<'_> {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        loop {
            std::task::ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return std::task::Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return std::task::Poll::Ready(Err(e)),
            }
        }
    }
}

pub fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    [bytes![code, flags, payload.len() as u32], payload.to_vec()].concat()
}

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("eventfd")
}

pub fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&fd, len).expect("ftruncate");
    fd
}

/// A guest's memory, one region.
pub struct Guest {
    pub memory: OwnedFd,
    pub guest_addr: u64,
    pub user_addr: u64,
    pub len: u64,
}

impl Guest {
    pub fn new() -> Self {
        Self::at(0x10_0000)
    }

    pub fn at(guest_addr: u64) -> Self {
        let len = 16 * RING_SPACE;
        Self { memory: memfd(len), guest_addr, user_addr: 0x7f00_0000_0000 + guest_addr, len }
    }

    /// The region, as messages contain it.
    pub fn region(&self) -> Vec<u8> {
        bytes![self.guest_addr, self.len, self.user_addr, 0_u64]
    }

    pub fn mem_table(&self) -> Vec<u8> {
        [bytes![1_u32, 0_u32], self.region()].concat()
    }

    /// Payload of ADD_MEM_REG and REM_MEM_REG.
    pub fn single_region(&self) -> Vec<u8> {
        [bytes![0_u64], self.region()].concat()
    }

    /// Payload of SET_VRING_ADDR.
    pub fn ring_addr(&self, index: u32) -> Vec<u8> {
        let at = self.user_addr + u64::from(index) * RING_SPACE;
        bytes![index, 0_u32, at, at + 2048, at + 1024, 0_u64]
    }

    /// Sets the available index of a queue.
    pub fn set_avail_idx(&self, index: u32, idx: u16) {
        let at = u64::from(index) * RING_SPACE + 1024 + 2;
        rustix::io::pwrite(&self.memory, &idx.to_le_bytes(), at).expect("pwrite");
    }

    /// The used index.
    pub fn used_idx(&self, index: u32) -> u16 {
        let mut idx = [0; 2];
        let at = u64::from(index) * RING_SPACE + 2048 + 2;
        rustix::io::pread(&self.memory, &mut idx, at).expect("pread");
        u16::from_le_bytes(idx)
    }
}
