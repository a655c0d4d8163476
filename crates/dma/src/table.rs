//! A guest's memory at one time (an epoch), and the scatter lists of the requests that use it.
//!
//! The control thread creates a [`MemTable`]; each queue's [`SgTable`] switches to it in reactor context. A table never
//! changes: when the guest's memory changes, a new table replaces it, and shares the unchanged regions. A region is unmapped
//! when the last table that contains it is dropped. A table is dropped when the last request that needs it has completed;
//! requests whose memory did not change switch to the new table.

use crate::{DirtyLog, GuestArea, Mapping, Seg, Sgl, copy};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A piece of guest memory: `len` bytes at guest-physical `guest_addr`, which the front-end's process has mapped at
/// `user_addr`, and this process from `offset` of `mapping` on.
#[derive(Clone, Debug)]
pub struct Region {
    /// Guest-physical address, used in descriptors.
    pub guest_addr: u64,
    /// Address in the front-end's process, used in messages about rings.
    pub user_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the first byte in `mapping`.
    pub offset: u64,
    /// The mapping in this process.
    pub mapping: Arc<Mapping>,
}

/// The reason for which regions do not make a valid table.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TableError {
    /// A region is empty, wraps around the address space, or lies outside of its mapping.
    #[error("memory region at {0:#x} is empty, wraps, or exceeds its file")]
    BadRegion(u64),
    /// Two regions share addresses.
    #[error("memory regions at {0:#x} and {1:#x} overlap")]
    Overlap(u64, u64),
}

/// A guest address range that is not in a region.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
#[error("guest memory has no {len} bytes at {addr:#x}")]
pub struct BadAddress {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The part of a region that address translation needs, stored compactly.
#[derive(Clone, Copy, Debug)]
struct Span {
    guest_addr: u64,
    len: u64,
    base: *mut u8,
}

// SAFETY: it points into its region's mapping, which is `Send` and `Sync` and lives as long.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// A span that contains no address.
    const NONE: Self = Self { guest_addr: 0, len: 0, base: std::ptr::null_mut() };

    fn new(region: &Region) -> Self {
        let base = region.mapping.base().as_ptr().wrapping_add(region.offset as usize);
        Self { guest_addr: region.guest_addr, len: region.len, base }
    }

    /// The local address of a guest address in this span, and the number of bytes from there to its end.
    #[inline]
    fn locate(&self, addr: u64) -> Option<(*mut u8, u64)> {
        let at = addr.wrapping_sub(self.guest_addr);
        (at < self.len).then(|| (self.base.wrapping_add(at as usize), self.len - at))
    }

    /// The local address of `len` bytes from a guest address, if they are all in the span.
    #[inline]
    fn locate_all(&self, addr: u64, len: usize) -> Option<*mut u8> {
        let at = addr.wrapping_sub(self.guest_addr);
        // The offset of an address before the region wraps to a large number.
        let end = at.checked_add(len as u64)?;
        if end > self.len {
            return None;
        }
        Some(self.base.wrapping_add(at as usize))
    }
}

/// All regions of a guest at one time, sorted by guest address.
#[derive(Debug)]
pub struct MemTable {
    /// The largest region, which contains nearly all buffers of a guest: a lookup tries it before it searches the others.
    largest: Span,
    /// One span per region, in the same order.
    spans: Box<[Span]>,
    /// Indices into `spans`, ordered by their local address.
    by_base: Box<[u16]>,
    regions: Box<[Region]>,
}

impl Default for MemTable {
    /// A table without memory.
    fn default() -> Self {
        Self { largest: Span::NONE, spans: Box::default(), by_base: Box::default(), regions: Box::default() }
    }
}

impl MemTable {
    /// Checks and sorts `regions`.
    ///
    /// # Errors
    /// [`TableError`].
    pub fn new(mut regions: Vec<Region>) -> Result<Self, TableError> {
        for r in &regions {
            let guest_end = r.guest_addr.checked_add(r.len);
            let user_end = r.user_addr.checked_add(r.len);
            let in_map = r.offset.checked_add(r.len).is_some_and(|end| end <= r.mapping.len());
            if r.len == 0 || guest_end.is_none() || user_end.is_none() || !in_map {
                return Err(TableError::BadRegion(r.guest_addr));
            }
        }
        assert!(
            regions.len() <= usize::from(u16::MAX),
            "{} regions, which a peer cannot announce",
            regions.len()
        );
        regions.sort_by_key(|r| r.guest_addr);
        for pair in regions.windows(2) {
            if pair[0].guest_addr + pair[0].len > pair[1].guest_addr {
                return Err(TableError::Overlap(pair[0].guest_addr, pair[1].guest_addr));
            }
        }
        let spans: Box<[Span]> = regions.iter().map(Span::new).collect();
        let mut by_base: Box<[u16]> = (0..spans.len()).map(|i| i as u16).collect();
        by_base.sort_by_key(|i| spans[usize::from(*i)].base as usize);
        let largest = spans.iter().max_by_key(|span| span.len).copied().unwrap_or(Span::NONE);
        Ok(Self { largest, spans, by_base, regions: regions.into() })
    }

    /// The regions, ordered by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Whether a region's memory was lost; see [`Mapping::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_poisoned())
    }

    /// The area of `len` bytes at `user_addr` of the front-end's process, if they lie in one region.
    pub fn area_at_user(&self, user_addr: u64, len: u64) -> Option<GuestArea> {
        let region = self.regions.iter().find(|r| user_addr.wrapping_sub(r.user_addr) < r.len)?;
        Self::area_in(region, user_addr - region.user_addr, len)
    }

    /// The area of `len` bytes at guest-physical `guest_addr`, if they lie in one region.
    pub fn area_at_guest(&self, guest_addr: u64, len: u64) -> Option<GuestArea> {
        let region = self.regions.iter().find(|r| guest_addr.wrapping_sub(r.guest_addr) < r.len)?;
        Self::area_in(region, guest_addr - region.guest_addr, len)
    }

    /// The guest-physical address of an address in the front-end's process.
    pub fn guest_addr_at_user(&self, user_addr: u64) -> Option<u64> {
        let region = self.regions.iter().find(|r| user_addr.wrapping_sub(r.user_addr) < r.len)?;
        Some(region.guest_addr + (user_addr - region.user_addr))
    }

    /// The guest-physical address of a piece that was looked up in this table; `None` for any other memory.
    pub fn guest_addr_of(&self, seg: &Seg) -> Option<u64> {
        let span = &self.spans[self.span_of(seg)?];
        Some(span.guest_addr + (seg.base() as usize - span.base as usize) as u64)
    }

    /// The span of a piece. Each span has its own mapping, even if several are mapped from the same memory.
    fn span_of(&self, seg: &Seg) -> Option<usize> {
        let (addr, spans) = (seg.base() as usize, &self.spans);
        let before = self.by_base.partition_point(|i| spans[usize::from(*i)].base as usize <= addr);
        let at = usize::from(self.by_base[before.checked_sub(1)?]);
        (((addr - spans[at].base as usize) as u64) < spans[at].len).then_some(at)
    }

    /// Whether a piece that was looked up in `other` has the same guest address and memory in this table.
    fn has_same_in(&self, other: &Self, seg: &Seg) -> bool {
        let Some(i) = other.span_of(seg) else { return false };
        let was = &other.regions[i];
        let found = self.regions.binary_search_by_key(&was.guest_addr, |r| r.guest_addr);
        found.is_ok_and(|i| {
            let is = &self.regions[i];
            (is.len, is.offset) == (was.len, was.offset) && Arc::ptr_eq(&is.mapping, &was.mapping)
        })
    }

    fn area_in(region: &Region, at: u64, len: u64) -> Option<GuestArea> {
        if at.checked_add(len)? > region.len {
            return None;
        }
        GuestArea::new(&region.mapping, region.offset + at, len)
    }

    /// The local address of a guest address, and the number of bytes from there to the end of its region.
    #[inline]
    fn locate(&self, addr: u64) -> Option<(*mut u8, u64)> {
        self.largest.locate(addr).or_else(|| self.search(addr))
    }

    /// [`MemTable::locate`] for an address outside of the largest region. A separate function, so that a lookup on the hot
    /// path takes a few instructions.
    #[inline(never)]
    fn search(&self, addr: u64) -> Option<(*mut u8, u64)> {
        let i = self.spans.partition_point(|span| span.guest_addr <= addr).checked_sub(1)?;
        self.spans[i].locate(addr)
    }

    /// The local address of `len` bytes, if they lie in one region.
    #[inline]
    fn locate_all(&self, addr: u64, len: usize) -> Option<*mut u8> {
        match self.largest.locate_all(addr, len) {
            Some(base) => Some(base),
            None => self.search_all(addr, len),
        }
    }

    /// [`MemTable::locate_all`] for bytes that are not all in the largest region.
    #[inline(never)]
    fn search_all(&self, addr: u64, len: usize) -> Option<*mut u8> {
        self.search(addr).and_then(|(base, room)| (len as u64 <= room).then_some(base))
    }

    /// Copies `out.len()` bytes from a guest address, across adjoining regions.
    ///
    /// # Errors
    /// [`BadAddress`]; some of `out` may have been written.
    ///
    /// # Panics
    /// If `out` has 4 GiB or more.
    pub fn read_bytes(&self, addr: u64, out: &mut [u8]) -> Result<(), BadAddress> {
        let mut at = 0;
        self.for_each_piece(addr, len_of(out), |base, len| {
            // SAFETY: the piece lies in a mapped region; `out` has room for all pieces.
            unsafe { copy::from_shared(out[at..].as_mut_ptr(), base, len) };
            at += len;
        })
    }

    /// Copies a value from a guest address: each byte is read once.
    ///
    /// # Errors
    /// [`BadAddress`].
    #[inline]
    pub fn read<T: FromBytes + KnownLayout + IntoBytes>(&self, addr: u64) -> Result<T, BadAddress> {
        if let Some(src) = self.locate_all(addr, size_of::<T>()) {
            // SAFETY: the bytes lie in a mapped region.
            return Ok(unsafe { copy::read_once(src) });
        }
        let mut value = T::new_zeroed();
        self.read_bytes(addr, value.as_mut_bytes())?;
        Ok(value)
    }

    /// As [`MemTable::read`], for a cache line that will be written soon: the line is transferred from the other core
    /// once instead of twice. `None` if the value is not in the guest's largest region.
    #[inline]
    pub fn read_largest_before_write<T: FromBytes>(&self, addr: u64) -> Option<T> {
        let src = self.largest.locate_all(addr, size_of::<T>())?;
        copy::prefetch_write(src);
        // SAFETY: the bytes lie in a mapped region.
        Some(unsafe { copy::read_once(src) })
    }

    /// Copies bytes to a guest address.
    ///
    /// # Errors
    /// [`BadAddress`]; a part may have been written.
    ///
    /// # Panics
    /// If `data` has 4 GiB or more.
    pub fn write_bytes(&self, addr: u64, data: &[u8]) -> Result<(), BadAddress> {
        let mut at = 0;
        self.for_each_piece(addr, len_of(data), |base, len| {
            // SAFETY: the piece lies in a mapped region; `data` has as many bytes from `at` on.
            unsafe { copy::to_shared(base, data[at..].as_ptr(), len) };
            at += len;
        })
    }

    /// Copies a value to a guest address.
    ///
    /// # Errors
    /// [`BadAddress`]; a part may have been written.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, addr: u64, value: &T) -> Result<(), BadAddress> {
        let bytes = value.as_bytes();
        if let Some(dst) = self.locate_all(addr, size_of::<T>()) {
            // SAFETY: the bytes lie in a mapped region; `bytes` has as many.
            unsafe { copy::to_shared(dst, bytes.as_ptr(), size_of::<T>()) };
            return Ok(());
        }
        self.write_bytes(addr, bytes)
    }

    /// Prefetches the cache line at a guest address, if the address is in a region.
    #[inline]
    pub fn prefetch(&self, addr: u64) {
        if let Some((base, _)) = self.locate(addr) {
            copy::prefetch(base, 1);
        }
    }

    /// Prefetches the cache line at a guest address for writing, if the address is in a region.
    #[inline]
    pub fn prefetch_write(&self, addr: u64) {
        if let Some((base, _)) = self.locate(addr) {
            copy::prefetch_write(base);
        }
    }

    #[inline]
    fn for_each_piece(
        &self,
        addr: u64,
        len: u32,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), BadAddress> {
        let bad = BadAddress { addr, len };
        let (mut at, mut left) = (addr, u64::from(len));
        while left > 0 {
            let (base, room) = self.locate(at).ok_or(bad)?;
            let n = left.min(room);
            each(base, n as usize);
            left -= n;
            at = if left == 0 { at } else { at.checked_add(n).ok_or(bad)? };
        }
        Ok(())
    }
}

fn len_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("copies are shorter than 4 GiB")
}

/// A table, and the number of requests that use it.
#[derive(Debug)]
struct Epoch {
    serial: NonZeroU32,
    table: Arc<MemTable>,
    users: u32,
}

/// The number of pieces for which a list keeps its memory: a request with as many segments as the device allows (`seg_max`),
/// plus the pieces before and after its data. The memory of a longer list is freed with its request.
const KEPT_PIECES: usize = 128;

/// The maximum number of pieces of a list: the longest chain (1,024 buffers), each of whose buffers spans two regions. Without
/// this limit, buffers that span hundreds of small regions would make half a million pieces.
const LIST_MAX: usize = 2048;

/// Number of pieces that fit into a slot itself.
const SHORT: usize = 3;
const _: () =
    assert!(SHORT < KEPT_PIECES && KEPT_PIECES <= LIST_MAX, "lists grow from short over kept to the longest");

/// A list: one cache line, with a vector beside it for long lists.
#[derive(Debug)]
#[repr(C, align(64))]
struct Slot {
    /// The pieces. If not all of them fit, they are in [`LongLists::lists`].
    short: [Seg; SHORT],
    /// Number of pieces.
    count: u32,
    /// Length of the list in bytes.
    len: u32,
    /// Serial number of the epoch in which the list's addresses were looked up, while the slot is in use.
    epoch: Option<NonZeroU32>,
    /// A number that the owner stores with the request.
    note: u32,
}

const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    const FREE: Self =
        Self { short: [Seg::new(std::ptr::null_mut(), 0); SHORT], count: 0, len: 0, epoch: None, note: 0 };

    #[inline]
    const fn is_long(&self) -> bool {
        self.count as usize > SHORT
    }
}

/// The lists that have more pieces than fit into a slot.
#[derive(Debug)]
struct LongLists {
    /// One list per slot; empty, or with old contents, while the slot's list is short.
    lists: Box<[Vec<Seg>]>,
    /// The number of pieces of all long lists in use.
    pieces: u32,
    /// Number of region lookups since [`SgTable::take_parts`].
    parts: u32,
}

/// The scatter lists of one queue's requests, one per slot, over the guest's changing memory.
///
/// [`SgTable::begin`] and [`SgTable::push`] fill a slot's list, [`SgTable::sgl`] lends it to a request, and
/// [`SgTable::end`] frees it when the request has completed. While a slot is in use, the memory of its list stays mapped.
#[derive(Debug)]
pub struct SgTable {
    slots: Box<[Slot]>,
    long_lists: LongLists,
    current: Epoch,
    /// Replaced tables that are still in use.
    old: Vec<Epoch>,
}

impl SgTable {
    /// Creates a table of `slots` empty lists over `memory`.
    pub fn new(slots: u16, memory: Arc<MemTable>) -> Self {
        let lists = vec![Vec::new(); slots.into()].into();
        let slots = (0..slots).map(|_| Slot::FREE).collect();
        let current = Epoch { serial: NonZeroU32::MIN, table: memory, users: 0 };
        Self { slots, long_lists: LongLists { lists, pieces: 0, parts: 0 }, current, old: Vec::new() }
    }

    /// The guest's memory for new requests.
    #[inline]
    pub fn memory(&self) -> &MemTable {
        &self.current.table
    }

    /// The guest's memory for new requests, for another table of lists.
    pub fn share_memory(&self) -> Arc<MemTable> {
        Arc::clone(&self.current.table)
    }

    /// The guest memory of the request in `slot`, which contains its header and status.
    ///
    /// # Panics
    /// If the slot is not in use.
    #[inline]
    pub fn memory_of(&self, slot: u16) -> &MemTable {
        let serial = self.slots[usize::from(slot)].epoch.expect("the slot is in use");
        table_of(&self.current, &self.old, serial)
    }

    /// Makes new requests use `memory`, and also those requests in flight whose memory is completely in it. The other requests
    /// keep their table.
    pub fn set_memory(&mut self, memory: Arc<MemTable>) {
        let serial = self.current.serial.checked_add(1).unwrap_or(NonZeroU32::MIN);
        let before = std::mem::replace(&mut self.current, Epoch { serial, table: memory, users: 0 });
        if before.users > 0 {
            self.old.push(before);
        }
        for slot in 0..self.slots.len() {
            self.switch_to_current(slot);
        }
        self.check_invariants();
    }

    /// Checks, in debug builds, that every slot in use has a table, and that users and pieces are counted. Visits all slots.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let users_of = |serial| self.slots.iter().filter(|slot| slot.epoch == Some(serial)).count() as u32;
        for epoch in self.old.iter().chain([&self.current]) {
            assert_eq!(users_of(epoch.serial), epoch.users, "a table counts the requests that use it");
        }
        assert!(self.old.iter().all(|epoch| epoch.users > 0), "a replaced table without users is kept");
        let used = self.slots.iter().filter(|slot| slot.epoch.is_some());
        assert_eq!(used.clone().count() as u32, self.in_use(), "a slot in use has no table");
        let pieces = used.filter(|slot| slot.is_long()).map(|slot| slot.count).sum::<u32>();
        assert_eq!(pieces, self.long_lists.pieces, "the pieces of long lists in use are counted");
    }

    /// Switches a request to the current table if the table contains all the request's memory unchanged, so that the request
    /// keeps no removed memory mapped.
    fn switch_to_current(&mut self, slot: usize) {
        let Some(serial) = self.slots[slot].epoch else { return };
        let table = table_of(&self.current, &self.old, serial);
        if self.segs(slot).iter().all(|seg| self.current.table.has_same_in(table, seg)) {
            self.end_old(serial);
            self.slots[slot].epoch = Some(self.current.serial);
            self.current.users += 1;
        }
    }

    /// Whether requests in flight use removed memory.
    pub fn has_old_users(&self) -> bool {
        !self.old.is_empty()
    }

    /// The slots of requests in flight that use removed memory.
    pub fn old_users(&self) -> impl Iterator<Item = u16> {
        (0..self.slots.len()).map(|slot| slot as u16).filter(|slot| self.is_old_user(*slot))
    }

    /// Whether the request in a slot uses removed memory.
    pub fn is_old_user(&self, slot: u16) -> bool {
        self.slots[usize::from(slot)].epoch.is_some_and(|serial| serial != self.current.serial)
    }

    /// Number of slots in use.
    pub fn in_use(&self) -> u32 {
        self.current.users + self.old.iter().map(|epoch| epoch.users).sum::<u32>()
    }

    /// The pieces of a slot's list.
    #[inline]
    fn segs(&self, slot: usize) -> &[Seg] {
        let Slot { short, count, .. } = &self.slots[slot];
        short.get(..*count as usize).unwrap_or_else(|| self.long_lists.of(slot, *count))
    }

    /// The number of pieces of all lists in use that have more than three pieces. Together with three per slot, the upper bound
    /// of the pieces that a change of memory visits.
    #[inline]
    pub const fn long_pieces(&self) -> u32 {
        self.long_lists.pieces
    }

    /// The number of regions looked up for buffers that span several regions, since the last call; refused lists count too.
    #[inline]
    pub const fn take_parts(&mut self) -> u32 {
        std::mem::replace(&mut self.long_lists.parts, 0)
    }

    /// Starts to use `slot`, and returns its empty list, which the caller fills.
    ///
    /// # Panics
    /// If the slot is in use.
    #[inline]
    pub fn begin(&mut self, slot: u16) -> List<'_> {
        let index = usize::from(slot);
        let slot = &mut self.slots[index];
        assert!(slot.epoch.is_none(), "the slot is in use");
        slot.epoch = Some(self.current.serial);
        (slot.count, slot.len) = (0, 0);
        self.current.users += 1;
        List { slot, index, long_lists: &mut self.long_lists, table: &self.current.table }
    }

    /// As [`List::push`], for the list of a slot in use.
    ///
    /// # Errors
    /// As [`List::push`].
    ///
    /// # Panics
    /// If the slot is not in use.
    pub fn push(&mut self, slot: u16, addr: u64, len: u32) -> Result<(), BadAddress> {
        let index = usize::from(slot);
        let slot = &mut self.slots[index];
        let table = table_of(&self.current, &self.old, slot.epoch.expect("the slot is in use"));
        List { slot, index, long_lists: &mut self.long_lists, table }.push(addr, len)
    }

    /// The list of `slot`, for the request.
    ///
    /// # Panics
    /// If the slot is not in use.
    #[inline]
    pub fn sgl(&self, slot: u16) -> Sgl {
        let slot = usize::from(slot);
        let Slot { epoch, len, .. } = self.slots[slot];
        assert!(epoch.is_some(), "the slot is not in use");
        // SAFETY: the list does not change until `end`, which the owner calls on completion; the memory stays
        // mapped by the slot's epoch; both are leaked if this table is dropped before.
        unsafe { Sgl::new(self.segs(slot), len) }
    }

    /// Writes the last byte of the list of `slot`, a status. Returns the number that [`List::note`] stored.
    ///
    /// # Panics
    /// If the slot is not in use, or its list has no bytes.
    #[inline]
    pub fn put_last_byte(&self, slot: u16, byte: u8) -> u32 {
        let Slot { epoch, note, .. } = self.slots[usize::from(slot)];
        assert!(epoch.is_some(), "the slot is not in use");
        let Some(last) = self.segs(slot.into()).last() else {
            unreachable!("a list with a status has a piece")
        };
        // SAFETY: the piece is mapped by the slot's epoch, and no piece is empty.
        unsafe { copy::to_shared(last.base().wrapping_add(last.len() - 1), &raw const byte, 1) };
        note
    }

    /// [`SgTable::put_last_byte`] and [`SgTable::end`] in one step, which reads the slot once.
    ///
    /// # Panics
    /// If the slot is not in use, or its list has no bytes.
    #[inline(always)]
    pub fn end_with_last_byte(&mut self, slot: u16, byte: u8) -> u32 {
        let index = usize::from(slot);
        let slot = &mut self.slots[index];
        let note = slot.note;
        let serial = slot.epoch.take();
        let is_current = serial == Some(self.current.serial);
        match slot.short.get(..slot.count as usize).and_then(<[Seg]>::last) {
            Some(last) if is_current => {
                // SAFETY: the piece is mapped by the slot's epoch, which is the current one, and no piece is empty.
                unsafe { copy::to_shared(last.base().wrapping_add(last.len() - 1), &raw const byte, 1) };
                self.current.users -= 1;
            }
            // The list is long, empty, unused, or in replaced memory.
            _ => {
                slot.epoch = serial;
                self.put_last_byte(index as u16, byte);
                self.end(index as u16);
            }
        }
        note
    }

    /// As [`SgTable::put_first`], then [`SgTable::end`], with a single look at the slot. `value` makes the value from the list's
    /// length and the number that [`List::note`] stored.
    ///
    /// # Panics
    /// As [`SgTable::put_first`].
    #[inline(always)]
    pub fn end_with_first<T: IntoBytes + Immutable>(&mut self, slot: u16, value: impl FnOnce(u32, u32) -> T) {
        let index = usize::from(slot);
        let slot = &mut self.slots[index];
        let value = value(slot.len, slot.note);
        let serial = slot.epoch.take();
        let is_current = serial == Some(self.current.serial);
        match slot.short.get(..slot.count as usize).and_then(<[Seg]>::first) {
            Some(first) if is_current && first.len() >= size_of::<T>() => {
                // SAFETY: the piece is mapped by the slot's epoch, which is the current one, and has room; the source is a `T` of
                // ours.
                unsafe { copy::to_shared(first.base(), value.as_bytes().as_ptr(), size_of::<T>()) };
                self.current.users -= 1;
            }
            // A list that is long, of replaced memory, too short in its first piece, or unused.
            _ => {
                slot.epoch = serial;
                self.put_first(index as u16, &value);
                self.end(index as u16);
            }
        }
    }

    /// Copies a value over the first bytes of the list of `slot`.
    ///
    /// # Panics
    /// If the slot is not in use, or its list is shorter than that.
    #[inline]
    pub fn put_first<T: IntoBytes + Immutable>(&self, slot: u16, value: &T) {
        let found = &self.slots[usize::from(slot)];
        assert!(found.epoch.is_some(), "the slot is not in use");
        // The first piece of a long list is in the slot too.
        match found.short.first() {
            Some(first) if found.count > 0 && first.len() >= size_of::<T>() => {
                // SAFETY: the piece is mapped by the slot's epoch, and has room; the source is a `T` of ours.
                unsafe { copy::to_shared(first.base(), value.as_bytes().as_ptr(), size_of::<T>()) };
            }
            _ => self.sgl(slot).put(value),
        }
    }

    /// Length of the list of `slot` in bytes.
    #[inline]
    pub fn len_of(&self, slot: u16) -> u32 {
        self.slots[usize::from(slot)].len
    }

    /// The number that the owner stored with the request in `slot`.
    #[inline]
    pub fn note_of(&self, slot: u16) -> u32 {
        self.slots[usize::from(slot)].note
    }

    /// Stores the owner's number with the request in `slot`.
    #[inline]
    pub fn note(&mut self, slot: u16, note: u32) {
        self.slots[usize::from(slot)].note = note;
    }

    /// Marks the bytes of the list of `slot` that its request may have written. Returns the number of log words and list pieces
    /// visited.
    ///
    /// # Panics
    /// If the slot is not in use, or its list is shorter.
    #[cold]
    pub fn mark_dirty(&self, slot: u16, bytes: Range<u32>, log: &DirtyLog) -> u64 {
        let table = self.memory_of(slot);
        let mut cost = 0;
        for seg in self.sgl(slot).slice(bytes.start, bytes.end - bytes.start).pieces() {
            let addr = table.guest_addr_of(&seg).expect("the piece was looked up in the slot's table");
            cost += 1 + log.mark(addr, seg.len() as u64);
        }
        cost
    }

    /// Frees `slot`: its request has completed.
    ///
    /// # Panics
    /// If the slot is not in use.
    #[inline]
    pub fn end(&mut self, slot: u16) {
        let index = usize::from(slot);
        let slot = &mut self.slots[index];
        let serial = slot.epoch.take().expect("the slot is in use");
        if slot.is_long() {
            self.long_lists.end(index, slot.count);
        }
        if serial == self.current.serial {
            self.current.users -= 1;
        } else {
            self.end_old(serial);
        }
    }

    #[cold]
    fn end_old(&mut self, serial: NonZeroU32) {
        let i = self.old.iter().position(|epoch| epoch.serial == serial).expect("the epoch has users");
        self.old[i].users -= 1;
        if self.old[i].users == 0 {
            self.old.swap_remove(i);
        }
    }
}

/// A list of an [`SgTable`] that is being filled.
#[derive(Debug)]
pub struct List<'a> {
    slot: &'a mut Slot,
    index: usize,
    long_lists: &'a mut LongLists,
    table: &'a MemTable,
}

impl<'a> List<'a> {
    /// The memory in which the list's addresses are looked up.
    pub const fn memory(&self) -> &'a MemTable {
        self.table
    }

    /// Stores the owner's number with the request: see [`SgTable::note_of`].
    #[inline]
    pub const fn note(&mut self, note: u32) {
        self.slot.note = note;
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> u32 {
        self.slot.len
    }

    /// Whether the list has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.slot.len == 0
    }

    /// Adds `len` bytes at a guest address.
    ///
    /// # Errors
    /// [`BadAddress`], also if the list would reach 4 GiB, or more than 2,048 pieces because buffers span many regions;
    /// then nothing was added.
    #[inline]
    pub fn push(&mut self, addr: u64, len: u32) -> Result<(), BadAddress> {
        self.extend([(addr, len)]).map(drop)
    }

    /// Adds pieces, each a length at a guest address. Returns the sum of their lengths.
    ///
    /// # Errors
    /// As [`List::push`], for the first piece that cannot be added; the pieces before it were added.
    // Always inlined: a separate function would return its result in memory.
    #[inline(always)]
    pub fn extend(&mut self, pieces: impl IntoIterator<Item = (u64, u32)>) -> Result<u32, BadAddress> {
        let Self { slot, index, long_lists, table } = self;
        let before = slot.len;
        // In registers, until the list is complete or another function needs them.
        let (mut count, mut all) = (slot.count, slot.len);
        for (addr, len) in pieces {
            let Some(total) = all.checked_add(len) else {
                (slot.count, slot.len) = (count, all);
                return Err(BadAddress { addr, len });
            };
            let base = table.largest.locate_all(addr, len as usize);
            if let Some(base) = base
                && len > 0
                && let Some(place) = slot.short.get_mut(count as usize)
            {
                *place = Seg::new(base, len as usize);
                count += 1;
            } else {
                (slot.count, slot.len) = (count, all);
                // The function receives the parts of the list: a reference to the list would force the list into memory.
                if !push_outlined(slot, *index, long_lists, table, (addr, len)) {
                    return Err(BadAddress { addr, len });
                }
                count = slot.count;
            }
            all = total;
        }
        (slot.count, slot.len) = (count, all);
        Ok(all - before)
    }

    /// The first `len` bytes of the finished list, for the request.
    ///
    /// # Panics
    /// If the list is shorter.
    // Always inlined, as the functions that it calls: a list that is passed to a function must lie in memory, and so must the
    // function's result.
    #[inline(always)]
    pub fn first(self, len: u32) -> Sgl {
        self.sgl().shortened(len)
    }

    /// The finished list, for the request.
    #[inline(always)]
    pub fn sgl(self) -> Sgl {
        let Slot { short, count, len, .. } = &*self.slot;
        let segs = short.get(..*count as usize).unwrap_or_else(|| self.long_lists.of(self.index, *count));
        // SAFETY: as in `SgTable::sgl`.
        unsafe { Sgl::new(segs, *len) }
    }

    /// Adds a piece.
    #[inline]
    fn add(&mut self, seg: Seg) {
        match self.slot.short.get_mut(self.slot.count as usize) {
            Some(place) => *place = seg,
            None => self.long_lists.add(self.index, self.slot, seg),
        }
        self.slot.count += 1;
    }

    /// Adds bytes that span several regions. Returns whether they were added: not if some are in no region, or if the list
    /// would have too many pieces. Counts the regions that were looked up.
    #[cold]
    fn push_parts(&mut self, addr: u64, len: u32) -> bool {
        let before = self.slot.count;
        let table = self.table;
        let pushed = table.for_each_piece(addr, len, |base, n| self.add(Seg::new(base, n)));
        self.long_lists.parts = self.long_lists.parts.saturating_add(self.slot.count - before);
        let fits = pushed.is_ok() && self.slot.count as usize <= LIST_MAX;
        if !fits {
            // The first pieces may have been found.
            self.long_lists.truncate(self.index, self.slot.count, before);
            self.slot.count = before;
        }
        fits
    }
}

/// Adds bytes that are not all in the largest region, or that do not fit into the slot. Returns whether they were added.
#[inline(never)]
fn push_outlined(
    slot: &mut Slot,
    index: usize,
    long_lists: &mut LongLists,
    table: &MemTable,
    (addr, len): (u64, u32),
) -> bool {
    let mut list = List { slot, index, long_lists, table };
    match table.locate_all(addr, len as usize) {
        Some(base) if len > 0 => {
            list.add(Seg::new(base, len as usize));
            true
        }
        _ => list.push_parts(addr, len),
    }
}

impl LongLists {
    /// The list of a slot, if it does not fit into the slot.
    #[cold]
    fn of(&self, slot: usize, count: u32) -> &[Seg] {
        let list = &self.lists[slot];
        assert_eq!(list.len(), count as usize, "a long list has as many pieces as its slot counts");
        list
    }

    /// Adds a piece to the list of a slot that is full.
    #[inline(never)]
    fn add(&mut self, index: usize, slot: &Slot, seg: Seg) {
        let list = &mut self.lists[index];
        if !slot.is_long() {
            list.clear();
            list.extend_from_slice(&slot.short);
            self.pieces += SHORT as u32;
        }
        list.push(seg);
        self.pieces += 1;
    }

    /// Shortens a list from `count` pieces to `left`. If these fit into the slot, the slot still has them.
    fn truncate(&mut self, index: usize, count: u32, left: u32) {
        let long = |count: u32| if count as usize > SHORT { count } else { 0 };
        debug_assert!(left <= count, "a list of {count} pieces is shortened to {left}");
        self.pieces -= long(count) - long(left);
        if long(left) > 0 {
            self.lists[index].truncate(left as usize);
        }
    }

    /// Ends a long list, and frees the memory of a very long one.
    #[inline(never)]
    fn end(&mut self, index: usize, count: u32) {
        self.pieces -= count;
        if self.lists[index].capacity() > KEPT_PIECES {
            self.lists[index] = Vec::new();
        }
    }
}

/// The table of an epoch that is in use.
#[inline]
fn table_of<'a>(current: &'a Epoch, old: &'a [Epoch], serial: NonZeroU32) -> &'a MemTable {
    if serial == current.serial {
        return &current.table;
    }
    let epoch = old.iter().find(|epoch| epoch.serial == serial);
    &epoch.expect("the epoch has users").table
}

impl Drop for SgTable {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check_invariants();
        }
        if self.in_use() > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(std::mem::take(&mut self.long_lists.lists));
            std::mem::forget(std::mem::take(&mut self.old));
            std::mem::forget(Arc::clone(&self.current.table));
        }
    }
}

#[cfg(test)]
mod tests;
