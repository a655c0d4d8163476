//! A queue of either format, as device types use it. Created in control context, used in reactor context by its one
//! owner.

use crate::{
    Chain, ConfigError, PackedConfig, PackedQueue, PopError, QueueError, SplitConfig, SplitQueue, avail_len,
    desc_len, packed, split, used_idx, used_len,
};
use aryk_dma::{GuestArea, Mapping, MemTable};
use std::sync::Arc;

/// The format of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A split ring (section 2.7).
    Split,
    /// A packed ring (section 2.8).
    Packed,
}

/// The parameters of a queue.
#[derive(Debug)]
pub struct Config {
    /// The format of the ring.
    pub format: Format,
    /// Number of descriptors.
    pub size: u16,
    /// The area of the descriptors.
    pub desc: GuestArea,
    /// The driver area: the available ring, or the driver's event suppression.
    pub driver: GuestArea,
    /// The device area: the used ring, or the device's event suppression.
    pub device: GuestArea,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// The starting position, as returned by GET_VRING_BASE and sent by SET_VRING_BASE. Split: the index of the next
    /// available entry. Packed: as [`PackedConfig::base`].
    pub base: u32,
    /// The memory that records chains in flight across restarts: [`inflight_len`] bytes. Its content takes precedence
    /// over `base`.
    pub inflight: Option<GuestArea>,
}

/// The size of one queue's part of an in-flight region, in bytes.
pub const fn inflight_len(format: Format, size: u16) -> u64 {
    // The next queue's part starts at a new cache line.
    match format {
        Format::Split => split::inflight::len(size).next_multiple_of(64),
        Format::Packed => packed::inflight::len(size).next_multiple_of(64),
    }
}

/// A queue of either format.
// An explicit tag, because each request reads it: a tag that the compiler hides in a spare value of a field takes longer to
// compare.
#[derive(Debug)]
#[repr(u32)]
pub enum Virtqueue {
    /// A split queue.
    Split(SplitQueue),
    /// A packed queue.
    Packed(PackedQueue),
}

/// The result of [`Virtqueue::pop`], which fits into a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Popped {
    /// The id of a chain.
    Chain(u16),
    /// No chain is available.
    Nothing,
    /// The id of a malformed chain. The chain counts as taken: complete it with a length of 0.
    Malformed(u16),
    /// The queue is broken; [`Virtqueue::broken`] returns the error.
    Broken,
}

impl From<Result<Option<u16>, PopError>> for Popped {
    #[inline]
    fn from(popped: Result<Option<u16>, PopError>) -> Self {
        match popped {
            Ok(Some(name)) => Self::Chain(name),
            Ok(None) => Self::Nothing,
            Err(PopError::Chain { head, .. }) => Self::Malformed(head),
            Err(PopError::Queue(_)) => Self::Broken,
        }
    }
}

// The next functions are separate for the reason that `Virtqueue::pop` states.

#[inline(never)]
fn push_used_packed(queue: &mut PackedQueue, id: u16, len: u32) {
    queue.push_used(id, len);
}

#[inline(never)]
fn prefetch_packed(queue: &PackedQueue, memory: &MemTable) {
    queue.prefetch_next(memory);
}

#[inline(never)]
fn pop_packed(queue: &mut PackedQueue, memory: &MemTable, chain: &mut Chain) -> Popped {
    queue.pop(memory, chain).into()
}

/// Applies the same expression to either format.
macro_rules! each {
    ($self:ident, $queue:ident => $what:expr) => {
        match $self {
            Self::Split($queue) => $what,
            Self::Packed($queue) => $what,
        }
    };
}

/// Offsets and lengths of the parts of a ring of either format in private memory.
const fn private_parts(size: u16) -> [(u64, u64); 3] {
    const ALIGN: u64 = 64;
    let (desc, driver, device) = (desc_len(size), avail_len(size, true), used_len(size, true));
    let driver_at = desc.next_multiple_of(ALIGN);
    let device_at = (driver_at + driver).next_multiple_of(ALIGN);
    [(0, desc), (driver_at, driver), (device_at, device)]
}

/// Bytes that [`Virtqueue::leave`] needs for a queue of `size` descriptors.
pub const fn private_len(size: u16) -> u64 {
    let [_, _, (at, len)] = private_parts(size);
    at + len
}

impl Virtqueue {
    /// Creates a queue over areas of a guest's memory.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let Config { format, size, desc, driver, device, event_idx, indirect, base, inflight } = config;
        match format {
            Format::Split => {
                let needed = used_len(size, event_idx);
                if device.len() < needed {
                    return Err(ConfigError::TooShort { part: "used ring", len: device.len(), needed });
                }
                let split = SplitConfig {
                    size,
                    desc,
                    avail: driver,
                    next_used: used_idx(&device),
                    used: device,
                    event_idx,
                    indirect,
                    next_avail: base as u16,
                };
                Ok(Self::Split(match inflight {
                    Some(region) => SplitQueue::with_inflight(split, region)?,
                    None => SplitQueue::new(split)?,
                }))
            }
            Format::Packed => {
                let packed = PackedConfig { size, desc, driver, device, event_idx, indirect, base };
                Ok(Self::Packed(match inflight {
                    Some(region) => PackedQueue::with_inflight(packed, region)?,
                    None => PackedQueue::new(packed)?,
                }))
            }
        }
    }

    /// As [`SplitQueue::size`].
    pub const fn size(&self) -> u16 {
        each!(self, queue => queue.size())
    }

    /// The position at which a successor continues after all taken chains are completed, in the format of [`Config::base`].
    pub const fn base(&self) -> u32 {
        match self {
            Self::Split(queue) => queue.next_avail() as u32,
            Self::Packed(queue) => queue.base(),
        }
    }

    /// As [`SplitQueue::in_flight`].
    pub fn in_flight(&self) -> u32 {
        each!(self, queue => queue.in_flight())
    }

    /// As [`SplitQueue::broken`].
    pub const fn broken(&self) -> Option<QueueError> {
        each!(self, queue => queue.broken())
    }

    /// As [`SplitQueue::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        each!(self, queue => queue.is_poisoned())
    }

    /// As [`SplitQueue::set_areas`].
    ///
    /// # Errors
    /// [`ConfigError`]; then nothing has changed.
    pub fn set_areas(
        &mut self,
        desc: GuestArea,
        driver: GuestArea,
        device: GuestArea,
    ) -> Result<(), ConfigError> {
        each!(self, queue => queue.set_areas(desc, driver, device))
    }

    /// Writes completions to `memory` instead of the driver's from now on, and no longer to the in-flight region, which records
    /// the chains in flight for a successor. The queue must take no more chains.
    ///
    /// # Errors
    /// [`ConfigError`]: `memory` is shorter than [`private_len`]; then nothing has changed.
    pub fn leave(&mut self, memory: &Arc<Mapping>) -> Result<(), ConfigError> {
        let [desc, driver, device] = private_parts(self.size());
        let area = |(at, len)| {
            let too_short =
                ConfigError::TooShort { part: "private memory", len: memory.len(), needed: at + len };
            GuestArea::new(memory, at, len).ok_or(too_short)
        };
        self.set_areas(area(desc)?, area(driver)?, area(device)?)?;
        each!(self, queue => queue.leave_inflight());
        Ok(())
    }

    /// As [`SplitQueue::available`].
    ///
    /// # Errors
    /// [`QueueError`] if the queue is broken.
    #[inline]
    pub fn available(&mut self) -> Result<u16, QueueError> {
        each!(self, queue => queue.available())
    }

    /// As [`SplitQueue::knows_more`]. Always `true` for a packed queue, which must pop to find out.
    #[inline]
    pub const fn may_know_more(&self) -> bool {
        match self {
            Self::Split(queue) => queue.knows_more(),
            Self::Packed(_) => true,
        }
    }

    /// As [`SplitQueue::pop`].
    // Always inlined, because a device type calls it in one place. Nearly all guests have a split ring. The code of packed
    // rings is in separate functions, so that it uses none of the caller's registers.
    #[inline(always)]
    pub fn pop(&mut self, memory: &MemTable, chain: &mut Chain) -> Popped {
        match self {
            // Not [`SplitQueue::pop`]: its detailed errors, which the caller does not need, would be passed through memory.
            Self::Split(queue) => match queue.take_head() {
                Ok(Some(head)) if queue.walk(head, memory, chain).is_ok() => Popped::Chain(head),
                Ok(Some(head)) => Popped::Malformed(head),
                Ok(None) => Popped::Nothing,
                Err(_) => Popped::Broken,
            },
            Self::Packed(queue) => pop_packed(queue, memory, chain),
        }
    }

    /// As [`SplitQueue::replays`].
    pub fn replays(&self) -> usize {
        each!(self, queue => queue.replays())
    }

    /// As [`SplitQueue::push_used`].
    ///
    /// # Panics
    /// If no chain with this id is in flight.
    #[inline]
    pub fn push_used(&mut self, id: u16, len: u32) {
        match self {
            Self::Split(queue) => queue.push_used(id, len),
            Self::Packed(queue) => push_used_packed(queue, id, len),
        }
    }

    /// As [`SplitQueue::publish`].
    #[inline]
    #[must_use = "a driver that receives no call waits forever"]
    pub fn publish(&mut self) -> bool {
        each!(self, queue => queue.publish())
    }

    /// As [`SplitQueue::enable_kicks`].
    #[inline]
    #[must_use = "the driver may send no kick for chains that are available already"]
    pub fn enable_kicks(&mut self) -> bool {
        each!(self, queue => queue.enable_kicks())
    }

    /// As [`SplitQueue::disable_kicks`].
    #[inline]
    pub fn disable_kicks(&mut self) {
        each!(self, queue => queue.disable_kicks());
    }

    /// As [`SplitQueue::prefetch_first`].
    #[inline]
    pub fn prefetch_first(&self, memory: &MemTable) {
        each!(self, queue => queue.prefetch_first(memory));
    }

    /// As [`SplitQueue::prefetch_next`].
    #[inline(always)]
    pub fn prefetch_next(&self, memory: &MemTable) {
        match self {
            Self::Split(queue) => queue.prefetch_next(memory),
            Self::Packed(queue) => prefetch_packed(queue, memory),
        }
    }
}
