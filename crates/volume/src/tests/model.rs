//! The model of a volume: which values each unit may have.

use std::collections::{BTreeMap, BTreeSet};

/// Fills a unit with what a value means there. The value 0 is zeroes.
pub(super) fn fill(unit: u64, value: u32, out: &mut [u8]) {
    if value == 0 {
        out.fill(0);
        return;
    }
    for (at, word) in out.chunks_exact_mut(8).enumerate() {
        let mixed = (u64::from(value) << 32 | unit & 0xffff_ffff).wrapping_add((at as u64) << 56);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
}

/// The value that a unit has.
pub(super) fn value_of(unit: u64, bytes: &[u8]) -> Option<u32> {
    let value = u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
    let mut expected = vec![0; bytes.len()];
    fill(unit, value, &mut expected);
    (expected == bytes).then_some(value)
}

/// The value of a unit of the foreign disk.
pub(super) fn foreign_value(unit: u64) -> u32 {
    0x00f0_0000 | (unit as u32 & 0xffff)
}

/// What a unit may be.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// What a read may return now.
    pub(super) now: Vec<u32>,
    /// What it may be besides after a crash.
    pub(super) lost: Vec<u32>,
    /// When the latest write of it was answered.
    pub(super) answered: u64,
}

/// A volume or snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) units: u64,
    pub(super) foreign_units: u64,
    pub(super) cells: BTreeMap<u64, Cell>,
    /// Units with a write under way.
    pub(super) busy: BTreeSet<u64>,
}

impl Model {
    fn default_of(&self, unit: u64) -> u32 {
        if unit < self.foreign_units { foreign_value(unit) } else { 0 }
    }

    pub(super) fn cell(&mut self, unit: u64) -> &mut Cell {
        let default = self.default_of(unit);
        self.cells.entry(unit).or_insert_with(|| Cell { now: vec![default], lost: Vec::new(), answered: 0 })
    }

    /// The units of a range that a change to zeroes concerns: all others are zeroes anyway.
    pub(super) fn touched(&self, from: u64, to: u64) -> Vec<u64> {
        let mut units: BTreeSet<_> = self.cells.range(from..to).map(|(&unit, _)| unit).collect();
        units.extend(from..to.min(self.foreign_units.max(from)));
        units.into_iter().collect()
    }

    pub(super) fn begin(&mut self, unit: u64, value: u32) {
        self.cell(unit).now.push(value);
        self.busy.insert(unit);
    }

    pub(super) fn answer(&mut self, unit: u64, value: u32, time: u64) {
        let cell = self.cell(unit);
        let old = std::mem::replace(&mut cell.now, vec![value]);
        cell.lost.extend(old.into_iter().filter(|old| *old != value));
        cell.answered = time;
        self.busy.remove(&unit);
    }

    /// A flush that started at `time` was answered.
    pub(super) fn flushed(&mut self, time: u64) {
        let busy = &self.busy;
        self.cells.iter_mut().filter(|(unit, cell)| cell.answered <= time && !busy.contains(unit)).for_each(
            |(_, cell)| {
                cell.lost.clear();
            },
        );
    }

    pub(super) fn crash(&mut self) {
        self.busy.clear();
        for cell in self.cells.values_mut() {
            let lost = std::mem::take(&mut cell.lost);
            cell.now.extend(lost);
            cell.now.sort_unstable();
            cell.now.dedup();
        }
    }

    /// Compares what was read, which is what it is from now on. `units` were busy at any time during the read: not compared.
    pub(super) fn check(&mut self, first: u64, bytes: &[u8], skip: &BTreeSet<u64>) -> Result<(), String> {
        for (at, piece) in bytes.chunks_exact(512).enumerate() {
            let unit = first + at as u64;
            let Some(value) = value_of(unit, piece) else { return Err(format!("unit {unit}: no value")) };
            if skip.contains(&unit) {
                continue;
            }
            let default = [self.default_of(unit)];
            let allowed = self.cells.get(&unit).map_or(&default[..], |cell| &cell.now);
            if !allowed.contains(&value) {
                return Err(format!("unit {unit}: {value:#x}, not of {allowed:x?}"));
            }
            if allowed.len() > 1 && !self.busy.contains(&unit) {
                self.cell(unit).now = vec![value];
            }
        }
        Ok(())
    }
}
