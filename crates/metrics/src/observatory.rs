//! Looks at everything there is, for all who want one. Control context, within one `LocalSet`.
//!
//! Who asks while others' look is being taken, or soon after it, gets that one: however many watch, the reactors are asked no more often.

use crate::unions::{Part, Sums, Union};
use crate::{Controller, Inventory};
use aryk_bdev::{Bdev, Failure, QosGroup, RateLimits, Summary, gather};
use aryk_dma::Reclaiming;
use aryk_reactor::{Clock, Handle, Nanos, ReactorStats};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// Everything there was at one time.
#[derive(Debug)]
pub struct Look {
    /// When it was finished.
    pub at: Nanos,
    /// How long it took.
    pub took: Duration,
    /// The disks, by age.
    pub disks: Vec<Disk>,
    /// Groups of disks, each after its parent.
    pub groups: Vec<Group>,
    /// The controllers, by name.
    pub controllers: Vec<Seat>,
    /// The reactors, by core.
    pub reactors: Vec<Reactor>,
    /// Bytes, and mappings, of front-ends' memory.
    pub mapped: (u64, u64),
    /// How far the unmapping of it is behind.
    pub reclaiming: Reclaiming,
}

impl Look {
    /// How much later it was finished than an earlier one.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> f64 {
        self.at.since(earlier.at).as_secs_f64().max(1e-3)
    }
}

/// A disk.
#[derive(Debug)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// The module's word for what it is.
    pub product: &'static str,
    /// Bytes.
    pub size: u64,
    /// The group that it is limited with.
    pub group: Option<String>,
    /// Its own limits.
    pub limits: RateLimits,
    /// What it has counted.
    pub counts: Summary,
    /// The last request that its store has failed.
    pub last_failure: Option<Failure>,
    /// The most requests that were in flight lately: in half a minute at least, in a minute at most.
    pub in_flight_max: u64,
}

/// A group of disks that are limited together.
#[derive(Debug)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// The group that it is in.
    pub parent: Option<String>,
    /// What its disks may do together.
    pub limits: RateLimits,
    /// How many disks are in it, and in the groups in it.
    pub disks: usize,
    /// What they did while they were.
    pub counts: Summary,
}

/// A controller, and what its disks did while they were its.
#[derive(Debug)]
pub struct Seat {
    /// The controller.
    pub controller: Controller,
    /// What its disks did, through whichever controller.
    pub counts: Summary,
}

/// A reactor.
#[derive(Debug)]
pub struct Reactor {
    /// Its core.
    pub core: u16,
    /// Where its time went.
    pub stats: ReactorStats,
    /// Its longest turn lately.
    pub longest_turn: Duration,
    /// Roots and pollers on it.
    pub members: u64,
    /// What disks did on it.
    pub counts: Summary,
}

/// Who looks.
#[derive(Debug, Default)]
pub struct Observatory(Mutex<Seen>);

/// What has been seen. Locked while the next look is taken.
#[derive(Debug, Default)]
struct Seen {
    last: Option<Rc<Look>>,
    depths: Peaks<u64>,
    turns: Peaks<Duration>,
    sums: Sums,
}

impl Observatory {
    /// A look at what is in `inventory`, no older than `age`.
    pub async fn look(&self, inventory: &dyn Inventory, age: Duration) -> Rc<Look> {
        let mut seen = self.0.lock().await;
        if let Some(look) = seen.last.as_ref().filter(|look| Clock::Monotonic.now().since(look.at) <= age) {
            return Rc::clone(look);
        }
        let look = Rc::new(seen.look(inventory).await);
        seen.last = Some(Rc::clone(&look));
        look
    }
}

impl Seen {
    async fn look(&mut self, inventory: &dyn Inventory) -> Look {
        let start = Clock::Monotonic.now();
        self.depths.begin(start);
        self.turns.begin(start);
        let (bdevs, handles) = (inventory.disks(), inventory.reactors());
        let (groups, controllers) = (inventory.groups(), inventory.controllers());
        let parts = gather(&bdevs, &handles).await;
        let unions = unions(&bdevs, &controllers);
        let mut counts = vec![Summary::default(); bdevs.len()];
        let parts = parts.into_iter().map(|part| {
            counts[part.disk].merge(&part.counts);
            let (serial, unions) = (bdevs[part.disk].serial(), &unions[part.disk]);
            Part { serial, core: part.core, counts: part.counts, unions }
        });
        let names: HashSet<&str> = groups.iter().map(|g| g.name()).collect();
        let seats: HashSet<&str> = controllers.iter().map(|c| &*c.name).collect();
        self.sums.look(parts, |union| match union {
            Union::Group(name) => names.contains(&**name),
            Union::Controller(name) => seats.contains(&**name),
            Union::Reactor(_) => true,
        });
        let mut sizes: HashMap<&Union, usize> = HashMap::new();
        unions.iter().flatten().for_each(|union| *sizes.entry(union).or_default() += 1);
        let group = |group: &Arc<QosGroup>| {
            let union = Union::Group(group.name().to_owned());
            Group {
                name: group.name().to_owned(),
                parent: group.parent().map(|parent| parent.name().to_owned()),
                limits: group.limits(),
                disks: sizes.get(&union).copied().unwrap_or_default(),
                counts: self.sums.of(&union),
            }
        };
        let groups = groups.iter().map(group).collect();
        let disks = bdevs.iter().zip(counts).map(|(bdev, counts)| self.disk(bdev, counts)).collect();
        let reactors = handles.iter().map(|handle| self.reactor(handle)).collect();
        let seat = |controller: Controller| {
            let counts = self.sums.of(&Union::Controller(controller.name.clone()));
            Seat { controller, counts }
        };
        let controllers = controllers.into_iter().map(seat).collect();
        let at = Clock::Monotonic.now();
        let (mapped, reclaiming) = (aryk_dma::mapped(), aryk_dma::reclaiming());
        Look { at, took: at.since(start), disks, groups, controllers, reactors, mapped, reclaiming }
    }

    fn disk(&mut self, bdev: &Bdev, counts: Summary) -> Disk {
        let geometry = bdev.geometry();
        Disk {
            name: bdev.name().to_owned(),
            product: bdev.device().product(),
            size: geometry.blocks * u64::from(geometry.block_size),
            in_flight_max: self.depths.raise(bdev.name(), counts.in_flight_max),
            group: bdev.qos_group().map(|group| group.name().to_owned()),
            limits: bdev.qos_limits(),
            last_failure: bdev.device().last_failure(),
            counts,
        }
    }

    fn reactor(&mut self, handle: &Handle) -> Reactor {
        let core = handle.core();
        Reactor {
            core,
            stats: handle.stats(),
            longest_turn: self.turns.raise(&core.to_string(), handle.take_longest_turn()),
            members: handle.members(),
            counts: self.sums.of(&Union::Reactor(core)),
        }
    }
}

/// What each disk belongs to, but for reactors: its group with all that this is in, and its controllers.
fn unions(bdevs: &[Arc<Bdev>], controllers: &[Controller]) -> Vec<Vec<Union>> {
    let mut of: HashMap<&str, Vec<Union>> = HashMap::new();
    for controller in controllers {
        for disk in &controller.disks {
            of.entry(disk).or_default().push(Union::Controller(controller.name.clone()));
        }
    }
    let all = |bdev: &Arc<Bdev>| {
        let mut unions = of.remove(bdev.name()).unwrap_or_default();
        let group = bdev.qos_group();
        let outwards = std::iter::successors(group.as_ref(), |group| group.parent());
        unions.extend(outwards.map(|group| Union::Group(group.name().to_owned())));
        unions
    };
    bdevs.iter().map(all).collect()
}

/// For how long a peak is told, at least.
const LATELY: Duration = Duration::from_secs(30);

/// The peaks of this while and of the one before, by name. What is gone is forgotten with its while.
#[derive(Debug)]
struct Peaks<T> {
    since: Nanos,
    now: HashMap<String, T>,
    before: HashMap<String, T>,
}

impl<T> Default for Peaks<T> {
    fn default() -> Self {
        Self { since: Nanos(0), now: HashMap::new(), before: HashMap::new() }
    }
}

impl<T: Ord + Copy> Peaks<T> {
    /// Begins a new while if this one has lasted.
    fn begin(&mut self, now: Nanos) {
        if now.since(self.since) >= LATELY {
            self.since = now;
            self.before = std::mem::take(&mut self.now);
        }
    }

    /// The peak of `name`, of which `value` is the latest.
    fn raise(&mut self, name: &str, value: T) -> T {
        let now = match self.now.get_mut(name) {
            Some(now) => {
                *now = value.max(*now);
                *now
            }
            None => {
                self.now.insert(name.to_owned(), value);
                value
            }
        };
        self.before.get(name).map_or(now, |&before| now.max(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_told_for_a_while() {
        let mut peaks = Peaks::default();
        let mut at = |second: u64, value: u64| {
            peaks.begin(Nanos(second * 1_000_000_000));
            peaks.raise("d", value)
        };
        assert_eq!([at(40, 3), at(50, 9), at(60, 1)], [3, 9, 9]);
        assert_eq!([at(75, 2), at(104, 1), at(106, 1), at(140, 0)], [9, 9, 2, 1]);
    }
}
