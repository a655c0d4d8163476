//! The steps of a simulation: it takes, clones, compares and deletes snapshots, and crashes the pool.

use aryk_dma::Buffer;
use aryk_volume::{Answer, Command, Label, Origin, State, VolumeId};
use uuid::Uuid;

use super::{
    CHANNELS, CLONES_MAX, Change, Channel, Cloned, Kind, SNAPSHOTS_MAX, Snapshot, Stop, Time, World, create,
};
use crate::disk::Crash;
use crate::pattern::{self, UNIT};

const VOLUME: [u8; 16] = [1; 16];

impl World {
    pub(super) fn step(&mut self) -> Result<(), Stop> {
        match self.rng.u32(..9) {
            0..3 if self.snapshots.len() < SNAPSHOTS_MAX => self.snapshot(),
            0..4 if !self.snapshots.is_empty() => self.delete(),
            4 if !self.snapshots.is_empty() => {
                let number = self.rng.usize(..self.snapshots.len());
                self.compare(number, true)
            }
            5 if !self.snapshots.is_empty() && self.clones.len() < CLONES_MAX => self.clone_snapshot(),
            _ => (0..20).try_for_each(|_| self.pass_time()),
        }
    }

    /// A step has ended; perhaps by a crash.
    pub(super) fn told(&mut self, result: Result<(), Stop>) -> Result<(), String> {
        match result {
            Ok(()) => Ok(()),
            Err(Stop::Crash) => self.crash().map_err(|stop| format!("after a crash: {}", Self::text(stop))),
            Err(stop) => Err(Self::text(stop)),
        }
    }

    pub(super) fn text(stop: Stop) -> String {
        match stop {
            Stop::Crash => "a crash at a wrong time".into(),
            Stop::Failed(what) => what,
        }
    }

    /// Takes a snapshot in all shards, while the channels go on.
    fn snapshot(&mut self) -> Result<(), Stop> {
        self.next += 1;
        let uuid = Uuid::from_u128(self.next.into());
        let began = self.tick();
        self.changing = Some(Change::Make { uuid, began, cut: Time::MAX });
        self.note(format!("make {uuid}"))?;
        for channel in 0..CHANNELS {
            self.pass_time()?;
            self.channels[channel].gate.close();
        }
        self.work_until(|world| {
            !world.requests.values().any(|request| matches!(request.kind, Kind::Write { .. }))
        })?;
        let ids = self.ids(VOLUME)?;
        let mut tags = Vec::new();
        for (shard, id) in ids.into_iter().enumerate() {
            self.pass_time()?;
            let label = Label { name: uuid.to_string(), uuid: uuid.into_bytes() };
            tags.push(self.begin(shard, Command::Snapshot(vec![(id, label)])));
        }
        let cut = self.tick();
        self.changing = Some(Change::Make { uuid, began, cut });
        for channel in 0..CHANNELS {
            self.pass_time()?;
            self.open_gate(channel)?;
        }
        for tag in tags {
            self.finish_command(tag)?;
        }
        self.note(String::new())?;
        self.changing = None;
        self.snapshots.push(Snapshot { uuid, began, cut, seen: None });
        self.counts.snapshots += 1;
        let number = self.snapshots.len() - 1;
        if self.rng.bool() { self.compare(number, true) } else { Ok(()) }
    }

    /// Opens the gate of a channel: the writes that it has held back begin.
    fn open_gate(&mut self, channel: usize) -> Result<(), Stop> {
        self.channels[channel].gate.open();
        while let Some(slot) = self.channels[channel].held.pop_front() {
            assert!(self.channels[channel].gate.enter(), "it was just opened");
            self.start_write(channel, slot)?;
        }
        Ok(())
    }

    /// Clones a snapshot in all shards, while the channels go on.
    fn clone_snapshot(&mut self) -> Result<(), Stop> {
        let number = self.rng.usize(..self.snapshots.len());
        self.compare(number, true)?;
        let Snapshot { uuid: snapshot, seen, .. } = &self.snapshots[number];
        let (snapshot, seen) = (snapshot.into_bytes(), seen.clone().expect("it was compared"));
        self.next += 1;
        let uuid = Uuid::from_u128(self.next.into());
        self.changing = Some(Change::Clone(Cloned { uuid, seen: seen.clone() }));
        self.note(format!("make {uuid}"))?;
        let mut tags = Vec::new();
        for (shard, id) in self.ids(snapshot)?.into_iter().enumerate() {
            self.pass_time()?;
            tags.push(self.begin(shard, create(uuid, Origin::Snapshot(id))));
        }
        for tag in tags {
            self.finish_command(tag)?;
        }
        self.note(String::new())?;
        self.changing = None;
        self.clones.push(Cloned { uuid, seen });
        self.counts.clones += 1;
        self.compare_clone(self.clones.len() - 1, true)
    }

    /// Reads a clone, and checks it.
    fn compare_clone(&mut self, number: usize, is_busy: bool) -> Result<(), Stop> {
        let ids = self.ids(self.clones[number].uuid.into_bytes())?;
        for slot in 0..self.slots.len() {
            let values = self.read(&ids, slot, is_busy)?;
            let seen = self.clones[number].seen[slot];
            if values.iter().any(|value| *value != seen) {
                return Err(Stop::Failed(format!("slot {slot} of a clone shows {values:?}, not {seen}")));
            }
        }
        Ok(())
    }

    /// Deletes a snapshot or a clone: in the first shard, then in the others.
    fn delete(&mut self) -> Result<(), Stop> {
        let all = self.snapshots.iter().map(|snapshot| snapshot.uuid);
        let all: Vec<Uuid> = all.chain(self.clones.iter().map(|clone| clone.uuid)).collect();
        let uuid = all[self.rng.usize(..all.len())];
        self.changing = Some(Change::Delete(uuid));
        self.note(format!("delete {uuid}"))?;
        let ids = self.ids(uuid.into_bytes())?;
        let tag = self.begin(0, Command::Delete(ids[0]));
        self.finish_command(tag)?;
        let mut tags = Vec::new();
        for (shard, id) in ids.into_iter().enumerate().skip(1) {
            self.pass_time()?;
            tags.push(self.begin(shard, Command::Delete(id)));
        }
        for tag in tags {
            self.finish_command(tag)?;
        }
        self.note(String::new())?;
        self.changing = None;
        self.forget(uuid);
        self.counts.deletions += 1;
        Ok(())
    }

    /// A snapshot or a clone is there no more.
    fn forget(&mut self, uuid: Uuid) {
        self.snapshots.retain(|snapshot| snapshot.uuid != uuid);
        self.clones.retain(|clone| clone.uuid != uuid);
    }

    /// Reads the values of a slot, by units, while the channels go on or not.
    fn read(&mut self, ids: &[VolumeId], slot: usize, is_busy: bool) -> Result<Vec<u64>, Stop> {
        let units = self.slots[slot].units;
        let count = (units.1 - units.0) as usize;
        let tag = self.submit(0, Kind::Read, ids, units, Buffer::new(count * UNIT, 4096));
        let is_over = |world: &Self| world.requests[&tag].left == 0;
        if is_busy {
            self.work_until(is_over)?
        } else {
            self.wait_until(is_over)?
        }
        let mut request = self.requests.remove(&tag).expect("it is kept for this");
        self.counts.values += count as u64;
        request.buffer.reclaim();
        let bytes = request.buffer.bytes().chunks(UNIT).take(count);
        let values = bytes.zip(units.0..).map(|(bytes, unit)| pattern::value(bytes, unit));
        values.collect::<Option<_>>().ok_or_else(|| Stop::Failed(format!("slot {slot} has no value")))
    }

    /// Reads a snapshot, and checks it.
    fn compare(&mut self, number: usize, is_busy: bool) -> Result<(), Stop> {
        let ids = self.ids(self.snapshots[number].uuid.into_bytes())?;
        let mut seen = Vec::new();
        for slot in 0..self.slots.len() {
            let values = self.read(&ids, slot, is_busy)?;
            if values.iter().any(|value| *value != values[0]) {
                return Err(Stop::Failed(format!(
                    "slot {slot} of a snapshot has parts of writes: {values:?}"
                )));
            }
            seen.push(values[0]);
        }
        self.check(number, &seen)?;
        self.snapshots[number].seen = Some(seen);
        Ok(())
    }

    fn check(&self, number: usize, seen: &[u64]) -> Result<(), String> {
        let Snapshot { began, cut, seen: before, .. } = &self.snapshots[number];
        if let Some(before) = before {
            return if before == seen {
                Ok(())
            } else {
                Err(format!("a snapshot showed {before:?}, and shows {seen:?}"))
            };
        }
        let write = |slot: usize| {
            let write = self.slots[slot].writes.iter().find(|write| write.number == seen[slot]);
            write.ok_or_else(|| format!("slot {slot} shows {}, which was not written", seen[slot]))
        };
        // What had ended before this moment must be there.
        let mut moment = *began;
        for slot in 0..seen.len() {
            let write = write(slot)?;
            moment = moment.max(write.began);
            if write.began > *cut {
                return Err(format!("a snapshot that was cut at {cut} has a later write: {write:?}"));
            }
        }
        for (slot, seen) in seen.iter().enumerate() {
            let missing = self.slots[slot]
                .writes
                .iter()
                .find(|write| write.number > *seen && write.ended.is_some_and(|ended| ended < moment));
            if let Some(missing) = missing {
                return Err(format!(
                    "a snapshot from {began} to {cut} has a write that began at {moment}, and {seen} instead of {missing:?} in slot {slot}"
                ));
            }
        }
        Ok(())
    }

    /// Nothing is under way any more.
    fn forget_requests(&mut self) {
        self.shards.clear();
        for request in std::mem::take(&mut self.requests).values_mut() {
            request.buffer.reclaim();
        }
        self.answers.clear();
        self.channels = (0..CHANNELS).map(|_| Channel::default()).collect();
        self.slots.iter_mut().for_each(|slot| slot.is_busy = false);
    }

    fn reopen(&mut self, crash: Crash) -> Result<(), Stop> {
        self.forget_requests();
        self.disk.crash(crash);
        for index in 0..self.count {
            let open = self.open(index)?;
            self.shards.push(open);
        }
        Ok(())
    }

    /// The pool crashes, and is opened again.
    fn crash(&mut self) -> Result<(), Stop> {
        self.crash_in = u32::MAX;
        let crash = match self.rng.u32(..8) {
            0..3 => Crash::Process,
            3 => Crash::PowerLosesAll,
            4 => Crash::PowerLosesNothing,
            _ => Crash::Power,
        };
        let mut is_power_loss = crash != Crash::Process;
        self.reopen(crash)?;
        while self.rng.u32(..4) == 0 {
            // Another one, while some shards are being opened.
            for _ in 0..self.rng.u32(..40) {
                self.pump()?;
            }
            let again = if self.rng.bool() { Crash::Power } else { Crash::Process };
            is_power_loss |= again != Crash::Process;
            self.reopen(again)?;
        }
        self.wait_until(|world| world.shards.iter().all(|shard| shard.pool.state() == State::Ready))?;
        self.resolve()?;
        self.check_volume(is_power_loss)?;
        self.write_all()?;
        for number in 0..self.snapshots.len() {
            self.compare(number, false)?;
        }
        for number in 0..self.clones.len() {
            self.compare_clone(number, false)?;
        }
        self.crash_in = self.rng.u32(100..5000);
        Ok(())
    }

    /// Finishes or undoes the change that was interrupted, as its note says.
    fn resolve(&mut self) -> Result<(), Stop> {
        let note = String::from_utf8_lossy(self.shards[0].pool.note()).into_owned();
        let there = |world: &Self, uuid: Uuid| -> Vec<Option<VolumeId>> {
            let id = |shard: &super::Open| {
                let mut volumes = shard.pool.volumes();
                volumes.find(|(_, volume)| volume.label.uuid == *uuid.as_bytes()).map(|(id, _)| id)
            };
            world.shards.iter().map(id).collect()
        };
        if let Some((what, uuid)) = note.split_once(' ') {
            let uuid = Uuid::parse_str(uuid).map_err(|error| Stop::Failed(error.to_string()))?;
            let ids = there(self, uuid);
            let is_whole = ids.iter().all(Option::is_some);
            if what == "delete" || !is_whole {
                self.counts.undone += u64::from(what == "make" && ids.iter().any(Option::is_some));
                for (shard, id) in ids.into_iter().enumerate().filter_map(|(shard, id)| Some((shard, id?))) {
                    let tag = self.begin(shard, Command::Delete(id));
                    self.wait_until(|world| world.answers.contains_key(&tag))?;
                    self.answers.remove(&tag).expect("it is there").map_err(Stop::Failed)?;
                }
            }
            let tag = self.begin(0, Command::SetNote(Vec::new()));
            self.wait_until(|world| world.answers.contains_key(&tag))?;
            self.answers.remove(&tag);
        }
        match self.changing.take() {
            Some(Change::Make { uuid, began, cut }) if there(self, uuid)[0].is_some() => {
                self.counts.kept += 1;
                self.snapshots.push(Snapshot { uuid, began, cut, seen: None });
            }
            Some(Change::Clone(clone)) if there(self, clone.uuid)[0].is_some() => {
                self.counts.kept += 1;
                self.clones.push(clone);
            }
            Some(Change::Delete(uuid)) if there(self, uuid)[0].is_none() => self.forget(uuid),
            _ => {}
        }
        let mut wanted = vec![VOLUME];
        wanted.extend(self.snapshots.iter().map(|snapshot| snapshot.uuid.into_bytes()));
        wanted.extend(self.clones.iter().map(|clone| clone.uuid.into_bytes()));
        wanted.sort_unstable();
        for (number, shard) in self.shards.iter().enumerate() {
            let mut there: Vec<[u8; 16]> =
                shard.pool.volumes().map(|(_, volume)| volume.label.uuid).collect();
            there.sort_unstable();
            if there != wanted {
                return Err(Stop::Failed(format!(
                    "shard {number} has {there:?}, and not {wanted:?}; note {note:?}"
                )));
            }
        }
        Ok(())
    }

    /// The volume has what no crash loses: all that has ended, or what was flushed if the power has failed.
    fn check_volume(&mut self, is_power_loss: bool) -> Result<(), Stop> {
        let ids = self.ids(VOLUME)?;
        for slot in 0..self.slots.len() {
            let values = self.read(&ids, slot, false)?;
            let of = &self.slots[slot];
            let ended =
                of.writes.iter().filter(|write| write.ended.is_some()).map(|write| write.number).max();
            let least = if is_power_loss { of.durable } else { ended.unwrap_or(0).max(of.durable) };
            let is_right = |value: &u64| {
                *value >= least && (*value == 0 || of.writes.iter().any(|write| write.number == *value))
            };
            if !values.iter().all(is_right) {
                let writes = &of.writes;
                return Err(Stop::Failed(format!(
                    "slot {slot} shows {values:?}, and not {least} at least; {writes:?}"
                )));
            }
        }
        Ok(())
    }

    /// Waits for all, and checks all.
    pub(super) fn finish(&mut self) -> Result<(), Stop> {
        self.wait_until(|world| world.requests.is_empty())?;
        for number in 0..self.snapshots.len() {
            self.compare(number, false)?;
        }
        for number in 0..self.clones.len() {
            self.compare_clone(number, false)?;
        }
        for shard in 0..self.shards.len() {
            let tag = self.begin(shard, Command::Check { data: true, repair: false });
            self.wait_until(|world| world.answers.contains_key(&tag))?;
            match self.answers.remove(&tag) {
                Some(Ok(Answer::Check(report))) if report.damage.is_empty() => {}
                other => return Err(Stop::Failed(format!("the check of shard {shard} says {other:?}"))),
            }
        }
        Ok(())
    }
}
