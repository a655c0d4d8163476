//! What can still be seen of timelines, as a merge needs it.
//!
//! Context: any. The caller fills a [`Views`] at the moment at which a merge starts, and never changes it afterwards.

use crate::key::{Commit, TimelineId};

/// The views of one timeline.
#[derive(Clone, Copy, Debug)]
pub struct TimelineViews<'a> {
    frozen: &'a [Commit],
    is_live: bool,
    has_base: bool,
}

impl TimelineViews<'_> {
    /// The oldest view that includes `commit`. A version is seen by any view only if it is seen by this one: what hides the
    /// version from this view hides it from all later ones.
    pub fn first_from(&self, commit: Commit) -> Option<Commit> {
        let first = self.frozen.partition_point(|view| *view < commit);
        self.frozen.get(first).copied().or(self.is_live.then_some(Commit::MAX))
    }

    /// Whether a frozen view does not include `commit`.
    pub(crate) fn has_frozen_before(&self, commit: Commit) -> bool {
        self.frozen.first().is_some_and(|first| *first < commit)
    }

    /// Whether an absent entry means the data of a base, and not zeroes.
    pub const fn has_base(&self) -> bool {
        self.has_base
    }
}

/// The views of all timelines of a partition. A timeline that is not here was deleted.
#[derive(Clone, Default, Debug)]
pub struct Views {
    /// Sorted by timeline.
    timelines: Vec<Timeline>,
    commits: Vec<Commit>,
}

#[derive(Clone, Copy, Debug)]
struct Timeline {
    id: TimelineId,
    /// Its part of the commits.
    first: usize,
    end: usize,
    is_live: bool,
    has_base: bool,
}

impl Views {
    /// Adds a timeline: the commits of its frozen views in ascending order, whether it has a live view, and whether an absent
    /// entry means the data of a base.
    ///
    /// # Panics
    /// If the timeline is here already, or the commits are not in order.
    pub fn add(
        &mut self,
        id: TimelineId,
        frozen: impl IntoIterator<Item = Commit>,
        is_live: bool,
        has_base: bool,
    ) {
        let first = self.commits.len();
        self.commits.extend(frozen);
        assert!(self.commits[first..].is_sorted(), "commits in ascending order");
        let place = self.timelines.partition_point(|timeline| timeline.id < id);
        assert!(self.timelines.get(place).is_none_or(|timeline| timeline.id != id), "each timeline once");
        self.timelines.insert(place, Timeline { id, first, end: self.commits.len(), is_live, has_base });
    }

    /// The views of a timeline, unless it was deleted.
    pub fn of(&self, id: TimelineId) -> Option<TimelineViews<'_>> {
        self.find(id).map(|place| self.at(place))
    }

    /// Where the views of a timeline are.
    pub(crate) fn find(&self, id: TimelineId) -> Option<usize> {
        self.timelines.binary_search_by_key(&id, |timeline| timeline.id).ok()
    }

    /// The views of the timeline there.
    pub(crate) fn at(&self, place: usize) -> TimelineViews<'_> {
        let Timeline { first, end, is_live, has_base, .. } = self.timelines[place];
        TimelineViews { frozen: &self.commits[first..end], is_live, has_base }
    }
}
