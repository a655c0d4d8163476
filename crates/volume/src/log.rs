//! The log stream: frames of fresh writes, committed in groups, acknowledged in order. Any context.
//!
//! Parts of requests wait in a queue; the end of a turn puts as many as fit into a frame. Several frames are in flight. A frame's
//! parts are passed on when it and all frames before it are written. If a frame cannot be written, it and all later ones are
//! written again in a fresh blob, with the same sequences: recovery finds the chain's continuation at the start of a later blob.

use crate::frame::{self, Head, Kind, Record};
use crate::outbox::{Outbox, Owner};
use crate::{BLOCK, BLOCK_UNITS, BlobId, Settings, StoreOp, UNIT};
use aryk_dma::Buffer;
use aryk_slots::Key;
use std::collections::VecDeque;

/// The only stream so far.
pub(crate) const STREAM: u32 = 0;

/// Index entries of one frame, so that no turn inserts too many.
const FRAME_ENTRIES_MAX: u64 = 8192;

/// Blocks that are copied before their checksums are computed, while the processor's nearest cache has them.
const COPIED_BLOCKS: u32 = 8;

/// Where a part's data is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// There is none.
    Nothing,
    /// In the request's memory, from this byte on.
    Memory(u32),
    /// In the request's buffer for its first (0) or last (1) block.
    Edge(usize),
}

/// What one commit writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) request: Key,
    pub(crate) record: Record,
    pub(crate) source: Source,
    /// Index entries of the part.
    pub(crate) entries: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameState {
    Writing,
    Done,
    /// It could not be written, or a frame before it: it is written again when all later frames are answered.
    Failed,
}

/// A frame in flight.
#[derive(Debug)]
pub(crate) struct LogFrame {
    pub(crate) sequence: u64,
    pub(crate) blob: BlobId,
    pub(crate) unit: u32,
    pub(crate) header_len: u32,
    len: u32,
    pub(crate) parts: Vec<Part>,
    pub(crate) buffer: Option<Buffer>,
    state: FrameState,
}

/// Where the next frame goes.
#[derive(Clone, Copy, Debug)]
struct Place {
    blob: BlobId,
    life: u64,
    unit: u32,
}

/// The log stream.
#[derive(Debug)]
pub(crate) struct Log {
    queue: VecDeque<Part>,
    /// Data bytes of the queue.
    pub(crate) queued_bytes: u64,
    frames: VecDeque<LogFrame>,
    pub(crate) next_sequence: u64,
    /// All frames below this sequence are durable. Each frame says so, which tells damage from the end of the log.
    pub(crate) durable: u64,
    writer: Option<Place>,
    /// Blobs that the manifest lists as the log's and that are not begun.
    spares: VecDeque<(BlobId, u64)>,
    /// Whether an edit with more spares is on its way.
    pub(crate) has_asked: bool,
    /// Blobs that were left, for the keeper.
    pub(crate) left: Vec<BlobId>,
    /// Bytes of frames, since the pool was opened.
    pub(crate) written_bytes: u64,
    /// Lists of parts that are used again.
    lists: Vec<Vec<Part>>,
    uuid: [u8; 16],
    alignment: u32,
    blob_units: u32,
}

/// What the queue's first parts need as a frame.
struct Shape {
    parts: usize,
    blocks: u32,
    header_len: u32,
    len: u32,
}

impl Log {
    pub(crate) fn new(uuid: [u8; 16], alignment: u32, blob_units: u32, next_sequence: u64) -> Self {
        Self {
            queue: VecDeque::new(),
            queued_bytes: 0,
            frames: VecDeque::new(),
            next_sequence,
            durable: next_sequence,
            writer: None,
            spares: VecDeque::new(),
            has_asked: false,
            left: Vec::new(),
            written_bytes: 0,
            lists: Vec::new(),
            uuid,
            alignment,
            blob_units,
        }
    }

    /// Adds a part to the queue.
    pub(crate) fn push(&mut self, part: Part) {
        self.queued_bytes += u64::from(part.record.data_blocks()) * u64::from(BLOCK);
        self.queue.push_back(part);
    }

    /// More blobs are listed as the log's.
    pub(crate) fn add_spares(&mut self, blobs: impl IntoIterator<Item = (BlobId, u64)>) {
        self.spares.extend(blobs);
        self.has_asked = false;
    }

    pub(crate) fn spares(&self) -> usize {
        self.spares.len()
    }

    /// Whether nothing is queued or in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.frames.is_empty()
    }

    /// Units that are left in the blob of the writer.
    pub(crate) fn room(&self) -> u32 {
        self.writer.map_or(0, |place| self.blob_units - place.unit)
    }

    /// Bytes of frames whose parts were not passed on.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.frames.iter().map(|frame| u64::from(frame.len)).sum()
    }

    /// Whether `more` bytes beyond the queue have a place, when a frame may leave `slack` bytes of a blob unused.
    pub(crate) fn has_room(&self, more: u64, slack: u32) -> bool {
        let bytes = self.queued_bytes + more;
        let blob = u64::from(self.blob_units) * u64::from(UNIT);
        let room = u64::from(self.room()) * u64::from(UNIT) + self.spares.len() as u64 * blob;
        // An eighth for headers, and what is left at the end of a blob where a frame does not fit.
        room > bytes + bytes / 8 + (1 + self.spares.len() as u64) * u64::from(slack)
    }

    /// Where the first frame is or will be whose parts were not passed on: sequence, blob (none before the first frame), unit.
    pub(crate) fn tail(&self) -> (u64, Option<BlobId>, u32) {
        match (self.frames.front(), self.writer) {
            (Some(frame), _) => (frame.sequence, Some(frame.blob), frame.unit),
            (None, Some(place)) => (self.next_sequence, Some(place.blob), place.unit),
            (None, None) => (self.next_sequence, self.spares.front().map(|(blob, _)| *blob), 0),
        }
    }

    /// What the next frame would be; the queue is not empty.
    fn shape(&self, settings: &Settings) -> Shape {
        let (mut parts, mut blocks, mut entries) = (0, 0, 0);
        for part in &self.queue {
            let more = blocks + part.record.data_blocks();
            let is_full =
                more * BLOCK > settings.frame_bytes_max || entries + part.entries > FRAME_ENTRIES_MAX;
            if parts > 0 && (is_full || part.record.kind == Kind::Dense || parts == usize::from(u16::MAX)) {
                break;
            }
            (parts, blocks, entries) = (parts + 1, more, entries + part.entries);
            if part.record.kind == Kind::Dense {
                break;
            }
        }
        let header_len = frame::header_bytes(parts, blocks as usize, self.alignment);
        Shape { parts, blocks, header_len, len: header_len + blocks * BLOCK }
    }

    /// The place for a frame of `len` bytes, which is taken.
    fn place(&mut self, len: u32) -> Option<Place> {
        let units = len / UNIT;
        if self.room() < units {
            let (blob, life) = self.spares.pop_front()?;
            self.left.extend(self.writer.map(|place| place.blob));
            self.writer = Some(Place { blob, life, unit: 0 });
        }
        let writer = self.writer.as_mut()?;
        let place = *writer;
        writer.unit += units;
        Some(place)
    }

    /// Puts parts of the queue into a frame. `take` returns a buffer; `fill` copies a part's data, from a byte on, to its
    /// place in the frame.
    pub(crate) fn pump(
        &mut self,
        settings: &Settings,
        out: &mut Outbox,
        take: impl FnOnce(u32) -> Buffer,
        mut fill: impl FnMut(&Part, u32, &mut [u8]),
    ) -> bool {
        let is_retrying = self.frames.back().is_some_and(|frame| frame.state == FrameState::Failed);
        if self.queue.is_empty() || self.frames.len() >= settings.frames_in_flight_max as usize || is_retrying
        {
            return false;
        }
        let shape = self.shape(settings);
        let Some(place) = self.place(shape.len) else { return false };
        let mut buffer = take(shape.len);
        let mut parts = self.lists.pop().unwrap_or_default();
        let mut records = Vec::with_capacity(shape.parts);
        let (header, data) = buffer.bytes_mut()[..shape.len as usize].split_at_mut(shape.header_len as usize);
        let checksums = frame::checksums_mut(header, shape.parts, shape.blocks as usize);
        let mut at = 0;
        for mut part in self.queue.drain(..shape.parts) {
            part.record.data = at;
            let blocks = part.record.data_blocks();
            for first in (0..blocks).step_by(COPIED_BLOCKS as usize) {
                let count = COPIED_BLOCKS.min(blocks - first);
                let bytes = &mut data[((at + first) * BLOCK) as usize..][..(count * BLOCK) as usize];
                fill(&part, first * BLOCK, bytes);
                for (index, block) in (first..).zip(bytes.chunks_exact(BLOCK as usize)) {
                    let crc = crate::checksum::of_block(part.record.block + u64::from(index), block);
                    checksums[(at + index) as usize * 4..][..4].copy_from_slice(&crc.to_le_bytes());
                }
            }
            at += blocks;
            records.push(part.record);
            parts.push(part);
        }
        self.queued_bytes -= u64::from(shape.blocks) * u64::from(BLOCK);
        let sequence = self.next_sequence;
        let Place { life, unit, .. } = place;
        let head = Head { uuid: self.uuid, life, sequence, stream: STREAM, unit, durable: self.durable };
        frame::encode(header, &head, &records, shape.blocks);
        self.next_sequence += 1;
        self.written_bytes += u64::from(shape.len);
        out.op(
            Owner::Frame { sequence },
            StoreOp::Write { blob: place.blob, unit: place.unit, data: buffer, len: shape.len },
        );
        self.frames.push_back(LogFrame {
            sequence,
            blob: place.blob,
            unit: place.unit,
            header_len: shape.header_len,
            len: shape.len,
            parts,
            buffer: None,
            state: FrameState::Writing,
        });
        true
    }

    /// A frame was answered.
    pub(crate) fn answered(&mut self, sequence: u64, buffer: Buffer, is_ok: bool) {
        let first = self.frames.front().expect("the frame is in flight").sequence;
        let at = (sequence - first) as usize;
        self.frames[at].buffer = Some(buffer);
        if is_ok && self.frames[at].state == FrameState::Writing {
            self.frames[at].state = FrameState::Done;
            return;
        }
        // This frame and all later ones go to the next blob.
        for frame in self.frames.iter_mut().skip(at) {
            frame.state = FrameState::Failed;
        }
        // It begins with this frame, so that recovery finds it there.
        if !is_ok && let Some(writer) = &mut self.writer {
            writer.unit = self.blob_units;
        }
    }

    /// Writes the frames again that could not be written, when none of them is in flight.
    pub(crate) fn retry(&mut self, out: &mut Outbox) {
        let is_failed = |frame: &&mut LogFrame| frame.state == FrameState::Failed;
        if self.frames.iter_mut().filter(is_failed).any(|frame| frame.buffer.is_none()) {
            return;
        }
        for at in 0..self.frames.len() {
            if self.frames[at].state != FrameState::Failed {
                continue;
            }
            let Some(place) = self.place(self.frames[at].len) else { return };
            let frame = &mut self.frames[at];
            let mut data = frame.buffer.take().expect("answered");
            frame::relocate(&mut data.bytes_mut()[..frame.header_len as usize], place.life, place.unit);
            (frame.blob, frame.unit, frame.state) = (place.blob, place.unit, FrameState::Writing);
            self.written_bytes += u64::from(frame.len);
            let op = StoreOp::Write { blob: place.blob, unit: place.unit, data, len: frame.len };
            out.op(Owner::Frame { sequence: frame.sequence }, op);
        }
    }

    /// The next frame whose parts can be passed on.
    pub(crate) fn pop_done(&mut self) -> Option<LogFrame> {
        (self.frames.front()?.state == FrameState::Done).then(|| self.frames.pop_front()).flatten()
    }

    /// Takes a list of parts back.
    pub(crate) fn recycle(&mut self, mut parts: Vec<Part>) {
        parts.clear();
        self.lists.push(parts);
    }

    /// Ends all frames and parts, because nothing can be written any more. Frames in flight stay.
    pub(crate) fn fail(&mut self) -> Vec<Part> {
        self.queued_bytes = 0;
        let mut parts: Vec<_> = self.queue.drain(..).collect();
        self.frames.iter_mut().for_each(|frame| parts.append(&mut frame.parts));
        parts
    }
}

impl LogFrame {
    /// The unit of a data block in the blob.
    pub(crate) const fn data_unit(&self, data_block: u32) -> u32 {
        self.unit + self.header_len / UNIT + data_block * BLOCK_UNITS
    }

    /// The checksum of a data block.
    pub(crate) fn checksum(&self, data_block: u32) -> u32 {
        let header =
            &self.buffer.as_ref().expect("the frame was answered").bytes()[..self.header_len as usize];
        frame::checksum_in(header, self.parts.len(), data_block)
    }
}
