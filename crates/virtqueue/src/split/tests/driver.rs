//! A guest: memory, and a driver's hands in it. Addresses are counted from the start of its memory.

use super::super::{SplitConfig, SplitQueue, avail_len, desc_len, used_len};
use crate::Piece;
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

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

pub(super) struct Guest {
    pub size: u16,
    pub base: u64,
    pub memory: Arc<MemTable>,
    mapping: Arc<Mapping>,
    start: u16,
}

impl Guest {
    /// Where its memory starts for the guest.
    pub const BASE: u64 = 0x4000_0000;
    const LEN: u64 = 16 << 20;
    /// The last 4 MiB hold the queue: a descriptor table, an available and a used ring.
    const DESC: u64 = 12 << 20;
    const AVAIL: u64 = 13 << 20;
    const USED: u64 = 14 << 20;

    pub fn new(size: u16) -> Self {
        Self::starting_at(size, 0)
    }

    /// With both indices at `start`.
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
        let guest = Self { size, base: Self::BASE, memory, mapping, start };
        guest.set_avail_idx(start);
        guest.area(Self::USED, 4).store_u16(2, start, Relaxed);
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

    fn write_desc(&self, at: u64, desc: Desc) {
        let area = self.area(at, 16);
        area.write(0, &self.base.wrapping_add(desc.addr));
        area.write(8, &desc.len);
        area.write(12, &desc.flags);
        area.write(14, &desc.next);
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

    pub fn set_avail(&self, place: u16, head: u16) {
        self.area(Self::AVAIL + 4 + 2 * u64::from(place), 2).store_u16(0, head, Relaxed);
    }

    pub fn avail_idx(&self) -> u16 {
        self.area(Self::AVAIL, 4).load_u16(2, Relaxed)
    }

    pub fn set_avail_idx(&self, idx: u16) {
        self.area(Self::AVAIL, 4).store_u16(2, idx, Release);
    }

    /// Adds a chain to the available ring, and shows it.
    pub fn offer(&self, head: u16) {
        let idx = self.avail_idx();
        self.set_avail(idx % self.size, head);
        self.set_avail_idx(idx.wrapping_add(1));
    }

    pub fn set_avail_flags(&self, flags: u16) {
        self.area(Self::AVAIL, 4).store_u16(0, flags, Relaxed);
    }

    pub fn set_used_event(&self, idx: u16) {
        self.area(Self::AVAIL + 4 + 2 * u64::from(self.size), 2).store_u16(0, idx, Relaxed);
    }

    pub fn used_idx(&self) -> u16 {
        self.area(Self::USED, 4).load_u16(2, Acquire)
    }

    pub fn used_flags(&self) -> u16 {
        self.area(Self::USED, 4).load_u16(0, Relaxed)
    }

    /// The used element at a place in the ring: id and length.
    pub fn used(&self, place: u16) -> (u32, u32) {
        let area = self.area(Self::USED + 4 + 8 * u64::from(place), 8);
        (area.read(0), area.read(4))
    }

    pub fn avail_event(&self) -> u16 {
        self.area(Self::USED + 4 + 8 * u64::from(self.size), 2).load_u16(0, Relaxed)
    }
}
