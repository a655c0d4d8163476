//! The cleaner: blobs of which little is alive are emptied, so that they can be freed. Any context.
//!
//! It reads a victim from its start, frame after frame. Of each record, it looks up which blocks a view still sees at their place
//! in the victim. These are written to a data blob, sorted by volume and block, with their checksums unchanged. Then each is
//! looked up again, and gets an entry with its key and its new place if it is still seen at the old one. The victim is freed when
//! flushes and merges have left out all entries that refer to it.

use crate::dead::DeadBlocks;
use crate::frame::{self, Frame, FrameError, Head, Kind, NO_STREAM, Record};
use crate::manifest::{Blob, BlobKind};
use crate::moving::{MOVED_MAX, Moved, moved_header_len};
use crate::outbox::Owner;
use crate::pool::Pool;
use crate::read::Waiter;
use crate::room::DEAD_SHARE_MIN;
use crate::{BLOCK, BLOCK_UNITS, BlobId, RANGE_BLOCKS, StoreError, StoreOp, UNIT};
use aryk_dma::Buffer;
use aryk_volume_index::{Place, Slot, Value};
use std::collections::BTreeSet;

/// Bytes of one read of a victim.
const READ_BYTES: u32 = 1 << 20;

/// Lookups in one turn.
const LOOKUPS_PER_TURN: u32 = 64;

/// Blocks for which what is left of a blob is used.
const MOVED_MIN: u32 = 16;

/// What the cleaner does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It looks at the blocks of the victim from this record on, and this block of the record.
    Examine { record: usize, block: u32 },
    /// It writes what it has gathered.
    Write,
    /// It makes entries, from this block on.
    Insert { at: usize },
}

/// A victim that is being emptied.
#[derive(Debug)]
struct Victim {
    blob: BlobId,
    life: u64,
    /// What was read of the blob: from this unit on, these bytes.
    unit: u32,
    bytes: Vec<u8>,
    /// Where in `bytes` the frame begins that is examined.
    start: usize,
    /// That frame, when all of it is in `bytes`.
    frame: Option<OpenFrame>,
    is_reading: bool,
    has_ended: bool,
    /// A block is damaged: its entry, and so the blob, stays.
    is_damaged: bool,
    waits: u32,
    phase: Phase,
    /// The record and block at which to go on when what was gathered has moved.
    resume: (usize, u32),
    moved: Vec<Moved>,
    /// Room for a header, then blocks.
    data: Option<Buffer>,
    /// Where the gathered blocks are being written: unit of the first block.
    target: Option<(BlobId, u32)>,
}

/// A frame whose blocks are examined.
#[derive(Debug)]
struct OpenFrame {
    records: Vec<Record>,
    header_units: u32,
    units: u32,
}

impl Victim {
    /// The unit of the blob at which the frame begins that is examined.
    const fn frame_unit(&self) -> u32 {
        self.unit + self.start as u32 / UNIT
    }
}

/// The cleaner of a pool.
#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    victim: Option<Victim>,
    /// The blob that gets what is moved: life and next unit.
    writer: Option<(BlobId, u64, u32)>,
    /// Victims that were emptied: they become free when no level refers to them any more.
    pub(crate) done: BTreeSet<BlobId>,
    /// Blocks that it need not look up.
    pub(crate) dead: DeadBlocks,
    /// Victims that cannot be emptied.
    stuck: BTreeSet<BlobId>,
    /// Whether the cleaner waits for a free blob.
    is_blocked: bool,
    /// Whether free blobs were short at the end of the latest turn.
    pub(crate) was_short: bool,
    /// Whether more may be dead, or blobs are shorter, than at the latest look for a victim.
    pub(crate) is_due: bool,
}

impl Cleaner {
    /// Whether the cleaner has nothing to do, or cannot do it before blobs are free.
    pub(crate) const fn is_idle(&self) -> bool {
        (self.victim.is_none() && !self.is_due) || self.is_blocked
    }

    /// Whether it has begun a blob for what it moves.
    pub(crate) const fn has_writer(&self) -> bool {
        self.writer.is_some()
    }

    /// A blob has begun another life.
    pub(crate) fn forget(&mut self, blob: BlobId) {
        self.done.remove(&blob);
        self.dead.forget(blob);
        self.stuck.remove(&blob);
    }
}

/// What a look at the victim's blocks needs next.
enum Look {
    /// A lookup was done.
    Done,
    /// Something is to be waited for, or another phase has begun.
    Pause,
}

impl Pool {
    /// Does a bounded piece of cleaning. Returns whether there is more to do without input.
    pub(crate) fn step_cleaner(&mut self) -> bool {
        let Some(mut victim) = self.cleaner.victim.take().or_else(|| self.choose_victim()) else {
            return false;
        };
        let mut has_more = true;
        for _ in 0..LOOKUPS_PER_TURN {
            if victim.waits > 0 || victim.is_reading || victim.phase == Phase::Write {
                has_more = false;
                break;
            }
            let look = match victim.phase {
                Phase::Examine { record, block } => self.examine(&mut victim, record, block),
                Phase::Insert { at } => self.insert_moved(&mut victim, at),
                Phase::Write => Look::Pause,
            };
            if victim.has_ended && victim.moved.is_empty() {
                let ended = if victim.is_damaged { &mut self.cleaner.stuck } else { &mut self.cleaner.done };
                ended.insert(victim.blob);
                self.jobs.can_force = true;
                self.buffers_of(victim);
                return true;
            }
            if matches!(look, Look::Pause) {
                has_more = false;
                break;
            }
        }
        self.cleaner.victim = Some(victim);
        has_more
    }

    fn buffers_of(&mut self, victim: Victim) {
        if let Some(data) = victim.data {
            self.buffers.give(data);
        }
    }

    /// The closed blob of which most is dead, if blobs are short or too much of the used space is dead. What it has
    /// must fit: the cleaner looks again when more blobs are free.
    fn choose_victim(&mut self) -> Option<Victim> {
        if !std::mem::take(&mut self.cleaner.is_due) {
            return None;
        }
        if self.is_roomy() {
            return None;
        }
        let blobs = &self.keeper.manifest.blobs;
        // A blob that the cleaner has just filled counts as mostly dead until a flush: it would move the same blocks for ever.
        let is_free_to_move = |id: BlobId| {
            !self.keeper.is_open(id)
                && !self.keeper.is_held(id)
                && !self.cleaner.done.contains(&id)
                && !self.cleaner.stuck.contains(&id)
                && !self.keeper.log_blobs.contains(&id)
        };
        let mut deadest = blobs.deadest(i64::from(self.facts.blob_units / DEAD_SHARE_MIN));
        let (blob, Blob { life, live, .. }) = deadest.find_map(|(id, _)| {
            let blob = blobs.get(id)?;
            (blob.live > 0 && is_free_to_move(id)).then_some((id, *blob))
        })?;
        if !self.can_move(live) {
            return None;
        }
        self.cleaner.is_due = true;
        Some(Victim {
            blob,
            life,
            unit: 0,
            bytes: Vec::new(),
            start: 0,
            frame: None,
            is_reading: false,
            has_ended: false,
            is_damaged: false,
            waits: 0,
            phase: Phase::Examine { record: 0, block: 0 },
            resume: (0, 0),
            moved: Vec::new(),
            data: None,
            target: None,
        })
    }

    /// Looks at the next blocks of the victim.
    fn examine(&mut self, victim: &mut Victim, record: usize, block: u32) -> Look {
        if self.keeper.life(victim.blob) != Some(victim.life) {
            // It was freed meanwhile.
            victim.has_ended = true;
            return self.write_moved(victim);
        }
        let Some(frame) = &victim.frame else { return self.open_frame(victim) };
        let Some(next) = frame.records.get(record).copied() else {
            victim.start += (frame.units * UNIT) as usize;
            victim.frame = None;
            victim.phase = Phase::Examine { record: 0, block: 0 };
            return Look::Done;
        };
        match next.kind {
            Kind::Dense => self.examine_dense(victim, record, &next),
            Kind::Data if block < next.blocks => self.examine_blocks(victim, record, block, &next),
            Kind::Data | Kind::Zero | Kind::ZeroRanges => {
                victim.phase = Phase::Examine { record: record + 1, block: 0 };
                Look::Done
            }
        }
    }

    /// Verifies the next frame of the victim; the victim ends where there is none.
    fn open_frame(&mut self, victim: &mut Victim) -> Look {
        let unit = victim.frame_unit();
        let left = (self.facts.blob_units - unit) as usize * UNIT as usize;
        let bytes = &victim.bytes[victim.start..];
        let frame = match Frame::header_len(bytes) {
            Ok(len) if len <= bytes.len() => Frame::parse(&bytes[..len]).ok(),
            Ok(len) if len <= left => return self.read_victim(victim),
            Err(FrameError::Short) if left >= UNIT as usize => return self.read_victim(victim),
            Ok(_) | Err(_) => None,
        };
        let is_right = |frame: &Frame<'_>| {
            let head = frame.head();
            (head.uuid, head.life, head.unit) == (self.keeper.manifest.uuid, victim.life, unit)
                && frame.units() as usize * UNIT as usize <= left
        };
        let Some(frame) = frame.filter(is_right) else {
            victim.has_ended = true;
            return self.write_moved(victim);
        };
        if bytes.len() < (frame.units() * UNIT) as usize {
            return self.read_victim(victim);
        }
        let (header_units, units) = (frame.header_units(), frame.units());
        victim.frame = Some(OpenFrame { records: frame.records().collect(), header_units, units });
        Look::Done
    }

    /// Reads more of the victim, behind what was read and not examined yet.
    fn read_victim(&mut self, victim: &mut Victim) -> Look {
        victim.unit = victim.frame_unit();
        victim.bytes.drain(..std::mem::take(&mut victim.start));
        let unit = victim.unit + victim.bytes.len() as u32 / UNIT;
        let len = ((self.facts.blob_units - unit) * UNIT).min(READ_BYTES);
        let data = self.buffers.take(len);
        victim.is_reading = true;
        self.keeper.pin(victim.blob);
        self.stats.background_read_bytes += u64::from(len);
        let blob = victim.blob;
        self.out.op(Owner::CleanRead { blob, len }, StoreOp::Read { blob, unit, data, len });
        Look::Pause
    }

    pub(crate) fn clean_read_answered(
        &mut self,
        blob: BlobId,
        len: u32,
        data: Buffer,
        result: Result<(), StoreError>,
    ) {
        self.unpin(blob);
        if let Some(victim) = &mut self.cleaner.victim {
            victim.is_reading = false;
            if result.is_ok() {
                victim.bytes.extend_from_slice(&data.bytes()[..len as usize]);
            } else {
                self.give_up();
            }
        }
        self.buffers.give(data);
    }

    /// The victim cannot be emptied.
    fn give_up(&mut self) {
        if let Some(victim) = self.cleaner.victim.take() {
            self.cleaner.stuck.insert(victim.blob);
            self.cleaner.is_due = true;
            if let Some((blob, _)) = victim.target {
                self.keeper.end_move(blob);
            }
            self.buffers_of(victim);
        }
    }

    fn examine_blocks(&mut self, victim: &mut Victim, number: usize, first: u32, record: &Record) -> Look {
        let max = self.moved_max();
        let count = (record.blocks - first).min(max);
        if victim.moved.len() as u32 + count > max {
            return self.write_moved(victim);
        }
        let next = Phase::Examine { record: number, block: first + count };
        let header_units = victim.frame.as_ref().expect("a frame is examined").header_units;
        let (blob, data) = (victim.blob, victim.frame_unit() + header_units);
        let unit = |at: u32| data + (record.data + at) * BLOCK_UNITS;
        let old = |at: u32| Place { blob, unit: unit(at) as u16 };
        if (first..first + count).all(|at| self.cleaner.dead.has(old(at))) {
            victim.phase = next;
            return Look::Done;
        }
        let Some(view) = self.first_view(record.timeline, usize::from(record.partition), record.commit)
        else {
            victim.phase = next;
            return Look::Done;
        };
        let slot = |at: u32| Slot::block(((record.block + u64::from(at)) % u64::from(RANGE_BLOCKS)) as u16);
        if let Err(waits) = self.look_up(record, slot(first), count, view, Waiter::Cleaner) {
            victim.waits = waits;
            return Look::Pause;
        }
        for at in first..first + count {
            let (unit, old) = (unit(at), old(at));
            let Some(version) = self.slots.get(slot(at)) else { continue };
            let Value::Block { place, crc } = version.value else { continue };
            if version.commit != record.commit || place != old {
                continue;
            }
            let block = record.block + u64::from(at);
            let bytes = &victim.bytes[((unit - victim.unit) * UNIT) as usize..][..BLOCK as usize];
            if crate::checksum::of_block(block, bytes) != crc {
                // The entry stays, so the damage is reported by reads and checks.
                self.stats.damaged_blocks += 1;
                victim.is_damaged = true;
                continue;
            }
            let header = moved_header_len(self.facts.alignment);
            let buffers = &mut self.buffers;
            let buffer = victim.data.get_or_insert_with(|| buffers.take(header + MOVED_MAX * BLOCK));
            let slot = victim.moved.len() as u32;
            buffer.write((header + slot * BLOCK) as usize, bytes);
            let moved = Record { block, blocks: 1, kind: Kind::Data, data: 0, ..*record };
            victim.moved.push(Moved { record: moved, crc, old, at: slot });
        }
        victim.phase = next;
        Look::Done
    }

    fn examine_dense(&mut self, victim: &mut Victim, number: usize, record: &Record) -> Look {
        let next = Phase::Examine { record: number + 1, block: 0 };
        let Some(view) = self.first_view(record.timeline, usize::from(record.partition), record.commit)
        else {
            victim.phase = next;
            return Look::Done;
        };
        if let Err(waits) = self.look_up(record, Slot::RANGE, 1, view, Waiter::Cleaner) {
            victim.waits = waits;
            return Look::Pause;
        }
        let old = Place { blob: victim.blob, unit: victim.frame_unit() as u16 };
        let is_seen = self.slots.get(Slot::RANGE).is_some_and(|version| {
            version.commit == record.commit && version.value == Value::Dense { place: old }
        });
        if !is_seen {
            victim.phase = next;
            return Look::Done;
        }
        if !victim.moved.is_empty() {
            return self.write_moved(victim);
        }
        let frame = victim.frame.as_ref().expect("a frame is examined");
        let (header, len) = (frame.header_units * UNIT, frame.units * UNIT);
        let mut data = self.buffers.take(len);
        data.write(0, &victim.bytes[victim.start..][..len as usize]);
        let Some((blob, life, unit)) = self.take_cleaner_place(len) else {
            self.buffers.give(data);
            return Look::Pause;
        };
        let head =
            Head { uuid: self.keeper.manifest.uuid, life, sequence: 0, stream: NO_STREAM, unit, durable: 0 };
        frame::encode(&mut data.bytes_mut()[..header as usize], &head, &[*record], RANGE_BLOCKS);
        victim.moved.push(Moved { record: *record, crc: 0, old, at: 0 });
        victim.target = Some((blob, unit));
        victim.resume = (number + 1, 0);
        victim.phase = Phase::Write;
        self.stats.moved_write_bytes += u64::from(len);
        self.out.op(Owner::CleanWrite, StoreOp::Write { blob, unit, data, len });
        Look::Pause
    }

    /// Units that are left in the cleaner's blob.
    pub(crate) fn writer_room(&self) -> u32 {
        self.cleaner.writer.map_or(0, |(.., unit)| self.facts.blob_units - unit)
    }

    /// Blocks that are written at once: as many as the cleaner's blob has room for, if that is worth a frame.
    fn moved_max(&self) -> u32 {
        let header = moved_header_len(self.facts.alignment) / UNIT;
        let room = self.writer_room().saturating_sub(header) / BLOCK_UNITS;
        if room < MOVED_MIN { MOVED_MAX } else { room.min(MOVED_MAX) }
    }

    /// The place for `len` bytes of moved data, which is taken: blob, its life, unit. It is in a new blob only if more than
    /// `reserve` are free.
    pub(crate) fn take_place(&mut self, len: u32, reserve: usize) -> Option<(BlobId, u64, u32)> {
        let units = len / UNIT;
        if self.writer_room() < units {
            let (blob, life) = self.keeper.allocate(BlobKind::Data, reserve)?;
            self.close_writer();
            self.cleaner.writer = Some((blob, life, 0));
        }
        let writer = self.cleaner.writer.as_mut()?;
        let place = *writer;
        writer.2 += units;
        self.keeper.begin_move(place.0);
        Some(place)
    }

    /// The place for what the cleaner moves. Without one, it is blocked: others have taken the place since it began the victim.
    fn take_cleaner_place(&mut self, len: u32) -> Option<(BlobId, u64, u32)> {
        let place = self.take_place(len, self.index_reserve());
        self.cleaner.is_blocked = place.is_none();
        place
    }

    /// The cleaner's blob gets nothing more.
    pub(crate) fn close_writer(&mut self) {
        if let Some((blob, _, unit)) = self.cleaner.writer.take() {
            self.keeper.manifest.blobs.set_written(blob, unit);
            self.keeper.close(blob, self.jobs.freezes + 1);
        }
    }

    /// Writes what was gathered, sorted by volume and block.
    fn write_moved(&mut self, victim: &mut Victim) -> Look {
        if victim.moved.is_empty() {
            return Look::Done;
        }
        let header = moved_header_len(self.facts.alignment);
        let count = victim.moved.len() as u32;
        let len = header + count * BLOCK;
        let Some((blob, life, unit)) = self.take_cleaner_place(len) else { return Look::Pause };
        victim
            .moved
            .sort_unstable_by_key(|moved| (moved.record.timeline, moved.record.block, moved.record.commit));
        let gathered = victim.data.take().expect("blocks were gathered");
        let mut data = self.buffers.take(len);
        for (at, moved) in victim.moved.iter_mut().enumerate() {
            let from = (header + moved.at * BLOCK) as usize;
            data.write(
                (header as usize) + at * BLOCK as usize,
                &gathered.bytes()[from..from + BLOCK as usize],
            );
            moved.at = at as u32;
        }
        self.buffers.give(gathered);
        self.encode_moved(&mut data, &victim.moved, life, unit);
        victim.target = Some((blob, unit));
        if let Phase::Examine { record, block } = victim.phase {
            victim.resume = (record, block);
        }
        victim.phase = Phase::Write;
        self.stats.moved_write_bytes += u64::from(len);
        self.out.op(Owner::CleanWrite, StoreOp::Write { blob, unit, data, len });
        Look::Pause
    }

    pub(crate) fn clean_write_answered(&mut self, data: Buffer, result: Result<(), StoreError>) {
        self.buffers.give(data);
        let victim = self.cleaner.victim.as_mut().expect("a victim stays while it is written");
        if result.is_ok() {
            victim.phase = Phase::Insert { at: 0 };
            return;
        }
        // Nothing refers to what was written. The next victim goes to another blob.
        let (blob, _) = victim.target.take().expect("a write has a target");
        self.keeper.end_move(blob);
        self.close_writer();
        self.give_up();
    }

    /// Makes the entry of the next block that was moved.
    fn insert_moved(&mut self, victim: &mut Victim, at: usize) -> Look {
        let Some(moved) = victim.moved.get(at).copied() else {
            victim.moved.clear();
            let (blob, _) = victim.target.take().expect("written");
            self.keeper.end_move(blob);
            victim.phase = Phase::Examine { record: victim.resume.0, block: victim.resume.1 };
            return Look::Done;
        };
        victim.phase = Phase::Insert { at: at + 1 };
        let target = victim.target.expect("written");
        if let Err(waits) = self.insert_entry(&moved, target, Waiter::Cleaner) {
            victim.waits = waits;
            victim.phase = Phase::Insert { at };
            return Look::Pause;
        }
        Look::Done
    }

    pub(crate) fn cleaner_waited(&mut self, is_ok: bool) {
        let Some(victim) = &mut self.cleaner.victim else { return };
        victim.waits -= 1;
        if !is_ok {
            victim.has_ended = true;
            if victim.waits == 0 {
                self.give_up();
            }
        }
    }
}
