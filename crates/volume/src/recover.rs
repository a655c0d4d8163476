//! Recovery: the tail of the log is read into the memtables. Any context.
//!
//! The chain of frames goes on with the expected sequence: in the same blob behind the frame before, or at the start of a later
//! blob of the list (which may begin with frames again that the blob before has, too). It ends where there is no such frame. Data
//! is verified, because a frame may be torn. The pool then begins a new life: fresh blobs for the log, so that nothing is written
//! where the old life may have written.
//!
//! A loss of power leaves any part of what was not durable, so intact frames behind the end prove nothing by themselves. But each
//! frame says which frames were durable when it was written. If that includes the one that is missing at the end of the chain,
//! the log is damaged: the pool is not opened ([`State::Damaged`]), because it would lose durable writes.

use crate::frame::{Frame, Kind, Record};
use crate::keeper::Then;
use crate::log::STREAM;
use crate::manifest::{BlobKind, Edit, LogTail, Manifest};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::{BLOCK, BLOCK_UNITS, BlobId, LogPlace, State, StoreError, StoreOp, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::Place;

/// Bytes of one read, and of the smallest one: around a place that cannot be read, reads become shorter.
const READ_BYTES: u32 = 1 << 20;
const READ_BYTES_MIN: u32 = BLOCK;
/// Units without a frame after which the search behind the chain's end leaves a blob: more than the largest frame has.
const SEARCH_UNITS: u32 = (8 << 20) / UNIT;

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
    /// Where the chain ended in each blob that was read, and the life of the blob.
    ends: Vec<(LogPlace, u64)>,
    search: Option<Search>,
    /// The blob that is being searched.
    searched: Option<BlobId>,
    is_reading: bool,
    /// Bytes of the next read.
    read_bytes: u32,
    replayed_bytes: u64,
}

/// The search for frames behind the end of the chain.
#[derive(Debug)]
struct Search {
    /// Where the missing frame should be.
    end: LogPlace,
    /// Places to search from.
    places: Vec<(LogPlace, u64)>,
    life: u64,
    /// The unit behind the last frame that was found.
    last: u32,
}

/// What a search has found.
enum Found {
    /// A frame that was written when the missing one was durable.
    Proof,
    /// More bytes are needed to tell.
    More,
    /// Nothing in this blob.
    Nothing,
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
            ends: Vec::new(),
            search: None,
            searched: None,
            is_reading: false,
            read_bytes: READ_BYTES,
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

    /// The search behind the end of the chain. Blobs of earlier openings are left out: the opening that followed has decided what
    /// is in the chain.
    fn search(&self) -> Option<Search> {
        let place_of = |blob: &BlobId| self.ends.iter().position(|(end, _)| end.blob == *blob);
        let last = self.used.last().and_then(place_of).unwrap_or(0);
        let (end, life) = *self.ends.get(last)?;
        let is_later = |place: &&(LogPlace, u64)| place.1 >> 32 >= life >> 32;
        let places = self.ends[last..].iter().filter(is_later).rev().copied().collect();
        Some(Search { end, places, life, last: 0 })
    }

    /// Looks at the bytes of a blob behind the chain's end.
    fn look(&mut self, uuid: &[u8; 16], life: u64, last: &mut u32, facts: &crate::StoreFacts) -> Found {
        let mut at = 0;
        let found = loop {
            let unit = self.unit + (at / UNIT as usize) as u32;
            let bytes = &self.bytes[at..];
            if unit >= facts.blob_units || unit - *last > SEARCH_UNITS {
                break Found::Nothing;
            }
            if bytes.len() < UNIT as usize {
                break Found::More;
            }
            let mut next = at + facts.alignment as usize;
            if let Ok(len) = Frame::header_len(bytes)
                && Frame::is_named(bytes, uuid, life, unit)
                && len <= (facts.blob_units - unit) as usize * UNIT as usize
            {
                if bytes.len() < len {
                    break Found::More;
                }
                if let Ok(frame) = Frame::parse(bytes) {
                    if frame.head().stream == STREAM && frame.head().durable > self.sequence {
                        break Found::Proof;
                    }
                    *last = unit + frame.units();
                    next = at + frame.units() as usize * UNIT as usize;
                }
            }
            if next > self.bytes.len() {
                // Nothing of what follows up to there is of interest.
                self.unit += (next / UNIT as usize) as u32;
                self.bytes.clear();
                return if self.unit < facts.blob_units { Found::More } else { Found::Nothing };
            }
            at = next;
        };
        self.unit += (at / UNIT as usize) as u32;
        self.bytes.drain(..at);
        found
    }
}

impl Pool {
    /// Goes on with recovery.
    pub(crate) fn recover(&mut self) {
        let Some(mut recovery) = self.recovery.take() else { return };
        if recovery.is_reading || self.state != State::Opening {
            self.recovery = Some(recovery);
            return;
        }
        loop {
            let Some(blob) = recovery.blob else {
                let Some(next) = recovery.blobs.pop() else {
                    if self.search(&mut recovery) {
                        break;
                    }
                    return self.recovered(&recovery);
                };
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
                    if let Some(life) = self.keeper.life(blob) {
                        recovery.ends.push((LogPlace { blob, unit: recovery.unit }, life));
                    }
                    if recovery.has_frames {
                        recovery.used.push(blob);
                    }
                    recovery.blob = None;
                    recovery.unit = 0;
                    recovery.bytes.clear();
                }
            }
        }
        if self.state == State::Opening {
            self.recovery = Some(recovery);
        }
    }

    /// Goes on with the search behind the end of the chain. Returns whether it waits for bytes, or has found damage.
    fn search(&mut self, recovery: &mut Recovery) -> bool {
        let Some(mut search) = recovery.search.take().or_else(|| recovery.search()) else { return false };
        loop {
            let Some(blob) = recovery.searched else {
                let Some((place, life)) = search.places.pop() else { return false };
                (recovery.searched, recovery.unit, search.life) = (Some(place.blob), place.unit, life);
                search.last = place.unit;
                continue;
            };
            let uuid = self.keeper.manifest.uuid;
            match recovery.look(&uuid, search.life, &mut search.last, &self.facts) {
                Found::Nothing => {
                    recovery.searched = None;
                    recovery.bytes.clear();
                }
                Found::More => {
                    self.read_more(recovery, blob);
                    recovery.search = Some(search);
                    return true;
                }
                Found::Proof => {
                    self.log_damage = Some(search.end);
                    if self.settings.accepts_damaged_log {
                        return false;
                    }
                    self.opened(State::Damaged(search.end));
                    return true;
                }
            }
        }
    }

    fn read_more(&mut self, recovery: &mut Recovery, blob: BlobId) {
        let unit = recovery.unit + recovery.bytes.len() as u32 / UNIT;
        let len = ((self.facts.blob_units - unit) * UNIT).min(recovery.read_bytes);
        let data = self.buffers.take(len);
        recovery.is_reading = true;
        self.stats.background_read_bytes += u64::from(len);
        self.out.op(Owner::Recovery { len }, StoreOp::Read { blob, unit, data, len });
    }

    pub(crate) fn recovery_answered(&mut self, len: u32, data: Buffer, result: Result<(), StoreError>) {
        if let Some(recovery) = &mut self.recovery {
            recovery.is_reading = false;
            if result.is_ok() {
                recovery.bytes.extend_from_slice(&data.bytes()[..len as usize]);
                recovery.read_bytes = (2 * recovery.read_bytes).min(READ_BYTES);
            }
        }
        self.buffers.give(data);
        match (&mut self.recovery, result) {
            // The place that cannot be read may lie behind the end of the chain.
            (Some(recovery), Err(StoreError::Medium)) if len > READ_BYTES_MIN => {
                recovery.read_bytes = (recovery.read_bytes / 4).max(READ_BYTES_MIN);
            }
            // Nothing that is needed is lost behind the end of the chain.
            (Some(Recovery { search: Some(_), searched, bytes, .. }), Err(StoreError::Medium)) => {
                bytes.clear();
                *searched = None;
            }
            (_, Err(error)) => self.fail(error),
            (_, Ok(())) => {}
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
    pub(crate) fn is_strange(&self, record: &Record) -> bool {
        let range = u64::from(crate::RANGE_BLOCKS);
        let end = record.block + u64::from(record.blocks) - 1;
        let is_split = record.kind != Kind::ZeroRanges && record.block / range != end / range;
        is_split || self.partition_of(record.timeline, record.block) != usize::from(record.partition)
    }

    fn recovered(&mut self, recovery: &Recovery) {
        self.log.next_sequence = recovery.sequence;
        self.log.written_bytes = recovery.replayed_bytes;
        self.compactor.excuse(recovery.replayed_bytes);
        self.keeper.log_blobs = recovery.used.iter().copied().collect();
        self.begin_writing();
    }

    /// Begins a life of the pool: the log gets its first blobs.
    pub(crate) fn begin_writing(&mut self) {
        self.cleaner.is_due = true;
        self.resume_writers();
        if self.is_short() {
            // The cleaner of the opening before may have emptied blobs.
            self.merge_all_levels();
        }
        let opening = self.keeper.manifest.opening + 1;
        self.keeper.edit(Edit::Opened { opening });
        self.follow_timelines();
        let old = self.keeper.manifest.log.clone();
        let reserve = self.opening_reserve();
        let spares: Vec<_> = self.keeper.allocate(BlobKind::Log, reserve).into_iter().collect();
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
