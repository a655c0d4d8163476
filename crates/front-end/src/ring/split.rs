//! A split ring. See [`super::Ring`].

use super::{
    APART, INDIRECT, NEXT, NotOutstanding, Parts, Piece, Shape, direction, indirect, passed, write_desc,
};
use aryk_dma::GuestArea;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

/// In the available ring's flags: the driver wants no calls. In the used ring's: the device wants no kicks.
const NO_NOTIFY: u16 = 1;
/// Stands for "no descriptor".
const NONE: u16 = u16::MAX;
/// Number of completions after which a polled ring moves its event index, so that the device never reaches it.
const MOVE_EVENT: u16 = 1 << 14;

/// An outstanding chain.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: u16,
    /// The chain's last descriptor, if its descriptors are freed when it completes.
    last: Option<u16>,
}

/// See [`super::Ring`].
#[derive(Debug)]
pub struct Split {
    area: GuestArea,
    parts: Parts,
    size: u16,
    event_idx: bool,
    polled: bool,
    /// Indexed by descriptor: the next one of its chain, or the next free one.
    links: Vec<u16>,
    first_free: u16,
    free: usize,
    /// Indexed by the head descriptor.
    outstanding: Vec<Option<Held>>,
    /// Indexed by slot: the head of a prepared chain, and its number of pieces.
    prepared: Vec<(u16, usize)>,
    next_avail: u16,
    shown: u16,
    next_used: u16,
}

/// The offsets of the parts of a ring at `at`.
pub(super) fn parts(at: u64, size: u16) -> Parts {
    let driver = at + 16 * u64::from(size);
    let device = (driver + 6 + 2 * u64::from(size)).next_multiple_of(APART);
    Parts { desc: at, driver, device }
}

impl Split {
    pub(super) fn new(area: GuestArea, at: u64, shape: Shape) -> Self {
        let Shape { size, event_idx, .. } = shape;
        let mut ring = Self {
            area,
            parts: parts(at, size),
            size,
            event_idx,
            polled: false,
            links: vec![NONE; size.into()],
            first_free: NONE,
            free: size.into(),
            outstanding: vec![None; size.into()],
            prepared: vec![(NONE, 0); size.into()],
            next_avail: 0,
            shown: 0,
            next_used: 0,
        };
        ring.set_order(&(0..size).collect::<Vec<_>>());
        ring
    }

    pub(super) fn set_order(&mut self, order: &[u16]) {
        assert!(
            order.len() == usize::from(self.size) && self.free == order.len(),
            "set_order needs a free ring and one index per descriptor"
        );
        self.first_free = order[0];
        for pair in order.windows(2) {
            self.links[usize::from(pair[0])] = pair[1];
        }
        self.links[usize::from(order[order.len() - 1])] = NONE;
    }

    pub(super) const fn parts(&self) -> Parts {
        self.parts
    }

    pub(super) const fn room(&self) -> usize {
        self.free
    }

    pub(super) fn add(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        let (head, last) = self.lay_out(self.first_free, pieces, table);
        self.remove_free(head, last, if table.is_some() { 1 } else { pieces.len() });
        self.show(head, Held { slot, last: Some(last) });
    }

    pub(super) fn prepare(&mut self, slot: u16, pieces: &[Piece], table: Option<u64>) {
        let (head, count) = self.prepared[usize::from(slot)];
        if head != NONE {
            assert_eq!(count, pieces.len(), "a prepared chain keeps its length");
            self.lay_out(head, pieces, table);
            return;
        }
        let (head, last) = self.lay_out(self.first_free, pieces, table);
        self.remove_free(head, last, if table.is_some() { 1 } else { pieces.len() });
        self.prepared[usize::from(slot)] = (head, pieces.len());
    }

    #[inline]
    pub(super) fn offer(&mut self, slot: u16) {
        let (head, _) = self.prepared[usize::from(slot)];
        assert_ne!(head, NONE, "slot {slot} was not prepared");
        self.show(head, Held { slot, last: None });
    }

    /// Removes a chain from the front of the free list.
    fn remove_free(&mut self, head: u16, last: u16, count: usize) {
        debug_assert_eq!(head, self.first_free, "chains are taken in order");
        self.free -= count;
        self.first_free = self.links[usize::from(last)];
    }

    /// Writes the descriptors of a chain that is already linked; returns the first and the last one.
    fn lay_out(&self, head: u16, pieces: &[Piece], table: Option<u64>) -> (u16, u16) {
        assert_ne!(head, NONE, "no free descriptors");
        if let Some(table) = table {
            for (i, piece) in (0_u16..).zip(pieces) {
                let is_last = usize::from(i) + 1 == pieces.len();
                let (flags, next) = if is_last { (0, 0) } else { (NEXT, i + 1) };
                let at = table + 16 * u64::from(i);
                write_desc(&self.area, at, *piece, [direction(piece) | flags, next]);
            }
            write_desc(&self.area, self.desc(head), indirect(table, pieces), [INDIRECT, 0]);
            return (head, head);
        }
        let mut at = head;
        for (i, piece) in pieces.iter().enumerate() {
            let next = self.links[usize::from(at)];
            if i + 1 == pieces.len() {
                write_desc(&self.area, self.desc(at), *piece, [direction(piece), 0]);
                break;
            }
            assert_ne!(next, NONE, "no free descriptors");
            write_desc(&self.area, self.desc(at), *piece, [direction(piece) | NEXT, next]);
            at = next;
        }
        (head, at)
    }

    #[inline]
    fn show(&mut self, head: u16, held: Held) {
        let place = usize::from(self.next_avail & (self.size - 1));
        self.area.store_u16(self.parts.driver as usize + 4 + 2 * place, head, Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        let outstanding = &mut self.outstanding[usize::from(head)];
        assert!(outstanding.is_none(), "a free chain is outstanding");
        *outstanding = Some(held);
    }

    fn desc(&self, index: u16) -> u64 {
        self.parts.desc + 16 * u64::from(index)
    }

    #[inline]
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

    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<(u16, u32)>, NotOutstanding> {
        if !self.is_ready() {
            return Ok(None);
        }
        let place = usize::from(self.next_used & (self.size - 1));
        let element: [u32; 2] = self.area.read(self.parts.device as usize + 4 + 8 * place);
        let [id, len] = element.map(u32::from_le);
        let held = self.outstanding.get_mut(id as usize).and_then(Option::take);
        let Held { slot, last } = held.ok_or(NotOutstanding { id })?;
        if let Some(last) = last {
            self.give_back(id as u16, last);
        }
        self.next_used = self.next_used.wrapping_add(1);
        if self.polled && self.next_used.is_multiple_of(MOVE_EVENT) {
            self.disarm();
        }
        Ok(Some((slot, len)))
    }

    fn give_back(&mut self, head: u16, last: u16) {
        let mut at = head;
        self.free += 1;
        while at != last {
            at = self.links[usize::from(at)];
            self.free += 1;
        }
        self.links[usize::from(last)] = self.first_free;
        self.first_free = head;
    }

    pub(super) fn arm(&mut self) {
        self.polled = false;
        if self.event_idx {
            self.store_event(self.next_used);
        } else {
            self.area.store_u16(self.parts.driver as usize, 0, Release);
        }
        fence(SeqCst);
    }

    pub(super) fn disarm(&mut self) {
        self.polled = true;
        if self.event_idx {
            // As far ahead as the 16 bits allow.
            self.store_event(self.next_used.wrapping_sub(1));
        } else {
            self.area.store_u16(self.parts.driver as usize, NO_NOTIFY, Release);
        }
    }

    fn store_event(&self, index: u16) {
        let at = self.parts.driver + 4 + 2 * u64::from(self.size);
        self.area.store_u16(at as usize, index, Release);
    }

    /// The used index in the ring, which QEMU sends too after a crash of the back-end.
    pub(super) fn base(&self) -> u32 {
        self.used_idx().into()
    }
}
