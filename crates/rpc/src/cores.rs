//! Reactors come and go while the daemon serves. Control context.
//!
//! One that is to go takes nothing new. Its queues are moved to the others, under I/O as by any other move; what else has a task on it is moved, or comes to its
//! end; and when nothing is left there, and nobody is about to bring something, its thread ends. What cannot leave in time keeps it.

use crate::{Control, Error};
use aryk_reactor::{CoreSet, Handle, Hold};
use aryk_vhost_blk::MOVE_PATIENCE;
use rustix::io::Errno;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long queues have to leave.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether they have, and how long a queue is left alone that could not.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a reactor on `core`.
pub(crate) fn add(control: &Control, core: u16) -> Result<(), Error> {
    control.reactors.add(core)?;
    leave_cores(control);
    tracing::info!(core, "a reactor was added");
    Ok(())
}

/// Ends the reactor on `core`, when all that is on it has gone to others.
pub(crate) async fn remove(control: &Control, core: u16) -> Result<(), Error> {
    let leaving = Leaving { control, handle: control.reactors.begin_to_leave(core)? };
    let until = Instant::now() + PATIENCE;
    loop {
        let stays = leaving.move_all_away().await;
        if let Some(ending) = control.reactors.end(&leaving.handle).await {
            while !ending.is_over() {
                sleep(Duration::from_millis(1)).await;
            }
            break;
        }
        if Instant::now() > until {
            let detail = format!(
                "the reactor on core {core} stays: {}",
                stays.unwrap_or_else(|| "it is still in use".into())
            );
            return Err(Error::errno(Errno::TIMEDOUT, detail));
        }
        sleep(PAUSE).await;
    }
    leave_cores(control);
    tracing::info!(core, "a reactor was taken");
    Ok(())
}

fn leave_cores(control: &Control) {
    if let Err(error) = control.reactors.leave_cores() {
        tracing::warn!(%error, "cannot leave the reactors' cores to them");
    }
}

/// A reactor that is to end; it stays if that is given up.
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
    /// Tries each of its queues once; why one stays, if any does.
    async fn move_all_away(&self) -> Option<String> {
        let control = self.control;
        let other = control.reactors.least_loaded(None);
        for bdev in control.disks.registry.list() {
            // If the other ends meanwhile, too, the next round goes on.
            let _ = bdev.move_sampling(&self.handle, &other).await;
        }
        let threads = self.handle.call(|cx| cx.thread_stats()).await.unwrap_or_default();
        let mut stays = None;
        for thread in threads {
            let there = self.destination(&thread.cores);
            let moved = control.scheduler.move_thread(thread.id, there, MOVE_PATIENCE).await;
            if let Some(Err(error)) = moved {
                stays = Some(format!("{}: {error}", thread.name));
            }
        }
        stays
    }

    /// Where a queue goes: somewhere it may run, if there is such a place.
    fn destination(&self, cores: &CoreSet) -> Hold {
        let reactors = &self.control.reactors;
        reactors.least_loaded(reactors.is_any_on(cores).then_some(cores))
    }
}
