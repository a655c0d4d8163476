//! The manifest: all that a pool knows besides its data, its index and the tail of its log. Any context.
//!
//! A manifest is the result of its edits in order. A checkpoint is a list of edits, too: those that make the manifest from an
//! empty one (`edit.rs`). In memory the manifest is always that of all edits handed to the store, whether or not they are durable
//! yet.

use crate::{Cut, Foreign, OpenError, Shard, StoreFacts, Volume, VolumeId};
use aryk_volume_index::{BlobId, Commit, Run, RunId, TimelineId};
use std::collections::{BTreeMap, BTreeSet, HashSet};

mod blobs;
pub(crate) mod checkpoint;
pub(crate) mod edit;

pub(crate) use blobs::Blobs;
pub(crate) use edit::{Counting, Edit};

/// What an absent block of a timeline reads as.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Base {
    /// A view of another timeline.
    View { timeline: TimelineId, cut: Cut },
    /// A disk of the caller.
    Foreign(Foreign),
}

/// One history of writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Timeline {
    /// By how many partitions its stripes are shifted. That of its base, so that both are in the same partitions.
    pub(crate) shift: u8,
    pub(crate) base: Option<Base>,
}

/// What a blob holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlobKind {
    /// Frames of the log.
    Log,
    /// Frames of the cleaner and of compaction.
    Data,
    /// Runs.
    Index,
}

/// A blob in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Blob {
    pub(crate) kind: BlobKind,
    /// Which of the blob's lives: never used again.
    pub(crate) life: u64,
    /// Units to which the levels refer; for an index blob, units of their runs.
    pub(crate) live: i64,
}

/// The index of a partition, as far as it is durable.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct PartitionLevels {
    /// Writes up to this commit are in the levels.
    pub(crate) flushed: u64,
    /// Newest first; the runs of each by key.
    pub(crate) levels: Vec<Vec<Run>>,
}

/// Where the tail of the log begins.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct LogTail {
    /// The sequence of the first frame that is not flushed.
    pub(crate) sequence: u64,
    /// The unit at which that frame begins, in the first blob.
    pub(crate) unit: u32,
    /// The blobs of the log, in the order of their use.
    pub(crate) blobs: Vec<BlobId>,
}

/// Who shows a timeline: a volume or snapshot, or a timeline of which it is the base.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum User {
    Volume(VolumeId),
    Clone(TimelineId),
}

/// The volumes, snapshots and clones that show a timeline.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Users {
    volumes: BTreeSet<VolumeId>,
    clones: BTreeSet<TimelineId>,
    /// How many of the volumes show its newest state.
    live: u32,
}

/// All that a pool knows besides its data, its index and the tail of its log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Manifest {
    pub(crate) uuid: [u8; 16],
    pub(crate) alignment: u32,
    pub(crate) blob_units: u32,
    /// How often the pool was opened: the high half of lives and of names of runs, so that none is used twice.
    pub(crate) opening: u32,
    pub(crate) next_timeline: u32,
    pub(crate) next_volume: u32,
    pub(crate) timelines: BTreeMap<TimelineId, Timeline>,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    pub(crate) partitions: Vec<PartitionLevels>,
    pub(crate) blobs: Blobs,
    pub(crate) log: LogTail,
    /// What the caller has stored about the pool.
    pub(crate) note: Vec<u8>,
    /// The counted units of timelines, by partition: of those that thick volumes show. `None` where they are not known.
    pub(crate) own: BTreeMap<TimelineId, [Option<u64>; crate::PARTITIONS]>,
    /// Live volumes that are thick.
    pub(crate) thick: BTreeSet<VolumeId>,
    /// Entries of all runs. It wraps around on numbers that no pool has, which a damaged manifest may have.
    pub(crate) entries: u64,
    users: BTreeMap<TimelineId, Users>,
    names: BTreeMap<String, VolumeId>,
    uuids: BTreeSet<([u8; 16], VolumeId)>,
}

impl Manifest {
    /// The size of the largest volume or snapshot that shows a timeline, itself or as a base at any depth.
    pub(crate) fn units_that_show(&self, timeline: TimelineId) -> u64 {
        let mut shows = HashSet::from([timeline]);
        // A base is older than what depends on it.
        for (&id, above) in self.timelines.range(timeline..) {
            if matches!(&above.base, Some(Base::View { timeline, .. }) if shows.contains(timeline)) {
                shows.insert(id);
            }
        }
        let volumes = self.volumes.values().filter(|volume| shows.contains(&volume.timeline));
        volumes.map(|volume| volume.units).max().unwrap_or(0)
    }

    /// The manifest of a pool that has nothing.
    pub(crate) fn new(uuid: [u8; 16], facts: &StoreFacts) -> Self {
        Self {
            uuid,
            alignment: facts.alignment,
            blob_units: facts.blob_units,
            opening: 0,
            next_timeline: 0,
            next_volume: 0,
            timelines: BTreeMap::new(),
            volumes: BTreeMap::new(),
            partitions: vec![PartitionLevels::default(); crate::PARTITIONS],
            blobs: Blobs::new(facts.blob_units),
            log: LogTail::default(),
            note: Vec::new(),
            own: BTreeMap::new(),
            thick: BTreeSet::new(),
            entries: 0,
            users: BTreeMap::new(),
            names: BTreeMap::new(),
            uuids: BTreeSet::new(),
        }
    }

    /// Makes the change of an edit. An error says why the edit does not fit; the manifest may then have a part of it.
    pub(crate) fn apply(&mut self, edit: Edit) -> Result<(), OpenError> {
        match edit {
            Edit::Opened { opening } => self.opening = opening,
            Edit::Timeline { id, timeline } => {
                self.next_timeline = self.next_timeline.max(following(id.0)?);
                self.set_timeline(id, Some(timeline));
            }
            Edit::TimelineGone { id } => {
                let old = self.set_timeline(id, None);
                old.ok_or(OpenError::Damaged("a timeline ends that does not exist"))?;
            }
            Edit::Volume { id, volume } => {
                self.next_volume = self.next_volume.max(following(id.0)?);
                self.set_volume(id, Some(volume));
            }
            Edit::VolumeGone { id } => {
                let old = self.set_volume(id, None);
                old.ok_or(OpenError::Damaged("a volume ends that does not exist"))?;
            }
            Edit::Counters { next_timeline, next_volume } => {
                self.next_timeline = self.next_timeline.max(next_timeline);
                self.next_volume = self.next_volume.max(next_volume);
            }
            Edit::Flushed { partition, flushed, runs } => {
                self.count_runs(&runs, 1)?;
                let levels = &mut self.partitions[usize::from(partition)];
                levels.flushed = levels.flushed.max(flushed);
                if !runs.is_empty() {
                    levels.levels.insert(0, runs);
                }
            }
            Edit::Merged { partition, first, count, runs } => self.merge(partition, first, count, runs)?,
            Edit::Blob { id, blob } => {
                if !self.blobs.insert(id, blob) {
                    return Err(OpenError::Damaged("a blob begins twice"));
                }
            }
            Edit::Live { id, change } => self.change_live(id, change)?,
            Edit::BlobGone { id } => {
                self.blobs.remove(id).ok_or(OpenError::Damaged("a blob ends that does not exist"))?;
            }
            Edit::Log(log) => self.log = log,
            Edit::Note(note) => self.note = note,
            Edit::Counted { id, counting } => {
                let units = match counting {
                    Counting::No => None,
                    Counting::Unknown => Some([None; crate::PARTITIONS]),
                    Counting::Zero => Some([Some(0); crate::PARTITIONS]),
                };
                match units {
                    None => drop(self.own.remove(&id)),
                    Some(_) if !self.timelines.contains_key(&id) => {
                        return Err(OpenError::Damaged("a timeline is counted that does not exist"));
                    }
                    Some(units) => drop(self.own.insert(id, units)),
                }
            }
            Edit::Own { id, partition, units } => {
                let own = self.own.get_mut(&id);
                let own = own.ok_or(OpenError::Damaged("a timeline has units that is not counted"))?;
                own[usize::from(partition)] = units;
            }
            Edit::Continued => {}
        }
        Ok(())
    }

    /// Whether software that does not know thick volumes cannot read the manifest.
    pub(crate) fn is_about_thick(&self) -> bool {
        !self.thick.is_empty() || !self.own.is_empty()
    }

    /// Whether a thick volume shows the newest state of a timeline.
    pub(crate) fn is_thick(&self, id: TimelineId) -> bool {
        let users = self.users.get(&id);
        users.is_some_and(|users| users.volumes.iter().any(|id| self.thick.contains(id)))
    }

    /// Units that are reserved for a thick volume, beyond those that it has for itself.
    pub(crate) fn reserved_units(&self, volume: &Volume, shard: Shard) -> u64 {
        let own = self.own.get(&volume.timeline).map_or(0, |own| own.iter().flatten().sum());
        thick_units(volume.units, shard).saturating_sub(own)
    }

    /// Changes a timeline, or ends it. Returns the old one.
    fn set_timeline(&mut self, id: TimelineId, new: Option<Timeline>) -> Option<Timeline> {
        if let Some(Base::View { timeline, .. }) = new.as_ref().and_then(|new| new.base.as_ref()) {
            self.users.entry(*timeline).or_default().clones.insert(id);
        }
        let base_of = |timeline: &Timeline| match timeline.base {
            Some(Base::View { timeline, .. }) => Some(timeline),
            _ => None,
        };
        let base = new.as_ref().and_then(base_of);
        let old = match new {
            Some(new) => self.timelines.insert(id, new),
            None => {
                self.own.remove(&id);
                self.timelines.remove(&id)
            }
        };
        if let Some(before) = old.as_ref().and_then(base_of).filter(|before| base != Some(*before)) {
            self.change_users(before, |users| {
                users.clones.remove(&id);
            });
        }
        old
    }

    /// Changes a volume, or ends it. Returns the old one.
    fn set_volume(&mut self, id: VolumeId, new: Option<Volume>) -> Option<Volume> {
        let old = self.volumes.remove(&id);
        if let Some(old) = &old {
            self.change_users(old.timeline, |users| {
                users.volumes.remove(&id);
                users.live -= u32::from(old.cut.is_none());
            });
            if self.names.get(&old.label.name) == Some(&id) {
                self.names.remove(&old.label.name);
            }
            self.uuids.remove(&(old.label.uuid, id));
            self.thick.remove(&id);
        }
        if let Some(new) = new {
            let users = self.users.entry(new.timeline).or_default();
            users.volumes.insert(id);
            users.live += u32::from(new.cut.is_none());
            self.names.insert(new.label.name.clone(), id);
            self.uuids.insert((new.label.uuid, id));
            if new.is_thick {
                self.thick.insert(id);
            }
            self.volumes.insert(id, new);
        }
        old
    }

    fn change_users(&mut self, id: TimelineId, change: impl FnOnce(&mut Users)) {
        if let Some(users) = self.users.get_mut(&id) {
            change(users);
            if users.volumes.is_empty() && users.clones.is_empty() {
                self.users.remove(&id);
            }
        }
    }

    /// The volume or snapshot of this name.
    pub(crate) fn named(&self, name: &str) -> Option<VolumeId> {
        self.names.get(name).copied()
    }

    /// Whether a volume or snapshot has this UUID.
    pub(crate) fn has_uuid(&self, uuid: &[u8; 16]) -> bool {
        let next = self.uuids.range((*uuid, VolumeId(0))..).next();
        next.is_some_and(|(found, _)| found == uuid)
    }

    fn merge(&mut self, partition: u8, first: u32, count: u32, runs: Vec<Run>) -> Result<(), OpenError> {
        self.count_runs(&runs, 1)?;
        let levels = &mut self.partitions[usize::from(partition)].levels;
        let (first, count) = (first as usize, count as usize);
        let end = first.checked_add(count).filter(|&end| count > 0 && end <= levels.len());
        let end = end.ok_or(OpenError::Damaged("levels are merged that do not exist"))?;
        let old: Vec<_> = levels.drain(first..end).collect();
        if !runs.is_empty() {
            levels.insert(first, runs);
        }
        old.iter().try_for_each(|runs| self.count_runs(runs, -1))
    }

    /// Counts the pages of runs that are added (1) or removed (−1) as live units of their blobs.
    fn count_runs(&mut self, runs: &[Run], sign: i64) -> Result<(), OpenError> {
        for run in runs {
            self.change_live(run.place.blob, sign * run_units(run))?;
            let entries = run.shape.entries;
            self.entries = if sign > 0 {
                self.entries.wrapping_add(entries)
            } else {
                self.entries.wrapping_sub(entries)
            };
        }
        Ok(())
    }

    fn change_live(&mut self, id: BlobId, change: i64) -> Result<(), OpenError> {
        let is_possible = self.blobs.change_live(id, change);
        is_possible
            .then_some(())
            .ok_or(OpenError::Damaged("a blob is used that does not exist, or a count is too large"))
    }

    /// The cuts of all frozen views of a timeline: snapshots, and bases of clones.
    pub(crate) fn cuts_of(&self, id: TimelineId) -> impl Iterator<Item = &Cut> {
        self.views_of(id).filter_map(|(_, cut)| cut)
    }

    /// All views of a timeline; without a cut, it is the newest state.
    pub(crate) fn views_of(&self, id: TimelineId) -> impl Iterator<Item = (User, Option<&Cut>)> {
        let users = self.users.get(&id);
        let volumes = users.into_iter().flat_map(|users| &users.volumes);
        let volumes = volumes.map(|id| (User::Volume(*id), self.volumes[id].cut.as_ref()));
        let clones = users.into_iter().flat_map(|users| &users.clones);
        volumes.chain(clones.filter_map(|id| match &self.timelines[id].base {
            Some(Base::View { cut, .. }) => Some((User::Clone(*id), Some(cut))),
            _ => None,
        }))
    }

    /// Whether a volume shows the newest state of a timeline.
    pub(crate) fn is_live(&self, id: TimelineId) -> bool {
        self.users.get(&id).is_some_and(|users| users.live > 0)
    }

    /// The largest name of a run, if there are runs.
    pub(crate) fn newest_run(&self) -> Option<RunId> {
        self.partitions.iter().flat_map(|partition| partition.levels.iter().flatten()).map(|run| run.id).max()
    }
}

/// The units of a run in its blob.
pub(crate) const fn run_units(run: &Run) -> i64 {
    run.shape.pages as i64 * aryk_volume_index::PAGE_UNITS as i64
}

/// Units that the data of a volume of this size can take in a shard.
pub(crate) const fn thick_units(units: u64, shard: Shard) -> u64 {
    shard.own_units(units.next_multiple_of(crate::BLOCK_UNITS as u64))
}

fn following(id: u32) -> Result<u32, OpenError> {
    id.checked_add(1).ok_or(OpenError::Damaged("an identifier is too large"))
}

/// A commit that was read from a disk.
pub(crate) fn commit(number: u64) -> Result<Commit, OpenError> {
    Commit::new(number).ok_or(OpenError::Damaged("a commit is too large"))
}

#[cfg(test)]
mod tests;
