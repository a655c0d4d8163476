//! The I/O queues of a controller: each reactor with channels has one on each path, as far as the target has enough.
//!
//! A reactor's queues are wanted from [`Command::Prepare`] or [`Command::Began`] on, and until [`Command::Gone`]. Tasks of their
//! own connect queues, and give them to their reactors.

use super::{Command, ConnectError, Control, Path, Waiter, admin, driver};
use crate::fabrics::driver::PATHS_MAX;
use aryk_bdev::OpenError;
use aryk_log_limit::limited;
use aryk_reactor::Handle;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::spawn_local;

/// Time between two attempts to connect a queue while the controller is there.
const QUEUE_INTERVAL: Duration = Duration::from_secs(1);

/// How far the queue of a reactor on a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The path is not connected, or has no queue for the reactor.
    Wanted,
    /// It is being connected, with this QID.
    Connecting(u16),
    /// The reactor has it, or it is kept for the reactor's first channel.
    Connected(u16),
    /// It could not be connected, and is tried again.
    Failed,
}

impl Stage {
    const fn qid(self) -> Option<u16> {
        match self {
            Self::Connecting(qid) | Self::Connected(qid) => Some(qid),
            Self::Wanted | Self::Failed => None,
        }
    }

    const fn is_connected(self) -> bool {
        matches!(self, Self::Connected(_))
    }
}

/// The queues of a reactor.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) reactor: Handle,
    /// By path.
    pub(super) stages: [Stage; PATHS_MAX],
    /// The reactor has a driver.
    pub(super) has_driver: bool,
    /// What the reactor has submitted again has not ended.
    pub(super) is_replaying: bool,
    waiters: Vec<Waiter>,
}

impl Queue {
    /// Answers the openers that wait for a queue.
    pub(super) fn answer(&mut self, result: &Result<(), OpenError>) {
        // An opener may be gone.
        self.waiters.drain(..).for_each(|waiter| drop(waiter.send(result.clone())));
    }

    fn is_connecting(&self) -> bool {
        self.stages.iter().any(|stage| matches!(stage, Stage::Connecting(_)))
    }

    fn is_connected(&self) -> bool {
        self.stages.iter().any(|stage| stage.is_connected())
    }

    /// Whether no opener waits for a queue, and none is being connected.
    pub(super) fn is_unwanted(&self) -> bool {
        self.waiters.is_empty() && !self.is_connecting()
    }
}

impl Control {
    fn queue_of(&mut self, reactor: Handle) -> &mut Queue {
        let place = self.queues.iter().position(|queue| queue.reactor == reactor);
        let place = place.unwrap_or_else(|| {
            let stages = [Stage::Wanted; PATHS_MAX];
            let (has_driver, is_replaying, waiters) = (false, false, Vec::new());
            self.queues.push(Queue { reactor, stages, has_driver, is_replaying, waiters });
            self.queues.len() - 1
        });
        &mut self.queues[place]
    }

    /// An opener needs queues on a reactor.
    pub(super) fn prepare(&mut self, reactor: Handle, reply: Waiter) {
        // A reactor may have ended.
        self.queues.retain(|queue| !queue.reactor.has_ended());
        let result = if self.is_stopping {
            Some(Err(OpenError::Removed))
        } else if self.shared.owner_for(&reactor).is_some() || self.shared.is_failing.load(Ordering::Acquire)
        {
            Some(Ok(()))
        } else {
            None
        };
        if let Some(result) = result {
            // The opener may be gone.
            return drop(reply.send(result));
        }
        let queue = self.queue_of(reactor);
        if queue.is_connected() {
            return drop(reply.send(Ok(())));
        }
        queue.waiters.push(reply);
        self.connect_wanted();
    }

    /// A driver has begun on a reactor, with the gate of that number and these queues.
    pub(super) async fn driver_began(&mut self, reactor: Handle, gate: u64, queues: &[(usize, u64, u16)]) {
        let shared = Arc::clone(&self.shared);
        let queue = self.queue_of(reactor.clone());
        queue.has_driver = true;
        for (path, stage) in queue.stages.iter_mut().enumerate() {
            let is_its = |(of, life, _): &&(usize, u64, u16)| *of == path && *life == shared.life(path);
            match queues.iter().find(is_its) {
                Some((_, _, qid)) => *stage = Stage::Connected(*qid),
                // An earlier driver had it.
                None if stage.is_connected() && !shared.has_prepared(&reactor, path) => {
                    *stage = Stage::Wanted
                }
                None => {}
            }
        }
        // The message that one of them is connected may come only now, and changes nothing then.
        if queue.is_connected() {
            queue.answer(&Ok(()));
        }
        if gate != shared.gate().0 {
            self.open_gate(&reactor).await;
        }
        if shared.is_failing.load(Ordering::Acquire) {
            let key = shared.key;
            // A reactor that has ended has no requests.
            let _ = reactor.call(move |cx| driver::fail(key, cx)).await;
        }
        self.connect_wanted();
        self.publish();
    }

    /// The number of queues that a path needs: one for each driver.
    pub(super) fn needed(&self) -> u16 {
        self.queues.iter().filter(|queue| queue.has_driver).count() as u16
    }

    /// Forgets reactors without a driver, a queue, or an opener that waits for one.
    pub(super) fn forget_unwanted(&mut self) {
        self.queues.retain(|queue| queue.has_driver || queue.is_connected() || !queue.is_unwanted());
    }

    /// A reactor has no driver any more.
    pub(super) async fn forget_queues(&mut self, reactor: &Handle) {
        let Some(place) = self.queues.iter().position(|queue| queue.reactor == *reactor) else { return };
        (self.queues[place].has_driver, self.queues[place].is_replaying) = (false, false);
        if self.queues[place].is_unwanted() {
            self.queues.swap_remove(place);
        } else {
            let shared = Arc::clone(&self.shared);
            for (path, stage) in self.queues[place].stages.iter_mut().enumerate() {
                if stage.is_connected() && !shared.has_prepared(reactor, path) {
                    *stage = Stage::Wanted;
                }
            }
        }
        self.connect_wanted();
        self.open_if_replayed().await;
        self.publish();
    }

    /// It is time to connect a queue again.
    pub(super) fn connect_again(&mut self, reactor: &Handle, path: usize) {
        let queue = self.queues.iter_mut().find(|queue| queue.reactor == *reactor);
        if let Some(queue) = queue.filter(|queue| queue.stages[path] == Stage::Failed) {
            queue.stages[path] = Stage::Wanted;
        }
        self.connect_wanted();
    }

    /// Connects the queues that are wanted, on the paths that are connected.
    pub(super) fn connect_wanted(&mut self) {
        let Self { paths, queues, shared, .. } = self;
        for (&path, of_path) in paths.iter() {
            let Some(limits) = of_path.limits() else { continue };
            let mut used: BTreeSet<u16> =
                queues.iter().filter_map(|queue| queue.stages[path].qid()).collect();
            for queue in queues.iter_mut().filter(|queue| queue.stages[path] == Stage::Wanted) {
                let Some(qid) = (1..=limits.count).find(|qid| !used.contains(qid)) else { break };
                used.insert(qid);
                queue.stages[path] = Stage::Connecting(qid);
                let (shared, config, reactor) =
                    (Arc::clone(shared), Arc::clone(&of_path.config), queue.reactor.clone());
                let life = shared.life(path);
                spawn_local(async move {
                    let result = match admin::open_queue(&config, limits, qid, (path, life)).await {
                        Ok(live) => {
                            let of_reactor = Arc::clone(&shared);
                            // A reactor that has ended wants no queue.
                            let _ = reactor.call(move |cx| driver::give(&of_reactor, live, cx)).await;
                            Ok(())
                        }
                        Err(error) => Err(error),
                    };
                    shared.send(Command::Connected { reactor, path, life, result });
                });
            }
        }
        self.shared.needed.store(self.needed(), Ordering::Release);
        let is_there = self.paths.values().any(Path::takes_requests);
        let lacks = |queue: &Queue| {
            let is_nowhere = queue.stages.iter().all(|stage| *stage == Stage::Wanted);
            is_there && is_nowhere && !queue.waiters.is_empty()
        };
        while let Some(place) = self.queues.iter().position(lacks) {
            self.use_other_queue(place);
        }
    }

    /// The target has too few queues: a reactor uses that of another.
    fn use_other_queue(&mut self, place: usize) {
        let staying = self.env.reactors().staying();
        let is_owner = |queue: &&Queue| {
            (queue.is_connected() || queue.is_connecting()) && staying.contains(&queue.reactor)
        };
        let owner = self.queues.iter().find(is_owner);
        let owner = owner.and_then(|owner| self.env.reactors().hold(&owner.reactor));
        let reactor = self.queues[place].reactor.clone();
        let result = match owner {
            Some(owner) => {
                tracing::warn!(
                    controller = self.config().name,
                    core = reactor.core(),
                    through = owner.core(),
                    "a core sends its requests through the queue of another: the target has too few"
                );
                self.shared.route(reactor, owner);
                Ok(())
            }
            None => Err(OpenError::Unavailable("the target has no queue for this core".to_owned())),
        };
        self.queues[place].answer(&result);
        if !self.queues[place].has_driver {
            self.queues.swap_remove(place);
        }
    }

    /// A queue was connected, and has been given to its reactor, or was not.
    pub(super) fn connected(
        &mut self,
        reactor: &Handle,
        path: usize,
        life: u64,
        result: Result<(), ConnectError>,
    ) {
        if life != self.shared.life(path) {
            return;
        }
        let Some(queue) = self.queues.iter_mut().find(|queue| queue.reactor == *reactor) else { return };
        let Stage::Connecting(qid) = queue.stages[path] else { return };
        match result {
            Ok(()) => {
                queue.stages[path] = Stage::Connected(qid);
                queue.answer(&Ok(()));
            }
            Err(error) => {
                queue.stages[path] = Stage::Failed;
                if !queue.is_connected() && !queue.is_connecting() {
                    let reason = format!("the queue cannot be connected: {error}");
                    queue.answer(&Err(OpenError::Unavailable(reason)));
                }
                let (shared, reactor) = (Arc::clone(&self.shared), reactor.clone());
                limited!(
                    self.lines, warn, controller = shared.config.name, core = reactor.core(), %error,
                    "a queue cannot be connected"
                );
                spawn_local(async move {
                    tokio::time::sleep(QUEUE_INTERVAL).await;
                    shared.send(Command::Again { reactor, path });
                });
            }
        }
        self.publish();
    }

    /// The cores with a queue on a path.
    pub(super) fn cores_on(&self, path: usize) -> Vec<u16> {
        let connected = self.queues.iter().filter(|queue| queue.stages[path].is_connected());
        connected.map(|queue| queue.reactor.core()).collect()
    }

    /// The queues of a path are gone.
    pub(super) fn forget_path(&mut self, path: usize) {
        self.queues.iter_mut().for_each(|queue| queue.stages[path] = Stage::Wanted);
    }
}
