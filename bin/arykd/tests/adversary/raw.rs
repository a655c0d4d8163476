//! A split ring under the caller's full control: descriptors and indices have any values, and requests are not tracked.

use aryk_front_end::{
    Announced, Error, Format, Memory, Request, Ring, Session, Shape, Wanted, feature, payload, protocol,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Descriptors of the ring: the default maximum of a queue, and QEMU's maximum.
const SIZE: u16 = 1024;
/// Bytes for the ring, at the beginning of the memory.
pub const RINGS: u64 = 1 << 20;

/// The index of the queue, and the size of the memory.
#[derive(Clone, Copy)]
pub struct Plan {
    /// The queue's index; the queues before it have rings of the smallest size, which stay empty.
    pub index: u16,
    /// Bytes of memory; the first MiB is the ring's.
    pub memory: u64,
}

/// A session with one ring.
pub struct Raw {
    pub session: Session,
    pub memory: Memory,
    pub size: u16,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
    index: u16,
    shown: u16,
}

pub fn wanted(queues: u16) -> Wanted {
    Wanted {
        features: feature::VERSION_1,
        optional: feature::INDIRECT | feature::LOG_ALL | 0xffff,
        protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
        optional_protocol: protocol::LOG_SHMFD | protocol::INFLIGHT_SHMFD,
        queues,
        patience: Duration::from_secs(20),
    }
}

impl Raw {
    /// Connects a session with a ring of the maximum size.
    pub fn connect(socket: &Path, plan: Plan) -> Result<Self, Error> {
        let size = SIZE;
        let session = Session::connect(socket, &wanted(plan.index + 1))?;
        // Takes all features, like a Linux guest with a SCSI host, except the dirty log, which is requested later.
        session.wire().send(Request::SET_FEATURES, &payload![session.features() & !feature::LOG_ALL], &[])?;
        let memory = Memory::new(plan.memory)?;
        session.share(&memory)?;
        let ring = Ring::new(Shape { format: Format::Split, size, event_idx: false }, &memory, 0);
        assert!(ring.parts().device + 6 + 8 * u64::from(size) <= RINGS);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os("eventfd"));
        let raw =
            Self { session, memory, size, ring, kick: event()?, call: event()?, index: plan.index, shown: 0 };
        raw.start()?;
        Ok(raw)
    }

    fn announced(&self) -> Announced<'_> {
        let (kick, call) = (self.kick.as_fd(), self.call.as_fd());
        Announced { index: self.index, size: self.size, ring: &self.ring, kick, call }
    }

    /// Announces and starts the ring.
    pub fn start(&self) -> Result<(), Error> {
        self.session.start(&self.announced())?;
        self.enable(true)
    }

    pub fn enable(&self, on: bool) -> Result<(), Error> {
        let on = u32::from(on);
        self.session.wire().send(Request::SET_VRING_ENABLE, &payload![u32::from(self.index), on], &[])
    }

    /// Stops the ring after its requests in flight have completed.
    pub fn stop(&self) -> Result<u32, Error> {
        self.session.stop(self.index)
    }

    /// Turns on the dirty log.
    pub fn log(&self) -> Result<(), Error> {
        let pages = (Memory::guest_addr(0) + self.memory.whole().len()) / 4096;
        let len = pages.div_ceil(8);
        let file = memfd_create("log", MemfdFlags::CLOEXEC).map_err(os("memfd_create"))?;
        ftruncate(&file, len).map_err(os("ftruncate"))?;
        self.session.log(file.as_fd(), len, &[self.announced()])
    }

    /// Writes descriptor `index` of the table at `table`, or of the ring's descriptor table.
    pub fn desc(&self, table: Option<u64>, index: u16, (at, len): (u64, u32), flags: u16, next: u16) {
        let at_desc = table.unwrap_or(self.ring.parts().desc) + 16 * u64::from(index);
        let low = Memory::guest_addr(at);
        let high = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.memory.whole().write(at_desc as usize, &[low.to_le(), high.to_le()]);
    }

    /// Adds a chain to the ring; `publish` makes it visible.
    pub fn offer(&mut self, head: u16) {
        let place = u64::from(self.shown & (self.size - 1));
        let at = self.ring.parts().driver + 4 + 2 * place;
        self.memory.whole().store_u16(at as usize, head, Ordering::Relaxed);
        self.shown = self.shown.wrapping_add(1);
    }

    /// Publishes the added chains.
    pub fn publish(&self) {
        self.memory.whole().store_u16(self.ring.parts().driver as usize + 2, self.shown, Ordering::Release);
        self.kick();
    }

    pub fn kick(&self) {
        // A full eventfd counts as kicked.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// The number of chains that are not used yet.
    pub fn outstanding(&self) -> u16 {
        let used = self.memory.whole().load_u16(self.ring.parts().device as usize + 2, Ordering::Acquire);
        self.shown.wrapping_sub(used)
    }
}

fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |source| Error::Os { what, source }
}
