//! Split virtqueues (section 2.7). Used in reactor context by the queue's one owner.
//!
//! The descriptor table and the available ring belong to the driver, the used ring to the device. Indices count
//! entries since the start, modulo 2¹⁶; an entry's place is its index modulo the queue's size.

use crate::chain::{CHAIN_MAX, Chain, Counts, Piece};
use crate::error::{ChainError, ConfigError, PopError, QueueError};
use aryk_crash_point::{Step, step};
use aryk_dma::{GuestArea, GuestArray, GuestU16, MemTable};
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) mod inflight;

use inflight::Inflight;

/// Descriptors in the largest split queue.
pub const SIZE_MAX: u16 = 32_768;
const _: () = assert!(
    SIZE_MAX.is_power_of_two() && CHAIN_MAX <= SIZE_MAX,
    "indices wrap, and a chain fits into a queue"
);

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Distance in chains at which a chain's first descriptor, and its first buffer, are prefetched.
const DESCS_AHEAD: u16 = 8;
const BUFFERS_AHEAD: u16 = 4;
const _: () = assert!(BUFFERS_AHEAD < DESCS_AHEAD, "a descriptor arrives before the buffer that it names");

/// Offset of both rings' `flags`; `idx` and the entries follow.
const FLAGS: usize = 0;
const IDX: usize = 2;
const RING: usize = 4;

/// A descriptor (section 2.7.5).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// An element of the used ring (section 2.7.8).
#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
struct UsedElem {
    id: u32,
    len: u32,
}

const DESC_LEN: usize = size_of::<Desc>();
const USED_ELEM_LEN: usize = size_of::<UsedElem>();
const _: () = assert!(DESC_LEN == 16 && USED_ELEM_LEN == 8);
const _: () = assert!(cfg!(target_endian = "little"), "ring fields are little-endian");

/// Bytes of the descriptor table of a queue of `size` descriptors.
pub const fn desc_len(size: u16) -> u64 {
    DESC_LEN as u64 * size as u64
}

/// Bytes of the available ring; with EVENT_IDX it ends in `used_event`.
pub const fn avail_len(size: u16, event_idx: bool) -> u64 {
    RING as u64 + 2 * size as u64 + 2 * event_idx as u64
}

/// Bytes of the used ring; with EVENT_IDX it ends in `avail_event`.
pub const fn used_len(size: u16, event_idx: bool) -> u64 {
    RING as u64 + USED_ELEM_LEN as u64 * size as u64 + 2 * event_idx as u64
}

/// The used ring's index: the starting position of a device that takes a queue over.
///
/// # Panics
/// If the area is shorter than 4 bytes or unaligned.
pub fn used_idx(used: &GuestArea) -> u16 {
    used.load_u16(IDX, Ordering::Relaxed)
}

/// The parameters of a split queue.
#[derive(Debug)]
pub struct SplitConfig {
    /// Descriptors in the table and entries in each ring: a power of two.
    pub size: u16,
    /// The descriptor table: [`desc_len`] bytes, aligned to 16.
    pub desc: GuestArea,
    /// The available ring: [`avail_len`] bytes, aligned to 2.
    pub avail: GuestArea,
    /// The used ring: [`used_len`] bytes, aligned to 4.
    pub used: GuestArea,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// Index of the next chain to take.
    pub next_avail: u16,
    /// Index of the next used element; [`used_idx`] for a queue that has run before.
    pub next_used: u16,
}

impl SplitConfig {
    fn check(&self) -> Result<Rings, ConfigError> {
        let size = self.size;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(ConfigError::Size(size));
        }
        let parts = [
            ("descriptor table", &self.desc, desc_len(size), 16),
            ("available ring", &self.avail, avail_len(size, self.event_idx), 2),
            ("used ring", &self.used, used_len(size, self.event_idx), 4),
        ];
        for (part, area, needed, align) in parts {
            if area.len() < needed {
                return Err(ConfigError::TooShort { part, len: area.len(), needed });
            }
            if !area.is_aligned(align) {
                return Err(ConfigError::Unaligned { part, align });
            }
        }
        // Each length and alignment was checked above.
        Ok(self.rings().expect("the areas are long and aligned enough"))
    }

    /// The parts of the areas; `None` if an area is not long or aligned enough.
    fn rings(&self) -> Option<Rings> {
        let size = usize::from(self.size);
        let avail_event = used_len(self.size, false) as usize;
        let used_event = avail_len(self.size, false) as usize;
        Some(Rings {
            descs: GuestArray::new(&self.desc, 0, size)?,
            heads: GuestArray::new(&self.avail, RING, size)?,
            used: GuestArray::new(&self.used, RING, size)?,
            driver: Words::new(&self.avail, self.event_idx.then_some(used_event))?,
            device: Words::new(&self.used, self.event_idx.then_some(avail_event))?,
        })
    }
}

/// The parts of the three areas.
#[derive(Debug)]
struct Rings {
    descs: GuestArray<Desc>,
    heads: GuestArray<u16>,
    used: GuestArray<UsedElem>,
    /// The fields of the available ring.
    driver: Words,
    /// The fields of the used ring.
    device: Words,
}

/// The fields of a ring beside its entries.
#[derive(Debug)]
struct Words {
    flags: GuestU16,
    idx: GuestU16,
    /// With EVENT_IDX: the index of the other side at which this side requests a notification.
    event: Option<GuestU16>,
}

impl Words {
    fn new(ring: &GuestArea, event: Option<usize>) -> Option<Self> {
        Some(Self {
            flags: GuestU16::new(ring, FLAGS)?,
            idx: GuestU16::new(ring, IDX)?,
            event: match event {
                Some(offset) => Some(GuestU16::new(ring, offset)?),
                None => None,
            },
        })
    }
}

/// The device's side of a split queue.
///
/// ```text
/// loop:  pop … pop   push_used … push_used   publish → call the guest?
/// idle:  enable_kicks → more already?  … kick …  disable_kicks
/// ```
#[derive(Debug)]
pub struct SplitQueue {
    config: SplitConfig,
    rings: Rings,
    /// Upper bound of the descriptors in a chain, without those of indirect tables.
    chain_max: u16,
    /// The driver's available index as last read.
    avail_idx: u16,
    /// The used index as last published. `None` at first: the driver may wait for a call that a predecessor failed to
    /// send.
    published: Option<u16>,
    /// One value per descriptor: whether it is the head of a chain that was taken and not completed.
    in_flight: Box<[bool]>,
    /// The same information for a successor, if the front-end keeps a region.
    kept: Option<Inflight>,
    /// Chains that a predecessor left in flight, in reverse order.
    replay: Vec<u16>,
    broken: Option<QueueError>,
}

impl SplitQueue {
    /// Creates a queue over areas of a guest's memory. Nothing is written to them yet.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(config: SplitConfig) -> Result<Self, ConfigError> {
        let rings = config.check()?;
        Ok(Self {
            rings,
            chain_max: config.size.min(CHAIN_MAX),
            avail_idx: config.next_avail,
            published: None,
            in_flight: vec![false; config.size.into()].into(),
            kept: None,
            replay: Vec::new(),
            broken: None,
            config,
        })
    }

    /// As [`SplitQueue::new`], with a region that records the chains in flight for a successor process. Chains that a
    /// predecessor has left in flight are taken first, and determine the starting position; `next_avail` is used only if the
    /// region is new.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn with_inflight(config: SplitConfig, region: GuestArea) -> Result<Self, ConfigError> {
        let mut queue = Self::new(config)?;
        let config = &mut queue.config;
        let (kept, mut heads) = Inflight::attach(region, config.size, config.next_used)?;
        heads.reverse();
        if !kept.is_new() {
            config.next_avail = config.next_used.wrapping_add(heads.len() as u16);
            queue.avail_idx = config.next_avail;
        }
        queue.kept = Some(kept);
        queue.replay = heads;
        queue.check_invariants();
        Ok(queue)
    }

    /// Descriptors in the table.
    pub const fn size(&self) -> u16 {
        self.config.size
    }

    /// Index of the next chain to take: the reply to GET_VRING_BASE once all taken chains are completed.
    pub const fn next_avail(&self) -> u16 {
        self.config.next_avail
    }

    /// Index of the next used element, which may be ahead of the published index.
    pub const fn next_used(&self) -> u16 {
        self.config.next_used
    }

    /// Chains that were taken and not completed.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.iter().filter(|is_in_flight| **is_in_flight).count() as u32
    }

    /// The error that broke the queue, if any.
    pub const fn broken(&self) -> Option<QueueError> {
        self.broken
    }

    /// Whether memory of the rings was lost; see [`aryk_dma::Mapping::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        [&self.config.desc, &self.config.avail, &self.config.used].iter().any(|area| area.is_poisoned())
            || self.kept.as_ref().is_some_and(Inflight::is_poisoned)
    }

    /// No longer records chains in the in-flight region, which stays as it is.
    pub(crate) fn leave_inflight(&mut self) {
        self.kept = None;
        self.replay.clear();
    }

    /// Sets the rings' areas after a change of the guest's memory.
    ///
    /// # Errors
    /// [`ConfigError`]; then nothing has changed.
    pub fn set_areas(
        &mut self,
        desc: GuestArea,
        avail: GuestArea,
        used: GuestArea,
    ) -> Result<(), ConfigError> {
        let config = SplitConfig { desc, avail, used, ..self.config };
        self.rings = config.check()?;
        self.config = config;
        self.check_invariants();
        Ok(())
    }

    /// Checks, in debug builds, the invariants between two calls; no input of the driver breaks them. Visits all heads.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Self { config, in_flight, replay, .. } = self;
        assert_eq!(in_flight.len(), usize::from(config.size), "each descriptor has a flag");
        let known = self.avail_idx.wrapping_sub(config.next_avail);
        assert!(
            known <= config.size,
            "{known} chains are known to be available in a queue of {}",
            config.size
        );
        assert!(self.broken.is_none() || known == 0, "a broken queue has chains to take");
        let mut seen = in_flight.clone();
        let is_new = |head: &u16| !std::mem::replace(&mut seen[usize::from(*head)], true);
        assert!(replay.iter().all(is_new), "a head is to be replayed twice, or is in flight already");
        assert!(replay.is_empty() || self.kept.is_some(), "a replay comes from an in-flight region");
    }

    /// Number of chains that can be popped. Reads the guest's index only when all chains up to the last read index were
    /// taken.
    ///
    /// # Errors
    /// [`QueueError`] if the queue is broken.
    #[inline]
    pub fn available(&mut self) -> Result<u16, QueueError> {
        let known = self.avail_idx.wrapping_sub(self.config.next_avail);
        if known > 0 { Ok(known) } else { self.refresh() }
    }

    /// Whether more chains can be popped without reading the guest's index again.
    #[inline]
    pub const fn knows_more(&self) -> bool {
        self.avail_idx != self.config.next_avail || !self.replay.is_empty()
    }

    /// Reads the guest's index.
    #[inline]
    fn refresh(&mut self) -> Result<u16, QueueError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        // Acquire: the driver wrote the entries, descriptors and buffers up to this index before it.
        let idx = self.rings.driver.idx.load(Ordering::Acquire);
        let new = idx.wrapping_sub(self.config.next_avail);
        if new > self.config.size {
            return Err(self.break_down(QueueError::IndexJump { from: self.avail_idx, to: idx }));
        }
        self.avail_idx = idx;
        Ok(new)
    }

    #[cold]
    fn break_down(&mut self, error: QueueError) -> QueueError {
        self.avail_idx = self.config.next_avail;
        self.broken = Some(error);
        self.check_invariants();
        error
    }

    /// Takes the next chain, if there is one: returns its head, which identifies it until [`SplitQueue::push_used`], and fills
    /// `chain` with its buffers. Indirect tables are read from `memory`.
    ///
    /// # Errors
    /// [`PopError`]. After [`PopError::Chain`] the head is taken as well, and `chain` is undefined.
    #[inline]
    pub fn pop(&mut self, memory: &MemTable, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        let Some(head) = self.take_head()? else { return Ok(None) };
        match self.walk(head, memory, chain) {
            Ok(()) => Ok(Some(head)),
            Err(error) => Err(PopError::Chain { head, error }),
        }
    }

    /// Takes the head of the next chain, if there is one. The caller walks the chain.
    #[inline(always)]
    pub(crate) fn take_head(&mut self) -> Result<Option<u16>, QueueError> {
        if !self.replay.is_empty() {
            return Ok(self.take_replay());
        }
        if self.available()? == 0 {
            return Ok(None);
        }
        step(Step::Found);
        let head = self.rings.heads.load_wrapped(self.config.next_avail);
        match self.in_flight.get_mut(usize::from(head)) {
            Some(is_in_flight @ false) => *is_in_flight = true,
            Some(true) => return Err(self.break_down(QueueError::HeadInFlight(head))),
            None => return Err(self.break_down(QueueError::HeadIndex(head))),
        }
        self.config.next_avail = self.config.next_avail.wrapping_add(1);
        if let Some(kept) = &mut self.kept {
            kept.begin(head);
            step(Step::Marked);
        }
        Ok(Some(head))
    }

    /// Number of chains that a predecessor left in flight. They are taken before all others.
    pub const fn replays(&self) -> usize {
        self.replay.len()
    }

    /// Takes the next head that a predecessor left in flight. The heads are distinct and in range.
    #[cold]
    fn take_replay(&mut self) -> Option<u16> {
        let head = self.replay.pop()?;
        let was_in_flight = std::mem::replace(&mut self.in_flight[usize::from(head)], true);
        assert!(!was_in_flight, "chain {head} is replayed while it is in flight");
        Some(head)
    }

    /// Collects the chain that starts at `head`, which is in range.
    #[inline(always)]
    pub(crate) fn walk(&self, head: u16, memory: &MemTable, chain: &mut Chain) -> Result<(), ChainError> {
        debug_assert!(self.in_flight[usize::from(head)], "chain {head} is taken before it is walked");
        let mut counts = Counts::NONE;
        let walked = self.walk_direct(head, &mut chain.places()[..self.chain_max.into()], &mut counts);
        chain.set_counts(counts);
        match walked? {
            Some(table) => self.walk_indirect(table, memory, chain),
            None => Ok(()),
        }
    }

    /// Collects the chain's descriptors in the queue's own table; returns the last one if it refers to an indirect table.
    #[inline(always)]
    fn walk_direct(
        &self,
        head: u16,
        places: &mut [Piece],
        counts: &mut Counts,
    ) -> Result<Option<Desc>, ChainError> {
        let mut index = head;
        for place in places {
            let desc = self.rings.descs.read(usize::from(index)).ok_or(ChainError::Index(index))?;
            if desc.flags & INDIRECT != 0 {
                return Ok(Some(desc));
            }
            if desc.len == 0 {
                return Err(ChainError::Empty);
            }
            *place = Piece { addr: desc.addr, len: desc.len };
            counts.all += 1;
            if desc.flags & WRITE == 0 {
                counts.readable += 1;
                if counts.readable != counts.all {
                    return Err(ChainError::Order);
                }
            }
            if desc.flags & NEXT == 0 {
                return Ok(None);
            }
            index = desc.next;
        }
        Err(if usize::from(index) < self.in_flight.len() {
            ChainError::TooLong
        } else {
            ChainError::Index(index)
        })
    }

    /// Continues in the table that `table` refers to (section 2.7.5.3).
    #[inline(never)]
    fn walk_indirect(&self, table: Desc, memory: &MemTable, chain: &mut Chain) -> Result<(), ChainError> {
        if !self.config.indirect {
            return Err(ChainError::IndirectNotNegotiated);
        }
        if table.flags & NEXT != 0 {
            return Err(ChainError::IndirectNext);
        }
        let bad_length = ChainError::IndirectLength(table.len);
        let count = u16::try_from(table.len / DESC_LEN as u32).map_err(|_| bad_length)?;
        if !table.len.is_multiple_of(DESC_LEN as u32) || count == 0 || count > CHAIN_MAX {
            return Err(bad_length);
        }
        let mut index = 0;
        for _ in 0..count.min(CHAIN_MAX - chain.count()) {
            let at = DESC_LEN as u64 * u64::from(index);
            let desc = table.addr.checked_add(at).and_then(|addr| memory.read::<Desc>(addr).ok());
            let desc = desc.ok_or(ChainError::IndirectAddress(table.addr))?;
            if desc.flags & INDIRECT != 0 {
                return Err(ChainError::IndirectNested);
            }
            match take(desc, chain)? {
                None => return Ok(()),
                Some(next) if next >= count => return Err(ChainError::Index(next)),
                Some(next) => index = next,
            }
        }
        Err(ChainError::TooLong)
    }

    /// Completes a chain: the device wrote `len` bytes from the start of its writable part. The driver sees the completion
    /// after [`SplitQueue::publish`].
    ///
    /// # Panics
    /// If no chain with this head is in flight.
    // Always inlined: a call would add a third to the function's cost.
    #[inline(always)]
    pub fn push_used(&mut self, head: u16, len: u32) {
        let is_in_flight = self.in_flight.get_mut(usize::from(head)).is_some_and(std::mem::take);
        if !is_in_flight {
            not_in_flight(head);
        }
        self.rings.used.write_wrapped(self.config.next_used, &UsedElem { id: head.into(), len });
        self.config.next_used = self.config.next_used.wrapping_add(1);
        if let Some(kept) = &mut self.kept {
            kept.end(head);
            step(Step::Used);
        }
    }

    /// Makes all completed chains visible to the driver. Returns whether the driver needs a call (interrupt) for them; the
    /// first time always `true`, because a predecessor may have failed to send a call.
    #[inline]
    #[must_use = "a driver that receives no call waits forever"]
    pub fn publish(&mut self) -> bool {
        let new = self.config.next_used;
        let old = self.published.replace(new);
        if old == Some(new) {
            return false;
        }
        // Release: the elements, and the data written before, are visible with the index.
        self.rings.device.idx.store(new, Ordering::Release);
        if let Some(kept) = &mut self.kept {
            step(Step::Published);
            kept.published(new);
        }
        // The driver enables calls, then reads the index again; the device writes the index, then reads whether calls are
        // enabled.
        fence(Ordering::SeqCst);
        match &self.rings.driver.event {
            None => {
                let flags = self.rings.driver.flags.load(Ordering::Relaxed);
                flags & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0
            }
            Some(event) => old.is_none_or(|old| passed(event.load(Ordering::Relaxed), old, new)),
        }
    }

    /// Requests a kick (notification) from the driver for each new chain, and then checks the ring again. Returns whether
    /// chains are available already: the driver may send no kick for them.
    #[inline]
    #[must_use = "the driver may send no kick for chains that are available already"]
    pub fn enable_kicks(&mut self) -> bool {
        match &self.rings.device.event {
            Some(event) => event.store(self.config.next_avail, Ordering::Relaxed),
            None => self.rings.device.flags.store(0, Ordering::Relaxed),
        }
        // The driver writes the index, then reads whether kicks are enabled; the device enables kicks, then reads the
        // index.
        fence(Ordering::SeqCst);
        self.rings.driver.idx.load(Ordering::Relaxed) != self.config.next_avail || !self.replay.is_empty()
    }

    /// Requests no kicks, while the queue is polled. With EVENT_IDX nothing is written: the index at which the driver kicks
    /// stays in the past.
    #[inline]
    pub fn disable_kicks(&mut self) {
        if self.rings.device.event.is_none() {
            self.rings.device.flags.store(VRING_USED_F_NO_NOTIFY as u16, Ordering::Relaxed);
        }
    }

    /// Prefetches the memory that taking the first known chains will read. Call it before a series of [`SplitQueue::pop`], each
    /// followed by [`SplitQueue::prefetch_next`]. A hint only.
    #[inline]
    pub fn prefetch_first(&self, memory: &MemTable) {
        let known = self.avail_idx.wrapping_sub(self.config.next_avail);
        // With fewer chains there is no other work to do during the prefetch.
        if known < 2 {
            return;
        }
        (0..known.min(DESCS_AHEAD)).for_each(|ahead| self.prefetch_desc(ahead));
        (0..known.min(BUFFERS_AHEAD)).for_each(|ahead| self.prefetch_buffer(ahead, memory));
    }

    /// Prefetches the memory that taking later chains will read. Each cache line comes from the driver's core, which takes
    /// longer than a request takes. So lines are prefetched some requests ahead: first a chain's descriptor; once that has
    /// arrived, the buffer that it describes.
    #[inline(always)]
    pub fn prefetch_next(&self, memory: &MemTable) {
        let known = self.avail_idx.wrapping_sub(self.config.next_avail);
        if known >= DESCS_AHEAD {
            self.prefetch_desc(DESCS_AHEAD - 1);
        }
        if known >= BUFFERS_AHEAD {
            self.prefetch_buffer(BUFFERS_AHEAD - 1, memory);
        }
    }

    /// Prefetches the first descriptor of the chain `ahead` positions after the next.
    #[inline]
    fn prefetch_desc(&self, ahead: u16) {
        self.rings.descs.prefetch(self.head(ahead));
    }

    /// Prefetches the first buffer of the chain `ahead` positions after the next, for writing: it is the header of a block
    /// request, and drivers keep the status byte next to it.
    #[inline]
    fn prefetch_buffer(&self, ahead: u16, memory: &MemTable) {
        let Some(desc) = self.rings.descs.read(self.head(ahead)) else { return };
        if desc.flags & INDIRECT != 0 {
            memory.prefetch(desc.addr);
        } else {
            memory.prefetch_write(desc.addr);
        }
    }

    /// The head of the chain `ahead` positions after the next. May be out of range if the driver wrote an invalid one.
    #[inline]
    fn head(&self, ahead: u16) -> usize {
        self.rings.heads.load_wrapped(self.config.next_avail.wrapping_add(ahead)).into()
    }
}

/// A separate function, so that the check on the hot path is a compare and a branch.
#[cold]
#[inline(never)]
fn not_in_flight(head: u16) -> ! {
    panic!("chain {head} is not in flight");
}

/// Adds a direct descriptor's buffer to `chain`. Returns the index of the next descriptor, if there is one.
#[inline]
fn take(desc: Desc, chain: &mut Chain) -> Result<Option<u16>, ChainError> {
    chain.add(Piece { addr: desc.addr, len: desc.len }, desc.flags & WRITE != 0)?;
    Ok((desc.flags & NEXT != 0).then_some(desc.next))
}

/// Whether index `event` was passed when the index went from `old` to `new` (section 2.7.10).
const fn passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests;
