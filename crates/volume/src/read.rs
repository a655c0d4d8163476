//! Reads: lookups of blocks, reads of their data, verification. Any context.
//!
//! A read looks up the blocks of one range after the other. Where index pages or checksums are missing, it waits for them and
//! looks the range up again; nothing was started for the range then. Data is read into buffers of the pool and reaches the
//! request's memory after its checksum was verified. Blobs are pinned while they are read. A request may ask for the places of
//! its data only, which the caller reads then (`reader.rs`).

use crate::active::{Op, Origin, Phase};
use crate::dense::DenseKey;
use crate::frame::{self, Frame};
use crate::manifest::Base;
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::request::{Extent, ExtentPlace};
use crate::{
    BLOCK, BLOCK_UNITS, BlobId, Extents, ForeignId, ForeignPiece, RANGE_BLOCKS, Status, StoreError, StoreOp,
    UNIT,
};
use aryk_dma::{Buffer, Sgl};
use aryk_slots::Key;
use aryk_volume_index::{Commit, NeedPages, PageBytes, Place, Query, RunId, Slot, TimelineId, Value};

/// Blocks of one operation.
const READ_BLOCKS_MAX: u32 = 256;

/// Operations of one request in flight.
const READS_MAX: u32 = 64;

/// What a block of a range is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// Not known yet.
    Open,
    /// Zeroes.
    Zero,
    /// Data at a place.
    Data { blob: BlobId, unit: u32, crc: u32 },
    /// Data of a dense frame, whose checksum is in the frame's header.
    Dense { place: Place },
    /// Data of the foreign disk of a timeline.
    Foreign(TimelineId),
}

impl Found {
    /// The checksum of data at a place.
    fn checksum(&self) -> u32 {
        match self {
            Self::Data { crc, .. } => *crc,
            _ => unreachable!("the blocks are data"),
        }
    }
}

/// Who waits for an index page or for checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiter {
    Request(Key),
    Cleaner,
    Compactor,
    Task,
    Scrub,
}

/// Blocks of one range, at one view.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) timeline: TimelineId,
    pub(crate) partition: usize,
    pub(crate) view: Commit,
    pub(crate) block: u64,
    pub(crate) count: u32,
}

impl Wanted {
    pub(crate) const fn range(&self) -> u32 {
        (self.block / RANGE_BLOCKS as u64) as u32
    }

    pub(crate) const fn first(&self) -> u16 {
        (self.block % RANGE_BLOCKS as u64) as u16
    }
}

impl Pool {
    /// Starts a read. One that comes after the abort of a change waits until the change has ended: other reads must not differ
    /// in what they see of it.
    pub(crate) fn start_read(&mut self, key: Key) {
        let request = self.requests.get(key).expect("the read is under way");
        let runtime = self.runtimes.get_mut(&request.volume).expect("the volume exists");
        if runtime.abandoned > 0 && matches!(request.origin, Origin::User(_)) {
            runtime.behind.push(key);
        } else {
            self.advance_read(key);
        }
    }

    /// Goes on with a read.
    pub(crate) fn advance_read(&mut self, key: Key) {
        loop {
            let request = self.requests.get_mut(key).expect("the read is under way");
            let end = request.end_block();
            if request.status != Status::Ok || request.cursor >= end {
                break;
            }
            if request.left >= READS_MAX {
                return;
            }
            let (timeline, volume, block) = (request.timeline, request.volume, request.cursor);
            let origin = request.origin;
            let count = (end - block).min(u64::from(RANGE_BLOCKS) - block % u64::from(RANGE_BLOCKS)) as u32;
            let partition = self.partition_of(timeline, block);
            let (timeline, view) = if origin == Origin::Inflate {
                self.base_view(timeline, partition)
            } else {
                let cut = self.keeper.manifest.volumes.get(&volume).and_then(|volume| volume.cut.as_ref());
                (timeline, cut.map_or(Commit::MAX, |cut| cut[partition]))
            };
            let wanted = Wanted { timeline, partition, view, block, count };
            if let Err(waits) = self.resolve(&wanted, Waiter::Request(key)) {
                let request = self.requests.get_mut(key).expect("the read is under way");
                request.phase = Phase::Looking;
                request.waits = waits;
                return;
            }
            self.take_found(key, block);
            self.requests.get_mut(key).expect("the read is under way").cursor += u64::from(count);
        }
        let request = self.requests.get_mut(key).expect("the read is under way");
        request.phase = Phase::Reading;
        if request.left == 0 {
            self.finish(key);
        }
    }

    /// The view that is the base of a timeline. For a foreign base, a view of the timeline that is older than all writes.
    fn base_view(&self, timeline: TimelineId, partition: usize) -> (TimelineId, Commit) {
        match self.histories.get(timeline).and_then(|history| history.base.as_ref()) {
            Some(Base::View { timeline, cut }) => (*timeline, cut[partition]),
            _ => (timeline, Commit::ZERO),
        }
    }

    /// Looks up what blocks are, into `self.found`. An error says how many pages or headers the waiter waits for.
    pub(crate) fn resolve(&mut self, wanted: &Wanted, waiter: Waiter) -> Result<(), u32> {
        self.found.clear();
        self.found.resize(wanted.count as usize, Found::Open);
        let (mut timeline, mut view) = (wanted.timeline, wanted.view);
        loop {
            let query = Query {
                timeline,
                range: wanted.range(),
                first: Slot::block(wanted.first()),
                count: wanted.count as u16,
                view,
            };
            let index = &self.partitions[wanted.partition].index;
            if let Err(need) = index.lookup(&self.cache, &query, &mut self.slots) {
                return Err(self.want_pages(&need, waiter));
            }
            if index.take_paid_merge() {
                self.jobs.want_merge(wanted.partition);
            }
            let mut is_open = false;
            for (at, found) in self.found.iter_mut().enumerate().filter(|(_, found)| **found == Found::Open) {
                match self.slots.get(Slot::block(wanted.first() + at as u16)).map(|version| version.value) {
                    Some(Value::Zero) => *found = Found::Zero,
                    Some(Value::Block { place, crc }) => {
                        *found = Found::Data { blob: place.blob, unit: u32::from(place.unit), crc };
                    }
                    Some(Value::Dense { place }) => *found = Found::Dense { place },
                    None => is_open = true,
                }
            }
            if !is_open {
                break;
            }
            match self.histories.get(timeline).and_then(|history| history.base.as_ref()) {
                Some(Base::View { timeline: base, cut }) => (timeline, view) = (*base, cut[wanted.partition]),
                Some(Base::Foreign(_)) => return self.fill_open(wanted, Found::Foreign(timeline), waiter),
                None => return self.fill_open(wanted, Found::Zero, waiter),
            }
        }
        self.resolve_dense(wanted, waiter)
    }

    fn fill_open(&mut self, wanted: &Wanted, with: Found, waiter: Waiter) -> Result<(), u32> {
        self.found.iter_mut().filter(|found| **found == Found::Open).for_each(|found| *found = with);
        self.resolve_dense(wanted, waiter)
    }

    /// Finds the checksums of blocks of dense frames.
    fn resolve_dense(&mut self, wanted: &Wanted, waiter: Waiter) -> Result<(), u32> {
        let mut waits = 0;
        let mut latest = None;
        for at in 0..self.found.len() {
            let Found::Dense { place } = self.found[at] else { continue };
            let life = self.keeper.life(place.blob).expect("the index refers to blobs in use");
            let key = (place.blob, life, u32::from(place.unit));
            let slot = usize::from(wanted.first()) + at;
            if let Some(checksums) = self.dense.get(&key) {
                let unit = key.2 + dense_header_len(self.facts.alignment) / UNIT + slot as u32 * BLOCK_UNITS;
                self.found[at] = Found::Data { blob: place.blob, unit, crc: checksums[slot] };
            } else if latest != Some(key) {
                latest = Some(key);
                waits += 1;
                self.want_header(key, waiter);
            }
        }
        if waits == 0 { Ok(()) } else { Err(waits) }
    }

    pub(crate) fn want_header(&mut self, key: DenseKey, waiter: Waiter) {
        let waiters = self.headers.entry(key).or_default();
        waiters.push(waiter);
        if waiters.len() > 1 {
            return;
        }
        let len = dense_header_len(self.facts.alignment);
        let data = self.buffers.take(len);
        self.keeper.pin(key.0);
        self.stats.index_read_bytes += u64::from(len);
        self.out.op(Owner::DenseHeader { key }, StoreOp::Read { blob: key.0, unit: key.2, data, len });
    }

    pub(crate) fn want_pages(&mut self, need: &NeedPages, waiter: Waiter) -> u32 {
        for page in need.pages() {
            let waiters = self.pages.entry((page.run, page.page)).or_default();
            waiters.push(waiter);
            if waiters.len() > 1 {
                continue;
            }
            let (blob, unit) = (page.place.blob, u32::from(page.place.unit));
            let data = self.buffers.take(BLOCK);
            self.keeper.pin(blob);
            self.stats.index_read_bytes += u64::from(BLOCK);
            let owner = Owner::Page { run: page.run, page: page.page, blob };
            self.out.op(owner, StoreOp::Read { blob, unit, data, len: BLOCK });
        }
        need.pages().len() as u32
    }

    pub(crate) fn page_answered(
        &mut self,
        run: RunId,
        page: u32,
        blob: BlobId,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(blob);
        let bytes: &PageBytes = data.bytes().first_chunk().expect("a buffer holds a page");
        let is_ok = result.is_ok() && self.cache.insert(run, page, bytes).is_ok();
        if result.is_ok() && !is_ok {
            self.stats.damaged_blocks += 1;
        }
        self.buffers.give(data);
        for waiter in self.pages.remove(&(run, page)).unwrap_or_default() {
            self.waited(waiter, is_ok);
        }
    }

    pub(crate) fn header_answered(&mut self, key: DenseKey, data: Buffer, result: Result<(), StoreError>) {
        self.unpin(key.0);
        let frame = result.ok().and_then(|()| Frame::parse(data.bytes()).ok());
        let head = |frame: &Frame<'_>| {
            (frame.head().uuid, frame.head().life, frame.head().unit, frame.data_blocks())
        };
        let expected = (self.keeper.manifest.uuid, key.1, key.2, RANGE_BLOCKS);
        let frame = frame.filter(|frame| head(frame) == expected);
        if let Some(frame) = &frame {
            self.dense.insert(key, (0..RANGE_BLOCKS).map(|at| frame.checksum(at)));
        } else if result.is_ok() {
            self.stats.damaged_blocks += 1;
        }
        let is_ok = frame.is_some();
        self.buffers.give(data);
        for waiter in self.headers.remove(&key).unwrap_or_default() {
            self.waited(waiter, is_ok);
        }
    }

    /// A page or header, for which the waiter has waited, is in memory, or cannot be read.
    fn waited(&mut self, waiter: Waiter, is_ok: bool) {
        let key = match waiter {
            Waiter::Request(key) => key,
            Waiter::Cleaner => return self.cleaner_waited(is_ok),
            Waiter::Compactor => return self.compactor_waited(is_ok),
            Waiter::Task => return self.task_waited(is_ok),
            Waiter::Scrub => return self.scrub_waited(is_ok),
        };
        let request = self.requests.get_mut(key).expect("a request waits until all its pages are answered");
        request.waits -= 1;
        if !is_ok {
            request.status = Status::Medium;
        }
        if request.waits == 0 {
            self.advance_read(key);
        }
    }

    /// Starts reads of what was found, from `block` on, or notes where it is.
    fn take_found(&mut self, key: Key, block: u64) {
        let locates = self.requests.get(key).expect("the read is under way").op == Op::Locate;
        let mut at = 0;
        while at < self.found.len() {
            let first = self.found[at];
            let len = self.found[at..]
                .iter()
                .enumerate()
                .take_while(|(index, found)| follows(&first, found, *index))
                .count();
            let start = block + at as u64;
            match first {
                Found::Open | Found::Dense { .. } => unreachable!("all blocks are resolved"),
                _ if locates => self.locate(key, start, at..at + len),
                Found::Zero => self.zero_memory(key, start, len as u64),
                Found::Foreign(timeline) => self.read_foreign(key, timeline, start, len as u64),
                Found::Data { blob, unit, .. } => self.read_data(key, start, blob, unit, at..at + len),
            }
            at += len;
        }
    }

    /// Adds blocks that were found to the extents of a request.
    fn locate(&mut self, key: Key, block: u64, found: std::ops::Range<usize>) {
        let request = self.requests.get_mut(key).expect("the request is under way");
        if request.extents.list.capacity() == 0 {
            request.extents = self.extent_lists.pop().unwrap_or_default();
        }
        let place = match self.found[found.start] {
            Found::Zero => None,
            Found::Data { blob, unit, .. } => Some(ExtentPlace { blob, unit, offset: 0 }),
            _ => {
                request.status = Status::Foreign;
                return;
            }
        };
        let blocks = found.len() as u32;
        request.extents.list.push(Extent { block, blocks, place });
        if let Some(ExtentPlace { blob, .. }) = place {
            request.extents.checksums.extend(self.found[found].iter().map(Found::checksum));
            self.keeper.pin(blob);
            self.stats.data_read_bytes += u64::from(blocks * BLOCK);
        }
    }

    /// Takes back what a reply has lent ([`crate::Reply::extents`]): nothing reads it any more. `damaged_blocks` did not match
    /// their checksums.
    pub fn give_back(&mut self, extents: Extents, damaged_blocks: u64) {
        self.stats.damaged_blocks += damaged_blocks;
        self.lent -= u64::from(!extents.list.is_empty());
        self.take_back(extents);
    }

    pub(crate) fn take_back(&mut self, mut extents: Extents) {
        for extent in extents.list.drain(..) {
            if let Some(ExtentPlace { blob, .. }) = extent.place {
                self.unpin(blob);
            }
        }
        if extents.list.capacity() > 0 {
            extents.checksums.clear();
            self.extent_lists.push(extents);
        }
    }

    fn read_data(&mut self, key: Key, block: u64, blob: BlobId, unit: u32, found: std::ops::Range<usize>) {
        let len = found.len() as u32 * BLOCK;
        let mut checksums = self.checksum_lists.pop().unwrap_or_default();
        checksums.extend(self.found[found].iter().map(Found::checksum));
        let data = self.buffers.take(len);
        self.keeper.pin(blob);
        self.stats.data_read_bytes += u64::from(len);
        self.out.op(
            Owner::Data { request: key, blob, block, checksums },
            StoreOp::Read { blob, unit, data, len },
        );
        self.requests.get_mut(key).expect("the read is under way").left += 1;
    }

    fn zero_memory(&self, key: Key, block: u64, blocks: u64) {
        let request = self.requests.get(key).expect("the read is under way");
        fill_zeroes(request.unit, &request.data, block, blocks);
    }

    /// Has a piece read from the foreign disk of a timeline: by the caller if it is the caller's request.
    fn read_foreign(&mut self, key: Key, timeline: TimelineId, block: u64, blocks: u64) {
        let Some(Base::Foreign(foreign)) =
            self.histories.get(timeline).and_then(|history| history.base.as_ref())
        else {
            unreachable!("the timeline has a foreign base");
        };
        let disk_units = foreign.units;
        let request = self.requests.get_mut(key).expect("the read is under way");
        let (at, len) = memory_of(request.unit, &request.data, block, blocks);
        let start = request.unit + u64::from(at / UNIT);
        let units = u64::from(len / UNIT).min(disk_units.saturating_sub(start));
        let there = units as u32 * UNIT;
        request.data.slice(at + there, len - there).fill(0);
        if units == 0 {
            return;
        }
        let piece =
            ForeignPiece { disk: ForeignId::of(timeline), disk_unit: start, at: u64::from(at / UNIT), units };
        if matches!(request.origin, Origin::User(_) | Origin::Abandoned) {
            if request.foreign.capacity() == 0 {
                let list = self.take_foreign_list();
                self.requests.get_mut(key).expect("the read is under way").foreign = list;
            }
            let list = &mut self.requests.get_mut(key).expect("the read is under way").foreign;
            match list.last_mut() {
                Some(last) if last.disk == piece.disk && last.at + last.units == piece.at => {
                    last.units += units
                }
                _ => list.push(piece),
            }
            return;
        }
        request.left += 1;
        let data = self.buffers.take(there);
        let op = StoreOp::ReadForeign { disk: piece.disk, unit: piece.disk_unit, data, len: there };
        self.out.op(Owner::Foreign { request: key, at, len: there }, op);
    }

    pub(crate) fn foreign_answered(
        &mut self,
        key: Key,
        at: u32,
        len: u32,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        let request = self.requests.get_mut(key).expect("the read is under way");
        match result {
            Ok(()) => request.data.write(at, &data.bytes()[..len as usize]),
            Err(_) => request.status = Status::Medium,
        }
        self.buffers.give(data);
        self.read_ended(key);
    }

    pub(crate) fn data_answered(
        &mut self,
        key: Key,
        blob: BlobId,
        block: u64,
        mut checksums: Vec<u32>,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(blob);
        let request = self.requests.get_mut(key).expect("the read is under way");
        if result.is_err() {
            request.status = Status::Medium;
        } else if !deliver(request.unit, &request.data, block, &checksums, data.bytes()) {
            request.status = Status::Medium;
            self.stats.damaged_blocks += 1;
        }
        checksums.clear();
        self.checksum_lists.push(checksums);
        self.buffers.give(data);
        self.read_ended(key);
    }

    fn read_ended(&mut self, key: Key) {
        let request = self.requests.get_mut(key).expect("the read is under way");
        request.left -= 1;
        if request.waits == 0 && (request.left == 0 || request.cursor < request.end_block()) {
            self.advance_read(key);
        }
    }
}

/// Whether a block, `index` blocks behind `first`, can be in the same operation.
fn follows(first: &Found, found: &Found, index: usize) -> bool {
    match (first, found) {
        (Found::Data { blob, unit, .. }, Found::Data { blob: other, unit: at, .. }) => {
            blob == other && *at == unit + index as u32 * BLOCK_UNITS && (index as u32) < READ_BLOCKS_MAX
        }
        (Found::Zero, Found::Zero) => true,
        (Found::Foreign(timeline), Found::Foreign(other)) => timeline == other,
        _ => false,
    }
}

/// The part of a request's memory that blocks concern: first byte, bytes. The memory is that of the units from `unit` on.
fn memory_of(unit: u64, memory: &Sgl, block: u64, blocks: u64) -> (u32, u32) {
    let start = (block * u64::from(BLOCK_UNITS)).max(unit);
    let end = ((block + blocks) * u64::from(BLOCK_UNITS)).min(unit + u64::from(memory.len() / UNIT));
    ((start - unit) as u32 * UNIT, (end - start) as u32 * UNIT)
}

/// Fills the memory of blocks with zeroes.
pub(crate) fn fill_zeroes(unit: u64, memory: &Sgl, block: u64, blocks: u64) {
    let (at, len) = memory_of(unit, memory, block, blocks);
    memory.slice(at, len).fill(0);
}

/// Verifies blocks from `block` on, and copies what the memory is for. Returns whether all match their checksums; otherwise
/// nothing is copied.
pub(crate) fn deliver(unit: u64, memory: &Sgl, block: u64, checksums: &[u32], bytes: &[u8]) -> bool {
    let blocks = bytes.chunks_exact(BLOCK as usize).zip(checksums);
    let is_right =
        |(number, (bytes, crc)): (u64, (&[u8], &u32))| crate::checksum::of_block(number, bytes) == *crc;
    let is_right = (block..).zip(blocks).all(is_right);
    if is_right {
        let (at, len) = memory_of(unit, memory, block, checksums.len() as u64);
        let skipped = unit.saturating_sub(block * u64::from(BLOCK_UNITS)) as usize * UNIT as usize;
        memory.write(at, &bytes[skipped..skipped + len as usize]);
    }
    is_right
}

/// Bytes of the header of a dense frame.
pub(crate) fn dense_header_len(alignment: u32) -> u32 {
    frame::header_bytes(1, RANGE_BLOCKS as usize, alignment)
}
