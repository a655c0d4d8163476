//! The sequences of frames of the log that one opening has written. Any context.
//!
//! Frames of one blob follow each other, so a list of ranges is short.

/// Sequences that were found.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequences {
    /// From and behind, sorted once all are found.
    ranges: Vec<(u64, u64)>,
    /// All frames of the log below this sequence were durable when the last of these frames was written.
    pub(super) durable: u64,
}

impl Sequences {
    /// A frame was found, which says that those below `durable` were durable.
    pub(super) fn add(&mut self, sequence: u64, durable: u64) {
        self.durable = self.durable.max(durable);
        match self.ranges.last_mut() {
            Some((_, end)) if *end == sequence => *end = sequence.saturating_add(1),
            _ => self.ranges.push((sequence, sequence.saturating_add(1))),
        }
    }

    /// All are found.
    pub(super) fn sort(&mut self) {
        self.ranges.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(self.ranges.len());
        for (from, end) in self.ranges.drain(..) {
            match joined.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(end),
                _ => joined.push((from, end)),
            }
        }
        self.ranges = joined;
    }

    /// The union of these sequences and others.
    pub(super) fn with(mut self, others: &Self) -> Self {
        self.durable = self.durable.max(others.durable);
        self.ranges.extend(&others.ranges);
        self.sort();
        self
    }

    /// Whether there are all from one up to, and without, another.
    pub(super) fn has_all(&self, from: u64, end: u64) -> bool {
        from >= end || self.ranges.iter().any(|range| range.0 <= from && end <= range.1)
    }

    /// The first one.
    pub(super) fn first(&self) -> u64 {
        self.ranges.first().map_or(u64::MAX, |range| range.0)
    }

    /// The one behind the last one.
    pub(super) fn end(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_frames_in_any_order() {
        let mut found = Sequences::default();
        for sequence in [10, 11, 12, 20, 21, 5, 13] {
            found.add(sequence, sequence / 2);
        }
        found.sort();
        assert_eq!((found.first(), found.end(), found.durable), (5, 22, 10));
        assert!(found.has_all(10, 14) && found.has_all(20, 22) && found.has_all(9, 9));
        assert!(!found.has_all(10, 15) && !found.has_all(5, 7));
        let mut others = Sequences::default();
        (14..20).for_each(|sequence| others.add(sequence, 0));
        assert!(found.with(&others).has_all(10, 22));
    }
}
