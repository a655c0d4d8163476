//! The scan of segments for a rebuild: which frames and pages each has. Any context.
//!
//! A segment is read from its start. What is in it belongs to the newest life of its blob of which it has a frame; a frame of an
//! earlier life is what is left behind. Behind a frame is the next one; where it is not, the rest is searched, because a header
//! may be damaged. A segment that begins with the first page of a run has runs, one behind the other.
//!
//! Data of guests is never taken for a frame: a frame names the UUID of the pool, which a guest does not know, and its place. It
//! is not taken for a page either: pages are read from the start of a segment on only, where no data of a guest can be.

use crate::frame::Frame;
use crate::{BLOCK, StoreFacts, UNIT};
use aryk_volume_index::{Entry, PAGE_UNITS, PageBytes, RunId, entries_of};

/// Bytes of a read, and of a read of a segment of which a part cannot be read.
const READ_BYTES: u32 = 1 << 20;
const SINGLE_BYTES: u32 = 4096;
/// Holes of a segment that are told apart.
const HOLES_MAX: usize = 64;

/// What a segment holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Segment {
    /// The newest life of its frames; 0 if it has none.
    pub(super) life: u64,
    /// Whether it has runs of the index.
    pub(super) is_index: bool,
    /// Whether its frames are of the log.
    pub(super) is_log: bool,
    /// Whether a frame says that blocks are zeroes.
    pub(super) has_zeroes: bool,
    /// The unit behind its last frame.
    pub(super) end: u32,
    /// Units before the end of which nothing is known, from and to.
    pub(super) holes: Vec<(u32, u32)>,
}

impl Segment {
    /// Takes a frame of the blob into account. Returns whether it is of the newest life so far.
    fn add(&mut self, frame: &Frame<'_>) -> bool {
        let head = frame.head();
        if head.life < self.life {
            return false;
        }
        if head.life > self.life {
            *self = Self { life: head.life, ..Self::default() };
        }
        if head.unit > self.end {
            if self.holes.len() < HOLES_MAX {
                self.holes.push((self.end, head.unit));
            } else if let Some(last) = self.holes.last_mut() {
                last.1 = head.unit;
            }
        }
        self.is_log |= head.stream != crate::frame::NO_STREAM;
        self.has_zeroes |= frame.records().any(|record| record.data_blocks() == 0);
        self.end = head.unit + frame.units();
        true
    }
}

/// What the next step of a walk is.
pub(super) enum Next {
    /// Bytes are missing: they are to be read from this unit on.
    Read { unit: u32, len: u32 },
    /// A frame of this pool at this unit: units of its header, and of all of it. Its bytes are [`Walk::frame`].
    Frame { unit: u32 },
    /// A page at this unit.
    Page { unit: u32, run: RunId, number: u32, entries: Vec<Entry> },
    /// Nothing more.
    End,
}

/// A walk through one segment.
#[derive(Debug)]
pub(super) struct Walk {
    /// The unit at which to go on, and the bytes that were read from there on, behind the first `start`.
    unit: u32,
    bytes: Vec<u8>,
    start: usize,
    /// Bytes of the frame at `unit`, which the next step passes over.
    frame: usize,
    is_index: bool,
    /// How many reads of single pages follow a failed read.
    singles: u32,
    /// The disk could not read a part.
    pub(super) is_unreadable: bool,
}

impl Walk {
    pub(super) const fn new() -> Self {
        Self {
            unit: 0,
            bytes: Vec::new(),
            start: 0,
            frame: 0,
            is_index: false,
            singles: 0,
            is_unreadable: false,
        }
    }

    /// The frame that was found: all of its bytes, if it is wholly in the segment.
    pub(super) fn frame(&self) -> &[u8] {
        &self.rest()[..self.frame]
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn read(&self, bytes: usize, facts: &StoreFacts) -> Next {
        let unit = self.unit + (self.rest().len() / UNIT as usize) as u32;
        let rest = (facts.blob_units - unit) * UNIT;
        let chunk = if self.singles > 0 { SINGLE_BYTES } else { READ_BYTES };
        let missing = (bytes - self.rest().len()) as u32;
        Next::Read {
            unit,
            len: if self.singles > 0 { chunk.min(rest) } else { missing.max(chunk).min(rest) },
        }
    }

    /// What a read has returned; `None` if it failed.
    pub(super) fn give(&mut self, len: u32, bytes: Option<&[u8]>) {
        self.bytes.drain(..std::mem::take(&mut self.start));
        match bytes {
            Some(bytes) => self.bytes.extend_from_slice(bytes),
            None if len > SINGLE_BYTES => {
                self.singles = len / SINGLE_BYTES + 1;
                return;
            }
            None => {
                self.is_unreadable = true;
                self.bytes.resize(self.bytes.len() + len as usize, 0);
            }
        }
        self.singles = self.singles.saturating_sub(1);
    }

    /// Goes on to the next frame or page. With `is_whole`, all of a frame is read.
    pub(super) fn next(&mut self, uuid: &[u8; 16], facts: &StoreFacts, is_whole: bool) -> Next {
        self.pass(self.frame);
        self.frame = 0;
        if self.unit == 0 && self.rest().len() < BLOCK as usize {
            return self.read(BLOCK as usize, facts);
        }
        if self.unit == 0 && matches!(self.page(), Some((_, 0, _))) {
            self.is_index = true;
        }
        if self.is_index {
            return self.next_page(facts);
        }
        loop {
            let left = (facts.blob_units - self.unit) as usize * UNIT as usize;
            if left == 0 {
                return Next::End;
            }
            if self.rest().len() < UNIT as usize {
                return self.read(UNIT as usize, facts);
            }
            let len = Frame::header_len(self.rest()).ok();
            let is_ours = |len: &usize| {
                *len <= left && self.rest()[8..24] == *uuid && self.rest()[48..52] == self.unit.to_le_bytes()
            };
            if let Some(len) = len.filter(is_ours) {
                if self.rest().len() < len {
                    return self.read(len, facts);
                }
                if let Ok(frame) = Frame::parse(&self.rest()[..len]) {
                    let total = frame.units() as usize * UNIT as usize;
                    if total <= left {
                        if is_whole && self.rest().len() < total {
                            return self.read(total, facts);
                        }
                        self.frame = if is_whole { total } else { len };
                        return Next::Frame { unit: self.unit };
                    }
                }
            }
            self.pass(facts.alignment as usize);
        }
    }

    fn page(&self) -> Option<(RunId, u32, Vec<Entry>)> {
        let page: &PageBytes = self.rest().first_chunk()?;
        entries_of(page).ok()
    }

    fn next_page(&mut self, facts: &StoreFacts) -> Next {
        while self.unit + PAGE_UNITS <= facts.blob_units {
            if self.rest().len() < BLOCK as usize {
                return self.read(BLOCK as usize, facts);
            }
            let (unit, page) = (self.unit, self.page());
            self.pass(BLOCK as usize);
            if let Some((run, number, entries)) = page {
                return Next::Page { unit, run, number, entries };
            }
        }
        Next::End
    }

    /// Leaves a frame to which nothing more is of interest, and the data behind its header.
    pub(super) fn skip(&mut self, units: u32) {
        self.pass(units as usize * UNIT as usize);
        self.frame = 0;
    }

    /// Looks for the next frame behind the start of this one: it is what is left of an earlier life.
    pub(super) fn look_inside(&mut self, facts: &StoreFacts) {
        self.frame = facts.alignment as usize;
    }

    fn pass(&mut self, bytes: usize) {
        self.unit += (bytes / UNIT as usize) as u32;
        self.start = (self.start + bytes).min(self.bytes.len());
    }
}

impl Segment {
    /// As [`Segment::add`], for the frame at the start of these bytes.
    pub(super) fn take(&mut self, bytes: &[u8]) -> bool {
        Frame::parse(bytes).is_ok_and(|frame| self.add(&frame))
    }
}
