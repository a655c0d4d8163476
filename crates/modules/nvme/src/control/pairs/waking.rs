//! The second queue pairs of reactors, with interrupts, for a controller whose interrupts cannot be masked. A reactor without one
//! polls while requests are in flight.

use super::{Pair, Pairs, Stage};
use crate::control::{Life, Thread};
use crate::driver;
use aryk_nvme::controller::PairRequest;
use aryk_nvme::queue::QueuePair;
use aryk_reactor::Handle;
use std::sync::Arc;

impl Pairs {
    /// Removes the second pair of a reactor whose first is removed, unless it has to be deleted first.
    pub(super) fn remove_waking_of(&mut self, first: &Pair) {
        let is_its = |pair: &mut Pair| {
            pair.is_waking && pair.handle == first.handle && matches!(pair.stage, Stage::Wanted)
        };
        let waking: Vec<Pair> = self.pairs.extract_if(.., is_its).collect();
        waking.into_iter().for_each(|pair| self.remove(pair));
    }

    /// A vector that no other second pair has; the one that the pair had before, if there is still such a vector.
    fn free_vector(&self, index: usize, vectors: u16) -> Option<u16> {
        let is_free = |vector: &u16| !self.pairs.iter().any(|pair| pair.vector == Some(*vector));
        let before = self.pairs[index].vector.filter(|vector| *vector < vectors);
        before.or_else(|| (1..vectors).find(is_free))
    }
}

impl Thread {
    /// Whether a reactor is being removed.
    pub(super) fn is_leaving(&self, handle: &Handle) -> bool {
        let reactors = self.env.reactors();
        reactors.handles().contains(handle) && !reactors.staying().contains(handle)
    }

    /// Wants a second pair for the reactor that gets its first, if the first has no interrupt.
    pub(super) fn want_waking_pair(&mut self, queue: &QueuePair) {
        let (pairs, depth) = (&mut self.pairs.pairs, queue.depth());
        let Some(first) = pairs.iter().find(|pair| pair.qid() == Some(queue.qid())) else { return };
        let handle = &first.handle;
        if self.can_mask
            || first.is_waking
            || pairs.iter().any(|pair| pair.is_waking && pair.handle == *handle)
        {
            return;
        }
        let shared = Arc::clone(&self.shared);
        first.send(move |cx| driver::prepare_waking(&shared, depth, cx));
        pairs.push(Pair::wanted_by(handle.clone(), &self.shared, true));
    }

    /// Makes the controller create the second pairs that are wanted, for reactors that have their first.
    pub(super) fn create_waking_pairs(&mut self) {
        for index in 0..self.pairs.pairs.len() {
            let pair = &self.pairs.pairs[index];
            let is_first = |first: &Pair| {
                first.handle == pair.handle && !first.is_waking && matches!(first.stage, Stage::Installed(_))
            };
            let is_wanted = pair.is_waking && matches!(pair.stage, Stage::Wanted) && !pair.is_refused;
            let has_first = self.pairs.pairs.iter().any(is_first);
            if !is_wanted || !has_first || self.can_mask || self.is_leaving(&pair.handle) {
                continue;
            }
            if let Err(reason) = self.create_waking_pair(index) {
                self.refuse_waking_pair(index, &reason);
            }
        }
    }

    fn create_waking_pair(&mut self, index: usize) -> Result<(), String> {
        let vector = self.pairs.free_vector(index, self.vectors);
        let vector = vector.ok_or_else(|| format!("there are {} interrupt vectors", self.vectors))?;
        let has_first = |handle: &Handle| {
            let is_its = |pair: &Pair| pair.handle == *handle && !pair.is_waking && pair.qid().is_some();
            self.pairs.pairs.iter().any(is_its)
        };
        let used = self.pairs.pairs.iter().filter(|pair| pair.qid().is_some()).count();
        let missing = self.env.reactors().handles().iter().filter(|handle| !has_first(handle)).count();
        let Life::Driven(driven) = &mut self.life else { return Ok(()) };
        let allowed = driven.controller.pairs_allowed();
        if used + missing >= usize::from(allowed) {
            return Err(format!("the controller has {allowed} queue pairs, too few for two on each core"));
        }
        let request = PairRequest { depth: self.config.depth, vector: Some(vector) };
        let qid = driven.controller.create_pair(request).map_err(|refused| refused.to_string())?;
        let pair = &mut self.pairs.pairs[index];
        (pair.stage, pair.vector) = (Stage::Creating(qid), Some(vector));
        Ok(())
    }

    /// A reactor gets no second pair, until the controller is opened again.
    pub(super) fn refuse_waking_pair(&mut self, index: usize, reason: &str) {
        let (controller, pair) = (&self.shared.name, &mut self.pairs.pairs[index]);
        let core = pair.handle.core();
        pair.is_refused = true;
        tracing::warn!(
            controller,
            core,
            reason,
            "a core gets no queue pair with interrupts: it polls while requests are in flight"
        );
        // The pair had a vector before.
        if pair.vector.is_some() {
            let failure = format!("core {core} gets no queue pair with interrupts: {reason}");
            self.shared.info().last_failure = Some(failure);
        }
    }
}
