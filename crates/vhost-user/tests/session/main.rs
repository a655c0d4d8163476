//! Tests of sessions with a scripted front-end, with the front-end of the `vhost` crate, and with a device that checks the
//! calls that it receives.

mod budget;
mod client;
mod device;
mod dirty;
mod fds;
mod foreign;
mod inflight;
mod memory;
mod order;
mod packed;
mod peer;
mod random;
mod reset;
mod server;

use aryk_vhost_user::{End, Error, SessionHandle, Stats, serve_front_end};
use device::Mock;
use peer::FrontEnd;
use std::rc::Rc;
use tokio::task::{JoinHandle, LocalSet};

/// Runs a test on one thread, as the daemon runs its sessions, with a timeout.
fn on_local_set(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let limit = std::time::Duration::from_secs(60);
    let limited = async { tokio::time::timeout(limit, test).await.expect("the test takes too long") };
    LocalSet::new().block_on(&runtime, limited);
}

/// A running session.
struct Running {
    device: Rc<Mock>,
    stats: Rc<Stats>,
    task: JoinHandle<Result<End, Error>>,
}

/// Starts a session. Returns its front-end, which has sent nothing yet.
fn start() -> (FrontEnd, Running) {
    start_with(Rc::new(Mock::default()))
}

fn start_with(device: Rc<Mock>) -> (FrontEnd, Running) {
    let (front_end, stream) = FrontEnd::pair();
    let stats = Rc::new(Stats::default());
    let task = tokio::task::spawn_local({
        let (device, stats) = (Rc::clone(&device), Rc::clone(&stats));
        async move { serve_front_end(stream, &*device, SessionHandle::default(), &stats).await }
    });
    (front_end, Running { device, stats, task })
}

impl Running {
    /// The result of the session. Checks that all queues were stopped.
    async fn end(self) -> Result<End, Error> {
        let end = self.task.await.expect("the session does not panic");
        assert!(self.device.running.borrow().is_empty(), "queues were left running");
        assert!(self.device.session.borrow().is_none(), "the device was not notified");
        assert_eq!(self.stats.snapshot().failed, u64::from(end.is_err()));
        end
    }

    /// The text of the error with which the session ended.
    async fn error(self) -> String {
        self.end().await.expect_err("an error").to_string()
    }
}
