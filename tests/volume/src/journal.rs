//! The store alone, without the engine: edits, checkpoints, data and growth, with crashes between any two operations of the disk.
//!
//! After each crash the pool opens, with all edits that were answered, and then perhaps some that were in flight, in their order.
//! Data that was answered before an edit was handed out is there if the edit is.

use std::collections::VecDeque;

use aryk_dma::Buffer;
use aryk_volume::{BlobId, OpId, StoreOp};
use aryk_volume_store::{
    Base, Error, Expected, Formatting, Growth, Opened, Opening, Options, Position, Store,
};
use fastrand::Rng;
use uuid::Uuid;

use crate::disk::{Counts, Crash, Disk, Faults, SECTOR};

const SEGMENT: u32 = 64 << 10;
/// Blobs that get data.
const BLOBS: u64 = 4;
const POOL: Uuid = Uuid::from_u128(0x0a0b);

/// An edit or a checkpoint, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Edit(u64),
    Checkpoint(u64),
}

/// An operation of the store in flight.
#[derive(Clone, Copy, Debug)]
enum Pending {
    Entry(Entry),
    Write,
    Flush(u64),
}

struct World {
    rng: Rng,
    disk: Disk,
    store: Box<Store>,
    pending: VecDeque<(OpId, Pending)>,
    next: u64,
    /// All entries that were handed out, in order, and how many of them were answered.
    entries: Vec<Entry>,
    answered: usize,
    /// Numbers of data writes: that were answered, that are durable, and that were answered before each entry was handed out.
    written: u64,
    durable: u64,
    needs: Vec<u64>,
    position: Position,
    is_pool: bool,
}

/// Runs one seed.
///
/// # Errors
/// What was violated.
pub fn run(seed: u64, steps: u32) -> Result<Counts, String> {
    let mut rng = Rng::with_seed(seed);
    let block = if rng.bool() { 512 } else { 4096 };
    let base = Base { bytes: (4 << 20) + 4096 * rng.u64(..100), block };
    let mut disk = Disk::new(base, rng.u64(..));
    disk.faults = Faults { slow_ppm: rng.u32(..50_000), ..Faults::default() };
    let store = loop {
        if let Ok(store) = create(&mut disk) {
            break store;
        }
    };
    let mut world = World {
        rng,
        disk,
        store,
        pending: VecDeque::new(),
        next: 0,
        entries: Vec::new(),
        answered: 0,
        written: 0,
        durable: 0,
        needs: Vec::new(),
        position: Position::default(),
        is_pool: false,
    };
    world.hand_out_entry(Entry::Checkpoint(0));
    for _ in 0..steps {
        world.step().map_err(|what| format!("seed {seed}: {what}"))?;
    }
    Ok(world.disk.counts)
}

fn create(disk: &mut Disk) -> Result<Box<Store>, Error> {
    let options = Options {
        segment_bytes: SEGMENT,
        area_bytes: Some(64 << 10),
        ..Options::new(POOL, Uuid::from_u128(1), "simulated", disk.base().block)
    };
    let mut formatting = Formatting::new(disk.base(), &options, true)?;
    loop {
        while let Some(op) = formatting.next_op() {
            disk.submit(op);
        }
        if let Some(result) = formatting.completed(disk.end_next().expect("an operation in flight")) {
            return result;
        }
    }
}

/// Opens the pool of a disk.
///
/// # Errors
/// Why it does not open.
pub fn open(disk: &mut Disk, expected: Expected) -> Result<Opened, Error> {
    let mut opening = Opening::new(disk.base(), expected);
    loop {
        while let Some(op) = opening.next_op() {
            disk.submit(op);
        }
        if let Some(result) = opening.completed(disk.end_next().expect("an operation in flight")) {
            return result.map(|opened| *opened);
        }
    }
}

impl World {
    fn step(&mut self) -> Result<(), String> {
        match self.rng.u32(..100) {
            0..25 => {
                let entry = Entry::Edit(self.next);
                self.hand_out_entry(entry);
            }
            25..27 => self.hand_out_entry(Entry::Checkpoint(self.next)),
            27..40 => self.write(),
            40..45 => self.flush(),
            45 => self.grow(),
            46..48 => return self.crash(),
            _ => {}
        }
        let is_pending = self.pending.iter().any(|(_, p)| matches!(p, Pending::Entry(Entry::Checkpoint(_))));
        if self.store.is_checkpoint_due() && !is_pending {
            self.hand_out_entry(Entry::Checkpoint(self.next));
        }
        for _ in 0..self.rng.u32(..4) {
            self.run_one()?;
        }
        Ok(())
    }

    fn id(&mut self) -> OpId {
        self.next += 1;
        OpId(self.next)
    }

    fn hand_out_entry(&mut self, entry: Entry) {
        // Long ones reach over several pages.
        let len = match entry {
            Entry::Checkpoint(_) => self.rng.usize(16..12_000),
            Entry::Edit(_) if self.rng.u32(..8) == 0 => self.rng.usize(1000..9000),
            Entry::Edit(_) => self.rng.usize(16..200),
        };
        let bytes = content(entry, len);
        let id = self.id();
        self.entries.push(entry);
        self.needs.push(self.written);
        self.pending.push_back((id, Pending::Entry(entry)));
        self.store.submit(
            id,
            match entry {
                Entry::Edit(_) => StoreOp::Commit { edit: bytes },
                Entry::Checkpoint(_) => StoreOp::Checkpoint { bytes },
            },
        );
    }

    /// Data writes follow each other, one at a time, around the blocks of the first blobs.
    fn write(&mut self) {
        if self.pending.iter().any(|(_, pending)| matches!(pending, Pending::Write)) {
            return;
        }
        let block = self.disk.base().block;
        let (blob, unit) = self.place(self.written);
        let mut data = Buffer::new(block as usize, 4096);
        data.bytes_mut()[..8].copy_from_slice(&(self.written + 1).to_le_bytes());
        let id = self.id();
        self.pending.push_back((id, Pending::Write));
        self.store.submit(id, StoreOp::Write { blob, unit, data, len: block });
    }

    /// Where a data write goes.
    fn place(&self, number: u64) -> (BlobId, u32) {
        let per_segment = u64::from(SEGMENT / self.disk.base().block);
        let blob = number / per_segment % BLOBS;
        (BlobId(blob as u32), (number % per_segment * u64::from(self.disk.base().block) / SECTOR) as u32)
    }

    /// All data is there that must be.
    fn check_data(&self, durable: u64) -> Result<(), String> {
        let capacity = BLOBS * u64::from(SEGMENT / self.disk.base().block);
        for number in durable.saturating_sub(capacity / 2)..durable {
            let (blob, unit) = self.place(number);
            let segment = self.store.superblock().segment(blob.0).ok_or("a lost segment")?;
            let bytes = self.disk.peek(segment.offset + u64::from(unit) * SECTOR, 8);
            if bytes != (number + 1).to_le_bytes() {
                return Err(format!("data write {number} is lost, of {durable} that are durable"));
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        let id = self.id();
        self.pending.push_back((id, Pending::Flush(self.written)));
        self.store.submit(id, StoreOp::Flush);
    }

    fn grow(&mut self) {
        if self.is_pool && self.store.growth() != Growth::Running && self.disk.base().bytes < 64 << 20 {
            let bytes = self.disk.base().bytes + self.rng.u64(1..40) * (64 << 10);
            self.disk.grow(bytes);
            self.store.grow(bytes);
        }
    }

    fn run_one(&mut self) -> Result<(), String> {
        while let Some(op) = self.store.next_op() {
            self.disk.submit(op);
        }
        if let Some(done) = self.disk.end_next() {
            self.store.completed(done);
        }
        while let Some(op) = self.store.next_op() {
            self.disk.submit(op);
        }
        while let Some(done) = self.store.next_answer() {
            let index =
                self.pending.iter().position(|(id, _)| *id == done.id).ok_or("an answer to nothing")?;
            let (_, pending) = self.pending.remove(index).expect("just found");
            done.result.map_err(|error| format!("{pending:?}: {error}"))?;
            match pending {
                Pending::Entry(entry) => {
                    if self.entries[self.answered] != entry {
                        return Err(format!(
                            "{entry:?} is answered before {:?}",
                            self.entries[self.answered]
                        ));
                    }
                    self.durable = self.durable.max(self.needs[self.answered]);
                    self.answered += 1;
                    self.is_pool = true;
                }
                Pending::Write => self.written += 1,
                Pending::Flush(written) => self.durable = self.durable.max(written),
            }
            self.position = self.position.max(self.store.position());
        }
        Ok(())
    }

    fn crash(&mut self) -> Result<(), String> {
        let crash =
            [Crash::Process, Crash::Power, Crash::Power, Crash::PowerLosesAll, Crash::PowerLosesNothing]
                [self.rng.usize(..5)];
        self.disk.crash(crash);
        self.pending.clear();
        let expected = Expected { pool: Some(POOL), position: Some(self.position), ..Expected::default() };
        let opened = match open(&mut self.disk, expected) {
            Ok(opened) => opened,
            // The superblock's first copy may be torn, while there is no second one.
            Err(Error::NotAPool { .. } | Error::Damaged { .. }) if !self.is_pool => {
                self.store = create(&mut self.disk).map_err(|error| error.to_string())?;
                self.entries.clear();
                self.needs.clear();
                (self.written, self.durable) = (0, 0);
                self.hand_out_entry(Entry::Checkpoint(self.next));
                return Ok(());
            }
            Err(error) => return Err(format!("after {crash:?}: {error}")),
        };
        let recovered = opened.recovered.ok_or("no checkpoint")?;
        let found: Vec<_> =
            std::iter::once(&recovered.checkpoint).chain(&recovered.edits).map(|b| entry(b)).collect();
        *self.store = opened.store;
        self.is_pool = true;
        self.compare(&found)
    }

    /// The entries that were found end at least where the answered ones do, and begin with a checkpoint.
    fn compare(&mut self, found: &[Option<Entry>]) -> Result<(), String> {
        let found: Vec<_> =
            found.iter().map(|entry| entry.ok_or("a damaged entry")).collect::<Result<_, _>>()?;
        let start =
            self.entries.iter().rposition(|entry| *entry == found[0]).ok_or("an unknown checkpoint")?;
        let end = start + found.len();
        if self.entries.get(start..end) != Some(&found[..]) || end < self.answered {
            return Err(format!("{:?} are answered, {found:?} are found", &self.entries[..self.answered]));
        }
        let is_checkpoint = |entry: &Entry| matches!(entry, Entry::Checkpoint(_));
        if !is_checkpoint(&found[0]) || found[1..].iter().any(is_checkpoint) {
            return Err("a checkpoint in a wrong place".into());
        }
        let needed = self.needs[end - 1].max(self.durable);
        self.entries.truncate(end);
        self.needs.truncate(end);
        (self.answered, self.durable, self.written) = (end, needed, needed);
        self.check_data(needed)
    }
}

const HEAD: usize = 9;

fn content(entry: Entry, len: usize) -> Vec<u8> {
    let (kind, number) = match entry {
        Entry::Edit(number) => (1, number),
        Entry::Checkpoint(number) => (2, number),
    };
    let mut bytes = vec![number as u8; len.max(HEAD)];
    bytes[0] = kind;
    bytes[1..HEAD].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn entry(bytes: &[u8]) -> Option<Entry> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let number = u64::from_le_bytes(head[1..].try_into().ok()?);
    let is_whole = rest.iter().all(|&byte| byte == number as u8);
    match head[0] {
        1 if is_whole => Some(Entry::Edit(number)),
        2 if is_whole => Some(Entry::Checkpoint(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_survives_crashes() {
        for seed in 0..200 {
            run(seed, 400).unwrap();
        }
    }

    #[test]
    fn a_seed_reproduces_exactly() {
        assert_eq!(run(7, 2000), run(7, 2000));
    }
}
