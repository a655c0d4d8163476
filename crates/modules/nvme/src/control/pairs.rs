//! The queue pairs of all reactors, as the control thread knows them.

mod alone;
mod waking;

use super::{Command, Life, RETURN_INTERVAL, Thread, now};
use crate::driver::{self, Cause, Live, Wake};
use crate::pool::Pool;
use crate::shared::Shared;
use alone::Alone;
use aryk_bdev::OpenError;
use aryk_log_limit::limited;
use aryk_nvme::controller::{PairRequest, Refused, ResetReason};
use aryk_nvme::queue::{DmaEnded, QueuePair, Restart};
use aryk_nvme::replay::History;
use aryk_pci::VectorMask;
use aryk_reactor::{Cx, DriverKey, Handle, Nanos};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Histories of pairs that have left, which are kept.
const DEPARTED_MAX: usize = 4;

type Message = Box<dyn FnOnce(&mut Cx) + Send>;
type Waiter = oneshot::Sender<Result<(), OpenError>>;

/// How far the pair of a reactor is.
enum Stage {
    /// The controller is not ready.
    Wanted,
    /// The controller creates the pair.
    Creating(u16),
    /// The reactor installs the pair.
    Installing(u16),
    /// The reactor has the pair.
    Installed(u16),
    /// The pair is deleted, because its reactor is removed.
    Deleting(u16),
}

/// A reactor, and its pair, or its second pair.
struct Pair {
    handle: Handle,
    /// That of the pair's driver.
    key: DriverKey,
    /// The pair is the reactor's second, with interrupts that cannot be masked. The reactor can do without it.
    is_waking: bool,
    /// The vector of such a pair, once it had one.
    vector: Option<u16>,
    /// Such a pair is not created while this controller lives.
    is_refused: bool,
    messages: UnboundedSender<Message>,
    sending: JoinHandle<()>,
    stage: Stage,
    /// The vector that the reactor watches.
    watched: Option<u16>,
    /// The reactor has a driver, perhaps with requests that wait.
    has_driver: bool,
    waiters: Vec<Waiter>,
    rewind: Rewind,
    /// Requests that the last reset kept have not ended.
    is_replaying: bool,
    failing: Option<Failing>,
    /// What a second pair had changed up to the last reset, or any pair when its commands had ended for the reset of another.
    history: Option<Box<History>>,
    /// When the pair was last reset without the controller.
    last_alone: Option<Nanos>,
}

/// A reactor that may have requests gets no pair, although the controller is ready.
#[derive(Clone, Copy)]
struct Failing {
    since: Nanos,
    /// When the next attempt is made.
    again: Nanos,
}

/// The pair's part in a reset, from the end of DMA to the decision about its commands.
enum Rewind {
    /// No reset, or the decision is made.
    None,
    /// The reactor takes the last completions.
    Reaping(DmaEnded),
    /// The reactor has reported what it has changed lately.
    Reaped(DmaEnded, Box<History>),
    /// The reactor decides.
    Deciding,
}

impl Pair {
    fn wanted_by(handle: Handle, shared: &Shared, is_waking: bool) -> Self {
        let (messages, sending) = send_in_order(handle.clone());
        Self {
            handle,
            key: if is_waking { shared.waking_key } else { shared.key },
            is_waking,
            vector: None,
            is_refused: false,
            messages,
            sending,
            stage: Stage::Wanted,
            watched: None,
            has_driver: false,
            waiters: Vec::new(),
            rewind: Rewind::None,
            is_replaying: false,
            failing: None,
            history: None,
            last_alone: None,
        }
    }

    fn send(&self, message: impl FnOnce(&mut Cx) + Send + 'static) {
        // The task goes on as long as the reactor.
        let _ = self.messages.send(Box::new(message));
    }

    const fn qid(&self) -> Option<u16> {
        match self.stage {
            Stage::Wanted => None,
            Stage::Creating(qid) | Stage::Installing(qid) | Stage::Installed(qid) | Stage::Deleting(qid) => {
                Some(qid)
            }
        }
    }

    /// The queue of a pair that the reactor has, or is about to have.
    const fn given_out(&self) -> Option<u16> {
        match self.stage {
            Stage::Wanted | Stage::Creating(_) => None,
            Stage::Installing(qid) | Stage::Installed(qid) | Stage::Deleting(qid) => Some(qid),
        }
    }

    /// How completions of the pair wake the reactor. `mask` is the mask of its interrupt, if that can be masked.
    fn wake(&self, mask: Option<VectorMask>) -> Wake {
        match (self.watched, mask) {
            (None, _) => Wake::Never,
            (Some(_), _) if self.is_waking => Wake::Always,
            (Some(_), Some(mask)) => Wake::Masked(mask),
            (Some(_), None) => Wake::Never,
        }
    }

    fn answer(&mut self, result: &Result<(), OpenError>) {
        for waiter in self.waiters.drain(..) {
            // The opener may be gone.
            let _ = waiter.send(result.clone());
        }
    }
}

/// The changes by pairs of reactors that were removed: a write in flight on another reactor may be older.
#[derive(Default)]
struct Departed {
    /// Each with the time at which the pair left, in order.
    histories: VecDeque<(Nanos, Box<History>)>,
    /// What changed up to this time is unknown.
    unknown_until: Nanos,
}

impl Departed {
    fn add(&mut self, history: Box<History>) {
        if self.histories.len() == DEPARTED_MAX
            && let Some((left, _)) = self.histories.pop_front()
        {
            self.unknown_until = self.unknown_until.max(left);
        }
        self.histories.push_back((now(), history));
    }

    fn histories(&self) -> impl Iterator<Item = Box<History>> {
        let known = self.histories.iter().map(|(_, history)| history.clone());
        known.chain([Box::new(History::unknown_until(self.unknown_until.0))])
    }
}

/// The pairs of all reactors.
#[derive(Default)]
pub(super) struct Pairs {
    pairs: Vec<Pair>,
    departed: Departed,
    /// The pair that is being reset without the controller.
    alone: Option<Alone>,
    /// Queues of reactors that have ended, until the controller has deleted them.
    orphans: Vec<u16>,
    /// Messages on their way to reactors without a pair.
    leaving: Vec<JoinHandle<()>>,
}

impl Pairs {
    fn find(&mut self, qid: u16) -> Option<&mut Pair> {
        self.pairs.iter_mut().find(|pair| pair.qid() == Some(qid))
    }

    fn installed(&mut self, qid: u16, is_watched: bool) {
        let Some(pair) = self.find(qid) else { return };
        if matches!(pair.stage, Stage::Installing(_)) {
            pair.stage = Stage::Installed(qid);
        }
        if !is_watched {
            pair.watched = None;
        }
        // The requests of a second pair never wait for it.
        (pair.has_driver, pair.failing) = (!pair.is_waking, None);
        pair.answer(&Ok(()));
    }

    /// Sends each pair that a reactor has the first step of a reset.
    pub(super) fn quiesce(&self, shared: &Arc<Shared>) {
        for pair in &self.pairs {
            if let Some(qid) = pair.given_out() {
                let (shared, key) = (Arc::clone(shared), pair.key);
                pair.send(move |cx| driver::quiesce(&shared, key, qid, cx));
            }
        }
    }

    /// The controller no longer accesses the memory of a pair's commands.
    pub(super) fn dma_ended(&mut self, shared: &Arc<Shared>, proof: DmaEnded) {
        let qid = proof.qid();
        self.orphans.retain(|&orphan| orphan != qid);
        let Some(pair) = self.find(qid) else { return };
        if pair.given_out().is_none() {
            pair.stage = Stage::Wanted;
            return;
        }
        pair.rewind = Rewind::Reaping(proof);
        let (shared, key) = (Arc::clone(shared), pair.key);
        pair.send(move |cx| driver::reap_last(&shared, key, qid, cx));
    }

    fn reaped(&mut self, qid: u16, history: Box<History>) {
        if let Some(pair) = self.find(qid) {
            pair.rewind = match std::mem::replace(&mut pair.rewind, Rewind::None) {
                Rewind::Reaping(proof) => Rewind::Reaped(proof, history),
                other => other,
            };
        }
    }

    /// Lets the pairs of a reset decide about their commands, once all have reported what they have changed.
    pub(super) fn rewind_if_complete(&mut self, shared: &Arc<Shared>, cause: Cause) {
        if self.pairs.iter().any(|pair| matches!(pair.rewind, Rewind::Reaping(_))) {
            return;
        }
        let histories = self.pairs.iter().filter_map(|pair| match &pair.rewind {
            Rewind::Reaped(_, history) => Some(history.clone()),
            _ => pair.history.clone(),
        });
        let histories: Arc<[Box<History>]> = histories.chain(self.departed.histories()).collect();
        for pair in &mut self.pairs {
            if !matches!(pair.rewind, Rewind::Reaped(..)) {
                continue;
            }
            let Rewind::Reaped(proof, history) = std::mem::replace(&mut pair.rewind, Rewind::Deciding) else {
                continue;
            };
            let is_deleted = matches!(pair.stage, Stage::Deleting(_));
            if is_deleted {
                self.departed.add(history);
            } else if pair.is_waking {
                pair.history = Some(history);
            }
            let cause = if is_deleted { Cause::End } else { cause };
            pair.is_replaying = !is_deleted;
            let (histories, shared, key) = (Arc::clone(&histories), Arc::clone(shared), pair.key);
            pair.send(move |cx| driver::rewind(&shared, key, proof, &histories, cause, cx));
        }
    }

    /// Takes back the pairs that had been rewound before the controller ended.
    pub(super) fn retire(&mut self, shared: &Arc<Shared>) {
        for pair in &mut self.pairs {
            if let Some(qid) = pair.given_out()
                && matches!(pair.rewind, Rewind::None)
            {
                pair.rewind = Rewind::Deciding;
                let (shared, key) = (Arc::clone(shared), pair.key);
                pair.send(move |cx| driver::retire(&shared, key, qid, cx));
            }
        }
    }

    /// A pair has decided about its commands. With `is_end`, its reactor has none any more. Returns whether that was awaited: the
    /// deletion of a pair that a reset had ended has a proof of its own, with which the pair decides once more.
    fn rewound(&mut self, shared: &Shared, qid: u16, is_end: bool) -> bool {
        let is_it = |pair: &Pair| pair.qid() == Some(qid) && matches!(pair.rewind, Rewind::Deciding);
        let Some(index) = self.pairs.iter().position(is_it) else { return false };
        self.pairs[index].rewind = Rewind::None;
        if is_end {
            shared.remove_pair(qid);
            if matches!(self.pairs[index].stage, Stage::Deleting(_)) {
                let pair = self.pairs.swap_remove(index);
                self.remove_waking_of(&pair);
                self.remove(pair);
            } else {
                let pair = &mut self.pairs[index];
                pair.stage = Stage::Wanted;
                // The requests of a second pair are the first pair's now.
                if pair.is_waking && std::mem::take(&mut pair.is_replaying) {
                    let handle = pair.handle.clone();
                    let is_first = |pair: &&mut Pair| pair.handle == handle && !pair.is_waking;
                    self.pairs
                        .iter_mut()
                        .find(is_first)
                        .into_iter()
                        .for_each(|first| first.is_replaying = true);
                }
            }
        }
        // The others do not wait for a pair that has left.
        self.open_if_replayed();
        true
    }

    /// Whether a reactor still has a pair.
    pub(super) fn are_given_out(&self) -> bool {
        self.pairs.iter().any(|pair| pair.given_out().is_some())
    }

    /// Pairs that were being created when the controller ended are wanted again.
    pub(super) fn forget_creations(&mut self) {
        for pair in &mut self.pairs {
            (pair.failing, pair.is_refused) = (None, false);
            if matches!(pair.stage, Stage::Creating(_)) {
                pair.stage = Stage::Wanted;
            }
        }
    }

    /// Reactors that cannot do without a pair: they may have requests.
    pub(super) fn needed(&self) -> usize {
        self.pairs.iter().filter(|pair| pair.has_driver).count()
    }

    /// A pair has submitted what the reset kept, and that has ended. When all have, new requests begin.
    fn replayed(&mut self, qid: u16) {
        if let Some(pair) = self.find(qid) {
            pair.is_replaying = false;
        }
        self.open_if_replayed();
    }

    fn open_if_replayed(&self) {
        if self.pairs.iter().any(|pair| pair.is_replaying) {
            return;
        }
        for pair in self.pairs.iter().filter(|pair| pair.given_out().is_some()) {
            let key = pair.key;
            pair.send(move |cx| driver::open(key, cx));
        }
    }

    fn remove(&mut self, mut pair: Pair) {
        let key = pair.key;
        pair.send(move |cx| driver::remove(key, cx));
        pair.answer(&Err(OpenError::Removed));
        self.leaving.push(pair.sending);
        self.leaving.retain(|sending| !sending.is_finished());
    }

    /// Removes the reactors that have no pair: their requests fail.
    pub(super) fn remove_wanted(&mut self) {
        let wanted = self.pairs.extract_if(.., |pair| matches!(pair.stage, Stage::Wanted));
        let wanted: Vec<Pair> = wanted.collect();
        wanted.into_iter().for_each(|pair| self.remove(pair));
        self.open_if_replayed();
    }

    /// How long a reactor that may have requests has got no pair, although the controller is ready.
    pub(super) fn failing_for(&self, now: Nanos) -> Option<Duration> {
        self.pairs.iter().filter_map(|pair| Some(now.since(pair.failing?.since))).max()
    }

    /// Makes the requests of all reactors fail, until they have pairs again.
    pub(super) fn fail_requests(&self, shared: &Shared) {
        let key = shared.key;
        for pair in self.pairs.iter().filter(|pair| pair.has_driver) {
            pair.send(move |cx| driver::fail_while_away(key, cx));
        }
    }

    /// Removes the pairs of all reactors, which have been retired.
    pub(super) fn remove_all(&mut self) {
        std::mem::take(&mut self.pairs).into_iter().for_each(|pair| self.remove(pair));
    }

    /// Waits until the last messages are sent.
    pub(super) async fn drain(&mut self) {
        for sending in self.leaving.drain(..) {
            // A task that has ended has sent everything, or its reactor has ended.
            let _ = sending.await;
        }
    }

    /// Forgets the pairs of reactors that have ended: a reactor drops what it has at its end.
    fn take_ended(&mut self) -> Vec<u16> {
        let ended = self.pairs.extract_if(.., |pair| pair.handle.has_ended());
        let ended: Vec<Pair> = ended.collect();
        if ended.iter().any(|pair| pair.has_driver) {
            // Their histories have ended with them.
            self.departed.unknown_until = now();
        }
        let ended: Vec<u16> = ended.iter().filter_map(Pair::qid).collect();
        self.orphans.extend(&ended);
        ended
    }

    /// Sends a message to the reactor of a pair, if there is one. It gets the key of the pair's driver.
    pub(super) fn send(&self, qid: u16, message: impl FnOnce(DriverKey, &mut Cx) + Send + 'static) {
        if let Some(pair) = self.pairs.iter().find(|pair| pair.qid() == Some(qid)) {
            let key = pair.key;
            pair.send(move |cx| message(key, cx));
        }
    }

    /// Makes the pairs take over the errors that are injected; each drops its sender then.
    pub(super) fn set_injections(&self, shared: &Arc<Shared>, applied: &mpsc::Sender<Infallible>) {
        for pair in &self.pairs {
            let (shared, applied, key) = (Arc::clone(shared), applied.clone(), pair.key);
            pair.send(move |cx| {
                driver::set_injections(&shared, key, cx);
                drop(applied);
            });
        }
    }

    /// The controller has paused.
    pub(super) fn restart_clocks(&self) {
        for pair in self.pairs.iter().filter(|pair| pair.given_out().is_some()) {
            let key = pair.key;
            pair.send(move |cx| driver::restart_clock(key, cx));
        }
    }
}

/// Sends messages to a reactor, in order: a full mailbox makes them wait here, and not the control thread.
fn send_in_order(handle: Handle) -> (UnboundedSender<Message>, JoinHandle<()>) {
    let (sender, mut messages) = mpsc::unbounded_channel::<Message>();
    let sending = tokio::task::spawn_local(async move {
        while let Some(message) = messages.recv().await {
            if handle.cast(message).await.is_err() {
                break;
            }
        }
    });
    (sender, sending)
}

impl Thread {
    pub(super) fn prepare(&mut self, handle: Handle, reply: Waiter) {
        if self.is_stopping {
            // The opener may be gone.
            let _ = reply.send(Err(OpenError::Removed));
            return;
        }
        if self.exclusive.is_some() {
            let reason = "the drive is being formatted, sanitized or divided".to_owned();
            // The opener may be gone.
            let _ = reply.send(Err(OpenError::Unavailable(reason)));
            return;
        }
        // A reactor may have ended, and another begun on its core.
        self.forget_ended_reactors();
        if self.shared.owner_for(&handle).is_some() {
            // The opener may be gone.
            let _ = reply.send(Ok(()));
            return;
        }
        let pairs = &mut self.pairs.pairs;
        let is_its = |pair: &Pair| pair.handle == handle && !pair.is_waking;
        let index = pairs.iter().position(is_its).unwrap_or_else(|| {
            pairs.push(Pair::wanted_by(handle, &self.shared, false));
            pairs.len() - 1
        });
        let pair = &mut pairs[index];
        match pair.stage {
            Stage::Installed(_) => drop(reply.send(Ok(()))),
            Stage::Deleting(_) => {
                drop(reply.send(Err(OpenError::Unavailable("the core is being removed".into()))))
            }
            _ => pair.waiters.push(reply),
        }
        self.create_pairs();
    }

    /// Makes the controller create the pairs that are wanted.
    pub(super) fn create_pairs(&mut self) {
        let Life::Driven(driven) = &mut self.life else { return };
        if !driven.is_usable || !driven.controller.is_ready() {
            return;
        }
        let (now, mut refusals) = (now(), Vec::new());
        for (index, pair) in self.pairs.pairs.iter_mut().enumerate() {
            let is_wanted = matches!(pair.stage, Stage::Wanted) && !pair.is_waking;
            if !is_wanted || pair.failing.is_some_and(|failing| failing.again > now) {
                continue;
            }
            // Vector 0 is the admin queue's; queue N has vector N, if that can be masked.
            let vector = driven.controller.next_qid().filter(|qid| self.can_mask && *qid < self.vectors);
            match driven.controller.create_pair(PairRequest { depth: self.config.depth, vector }) {
                Ok(qid) => pair.stage = Stage::Creating(qid),
                Err(refused) => refusals.push((index, refused)),
            }
        }
        for (index, refused) in refusals.into_iter().rev() {
            self.use_other_pair(index, &refused);
        }
        self.create_waking_pairs();
    }

    /// A reactor gets no pair: it uses that of another, if the controller just has too few.
    fn use_other_pair(&mut self, index: usize, refused: &Refused) {
        let staying = self.env.reactors().staying();
        let pairs = &mut self.pairs.pairs;
        let is_coming =
            |pair: &Pair| matches!(pair.stage, Stage::Creating(_) | Stage::Installing(_)) && !pair.is_waking;
        let has_none = matches!(refused, Refused::NoPair(_));
        // A reactor with a driver may have requests, which wait for its own pair.
        if pairs[index].has_driver {
            return self.retry_later(index, &refused.to_string());
        }
        if has_none && pairs.iter().any(is_coming) {
            return;
        }
        let is_owner = |pair: &&Pair| {
            let is_there = matches!(pair.stage, Stage::Installed(_)) && !pair.is_waking;
            has_none && is_there && staying.contains(&pair.handle)
        };
        let owner = pairs.iter().find(is_owner);
        let owner = owner.and_then(|owner| self.env.reactors().hold(&owner.handle));
        let result = match owner {
            Some(owner) => {
                tracing::warn!(
                    controller = self.shared.name,
                    core = pairs[index].handle.core(),
                    through = owner.core(),
                    reason = %refused,
                    "a core sends its requests through the queue pair of another"
                );
                self.shared.route(pairs[index].handle.clone(), owner);
                Ok(())
            }
            None => Err(OpenError::Unavailable(refused.to_string())),
        };
        let mut pair = pairs.swap_remove(index);
        pair.answer(&result);
    }

    /// Gives a reactor the pair that the controller has created for it.
    pub(super) fn queue_created(&mut self, queue: QueuePair) {
        let qid = queue.qid();
        if self.pairs.find(qid).is_none() {
            // The reactor has ended meanwhile.
            return self.with_controller(|controller| drop(controller.delete_pair(qid)));
        }
        if let Err(error) = self.give_out(queue) {
            self.with_controller(|controller| drop(controller.delete_pair(qid)));
            self.queue_failed(qid, &error);
        }
    }

    /// Sends a pair to its reactor.
    fn give_out(&mut self, queue: QueuePair) -> Result<(), String> {
        let qid = queue.qid();
        let mask = self.mask_of(qid);
        self.want_waking_pair(&queue);
        let is_gated = self.pairs.pairs.iter().any(|pair| pair.is_replaying);
        let Life::Driven(driven) = &mut self.life else { return Ok(()) };
        let Some(pair) = self.pairs.find(qid) else { return Ok(()) };
        let transfers = 2 * crate::DATA_MAX;
        let bytes = self.config.bounce_bytes.max(transfers);
        let pool = Pool::new(&driven.function, bytes, driven.controller.page()).map_err(|e| e.to_string())?;
        let vector = if pair.is_waking { pair.vector } else { mask.as_ref().map(|_| qid) };
        let watches = vector.filter(|_| pair.watched != vector);
        let interrupt = watches.map(|vector| self.interrupts[usize::from(vector)].try_clone());
        let interrupt = interrupt.transpose().map_err(|error| error.to_string())?;
        mask.iter().for_each(VectorMask::mask);
        pair.watched = vector;
        let info = driven.controller.info();
        let live = Box::new(Live {
            pair: queue,
            pool,
            wake: pair.wake(mask),
            memory: driven.memory.clone(),
            retry_delays: info.map_or([0; 3], |info| info.retry_delays),
            has_write_cache: info.is_none_or(|info| info.has_volatile_cache),
            stats: self.shared.add_pair(qid, pair.handle.core(), pair.is_waking),
        });
        pair.stage = Stage::Installing(qid);
        let (shared, key) = (Arc::clone(&self.shared), pair.key);
        pair.send(move |cx| {
            let watched = driver::install(&shared, key, live, interrupt, is_gated, cx);
            shared.send(Command::Installed { qid, watched });
        });
        Ok(())
    }

    pub(super) fn installed(&mut self, qid: u16, watched: &std::io::Result<()>) {
        if let Err(error) = watched {
            let controller = &self.shared.name;
            limited!(self.lines, warn, controller, qid, %error, "a reactor cannot watch an interrupt: it polls");
        }
        self.pairs.installed(qid, watched.is_ok());
        self.create_pairs();
    }

    /// A pair can run again.
    pub(super) fn queue_ready(&mut self, restart: Restart) {
        let qid = restart.qid();
        self.end_alone(qid);
        let mask = self.mask_of(qid);
        let Life::Driven(driven) = &self.life else { return };
        let delays = driven.controller.info().map_or([0; 3], |info| info.retry_delays);
        if let Some(pair) = self.pairs.find(qid) {
            let (key, wake) = (pair.key, pair.wake(mask));
            pair.send(move |cx| driver::resume(key, restart, wake, delays, cx));
        }
    }

    /// The mask of a queue's interrupt, if it has one.
    fn mask_of(&self, qid: u16) -> Option<VectorMask> {
        let Life::Driven(driven) = &self.life else { return None };
        (self.can_mask && qid < self.vectors).then(|| driven.function.vector_mask(qid)).flatten()
    }

    /// A pair could not be created. A reactor that may have requests tries again.
    pub(super) fn queue_failed(&mut self, qid: u16, reason: &str) {
        let Some(index) = self.pairs.pairs.iter().position(|pair| pair.qid() == Some(qid)) else { return };
        self.end_alone(qid);
        let pair = &mut self.pairs.pairs[index];
        pair.stage = Stage::Wanted;
        let reason = format!("the controller creates no queue pair: {reason}");
        if pair.is_waking {
            return self.refuse_waking_pair(index, &reason);
        }
        if pair.has_driver {
            self.retry_later(index, &reason);
        }
        let pair = &mut self.pairs.pairs[index];
        pair.answer(&Err(OpenError::Unavailable(reason)));
        if !pair.has_driver {
            self.pairs.pairs.swap_remove(index);
        }
    }

    /// A reactor that may have requests gets no pair now. Another attempt follows, until the grace time is over.
    fn retry_later(&mut self, index: usize, reason: &str) {
        let (controller, now) = (&self.shared.name, now());
        let pair = &mut self.pairs.pairs[index];
        let since = pair.failing.map_or(now, |failing| failing.since);
        pair.failing = Some(Failing { since, again: now.after(RETURN_INTERVAL) });
        let core = pair.handle.core();
        limited!(self.lines, error, controller, core, reason, "a core gets no queue pair: its requests wait");
        self.shared.info().last_failure = Some(format!("core {core} gets no queue pair: {reason}"));
    }

    /// Gives the controller up if a reactor has got no pair for the grace time: its requests would wait for ever, and those of
    /// other reactors with them.
    pub(super) fn end_without_pairs(&mut self) {
        let Some(failing_for) = self.pairs.failing_for(now()) else { return };
        if failing_for >= self.config.grace && !self.is_stopping {
            let controller = &self.shared.name;
            tracing::error!(controller, "a core has got no queue pair in time: the disks are removed");
            self.begin_to_stop();
        }
    }

    pub(super) fn reaped(&mut self, qid: u16, history: Box<History>) {
        self.pairs.reaped(qid, history);
        self.pairs.rewind_if_complete(&self.shared, self.cause());
    }

    pub(super) fn rewound(&mut self, qid: u16, is_end: bool) {
        if self.pairs.rewound(&self.shared, qid, is_end) {
            self.with_controller(|controller| controller.queue_rewound(qid));
        }
    }

    pub(super) fn replayed(&mut self, qid: u16) {
        self.pairs.replayed(qid);
    }

    /// Asks reactors that are being removed whether they still use their pairs.
    pub(super) fn leave_reactors(&self) {
        for pair in &self.pairs.pairs {
            let Stage::Installed(qid) = pair.stage else { continue };
            if !self.is_leaving(&pair.handle) {
                continue;
            }
            self.shared.forget_owner(&pair.handle);
            let (shared, key) = (Arc::clone(&self.shared), pair.key);
            pair.send(move |cx| {
                if driver::leave_if_unused(key, cx) {
                    shared.send(Command::Unused(qid));
                }
            });
        }
    }

    pub(super) fn forget_ended_reactors(&mut self) {
        let ended = self.pairs.take_ended();
        for &qid in &ended {
            self.shared.remove_pair(qid);
            // The controller may have ended already.
            self.with_controller(|controller| drop(controller.delete_pair(qid)));
        }
        if !ended.is_empty() && self.pairs.is_one_reset() {
            // It may be that pair, or one whose commands are awaited.
            self.reset(ResetReason::QueueError);
        }
        if !ended.is_empty() {
            // The others do not wait for it.
            self.pairs.rewind_if_complete(&self.shared, self.cause());
            self.pairs.open_if_replayed();
        }
    }

    /// Makes every reactor stop submitting: the first step of a reset, and of a shutdown.
    pub(super) fn quiesce(&mut self) {
        self.pairs.forget_alone();
        self.pairs.quiesce(&self.shared);
        for qid in self.pairs.orphans.clone() {
            self.with_controller(|controller| controller.queue_quiesced(qid));
        }
    }

    /// Deletes a pair that its reactor does not use, or could not install.
    pub(super) fn delete_pair(&mut self, qid: u16) {
        let Life::Driven(driven) = &mut self.life else { return };
        let Some(pair) = self.pairs.find(qid) else { return };
        if matches!(pair.stage, Stage::Installed(_) | Stage::Installing(_)) {
            pair.stage = Stage::Deleting(qid);
            // A pair that a reset has just ended goes with the reset.
            let _ = driven.controller.delete_pair(qid);
        }
    }
}
