//! What may be read: for each part of a volume, the values that requests may have left there.
//!
//! Requests overlap, so the model does not know their order. A value is out once a later write has ended, that began after the
//! write of the value had ended. It is out for good, also after a loss of power, once such a later write is durable.

use std::collections::BTreeMap;

use aryk_volume::VolumeId;

use crate::pattern::{self, ZERO};

/// A moment: the number of events before it.
pub type Time = u64;

/// A write that a part may show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What it wrote.
    pub value: u64,
    /// When it began.
    pub began: Time,
    /// When it ended.
    pub ended: Option<Time>,
    /// Whether it succeeded: a failed one may have changed something, but replaces nothing.
    is_ok: bool,
    is_durable: bool,
    /// When a later write replaced it, as readers see it.
    replaced: Option<Time>,
    /// Whether a later write replaced it durably.
    is_gone: bool,
}

impl Candidate {
    fn settled(value: u64, at: Time) -> Self {
        Self {
            value,
            began: at,
            ended: Some(at),
            is_ok: true,
            is_durable: true,
            replaced: None,
            is_gone: false,
        }
    }
}

/// The smallest part of a volume that is written by itself.
#[derive(Clone, Debug)]
pub struct Cell(Vec<Candidate>);

impl Cell {
    fn find(&mut self, began: Time) -> Option<&mut Candidate> {
        self.0.iter_mut().find(|candidate| candidate.began == began)
    }

    fn end(&mut self, began: Time, now: Time) {
        for other in &mut self.0 {
            if other.ended.is_some_and(|ended| ended < began) && other.replaced.is_none() {
                other.replaced = Some(now);
            }
        }
    }

    fn persist(&mut self, began: Time, oldest: Time) {
        for other in &mut self.0 {
            other.is_gone |= other.ended.is_some_and(|ended| ended < began);
        }
        self.0.retain(|other| !other.is_gone || other.replaced.is_none_or(|replaced| replaced >= oldest));
    }

    /// What a reader may see that began at this time and ends now.
    pub fn seen_since(&self, began: Time) -> impl Iterator<Item = &Candidate> {
        self.0.iter().filter(move |candidate| candidate.replaced.is_none_or(|replaced| replaced > began))
    }

    /// Whether readers that begin now see this value, and no other.
    pub fn settled_value(&self) -> Option<u64> {
        let mut values = self.seen_since(Time::MAX).map(|candidate| candidate.value);
        let first = values.next()?;
        values.all(|value| value == first).then_some(first)
    }
}

/// A write in progress, or one that is not durable.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// When it began; identifies it.
    pub began: Time,
    /// The first unit, and the one after the last.
    pub units: (u64, u64),
    /// When it ended.
    ended: Option<Time>,
}

/// What a volume shows where nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    /// The value; zero beyond `units`.
    pub value: u64,
    /// The units that have it.
    pub units: u64,
}

/// A volume or a snapshot.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its identifier.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Its size.
    pub units: u64,
    /// Units of the smallest part that is written by itself.
    pub grain: u64,
    /// The volume that a snapshot is of.
    pub of: Option<VolumeId>,
    /// What is below everything.
    pub below: Below,
    /// Units from here on may read zeroes: a crash has interrupted a command that would have cut them off.
    pub zeroed_from: u64,
    /// Snapshots that were taken together, until their content is known.
    pub group: Option<Time>,
    cells: BTreeMap<u64, Cell>,
    writes: Vec<Write>,
}

impl Model {
    /// A new volume.
    pub fn new(name: String, units: u64, grain: u64, below: Below) -> Self {
        let (id, cells, writes) = (VolumeId(u32::MAX), BTreeMap::new(), Vec::new());
        let zeroed_from = u64::MAX;
        Self { id, name, units, grain, of: None, below, zeroed_from, group: None, cells, writes }
    }

    /// A volume or snapshot with the content of this one, as a reader sees it that began at this time and ends now.
    pub fn copy_since(&self, name: String, began: Time) -> Self {
        let mut copy = Self { name, writes: Vec::new(), group: None, of: None, ..self.clone() };
        for cell in copy.cells.values_mut() {
            cell.0.retain(|candidate| candidate.replaced.is_none_or(|replaced| replaced > began));
            for candidate in &mut cell.0 {
                (candidate.replaced, candidate.is_gone) = (None, false);
            }
        }
        copy
    }

    /// Of what the volume may show, no value replaces another: the choice was made when its snapshot was taken.
    pub fn forget_order(&mut self) {
        for cell in self.cells.values_mut().filter(|cell| cell.0.len() > 1) {
            cell.0.iter_mut().for_each(|candidate| candidate.is_ok = false);
        }
    }

    /// Takes over the content of a snapshot.
    pub fn revert_to(&mut self, snapshot: &Self) {
        (self.units, self.below) = (snapshot.units, snapshot.below);
        self.cells.clone_from(&snapshot.cells);
        self.forget_order();
        self.writes.clear();
    }

    /// Takes over the content of another volume, in whose place this one is from now on.
    pub fn adopt(&mut self, other: Self) {
        (self.units, self.below, self.zeroed_from) = (other.units, other.below, other.zeroed_from);
        (self.cells, self.writes) = (other.cells, other.writes);
    }

    fn below_at(&self, unit: u64) -> u64 {
        if unit < self.below.units { self.below.value } else { ZERO }
    }

    /// The first units of the parts from one unit to another.
    fn parts(&self, units: (u64, u64)) -> impl Iterator<Item = u64> + use<> {
        (units.0 / self.grain * self.grain..units.1).step_by(self.grain as usize)
    }

    fn cell(&mut self, unit: u64) -> &mut Cell {
        let below = self.below_at(unit);
        self.cells.entry(unit).or_insert_with(|| Cell(vec![Candidate::settled(below, 0)]))
    }

    /// A write begins.
    pub fn begin(&mut self, units: (u64, u64), value: u64, now: Time) {
        for unit in self.parts(units) {
            let candidate =
                Candidate { ended: None, is_ok: false, is_durable: false, ..Candidate::settled(value, now) };
            self.cell(unit).0.push(candidate);
        }
        self.writes.push(Write { began: now, units, ended: None });
    }

    /// A write has ended. `replaces`: the units in which nothing older is left.
    pub fn end(&mut self, began: Time, replaces: (u64, u64), now: Time) {
        let Some(write) = self.writes.iter_mut().find(|write| write.began == began) else { return };
        write.ended = Some(now);
        let units = write.units;
        for unit in self.parts(units) {
            let is_ok = replaces.0 <= unit && unit < replaces.1;
            let Some(cell) = self.cells.get_mut(&unit) else { continue };
            let Some(candidate) = cell.find(began) else { continue };
            (candidate.ended, candidate.is_ok) = (Some(now), is_ok);
            if is_ok {
                cell.end(began, now);
            }
        }
    }

    /// What had ended before this time is durable. `oldest`: when the oldest reader began.
    pub fn persist(&mut self, before: Time, oldest: Time) {
        let is_covered = |write: &Write| write.ended.is_some_and(|ended| ended < before);
        let covered: Vec<_> = self.writes.iter().copied().filter(is_covered).collect();
        self.writes.retain(|write| !is_covered(write));
        for write in covered {
            self.persist_write(write, oldest);
        }
    }

    /// One write is durable.
    pub fn persist_one(&mut self, began: Time, oldest: Time) {
        if let Some(n) = self.writes.iter().position(|write| write.began == began) {
            let write = self.writes.remove(n);
            self.persist_write(write, oldest);
        }
    }

    fn persist_write(&mut self, write: Write, oldest: Time) {
        for unit in self.parts(write.units) {
            let Some(cell) = self.cells.get_mut(&unit) else { continue };
            let Some(candidate) = cell.find(write.began).filter(|candidate| candidate.is_ok) else {
                continue;
            };
            candidate.is_durable = true;
            cell.persist(write.began, oldest);
        }
    }

    /// The values that a reader may see that began at this time and ends now.
    ///
    /// # Errors
    /// If the value is none of them: says which they are.
    pub fn check(&self, unit: u64, value: u64, began: Time) -> Result<(), String> {
        if value == ZERO && unit >= self.zeroed_from {
            return Ok(());
        }
        let Some(cell) = self.cells.get(&unit) else {
            let below = self.below_at(unit);
            return if value == below {
                Ok(())
            } else {
                Err(format!("expected {below:#x}, below everything"))
            };
        };
        if cell.seen_since(began).any(|candidate| candidate.value == value) {
            return Ok(());
        }
        Err(format!(
            "expected one of {:?}; history {:?}",
            cell.seen_since(began).map(|c| c.value).collect::<Vec<_>>(),
            cell.0
        ))
    }

    /// A reader has seen this value while nothing was written: from now on, and after any crash, it is there.
    pub fn settle(&mut self, unit: u64, value: u64, now: Time) {
        if let Some(cell) = self.cells.get_mut(&unit) {
            let began = cell.0.iter().filter(|c| c.value == value).map(|c| c.began).min().unwrap_or(now);
            let candidate = Candidate { began, ..Candidate::settled(value, now.min(began + 1)) };
            cell.0.clear();
            cell.0.push(candidate);
        }
    }

    /// Whether writes are in progress.
    pub fn is_written(&self) -> bool {
        self.writes.iter().any(|write| write.ended.is_none())
    }

    /// A crash: what was in progress is over, and the rest is what the disk may have kept.
    pub fn crash(&mut self, loses_unflushed: bool, now: Time) {
        self.writes.clear();
        for cell in self.cells.values_mut() {
            cell.0.retain(
                |candidate| if loses_unflushed { !candidate.is_gone } else { candidate.replaced.is_none() },
            );
            for candidate in &mut cell.0 {
                candidate.ended.get_or_insert(now);
                (candidate.replaced, candidate.is_gone) = (None, false);
                // What may be lost has replaced nothing. A part that cannot be read after the crash stays in doubt.
                candidate.is_ok &= candidate.is_durable || !loses_unflushed;
            }
        }
    }

    /// A new size. What is lost reads as zeroes when the volume grows again.
    pub fn resize(&mut self, units: u64) {
        self.below.units = self.below.units.min(units);
        self.cells.retain(|unit, _| *unit < units);
        self.units = units;
    }

    /// The units that have a history.
    pub fn units_with_history(&self) -> impl Iterator<Item = u64> {
        self.cells.keys().copied()
    }

    /// The value of a unit, if there is only one.
    pub fn settled_value(&self, unit: u64) -> Option<u64> {
        self.cells.get(&unit).map_or(Some(self.below_at(unit)), Cell::settled_value)
    }

    /// When the write began whose value was seen here; the earliest, if several have this value.
    pub fn began(&self, unit: u64, value: u64) -> Time {
        let cell = self.cells.get(&unit);
        cell.and_then(|cell| cell.0.iter().filter(|c| c.value == value).map(|c| c.began).min()).unwrap_or(0)
    }

    /// All that is known of a unit, for a message.
    pub fn history(&self, unit: u64) -> Option<&Cell> {
        self.cells.get(&unit)
    }

    /// Whether this value had been replaced before this time: by a write that began after the value's had ended, and that ended
    /// before the time.
    pub fn was_replaced_before(&self, unit: u64, value: u64, time: Time) -> bool {
        let Some(cell) = self.cells.get(&unit) else { return false };
        let mut same = cell.0.iter().filter(|c| c.value == value);
        same.all(|c| {
            cell.0.iter().any(|later| {
                later.is_ok
                    && c.ended.is_some_and(|ended| ended < later.began)
                    && later.ended.is_some_and(|ended| ended < time)
            })
        })
    }
}

/// What a foreign disk of this number and size shows.
pub const fn foreign(disk: u32, units: u64) -> Below {
    Below { value: pattern::foreign(disk), units }
}
