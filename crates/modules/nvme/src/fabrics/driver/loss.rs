//! The steps after a lost connection, and the end of a queue. The thread sends each as a message. Reactor context.
//!
//! 0. [`cut`] on all reactors, if the target can access VMs' memory by itself ([`crate::fabrics::direct`]): the connections of
//!    the path are closed, and the thread waits until no device accesses memory for them. Other requests go on meanwhile.
//! 1. [`stop`] on all reactors: the connections of the path are closed, and no request starts. Requests that the controller had
//!    are held, and those that another controller has count as completed.
//! 2. [`settle`] on all reactors, with what all have reported: requests that change nothing take another path, and changes that
//!    must not be submitted again fail. From then on, only changes wait whose blocks a lost connection may still change: the
//!    guard.
//! 3. [`replay`] on all reactors, when no lost connection can execute anything any more: the other changes are submitted again.
//! 4. [`open`] on all reactors, when all these have ended: the guard is empty.
//!
//! A path that is lost meanwhile begins with step 1 again.

use super::{Absence, Extent, Gate, Guard, Live, Loss, PATHS_MAX, QueueDriver, Request, State, with_driver};
use crate::fabrics::control::Command;
use crate::fabrics::shared::Shared;
use crate::status::errno;
use aryk_bdev::{Failure, Io, Op, Status};
use aryk_nvme::queue::{Fate, Unfinished};
use aryk_nvme::replay::{self, Change, History, Replay};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_rdma::Ending;
use aryk_reactor::{Cx, DriverKey};
use aryk_slots::Key;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Losses that a request survives: it may be what the target fails at.
const LOSSES_MAX: u8 = 16;

/// What a reactor reports when the connections of a path are closed after a loss.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// What the queues have changed lately; changes that are under way on other paths count as completed.
    pub(crate) history: Box<History>,
    /// Changes that a controller may still make, by path.
    pub(crate) unsettled: Vec<(usize, Extent)>,
    /// Of connections that were closed since step 0. Step 2 comes after their ends.
    pub(crate) endings: Vec<Ending>,
}

/// Gives a reactor a connected queue: its driver, or the one that the first channel makes.
pub(crate) fn give(shared: &Arc<Shared>, live: Box<Live>, cx: &mut Cx) {
    if live.life != shared.life(live.path) {
        return;
    }
    let mut live = Some(live);
    with_driver(shared.key, cx, |driver, cx| {
        if let Some(live) = live.take() {
            driver.install(live, cx);
            driver.start_waiting(cx);
        }
    });
    if let Some(live) = live {
        shared.keep_prepared(cx.handle().clone(), live);
    }
}

/// Step 0. Returns the ends to wait for.
pub(crate) fn cut(key: DriverKey, path: usize, cx: &mut Cx) -> Vec<Ending> {
    let endings = with_driver(key, cx, |driver, cx| {
        driver.drop_live(path, cx);
        std::mem::take(&mut driver.endings)
    });
    endings.unwrap_or_default()
}

/// Step 1. `None`: the reactor has no driver.
pub(crate) fn stop(key: DriverKey, path: usize, cx: &mut Cx) -> Option<Stopped> {
    with_driver(key, cx, |driver, cx| {
        driver.drop_live(path, cx);
        driver.gate = Gate::Closed;
        driver.replayed = 0;
        let mut history = Box::new(driver.history.clone());
        for (_, request) in driver.requests.iter_mut() {
            match request.state {
                State::Lost => request.state = State::Held,
                State::AtController { .. } if request.io.op.is_change() => {
                    let channel = driver.channels.get(request.channel).expect("it has requests");
                    let (nsid, slba, blocks) =
                        (channel.namespace.nsid(), request.io.lba.0, request.io.blocks.0);
                    history.add(Change { nsid, slba, blocks, completed: u64::MAX });
                }
                _ => {}
            }
        }
        let (unsettled, endings) =
            (std::mem::take(&mut driver.unsettled), std::mem::take(&mut driver.endings));
        Stopped { history, unsettled, endings }
    })
}

/// Step 2.
pub(crate) fn settle(key: DriverKey, histories: &[Box<History>], guard: Guard, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        driver.rewind(histories, cx);
        driver.set_guard(guard);
        driver.start_waiting(cx);
    });
}

/// Step 3. Returns the number of changes that are submitted again; [`Command::Replayed`] follows their end, if there are any.
/// `None`: the reactor has no driver any more.
pub(crate) fn replay(key: DriverKey, round: u64, cx: &mut Cx) -> Option<u32> {
    with_driver(key, cx, |driver, cx| {
        driver.round = round;
        for key in driver.in_state(State::Unproven).into_iter().rev() {
            let request = driver.requests.get_mut(key).expect("just found");
            (request.state, request.is_replayed) = (State::Waiting, true);
            driver.waiting.push_front(key);
        }
        let replayed = driver.requests.iter().filter(|(_, request)| request.is_replayed).count() as u32;
        driver.replayed = replayed;
        driver.start_waiting(cx);
        replayed
    })
}

/// Step 4, and for a driver that has begun while its gate was closed.
pub(crate) fn open(key: DriverKey, guard: Guard, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        driver.set_guard(guard);
        driver.start_waiting(cx);
    });
}

/// All paths have been lost for long: requests fail until one is back.
pub(crate) fn fail(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        if driver.lives.iter().all(Option::is_none) && driver.absence == Absence::Wait {
            driver.absence = Absence::Fail;
            driver.end_all(cx);
        }
    });
}

/// A path is back, and its queues are being connected: requests wait again.
pub(crate) fn hold(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, _| {
        if driver.absence == Absence::Fail {
            driver.absence = Absence::Wait;
        }
    });
}

/// The controller does not come back: requests fail from now on. Step 0 has been done for all paths.
pub(crate) fn close(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        (0..PATHS_MAX).for_each(|path| driver.drop_live(path, cx));
        driver.absence = Absence::Removed;
        driver.end_all(cx);
    });
}

/// Returns the number of commands that a path has. If it has none, its connection is closed.
pub(crate) fn drain(key: DriverKey, path: usize, cx: &mut Cx) -> u32 {
    let drained = with_driver(key, cx, |driver, cx| {
        let left = driver.lives[path].as_ref().map_or(0, |live| live.in_flight());
        if left == 0 {
            driver.drop_live(path, cx);
        }
        left
    });
    drained.unwrap_or(0)
}

impl QueueDriver {
    /// Takes over a connection.
    pub(super) fn install(&mut self, mut live: Box<Live>, cx: &mut Cx) {
        if self.absence == Absence::Removed || live.life != self.shared.life(live.path) {
            return;
        }
        let (path, watched) = (live.path, live.link.watch(self.id, cx));
        for (_, channel) in self.channels.iter_mut() {
            channel.commands = channel.namespace.commands();
            channel.route.forget();
        }
        if live.link.has_tls() && self.sealing.is_none() {
            self.sealing = Some(cx.local_state());
        }
        self.lives[path] = Some(live);
        self.absence = Absence::Wait;
        match watched {
            Ok(()) => cx.wake_driver(self.id),
            Err(error) => self.lose(path, &error.into(), cx),
        }
    }

    /// Closes the connection of a path, and tells the thread why.
    #[cold]
    pub(super) fn lose(&mut self, path: usize, loss: &Loss, cx: &mut Cx) {
        let Some(live) = &self.lives[path] else { return };
        let life = live.life;
        self.drop_live(path, cx);
        self.shared.send(Command::Lost { path, life, reason: loss.to_string() });
    }

    /// Closes the connection of a path, if there is one. Requests that the controller had are held.
    fn drop_live(&mut self, path: usize, cx: &mut Cx) {
        let Some(live) = self.lives[path].take() else { return };
        self.endings.extend(live.link.close(cx));
        self.channels.iter_mut().for_each(|(_, channel)| channel.route.forget());
        for (_, request) in self.requests.iter_mut() {
            if !matches!(request.state, State::AtController { path: its, .. } if its == path) {
                continue;
            }
            (request.state, request.refused_since) = (State::Lost, 0);
            request.losses = request.losses.saturating_add(1);
            if request.io.op.is_change() {
                let nsid = self.channels.get(request.channel).expect("it has requests").namespace.nsid();
                let (first, blocks) = (request.io.lba.0, request.io.blocks.0);
                let extent = Extent { nsid, first, end: first.saturating_add(blocks) };
                self.unsettled.push((path, extent));
            }
        }
    }

    /// Lets requests start that change no block of the guard, and puts those in order that waited for it.
    pub(super) fn set_guard(&mut self, guard: Guard) {
        self.gate = if guard.is_empty() { Gate::Open } else { Gate::Guarded };
        self.guard = guard;
        for key in std::mem::take(&mut self.guarded).into_iter().rev() {
            self.requests.get_mut(key).expect("it waits").state = State::Waiting;
            self.waiting.push_front(key);
        }
    }

    /// The requests in a state, in order.
    fn in_state(&self, state: State) -> Vec<Key> {
        let found = self.requests.iter().filter(|(_, request)| request.state == state);
        let mut found: Vec<(u64, Key)> = found.map(|(key, request)| (request.number, key)).collect();
        found.sort_unstable_by_key(|(number, _)| *number);
        found.into_iter().map(|(_, key)| key).collect()
    }

    /// Decides about the requests that are held.
    fn rewind(&mut self, histories: &[Box<History>], cx: &mut Cx) {
        let histories: Vec<&History> = histories.iter().map(|history| &**history).collect();
        for key in self.in_state(State::Held).into_iter().rev() {
            let request = self.requests.get_mut(key).expect("just found");
            if request.is_aborted {
                // No earlier: from now on, the guard has its blocks on all reactors.
                self.finish(key, Status::Aborted, cx);
                continue;
            }
            let Io { op, lba, blocks, .. } = request.io;
            let replay = match op {
                Op::Read | Op::Compare | Op::Flush => Replay::Harmless,
                Op::Write | Op::WriteZeroes | Op::Unmap => Replay::IfUnseen { slba: lba.0, blocks: blocks.0 },
                Op::CompareAndWrite | Op::Copy => Replay::Never,
            };
            let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
            let entry = SubmissionEntry::new(0, namespace.nsid());
            let unfinished = Unfinished { entry, token: 0, submitted: request.first_attempt };
            let fate = match request.is_replayed {
                // The guard has kept later changes of its blocks away since the first decision.
                true => Fate::Resubmit,
                false => replay::decide(replay, &unfinished, &histories),
            };
            if fate == Fate::Fail || request.losses > LOSSES_MAX {
                namespace.failed(Failure::now(op, lba, blocks, errno(Status::Aborted)));
                self.shared.failed_by_loss.fetch_add(1, Ordering::Relaxed);
                self.finish(key, Status::Medium, cx);
                continue;
            }
            self.shared.resubmitted.fetch_add(1, Ordering::Relaxed);
            if op.is_change() {
                request.state = State::Unproven;
            } else {
                request.state = State::Waiting;
                self.waiting.push_front(key);
            }
        }
    }

    /// A change that was submitted again has ended.
    #[cold]
    pub(super) fn ended_replayed(&mut self) {
        // Between a loss and the next step 3, they are not counted.
        let Some(left) = self.replayed.checked_sub(1) else { return };
        self.replayed = left;
        if left == 0 {
            self.shared.send(Command::Replayed { reactor: self.handle.clone(), round: self.round });
        }
    }

    /// Fails a request because there is no path.
    #[cold]
    pub(super) fn fail_away(&self, key: Key) -> Status {
        let request = self.requests.get(key).expect("the caller has a request");
        let Io { op, lba, blocks, .. } = request.io;
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        namespace.failed(Failure::now(op, lba, blocks, errno(Status::Removed)));
        Status::Medium
    }

    /// Ends all requests, none of which a controller has. While the thread does not know of a lost connection yet, its requests
    /// do not end: step 2 does that.
    fn end_all(&mut self, cx: &mut Cx) {
        let may_end = |request: &Request| self.absence == Absence::Removed || request.state != State::Lost;
        let all = self.requests.iter().filter(|(_, request)| may_end(request));
        let mut all: Vec<(u64, Key)> = all.map(|(key, request)| (request.number, key)).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        self.guarded.clear();
        self.delayed.clear();
        self.waiting.clear();
        for (_, key) in all {
            let status = match self.absence {
                Absence::Removed => Status::Removed,
                Absence::Wait | Absence::Fail => self.fail_away(key),
            };
            self.finish(key, status, cx);
        }
    }
}
