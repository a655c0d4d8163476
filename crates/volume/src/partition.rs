//! Partitions, and what they must know of timelines. Any context.

use crate::manifest::{Base, Manifest};
use crate::{Cut, PARTITIONS};
use aryk_slots::Key;
use aryk_volume_index::{Commit, Index, TimelineId, Views};
use std::collections::{BTreeMap, VecDeque};

/// The first commit of a write.
pub(crate) const FIRST_COMMIT: u64 = 2;

/// One of the partitions of a pool.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) index: Index,
    /// The commit of the next write.
    pub(crate) next: u64,
    /// Writes up to this commit can be read.
    pub(crate) readable: u64,
    /// Requests that wait until a commit can be read, in the order of these commits, and which of their edges.
    pub(crate) waiting: VecDeque<(u64, Key, usize)>,
}

impl Partition {
    /// The commit of the next write, which is taken.
    pub(crate) fn take_commit(&mut self) -> Commit {
        let commit = Commit::new(self.next).expect("2⁴⁸ writes of a partition take centuries");
        self.next += 1;
        commit
    }

    /// The state after all writes that can be read.
    pub(crate) fn readable(&self) -> Commit {
        Commit::new(self.readable).expect("a commit that was taken")
    }

    /// The state after all writes so far.
    pub(crate) fn now(&self) -> Commit {
        Commit::new(self.next - 1).expect("a commit that was taken")
    }
}

/// What reads and merges must know of a timeline.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct History {
    pub(crate) shift: u8,
    pub(crate) base: Option<Base>,
    pub(crate) is_live: bool,
    /// The cuts of its frozen views.
    cuts: Vec<Cut>,
    /// The newest frozen view.
    pub(crate) kept: Cut,
}

impl History {
    /// The oldest view of a partition that includes a commit.
    pub(crate) fn first_from(&self, partition: usize, commit: Commit) -> Option<Commit> {
        let frozen = self.cuts.iter().map(|cut| cut[partition]).filter(|view| *view >= commit).min();
        frozen.or(self.is_live.then_some(Commit::MAX))
    }
}

/// What reads and merges must know of all timelines.
#[derive(Debug, Default)]
pub(crate) struct Histories {
    all: BTreeMap<TimelineId, History>,
    /// Cuts of snapshots whose edit waits for writes to become durable.
    pending: Vec<(TimelineId, Cut)>,
}

impl Histories {
    /// All that a manifest has.
    pub(crate) fn new(manifest: &Manifest) -> Self {
        let mut histories = Self::default();
        for &id in manifest.timelines.keys() {
            histories.update(id, manifest);
        }
        histories
    }

    pub(crate) fn get(&self, id: TimelineId) -> Option<&History> {
        self.all.get(&id)
    }

    /// The views of a timeline have changed.
    pub(crate) fn update(&mut self, id: TimelineId, manifest: &Manifest) {
        let Some(timeline) = manifest.timelines.get(&id) else {
            self.all.remove(&id);
            return;
        };
        let pending = self.pending.iter().filter(|(of, _)| *of == id).map(|(_, cut)| cut);
        let mut cuts: Vec<Cut> = manifest.cuts_of(id).chain(pending).copied().collect();
        cuts.sort_unstable();
        cuts.dedup();
        let kept = std::array::from_fn(|at| cuts.iter().map(|cut| cut[at]).max().unwrap_or(Commit::ZERO));
        let history = History {
            shift: timeline.shift,
            base: timeline.base.clone(),
            is_live: manifest.is_live(id),
            cuts,
            kept,
        };
        self.all.insert(id, history);
    }

    /// A snapshot was cut whose edit waits.
    pub(crate) fn begin_cut(&mut self, id: TimelineId, cut: Cut, manifest: &Manifest) {
        self.pending.push((id, cut));
        self.update(id, manifest);
    }

    /// The edit of a snapshot was made, or will never be.
    pub(crate) fn end_cut(&mut self, id: TimelineId, cut: &Cut, manifest: &Manifest) {
        if let Some(at) = self.pending.iter().position(|(of, pending)| *of == id && pending == cut) {
            self.pending.swap_remove(at);
        }
        self.update(id, manifest);
    }

    /// What merges of a partition must keep.
    pub(crate) fn views(&self, partition: usize) -> Views {
        debug_assert!(partition < PARTITIONS);
        let mut views = Views::default();
        for (&id, history) in &self.all {
            let mut frozen: Vec<_> = history.cuts.iter().map(|cut| cut[partition]).collect();
            frozen.sort_unstable();
            views.add(id, frozen, history.is_live, history.base.is_some());
        }
        views
    }

    /// The largest commit of any view of a partition.
    pub(crate) fn newest(&self, partition: usize) -> u64 {
        self.all.values().map(|history| history.kept[partition].get()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreFacts;
    use crate::manifest::{Edit, Timeline};

    #[test]
    fn a_pending_cut_is_a_view_until_its_edit_is_made() {
        let facts = StoreFacts { alignment: 512, blob_units: 65_536, blobs: 4 };
        let mut manifest = Manifest::new([0; 16], &facts);
        let id = TimelineId(1);
        manifest.apply(Edit::Timeline { id, timeline: Timeline { shift: 0, base: None } }).unwrap();
        let mut histories = Histories::new(&manifest);
        let cut = [Commit::new(9).unwrap(); PARTITIONS];
        histories.begin_cut(id, cut, &manifest);
        let views = histories.views(3);
        let first = |commit| views.of(id).unwrap().first_from(Commit::new(commit).unwrap());
        assert_eq!((first(9).map(Commit::get), first(10)), (Some(9), None));
        assert_eq!(histories.newest(3), 9);
        histories.end_cut(id, &cut, &manifest);
        assert_eq!(histories.newest(3), 0);
    }
}
