//! A driver: guest memory with a packed ring, and an in-flight region as a front-end keeps it.

use super::super::{AVAIL, Cursor, EVENT_LEN, NEXT, PackedConfig, PackedQueue, USED, inflight};
use crate::ConfigError;
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

const LEN: u64 = 1 << 20;
const DRIVER: u64 = 512 << 10;
const DEVICE: u64 = DRIVER + 64;
/// Address of indirect tables.
pub const TABLES: u64 = 600 << 10;
/// Address of buffers.
pub const BUFFERS: u64 = 700 << 10;

pub struct Driver {
    pub memory: MemTable,
    mapping: Arc<Mapping>,
    ring: GuestArea,
    pub region: GuestArea,
    size: u16,
    /// The base that the front-end sends with SET_VRING_BASE.
    pub base: u32,
    avail: Cursor,
    used: Cursor,
    /// Descriptors of each chain, by id; 0: free.
    counts: Vec<u16>,
}

impl Driver {
    pub fn new(size: u16) -> Self {
        let mapping = Arc::new(Mapping::anonymous(LEN).unwrap());
        let region =
            Region { guest_addr: 0, user_addr: 0, len: LEN, offset: 0, mapping: Arc::clone(&mapping) };
        let kept = inflight::len(size);
        let start = Cursor { index: 0, wrap: true };
        Self {
            memory: MemTable::new(vec![region]).unwrap(),
            ring: GuestArea::new(&mapping, 0, 16 * u64::from(size)).unwrap(),
            mapping,
            region: GuestArea::new(&Arc::new(Mapping::anonymous(kept).unwrap()), 0, kept).unwrap(),
            size,
            base: 0x8000_8000,
            avail: start,
            used: start,
            counts: vec![0; size.into()],
        }
    }

    pub fn config(&self, event_idx: bool) -> PackedConfig {
        let area = |at, len| GuestArea::new(&self.mapping, at, len).unwrap();
        PackedConfig {
            size: self.size,
            desc: self.ring.clone(),
            driver: area(DRIVER, EVENT_LEN),
            device: area(DEVICE, EVENT_LEN),
            event_idx,
            indirect: true,
            base: self.base,
        }
    }

    pub fn queue(&self, event_idx: bool) -> PackedQueue {
        PackedQueue::new(self.config(event_idx)).unwrap()
    }

    /// Creates the queue of a back-end process that starts now.
    pub fn successor(&self) -> Result<PackedQueue, ConfigError> {
        PackedQueue::with_inflight(self.config(false), self.region.clone())
    }

    pub fn has_room(&self, count: u16) -> bool {
        self.counts.iter().sum::<u16>() + count <= self.size
    }

    /// Makes a chain of `count` buffers available; returns its id.
    pub fn add(&mut self, count: u16) -> u16 {
        let descs: Vec<_> = (0..u64::from(count)).map(|i| (BUFFERS + 64 * i, 8, 0)).collect();
        self.offer(&descs)
    }

    /// Makes a chain of these descriptors (address, length, flags) available under a free id.
    pub fn offer(&mut self, descs: &[(u64, u32, u16)]) -> u16 {
        let id = self.counts.iter().position(|count| *count == 0).unwrap() as u16;
        self.offer_as(id, descs);
        id
    }

    /// As [`Self::offer`], under a given id.
    pub fn offer_as(&mut self, id: u16, descs: &[(u64, u32, u16)]) {
        if let Some(count) = self.counts.get_mut(usize::from(id)) {
            *count = descs.len() as u16;
        }
        let first = self.avail;
        let mut shown = 0;
        for (i, &(addr, len, flags)) in descs.iter().enumerate() {
            let at = 16 * usize::from(self.avail.index);
            self.ring.write(at, &addr);
            self.ring.write(at + 8, &len);
            self.ring.write(at + 12, &id);
            let next = if i + 1 < descs.len() { NEXT } else { 0 };
            let flags = flags | next | if self.avail.wrap { AVAIL } else { USED };
            if i == 0 {
                shown = flags;
            } else {
                self.ring.store_u16(at + 14, flags, Release);
            }
            self.avail = self.avail.after(1, self.size);
        }
        self.ring.store_u16(16 * usize::from(first.index) + 14, shown, Release);
    }

    /// Writes an indirect table.
    pub fn table(&self, at: u64, descs: &[(u64, u32, u16)]) {
        for (i, &(addr, len, flags)) in descs.iter().enumerate() {
            let at = TABLES + at + 16 * i as u64;
            self.memory.write(at, &addr).unwrap();
            self.memory.write(at + 8, &len).unwrap();
            self.memory.write(at + 14, &flags).unwrap();
        }
    }

    /// The next completed chain: its id, and the length that the device reports.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let at = 16 * usize::from(self.used.index);
        let flags = self.ring.load_u16(at + 14, Acquire);
        let wrap = self.used.wrap;
        if (flags & AVAIL != 0) != wrap || (flags & USED != 0) != wrap {
            return None;
        }
        let (id, len) = (self.ring.read::<u16>(at + 12), self.ring.read(at + 8));
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "{id} is not in flight");
        self.used = self.used.after(count, self.size);
        Some((id, len))
    }

    pub fn ask_for_calls(&self, flags: u16, off_wrap: u16) {
        self.memory.write(DRIVER, &off_wrap).unwrap();
        self.memory.write(DRIVER + 2, &flags).unwrap();
    }

    /// Flags and descriptor event.
    pub fn kicks_asked_for(&self) -> (u16, u16) {
        (self.memory.read(DEVICE + 2).unwrap(), self.memory.read(DEVICE).unwrap())
    }
}
