//! Adds and removes reactors while the daemon serves. Control context.
//!
//! A reactor that is to end takes no new work. Its queues and the shards of pools are moved to the others under I/O, as by any
//! other move; other tasks on it are moved or complete. When nothing is left, and no [`Hold`] of the reactor exists, its thread
//! ends. If something cannot leave in time, the reactor stays.

use crate::{Control, Error};
use aryk_reactor::{CoreSet, Handle, Hold, MOVE_PATIENCE};
use rustix::io::Errno;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long queues have to leave.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between attempts, and how long a queue that could not move is left alone.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a reactor on `core`.
pub(crate) fn add(control: &Control, core: u16) -> Result<(), Error> {
    control.reactors.add(core)?;
    leave_cores(control);
    tracing::info!(core, "reactor added");
    Ok(())
}

/// Ends the reactor on `core`, after all its work has moved to other reactors.
pub(crate) async fn remove(control: &Control, core: u16) -> Result<(), Error> {
    let leaving = Leaving { control, handle: control.reactors.begin_to_leave(core)? };
    let until = Instant::now() + PATIENCE;
    loop {
        let stays = leaving.move_all_away(until).await;
        if let Some(ending) = control.reactors.end(&leaving.handle).await {
            while !ending.is_over() {
                sleep(Duration::from_millis(1)).await;
            }
            break;
        }
        if Instant::now() > until {
            let detail = format!(
                "cannot remove the reactor on core {core}: {}",
                stays.unwrap_or_else(|| "it is still in use".into())
            );
            return Err(Error::errno(Errno::TIMEDOUT, detail));
        }
        sleep(PAUSE).await;
    }
    leave_cores(control);
    tracing::info!(core, "reactor removed");
    Ok(())
}

fn leave_cores(control: &Control) {
    if let Err(error) = control.reactors.leave_cores() {
        tracing::warn!(%error, "cannot move other threads off the reactors' cores");
    }
}

/// A reactor that is to end; when this is dropped before the end, the reactor stays.
struct Leaving<'a> {
    control: &'a Control,
    handle: Handle,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.control.reactors.keep(&self.handle);
    }
}

impl Leaving<'_> {
    /// Tries to move each of the queues and background tasks once, but begins no move after `until`; returns why one of them
    /// stays, if one does.
    async fn move_all_away(&self, until: Instant) -> Option<String> {
        let control = self.control;
        let other = control.reactors.least_loaded(None);
        for bdev in control.disks.registry.list() {
            // If the other reactor ends too, the next round moves the sampling again.
            let _ = bdev.move_sampling(&self.handle, &other).await;
        }
        let threads = self.handle.call(|cx| cx.thread_stats()).await.unwrap_or_default();
        let mut stays = None;
        for thread in threads {
            if Instant::now() > until {
                return stays.or_else(|| Some(format!("{}: the others took too long", thread.name)));
            }
            let there = self.destination(&thread.cores);
            let moved = control.scheduler.move_thread(thread.id, there, MOVE_PATIENCE).await;
            if let Some(Err(error)) = moved {
                stays = Some(format!("{}: {error}", thread.name));
            }
        }
        stays
    }

    /// Where a queue moves: to a core that its mask allows, if such a core has a reactor.
    fn destination(&self, cores: &CoreSet) -> Hold {
        let reactors = &self.control.reactors;
        reactors.least_loaded(reactors.is_any_on(cores).then_some(cores))
    }
}

#[cfg(test)]
mod tests;
