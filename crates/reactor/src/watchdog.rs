//! Logs each turn of a reactor that takes too long, and the work that runs in it. The watchdog has a thread of its own.

use crate::handle::{Handle, lock};
use crate::{Clock, Nanos, ReactorList};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Checks the reactors every half of `limit`, until `stop` is closed.
pub(crate) fn run(reactors: &ReactorList, limit: Duration, stop: &Receiver<()>) {
    // The last reported turn of each core.
    let mut reported = BTreeMap::new();
    while stop.recv_timeout(limit / 2) == Err(RecvTimeoutError::Timeout) {
        let now = Clock::Monotonic.now();
        for handle in &reactors.handles() {
            if let Some(stuck) = Stuck::find(handle, now, limit)
                && reported.insert(handle.core(), stuck.began) != Some(stuck.began)
            {
                let for_ms = stuck.took.as_millis() as u64;
                tracing::warn!(core = handle.core(), for_ms, "a reactor is stuck in {stuck}");
            }
        }
    }
}

/// A turn that takes too long.
struct Stuck<'a> {
    handle: &'a Handle,
    began: Nanos,
    took: Duration,
}

impl<'a> Stuck<'a> {
    fn find(handle: &'a Handle, now: Nanos, limit: Duration) -> Option<Self> {
        let began = handle.0.account.turn_began()?;
        let took = now.since(began);
        (took > limit).then_some(Self { handle, began, took })
    }
}

/// Writes the work that runs, and the last trace record of this turn with its layer and object.
impl fmt::Display for Stuck<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = self.handle.0.account.running();
        match lock(&self.handle.0.names).get(&running) {
            Some(name) => f.write_str(name)?,
            None => f.write_str(running.kind())?,
        }
        let Some(last) = self.handle.0.trace.last().filter(|r| r.at >= self.began) else { return Ok(()) };
        write!(f, ", after {} in {}", last.point.name(), last.layer.name())?;
        match self.handle.name_of(last.layer, last.object) {
            Some(name) => write!(f, " of {name}"),
            None => write!(f, " of object {}", last.object),
        }
    }
}
