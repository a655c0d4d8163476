//! A packed ring. See [`super::Ring`].

use super::{
    APART, INDIRECT, NEXT, NotOutstanding, Parts, Piece, Shape, direction, indirect, passed, write_addr,
    write_desc,
};
use aryk_dma::GuestArea;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

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

    /// The position as 16 bits, the encoding of event suppression and SET_VRING_BASE.
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
    /// Indexed by buffer id, which is the slot: the number of descriptors of the outstanding chain.
    outstanding: Vec<Option<u16>>,
    /// Indexed by slot: the descriptors of a prepared chain, and whether they are in an indirect table.
    prepared: Vec<(Vec<Piece>, bool)>,
    free: usize,
    next_avail: Position,
    next_used: Position,
    /// Descriptors made available since the driver last read the device's event suppression.
    shown: u16,
}

/// The offsets of the parts of a ring at `at`.
pub(super) fn parts(at: u64, size: u16) -> Parts {
    let driver = (at + 16 * u64::from(size)).next_multiple_of(APART);
    Parts { desc: at, driver, device: driver + APART }
}

impl Packed {
    pub(super) fn new(area: GuestArea, at: u64, shape: Shape) -> Self {
        let Shape { size, event_idx, .. } = shape;
        Self {
            area,
            parts: parts(at, size),
            size,
            event_idx,
            outstanding: vec![None; size.into()],
            prepared: vec![(Vec::new(), false); size.into()],
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
        match table {
            Some(table) => {
                self.write_table(table, pieces);
                self.show_chain(slot, &[indirect(table, pieces)], true);
            }
            None => self.show_chain(slot, pieces, false),
        }
    }

    pub(super) fn prepare(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        let all = [table.map_or(Piece { at: 0, len: 0, write: false }, |table| indirect(table, pieces))];
        let chain = if let Some(table) = table {
            self.write_table(table, pieces);
            &all[..]
        } else {
            pieces
        };
        let (prepared, is_table) = &mut self.prepared[usize::from(slot)];
        if prepared.is_empty() {
            prepared.extend_from_slice(chain);
        } else {
            prepared.copy_from_slice(chain);
        }
        *is_table = table.is_some();
    }

    #[inline]
    pub(super) fn offer(&mut self, slot: u16) {
        // Taken out of the vector because `show_chain` borrows `self`; put back below.
        let (chain, is_table) = std::mem::take(&mut self.prepared[usize::from(slot)]);
        assert!(!chain.is_empty(), "slot {slot} was not prepared");
        self.show_chain(slot, &chain, is_table);
        self.prepared[usize::from(slot)] = (chain, is_table);
    }

    fn write_table(&self, table: u64, pieces: &[Piece]) {
        for (i, piece) in pieces.iter().enumerate() {
            write_desc(&self.area, table + 16 * i as u64, *piece, [0, direction(piece)]);
        }
    }

    #[inline]
    fn show_chain(&mut self, slot: u16, chain: &[Piece], is_table: bool) {
        assert!(self.outstanding[usize::from(slot)].is_none(), "a free slot is outstanding");
        let count = chain.len() as u16;
        assert!(chain.len() <= self.free, "no free descriptors");
        let head = self.next_avail;
        let flags = |i: usize| {
            let next = if i + 1 < chain.len() { NEXT } else { 0 };
            direction(&chain[i]) | next | if is_table { INDIRECT } else { 0 }
        };
        let mut at = head;
        for (i, piece) in chain.iter().enumerate() {
            let desc = self.desc(at.index);
            write_addr(&self.area, desc as u64, *piece);
            self.area.store_u16(desc + 12, slot, Relaxed);
            // The head comes last: the device must not see the chain before it is complete.
            if i > 0 {
                self.show(at, flags(i));
            }
            at.advance(1, self.size);
        }
        self.show(head, flags(0));
        self.next_avail = at;
        self.free -= chain.len();
        self.shown += count;
        self.outstanding[usize::from(slot)] = Some(count);
    }

    fn desc(&self, index: u16) -> usize {
        self.parts.desc as usize + 16 * usize::from(index)
    }

    /// Makes the descriptor at a position available.
    #[inline]
    fn show(&self, at: Position, flags: u16) {
        let bits = if at.wrap { AVAIL } else { USED };
        self.area.store_u16(self.desc(at.index) + 14, flags | bits, Release);
    }

    #[inline]
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

    #[inline]
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

    pub(super) fn disarm(&self) {
        self.area.store_u16(self.parts.driver as usize + 2, DISABLE, Release);
    }

    /// Both of the device's positions, equal to the position up to which completions were taken: the device finds the
    /// requests after it in the in-flight region.
    pub(super) fn base(&self) -> u32 {
        let bits = u32::from(self.next_used.bits());
        bits | bits << 16
    }
}
