//! The limits of one disk or group, as buckets for the reactors. Control context.

use crate::{Bucket, Kind, Limits, LimitsError};
use std::sync::Arc;

/// Limits and their buckets.
#[derive(Clone, Debug, Default)]
pub struct Limiter {
    limits: Limits,
    buckets: Vec<(Kind, Arc<Bucket>)>,
}

impl Limiter {
    /// A limiter without limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// The current limits.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The buckets, each with the requests that it limits.
    pub fn buckets(&self) -> &[(Kind, Arc<Bucket>)] {
        &self.buckets
    }

    /// Sets other limits. Buckets whose limit stays keep their debt. If the set of buckets changes, the caller must notify all
    /// users of buckets.
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
