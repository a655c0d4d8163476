//! Damage of any byte of a pool: on a copy of a small pool that has all structures, some bits of a sector are changed. Then the
//! pool is opened, read and checked there. Either the damage is named, or the data is right.

use std::collections::{BTreeMap, BTreeSet};

use aryk_volume::frame::Frame;
use aryk_volume::{Action, Status};
use aryk_volume_store::{HEADER_BYTES, Header, Kind, SUPERBLOCK_BYTES, SUPERBLOCK_PLACES};
use fastrand::Rng;

use crate::disk::{Disk, SECTOR};
use crate::fixture::{POOL, RANGE, Rig, Step, contents};

/// The volume whose write is the last frame of the log: nothing proves that this frame was durable.
const LAST: &str = "last";

/// Units of a volume whose index has an inner page.
const SMALL: u64 = 4096;

/// Frames of all kinds, an index with inner pages, a checkpoint with edits behind it, and writes that only the log has.
const HISTORY: &[Step] = &[
    Step::Create("a", SMALL),
    Step::Create("dense", RANGE),
    Step::Create(LAST, 8),
    Step::Write("dense", 0, RANGE, 1),
    Step::Write("a", 0, SMALL / 2, 2),
    Step::Write("a", SMALL / 2, 1024, 3),
    Step::Write("a", 3, 5, 4),
    Step::Zero("a", 16, 41),
    Step::Snapshot("a", "s"),
    Step::Write("a", 64, 1024, 5),
    Step::Clone("s", "b"),
    Step::Write("b", 8, 8, 6),
    Step::Zero("b", SMALL / 2, 512),
    Step::Overlay("d", 1024),
    Step::Write("d", 508, 8, 7),
    Step::Checkpoint,
    Step::Write("a", 2048, 512, 8),
    Step::Snapshot("b", "t"),
    Step::Write("b", 16, 9, 9),
    Step::Flush("b"),
    Step::Write(LAST, 0, 8, 10),
];

/// A structure of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A copy of the superblock.
    Superblock,
    /// A mirror of a checkpoint.
    Checkpoint,
    /// A mirror of a record of edits.
    Edits,
    /// A copy of the manifest.
    Copy,
    /// The header of a frame.
    Header,
    /// Blocks of volumes.
    Data,
    /// A leaf page of the index.
    Leaf,
    /// An inner page of the index.
    Inner,
    /// Whatever was written.
    Any,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Superblock,
        Self::Checkpoint,
        Self::Edits,
        Self::Copy,
        Self::Header,
        Self::Data,
        Self::Leaf,
        Self::Inner,
        Self::Any,
    ];
}

/// Where a structure is.
#[derive(Clone, Copy, Debug)]
struct Place {
    part: Part,
    offset: u64,
    bytes: u64,
    /// Whether the pool needs it, or keeps it as a second copy: then its damage must be told.
    is_used: bool,
}

/// A pool, of which copies are damaged.
#[derive(Debug)]
pub struct Target {
    disk: Disk,
    expected: BTreeMap<&'static str, Vec<u64>>,
    places: Vec<Place>,
}

impl Target {
    /// Makes the pool.
    ///
    /// # Errors
    /// What went wrong, which is a mistake of the engine or of the history.
    pub fn new() -> Result<Self, String> {
        let mut rig = Rig::create(HISTORY)?;
        let data = data(&mut rig);
        let disk = rig.disk.fork(0);
        let mut places: Vec<_> = SUPERBLOCK_PLACES
            .iter()
            .map(|&offset| (Part::Superblock, offset, SUPERBLOCK_BYTES as u64, true))
            .map(|(part, offset, bytes, is_used)| Place { part, offset, bytes, is_used })
            .collect();
        places.extend(records(&disk));
        places.extend(frames(&disk));
        places.extend(pages(&disk));
        places.extend(data);
        Ok(Self { disk, expected: contents(HISTORY), places })
    }

    /// Damages what the seed says. Returns the structure, and whether anything was told.
    ///
    /// # Errors
    /// What was wrong: other data, or damage that nothing tells.
    pub fn run(&self, seed: u64) -> Result<(Part, bool), String> {
        let mut rng = Rng::with_seed(seed);
        let part = Part::ALL[(seed % Part::ALL.len() as u64) as usize];
        let place = match part {
            Part::Any => self.disk.written_page(&mut rng).map(|offset| Place {
                part,
                offset,
                bytes: 4096,
                is_used: false,
            }),
            part => {
                let places: Vec<_> = self.places.iter().filter(|place| place.part == part).collect();
                rng.choice(places).copied()
            }
        };
        let place = place.ok_or_else(|| format!("the pool has no {part:?}"))?;
        let first = place.offset + rng.u64(..place.bytes);
        let mut disk = self.disk.fork(seed);
        disk.flip(first, rng.u8(..8));
        // Sometimes more of the sector.
        for _ in 0..rng.u32(..2) * 16 {
            let at = first / SECTOR * SECTOR + rng.u64(..SECTOR);
            let end = place.offset + place.bytes;
            if at != first && (place.offset..end).contains(&at) {
                disk.flip(at, rng.u8(..8));
            }
        }
        let is_told = self.judge(disk).map_err(|what| format!("{place:?}, byte {first}: {what}"))?;
        if place.is_used && !is_told {
            return Err(format!("{place:?}, byte {first}: nothing tells the damage"));
        }
        Ok((part, is_told))
    }

    /// Opens the pool of a damaged disk, reads all and checks it. Returns whether anything tells the damage.
    fn judge(&self, disk: Disk) -> Result<bool, String> {
        let mut rig = match Rig::open(disk) {
            Ok(rig) => rig,
            Err(error) if error.to_lowercase().contains("damaged") => return Ok(true),
            Err(error) => return Err(format!("it does not open, and no damage is named: {error}")),
        };
        let refused = self.compare(&mut rig)?;
        let report = rig.check()?;
        let is_told = !report.is_clean() || !rig.findings.is_empty();
        if refused == 0 {
            return Ok(is_told);
        }
        let refused = self.compare(&mut rig).map_err(|what| format!("after the check: {what}"))?;
        // The merges of a check replace inner pages without reading them: then the damage is mended.
        if refused > 0 && report.damage.is_empty() {
            return Err(format!("{refused} blocks cannot be read, and the check says nothing"));
        }
        Ok(is_told)
    }

    /// Reads all volumes and snapshots. Returns the number of blocks that cannot be read.
    fn compare(&self, rig: &mut Rig) -> Result<u64, String> {
        const PIECE: u64 = 2048;
        let names: BTreeSet<_> = rig.pool.volumes().map(|(_, volume)| volume.label.name.clone()).collect();
        if !names.iter().eq(self.expected.keys()) {
            return Err(format!("it has {names:?}"));
        }
        let mut refused = 0;
        for (name, words) in &self.expected {
            for first in (0..words.len() as u64).step_by(PIECE as usize) {
                let end = (first + PIECE).min(words.len() as u64);
                if let Some(found) = rig.read(name, (first, end - first))? {
                    same(name, first, &words[first as usize..end as usize], &found)?;
                    continue;
                }
                for block in (first..end).step_by(8) {
                    let expected = &words[block as usize..block as usize + 8];
                    match rig.read(name, (block, 8))? {
                        Some(found) => same(name, block, expected, &found)?,
                        None => refused += 1,
                    }
                }
            }
        }
        Ok(refused)
    }
}

fn same(name: &str, first: u64, expected: &[u64], found: &[u64]) -> Result<(), String> {
    let is_other = |(expected, found): (&u64, &u64)| expected != found && !(name == LAST && *found == 0);
    match expected.iter().zip(found).position(is_other) {
        Some(at) => {
            Err(format!("unit {} of {name} has {}, not {}", first + at as u64, found[at], expected[at]))
        }
        None => Ok(()),
    }
}

/// Checkpoints, edits and copies of the manifest.
fn records(disk: &Disk) -> Vec<Place> {
    let header = |offset: u64| Some((offset, Header::parse(&disk.peek(offset, HEADER_BYTES))?));
    let is_ours = |(_, header): &(u64, Header)| header.pool == POOL;
    let all: Vec<_> = disk.sectors_with(b"ARMJ").into_iter().filter_map(header).filter(is_ours).collect();
    let newest = |of: fn(&Header) -> Option<u64>| all.iter().filter_map(|(_, header)| of(header)).max();
    let generation = newest(|header| (header.kind == Kind::Checkpoint).then_some(header.generation));
    let of_it = || all.iter().filter(|(_, header)| Some(header.generation) == generation);
    // Of the last record, a power failure may have left one copy only.
    let last = of_it().filter(|(_, h)| h.kind == Kind::Edits).map(|(_, h)| h.sequence).max().unwrap_or(0);
    let place = |(offset, header): &(u64, Header)| {
        let is_new = Some(header.generation) == generation;
        let (part, is_used) = match header.kind {
            Kind::Checkpoint => (Part::Checkpoint, is_new),
            Kind::Edits => (Part::Edits, is_new && header.sequence < last),
            Kind::Copy => (Part::Copy, false),
        };
        Place { part, offset: *offset, bytes: HEADER_BYTES as u64 + u64::from(header.len), is_used }
    };
    all.iter().map(place).collect()
}

/// Headers of frames. Those of old lives are not needed.
fn frames(disk: &Disk) -> Vec<Place> {
    let place = |offset| {
        let bytes = Frame::header_len(&disk.peek(offset, SECTOR as usize)).ok()? as u64;
        Some(Place { part: Part::Header, offset, bytes, is_used: false })
    };
    disk.sectors_with(b"AVF1").into_iter().filter_map(place).collect()
}

/// Pages of the index. Those of levels that were merged are not needed.
fn pages(disk: &Disk) -> Vec<Place> {
    let place = |offset| {
        let entries = disk.peek(offset + 24, 2);
        let part = if entries == [0; 2] { Part::Inner } else { Part::Leaf };
        Place { part, offset, bytes: 4096, is_used: false }
    };
    disk.sectors_with(b"AVIX").into_iter().map(place).collect()
}

/// Data of volumes and snapshots, of all but the last write.
fn data(rig: &mut Rig) -> Vec<Place> {
    let volumes: Vec<_> =
        rig.pool.volumes().map(|(id, volume)| (id, volume.units, volume.label.name == LAST)).collect();
    let mut places = Vec::new();
    for (id, units, _) in volumes.into_iter().filter(|(.., is_last)| !is_last) {
        for unit in (0..units).step_by(8) {
            let reply = rig.request(id, (unit, 8), Action::Locate);
            // Parts of the foreign disk are nowhere in the pool.
            let Ok(mut reply) = reply else { continue };
            if reply.status == Status::Ok {
                let found = std::cell::Cell::new(None);
                reply.extents.place(|blob, unit, len| {
                    let offset = rig.store.offset(blob, unit, len);
                    found.set(Some(offset));
                    offset
                });
                let place = |offset| Place { part: Part::Data, offset, bytes: 4096, is_used: true };
                places.extend(found.get().map(place));
            }
            rig.pool.give_back(reply.extents, 0);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_told_or_does_not_matter() {
        let target = Target::new().unwrap();
        let (mut tried, mut told) = (BTreeMap::new(), BTreeMap::new());
        for seed in 0..153 {
            let (part, is_told) = target.run(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
            *tried.entry(part).or_insert(0) += 1;
            *told.entry(part).or_insert(0) += u32::from(is_told);
        }
        assert!(Part::ALL.iter().all(|part| tried[part] == 17), "{tried:?}");
        // Only a rebuild reads the copies of the manifest, and the merges of a check replace inner pages.
        let may_be_silent = |part: &Part| matches!(part, Part::Copy | Part::Inner);
        assert!(Part::ALL.iter().all(|part| may_be_silent(part) || told[part] > 0), "{told:?}");
    }
}
