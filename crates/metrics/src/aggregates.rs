//! Sums of disks' counts per group, controller and reactor. Any context; pure.
//!
//! Disks change their groups and controllers, and are deleted. So that the sum of an aggregate only grows, it adds the increase
//! of each of its disks since the last snapshot. The increase between the last snapshot and the moment when a disk leaves is
//! missing from the sum.

use aryk_bdev::Summary;
use std::collections::HashMap;

/// A set of disks with summed counts.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Aggregate {
    Group(String),
    Controller(String),
    /// A reactor, by its core.
    Reactor(u16),
}

/// The sums of all aggregates.
#[derive(Debug, Default)]
pub struct Sums {
    /// The counts of each disk on each core at the last snapshot.
    seen: HashMap<(u64, u16), Summary>,
    sums: HashMap<Aggregate, Summary>,
}

/// A disk on a core: the disk's serial number, its counts, and its aggregates other than the core's reactor.
pub struct Part<'a> {
    pub serial: u64,
    pub core: u16,
    pub counts: Summary,
    pub aggregates: &'a [Aggregate],
}

impl Sums {
    /// Adds a snapshot: each disk on each core, once. Drops the sums of aggregates for which `exists` returns false.
    pub fn add<'a>(&mut self, parts: impl Iterator<Item = Part<'a>>, exists: impl Fn(&Aggregate) -> bool) {
        self.sums.retain(|aggregate, _| exists(aggregate));
        self.sums.values_mut().for_each(Summary::forget_depths);
        let mut seen = HashMap::with_capacity(self.seen.len());
        for Part { serial, core, counts, aggregates } in parts {
            let grown = match self.seen.get(&(serial, core)) {
                Some(earlier) => counts.since(earlier),
                None => counts,
            };
            seen.insert((serial, core), counts);
            for aggregate in aggregates.iter().chain([&Aggregate::Reactor(core)]) {
                match self.sums.get_mut(aggregate) {
                    Some(sum) => sum.merge(&grown),
                    None => _ = self.sums.insert(aggregate.clone(), grown),
                }
            }
        }
        self.seen = seen;
    }

    /// The sum of `aggregate`.
    pub fn of(&self, aggregate: &Aggregate) -> Summary {
        self.sums.get(aggregate).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_bdev::{Bytes, Op, Stats, Status};

    /// The counts of a disk with this many reads, and some requests in flight.
    fn counts(reads: u64, in_flight: u64) -> Summary {
        let mut stats = Stats::default();
        (0..reads).for_each(|_| stats.record(Op::Read, Bytes(512), Status::Ok, 1000));
        let mut counts = Summary::default();
        counts.add(&stats);
        counts.in_flight = in_flight;
        counts
    }

    #[test]
    fn counts_only_grow() {
        let (group, other) = (Aggregate::Group("g".into()), Aggregate::Group("h".into()));
        let mut sums = Sums::default();
        let mut add = |disks: &[(u64, u64, &[Aggregate])]| {
            let part =
                |&(serial, reads, aggregates)| Part { serial, core: 1, counts: counts(reads, 2), aggregates };
            sums.add(disks.iter().map(part), |aggregate| *aggregate != Aggregate::Group("gone".into()));
            [&group, &other, &Aggregate::Reactor(1)].map(|aggregate| sums.of(aggregate).op(Op::Read).ops)
        };
        let (g, h) = (&[group.clone()][..], &[other.clone()][..]);
        assert_eq!(add(&[(1, 10, g), (2, 5, g)]), [15, 0, 15]);
        // One disk changes its group; its requests count there from then on.
        assert_eq!(add(&[(1, 13, g), (2, 9, h)]), [18, 4, 22]);
        // One disk is deleted, one has its counts reset.
        assert_eq!(add(&[(1, 2, g)]), [20, 4, 24]);
        // A new disk with the name of an old one starts from zero.
        assert_eq!(add(&[(1, 2, g), (3, 7, g)]), [27, 4, 31]);
        assert_eq!(add(&[(3, 7, &[Aggregate::Group("gone".into())])]), [27, 4, 31]);
        assert_eq!((sums.of(&group).in_flight, sums.of(&Aggregate::Reactor(1)).in_flight), (0, 2));
    }
}
