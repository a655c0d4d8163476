//! A disk in virtual time that fails as disks do.
//!
//! An operation ends at a random time, so operations end in another order than they began. Writes are visible once they have
//! ended, and durable once a flush that began later has ended. A crash tears and loses what is not durable: each sector of 512
//! bytes of each write reaches the medium or does not, in any order of the writes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::rc::Rc;

use aryk_dma::Buffer;
use aryk_volume::{Read, ReadId, StoreError};
use aryk_volume_store::{Base, DiskDone, DiskOp, DiskRequest, DiskTag};
use fastrand::Rng;

/// Bytes that reach the medium together.
pub const SECTOR: u64 = 512;
const PAGE: u64 = 4096;

/// What goes wrong, besides crashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Operations of a million that take fifty times as long.
    pub slow_ppm: u32,
    /// Operations of a million that take a minute.
    pub stuck_ppm: u32,
    /// Reads of a million that fail.
    pub read_error_ppm: u32,
    /// Writes of a million that fail.
    pub write_error_ppm: u32,
    /// Flushes of a million that fail.
    pub flush_error_ppm: u32,
    /// Whether writes to places that were never written fail, as on a thin disk that is full.
    pub is_full: bool,
}

/// What survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process ends: what was in flight may have arrived, and all that had ended stays visible.
    Process,
    /// The power fails: everything that is not durable may be lost.
    Power,
    /// The power fails, and nothing that is not durable arrives.
    PowerLosesAll,
    /// The power fails, and everything arrives.
    PowerLosesNothing,
}

type Pages = HashMap<u64, Rc<[u8; PAGE as usize]>>;

#[derive(Clone, Debug)]
enum Content {
    Data(Rc<[u8]>),
    /// A discard of this many bytes, after which they read as zeroes.
    Discard(u64),
}

/// A write or discard that is not durable.
#[derive(Clone, Debug)]
struct Change {
    offset: u64,
    content: Content,
    has_ended: bool,
}

#[derive(Debug)]
enum Work {
    Read {
        offset: u64,
        buffer: Buffer,
        len: u32,
    },
    Change {
        number: u64,
        buffer: Option<Buffer>,
    },
    /// A flush of the changes with these numbers, in the order in which they ended.
    Flush(Vec<u64>),
}

/// Whose an operation is.
#[derive(Clone, Copy, Debug)]
enum Tag {
    Store(DiskTag),
    Shard(u32, DiskTag),
    Reader(ReadId),
}

#[derive(Debug)]
struct Running {
    tag: Tag,
    work: Work,
}

/// The end of an operation.
#[derive(Debug)]
pub enum Ended {
    /// Of the store.
    Store(DiskDone),
    /// Of the store of this shard.
    Shard(u32, DiskDone),
    /// Of a reader.
    Reader(ReadId, Buffer, Result<(), StoreError>),
}

/// Counters of what a disk did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations that ended.
    pub operations: u64,
    /// Operations that failed.
    pub failures: u64,
    /// Crashes.
    pub crashes: u64,
}

/// The disk.
#[derive(Debug)]
pub struct Disk {
    base: Base,
    /// What the next faults are.
    pub faults: Faults,
    visible: Pages,
    durable: Pages,
    /// By number, in the order in which they began.
    changes: BTreeMap<u64, Change>,
    /// Numbers of changes, in the order in which they ended.
    ended: Vec<u64>,
    running: BTreeMap<u64, Running>,
    /// Times at which operations end, and their numbers.
    times: BinaryHeap<Reverse<(u64, u64)>>,
    next_number: u64,
    now: u64,
    /// Sectors that cannot be read until they are written again.
    unreadable: BTreeSet<u64>,
    rng: Rng,
    /// What the disk did so far.
    pub counts: Counts,
    digest: u64,
}

impl Disk {
    /// A disk of zeroes.
    pub fn new(base: Base, seed: u64) -> Self {
        Self {
            base,
            faults: Faults::default(),
            visible: Pages::new(),
            durable: Pages::new(),
            changes: BTreeMap::new(),
            ended: Vec::new(),
            running: BTreeMap::new(),
            times: BinaryHeap::new(),
            next_number: 0,
            now: 0,
            unreadable: BTreeSet::new(),
            rng: Rng::with_seed(seed),
            counts: Counts::default(),
            digest: seed,
        }
    }

    /// A disk with this content.
    pub fn of(base: Base, bytes: &[u8]) -> Self {
        let mut disk = Self::new(base, 0);
        for (number, bytes) in (0..).zip(bytes.chunks_exact(PAGE as usize)) {
            if bytes.iter().any(|byte| *byte != 0) {
                let mut page = [0; PAGE as usize];
                page.copy_from_slice(bytes);
                disk.durable.insert(number, Rc::new(page));
            }
        }
        disk.visible = disk.durable.clone();
        disk
    }

    /// Its size and block.
    pub const fn base(&self) -> Base {
        self.base
    }

    /// Makes the disk larger.
    pub fn grow(&mut self, bytes: u64) {
        self.base.bytes = self.base.bytes.max(bytes);
    }

    /// Microseconds since the start.
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> usize {
        self.running.len()
    }

    /// A value that differs between two runs if the disk saw different operations.
    pub const fn digest(&self) -> u64 {
        self.digest
    }

    /// Begins an operation.
    pub fn submit(&mut self, op: DiskOp) {
        self.begin(Tag::Store(op.tag), op.request);
    }

    /// Begins an operation of a shard, which has a part of the disk for itself from [`shard_place`] on. Flushes and crashes are
    /// those of the whole disk.
    pub fn submit_for(&mut self, shard: u32, op: DiskOp) {
        let place = shard_place(shard);
        let mut request = op.request;
        match &mut request {
            DiskRequest::Read { offset, .. }
            | DiskRequest::Write { offset, .. }
            | DiskRequest::Discard { offset, .. } => *offset += place,
            DiskRequest::Flush => {}
        }
        self.begin(Tag::Shard(shard, op.tag), request);
    }

    /// Begins a read of a reader.
    pub fn read(&mut self, read: Read) {
        let Read { id, offset, data, len } = read;
        self.begin(Tag::Reader(id), DiskRequest::Read { offset, buffer: data, len });
    }

    fn begin(&mut self, tag: Tag, request: DiskRequest) {
        let number = self.next_number;
        self.next_number += 1;
        let work = match request {
            DiskRequest::Read { offset, buffer, len } => {
                self.check(offset, u64::from(len));
                self.note(1, offset, u64::from(len));
                Work::Read { offset, buffer, len }
            }
            DiskRequest::Write { offset, buffer, len } => {
                self.check(offset, u64::from(len));
                self.note(2, offset, u64::from(len));
                let content = Content::Data(Rc::from(&buffer.bytes()[..len as usize]));
                self.changes.insert(number, Change { offset, content, has_ended: false });
                Work::Change { number, buffer: Some(buffer) }
            }
            DiskRequest::Discard { offset, bytes } => {
                self.check(offset, bytes);
                self.note(3, offset, bytes);
                let content = Content::Discard(bytes);
                self.changes.insert(number, Change { offset, content, has_ended: false });
                Work::Change { number, buffer: None }
            }
            DiskRequest::Flush => {
                self.note(4, 0, 0);
                Work::Flush(self.ended.clone())
            }
        };
        self.running.insert(number, Running { tag, work });
        let time = self.now + self.latency();
        self.times.push(Reverse((time, number)));
    }

    /// Ends the operation that ends next; `None` if none is in flight.
    ///
    /// # Panics
    /// If it is a reader's.
    pub fn end_next(&mut self) -> Option<DiskDone> {
        self.end_any().map(|ended| match ended {
            Ended::Store(done) | Ended::Shard(_, done) => done,
            Ended::Reader(..) => panic!("nobody reads beside the store"),
        })
    }

    /// Ends the operation that ends next, a reader's too.
    pub fn end_any(&mut self) -> Option<Ended> {
        let Reverse((time, number)) = self.times.pop()?;
        self.now = self.now.max(time);
        self.counts.operations += 1;
        let Running { tag, work } = self.running.remove(&number).expect("an operation in flight");
        let (buffer, result) = match work {
            Work::Read { offset, mut buffer, len } => {
                let result = self.read_result(offset, len);
                let mut bytes = vec![0; len as usize];
                load(&self.visible, offset, &mut bytes);
                buffer.write(0, &bytes);
                (Some(buffer), result)
            }
            Work::Change { number, buffer } => {
                let change = &self.changes[&number];
                let result = match change.content {
                    Content::Data(_) => self.write_result(change.offset),
                    Content::Discard(_) => Ok(()),
                };
                self.end_change(number, result.is_ok());
                (buffer, result)
            }
            Work::Flush(covered) => {
                let result = self.flush_result();
                for number in covered.into_iter().filter(|_| result.is_ok()) {
                    if let Some(change) = self.changes.remove(&number) {
                        apply(&mut self.durable, change.offset, &change.content);
                    }
                }
                self.ended.retain(|number| self.changes.contains_key(number));
                (None, result)
            }
        };
        self.counts.failures += u64::from(result.is_err());
        Some(match tag {
            Tag::Store(tag) => Ended::Store(DiskDone { tag, buffer, result }),
            Tag::Shard(shard, tag) => Ended::Shard(shard, DiskDone { tag, buffer, result }),
            Tag::Reader(id) => Ended::Reader(id, buffer.expect("reads have buffers"), result),
        })
    }

    /// A failed write may have changed some of its sectors.
    fn end_change(&mut self, number: u64, is_ok: bool) {
        let mut change = self.changes.remove(&number).expect("a change in flight");
        if let Content::Data(data) = &change.content {
            let sectors = change.offset / SECTOR..(change.offset + data.len() as u64) / SECTOR;
            let good: Vec<_> = self.unreadable.range(sectors).copied().collect();
            for sector in good {
                self.unreadable.remove(&sector);
            }
        }
        change.has_ended = true;
        if is_ok {
            apply(&mut self.visible, change.offset, &change.content);
            self.changes.insert(number, change);
            self.ended.push(number);
        } else {
            for part in self.arrived(&change) {
                self.insert_ended(part);
            }
        }
    }

    fn insert_ended(&mut self, change: Change) {
        let number = self.next_number;
        self.next_number += 1;
        apply(&mut self.visible, change.offset, &change.content);
        self.changes.insert(number, Change { has_ended: true, ..change });
        self.ended.push(number);
    }

    /// The sectors of a change that reach the medium.
    fn arrived(&mut self, change: &Change) -> Vec<Change> {
        let len = match &change.content {
            Content::Data(data) => data.len() as u64,
            Content::Discard(bytes) => *bytes,
        };
        let odds = self.odds();
        let grain = match change.content {
            Content::Data(_) => SECTOR,
            // Discards are large, and most disks carry them out by larger units.
            Content::Discard(_) => (len / 4).max(SECTOR),
        };
        let mut parts = Vec::new();
        for at in (0..len).step_by(grain as usize) {
            if self.rng.u32(..100) < odds {
                let bytes = grain.min(len - at);
                let content = match &change.content {
                    Content::Data(data) => Content::Data(Rc::from(&data[at as usize..(at + bytes) as usize])),
                    Content::Discard(_) => Content::Discard(bytes),
                };
                parts.push(Change { offset: change.offset + at, content, has_ended: true });
            }
        }
        parts
    }

    /// Percent of a write's sectors that reach the medium.
    fn odds(&mut self) -> u32 {
        match self.rng.u32(..4) {
            0 => 0,
            1 => 100,
            _ => self.rng.u32(1..100),
        }
    }

    /// Ends everything that is in flight, without results.
    pub fn crash(&mut self, crash: Crash) {
        self.counts.crashes += 1;
        self.note(5, crash as u64, 0);
        self.running.clear();
        self.times.clear();
        if crash == Crash::Process {
            let numbers: Vec<_> =
                self.changes.iter().filter(|(_, c)| !c.has_ended).map(|(n, _)| *n).collect();
            for number in numbers {
                let change = self.changes.remove(&number).expect("just found");
                for part in self.arrived(&change) {
                    self.insert_ended(part);
                }
            }
            return;
        }
        let mut changes: Vec<_> = std::mem::take(&mut self.changes).into_values().collect();
        self.ended.clear();
        match crash {
            Crash::PowerLosesAll => changes.clear(),
            Crash::PowerLosesNothing => {}
            Crash::Power | Crash::Process => {
                self.rng.shuffle(&mut changes);
                changes = changes.iter().flat_map(|change| self.arrived(change)).collect();
            }
        }
        for change in changes {
            apply(&mut self.durable, change.offset, &change.content);
        }
        self.visible = self.durable.clone();
    }

    /// Changes a bit, without a sign of it.
    pub fn flip(&mut self, offset: u64, bit: u8) {
        self.note(6, offset, u64::from(bit));
        for pages in [&mut self.visible, &mut self.durable] {
            let page = pages.entry(offset / PAGE).or_insert_with(|| Rc::new([0; PAGE as usize]));
            Rc::make_mut(page)[(offset % PAGE) as usize] ^= 1 << bit;
        }
    }

    /// Whether operations may fail from now on.
    pub fn is_faulty(&self) -> bool {
        let Faults { read_error_ppm, write_error_ppm, flush_error_ppm, is_full, .. } = self.faults;
        is_full || read_error_ppm + write_error_ppm + flush_error_ppm > 0 || !self.unreadable.is_empty()
    }

    /// No operation fails any more, and all sectors can be read.
    pub fn heal(&mut self) {
        self.faults = Faults { slow_ppm: self.faults.slow_ppm, ..Faults::default() };
        self.unreadable.clear();
    }

    /// Makes a sector unreadable until it is written again.
    pub fn lose(&mut self, sector: u64) {
        self.note(7, sector, 0);
        self.unreadable.insert(sector);
    }

    /// A random page that was written, as its byte offset.
    pub fn written_page(&self, rng: &mut Rng) -> Option<u64> {
        let mut pages: Vec<_> = self.visible.keys().copied().collect();
        pages.sort_unstable();
        (!pages.is_empty()).then(|| pages[rng.usize(..pages.len())] * PAGE)
    }

    /// Bytes as a read would return them.
    pub fn peek(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        load(&self.visible, offset, &mut bytes);
        bytes
    }

    /// Byte offsets of the sectors that begin with these bytes.
    pub fn sectors_with(&self, magic: &[u8]) -> Vec<u64> {
        let mut found: Vec<_> = self
            .visible
            .iter()
            .flat_map(|(page, bytes)| {
                let sectors = bytes.chunks(SECTOR as usize).zip((page * PAGE..).step_by(SECTOR as usize));
                sectors.filter(|(sector, _)| sector.starts_with(magic)).map(|(_, offset)| offset)
            })
            .collect();
        found.sort_unstable();
        found
    }

    /// A copy of the disk as it is after a clean shutdown.
    pub fn fork(&self, seed: u64) -> Self {
        let mut copy = Self::new(self.base, seed);
        copy.visible = self.visible.clone();
        copy.durable = self.visible.clone();
        copy.unreadable = self.unreadable.clone();
        copy
    }

    fn check(&self, offset: u64, len: u64) {
        let block = u64::from(self.base.block);
        assert!(
            len > 0 && offset.is_multiple_of(block) && len.is_multiple_of(block),
            "{len} bytes at {offset}"
        );
        assert!(offset + len <= self.base.bytes, "{len} bytes at {offset} of {}", self.base.bytes);
    }

    fn latency(&mut self) -> u64 {
        let normal = self.rng.u64(20..400);
        let dice = self.rng.u32(..1_000_000);
        let Faults { slow_ppm, stuck_ppm, .. } = self.faults;
        match dice {
            _ if dice < stuck_ppm => 60_000_000,
            _ if dice < stuck_ppm + slow_ppm => 50 * normal,
            _ => normal,
        }
    }

    fn read_result(&mut self, offset: u64, len: u32) -> Result<(), StoreError> {
        let sectors = offset / SECTOR..(offset + u64::from(len)) / SECTOR;
        let is_lost = self.unreadable.range(sectors).next().is_some();
        let fails = self.rng.u32(..1_000_000) < self.faults.read_error_ppm;
        if is_lost || fails { Err(StoreError::Medium) } else { Ok(()) }
    }

    fn write_result(&mut self, offset: u64) -> Result<(), StoreError> {
        if self.faults.is_full && !self.visible.contains_key(&(offset / PAGE)) {
            return Err(StoreError::NoSpace);
        }
        let fails = self.rng.u32(..1_000_000) < self.faults.write_error_ppm;
        if fails { Err(StoreError::Medium) } else { Ok(()) }
    }

    /// What a failed flush should have made durable may still be lost.
    fn flush_result(&mut self) -> Result<(), StoreError> {
        let ppm = self.faults.flush_error_ppm;
        let fails = ppm > 0 && self.rng.u32(..1_000_000) < ppm;
        if fails { Err(StoreError::Medium) } else { Ok(()) }
    }

    fn note(&mut self, kind: u64, offset: u64, len: u64) {
        for value in [kind, offset, len, self.now] {
            self.digest = (self.digest ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
    }
}

/// The byte offset of the part of the disk that a shard has.
pub const fn shard_place(shard: u32) -> u64 {
    (shard as u64) << 40
}

fn load(pages: &Pages, offset: u64, bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        let place = offset + at as u64;
        let inside = (place % PAGE) as usize;
        let len = (PAGE as usize - inside).min(bytes.len() - at);
        match pages.get(&(place / PAGE)) {
            Some(page) => bytes[at..at + len].copy_from_slice(&page[inside..inside + len]),
            None => bytes[at..at + len].fill(0),
        }
        at += len;
    }
}

fn apply(pages: &mut Pages, offset: u64, content: &Content) {
    let len = match content {
        Content::Data(data) => data.len() as u64,
        Content::Discard(bytes) => *bytes,
    };
    let mut at = 0;
    while at < len {
        let place = offset + at;
        let inside = (place % PAGE) as usize;
        let step = (PAGE - place % PAGE).min(len - at);
        match content {
            Content::Discard(_) if step == PAGE => {
                pages.remove(&(place / PAGE));
            }
            Content::Discard(_) => {
                if let Some(page) = pages.get_mut(&(place / PAGE)) {
                    Rc::make_mut(page)[inside..inside + step as usize].fill(0);
                }
            }
            Content::Data(data) => {
                let page = pages.entry(place / PAGE).or_insert_with(|| Rc::new([0; PAGE as usize]));
                let data = &data[at as usize..(at + step) as usize];
                Rc::make_mut(page)[inside..inside + step as usize].copy_from_slice(data);
            }
        }
        at += step;
    }
}
