//! Compaction of a range in a row ([`Form::Row`](crate::Form)): its blocks are written one after the other. Any context.
//!
//! Each block keeps its key, so that views see what they saw, and has an entry of its own, so that it is dead by itself when it
//! is written again. What lies in a row already is left where it is. A range is gathered in parts of 1 MiB, each if it lies in
//! enough small pieces.
//!
//! **When that is worth it.** Only sequential reads gain, and what is written has to be cleaned up later, like what users
//! write. So it happens on a pool at rest that has free blobs, and as long as all that was written to the store is less than
//! the allowed multiple of what users have written: the *allowance*. It starts again from zero when nothing is left to be
//! gathered, so that a time without random writes saves up nothing; what was spent beyond it, as for cleaning up, is paid back
//! first.

use super::{Gather, Piece, Search, Step, Stop};
use crate::frame::{Kind, Record};
use crate::moving::{MOVED_MAX, Moved, moved_header_len};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::Waiter;
use crate::{BLOCK, BLOCK_UNITS, RANGE_BLOCKS, StoreOp, UNIT};
use aryk_volume_index::{Commit, Slot, Value};

/// So many blocks in a row are left where they are.
const LARGE_PIECE: usize = 32;

/// Entries that are made in one turn.
const ENTRIES_PER_TURN: usize = 64;

/// Users have written so many times the bytes of the index before its levels are merged to find ranges.
const SEARCH_SHARE: u64 = 16;

/// Parts of a range.
const PARTS: u32 = RANGE_BLOCKS / MOVED_MAX;

impl Pool {
    /// Bytes that may be written to the store beside what has been.
    fn allowance(&self) -> u64 {
        let stats = &self.stats;
        let others = stats.moved_write_bytes + stats.index_write_bytes + stats.manifest_write_bytes;
        let earned = stats.user_write_bytes / 100 * u64::from(self.settings.write_amplification_max);
        (earned + self.compactor.excused)
            .saturating_sub(self.log.written_bytes + others + self.compactor.forfeited)
    }

    fn can_afford_range(&self) -> bool {
        self.allowance() >= u64::from(RANGE_BLOCKS * BLOCK)
    }

    /// Whether blocks may be moved now.
    pub(super) fn may_gather_rows(&self) -> bool {
        self.compactor.is_at_rest
            && !self.compactor.is_paused
            && self.can_afford_range()
            && self.is_roomy()
            && !self.is_short()
    }

    /// Whether users have written so much since levels were merged to find ranges that it is worth it again.
    pub(super) fn is_search_due(&self) -> bool {
        match self.compactor.search {
            Search::Found => false,
            Search::After(bytes) => self.stats.user_write_bytes >= bytes && self.can_afford_range(),
        }
    }

    /// All that was found is gathered: the allowance begins anew, or levels are merged to find more. Returns whether they are.
    pub(super) fn search_for_rows(&mut self) -> bool {
        if self.is_search_due() {
            self.merge_all_levels();
            self.compactor.search = Search::Found;
            return true;
        }
        if matches!(self.compactor.search, Search::Found) {
            self.compactor.forfeited += self.allowance();
            let index = self.keeper.manifest.blobs.index_live().max(0) as u64 * u64::from(UNIT);
            let more = (index * SEARCH_SHARE).max(self.settings.flush_bytes);
            self.compactor.search = Search::After(self.stats.user_write_bytes + more);
        }
        false
    }

    /// Finds the small pieces in which the part lies.
    pub(super) fn look_at_part(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        if !self.may_gather_rows() {
            self.compactor.wanted.insert((gather.timeline, gather.range));
            return Err(Stop::Leave);
        }
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let view = if history.is_live { Commit::MAX } else { history.kept[gather.partition] };
        self.look_up_part(gather, MOVED_MAX, view)?;
        let (mut all, mut pieces): (Vec<Moved>, Vec<Piece>) = (Vec::new(), Vec::new());
        for block in gather.first..gather.first + MOVED_MAX {
            let Some(version) = self.slots.get(Slot::block(block as u16)) else { continue };
            let Value::Block { place, crc } = version.value else { continue };
            let record = Record {
                timeline: gather.timeline,
                partition: gather.partition as u8,
                kind: Kind::Data,
                commit: version.commit,
                block: gather.first_block() + u64::from(block - gather.first),
                blocks: 1,
                data: 0,
            };
            all.push(Moved { record, crc, old: place, at: 0 });
            let (blob, unit) = (place.blob, u32::from(place.unit));
            match pieces.last_mut() {
                Some(last) if (last.blob, last.unit + last.blocks as u32 * BLOCK_UNITS) == (blob, unit) => {
                    last.blocks += 1;
                }
                _ => {
                    let life = self.keeper.life(blob).expect("the index refers to blobs in use");
                    pieces.push(Piece { at: 0, blocks: 1, blob, life, unit });
                }
            }
        }
        gather.take_small(all, pieces);
        if gather.pieces.len() < (self.settings.pieces.pieces_min.div_ceil(PARTS) as usize).max(2) {
            return self.next_part(gather);
        }
        let len = moved_header_len(self.facts.alignment) + gather.moved.len() as u32 * BLOCK;
        gather.data = Some(self.buffers.take(len));
        gather.step = Step::Read;
        Ok(())
    }

    /// Writes the blocks that were read.
    pub(super) fn write_part(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let len = moved_header_len(self.facts.alignment) + gather.moved.len() as u32 * BLOCK;
        let (blob, life, unit) = self.take_place(len, self.reserve()).ok_or(Stop::Leave)?;
        gather.target = Some((blob, unit));
        let mut data = gather.data.take().expect("the part was read");
        self.encode_moved(&mut data, &gather.moved, life, unit);
        gather.step = Step::Write;
        self.stats.moved_write_bytes += u64::from(len);
        self.stats.gathered_write_bytes += u64::from(len);
        self.out.op(Owner::CompactWrite, StoreOp::Write { blob, unit, data, len });
        Err(Stop::Wait)
    }

    /// Makes entries of the blocks that were written.
    pub(super) fn insert_entries(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let target = gather.target.expect("written");
        for _ in 0..ENTRIES_PER_TURN {
            let Some(moved) = gather.moved.last() else {
                gather.parts += 1;
                return self.next_part(gather);
            };
            if let Err(waits) = self.insert_entry(moved, target, Waiter::Compactor) {
                gather.waits = waits;
                return Err(Stop::Wait);
            }
            gather.moved.pop();
        }
        Ok(())
    }

    fn next_part(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        if let Some((blob, _)) = gather.target.take() {
            self.keeper.end_move(blob);
        }
        gather.first += MOVED_MAX;
        gather.step = Step::Look;
        if gather.first < RANGE_BLOCKS { Ok(()) } else { Err(Stop::Leave) }
    }
}

impl Gather {
    /// Takes the blocks of small pieces, in their order.
    fn take_small(&mut self, all: Vec<Moved>, pieces: Vec<Piece>) {
        self.moved.clear();
        self.pieces.clear();
        let mut all = all.into_iter();
        for piece in pieces {
            let blocks = all.by_ref().take(piece.blocks);
            if piece.blocks >= LARGE_PIECE {
                blocks.for_each(drop);
                continue;
            }
            let at = self.moved.len();
            self.pieces.push(Piece { at, ..piece });
            self.moved.extend((at..).zip(blocks).map(|(at, moved)| Moved { at: at as u32, ..moved }));
        }
        self.checksums.clear();
        self.checksums.extend(self.moved.iter().map(|moved| moved.crc));
    }
}
