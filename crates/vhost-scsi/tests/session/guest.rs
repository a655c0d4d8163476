//! The guest's side of a controller: session, queues, commands. Its calls block; the controller runs on other threads.

use aryk_front_end::{
    Announced, Format, Memory, Piece, Request, Ring, Session, Shape, Wanted, feature, payload, protocol,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Descriptors of each queue.
const SIZE: u16 = 256;
/// The size of the memory of each queue's requests (request, answer and data), in bytes.
const SPACE: u64 = 16 << 20;
/// Offsets of the answer and of the data in that memory.
pub const ANSWER_AT: u64 = 512;
pub const DATA_AT: u64 = 4096;
/// The size of an answer in bytes.
pub const ANSWER: usize = 108;

/// The features for hot plug and change events.
pub const EVENTS: u64 = 1 << 1 | 1 << 2;

/// The queues' indices.
pub const CONTROL: u16 = 0;
pub const EVENT: u16 = 1;
pub const REQUEST: u16 = 2;

/// The guest address of the second memory region, which contains no queues.
const MORE: u64 = 0x2000_0000;

struct Lane {
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
    space: u64,
}

/// A guest with one request queue.
pub struct Guest {
    session: Session,
    memory: Memory,
    lanes: Vec<Lane>,
}

/// The answer of a command.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// Bytes that the device reports as written.
    pub written: u32,
    pub response: u8,
    pub status: u8,
    pub residual: u32,
    pub sense: Vec<u8>,
    pub data: Vec<u8>,
}

impl Answer {
    /// Key, code and qualifier of sense data in fixed format.
    pub fn key_and_code(&self) -> (u8, u8, u8) {
        (self.sense[2] & 0xf, self.sense[12], self.sense[13])
    }
}

/// The dirty log of a guest's memory.
pub struct Log {
    file: File,
}

impl Log {
    /// Whether all these pages are marked dirty. Clears their marks.
    pub fn take(&self, pages: Range<u64>) -> bool {
        let mut all = true;
        for page in pages {
            let mut byte = [0];
            self.file.read_exact_at(&mut byte, page / 8).expect("the log covers the memory");
            all &= byte[0] & 1 << (page % 8) != 0;
            byte[0] &= !(1 << (page % 8));
            self.file.write_all_at(&byte, page / 8).expect("the log covers the memory");
        }
        all
    }
}

/// How long any call may take.
const PATIENCE: Duration = Duration::from_secs(20);

impl Guest {
    /// Connects a guest. If `has_inflight`, the guest provides an in-flight region.
    pub fn connect(socket: &Path, format: Format, has_inflight: bool) -> Self {
        let wanted = Wanted {
            features: feature::VERSION_1
                | EVENTS
                | if format == Format::Packed { feature::PACKED } else { 0 },
            optional: 0,
            protocol: protocol::MQ
                | protocol::REPLY_ACK
                | protocol::CONFIG
                | protocol::LOG_SHMFD
                | protocol::INFLIGHT_SHMFD,
            optional_protocol: 0,
            queues: 3,
            patience: PATIENCE,
        };
        let session = Session::connect(socket, &wanted).expect("a session");
        let shape = Shape { format, size: SIZE, event_idx: false };
        let ring_space = shape.space();
        let memory = Memory::new(3 * (ring_space + SPACE)).expect("memory");
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let lane = |i: u64| Lane {
            ring: Ring::new(shape, &memory, i * (ring_space + SPACE)),
            kick: event(),
            call: event(),
            space: i * (ring_space + SPACE) + ring_space,
        };
        let lanes: Vec<_> = (0..3).map(lane).collect();
        session.set_features().expect("features");
        session.share(&memory).expect("memory");
        if has_inflight {
            // For three queues; the answer begins with a size and an offset.
            let asked = payload![0_u64, 0_u64, 3_u16, SIZE, 0_u32];
            let (region, fd) = session.wire().ask(Request::GET_INFLIGHT_FD, &asked).expect("a region");
            let fd = fd.expect("a file");
            session.wire().send(Request::SET_INFLIGHT_FD, &region, &[fd.as_fd()]).expect("a region");
        }
        for (index, lane) in (0..).zip(&lanes) {
            let (kick, call) = (lane.kick.as_fd(), lane.call.as_fd());
            session.start(&Announced { index, size: SIZE, ring: &lane.ring, kick, call }).expect("a queue");
        }
        session.enable(3).expect("queues");
        Self { session, memory, lanes }
    }

    /// Starts the dirty log: one byte for eight pages, from guest address 0 on.
    pub fn log(&self) -> Log {
        let [first, len, ..] = self.memory.region();
        let bytes = (first + len).div_ceil(8 * PAGE).next_multiple_of(PAGE);
        let file = memfd_create("log", MemfdFlags::CLOEXEC).expect("a log");
        ftruncate(&file, bytes).expect("a log");
        let announced: Vec<_> = (0..)
            .zip(&self.lanes)
            .map(|(index, lane)| {
                let (kick, call) = (lane.kick.as_fd(), lane.call.as_fd());
                Announced { index, size: SIZE, ring: &lane.ring, kick, call }
            })
            .collect();
        self.session.log(file.as_fd(), bytes, &announced).expect("a log");
        Log { file: file.into() }
    }

    /// The pages of `len` bytes at offset `at` of a queue's space.
    pub fn pages(&self, queue: u16, at: u64, len: u64) -> Range<u64> {
        let start = Memory::guest_addr(self.lanes[usize::from(queue)].space + at);
        start / PAGE..(start + len).div_ceil(PAGE)
    }

    /// The page of the ring's part that the device writes.
    pub fn used_page(&self, queue: u16) -> Range<u64> {
        let at = Memory::guest_addr(self.lanes[usize::from(queue)].ring.parts().device);
        at / PAGE..at / PAGE + 1
    }

    /// The device's configuration space.
    pub fn config(&self) -> Vec<u8> {
        self.session.config(36).expect("a configuration")
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        bytes.iter().enumerate().for_each(|(i, byte)| self.memory.whole().write(at as usize + i, byte));
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        (0..len).map(|i| self.memory.whole().read(at as usize + i)).collect()
    }

    /// Makes a chain available: offsets into the queue's space, lengths, and whether the device writes there.
    pub fn offer(&mut self, queue: u16, slot: u16, pieces: &[(u64, u32, bool)]) {
        let lane = &mut self.lanes[usize::from(queue)];
        let space = lane.space;
        let place = |&(at, len, write): &(u64, u32, bool)| Piece { at: space + at, len, write };
        let pieces: Vec<_> = pieces.iter().filter(|p| p.1 > 0).map(place).collect();
        lane.ring.add(slot, &pieces, None);
        lane.ring.publish();
        rustix::io::write(&lane.kick, &1u64.to_ne_bytes()).expect("a kick");
    }

    /// The next used chain, if one arrives within this time: slot and length.
    #[expect(clippy::disallowed_methods, reason = "a guest lives in real time")]
    pub fn take(&mut self, queue: u16, patience: Duration) -> Option<(u16, u32)> {
        let end = Instant::now() + patience;
        loop {
            if let Some(taken) = self.lanes[usize::from(queue)].ring.take().expect("a valid used element") {
                return Some(taken);
            }
            if Instant::now() > end {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Writes into a queue's space.
    pub fn write(&self, queue: u16, at: u64, bytes: &[u8]) {
        self.put(self.lanes[usize::from(queue)].space + at, bytes);
    }

    /// Reads from a queue's space.
    pub fn read(&self, queue: u16, at: u64, len: usize) -> Vec<u8> {
        self.get(self.lanes[usize::from(queue)].space + at, len)
    }

    /// Submits a command as `slot`.
    pub fn submit(&mut self, slot: u16, address: [u8; 8], cdb: &[u8], out: &[u8], room: u32) {
        let data = Self::base(slot) + DATA_AT;
        self.write(REQUEST, data, out);
        self.submit_at(slot, address, cdb, data, [out.len() as u32, room]);
    }

    /// Submits a read into the second region; see [`Guest::share`].
    pub fn submit_to_more(&mut self, slot: u16, address: [u8; 8], cdb: &[u8], room: u32) {
        let data = MORE - Memory::guest_addr(self.lanes[usize::from(REQUEST)].space);
        self.submit_at(slot, address, cdb, data, [0, room]);
    }

    /// The offset of a slot's space.
    fn base(slot: u16) -> u64 {
        u64::from(slot) * SPACE / u64::from(SIZE)
    }

    fn submit_at(&mut self, slot: u16, address: [u8; 8], cdb: &[u8], data: u64, [out, room]: [u32; 2]) {
        let base = Self::base(slot);
        let mut request = [0; 51];
        request[..8].copy_from_slice(&address);
        request[8..16].copy_from_slice(&(1000 + u64::from(slot)).to_le_bytes());
        request[19..19 + cdb.len()].copy_from_slice(cdb);
        self.write(REQUEST, base, &request);
        self.write(REQUEST, base + ANSWER_AT, &[0xee; ANSWER]);
        let pieces = [
            (base, 51, false),
            (data, out, false),
            (base + ANSWER_AT, ANSWER as u32, true),
            (data, room, true),
        ];
        self.offer(REQUEST, slot, &pieces);
    }

    /// Announces the queues' memory, and optionally a second region. Returns how long the device took.
    #[expect(clippy::disallowed_methods, reason = "a guest lives in real time")]
    pub fn share(&self, more: Option<&Memory>) -> Duration {
        let [guest, len, user, offset] = self.memory.region();
        let (mut regions, mut files) = (payload![guest, len, user, offset], vec![self.memory.fd()]);
        if let Some(more) = more {
            regions.extend(payload![MORE, more.region()[1], user + MORE, 0_u64]);
            files.push(more.fd());
        }
        let message = [payload![files.len() as u32, 0_u32], regions].concat();
        let began = Instant::now();
        self.session.wire().send(Request::SET_MEM_TABLE, &message, &files).expect("memory");
        began.elapsed()
    }

    /// The answer of the completed command `slot`.
    pub fn answer(&self, slot: u16, written: u32, room: u32) -> Answer {
        let base = Self::base(slot);
        let answer = self.read(REQUEST, base + ANSWER_AT, ANSWER);
        let word = |at: usize| u32::from_le_bytes(answer[at..at + 4].try_into().expect("four bytes"));
        let data = self.read(REQUEST, base + DATA_AT, room as usize);
        let sense = answer[12..][..word(0) as usize].to_vec();
        Answer { written, residual: word(4), status: answer[10], response: answer[11], sense, data }
    }

    /// Submits a command and waits for its answer.
    pub fn command(&mut self, address: [u8; 8], cdb: &[u8], out: &[u8], room: u32) -> Answer {
        self.submit(0, address, cdb, out, room);
        let (slot, written) = self.take(REQUEST, PATIENCE).expect("an answer");
        assert_eq!(slot, 0);
        self.answer(0, written, room)
    }

    /// Runs a task management function and returns its response.
    pub fn run_tmf(&mut self, function: u32, address: [u8; 8], tag: u64) -> u8 {
        self.submit_tmf(0, function, address, tag);
        self.next_tmf_answer(PATIENCE).expect("a response").1
    }

    /// Submits a task management function as `slot`.
    pub fn submit_tmf(&mut self, slot: u16, function: u32, address: [u8; 8], tag: u64) {
        let request =
            [&0u32.to_le_bytes()[..], &function.to_le_bytes(), &address, &tag.to_le_bytes()].concat();
        let at = 128 * u64::from(slot);
        self.write(CONTROL, at, &request);
        self.write(CONTROL, at + 64, &[0xee]);
        self.offer(CONTROL, slot, &[(at, request.len() as u32, false), (at + 64, 1, true)]);
    }

    /// The next function that is answered within this time, and its response.
    pub fn next_tmf_answer(&mut self, patience: Duration) -> Option<(u16, u8)> {
        let (slot, _) = self.take(CONTROL, patience)?;
        Some((slot, self.read(CONTROL, 128 * u64::from(slot) + 64, 1)[0]))
    }

    /// Makes a buffer for an event available.
    pub fn refill(&mut self, slot: u16) {
        let at = u64::from(slot) * 64;
        self.offer(EVENT, slot, &[(at, 16, true)]);
    }

    /// The next event, if one arrives within this time: event, address, reason.
    pub fn event(&mut self, patience: Duration) -> Option<(u32, [u8; 8], u32)> {
        let (slot, written) = self.take(EVENT, patience)?;
        assert_eq!(written, 16);
        let bytes = self.read(EVENT, u64::from(slot) * 64, 16);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Some((word(0), bytes[4..12].try_into().expect("eight bytes"), word(12)))
    }

    /// Starts a stopped queue again at the ring index where it stopped.
    pub fn resume(&self, queue: u16) {
        let lane = &self.lanes[usize::from(queue)];
        let (kick, call) = (lane.kick.as_fd(), lane.call.as_fd());
        let announced = Announced { index: queue, size: SIZE, ring: &lane.ring, kick, call };
        self.session.start(&announced).expect("a queue");
        self.session.enable(3).expect("queues");
    }

    /// Stops a queue. Returns its base.
    pub fn stop(&self, queue: u16) -> u32 {
        self.session.stop(queue).expect("a base")
    }
}
