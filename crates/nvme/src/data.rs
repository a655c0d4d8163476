//! A command's data as the controller finds it: PRP entries, or SGL descriptors where PRPs cannot describe it. NVMe 2.0 §4.1.
//! Pure functions, on the hot path.
//!
//! Both describe a list of [`Piece`]s. Entries that do not fit in the command itself go to the command's **list**, a part of one
//! memory page that belongs to the command's slot. So a list never spans pages and needs no chaining; its length limits a
//! transfer (`list_bytes`).

use crate::spec::entry::SubmissionEntry;

/// A contiguous part of a command's data, by the address that the controller uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub iova: u64,
    /// Bytes; at least 1.
    pub len: u32,
}

/// Data that a command cannot carry as it is. The caller copies the data through an aligned buffer ("bounces") and counts that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// A piece is not aligned as PRPs demand, and the controller has no SGLs that allow it.
    #[error("data piece {index} is not aligned for PRPs, and the controller supports no SGLs for it")]
    Unaligned {
        /// The first such piece.
        index: usize,
    },
    /// There are more pages or pieces than a list has entries.
    #[error("the data needs more than the {max} entries of its list")]
    TooLong {
        /// Entries of the list.
        max: usize,
    },
    /// A piece is empty, or goes beyond the address space.
    #[error("data piece {index} is empty or wraps around")]
    BadPiece {
        /// The first such piece.
        index: usize,
    },
}

/// Which SGLs the controller supports. NVMe 2.0 §5.17.2.1, field SGLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SglSupport {
    /// None.
    #[default]
    None,
    /// Any alignment and length.
    Bytes,
    /// Addresses and lengths that are multiples of 4.
    Dwords,
}

/// A command's list: `len` little-endian words of 64 bits at an address of the controller.
pub(crate) struct List<W> {
    /// Address of word 0.
    pub(crate) iova: u64,
    /// Number of words.
    pub(crate) len: usize,
    /// Writes some words, from the given one on.
    pub(crate) write: W,
}

/// Words of a list that are written together.
const PART: usize = 32;

impl<W: FnMut(usize, &[u64])> List<W> {
    /// Writes the addresses of `count` consecutive pages from `start` on.
    #[inline]
    fn write_pages(&mut self, start: usize, count: usize, first: u64, page: u64) {
        let mut part = [0; PART];
        let (mut written, mut next) = (0, first);
        while written < count {
            let part = &mut part[..PART.min(count - written)];
            for word in &mut *part {
                *word = next.to_le();
                // Behind the last page of the address space, there is none.
                next = next.wrapping_add(page);
            }
            (self.write)(start + written, part);
            written += part.len();
        }
    }

    /// Writes the descriptors of the pieces.
    #[inline]
    fn write_descriptors(&mut self, pieces: &[Piece]) {
        let mut part = [0; PART];
        for (index, pieces) in pieces.chunks(PART / 2).enumerate() {
            for (words, piece) in part.as_chunks_mut::<2>().0.iter_mut().zip(pieces) {
                *words = descriptor(DATA_BLOCK, piece.iova, piece.len).map(u64::to_le);
            }
            (self.write)(index * PART, &part[..2 * pieces.len()]);
        }
    }
}

/// The offset of an address in its page, whose size is a power of two.
#[inline]
const fn offset(iova: u64, page: u64) -> u64 {
    iova & (page - 1)
}

/// Bytes of a list for transfers of up to `transfer` bytes in up to `pieces` pieces, for memory pages of `page` bytes: a power of
/// two, at most one page.
pub(crate) fn list_bytes(transfer: u64, pieces: u32, sgl: SglSupport, page: u64) -> u64 {
    let prps = (transfer / page + 1) * 8;
    let descriptors = if sgl == SglSupport::None { 0 } else { u64::from(pieces) * 16 };
    prps.max(descriptors).next_power_of_two().clamp(64, page)
}

/// The most bytes that PRPs with a list of one page describe, for data that begins at any offset of a page.
pub(crate) const fn transfer_max(page: u64) -> u64 {
    page / 8 * page
}

/// Adds the data to a command: as PRPs if they can describe it, otherwise as an SGL. A command without data stays as it is.
#[inline]
pub(crate) fn attach<W: FnMut(usize, &[u64])>(
    entry: SubmissionEntry,
    pieces: &[Piece],
    page: u64,
    sgl: SglSupport,
    list: &mut List<W>,
) -> Result<SubmissionEntry, Unfit> {
    if pieces.is_empty() {
        return Ok(entry);
    }
    match (prps(pieces, page, list), sgl) {
        (Ok([prp1, prp2]), _) => Ok(entry.with_prps(prp1, prp2)),
        (Err(Unfit::Unaligned { .. } | Unfit::TooLong { .. }), SglSupport::Bytes | SglSupport::Dwords) => {
            Ok(entry.with_sgl(sgl_words(pieces, sgl, list)?))
        }
        (Err(unfit), _) => Err(unfit),
    }
}

/// PRP1 and PRP2, with the entries behind them in `list`. NVMe 2.0 §4.1.1.
///
/// Only the first piece may start within a page, at a multiple of 4; only the last may end within one. Pieces that are contiguous
/// for the controller count as one.
#[inline]
fn prps<W: FnMut(usize, &[u64])>(pieces: &[Piece], page: u64, list: &mut List<W>) -> Result<[u64; 2], Unfit> {
    match *pieces {
        // Most commands: data within one page.
        [Piece { iova, len }] if len != 0 && iova % 4 == 0 && offset(iova, page) + u64::from(len) <= page => {
            Ok([iova, 0])
        }
        _ => long_prps(pieces, page, list),
    }
}

fn long_prps<W: FnMut(usize, &[u64])>(
    pieces: &[Piece],
    page: u64,
    list: &mut List<W>,
) -> Result<[u64; 2], Unfit> {
    let prp1 = pieces[0].iova;
    if !prp1.is_multiple_of(4) {
        return Err(Unfit::Unaligned { index: 0 });
    }
    let (mut entries, mut first_entry, mut end) = (0, 0, prp1);
    for (index, piece) in pieces.iter().enumerate() {
        let next_end = piece.iova.checked_add(u64::from(piece.len)).filter(|_| piece.len > 0);
        let next_end = next_end.ok_or(Unfit::BadPiece { index })?;
        let is_contiguous = piece.iova == end;
        if !is_contiguous && offset(piece.iova | end, page) != 0 {
            return Err(Unfit::Unaligned { index });
        }
        // The first page of the data is PRP1's; every later page has an entry.
        let from = if index == 0 { (prp1 - offset(prp1, page)).checked_add(page) } else { Some(piece.iova) };
        // Contiguous pieces may begin within a page, which has its entry.
        let first = from.and_then(|from| from.checked_add(offset(from.wrapping_neg(), page)));
        if let Some(first) = first.filter(|&first| first < next_end) {
            let count = ((next_end - 1 - first) >> page.trailing_zeros()) as usize + 1;
            if count > list.len - entries {
                return Err(Unfit::TooLong { max: list.len });
            }
            if entries == 0 {
                first_entry = first;
            }
            list.write_pages(entries, count, first, page);
            entries += count;
        }
        end = next_end;
    }
    Ok([prp1, if entries > 1 { list.iova } else { first_entry }])
}

/// SGL descriptor type of data. NVMe 2.0 §4.1.2.1.
const DATA_BLOCK: u64 = 0x0;
/// SGL descriptor type of the only list of descriptors.
const LAST_SEGMENT: u64 = 0x3;

const fn descriptor(kind: u64, iova: u64, len: u32) -> [u64; 2] {
    [iova, len as u64 | kind << 60]
}

/// SGL1, with the descriptors behind it in `list`. NVMe 2.0 §4.1.2.
fn sgl_words<W: FnMut(usize, &[u64])>(
    pieces: &[Piece],
    sgl: SglSupport,
    list: &mut List<W>,
) -> Result<[u64; 2], Unfit> {
    for (index, piece) in pieces.iter().enumerate() {
        if piece.len == 0 || piece.iova.checked_add(u64::from(piece.len)).is_none() {
            return Err(Unfit::BadPiece { index });
        }
        if sgl == SglSupport::Dwords && (piece.iova | u64::from(piece.len)) % 4 != 0 {
            return Err(Unfit::Unaligned { index });
        }
    }
    if let [piece] = pieces {
        return Ok(descriptor(DATA_BLOCK, piece.iova, piece.len));
    }
    if 2 * pieces.len() > list.len {
        return Err(Unfit::TooLong { max: list.len / 2 });
    }
    list.write_descriptors(pieces);
    Ok(descriptor(LAST_SEGMENT, list.iova, 16 * pieces.len() as u32))
}

#[cfg(test)]
mod tests;
