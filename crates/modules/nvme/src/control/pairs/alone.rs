//! The reset of one queue pair, after a completion that no correct controller posts: the controller and the other pairs go on.
//!
//! A write of the broken pair may be submitted again only if no other pair completes a change of its blocks after the decision.
//! So the other pairs first end the commands that they have in flight, begin no new ones, and report what they have changed.
//! Then the queues are deleted and created again, and the pair replays its commands as after any reset; after that, all pairs
//! begin new commands. A pair that breaks again soon, or while another is being reset, is a broken controller, which is reset
//! as a whole; so is one whose other pairs do not end their commands in time.
use super::super::{STABLE, Thread, now};
use super::{Pair, Pairs, Rewind, Stage};
use crate::driver;
use crate::shared::Shared;
use aryk_log_limit::limited;
use aryk_nvme::controller::ResetReason;
use aryk_nvme::queue::QueueError;
use aryk_nvme::replay::History;
use aryk_reactor::Nanos;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A pair that is being reset.
pub(super) struct Alone {
    qid: u16,
    since: Nanos,
    /// Pairs that have commands in flight.
    awaited: Vec<u16>,
}

impl Pairs {
    /// Whether a pair is being reset without the controller.
    pub(in super::super) const fn is_one_reset(&self) -> bool {
        self.alone.is_some()
    }

    /// The controller ends or is reset, and with it the pair.
    pub(in super::super) fn forget_alone(&mut self) {
        self.alone = None;
    }

    /// Lets all pairs but this one end their commands; `false` if the pair cannot be reset without the controller.
    fn begin_alone(&mut self, shared: &Arc<Shared>, qid: u16, now: Nanos) -> bool {
        let is_settled = |pair: &Pair| {
            let is_moving = matches!(pair.stage, Stage::Installing(_) | Stage::Deleting(_));
            !is_moving && matches!(pair.rewind, Rewind::None) && !pair.is_replaying
        };
        let can_be = self.alone.is_none() && self.orphans.is_empty() && self.pairs.iter().all(is_settled);
        let Some(pair) = self.find(qid).filter(|_| can_be) else { return false };
        if pair.last_alone.is_some_and(|last| now.since(last) < STABLE) {
            return false;
        }
        // New commands begin on all pairs when this one has replayed its own.
        (pair.last_alone, pair.is_replaying) = (Some(now), true);
        let mut awaited = Vec::new();
        for other in &self.pairs {
            if let Some(held) = other.given_out().filter(|held| *held != qid) {
                let (shared, key) = (Arc::clone(shared), other.key);
                other.send(move |cx| driver::hold(&shared, key, held, cx));
                awaited.push(held);
            }
        }
        self.alone = Some(Alone { qid, since: now, awaited });
        true
    }

    /// A pair has ended its commands. Returns the pair to reset if this was the last.
    fn held(&mut self, qid: u16, history: Box<History>) -> Option<u16> {
        let alone = self.alone.as_mut().filter(|alone| alone.awaited.contains(&qid))?;
        alone.awaited.retain(|awaited| *awaited != qid);
        let ready = alone.awaited.is_empty().then_some(alone.qid);
        if let Some(pair) = self.find(qid) {
            pair.history = Some(history);
        }
        ready
    }
}

impl Thread {
    /// A pair has got a completion that no correct controller posts.
    pub(in super::super) fn queue_error(&mut self, error: QueueError) {
        let (controller, qid) = (&self.shared.name, error.qid());
        tracing::error!(controller, %error, "the NVMe controller breaks the protocol");
        self.shared.info().last_failure = Some(error.to_string());
        let mut is_ready = false;
        self.with_controller(|controller| is_ready = controller.is_ready());
        if !is_ready || !self.pairs.begin_alone(&self.shared, qid, now()) {
            return self.reset(ResetReason::QueueError);
        }
        if self.pairs.alone.as_ref().is_some_and(|alone| alone.awaited.is_empty()) {
            self.reset_pair(qid);
        }
    }

    /// A pair has ended its commands for the reset of another, and has changed this lately.
    pub(in super::super) fn held(&mut self, qid: u16, history: Box<History>) {
        if let Some(qid) = self.pairs.held(qid, history) {
            self.reset_pair(qid);
        }
    }

    fn reset_pair(&mut self, qid: u16) {
        let mut is_refused = true;
        self.with_controller(|controller| is_refused = controller.reset_pair(qid).is_err());
        if is_refused {
            self.reset(ResetReason::QueueError);
        }
    }

    /// The pair runs again.
    pub(super) fn end_alone(&mut self, qid: u16) {
        let Some(alone) = self.pairs.alone.take_if(|alone| alone.qid == qid) else { return };
        self.shared.counters.queue_resets.fetch_add(1, Ordering::Relaxed);
        let (controller, took_ms) = (&self.shared.name, now().since(alone.since).as_millis() as u64);
        limited!(self.lines, warn, controller, qid, took_ms, "a queue pair of the NVMe controller was reset");
    }
}
