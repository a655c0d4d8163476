//! Tells when a reactor's turn takes too long, and what is at fault. A thread of its own.

use crate::handle::{Handle, lock};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// What was seen of one reactor.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    turns: u64,
    sleeping: Duration,
    told: bool,
}

/// Looks at `handles` every half of `limit`, until `stop` is closed.
pub(crate) fn run(handles: &[Handle], limit: Duration, stop: &Receiver<()>) {
    let mut seen = vec![Seen::default(); handles.len()];
    while stop.recv_timeout(limit / 2) == Err(RecvTimeoutError::Timeout) {
        for (handle, seen) in handles.iter().zip(&mut seen) {
            check(handle, seen);
        }
    }
}

/// A reactor is stuck if something of it is running, and has been since the last look.
fn check(handle: &Handle, seen: &mut Seen) {
    let turns = handle.0.account.turns.load(Ordering::Relaxed);
    let running = handle.0.account.running.load(Ordering::Relaxed);
    if turns != seen.turns || running == 0 {
        *seen = Seen { turns, ..Seen::default() };
        return;
    }
    if !std::mem::replace(&mut seen.told, true) {
        let name = lock(&handle.0.names).get(&running).cloned();
        let name = name.unwrap_or_else(|| "something unnamed".to_owned());
        let last = handle.0.trace.last();
        tracing::warn!(core = handle.core(), what = name, ?last, "a reactor's turn takes too long");
    }
}
