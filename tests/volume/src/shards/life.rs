//! The steps of a simulation, except changes: it takes, clones, compares and deletes snapshots, and crashes the pool.

use aryk_dma::Buffer;
use aryk_volume::{Answer, Command, Label, Origin, State, VolumeId};
use uuid::Uuid;

use super::slot::{self, Time, Write};
use super::{
    CHANNELS, CLONES_MAX, Change, Cloned, InFlight, Kind, SNAPSHOTS_MAX, Snapshot, Stop, VOLUME, World,
    channels, create,
};
use crate::disk::Crash;
use crate::pattern::{self, UNIT, ZERO};

impl World {
    pub(super) fn step(&mut self) -> Result<(), Stop> {
        match self.rng.u32(..13) {
            0..3 if self.snapshots.len() < SNAPSHOTS_MAX => self.snapshot(),
            0..4 if !self.snapshots.is_empty() => self.delete(),
            4 if !self.snapshots.is_empty() => {
                let number = self.rng.usize(..self.snapshots.len());
                self.compare(number, true)
            }
            5 if !self.snapshots.is_empty() && self.clones.len() < CLONES_MAX => self.clone_snapshot(),
            6 if !self.snapshots.is_empty() => self.revert(),
            7..9 => self.resize(),
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
        let (began, size) = (self.tick(), self.size);
        self.changing = Some(Change::Make { uuid, size, began, cut: Time::MAX });
        self.note(format!("make {uuid}"))?;
        self.close_gates()?;
        let ids = self.ids(VOLUME)?;
        let mut tags = Vec::new();
        for (shard, id) in ids.into_iter().enumerate() {
            self.pass_time()?;
            let label = Label { name: uuid.to_string(), uuid: uuid.into_bytes() };
            tags.push(self.begin(shard, Command::Snapshot(vec![(id, label)])));
        }
        let cut = self.tick();
        self.changing = Some(Change::Make { uuid, size, began, cut });
        self.open_gates()?;
        for tag in tags {
            self.finish_command(tag)?;
        }
        self.note(String::new())?;
        self.changing = None;
        self.snapshots.push(Snapshot { uuid, size, began, cut, seen: None });
        self.counts.snapshots += 1;
        let number = self.snapshots.len() - 1;
        if self.rng.bool() { self.compare(number, true) } else { Ok(()) }
    }

    /// Closes the gates of the channels one after another, and waits until no write is under way.
    pub(super) fn close_gates(&mut self) -> Result<(), Stop> {
        for channel in 0..CHANNELS {
            self.pass_time()?;
            self.channels[channel].gate.close();
        }
        self.work_until(|world| {
            !world.requests.values().any(|request| matches!(request.kind, Kind::Write { .. }))
        })
    }

    /// Opens the gates of the channels one after another: the writes that they have held back begin.
    pub(super) fn open_gates(&mut self) -> Result<(), Stop> {
        for channel in 0..CHANNELS {
            self.pass_time()?;
            self.channels[channel].gate.open();
            while let Some(slot) = self.channels[channel].held.pop_front() {
                assert!(self.channels[channel].gate.enter(), "it was just opened");
                self.start_write(channel, slot)?;
            }
        }
        Ok(())
    }

    /// Clones a snapshot in all shards, while the channels go on.
    fn clone_snapshot(&mut self) -> Result<(), Stop> {
        let number = self.rng.usize(..self.snapshots.len());
        self.compare(number, true)?;
        let Snapshot { uuid: snapshot, size, seen, .. } = &self.snapshots[number];
        let (snapshot, size) = (snapshot.into_bytes(), *size);
        let seen = seen.clone().expect("it was compared");
        self.next += 1;
        let uuid = Uuid::from_u128(self.next.into());
        self.changing = Some(Change::Clone(Cloned { uuid, size, seen: seen.clone() }));
        self.note(format!("make {uuid}"))?;
        let ids = self.ids(snapshot)?;
        self.in_shards(0..ids.len(), |shard| create(uuid, Origin::Snapshot(ids[shard]), size))?;
        self.note(String::new())?;
        self.changing = None;
        self.clones.push(Cloned { uuid, size, seen });
        self.counts.clones += 1;
        self.compare_clone(self.clones.len() - 1, true)
    }

    /// Reads all clones, and checks them.
    pub(super) fn compare_clones(&mut self, is_busy: bool) -> Result<(), Stop> {
        (0..self.clones.len()).try_for_each(|number| self.compare_clone(number, is_busy))
    }

    /// Reads a clone, and checks it.
    fn compare_clone(&mut self, number: usize, is_busy: bool) -> Result<(), Stop> {
        let Cloned { uuid, size, .. } = self.clones[number];
        let ids = self.ids(uuid.into_bytes())?;
        for slot in 0..self.slots.len() {
            let values = self.read(&ids, slot, size, is_busy)?;
            let seen = &self.clones[number].seen[slot];
            let places = self.slots[slot].units.0..;
            let mut units = places.zip(values.iter().zip(seen));
            if !units.all(|(unit, (value, seen))| {
                value == seen || self.may_show_by_change(uuid, slot, unit, *value)
            }) {
                let (values, seen) = (slot::told(&values), slot::told(seen));
                return Err(Stop::Failed(format!("slot {slot} of a clone shows {values}, and not {seen}")));
            }
            // Of what a crash has interrupted, there is from now on what was there now.
            self.clones[number].seen[slot] = values;
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
        self.in_shards(0..1, |shard| Command::Delete(ids[shard]))?;
        self.in_shards(1..ids.len(), |shard| Command::Delete(ids[shard]))?;
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

    /// Reads the values of a slot of a volume of this size, by units, while the channels go on or not. What is beyond the end
    /// counts as zeroes.
    pub(super) fn read(
        &mut self,
        ids: &[VolumeId],
        slot: usize,
        size: u64,
        is_busy: bool,
    ) -> Result<Vec<u64>, Stop> {
        let (first, end) = self.slots[slot].units;
        let mut values = vec![ZERO; (end - first) as usize];
        let Some(units) = self.slots[slot].within(size) else { return Ok(values) };
        let bytes = (units.1 - units.0) as usize * UNIT;
        let tag = self.submit(0, Kind::Read, ids, units, Buffer::new(bytes, 4096));
        let is_over = |world: &Self| world.requests[&tag].left == 0;
        if is_busy {
            self.work_until(is_over)?
        } else {
            self.wait_until(is_over)?
        }
        let mut request = self.requests.remove(&tag).expect("it is kept for this");
        request.buffer.reclaim();
        if request.is_refused {
            return Err(Stop::Failed(format!("a read of slot {slot} was refused")));
        }
        let read = self.values(slot, &request)?;
        values[..read.len()].copy_from_slice(&read);
        Ok(values)
    }

    /// The values that a read has found, by units.
    fn values(&mut self, slot: usize, request: &InFlight) -> Result<Vec<u64>, Stop> {
        let count = request.units.1 - request.units.0;
        self.counts.values += count;
        let bytes = request.buffer.bytes().chunks(UNIT).take(count as usize);
        let values = bytes.zip(request.units.0..).map(|(bytes, unit)| pattern::value(bytes, unit));
        values.collect::<Option<_>>().ok_or_else(|| Stop::Failed(format!("slot {slot} has no value")))
    }

    /// A read of the volume has ended: it shows nothing that was replaced before it began.
    pub(super) fn look_ended(&mut self, slot: usize, request: &InFlight) -> Result<(), Stop> {
        self.counts.looks += 1;
        let values = self.values(slot, request)?;
        self.check_slot(slot, &values, |write| write.ended.is_some_and(|ended| ended < request.began))
    }

    /// Checks what the first units of a slot of the volume show: what the latest write has left of which it `is_certain` that it
    /// is there, or a later one.
    pub(super) fn check_slot(
        &self,
        slot: usize,
        values: &[u64],
        is_certain: impl Fn(&Write) -> bool,
    ) -> Result<(), Stop> {
        let of = &self.slots[slot];
        for (unit, value) in (of.units.0..).zip(values) {
            if !of.may_show(unit, *value, &is_certain)
                && !self.may_show_by_change(Uuid::from_bytes(VOLUME), slot, unit, *value)
            {
                return Err(Stop::Failed(format!(
                    "unit {unit} of slot {slot} ({:?}) shows {value}; in all {}; the latest: {:?}",
                    of.units,
                    slot::told(values),
                    of.latest()
                )));
            }
        }
        Ok(())
    }

    /// Reads all slots of the volume while the channels go on, and checks them.
    pub(super) fn look_at_all(&mut self) -> Result<(), Stop> {
        for slot in 0..self.slots.len() {
            self.look(0, slot, self.size)?;
        }
        let is_look = |kind: &Kind| matches!(kind, Kind::Look { .. });
        let last = self.next;
        self.work_until(|world| {
            !world.requests.iter().any(|(tag, request)| *tag <= last && is_look(&request.kind))
        })
    }

    /// Reads a snapshot, and checks it.
    pub(super) fn compare(&mut self, number: usize, is_busy: bool) -> Result<(), Stop> {
        let Snapshot { uuid, size, .. } = self.snapshots[number];
        let ids = self.ids(uuid.into_bytes())?;
        let mut seen = Vec::new();
        for slot in 0..self.slots.len() {
            seen.push(self.read(&ids, slot, size, is_busy)?);
        }
        self.check(number, &seen)?;
        self.snapshots[number].seen = Some(seen);
        Ok(())
    }

    fn check(&self, number: usize, seen: &[Vec<u64>]) -> Result<(), String> {
        let Snapshot { began, cut, seen: before, .. } = &self.snapshots[number];
        if let Some(before) = before {
            let differs = (0..seen.len()).find(|&slot| before[slot] != seen[slot]);
            return differs.map_or(Ok(()), |slot| {
                let (before, now) = (slot::told(&before[slot]), slot::told(&seen[slot]));
                Err(format!("slot {slot} of a snapshot showed {before}, and shows {now}"))
            });
        }
        let mut moments = Vec::new();
        for (slot, seen) in self.slots.iter().zip(seen) {
            moments.push(slot.moments(seen).ok_or_else(|| {
                let (seen, latest) = (slot::told(seen), slot.latest());
                format!("a snapshot shows {seen} in the slot {:?}, as at no moment: {latest:?}", slot.units)
            })?);
        }
        // What had ended before this moment must be there.
        let mut moment = *began;
        for (slot, (first, _)) in self.slots.iter().zip(&moments) {
            let write = slot.write(*first);
            moment = moment.max(write.began);
            if write.began > *cut {
                return Err(format!("a snapshot that was cut at {cut} has a later write: {write:?}"));
            }
        }
        for (slot, (_, last)) in self.slots.iter().zip(&moments) {
            if let Some(missing) = slot.later(*last, moment) {
                let seen = slot.write(*last);
                return Err(format!(
                    "a snapshot from {began} to {cut} has a write that began at {moment}, and in the slot {:?} {seen:?} \
                     instead of {missing:?}",
                    slot.units
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
        self.channels = channels(self.size);
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
        let mut is_power_loss = false;
        let mut crash = match self.rng.u32(..8) {
            0..3 => Crash::Process,
            3 => Crash::PowerLosesAll,
            4 => Crash::PowerLosesNothing,
            _ => Crash::Power,
        };
        loop {
            is_power_loss |= crash != Crash::Process;
            self.crash_in = u32::MAX;
            self.reopen(crash)?;
            // Another one, while some shards are being opened, or while a change is finished.
            if self.rng.u32(..3) == 0 {
                let events = if self.rng.bool() { 40 } else { 600 };
                self.crash_in = self.rng.u32(1..events);
            }
            match self.recover() {
                Err(Stop::Crash) => crash = if self.rng.bool() { Crash::Power } else { Crash::Process },
                recovered => break recovered?,
            }
        }
        self.crash_in = u32::MAX;
        self.resolve()?;
        self.channels = channels(self.size);
        self.check_volume(is_power_loss)?;
        self.compare_clones(false)?;
        self.changing = None;
        self.write_all()?;
        for number in 0..self.snapshots.len() {
            self.compare(number, false)?;
        }
        self.compare_clones(false)?;
        self.bring_back()?;
        self.crash_in = self.rng.u32(100..5000);
        Ok(())
    }

    /// Waits until the shards are open, and finishes or undoes the change that was interrupted.
    fn recover(&mut self) -> Result<(), Stop> {
        self.wait_until(|world| world.shards.iter().all(|shard| shard.pool.state() == State::Ready))?;
        self.finish_change()
    }

    /// What has become of the change that was interrupted.
    fn resolve(&mut self) -> Result<(), Stop> {
        self.resolve_change()?;
        let there = |uuid: Uuid| !self.shards_with(uuid).is_empty();
        let is_there = match &self.changing {
            Some(Change::Make { uuid, .. } | Change::Delete(uuid)) => there(*uuid),
            Some(Change::Clone(clone)) => there(clone.uuid),
            _ => false,
        };
        match self.changing.take() {
            Some(Change::Make { uuid, size, began, cut }) if is_there => {
                self.counts.kept += 1;
                self.snapshots.push(Snapshot { uuid, size, began, cut, seen: None });
            }
            Some(Change::Clone(clone)) if is_there => {
                self.counts.kept += 1;
                self.clones.push(clone);
            }
            Some(Change::Delete(uuid)) if !is_there => self.forget(uuid),
            resize @ Some(Change::Resize { .. }) => self.changing = resize,
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
                return Err(Stop::Failed(format!("shard {number} has {there:?}, and not {wanted:?}")));
            }
        }
        self.check_sizes()
    }

    /// The volume has what no crash loses: all that has ended, or what was flushed if the power has failed. What there is now,
    /// no crash loses any more.
    fn check_volume(&mut self, is_power_loss: bool) -> Result<(), Stop> {
        let ids = self.ids(VOLUME)?;
        for slot in 0..self.slots.len() {
            let values = self.read(&ids, slot, self.size, false)?;
            let shown = self.slots[slot].within(self.size).map_or(0, |(first, end)| end - first);
            self.check_slot(slot, &values[..shown as usize], |write| {
                write.is_durable || (!is_power_loss && write.ended.is_some())
            })?;
            let (first, now) = (self.slots[slot].units.0, self.tick());
            self.slots[slot].put(first, values, (now, now), true);
        }
        Ok(())
    }

    /// Waits for all, and checks all.
    pub(super) fn finish(&mut self) -> Result<(), Stop> {
        self.wait_until(|world| world.requests.is_empty())?;
        for number in 0..self.snapshots.len() {
            self.compare(number, false)?;
        }
        self.compare_clones(false)?;
        self.check_volume(false)?;
        self.check_sizes()?;
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
