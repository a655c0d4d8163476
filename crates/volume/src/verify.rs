//! Comparing data with the index: which reads are needed for entries, and which blocks are wrong. Any context.

use crate::checksum;
use crate::frame::Frame;
use crate::manifest::BlobKind;
use crate::pool::Pool;
use crate::read::dense_header_len;
use crate::{BLOCK, BLOCK_UNITS, BlobId, RANGE_BLOCKS, StoreError};
use aryk_dma::Buffer;
use aryk_volume_index::{Entry, Key as IndexKey, Place, Value};

/// Blocks of one read.
const READ_BLOCKS: usize = 64;

/// What is wrong about an entry that refers to a place that cannot hold data.
pub(crate) const NO_DATA: &str = "an entry refers to a place that holds no data";

/// Data that is read at once, and the entries that refer to it: those of blocks in a row, or that of a dense frame.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) blob: BlobId,
    pub(crate) life: u64,
    pub(crate) unit: u32,
    pub(crate) len: u32,
    entries: Vec<Entry>,
}

/// Blocks of an entry that are not as the entry says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wrong {
    pub(crate) entry: Entry,
    pub(crate) block: u64,
    pub(crate) blocks: u32,
    pub(crate) what: &'static str,
}

impl Wrong {
    /// All blocks of an entry.
    pub(crate) const fn all(entry: Entry, what: &'static str) -> Self {
        let blocks = if entry.key.slot().is_range() { RANGE_BLOCKS } else { 1 };
        Self { entry, block: first_block(entry.key), blocks, what }
    }
}

/// The first block of a volume that an entry is about.
pub(crate) const fn first_block(key: IndexKey) -> u64 {
    key.range() as u64 * RANGE_BLOCKS as u64 + key.slot().get().saturating_sub(1) as u64
}

/// Where the data of an entry is; `None` for zeroes.
pub(crate) const fn place_of(value: &Value) -> Option<Place> {
    match value {
        Value::Block { place, .. } | Value::Dense { place } => Some(*place),
        Value::Zero => None,
    }
}

impl Pool {
    /// Whether the place to which an entry refers can hold data.
    pub(crate) fn can_hold_data(&self, value: &Value) -> bool {
        let Some((place, (blob, units))) = place_of(value).zip(value.reference()) else { return true };
        let is_known = self.keeper.manifest.blobs.get(blob).is_some_and(|blob| blob.kind != BlobKind::Index);
        is_known && u32::from(place.unit) + units <= self.facts.blob_units
    }

    /// The reads that verify the data of entries, in the order of its places. What they refer to can hold data.
    pub(crate) fn pieces(&self, entries: impl Iterator<Item = Entry>) -> Vec<Piece> {
        let mut placed: Vec<_> = entries.filter_map(|entry| Some((place_of(&entry.value)?, entry))).collect();
        placed.sort_unstable_by_key(|(place, _)| (place.blob, place.unit));
        let mut pieces: Vec<Piece> = Vec::new();
        for (Place { blob, unit }, entry) in placed {
            let unit = u32::from(unit);
            let is_dense = entry.key.slot().is_range();
            if let Some(last) = pieces.last_mut()
                && !is_dense
                && !last.entries[0].key.slot().is_range()
                && (last.blob, last.unit + last.entries.len() as u32 * BLOCK_UNITS) == (blob, unit)
                && last.entries.len() < READ_BLOCKS
            {
                last.entries.push(entry);
                last.len += BLOCK;
                continue;
            }
            let life = self.keeper.life(blob).expect("a blob in use");
            let header = if is_dense { dense_header_len(self.facts.alignment) } else { 0 };
            let blocks = if is_dense { RANGE_BLOCKS } else { 1 };
            let len = header + blocks * BLOCK;
            pieces.push(Piece { blob, life, unit, len, entries: vec![entry] });
        }
        pieces
    }

    /// Compares data with its entries. Returns how many blocks were compared, and those that are wrong.
    pub(crate) fn verify(
        &self,
        piece: &Piece,
        data: &Buffer,
        result: Result<(), StoreError>,
    ) -> (u64, Vec<Wrong>) {
        let what = if result.is_ok() { "data does not match its checksum" } else { "data cannot be read" };
        let all = || piece.entries.iter().map(|entry| Wrong::all(*entry, what)).collect();
        if result.is_err() {
            return (0, all());
        }
        let bytes = &data.bytes()[..piece.len as usize];
        let first = piece.entries[0];
        if !first.key.slot().is_range() {
            let is_wrong = |(entry, bytes): &(&Entry, &[u8])| {
                let Value::Block { crc, .. } = entry.value else { return true };
                checksum::of_block(first_block(entry.key), bytes) != crc
            };
            let blocks = piece.entries.iter().zip(bytes.chunks_exact(BLOCK as usize)).filter(is_wrong);
            return (piece.entries.len() as u64, blocks.map(|(entry, _)| Wrong::all(*entry, what)).collect());
        }
        let (header, bytes) = bytes.split_at(dense_header_len(self.facts.alignment) as usize);
        let head = |frame: &Frame<'_>| (frame.head().life, frame.head().unit, frame.data_blocks());
        let frame = Frame::parse(header).ok();
        let Some(frame) = frame.filter(|frame| head(frame) == (piece.life, piece.unit, RANGE_BLOCKS)) else {
            return (0, all());
        };
        let start = first_block(first.key);
        let blocks = (0..RANGE_BLOCKS).zip(bytes.chunks_exact(BLOCK as usize));
        let wrong = blocks.filter_map(|(at, bytes)| {
            let block = start + u64::from(at);
            let is_wrong = checksum::of_block(block, bytes) != frame.checksum(at);
            is_wrong.then_some(Wrong { entry: first, block, blocks: 1, what })
        });
        (u64::from(RANGE_BLOCKS), wrong.collect())
    }
}
