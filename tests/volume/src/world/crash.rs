//! Crashes, and comparisons of everything.

use aryk_volume::frame::{Frame, NO_STREAM};
use aryk_volume::{Command, Pool, State, VolumeId};
use aryk_volume_store::{Error, Expected, HEADER_BYTES, Header, Kind as Record};

use super::{Open, POOL, Pending, World, recovered};
use crate::disk::{Crash, Disk, Faults, SECTOR};
use crate::journal;
use crate::model::{Model, Time};
use crate::script::Kind;

/// Units of a read of a comparison.
const READ: u64 = 512;

impl World {
    pub(super) fn crash(&mut self, crash: Crash) -> Result<(), String> {
        let now = self.tick();
        self.count_ranges();
        self.counts.read_only += u64::from(self.is_read_only());
        drop(self.open.take());
        for request in std::mem::take(&mut self.requests).values_mut() {
            if let Some(buffer) = &mut request.buffer {
                buffer.reclaim();
            }
        }
        let mut pending = std::mem::take(&mut self.unsure);
        pending.extend(std::mem::take(&mut self.commands).into_values());
        let maybe = self.maybe_snapshots(&pending);
        for model in &mut self.volumes {
            model.crash(crash != Crash::Process, now);
        }
        self.disk.crash(crash);
        self.disk.faults = Faults { slow_ppm: self.disk.faults.slow_ppm, ..Faults::default() };
        if self.disk.is_faulty() && self.rng.bool() {
            self.disk.heal();
        }
        if self.rng.u32(..8) == 0 && !self.disk.is_faulty() {
            self.lose_checkpoint().map_err(|what| format!("a lost checkpoint, after {crash:?}: {what}"))?;
        }
        loop {
            self.reopen()?;
            // Another crash, before the pool is ready.
            if self.rng.u32(..4) > 0 {
                break;
            }
            for _ in 0..self.rng.u32(..20) {
                self.pump()?;
            }
            drop(self.open.take());
            self.disk.crash(if self.rng.bool() { Crash::Power } else { Crash::Process });
        }
        if self.rng.u32(..4) == 0 && !self.disk.is_faulty() {
            self.rot().map_err(|what| format!("after {crash:?}: {what}"))?;
        }
        self.await_ready().map_err(|what| format!("after {crash:?}: {what}"))?;
        self.resolve(pending, maybe).map_err(|what| format!("after {crash:?}: {what}"))?;
        self.verify(true).map_err(|what| format!("after {crash:?}: {what}"))?;
        self.check_pool().map_err(|what| format!("after {crash:?}: {what}"))?;
        if self.rng.u32(..4) == 0 {
            self.decay().map_err(|what| format!("after {crash:?}: {what}"))?;
        }
        Ok(())
    }

    /// Damages both copies of the latest checkpoint behind their headers, opens the pool, and lets it write another one.
    fn lose_checkpoint(&mut self) -> Result<(), String> {
        let header = |offset: &u64| {
            let header = Header::parse(&self.disk.peek(*offset, SECTOR as usize))?;
            (header.kind == Record::Checkpoint && header.pool == POOL).then_some((*offset, header))
        };
        let headers: Vec<_> = self.disk.sectors_with(b"ARMJ").iter().filter_map(header).collect();
        let latest = headers.iter().map(|(_, header)| header.generation).max().ok_or("no checkpoint")?;
        let older = headers.iter().filter(|(_, header)| header.generation < latest);
        let before = older.clone().map(|(_, header)| header.generation).max().unwrap_or(0);
        let of_before: Vec<_> = older.filter(|(_, header)| header.generation == before).collect();
        let is_intact = |(offset, header): &&(u64, Header)| {
            header.is_of(&self.disk.peek(offset + HEADER_BYTES as u64, header.len as usize))
        };
        // A crash before the mark of a checkpoint leaves no link to its last edits.
        let is_linked = |(_, header): &&(u64, Header)| header.successor == 0 || header.previous != 0;
        if latest > 1
            && !(of_before.iter().copied().any(|h| is_intact(&h)) && of_before.iter().all(is_linked))
        {
            return Ok(());
        }
        for (offset, header) in headers.iter().copied().filter(|(_, header)| header.generation == latest) {
            let bit = self.rng.u64(..u64::from(header.len) * 8);
            self.disk.flip(offset + HEADER_BYTES as u64 + bit / 8, (bit % 8) as u8);
        }
        self.reopen()?;
        self.counts.remade += u64::from(self.opened().store.is_checkpoint_due());
        self.await_ready()?;
        while self.opened().store.is_checkpoint_due() {
            if !self.pump()? {
                return Err("no checkpoint was written".to_owned());
            }
        }
        drop(self.open.take());
        self.disk.crash(Crash::Process);
        Ok(())
    }

    /// Damages a frame of the log on a copy of the disk, and opens the pool there: either the damage is named, or nothing proves
    /// that the frame was durable, or no opening needs it.
    fn rot(&mut self) -> Result<(), String> {
        let mut disk = self.disk.fork(self.rng.u64(..));
        let frames = log_frames(&disk);
        let Some(&frame) = self.rng.choice(&frames) else { return Ok(()) };
        let is_proven = frames.iter().any(|other| other.head.durable > frame.head.sequence);
        let bit = self.rng.u64(..frame.bytes * 8);
        disk.flip(frame.offset + bit / 8, (bit % 8) as u8);
        let expected = Expected { pool: Some(POOL), ..Expected::default() };
        let opened = journal::open(&mut disk, expected).map_err(|error: Error| error.to_string())?;
        let (store, recovered) = (Box::new(opened.store), recovered(opened.recovered)?);
        let pool = Pool::open(|_| self.settings, store.facts(), POOL.into_bytes(), &recovered);
        let pool = pool.map_err(|error| error.to_string())?;
        let start = pool.log_start();
        // An opening with another frame of this sequence does not need this one.
        let has_other = frames.iter().filter(|other| other.head.sequence == frame.head.sequence).count() > 1;
        let mut copy = Some(Open::new(pool, store));
        std::mem::swap(&mut self.disk, &mut disk);
        std::mem::swap(&mut self.open, &mut copy);
        let state = loop {
            let has_work = self.pump()?;
            match self.opened().pool.state() {
                State::Opening if has_work => {}
                state => break state,
            }
        };
        std::mem::swap(&mut self.disk, &mut disk);
        std::mem::swap(&mut self.open, &mut copy);
        let is_needed = is_proven && !has_other && frame.head.sequence >= start;
        match state {
            State::Damaged(_) if is_proven => {
                self.counts.damaged += 1;
                Ok(())
            }
            State::Ready if !is_needed => Ok(()),
            state => Err(format!("{frame:?} was damaged (needed: {is_needed}), and the pool is {state:?}")),
        }
    }

    /// Opens the pool. Sectors that cannot be read may prevent that, but not when they can be read again.
    pub(super) fn reopen(&mut self) -> Result<(), String> {
        let expected = Expected { pool: Some(POOL), ..Expected::default() };
        let mut opened = journal::open(&mut self.disk, expected);
        if opened.is_err() && self.disk.is_faulty() {
            self.disk.heal();
            self.disk.crash(Crash::Process);
            opened = journal::open(&mut self.disk, expected);
        }
        let opened = opened.map_err(|error: Error| error.to_string())?;
        let recovered = recovered(opened.recovered)?;
        let store = Box::new(opened.store);
        let pool = Pool::open(|_| self.settings, store.facts(), POOL.into_bytes(), &recovered);
        let pool = pool.map_err(|error| error.to_string())?;
        self.open = Some(Open::new(pool, store));
        self.failures_before = self.disk.counts.failures;
        Ok(())
    }

    /// The snapshots that may exist although their commands were not answered, as they are then.
    fn maybe_snapshots(&self, pending: &[Pending]) -> Vec<Model> {
        let mut maybe = Vec::new();
        for pending in pending {
            let Pending::Snapshot { of, names, began } = pending else { continue };
            for (volume, name) in of.iter().zip(names) {
                let Some(model) = self.volumes.iter().find(|model| model.id == *volume) else { continue };
                let mut copy = model.copy_since(name.clone(), *began);
                (copy.of, copy.group) = (Some(*volume), Some(*began));
                copy.crash(false, self.now);
                maybe.push(copy);
            }
        }
        maybe
    }

    /// Which of the commands have taken effect that were in progress.
    fn resolve(&mut self, pending: Vec<Pending>, mut maybe: Vec<Model>) -> Result<(), String> {
        let found: Vec<_> = self.opened().pool.volumes().map(|(id, volume)| (id, volume.clone())).collect();
        let id_of =
            |name: &str| found.iter().find(|(_, volume)| volume.label.name == name).map(|(id, _)| *id);
        for pending in pending {
            match pending {
                Pending::Create(mut model) => {
                    if let Some(id) = id_of(&model.name) {
                        model.id = id;
                        model.crash(false, self.now);
                        self.volumes.push(*model);
                    }
                }
                Pending::Delete(id) => {
                    if found.iter().all(|(other, _)| *other != id) {
                        self.volumes.retain(|model| model.id != id);
                    }
                }
                Pending::Snapshot { names, .. } => {
                    let ids: Vec<_> = names.iter().filter_map(|name| id_of(name)).collect();
                    if !ids.is_empty() && ids.len() < names.len() {
                        return Err(format!("only some of the snapshots {names:?} exist"));
                    }
                    for (name, id) in names.iter().zip(ids) {
                        if let Some(n) = maybe.iter().position(|model| model.name == *name) {
                            let mut model = maybe.swap_remove(n);
                            model.id = id;
                            self.volumes.push(model);
                        }
                    }
                }
                Pending::Resize(id, units) => {
                    let is_done = found.iter().any(|(other, volume)| *other == id && volume.units == units);
                    let Some(model) = self.model(id) else { continue };
                    if is_done {
                        model.resize(units);
                    } else {
                        // What a shrunk volume loses is emptied before the size changes.
                        model.zeroed_from = model.zeroed_from.min(units);
                    }
                }
                Pending::Rename(id, name) => {
                    let is_done = id_of(&name) == Some(id);
                    if let Some(model) = self.model(id).filter(|_| is_done) {
                        model.name = name;
                    }
                }
                Pending::Revert { volume, snapshot, timeline } => {
                    // A volume that is reverted begins another history.
                    if found.iter().any(|(id, found)| *id == volume && found.timeline != timeline) {
                        self.reverted(volume, snapshot);
                    }
                }
                Pending::Adopt { volume, from, .. } => {
                    if found.iter().all(|(other, _)| *other != from) {
                        self.adopted(volume, from, None);
                    }
                }
                Pending::Inflate(_) | Pending::SetThick(_) | Pending::Changed { .. } | Pending::Check => {}
            }
        }
        self.compare_volumes(&found)
    }

    fn compare_volumes(&mut self, found: &[(VolumeId, aryk_volume::Volume)]) -> Result<(), String> {
        for (id, volume) in found {
            let Some(model) = self.volumes.iter().find(|model| model.id == *id) else {
                return Err(format!("{id:?} {:?} exists, and should not", volume.label.name));
            };
            let is_snapshot = volume.cut.is_some();
            if (&model.name, model.units, model.of.is_some())
                != (&volume.label.name, volume.units, is_snapshot)
            {
                return Err(format!("expected {} with {} units, found {volume:?}", model.name, model.units));
            }
        }
        match self.volumes.iter().find(|model| found.iter().all(|(id, _)| *id != model.id)) {
            Some(model) => Err(format!("{} ({:?}) is lost", model.name, model.id)),
            None => Ok(()),
        }
    }

    /// Reads everything that was ever written, and compares. With `is_opened`, nothing was written since the pool was opened: all
    /// that is found is durable, because an opening ends with a flush.
    pub(super) fn verify(&mut self, is_opened: bool) -> Result<(), String> {
        self.settle()?;
        self.observed.clear();
        let reads: Vec<_> = self
            .volumes
            .iter()
            .filter(|model| !self.is_busy(model.id))
            .flat_map(|model| reads(model).into_iter().map(|units| (model.id, units)).collect::<Vec<_>>())
            .collect();
        for (id, units) in reads {
            self.wait_until(|world| world.requests.len() < 32)?;
            self.submit(id, units, Kind::Read, true);
        }
        self.settle()?;
        let observed = std::mem::take(&mut self.observed);
        self.check_groups(&observed)?;
        if !is_opened {
            return Ok(());
        }
        let now = self.tick();
        for (id, unit, value) in observed {
            if let Some(model) = self.model(id) {
                model.settle(unit, value, now);
            }
        }
        Ok(())
    }

    /// Snapshots that were taken together show one moment: if one has a write, all have what ended before that write began.
    fn check_groups(&mut self, observed: &[(VolumeId, u64, u64)]) -> Result<(), String> {
        let mut latest = std::collections::BTreeMap::<Time, (Time, VolumeId, u64)>::new();
        let group_of =
            |id: VolumeId| self.volumes.iter().find(|model| model.id == id).and_then(|m| Some((m.group?, m)));
        for &(id, unit, value) in observed {
            let Some((group, model)) = group_of(id) else { continue };
            let began = model.began(unit, value);
            let entry = latest.entry(group).or_insert((began, id, unit));
            if began > entry.0 {
                *entry = (began, id, unit);
            }
        }
        for &(id, unit, value) in observed {
            let Some((group, model)) = group_of(id) else { continue };
            let (time, of, at) = latest[&group];
            if model.was_replaced_before(unit, value, time) {
                return Err(format!(
                    "snapshot {} has {value:#x} at unit {unit}, which was replaced before the write of {time} began, \
                     which is at unit {at} of {of:?}: {:?}",
                    model.name,
                    model.history(unit)
                ));
            }
        }
        for model in &mut self.volumes {
            model.group = None;
        }
        Ok(())
    }

    /// The engine's own check finds nothing.
    pub(super) fn check_pool(&mut self) -> Result<(), String> {
        if self.is_read_only() {
            return Ok(());
        }
        self.command(Command::Check { data: true, repair: false }, Pending::Check);
        self.settle()
    }
}

/// A frame of the log on the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogFrame {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) head: aryk_volume::frame::Head,
}

/// What the disk has of frames of the log, of any life.
pub(super) fn log_frames(disk: &Disk) -> Vec<LogFrame> {
    let mut frames = Vec::new();
    for offset in disk.sectors_with(b"AVF1") {
        let Ok(len) = Frame::header_len(&disk.peek(offset, SECTOR as usize)) else { continue };
        let header = disk.peek(offset, len.min(1 << 20));
        let Ok(frame) = Frame::parse(&header) else { continue };
        if frame.head().stream != NO_STREAM {
            let bytes = u64::from(frame.units()) * SECTOR;
            frames.push(LogFrame { offset, bytes, head: frame.head() });
        }
    }
    frames
}

/// The parts of a volume that have a history, and some beside.
fn reads(model: &Model) -> Vec<(u64, u64)> {
    let mut reads: Vec<(u64, u64)> = Vec::new();
    for unit in model.units_with_history() {
        let end = (unit + model.grain).min(model.units);
        match reads.last_mut() {
            Some(last) if last.1 == unit && end - last.0 <= READ => last.1 = end,
            _ => reads.push((unit, end)),
        }
    }
    let middle = model.units / 3 / 8 * 8;
    reads.push((middle, (middle + 64).min(model.units)));
    reads
}
