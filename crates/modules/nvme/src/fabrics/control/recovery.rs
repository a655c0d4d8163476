//! Recovery of requests after a loss: the rounds over all reactors, whose steps are in [`crate::fabrics::driver`].
//!
//! A change that a lost connection had may still be executed at the target, until one of two things is known: the path has a new
//! controller, of a target that ends the earlier one first, or the target must have missed the keep-alives of the lost one. Until
//! then its blocks are guarded; all other requests go on through the other paths, or when the path is back.

use super::{Control, Guard, driver};
use crate::fabrics::driver::Extent;
use aryk_nvme::replay::History;
use aryk_rdma::Ending;
use aryk_reactor::Handle;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A target ends a controller at the latest after twice its keep-alive timeout, if it counts all commands as signs of life; and
/// this much later by its timers.
const FENCE_MARGIN: Duration = Duration::from_secs(1);

impl Control {
    /// Closes the connections of a path, and lets the requests that it does not hold up go on.
    pub(super) async fn stop_path(&mut self, path: usize) {
        self.shared.begin_life(path);
        let (key, lost_at) = (self.shared.key, Instant::now());
        self.cut(path).await;
        self.shared.set_gate(None);
        let (mut histories, mut unsettled, mut endings) = (Vec::new(), Vec::new(), Vec::new());
        for queue in &mut self.queues {
            let stopped = queue.reactor.call(move |cx| driver::stop(key, path, cx)).await;
            queue.is_replaying = false;
            if let Ok(Some(stopped)) = stopped {
                // The driver's `Began` may arrive only after this answer. The requests that it holds wait for step 2.
                queue.has_driver = true;
                histories.push(stopped.history);
                unsettled.extend(stopped.unsettled);
                endings.extend(stopped.endings);
            }
        }
        wait(endings).await;
        self.forget_path(path);
        self.forget_unwanted();
        let departed = self.shared.take_departed();
        histories.push(Box::new(History::unknown_until(departed.until.0)));
        unsettled.extend(departed.unsettled);
        for (of, _) in &unsettled {
            self.fences.insert(*of, lost_at + 2 * self.config().keep_alive + FENCE_MARGIN);
        }
        let extents: Vec<Extent> = unsettled.into_iter().map(|(_, extent)| extent).collect();
        self.guard = self.guard.with(&extents);
        self.shared.set_gate(Some(self.guard.clone()));
        let histories: Arc<[Box<History>]> = histories.into();
        for queue in &self.queues {
            let (histories, guard) = (Arc::clone(&histories), self.guard.clone());
            // A reactor that has ended has no requests.
            let _ = queue.reactor.call(move |cx| driver::settle(key, &histories, guard, cx)).await;
        }
        self.replay_if_proven().await;
    }

    /// Closes the connections of a path, if its target can access VMs' memory by itself, and waits until it cannot by them.
    pub(super) async fn cut(&self, path: usize) {
        if !self.config().is_direct {
            return;
        }
        let (key, mut endings) = (self.shared.key, Vec::new());
        for queue in &self.queues {
            // A reactor that has ended has no requests.
            endings
                .extend(queue.reactor.call(move |cx| driver::cut(key, path, cx)).await.unwrap_or_default());
        }
        wait(endings).await;
    }

    /// Lets the requests of a driver start that has begun with another gate.
    pub(super) async fn open_gate(&mut self, reactor: &Handle) {
        let (key, guard) = (self.shared.key, self.guard.clone());
        // A reactor that has ended has no requests.
        let _ = reactor.call(move |cx| driver::open(key, guard, cx)).await;
    }

    /// Submits changes again, if no lost connection can execute anything any more.
    pub(super) async fn replay_if_proven(&mut self) {
        if !self.fences.is_empty() || self.guard.is_empty() {
            return;
        }
        self.round += 1;
        let (key, round) = (self.shared.key, self.round);
        for queue in &mut self.queues {
            let replayed = queue.reactor.call(move |cx| driver::replay(key, round, cx)).await;
            queue.is_replaying = matches!(replayed, Ok(Some(1..)));
        }
        self.open_if_replayed().await;
    }

    /// A reactor has ended what it has submitted again.
    pub(super) async fn replayed(&mut self, reactor: &Handle, round: u64) {
        if round != self.round {
            return;
        }
        let its = self.queues.iter_mut().filter(|queue| queue.reactor == *reactor);
        its.for_each(|queue| queue.is_replaying = false);
        self.open_if_replayed().await;
    }

    /// Empties the guard, once all that was submitted again has ended.
    pub(super) async fn open_if_replayed(&mut self) {
        let is_waiting = !self.fences.is_empty() || self.queues.iter().any(|queue| queue.is_replaying);
        if is_waiting || self.guard.is_empty() {
            return;
        }
        self.guard = Guard::default();
        self.shared.set_gate(Some(Guard::default()));
        let key = self.shared.key;
        for queue in &self.queues {
            // A reactor that has ended has no requests.
            let _ = queue.reactor.call(move |cx| driver::open(key, Guard::default(), cx)).await;
        }
    }

    /// A path has a new controller.
    pub(super) async fn path_is_back(&mut self, path: usize, ends_earlier: bool) {
        if ends_earlier && self.fences.remove(&path).is_some() {
            self.replay_if_proven().await;
        }
    }
}

/// Waits until no device accesses memory any more for connections that were closed.
async fn wait(endings: Vec<Ending>) {
    for ending in endings {
        ending.wait().await;
    }
}
