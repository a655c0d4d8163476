//! What a simulation begins: requests and commands.

use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_volume::{Action, Command, Foreign, Label, Origin, Request, Tag, VolumeId, WhenFull};
use fastrand::Rng;

use super::{FOREIGN_UNITS, InFlight, Open, Pending, SEGMENT, World, bytes};
use crate::disk::SECTOR;
use crate::model::{self, Below, Model};
use crate::pattern::{self, UNIT, ZERO};
use crate::script::{Kind, Step};

/// Units of a mebibyte.
const MIB: u64 = 2048;
/// Volumes and snapshots at a time.
const VOLUMES_MAX: usize = 12;
/// Units of a usual part of a volume that is written.
const SPOT: u64 = 512;
/// Units of a piece of a range that is written all over.
const PIECE: u64 = 128;
/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Writes of one step that writes anywhere.
const OVERWRITES: u32 = 256;

/// The parts of a volume that are written: where ranges and partitions meet, at its end, and one whole range.
fn spots(units: u64) -> Vec<(u64, u64)> {
    let range = 4 * MIB;
    let mut spots = vec![(0, SPOT), (units.saturating_sub(SPOT) / 8 * 8, units)];
    spots.extend([range, 4 * range, 8 * range].map(|edge| (edge - SPOT / 2, edge + SPOT / 2)));
    spots.push((range, 2 * range));
    spots.retain(|spot| spot.1 <= units);
    if spots.is_empty() {
        spots.push((0, units));
    }
    spots
}

impl World {
    pub(super) fn step(&mut self, step: Step, pace: u32) -> Result<(), String> {
        self.wait_for_turn()?;
        self.tick();
        self.begin(step)?;
        for _ in 0..pace {
            self.pump()?;
        }
        Ok(())
    }

    fn begin(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Request { volume, spot, at, units, kind } => self.request(volume, spot, at, units, kind),
            Step::Scatter { volume, seed } => return self.scatter(volume, seed),
            Step::Fill { percent, waits, is_thick } => return self.fill(percent, waits, is_thick),
            Step::Overwrite { volume, seed } => return self.overwrite(volume, seed),
            Step::DiscardAll { volume } => {
                if let Some(model) = self.pick(volume, |model| model.of.is_none()) {
                    let (id, units) = (model.id, model.units);
                    self.submit(id, (0, units), Kind::Zero { whole_blocks: true, fua: false }, false);
                }
            }
            Step::Create { .. } => self.create(step),
            Step::SetThick { volume, is_thick } => {
                if let Some(id) = self.pick(volume, |model| model.of.is_none()).map(|model| model.id) {
                    self.command(Command::SetThick { volume: id, is_thick }, Pending::SetThick(id));
                }
            }
            Step::Snapshot { volume, count } => self.snapshot(volume, count),
            Step::Clone { snapshot } => self.clone_snapshot(snapshot),
            Step::Delete { volume } => {
                if let Some(id) = self.pick(volume, |_| true).map(|model| model.id) {
                    self.command(Command::Delete(id), Pending::Delete(id));
                }
            }
            Step::Resize { volume, mib } => return self.resize(volume, u64::from(mib) * MIB),
            Step::Rename { volume } => {
                if let Some(id) = self.pick(volume, |_| true).map(|model| model.id) {
                    let name = self.name();
                    self.command(
                        Command::Rename { volume: id, name: name.clone() },
                        Pending::Rename(id, name),
                    );
                }
            }
            Step::Revert { snapshot } => return self.revert(snapshot),
            Step::Adopt { volume } => return self.adopt(volume),
            Step::Inflate { volume } => {
                if let Some(id) = self.pick(volume, |model| model.of.is_none()).map(|model| model.id) {
                    self.command(Command::Inflate(id), Pending::Inflate(id));
                }
            }
            Step::Changed { snapshot } => return self.changed(snapshot),
            Step::Check => return self.check_pool(),
            Step::Settle => return self.settle(),
            Step::Verify => return self.verify(false),
            Step::Crash(crash) => return self.crash(crash),
            Step::Rebuild => return self.rebuild(),
            Step::Grow => self.grow(),
            Step::Faults(faults) => self.disk.faults = faults,
            Step::Lose { sectors } => self.lose(sectors),
        }
        Ok(())
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("volume-{}", self.names)
    }

    fn label(&mut self) -> Label {
        let name = self.name();
        Label { name, uuid: u128::from(self.names).to_le_bytes() }
    }

    /// A volume that nothing else will change until the next reply.
    fn pick(&self, number: u32, is_wanted: impl Fn(&Model) -> bool) -> Option<&Model> {
        let is_free = |model: &&Model| is_wanted(model) && !self.is_busy(model.id);
        let wanted: Vec<_> = self.volumes.iter().filter(is_free).collect();
        (!wanted.is_empty()).then(|| wanted[number as usize % wanted.len()])
    }

    /// Whether a command is running that removes the volume, or changes what it is; or one has failed, so that nobody knows.
    pub(super) fn is_busy(&self, id: VolumeId) -> bool {
        self.unresolved().any(|pending| match pending {
            Pending::Delete(of) | Pending::Resize(of, _) => *of == id,
            Pending::Revert { volume, snapshot, .. } => *volume == id || *snapshot == id,
            Pending::Adopt { volume, from, .. } => *volume == id || *from == id,
            Pending::Changed { since, until } => *since == id || *until == id,
            _ => false,
        })
    }

    pub(super) fn command(&mut self, command: Command, pending: Pending) {
        let tag = self.tick();
        self.commands.insert(tag, pending);
        self.opened().pool.command(Tag(tag), command);
    }

    fn request(&mut self, volume: u32, spot: u32, at: u32, units: u32, kind: Kind) {
        let Some(model) = self.pick(volume, |model| model.of.is_none() || kind == Kind::Read) else { return };
        let spots = spots(model.units);
        let (start, end) = spots[spot as usize % spots.len()];
        let is_large = end - start > SPOT;
        let units = if is_large { u64::from(units) * 4 } else { u64::from(units) };
        let grain = model.grain;
        let first = (start + u64::from(at) % (end - start)) / grain * grain;
        let last = (first + units.next_multiple_of(grain)).min(end);
        let id = model.id;
        let range = if kind == Kind::Flush { (0, 0) } else { (first, last) };
        self.submit(id, range, kind, false);
    }

    /// Writes of up to 16 blocks, to all parts of one range in any order; and then perhaps none for a while.
    fn scatter(&mut self, volume: u32, seed: u64) -> Result<(), String> {
        let Some(id) = self.pick(volume, |model| model.of.is_none()).map(|model| model.id) else {
            return Ok(());
        };
        let mut rng = Rng::with_seed(seed);
        let mut parts: Vec<u64> = (0..4 * MIB / PIECE).collect();
        rng.shuffle(&mut parts);
        parts.truncate(rng.usize(1..=parts.len()));
        for part in parts {
            self.wait_for_turn()?;
            let Some(model) = self.model(id).filter(|model| model.units >= 8 * MIB) else { return Ok(()) };
            let (grain, is_whole) = (model.grain, rng.u32(..8) > 0);
            let first = 4 * MIB + part * PIECE;
            let end = first + if is_whole { PIECE } else { rng.u64(1..=PIECE).next_multiple_of(grain) };
            if !self.is_busy(id) {
                self.submit(id, (first, end), Kind::Write(false), false);
            }
        }
        if rng.bool() {
            self.settle()?;
            for _ in 0..rng.u32(..400) {
                self.pump()?;
            }
        }
        Ok(())
    }

    /// Waits until another request may begin.
    fn wait_for_turn(&mut self) -> Result<(), String> {
        self.wait_until(|world| world.requests.len() < world.shape.depth)
    }

    fn fill(&mut self, percent: u32, waits: bool, is_thick: bool) -> Result<(), String> {
        let bytes = self.opened().pool.stats().usable_bytes * u64::from(percent) / 100;
        let units = bytes / BLOCK * BLOCK / SECTOR;
        self.create_empty(units, 8, waits, is_thick);
        self.settle()?;
        let id = self.volumes.last().ok_or("no volume")?.id;
        for first in (0..units).step_by(SPOT as usize) {
            self.wait_for_turn()?;
            self.submit(id, (first, units.min(first + SPOT)), Kind::Write(false), false);
        }
        Ok(())
    }

    /// Writes of 1 to 16 blocks.
    fn overwrite(&mut self, volume: u32, seed: u64) -> Result<(), String> {
        let mut rng = Rng::with_seed(seed);
        for _ in 0..OVERWRITES {
            self.wait_for_turn()?;
            let Some(model) = self.pick(volume, |model| model.of.is_none()) else { return Ok(()) };
            let (id, units) = (model.id, model.units);
            let first = rng.u64(0..units) / 8 * 8;
            self.submit(id, (first, units.min(first + 8 * rng.u64(1..=16))), Kind::Write(false), false);
        }
        Ok(())
    }

    /// Submits a request; the model knows of it from now on.
    pub(super) fn submit(&mut self, volume: VolumeId, units: (u64, u64), kind: Kind, is_verification: bool) {
        let began = self.tick();
        let value = if matches!(kind, Kind::Write(_)) { began } else { ZERO };
        let has_data = matches!(kind, Kind::Write(_) | Kind::Read);
        let mut buffer = has_data.then(|| Buffer::new(bytes(units), PAGE as usize));
        if let (Some(buffer), Kind::Write(_)) = (&mut buffer, kind) {
            for (unit, bytes) in (units.0..).zip(buffer.bytes_mut().chunks_mut(UNIT)) {
                pattern::fill(bytes, value, unit);
            }
        }
        if matches!(kind, Kind::Write(_) | Kind::Zero { .. })
            && let Some(model) = self.model(volume)
        {
            model.begin(units, value, began);
        }
        let is_located = kind == Kind::Read && self.rng.bool();
        let memory = buffer.as_mut().map_or(Sgl::EMPTY, Buffer::lend);
        let action = match kind {
            Kind::Read if is_located => Action::Locate,
            Kind::Read => Action::Read { data: memory },
            Kind::Write(fua) => Action::Write { data: memory, fua },
            Kind::Zero { whole_blocks, fua } => Action::Zero { whole_blocks, fua },
            Kind::Flush => Action::Flush,
        };
        let request = InFlight { volume, units, kind, began, buffer, memory, is_verification, is_located };
        self.requests.insert(began, request);
        let request = Request { tag: Tag(began), volume, unit: units.0, units: units.1 - units.0, action };
        let Open { pool, beside, .. } = self.opened();
        if is_located {
            beside.submit(request);
        } else {
            pool.submit(request);
        }
    }

    fn create_empty(&mut self, units: u64, grain: u64, waits: bool, is_thick: bool) {
        let label = self.label();
        let model = Model::new(label.name.clone(), units, grain, Below { value: ZERO, units: 0 });
        let when_full = if waits { WhenFull::Wait } else { WhenFull::Fail };
        let command = Command::Create {
            label,
            units,
            block_size: if grain == 1 { 512 } else { 4096 },
            origin: Origin::Empty,
            when_full,
            is_thick,
        };
        self.command(command, Pending::Create(Box::new(model)));
    }

    fn create(&mut self, step: Step) {
        let Step::Create { mib, has_small_blocks, is_overlay, waits, is_thick } = step else { return };
        if self.volumes.len() >= VOLUMES_MAX {
            return;
        }
        let label = self.label();
        let image = mib % 2;
        // One ends within a block.
        let foreign = Foreign { name: format!("image-{image}"), units: FOREIGN_UNITS + u64::from(image) };
        let least = if is_overlay { foreign.units.next_multiple_of(8) } else { 0 };
        let units = least.max(u64::from(mib) * MIB);
        let below =
            if is_overlay { model::foreign(image, foreign.units) } else { Below { value: ZERO, units: 0 } };
        let model = Model::new(label.name.clone(), units, if has_small_blocks { 1 } else { 8 }, below);
        let command = Command::Create {
            label,
            units,
            block_size: if has_small_blocks { 512 } else { 4096 },
            origin: if is_overlay { Origin::Foreign(foreign) } else { Origin::Empty },
            when_full: if waits { WhenFull::Wait } else { WhenFull::Fail },
            is_thick,
        };
        self.command(command, Pending::Create(Box::new(model)));
    }

    fn snapshot(&mut self, volume: u32, count: u32) {
        let free: Vec<_> =
            self.volumes.iter().filter(|m| m.of.is_none() && !self.is_busy(m.id)).map(|m| m.id).collect();
        if free.is_empty() || self.volumes.len() >= VOLUMES_MAX {
            return;
        }
        let count = (count as usize).min(free.len());
        let of: Vec<_> = (0..count).map(|n| free[(volume as usize % free.len() + n) % free.len()]).collect();
        let labels: Vec<_> = of.iter().map(|&id| (id, self.label())).collect();
        let names = labels.iter().map(|(_, label)| label.name.clone()).collect();
        // Its content is that of a moment between now and the reply.
        let began = self.tick();
        self.command(Command::Snapshot(labels), Pending::Snapshot { of, names, began });
    }

    fn clone_snapshot(&mut self, snapshot: u32) {
        if self.volumes.len() >= VOLUMES_MAX {
            return;
        }
        let Some(model) = self.pick(snapshot, |model| model.of.is_some()) else { return };
        let (id, units, grain) = (model.id, model.units, model.grain);
        // A snapshot's content may not be known yet; then the clone's is not either, and both are the same.
        let mut copy = model.copy_since(String::new(), u64::MAX);
        copy.forget_order();
        let label = self.label();
        copy.name.clone_from(&label.name);
        let command = Command::Create {
            label,
            units,
            block_size: if grain == 1 { 512 } else { 4096 },
            origin: Origin::Snapshot(id),
            when_full: WhenFull::Fail,
            is_thick: false,
        };
        self.command(command, Pending::Create(Box::new(copy)));
    }

    /// Waits until nothing is in flight on a volume.
    fn quiesce(&mut self, id: VolumeId) -> Result<bool, String> {
        self.wait_until(|world| world.requests.values().all(|request| request.volume != id))?;
        Ok(self.model(id).is_some() && !self.is_busy(id))
    }

    fn resize(&mut self, volume: u32, units: u64) -> Result<(), String> {
        let Some(id) = self.pick(volume, |model| model.of.is_none()).map(|model| model.id) else {
            return Ok(());
        };
        if self.quiesce(id)? {
            self.command(Command::Resize { volume: id, units }, Pending::Resize(id, units));
        }
        Ok(())
    }

    fn revert(&mut self, snapshot: u32) -> Result<(), String> {
        let Some(model) = self.pick(snapshot, |model| model.of.is_some()) else { return Ok(()) };
        let (snapshot, Some(volume)) = (model.id, model.of) else { return Ok(()) };
        if self.quiesce(volume)? && self.model(snapshot).is_some() && !self.is_busy(snapshot) {
            let mut volumes = self.opened().pool.volumes();
            let timeline = volumes.find(|(id, _)| *id == volume).expect("the volume exists").1.timeline;
            drop(volumes);
            self.command(
                Command::Revert { volume, snapshot },
                Pending::Revert { volume, snapshot, timeline },
            );
        }
        Ok(())
    }

    fn adopt(&mut self, volume: u32) -> Result<(), String> {
        let Some(model) = self.pick(volume, |model| model.of.is_none()) else { return Ok(()) };
        let (id, units, grain) = (model.id, model.units, model.grain);
        let is_like = |model: &Model| {
            model.id != id && model.of.is_none() && (model.units, model.grain) == (units, grain)
        };
        if self.pick(volume, is_like).is_none() && self.volumes.len() < VOLUMES_MAX {
            self.create_empty(units, grain, false, false);
            self.settle()?;
        }
        let Some(from) = self.pick(volume, is_like).map(|model| model.id) else { return Ok(()) };
        for units in [(0, units.min(SPOT)), (units.saturating_sub(SPOT) / 8 * 8, units)] {
            self.wait_for_turn()?;
            if self.model(from).is_some_and(|model| is_like(model)) && !self.is_busy(from) {
                self.submit(from, units, Kind::Write(false), false);
            }
        }
        let is_free = self.quiesce(id)? && self.quiesce(from)? && self.quiesce(id)?;
        if is_free && !self.is_busy(from) && self.model(from).is_some_and(|model| is_like(model)) {
            let began = self.tick();
            self.command(Command::Adopt { volume: id, from }, Pending::Adopt { volume: id, from, began });
        }
        Ok(())
    }

    fn changed(&mut self, snapshot: u32) -> Result<(), String> {
        let Some(model) = self.pick(snapshot, |model| model.of.is_some()) else { return Ok(()) };
        let (since, Some(until)) = (model.id, model.of) else { return Ok(()) };
        if self.quiesce(until)? && self.model(since).is_some() && !self.is_busy(since) {
            self.command(Command::Changed { since, until }, Pending::Changed { since, until });
        }
        Ok(())
    }

    fn lose(&mut self, sectors: u32) {
        for _ in 0..sectors {
            if let Some(page) = self.disk.written_page(&mut self.rng) {
                self.disk.lose(page / SECTOR + self.rng.u64(..BLOCK / SECTOR));
            }
        }
    }

    fn grow(&mut self) {
        let bytes = self.disk.base().bytes + 2 * u64::from(SEGMENT);
        self.disk.grow(bytes);
        let open = self.opened();
        open.store.grow(bytes);
    }
}
