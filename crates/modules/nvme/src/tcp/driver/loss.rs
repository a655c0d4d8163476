//! The steps after a lost connection, and the end of a queue. The thread sends each as a message. Reactor context.

use super::{Gate, Life, Live, Loss, QueueDriver, Request, Start, State, watch, with_driver};
use crate::status::errno;
use crate::tcp::control::Command;
use crate::tcp::shared::Shared;
use aryk_bdev::{Failure, Io, Op, Status};
use aryk_nvme::queue::{Fate, Unfinished};
use aryk_nvme::replay::{self, History, Replay};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_reactor::{Cx, DriverKey, Nanos};
use aryk_slots::Key;
use rustix::net::sockopt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Losses during its repetition that a request survives: it may be what the target fails at, and requests of all VMs wait until
/// the requests that a loss kept have ended.
const REPLAYS_MAX: u8 = 15;

/// What a reactor reports when its connection is closed after a loss.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// What the queue has changed lately.
    pub(crate) history: Box<History>,
    /// Whether the controller had changes that may still take effect.
    pub(crate) has_unsettled: bool,
}

/// Gives a reactor a connected queue: its driver, or the one that the first channel makes.
pub(crate) fn give(shared: &Arc<Shared>, live: Box<Live>, cx: &mut Cx) {
    if live.generation != shared.generation() {
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

/// Step 1: closes the connection. Requests that the controller had are held. `None`: the reactor has no driver.
pub(crate) fn stop(key: DriverKey, cx: &mut Cx) -> Option<Stopped> {
    with_driver(key, cx, |driver, cx| {
        driver.drop_live(cx);
        driver.gate = Gate::Closed;
        Stopped {
            history: Box::new(driver.history.clone()),
            has_unsettled: std::mem::take(&mut driver.has_unsettled),
        }
    })
}

/// Step 2: gives a reactor a connection to a controller whose predecessor has ended. Requests that were held and cannot be
/// submitted again without being seen fail; the others are started, and no new ones before [`open`]. Returns their number; `None`
/// if the reactor has no driver any more.
pub(crate) fn resume(
    key: DriverKey,
    live: Box<Live>,
    histories: &[Box<History>],
    cx: &mut Cx,
) -> Option<u32> {
    with_driver(key, cx, |driver, cx| {
        driver.rewind(histories, cx);
        driver.install(live, cx);
        driver.gate = Gate::Closed;
        let kept = driver.requests.iter().filter(|(_, request)| request.is_kept).count() as u32;
        if kept > 0 {
            driver.gate = Gate::Replaying(kept);
            driver.start_waiting(cx);
        }
        kept
    })
}

/// Step 3: what all reactors have kept has ended.
pub(crate) fn open(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        // Another loss may have come between.
        if matches!(driver.life, Life::Live(_)) {
            driver.gate = Gate::Open;
            driver.requests.iter_mut().for_each(|(_, request)| request.is_kept = false);
            driver.start_waiting(cx);
        }
    });
}

/// The controller has been away for long: requests fail until it is back.
pub(crate) fn fail(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        if matches!(driver.life, Life::Away) {
            driver.life = Life::Failing;
            driver.end_all(cx);
        }
    });
}

/// The controller does not come back: requests fail from now on.
pub(crate) fn close(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        driver.drop_live(cx);
        driver.life = Life::Closed;
        driver.end_all(cx);
    });
}

impl QueueDriver {
    /// Takes over a connection.
    pub(super) fn install(&mut self, mut live: Box<Live>, cx: &mut Cx) {
        if matches!(self.life, Life::Closed) || live.generation != self.shared.generation() {
            return;
        }
        if let Err(error) = watch(&mut live, self.id, cx) {
            self.life = Life::Live(live);
            return self.lose(&error.into(), cx);
        }
        for (_, channel) in self.channels.iter_mut() {
            channel.commands = channel.namespace.commands();
        }
        self.gate = if self.shared.is_gated.load(Ordering::Acquire) { Gate::Closed } else { Gate::Open };
        (live.read_at, live.write_at) = (Nanos(0), Nanos(0));
        if live.tls.is_some() && self.sealing.is_none() {
            self.sealing = Some(cx.local_state());
        }
        self.life = Life::Live(live);
        cx.wake_driver(self.id);
    }

    /// Closes the connection, and tells the thread why.
    #[cold]
    pub(super) fn lose(&mut self, loss: &Loss, cx: &mut Cx) {
        let Life::Live(live) = &self.life else { return };
        let generation = live.generation;
        self.drop_live(cx);
        self.shared.send(Command::Lost { generation, reason: loss.to_string() });
    }

    /// Closes the connection, if there is one. What the kernel has not sent is dropped, so that it cannot arrive later.
    fn drop_live(&mut self, cx: &mut Cx) {
        let Life::Live(live) = &self.life else { return };
        [live.watch, live.room].into_iter().flatten().for_each(|watch| drop(cx.unwatch(watch)));
        // It fails for a socket that is closed already.
        let _ = sockopt::set_socket_linger(&live.socket, Some(Duration::ZERO));
        self.life = Life::Away;
        let is_replaying = matches!(self.gate, Gate::Replaying(_));
        self.gate = Gate::Closed;
        for (_, request) in self.requests.iter_mut() {
            if matches!(request.state, State::AtController(..)) {
                request.state = State::Held;
                request.replays += u8::from(is_replaying && request.is_kept);
                self.has_unsettled |= request.io.op.is_change();
            }
        }
        // An aborted request is not submitted again, and the controller may stay away.
        let is_meant = |request: &Request| request.state == State::Held && request.is_aborted;
        let held = self.requests.iter().filter(|(_, request)| is_meant(request));
        let aborted: Vec<Key> = held.map(|(key, _)| key).collect();
        aborted.into_iter().for_each(|key| self.finish(key, Status::Aborted, cx));
    }

    /// Decides about the requests that are held.
    fn rewind(&mut self, histories: &[Box<History>], cx: &mut Cx) {
        let histories: Vec<&History> = histories.iter().map(|history| &**history).collect();
        let held = self.requests.iter().filter(|(_, request)| request.state == State::Held);
        let mut held: Vec<(u64, Key)> = held.map(|(key, request)| (request.number, key)).collect();
        held.sort_unstable_by_key(|(number, _)| *number);
        for &(_, key) in held.iter().rev() {
            let request = self.requests.get_mut(key).expect("just found");
            let Io { op, lba, blocks, .. } = request.io;
            let replay = match op {
                Op::Read | Op::Compare | Op::Flush => Replay::Harmless,
                Op::Write | Op::WriteZeroes | Op::Unmap => Replay::IfUnseen { slba: lba.0, blocks: blocks.0 },
                Op::CompareAndWrite | Op::Copy => Replay::Never,
            };
            let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
            let entry = SubmissionEntry::new(0, namespace.nsid());
            let unfinished = Unfinished { entry, token: 0, submitted: request.first_attempt };
            let fate = replay::decide(replay, &unfinished, &histories);
            if fate == Fate::Resubmit && request.replays <= REPLAYS_MAX {
                (request.state, request.is_kept) = (State::Waiting, true);
                self.waiting.push_front(key);
                self.shared.resubmitted.fetch_add(1, Ordering::Relaxed);
            } else {
                namespace.failed(Failure::now(op, lba, blocks, errno(Status::Aborted)));
                self.shared.failed_by_loss.fetch_add(1, Ordering::Relaxed);
                self.finish(key, Status::Medium, cx);
            }
        }
    }

    /// So many requests that a loss kept have not ended.
    pub(super) fn set_kept(&mut self, left: u32) {
        self.gate = if left == 0 { Gate::Closed } else { Gate::Replaying(left) };
        if left == 0
            && let Life::Live(live) = &self.life
        {
            let generation = live.generation;
            self.shared.send(Command::Replayed { reactor: self.handle.clone(), generation });
        }
    }

    /// Ends a request because the controller is away.
    #[cold]
    pub(super) fn fail_away(&self, key: Key) -> Start {
        let request = self.requests.get(key).expect("the caller has a request");
        let Io { op, lba, blocks, .. } = request.io;
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        namespace.failed(Failure::now(op, lba, blocks, errno(Status::Removed)));
        Start::Ended(Status::Medium)
    }

    /// Ends all requests, none of which the controller has.
    fn end_all(&mut self, cx: &mut Cx) {
        let held = self.requests.iter().filter(|(_, request)| request.state == State::Held);
        let mut held: Vec<(u64, Key)> = held.map(|(key, request)| (request.number, key)).collect();
        held.sort_unstable_by_key(|(number, _)| *number);
        held.into_iter().rev().for_each(|(_, key)| self.waiting.push_front(key));
        let delayed = std::mem::take(&mut self.delayed);
        self.waiting.extend(delayed.into_iter().map(|(_, key)| key));
        while let Some(key) = self.waiting.pop_front() {
            if let Start::Ended(status) = self.start(key, cx) {
                self.finish(key, status, cx);
            }
        }
    }
}
