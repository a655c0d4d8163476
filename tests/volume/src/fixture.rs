//! Images of pools that were made once, which every later version must read: `cargo run -p aryk-volume-simulation --example
//! pool-fixture FILE` makes one of today's format.
//!
//! An image is a list of rows of sectors; all others are zeroes. A row: its first sector (4 bytes), its sectors (4), and then
//! either the 8 bytes with which all of them are filled, if the highest bit of the number is 1, or their bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_volume::{
    Action, Answer, CheckReport, Command, Done, Foreign, Label, OpId, Origin, Pool, Reply, Request, Settings,
    State, Status, StoreOp, Tag, VolumeId, WhenFull,
};
use aryk_volume_store::{Base, Expected, Finding, Formatting, Opening, Options, Store};
use uuid::Uuid;

use crate::disk::{Disk, SECTOR as SECTOR_BYTES};

const SECTOR: usize = SECTOR_BYTES as usize;
pub(crate) const POOL: Uuid = Uuid::from_u128(0xf1);
const SEGMENT: u32 = 8 << 20;
const AREA: u64 = 256 << 10;
const BYTES: u64 = (2 << 20) + 4 * AREA + 24 * SEGMENT as u64;
const FILLED: u32 = 1 << 31;
/// What the foreign disk is filled with.
const FOREIGN: u64 = 99;

/// A part of the history of the pool in the fixture. A *word* fills all that is written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Create(&'static str, u64),
    /// A volume on a foreign disk of half its size.
    Overlay(&'static str, u64),
    Thick(&'static str),
    /// First unit, units, word.
    Write(&'static str, u64, u64, u64),
    Zero(&'static str, u64, u64),
    /// Of the first, called as the second.
    Snapshot(&'static str, &'static str),
    Clone(&'static str, &'static str),
    Delete(&'static str),
    Checkpoint,
    Flush(&'static str),
}

/// Units of 4 MiB.
pub(crate) const RANGE: u64 = 8192;

/// The history of the pool in `pool-v1`, which stays as it is: frames of all kinds, parts of blocks, ranges of zeroes, levels
/// of the index, a checkpoint with edits behind it, and writes that only the log has.
const HISTORY: &[Step] = &[
    Step::Create("a", 6 * RANGE),
    Step::Write("a", 0, RANGE, 1),
    Step::Write("a", RANGE + 3, 5, 2),
    Step::Write("a", 2 * RANGE, 1024, 3),
    Step::Zero("a", 2 * RANGE + 16, 41),
    Step::Write("a", 3 * RANGE, 64, 4),
    Step::Snapshot("a", "s1"),
    Step::Zero("a", 3 * RANGE, 2 * RANGE),
    Step::Write("a", 4 * RANGE + 8, 16, 5),
    Step::Clone("s1", "b"),
    Step::Write("b", 8, 8, 6),
    Step::Zero("b", 2 * RANGE, 8),
    Step::Overlay("d", 2 * RANGE),
    Step::Write("d", RANGE - 4, 8, 7),
    Step::Create("gone", RANGE),
    Step::Write("gone", 0, 1024, 8),
    Step::Snapshot("b", "s2"),
    Step::Delete("gone"),
    Step::Thick("a"),
    Step::Checkpoint,
    Step::Write("a", 64, 1024, 9),
    Step::Snapshot("a", "s3"),
    Step::Delete("s1"),
    Step::Write("b", 5 * RANGE, 8, 10),
    Step::Write("a", 16, 9, 11),
];

/// What volumes and snapshots have: a word for each unit.
pub(crate) fn contents(history: &[Step]) -> BTreeMap<&'static str, Vec<u64>> {
    let mut all = BTreeMap::<_, Vec<u64>>::new();
    for step in history {
        let mut fill = |name, unit: u64, units: u64, word| {
            let words = all.get_mut(name).expect("it exists");
            words[unit as usize..][..units as usize].fill(word);
        };
        match *step {
            Step::Write(name, unit, units, word) => fill(name, unit, units, word),
            Step::Zero(name, unit, units) => fill(name, unit, units, 0),
            Step::Create(name, units) => drop(all.insert(name, vec![0; units as usize])),
            Step::Overlay(name, units) => {
                let (half, units) = (units as usize / 2, units as usize);
                all.insert(name, [vec![FOREIGN; half], vec![0; units - half]].concat());
            }
            Step::Snapshot(of, name) | Step::Clone(of, name) => drop(all.insert(name, all[of].clone())),
            Step::Delete(name) => drop(all.remove(name)),
            Step::Thick(_) | Step::Checkpoint | Step::Flush(_) => {}
        }
    }
    all
}

/// A pool on a disk whose operations end one after the other.
pub(crate) struct Rig {
    pub(crate) disk: Disk,
    pub(crate) pool: Pool,
    pub(crate) store: Box<Store>,
    /// What the opening has found.
    pub(crate) findings: Vec<Finding>,
    foreign: VecDeque<(OpId, StoreOp)>,
    names: u128,
}

fn base() -> Base {
    Base { bytes: BYTES, block: 512 }
}

fn words(bytes: &mut [u8], word: u64) {
    bytes.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&word.to_le_bytes()));
}

/// With these, flushes and merges happen, and dense frames.
fn settings() -> Settings {
    Settings { flush_entries: 64, dense_writes: true, ..Settings::default() }
}

impl Rig {
    /// A new pool with this history.
    pub(crate) fn create(history: &[Step]) -> Result<Self, String> {
        let mut disk = Disk::new(base(), 0);
        let device = Uuid::from_u128(1);
        let options = Options {
            segment_bytes: SEGMENT,
            area_bytes: Some(AREA),
            ..Options::new(POOL, device, "old", 512)
        };
        let mut formatting = Formatting::new(base(), &options, false).map_err(|error| error.to_string())?;
        let store = loop {
            disk.submit(formatting.next_op().ok_or("the creation stalls")?);
            if let Some(result) = formatting.completed(disk.end_next().expect("an operation in flight")) {
                break result.map_err(|error| error.to_string())?;
            }
        };
        let pool = Pool::create(settings(), store.facts(), POOL.into_bytes());
        let (findings, foreign) = (Vec::new(), VecDeque::new());
        let mut rig = Self { disk, pool, store, findings, foreign, names: 0 }.ready()?;
        history.iter().try_for_each(|step| rig.step(*step).map_err(|what| format!("{step:?}: {what}")))?;
        Ok(rig)
    }

    /// Opens the pool of a disk.
    pub(crate) fn open(mut disk: Disk) -> Result<Self, String> {
        let mut opening = Opening::new(base(), Expected::default());
        let opened = loop {
            disk.submit(opening.next_op().ok_or("the opening stalls")?);
            if let Some(result) = opening.completed(disk.end_next().expect("an operation in flight")) {
                break result.map_err(|error| error.to_string())?;
            }
        };
        let (store, recovered) = (Box::new(opened.store), opened.recovered.ok_or("the checkpoint is lost")?);
        let pool = Pool::open(|_| settings(), store.facts(), store.pool().into_bytes(), &recovered)
            .map_err(|error| error.to_string())?;
        let (findings, foreign) = (opened.findings, VecDeque::new());
        Self { disk, pool, store, findings, foreign, names: 1000 }.ready()
    }

    fn ready(mut self) -> Result<Self, String> {
        self.settle();
        if self.pool.state() == State::Ready { Ok(self) } else { Err(format!("{:?}", self.pool.state())) }
    }

    /// Goes on until nothing is left to do.
    fn settle(&mut self) {
        let mut has_more = true;
        while has_more {
            has_more = self.pool.turn();
            if self.store.is_checkpoint_due() {
                self.pool.request_checkpoint();
            }
            while let Some((id, op)) = self.pool.next_op() {
                has_more = true;
                match op {
                    StoreOp::ReadForeign { .. } => self.foreign.push_back((id, op)),
                    op => self.store.submit(id, op),
                }
            }
            while let Some(op) = self.store.next_op() {
                self.disk.submit(op);
                self.store.completed(self.disk.end_next().expect("an operation in flight"));
            }
            while let Some(done) = self.store.next_answer() {
                has_more = true;
                self.pool.completed(done);
            }
            while let Some((id, StoreOp::ReadForeign { mut data, len, .. })) = self.foreign.pop_front() {
                words(&mut data.bytes_mut()[..len as usize], FOREIGN);
                self.pool.completed(Done { id, data: Some(data), result: Ok(()) });
            }
        }
    }

    fn command(&mut self, command: Command) -> Result<Answer, String> {
        self.pool.command(Tag(0), command.clone());
        self.settle();
        let reply = self.pool.next_command_reply().ok_or("no answer")?;
        reply.result.map_err(|error| format!("{command:?}: {error:?}"))
    }

    /// A request that the pool answers, or cannot because of its disk.
    pub(crate) fn request(
        &mut self,
        volume: VolumeId,
        units: (u64, u64),
        action: Action,
    ) -> Result<Reply, String> {
        self.pool.submit(Request { tag: Tag(0), volume, unit: units.0, units: units.1, action });
        self.settle();
        let reply = self.pool.next_reply().ok_or("no reply")?;
        let is_expected = matches!(reply.status, Status::Ok | Status::Medium);
        if is_expected { Ok(reply) } else { Err(format!("{units:?}: {:?}", reply.status)) }
    }

    fn change(&mut self, name: &str, units: (u64, u64), action: Action) -> Result<(), String> {
        match self.request(self.find(name)?, units, action)?.status {
            Status::Ok => Ok(()),
            status => Err(format!("{units:?}: {status:?}")),
        }
    }

    pub(crate) fn find(&self, name: &str) -> Result<VolumeId, String> {
        let mut volumes = self.pool.volumes();
        volumes
            .find(|(_, volume)| volume.label.name == name)
            .map(|(id, _)| id)
            .ok_or(format!("no volume {name}"))
    }

    fn label(&mut self, name: &str) -> Label {
        self.names += 1;
        Label { name: name.to_owned(), uuid: self.names.to_le_bytes() }
    }

    fn create_volume(&mut self, name: &str, units: u64, origin: Origin) -> Result<(), String> {
        let (label, when_full) = (self.label(name), WhenFull::Fail);
        let command = Command::Create { label, units, block_size: 512, origin, when_full, is_thick: false };
        self.command(command).map(drop)
    }

    fn write(&mut self, name: &str, unit: u64, units: u64, word: u64) -> Result<(), String> {
        let mut buffer = Buffer::new(units as usize * SECTOR, PAGE as usize);
        words(buffer.bytes_mut(), word);
        let data = buffer.lend();
        let result = self.change(name, (unit, units), Action::Write { data, fua: false });
        buffer.reclaim();
        result
    }

    /// The words of units of a volume: from one on, so many. `None` if they cannot be read.
    pub(crate) fn read(&mut self, name: &str, units: (u64, u64)) -> Result<Option<Vec<u64>>, String> {
        let mut buffer = Buffer::new(units.1 as usize * SECTOR, PAGE as usize);
        let data: Sgl = buffer.lend();
        let result = self.find(name).and_then(|id| self.request(id, units, Action::Read { data }));
        buffer.reclaim();
        let reply = result?;
        if reply.status == Status::Medium {
            return Ok(None);
        }
        for piece in reply.foreign {
            let at = piece.at as usize * SECTOR;
            words(&mut buffer.bytes_mut()[at..at + piece.units as usize * SECTOR], FOREIGN);
        }
        let one = |unit: &[u8]| {
            let word = unit.first_chunk().map(|first| u64::from_le_bytes(*first))?;
            unit.chunks_exact(8).all(|part| part == word.to_le_bytes()).then_some(word)
        };
        let all: Option<Vec<_>> = buffer.bytes().chunks_exact(SECTOR).map(one).collect();
        all.map(Some).ok_or_else(|| format!("a unit of {name} has two words"))
    }

    /// The pool has these volumes and snapshots, and a check finds nothing.
    fn compare(&mut self, expected: &BTreeMap<&str, Vec<u64>>) -> Result<(), String> {
        if !self.findings.is_empty() {
            return Err(format!("the store found {:?}", self.findings));
        }
        let names: BTreeSet<_> = self.pool.volumes().map(|(_, volume)| volume.label.name.clone()).collect();
        if !names.iter().eq(expected.keys()) {
            return Err(format!("it has {names:?}"));
        }
        for (name, words) in expected {
            let found = self.read(name, (0, words.len() as u64))?.ok_or("it cannot be read")?;
            if let Some(unit) = (0..words.len()).find(|unit| found[*unit] != words[*unit]) {
                return Err(format!("unit {unit} of {name}: {}, not {}", found[unit], words[unit]));
            }
        }
        let report = self.check()?;
        if report.is_clean() { Ok(()) } else { Err(format!("the check found {report:?}")) }
    }

    /// What a check of everything finds.
    pub(crate) fn check(&mut self) -> Result<CheckReport, String> {
        match self.command(Command::Check { data: true, repair: false })? {
            Answer::Check(report) => Ok(report),
            other => Err(format!("{other:?} for a check")),
        }
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Create(name, units) => self.create_volume(name, units, Origin::Empty),
            Step::Overlay(name, units) => {
                let disk = Foreign { name: "image".to_owned(), units: units / 2 };
                self.create_volume(name, units, Origin::Foreign(disk))
            }
            Step::Clone(of, name) => {
                let snapshot = self.find(of)?;
                let found = self.pool.volumes().find(|(id, _)| *id == snapshot);
                let units = found.map(|(_, volume)| volume.units).ok_or("no snapshot")?;
                self.create_volume(name, units, Origin::Snapshot(snapshot))
            }
            Step::Thick(name) => {
                let volume = self.find(name)?;
                self.command(Command::SetThick { volume, is_thick: true }).map(drop)
            }
            Step::Write(name, unit, units, word) => self.write(name, unit, units, word),
            Step::Zero(name, unit, units) => {
                self.change(name, (unit, units), Action::Zero { whole_blocks: false, fua: false })
            }
            Step::Snapshot(of, name) => {
                let label = self.label(name);
                self.command(Command::Snapshot(vec![(self.find(of)?, label)])).map(drop)
            }
            Step::Delete(name) => self.command(Command::Delete(self.find(name)?)).map(drop),
            Step::Flush(name) => self.change(name, (0, 0), Action::Flush),
            Step::Checkpoint => {
                self.pool.request_checkpoint();
                self.settle();
                Ok(())
            }
        }
    }
}

/// An image of the pool, as this version makes it.
///
/// # Errors
/// What went wrong, which is a mistake of the engine or of the history.
pub fn make() -> Result<Vec<u8>, String> {
    Ok(pack(&Rig::create(HISTORY)?.disk.peek(0, BYTES as usize)))
}

fn pack(bytes: &[u8]) -> Vec<u8> {
    let word = |sector: &[u8]| {
        let first = sector.first_chunk::<8>().copied()?;
        sector.chunks_exact(8).all(|part| part == first).then_some(first)
    };
    let sectors: Vec<_> = bytes.chunks_exact(SECTOR).map(|sector| (word(sector), sector)).collect();
    let mut packed = Vec::new();
    let mut first = 0;
    for row in sectors.chunk_by(|(a, _), (b, _)| a == b) {
        let (filled, count) = (row[0].0, row.len() as u32);
        if filled != Some([0; 8]) {
            packed.extend((first as u32).to_le_bytes());
            packed.extend((count | if filled.is_some() { FILLED } else { 0 }).to_le_bytes());
            match filled {
                Some(word) => packed.extend(word),
                None => row.iter().for_each(|(_, sector)| packed.extend(*sector)),
            }
        }
        first += row.len();
    }
    packed
}

/// The disk that an image is of.
fn unpack(mut packed: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = vec![0; BYTES as usize];
    let mut take = |len: usize| packed.split_off(..len);
    while let Some(head) = take(8) {
        let first = u32::from_le_bytes(*head.first_chunk()?) as usize;
        let count = u32::from_le_bytes(*head.last_chunk()?);
        let row = bytes.get_mut(first * SECTOR..)?.get_mut(..(count & !FILLED) as usize * SECTOR)?;
        if count & FILLED != 0 {
            words(row, u64::from_le_bytes(*take(8)?.first_chunk()?));
        } else {
            row.copy_from_slice(take(row.len())?);
        }
    }
    Some(bytes)
}

/// Opens the pool of an image, compares all that it has with its history, checks it, writes to it, and does the same again.
///
/// # Errors
/// What is wrong.
pub fn check(image: &[u8]) -> Result<(), String> {
    let mut expected = contents(HISTORY);
    let disk = |bytes: Vec<u8>| Disk::of(base(), &bytes);
    let mut rig = Rig::open(unpack(image).map(disk).ok_or("it is no image")?)?;
    if (rig.store.superblock().name.as_str(), rig.store.pool()) != ("old", POOL) {
        return Err(format!("it is of another pool: {:?}", rig.store.superblock()));
    }
    if rig.pool.volumes().all(|(_, volume)| !volume.is_thick) {
        return Err("no volume is thick".to_owned());
    }
    rig.compare(&expected)?;
    rig.write("b", 100, 3000, 12)?;
    expected.entry("b").and_modify(|words| words[100..3100].fill(12));
    rig.change("b", (0, 0), Action::Flush)?;
    Rig::open(rig.disk)?.compare(&expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::{CrcAlgorithm, checksum};

    /// By the version of the format.
    const FIXTURES: [&[u8]; 1] = [include_bytes!("../fixtures/pool-v1")];

    #[test]
    fn pools_of_all_versions_are_read_and_written() {
        FIXTURES.into_iter().for_each(|image| check(image).unwrap());
        check(&make().unwrap()).unwrap();
    }

    #[test]
    fn a_pool_of_a_newer_version_is_refused() {
        let mut bytes = unpack(FIXTURES[0]).unwrap();
        for copy in [0, 1 << 20] {
            let superblock = &mut bytes[copy..copy + 4096];
            superblock[8] = 2;
            superblock[12..16].fill(0);
            let crc = checksum(CrcAlgorithm::Crc32Iscsi, superblock) as u32;
            superblock[12..16].copy_from_slice(&crc.to_le_bytes());
        }
        let error = Rig::open(Disk::of(base(), &bytes)).err().unwrap();
        assert!(error.contains("version 2"), "{error}");
    }
}
