//! Compaction of a range into a dense frame ([`Form::Dense`](crate::Form)). Any context.
//!
//! The dense frame gets the commit *M* of the newest of the blocks. So its one entry is a version of all blocks of the range for
//! each view from *M* on, and hides those from which it was made.
//!
//! **When that is right.** At the oldest view that includes *M*, each block must be the version that was gathered, or newer data:
//! when the frame is written, this is looked up once more, in the turn in which the entry is made. Later views differ from this
//! one only by newer versions, and a merge that begins later leaves out no zero that is newer than an entry elsewhere.
//!
//! **When that is worth it.** Blocks that a view older than *M* sees stay, and would exist twice: a range with many of them is
//! left alone, and so is one that shows its base. While free blobs are short, worn ranges are gathered under load, too, because a
//! dense frame is alive as a whole.

use super::{Gather, Piece, READ_BLOCKS_MAX, Step, Stop};
use crate::dense::DenseKey;
use crate::frame::{self, Head, Kind, NO_STREAM, Record};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::{Waiter, dense_header_len};
use crate::{BLOCK, BLOCK_UNITS, RANGE_BLOCKS, StoreOp, UNIT};
use aryk_volume_index::{Commit, Key as IndexKey, Place, Slot, Value, Version};

/// Blocks that may exist twice, because older views keep them.
const TWICE_MAX: usize = 64;

impl Pool {
    /// Finds what the range consists of, and whether it is to be gathered.
    pub(super) fn look_at_range(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let (has_base, kept) = (history.base.is_some(), history.kept[gather.partition]);
        let view = if history.is_live { Commit::MAX } else { kept };
        self.look_up_part(gather, RANGE_BLOCKS, view)?;
        let slots = (0..RANGE_BLOCKS).map(|block| self.slots.get(Slot::block(block as u16)));
        gather.versions.clear();
        gather.versions.extend(slots);
        let versions = gather.versions.iter().flatten();
        gather.commit = versions.clone().map(|version| version.commit).max().ok_or(Stop::Leave)?;
        let shows_base = has_base && gather.versions.contains(&None);
        let has_data = |version: &&Version| version.value != Value::Zero;
        let blocks = versions.clone().filter(has_data).count();
        let of_dense = |version: &&Version| matches!(version.value, Value::Dense { .. });
        let dense = versions.clone().filter(of_dense).count();
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let is_twice = |version: &&Version| {
            let first = history.first_from(gather.partition, version.commit);
            has_data(version) && first.is_some_and(|view| view < gather.commit)
        };
        let twice = versions.clone().filter(is_twice).count();
        let pieces = self.settings.pieces;
        let is_worn = dense > 0 && blocks - dense >= pieces.worn_min as usize;
        let has_space = self.is_roomy() && !self.is_short();
        let is_full = dense == 0 && blocks >= pieces.blocks_min as usize && has_space;
        if shows_base || twice > TWICE_MAX || !(is_worn || is_full) {
            return Err(Stop::Leave);
        }
        self.find_pieces(gather)?;
        if !is_worn && gather.pieces.len() < pieces.pieces_min as usize {
            return Err(Stop::Leave);
        }
        gather.data = Some(self.buffers.take(dense_header_len(self.facts.alignment) + RANGE_BLOCKS * BLOCK));
        gather.step = Step::Read;
        Ok(())
    }

    /// Finds the places and checksums of the blocks.
    fn find_pieces(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let header = dense_header_len(self.facts.alignment) / UNIT;
        let mut latest: Option<DenseKey> = None;
        gather.pieces.clear();
        gather.checksums.clear();
        for block in 0..RANGE_BLOCKS as usize {
            let value = gather.versions[block].map_or(Value::Zero, |version| version.value);
            let (blob, unit, crc) = match value {
                Value::Zero => {
                    gather.checksums.push(0);
                    continue;
                }
                Value::Block { place, crc } => (place.blob, u32::from(place.unit), crc),
                Value::Dense { place } => {
                    let life = self.keeper.life(place.blob).expect("the index refers to blobs in use");
                    let key = (place.blob, life, u32::from(place.unit));
                    let crc = self.dense.get(&key).map(|checksums| checksums[block]);
                    if crc.is_none() && latest != Some(key) {
                        latest = Some(key);
                        gather.waits += 1;
                        self.want_header(key, Waiter::Compactor);
                    }
                    let crc = crc.unwrap_or_default();
                    (place.blob, key.2 + header + block as u32 * BLOCK_UNITS, crc)
                }
            };
            gather.checksums.push(crc);
            let life = self.keeper.life(blob).expect("the index refers to blobs in use");
            match gather.pieces.last_mut() {
                Some(last)
                    if (last.blob, last.unit + last.blocks as u32 * BLOCK_UNITS) == (blob, unit)
                        && last.at + last.blocks == block
                        && last.blocks < READ_BLOCKS_MAX =>
                {
                    last.blocks += 1;
                }
                _ => gather.pieces.push(Piece { at: block, blocks: 1, blob, life, unit }),
            }
        }
        if gather.waits > 0 { Err(Stop::Wait) } else { Ok(()) }
    }

    pub(super) fn write_range(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let header = dense_header_len(self.facts.alignment);
        let len = header + RANGE_BLOCKS * BLOCK;
        let (blob, life, unit) = self.take_place(len, self.index_reserve() + 1).ok_or(Stop::Leave)?;
        gather.target = Some((blob, unit));
        let block = u64::from(gather.range) * u64::from(RANGE_BLOCKS);
        let mut data = gather.data.take().expect("the range was read");
        let (out, blocks) = data.bytes_mut()[..len as usize].split_at_mut(header as usize);
        let versions = gather.versions.iter().zip(blocks.chunks_exact_mut(BLOCK as usize));
        for ((at, (version, bytes)), crc) in (block..).zip(versions).zip(&mut gather.checksums) {
            if version.is_none_or(|version| version.value == Value::Zero) {
                bytes.fill(0);
                *crc = crate::checksum::of_block(at, bytes);
            }
        }
        let places = frame::checksums_mut(out, 1, RANGE_BLOCKS as usize).chunks_exact_mut(4);
        places.zip(&gather.checksums).for_each(|(place, crc)| place.copy_from_slice(&crc.to_le_bytes()));
        let record = Record {
            timeline: gather.timeline,
            partition: gather.partition as u8,
            kind: Kind::Dense,
            commit: gather.commit,
            block,
            blocks: RANGE_BLOCKS,
            data: 0,
        };
        let head =
            Head { uuid: self.keeper.manifest.uuid, life, sequence: 0, stream: NO_STREAM, unit, durable: 0 };
        frame::encode(out, &head, &[record], RANGE_BLOCKS);
        gather.step = Step::Write;
        self.stats.moved_write_bytes += u64::from(len);
        self.out.op(Owner::CompactWrite, StoreOp::Write { blob, unit, data, len });
        Err(Stop::Wait)
    }

    /// Makes the entry of the range, unless something came between.
    pub(super) fn insert_range(&mut self, gather: &mut Gather) -> Result<(), Stop> {
        let history = self.histories.get(gather.timeline).ok_or(Stop::Leave)?;
        let kept = history.kept[gather.partition];
        let view = history.first_from(gather.partition, gather.commit).ok_or(Stop::Leave)?;
        self.look_up_part(gather, RANGE_BLOCKS, view)?;
        let is_same = |(block, old): (u32, &Option<Version>)| {
            let now = self.slots.get(Slot::block(block as u16));
            // A merge under way may leave a newer zero out, which then would not hide the frame.
            let is_newer = |now: &Version| now.commit > gather.commit && now.value != Value::Zero;
            now == *old || now.as_ref().is_some_and(is_newer)
        };
        if (0..RANGE_BLOCKS).zip(&gather.versions).all(is_same) {
            let (blob, unit) = gather.target.expect("written");
            let key = IndexKey::new(gather.timeline, gather.range, Slot::RANGE, gather.commit);
            let value = Value::Dense { place: Place { blob, unit: unit as u16 } };
            self.partitions[gather.partition].index.insert(key, value, kept);
            self.jobs.fresh_entries += 1;
            gather.parts += 1;
            self.keeper.hold(blob, self.jobs.freezes + 1);
        }
        Err(Stop::Leave)
    }
}
