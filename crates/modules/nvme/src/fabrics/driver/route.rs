//! Which path the requests of a channel take. Reactor context; the owner of the controller changes the table in control.

use crate::shared::lock;
use aryk_nvme_fabrics::subsystem::AnaState;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

/// Paths of a controller, at most.
pub const PATHS_MAX: usize = 8;

/// How the paths of a disk are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One path takes all requests; another one only if that is lost or gets worse.
    ActivePassive,
    /// Each of the best paths takes so many requests in turn.
    RoundRobin(u32),
    /// The one of the best paths with the fewest requests takes the next.
    QueueDepth,
}

/// Paths as a set, a bit each.
pub(crate) fn bits(paths: impl Iterator<Item = usize>) -> u8 {
    paths.fold(0, |bits, path| bits | 1 << path)
}

/// The paths of a namespace that take requests, a bit each: of those that are `connected`, the best, by what `access` reports.
pub(crate) fn best_paths(connected: u8, access: impl Fn(usize) -> Option<AnaState>, choice: Choice) -> u8 {
    let with = |state: AnaState| {
        let has = |path: &usize| connected >> path & 1 == 1 && access(*path) == Some(state);
        bits((0..PATHS_MAX).filter(has))
    };
    let optimized = with(AnaState::Optimized);
    let best = if optimized != 0 { optimized } else { with(AnaState::NonOptimized) };
    let preferred = bits(choice.preferred.into_iter()) & best;
    match choice.policy {
        Policy::ActivePassive if preferred != 0 => preferred,
        // The lowest bit.
        Policy::ActivePassive => best & best.wrapping_neg(),
        Policy::RoundRobin(_) | Policy::QueueDepth => best,
    }
}

/// The policy of a disk, and the path that the operator prefers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) policy: Policy,
    pub(crate) preferred: Option<usize>,
}

/// What the paths of a controller are for one namespace.
#[derive(Debug)]
pub(crate) struct PathTable {
    /// The [`AnaState`] of each path; 0: the path does not have the namespace.
    access: [AtomicU8; PATHS_MAX],
    choice: Mutex<Choice>,
}

impl PathTable {
    pub(crate) fn new(policy: Policy) -> Self {
        let choice = Choice { policy, preferred: None };
        Self { access: Default::default(), choice: Mutex::new(choice) }
    }

    /// Sets what a path is for the namespace. Returns whether that is new.
    pub(crate) fn set_access(&self, path: usize, state: Option<AnaState>) -> bool {
        let code = state.map_or(0, |state| state as u8);
        self.access[path].swap(code, Ordering::Relaxed) != code
    }

    /// What a path is for the namespace; `None`: it does not have the namespace.
    pub(crate) fn access(&self, path: usize) -> Option<AnaState> {
        match self.access[path].load(Ordering::Relaxed) {
            0 => None,
            code => Some(AnaState::of(code)),
        }
    }

    pub(crate) fn choice(&self) -> Choice {
        *lock(&self.choice)
    }

    pub(crate) fn set_choice(&self, choice: Choice) {
        *lock(&self.choice) = choice;
    }
}

/// The paths that the requests of a channel take now.
#[derive(Debug)]
pub(super) struct Route {
    /// The version of paths and tables of which it was made; 0: it is to be made again.
    version: u64,
    /// The best paths that are connected, a bit each.
    usable: u8,
    policy: Policy,
    /// The path of round robin, and the requests that it takes before the next.
    current: u8,
    left: u32,
}

impl Route {
    pub(super) const fn new() -> Self {
        Self { version: 0, usable: 0, policy: Policy::ActivePassive, current: 0, left: 0 }
    }

    /// Has the route made again: paths have come or gone.
    pub(super) const fn forget(&mut self) {
        self.version = 0;
    }

    pub(super) const fn is_of(&self, version: u64) -> bool {
        self.version == version
    }

    /// Makes the route, of the paths that are `connected`, a bit each.
    pub(super) fn make(&mut self, table: &PathTable, connected: u8, version: u64) {
        let choice = table.choice();
        self.usable = best_paths(connected, |path| table.access(path), choice);
        (self.policy, self.version) = (choice.policy, version);
    }

    /// The path of the next request. `room` returns how many commands a path has room for. `None`: there is no path.
    #[inline]
    pub(super) fn next(&mut self, room: impl Fn(usize) -> usize) -> Option<usize> {
        if self.usable.is_power_of_two() {
            return Some(self.usable.trailing_zeros() as usize);
        }
        self.next_of_several(room)
    }

    fn next_of_several(&mut self, room: impl Fn(usize) -> usize) -> Option<usize> {
        let is_usable = |path: &u8| self.usable >> path & 1 == 1;
        let Policy::RoundRobin(each) = self.policy else {
            return (0..PATHS_MAX as u8).filter(is_usable).map(usize::from).max_by_key(|path| room(*path));
        };
        if self.left == 0 || !is_usable(&self.current) || room(self.current.into()) == 0 {
            let from = |i| (self.current + i) % PATHS_MAX as u8;
            let others = (1..=PATHS_MAX as u8).map(from).filter(is_usable);
            let next =
                others.clone().find(|path| room((*path).into()) > 0).or_else(|| others.clone().next())?;
            (self.current, self.left) = (next, each.max(1));
        }
        self.left -= 1;
        Some(self.current.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(states: &[Option<AnaState>], connected: u8, choice: Choice) -> Route {
        let table = PathTable::new(choice.policy);
        for (path, state) in states.iter().enumerate() {
            table.set_access(path, *state);
        }
        table.set_choice(choice);
        let mut route = Route::new();
        route.make(&table, connected, 1);
        route
    }

    const BEST: Option<AnaState> = Some(AnaState::Optimized);
    const OTHER: Option<AnaState> = Some(AnaState::NonOptimized);
    const NONE: Option<AnaState> = Some(AnaState::Inaccessible);

    fn passive(preferred: Option<usize>) -> Choice {
        Choice { policy: Policy::ActivePassive, preferred }
    }

    #[test]
    fn one_path_takes_all_requests_while_it_is_among_the_best() {
        let next =
            |states: &[_], connected, preferred| route(states, connected, passive(preferred)).next(|_| 1);
        assert_eq!(next(&[OTHER, BEST, BEST], 0b111, None), Some(1));
        assert_eq!(next(&[OTHER, BEST, BEST], 0b111, Some(2)), Some(2));
        assert_eq!(next(&[OTHER, BEST, BEST], 0b111, Some(0)), Some(1), "not one of the best");
        assert_eq!(next(&[OTHER, BEST, BEST], 0b011, Some(2)), Some(1), "not connected");
        assert_eq!(next(&[OTHER, BEST, NONE], 0b101, None), Some(0));
        assert_eq!(next(&[NONE, None], 0b11, None), None);
        assert_eq!(next(&[BEST, BEST], 0, None), None);
    }

    #[test]
    fn round_robin_gives_each_path_its_number() {
        let choice = Choice { policy: Policy::RoundRobin(2), preferred: None };
        let mut of = route(&[BEST, OTHER, BEST, BEST], 0b1111, choice);
        let taken: Vec<usize> = (0..8).map(|_| of.next(|_| 1).unwrap()).collect();
        assert_eq!(taken, [2, 2, 3, 3, 0, 0, 2, 2]);
        // A full path is passed over, unless all are full.
        assert_eq!(of.next(|path| usize::from(path != 3)), Some(0));
        assert!(of.next(|_| 0).is_some());
    }

    #[test]
    fn the_path_with_the_most_room_takes_the_next() {
        let choice = Choice { policy: Policy::QueueDepth, preferred: None };
        let mut of = route(&[BEST, BEST, BEST], 0b111, choice);
        assert_eq!(of.next(|path| [3, 9, 5][path]), Some(1));
    }
}
