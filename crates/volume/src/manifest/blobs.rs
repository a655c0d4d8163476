//! The blobs in use, and which of them the cleaner takes first. Any context.
//!
//! Looking for a victim costs the same for a pool of any size: data blobs are sorted by how much of them is dead, roughly.

use super::{Blob, BlobKind};
use aryk_volume_index::BlobId;
use std::collections::{BTreeMap, BTreeSet};

/// Classes of dead shares.
const CLASSES: i64 = 32;

/// The blobs in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Blobs {
    all: BTreeMap<BlobId, Blob>,
    blob_units: i64,
    index: BTreeSet<BlobId>,
    /// Blobs of the log and of data, by their dead share.
    by_dead: Vec<BTreeSet<BlobId>>,
    /// Units to which levels refer in all of these. It wraps around on numbers that no pool has, which a damaged manifest may
    /// have.
    data_live: i64,
    /// The same for blobs of the index: units of runs.
    index_live: i64,
    /// Units that were written to blobs of the cleaner. What frames that did not fit have left behind them is not dead: another
    /// move would leave it, too.
    written: BTreeMap<BlobId, i64>,
}

impl Blobs {
    pub(super) fn new(blob_units: u32) -> Self {
        Self {
            all: BTreeMap::new(),
            blob_units: i64::from(blob_units),
            index: BTreeSet::new(),
            by_dead: vec![BTreeSet::new(); CLASSES as usize + 1],
            data_live: 0,
            index_live: 0,
            written: BTreeMap::new(),
        }
    }

    pub(crate) fn get(&self, id: BlobId) -> Option<&Blob> {
        self.all.get(&id)
    }

    pub(crate) fn contains(&self, id: BlobId) -> bool {
        self.all.contains_key(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// All blobs, by number.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (BlobId, &Blob)> {
        self.all.iter().map(|(&id, blob)| (id, blob))
    }

    /// Blobs by number, from this one on.
    pub(crate) fn from(&self, first: BlobId) -> impl Iterator<Item = (BlobId, &Blob)> {
        self.all.range(first..).map(|(&id, blob)| (id, blob))
    }

    /// The blobs of the index.
    pub(crate) fn of_index(&self) -> impl Iterator<Item = (BlobId, &Blob)> {
        self.index.iter().map(|id| (*id, &self.all[id]))
    }

    /// The number of blobs of the index.
    pub(crate) fn index_len(&self) -> usize {
        self.index.len()
    }

    /// Units of runs in blobs of the index.
    pub(crate) const fn index_live(&self) -> i64 {
        self.index_live
    }

    /// Units to which levels refer in blobs of the log and of data.
    pub(crate) const fn data_live(&self) -> i64 {
        self.data_live
    }

    /// Blobs of the log and of data and the units of each that are dead, from the class with the most on, down to `least` units.
    pub(crate) fn deadest(&self, least: i64) -> impl Iterator<Item = (BlobId, i64)> {
        let classes = self.by_dead.iter().skip(self.class(least)).rev();
        classes.flatten().map(|id| (*id, self.dead(*id))).filter(move |(_, dead)| *dead >= least)
    }

    /// Adds a blob. Returns whether it is new.
    pub(super) fn insert(&mut self, id: BlobId, blob: Blob) -> bool {
        let is_new = self.remove(id).is_none();
        self.all.insert(id, blob);
        if blob.kind == BlobKind::Index {
            self.index.insert(id);
            self.index_live = self.index_live.wrapping_add(blob.live);
        } else {
            self.data_live = self.data_live.wrapping_add(blob.live);
            let class = self.class(self.dead(id));
            self.by_dead[class].insert(id);
        }
        is_new
    }

    pub(super) fn remove(&mut self, id: BlobId) -> Option<Blob> {
        let class = self.class(self.dead(id));
        let blob = self.all.remove(&id)?;
        if self.index.remove(&id) {
            self.index_live = self.index_live.wrapping_sub(blob.live);
        } else {
            self.data_live = self.data_live.wrapping_sub(blob.live);
            self.by_dead[class].remove(&id);
            self.written.remove(&id);
        }
        Some(blob)
    }

    /// Changes the number of units to which levels refer. Returns whether the blob exists and the number is possible.
    pub(super) fn change_live(&mut self, id: BlobId, change: i64) -> bool {
        let Some(live) = self.all.get(&id).and_then(|blob| blob.live.checked_add(change)) else {
            return false;
        };
        self.reclass(id, |blobs| {
            let blob = blobs.all.get_mut(&id).expect("found above");
            let sum = if blob.kind == BlobKind::Index { &mut blobs.index_live } else { &mut blobs.data_live };
            *sum = sum.wrapping_add(change);
            blob.live = live;
        });
        true
    }

    /// The cleaner has written so many units to a blob, and writes no more.
    pub(crate) fn set_written(&mut self, id: BlobId, units: u32) {
        self.reclass(id, |blobs| {
            blobs.written.insert(id, i64::from(units));
        });
    }

    /// Makes a change of a blob, and keeps its class up to date.
    fn reclass(&mut self, id: BlobId, change: impl FnOnce(&mut Self)) {
        let old = self.class(self.dead(id));
        change(self);
        let new = self.class(self.dead(id));
        if old != new && self.by_dead[old].remove(&id) {
            self.by_dead[new].insert(id);
        }
    }

    /// Units of a blob that are dead.
    fn dead(&self, id: BlobId) -> i64 {
        let written = self.written.get(&id).copied().unwrap_or(self.blob_units);
        self.all.get(&id).map_or(0, |blob| written.saturating_sub(blob.live))
    }

    fn class(&self, dead: i64) -> usize {
        (dead.clamp(0, self.blob_units) * CLASSES / self.blob_units) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadest_come_first_whatever_happens_to_them() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut blobs = Blobs::new(10_240);
        for life in 0..20_000 {
            let id = BlobId(rng.u32(0..40));
            match rng.u8(0..6) {
                0 => {
                    let kind = *rng.choice(&[BlobKind::Log, BlobKind::Data, BlobKind::Index]).unwrap();
                    blobs.insert(id, Blob { kind, life, live: rng.i64(0..10_240) });
                }
                1 => {
                    let exists = blobs.contains(id);
                    assert_eq!(blobs.remove(id).is_some(), exists);
                }
                2 if blobs.contains(id) => blobs.set_written(id, rng.u32(5000..10_240)),
                _ => {
                    let live = blobs.get(id).map_or(0, |blob| rng.i64(0..10_240) - blob.live);
                    assert_eq!(blobs.change_live(id, live), blobs.contains(id));
                }
            }
            let data = |(_, blob): &(BlobId, &Blob)| blob.kind != BlobKind::Index;
            assert_eq!(blobs.data_live(), blobs.iter().filter(data).map(|(_, blob)| blob.live).sum::<i64>());
            assert_eq!(blobs.index_live(), blobs.of_index().map(|(_, blob)| blob.live).sum::<i64>());
            assert_eq!(blobs.index_len(), blobs.of_index().count());
            let found: Vec<_> = blobs.deadest(1000).collect();
            let expected = blobs.iter().filter(data).filter(|(id, _)| blobs.dead(*id) >= 1000).count();
            assert_eq!(found.len(), expected);
            assert!(found.iter().all(|&(id, dead)| dead == blobs.dead(id) && dead >= 1000));
            assert!(found.iter().map(|(_, dead)| dead * CLASSES / 10_240).is_sorted_by(|a, b| a >= b));
        }
        assert!(!blobs.change_live(BlobId(99), 1));
    }
}
