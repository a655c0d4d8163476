//! Commands: volumes, snapshots and clones begin, change and end. Any context.
//!
//! A command that changes what a volume shows holds the volume: its requests under way end first, and new ones wait. Snapshots
//! hold nothing: their cut is the commits that are taken at this instant, and their edit waits until all writes up to the cut are
//! done.

use crate::active::{Op, Origin, Runtime};
use crate::check::Check;
use crate::ids::VOLUME_UNITS_MAX;
use crate::keeper::Then;
use crate::manifest::{Base, Counting, Edit, Timeline, thick_units};
use crate::pool::Pool;
use crate::tasks::Work;
use crate::{
    Answer, Command, CommandError, CommandReply, Cut, Label, Origin as Content, PARTITIONS, State, Status,
    Tag, TimelineId, Volume, VolumeId,
};
use aryk_dma::Sgl;
use std::collections::{BTreeMap, VecDeque};

/// The most bytes of a name.
const NAME_MAX: usize = 255;

/// The most bytes of a note.
const NOTE_MAX: usize = 4096;

/// A larger base would appear where the volume grows, but no longer once the volume is inflated.
const SMALLER_THAN_BASE: CommandError =
    CommandError::Invalid("a volume is at least as large as the snapshot or disk below it");

/// A foreign disk below it may have blocks of that size.
const SMALLER_BLOCKS: CommandError =
    CommandError::Invalid("the blocks of a volume are at least as large as those of the snapshot");

/// Commands under way.
#[derive(Debug, Default)]
pub(crate) struct Admin {
    /// Commands that hold a volume.
    running: BTreeMap<VolumeId, (Tag, Command)>,
    /// Snapshots whose edit waits for writes, in the order of their cuts.
    cuts: VecDeque<Cutting>,
}

#[derive(Debug)]
struct Cutting {
    tag: Tag,
    cut: Cut,
    of: Vec<(VolumeId, TimelineId, Label)>,
}

type Outcome = Result<(), CommandError>;

impl Pool {
    /// Starts a command, or answers why it is refused.
    pub(crate) fn start_command(&mut self, tag: Tag, command: Command) {
        let outcome = match self.state {
            State::Ready => self.try_command(tag, command),
            State::ReadOnly(_) => Err(CommandError::ReadOnly),
            State::Failed(_) | State::Damaged(_) | State::Opening => Err(CommandError::Medium),
        };
        if let Err(error) = outcome {
            self.out.command_replies.push_back(CommandReply { tag, result: Err(error) });
        }
    }

    fn try_command(&mut self, tag: Tag, command: Command) -> Outcome {
        match command {
            Command::Create { label, units, block_size, origin, when_full, is_thick } => {
                let timeline = self.next_timeline()?;
                let volume = Volume { label, units, block_size, when_full, is_thick, timeline, cut: None };
                self.create_volume(tag, volume, origin)
            }
            Command::Delete(id) => self.hold(id, tag, Command::Delete(id)),
            Command::Resize { volume, units } => self.resize(tag, volume, units),
            Command::Rename { volume, name } => {
                self.find(volume)?;
                self.check_name(&name, Some(volume))?;
                self.change_volume(volume, tag, |volume| volume.label.name = name);
                Ok(())
            }
            Command::SetWhenFull { volume, when_full } => {
                self.find(volume)?;
                self.change_volume(volume, tag, |volume| volume.when_full = when_full);
                Ok(())
            }
            Command::SetThick { volume, is_thick } => self.set_thick(tag, volume, is_thick),
            Command::SetNote(note) if note.len() > NOTE_MAX => {
                Err(CommandError::Invalid("a note has up to 4,096 bytes"))
            }
            Command::SetNote(note) => {
                self.keeper.edit(Edit::Note(note));
                self.keeper.commit(Then::Answer(tag, Answer::Done));
                Ok(())
            }
            Command::Snapshot(of) => self.cut(tag, of),
            Command::Revert { volume, snapshot } => {
                let (target, source) = (self.find(volume)?, self.find(snapshot)?);
                if target.cut.is_some() || source.cut.is_none() {
                    return Err(CommandError::WrongKind("a volume is reverted to a snapshot"));
                }
                if source.block_size > target.block_size {
                    return Err(SMALLER_BLOCKS);
                }
                let command = Command::Revert { volume, snapshot };
                match self.check_reservation(tag, &command)? {
                    Some(()) => self.hold(volume, tag, command),
                    None => Ok(()),
                }
            }
            Command::Adopt { volume, from } => {
                self.check_adoption(volume, from)?;
                self.hold(volume, tag, Command::Adopt { volume, from })
            }
            Command::Freeze(id) if self.find(id)?.cut.is_some() => {
                Err(CommandError::WrongKind("it is a snapshot already"))
            }
            Command::Freeze(id) => self.hold(id, tag, Command::Freeze(id)),
            Command::Own(id) => self.start_own(tag, id),
            Command::Inflate(id) => self.start_inflate(tag, id),
            Command::Changed { since, until } => self.start_changed(tag, since, until),
            Command::Space { of, gives_way } => self.start_space(tag, of, gives_way),
            Command::Check { data, repair } => {
                self.tasks.push(tag, Work::Check(Check::new(data, repair)));
                Ok(())
            }
        }
    }

    pub(crate) fn find(&self, id: VolumeId) -> Result<&Volume, CommandError> {
        self.keeper.manifest.volumes.get(&id).ok_or(CommandError::NotFound)
    }

    fn check_name(&self, name: &str, of: Option<VolumeId>) -> Outcome {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(CommandError::Invalid("a name has 1 to 255 bytes"));
        }
        let cutting =
            self.admin.cuts.iter().flat_map(|cutting| &cutting.of).any(|(.., label)| label.name == name);
        if cutting || self.keeper.manifest.named(name).is_some_and(|id| Some(id) != of) {
            return Err(CommandError::Exists);
        }
        Ok(())
    }

    fn check_label(&self, label: &Label) -> Outcome {
        self.check_name(&label.name, None)?;
        let cutting = self
            .admin
            .cuts
            .iter()
            .flat_map(|cutting| &cutting.of)
            .any(|(.., other)| other.uuid == label.uuid);
        if cutting || self.keeper.manifest.has_uuid(&label.uuid) {
            return Err(CommandError::Exists);
        }
        Ok(())
    }

    fn check_size(units: u64, block_size: u32) -> Outcome {
        if !matches!(block_size, 512 | 4096) {
            return Err(CommandError::Invalid("a block has 512 or 4,096 bytes"));
        }
        if units == 0
            || units > VOLUME_UNITS_MAX
            || !units.is_multiple_of(u64::from(block_size / crate::UNIT))
        {
            return Err(CommandError::Invalid(
                "a volume has at least one block, whole blocks, and at most 1 EiB",
            ));
        }
        Ok(())
    }

    /// Creates a volume, whose timeline is the next one.
    fn create_volume(&mut self, tag: Tag, volume: Volume, origin: Content) -> Outcome {
        let Volume { units, block_size, is_thick, timeline, .. } = volume;
        self.check_label(&volume.label)?;
        Self::check_size(units, block_size)?;
        let (shift, base) = match &origin {
            Content::Empty => (timeline.0 as u8 % PARTITIONS as u8, None),
            Content::Foreign(foreign) if foreign.units > units => return Err(SMALLER_THAN_BASE),
            Content::Foreign(foreign) => {
                (timeline.0 as u8 % PARTITIONS as u8, Some(Base::Foreign(foreign.clone())))
            }
            Content::Snapshot(id) => {
                let snapshot = self.find(*id)?;
                if snapshot.units > units {
                    return Err(SMALLER_THAN_BASE);
                }
                if snapshot.block_size > block_size {
                    return Err(SMALLER_BLOCKS);
                }
                let cut =
                    snapshot.cut.ok_or(CommandError::WrongKind("the base of a volume is a snapshot"))?;
                let of = snapshot.timeline;
                (self.keeper.manifest.timelines[&of].shift, Some(Base::View { timeline: of, cut }))
            }
        };
        if self.keeper.manifest.next_volume == u32::MAX {
            return Err(CommandError::Invalid("the pool has had four billion volumes"));
        }
        if is_thick {
            let Volume { label, when_full, .. } = volume.clone();
            let command = Command::Create { label, units, block_size, origin, when_full, is_thick };
            if self.check_reservation(tag, &command)?.is_none() {
                return Ok(());
            }
        }
        self.begin_timeline(timeline, Timeline { shift, base });
        let id = self.add_volume(volume);
        if is_thick {
            self.count_timeline(timeline, Counting::Zero);
        }
        self.keeper.commit(Then::Answer(tag, Answer::Volume(id)));
        Ok(())
    }

    fn begin_timeline(&mut self, id: TimelineId, timeline: Timeline) {
        let base = timeline.base.clone();
        self.keeper.edit(Edit::Timeline { id, timeline });
        self.histories.update(id, &self.keeper.manifest);
        if let Some(Base::View { timeline, .. }) = base {
            self.histories.update(timeline, &self.keeper.manifest);
        }
    }

    fn add_volume(&mut self, volume: Volume) -> VolumeId {
        let id = VolumeId(self.keeper.manifest.next_volume);
        let timeline = volume.timeline;
        self.keeper.edit(Edit::Volume { id, volume });
        self.histories.update(timeline, &self.keeper.manifest);
        self.runtimes.insert(id, Runtime::default());
        id
    }

    pub(crate) fn change_volume(&mut self, id: VolumeId, tag: Tag, change: impl FnOnce(&mut Volume)) {
        let mut volume = self.keeper.manifest.volumes[&id].clone();
        change(&mut volume);
        let timeline = volume.timeline;
        self.keeper.edit(Edit::Volume { id, volume });
        self.follow_timeline(timeline);
        self.keeper.commit(Then::Answer(tag, Answer::Done));
    }

    pub(crate) fn check_free(&self, id: VolumeId) -> Outcome {
        let is_cut = self.admin.cuts.iter().flat_map(|cutting| &cutting.of).any(|(of, ..)| *of == id);
        if is_cut || self.admin.running.contains_key(&id) || self.tasks.has(id) {
            Err(CommandError::Busy)
        } else {
            Ok(())
        }
    }

    /// Runs a command when the requests of its volume have ended; new ones wait.
    fn hold(&mut self, id: VolumeId, tag: Tag, command: Command) -> Outcome {
        self.find(id)?;
        self.check_free(id)?;
        self.admin.running.insert(id, (tag, command));
        let runtime = self.runtimes.get_mut(&id).expect("the volume exists");
        runtime.is_held = true;
        if runtime.in_flight == 0 {
            self.drained(id);
        }
        Ok(())
    }

    /// The requests of a held volume have ended.
    pub(crate) fn drained(&mut self, id: VolumeId) {
        let (tag, command) = self.admin.running.get(&id).cloned().expect("a command holds the volume");
        match command {
            Command::Delete(_) => {
                let volume = self.keeper.manifest.volumes[&id].timeline;
                self.keeper.edit(Edit::VolumeGone { id });
                self.collect_timelines(volume);
                self.keeper.commit(Then::Answer(tag, Answer::Done));
                self.release(id);
                self.runtimes.remove(&id);
            }
            Command::Freeze(_) => {
                // All writes of the volume have been answered, so they can be read.
                let cut = std::array::from_fn(|number| self.partitions[number].readable());
                self.change_volume(id, tag, |volume| (volume.cut, volume.is_thick) = (Some(cut), false));
                let timeline = self.keeper.manifest.volumes[&id].timeline;
                self.histories.update(timeline, &self.keeper.manifest);
                self.release(id);
            }
            Command::Resize { units, .. } => {
                let old = self.keeper.manifest.volumes[&id].units;
                self.begin(Origin::Command, id, Op::Zero, (units, old - units), Sgl::EMPTY, false);
            }
            Command::Revert { .. } | Command::Adopt { .. } => {
                let changed = match command {
                    Command::Adopt { from, .. } => self.adopt(tag, id, from),
                    Command::Revert { snapshot, .. } => self.revert(tag, id, snapshot),
                    _ => unreachable!("the pattern has these"),
                };
                if let Err(error) = changed {
                    self.out.command_replies.push_back(CommandReply { tag, result: Err(error) });
                }
                self.release(id);
            }
            _ => unreachable!("no other command holds a volume"),
        }
    }

    /// The request of a command that holds its volume has ended.
    pub(crate) fn command_request_ended(&mut self, id: VolumeId, status: Status) {
        let (tag, command) = self.admin.running.get(&id).cloned().expect("a command holds the volume");
        let Command::Resize { units, .. } = command else { unreachable!("only a resize has requests") };
        if status == Status::Ok {
            self.change_volume(id, tag, |volume| volume.units = units);
        } else {
            let error = if status == Status::NoSpace { CommandError::NoSpace } else { CommandError::Medium };
            self.out.command_replies.push_back(CommandReply { tag, result: Err(error) });
        }
        self.release(id);
    }

    /// A command no longer holds its volume: the requests that waited go on.
    fn release(&mut self, id: VolumeId) {
        self.admin.running.remove(&id);
        let runtime = self.runtimes.get_mut(&id).expect("the volume was held");
        runtime.is_held = false;
        for request in std::mem::take(&mut runtime.held) {
            self.start(request);
        }
    }

    fn resize(&mut self, tag: Tag, id: VolumeId, units: u64) -> Outcome {
        let volume = self.find(id)?;
        if volume.cut.is_some() {
            return Err(CommandError::WrongKind("a snapshot keeps its size"));
        }
        Self::check_size(units, volume.block_size)?;
        let old = volume.units;
        if units < old {
            return self.hold(id, tag, Command::Resize { volume: id, units });
        }
        self.check_free(id)?;
        if self.check_reservation(tag, &Command::Resize { volume: id, units })?.is_some() {
            self.change_volume(id, tag, |volume| volume.units = units);
        }
        Ok(())
    }

    fn next_timeline(&self) -> Result<TimelineId, CommandError> {
        match self.keeper.manifest.next_timeline {
            u32::MAX => Err(CommandError::Invalid("the pool has had four billion volumes")),
            next => Ok(TimelineId(next)),
        }
    }

    fn revert(&mut self, tag: Tag, id: VolumeId, snapshot: VolumeId) -> Outcome {
        let source = self.find(snapshot)?.clone();
        let mut volume = self.find(id)?.clone();
        let cut = source.cut.ok_or(CommandError::NotFound)?;
        if volume.is_thick {
            // Others may have taken the space while requests of the volume ended.
            let size = |units| thick_units(units, self.settings.shard) as i64;
            self.check_unreserved(size(source.units) - size(volume.units))?;
        }
        let old = std::mem::replace(&mut volume.timeline, self.next_timeline()?);
        let is_thick = volume.is_thick;
        volume.units = source.units;
        let shift = self.keeper.manifest.timelines[&source.timeline].shift;
        let base = Some(Base::View { timeline: source.timeline, cut });
        let timeline = volume.timeline;
        self.begin_timeline(timeline, Timeline { shift, base });
        self.keeper.edit(Edit::Volume { id, volume });
        self.histories.update(timeline, &self.keeper.manifest);
        if is_thick {
            self.count_timeline(timeline, Counting::Zero);
        }
        self.collect_timelines(old);
        self.keeper.commit(Then::Answer(tag, Answer::Done));
        Ok(())
    }

    fn check_adoption(&self, volume: VolumeId, from: VolumeId) -> Outcome {
        let (target, source) = (self.find(volume)?, self.find(from)?);
        if target.cut.is_some() || source.cut.is_some() || volume == from {
            return Err(CommandError::WrongKind("a volume gets the content of another volume"));
        }
        if (target.units, target.block_size) != (source.units, source.block_size) {
            return Err(CommandError::Invalid("the volumes have different sizes"));
        }
        self.check_free(from)?;
        let is_busy = self.runtimes.get(&from).is_some_and(|runtime| runtime.in_flight > 0);
        if is_busy { Err(CommandError::Busy) } else { Ok(()) }
    }

    fn adopt(&mut self, tag: Tag, id: VolumeId, from: VolumeId) -> Outcome {
        self.check_adoption(id, from)?;
        let timeline = self.find(from)?.timeline;
        let mut volume = self.find(id)?.clone();
        let old = std::mem::replace(&mut volume.timeline, timeline);
        self.keeper.edit(Edit::Volume { id, volume });
        self.keeper.edit(Edit::VolumeGone { id: from });
        self.runtimes.remove(&from);
        self.histories.update(timeline, &self.keeper.manifest);
        self.follow_timeline(timeline);
        self.collect_timelines(old);
        self.keeper.commit(Then::Answer(tag, Answer::Done));
        Ok(())
    }

    /// Views of a timeline have gone. Ends it if it has none, and then what only it was based on.
    pub(crate) fn collect_timelines(&mut self, first: TimelineId) {
        let mut next = Some(first);
        while let Some(id) = next.take() {
            let manifest = &self.keeper.manifest;
            if !manifest.is_live(id) && manifest.cuts_of(id).next().is_none() {
                if let Some(Base::View { timeline, .. }) = &manifest.timelines[&id].base {
                    next = Some(*timeline);
                }
                self.keeper.edit(Edit::TimelineGone { id });
            }
            self.histories.update(id, &self.keeper.manifest);
            self.follow_timeline(id);
            self.forget_own(id);
        }
        self.jobs.stale = [true; PARTITIONS];
        self.note_deleted();
    }

    /// Takes snapshots at this instant.
    fn cut(&mut self, tag: Tag, of: Vec<(VolumeId, Label)>) -> Outcome {
        for (at, (id, label)) in of.iter().enumerate() {
            if self.find(*id)?.cut.is_some() {
                return Err(CommandError::WrongKind("a snapshot is taken of a volume"));
            }
            if self.admin.running.contains_key(id) {
                return Err(CommandError::Busy);
            }
            self.check_label(label)?;
            if of[..at].iter().any(|(_, other)| other.name == label.name || other.uuid == label.uuid) {
                return Err(CommandError::Exists);
            }
        }
        if of.is_empty() {
            return Err(CommandError::Invalid("no volume was named"));
        }
        let command = Command::Snapshot(of);
        if self.check_reservation(tag, &command)?.is_none() {
            return Ok(());
        }
        let Command::Snapshot(of) = command else { unreachable!("made above") };
        let cut: Cut = std::array::from_fn(|number| self.partitions[number].now());
        let timeline = |id| self.keeper.manifest.volumes[&id].timeline;
        let of: Vec<_> = of.into_iter().map(|(id, label)| (id, timeline(id), label)).collect();
        for (_, timeline, _) in &of {
            self.histories.begin_cut(*timeline, cut, &self.keeper.manifest);
            if self.keeper.manifest.own.contains_key(timeline) {
                // All that it has is the snapshot's, too.
                self.count_timeline(*timeline, Counting::Zero);
            }
        }
        self.admin.cuts.push_back(Cutting { tag, cut, of });
        self.cut_written();
        Ok(())
    }

    /// More writes are done: makes the edits of snapshots that waited for them.
    pub(crate) fn cut_written(&mut self) {
        while let Some(cutting) = self.admin.cuts.front() {
            let is_written = |(partition, cut): (&crate::partition::Partition, &crate::Commit)| {
                partition.readable >= cut.get()
            };
            if !self.partitions.iter().zip(&cutting.cut).all(is_written) {
                return;
            }
            let Cutting { tag, cut, of } = self.admin.cuts.pop_front().expect("not empty");
            let mut ids = Vec::new();
            for (id, timeline, label) in of {
                let of = self.keeper.manifest.volumes[&id].clone();
                let volume = Volume { label, cut: Some(cut), is_thick: false, timeline, ..of };
                ids.push(self.add_volume(volume));
                self.histories.end_cut(timeline, &cut, &self.keeper.manifest);
            }
            self.keeper.commit(Then::Answer(tag, Answer::Volumes(ids)));
        }
    }

    /// Ends all commands under way: nothing can be written any more.
    pub(crate) fn fail_commands(&mut self) {
        for Cutting { tag, cut, of } in std::mem::take(&mut self.admin.cuts) {
            for (_, timeline, _) in of {
                self.histories.end_cut(timeline, &cut, &self.keeper.manifest);
            }
            self.out.command_replies.push_back(CommandReply { tag, result: Err(CommandError::Medium) });
        }
        for tag in self.reserves.drain().collect::<Vec<_>>() {
            self.out.command_replies.push_back(CommandReply { tag, result: Err(CommandError::Medium) });
        }
        for tag in self.tasks.drain() {
            self.out.command_replies.push_back(CommandReply { tag, result: Err(CommandError::Medium) });
        }
        while let Some((id, (tag, _))) = self.admin.running.pop_first() {
            self.out.command_replies.push_back(CommandReply { tag, result: Err(CommandError::Medium) });
            self.release(id);
        }
    }
}
