//! Shards: engines that have a pool together. Any context.
//!
//! Each shard has all volumes of the pool, with their whole sizes, and of each volume the data of every n-th stripe. What is not
//! its own was never written there. So places in a volume mean the same in all shards.

use crate::ids::STRIPE_BLOCKS;
use crate::{BLOCK_UNITS, PARTITIONS};

/// Units of a stripe.
const STRIPE_UNITS: u64 = STRIPE_BLOCKS * BLOCK_UNITS as u64;

/// One of the shards of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shard {
    index: u32,
    count: u32,
}

impl Shard {
    /// The only one of a pool.
    pub const ALL: Self = Self { index: 0, count: 1 };

    /// The most shards of a pool.
    pub const MAX: u32 = PARTITIONS as u32;

    /// The shard with this index among so many; `None` if there cannot be so many: their number is a power of two, at most
    /// [`Shard::MAX`].
    pub const fn new(index: u32, count: u32) -> Option<Self> {
        if count.is_power_of_two() && count <= Self::MAX && index < count {
            Some(Self { index, count })
        } else {
            None
        }
    }

    /// Its index.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// The number of shards.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// The index of the shard among `count` that has a unit of a volume.
    pub const fn of_unit(unit: u64, count: u32) -> u32 {
        (unit / STRIPE_UNITS % count as u64) as u32
    }

    /// Units from `unit` up to the next one that may belong to another shard.
    pub const fn units_left(unit: u64) -> u64 {
        STRIPE_UNITS - unit % STRIPE_UNITS
    }

    /// The first block from `block` on that is its own.
    pub(crate) const fn next_block(self, block: u64) -> u64 {
        let stripe = block / STRIPE_BLOCKS;
        let ahead = (self.index as u64 + self.count as u64 - stripe % self.count as u64) % self.count as u64;
        if ahead == 0 { block } else { (stripe + ahead) * STRIPE_BLOCKS }
    }

    /// How many of the first units of a volume are its own.
    pub(crate) const fn own_units(self, units: u64) -> u64 {
        let (stripes, rest) = (units / STRIPE_UNITS, units % STRIPE_UNITS);
        let (rounds, last) = (stripes / self.count as u64, stripes % self.count as u64);
        let index = self.index as u64;
        let whole = rounds + (index < last) as u64;
        whole * STRIPE_UNITS + if index == last { rest } else { 0 }
    }
}

/// The part of a request that a shard has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The index of the shard.
    pub shard: u32,
    /// The first unit.
    pub unit: u64,
    /// The number of units.
    pub units: u64,
}

/// The pieces of a request of data: one for each stripe, in the order of its units.
pub fn pieces(count: u32, unit: u64, units: u64) -> impl Iterator<Item = Piece> {
    let (mut at, end) = (unit, unit + units);
    std::iter::from_fn(move || {
        let units = Shard::units_left(at).min(end - at);
        let piece = Piece { shard: Shard::of_unit(at, count), unit: at, units };
        at += units;
        (units > 0).then_some(piece)
    })
}

/// Holds back the writes of a channel of a volume while all shards take a snapshot: those under way end first, so that the
/// snapshot has all of a write or nothing, and with a write all that had ended before it began.
#[derive(Debug, Default)]
pub struct WriteGate {
    is_closed: bool,
    /// Writes under way.
    writes: u32,
}

impl WriteGate {
    /// Whether a write may begin, which is then under way.
    pub const fn enter(&mut self) -> bool {
        self.writes += !self.is_closed as u32;
        !self.is_closed
    }

    /// A write has ended. Returns whether none is under way any more.
    pub const fn leave(&mut self) -> bool {
        self.writes -= 1;
        self.writes == 0
    }

    /// No write begins from now on. Returns whether none is under way.
    pub const fn close(&mut self) -> bool {
        self.is_closed = true;
        self.writes == 0
    }

    /// Writes may begin again.
    pub const fn open(&mut self) {
        self.is_closed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_and_in_order() {
        let stripe = STRIPE_UNITS;
        let piece = |shard, unit, units| Piece { shard, unit, units };
        assert_eq!(pieces(4, 8, 16).collect::<Vec<_>>(), [piece(0, 8, 16)]);
        assert_eq!(
            pieces(2, stripe - 8, stripe + 24).collect::<Vec<_>>(),
            [piece(0, stripe - 8, 8), piece(1, stripe, stripe), piece(0, 2 * stripe, 16)]
        );
        assert_eq!(pieces(1, stripe - 1, 2).count(), 2);
        assert_eq!(pieces(2, stripe, 0).count(), 0);
    }

    #[test]
    fn a_closed_gate_waits_for_the_writes_under_way() {
        let mut gate = WriteGate::default();
        assert!(gate.enter() && gate.enter() && !gate.close());
        assert!(!gate.enter() && !gate.leave() && gate.leave());
        gate.open();
        assert!(gate.enter() && gate.leave() && gate.close());
    }

    #[test]
    fn each_unit_belongs_to_one_shard() {
        for count in [1, 2, 4, 16] {
            let shards: Vec<_> = (0..count).map(|index| Shard::new(index, count).unwrap()).collect();
            for units in [0, 1, 7, STRIPE_UNITS - 1, STRIPE_UNITS, 5 * STRIPE_UNITS + 3, 1 << 51] {
                assert_eq!(shards.iter().map(|shard| shard.own_units(units)).sum::<u64>(), units);
            }
            for block in [0, 1, STRIPE_BLOCKS - 1, STRIPE_BLOCKS, 37 * STRIPE_BLOCKS + 5] {
                let of = Shard::of_unit(block * u64::from(BLOCK_UNITS), count);
                for shard in &shards {
                    let next = shard.next_block(block);
                    assert_eq!(next == block, shard.index() == of);
                    assert_eq!(Shard::of_unit(next * u64::from(BLOCK_UNITS), count), shard.index());
                    assert!(next < block + u64::from(count) * STRIPE_BLOCKS);
                }
            }
        }
    }

    #[test]
    fn numbers_of_shards_are_checked() {
        for (index, count) in [(0, 0), (1, 1), (0, 3), (2, 2), (0, 32)] {
            assert_eq!(Shard::new(index, count), None);
        }
    }
}
