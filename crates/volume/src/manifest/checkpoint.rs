//! A checkpoint that is encoded in pieces, while the manifest changes. Any context.
//!
//! What was encoded so far is the manifest of this moment without the parts that follow: timelines, volumes and blobs below a
//! place in the order of their numbers, and the levels of some partitions. A change of such a part is appended as an edit; a
//! change of a part that follows is encoded with that part. So at its end the checkpoint is the manifest of its end.
//!
//! A copy is a checkpoint without blobs: each segment tells of itself what the manifest says of its blob.
//!
//! The levels of one partition are copied when their turn begins: edits that are made while they are written follow them. Live
//! units of index blobs are those of their runs, which the runs add when they are read; so these blobs are encoded without any.

use super::edit::{Content, Counting, Edit, seal_head, write_run};
use super::{Blob, BlobKind, Manifest};
use crate::codec::Writer;
use crate::{BlobId, PARTITIONS, TimelineId, VolumeId};
use aryk_volume_index::Run;
use crc_fast::{CrcAlgorithm, Digest};
use std::collections::VecDeque;

/// What is encoded next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    Timeline(TimelineId),
    Volume(VolumeId),
    Blob(BlobId),
    /// The levels of a partition, which were not copied yet.
    Partition(u8),
    /// The copied levels of a partition.
    Levels(u8),
    End,
}

/// A checkpoint under way.
#[derive(Debug)]
pub(crate) struct Encoding {
    content: Content,
    /// Whether it may be about thick volumes.
    is_thick: bool,
    writer: Writer,
    digest: Digest,
    /// The bytes that the digest has.
    digested: usize,
    next: Next,
    /// Levels of the partition, the oldest first; and the runs of the first one that are written.
    levels: VecDeque<Vec<Run>>,
    runs: usize,
    flushed: u64,
    /// Edits that follow the levels of the partition.
    after: Writer,
}

impl Encoding {
    /// Begins a checkpoint or a copy that will have about `bytes`.
    pub(crate) fn new(manifest: &Manifest, content: Content, bytes: usize) -> Self {
        let mut writer = Writer::default();
        writer.bytes.reserve(bytes);
        let is_thick = manifest.is_about_thick();
        seal_head(&mut writer, manifest, content, is_thick);
        Self {
            content,
            is_thick,
            writer,
            digest: Digest::new(CrcAlgorithm::Crc32Iscsi),
            digested: 0,
            next: Next::Timeline(TimelineId(0)),
            levels: VecDeque::new(),
            runs: 0,
            flushed: 0,
            after: Writer::default(),
        }
    }

    /// Encodes the next piece, of about `budget` bytes. Returns whether all is encoded.
    pub(crate) fn step(&mut self, manifest: &Manifest, budget: usize) -> bool {
        let end = self.writer.bytes.len() + budget;
        while self.writer.bytes.len() < end && self.next != Next::End {
            self.encode_next(manifest, end);
        }
        self.digest.update(&self.writer.bytes[self.digested..]);
        self.digested = self.writer.bytes.len();
        self.next == Next::End
    }

    /// Encodes at least one item: as many of its kind as there are, up to `end`.
    fn encode_next(&mut self, manifest: &Manifest, end: usize) {
        let writer = &mut self.writer;
        match self.next {
            Next::Timeline(from) => {
                for (&id, timeline) in manifest.timelines.range(from..) {
                    if writer.bytes.len() >= end {
                        self.next = Next::Timeline(id);
                        return;
                    }
                    Edit::Timeline { id, timeline: timeline.clone() }.write(writer);
                }
                self.next = Next::Volume(VolumeId(0));
            }
            Next::Volume(from) => {
                for (&id, volume) in manifest.volumes.range(from..) {
                    if writer.bytes.len() >= end {
                        self.next = Next::Volume(id);
                        return;
                    }
                    Edit::Volume { id, volume: volume.clone() }.write(writer);
                }
                let has_blobs = self.content == Content::Checkpoint;
                self.next = if has_blobs { Next::Blob(BlobId(0)) } else { Next::Partition(0) };
            }
            Next::Blob(from) => {
                for (id, blob) in manifest.blobs.from(from) {
                    if writer.bytes.len() >= end {
                        self.next = Next::Blob(id);
                        return;
                    }
                    let live = if blob.kind == BlobKind::Index { 0 } else { blob.live };
                    Edit::Blob { id, blob: Blob { live, ..*blob } }.write(writer);
                }
                self.next = Next::Partition(0);
            }
            Next::Partition(number) => {
                let partition = &manifest.partitions[usize::from(number)];
                self.flushed = partition.flushed;
                self.levels = partition.levels.iter().rev().cloned().collect();
                self.runs = 0;
                let flushed = partition.flushed;
                Edit::Flushed { partition: number, flushed, runs: Vec::new() }.write(writer);
                self.next = Next::Levels(number);
            }
            Next::Levels(number) => self.encode_levels(number, end),
            Next::End => {}
        }
    }

    fn encode_levels(&mut self, number: u8, end: usize) {
        let Some(level) = self.levels.front() else {
            self.writer.bytes.append(&mut self.after.bytes);
            let next = number + 1;
            self.next = if usize::from(next) == PARTITIONS { Next::End } else { Next::Partition(next) };
            return;
        };
        if self.runs == 0 {
            Edit::begin_flushed(&mut self.writer, number, self.flushed, level.len());
        }
        while let Some(run) = level.get(self.runs) {
            write_run(&mut self.writer, run);
            self.runs += 1;
            if self.writer.bytes.len() >= end {
                break;
            }
        }
        if self.runs == level.len() {
            self.levels.pop_front();
            self.runs = 0;
        }
    }

    /// The manifest was changed by an edit: appends it if it is about a part that was encoded. Returns whether the edit can be
    /// said in its version: if not, it has to begin again.
    pub(crate) fn note(&mut self, edit: &Edit) -> bool {
        if edit.is_about_thick() && !self.is_thick {
            return false;
        }
        let is_encoded = match (edit, self.next) {
            (Edit::Blob { .. } | Edit::Live { .. } | Edit::BlobGone { .. }, _)
                if self.content == Content::Copy =>
            {
                false
            }
            (
                Edit::Opened { .. }
                | Edit::Counters { .. }
                | Edit::Log(_)
                | Edit::Note(_)
                | Edit::Counted { .. }
                | Edit::Own { .. }
                | Edit::Continued,
                _,
            ) => false,
            (_, Next::End) => true,
            (Edit::Timeline { id, .. } | Edit::TimelineGone { id }, Next::Timeline(next)) => *id < next,
            (Edit::Timeline { .. } | Edit::TimelineGone { .. }, _) => true,
            (_, Next::Timeline(_)) => false,
            (Edit::Volume { id, .. } | Edit::VolumeGone { id }, Next::Volume(next)) => *id < next,
            (Edit::Volume { .. } | Edit::VolumeGone { .. }, _) => true,
            (_, Next::Volume(_)) => false,
            (Edit::Blob { id, .. } | Edit::Live { id, .. } | Edit::BlobGone { id }, Next::Blob(next)) => {
                *id < next
            }
            (Edit::Blob { .. } | Edit::Live { .. } | Edit::BlobGone { .. }, _) => true,
            (_, Next::Blob(_)) => false,
            (Edit::Flushed { partition, .. } | Edit::Merged { partition, .. }, Next::Partition(next)) => {
                *partition < next
            }
            (Edit::Flushed { partition, .. } | Edit::Merged { partition, .. }, Next::Levels(now)) => {
                *partition <= now
            }
        };
        if is_encoded {
            let is_within = matches!(self.next, Next::Levels(_));
            edit.write(if is_within { &mut self.after } else { &mut self.writer });
        }
        true
    }

    /// The bytes of the checkpoint, of which all is encoded.
    pub(crate) fn finish(mut self, manifest: &Manifest) -> Vec<u8> {
        debug_assert_eq!(self.next, Next::End);
        let (next_timeline, next_volume) = (manifest.next_timeline, manifest.next_volume);
        for edit in [
            Edit::Opened { opening: manifest.opening },
            Edit::Counters { next_timeline, next_volume },
            Edit::Log(manifest.log.clone()),
            Edit::Note(manifest.note.clone()),
        ] {
            edit.write(&mut self.writer);
        }
        for (&id, own) in &manifest.own {
            Edit::Counted { id, counting: Counting::Unknown }.write(&mut self.writer);
            for (partition, units) in (0..).zip(own).filter(|(_, units)| units.is_some()) {
                Edit::Own { id, partition, units: *units }.write(&mut self.writer);
            }
        }
        self.digest.update(&self.writer.bytes[self.digested..]);
        let crc = self.digest.finalize() as u32;
        self.writer.raw(&crc.to_le_bytes());
        self.writer.bytes
    }
}

/// The checkpoint of a manifest that does not change meanwhile.
#[cfg(test)]
pub(crate) fn encode(manifest: &Manifest) -> Vec<u8> {
    let mut encoding = Encoding::new(manifest, Content::Checkpoint, 0);
    while !encoding.step(manifest, usize::MAX / 2) {}
    encoding.finish(manifest)
}
