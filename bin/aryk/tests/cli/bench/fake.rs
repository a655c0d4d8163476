//! A back end that lies, in one way at a time. Written by hand, for no library would.

use aryk_dma::{GuestArea, Mapping};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// It answers so many messages, and hangs up.
    HangUpAfter(usize),
    /// It answers no message.
    Silent,
    /// A reply with too little in it.
    ShortReply,
    /// A reply that says it is very long.
    LongReply,
    /// The reply to another message.
    OtherReply,
    /// A part of a reply, and no more.
    HalfReply,
    /// It can do nothing.
    NoFeatures,
    /// It gives less of its configuration than was asked for.
    ShortConfig,
    /// It has blocks of this size.
    Blocks(u32),
    /// It has so many sectors.
    Capacity(u64),
    /// It does not take memory.
    RefuseMemory,
    /// It answers no request.
    NoAnswers,
    /// It completes the request of this id.
    Id(u16),
    /// It completes a request twice.
    Twice,
    /// It answers a request with this status.
    Status(u8),
    /// It says that it wrote so many bytes.
    Length(u32),
}

/// The back end.
pub struct Fake;

/// Messages with replies of their own, and others that it looks at.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_ADDR: u32 = 9;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;

const VERSION_1_PACKED_AND_PROTOCOL: u64 = 1 << 32 | 1 << 34 | 1 << 30;
const BLK_SIZE: u64 = 1 << 6;
const PACKED: u64 = 1 << 34;
const REPLY_ACK_AND_CONFIG: u64 = 1 << 3 | 1 << 9;

impl Fake {
    /// Messages until its queue runs, and one more.
    pub const MESSAGES: usize = 14;

    /// Listens; it serves one after the other until the test ends.
    pub fn start(path: &Path, lie: Lie) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // Whoever it lies to leaves.
                let _ = Session { stream: stream.unwrap(), lie, memory: None, rings: [0; 3], packed: false }
                    .run();
            }
        });
    }
}

/// One who believes it.
struct Session {
    stream: UnixStream,
    lie: Lie,
    /// The memory, and its address in messages.
    memory: Option<(GuestArea, u64)>,
    /// Offsets of descriptors, what the device writes, and what the driver writes.
    rings: [usize; 3],
    packed: bool,
}

impl Session {
    /// Answers until the other hangs up.
    fn run(mut self) -> Option<()> {
        for message in 0.. {
            if self.lie == Lie::HangUpAfter(message) {
                return None;
            }
            let (code, needs_reply, payload, fd) = self.receive()?;
            let reply = self.reply(code, &payload, fd);
            let answer = match (reply, needs_reply) {
                (Some(reply), _) => reply,
                (None, true) => {
                    let refuses = code == SET_MEM_TABLE && self.lie == Lie::RefuseMemory;
                    u64::from(refuses).to_ne_bytes().to_vec()
                }
                (None, false) => continue,
            };
            self.send(code, &answer)?;
            if code == SET_VRING_ENABLE {
                self.serve();
            }
        }
        None
    }

    fn receive(&self) -> Option<(u32, bool, Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let fd = self.read(&mut header)?;
        let field = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().unwrap());
        let mut payload = vec![0; field(8) as usize];
        let late = if payload.is_empty() { None } else { self.read(&mut payload)? };
        Some((field(0), field(4) & 8 != 0, payload, fd.or(late)))
    }

    /// What is in full; a file that came with it.
    fn read(&self, mut bytes: &mut [u8]) -> Option<Option<OwnedFd>> {
        let mut fd = None;
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(bytes)];
            let n = recvmsg(&self.stream, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                    fd = fds.next().or(fd);
                }
            }
            bytes = &mut bytes[n..];
            if n == 0 {
                return None;
            }
        }
        Some(fd)
    }

    fn send(&mut self, code: u32, payload: &[u8]) -> Option<()> {
        let (code, len, payload) = match self.lie {
            Lie::Silent => return Some(()),
            Lie::OtherReply => (99, payload.len(), payload),
            Lie::LongReply => (code, 1 << 30, payload),
            Lie::ShortReply => (code, 3, &payload[..3]),
            Lie::HalfReply => (code, payload.len(), &payload[..4]),
            _ => (code, payload.len(), payload),
        };
        let header = [code, 5, len as u32].map(u32::to_ne_bytes).concat();
        self.stream.write_all(&[&header, payload].concat()).ok()
    }

    /// The reply to a message that has one.
    fn reply(&mut self, code: u32, payload: &[u8], fd: Option<OwnedFd>) -> Option<Vec<u8>> {
        let word = |i: usize| u64::from_ne_bytes(payload[8 * i..8 * i + 8].try_into().unwrap());
        match code {
            GET_FEATURES if self.lie == Lie::NoFeatures => Some(0_u64.to_ne_bytes().to_vec()),
            GET_FEATURES => Some((VERSION_1_PACKED_AND_PROTOCOL | BLK_SIZE).to_ne_bytes().to_vec()),
            GET_PROTOCOL_FEATURES => Some(REPLY_ACK_AND_CONFIG.to_ne_bytes().to_vec()),
            SET_PROTOCOL_FEATURES => None,
            GET_CONFIG => Some(self.config()),
            SET_FEATURES => {
                self.packed = word(0) & PACKED != 0;
                None
            }
            SET_MEM_TABLE => {
                let mapping = Mapping::shared(fd.unwrap().as_fd(), 0, word(2)).unwrap();
                let area = GuestArea::new(&Arc::new(mapping), 0, word(2)).unwrap();
                self.memory = Some((area, word(3)));
                None
            }
            SET_VRING_ADDR => {
                let base = self.memory.as_ref().unwrap().1;
                self.rings = [1, 2, 3].map(|i| (word(i) - base) as usize);
                None
            }
            _ => None,
        }
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let capacity = if let Lie::Capacity(sectors) = self.lie { sectors } else { 1 << 20 };
        let block = if let Lie::Blocks(size) = self.lie { size } else { 512 };
        config[..8].copy_from_slice(&capacity.to_le_bytes());
        config[20..24].copy_from_slice(&block.to_le_bytes());
        let mut reply = [0_u32, 60, 0].map(u32::to_ne_bytes).concat();
        reply.extend(&config);
        reply.truncate(if self.lie == Lie::ShortConfig { 8 } else { reply.len() });
        reply
    }

    /// Answers the first request, in its way.
    fn serve(&self) {
        let (memory, _) = self.memory.as_ref().unwrap();
        let [desc, used, avail] = self.rings;
        let is_there = || match self.packed {
            true => memory.load_u16(desc + 14, Acquire) & 1 << 7 != 0,
            false => memory.load_u16(avail + 2, Acquire) != 0,
        };
        while !is_there() {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        // Where its descriptors are, the last of which is its status.
        let (head, last) = if self.packed {
            (memory.load_u16(desc + 12, Acquire), 2)
        } else {
            let head = memory.load_u16(avail + 4, Acquire);
            let next = |index: u16| memory.load_u16(desc + 16 * usize::from(index) + 14, Acquire);
            (head, next(next(head)))
        };
        let status = u64::from_le_bytes(memory.read(desc + 16 * usize::from(last)));
        let status = (status - 0x1000_0000) as usize;
        let (id, code, len, count) = match self.lie {
            Lie::NoAnswers | Lie::HangUpAfter(_) => return,
            Lie::Id(id) => (id, 0, 4097, 1),
            Lie::Twice => (head, 0, 4097, 2),
            Lie::Status(code) => (head, code, 4097, 1),
            Lie::Length(len) => (head, 0, len, 1),
            lie => panic!("{lie:?} comes before"),
        };
        memory.write(status, &code);
        for i in 0..count {
            if self.packed {
                let at = desc + 3 * 16 * usize::from(i);
                memory.write(at + 8, &u32::to_le_bytes(len));
                memory.store_u16(at + 12, id, Release);
                memory.store_u16(at + 14, 1 << 7 | 1 << 15, Release);
            } else {
                let at = used + 4 + 8 * usize::from(i);
                memory.write(at, &u32::from(id).to_le_bytes());
                memory.write(at + 4, &u32::to_le_bytes(len));
            }
        }
        if !self.packed {
            memory.store_u16(used + 2, count, Release);
        }
    }
}
