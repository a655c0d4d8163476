//! A faulty back-end with one fault at a time. Written by hand, because no library sends wrong messages.

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

/// The fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Replies to this many messages, then disconnects.
    HangUpAfter(usize),
    /// Replies to no message.
    Silent,
    /// Sends a reply that is too short.
    ShortReply,
    /// Sends a reply with a very large length.
    LongReply,
    /// Sends the reply of another message.
    OtherReply,
    /// Sends a part of a reply only.
    HalfReply,
    /// Offers no features.
    NoFeatures,
    /// Returns fewer configuration bytes than requested.
    ShortConfig,
    /// Reports this block size.
    Blocks(u32),
    /// Reports this number of sectors.
    Capacity(u64),
    /// Refuses the memory table.
    RefuseMemory,
    /// Completes no request.
    NoAnswers,
    /// Completes a request with this id.
    Id(u16),
    /// Completes a request twice.
    Twice,
    /// Completes a request with this status.
    Status(u8),
    /// Reports this many written bytes.
    Length(u32),
}

/// The back-end.
pub struct Fake;

/// Messages that have replies, and other messages that the back-end parses.
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

    /// Listens, and serves one front-end after the other until the test ends.
    pub fn start(path: &Path, fault: Fault) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // The front-end disconnects after the fault.
                let _ =
                    Session { stream: stream.unwrap(), fault, memory: None, rings: [0; 3], packed: false }
                        .run();
            }
        });
    }
}

/// A session with a front-end.
struct Session {
    stream: UnixStream,
    fault: Fault,
    /// The guest memory, and its address in messages.
    memory: Option<(GuestArea, u64)>,
    /// Offsets of the descriptors, the device area and the driver area.
    rings: [usize; 3],
    packed: bool,
}

impl Session {
    /// Replies until the front-end disconnects.
    fn run(mut self) -> Option<()> {
        for message in 0.. {
            if self.fault == Fault::HangUpAfter(message) {
                return None;
            }
            let (code, needs_reply, payload, fd) = self.receive()?;
            let reply = self.reply(code, &payload, fd);
            let answer = match (reply, needs_reply) {
                (Some(reply), _) => reply,
                (None, true) => {
                    let refuses = code == SET_MEM_TABLE && self.fault == Fault::RefuseMemory;
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

    /// Fills `bytes`. Returns a file descriptor that came with them.
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
        let (code, len, payload) = match self.fault {
            Fault::Silent => return Some(()),
            Fault::OtherReply => (99, payload.len(), payload),
            Fault::LongReply => (code, 1 << 30, payload),
            Fault::ShortReply => (code, 3, &payload[..3]),
            Fault::HalfReply => (code, payload.len(), &payload[..4]),
            _ => (code, payload.len(), payload),
        };
        let header = [code, 5, len as u32].map(u32::to_ne_bytes).concat();
        self.stream.write_all(&[&header, payload].concat()).ok()
    }

    /// The reply to a message, if it has one.
    fn reply(&mut self, code: u32, payload: &[u8], fd: Option<OwnedFd>) -> Option<Vec<u8>> {
        let word = |i: usize| u64::from_ne_bytes(payload[8 * i..8 * i + 8].try_into().unwrap());
        match code {
            GET_FEATURES if self.fault == Fault::NoFeatures => Some(0_u64.to_ne_bytes().to_vec()),
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
        let capacity = if let Fault::Capacity(sectors) = self.fault { sectors } else { 1 << 20 };
        let block = if let Fault::Blocks(size) = self.fault { size } else { 512 };
        config[..8].copy_from_slice(&capacity.to_le_bytes());
        config[20..24].copy_from_slice(&block.to_le_bytes());
        let mut reply = [0_u32, 60, 0].map(u32::to_ne_bytes).concat();
        reply.extend(&config);
        reply.truncate(if self.fault == Fault::ShortConfig { 8 } else { reply.len() });
        reply
    }

    /// Completes the first request, with the fault.
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
        // The index of its first and last descriptor; the last one is its status.
        let (head, last) = if self.packed {
            (memory.load_u16(desc + 12, Acquire), 2)
        } else {
            let head = memory.load_u16(avail + 4, Acquire);
            let next = |index: u16| memory.load_u16(desc + 16 * usize::from(index) + 14, Acquire);
            (head, next(next(head)))
        };
        let status = u64::from_le_bytes(memory.read(desc + 16 * usize::from(last)));
        let status = (status - 0x1000_0000) as usize;
        let (id, code, len, count) = match self.fault {
            Fault::NoAnswers | Fault::HangUpAfter(_) => return,
            Fault::Id(id) => (id, 0, 4097, 1),
            Fault::Twice => (head, 0, 4097, 2),
            Fault::Status(code) => (head, code, 4097, 1),
            Fault::Length(len) => (head, 0, len, 1),
            fault => panic!("{fault:?} comes before"),
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
