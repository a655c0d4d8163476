//! A queue of either format, as device types see it. Made in control context, used in reactor context by its one owner.

use crate::{
    Chain, ConfigError, PackedConfig, PackedQueue, PopError, QueueError, SplitConfig, SplitQueue, packed,
    split, used_idx, used_len,
};
use aryk_dma::{GuestArea, MemTable};

/// How a ring is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Section 2.7.
    Split,
    /// Section 2.8.
    Packed,
}

/// What a queue is made of.
#[derive(Debug)]
pub struct Config {
    /// How its ring is laid out.
    pub format: Format,
    /// Descriptors.
    pub size: u16,
    /// The descriptors.
    pub desc: GuestArea,
    /// What the driver writes: the available ring, or its event suppression.
    pub driver: GuestArea,
    /// What the device writes: the used ring, or its event suppression.
    pub device: GuestArea,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// Where to go on, as GET_VRING_BASE said and SET_VRING_BASE says. Split: the index of the next available entry. Packed: as
    /// [`PackedConfig::base`].
    pub base: u32,
    /// Where what is in flight is known over restarts: [`inflight_len`] bytes. What it knows comes before `base`.
    pub inflight: Option<GuestArea>,
}

/// Bytes of one queue's part of an in-flight region.
pub const fn inflight_len(format: Format, size: u16) -> u64 {
    // Its neighbour's part starts on a cache line of its own.
    match format {
        Format::Split => split::inflight::len(size).next_multiple_of(64),
        Format::Packed => packed::inflight::len(size).next_multiple_of(64),
    }
}

/// A queue of either format.
#[derive(Debug)]
pub enum Virtqueue {
    /// A split one.
    Split(SplitQueue),
    /// A packed one.
    Packed(PackedQueue),
}

/// The same for every format.
macro_rules! each {
    ($self:ident, $queue:ident => $what:expr) => {
        match $self {
            Self::Split($queue) => $what,
            Self::Packed($queue) => $what,
        }
    };
}

impl Virtqueue {
    /// A queue over areas of a guest's memory.
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

    /// Where a successor goes on once all taken chains are given back, as [`Config::base`] has it.
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

    /// As [`SplitQueue::available`].
    ///
    /// # Errors
    /// [`QueueError`] if the queue is broken.
    #[inline]
    pub fn available(&mut self) -> Result<u16, QueueError> {
        each!(self, queue => queue.available())
    }

    /// As [`SplitQueue::pop`].
    ///
    /// # Errors
    /// [`PopError`].
    ///
    /// # Panics
    /// If `chain` was made for smaller queues.
    #[inline]
    pub fn pop(&mut self, memory: &MemTable, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        each!(self, queue => queue.pop(memory, chain))
    }

    /// As [`SplitQueue::replays`].
    pub fn replays(&self) -> usize {
        each!(self, queue => queue.replays())
    }

    /// As [`SplitQueue::push_used`].
    ///
    /// # Panics
    /// If no chain of this name is in flight.
    #[inline]
    pub fn push_used(&mut self, id: u16, len: u32) {
        each!(self, queue => queue.push_used(id, len));
    }

    /// As [`SplitQueue::publish`].
    #[inline]
    #[must_use = "a driver that is not called waits for ever"]
    pub fn publish(&mut self) -> bool {
        each!(self, queue => queue.publish())
    }

    /// As [`SplitQueue::enable_kicks`].
    #[inline]
    #[must_use = "no kick may come for chains that are there already"]
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
    #[inline]
    pub fn prefetch_next(&self, memory: &MemTable) {
        each!(self, queue => queue.prefetch_next(memory));
    }
}
