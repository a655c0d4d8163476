//! What the slots of a volume may show: the model of the simulations of several shards. Any context.
//!
//! A slot has one write under way at a time, so that its history is a list of what it showed one after another. A change of the
//! volume is in the list, too: what a smaller size cuts off becomes zeroes, and a revert brings back what a snapshot shows.

use crate::pattern::ZERO;

/// A moment: the number of events before it.
pub(super) type Time = u64;

/// What a write leaves in a slot.
#[derive(Clone, Debug)]
enum Content {
    /// One value in all units: the number of the write.
    Number(u64),
    /// A value of its own in each unit from the first one on.
    Units { first: u64, values: Vec<u64> },
}

/// A write to a slot, or a change of its volume that has left something there.
#[derive(Clone, Debug)]
pub(super) struct Write {
    content: Content,
    pub(super) began: Time,
    pub(super) ended: Option<Time>,
    /// A shard has refused a part of it, which lay beyond the end of the volume.
    is_refused: bool,
    /// No crash loses it.
    pub(super) is_durable: bool,
}

impl Write {
    /// What it leaves in a unit.
    fn at(&self, unit: u64) -> Option<u64> {
        match &self.content {
            Content::Number(number) => Some(*number),
            Content::Units { first, values } => values.get(unit.checked_sub(*first)? as usize).copied(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) units: (u64, u64),
    pub(super) is_busy: bool,
    /// In the order in which they took effect.
    writes: Vec<Write>,
}

impl Slot {
    /// A slot of a new volume.
    pub(super) fn new(units: (u64, u64)) -> Self {
        let mut slot = Self { units, is_busy: false, writes: Vec::new() };
        slot.put(units.0, vec![ZERO; (units.1 - units.0) as usize], (0, 0), true);
        slot
    }

    /// The part that a volume of this size has; `None` if it has nothing of the slot.
    pub(super) fn within(&self, size: u64) -> Option<(u64, u64)> {
        (self.units.0 < size).then_some((self.units.0, self.units.1.min(size)))
    }

    /// Whether a volume of this size ends within the slot.
    pub(super) const fn is_cut(&self, size: u64) -> bool {
        self.units.0 < size && size < self.units.1
    }

    /// A write begins.
    pub(super) fn begin(&mut self, number: u64, began: Time) {
        let content = Content::Number(number);
        self.writes.push(Write { content, began, ended: None, is_refused: false, is_durable: false });
        self.is_busy = true;
    }

    /// A write has ended.
    pub(super) fn end(&mut self, number: u64, now: Time, is_refused: bool) {
        let mut writes = self.writes.iter_mut().rev();
        let write = writes.find(|write| matches!(write.content, Content::Number(of) if of == number));
        let write = write.expect("it has begun");
        (write.ended, write.is_refused) = (Some(now), is_refused);
        self.is_busy = false;
    }

    /// Something else has left these values from a unit on, between two moments.
    pub(super) fn put(&mut self, first: u64, values: Vec<u64>, times: (Time, Time), is_durable: bool) {
        let (content, began, ended) = (Content::Units { first, values }, times.0, Some(times.1));
        self.writes.push(Write { content, began, ended, is_refused: false, is_durable });
    }

    /// The volume ends here from now on, for certain: the rest reads zeroes if it comes back.
    pub(super) fn cut_off(&mut self, size: u64, times: (Time, Time)) {
        let first = self.units.0.max(size);
        if first < self.units.1 {
            self.put(first, vec![ZERO; (self.units.1 - first) as usize], times, true);
        }
    }

    /// What had ended before this moment is durable.
    pub(super) fn flushed(&mut self, before: Time) {
        let ended = self.writes.iter_mut().filter(|write| write.ended.is_some_and(|ended| ended < before));
        ended.for_each(|write| write.is_durable = true);
    }

    /// Whether the latest write was refused in part, so that its other parts may be there.
    pub(super) fn is_torn(&self) -> bool {
        let covers = |write: &&Write| write.at(self.units.0).is_some();
        self.writes.iter().rev().find(covers).is_some_and(|write| write.is_refused)
    }

    /// Whether a unit may show a value: that of the latest write for which `is_certain` says so, or of one after it.
    pub(super) fn may_show(&self, unit: u64, value: u64, is_certain: impl Fn(&Write) -> bool) -> bool {
        for write in self.writes.iter().rev() {
            match write.at(unit) {
                Some(shown) if shown == value => return true,
                Some(_) if !write.is_refused && is_certain(write) => return false,
                _ => {}
            }
        }
        false
    }

    /// The first and the last write after which the slot showed all these values together.
    pub(super) fn moments(&self, seen: &[u64]) -> Option<(usize, usize)> {
        let mut shown = vec![ZERO; seen.len()];
        let mut found = None;
        for (number, write) in self.writes.iter().enumerate().filter(|(_, write)| !write.is_refused) {
            for (unit, shown) in (self.units.0..).zip(&mut shown) {
                *shown = write.at(unit).unwrap_or(*shown);
            }
            if shown == seen {
                found = Some((found.map_or(number, |(first, _)| first), number));
            }
        }
        found
    }

    /// A write of the history.
    pub(super) fn write(&self, number: usize) -> &Write {
        &self.writes[number]
    }

    /// A write after this one that had ended before a moment.
    pub(super) fn later(&self, number: usize, moment: Time) -> Option<&Write> {
        let is_later = |write: &&Write| !write.is_refused && write.ended.is_some_and(|ended| ended < moment);
        self.writes[number + 1..].iter().find(is_later)
    }

    /// The end of the history, for a message.
    pub(super) fn latest(&self) -> &[Write] {
        &self.writes[self.writes.len().saturating_sub(8)..]
    }
}

/// Values in a row, for a message: how many units have each.
pub(super) fn told(values: &[u64]) -> String {
    let rows = values.chunk_by(|a, b| a == b);
    rows.map(|row| format!("{} units of {}", row.len(), row[0])).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cut_off_shows_zeroes() {
        let mut slot = Slot::new((10, 14));
        slot.begin(7, 1);
        slot.end(7, 2, false);
        slot.cut_off(12, (3, 4));
        let certain = |write: &Write| write.ended.is_some_and(|ended| ended < 9);
        let shows = |slot: &Slot, unit, value| slot.may_show(unit, value, certain);
        assert!(shows(&slot, 11, 7) && !shows(&slot, 11, 0) && shows(&slot, 12, 0) && !shows(&slot, 12, 7));
        assert_eq!(slot.moments(&[7, 7, 0, 0]), Some((2, 2)));
        assert_eq!(slot.moments(&[7, 7, 7, 0]), None);
        // Not before the size is certain.
        assert!(slot.may_show(12, 7, |write| write.ended.is_some_and(|ended| ended < 4)));
    }

    #[test]
    fn a_refused_write_replaces_nothing() {
        let mut slot = Slot::new((0, 2));
        slot.begin(7, 1);
        slot.end(7, 2, true);
        assert!(slot.is_torn() && slot.may_show(0, 7, |_| true) && slot.may_show(0, 0, |_| true));
        slot.put(0, vec![7, 0], (3, 3), false);
        assert!(!slot.is_torn() && !slot.may_show(0, 0, |_| true));
        assert_eq!(slot.moments(&[7, 7]), None);
    }
}
