//! Recovery: the tail of the log is read into the memtables. Any context.
//!
//! The chain of frames goes on with the expected sequence: in the same blob behind the frame before, or at the start of a later
//! blob of the list (which may begin with frames again that the blob before has, too). It ends where there is no such frame. Data
//! is verified, because a frame may be torn. The pool then begins a new life: fresh blobs for the log, so that nothing is written
//! where the old life may have written.

use crate::frame::{Frame, Kind, Record};
use crate::keeper::Then;
use crate::log::STREAM;
use crate::manifest::{BlobKind, Edit, LogTail, Manifest};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::{BLOCK, BLOCK_UNITS, BlobId, StoreError, StoreOp, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::Place;

/// Bytes of one read.
const READ_BYTES: u32 = 1 << 20;

/// The state of recovery.
#[derive(Debug)]
pub(crate) struct Recovery {
    /// The blobs of the list that were not read.
    blobs: Vec<BlobId>,
    /// The blob that is being read.
    blob: Option<BlobId>,
    /// The unit in it of the first byte of `bytes`.
    unit: u32,
    bytes: Vec<u8>,
    /// The sequence of the next frame.
    sequence: u64,
    /// Whether a frame of the blob belonged to the chain.
    has_frames: bool,
    /// The blobs with frames of the chain.
    used: Vec<BlobId>,
    is_reading: bool,
    replayed_bytes: u64,
}

/// What the bytes at the next frame's place are.
enum Next {
    /// The next frame of the chain, of this many bytes.
    Frame(usize),
    /// More bytes are needed to tell.
    More,
    /// Not the next frame of the chain.
    End,
}

impl Recovery {
    pub(crate) fn new(manifest: &Manifest) -> Self {
        Self {
            blobs: manifest.log.blobs.iter().rev().copied().collect(),
            blob: None,
            unit: manifest.log.unit,
            bytes: Vec::new(),
            sequence: manifest.log.sequence,
            has_frames: false,
            used: Vec::new(),
            is_reading: false,
            replayed_bytes: 0,
        }
    }

    fn next(&self, manifest: &Manifest, blob: BlobId, blob_units: u32) -> Next {
        let left = (blob_units - self.unit) as usize * UNIT as usize;
        let needs = |len: usize| if len <= left { Next::More } else { Next::End };
        let len = match Frame::header_len(&self.bytes) {
            Ok(len) if len <= self.bytes.len() => len,
            Ok(len) => return needs(len),
            Err(crate::frame::FrameError::Short) => return needs(UNIT as usize),
            Err(_) => return Next::End,
        };
        let Ok(frame) = Frame::parse(&self.bytes[..len]) else { return Next::End };
        let (head, life) = (frame.head(), manifest.blobs.get(blob).map(|blob| blob.life));
        let is_next =
            if self.has_frames { head.sequence == self.sequence } else { head.sequence <= self.sequence };
        if head.uuid != manifest.uuid
            || Some(head.life) != life
            || head.stream != STREAM
            || head.unit != self.unit
            || !is_next
        {
            return Next::End;
        }
        let total = frame.units() as usize * UNIT as usize;
        let Some(data) = self.bytes.get(len..total) else { return needs(total) };
        let is_right = |record: Record| {
            (0..record.data_blocks()).all(|at| {
                let bytes = &data[((record.data + at) * BLOCK) as usize..][..BLOCK as usize];
                crate::checksum::of_block(record.block + u64::from(at), bytes)
                    == frame.checksum(record.data + at)
            })
        };
        if frame.records().all(is_right) { Next::Frame(total) } else { Next::End }
    }
}

impl Pool {
    /// Goes on with recovery.
    pub(crate) fn recover(&mut self) {
        let Some(mut recovery) = self.recovery.take() else { return };
        if recovery.is_reading || self.state != crate::State::Opening {
            self.recovery = Some(recovery);
            return;
        }
        loop {
            let Some(blob) = recovery.blob else {
                let Some(next) = recovery.blobs.pop() else { return self.recovered(&recovery) };
                recovery.blob = Some(next);
                recovery.has_frames = false;
                continue;
            };
            match recovery.next(&self.keeper.manifest, blob, self.facts.blob_units) {
                Next::Frame(len) => {
                    self.replay(&mut recovery, blob, len);
                    recovery.bytes.drain(..len);
                    recovery.unit += len as u32 / UNIT;
                }
                Next::More => break self.read_more(&mut recovery, blob),
                Next::End => {
                    if recovery.has_frames {
                        recovery.used.push(blob);
                    }
                    recovery.blob = None;
                    recovery.unit = 0;
                    recovery.bytes.clear();
                }
            }
        }
        self.recovery = Some(recovery);
    }

    fn read_more(&mut self, recovery: &mut Recovery, blob: BlobId) {
        let unit = recovery.unit + recovery.bytes.len() as u32 / UNIT;
        let len = ((self.facts.blob_units - unit) * UNIT).min(READ_BYTES);
        let data = self.buffers.take(len);
        recovery.is_reading = true;
        self.stats.background_read_bytes += u64::from(len);
        self.out.op(Owner::Recovery { len }, StoreOp::Read { blob, unit, data, len });
    }

    pub(crate) fn recovery_answered(&mut self, len: u32, data: Buffer, result: Result<(), StoreError>) {
        if let Some(recovery) = &mut self.recovery {
            recovery.is_reading = false;
            recovery.bytes.extend_from_slice(&data.bytes()[..len as usize]);
        }
        self.buffers.give(data);
        if let Err(error) = result {
            self.fail(error);
        }
        self.recover();
    }

    /// Adds the entries of a frame that are not in the levels.
    fn replay(&mut self, recovery: &mut Recovery, blob: BlobId, len: usize) {
        let frame = Frame::parse(&recovery.bytes[..len]).expect("verified");
        let sequence = frame.head().sequence;
        recovery.has_frames |= sequence == recovery.sequence;
        recovery.replayed_bytes += len as u64;
        if sequence < recovery.sequence {
            return;
        }
        recovery.sequence += 1;
        let place = Place { blob, unit: recovery.unit as u16 };
        let data = recovery.unit + frame.header_units();
        for record in frame.records() {
            let number = usize::from(record.partition);
            let commit = record.commit.get();
            let partition = &mut self.partitions[number];
            partition.next = partition.next.max(commit + 1);
            partition.readable = partition.next - 1;
            if commit <= self.keeper.manifest.partitions[number].flushed || self.is_strange(&record) {
                continue;
            }
            let block = |at: u32| {
                let unit = (data + (record.data + at) * BLOCK_UNITS) as u16;
                (Place { blob, unit }, frame.checksum(record.data + at))
            };
            self.insert(&record, place, block);
        }
    }

    /// Whether a record does not fit its partition: blocks that another one owns.
    fn is_strange(&self, record: &Record) -> bool {
        let range = u64::from(crate::RANGE_BLOCKS);
        let end = record.block + u64::from(record.blocks) - 1;
        let is_split = record.kind != Kind::ZeroRanges && record.block / range != end / range;
        is_split || self.partition_of(record.timeline, record.block) != usize::from(record.partition)
    }

    fn recovered(&mut self, recovery: &Recovery) {
        self.log.next_sequence = recovery.sequence;
        self.log.written_bytes = recovery.replayed_bytes;
        self.keeper.log_blobs = recovery.used.iter().copied().collect();
        self.begin_writing();
    }

    /// Begins a life of the pool: the log gets its first blobs.
    pub(crate) fn begin_writing(&mut self) {
        self.cleaner.is_due = true;
        let opening = self.keeper.manifest.opening + 1;
        self.keeper.edit(Edit::Opened { opening });
        let old = self.keeper.manifest.log.clone();
        let spares: Vec<_> = self.keeper.allocate(BlobKind::Log, 0).into_iter().collect();
        // The tail begins where it began, unless its first blob has no frame of it.
        let (sequence, unit) = match self.keeper.log_blobs.front() {
            Some(first) if old.blobs.first() == Some(first) => (old.sequence, old.unit),
            Some(_) => (old.sequence, 0),
            None => (self.log.next_sequence, 0),
        };
        self.keeper.log_blobs.extend(spares.iter().map(|(blob, _)| *blob));
        let blobs = self.keeper.log_blobs.iter().copied().collect();
        self.keeper.edit(Edit::Log(LogTail { sequence, unit, blobs }));
        old.blobs.into_iter().for_each(|blob| self.keeper.add_candidate(blob));
        if !spares.is_empty() {
            self.keeper.commit(Then::LogBlobs(spares));
            self.log.has_asked = true;
        }
        self.keeper.commit(Then::Opened);
    }
}
