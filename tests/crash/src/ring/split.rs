//! A split ring.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use aryk_dma::GuestArea;

use super::{INDIRECT, NEXT, NotOutstanding, Parts, Piece, direction, passed, write_desc};
use crate::random::Random;

const NO_NOTIFY: u16 = 1;

/// See [`super::Ring`].
#[derive(Debug)]
pub struct Split {
    area: GuestArea,
    parts: Parts,
    size: u16,
    event_idx: bool,
    free: Vec<u16>,
    /// By head: the slot, and the descriptors of its chain.
    outstanding: Vec<Option<(u16, Vec<u16>)>>,
    next_avail: u16,
    shown: u16,
    next_used: u16,
}

impl Split {
    pub(super) fn new(area: GuestArea, at: u64, size: u16, event_idx: bool, random: &mut Random) -> Self {
        let driver = at + 16 * u64::from(size);
        let device = (driver + 6 + 2 * u64::from(size)).next_multiple_of(4);
        // A driver that has run for a while takes its descriptors in any order.
        let mut free: Vec<u16> = (0..size).collect();
        random.shuffle(&mut free);
        Self {
            area,
            parts: Parts { desc: at, driver, device },
            size,
            event_idx,
            free,
            outstanding: vec![None; size.into()],
            next_avail: 0,
            shown: 0,
            next_used: 0,
        }
    }

    pub(super) const fn parts(&self) -> Parts {
        self.parts
    }

    pub(super) const fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        let needed = if table.is_some() { 1 } else { pieces.len() };
        let chain = self.free.split_off(self.free.len() - needed);
        if let Some(table) = table {
            let places: Vec<u16> = (0..pieces.len() as u16).collect();
            self.write_chain(table, &places, pieces);
            let all = Piece { at: table, len: 16 * pieces.len() as u32, write: false };
            write_desc(&self.area, self.desc(chain[0]), all, [INDIRECT, 0]);
        } else {
            self.write_chain(self.parts.desc, &chain, pieces);
        }
        let place = u64::from(self.next_avail % self.size);
        self.area.store_u16((self.parts.driver + 4 + 2 * place) as usize, chain[0], Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        let head = usize::from(chain[0]);
        assert!(self.outstanding[head].is_none(), "a free descriptor is outstanding");
        self.outstanding[head] = Some((slot, chain));
    }

    fn desc(&self, index: u16) -> u64 {
        self.parts.desc + 16 * u64::from(index)
    }

    fn write_chain(&self, table: u64, places: &[u16], pieces: &[Piece]) {
        for (i, piece) in pieces.iter().enumerate() {
            let next = places.get(i + 1);
            let flags = direction(piece) | if next.is_some() { NEXT } else { 0 };
            let at = table + 16 * u64::from(places[i]);
            write_desc(&self.area, at, *piece, [flags, next.copied().unwrap_or(0)]);
        }
    }

    pub(super) fn publish(&mut self) -> bool {
        let old = self.shown;
        if old == self.next_avail {
            return false;
        }
        self.shown = self.next_avail;
        self.area.store_u16(self.parts.driver as usize + 2, self.next_avail, Release);
        fence(SeqCst);
        if self.event_idx {
            let at = self.parts.device + 4 + 8 * u64::from(self.size);
            passed(self.area.load_u16(at as usize, Relaxed), self.next_avail, old)
        } else {
            self.area.load_u16(self.parts.device as usize, Relaxed) & NO_NOTIFY == 0
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.used_idx() != self.next_used
    }

    fn used_idx(&self) -> u16 {
        self.area.load_u16(self.parts.device as usize + 2, Acquire)
    }

    pub(super) fn take(&mut self) -> Result<Option<(u16, u32)>, NotOutstanding> {
        if !self.is_ready() {
            return Ok(None);
        }
        let at = self.parts.device as usize + 4 + 8 * usize::from(self.next_used % self.size);
        let id = u32::from_le_bytes(self.area.read(at));
        let len = u32::from_le_bytes(self.area.read(at + 4));
        let chain = self.outstanding.get_mut(id as usize).and_then(Option::take);
        let (slot, chain) = chain.ok_or(NotOutstanding { id })?;
        self.free.extend(chain);
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some((slot, len)))
    }

    pub(super) fn arm(&self) {
        if self.event_idx {
            let at = self.parts.driver + 4 + 2 * u64::from(self.size);
            self.area.store_u16(at as usize, self.next_used, Release);
        } else {
            self.area.store_u16(self.parts.driver as usize, 0, Release);
        }
        fence(SeqCst);
    }

    /// As QEMU has it after a crash: the used index in the ring.
    pub(super) fn base(&self) -> u32 {
        self.used_idx().into()
    }
}
