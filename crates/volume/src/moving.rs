//! Blocks that are moved, by the cleaner and by compaction: each keeps its key and its checksum. Any context.
//!
//! They are written in a row, in a frame that is no part of the log. Then each is looked up, at the oldest view that sees it, and
//! gets an entry with its new place if it is still seen at the old one. So a block that was written again meanwhile, or that
//! others have moved, is dead at its new place, and views see what they saw.

use crate::frame::{self, Head, Kind, NO_STREAM, Record};
use crate::pool::Pool;
use crate::read::Waiter;
use crate::{BLOCK_UNITS, BlobId, RANGE_BLOCKS, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::{Commit, Key as IndexKey, Place, Query, Slot, TimelineId, Value};

/// Blocks that are written at once.
pub(crate) const MOVED_MAX: u32 = 256;

/// A block that is moved, or a dense range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    pub(crate) record: Record,
    pub(crate) crc: u32,
    /// Where it was: the block, or the dense frame.
    pub(crate) old: Place,
    /// Which block of the moved data it is.
    pub(crate) at: u32,
}

impl Pool {
    /// The oldest view that sees a commit, if any does and no newer version hides it.
    pub(crate) fn first_view(
        &self,
        timeline: TimelineId,
        partition: usize,
        commit: Commit,
    ) -> Option<Commit> {
        self.histories.get(timeline)?.first_from(partition, commit)
    }

    /// Looks up slots of a record's range, into `slots`. An error is the number of pages for which `waiter` waits.
    pub(crate) fn look_up(
        &mut self,
        record: &Record,
        first: Slot,
        count: u32,
        view: Commit,
        waiter: Waiter,
    ) -> Result<(), u32> {
        let range = (record.block / u64::from(RANGE_BLOCKS)) as u32;
        let query = Query { timeline: record.timeline, range, first, count: count as u16, view };
        let index = &self.partitions[usize::from(record.partition)].index;
        index.lookup(&self.cache, &query, &mut self.slots).map_err(|need| self.want_pages(&need, waiter))
    }

    /// Makes the header of a frame at this unit of the blob's life. The moved blocks are behind it, in their order.
    pub(crate) fn encode_moved(&self, data: &mut Buffer, all: &[Moved], life: u64, unit: u32) {
        let mut records: Vec<Record> = Vec::new();
        for moved in all {
            match records.last_mut() {
                Some(last) if is_next(last, &moved.record) => last.blocks += 1,
                _ => records.push(Record { data: moved.at, ..moved.record }),
            }
        }
        let out = &mut data.bytes_mut()[..moved_header_len(self.facts.alignment) as usize];
        let checksums = frame::checksums_mut(out, records.len(), all.len());
        for (bytes, moved) in checksums.chunks_exact_mut(4).zip(all) {
            bytes.copy_from_slice(&moved.crc.to_le_bytes());
        }
        let head =
            Head { uuid: self.keeper.manifest.uuid, life, sequence: 0, stream: NO_STREAM, unit, durable: 0 };
        frame::encode(out, &head, &records, all.len() as u32);
    }

    /// Makes the entry of what was moved to the frame at `target`, if a view still sees it at its old place. An error is the
    /// number of pages for which `waiter` waits.
    pub(crate) fn insert_entry(
        &mut self,
        moved: &Moved,
        (blob, unit): (BlobId, u32),
        waiter: Waiter,
    ) -> Result<(), u32> {
        let record = moved.record;
        let partition = usize::from(record.partition);
        let slot = match record.kind {
            Kind::Dense => Slot::RANGE,
            _ => Slot::block((record.block % u64::from(RANGE_BLOCKS)) as u16),
        };
        let Some(view) = self.first_view(record.timeline, partition, record.commit) else { return Ok(()) };
        self.look_up(&record, slot, 1, view, waiter)?;
        let (old, new) = match record.kind {
            Kind::Dense => {
                let place = Place { blob, unit: unit as u16 };
                (Value::Dense { place: moved.old }, Value::Dense { place })
            }
            _ => {
                let unit = unit + moved_header_len(self.facts.alignment) / UNIT + moved.at * BLOCK_UNITS;
                let (crc, place) = (moved.crc, Place { blob, unit: unit as u16 });
                (Value::Block { place: moved.old, crc }, Value::Block { place, crc })
            }
        };
        if self.slots.get(slot).is_some_and(|version| version.commit == record.commit && version.value == old)
        {
            let kept = self.histories.get(record.timeline).expect("it has a view").kept[partition];
            let range = (record.block / u64::from(RANGE_BLOCKS)) as u32;
            let key = IndexKey::new(record.timeline, range, slot, record.commit);
            self.partitions[partition].index.insert(key, new, kept);
            self.jobs.fresh_entries += 1;
            self.keeper.hold(blob, self.jobs.freezes + 1);
        }
        Ok(())
    }
}

/// Bytes of the header of frames with moved blocks: room for as many records as blocks.
pub(crate) fn moved_header_len(alignment: u32) -> u32 {
    frame::header_bytes(MOVED_MAX as usize, MOVED_MAX as usize, alignment)
}

/// Whether a moved block belongs to the same record: the next block of the same commit, in the same range.
fn is_next(last: &Record, next: &Record) -> bool {
    (last.timeline, last.commit, last.block + u64::from(last.blocks))
        == (next.timeline, next.commit, next.block)
        && !next.block.is_multiple_of(u64::from(RANGE_BLOCKS))
}
