//! Commands to pools of several parts. Control context.
//!
//! Each part has all volumes. What a command says about data is asked of all parts, and what they say is put together. A change
//! of the volumes is made in all of them, so that they agree also after a crash: before it begins, the note of the first part
//! says what is meant ([`Intent`]); afterwards, that is taken back. Where a change was interrupted, or a part has refused it, it
//! is finished or undone later: when the pool is opened, before the next change, and from time to time. Until then, a volume of
//! it can be deleted, and not be changed otherwise; one whose content differs between the parts has no disk.
//!
//! | change | in which order | after an interruption |
//! | --- | --- | --- |
//! | new volumes and snapshots | at the same time | what is not in all parts is deleted |
//! | deletions, `Adopt` | the first part, which may refuse; then the others | done in all parts |
//! | `Revert` | the first part, which may refuse; then the others | done in the parts that have not done it |
//! | a size, or another property | what may be refused, in the first part last; otherwise there first | the others become as the first one |
//!
//! In parts other than the first, the names of volumes are their UUIDs: only the first one has to know a new name.

use super::{Listed, Pool, lock};
use crate::gate::Closed;
use crate::note::{self, Intent};
use crate::part::Part;
use crate::{Error, VolumeDisk};
use aryk_bdev::Bdev;
use aryk_log_limit::limited;
use aryk_volume::{Answer, CheckReport, Command, CommandError, Label, Space, VolumeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// Volumes and snapshots that are made at the same time: an intent names them all.
const MADE_MAX: usize = 64;

/// Bytes of a note with a new intent, at most. One that is undone becomes a little longer.
const NOTE_BYTES: usize = 3800;

const UNFINISHED: Error =
    Error::Busy("an earlier change of the volume is not finished in all shards of the pool; try again later");

/// In which order the parts make a change.
#[derive(Clone, Copy)]
enum Order {
    FirstPartFirst,
    FirstPartLast,
}

impl Pool {
    /// Runs a command.
    pub(super) async fn command(&self, command: Command) -> Result<Answer, Error> {
        if let [only] = &self.parts[..] {
            return only.command(command).await;
        }
        let uuid = |id: VolumeId| self.uuid_of(id);
        match &command {
            Command::Rename { .. } => self.parts[0].command(command).await,
            Command::Own(_)
            | Command::Changed { .. }
            | Command::Space { .. }
            | Command::Check { .. }
            | Command::Inflate(_)
            | Command::SetNote(_) => {
                let answers = self.command_all(&command).await?;
                self.merge(answers)
            }
            Command::Create { label, .. } => {
                let made = vec![Uuid::from_bytes(label.uuid)];
                self.make(&command, made).await
            }
            Command::Snapshot(of) => {
                let made = of.iter().map(|(_, label)| Uuid::from_bytes(label.uuid)).collect();
                self.make(&command, made).await
            }
            Command::Delete(id) => self.delete_in_all(&command, uuid(*id)?).await,
            Command::Revert { volume, snapshot } => {
                let intent = self.revert_intent(uuid(*volume)?, uuid(*snapshot)?).await?;
                let disks = self.disks_of(&[*volume]);
                let closed = Self::close_gates(&disks);
                let changed = match closed.drained().await {
                    Ok(()) => self.change(&command, intent, Order::FirstPartFirst).await,
                    Err(error) => Err(error),
                };
                closed.open().await;
                changed
            }
            Command::Adopt { volume, from } => {
                let intent = Intent::Adopt { volume: uuid(*volume)?, from: uuid(*from)? };
                self.change(&command, intent, Order::FirstPartFirst).await
            }
            Command::Resize { volume, units } => {
                let old = lock(&self.members).get(volume).map(|member| member.volume.units);
                let grows = old.is_some_and(|old| *units > old);
                let order = if grows { Order::FirstPartLast } else { Order::FirstPartFirst };
                self.change(&command, Intent::Follow(uuid(*volume)?), order).await
            }
            Command::SetThick { volume, is_thick } => {
                let order = if *is_thick { Order::FirstPartLast } else { Order::FirstPartFirst };
                self.change(&command, Intent::Follow(uuid(*volume)?), order).await
            }
            Command::SetWhenFull { volume, .. } | Command::Freeze(volume) => {
                self.change(&command, Intent::Follow(uuid(*volume)?), Order::FirstPartFirst).await
            }
        }
    }

    /// What a revert means, before it begins.
    pub(crate) async fn revert_intent(&self, volume: Uuid, snapshot: Uuid) -> Result<Intent, Error> {
        let lists = self.lists().await?;
        let timeline = |list: &BTreeMap<Uuid, Listed>| list.get(&volume).map(|listed| listed.volume.timeline);
        let before = lists.iter().map(timeline).collect::<Option<_>>();
        Ok(Intent::Revert { volume, snapshot, before: before.ok_or(Error::Incomplete)? })
    }

    /// Deletes a volume, whose unfinished changes are finished by that.
    async fn delete_in_all(&self, command: &Command, uuid: Uuid) -> Result<Answer, Error> {
        let before = lock(&self.intents).clone();
        let (mut uuids, mut others) = (vec![uuid], Vec::new());
        for intent in &before {
            match intent.replaced_by_deletion_of(uuid) {
                Some(deleted) => uuids.extend(deleted.into_iter().filter(|other| *other != uuid)),
                None => others.push(intent.clone()),
            }
        }
        if others.len() == before.len() {
            return self.change(command, Intent::Delete(uuids), Order::FirstPartFirst).await;
        }
        // The first part has finished its part of the changes, and the others need not.
        let intent = Intent::Delete(uuids);
        others.push(intent.clone());
        self.store_intents(others).await?;
        if let Err(error) = self.command_in(command, 0..1).await {
            self.store_intents(before).await?;
            return Err(error);
        }
        self.finish_or_warn(&intent).await;
        Ok(Answer::Done)
    }

    fn uuid_of(&self, id: VolumeId) -> Result<Uuid, Error> {
        let uuid = lock(&self.members).get(&id).map(|member| member.uuid());
        uuid.ok_or(Error::Command(CommandError::NotFound))
    }

    /// How a part identifies a volume.
    fn id_in(&self, id: VolumeId, part: usize) -> Result<VolumeId, Error> {
        let members = lock(&self.members);
        let ids = members.get(&id).map(|member| &member.ids);
        ids.and_then(|ids| ids.get(part).copied()).ok_or(Error::Command(CommandError::NotFound))
    }

    /// A command as a part gets it.
    fn for_part(&self, command: &Command, part: usize) -> Result<Command, Error> {
        let id = |id: &VolumeId| self.id_in(*id, part);
        let label = |label: &Label| match part {
            0 => label.clone(),
            _ => Label { name: Uuid::from_bytes(label.uuid).to_string(), uuid: label.uuid },
        };
        Ok(match command {
            Command::Create { label: of, units, block_size, origin, when_full, is_thick } => {
                let origin = match origin {
                    aryk_volume::Origin::Snapshot(of) => aryk_volume::Origin::Snapshot(id(of)?),
                    other => other.clone(),
                };
                let (units, block_size, when_full, is_thick) = (*units, *block_size, *when_full, *is_thick);
                Command::Create { label: label(of), units, block_size, origin, when_full, is_thick }
            }
            Command::Delete(of) => Command::Delete(id(of)?),
            Command::Resize { volume, units } => Command::Resize { volume: id(volume)?, units: *units },
            Command::Rename { volume, name } => Command::Rename { volume: id(volume)?, name: name.clone() },
            Command::SetWhenFull { volume, when_full } => {
                Command::SetWhenFull { volume: id(volume)?, when_full: *when_full }
            }
            Command::SetThick { volume, is_thick } => {
                Command::SetThick { volume: id(volume)?, is_thick: *is_thick }
            }
            Command::SetNote(note) => Command::SetNote(note.clone()),
            Command::Snapshot(of) => {
                let of = of.iter().map(|(of, named)| Ok((id(of)?, label(named))));
                Command::Snapshot(of.collect::<Result<_, Error>>()?)
            }
            Command::Revert { volume, snapshot } => {
                Command::Revert { volume: id(volume)?, snapshot: id(snapshot)? }
            }
            Command::Adopt { volume, from } => Command::Adopt { volume: id(volume)?, from: id(from)? },
            Command::Freeze(of) => Command::Freeze(id(of)?),
            Command::Own(of) => Command::Own(id(of)?),
            Command::Inflate(of) => Command::Inflate(id(of)?),
            Command::Changed { since, until } => Command::Changed { since: id(since)?, until: id(until)? },
            Command::Space { of, gives_way } => {
                let of = of.iter().map(id).collect::<Result<_, Error>>()?;
                Command::Space { of, gives_way: *gives_way }
            }
            Command::Check { data, repair } => Command::Check { data: *data, repair: *repair },
        })
    }

    /// Runs a command in all parts at the same time. Returns their answers, or the first error.
    async fn command_all(&self, command: &Command) -> Result<Vec<Answer>, Error> {
        self.command_in(command, 0..self.parts.len()).await
    }

    async fn command_in(
        &self,
        command: &Command,
        parts: std::ops::Range<usize>,
    ) -> Result<Vec<Answer>, Error> {
        let commands: Vec<Command> =
            parts.clone().map(|part| self.for_part(command, part)).collect::<Result<_, _>>()?;
        let mut begun = Vec::new();
        for (part, command) in parts.zip(commands) {
            begun.push(self.parts[part].begin(command).await);
        }
        // All that were begun end before this does.
        let mut results = Vec::new();
        for answering in begun {
            results.push(match answering {
                Ok(answering) => answering.result().await,
                Err(error) => Err(error),
            });
        }
        results.into_iter().collect()
    }

    /// Puts the answers of all parts together.
    fn merge(&self, answers: Vec<Answer>) -> Result<Answer, Error> {
        let mut answers = answers.into_iter();
        let mut merged = answers.next().ok_or(Error::Ended)?;
        for (answer, part) in answers.zip(1..) {
            match (&mut merged, answer) {
                (Answer::Changed(all), Answer::Changed(more)) => {
                    all.extend(more);
                    all.sort_unstable();
                }
                (Answer::Space(all), Answer::Space(more)) => self.add_space(all, &more, part),
                (Answer::Check(all), Answer::Check(more)) => self.add_report(all, more, part),
                _ => {}
            }
        }
        if let Answer::Changed(parts) = &mut merged {
            // All shards have a discard of many stripes.
            parts.dedup_by(|next, last| {
                let touches = next.0 <= last.0 + last.1;
                if touches {
                    last.1 = last.1.max(next.0 + next.1 - last.0);
                }
                touches
            });
        }
        Ok(merged)
    }

    /// The volume that a part means.
    pub(super) fn id_from(&self, id: VolumeId, part: usize) -> Option<VolumeId> {
        let members = lock(&self.members);
        members.values().find(|member| member.ids.get(part) == Some(&id)).map(|member| member.id)
    }

    fn add_space(&self, all: &mut [Space], more: &[Space], part: usize) {
        let more: BTreeMap<VolumeId, &Space> = more.iter().map(|space| (space.volume, space)).collect();
        for space in all {
            let there = self.id_in(space.volume, part).ok().and_then(|id| more.get(&id));
            if let Some(there) = there {
                space.own_bytes += there.own_bytes;
                space.shared_bytes += there.shared_bytes;
            }
        }
    }

    fn add_report(&self, all: &mut CheckReport, more: CheckReport, part: usize) {
        all.references += more.references;
        all.blocks_read += more.blocks_read;
        all.leaked_units += more.leaked_units;
        all.is_index_damaged |= more.is_index_damaged;
        all.damage.extend(more.damage.into_iter().map(|mut damage| {
            damage.volume = damage.volume.and_then(|id| self.id_from(id, part));
            damage
        }));
    }

    /// Makes volumes or snapshots in all parts, or in none. Snapshots have the same moment in all parts.
    async fn make(&self, command: &Command, made: Vec<Uuid>) -> Result<Answer, Error> {
        if made.len() > MADE_MAX {
            return Err(Error::Busy("a pool of several shards takes at most 64 snapshots at one instant"));
        }
        let of: Vec<VolumeId> = match command {
            Command::Snapshot(of) => of.iter().map(|(id, _)| *id).collect(),
            _ => Vec::new(),
        };
        for id in &of {
            self.check_finished(&[self.uuid_of(*id)?])?;
        }
        let (intent, uuids) = (Intent::Make(made.clone()), made);
        self.begin_intent(intent.clone()).await?;
        let answers = match command {
            Command::Snapshot(_) => {
                let disks = self.disks_of(&of);
                self.cut_all(command, &of, Self::close_gates(&disks)).await
            }
            _ => self.command_all(command).await,
        };
        match answers {
            Ok(answers) => {
                self.end_intent(&intent).await?;
                answers.into_iter().next().ok_or(Error::Ended)
            }
            // What was made is deleted, also if all parts have it: it may have another moment in each.
            Err(error) => {
                let undone = self.replace_intent(&intent, Intent::Delete(uuids)).await?;
                self.finish_or_warn(&undone).await;
                Err(error)
            }
        }
    }

    /// Takes snapshots in all parts while nothing writes to the volumes. The parts make them durable afterwards.
    async fn cut_all(
        &self,
        command: &Command,
        of: &[VolumeId],
        closed: Closed<'_>,
    ) -> Result<Vec<Answer>, Error> {
        let mut begun = Vec::new();
        let mut cut = closed.drained().await;
        if cut.is_ok() {
            for (number, part) in self.parts.iter().enumerate() {
                match self.begin_in(part, command, number).await {
                    Ok(answering) => begun.push(answering),
                    Err(error) => cut = Err(error),
                }
            }
        }
        // A part with thick volumes may have to find space for the snapshot before.
        let is_thick = {
            let members = lock(&self.members);
            of.iter().any(|id| members.get(id).is_some_and(|member| member.volume.is_thick))
        };
        let mut results = Vec::new();
        if is_thick {
            for answering in begun.drain(..) {
                results.push(answering.result().await);
            }
        }
        let cut = cut.and(closed.check_time());
        closed.open().await;
        for answering in begun {
            results.push(answering.result().await);
        }
        cut?;
        results.into_iter().collect()
    }

    async fn begin_in(
        &self,
        part: &Part,
        command: &Command,
        number: usize,
    ) -> Result<crate::part::Answering, Error> {
        part.begin(self.for_part(command, number)?).await
    }

    /// The disks of volumes.
    fn disks_of(&self, of: &[VolumeId]) -> Vec<Arc<Bdev>> {
        let members = lock(&self.members);
        of.iter().filter_map(|id| members.get(id)?.disk.clone()).collect()
    }

    /// Closes the gates of disks.
    fn close_gates(disks: &[Arc<Bdev>]) -> Closed<'_> {
        let devices = disks.iter().filter_map(|disk| disk.device_as::<VolumeDisk>());
        Closed::new(devices.map(|device| &device.gate).collect())
    }

    /// Makes a change in all parts.
    async fn change(&self, command: &Command, intent: Intent, order: Order) -> Result<Answer, Error> {
        self.begin_intent(intent.clone()).await?;
        let count = self.parts.len();
        let (first, rest) = match order {
            Order::FirstPartFirst => (0..1, 1..count),
            Order::FirstPartLast => (1..count, 0..1),
        };
        match (self.command_in(command, first).await, order) {
            (Ok(_), _) => {}
            // Nothing was changed.
            (Err(error), Order::FirstPartFirst) => {
                self.end_intent(&intent).await?;
                return Err(error);
            }
            // What some of the other parts have changed is taken back.
            (Err(error), Order::FirstPartLast) => {
                self.finish_or_warn(&intent).await;
                return Err(error);
            }
        }
        match (self.command_in(command, rest).await, order) {
            (Ok(_), _) => self.end_intent(&intent).await?,
            (Err(error), Order::FirstPartLast) => {
                self.finish_or_warn(&intent).await;
                return Err(error);
            }
            (Err(_), Order::FirstPartFirst) => match self.finish_intent(&intent).await {
                Ok(()) => {}
                // Nobody sees the volume any more.
                Err(error) if matches!(intent, Intent::Delete(_)) => self.warn(&error),
                Err(error) => return Err(Error::Unfinished(Box::new(error))),
            },
        }
        Ok(Answer::Done)
    }

    /// Whether the content of a volume differs between the parts, until a change is finished.
    pub(super) fn is_mixed(&self, uuid: Uuid) -> bool {
        lock(&self.intents).iter().any(|intent| intent.mixed() == Some(uuid))
    }

    /// Whether no change of these volumes waits to be finished.
    ///
    /// # Errors
    /// [`Error::Busy`].
    fn check_finished(&self, uuids: &[Uuid]) -> Result<(), Error> {
        let intents = lock(&self.intents);
        let waits = intents.iter().any(|intent| intent.uuids().iter().any(|uuid| uuids.contains(uuid)));
        if waits { Err(UNFINISHED) } else { Ok(()) }
    }

    /// Notes what the next change means.
    ///
    /// # Errors
    /// [`Error::Busy`]: an earlier change of its volumes is not finished, or too many others are not.
    pub(crate) async fn begin_intent(&self, intent: Intent) -> Result<(), Error> {
        self.check_finished(&intent.uuids())?;
        let mut intents = lock(&self.intents).clone();
        intents.push(intent);
        if note::with_intents(&self.note().await?, &intents).len() > NOTE_BYTES {
            return Err(Error::Busy(
                "too many changes are not finished in all shards of the pool; try again later",
            ));
        }
        self.store_intents(intents).await
    }

    /// Notes another meaning of a change, and returns that.
    async fn replace_intent(&self, intent: &Intent, by: Intent) -> Result<Intent, Error> {
        let mut intents = lock(&self.intents).clone();
        intents.iter_mut().filter(|other| *other == intent).for_each(|other| *other = by.clone());
        self.store_intents(intents).await?;
        Ok(by)
    }

    /// A change is done.
    async fn end_intent(&self, intent: &Intent) -> Result<(), Error> {
        let mut intents = lock(&self.intents).clone();
        intents.retain(|other| other != intent);
        self.store_intents(intents).await
    }

    async fn store_intents(&self, intents: Vec<Intent>) -> Result<(), Error> {
        let note = note::with_intents(&self.note().await?, &intents);
        self.parts[0].command(Command::SetNote(note)).await?;
        *lock(&self.intents) = intents;
        Ok(())
    }

    pub(super) async fn note(&self) -> Result<Vec<u8>, Error> {
        let note = self.parts[0].root.call(|owner, _| owner.engine().map(|engine| engine.note().to_vec()));
        note.await.ok().flatten().ok_or(Error::Ended)
    }

    /// Reads the note of a pool that has just been opened: the size of its clusters, when it is scrubbed, and which changes were
    /// interrupted. Finishes or undoes these as far as possible.
    ///
    /// # Errors
    /// [`Error::Intent`]: a newer version has begun a change that this one does not know.
    pub(crate) async fn recover(&self) -> Result<(), Error> {
        let note = self.note().await?;
        self.cluster.store(note::cluster(&note).0, Ordering::Relaxed);
        self.recover_scrub(&note);
        if self.parts.len() > 1 {
            *lock(&self.intents) = note::intents(&note)?;
            self.finish_intents().await;
        }
        Ok(())
    }

    /// Finishes or undoes, as far as possible, the changes that were interrupted or that a part has refused.
    pub(super) async fn finish_intents(&self) {
        let intents = lock(&self.intents).clone();
        for intent in intents {
            self.finish_or_warn(&intent).await;
        }
    }

    async fn finish_or_warn(&self, intent: &Intent) {
        if let Err(error) = self.finish_intent(intent).await {
            self.warn(&error);
        }
    }

    fn warn(&self, error: &Error) {
        limited!(
            self.unfinished_lines, warn, pool = self.name(), %error,
            "a change is not finished in all shards: it is tried again"
        );
    }

    /// What volumes each part has.
    async fn lists(&self) -> Result<Vec<BTreeMap<Uuid, Listed>>, Error> {
        let mut lists = Vec::new();
        for part in &self.parts {
            let listed = part.root.call(|owner, _| owner.volumes()).await.map_err(|_| Error::Ended)?;
            let by_uuid = |listed: Listed| (Uuid::from_bytes(listed.volume.label.uuid), listed);
            lists.push(listed.into_iter().map(by_uuid).collect());
        }
        Ok(lists)
    }

    /// Finishes or undoes a change.
    ///
    /// # Errors
    /// Why the first part that has refused to did so. The change is tried again later.
    async fn finish_intent(&self, intent: &Intent) -> Result<(), Error> {
        let lists = self.lists().await?;
        let mut intent = intent.clone();
        if let Intent::Make(made) = &intent
            && !lists.iter().all(|list| made.iter().all(|uuid| list.contains_key(uuid)))
        {
            // It stays undone, whatever is made later.
            intent = self.replace_intent(&intent, Intent::Delete(made.clone())).await?;
        }
        let mut result = Ok(());
        for (part, command) in missing(&intent, &lists)? {
            result = result.and(self.parts[part].command(command).await.map(drop));
        }
        result?;
        self.end_intent(&intent).await
    }
}

/// The commands to parts that finish a change. `lists` has what volumes each part has.
///
/// # Errors
/// [`Error::Incomplete`]: a part lacks what it needs for the change.
fn missing(intent: &Intent, lists: &[BTreeMap<Uuid, Listed>]) -> Result<Vec<(usize, Command)>, Error> {
    let mut commands = Vec::new();
    let parts = || lists.iter().enumerate();
    match intent {
        Intent::Make(_) => {}
        Intent::Delete(uuids) => {
            for (part, list) in parts() {
                let there = uuids.iter().filter_map(|uuid| list.get(uuid));
                commands.extend(there.map(|listed| (part, Command::Delete(listed.id))));
            }
        }
        Intent::Revert { volume, snapshot, before } => {
            for (part, list) in parts() {
                if let Some(volume) = list.get(volume)
                    && before.get(part) == Some(&volume.volume.timeline)
                {
                    let snapshot = list.get(snapshot).ok_or(Error::Incomplete)?.id;
                    commands.push((part, Command::Revert { volume: volume.id, snapshot }));
                }
            }
        }
        Intent::Adopt { volume, from } => {
            for (part, list) in parts() {
                if let (Some(volume), Some(from)) = (list.get(volume), list.get(from)) {
                    commands.push((part, Command::Adopt { volume: volume.id, from: from.id }));
                }
            }
        }
        Intent::Follow(uuid) => {
            let Some(first) = lists.first().and_then(|list| list.get(uuid)) else { return Ok(commands) };
            for (part, list) in parts().skip(1) {
                let Some(Listed { id, volume, .. }) = list.get(uuid) else { continue };
                let (volume_id, wanted) = (*id, &first.volume);
                let mut add = |command| commands.push((part, command));
                if volume.is_thick && !wanted.is_thick {
                    add(Command::SetThick { volume: volume_id, is_thick: false });
                }
                if volume.units != wanted.units {
                    add(Command::Resize { volume: volume_id, units: wanted.units });
                }
                if !volume.is_thick && wanted.is_thick {
                    add(Command::SetThick { volume: volume_id, is_thick: true });
                }
                if volume.when_full != wanted.when_full {
                    add(Command::SetWhenFull { volume: volume_id, when_full: wanted.when_full });
                }
                if volume.cut.is_none() && wanted.cut.is_some() {
                    add(Command::Freeze(volume_id));
                }
            }
        }
    }
    Ok(commands)
}
