//! A queue's setup, as its front-end sends it, one message at a time. Control context.

use crate::Error;
use crate::device::{EventFd, QueueLog, Rings};
use crate::message::{Code, VringAddr};
use crate::session::{F_EVENT_IDX, F_PROTOCOL_FEATURES, F_RING_PACKED, Started};
use aryk_dma::MemTable;

/// Whether a queue is started, and how the guest signals available buffers. "Ring states".
#[derive(Clone, Debug, Default)]
pub(crate) enum Kick {
    /// Not started.
    #[default]
    Stopped,
    /// Started; the device must poll the ring.
    Poll,
    /// Started; the fd becomes readable after a kick.
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

/// Bytes of a packed ring's `struct pvirtq_event_suppress` (virtio 1.2, section 2.8.14).
const EVENT_SUPPRESSION_LEN: u64 = 4;

const WRONG_SIZE: &str = "a queue's size is 1 to 32768, and a power of two for a split ring";
const NOT_ALIGNED: &str = "a ring is not aligned";
const WRONG_BASE: &str = "an index into the available ring has 16 bits";

/// Addresses of the parts of a ring in the front-end's process: `avail` and `used` of a packed ring are the driver's and the
/// device's event suppression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingAddrs {
    desc: u64,
    avail: u64,
    used: u64,
}

impl RingAddrs {
    fn is_aligned(self, packed: bool) -> bool {
        let driver = if packed { 4 } else { 2 };
        self.desc.is_multiple_of(16) && self.avail.is_multiple_of(driver) && self.used.is_multiple_of(4)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Vring {
    /// Number of descriptors; 0 until the front-end has set it.
    pub(crate) size: u16,
    /// Position at which the stopped queue resumes; see [`crate::QueueSetup::base`]. `None` until the front-end has set it or the
    /// queue has run.
    pub(crate) base: Option<u32>,
    /// Position at which the queue stopped, if a reset has cleared `base` since. QEMU 7.2 sets the device's status to 0 before it
    /// sends GET_VRING_BASE for each queue, and passes the answers to the QEMU to which a VM migrates.
    pub(crate) stopped_at: Option<u32>,
    pub(crate) addr: Option<RingAddrs>,
    /// Guest address of the used ring, if writes to the used ring must be logged.
    pub(crate) log_addr: Option<u64>,
    /// The log that the device uses for the queue, while the queue runs.
    pub(crate) log: Option<QueueLog>,
    pub(crate) kick: Kick,
    pub(crate) call: Option<EventFd>,
    pub(crate) err: Option<EventFd>,
    /// The last SET_VRING_ENABLE, if one was received.
    pub(crate) enabled: Option<bool>,
    /// Whether the device runs the queue.
    pub(crate) run_state: RunState,
}

/// Whether the device runs a queue.
#[derive(Debug, Default)]
pub(crate) enum RunState {
    #[default]
    Stopped,
    /// The device waits for the queue's disk.
    Starting(Started),
    Running,
}

impl RunState {
    pub(crate) const fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}

impl Vring {
    /// SET_VRING_NUM: up to 32,768, a power of two for a split ring (virtio 1.2, sections 2.7 and 2.8), and no more than `max`.
    ///
    /// The ring format may not be known yet: then [`Vring::check`] does the remaining checks. The same holds for the functions
    /// below.
    pub(crate) fn check_size(code: Code, features: Option<u64>, num: u32, max: u16) -> Result<u16, Error> {
        const SIZE_MAX: u16 = 32_768;
        let size = u16::try_from(num).ok().filter(|n| (1..=SIZE_MAX).contains(n));
        let split = features.is_some_and(|features| !is_packed(features));
        let size = size.filter(|n| !split || n.is_power_of_two());
        let size = size.ok_or(Error::BadPayload { code, what: WRONG_SIZE })?;
        if size > max { Err(Error::QueueTooLarge { code, size, max }) } else { Ok(size) }
    }

    /// SET_VRING_ADDR: checks the alignment that virtio 1.2, sections 2.7 and 2.8.10, requires. Addresses that are aligned in
    /// the front-end are aligned in this process, because memory is mapped accordingly.
    pub(crate) fn check_addr(
        code: Code,
        features: Option<u64>,
        addr: &VringAddr,
    ) -> Result<RingAddrs, Error> {
        let VringAddr { desc, avail, used, .. } = *addr;
        let addrs = RingAddrs { desc, avail, used };
        if !addrs.is_aligned(features.is_some_and(is_packed)) {
            return Err(Error::BadPayload { code, what: NOT_ALIGNED });
        }
        Ok(addrs)
    }

    /// SET_VRING_ADDR: the guest address at which writes to the used ring are logged, if they must be logged.
    pub(crate) fn check_log(code: Code, offered: bool, addr: &VringAddr) -> Result<Option<u64>, Error> {
        /// VHOST_VRING_F_LOG.
        const LOG: u32 = 1;
        let error = |what| Err(Error::BadPayload { code, what });
        match addr.flags {
            0 => Ok(None),
            LOG if !offered => error("logging of a ring was not negotiated"),
            LOG if !addr.log.is_multiple_of(4) => error("the log address of a ring is not aligned"),
            LOG => Ok(Some(addr.log)),
            _ => error("unknown ring flags"),
        }
    }

    /// SET_VRING_BASE: 16 bits for a split ring, 32 for a packed one.
    pub(crate) fn check_base(code: Code, features: Option<u64>, base: u32) -> Result<(), Error> {
        let split = features.is_some_and(|features| !is_packed(features));
        if split && base > u16::MAX.into() {
            return Err(Error::BadPayload { code, what: WRONG_BASE });
        }
        Ok(())
    }

    /// The checks that were not possible before the features were known.
    pub(crate) fn check(&self, code: Code, features: u64) -> Result<(), Error> {
        let packed = is_packed(features);
        let error = |what| Err(Error::BadPayload { code, what });
        if !packed && !self.size.is_power_of_two() {
            return error(WRONG_SIZE);
        }
        if self.addr.is_some_and(|addrs| !addrs.is_aligned(packed)) {
            return error(NOT_ALIGNED);
        }
        Self::check_base(code, Some(features), self.base(features))
    }

    /// Position at which the queue resumes.
    pub(crate) fn base(&self, features: u64) -> u32 {
        /// Both indices 0, and both wrap counters 1 (virtio 1.2, section 2.8.1).
        const PACKED_START: u32 = 0x8000_8000;
        self.base.unwrap_or(if is_packed(features) { PACKED_START } else { 0 })
    }

    /// Whether the front-end has enabled the queue and has sent its complete setup.
    pub(crate) fn is_wanted(&self, features: u64) -> bool {
        // "Ring states": without protocol features a ring is initially enabled; with protocol features it is initially
        // disabled.
        let enabled = self.enabled.unwrap_or(features & F_PROTOCOL_FEATURES == 0);
        enabled && !matches!(self.kick, Kick::Stopped) && self.size > 0 && self.addr.is_some()
    }

    /// Guest addresses and lengths of the parts of the ring that the device writes, as far as they must be logged.
    pub(crate) fn logged_ring(&self, features: u64, memory: &MemTable) -> [(u64, u64); 2] {
        const NONE: (u64, u64) = (0, 0);
        let Some(log_addr) = self.log_addr else { return [NONE; 2] };
        let device = (log_addr, self.device_len(features));
        // The device also writes a packed ring's descriptors, whose guest address the front-end does not send.
        let desc = self.addr.filter(|_| is_packed(features));
        let desc = desc.and_then(|addr| memory.guest_addr_at_user(addr.desc));
        [device, desc.map_or(NONE, |addr| (addr, self.desc_len()))]
    }

    fn desc_len(&self) -> u64 {
        16 * u64::from(self.size)
    }

    fn driver_len(&self, features: u64) -> u64 {
        if is_packed(features) {
            EVENT_SUPPRESSION_LEN
        } else {
            4 + 2 * u64::from(self.size) + event_len(features)
        }
    }

    fn device_len(&self, features: u64) -> u64 {
        if is_packed(features) {
            EVENT_SUPPRESSION_LEN
        } else {
            4 + 8 * u64::from(self.size) + event_len(features)
        }
    }

    /// The areas of the rings in `memory`; `None` if `memory` does not contain them.
    pub(crate) fn rings(&self, features: u64, memory: &MemTable) -> Option<Rings> {
        let addr = self.addr?;
        Some(Rings {
            desc: memory.area_at_user(addr.desc, self.desc_len())?,
            driver: memory.area_at_user(addr.avail, self.driver_len(features))?,
            device: memory.area_at_user(addr.used, self.device_len(features))?,
        })
    }
}

/// Bytes of `used_event` and of `avail_event` in split rings.
const fn event_len(features: u64) -> u64 {
    if features & F_EVENT_IDX != 0 { 2 } else { 0 }
}

/// Whether these features select packed rings.
pub(crate) const fn is_packed(features: u64) -> bool {
    features & F_RING_PACKED != 0
}
