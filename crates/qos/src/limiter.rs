//! The limits of one disk or group, as the buckets that reactors go by. Control context.

use crate::{Bucket, Kind, Limits, LimitsError};
use std::sync::Arc;

/// Limits, and the buckets that they are.
#[derive(Clone, Debug, Default)]
pub struct Limiter {
    limits: Limits,
    buckets: Vec<(Kind, Arc<Bucket>)>,
}

impl Limiter {
    /// Without any limit.
    pub fn new() -> Self {
        Self::default()
    }

    /// What was set.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The buckets, each with what it counts.
    pub fn buckets(&self) -> &[(Kind, Arc<Bucket>)] {
        &self.buckets
    }

    /// Has other limits from now on. Buckets that stay keep their debt. Whoever goes by buckets must be told if there are others now.
    ///
    /// # Errors
    /// [`LimitsError`]; then nothing has changed.
    pub fn set(&mut self, limits: Limits, now: u64) -> Result<(), LimitsError> {
        let costs = limits.costs()?;
        let before = std::mem::take(&mut self.buckets);
        let bucket = |(kind, cost)| match before.iter().find(|(k, _)| *k == kind) {
            Some((_, bucket)) => {
                bucket.set(cost, limits.burst, now);
                (kind, Arc::clone(bucket))
            }
            None => (kind, Arc::new(Bucket::new(cost, limits.burst, now))),
        };
        self.buckets = costs.into_iter().map(bucket).collect();
        self.limits = limits;
        Ok(())
    }
}
