//! How many units the live view of a timeline has for itself: those of versions that are newer than all of its frozen views.
//!
//! Context: any. A merge counts them for the timelines for which its caller asks.

use std::collections::BTreeMap;

use crate::key::{Commit, Entry, TimelineId};

/// What a merge has found out about a timeline.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Owned {
    /// Units of all versions that are newer than the newest frozen view, and that the merge has written.
    pub total: i64,
    /// By how much these are more than those of the runs that were merged: what came from memtables counts, what was left out
    /// counts negatively.
    pub change: i64,
}

/// Counts the units of timelines.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    /// The newest frozen view of each timeline, and what was found, by timeline.
    timelines: Vec<(TimelineId, Commit, Owned)>,
    /// The place of the latest version's timeline, which has one unless it is not counted.
    last: Option<(TimelineId, Option<usize>)>,
}

impl Owners {
    pub(crate) fn new(timelines: &BTreeMap<TimelineId, Commit>) -> Self {
        let timelines = timelines.iter().map(|(&id, &newest)| (id, newest, Owned::default())).collect();
        Self { timelines, last: None }
    }

    /// Counts a version: how often it was in the runs, and whether it stays.
    #[inline]
    pub(crate) fn count(&mut self, entry: &Entry, in_runs: i64, is_kept: bool) {
        if self.timelines.is_empty() {
            return;
        }
        let id = entry.key.timeline();
        let place = match self.last {
            Some((last, place)) if last == id => place,
            _ => self.timelines.binary_search_by_key(&id, |timeline| timeline.0).ok(),
        };
        self.last = Some((id, place));
        let Some((_, newest, owned)) = place.map(|place| &mut self.timelines[place]) else { return };
        if entry.key.commit() <= *newest {
            return;
        }
        let units = entry.value.reference().map_or(0, |(_, units)| i64::from(units));
        let kept = if is_kept { units } else { 0 };
        owned.total += kept;
        owned.change += kept - in_runs * units;
    }

    /// What was found, by timeline.
    pub(crate) fn finish(self) -> impl Iterator<Item = (TimelineId, Owned)> {
        self.timelines.into_iter().map(|(id, _, owned)| (id, owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{BLOCK_UNITS, BlobId, Key, Place, Slot, Value};

    #[test]
    fn versions_newer_than_the_newest_frozen_view_are_counted() {
        let commit = |number| Commit::new(number).expect("a small number");
        let timelines = BTreeMap::from([(TimelineId(2), commit(5)), (TimelineId(7), Commit::ZERO)]);
        let mut owners = Owners::new(&timelines);
        let value = Value::Block { place: Place { blob: BlobId(1), unit: 0 }, crc: 0 };
        let entry = |id, at| Entry { key: Key::new(TimelineId(id), 0, Slot::block(0), commit(at)), value };
        owners.count(&entry(1, 9), 0, true);
        owners.count(&entry(2, 9), 0, true);
        owners.count(&entry(2, 6), 2, false);
        owners.count(&entry(2, 5), 1, false);
        owners.count(&entry(7, 5), 1, true);
        let zero = Entry { value: Value::Zero, ..entry(7, 4) };
        owners.count(&zero, 1, true);
        let units = i64::from(BLOCK_UNITS);
        let found: Vec<_> = owners.finish().collect();
        let expected = [
            (TimelineId(2), Owned { total: units, change: units - 2 * units }),
            (TimelineId(7), Owned { total: units, change: 0 }),
        ];
        assert_eq!(found, expected);
    }
}
