//! Records the chains of a packed queue that are in flight, in memory that outlives the process ("Inflight I/O tracking"
//! of the vhost-user specification). Created in control context, used by the queue in reactor context.
//!
//! Used descriptors overwrite descriptors that other chains may still need, so the region holds a copy of each
//! descriptor: as many entries as the ring has descriptors, each free or in one chain. The free entries form a list; a
//! chain's entries are taken from its head and returned to it.
//!
//! - A chain is in flight when its first entry is marked, which is the last store: a successor relies on the marks.
//! - A batch is completed in steps: its chains join the free list; one store records the new used position beside the old one;
//!   the ring's descriptors become visible, one after the other; the marks are cleared; the old position is set to the new one.
//!   A successor that finds two different positions follows the free list back to the beginning of the batch, and the ring
//!   itself shows how many chains of the batch the driver can see. The other chains are still in flight.
//!
//! The order of the stores is essential: the kernel completes a killed process's stores in program order, which the
//! fences preserve.
//!
//! **Invariant.** The region is shared with the front-end: it is read once, at the start, and checked. Values that are needed
//! later are kept in this process.

use super::{Cursor, DESC_LEN, Desc, FLAGS, NEXT as HAS_NEXT};
use crate::error::{ConfigError, InflightError};
use aryk_crash_point::{Step, step};
use aryk_dma::GuestArea;
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, compiler_fence};

/// The only defined version.
const VERSION: u16 = 1;

/// Offsets in the header; entries follow.
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM: usize = 10;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
/// Used index (16 bits), old used index (16), used wrap counter (8), old used wrap counter (8): one word, so that they
/// change together.
const USED: usize = 16;
const ENTRIES: usize = 32;

/// Bytes of an entry, and offsets in it.
const ENTRY_LEN: usize = 32;
const INFLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const DESC_ID: usize = 16;
const DESC_FLAGS: usize = 18;
const DESC_LENGTH: usize = 20;
const DESC_ADDR: usize = 24;
const _: () =
    assert!(DESC_ADDR + 8 == ENTRY_LEN && USED.is_multiple_of(8), "the layout of the specification");

/// Bytes of a queue's part, without padding.
pub(crate) const fn len(size: u16) -> u64 {
    (ENTRIES + ENTRY_LEN * size as usize) as u64
}

const fn entry(index: u16) -> usize {
    ENTRIES + ENTRY_LEN * index as usize
}

/// A chain that a predecessor left in flight.
#[derive(Clone, Debug)]
pub(super) struct Replay {
    counter: u64,
    entries: Entries,
    pub id: u16,
    pub descs: Vec<Desc>,
}

/// The entries of a chain: the first, and the last.
#[derive(Clone, Copy, Debug, Default)]
struct Entries {
    first: u16,
    last: u16,
}

#[derive(Debug)]
pub(super) struct Inflight {
    area: GuestArea,
    size: u16,
    /// The next chain's position in the order of arrival.
    counter: u64,
    /// The successor of each entry in its chain, or in the free list; `size` at the end of the free list.
    next: Box<[u16]>,
    free_head: u16,
    /// The chain that is being taken, and the number of its entries.
    taking: Entries,
    count: u16,
    /// The entries of each chain in flight, by buffer id.
    chains: Box<[Entries]>,
    /// First entries of the chains completed since the last publication.
    batch: Vec<u16>,
    /// The used position that the driver sees.
    used: Cursor,
    replays: VecDeque<Replay>,
    is_new: bool,
}

impl Inflight {
    /// Takes over a predecessor's region, or initializes a region of zeroes, for a queue whose next used position is `used`.
    /// `ring` is the descriptor ring.
    pub fn attach(area: GuestArea, size: u16, used: Cursor, ring: &GuestArea) -> Result<Self, ConfigError> {
        let needed = len(size);
        if area.len() < needed {
            return Err(ConfigError::TooShort { part: "in-flight region", len: area.len(), needed });
        }
        if !area.is_aligned(8) {
            return Err(ConfigError::Unaligned { part: "in-flight region", align: 8 });
        }
        let version = area.read::<u16>(VERSION_AT);
        let mut inflight = Self {
            area,
            size,
            counter: 0,
            next: vec![size; size.into()].into(),
            free_head: size,
            taking: Entries::default(),
            count: 0,
            chains: vec![Entries::default(); size.into()].into(),
            batch: Vec::with_capacity(size.into()),
            used,
            replays: VecDeque::new(),
            is_new: version == 0,
        };
        match version {
            0 => inflight.initialise(),
            VERSION => inflight.recover(ring)?,
            version => return Err(InflightError::Version(version).into()),
        }
        Ok(inflight)
    }

    fn initialise(&mut self) {
        self.area.write(FEATURES, &0_u64);
        self.area.write(DESC_NUM, &self.size);
        self.note_used(self.used, self.used);
        self.free_all_but(&vec![false; self.size.into()]);
        compiler_fence(Ordering::SeqCst);
        self.area.write(VERSION_AT, &VERSION);
    }

    fn recover(&mut self, ring: &GuestArea) -> Result<(), InflightError> {
        let desc_num = self.area.read::<u16>(DESC_NUM);
        if desc_num != self.size {
            return Err(InflightError::Size { region: desc_num, queue: self.size });
        }
        let [idx_lo, idx_hi, old_lo, old_hi, wrap, old_wrap, ..] = self.area.load_u64(USED).to_le_bytes();
        let new = self.cursor(u16::from_le_bytes([idx_lo, idx_hi]), wrap)?;
        let old = self.cursor(u16::from_le_bytes([old_lo, old_hi]), old_wrap)?;
        self.used = if new == old { old } else { self.settle_batch(old, new, ring)? };
        compiler_fence(Ordering::SeqCst);
        self.note_used(self.used, self.used);
        step(Step::Recovered);
        self.collect()
    }

    fn cursor(&self, index: u16, wrap: u8) -> Result<Cursor, InflightError> {
        if index < self.size {
            Ok(Cursor { index, wrap: wrap != 0 })
        } else {
            Err(InflightError::Head(index))
        }
    }

    /// Records the device's used position, and the position that the driver is known to see.
    fn note_used(&self, new: Cursor, old: Cursor) {
        let ([a, b], [c, d]) = (new.index.to_le_bytes(), old.index.to_le_bytes());
        self.area.store_u64(USED, u64::from_le_bytes([a, b, c, d, new.wrap.into(), old.wrap.into(), 0, 0]));
    }

    /// Ends the chains of an interrupted batch that the driver can see. Returns the position up to which the driver can see
    /// used descriptors.
    fn settle_batch(&self, old: Cursor, new: Cursor, ring: &GuestArea) -> Result<Cursor, InflightError> {
        let (mut head, end) = (self.area.read::<u16>(FREE_HEAD), self.area.read::<u16>(OLD_FREE_HEAD));
        if head == end {
            // Only this step is missing.
            return Ok(new);
        }
        let mut batch = Vec::new();
        while head != end {
            let (last, num) =
                (self.area.read::<u16>(self.at(head, LAST)?), self.area.read::<u16>(self.at(head, NUM)?));
            if num == 0 || num > self.size || batch.len() == usize::from(self.size) {
                return Err(InflightError::Chain(head));
            }
            batch.push((head, num));
            head = self.area.read(self.at(last, NEXT)?);
        }
        let mut used = old;
        for (head, num) in batch.into_iter().rev() {
            let flags = ring.load_u16(DESC_LEN * usize::from(used.index) + FLAGS, Ordering::Acquire);
            // If the flags are still the driver's, the used descriptor was not written. The flags are not compared with "used",
            // because a driver that saw the used descriptor may have reused it since.
            if used.is_avail(flags) {
                break;
            }
            self.area.write(self.at(head, INFLIGHT)?, &0_u8);
            used = used.after(num, self.size);
        }
        Ok(used)
    }

    /// The offset of a field of an entry.
    fn at(&self, index: u16, part: usize) -> Result<usize, InflightError> {
        if index < self.size { Ok(entry(index) + part) } else { Err(InflightError::Head(index)) }
    }

    /// Finds the chains in flight; all entries outside of them are free.
    fn collect(&mut self) -> Result<(), InflightError> {
        let (mut taken, mut ids) = (vec![false; self.size.into()], vec![false; self.size.into()]);
        let mut replays = Vec::new();
        for first in 0..self.size {
            match self.area.read::<u8>(self.at(first, INFLIGHT)?) {
                0 => {}
                1 => {
                    let replay = self.chain(first, &mut taken)?;
                    if std::mem::replace(&mut ids[usize::from(replay.id)], true) {
                        return Err(InflightError::Chain(first));
                    }
                    replays.push(replay);
                }
                value => return Err(InflightError::State { head: first, value }),
            }
        }
        replays.sort_unstable_by_key(|replay| replay.counter);
        self.counter = replays.last().map_or(0, |replay| replay.counter.wrapping_add(1));
        self.free_all_but(&taken);
        self.replays = replays.into();
        Ok(())
    }

    /// The chain with this first entry. Marks its entries in `taken`, where none of them may be marked already.
    fn chain(&mut self, first: u16, taken: &mut [bool]) -> Result<Replay, InflightError> {
        let broken = InflightError::Chain(first);
        let num = self.area.read::<u16>(self.at(first, NUM)?);
        let (mut descs, mut index, mut last) = (Vec::new(), first, first);
        for _ in 0..num {
            if std::mem::replace(taken.get_mut(usize::from(index)).ok_or(broken)?, true) {
                return Err(broken);
            }
            descs.push(self.desc(index));
            (last, index) = (index, self.area.read(entry(index) + NEXT));
            // Read once. The successor of the last entry is meaningless.
            self.next[usize::from(last)] = index;
        }
        let id = descs.last().ok_or(broken)?.id;
        let goes_on = descs.iter().map(|desc| desc.flags & HAS_NEXT != 0);
        let is_whole = goes_on.rev().enumerate().all(|(behind, goes_on)| goes_on == (behind > 0));
        if !is_whole || id >= self.size || self.area.read::<u16>(self.at(first, LAST)?) != last {
            return Err(broken);
        }
        let counter = self.area.read(self.at(first, COUNTER)?);
        Ok(Replay { counter, entries: Entries { first, last }, id, descs })
    }

    /// The descriptor in an entry.
    fn desc(&self, index: u16) -> Desc {
        let at = entry(index);
        Desc {
            addr: self.area.read(at + DESC_ADDR),
            len: self.area.read(at + DESC_LENGTH),
            id: self.area.read(at + DESC_ID),
            flags: self.area.read(at + DESC_FLAGS),
        }
    }

    /// Rebuilds the list of free entries.
    fn free_all_but(&mut self, taken: &[bool]) {
        self.free_head = self.size;
        for index in (0..self.size).rev().filter(|&index| !taken[usize::from(index)]) {
            self.next[usize::from(index)] = self.free_head;
            self.area.write(entry(index) + NEXT, &self.free_head);
            self.free_head = index;
        }
        self.area.write(FREE_HEAD, &self.free_head);
        self.area.write(OLD_FREE_HEAD, &self.free_head);
    }

    /// The next chain that a predecessor left in flight.
    #[inline]
    pub fn next_replay(&mut self) -> Option<Replay> {
        let replay = self.replays.pop_front()?;
        self.chains[usize::from(replay.id)] = replay.entries;
        Some(replay)
    }

    /// Number of replays left.
    pub fn replays(&self) -> usize {
        self.replays.len()
    }

    /// Whether replays are left.
    pub fn has_replays(&self) -> bool {
        !self.replays.is_empty()
    }

    /// The used position of a predecessor, if there was one, and the number of descriptors that it left in flight.
    pub fn recovered(&self) -> Option<(Cursor, u16)> {
        let descs = self.replays.iter().map(|replay| replay.descs.len()).sum::<usize>();
        (!self.is_new).then_some((self.used, descs as u16))
    }

    /// Copies the next descriptor of a chain that is being taken. There is a free entry as long as the ring has a descriptor
    /// that was not taken.
    #[inline]
    pub fn note(&mut self, desc: &Desc, is_first: bool) {
        let index = self.free_head;
        assert!(index < self.size, "the region has a free entry for each descriptor");
        let at = entry(index);
        self.area.write(at + DESC_ADDR, &desc.addr);
        self.area.write(at + DESC_LENGTH, &desc.len);
        self.area.write(at + DESC_ID, &desc.id);
        self.area.write(at + DESC_FLAGS, &desc.flags);
        if is_first {
            self.taking.first = index;
            self.count = 0;
        }
        self.taking.last = index;
        self.count += 1;
        self.free_head = self.next[usize::from(index)];
    }

    /// Discards the copied descriptors, because they are not a valid chain.
    #[cold]
    pub fn forget(&mut self) {
        assert!(self.count > 0, "no descriptor was copied");
        self.free_head = self.taking.first;
    }

    /// Records that the copied chain has been taken.
    #[inline]
    pub fn begin(&mut self, id: u16) {
        debug_assert!(self.replays.is_empty(), "replays are taken before new chains");
        debug_assert!(self.batch.is_empty(), "completed chains are published before a chain is taken");
        let at = entry(self.taking.first);
        self.area.write(at + LAST, &self.taking.last);
        self.area.write(at + NUM, &self.count);
        self.area.write(at + COUNTER, &self.counter);
        self.counter = self.counter.wrapping_add(1);
        compiler_fence(Ordering::SeqCst);
        self.area.write(at + INFLIGHT, &1_u8);
        compiler_fence(Ordering::SeqCst);
        self.area.write(FREE_HEAD, &self.free_head);
        self.area.write(OLD_FREE_HEAD, &self.free_head);
        self.chains[usize::from(id)] = self.taking;
    }

    /// Records that a chain was completed. The driver does not see that yet.
    #[inline]
    pub fn end(&mut self, id: u16) {
        let Entries { first, last } = self.chains[usize::from(id)];
        self.next[usize::from(last)] = self.free_head;
        self.area.write(entry(last) + NEXT, &self.free_head);
        compiler_fence(Ordering::SeqCst);
        self.free_head = first;
        self.area.write(FREE_HEAD, &first);
        self.batch.push(first);
    }

    /// Records that the batch is about to become visible, up to `used`.
    #[inline]
    pub fn publishing(&mut self, used: Cursor) {
        compiler_fence(Ordering::SeqCst);
        self.note_used(used, self.used);
        self.used = used;
        compiler_fence(Ordering::SeqCst);
    }

    /// Records that the batch is visible.
    #[inline]
    pub fn published(&mut self) {
        compiler_fence(Ordering::SeqCst);
        for first in self.batch.drain(..) {
            self.area.write(entry(first) + INFLIGHT, &0_u8);
            step(Step::Clearing);
        }
        compiler_fence(Ordering::SeqCst);
        step(Step::Cleared);
        self.area.write(OLD_FREE_HEAD, &self.free_head);
        compiler_fence(Ordering::SeqCst);
        self.note_used(self.used, self.used);
    }

    pub fn is_poisoned(&self) -> bool {
        self.area.is_poisoned()
    }
}
