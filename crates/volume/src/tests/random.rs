//! Random requests and commands by seed, with reopening at any point.

use super::model::{self, Model};
use super::rig::{self, Rig};
use crate::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Units of 4 MiB.
const RANGE: u64 = 8192;

enum Pending {
    Write { volume: VolumeId, first: u64, units: u64, value: u32 },
    Zero { volume: VolumeId, range: (u64, u64), units: Vec<u64> },
    Read { volume: VolumeId, first: u64, skip: BTreeSet<u64>, since: u64 },
    Flush { time: u64 },
}

pub(super) struct World {
    pub(super) rig: Rig,
    pub(super) models: BTreeMap<VolumeId, Model>,
    snapshots: BTreeSet<VolumeId>,
    pending: HashMap<Tag, Pending>,
    next_value: u32,
    time: u64,
    names: u32,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let facts = StoreFacts { alignment: if seed.is_multiple_of(2) { 512 } else { 4096 }, ..rig::facts() };
        let rig = Rig::with(seed, rig::settings(), facts);
        Self {
            rig,
            models: BTreeMap::new(),
            snapshots: BTreeSet::new(),
            pending: HashMap::new(),
            next_value: 0,
            time: 0,
            names: 0,
        }
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    fn any(&mut self, of: impl Fn(&VolumeId) -> bool) -> Option<VolumeId> {
        let ids: Vec<_> = self.models.keys().filter(|id| of(id)).copied().collect();
        (!ids.is_empty()).then(|| ids[self.rig.rng.usize(0..ids.len())])
    }

    fn any_volume(&mut self) -> Option<VolumeId> {
        let snapshots = self.snapshots.clone();
        self.any(|id| !snapshots.contains(id))
    }

    fn place(&mut self, volume: VolumeId) -> (u64, u64) {
        let end = self.models[&volume].units;
        let rng = &mut self.rig.rng;
        let near = [0, RANGE - 100, 4 * RANGE - 50, 9 * RANGE, end.saturating_sub(300)][rng.usize(0..5)]
            .min(end - 1);
        let mut first = (near + rng.u64(0..300)).min(end - 1);
        let mut units = [1, 8, 8, 8, 16, 64][rng.usize(0..6)];
        if rng.u8(0..4) > 0 {
            first = first / 8 * 8;
        } else {
            units += rng.u64(0..9);
        }
        if rng.u16(0..300) == 0 {
            first = first / RANGE * RANGE;
            units = RANGE;
        }
        (first, units.min(end - first))
    }

    fn is_busy(&self, volume: VolumeId, first: u64, units: u64) -> bool {
        let is_zeroed = |pending: &Pending| match pending {
            Pending::Zero { volume: of, range, .. } => {
                *of == volume && range.0 < first + units && first < range.1
            }
            _ => false,
        };
        self.models[&volume].busy.range(first..first + units).next().is_some()
            || self.pending.values().any(is_zeroed)
    }

    fn write(&mut self) {
        let Some(volume) = self.any_volume() else { return };
        let (first, units) = self.place(volume);
        if self.is_busy(volume, first, units) {
            return;
        }
        self.next_value += 1;
        let value = self.next_value;
        let mut bytes = vec![0; (units * 512) as usize];
        for (at, piece) in bytes.chunks_exact_mut(512).enumerate() {
            model::fill(first + at as u64, value, piece);
        }
        let model = self.models.get_mut(&volume).unwrap();
        (first..first + units).for_each(|unit| model.begin(unit, value));
        let fua = self.rig.rng.u8(0..10) == 0;
        let tag = self.rig.submit_write(volume, first, &bytes, fua);
        self.pending.insert(tag, Pending::Write { volume, first, units, value });
    }

    fn zero(&mut self) {
        let Some(volume) = self.any_volume() else { return };
        let (mut first, mut units) = self.place(volume);
        if self.rig.rng.u8(0..8) == 0 {
            let end = self.models[&volume].units;
            first = self.rig.rng.u64(0..end / 2);
            units = self.rig.rng.u64(1..=end - first);
        }
        if self.is_busy(volume, first, units) {
            return;
        }
        let whole_blocks = self.rig.rng.bool();
        let (mut from, mut to) = (first, first + units);
        if whole_blocks {
            from = from.next_multiple_of(8);
            to = (to / 8 * 8).max(from);
        }
        let model = self.models.get_mut(&volume).unwrap();
        let touched = model.touched(from, to);
        touched.iter().for_each(|unit| model.begin(*unit, 0));
        let tag = self.rig.submit(volume, first, units, Action::Zero { whole_blocks, fua: false });
        self.pending.insert(tag, Pending::Zero { volume, range: (first, first + units), units: touched });
    }

    fn read(&mut self) {
        let Some(volume) = self.any(|_| true) else { return };
        let (first, units) = self.place(volume);
        let skip = self.models[&volume].busy.clone();
        let tag = self.rig.submit_read(volume, first, units);
        self.pending.insert(tag, Pending::Read { volume, first, skip, since: self.time });
    }

    fn flush(&mut self) {
        let Some(volume) = self.any(|_| true) else { return };
        let tag = self.rig.submit(volume, 0, 0, Action::Flush);
        self.pending.insert(tag, Pending::Flush { time: self.time });
    }

    /// Takes the replies.
    pub(super) fn drain(&mut self) {
        for reply in std::mem::take(&mut self.rig.replies) {
            self.time += 1;
            let pending = self.pending.remove(&reply.tag).expect("a request");
            assert_eq!(reply.status, Status::Ok, "{:?}", self.rig.pool.state());
            match pending {
                Pending::Write { volume, first, units, value } => {
                    let model = self.models.get_mut(&volume).unwrap();
                    (first..first + units).for_each(|unit| model.answer(unit, value, self.time));
                    self.rig.forget(reply.tag);
                }
                Pending::Zero { volume, units, .. } => {
                    let model = self.models.get_mut(&volume).unwrap();
                    units.iter().for_each(|unit| model.answer(*unit, 0, self.time));
                }
                Pending::Read { volume, first, skip, since } => {
                    let bytes = self.rig.data(&reply);
                    // What was written meanwhile may be seen or not.
                    let written: BTreeSet<u64> = self.models[&volume]
                        .cells
                        .range(first..first + bytes.len() as u64 / 512)
                        .filter(|(_, cell)| cell.answered > since)
                        .map(|(&unit, _)| unit)
                        .collect();
                    let skip = &skip | &written;
                    self.models.get_mut(&volume).unwrap().check(first, &bytes, &skip).unwrap();
                }
                Pending::Flush { time } => self.models.values_mut().for_each(|model| model.flushed(time)),
            }
        }
    }

    fn command(&mut self, command: Command) -> Result<Answer, CommandError> {
        let result = self.rig.command(command);
        self.drain();
        result
    }

    fn label(&mut self) -> Label {
        let name = self.name();
        let mut uuid = [0; 16];
        uuid[..4].copy_from_slice(&self.names.to_le_bytes());
        Label { name, uuid }
    }

    pub(super) fn create(&mut self) {
        let label = self.label();
        let snapshots = self.snapshots.clone();
        let (origin, model) = match (self.rig.rng.u8(0..4), self.any(|id| snapshots.contains(id))) {
            (0 | 1, Some(id)) => (Origin::Snapshot(id), self.models[&id].clone()),
            (2, _) => {
                let foreign = Foreign { name: "image".to_owned(), units: 501 };
                (
                    Origin::Foreign(foreign),
                    Model { units: 12 * RANGE, foreign_units: 501, ..Model::default() },
                )
            }
            _ => (Origin::Empty, Model { units: 10 * RANGE + 40, ..Model::default() }),
        };
        let (units, when_full) = (model.units, WhenFull::Wait);
        let answer = self.command(Command::Create {
            label,
            units,
            block_size: 512,
            origin,
            when_full,
            is_thick: false,
        });
        let Ok(Answer::Volume(id)) = answer else { panic!("{answer:?}") };
        self.models.insert(id, model);
    }

    fn snapshot(&mut self) {
        let Some(of) = self.any_volume() else { return };
        let label = self.label();
        let mut model = self.models[&of].clone();
        model.busy.clear();
        model.cells.values_mut().for_each(|cell| cell.lost.clear());
        let answer = self.command(Command::Snapshot(vec![(of, label)]));
        let Ok(Answer::Volumes(ids)) = answer else { panic!("{answer:?}") };
        self.models.insert(ids[0], model);
        self.snapshots.insert(ids[0]);
    }

    fn delete(&mut self) {
        let Some(id) = self.any(|_| true) else { return };
        assert_eq!(self.command(Command::Delete(id)), Ok(Answer::Done));
        self.models.remove(&id);
        self.snapshots.remove(&id);
    }

    fn revert(&mut self) {
        let (snapshots, Some(volume)) = (self.snapshots.clone(), self.any_volume()) else { return };
        let Some(snapshot) = self.any(|id| snapshots.contains(id)) else { return };
        assert_eq!(self.command(Command::Revert { volume, snapshot }), Ok(Answer::Done));
        self.models.insert(volume, self.models[&snapshot].clone());
    }

    fn resize(&mut self) {
        let Some(volume) = self.any_volume() else { return };
        let units = self.rig.rng.u64(2 * RANGE..14 * RANGE);
        assert_eq!(self.command(Command::Resize { volume, units }), Ok(Answer::Done));
        let model = self.models.get_mut(&volume).unwrap();
        model.cells.retain(|unit, _| *unit < units);
        model.units = units;
        model.foreign_units = model.foreign_units.min(units);
    }

    fn crash(&mut self) {
        self.rig.reopen(true);
        self.forget();
        self.verify();
    }

    /// The pool has ended: what was not durable may be lost.
    pub(super) fn forget(&mut self) {
        self.pending.clear();
        self.models.values_mut().for_each(Model::crash);
    }

    /// Reads all that was ever written.
    pub(super) fn verify(&mut self) {
        self.verify_without(|_, _, _| false);
    }

    /// Reads all that was ever written, and compares it except where a unit may have any value.
    pub(super) fn verify_without(&mut self, is_left_out: impl Fn(VolumeId, u64, &[u32]) -> bool) {
        if let Err(what) = self.compare(is_left_out) {
            panic!("{what}");
        }
    }

    /// Whether that is so.
    pub(super) fn is_same(&mut self, is_left_out: impl Fn(VolumeId, u64, &[u32]) -> bool) -> bool {
        self.compare(is_left_out).is_ok()
    }

    fn compare(&mut self, is_left_out: impl Fn(VolumeId, u64, &[u32]) -> bool) -> Result<(), String> {
        let ids: Vec<_> = self.models.keys().copied().collect();
        for id in ids {
            let cells = self.models[&id].cells.iter();
            let skip = cells
                .filter(|(unit, cell)| is_left_out(id, **unit, &cell.now))
                .map(|(unit, _)| *unit)
                .collect();
            let blocks: BTreeSet<u64> = self.models[&id].cells.keys().map(|unit| unit / 64).collect();
            for block in blocks {
                let first = block * 64;
                let units = 64.min(self.models[&id].units - first);
                let bytes = self.rig.read(id, first, units);
                let result = self.models.get_mut(&id).unwrap().check(first, &bytes, &skip);
                result.map_err(|what| format!("volume {id:?}: {what}"))?;
            }
        }
        Ok(())
    }

    pub(super) fn act(&mut self) {
        match self.rig.rng.u16(0..1000) {
            0..450 => self.write(),
            450..520 => self.zero(),
            520..700 => self.read(),
            700..740 => self.flush(),
            740..750 if self.models.len() < 8 => self.create(),
            750..765 if self.models.len() < 8 => self.snapshot(),
            765..775 if self.models.len() > 1 => self.delete(),
            775..780 => self.revert(),
            780..785 => self.resize(),
            785..795 => self.crash(),
            795..800 => self.rig.pool.jobs.is_flush_wanted = true,
            _ => {
                for _ in 0..self.rig.rng.u8(0..20) {
                    self.rig.turn();
                    self.rig.step();
                }
            }
        }
        if self.rig.rng.bool() {
            self.rig.turn();
        }
        self.drain();
    }
}

fn run(seed: u64, actions: usize) {
    let mut world = World::new(seed);
    world.create();
    for _ in 0..actions {
        world.act();
    }
    world.rig.settle();
    world.drain();
    world.verify();
    world.rig.reopen(false);
    world.verify();
}

#[test]
fn volumes_have_what_was_written_whatever_happens() {
    let seeds = std::env::var("ARYK_VOLUME_SEEDS").ok().and_then(|text| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    });
    for seed in seeds.unwrap_or(0..25) {
        eprintln!("seed {seed}");
        run(seed, 1500);
    }
}
