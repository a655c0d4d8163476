//! The life of a reactor's queue pair: its installation, the steps of a reset, its end. The control thread sends each as a
//! message. Reactor context.

use super::{Gate, Life, Live, PairDriver, Pairs, Start, State, Wake, with_driver};
use crate::control::Command;
use crate::shared::Shared;
use crate::status::errno;
use aryk_bdev::{Failure, Io, Op, Status};
use aryk_nvme::queue::{DmaEnded, Fate, Restart, Unfinished};
use aryk_nvme::replay::{self, History, Replay};
use aryk_reactor::{Cx, Driver, DriverKey, DriverRef};
use aryk_slots::Key;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Resets after failures of the controller that keep a request. The request may be what the controller fails at, and requests of
/// all VMs wait until the requests that a reset kept have ended.
const REPLAYS_MAX: u8 = 2;

/// Why the commands of a pair end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A reset that a caller asked for.
    Request,
    /// A reset because the controller failed, perhaps at one of the commands.
    Failure,
    /// The end of the pair, or of the controller.
    End,
}

/// Gives a reactor a pair: its first, or the one of a controller that has come back. With `is_gated`, a new pair starts requests
/// when [`open`] is called. `interrupt` is watched from now on.
///
/// # Errors
/// The interrupt cannot be watched: the reactor polls while requests are in flight.
pub(crate) fn install(
    shared: &Arc<Shared>,
    key: DriverKey,
    live: Box<Live>,
    interrupt: Option<OwnedFd>,
    is_gated: bool,
    cx: &mut Cx,
) -> std::io::Result<()> {
    let depth = live.pair.depth();
    let mut live = Some(live);
    let Ok(driver) = cx.driver(key, |id, _| {
        let life = Life::Live(live.take().expect("taken once"));
        let mut driver = PairDriver::new(Arc::clone(shared), key, id, depth, life);
        driver.gate = if is_gated { Gate::Closed } else { Gate::Open };
        Ok::<_, Infallible>(driver)
    });
    let watched = interrupt.map_or(Ok(()), |fd| cx.watch_driver(fd, driver.id()).map(drop));
    let mut pair = driver.activate(cx);
    if watched.is_err() {
        let of_driver = if let Life::Live(live) = &mut pair.life { Some(live) } else { None };
        live.as_mut().or(of_driver).iter_mut().for_each(|live| live.wake = Wake::Never);
    }
    if let Some(live) = live {
        for (_, channel) in pair.channels.iter_mut() {
            channel.lookup = live.memory.as_ref().map(|memory| memory.lookup());
            channel.commands = channel.namespace.commands();
        }
        pair.life = Life::Live(live);
        (pair.keeps_awake, pair.completed_at_arm) = (false, 0);
        pair.begin_replay(cx);
    }
    drop(pair);
    cx.local_state::<Pairs>().0.borrow_mut().insert(key, driver);
    watched
}

/// Step 1 of a reset: no more submissions.
pub(crate) fn quiesce(shared: &Shared, key: DriverKey, qid: u16, cx: &mut Cx) {
    with_driver(key, cx, |driver, _| {
        if let Life::Live(live) = &mut driver.life {
            live.pair.quiesce();
        }
    });
    shared.send(Command::Quiesced(qid));
}

/// The first step of the reset of another pair: no new commands until [`open`]. When those in flight have ended, the control
/// thread gets what the pair has changed.
pub(crate) fn hold(shared: &Shared, key: DriverKey, qid: u16, cx: &mut Cx) {
    let is_there = with_driver(key, cx, |driver, _| {
        (driver.gate, driver.held) = (Gate::Closed, Some(qid));
        driver.report_if_held();
    });
    if is_there.is_none() {
        shared.send(Command::Held { qid, history: Box::new(History::new(1)) });
    }
}

/// Step 2, after the end of DMA: takes the completions that came in time. Returns what the pair has changed.
pub(crate) fn reap_last(shared: &Shared, key: DriverKey, qid: u16, cx: &mut Cx) {
    let history = with_driver(key, cx, |driver, cx| {
        while driver.reap(u32::from(u16::MAX), cx) > 0 {}
        Box::new(driver.history.clone())
    });
    let history = history.unwrap_or_else(|| Box::new(History::new(1)));
    shared.send(Command::Reaped { qid, history });
}

/// Step 3: requests that may have taken effect and cannot be submitted again without being seen fail; the others wait. A pair
/// that does not come back is returned to the control thread, which unmaps its memory.
pub(crate) fn rewind(
    shared: &Shared,
    key: DriverKey,
    proof: DmaEnded,
    histories: &[Box<History>],
    cause: Cause,
    cx: &mut Cx,
) {
    let (qid, is_end) = (proof.qid(), cause == Cause::End);
    let rewound = with_driver(key, cx, |driver, cx| {
        driver.rewind(proof, histories, cause, cx);
        if is_end {
            driver.retire(cx);
        }
    });
    shared.send(Command::Rewound { qid, is_end: is_end || rewound.is_none() });
}

/// The controller has ended after a pair was rewound: the pair is returned to the control thread.
pub(crate) fn retire(shared: &Shared, key: DriverKey, qid: u16, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| driver.retire(cx));
    shared.send(Command::Rewound { qid, is_end: true });
}

impl PairDriver {
    /// Reports to the control thread, if that waits, that no command is in flight.
    #[inline]
    pub(super) fn report_if_held(&mut self) {
        if let Some(qid) = self.held
            && self.in_flight() == 0
        {
            self.held = None;
            self.shared.send(Command::Held { qid, history: Box::new(self.history.clone()) });
        }
    }

    fn take_live(&mut self) -> Option<Box<Live>> {
        match std::mem::replace(&mut self.life, Life::Away) {
            Life::Live(live) => Some(live),
            other => {
                self.life = other;
                None
            }
        }
    }

    fn retire(&mut self, cx: &mut Cx) {
        (self.is_armed, self.held) = (false, None);
        self.channels.iter_mut().for_each(|(_, channel)| channel.lookup = None);
        if let Some(live) = self.take_live() {
            assert_eq!(live.pair.in_flight(), 0, "a pair is rewound before it is retired");
            self.shared.send(Command::Retired(live));
        }
        self.hand_over(cx);
    }

    fn rewind(&mut self, proof: DmaEnded, histories: &[Box<History>], cause: Cause, cx: &mut Cx) {
        let Life::Live(live) = &mut self.life else { return };
        let histories: Vec<&History> = histories.iter().map(|history| &**history).collect();
        let (mut kept, mut failed) = (Vec::new(), Vec::new());
        let requests = &mut self.requests;
        live.pair.rewind(proof, |unfinished| {
            let key = Key::from_raw(unfinished.token);
            let request = requests.get_mut(key).expect("a command in flight is of a request");
            // The first attempt may have taken effect as well as the last.
            let unfinished = Unfinished { submitted: request.first_attempt, ..*unfinished };
            let Io { op, lba, blocks, .. } = request.io;
            let replay = match op {
                // The blocks are in the data of the command. A repeated discard can be seen in the same cases as a repeated
                // write.
                Op::Unmap => Replay::IfUnseen { slba: lba.0, blocks: blocks.0 },
                _ => replay::of(&unfinished.entry),
            };
            let fate = replay::decide(replay, &unfinished, &histories);
            request.replays += u8::from(cause == Cause::Failure);
            if fate == Fate::Resubmit && request.replays <= REPLAYS_MAX {
                kept.push(key)
            } else {
                failed.push(key)
            }
            // A command that is submitted again is made anew: its bounce buffer and its list may be elsewhere.
            Fate::Fail
        });
        (self.is_armed, self.held) = (false, None);
        self.gate = Gate::Closed;
        // The requests that an earlier reset kept come first: while they have not ended, no other is started.
        let is_kept = |key: &Key| self.requests.get(*key).is_some_and(|request| request.is_kept);
        let (starved_kept, starved): (Vec<_>, Vec<_>) = self.starved.drain(..).partition(is_kept);
        starved_kept.into_iter().rev().for_each(|key| self.waiting.push_front(key));
        self.waiting.extend(starved);
        for key in failed {
            self.fail_by_reset(key, cx);
        }
        for key in kept.into_iter().rev() {
            self.give_pages_back(key);
            let request = self.requests.get_mut(key).expect("it was in flight");
            if request.is_aborted {
                self.finish(key, Status::Aborted, cx);
                continue;
            }
            (request.state, request.is_kept) = (State::Waiting, true);
            self.shared.counters.resubmitted.fetch_add(1, Ordering::Relaxed);
            self.waiting.push_front(key);
        }
        self.publish();
    }

    /// Ends a request that may have taken effect, and must not take effect again.
    fn fail_by_reset(&mut self, key: Key, cx: &mut Cx) {
        // The second command of a fused pair.
        let Some(request) = self.requests.get(key) else { return };
        let Io { op, lba, blocks, .. } = request.io;
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        namespace.failed(Failure::now(op, lba, blocks, errno(Status::Aborted)));
        self.shared.counters.failed_by_reset.fetch_add(1, Ordering::Relaxed);
        self.finish(key, Status::Medium, cx);
    }

    /// Ends a request because the controller is away.
    #[cold]
    pub(super) fn fail_away(&mut self, key: Key) -> Start {
        let request = self.requests.get(key).expect("the caller has a request");
        let Io { op, lba, blocks, .. } = request.io;
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        namespace.failed(Failure::now(op, lba, blocks, errno(Status::Removed)));
        Start::Ended(Status::Medium)
    }

    /// Moves all requests to the FIFO; none is at the controller.
    fn collect_waiting(&mut self) {
        let delayed = std::mem::take(&mut self.delayed);
        self.waiting.extend(delayed.into_iter().map(|(_, key)| key));
        let starved = std::mem::take(&mut self.starved);
        self.waiting.extend(starved);
        self.waiting.append(&mut self.emptying.waiting);
    }

    /// Starts the requests that resets kept; new ones wait until all reactors have done so.
    fn begin_replay(&mut self, cx: &mut Cx) {
        let kept = self.requests.iter().filter(|(_, request)| request.is_kept).count();
        self.set_kept(kept as u32);
        self.start_waiting(cx);
    }
}

/// Step 4: the pair runs again. A reset has unmasked its interrupt.
pub(crate) fn resume(key: DriverKey, restart: Restart, wake: Wake, retry_delays: [u16; 3], cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        let now = cx.now().0;
        let Life::Live(live) = &mut driver.life else { return };
        live.pair.resume(restart, now);
        wake.mask();
        (live.wake, live.retry_delays) = (wake, retry_delays);
        for (_, channel) in driver.channels.iter_mut() {
            channel.commands = channel.namespace.commands();
        }
        driver.begin_replay(cx);
    });
}

/// Step 5: all reactors have submitted again what they kept, and it has ended.
pub(crate) fn open(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        // Another reset may have begun.
        if driver.gate == Gate::Closed {
            driver.gate = Gate::Open;
            driver.requests.iter_mut().for_each(|(_, request)| request.is_kept = false);
            driver.start_waiting(cx);
        }
    });
}

/// The controller has paused: the time of the commands in flight begins now.
pub(crate) fn restart_clock(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        if let Life::Live(live) = &mut driver.life {
            live.pair.restart_clock(cx.now().0);
        }
    });
}

/// The controller has been away for too long: requests fail until [`install`] gives the reactor a pair again.
pub(crate) fn fail_while_away(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        // Another message may have come between.
        if !matches!(driver.life, Life::Away) {
            return;
        }
        driver.life = Life::Failing;
        driver.collect_waiting();
        while let Some(key) = driver.waiting.pop_front() {
            if let Start::Ended(status) = driver.fail_away(key) {
                driver.finish(key, status, cx);
            }
        }
        driver.gate = Gate::Open;
    });
}

/// The controller does not come back: requests fail from now on, and the reactor keeps no pair.
pub(crate) fn remove(key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        assert!(!matches!(driver.life, Life::Live(_)), "a pair is retired before it is removed");
        driver.life = Life::Closed;
        driver.collect_waiting();
        while let Some(key) = driver.waiting.pop_front() {
            driver.finish(key, Status::Removed, cx);
        }
        driver.gate = Gate::Open;
    });
    let removed: Option<DriverRef<PairDriver>> = cx.local_state::<Pairs>().0.borrow_mut().remove(&key);
    drop(removed);
}

/// Lets no channel use the pair any more, if none does. Returns whether that is so.
pub(crate) fn leave_if_unused(key: DriverKey, cx: &mut Cx) -> bool {
    let left = with_driver(key, cx, |driver, _| {
        driver.is_leaving = driver.channels.is_empty();
        driver.is_leaving
    });
    left.unwrap_or(true)
}
