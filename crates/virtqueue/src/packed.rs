//! Packed virtqueues (section 2.8). Used in reactor context by the queue's one owner.
//!
//! Driver and device share one ring of descriptors. Two bits in a descriptor's flags decide whether it belongs to the driver or
//! the device. Their meaning changes with each pass over the ring, so each side has a wrap counter. The device writes used
//! elements over descriptors that it has taken, in the order of completion, and then advances by as many descriptors as the
//! chain had.

use crate::chain::{CHAIN_MAX, Chain, Piece};
use crate::error::{ChainError, ConfigError, PopError, QueueError};
use crate::split::SIZE_MAX;
use aryk_crash_point::{Step, step};
use aryk_dma::{GuestArea, MemTable};
use inflight::Inflight;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_PACKED_DESC_F_AVAIL,
    VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_F_WRAP_CTR, VRING_PACKED_EVENT_FLAG_DESC,
    VRING_PACKED_EVENT_FLAG_DISABLE, VRING_PACKED_EVENT_FLAG_ENABLE,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) mod inflight;

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
const AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
const EVENT_ENABLE: u16 = VRING_PACKED_EVENT_FLAG_ENABLE as u16;
const EVENT_DISABLE: u16 = VRING_PACKED_EVENT_FLAG_DISABLE as u16;
const EVENT_DESC: u16 = VRING_PACKED_EVENT_FLAG_DESC as u16;

/// A descriptor (section 2.8.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Desc {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

const DESC_LEN: usize = size_of::<Desc>();
const _: () = assert!(DESC_LEN == 16);
const _: () =
    assert!(SIZE_MAX <= 1 << VRING_PACKED_EVENT_F_WRAP_CTR, "an index fits beside its wrap counter");
/// Offsets in a descriptor.
const LEN: usize = 8;
const ID: usize = 12;
const FLAGS: usize = 14;

/// Bytes of an event suppression structure (section 2.8.14), and offsets in it.
pub const EVENT_LEN: u64 = 4;
const EVENT_OFF_WRAP: usize = 0;
const EVENT_FLAGS: usize = 2;

/// Distance in descriptors at which a buffer is prefetched.
const BUFFERS_AHEAD: u16 = 3;

/// A position in the ring, with the wrap counter of that pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    index: u16,
    wrap: bool,
}

impl Cursor {
    /// Decodes the 16 bits of GET_VRING_BASE.
    const fn from_bits(bits: u16) -> Self {
        Self {
            index: bits & !(1 << VRING_PACKED_EVENT_F_WRAP_CTR),
            wrap: bits >> VRING_PACKED_EVENT_F_WRAP_CTR == 1,
        }
    }

    const fn bits(self) -> u16 {
        self.index | (self.wrap as u16) << VRING_PACKED_EVENT_F_WRAP_CTR
    }

    /// The position `count` descriptors later, at most one pass.
    #[inline]
    const fn after(self, count: u16, size: u16) -> Self {
        let index = self.index as u32 + count as u32;
        if index >= size as u32 {
            Self { index: (index - size as u32) as u16, wrap: !self.wrap }
        } else {
            Self { index: index as u16, wrap: self.wrap }
        }
    }

    /// Whether a descriptor at this position with these flags is available.
    #[inline]
    const fn is_avail(self, flags: u16) -> bool {
        (flags & AVAIL != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    /// The flags of a used descriptor at this position.
    #[inline]
    const fn used(self, len: u32) -> u16 {
        let written = if len > 0 { WRITE } else { 0 };
        if self.wrap { AVAIL | USED | written } else { written }
    }
}

/// The parameters of a packed queue.
#[derive(Debug)]
pub struct PackedConfig {
    /// Descriptors in the ring: up to [`SIZE_MAX`].
    pub size: u16,
    /// The ring: 16 bytes a descriptor, aligned to 16.
    pub desc: GuestArea,
    /// The driver's event suppression: [`EVENT_LEN`] bytes, aligned to 4.
    pub driver: GuestArea,
    /// The device's event suppression: the same.
    pub device: GuestArea,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// Bits 0–14: the next descriptor to take; bit 15: its wrap counter; bits 16–30 and 31: the same for the next used
    /// descriptor.
    pub base: u32,
}

impl PackedConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let size = self.size;
        if size == 0 || size > SIZE_MAX {
            return Err(ConfigError::PackedSize(size));
        }
        let parts = [
            ("descriptor ring", &self.desc, DESC_LEN as u64 * u64::from(size), 16),
            ("driver's event suppression", &self.driver, EVENT_LEN, 4),
            ("device's event suppression", &self.device, EVENT_LEN, 4),
        ];
        for (part, area, needed, align) in parts {
            if area.len() < needed {
                return Err(ConfigError::TooShort { part, len: area.len(), needed });
            }
            if !area.is_aligned(align) {
                return Err(ConfigError::Unaligned { part, align });
            }
        }
        Ok(())
    }
}

/// A used element that is not published yet.
#[derive(Clone, Copy, Debug)]
struct UsedDesc {
    at: Cursor,
    flags: u16,
}

/// The device's side of a packed queue. As [`SplitQueue`](crate::SplitQueue), but a chain is identified by its buffer id.
#[derive(Debug)]
pub struct PackedQueue {
    config: PackedConfig,
    next_avail: Cursor,
    next_used: Cursor,
    /// Descriptors that were taken and not returned.
    taken: u16,
    /// Descriptors of each chain in flight, by id; 0: not in flight.
    counts: Box<[u16]>,
    /// Used elements that were added since the last publication, in order.
    used: Vec<UsedDesc>,
    /// The number of descriptors between the first element of `used` and [`PackedQueue::next_used`].
    unpublished: u16,
    /// Whether anything was published. Until then, the driver may wait for a call that a predecessor failed to send.
    has_published: bool,
    /// A publication within [`PackedQueue::pop`] found that the driver needs a call.
    owes_call: bool,
    kept: Option<Inflight>,
    broken: Option<QueueError>,
}

impl PackedQueue {
    /// Creates a queue over areas of a guest's memory. Nothing is written to them yet.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(config: PackedConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let (avail, used) =
            (Cursor::from_bits(config.base as u16), Cursor::from_bits((config.base >> 16) as u16));
        if avail.index >= config.size || used.index >= config.size {
            return Err(ConfigError::Base(config.base));
        }
        let taken = distance(used, avail, config.size).ok_or(ConfigError::Base(config.base))?;
        Ok(Self {
            next_avail: avail,
            next_used: used,
            taken,
            counts: vec![0; config.size.into()].into(),
            used: Vec::with_capacity(config.size.into()),
            unpublished: 0,
            has_published: false,
            owes_call: false,
            kept: None,
            broken: None,
            config,
        })
    }

    /// As [`PackedQueue::new`], with a region that records the chains in flight for a successor process. If a predecessor has
    /// used the region, the queue first takes the predecessor's chains in flight, and continues at its position; `base` is used
    /// only if the region is new.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn with_inflight(config: PackedConfig, region: GuestArea) -> Result<Self, ConfigError> {
        let mut queue = Self::new(config)?;
        let kept = Inflight::attach(region, queue.config.size, queue.next_used, &queue.config.desc)?;
        if let Some((used, taken)) = kept.recovered() {
            (queue.next_used, queue.taken) = (used, taken);
            queue.next_avail = used.after(taken, queue.config.size);
        }
        queue.kept = Some(kept);
        queue.check_invariants();
        Ok(queue)
    }

    /// Descriptors in the ring.
    pub const fn size(&self) -> u16 {
        self.config.size
    }

    /// The position at which a successor continues, in the format of [`PackedConfig::base`].
    pub const fn base(&self) -> u32 {
        self.next_avail.bits() as u32 | (self.next_used.bits() as u32) << 16
    }

    /// Chains that were taken and not completed.
    pub fn in_flight(&self) -> u32 {
        self.counts.iter().filter(|count| **count > 0).count() as u32
    }

    /// The error that broke the queue, if any.
    pub const fn broken(&self) -> Option<QueueError> {
        self.broken
    }

    /// Whether memory of the ring was lost; see [`aryk_dma::Mapping::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        [&self.config.desc, &self.config.driver, &self.config.device].iter().any(|area| area.is_poisoned())
            || self.kept.as_ref().is_some_and(Inflight::is_poisoned)
    }

    /// As [`crate::SplitQueue::leave_inflight`].
    pub(crate) fn leave_inflight(&mut self) {
        self.kept = None;
    }

    /// Sets the ring's areas after a change of the guest's memory.
    ///
    /// # Errors
    /// [`ConfigError`]; then nothing has changed.
    pub fn set_areas(
        &mut self,
        desc: GuestArea,
        driver: GuestArea,
        device: GuestArea,
    ) -> Result<(), ConfigError> {
        let config = PackedConfig { desc, driver, device, ..self.config };
        config.check()?;
        self.config = config;
        self.check_invariants();
        Ok(())
    }

    /// Checks, in debug builds, the invariants between two calls; no input of the driver breaks them. Visits all ids.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        self.check_positions();
        let counted = self.counts.iter().map(|&count| u32::from(count)).sum::<u32>();
        assert!(
            counted <= self.taken.into(),
            "chains in flight have {counted} descriptors, of {} taken",
            self.taken
        );
        let first = self.used.first().map(|used| used.at.after(self.unpublished, self.config.size));
        // A driver that offers descriptors again before it sees them used can make it more than a pass.
        let is_pass = self.unpublished <= self.config.size;
        let is_end = first.is_none_or(|end| !is_pass || end == self.next_used);
        assert!(is_end, "{} descriptors are unpublished up to {:?}", self.unpublished, self.next_used);
        assert_eq!(self.used.is_empty(), self.unpublished == 0, "each used element skips descriptors");
    }

    /// As [`PackedQueue::check_invariants`], but only the checks without a loop.
    #[inline]
    fn check_positions(&self) {
        debug_assert!(
            distance(self.next_used, self.next_avail, self.config.size) == Some(self.taken),
            "{} descriptors are taken, from {:?} to {:?}",
            self.taken,
            self.next_used,
            self.next_avail
        );
    }

    /// 1 if a chain can be popped, else 0: their number is unknown before their descriptors are read.
    ///
    /// # Errors
    /// [`QueueError`] if the queue is broken.
    #[inline]
    pub fn available(&mut self) -> Result<u16, QueueError> {
        match self.broken {
            Some(error) => Err(error),
            None => Ok(self.is_available().into()),
        }
    }

    #[inline]
    fn is_available(&self) -> bool {
        // Acquire: the driver wrote the chain's other descriptors and buffers before.
        let flags = self.config.desc.load_u16(self.at(self.next_avail) + FLAGS, Ordering::Acquire);
        self.next_avail.is_avail(flags)
    }

    /// The offset of a descriptor in the ring.
    #[inline]
    const fn at(&self, cursor: Cursor) -> usize {
        DESC_LEN * cursor.index as usize
    }

    #[cold]
    fn break_down(&mut self, error: QueueError) -> PopError {
        self.broken = Some(error);
        error.into()
    }

    /// As [`PackedQueue::break_down`], after descriptors of a chain were read.
    #[cold]
    fn give_up(&mut self, error: QueueError) -> PopError {
        if let Some(kept) = &mut self.kept {
            kept.forget();
        }
        self.break_down(error)
    }

    /// Takes the next chain, if there is one: returns its id, which identifies it until [`PackedQueue::push_used`], and fills
    /// `chain` with its buffers. Indirect tables are read from `memory`.
    ///
    /// # Errors
    /// [`PopError`]. After [`PopError::Chain`] the chain is taken as well, and `chain` is undefined.
    #[inline]
    pub fn pop(&mut self, memory: &MemTable, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        if let Some(error) = self.broken {
            return Err(error.into());
        }
        if let Some(replay) = self.kept.as_mut().and_then(Inflight::next_replay) {
            return self.take_replay(&replay, memory, chain);
        }
        if !self.is_available() {
            return Ok(None);
        }
        step(Step::Found);
        // The region has one free list: completed chains must be on it before a new chain takes entries from it. Whether there is
        // a chain is read once, above: with a second read, a chain that comes between the two would be taken too early.
        if self.kept.is_some() && !self.used.is_empty() {
            self.owes_call |= self.publish_used();
        }
        self.take(memory, chain)
    }

    /// Takes the chain at `next_avail`.
    #[inline]
    fn take(&mut self, memory: &MemTable, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        chain.clear();
        if self.taken == self.config.size {
            return Err(self.break_down(QueueError::Overrun));
        }
        let (mut cursor, mut count, mut sound) = (self.next_avail, 0, Ok(()));
        let id = loop {
            if self.taken + count == self.config.size {
                return Err(self.give_up(QueueError::Overrun));
            }
            let desc: Desc = self.config.desc.read(self.at(cursor));
            let is_last = desc.flags & NEXT == 0;
            if let Some(kept) = &mut self.kept {
                kept.note(&desc, count == 0);
            }
            count += 1;
            cursor = cursor.after(1, self.config.size);
            // A malformed chain is followed to its end too, because its id is there.
            sound = sound.and_then(|()| add(&desc, self.config.indirect, memory, chain));
            if is_last {
                break desc.id;
            }
        };
        if id >= self.config.size {
            return Err(self.give_up(QueueError::HeadIndex(id)));
        }
        if self.counts[usize::from(id)] != 0 {
            return Err(self.give_up(QueueError::HeadInFlight(id)));
        }
        self.counts[usize::from(id)] = count;
        self.taken += count;
        self.next_avail = cursor;
        self.check_positions();
        if let Some(kept) = &mut self.kept {
            kept.begin(id);
            step(Step::Marked);
        }
        sound.map(|()| Some(id)).map_err(|error| {
            chain.skip(count);
            PopError::Chain { head: id, error }
        })
    }

    /// Number of chains that a predecessor left in flight. They are taken before all others.
    pub fn replays(&self) -> usize {
        self.kept.as_ref().map_or(0, Inflight::replays)
    }

    /// Takes a chain that a predecessor left in flight. Its id was checked; its descriptors still come from the guest.
    #[cold]
    fn take_replay(
        &mut self,
        replay: &inflight::Replay,
        memory: &MemTable,
        chain: &mut Chain,
    ) -> Result<Option<u16>, PopError> {
        chain.clear();
        let before = std::mem::replace(&mut self.counts[usize::from(replay.id)], replay.descs.len() as u16);
        assert_eq!(before, 0, "chain {} is replayed while it is in flight", replay.id);
        self.check_invariants();
        let sound = replay.descs.iter().try_for_each(|desc| add(desc, self.config.indirect, memory, chain));
        sound.map(|()| Some(replay.id)).map_err(|error| PopError::Chain { head: replay.id, error })
    }

    /// Completes a chain: the device wrote `len` bytes from the start of its writable part. The driver sees the completion
    /// after [`PackedQueue::publish`].
    ///
    /// # Panics
    /// If no chain with this id is in flight.
    #[inline]
    pub fn push_used(&mut self, id: u16, len: u32) {
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "chain {id} is not in flight");
        let (at, place) = (self.next_used, self.at(self.next_used));
        self.config.desc.write(place + LEN, &len);
        self.config.desc.write(place + ID, &id);
        self.used.push(UsedDesc { at, flags: at.used(len) });
        self.next_used = at.after(count, self.config.size);
        self.unpublished += count;
        self.taken -= count;
        self.check_positions();
        if let Some(kept) = &mut self.kept {
            kept.end(id);
            step(Step::Used);
        }
    }

    /// Makes all completed chains visible to the driver. Returns whether the driver needs a call (interrupt) for them; the
    /// first time always `true`, because a predecessor may have failed to send a call.
    #[inline]
    #[must_use = "a driver that receives no call waits forever"]
    pub fn publish(&mut self) -> bool {
        let owed = std::mem::take(&mut self.owes_call) | !std::mem::replace(&mut self.has_published, true);
        if self.used.is_empty() {
            return owed;
        }
        self.publish_used() | owed
    }

    fn publish_used(&mut self) -> bool {
        match &mut self.kept {
            None => {
                // The driver reads the descriptors in order, so it sees none before the first. Release: earlier writes
                // are visible.
                for used in self.used.iter().rev() {
                    let place = DESC_LEN * usize::from(used.at.index) + FLAGS;
                    self.config.desc.store_u16(place, used.flags, Ordering::Release);
                }
            }
            Some(kept) => {
                kept.publishing(self.next_used);
                // In order, so that a successor finds the last visible one: descriptors after an invisible one must look
                // unused.
                for used in &self.used {
                    let place = DESC_LEN * usize::from(used.at.index) + FLAGS;
                    self.config.desc.store_u16(place, used.flags, Ordering::Release);
                    step(Step::Published);
                }
                kept.published();
            }
        }
        self.used.clear();
        let count = std::mem::take(&mut self.unpublished);
        // The driver enables calls, then reads the ring again; the device writes to the ring, then reads whether calls
        // are enabled.
        fence(Ordering::SeqCst);
        self.wants_call(count)
    }

    /// Whether the driver needs a call for the `count` descriptors before the next used one.
    #[inline]
    fn wants_call(&self, count: u16) -> bool {
        match self.config.driver.load_u16(EVENT_FLAGS, Ordering::Relaxed) {
            EVENT_DISABLE => false,
            EVENT_DESC if self.config.event_idx => {
                let event = Cursor::from_bits(self.config.driver.load_u16(EVENT_OFF_WRAP, Ordering::Relaxed));
                let (size, new) = (i32::from(self.config.size), i32::from(self.next_used.index));
                let round = if event.wrap == self.next_used.wrap { 0 } else { size };
                let event = i32::from(event.index) - round;
                (new - i32::from(count)..new).contains(&event)
            }
            _ => true,
        }
    }

    /// Requests a kick (notification) from the driver for each new chain, and then checks the ring again. Returns whether
    /// chains are available already: the driver may send no kick for them.
    #[inline]
    #[must_use = "the driver may send no kick for chains that are available already"]
    pub fn enable_kicks(&mut self) -> bool {
        let flags = if self.config.event_idx {
            self.config.device.store_u16(EVENT_OFF_WRAP, self.next_avail.bits(), Ordering::Relaxed);
            EVENT_DESC
        } else {
            EVENT_ENABLE
        };
        // Release: the flags that request an event come after the event.
        self.config.device.store_u16(EVENT_FLAGS, flags, Ordering::Release);
        // The driver writes a descriptor, then reads whether kicks are enabled; the device enables kicks, then reads the
        // descriptor.
        fence(Ordering::SeqCst);
        self.is_available() || self.kept.as_ref().is_some_and(Inflight::has_replays)
    }

    /// Requests no kicks, while the queue is polled.
    #[inline]
    pub fn disable_kicks(&mut self) {
        self.config.device.store_u16(EVENT_FLAGS, EVENT_DISABLE, Ordering::Relaxed);
    }

    /// Prefetches the memory that taking the next chains will read. A hint only.
    #[inline]
    pub fn prefetch_first(&self, memory: &MemTable) {
        (1..BUFFERS_AHEAD).for_each(|ahead| self.prefetch_buffer(ahead, memory));
    }

    /// As [`PackedQueue::prefetch_first`], between one [`PackedQueue::pop`] and the next.
    #[inline]
    pub fn prefetch_next(&self, memory: &MemTable) {
        self.prefetch_buffer(BUFFERS_AHEAD, memory);
    }

    /// Prefetches the buffer of the descriptor `ahead` positions after the next, if it is available.
    #[inline]
    fn prefetch_buffer(&self, ahead: u16, memory: &MemTable) {
        if ahead >= self.config.size {
            return;
        }
        let cursor = self.next_avail.after(ahead, self.config.size);
        let desc: Desc = self.config.desc.read(self.at(cursor));
        if !cursor.is_avail(desc.flags) {
            return;
        }
        if desc.flags & INDIRECT != 0 {
            memory.prefetch(desc.addr);
        } else {
            memory.prefetch_write(desc.addr);
        }
    }
}

/// Number of descriptors from `from` to `to`; `None` if that is more than one pass.
const fn distance(from: Cursor, to: Cursor, size: u16) -> Option<u16> {
    if from.wrap == to.wrap {
        to.index.checked_sub(from.index)
    } else {
        // `to` is in the next pass, and must not be past `from`.
        if to.index <= from.index { Some(to.index + (size - from.index)) } else { None }
    }
}

/// Adds a ring descriptor's buffer, or the buffers of its indirect table, to `chain`. `indirect`: indirect tables are allowed.
#[inline]
fn add(desc: &Desc, indirect: bool, memory: &MemTable, chain: &mut Chain) -> Result<(), ChainError> {
    if desc.flags & INDIRECT != 0 {
        return add_table(desc, indirect, memory, chain);
    }
    chain.add(Piece { addr: desc.addr, len: desc.len }, desc.flags & WRITE != 0)
}

/// Section 2.8.7: a table's descriptors are consecutive; of their flags only WRITE is valid.
#[inline(never)]
fn add_table(table: &Desc, indirect: bool, memory: &MemTable, chain: &mut Chain) -> Result<(), ChainError> {
    if !indirect {
        return Err(ChainError::IndirectNotNegotiated);
    }
    if table.flags & NEXT != 0 {
        return Err(ChainError::IndirectNext);
    }
    let count = table.len / DESC_LEN as u32;
    let room = CHAIN_MAX - chain.count();
    if !table.len.is_multiple_of(DESC_LEN as u32) || count == 0 || count > room.into() {
        return Err(ChainError::IndirectLength(table.len));
    }
    for index in 0..u64::from(count) {
        let addr = table.addr.checked_add(DESC_LEN as u64 * index);
        let desc = addr.and_then(|addr| memory.read::<Desc>(addr).ok());
        let desc = desc.ok_or(ChainError::IndirectAddress(table.addr))?;
        if desc.flags & INDIRECT != 0 {
            return Err(ChainError::IndirectNested);
        }
        chain.add(Piece { addr: desc.addr, len: desc.len }, desc.flags & WRITE != 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
