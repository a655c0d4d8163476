//! Space that is reserved for thick volumes, and what it leaves to all others. Any context.
//!
//! The pool has room for [`Stats::usable_bytes`](crate::Stats) of data, with which it can be written at random for ever: what
//! overwriting costs (dead data, headers, the index) is in the rest. A thick volume reserves units for its size, less those that
//! its live view has for itself: versions that are newer than the newest snapshot of its history. These may be replaced without
//! needing more space in the end, so they pay for themselves; what a snapshot shares does not, because the snapshot keeps it.
//! So *data and reservations together never exceed the room*: all that takes space is compared with it first, but writes to thick
//! volumes, for which the comparison was made when the space was reserved.
//!
//! What is alive is known too high: versions that newer ones have replaced count until both are merged. So a comparison that
//! fails is repeated after a *recount*: a flush, and merges of all levels. These also find out what thick volumes have for
//! themselves, where that is not known: after a volume has become thick, or a snapshot of it was deleted. Until then it counts
//! as nothing, so that too much is reserved, never too little.
//!
//! A write that would exceed the room waits for the recount apart from the ring of waiting volumes, so that it holds up no thick
//! volume. After a recount, the next one is due when something was deleted, or [`Pool::quantum`] was written or discarded:
//! otherwise each block that is overwritten in a full pool would cost a recount. Until then the pool is full for all but thick
//! volumes.

use crate::active::Op;
use crate::keeper::Then;
use crate::manifest::{Counting, Edit, thick_units};
use crate::pool::Pool;
use crate::{
    BLOCK_UNITS, Command, CommandError, PARTITIONS, Status, Tag, TimelineId, UNIT, Volume, VolumeId, WhenFull,
};
use aryk_slots::Key;
use aryk_volume_index::{Commit, Owned};
use std::collections::{BTreeMap, VecDeque};

/// A recount is due when so much of the room was written since the one before.
const QUANTUM_SHARE: u64 = 64;

/// At least so many units.
const QUANTUM_MIN: u64 = (256 << 10) / UNIT as u64;

/// Where a recount is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Recount {
    #[default]
    None,
    /// The flush with this number comes first.
    Flush(u64),
    /// Then levels are merged.
    Merge,
}

/// What waits for space beside reservations, and what is known of it.
#[derive(Debug, Default)]
pub(crate) struct Reserves {
    /// Units that are reserved beyond what thick volumes have for themselves.
    units: u64,
    /// The number of changes of what is counted, and that of the latest of each timeline.
    generation: u64,
    counted_at: BTreeMap<TimelineId, u64>,
    recount: Recount,
    /// Units that were written or discarded ([`Reserves::changed`]) before the latest recount, if nothing was deleted since.
    recounted: Option<u64>,
    /// Units that were written or discarded.
    changed: u64,
    /// Volumes whose changes wait for space that is not reserved. They are in no ring.
    pub(crate) parked: VecDeque<VolumeId>,
    /// Commands that wait for a recount.
    commands: VecDeque<(Tag, Command)>,
    /// An inflation waits for space.
    is_copy_waiting: bool,
    /// Units that inflations have copied and that no flush has added to the levels.
    pub(crate) copied_units: u64,
}

impl Reserves {
    /// Whether nothing waits, and no recount runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.recount == Recount::None && self.commands.is_empty()
    }

    /// Commands that wait; they end.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Tag> + use<> {
        std::mem::take(&mut self.commands).into_iter().map(|(tag, _)| tag)
    }

    /// The moment of a job's beginning.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation
    }
}

impl Pool {
    /// Units of data that the pool has room for.
    fn room_units(&self) -> u64 {
        self.usable_bytes() / u64::from(UNIT)
    }

    /// Units that are free or become free when what was replaced is merged, and that nothing has reserved. Too few rather than
    /// too many; negative if thick volumes have replaced what was not merged since.
    fn unreserved_units(&self) -> i64 {
        let log = &self.log;
        let fresh =
            (self.unflushed_bytes() + log.queued_bytes) / u64::from(UNIT) + self.reserves.copied_units;
        self.room_units() as i64
            - self.keeper.manifest.blobs.data_live()
            - fresh as i64
            - self.reserves.units as i64
    }

    /// Bytes that are reserved beyond what thick volumes have for themselves.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserves.units * u64::from(UNIT)
    }

    /// Units after whose change another recount is worth it.
    fn quantum(&self) -> u64 {
        (self.room_units() / QUANTUM_SHARE).max(QUANTUM_MIN)
    }

    /// Volumes, their sizes, or what they have for themselves have changed.
    pub(crate) fn count_reserved(&mut self) {
        let (manifest, shard) = (&self.keeper.manifest, self.settings.shard);
        self.reserves.units =
            manifest.thick.iter().map(|id| manifest.reserved_units(&manifest.volumes[id], shard)).sum();
    }

    /// Changes how the units of a timeline are counted. Jobs that run say nothing about it from now on.
    pub(crate) fn count_timeline(&mut self, id: TimelineId, counting: Counting) {
        self.reserves.generation += 1;
        if counting == Counting::No {
            self.reserves.counted_at.remove(&id);
        } else {
            self.reserves.counted_at.insert(id, self.reserves.generation);
        }
        self.keeper.edit(Edit::Counted { id, counting });
        self.count_reserved();
    }

    /// The users of a timeline have changed: it is counted from now on if a thick volume shows it, or no longer.
    pub(crate) fn follow_timeline(&mut self, id: TimelineId) {
        let manifest = &self.keeper.manifest;
        let (is_thick, is_counted) = (manifest.is_thick(id), manifest.own.contains_key(&id));
        match (is_thick, is_counted) {
            (true, false) => self.count_timeline(id, Counting::Unknown),
            (false, true) => self.count_timeline(id, Counting::No),
            (false, false) => {
                self.reserves.counted_at.remove(&id);
                self.count_reserved();
            }
            (true, true) => self.count_reserved(),
        }
    }

    /// The pool is open: what is counted is what thick volumes show.
    pub(crate) fn follow_timelines(&mut self) {
        let manifest = &self.keeper.manifest;
        let shown = manifest.thick.iter().map(|id| manifest.volumes[id].timeline);
        let all: Vec<_> = shown.chain(manifest.own.keys().copied()).collect();
        all.into_iter().for_each(|id| self.follow_timeline(id));
    }

    /// The index is made anew.
    pub(crate) fn forget_all_own(&mut self) {
        let all: Vec<_> = self.keeper.manifest.own.keys().copied().collect();
        all.into_iter().for_each(|id| self.forget_own(id));
    }

    /// A view of a timeline has gone: its volume may have more for itself.
    pub(crate) fn forget_own(&mut self, id: TimelineId) {
        if self.keeper.manifest.own.contains_key(&id) {
            self.count_timeline(id, Counting::Unknown);
        }
    }

    /// Timelines that are counted in a partition, with the newest frozen view of each.
    pub(crate) fn counted(&self, partition: usize) -> BTreeMap<TimelineId, Commit> {
        let newest = |id| self.histories.get(id).map_or(Commit::ZERO, |history| history.kept[partition]);
        self.keeper.manifest.own.keys().map(|&id| (id, newest(id))).collect()
    }

    /// Whether a job that began at this generation says nothing about a timeline: how that is counted has changed since.
    pub(crate) fn is_old(&self, id: TimelineId, begun: u64) -> bool {
        self.reserves.counted_at.get(&id).is_some_and(|at| *at > begun)
    }

    /// A job that began at this generation has counted a partition: `is_all`, all of its levels.
    pub(crate) fn note_owned(
        &mut self,
        partition: usize,
        begun: u64,
        owned: impl IntoIterator<Item = (TimelineId, Owned)>,
        is_all: bool,
    ) {
        for (id, Owned { total, change }) in owned {
            // What an old job has flushed or left out is older than the newest snapshot, or was never counted.
            let Some(own) = self.keeper.manifest.own.get(&id).filter(|_| !self.is_old(id, begun)) else {
                continue;
            };
            let old = own[partition];
            let new = if is_all {
                Some(total.max(0).unsigned_abs())
            } else {
                old.map(|old| old.saturating_add_signed(change))
            };
            if new != old {
                self.keeper.edit(Edit::Own { id, partition: partition as u8, units: new });
            }
        }
        self.count_reserved();
    }

    /// Units that a change takes, unless they are reserved.
    fn unreserved_cost(&self, key: Key) -> u64 {
        if self.keeper.manifest.thick.is_empty() {
            return 0;
        }
        let request = self.requests.get(key).expect("the change is under way");
        if self.keeper.manifest.thick.contains(&request.volume) {
            return 0;
        }
        let blocks = match request.op {
            Op::Write => request.end_block() - request.first_block(),
            _ => request.edge_blocks().iter().flatten().count() as u64,
        };
        blocks * u64::from(BLOCK_UNITS)
    }

    /// Whether a change has space that is not reserved for others, or needs none.
    pub(crate) fn has_unreserved(&self, key: Key) -> bool {
        let cost = self.unreserved_cost(key);
        cost == 0 || self.reserves.parked.is_empty() && cost as i64 <= self.unreserved_units()
    }

    /// Whether the first change that waits for unreserved space can have it.
    fn can_unpark(&self) -> bool {
        let cost = self.reserves.parked.front().map(|id| {
            let key = self.runtimes[id].queue.front().expect("a volume that waits has a request");
            self.unreserved_cost(*key)
        });
        cost.is_some_and(|cost| cost as i64 <= self.unreserved_units())
    }

    /// Whether a change takes no space that others could have reserved.
    pub(crate) fn is_free_of_cost(&self, key: Key) -> bool {
        self.unreserved_cost(key) == 0
    }

    /// Notes what a change that was admitted writes or discards.
    pub(crate) fn note_changed(&mut self, units: u64) {
        self.reserves.changed += units;
    }

    /// Whether an inflation may copy so many blocks. If not, it waits.
    pub(crate) fn may_copy(&mut self, volume: VolumeId, blocks: u32) -> bool {
        let manifest = &self.keeper.manifest;
        let is_reserved = manifest.thick.contains(&volume)
            && manifest.cuts_of(manifest.volumes[&volume].timeline).next().is_none();
        let units = i64::from(blocks * BLOCK_UNITS);
        let may = manifest.thick.is_empty() || is_reserved || units <= self.unreserved_units();
        self.reserves.is_copy_waiting = !may;
        may
    }

    /// Something was deleted: a recount may find space.
    pub(crate) const fn note_deleted(&mut self) {
        self.reserves.recounted = None;
    }

    /// Reserves nothing, but finds out whether so many units more could be reserved. If that is not known, the command waits, and
    /// comes again: the result is `None`.
    fn try_reserve(&mut self, tag: Tag, command: &Command, units: i64) -> Result<Option<()>, CommandError> {
        match self.check_unreserved(units) {
            Err(_) if self.is_recount_due() => {
                self.reserves.commands.push_back((tag, command.clone()));
                Ok(None)
            }
            result => result.map(Some),
        }
    }

    /// Whether so many units can be reserved, as far as is known.
    pub(crate) fn check_unreserved(&self, units: i64) -> Result<(), CommandError> {
        let free = self.unreserved_units();
        if units <= 0 || units <= free {
            return Ok(());
        }
        let bytes = |units: i64| units.max(0) as u64 * u64::from(UNIT);
        Err(CommandError::NotReservable { needed: bytes(units), free: bytes(free) })
    }

    /// Finds out whether the space that a command would have reserved is there ([`Pool::try_reserve`]).
    pub(crate) fn check_reservation(
        &mut self,
        tag: Tag,
        command: &Command,
    ) -> Result<Option<()>, CommandError> {
        let manifest = &self.keeper.manifest;
        let thick = |id: &VolumeId| manifest.volumes.get(id).filter(|volume| volume.is_thick);
        let shard = self.settings.shard;
        let size = |units: u64| thick_units(units, shard) as i64;
        let units = match command {
            Command::Create { units, is_thick: true, .. } => size(*units),
            Command::Resize { volume, units } => {
                thick(volume).map_or(0, |volume| size(*units) - size(volume.units))
            }
            Command::Revert { volume, snapshot } => match (thick(volume), manifest.volumes.get(snapshot)) {
                (Some(volume), Some(snapshot)) => size(snapshot.units) - size(volume.units),
                _ => 0,
            },
            // What the volumes have for themselves becomes the snapshots'.
            Command::Snapshot(of) => {
                let own =
                    |volume: &Volume| size(volume.units) - manifest.reserved_units(volume, shard) as i64;
                of.iter().filter_map(|(id, _)| thick(id)).map(own).sum()
            }
            Command::SetThick { volume, is_thick: true } => {
                match manifest.volumes.get(volume).filter(|volume| !volume.is_thick) {
                    Some(volume) => manifest.reserved_units(volume, shard) as i64,
                    None => 0,
                }
            }
            _ => 0,
        };
        self.try_reserve(tag, command, units)
    }

    /// Makes a volume thick, or no longer.
    pub(crate) fn set_thick(&mut self, tag: Tag, id: VolumeId, is_thick: bool) -> Result<(), CommandError> {
        let volume = self.find(id)?;
        if volume.cut.is_some() {
            return Err(CommandError::WrongKind("a snapshot is never written, so it reserves no space"));
        }
        let timeline = volume.timeline;
        if is_thick && !self.keeper.manifest.own.contains_key(&timeline) {
            // What it has for itself is found out first.
            self.count_timeline(timeline, Counting::Unknown);
            self.note_deleted();
        }
        let result = self.check_reservation(tag, &Command::SetThick { volume: id, is_thick });
        if let Ok(Some(())) = result {
            self.change_volume(id, tag, |volume| volume.is_thick = is_thick);
            // Its changes wait no longer, nor do those behind them if it gives up space.
            self.unpark();
        }
        if !matches!(result, Ok(None)) {
            self.follow_timeline(timeline);
            self.keeper.commit(Then::Nothing);
        }
        result.map(drop)
    }

    /// Whether a recount runs, or may find something.
    fn is_recount_due(&self) -> bool {
        let Reserves { recount, recounted, changed, .. } = self.reserves;
        recount != Recount::None || recounted.is_none_or(|before| changed - before >= self.quantum())
    }

    /// Goes on with a recount, and with what waits for it. Returns whether there is more to do without input.
    pub(crate) fn step_reserves(&mut self) -> bool {
        match self.reserves.recount {
            Recount::None => {
                let Reserves { parked, commands, is_copy_waiting, .. } = &self.reserves;
                if parked.is_empty() && commands.is_empty() && !is_copy_waiting {
                    return false;
                }
                if commands.is_empty() && !parked.is_empty() && self.can_unpark() {
                    self.unpark();
                    return true;
                }
                self.begin_recount()
            }
            Recount::Flush(number) if self.keeper.flushed >= number => {
                self.merge_all_levels();
                self.recount_unknown();
                self.reserves.recount = Recount::Merge;
                true
            }
            Recount::Merge if self.jobs.has_merged() => {
                self.reserves.recount = Recount::None;
                self.reserves.recounted = Some(self.reserves.changed);
                self.end_recount();
                true
            }
            _ => false,
        }
    }

    fn begin_recount(&mut self) -> bool {
        if !self.is_recount_due() {
            self.refuse_parked();
            return false;
        }
        self.reserves.recount = Recount::Flush(self.jobs.freezes + 1);
        self.jobs.is_flush_wanted = true;
        true
    }

    /// Has partitions merged in which it is not known what a volume has for itself.
    fn recount_unknown(&mut self) {
        for number in 0..PARTITIONS {
            let manifest = &self.keeper.manifest;
            if !manifest.own.values().any(|own| own[number].is_none()) {
                continue;
            }
            if self.partitions[number].index.levels().is_empty() {
                let owned: Vec<_> = manifest.own.keys().map(|id| (*id, Owned::default())).collect();
                self.note_owned(number, self.reserves.generation, owned, true);
                self.keeper.commit(Then::Nothing);
            } else {
                self.jobs.stale[number] = true;
            }
        }
    }

    /// What waited for a recount is tried again.
    fn end_recount(&mut self) {
        for (tag, command) in std::mem::take(&mut self.reserves.commands) {
            self.start_command(tag, command);
        }
    }

    /// Has the changes that waited for unreserved space wait for their turn again.
    fn unpark(&mut self) {
        self.ring.append(&mut self.reserves.parked);
    }

    /// Fails changes that wait for unreserved space, of volumes that report a full pool.
    fn refuse_parked(&mut self) {
        let manifest = &self.keeper.manifest;
        let fails = |id: &&VolumeId| manifest.volumes[*id].when_full == WhenFull::Fail;
        let failing: Vec<_> = self.reserves.parked.iter().filter(fails).copied().collect();
        for id in failing {
            self.end_waiting(id, Status::NoSpace, |_| true);
        }
    }
}
