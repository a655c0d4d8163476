//! How many units of each blob become referenced or unreferenced.
//!
//! Context: any. Adding is an append; the list is sorted and summed up when it has doubled, so that a long merge takes memory for
//! the blobs that it meets and not for its entries.

use crate::key::{BlobId, Value};

/// Entries beyond twice the number of blobs at which the list is summed up.
const SLACK: usize = 4096;

/// Changes of units by blob.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    changes: Vec<(BlobId, i64)>,
    /// The number of changes at which they are summed up.
    limit: usize,
}

impl Tally {
    /// Counts the reference of an entry that appears.
    pub fn add(&mut self, value: &Value) {
        if let Some((blob, units)) = value.reference() {
            self.change(blob, i64::from(units));
        }
    }

    /// Counts the reference of an entry that goes away.
    pub fn remove(&mut self, value: &Value) {
        if let Some((blob, units)) = value.reference() {
            self.change(blob, -i64::from(units));
        }
    }

    fn change(&mut self, blob: BlobId, units: i64) {
        if self.changes.len() >= self.limit.max(SLACK) {
            self.sum_up();
            self.limit = 2 * self.changes.len() + SLACK;
        }
        self.changes.push((blob, units));
    }

    fn sum_up(&mut self) {
        self.changes.sort_unstable_by_key(|(blob, _)| *blob);
        self.changes.dedup_by(|next, sum| {
            let is_same = next.0 == sum.0;
            if is_same {
                sum.1 += next.1;
            }
            is_same
        });
    }

    /// The sum of changes of each blob, by blob, without those that are zero.
    pub fn into_changes(mut self) -> Vec<(BlobId, i64)> {
        self.sum_up();
        self.changes.retain(|(_, units)| *units != 0);
        self.changes
    }
}
