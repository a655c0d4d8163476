//! A queue as its front-end has described it, piece by piece. Control context.

use crate::Error;
use crate::device::{EventFd, Rings};
use crate::message::{Code, VringAddr};
use crate::session::{F_EVENT_IDX, F_PROTOCOL_FEATURES};
use aryk_dma::MemTable;

/// Whether a queue is started, and how the guest says that it has made buffers available. "Ring states".
#[derive(Clone, Debug, Default)]
pub(crate) enum Kick {
    /// Not started.
    #[default]
    Stopped,
    /// Started; the ring is to be polled.
    Poll,
    /// Started; readable after a kick.
    Fd(EventFd),
}

impl Kick {
    pub(crate) fn fd(&self) -> Option<EventFd> {
        match self {
            Self::Stopped | Self::Poll => None,
            Self::Fd(fd) => Some(EventFd::clone(fd)),
        }
    }
}

/// Where the parts of a ring lie, in the front-end's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingAddrs {
    desc: u64,
    avail: u64,
    used: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Vring {
    /// Descriptors; 0 until it is told.
    pub(crate) size: u16,
    /// Where it goes on, when it does not run; see [`crate::QueueSetup::base`].
    pub(crate) base: u32,
    pub(crate) addr: Option<RingAddrs>,
    pub(crate) kick: Kick,
    pub(crate) call: Option<EventFd>,
    pub(crate) err: Option<EventFd>,
    /// The last SET_VRING_ENABLE, if there was one.
    pub(crate) enabled: Option<bool>,
    /// Whether the device runs it.
    pub(crate) running: bool,
}

impl Vring {
    /// SET_VRING_NUM: a power of two up to 32,768 (virtio 1.2, section 2.7).
    pub(crate) fn check_size(code: Code, num: u32) -> Result<u16, Error> {
        let size = u16::try_from(num).ok().filter(|n| n.is_power_of_two());
        size.ok_or(Error::BadPayload { code, what: "a queue's size is a power of two up to 32768" })
    }

    /// SET_VRING_ADDR: aligned as virtio 1.2, section 2.7, asks. Memory is mapped so that what is aligned in the
    /// front-end is aligned here.
    pub(crate) fn check_addr(code: Code, addr: &VringAddr) -> Result<RingAddrs, Error> {
        let VringAddr { desc, avail, used, .. } = *addr;
        if !desc.is_multiple_of(16) || !avail.is_multiple_of(2) || !used.is_multiple_of(4) {
            return Err(Error::BadPayload { code, what: "a ring is not aligned" });
        }
        if addr.flags != 0 {
            return Err(Error::BadPayload { code, what: "logging of a ring was not negotiated" });
        }
        Ok(RingAddrs { desc, avail, used })
    }

    /// Whether the front-end has said all that is needed to run it, and wants it to run.
    pub(crate) fn is_wanted(&self, features: u64) -> bool {
        // "Ring states": without protocol features a ring begins enabled, with them disabled.
        let enabled = self.enabled.unwrap_or(features & F_PROTOCOL_FEATURES == 0);
        enabled && !matches!(self.kick, Kick::Stopped) && self.size > 0 && self.addr.is_some()
    }

    /// The rings in `memory`, if they are there.
    pub(crate) fn rings(&self, features: u64, memory: &MemTable) -> Option<Rings> {
        let addr = self.addr?;
        let size = u64::from(self.size);
        let event = if features & F_EVENT_IDX != 0 { 2 } else { 0 };
        Some(Rings {
            desc: memory.area_at_user(addr.desc, 16 * size)?,
            driver: memory.area_at_user(addr.avail, 4 + 2 * size + event)?,
            device: memory.area_at_user(addr.used, 4 + 8 * size + event)?,
        })
    }
}
