//! Changes of volumes in all shards: sizes and reverts. What was interrupted is finished or undone after a crash.
//!
//! The steps are those of the module (`pool/changes.rs`). A smaller size is made in the first shard first, and a larger one last;
//! the others follow the first one. A revert is certain when its note is, and its note has the histories that the volume had
//! in each shard.

use std::ops::Range;

use aryk_volume::{Command, Shard, TimelineId, Volume, VolumeId};
use uuid::Uuid;

use super::{CHANNELS, Change, STRIPE, STRIPES, Snapshot, Stop, VOLUME, World};
use crate::pattern::ZERO;

impl World {
    /// Makes a volume or a clone larger or smaller.
    pub(super) fn resize(&mut self) -> Result<(), Stop> {
        let (uuid, to) = (self.volume_or_clone(), self.other_size());
        self.resize_to(uuid, to)
    }

    fn resize_to(&mut self, uuid: Uuid, to: u64) -> Result<(), Stop> {
        let from = self.size_of(uuid);
        let is_volume = uuid.as_bytes() == &VOLUME;
        if from == to {
            return Ok(());
        }
        // Some channels learn late that the volume is smaller, and are refused what they submit until then.
        for channel in 0..CHANNELS {
            self.pass_time()?;
            if is_volume && to < from && self.rng.u32(..4) > 0 {
                self.channels[channel].size = to;
            }
        }
        let began = self.tick();
        self.changing = Some(Change::Resize { uuid, from, to, began, is_certain: false });
        self.note(format!("follow {uuid}"))?;
        self.crash_soon();
        let ids = self.ids(*uuid.as_bytes())?;
        let resize = |shard: usize| Command::Resize { volume: ids[shard], units: to };
        if to < from {
            self.in_shards(0..1, resize)?;
            self.make_certain();
            self.in_shards(1..ids.len(), resize)?;
        } else {
            self.in_shards(1..ids.len(), resize)?;
            self.in_shards(0..1, resize)?;
            self.make_certain();
        }
        self.note(String::new())?;
        self.set_size(uuid, to, began);
        self.changing = None;
        self.counts.grown += u64::from(to > from);
        self.counts.shrunk += u64::from(to < from);
        if is_volume { self.tell_size() } else { self.compare_clones(true) }
    }

    /// Gives a volume or a clone the content of a snapshot.
    pub(super) fn revert(&mut self) -> Result<(), Stop> {
        let number = self.rng.usize(..self.snapshots.len());
        self.compare(number, true)?;
        let Snapshot { uuid: snapshot, size, seen, .. } = &self.snapshots[number];
        let (snapshot, size, seen) = (*snapshot, *size, seen.clone().expect("it was compared"));
        let uuid = self.volume_or_clone();
        let is_volume = uuid.as_bytes() == &VOLUME;
        let before: Vec<TimelineId> = self.found(uuid, |_, volume| volume.timeline)?;
        if is_volume {
            self.close_gates()?;
        }
        let began = self.tick();
        let text: String = before.iter().map(|timeline| format!(" {}", timeline.0)).collect();
        self.changing = Some(Change::Revert { uuid, size, seen, before, began, is_certain: false });
        self.note(format!("revert {uuid} {snapshot}{text}"))?;
        self.make_certain();
        self.crash_soon();
        let (ids, of) = (self.ids(*uuid.as_bytes())?, self.ids(*snapshot.as_bytes())?);
        let revert = |shard: usize| Command::Revert { volume: ids[shard], snapshot: of[shard] };
        self.in_shards(0..1, revert)?;
        self.in_shards(1..ids.len(), revert)?;
        self.note(String::new())?;
        self.finish_revert();
        self.counts.reverts += 1;
        if !is_volume {
            return self.compare_clones(true);
        }
        self.open_gates()?;
        self.tell_size()
    }

    /// Crashes come more often while a change is made.
    fn crash_soon(&mut self) {
        if self.crash_in < u32::MAX && self.rng.u32(..3) == 0 {
            self.crash_in = self.rng.u32(1..200);
        }
    }

    /// Runs a command in some shards at the same time, while the channels go on.
    pub(super) fn in_shards(
        &mut self,
        shards: Range<usize>,
        command: impl Fn(usize) -> Command,
    ) -> Result<(), Stop> {
        let mut tags = Vec::new();
        for shard in shards {
            self.pass_time()?;
            tags.push(self.begin(shard, command(shard)));
        }
        for tag in tags {
            self.finish_command(tag)?;
        }
        Ok(())
    }

    /// The volume, or sometimes one of its clones.
    fn volume_or_clone(&mut self) -> Uuid {
        match self.rng.usize(..4 * (1 + self.clones.len())) {
            number if number < self.clones.len() => self.clones[number].uuid,
            _ => Uuid::from_bytes(VOLUME),
        }
    }

    /// A size: up to a border of stripes, within a slot, or any. Small volumes become large again.
    fn other_size(&mut self) -> u64 {
        let all = STRIPES * STRIPE;
        match self.rng.u32(..6) {
            0 | 1 => all,
            2 => self.rng.u64(1..STRIPES) * STRIPE,
            3 => self.rng.u64(1..all),
            _ => {
                let (first, end) = self.slots[self.rng.usize(..self.slots.len())].units;
                self.rng.u64(first + 1..end)
            }
        }
    }

    /// What each shard has of a volume.
    fn found<T>(&self, uuid: Uuid, of: impl Fn(VolumeId, &Volume) -> T) -> Result<Vec<T>, Stop> {
        let in_shard = |shard: &super::Open| {
            let mut volumes = shard.pool.volumes();
            volumes
                .find(|(_, volume)| volume.label.uuid == *uuid.as_bytes())
                .map(|(id, volume)| of(id, volume))
        };
        let found: Option<Vec<T>> = self.shards.iter().map(in_shard).collect();
        found.ok_or_else(|| Stop::Failed(format!("a shard lacks {uuid}")))
    }

    fn size_of(&self, uuid: Uuid) -> u64 {
        self.clones.iter().find(|clone| clone.uuid == uuid).map_or(self.size, |clone| clone.size)
    }

    /// No crash prevents the change any more.
    fn make_certain(&mut self) {
        if let Some(Change::Resize { is_certain, .. } | Change::Revert { is_certain, .. }) =
            &mut self.changing
        {
            *is_certain = true;
        }
    }

    /// Notes that all shards have given a volume or a clone another size.
    fn set_size(&mut self, uuid: Uuid, size: u64, began: super::Time) {
        let now = self.tick();
        if let Some(clone) = self.clones.iter_mut().find(|clone| clone.uuid == uuid) {
            clone.size = size;
            for (slot, seen) in self.slots.iter().zip(&mut clone.seen) {
                let beyond = (slot.units.0..).zip(seen).filter(|(unit, _)| *unit >= size);
                beyond.for_each(|(_, value)| *value = ZERO);
            }
            return;
        }
        (self.size, self.size_since) = (size, now);
        self.slots.iter_mut().for_each(|slot| slot.cut_off(size, (began, now)));
    }

    /// Notes that all shards have made the revert.
    fn finish_revert(&mut self) {
        let Some(Change::Revert { uuid, size, seen, began, .. }) = self.changing.take() else { return };
        let now = self.tick();
        if let Some(clone) = self.clones.iter_mut().find(|clone| clone.uuid == uuid) {
            (clone.size, clone.seen) = (size, seen);
            return;
        }
        (self.size, self.size_since) = (size, now);
        for (slot, seen) in self.slots.iter_mut().zip(seen) {
            slot.put(slot.units.0, seen, (began, now), true);
        }
    }

    /// Whether a volume may show this because of the change that is being made, or that a crash has interrupted.
    pub(super) fn may_show_by_change(&self, of: Uuid, slot: usize, unit: u64, value: u64) -> bool {
        match &self.changing {
            // What is cut off becomes zeroes before the size is another one.
            Some(Change::Resize { uuid, from, to, is_certain, .. }) if *uuid == of && to < from => {
                let is_begun = *is_certain || Shard::of_unit(unit, self.count) == 0;
                unit >= *to && value == ZERO && is_begun
            }
            Some(Change::Revert { uuid, seen, .. }) if *uuid == of => {
                seen[slot][(unit - self.slots[slot].units.0) as usize] == value
            }
            _ => false,
        }
    }

    /// Beyond this, a shard may refuse requests to the volume.
    pub(super) fn size_min(&self) -> u64 {
        match &self.changing {
            Some(Change::Resize { uuid, to: size, .. } | Change::Revert { uuid, size, .. })
                if uuid.as_bytes() == &VOLUME =>
            {
                self.size.min(*size)
            }
            _ => self.size,
        }
    }

    /// The channels learn the size of the volume. A write that was refused beyond the end may be there up to the end: what it
    /// has left is read, and stays.
    fn tell_size(&mut self) -> Result<(), Stop> {
        // Nothing writes beyond the old size yet.
        self.look_at_all()?;
        for channel in 0..CHANNELS {
            self.pass_time()?;
            self.channels[channel].size = self.size;
        }
        self.work_until(|world| !world.requests.values().any(|request| request.units.1 > world.size))?;
        let ids = self.ids(VOLUME)?;
        for slot in 0..self.slots.len() {
            if !self.slots[slot].is_torn() {
                continue;
            }
            if self.slots[slot].is_cut(self.size) {
                let mut values = self.read(&ids, slot, self.size, true)?;
                values.truncate((self.size - self.slots[slot].units.0) as usize);
                self.check_slot(slot, &values, |write| write.ended.is_some())?;
                let (first, now) = (self.slots[slot].units.0, self.tick());
                self.slots[slot].put(first, values, (now, now), false);
                self.counts.torn += 1;
            }
            let now = self.tick();
            self.slots[slot].cut_off(self.size, (now, now));
        }
        Ok(())
    }

    /// Finishes or undoes the change that a crash has interrupted, as its note says. Another crash may interrupt that.
    pub(super) fn finish_change(&mut self) -> Result<(), Stop> {
        let note = String::from_utf8_lossy(self.shards[0].pool.note()).into_owned();
        let uuid = |word: &str| Uuid::parse_str(word).map_err(|error| Stop::Failed(error.to_string()));
        let words: Vec<&str> = note.split(' ').collect();
        match words[..] {
            [""] => return Ok(()),
            ["make", made] => self.finish_make(uuid(made)?)?,
            ["delete", deleted] => self.delete_everywhere(uuid(deleted)?)?,
            ["follow", volume] => {
                let sizes = self.found(uuid(volume)?, |id, volume| (id, volume.units))?;
                let units = sizes[0].1;
                let missing: Vec<_> = (0..).zip(&sizes).filter(|(_, (_, size))| *size != units).collect();
                self.counts.mixed += u64::from(!missing.is_empty());
                for (shard, (id, _)) in missing {
                    self.run_in(shard, Command::Resize { volume: *id, units })?;
                }
            }
            ["revert", volume, snapshot, ref before @ ..] => {
                let found = self.found(uuid(volume)?, |id, volume| (id, volume.timeline.0.to_string()))?;
                let snapshots = self.ids(uuid(snapshot)?.into_bytes())?;
                let is_missing = |(shard, (_, timeline)): &(usize, &(_, String))| before[*shard] == timeline;
                let missing: Vec<_> = (0..).zip(&found).filter(is_missing).collect();
                self.counts.mixed += u64::from(!missing.is_empty() && missing.len() < found.len());
                for (shard, (volume, _)) in missing {
                    self.run_in(shard, Command::Revert { volume: *volume, snapshot: snapshots[shard] })?;
                }
            }
            _ => return Err(Stop::Failed(format!("the note says {note:?}"))),
        }
        self.run_in(0, Command::SetNote(Vec::new()))
    }

    /// What is not in all shards is deleted. That stays so, also if a crash interrupts it.
    fn finish_make(&mut self, uuid: Uuid) -> Result<(), Stop> {
        let there = self.shards_with(uuid);
        if there.len() == self.shards.len() {
            return Ok(());
        }
        self.counts.undone += u64::from(!there.is_empty());
        self.run_in(0, Command::SetNote(format!("delete {uuid}").into_bytes()))?;
        self.delete_everywhere(uuid)
    }

    fn delete_everywhere(&mut self, uuid: Uuid) -> Result<(), Stop> {
        let there = self.shards_with(uuid);
        there.into_iter().try_for_each(|(shard, id)| self.run_in(shard, Command::Delete(id)))
    }

    /// The shards that have a volume, and how they identify it.
    pub(super) fn shards_with(&self, uuid: Uuid) -> Vec<(usize, VolumeId)> {
        let id = |(shard, open): (usize, &super::Open)| {
            let mut volumes = open.pool.volumes();
            let found = volumes.find(|(_, volume)| volume.label.uuid == *uuid.as_bytes());
            found.map(|(id, _)| (shard, id))
        };
        self.shards.iter().enumerate().filter_map(id).collect()
    }

    fn run_in(&mut self, shard: usize, command: Command) -> Result<(), Stop> {
        let tag = self.begin(shard, command);
        self.wait_until(|world| world.answers.contains_key(&tag))?;
        self.answers.remove(&tag).expect("it is there").map(drop).map_err(Stop::Failed)
    }

    /// A size or a revert that a crash has interrupted is there in all shards or in none. Until all was read, the model keeps one
    /// that is not there.
    pub(super) fn resolve_change(&mut self) -> Result<(), Stop> {
        self.cut_off = None;
        match &self.changing {
            Some(Change::Resize { uuid, from, to, began, is_certain }) => {
                let (uuid, from, to, began, is_certain) = (*uuid, *from, *to, *began, *is_certain);
                let sizes = self.found(uuid, |_, volume| volume.units)?;
                if sizes.iter().all(|size| *size == to) {
                    self.changing = None;
                    self.set_size(uuid, to, began);
                    self.cut_off = (to < from).then_some((uuid, from));
                } else if is_certain || sizes.iter().any(|size| *size != from) {
                    return Err(Stop::Failed(format!(
                        "after a change from {from} to {to} units (certain: {is_certain}), shards have {sizes:?}"
                    )));
                }
            }
            Some(Change::Revert { uuid, before, is_certain, .. }) => {
                let (uuid, is_certain) = (*uuid, *is_certain);
                let now: Vec<TimelineId> = self.found(uuid, |_, volume| volume.timeline)?;
                if now.iter().zip(before).all(|(now, before)| now != before) {
                    self.finish_revert();
                } else if is_certain || now != *before {
                    return Err(Stop::Failed(format!(
                        "after a revert (certain: {is_certain}), shards have {now:?}, and had {before:?}"
                    )));
                } else {
                    // Nothing of it is to be seen.
                    self.changing = None;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What a crash has cut off, in the middle of that, comes back and reads zeroes.
    pub(super) fn bring_back(&mut self) -> Result<(), Stop> {
        match self.cut_off.take() {
            Some((uuid, from)) => self.resize_to(uuid, from),
            None => Ok(()),
        }
    }

    /// All shards have the sizes that are told.
    pub(super) fn check_sizes(&self) -> Result<(), Stop> {
        let clones = self.clones.iter().map(|clone| (clone.uuid, clone.size));
        let snapshots = self.snapshots.iter().map(|snapshot| (snapshot.uuid, snapshot.size));
        let volume = std::iter::once((Uuid::from_bytes(VOLUME), self.size));
        for (uuid, size) in volume.chain(snapshots).chain(clones) {
            let sizes = self.found(uuid, |_, volume| volume.units)?;
            if sizes.iter().any(|there| *there != size) {
                return Err(Stop::Failed(format!("{uuid} has {size} units, and in the shards {sizes:?}")));
            }
        }
        Ok(())
    }
}
