//! All versions that were ever written, and the views that may still look.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Commit, Key, Slot, TimelineId, Value, Version, Views};

/// A timeline's views.
pub(in crate::tests) struct Timeline {
    pub(in crate::tests) is_live: bool,
    pub(in crate::tests) has_base: bool,
    pub(in crate::tests) frozen: BTreeSet<Commit>,
}

/// Versions of a slot, by commit.
type Versions = BTreeMap<Commit, Value>;

pub(in crate::tests) struct Model {
    pub(in crate::tests) timelines: BTreeMap<u32, Timeline>,
    versions: BTreeMap<(u32, u32, Slot), Versions>,
}

impl Model {
    /// Three timelines; the last has a base.
    pub(in crate::tests) fn new() -> Self {
        let timeline = |id| (id, Timeline { is_live: true, has_base: id == 2, frozen: BTreeSet::new() });
        Self { timelines: (0..3).map(timeline).collect(), versions: BTreeMap::new() }
    }

    pub(in crate::tests) fn insert(&mut self, key: Key, value: Value) {
        let place = (key.timeline().0, key.range(), key.slot());
        self.versions.entry(place).or_default().insert(key.commit(), value);
    }

    /// The version of exactly this slot at a view.
    pub(in crate::tests) fn own(
        &self,
        timeline: u32,
        range: u32,
        slot: Slot,
        view: Commit,
    ) -> Option<Version> {
        let versions = self.versions.get(&(timeline, range, slot))?;
        versions.range(..=view).next_back().map(|(&commit, &value)| Version { commit, value })
    }

    /// The version that a view sees of a block.
    pub(in crate::tests) fn seen(
        &self,
        timeline: u32,
        range: u32,
        slot: Slot,
        view: Commit,
    ) -> Option<Version> {
        let of_range = self.own(timeline, range, Slot::RANGE, view);
        let of_block = self.own(timeline, range, slot, view);
        match (of_range, of_block) {
            (Some(of_range), Some(of_block)) if of_block.commit > of_range.commit => Some(of_block),
            (of_range, of_block) => of_range.or(of_block),
        }
    }

    /// The views of a timeline.
    pub(in crate::tests) fn views(&self, timeline: u32) -> Vec<Commit> {
        self.timelines.get(&timeline).map_or_else(Vec::new, |timeline| {
            let live = timeline.is_live.then_some(Commit::MAX);
            timeline.frozen.iter().copied().chain(live).collect()
        })
    }

    /// The newest frozen view.
    pub(in crate::tests) fn kept(&self, timeline: u32) -> Commit {
        self.timelines[&timeline].frozen.last().copied().unwrap_or(Commit::ZERO)
    }

    /// The views as a merge takes them.
    pub(in crate::tests) fn for_merge(&self) -> Views {
        let mut views = Views::default();
        for (id, timeline) in self.timelines.iter().rev() {
            views.add(TimelineId(*id), timeline.frozen.iter().copied(), timeline.is_live, timeline.has_base);
        }
        views
    }
}
