//! Records of the meta journal: a header and its payload. Any context.
//!
//! A record starts at a multiple of [`RECORD_ALIGN`] bytes of its area. The first record of an area is a checkpoint; its sequence
//! number is 0, and it begins a *generation*. Records of edits follow it. A record belongs to a generation of a pool and names
//! the record before it by checksum, so no record of the past, wherever it lies, is taken for a new one.

use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum;

/// Alignment of records in their area, in bytes.
pub const RECORD_ALIGN: u64 = 4096;
/// Bytes of a header, directly before the payload.
pub const HEADER_BYTES: usize = 64;
/// Longest payload of a record of edits.
pub(crate) const EDITS_BYTES_MAX: usize = 1 << 20;
/// Bytes of the length before each edit.
const LENGTH: usize = 4;

const MAGIC: [u8; 4] = *b"ARMJ";
const VERSION: u8 = 1;

/// What a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The whole state.
    Checkpoint = 1,
    /// Changes since the record before.
    Edits = 2,
    /// A copy of the manifest, which is in no area.
    Copy = 3,
}

/// A checked header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the record.
    pub kind: Kind,
    /// The pool that the record belongs to.
    pub pool: Uuid,
    /// The number of the checkpoint that the record is or follows, or of the copy.
    pub generation: u64,
    /// 0 for the checkpoint and for a copy, then one more for each record.
    pub sequence: u64,
    /// Of a checkpoint: the generation that has replaced it, or 0.
    pub successor: u64,
    /// Bytes of the payload.
    pub len: u32,
    /// CRC32C of the payload.
    pub payload: u32,
    /// [`Header::link`] of the record before. In a checkpoint that has been replaced, that of the last record of its generation;
    /// otherwise 0 in a checkpoint.
    pub previous: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    reserved: [u8; 2],
    pool: [u8; 16],
    generation: U64,
    sequence: U64,
    successor: U64,
    len: U32,
    payload: U32,
    previous: U32,
    checksum: U32,
}

const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);
const CHECKSUM_AT: usize = HEADER_BYTES - 4;

impl Header {
    /// A header for this payload.
    pub(crate) fn new(kind: Kind, pool: Uuid, generation: u64, payload: &[u8]) -> Self {
        Self {
            kind,
            pool,
            generation,
            sequence: 0,
            successor: 0,
            len: u32::try_from(payload.len()).expect("a payload below 4 GiB"),
            payload: checksum::of(&[payload]),
            previous: 0,
        }
    }

    /// The header of a checkpoint or a copy whose payload's checksum is not known yet.
    pub(crate) fn unsealed(kind: Kind, pool: Uuid, generation: u64, bytes: usize) -> Self {
        let len = u32::try_from(bytes).expect("a payload below 4 GiB");
        Self { len, payload: 0, ..Self::new(kind, pool, generation, &[]) }
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = Raw {
            magic: MAGIC,
            version: VERSION,
            kind: self.kind as u8,
            reserved: [0; 2],
            pool: self.pool.into_bytes(),
            generation: self.generation.into(),
            sequence: self.sequence.into(),
            successor: self.successor.into(),
            len: self.len.into(),
            payload: self.payload.into(),
            previous: self.previous.into(),
            checksum: 0.into(),
        };
        raw.checksum = checksum::of(&[&raw.as_bytes()[..CHECKSUM_AT]]).into();
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads a header from the start of `bytes`; `None` if there is none, or a damaged one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (raw, _) = Raw::read_from_prefix(bytes).ok()?;
        let kind = match raw.kind {
            1 => Kind::Checkpoint,
            2 => Kind::Edits,
            3 => Kind::Copy,
            _ => return None,
        };
        let is_ours = raw.magic == MAGIC
            && raw.version == VERSION
            && raw.checksum.get() == checksum::of(&[&bytes[..CHECKSUM_AT]])
            && (kind != Kind::Edits) == (raw.sequence.get() == 0);
        is_ours.then(|| Self {
            kind,
            pool: Uuid::from_bytes(raw.pool),
            generation: raw.generation.get(),
            sequence: raw.sequence.get(),
            successor: raw.successor.get(),
            len: raw.len.get(),
            payload: raw.payload.get(),
            previous: raw.previous.get(),
        })
    }

    /// Whether this is the payload of this record.
    pub fn is_of(&self, payload: &[u8]) -> bool {
        payload.len() == self.len as usize && checksum::of(&[payload]) == self.payload
    }

    /// What the next record has as [`Header::previous`]: independent of what is set when a checkpoint is replaced.
    pub fn link(&self) -> u32 {
        let previous = if self.kind == Kind::Checkpoint { 0 } else { self.previous };
        checksum::of(&[&Self { successor: 0, previous, ..*self }.encode()[..CHECKSUM_AT]])
    }

    /// Bytes of the record in its area.
    pub fn bytes(&self) -> u64 {
        record_bytes(self.len as usize)
    }
}

/// Bytes that a record with a payload of `len` bytes takes in its area.
pub(crate) fn record_bytes(len: usize) -> u64 {
    ((HEADER_BYTES + len) as u64).next_multiple_of(RECORD_ALIGN)
}

/// Adds an edit to the payload of a record, if there is room.
pub(crate) fn push_edit(payload: &mut Vec<u8>, edit: &[u8]) -> bool {
    let has_room = payload.len() + LENGTH + edit.len() <= EDITS_BYTES_MAX;
    if has_room {
        payload.extend_from_slice(&(edit.len() as u32).to_le_bytes());
        payload.extend_from_slice(edit);
    }
    has_room
}

/// The edits of a record's payload; `None` if the payload contradicts the format.
pub fn edits(mut payload: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut edits = Vec::new();
    while !payload.is_empty() {
        let (len, rest) = payload.split_first_chunk::<LENGTH>()?;
        let (edit, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        edits.push(edit.to_vec());
        payload = rest;
    }
    Some(edits)
}

#[cfg(test)]
mod tests;
