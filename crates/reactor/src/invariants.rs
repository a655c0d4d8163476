//! Checks of a reactor's lists and counts, at the end of each turn of a debug build. They allocate nothing, because tests count
//! the allocations of a turn. Reactor context.

use crate::{Cx, RootId, SleepPolicy};
use std::collections::VecDeque;

/// A check visits all roots, so a reactor with more roots than this is checked in one turn of as many as it has roots. For each
/// thread, a check visits all roots once more: it looks at so many threads, and the next check at the next ones.
const ROOTS: u32 = 64;

impl Cx {
    /// Checks what holds between two turns.
    pub(crate) fn check_invariants(&self) {
        let roots = self.roots.len();
        if !cfg!(debug_assertions) || roots > ROOTS && !self.turn().is_multiple_of(roots.into()) {
            return;
        }
        self.check_roots();
        self.check_pollers();
        self.check_members();
        self.drivers.check_invariants();
    }

    fn check_roots(&self) {
        let listed =
            |list: &VecDeque<RootId>| list.iter().filter(|id| self.roots.get(id.0).is_some()).count();
        let promoted = self.roots.iter().filter(|(_, root)| root.promoted).count();
        assert_eq!(listed(&self.promoted), promoted, "a promoted root is polled once in each turn");
        let queued = self.roots.iter().filter(|(_, root)| root.queued).count();
        assert_eq!(listed(&self.woken), queued, "a root is in the queue of woken roots once");
        let is_lost = self.roots.iter().any(|(_, root)| root.woken && !root.queued && !root.promoted);
        assert!(!is_lost, "a root was woken, but is in no list");
        let last = self.last_woken.and_then(|id| self.roots.get(id.0));
        assert!(last.is_none_or(|root| root.woken), "the next wake of the root that was woken last is lost");
        let sleepless = self.roots.iter().filter(|(_, root)| root.policy == SleepPolicy::Poll).count();
        assert_eq!(sleepless, self.sleepless_roots as usize, "roots that keep the reactor awake");
    }

    fn check_pollers(&self) {
        let of_each_turn = self.pollers.iter().filter(|(_, poller)| poller.period.is_none()).count();
        let active = self.active_pollers.iter().filter(|id| self.pollers.get(id.0).is_some()).count();
        assert_eq!(active, of_each_turn, "a poller without a period runs once in each turn");
        assert!(self.pollers.iter().all(|(_, poller)| poller.run.is_some()), "a poller lost its function");
    }

    /// Checks that threads and the account count their roots and pollers.
    fn check_members(&self) {
        let roots = || self.roots.iter().map(|(_, root)| root.thread);
        let members = || roots().chain(self.pollers.iter().map(|(_, poller)| poller.thread));
        let checks = self.turn() / u64::from(self.roots.len().max(1));
        let first = checks * u64::from(ROOTS) % u64::from(self.threads.len().max(1));
        for (id, thread) in self.threads.iter().skip(first as usize).take(ROOTS as usize) {
            let count = members().filter(|member| member.0 == id).count();
            assert_eq!(thread.members as usize, count, "roots and pollers of thread {}", thread.name);
        }
        let all = self.threads.iter().map(|(_, thread)| u64::from(thread.members)).sum::<u64>();
        assert_eq!(all, members().count() as u64, "the thread of a root or poller is on its reactor");
        assert_eq!(all, self.handle.0.account.members(), "members of the reactor");
    }
}
