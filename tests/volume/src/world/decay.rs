//! Damage and repairs on copies of the disk, while nothing goes on: the pool is opened there, read and checked.

use std::collections::HashMap;

use aryk_dma::Buffer;
use aryk_volume::{
    BlobId, Command, Damage, Done, OpId, Rebuild, RebuildError, RebuildReport, Recipe, StoreOp, UNIT,
    VolumeId,
};
use aryk_volume_store::{Expected, HEADER_BYTES, Header, Kind as Record, SUPERBLOCK_PLACES, Store};

use super::crash::{LogFrame, log_frames};
use super::{POOL, Pending, World};
use crate::disk::{Disk, SECTOR};
use crate::journal;

/// What is different about the disk of a pool.
#[derive(Debug, Default)]
pub(super) enum Copied {
    /// It is the disk of the simulation.
    #[default]
    No,
    /// Bits of a copy were changed: data may be refused.
    Damaged,
    /// The pool of a copy was rebuilt: these blocks may have older data.
    Rebuilt(Vec<Damage>),
}

impl World {
    /// Damages a sector of a copy of the disk, of any structure. The pool opens nevertheless: all but data is there twice, or
    /// is not needed for that; unless a mirror was not written because the disk failed. Where data is refused, a check tells
    /// the damage.
    pub(super) fn decay(&mut self) -> Result<(), String> {
        if self.has_failed() || self.disk.is_faulty() {
            return Ok(());
        }
        let disk = self.disk.fork(self.rng.u64(..));
        let Some(place) = self.any_place(&disk) else { return Ok(()) };
        self.with_copy(disk, Copied::Damaged, |world| world.decay_at(place))
            .map_err(|what| format!("the sector of byte {place} was damaged: {what}"))
    }

    fn decay_at(&mut self, place: u64) -> Result<(), String> {
        self.reopen()?;
        let start = self.opened().pool.log_start();
        // Nothing proves yet that the tail of the log is durable, so damage of it may look like its end.
        let is_tail = |frame: &LogFrame| {
            frame.head.sequence >= start && (frame.offset..frame.offset + frame.bytes).contains(&place)
        };
        if log_frames(&self.disk).iter().any(is_tail) {
            return Ok(());
        }
        for _ in 0..self.rng.u32(1..9) {
            let (at, bit) = (self.rng.u64(..SECTOR), self.rng.u8(..8));
            self.disk.flip(place / SECTOR * SECTOR + at, bit);
        }
        self.counts.decayed += 1;
        match self.reopen().and_then(|()| self.await_ready()) {
            Err(_) if self.shape.has_faults => return Ok(()),
            opened => opened?,
        }
        let damage = self.scrub_all()?;
        self.refused = 0;
        self.verify(false)?;
        if self.refused > 0 && damage.is_empty() && !self.is_read_only() {
            return Err(format!("{} reads are refused, and the scrub has found nothing", self.refused));
        }
        self.reported = 0;
        self.command(Command::Check { data: true, repair: false }, Pending::Check);
        self.settle()?;
        self.refused = 0;
        self.verify(false)?;
        // The merges of the check may have mended a page of the index.
        if self.refused > 0 && self.reported == 0 {
            return Err(format!("{} reads are refused, and the check says nothing", self.refused));
        }
        Ok(())
    }

    /// A byte of any structure, or of any page that was written.
    fn any_place(&mut self, disk: &Disk) -> Option<u64> {
        let magic: &[u8] = match self.rng.u32(..6) {
            0 => b"ARMJ",
            1 => b"AVF1",
            2 => b"AVIX",
            3 => return self.rng.choice(SUPERBLOCK_PLACES).map(|place| place + self.rng.u64(..4096)),
            _ => return disk.written_page(&mut self.rng).map(|page| page + self.rng.u64(..4096)),
        };
        self.rng.choice(disk.sectors_with(magic)).map(|sector| sector + self.rng.u64(..SECTOR))
    }

    /// Loses all checkpoints of a copy of the disk, and sometimes the copies of the manifest, and rebuilds the pool there as
    /// `aryk pool check --repair` does. Its data is right, but for blocks of which the report says that they are in doubt.
    pub(super) fn rebuild(&mut self) -> Result<(), String> {
        self.settle()?;
        self.rest()?;
        if self.is_read_only() || self.disk.is_faulty() {
            return Ok(());
        }
        let mut disk = self.disk.fork(self.rng.u64(..));
        let loses = [true, self.rng.u32(..3) == 0];
        for offset in disk.sectors_with(b"ARMJ") {
            let Some(header) = Header::parse(&disk.peek(offset, HEADER_BYTES)) else { continue };
            let is_lost = match header.kind {
                Record::Checkpoint => loses[0],
                // The newer one may be left.
                Record::Copy => loses[1] && self.rng.bool(),
                Record::Edits => false,
            };
            if is_lost {
                disk.flip(offset + self.rng.u64(..HEADER_BYTES as u64), self.rng.u8(..8));
            }
        }
        let report = match rebuild(&mut disk)? {
            Ok(report) => report,
            Err(RebuildError::NoSpace(_) | RebuildError::Nothing) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        self.counts.rebuilt += 1;
        // Without a copy, names and snapshots are lost.
        let is_named = report.recipe != Recipe::HeadersOnly;
        let what = format!("rebuilt from {:?}", report.recipe);
        self.with_copy(disk, Copied::Rebuilt(report.damage), |world| {
            world.reopen()?;
            world.await_ready()?;
            if is_named {
                world.verify(false)?;
            }
            world.check_pool()
        })
        .map_err(|error| format!("{what}: {error}"))
    }

    /// Does something with the pool of another disk. Afterwards everything is as it was.
    fn with_copy(
        &mut self,
        disk: Disk,
        copied: Copied,
        act: impl FnOnce(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        let disk = std::mem::replace(&mut self.disk, disk);
        let (open, volumes) = (self.open.take(), self.volumes.clone());
        let failures = self.failures_before;
        self.copied = copied;
        let result = act(self);
        (self.disk, self.open, self.volumes) = (disk, open, volumes);
        (self.failures_before, self.copied) = (failures, Copied::No);
        self.observed.clear();
        result
    }

    /// Whether a block may have older data, because the index was made again.
    pub(super) fn is_in_doubt(&self, volume: VolumeId, unit: u64) -> bool {
        let Copied::Rebuilt(doubts) = &self.copied else { return false };
        let block = unit / 8;
        doubts.iter().any(|doubt| {
            doubt.volume == Some(volume) && (doubt.block..doubt.block + doubt.blocks).contains(&block)
        })
    }
}

/// Rebuilds the pool of a disk.
fn rebuild(disk: &mut Disk) -> Result<Result<RebuildReport, RebuildError>, String> {
    let expected = Expected { pool: Some(POOL), may_lack_checkpoint: true, ..Expected::default() };
    let opened = journal::open(disk, expected).map_err(|error| error.to_string())?;
    if opened.recovered.is_some() {
        return Err("a checkpoint is left".to_owned());
    }
    let (mut store, copy) = (opened.store, opened.copy);
    let mut others = Others { first: store.facts().blobs, blobs: HashMap::new() };
    let mut rebuild = Rebuild::new(store.facts(), POOL.into_bytes(), copy.as_deref(), true);
    loop {
        let mut has_more = rebuild.turn();
        while let Some((id, op)) = rebuild.next_op() {
            has_more = true;
            match others.run(id, op, store.facts().blob_bytes()) {
                Ok(done) => rebuild.completed(done),
                Err(op) => store.submit(id, op),
            }
        }
        run(&mut store, disk);
        while let Some(answer) = store.next_answer() {
            rebuild.completed(answer);
        }
        if let Some(result) = rebuild.take_result() {
            return Ok(result);
        }
        if !has_more {
            return Err(format!("the rebuild stalls: {:?}", rebuild.progress()));
        }
    }
}

/// Runs all operations of a store, in any order.
fn run(store: &mut Store, disk: &mut Disk) {
    loop {
        while let Some(op) = store.next_op() {
            disk.submit(op);
        }
        let Some(done) = disk.end_next() else { return };
        store.completed(done);
    }
}

/// The blobs of a rebuild that the store does not have.
struct Others {
    first: u32,
    blobs: HashMap<BlobId, Vec<u8>>,
}

impl Others {
    /// Runs an operation on such a blob, or returns one of another blob.
    fn run(&mut self, id: OpId, op: StoreOp, blob_bytes: u64) -> Result<Done, StoreOp> {
        let place = |unit: u32, len: u32| {
            let start = unit as usize * UNIT as usize;
            start..start + len as usize
        };
        let new = || vec![0; blob_bytes as usize];
        let data: Option<Buffer> = match op {
            StoreOp::Read { blob, unit, mut data, len } if blob.0 >= self.first => {
                let bytes = self.blobs.entry(blob).or_insert_with(new);
                data.write(0, &bytes[place(unit, len)]);
                Some(data)
            }
            StoreOp::Write { blob, unit, data, len } if blob.0 >= self.first => {
                let bytes = self.blobs.entry(blob).or_insert_with(new);
                bytes[place(unit, len)].copy_from_slice(&data.bytes()[..len as usize]);
                Some(data)
            }
            StoreOp::Discard { blob } if blob.0 >= self.first => {
                self.blobs.remove(&blob);
                None
            }
            op => return Err(op),
        };
        Ok(Done { id, data, result: Ok(()) })
    }
}
