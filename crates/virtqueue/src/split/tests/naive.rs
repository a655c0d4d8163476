//! A second implementation of the device's side, as slow and simple as section 2.7: no state but the parameters, no shortcuts,
//! integers wide enough never to wrap.

use super::driver::{Guest, INDIRECT, NEXT, WRITE};
use crate::{CHAIN_MAX, ChainError, Piece, PopError, QueueError};
use std::collections::BTreeSet;

/// The result of taking a chain: its head and its readable and writable buffers; `None` if there is none.
pub(super) type Outcome = Result<Option<(u16, Vec<Piece>, Vec<Piece>)>, PopError>;

/// Takes the next chain as a device that has taken chains up to index `next`, of which `in_flight` were not completed.
pub(super) fn pop(
    guest: &Guest,
    indirect: bool,
    next: u16,
    shown: u16,
    in_flight: &BTreeSet<u16>,
) -> Outcome {
    let idx = shown;
    // Counting up from `next`, the driver's index is reached after at most as many steps as the queue has descriptors.
    let Some(new) = (0..=guest.size).find(|n| next.wrapping_add(*n) == idx) else {
        return Err(QueueError::IndexJump { from: next, to: idx }.into());
    };
    if new == 0 {
        return Ok(None);
    }
    let head = guest.avail(next % guest.size);
    if head >= guest.size {
        return Err(QueueError::HeadIndex(head).into());
    }
    if in_flight.contains(&head) {
        return Err(QueueError::HeadInFlight(head).into());
    }
    match buffers(guest, indirect, head) {
        Ok((readable, writable)) => Ok(Some((head, readable, writable))),
        Err(error) => Err(PopError::Chain { head, error }),
    }
}

#[derive(Clone, Copy)]
struct Raw {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn raw(bytes: [u8; 16]) -> Raw {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
    Raw {
        addr: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        len: u32::from_le_bytes([i, j, k, l]),
        flags: u16::from_le_bytes([m, n]),
        next: u16::from_le_bytes([o, p]),
    }
}

fn buffers(guest: &Guest, indirect: bool, head: u16) -> Result<(Vec<Piece>, Vec<Piece>), ChainError> {
    let mut parts = (Vec::new(), Vec::new());
    let mut index = head;
    for _ in 0..guest.size {
        let desc = raw(guest.desc_bytes(index));
        if desc.flags & INDIRECT != 0 {
            in_table(guest, indirect, desc, &mut parts)?;
            return Ok(parts);
        }
        add(desc, &mut parts)?;
        if desc.flags & NEXT == 0 {
            return Ok(parts);
        }
        index = desc.next;
        if index >= guest.size {
            return Err(ChainError::Index(index));
        }
    }
    Err(ChainError::TooLong)
}

fn in_table(
    guest: &Guest,
    indirect: bool,
    table: Raw,
    parts: &mut (Vec<Piece>, Vec<Piece>),
) -> Result<(), ChainError> {
    let longest = usize::from(CHAIN_MAX);
    if !indirect {
        return Err(ChainError::IndirectNotNegotiated);
    }
    if table.flags & NEXT != 0 {
        return Err(ChainError::IndirectNext);
    }
    if table.len == 0 || !table.len.is_multiple_of(16) || table.len as usize / 16 > longest {
        return Err(ChainError::IndirectLength(table.len));
    }
    let count = table.len / 16;
    let mut index = 0;
    for _ in 0..count {
        if parts.0.len() + parts.1.len() == longest {
            break;
        }
        let addr = u128::from(table.addr) + u128::from(index) * 16;
        let bytes = guest.memory_bytes(addr).ok_or(ChainError::IndirectAddress(table.addr))?;
        let desc = raw(bytes);
        if desc.flags & INDIRECT != 0 {
            return Err(ChainError::IndirectNested);
        }
        add(desc, parts)?;
        if desc.flags & NEXT == 0 {
            return Ok(());
        }
        index = desc.next;
        if u32::from(index) >= count {
            return Err(ChainError::Index(index));
        }
    }
    Err(ChainError::TooLong)
}

fn add(desc: Raw, (readable, writable): &mut (Vec<Piece>, Vec<Piece>)) -> Result<(), ChainError> {
    let piece = Piece { addr: desc.addr, len: desc.len };
    match (desc.len, desc.flags & WRITE != 0, writable.is_empty()) {
        (0, ..) => return Err(ChainError::Empty),
        (_, true, _) => writable.push(piece),
        (_, false, true) => readable.push(piece),
        (_, false, false) => return Err(ChainError::Order),
    }
    Ok(())
}

/// Whether the other side needs a notification about the entries from index `old` up to, but not including, `new`: it has
/// requested one for the entry at index `event`.
pub(super) fn wanted(event: u16, old: u16, new: u16) -> bool {
    let mut index = old;
    while index != new {
        if index == event {
            return true;
        }
        index = index.wrapping_add(1);
    }
    false
}
