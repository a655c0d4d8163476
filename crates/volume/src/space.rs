//! The space of volumes and snapshots: what each keeps in use, alone or together with others. Any context.
//!
//! A version of a block is in use while a view of its timeline sees it. Views are volumes, snapshots, and the places where the
//! timelines of clones begin. Those that see a version are neighbours in age: they begin with the oldest that includes its
//! commit, and end before the first that includes what hides it. So one scan of the index, in the order of its keys, counts all
//! views at once: it adds the bytes of a version where these views begin, and subtracts them where they end.
//!
//! What exactly one view sees becomes free with it. If that view is the beginning of a clone, this happens when the clone's
//! timeline ends, which is with its last view.
//!
//! Writes go on meanwhile, and volumes come and go. The answer has only volumes that existed at its beginning and at its end.

use crate::manifest::{Base, User};
use crate::pool::Pool;
use crate::read::Waiter;
use crate::tasks::{Progress, Work};
use crate::{Answer, CommandError, PARTITIONS, Space, Tag, UNIT, VolumeId};
use aryk_volume_index::{Commit, Entry, Key as IndexKey, ScanOptions, Slot, TimelineId};
use std::collections::{BTreeMap, BTreeSet};

/// Entries that are visited in one turn.
const ENTRIES_PER_TURN: usize = 2048;

/// Timelines that are added up in one turn, at least.
const TIMELINES_PER_TURN: usize = 1024;

/// Units of the versions that a view sees, and of those that no other view of the timeline sees.
type Units = (u64, u64);

/// The views of one timeline in one partition, and what they see.
#[derive(Debug, Default)]
struct Seen {
    timeline: Option<TimelineId>,
    /// By age.
    views: Vec<(Commit, User)>,
    /// Where units begin and end to be seen: the views of the same index, and the end.
    changes: Vec<i64>,
    /// Units that only the view of the same index sees.
    only: Vec<u64>,
    /// The range of the last version, and the commits of versions of all of it, newest first.
    group: Option<u32>,
    covers: Vec<Commit>,
    last: Option<IndexKey>,
}

impl Seen {
    fn new(timeline: TimelineId, mut views: Vec<(Commit, User)>) -> Self {
        views.sort_unstable();
        let (changes, only) = (vec![0; views.len() + 1], vec![0; views.len()]);
        Self { timeline: Some(timeline), views, changes, only, ..Self::default() }
    }

    /// Counts a version. All versions of the timeline come in the order of their keys.
    fn count(&mut self, entry: &Entry) {
        let key = entry.key;
        let (commit, slot) = (key.commit(), key.slot());
        if self.group != Some(key.range()) {
            self.group = Some(key.range());
            self.covers.clear();
            self.last = None;
        }
        let newer = self.last.filter(|last| last.slot() == slot).map(IndexKey::commit);
        self.last = Some(key);
        let cover = if slot.is_range() {
            self.covers.push(commit);
            None
        } else {
            let older = self.covers.partition_point(|cover| *cover >= commit);
            self.covers[..older].last().copied()
        };
        let Some((_, units)) = entry.value.reference() else { return };
        let hides = newer.into_iter().chain(cover).min();
        let from = self.views.partition_point(|(view, _)| *view < commit);
        let to =
            hides.map_or(self.views.len(), |hides| self.views.partition_point(|(view, _)| *view < hides));
        if from < to {
            self.changes[from] += i64::from(units);
            self.changes[to] -= i64::from(units);
        }
        if from + 1 == to {
            self.only[from] += u64::from(units);
        }
    }

    /// What each view sees.
    fn finish(self, totals: &mut BTreeMap<(TimelineId, User), Units>) {
        let Some(timeline) = self.timeline else { return };
        let mut seen = 0;
        for (((_, user), change), only) in self.views.into_iter().zip(self.changes).zip(self.only) {
            seen += change;
            let total = totals.entry((timeline, user)).or_default();
            total.0 += seen.unsigned_abs();
            total.1 += only;
        }
    }
}

/// Which part of the work comes next.
#[derive(Debug)]
enum Step {
    Begin,
    Scan,
    Sum,
}

/// The count of the space of volumes.
#[derive(Debug)]
pub(crate) struct Count {
    /// Which; all if there are none.
    of: Vec<VolumeId>,
    /// Whether it ends when another command waits.
    pub(crate) gives_way: bool,
    step: Step,
    /// Keys that are visited in each partition: from, and behind.
    parts: Vec<(IndexKey, Option<IndexKey>)>,
    part: usize,
    partition: usize,
    from: Option<IndexKey>,
    entries: Vec<Entry>,
    /// The first volume and timeline that came later.
    end: (VolumeId, TimelineId),
    seen: Seen,
    totals: BTreeMap<(TimelineId, User), Units>,
    /// The volume at which the sums go on.
    next: VolumeId,
    found: Vec<Space>,
}

impl Pool {
    /// Starts a count of the space of these volumes and snapshots, or of all.
    pub(crate) fn start_space(
        &mut self,
        tag: Tag,
        of: Vec<VolumeId>,
        gives_way: bool,
    ) -> Result<(), CommandError> {
        of.iter().try_for_each(|id| self.find(*id).map(drop))?;
        self.tasks.push(
            tag,
            Work::Space(Count {
                of,
                gives_way,
                step: Step::Begin,
                parts: Vec::new(),
                part: 0,
                partition: 0,
                from: None,
                entries: Vec::new(),
                end: (VolumeId(0), TimelineId(0)),
                seen: Seen::default(),
                totals: BTreeMap::new(),
                next: VolumeId(0),
                found: Vec::new(),
            }),
        );
        Ok(())
    }

    pub(crate) fn step_space(&mut self, count: &mut Count) -> Progress {
        match count.step {
            Step::Begin => {
                self.begin_count(count);
                count.step = Step::Scan;
                Progress::More
            }
            Step::Scan if count.part == count.parts.len() => {
                count.step = Step::Sum;
                Progress::More
            }
            Step::Scan => self.scan_space(count),
            Step::Sum => self.sum_space(count),
        }
    }

    /// Finds out which keys are to be visited.
    fn begin_count(&self, count: &mut Count) {
        let manifest = &self.keeper.manifest;
        count.end = (VolumeId(manifest.next_volume), TimelineId(manifest.next_timeline));
        if count.of.is_empty() {
            count.parts.push((IndexKey::MIN, None));
            return;
        }
        count.of.sort_unstable();
        count.of.dedup();
        let mut timelines = BTreeSet::new();
        for volume in count.of.iter().filter_map(|id| manifest.volumes.get(id)) {
            let mut next = Some(volume.timeline);
            while let Some(timeline) = next.filter(|timeline| timelines.insert(*timeline)) {
                next = self.base(timeline).map(|(base, _)| base);
            }
        }
        let start = |timeline| IndexKey::new(TimelineId(timeline), 0, Slot::RANGE, Commit::MAX);
        count.parts.extend(timelines.iter().map(|id| (start(id.0), id.0.checked_add(1).map(start))));
    }

    fn scan_space(&mut self, count: &mut Count) -> Progress {
        let (start, end) = count.parts[count.part];
        let from = count.from.unwrap_or(start);
        let options = ScanOptions { from, end, since: None, limit: ENTRIES_PER_TURN };
        count.entries.clear();
        let index = &self.partitions[count.partition].index;
        match index.scan(&self.cache, &options, &mut count.entries) {
            Ok(next) => count.from = next,
            Err(need) => {
                self.tasks.waits = self.want_pages(&need, Waiter::Task);
                return Progress::Wait;
            }
        }
        for entry in std::mem::take(&mut count.entries) {
            if count.seen.timeline != Some(entry.key.timeline()) {
                let next = self.views_at(entry.key.timeline(), count);
                std::mem::replace(&mut count.seen, next).finish(&mut count.totals);
            }
            count.seen.count(&entry);
        }
        if count.from.is_none() {
            std::mem::take(&mut count.seen).finish(&mut count.totals);
            count.partition += 1;
            if count.partition == PARTITIONS {
                (count.partition, count.part) = (0, count.part + 1);
            }
        }
        Progress::More
    }

    /// The views of a timeline in the partition that is being visited.
    fn views_at(&self, timeline: TimelineId, count: &Count) -> Seen {
        let is_counted = |user: &User| match user {
            User::Volume(id) => *id < count.end.0,
            User::Clone(id) => *id < count.end.1,
        };
        let views = self.keeper.manifest.views_of(timeline).filter(|(user, _)| is_counted(user));
        let at = |cut: Option<&crate::Cut>| cut.map_or(Commit::MAX, |cut| cut[count.partition]);
        Seen::new(timeline, views.map(|(user, cut)| (at(cut), user)).collect())
    }

    /// Adds up what some of the volumes see in their timelines and below.
    fn sum_space(&self, count: &mut Count) -> Progress {
        let manifest = &self.keeper.manifest;
        let mut left = TIMELINES_PER_TURN;
        for (&id, volume) in manifest.volumes.range(count.next..count.end.0) {
            if left == 0 {
                count.next = id;
                return Progress::More;
            }
            if !count.of.is_empty() && count.of.binary_search(&id).is_err() {
                left -= 1;
                continue;
            }
            let (mut own, mut all, mut is_alone) = (0, 0, true);
            let (mut timeline, mut user) = (volume.timeline, User::Volume(id));
            loop {
                let (seen, only) = count.totals.get(&(timeline, user)).copied().unwrap_or_default();
                all += seen;
                own += if is_alone { only } else { 0 };
                is_alone &= manifest.views_of(timeline).nth(1).is_none();
                left = left.saturating_sub(1);
                let Some(Base::View { timeline: base, .. }) = manifest.timelines[&timeline].base else {
                    break;
                };
                (timeline, user) = (base, User::Clone(timeline));
            }
            let bytes = |units: u64| units * u64::from(UNIT);
            count.found.push(Space { volume: id, own_bytes: bytes(own), shared_bytes: bytes(all - own) });
        }
        Progress::Done(Ok(Some(Answer::Space(std::mem::take(&mut count.found)))))
    }
}
