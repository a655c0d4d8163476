//! Objects of Ceph that could not be restored, and when the next try is made. Control context.
//!
//! The restoration tries absent objects again each second. A try for an object of Ceph connects a client, which is work for the
//! cluster's monitors: so the times between tries that have failed become longer.

use crate::{Error, journal};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// The first and the longest time between two tries.
const DELAY_MIN: Duration = Duration::from_secs(1);
const DELAY_MAX: Duration = Duration::from_secs(16);

/// A try that has failed.
#[derive(Debug)]
struct Failed {
    /// When the next try is made.
    next: Instant,
    /// The time between the two tries.
    delay: Duration,
    error: Error,
}

/// The tries that have failed, by method and object.
#[derive(Debug, Default)]
pub(crate) struct Waits(RefCell<HashMap<(&'static str, String), Failed>>);

impl Waits {
    /// Refuses a try of the restoration that comes too early. Clients' calls are never too early.
    ///
    /// # Errors
    /// That of the last try.
    pub(super) fn check(&self, method: &'static str, object: &str) -> Result<(), Error> {
        if !journal::is_restore() {
            return Ok(());
        }
        match self.0.borrow().get(&(method, object.to_owned())) {
            Some(failed) if Instant::now() < failed.next => Err(failed.error.clone()),
            _ => Ok(()),
        }
    }

    /// Notes the result of a try: the error of one after which the next must wait.
    pub(super) fn note(&self, method: &'static str, object: &str, error: Option<Error>) {
        let (mut all, key, now) = (self.0.borrow_mut(), (method, object.to_owned()), Instant::now());
        let before = all.remove(&key);
        let Some(error) = error.filter(|_| journal::is_restore()) else { return };
        // Those that are not tried any more: a client has removed the objects.
        all.retain(|_, failed| now < failed.next + DELAY_MAX);
        let delay = before.map_or(DELAY_MIN, |failed| (failed.delay * 2).min(DELAY_MAX));
        all.insert(key, Failed { next: now + delay, delay, error });
    }
}
