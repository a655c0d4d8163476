//! The rebuild of a pool whose manifest is lost: from what segments say of themselves, and from the copy of the manifest. Any
//! context.
//!
//! All segments are read once: which frames of which life each has, which runs, and whether data matches its checksums. Then
//! there are two ways.
//!
//! - **The copy of the manifest** is of the newest opening, its runs are all there, and no frame of the log is missing. Then it
//!   is the manifest, and only what it does not have is made again: the blobs.
//! - **The frames' headers.** Otherwise the index is made from them. The runs of the copy that are there are used. A partition of
//!   which a run is missing gets an entry for each record of a frame, and for each zero of an old run; the commits say which
//!   entry is newer. The names of volumes and the cuts of snapshots are those of the copy, if there is one. Frames do not say
//!   which blocks were discarded long ago. Blocks that may show older data for that reason, and all others that are in doubt, are
//!   reported.
//!
//! Memory is bounded: entries go to runs by the flushes and merges of the engine, in blobs that the store does not have, whose
//! numbers follow those of the store. The caller keeps these elsewhere until the end. The index that is complete is then
//! merged again, to segments in which nothing is alive and which say nothing that another rebuild would need. Last comes the
//! checkpoint. Until it is durable, another rebuild finds the same.

use crate::command;
use crate::frame::{Frame, Head, Kind, NO_STREAM, Record};
use crate::ids::{STRIPE_BLOCKS, VOLUME_UNITS_MAX};
use crate::manifest::edit::{self, Content};
use crate::manifest::{Blob, BlobKind, Edit, LogTail, Manifest, Timeline};
use crate::pool::Pool;
use crate::{
    BLOCK, BLOCK_UNITS, BlobId, Done, Label, OpId, OpenError, PARTITIONS, RANGE_BLOCKS, Settings, StoreFacts,
    StoreOp, TimelineId, UNIT, Volume, VolumeId, WhenFull, checksum,
};
use aryk_dma::Buffer;
use aryk_volume_index::{Commit, Entry, PAGE_UNITS, Place, Run, RunId, Value};
use copy::Copy;
use scan::{Next, Segment, Walk};
use sequences::Sequences;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

mod copy;
mod index;
mod report;
mod scan;
mod sequences;

pub use report::{Progress, RebuildError, RebuildReport, Recipe};

/// The identifier of reads of segments, which no operation of a pool has.
const SCAN: OpId = OpId(u64::MAX);
/// Frames or pages of one turn.
const STEPS_PER_TURN: usize = 64;
/// Blocks with damaged data that are remembered.
const BAD_MAX: usize = 1 << 20;
/// Stripes of a volume that are reported one by one.
const STRIPES_MAX: u64 = 256;
/// Pages of a run that are read at once.
const PAGES: u32 = 256;
/// Blobs that the store does not have, for each of its own.
const OTHERS_SHARE: u32 = 4;
const OTHERS_MIN: u32 = 64;
/// Segments that a merge may need besides those of its output.
const SPARE_SEGMENTS: usize = 2;

/// A run that was found: where it begins, and how many of its pages follow each other.
#[derive(Clone, Copy, Debug)]
struct FoundRun {
    blob: BlobId,
    unit: u32,
    pages: u32,
}

/// A timeline, as headers describe it.
#[derive(Clone, Copy, Debug)]
struct FoundTimeline {
    shift: u8,
    /// The block behind the last one that was written.
    end: u64,
}

/// A block whose data does not match its checksum.
#[derive(Clone, Copy, Debug)]
struct Bad {
    life: u64,
    record: Record,
    block: u64,
    crc: u32,
    sequence: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// All segments are read.
    Scan,
    /// The runs of the copy are read, to count which blobs are alive.
    Count,
    /// Entries are made of records.
    Insert,
    /// They are flushed, and all levels are merged.
    Settle,
    /// The index is merged to segments of the store.
    Place,
    /// The checkpoint is being written.
    Write,
    Done,
}

/// A rebuild under way. The caller takes turns and runs its operations, until there is a result.
#[derive(Debug)]
pub struct Rebuild {
    facts: StoreFacts,
    uuid: [u8; 16],
    is_writing: bool,
    phase: Phase,
    copy: Option<Copy>,
    segments: Vec<Segment>,
    runs: BTreeMap<RunId, FoundRun>,
    sequences: BTreeMap<u32, Sequences>,
    timelines: BTreeMap<TimelineId, FoundTimeline>,
    bad: BTreeMap<(BlobId, u32), Bad>,
    /// Runs of the copy that are used, and for each partition of which all are there: the commit up to which they have all.
    used: BTreeSet<RunId>,
    known: [Option<u64>; PARTITIONS],
    /// Whether the segments of the index are being read, before the others.
    is_at_index: bool,
    /// The segment that is being read.
    at: u32,
    walk: Walk,
    /// The last page of it that is surely of the index.
    page: Option<(RunId, u32)>,
    is_reading: bool,
    /// Parts of runs that are to be counted: blob, unit, pages.
    parts: VecDeque<(BlobId, u32, u32)>,
    live: BTreeMap<BlobId, i64>,
    manifest: Option<Manifest>,
    pool: Option<Pool>,
    has_merged: bool,
    ops: VecDeque<(OpId, StoreOp)>,
    report: RebuildReport,
    result: Option<Result<RebuildReport, RebuildError>>,
}

impl Rebuild {
    /// Begins the rebuild of a pool. `copy` is the copy of its manifest, if the store has one. Without `is_writing`, nothing is
    /// written to the store's own blobs, and the report says what would be.
    pub fn new(facts: StoreFacts, uuid: [u8; 16], copy: Option<&[u8]>, is_writing: bool) -> Self {
        Self {
            facts,
            uuid,
            is_writing,
            phase: Phase::Scan,
            copy: copy.and_then(|bytes| Copy::read(bytes, uuid, &facts).ok()),
            segments: vec![Segment::default(); facts.blobs as usize],
            runs: BTreeMap::new(),
            sequences: BTreeMap::new(),
            timelines: BTreeMap::new(),
            bad: BTreeMap::new(),
            used: BTreeSet::new(),
            known: [None; PARTITIONS],
            is_at_index: true,
            at: 0,
            walk: Walk::new(),
            page: None,
            is_reading: false,
            parts: VecDeque::new(),
            live: BTreeMap::new(),
            manifest: None,
            pool: None,
            has_merged: false,
            ops: VecDeque::new(),
            report: RebuildReport {
                recipe: Recipe::HeadersOnly,
                segments: 0,
                frames: 0,
                entries: 0,
                volumes: Vec::new(),
                damage: Vec::new(),
            },
            result: None,
        }
    }

    /// The present step, and how much of it is done.
    pub fn progress(&self) -> Progress {
        let all = u64::from(self.facts.blobs);
        let done = u64::from(self.at);
        match self.phase {
            Phase::Scan => Progress { what: "reading segments", done, all },
            Phase::Count => Progress { what: "counting references", done: 0, all: self.parts.len() as u64 },
            Phase::Insert => Progress { what: "making the index", done, all },
            Phase::Settle | Phase::Place | Phase::Write | Phase::Done => {
                Progress { what: "writing the index", done: 0, all: 1 }
            }
        }
    }

    /// The result, once there is one.
    pub fn take_result(&mut self) -> Option<Result<RebuildReport, RebuildError>> {
        self.result.take()
    }

    /// The next operation. Blobs from [`StoreFacts::blobs`] on are not the store's: the caller keeps them until the end.
    pub fn next_op(&mut self) -> Option<(OpId, StoreOp)> {
        self.ops.pop_front()
    }

    /// Takes what the pool hands out. Returns whether some operations were answered at once: edits and checkpoints of the
    /// manifest before the last one are not stored.
    fn take_ops(&mut self) -> bool {
        let Some(pool) = &mut self.pool else { return false };
        let mut has_answered = false;
        while let Some((id, op)) = pool.next_op() {
            let is_hidden = match &op {
                StoreOp::Commit { .. } | StoreOp::Copy { .. } => true,
                StoreOp::Checkpoint { .. } => self.phase != Phase::Write,
                _ => false,
            };
            if is_hidden {
                pool.completed(Done { id, data: None, result: Ok(()) });
                has_answered = true;
            } else {
                self.ops.push_back((id, op));
            }
        }
        has_answered
    }

    /// Takes the answer to an operation.
    pub fn completed(&mut self, done: Done) {
        if done.id == SCAN {
            return self.scanned(done);
        }
        if let (Phase::Write, Err(error)) = (self.phase, done.result) {
            self.end(Err(RebuildError::Store(error)));
        }
        if let Some(pool) = &mut self.pool {
            pool.completed(done);
        }
    }

    fn end(&mut self, result: Result<(), RebuildError>) {
        self.phase = Phase::Done;
        let report = std::mem::replace(
            &mut self.report,
            RebuildReport {
                recipe: Recipe::HeadersOnly,
                segments: 0,
                frames: 0,
                entries: 0,
                volumes: Vec::new(),
                damage: Vec::new(),
            },
        );
        self.result.get_or_insert(result.map(|()| report));
    }

    /// Does a bounded piece of the work. Returns whether there is more to do without input.
    pub fn turn(&mut self) -> bool {
        let has_more = match self.phase {
            Phase::Scan => self.step_scan(),
            Phase::Count => self.step_count(),
            Phase::Insert => self.step_insert(),
            Phase::Settle => self.step_settle(),
            Phase::Place => self.step_place(),
            Phase::Write => self.step_write(),
            Phase::Done => false,
        };
        self.take_ops() | has_more
    }

    /// Has bytes of a blob read.
    fn read(&mut self, blob: BlobId, unit: u32, len: u32) {
        self.is_reading = true;
        let data = Buffer::new(len as usize, BLOCK as usize);
        self.ops.push_back((SCAN, StoreOp::Read { blob, unit, data, len }));
    }

    fn scanned(&mut self, done: Done) {
        self.is_reading = false;
        let data = done.data.expect("the buffer of a read");
        let len = data.len() as u32;
        if self.phase == Phase::Count {
            return self.count(done.result.ok().map(|()| data.bytes()));
        }
        self.walk.give(len, done.result.ok().map(|()| data.bytes()));
    }

    /// Goes on to the next segment.
    fn next_segment(&mut self) {
        self.at += 1;
        self.walk = Walk::new();
        self.page = None;
    }

    fn add_damage(&mut self, volume: Option<VolumeId>, block: u64, blocks: u64, what: &str) {
        command::add_damage(&mut self.report.damage, volume, block, blocks, what);
    }

    fn step_scan(&mut self) -> bool {
        for _ in 0..STEPS_PER_TURN {
            if self.is_reading {
                return false;
            }
            if self.at == self.facts.blobs {
                self.plan();
                return true;
            }
            let blob = BlobId(self.at);
            match self.walk.next(&self.uuid, &self.facts, true) {
                Next::Read { unit, len } => self.read(blob, unit, len),
                Next::Frame { unit } => self.see_frame(blob, unit),
                Next::Page { unit, run, number, .. } => self.see_page(blob, unit, run, number),
                Next::End => {
                    let segment = &mut self.segments[self.at as usize];
                    if self.walk.is_unreadable && segment.holes.is_empty() {
                        segment.holes.push((0, segment.end));
                    }
                    self.next_segment();
                }
            }
        }
        true
    }

    fn see_frame(&mut self, blob: BlobId, unit: u32) {
        let segment = &mut self.segments[blob.0 as usize];
        if !segment.take(self.walk.frame()) {
            self.walk.look_inside(&self.facts);
            return;
        }
        self.report.frames += 1;
        let bytes = self.walk.frame();
        let frame = Frame::parse(bytes).expect("the walk has verified it");
        let (head, data) = (frame.head(), &bytes[frame.header_units() as usize * UNIT as usize..]);
        let sequence = (head.stream != NO_STREAM).then_some(head.sequence);
        if let Some(sequence) = sequence {
            self.sequences.entry((head.life >> 32) as u32).or_default().add(sequence, head.durable);
        }
        for record in frame.records() {
            let stripe = (record.block / STRIPE_BLOCKS % PARTITIONS as u64) as u8;
            let shift = (record.partition + PARTITIONS as u8 - stripe) % PARTITIONS as u8;
            let found = self.timelines.entry(record.timeline).or_insert(FoundTimeline { shift, end: 0 });
            if record.data_blocks() > 0 {
                found.end = found.end.max(record.block + u64::from(record.blocks));
            }
            for at in 0..record.data_blocks() {
                let (block, number) = (record.block + u64::from(at), record.data + at);
                let bytes = &data[(number * BLOCK) as usize..][..BLOCK as usize];
                let crc = frame.checksum(number);
                if checksum::of_block(block, bytes) != crc && self.bad.len() <= BAD_MAX {
                    let unit = unit + frame.header_units() + number * BLOCK_UNITS;
                    let bad = Bad { life: head.life, record, block, crc, sequence };
                    self.bad.insert((blob, unit), bad);
                }
            }
        }
    }

    fn see_page(&mut self, blob: BlobId, unit: u32, run: RunId, number: u32) {
        self.segments[blob.0 as usize].is_index = true;
        if number == 0 {
            self.runs.insert(run, FoundRun { blob, unit, pages: 1 });
        } else if let Some(found) = self.runs.get_mut(&run)
            && (found.blob, found.unit + number * PAGE_UNITS) == (blob, unit)
            && found.pages == number
        {
            found.pages += 1;
        }
    }

    /// All segments are read: decides how to go on.
    fn plan(&mut self) {
        let is_used = |segment: &&Segment| segment.life > 0 || segment.is_index;
        self.report.segments = self.segments.iter().filter(is_used).count() as u32;
        self.at = 0;
        self.sequences.values_mut().for_each(Sequences::sort);
        if self.bad.len() > BAD_MAX {
            return self.end(Err(RebuildError::TooDamaged));
        }
        if self.report.segments == 0 && self.copy.is_none() {
            return self.end(Err(RebuildError::Nothing));
        }
        if let Some(manifest) = self.exact() {
            self.report.recipe = Recipe::Copy;
            let runs = manifest.partitions.iter().flat_map(|partition| partition.levels.iter().flatten());
            self.parts = runs
                .flat_map(|run| {
                    let (blob, start) = (run.place.blob, u32::from(run.place.unit));
                    (0..run.shape.pages)
                        .step_by(PAGES as usize)
                        .map(move |page| (blob, start + page * PAGE_UNITS, PAGES.min(run.shape.pages - page)))
                })
                .collect();
            self.manifest = Some(manifest);
            self.phase = Phase::Count;
            return;
        }
        self.infer(true);
    }

    /// Goes on by the headers of frames, and by the runs of the copy if they are those of the end.
    fn infer(&mut self, uses_runs: bool) {
        if uses_runs {
            self.use_runs();
        }
        let manifest = self.inferred();
        match manifest.verify(&self.facts) {
            Ok(()) => self.begin_index(manifest),
            Err(error) => self.end(Err(RebuildError::Wrong(error))),
        }
    }

    /// The newest opening of which a segment knows.
    fn opening(&self) -> u32 {
        let lives = self.segments.iter().map(|segment| segment.life);
        let runs = self.runs.keys().map(|run| run.0);
        lives.chain(runs).map(|number| (number >> 32) as u32).max().unwrap_or(0)
    }

    /// The blob of a segment, as its frames describe it.
    fn blob(segment: &Segment, kind: BlobKind) -> Blob {
        Blob { kind, life: segment.life, live: 0 }
    }

    /// A manifest without an index, which has all segments, and the volumes of the copy and of what else was found.
    fn inferred(&mut self) -> Manifest {
        let mut manifest = match self.copy.take() {
            Some(copy) => {
                self.report.recipe = Recipe::Headers;
                copy.manifest
            }
            None => Manifest::new(self.uuid, &self.facts),
        };
        let apply = |manifest: &mut Manifest, edit| {
            manifest.apply(edit).expect("what is added is not there");
        };
        let opening = manifest.opening.max(self.opening());
        apply(&mut manifest, Edit::Opened { opening });
        let first = manifest.next_timeline;
        let unknown: Vec<_> =
            self.timelines.range(TimelineId(first)..).map(|(id, found)| (*id, *found)).collect();
        for (id, found) in unknown {
            // What is about the largest number was not written by a pool.
            if id.0 == u32::MAX || manifest.next_volume == u32::MAX {
                continue;
            }
            apply(
                &mut manifest,
                Edit::Timeline { id, timeline: Timeline { shift: found.shift, base: None } },
            );
            let range = u64::from(RANGE_BLOCKS);
            let units =
                (found.end.max(1).next_multiple_of(range) * u64::from(BLOCK_UNITS)).min(VOLUME_UNITS_MAX);
            let mut uuid = self.uuid;
            for (byte, number) in uuid.iter_mut().zip(id.0.wrapping_add(1).to_le_bytes()) {
                *byte ^= number;
            }
            let mut name = format!("recovered-{}", id.0);
            while manifest.named(&name).is_some() {
                name.push('+');
            }
            let volume = VolumeId(manifest.next_volume);
            let label = Label { name, uuid };
            let volume_of = Volume {
                label,
                units,
                block_size: UNIT,
                when_full: WhenFull::Fail,
                is_thick: false,
                timeline: id,
                cut: None,
            };
            apply(&mut manifest, Edit::Volume { id: volume, volume: volume_of });
            let what = "its name, its size and its snapshots are lost; if it was a clone, what it had of its snapshot reads as zeroes";
            self.add_damage(Some(volume), 0, units / u64::from(BLOCK_UNITS), what);
        }
        for (number, segment) in (0..).zip(&self.segments) {
            let edit = Edit::Blob { id: BlobId(number), blob: Self::blob(segment, BlobKind::Data) };
            apply(&mut manifest, edit);
        }
        manifest
    }
}

/// The volumes and snapshots of a manifest.
fn names(manifest: &Manifest) -> Vec<(VolumeId, String)> {
    manifest.volumes.iter().map(|(id, volume)| (*id, volume.label.name.clone())).collect()
}
