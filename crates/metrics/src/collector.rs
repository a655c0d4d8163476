//! Snapshots of all counts, shared by all clients. Control context, within one `LocalSet`.
//!
//! A client that asks during another client's snapshot, or soon after it, gets the same one. So the number of clients does not
//! raise how often the reactors are read.

use crate::aggregates::{Aggregate, Part, Sums};
use crate::inventory::{Host, Nvme, Pool, RbdClient, Remote};
use crate::{Controller, Inventory};
use aryk_bdev::{Bdev, Bytes, Failure, MemoryClientInfo, QosGroup, RateLimits, Summary, gather};
use aryk_dma::Reclaiming;
use aryk_reactor::{Clock, Handle, Nanos, ReactorStats};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// All counts at one time.
#[derive(Debug)]
pub struct Snapshot {
    /// When the snapshot was complete.
    pub at: Nanos,
    /// The time that the snapshot took.
    pub took: Duration,
    /// The disks, by age.
    pub disks: Vec<Disk>,
    /// Groups of disks, each after its parent.
    pub groups: Vec<Group>,
    /// The controllers, by name.
    pub controllers: Vec<ControllerCounts>,
    /// The NVMe controllers that the daemon drives, by name.
    pub nvme: Vec<Nvme>,
    /// The controllers of other hosts, by name.
    pub remotes: Vec<Remote>,
    /// The clients of Ceph clusters.
    pub rbd: Vec<RbdClient>,
    /// The hosts that use shared disks.
    pub hosts: Vec<Host>,
    /// The pools of volumes, by age.
    pub pools: Vec<Pool>,
    /// The reactors, by core.
    pub reactors: Vec<Reactor>,
    /// Guest memory that is mapped, in bytes and mappings.
    pub mapped: (u64, u64),
    /// Guest memory that was released although requests use its addresses, in bytes and mappings.
    pub revoked: (u64, u64),
    /// The backlog of mappings to be unmapped.
    pub reclaiming: Reclaiming,
    /// The devices, or groups of devices, that register guest memory.
    pub memory_clients: Vec<MemoryClientInfo>,
}

impl Snapshot {
    /// Seconds from `earlier` to this snapshot.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> f64 {
        self.at.since(earlier.at).as_secs_f64().max(1e-3)
    }
}

/// A disk.
#[derive(Debug)]
pub struct Disk {
    /// The disk's name.
    pub name: String,
    /// The module's product name.
    pub product: &'static str,
    /// Size in bytes.
    pub size: Bytes,
    /// The disk's group, if it has one.
    pub group: Option<String>,
    /// The disk's own limits.
    pub limits: RateLimits,
    /// The disk's counts.
    pub counts: Summary,
    /// The last request that the store failed.
    pub last_failure: Option<Failure>,
    /// The highest number of requests in flight, over the last 30 to 60 seconds.
    pub in_flight_max: u64,
}

/// A group of disks that share limits.
#[derive(Debug)]
pub struct Group {
    /// The group's name.
    pub name: String,
    /// The parent group.
    pub parent: Option<String>,
    /// The group's limits.
    pub limits: RateLimits,
    /// The number of disks in the group and its subgroups.
    pub disks: usize,
    /// The sum of the disks' counts, each while the disk was in the group.
    pub counts: Summary,
}

/// A controller, and the sum of its disks' counts, each while the controller had the disk.
#[derive(Debug)]
pub struct ControllerCounts {
    /// The controller.
    pub controller: Controller,
    /// The sum, including requests that came through other controllers.
    pub counts: Summary,
}

/// A reactor.
#[derive(Debug)]
pub struct Reactor {
    /// The reactor's core.
    pub core: u16,
    /// The reactor's time by state.
    pub stats: ReactorStats,
    /// The longest turn, lately.
    pub longest_turn: Duration,
    /// Roots and pollers on the reactor.
    pub members: u64,
    /// The sum of the counts of all disks on this reactor.
    pub counts: Summary,
}

/// Takes snapshots.
#[derive(Debug, Default)]
pub struct Collector(Mutex<Collected>);

/// The last snapshot, and the state across snapshots. Locked while a snapshot is taken.
#[derive(Debug, Default)]
struct Collected {
    last: Option<Rc<Snapshot>>,
    depths: Peaks<u64>,
    turns: Peaks<Duration>,
    sums: Sums,
}

impl Collector {
    /// A snapshot of `inventory` that is at most `age` old.
    pub async fn snapshot(&self, inventory: &dyn Inventory, age: Duration) -> Rc<Snapshot> {
        let mut seen = self.0.lock().await;
        if let Some(snapshot) =
            seen.last.as_ref().filter(|snapshot| Clock::Monotonic.now().since(snapshot.at) <= age)
        {
            return Rc::clone(snapshot);
        }
        let snapshot = Rc::new(seen.snapshot(inventory).await);
        seen.last = Some(Rc::clone(&snapshot));
        snapshot
    }
}

impl Collected {
    async fn snapshot(&mut self, inventory: &dyn Inventory) -> Snapshot {
        let start = Clock::Monotonic.now();
        self.depths.begin(start);
        self.turns.begin(start);
        let (bdevs, handles) = (inventory.disks(), inventory.reactors());
        let (groups, controllers) = (inventory.groups(), inventory.controllers());
        let parts = gather(&bdevs, &handles).await;
        let pools = inventory.pools().await;
        let aggregates = aggregates(&bdevs, &controllers);
        let mut counts = vec![Summary::default(); bdevs.len()];
        let parts = parts.into_iter().map(|part| {
            counts[part.disk].merge(&part.counts);
            let (serial, aggregates) = (bdevs[part.disk].serial(), &aggregates[part.disk]);
            Part { serial, core: part.core, counts: part.counts, aggregates }
        });
        let names: HashSet<&str> = groups.iter().map(|g| g.name()).collect();
        let controller_names: HashSet<&str> = controllers.iter().map(|c| &*c.name).collect();
        self.sums.add(parts, |aggregate| match aggregate {
            Aggregate::Group(name) => names.contains(&**name),
            Aggregate::Controller(name) => controller_names.contains(&**name),
            Aggregate::Reactor(_) => true,
        });
        let mut sizes: HashMap<&Aggregate, usize> = HashMap::new();
        aggregates.iter().flatten().for_each(|aggregate| *sizes.entry(aggregate).or_default() += 1);
        let group = |group: &Arc<QosGroup>| {
            let aggregate = Aggregate::Group(group.name().to_owned());
            Group {
                name: group.name().to_owned(),
                parent: group.parent().map(|parent| parent.name().to_owned()),
                limits: group.limits(),
                disks: sizes.get(&aggregate).copied().unwrap_or_default(),
                counts: self.sums.of(&aggregate),
            }
        };
        let groups = groups.iter().map(group).collect();
        let disks = bdevs.iter().zip(counts).map(|(bdev, counts)| self.disk(bdev, counts)).collect();
        let reactors = handles.iter().map(|handle| self.reactor(handle)).collect();
        let of_controller = |controller: Controller| {
            let counts = self.sums.of(&Aggregate::Controller(controller.name.clone()));
            ControllerCounts { controller, counts }
        };
        let controllers = controllers.into_iter().map(of_controller).collect();
        let at = Clock::Monotonic.now();
        let (mapped, revoked, reclaiming) = (aryk_dma::mapped(), aryk_dma::revoked(), aryk_dma::reclaiming());
        let memory_clients = inventory.memory().clients();
        Snapshot {
            at,
            took: at.since(start),
            disks,
            groups,
            controllers,
            nvme: inventory.nvme(),
            remotes: inventory.remotes(),
            rbd: inventory.rbd(),
            hosts: inventory.hosts(),
            pools,
            reactors,
            mapped,
            revoked,
            reclaiming,
            memory_clients,
        }
    }

    fn disk(&mut self, bdev: &Bdev, counts: Summary) -> Disk {
        let geometry = bdev.geometry();
        Disk {
            name: bdev.name().to_owned(),
            product: bdev.device().product(),
            size: geometry.blocks.to_bytes(geometry.block_size),
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
            counts: self.sums.of(&Aggregate::Reactor(core)),
        }
    }
}

/// The groups, with all parents, and the controllers of each disk.
fn aggregates(bdevs: &[Arc<Bdev>], controllers: &[Controller]) -> Vec<Vec<Aggregate>> {
    let mut of: HashMap<&str, Vec<Aggregate>> = HashMap::new();
    for controller in controllers {
        for disk in &controller.disks {
            of.entry(disk).or_default().push(Aggregate::Controller(controller.name.clone()));
        }
    }
    let all = |bdev: &Arc<Bdev>| {
        let mut aggregates = of.remove(bdev.name()).unwrap_or_default();
        let group = bdev.qos_group();
        let outwards = std::iter::successors(group.as_ref(), |group| group.parent());
        aggregates.extend(outwards.map(|group| Aggregate::Group(group.name().to_owned())));
        aggregates
    };
    bdevs.iter().map(all).collect()
}

/// How long a peak is reported, at least.
const PEAK_PERIOD: Duration = Duration::from_secs(30);

/// Peaks by name, of the present period and of the one before. An object that is gone is forgotten with its period.
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
    /// Begins a new period if the present one has ended.
    fn begin(&mut self, now: Nanos) {
        if now.since(self.since) >= PEAK_PERIOD {
            self.since = now;
            self.before = std::mem::take(&mut self.now);
        }
    }

    /// Adds `value` to the peak of `name`, and returns the peak.
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
    fn peaks_are_reported_for_one_to_two_periods() {
        let mut peaks = Peaks::default();
        let mut at = |second: u64, value: u64| {
            peaks.begin(Nanos(second * 1_000_000_000));
            peaks.raise("d", value)
        };
        assert_eq!([at(40, 3), at(50, 9), at(60, 1)], [3, 9, 9]);
        assert_eq!([at(75, 2), at(104, 1), at(106, 1), at(140, 0)], [9, 9, 2, 1]);
    }
}
