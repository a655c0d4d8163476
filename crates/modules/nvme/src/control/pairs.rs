//! The queue pairs of all reactors, as the control thread knows them.

use super::{Command, Life, Thread};
use crate::driver::{self, Live};
use crate::pool::Pool;
use crate::shared::Shared;
use aryk_bdev::OpenError;
use aryk_nvme::controller::{PairRequest, Refused};
use aryk_nvme::queue::{DmaEnded, QueuePair, Restart};
use aryk_nvme::replay::History;
use aryk_pci::VectorMask;
use aryk_reactor::{Cx, Handle};
use std::sync::Arc;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

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

/// A reactor, and its pair.
struct Pair {
    handle: Handle,
    messages: UnboundedSender<Message>,
    sending: JoinHandle<()>,
    stage: Stage,
    /// The reactor watches its interrupt.
    is_watched: bool,
    waiters: Vec<Waiter>,
    /// The reset that is under way.
    rewinding: Option<Rewinding>,
}

/// The pair's part in a reset, between the end of DMA and the decision about its commands.
struct Rewinding {
    proof: DmaEnded,
    history: Option<Box<History>>,
}

impl Pair {
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

    fn answer(&mut self, result: &Result<(), OpenError>) {
        for waiter in self.waiters.drain(..) {
            // The opener may be gone.
            let _ = waiter.send(result.clone());
        }
    }
}

/// The pairs of all reactors.
#[derive(Default)]
pub(super) struct Pairs {
    pairs: Vec<Pair>,
    /// Queues of reactors that have ended, until the controller has deleted them.
    orphans: Vec<u16>,
    /// Messages on their way to reactors without a pair.
    leaving: Vec<JoinHandle<()>>,
}

impl Pairs {
    fn find(&mut self, qid: u16) -> Option<&mut Pair> {
        self.pairs.iter_mut().find(|pair| pair.qid() == Some(qid))
    }

    pub(super) fn installed(&mut self, qid: u16, result: std::io::Result<()>) {
        let Some(pair) = self.find(qid) else { return };
        if matches!(pair.stage, Stage::Installing(_)) {
            pair.stage = Stage::Installed(qid);
        }
        match result {
            Ok(()) => {
                pair.is_watched = true;
                pair.answer(&Ok(()));
            }
            Err(error) => {
                pair.answer(&Err(OpenError::Unavailable(format!("cannot watch an interrupt: {error}"))))
            }
        }
    }

    /// Sends each pair that a reactor has the first step of a reset.
    pub(super) fn quiesce(&self, shared: &Shared) {
        let key = shared.key;
        for pair in &self.pairs {
            if let Some(qid) = pair.given_out() {
                pair.send(move |cx| driver::quiesce(key, qid, cx));
            }
        }
    }

    /// The controller no longer accesses the memory of a pair's commands.
    pub(super) fn dma_ended(&mut self, shared: &Shared, proof: DmaEnded) {
        let (key, qid) = (shared.key, proof.qid());
        self.orphans.retain(|&orphan| orphan != qid);
        let Some(pair) = self.find(qid) else { return };
        if pair.given_out().is_none() {
            pair.stage = Stage::Wanted;
            return;
        }
        pair.rewinding = Some(Rewinding { proof, history: None });
        pair.send(move |cx| driver::reap_last(key, qid, cx));
    }

    pub(super) fn reaped(&mut self, qid: u16, history: Box<History>) {
        if let Some(Rewinding { history: place, .. }) =
            self.find(qid).and_then(|pair| pair.rewinding.as_mut())
        {
            *place = Some(history);
        }
    }

    /// Lets the pairs of a reset decide about their commands, once all have reported what they have changed.
    pub(super) fn rewind_if_complete(&mut self, shared: &Shared, is_end: bool) {
        let rewinding = || self.pairs.iter().filter_map(|pair| pair.rewinding.as_ref());
        if rewinding().any(|rewinding| rewinding.history.is_none()) {
            return;
        }
        let histories: Arc<[Box<History>]> =
            rewinding().filter_map(|rewinding| rewinding.history.clone()).collect();
        let key = shared.key;
        for pair in &mut self.pairs {
            let Some(Rewinding { proof, .. }) = pair.rewinding.take() else { continue };
            let is_end = is_end || matches!(pair.stage, Stage::Deleting(_));
            let histories = Arc::clone(&histories);
            pair.send(move |cx| driver::rewind(key, proof, &histories, is_end, cx));
        }
    }

    /// The controller has paused.
    pub(super) fn restart_clocks(&self, shared: &Shared) {
        let key = shared.key;
        for pair in self.pairs.iter().filter(|pair| pair.given_out().is_some()) {
            pair.send(move |cx| driver::restart_clock(key, cx));
        }
    }

    /// A pair has decided about its commands. Whether its reactor has none any more.
    pub(super) fn rewound(&mut self, shared: &Shared, qid: u16, is_end: bool) {
        let Some(index) = self.pairs.iter().position(|pair| pair.qid() == Some(qid)) else { return };
        if matches!(self.pairs[index].stage, Stage::Deleting(_)) {
            shared.remove_pair(qid);
            let pair = self.pairs.swap_remove(index);
            self.remove(shared, pair);
        } else if is_end {
            shared.remove_pair(qid);
            self.pairs[index].stage = Stage::Wanted;
        }
    }

    /// Whether a reactor still has a pair.
    pub(super) fn are_given_out(&self) -> bool {
        self.pairs.iter().any(|pair| pair.given_out().is_some())
    }

    fn remove(&mut self, shared: &Shared, mut pair: Pair) {
        let key = shared.key;
        pair.send(move |cx| driver::remove(key, cx));
        pair.answer(&Err(OpenError::Removed));
        self.leaving.push(pair.sending);
        self.leaving.retain(|sending| !sending.is_finished());
    }

    /// Removes the pairs of all reactors, which have been retired.
    pub(super) fn remove_all(&mut self, shared: &Shared) {
        std::mem::take(&mut self.pairs).into_iter().for_each(|pair| self.remove(shared, pair));
    }

    /// Waits until the last messages are sent.
    pub(super) async fn drain(&mut self) {
        for sending in self.leaving.drain(..) {
            // A task that has ended has sent everything, or its reactor has ended.
            let _ = sending.await;
        }
    }

    /// Forgets the pairs of reactors that have ended, which have dropped them.
    fn take_ended(&mut self) -> Vec<u16> {
        let ended = self.pairs.extract_if(.., |pair| pair.handle.has_ended());
        let ended: Vec<u16> = ended.filter_map(|pair| pair.qid()).collect();
        self.orphans.extend(&ended);
        ended
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
        // A reactor may have ended, and another begun on its core.
        self.forget_ended_reactors();
        if self.shared.owner_for(&handle).is_some() {
            // The opener may be gone.
            let _ = reply.send(Ok(()));
            return;
        }
        let pairs = &mut self.pairs.pairs;
        let index = pairs.iter().position(|pair| pair.handle == handle).unwrap_or_else(|| {
            let (messages, sending) = send_in_order(handle.clone());
            let (stage, waiters) = (Stage::Wanted, Vec::new());
            pairs.push(Pair {
                handle,
                messages,
                sending,
                stage,
                is_watched: false,
                waiters,
                rewinding: None,
            });
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
        let mut refusals = Vec::new();
        for (index, pair) in self.pairs.pairs.iter_mut().enumerate() {
            if !matches!(pair.stage, Stage::Wanted) {
                continue;
            }
            let vectors = self.interrupts.len() as u16;
            // Vector 0 is the admin queue's, which is polled; queue N has vector N.
            let vector = driven.controller.next_qid().filter(|qid| *qid < vectors);
            match driven.controller.create_pair(PairRequest { depth: self.config.depth, vector }) {
                Ok(qid) => pair.stage = Stage::Creating(qid),
                Err(refused) => refusals.push((index, refused)),
            }
        }
        for (index, refused) in refusals.into_iter().rev() {
            self.use_other_pair(index, &refused);
        }
    }

    /// A reactor gets no pair: it uses that of another, if the controller just has too few.
    fn use_other_pair(&mut self, index: usize, refused: &Refused) {
        let staying = self.env.reactors().staying();
        let pairs = &mut self.pairs.pairs;
        let is_coming = |pair: &Pair| matches!(pair.stage, Stage::Creating(_) | Stage::Installing(_));
        if matches!(refused, Refused::NoPair(_)) && pairs.iter().any(is_coming) {
            // Tried again when that pair is installed.
            return;
        }
        let owner = match refused {
            Refused::NoPair(_) => pairs
                .iter()
                .find(|pair| matches!(pair.stage, Stage::Installed(_)) && staying.contains(&pair.handle)),
            _ => None,
        };
        let owner = owner.and_then(|owner| self.env.reactors().hold(&owner.handle));
        let result = match owner {
            Some(owner) => {
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
        let mask = self.mask_of(qid);
        let Life::Driven(driven) = &mut self.life else { return };
        let Some(pair) = self.pairs.find(qid) else { return };
        let transfers = 2 * crate::DATA_MAX;
        let pool =
            Pool::new(&driven.function, self.config.bounce_bytes.max(transfers), driven.controller.page());
        let pool = match pool {
            Ok(pool) => pool,
            Err(error) => {
                pair.answer(&Err(OpenError::Unavailable(error.to_string())));
                pair.stage = Stage::Wanted;
                // The pair was created just now.
                let deleted = driven.controller.delete_pair(qid);
                debug_assert!(deleted.is_ok(), "{deleted:?}");
                return;
            }
        };
        let info = driven.controller.info();
        if let Some(mask) = &mask {
            mask.mask();
        }
        let interrupt =
            (mask.is_some() && !pair.is_watched).then(|| self.interrupts[usize::from(qid)].try_clone());
        let core = pair.handle.core();
        let live = Box::new(Live {
            pair: queue,
            pool,
            mask,
            memory: driven.memory.clone(),
            retry_delays: info.map_or([0; 3], |info| info.retry_delays),
            has_write_cache: info.is_none_or(|info| info.has_write_cache),
            stats: self.shared.add_pair(qid, core),
        });
        pair.stage = Stage::Installing(qid);
        let shared = Arc::clone(&self.shared);
        pair.send(move |cx| {
            let result = interrupt.transpose().and_then(|fd| driver::install(&shared, live, fd, cx));
            shared.send(Command::Installed { qid, result });
        });
    }

    /// A pair can run again.
    pub(super) fn queue_ready(&mut self, restart: Restart) {
        let (key, qid) = (self.shared.key, restart.qid());
        let mask = self.mask_of(qid);
        if let Some(pair) = self.pairs.find(qid) {
            pair.send(move |cx| driver::resume(key, restart, mask, cx));
        }
    }

    /// The mask of a queue's interrupt, if it has one.
    fn mask_of(&self, qid: u16) -> Option<VectorMask> {
        let Life::Driven(driven) = &self.life else { return None };
        self.interrupts.get(usize::from(qid)).and_then(|_| driven.function.vector_mask(qid))
    }

    pub(super) fn queue_failed(&mut self, qid: u16, reason: &str) {
        if let Some(pair) = self.pairs.find(qid) {
            pair.stage = Stage::Wanted;
            pair.answer(&Err(OpenError::Unavailable(format!(
                "the controller creates no queue pair: {reason}"
            ))));
        }
    }

    pub(super) fn reaped(&mut self, qid: u16, history: Box<History>) {
        self.pairs.reaped(qid, history);
        let is_end = self.is_over();
        self.pairs.rewind_if_complete(&self.shared, is_end);
    }

    pub(super) fn rewound(&mut self, qid: u16) {
        let is_end = self.is_over();
        self.pairs.rewound(&self.shared, qid, is_end);
        self.with_controller(|controller| controller.queue_rewound(qid));
    }

    /// Asks reactors that are being removed whether they still use their pairs.
    pub(super) fn leave_reactors(&self) {
        let (all, staying) = (self.env.reactors().handles(), self.env.reactors().staying());
        for pair in &self.pairs.pairs {
            let is_leaving = all.contains(&pair.handle) && !staying.contains(&pair.handle);
            let Stage::Installed(qid) = pair.stage else { continue };
            if !is_leaving {
                continue;
            }
            self.shared.forget_owner(&pair.handle);
            let shared = Arc::clone(&self.shared);
            pair.send(move |cx| {
                if driver::is_unused(shared.key, cx) {
                    shared.send(Command::Unused(qid));
                }
            });
        }
    }

    pub(super) fn forget_ended_reactors(&mut self) {
        for qid in self.pairs.take_ended() {
            self.shared.remove_pair(qid);
            // The controller may have ended already.
            self.with_controller(|controller| drop(controller.delete_pair(qid)));
        }
    }

    /// Makes every reactor stop submitting: the first step of a reset, and of a shutdown.
    pub(super) fn quiesce(&mut self) {
        self.pairs.quiesce(&self.shared);
        for qid in self.pairs.orphans.clone() {
            self.with_controller(|controller| controller.queue_quiesced(qid));
        }
    }

    pub(super) fn delete_pair(&mut self, qid: u16) {
        let Life::Driven(driven) = &mut self.life else { return };
        let Some(pair) = self.pairs.find(qid) else { return };
        if matches!(pair.stage, Stage::Installed(_)) {
            pair.stage = Stage::Deleting(qid);
            // A pair that a reset has just ended goes with the reset.
            let _ = driven.controller.delete_pair(qid);
        }
    }
}
