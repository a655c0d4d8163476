//! How many units of each blob become referenced or unreferenced.
//!
//! Context: any. Each change costs about the same, however many blobs a long merge meets.

use std::collections::BTreeMap;

use crate::key::{BlobId, Value};

/// Changes of units by blob.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    changes: BTreeMap<BlobId, i64>,
}

impl Tally {
    /// Counts the reference of an entry that appears.
    pub fn add(&mut self, value: &Value) {
        if let Some((blob, units)) = value.reference() {
            *self.changes.entry(blob).or_default() += i64::from(units);
        }
    }

    /// Counts the reference of an entry that goes away.
    pub fn remove(&mut self, value: &Value) {
        if let Some((blob, units)) = value.reference() {
            *self.changes.entry(blob).or_default() -= i64::from(units);
        }
    }

    /// The sum of changes of each blob, by blob; some may be zero.
    pub fn into_changes(self) -> BTreeMap<BlobId, i64> {
        self.changes
    }
}
