//! A guest: its memory, and a driver's access to the memory. Addresses are relative to the start of the memory.

use super::super::{SplitConfig, SplitQueue, avail_len, desc_len, used_len};
use crate::Piece;
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// A descriptor, as in section 2.7.5, but with an address relative to the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

#[derive(Clone)]
pub(super) struct Guest {
    pub size: u16,
    pub base: u64,
    pub memory: Arc<MemTable>,
    mapping: Arc<Mapping>,
    /// The whole memory.
    whole: GuestArea,
    start: u16,
}

impl Guest {
    /// The guest address of the memory.
    pub const BASE: u64 = 0x4000_0000;
    pub const LEN: u64 = 16 << 20;
    /// The last 4 MiB hold the queue: a descriptor table, an available and a used ring.
    const DESC: u64 = 12 << 20;
    const AVAIL: u64 = 13 << 20;
    const USED: u64 = 14 << 20;

    pub fn new(size: u16) -> Self {
        Self::starting_at(size, 0)
    }

    /// Creates a guest with both indices at `start`.
    pub fn starting_at(size: u16, start: u16) -> Self {
        let mapping = Arc::new(Mapping::anonymous(Self::LEN).unwrap());
        let region = Region {
            guest_addr: Self::BASE,
            user_addr: 0x7000_0000,
            len: Self::LEN,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = Arc::new(MemTable::new(vec![region]).unwrap());
        let whole = GuestArea::new(&mapping, 0, Self::LEN).unwrap();
        let guest = Self { size, base: Self::BASE, memory, mapping, whole, start };
        guest.set_avail_idx(start);
        guest.whole.store_u16(Self::USED as usize + 2, start, Release);
        guest
    }

    pub fn area(&self, offset: u64, len: u64) -> GuestArea {
        GuestArea::new(&self.mapping, offset, len).unwrap()
    }

    pub fn config(&self, event_idx: bool) -> SplitConfig {
        SplitConfig {
            size: self.size,
            desc: self.area(Self::DESC, desc_len(self.size)),
            avail: self.area(Self::AVAIL, avail_len(self.size, event_idx)),
            used: self.area(Self::USED, used_len(self.size, event_idx)),
            event_idx,
            indirect: true,
            next_avail: self.start,
            next_used: self.start,
        }
    }

    pub fn queue(&self, event_idx: bool) -> SplitQueue {
        SplitQueue::new(self.config(event_idx)).unwrap()
    }

    pub fn piece(&self, addr: u64, len: u32) -> Piece {
        Piece { addr: self.base.wrapping_add(addr), len }
    }

    pub fn read_u64(&self, at: u64) -> u64 {
        self.whole.read(at as usize)
    }

    pub fn write_u64(&self, at: u64, value: u64) {
        self.whole.write(at as usize, &value);
    }

    fn load(&self, part: u64, offset: u64) -> u16 {
        self.whole.load_u16((part + offset) as usize, Acquire)
    }

    fn store(&self, part: u64, offset: u64, value: u16) {
        self.whole.store_u16((part + offset) as usize, value, Release);
    }

    fn write_desc(&self, at: u64, desc: Desc) {
        let at = at as usize;
        self.whole.write(at, &self.base.wrapping_add(desc.addr));
        self.whole.write(at + 8, &desc.len);
        self.whole.write(at + 12, &desc.flags);
        self.whole.write(at + 14, &desc.next);
    }

    pub fn set_desc(&self, index: u16, desc: Desc) {
        self.write_desc(Self::DESC + 16 * u64::from(index), desc);
    }

    /// Writes an indirect table.
    pub fn set_table(&self, addr: u64, table: &[Desc]) {
        for (i, desc) in table.iter().enumerate() {
            self.write_desc(addr + 16 * i as u64, *desc);
        }
    }

    pub fn desc_bytes(&self, index: u16) -> [u8; 16] {
        self.whole.read(Self::DESC as usize + 16 * usize::from(index))
    }

    /// The bytes at a guest-physical address, which may be beyond 64 bits.
    pub fn memory_bytes(&self, addr: u128) -> Option<[u8; 16]> {
        let at = addr.checked_sub(Self::BASE.into()).filter(|at| at + 16 <= Self::LEN.into())?;
        Some(self.whole.read(at as usize))
    }

    pub fn avail(&self, place: u16) -> u16 {
        self.load(Self::AVAIL, 4 + 2 * u64::from(place))
    }

    pub fn set_avail(&self, place: u16, head: u16) {
        self.store(Self::AVAIL, 4 + 2 * u64::from(place), head);
    }

    pub fn avail_idx(&self) -> u16 {
        self.load(Self::AVAIL, 2)
    }

    pub fn set_avail_idx(&self, idx: u16) {
        self.store(Self::AVAIL, 2, idx);
    }

    /// Adds a chain to the available ring, and makes it visible.
    pub fn offer(&self, head: u16) {
        let idx = self.avail_idx();
        self.set_avail(idx % self.size, head);
        self.set_avail_idx(idx.wrapping_add(1));
    }

    pub fn set_avail_flags(&self, flags: u16) {
        self.store(Self::AVAIL, 0, flags);
    }

    pub fn set_used_event(&self, idx: u16) {
        self.store(Self::AVAIL, 4 + 2 * u64::from(self.size), idx);
    }

    pub fn used_idx(&self) -> u16 {
        self.load(Self::USED, 2)
    }

    pub fn used_flags(&self) -> u16 {
        self.load(Self::USED, 0)
    }

    /// The used element at a position in the ring: id and length.
    pub fn used(&self, place: u16) -> (u32, u32) {
        let at = Self::USED as usize + 4 + 8 * usize::from(place);
        (self.whole.read(at), self.whole.read(at + 4))
    }

    pub fn avail_event(&self) -> u16 {
        self.load(Self::USED, 4 + 8 * u64::from(self.size))
    }
}
