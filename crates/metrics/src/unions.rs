//! What groups, controllers and reactors have counted: what disks did while they were theirs. Any context; pure.
//!
//! Disks change their groups and controllers, and go. So that a union's counts only grow, it is given what each of its disks has counted since the last look, and
//! keeps that. What a disk did between the last look and its leaving is not told of the union.

use aryk_bdev::Summary;
use std::collections::HashMap;

/// What disks belong to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Union {
    Group(String),
    Controller(String),
    /// By core.
    Reactor(u16),
}

/// The counts of all unions.
#[derive(Debug, Default)]
pub struct Sums {
    /// What each disk had counted on each core, at the last look.
    seen: HashMap<(u64, u16), Summary>,
    sums: HashMap<Union, Summary>,
}

/// A disk on a core: the disk's number, its counts, and what it belongs to besides the core's reactor.
pub struct Part<'a> {
    pub serial: u64,
    pub core: u16,
    pub counts: Summary,
    pub unions: &'a [Union],
}

impl Sums {
    /// A look: each disk on each core, once. Unions of which `is_there` knows nothing are forgotten.
    pub fn look<'a>(&mut self, parts: impl Iterator<Item = Part<'a>>, is_there: impl Fn(&Union) -> bool) {
        self.sums.retain(|union, _| is_there(union));
        self.sums.values_mut().for_each(Summary::forget_depths);
        let mut seen = HashMap::with_capacity(self.seen.len());
        for Part { serial, core, counts, unions } in parts {
            let grown = match self.seen.get(&(serial, core)) {
                Some(earlier) => counts.since(earlier),
                None => counts,
            };
            seen.insert((serial, core), counts);
            for union in unions.iter().chain([&Union::Reactor(core)]) {
                match self.sums.get_mut(union) {
                    Some(sum) => sum.merge(&grown),
                    None => _ = self.sums.insert(union.clone(), grown),
                }
            }
        }
        self.seen = seen;
    }

    /// What `union` has counted.
    pub fn of(&self, union: &Union) -> Summary {
        self.sums.get(union).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_bdev::{Op, Stats, Status};

    /// The counts of a disk that has done so many reads, and has some in flight.
    fn counts(reads: u64, in_flight: u64) -> Summary {
        let mut stats = Stats::default();
        (0..reads).for_each(|_| stats.record(Op::Read, 512, Status::Ok, 1000));
        let mut counts = Summary::default();
        counts.add(&stats);
        counts.in_flight = in_flight;
        counts
    }

    #[test]
    fn counts_only_grow() {
        let (group, other) = (Union::Group("g".into()), Union::Group("h".into()));
        let mut sums = Sums::default();
        let mut look = |disks: &[(u64, u64, &[Union])]| {
            let part = |&(serial, reads, unions)| Part { serial, core: 1, counts: counts(reads, 2), unions };
            sums.look(disks.iter().map(part), |union| *union != Union::Group("gone".into()));
            [&group, &other, &Union::Reactor(1)].map(|union| sums.of(union).op(Op::Read).ops)
        };
        let (g, h) = (&[group.clone()][..], &[other.clone()][..]);
        assert_eq!(look(&[(1, 10, g), (2, 5, g)]), [15, 0, 15]);
        // One goes elsewhere, and is told there from then on.
        assert_eq!(look(&[(1, 13, g), (2, 9, h)]), [18, 4, 22]);
        // One is deleted, one has its counts set to zero.
        assert_eq!(look(&[(1, 2, g)]), [20, 4, 24]);
        // A new disk of an old one's name begins anew.
        assert_eq!(look(&[(1, 2, g), (3, 7, g)]), [27, 4, 31]);
        assert_eq!(look(&[(3, 7, &[Union::Group("gone".into())])]), [27, 4, 31]);
        assert_eq!((sums.of(&group).in_flight, sums.of(&Union::Reactor(1)).in_flight), (0, 2));
    }
}
