//! A packed ring.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use aryk_dma::GuestArea;

use super::{INDIRECT, NEXT, NotOutstanding, Parts, Piece, direction, passed, write_addr, write_desc};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Event suppression (section 2.8.14): flags.
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const AT_DESC: u16 = 2;

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    const START: Self = Self { index: 0, wrap: true };

    const fn advance(&mut self, by: u16, size: u16) {
        self.index += by;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    /// In 16 bits, as event suppression and SET_VRING_BASE have it.
    const fn bits(self) -> u16 {
        self.index | (self.wrap as u16) << 15
    }
}

/// See [`super::Ring`].
#[derive(Debug)]
pub struct Packed {
    area: GuestArea,
    parts: Parts,
    size: u16,
    event_idx: bool,
    /// By buffer id, which is the slot: how many descriptors its chain has.
    outstanding: Vec<Option<u16>>,
    free: usize,
    next_avail: Position,
    next_used: Position,
    /// Descriptors made available since the device was last asked whether it wants a kick.
    shown: u16,
}

impl Packed {
    pub(super) fn new(area: GuestArea, at: u64, size: u16, event_idx: bool) -> Self {
        let driver = at + 16 * u64::from(size);
        Self {
            area,
            parts: Parts { desc: at, driver, device: driver + 4 },
            size,
            event_idx,
            outstanding: vec![None; size.into()],
            free: size.into(),
            next_avail: Position::START,
            next_used: Position::START,
            shown: 0,
        }
    }

    pub(super) const fn parts(&self) -> Parts {
        self.parts
    }

    pub(super) const fn room(&self) -> usize {
        self.free
    }

    pub(super) fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        assert!(self.outstanding[usize::from(slot)].is_none(), "a free slot is outstanding");
        let head = self.next_avail;
        let count = if let Some(table) = table {
            for (i, piece) in pieces.iter().enumerate() {
                write_desc(&self.area, table + 16 * i as u64, *piece, [0, direction(piece)]);
            }
            let all = Piece { at: table, len: 16 * pieces.len() as u32, write: false };
            self.write(head, all, slot, INDIRECT, false);
            1
        } else {
            let mut at = head;
            for (i, piece) in pieces.iter().enumerate() {
                let next = if i + 1 < pieces.len() { NEXT } else { 0 };
                // The device must not see the chain before all of it is there: its head comes last.
                self.write(at, *piece, slot, direction(piece) | next, i > 0);
                at.advance(1, self.size);
            }
            pieces.len() as u16
        };
        let flags = if table.is_some() {
            INDIRECT
        } else {
            direction(&pieces[0]) | if pieces.len() > 1 { NEXT } else { 0 }
        };
        self.show(head, flags);
        self.next_avail.advance(count, self.size);
        self.free -= usize::from(count);
        self.shown += count;
        self.outstanding[usize::from(slot)] = Some(count);
    }

    fn desc(&self, index: u16) -> usize {
        self.parts.desc as usize + 16 * usize::from(index)
    }

    fn write(&self, at: Position, piece: Piece, id: u16, flags: u16, show: bool) {
        let desc = self.desc(at.index);
        write_addr(&self.area, desc as u64, piece);
        self.area.store_u16(desc + 12, id, Relaxed);
        if show {
            self.show(at, flags);
        }
    }

    /// Makes the descriptor at a place available.
    fn show(&self, at: Position, flags: u16) {
        let bits = if at.wrap { AVAIL } else { USED };
        self.area.store_u16(self.desc(at.index) + 14, flags | bits, Release);
    }

    pub(super) fn publish(&mut self) -> bool {
        let added = std::mem::take(&mut self.shown);
        if added == 0 {
            return false;
        }
        fence(SeqCst);
        let flags = self.area.load_u16(self.parts.device as usize + 2, Acquire) & 3;
        if flags != AT_DESC || !self.event_idx {
            return flags != DISABLE;
        }
        let bits = self.area.load_u16(self.parts.device as usize, Relaxed);
        let mut event = bits & !(1 << 15);
        if (bits >> 15 != 0) != self.next_avail.wrap {
            event = event.wrapping_sub(self.size);
        }
        let new = self.next_avail.index;
        passed(event, new, new.wrapping_sub(added))
    }

    pub(super) fn is_ready(&self) -> bool {
        let flags = self.area.load_u16(self.desc(self.next_used.index) + 14, Acquire);
        let wrap = self.next_used.wrap;
        (flags & AVAIL != 0) == wrap && (flags & USED != 0) == wrap
    }

    pub(super) fn take(&mut self) -> Result<Option<(u16, u32)>, NotOutstanding> {
        if !self.is_ready() {
            return Ok(None);
        }
        let desc = self.desc(self.next_used.index);
        let len = u32::from_le_bytes(self.area.read(desc + 8));
        let id = self.area.load_u16(desc + 12, Relaxed);
        let count = self.outstanding.get_mut(usize::from(id)).and_then(Option::take);
        let count = count.ok_or_else(|| NotOutstanding { id: id.into() })?;
        self.next_used.advance(count, self.size);
        self.free += usize::from(count);
        Ok(Some((id, len)))
    }

    pub(super) fn arm(&self) {
        let at = self.parts.driver as usize;
        if self.event_idx {
            self.area.store_u16(at, self.next_used.bits(), Relaxed);
            self.area.store_u16(at + 2, AT_DESC, Release);
        } else {
            self.area.store_u16(at + 2, ENABLE, Release);
        }
        fence(SeqCst);
    }

    /// Where completions were taken up to, as both of the device's positions: it finds the rest by the in-flight region.
    pub(super) fn base(&self) -> u32 {
        let bits = u32::from(self.next_used.bits());
        bits | bits << 16
    }
}
