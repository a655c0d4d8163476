//! The second queue pair of a reactor, for a controller whose interrupts cannot be masked: over vfio-user, and where the MSI-X
//! table cannot be mapped. Reactor context.
//!
//! The reactor's first pair has no interrupt, so polling causes none; but while commands are in flight there, the reactor cannot
//! sleep. The second pair has an interrupt that always signals. Requests go to the first pair until it has kept the reactor from
//! sleeping, and from then on to the second, until the reactor takes completions without a pause: then polling is cheaper again.
//!
//! The reactor can do without the second pair: its requests go to the first when the controller ends, and new ones while the
//! second is not there.

use super::{Gate, Life, PairDriver, Pairs, Wake, find};
use crate::shared::Shared;
use aryk_reactor::Cx;
use aryk_slots::Key;
use std::convert::Infallible;
use std::sync::Arc;

/// Completions of the second pair without an attempt to sleep between them, after which requests go to the first pair again.
const AWAKE: u64 = 64;

/// Creates the driver of a reactor's second pair. The pair may come later, or never.
pub(crate) fn prepare_waking(shared: &Arc<Shared>, depth: u16, cx: &mut Cx) {
    let key = shared.waking_key;
    let Ok(driver) = cx.driver(key, |id, _| {
        Ok::<_, Infallible>(PairDriver::new(Arc::clone(shared), key, id, depth, Life::Away))
    });
    cx.local_state::<Pairs>().0.borrow_mut().insert(key, driver);
}

impl PairDriver {
    /// Names the same channel in the reactor's first driver.
    pub(crate) fn set_twin(&mut self, channel: Key, twin: Key) {
        self.channels.get_mut(channel).expect("just opened").twin = Some(twin);
    }

    /// Whether a new request goes to the reactor's second pair instead of this one.
    pub(crate) fn yields_to(&mut self, waking: &mut Self) -> bool {
        if !self.keeps_awake {
            return false;
        }
        let Life::Live(live) = &waking.life else { return false };
        if !matches!(live.wake, Wake::Always) || !live.pair.is_running() || waking.gate != Gate::Open {
            return false;
        }
        let completed = live.pair.counters().completed;
        if completed - waking.completed_at_arm < AWAKE {
            return true;
        }
        (self.keeps_awake, waking.completed_at_arm) = (false, completed);
        false
    }

    /// Gives the requests of the reactor's second pair to its first: the second may not come back.
    pub(super) fn hand_over(&mut self, cx: &mut Cx) {
        if self.key == self.shared.key {
            return;
        }
        // Without it, the requests fail with the controller's disks.
        let Some(first) = find(self.shared.key, cx) else { return };
        let first = &mut *first.activate(cx);
        let emptying = self.emptying.waiting.drain(..);
        let waiting = self.waiting.drain(..).chain(self.starved.drain(..)).chain(emptying);
        let waiting: Vec<Key> = waiting.collect();
        let is_kept = |key: &Key| self.requests.get(*key).is_some_and(|request| request.is_kept);
        // The requests that a reset kept come before the new ones.
        let (kept, new): (Vec<Key>, Vec<Key>) = waiting.into_iter().partition(is_kept);
        for key in kept.into_iter().rev() {
            let key = self.hand_over_one(key, first);
            first.waiting.push_front(key);
        }
        for key in new {
            let key = self.hand_over_one(key, first);
            first.waiting.push_back(key);
        }
        for (at, key) in std::mem::take(&mut self.delayed) {
            let (key, driver) = (self.hand_over_one(key, first), first.id);
            first.delayed.push((at, key));
            cx.call_at(at, move |cx| cx.wake_driver(driver));
        }
        assert!(self.requests.is_empty(), "a pair that was rewound has no commands in flight");
    }

    /// Moves a request to the first driver. Returns its key there.
    fn hand_over_one(&mut self, key: Key, first: &mut Self) -> Key {
        let mut request = self.requests.remove(key).expect("a request that waits");
        let channel = self.channels.get(request.channel).expect("it has requests");
        request.channel = channel.twin.expect("both drivers have the channel");
        if let Gate::Replaying(left) = &mut first.gate {
            *left += u32::from(request.is_kept);
        }
        self.emptying.end(request.emptying);
        first.emptying.take_over(request.emptying);
        first.requests.add(request)
    }
}
