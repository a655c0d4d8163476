//! A guest with one queue and memory regions that it adds and removes. Its calls block; the controller runs on another thread.

use aryk_front_end::{
    Announced, Builder, Error, Format, Memory, Operation, Place, Request, Ring, Session, Shape, Wanted, blk,
    feature, payload, protocol,
};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

const SIZE: u16 = 64;
/// The size of the first region (ring, and requests without their data), in bytes.
const FIRST: u64 = 1 << 20;
/// The offset of the requests in the first region.
const HEADS: u64 = 256 << 10;
/// The guest address of the regions that are added and removed.
const PLUGGED: u64 = 1 << 40;
/// The distance between two of their places, in bytes.
const STEP: u64 = 1 << 30;
/// The size of a request's data and of each added region, in bytes.
pub const LEN: u64 = 64 << 10;

/// A connected guest.
pub struct Guest {
    session: Session,
    memory: Memory,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Guest {
    /// Connects, and starts its queue. `patience` is how long each reply may take.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self, Error> {
        let wanted = Wanted {
            features: feature::VERSION_1,
            optional: 0,
            protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::CONFIGURE_MEM_SLOTS,
            optional_protocol: 0,
            queues: 1,
            patience,
        };
        let session = Session::connect(socket, &wanted)?;
        let shape = Shape { format: Format::Split, size: SIZE, event_idx: false };
        let memory = Memory::new(FIRST)?;
        let ring = Ring::new(shape, &memory, 0);
        assert!(shape.space() <= HEADS, "a ring of {} bytes", shape.space());
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let guest = Self { session, memory, ring, kick: event(), call: event() };
        guest.session.set_features()?;
        guest.session.share(&guest.memory)?;
        guest.start()?;
        Ok(guest)
    }

    fn start(&self) -> Result<(), Error> {
        let (kick, call) = (self.kick.as_fd(), self.call.as_fd());
        self.session.start(&Announced { index: 0, size: SIZE, ring: &self.ring, kick, call })?;
        self.session.enable(1)
    }

    /// Stops the queue, and starts it again.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.session.stop(0)?;
        self.start()
    }

    fn message(at: u64, memory: &Memory) -> Vec<u8> {
        let guest_addr = PLUGGED + at * STEP;
        payload![0_u64, guest_addr, memory.region()[1], guest_addr, 0_u64]
    }

    /// Adds a region at one of the places for regions.
    pub fn plug(&self, at: u64, memory: &Memory) -> Result<(), Error> {
        self.session.wire().send(Request::ADD_MEM_REG, &Self::message(at, memory), &[memory.fd()])
    }

    /// Removes a region.
    pub fn unplug(&self, at: u64, memory: &Memory) -> Result<(), Error> {
        self.session.wire().send(Request::REM_MEM_REG, &Self::message(at, memory), &[])
    }

    /// Submits a request whose data is the region at place `at`.
    pub fn submit(&mut self, slot: u16, operation: Operation, at: u64, offset: u64) {
        let head = HEADS + u64::from(slot) * blk::Requests::SPACE;
        let data = (PLUGGED + at * STEP).wrapping_sub(Memory::guest_addr(0));
        let place = Place { head, data, len: LEN as u32 };
        blk::Requests.set_up(self.memory.whole(), operation, place, offset);
        self.ring.add(slot, &blk::Requests.pieces(operation, place), None);
        self.ring.publish();
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("a kick");
    }

    /// Whether the next request succeeds; `None` if none completes within this time.
    #[expect(clippy::disallowed_methods, reason = "a guest lives in real time")]
    pub fn take(&mut self, patience: Duration) -> Option<bool> {
        let end = Instant::now() + patience;
        loop {
            if let Some((slot, _)) = self.ring.take().expect("a valid used element") {
                let head = HEADS + u64::from(slot) * blk::Requests::SPACE;
                let place = Place { head, data: 0, len: 0 };
                let checked = blk::Requests.check(self.memory.whole(), Operation::Write, place, 0);
                return Some(checked.is_ok());
            }
            if Instant::now() > end {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Submits a request and waits until it has succeeded.
    pub fn run(&mut self, operation: Operation, at: u64, offset: u64) {
        self.submit(0, operation, at, offset);
        assert_eq!(self.take(Duration::from_secs(20)), Some(true));
    }
}

/// Allocates a region that can be added.
pub fn region() -> Memory {
    Memory::new(LEN).expect("memory")
}

/// Fills a region with a byte.
pub fn fill(memory: &Memory, byte: u8) {
    memory.whole().write_bytes(0, &[byte; LEN as usize]);
}

/// Whether each byte of a region has this value.
pub fn is_full_of(memory: &Memory, byte: u8) -> bool {
    let mut bytes = vec![0; LEN as usize];
    memory.whole().read_bytes(0, &mut bytes);
    bytes.iter().all(|b| *b == byte)
}
