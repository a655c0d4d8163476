//! Frames: the one format of all data in blobs. Any context.
//!
//! A frame is a header, padded to the store's alignment, and data blocks of 4 KiB. The header describes itself: a check that has
//! lost the index finds it again in the headers. All integers are little-endian.
//!
//! | offset | bytes | field |
//! | ---: | ---: | --- |
//! | 0 | 4 | magic `AVF1` |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | units (512 bytes) of the header |
//! | 8 | 16 | UUID of the pool |
//! | 24 | 8 | life of the blob |
//! | 32 | 8 | sequence: counts the frames of a log stream; 0 in a data blob |
//! | 40 | 4 | log stream; 0xffff_ffff in a data blob |
//! | 44 | 4 | data blocks |
//! | 48 | 4 | unit of the blob at which the frame begins |
//! | 52 | 2 | records |
//! | 54 | 2 | zero |
//! | 56 | 8 | sequence of the log's first frame that may not have been durable when this one was written; 0 in a data blob |
//! | 64 | 32 each | records |
//! | | 4 each | checksums of the data blocks (CRC32C, mixed with the number of the block in its volume) |
//! | | | zero |
//! | end − 4 | 4 | CRC32C of the header before |
//!
//! A record: timeline (4), partition (1), kind (1), zero (2), commit (8), first block (8), blocks (4), number of the first of its
//! data blocks in the frame (4).

use crate::{BLOCK_UNITS, Commit, PARTITIONS, TimelineId, UNIT, checksum};

const MAGIC: [u8; 4] = *b"AVF1";
const VERSION: u16 = 1;
const FIXED: usize = 64;
const RECORD: usize = 32;

/// The stream of frames in data blobs.
pub const NO_STREAM: u32 = u32::MAX;

/// What a record says about its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// The frame has their data.
    Data = 0,
    /// They read as zeroes.
    Zero = 1,
    /// All ranges of the partition between the first block and the end read as zeroes. Both are multiples of a range.
    ZeroRanges = 2,
    /// As `Data`: a whole range, which the index finds by its header.
    Dense = 3,
}

/// Blocks of a timeline that one commit has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The timeline.
    pub timeline: TimelineId,
    /// The partition that owns the blocks.
    pub partition: u8,
    /// What happened to the blocks.
    pub kind: Kind,
    /// The commit.
    pub commit: Commit,
    /// The first block of the volume.
    pub block: u64,
    /// The number of blocks.
    pub blocks: u32,
    /// The number of the first data block in the frame.
    pub data: u32,
}

impl Record {
    /// The number of data blocks in the frame.
    pub const fn data_blocks(&self) -> u32 {
        match self.kind {
            Kind::Data | Kind::Dense => self.blocks,
            Kind::Zero | Kind::ZeroRanges => 0,
        }
    }
}

/// What a frame's header says besides its records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The pool.
    pub uuid: [u8; 16],
    /// The life of the blob.
    pub life: u64,
    /// The number of the frame in its stream.
    pub sequence: u64,
    /// The log stream.
    pub stream: u32,
    /// The unit of the blob at which the frame begins.
    pub unit: u32,
    /// All frames of the log below this sequence were durable when the frame was written.
    pub durable: u64,
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// They are too few.
    #[error("the frame is cut off")]
    Short,
    /// They do not begin with the magic.
    #[error("there is no frame")]
    Magic,
    /// The version is newer.
    #[error("the frame has version {0}")]
    Version(u16),
    /// The header's checksum is wrong.
    #[error("the header of a frame is damaged")]
    Checksum,
    /// A field has a value that is not allowed.
    #[error("the header of a frame has a wrong field")]
    Field,
}

/// The bytes of a header for this many records and data blocks.
pub fn header_bytes(records: usize, data_blocks: usize, alignment: u32) -> u32 {
    ((FIXED + records * RECORD + data_blocks * 4 + 4) as u32).next_multiple_of(alignment)
}

/// Writes a header to the start of `out`, all of whose bytes are the header's. The checksums are there already
/// ([`checksums_mut`]).
///
/// # Panics
/// If `out` does not have the length that [`header_bytes`] returned.
pub fn encode(out: &mut [u8], head: &Head, records: &[Record], data_blocks: u32) {
    let used = FIXED + records.len() * RECORD + data_blocks as usize * 4;
    assert!(
        used + 4 <= out.len() && out.len().is_multiple_of(UNIT as usize),
        "{used} bytes in a header of {}",
        out.len()
    );
    out[0..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    let units = (out.len() / UNIT as usize) as u16;
    out[6..8].copy_from_slice(&units.to_le_bytes());
    out[8..24].copy_from_slice(&head.uuid);
    out[24..32].copy_from_slice(&head.life.to_le_bytes());
    out[32..40].copy_from_slice(&head.sequence.to_le_bytes());
    out[40..44].copy_from_slice(&head.stream.to_le_bytes());
    out[44..48].copy_from_slice(&data_blocks.to_le_bytes());
    out[48..52].copy_from_slice(&head.unit.to_le_bytes());
    out[52..54].copy_from_slice(&(records.len() as u16).to_le_bytes());
    out[54..56].fill(0);
    out[56..64].copy_from_slice(&head.durable.to_le_bytes());
    for (record, bytes) in records.iter().zip(out[FIXED..].chunks_exact_mut(RECORD)) {
        bytes[0..4].copy_from_slice(&record.timeline.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&[record.partition, record.kind as u8, 0, 0]);
        bytes[8..16].copy_from_slice(&record.commit.get().to_le_bytes());
        bytes[16..24].copy_from_slice(&record.block.to_le_bytes());
        bytes[24..28].copy_from_slice(&record.blocks.to_le_bytes());
        bytes[28..32].copy_from_slice(&record.data.to_le_bytes());
    }
    let end = out.len() - 4;
    out[used..end].fill(0);
    seal(out);
}

/// The bytes of a header that hold the checksums of the data blocks.
pub fn checksums_mut(header: &mut [u8], records: usize, data_blocks: usize) -> &mut [u8] {
    &mut header[FIXED + records * RECORD..][..data_blocks * 4]
}

/// The checksum of a data block in a header that this process has encoded.
pub(crate) fn checksum_in(header: &[u8], records: usize, data_block: u32) -> u32 {
    u32_at(header, FIXED + records * RECORD + data_block as usize * 4)
}

/// Gives a header, with all else unchanged, to another place.
pub fn relocate(header: &mut [u8], life: u64, unit: u32) {
    header[24..32].copy_from_slice(&life.to_le_bytes());
    header[48..52].copy_from_slice(&unit.to_le_bytes());
    seal(header);
}

fn seal(header: &mut [u8]) {
    let end = header.len() - 4;
    let crc = checksum::of(&header[..end]);
    header[end..].copy_from_slice(&crc.to_le_bytes());
}

/// A header that was verified.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    header: &'a [u8],
    records: usize,
    data_blocks: usize,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl<'a> Frame<'a> {
    /// The bytes of the header that begins with `bytes`, of which one unit is enough.
    pub fn header_len(bytes: &[u8]) -> Result<usize, FrameError> {
        if bytes.len() < UNIT as usize {
            return Err(FrameError::Short);
        }
        if bytes[..4] != MAGIC {
            return Err(FrameError::Magic);
        }
        match u16_at(bytes, 4) {
            VERSION => {}
            other => return Err(FrameError::Version(other)),
        }
        match u16_at(bytes, 6) {
            0 => Err(FrameError::Field),
            units => Ok(usize::from(units) * UNIT as usize),
        }
    }

    /// Whether `bytes`, of which one unit is there, name this pool, life and unit as a header does. A VM does not know the UUID
    /// of its pool.
    pub(crate) fn is_named(bytes: &[u8], uuid: &[u8; 16], life: u64, unit: u32) -> bool {
        bytes[8..24] == *uuid && u64_at(bytes, 24) == life && u32_at(bytes, 48) == unit
    }

    /// Verifies the header at the start of `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let header = bytes.get(..Self::header_len(bytes)?).ok_or(FrameError::Short)?;
        let end = header.len() - 4;
        if checksum::of(&header[..end]) != u32_at(header, end) {
            return Err(FrameError::Checksum);
        }
        let frame = Self {
            header,
            records: usize::from(u16_at(header, 52)),
            data_blocks: u32_at(header, 44) as usize,
        };
        let used = frame.data_blocks.checked_mul(4).map(|crcs| FIXED + frame.records * RECORD + crcs);
        if used.is_none_or(|used| used > end) {
            return Err(FrameError::Field);
        }
        let mut data = 0;
        for index in 0..frame.records {
            let record = frame.try_record(index).ok_or(FrameError::Field)?;
            if record.data != data {
                return Err(FrameError::Field);
            }
            data += record.data_blocks();
        }
        if data as usize == frame.data_blocks { Ok(frame) } else { Err(FrameError::Field) }
    }

    /// What the header says besides its records.
    pub fn head(&self) -> Head {
        Head {
            uuid: self.header[8..24].try_into().expect("16 bytes"),
            life: u64_at(self.header, 24),
            sequence: u64_at(self.header, 32),
            stream: u32_at(self.header, 40),
            unit: u32_at(self.header, 48),
            durable: u64_at(self.header, 56),
        }
    }

    /// Units of the header.
    pub const fn header_units(&self) -> u32 {
        self.header.len() as u32 / UNIT
    }

    /// Units of the whole frame.
    pub const fn units(&self) -> u32 {
        self.header_units() + self.data_blocks as u32 * BLOCK_UNITS
    }

    /// The number of data blocks.
    pub const fn data_blocks(&self) -> u32 {
        self.data_blocks as u32
    }

    /// The records.
    pub fn records(&self) -> impl Iterator<Item = Record> + use<'a> {
        let frame = *self;
        (0..self.records).map(move |index| frame.try_record(index).expect("verified by `parse`"))
    }

    /// The checksum of a data block.
    pub fn checksum(&self, data_block: u32) -> u32 {
        u32_at(self.header, FIXED + self.records * RECORD + data_block as usize * 4)
    }

    /// The checksums of all data blocks, as bytes.
    pub fn checksums(&self) -> &'a [u8] {
        &self.header[FIXED + self.records * RECORD..][..self.data_blocks * 4]
    }

    fn try_record(&self, index: usize) -> Option<Record> {
        let bytes = &self.header[FIXED + index * RECORD..][..RECORD];
        let kind = match bytes[5] {
            0 => Kind::Data,
            1 => Kind::Zero,
            2 => Kind::ZeroRanges,
            3 => Kind::Dense,
            _ => return None,
        };
        let record = Record {
            timeline: TimelineId(u32_at(bytes, 0)),
            partition: bytes[4],
            kind,
            commit: Commit::new(u64_at(bytes, 8))?,
            block: u64_at(bytes, 16),
            blocks: u32_at(bytes, 24),
            data: u32_at(bytes, 28),
        };
        let fits = usize::from(record.partition) < PARTITIONS
            && record.blocks > 0
            && record.block < 1 << 42
            && record.data_blocks() <= self.data_blocks as u32;
        let ranges = u64::from(crate::RANGE_BLOCKS);
        let aligned = record.block.is_multiple_of(ranges) && u64::from(record.blocks).is_multiple_of(ranges);
        let whole = match kind {
            Kind::Data | Kind::Zero => true,
            Kind::ZeroRanges => aligned,
            Kind::Dense => aligned && u64::from(record.blocks) == ranges,
        };
        (fits && whole).then_some(record)
    }
}

#[cfg(test)]
mod tests;
