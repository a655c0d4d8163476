//! The daemon's counts, as in `aryk_stats_get`, and the rates between two reads.

use super::state::View;
use crate::latency::Buckets;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// All counts at one time. Times in ticks.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Reading {
    pub tick_rate: u64,
    pub ticks: u64,
    pub disks: Vec<Disk>,
    pub groups: Vec<Group>,
    pub controllers: Vec<Controller>,
    pub reactors: Vec<Reactor>,
    pub tasks: Vec<Task>,
    pub drives: Vec<Drive>,
    pub pools: Vec<Pool>,
    pub volumes: Vec<Volume>,
    pub hosts: Vec<Host>,
}

/// The counts of a disk.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub name: String,
    pub kind: String,
    pub size: u64,
    pub group: Option<String>,
    #[serde(flatten)]
    pub work: Work,
}

/// The counts of a group.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Group {
    pub name: String,
    pub parent: Option<String>,
    pub disks: u64,
    pub limits: Limits,
    #[serde(flatten)]
    pub work: Work,
}

/// The limits that apply to all operations together.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Limits {
    pub rw_ios_per_sec: u64,
    pub rw_mbytes_per_sec: u64,
}

/// The counts of one or more disks.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Work {
    pub read_ops: u64,
    pub read_bytes: u64,
    pub write_ops: u64,
    pub write_bytes: u64,
    pub other_ops: u64,
    pub errors: u64,
    pub latency_ticks: u64,
    pub throttled_ticks: u64,
    pub queue_ticks: u64,
    pub in_flight: u64,
    pub waiting: u64,
}

/// The counts of a controller.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Controller {
    pub name: String,
    pub kind: String,
    pub disks: Vec<String>,
    pub connected: bool,
    pub queues: u64,
}

/// The counts of a reactor.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Reactor {
    pub core: u16,
    pub busy_ticks: u64,
    pub idle_ticks: u64,
    pub sleeping_ticks: u64,
    pub turns: u64,
    pub longest_turn_ticks: u64,
    pub members: u64,
}

/// The counts of a background task.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Task {
    pub name: String,
    pub id: u64,
    pub core: Option<u16>,
    pub busy_ticks: u64,
    pub budget_ticks: u64,
    pub granted: u64,
}

/// The counts of an NVMe drive that the daemon drives itself.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Drive {
    pub name: String,
    pub ready: bool,
    pub disks: Vec<String>,
    pub temperature_celsius: Option<u64>,
    pub commands: u64,
    pub doorbells: u64,
    pub in_flight: u64,
    pub retries: u64,
    pub aborts: u64,
    pub resets: u64,
    /// Commands that ended with an error, by the type of the status code.
    pub errors: BTreeMap<String, u64>,
}

/// The counts of a pool of volumes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Pool {
    pub name: String,
    pub writable: bool,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub user_write_bytes: u64,
    pub user_read_bytes: u64,
    pub written_bytes: u64,
    pub read_bytes: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    pub backlog_bytes: u64,
    pub debt_bytes: u64,
    pub waiting_requests: u64,
    pub damaged_blocks: u64,
}

/// The space of a volume or a snapshot.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Volume {
    pub name: String,
    pub kind: String,
    pub size: u64,
    pub own_bytes: u64,
    pub shared_bytes: u64,
    pub counted_seconds_ago: u64,
}

/// The counts of a controller of a host on the network.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Host {
    pub name: String,
    pub subsystem: String,
    pub controller: u16,
    pub queues: u64,
    #[serde(flatten)]
    pub work: Work,
    pub latency_buckets: Buckets,
}

/// Rates of a host's controller, per second; its other counts are as they are.
#[derive(Debug, Clone, Default)]
pub struct HostRate {
    pub host: Host,
    pub rate: Rate,
    /// Latencies that half of the requests of the interval did not exceed, 99% of them, and 99.9%.
    pub p50_ns: Option<u64>,
    pub p99_ns: Option<u64>,
    pub p999_ns: Option<u64>,
}

impl HostRate {
    fn between(old: Option<&Host>, now: &Host, interval: Interval) -> Self {
        let rate = Rate::between(&now.name, &now.work, old.map(|old| &old.work), interval);
        let before = old.map(|old| &old.latency_buckets);
        let latencies =
            before.map_or_else(|| now.latency_buckets.clone(), |old| now.latency_buckets.since(old));
        let at = |quantile| Some(interval.nanoseconds(latencies.quantile(quantile)?));
        Self { host: now.clone(), rate, p50_ns: at(0.5), p99_ns: at(0.99), p999_ns: at(0.999) }
    }
}

/// Rates of one or more disks, or of a host, per second.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rate {
    pub name: String,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub others: u64,
    pub errors: u64,
    /// All failed requests so far: the rate of a single failure would be zero.
    pub failed: u64,
    /// Time of all requests, and the part of it that they waited for limits or in the block layer's queue, in nanoseconds.
    pub latency_ns: u64,
    pub wait_ns: u64,
    pub in_flight: u64,
    pub waiting: u64,
}

impl Rate {
    fn between(name: &str, now: &Work, old: Option<&Work>, interval: Interval) -> Self {
        let of = |count: fn(&Work) -> u64| interval.per_second(count(now), old.map_or(0, count));
        let nanoseconds = |ticks: u64| interval.nanoseconds(ticks);
        Self {
            name: name.to_owned(),
            reads: of(|work| work.read_ops),
            read_bytes: of(|work| work.read_bytes),
            writes: of(|work| work.write_ops),
            write_bytes: of(|work| work.write_bytes),
            others: of(|work| work.other_ops),
            errors: of(|work| work.errors),
            failed: now.errors,
            latency_ns: nanoseconds(of(|work| work.latency_ticks)),
            wait_ns: nanoseconds(of(|work| work.throttled_ticks) + of(|work| work.queue_ticks)),
            in_flight: now.in_flight,
            waiting: now.waiting,
        }
    }

    pub const fn ops(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    pub const fn bytes(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// Mean latency of a request.
    pub const fn mean_ns(&self) -> Option<u64> {
        self.latency_ns.checked_div(self.ops())
    }

    /// The percentage of it that requests waited.
    pub const fn wait_percent(&self) -> u64 {
        match self.latency_ns {
            0 => 0,
            ns => self.wait_ns.saturating_mul(100) / ns,
        }
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
        self.others += other.others;
        self.errors += other.errors;
        self.failed += other.failed;
        self.latency_ns += other.latency_ns;
        self.wait_ns += other.wait_ns;
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
    }
}

/// A reactor's use of time, in percent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Share {
    pub core: u16,
    pub busy: u64,
    pub idle: u64,
    pub asleep: u64,
    pub turns: u64,
    pub longest_turn_ns: u64,
    pub members: u64,
}

/// A background task's use of its core and of its budget.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effort {
    pub name: String,
    pub core: Option<u16>,
    /// Percentage of the core's time.
    pub busy: f64,
    pub budget_ns: u64,
    /// Turns that granted it its budget, per second.
    pub granted: u64,
    /// Percentage of the granted time that it used; more than 100 if its pieces of work are longer than its budget.
    pub used: Option<u64>,
}

/// A drive's commands and doorbells per second; its other counts are as they are, for one of them would be a rate of zero.
#[derive(Debug, Clone, Default)]
pub struct DriveRate {
    pub commands: u64,
    pub doorbells: u64,
    pub drive: Drive,
}

impl DriveRate {
    fn between(old: Option<&Drive>, now: &Drive, interval: Interval) -> Self {
        let of = |count: fn(&Drive) -> u64| interval.per_second(count(now), old.map_or(0, count));
        Self {
            commands: of(|drive| drive.commands),
            doorbells: of(|drive| drive.doorbells),
            drive: now.clone(),
        }
    }
}

/// A pool's bytes per second, and what the interval says of its work; its other counts are as they are.
#[derive(Debug, Clone, Default)]
pub struct PoolRate {
    pub user_writes: u64,
    pub user_reads: u64,
    /// Bytes to the pool's disk.
    pub written: u64,
    /// Bytes from the pool's disk.
    pub read: u64,
    /// Percentage of index pages that were in memory.
    pub cached: Option<u64>,
    pub pool: Pool,
}

impl PoolRate {
    fn between(old: Option<&Pool>, now: &Pool, interval: Interval) -> Self {
        let of = |count: fn(&Pool) -> u64| interval.per_second(count(now), old.map_or(0, count));
        let (hits, misses) = (of(|pool| pool.cache_hits), of(|pool| pool.cache_misses));
        Self {
            user_writes: of(|pool| pool.user_write_bytes),
            user_reads: of(|pool| pool.user_read_bytes),
            written: of(|pool| pool.written_bytes),
            read: of(|pool| pool.read_bytes),
            cached: (hits * 100).checked_div(hits + misses),
            pool: now.clone(),
        }
    }

    /// Bytes to the pool's disk for each byte that users have written, in hundredths; `None` if they have written nothing.
    pub fn write_amplification(&self) -> Option<u64> {
        (self.written * 100).checked_div(self.user_writes)
    }
}

/// The time between two readings.
#[derive(Debug, Clone, Copy)]
struct Interval {
    tick_rate: u64,
    ticks: u64,
}

impl Interval {
    fn seconds(self) -> f64 {
        self.ticks as f64 / self.tick_rate as f64
    }

    /// The rate of a count, which starts from zero if it is smaller than before.
    fn per_second(self, now: u64, old: u64) -> u64 {
        let grown = if now >= old { now - old } else { now };
        (grown as f64 / self.seconds()).round() as u64
    }

    fn nanoseconds(self, ticks: u64) -> u64 {
        (u128::from(ticks) * 1_000_000_000 / u128::from(self.tick_rate)) as u64
    }
}

impl Share {
    fn between(old: &Reactor, now: &Reactor, interval: Interval) -> Self {
        let times = [
            now.busy_ticks.saturating_sub(old.busy_ticks),
            now.idle_ticks.saturating_sub(old.idle_ticks),
            now.sleeping_ticks.saturating_sub(old.sleeping_ticks),
        ];
        let [busy, idle, asleep] = times.map(|t| t * 100 / times.iter().sum::<u64>().max(1));
        Self {
            core: now.core,
            busy,
            idle,
            asleep,
            turns: interval.per_second(now.turns, old.turns),
            longest_turn_ns: interval.nanoseconds(now.longest_turn_ticks),
            members: now.members,
        }
    }
}

impl Effort {
    fn between(old: &Task, now: &Task, interval: Interval) -> Self {
        let busy = now.busy_ticks.saturating_sub(old.busy_ticks);
        let granted = now.granted.saturating_sub(old.granted);
        Self {
            name: now.name.clone(),
            core: now.core,
            busy: busy as f64 * 100.0 / interval.ticks as f64,
            budget_ns: interval.nanoseconds(now.budget_ticks),
            granted: interval.per_second(now.granted, old.granted),
            used: busy.saturating_mul(100).checked_div(granted.saturating_mul(now.budget_ticks)),
        }
    }
}

/// The rates between two readings.
#[derive(Debug, Clone, Default)]
pub struct Rates {
    pub seconds: f64,
    pub disks: Vec<Rate>,
    /// Disks in groups, with their groups.
    places: Vec<(String, String)>,
    pub groups: Vec<(Group, Rate)>,
    pub controllers: Vec<(Controller, Rate)>,
    pub reactors: Vec<Share>,
    pub tasks: Vec<Effort>,
    pub drives: Vec<DriveRate>,
    pub pools: Vec<PoolRate>,
    /// As they are.
    pub volumes: Vec<Volume>,
    pub hosts: Vec<HostRate>,
    pub total: Rate,
}

impl Rates {
    /// A disk that was created between the readings, or whose counts were reset, starts from zero.
    pub fn between(before: &Reading, now: &Reading) -> Self {
        let tick_rate = now.tick_rate.max(1);
        let ticks = now.ticks.saturating_sub(before.ticks).max(1);
        let interval = Interval { tick_rate, ticks };
        let seconds = interval.seconds();
        let rate = |name: &str, now: &Work, old: Option<&Work>| Rate::between(name, now, old, interval);
        let old: HashMap<_, _> = before.disks.iter().map(|disk| (&*disk.name, &disk.work)).collect();
        let of_disk = |disk: &Disk| rate(&disk.name, &disk.work, old.get(&*disk.name).copied());
        let disks: Vec<_> = now.disks.iter().map(of_disk).collect();
        let places = now.disks.iter().filter_map(|disk| Some((disk.name.clone(), disk.group.clone()?)));
        let places = places.collect();
        let of_group = |group: &Group| {
            let old = before.groups.iter().find(|old| old.name == group.name);
            (group.clone(), rate(&group.name, &group.work, old.map(|old| &old.work)))
        };
        let groups = now.groups.iter().map(of_group).collect();
        let mut total = Rate::default();
        disks.iter().for_each(|disk| total.add(disk));
        let by_name: HashMap<_, _> = disks.iter().map(|disk| (&*disk.name, disk)).collect();
        let of_controller = |controller: &Controller| {
            let mut sum = Rate { name: controller.name.clone(), ..Rate::default() };
            controller.disks.iter().filter_map(|d| by_name.get(&**d)).for_each(|disk| sum.add(disk));
            (controller.clone(), sum)
        };
        let controllers = now.controllers.iter().map(of_controller).collect();
        let share = |reactor: &Reactor| {
            let nothing = Reactor::default();
            let old = before.reactors.iter().find(|r| r.core == reactor.core).unwrap_or(&nothing);
            Share::between(old, reactor, interval)
        };
        let reactors = now.reactors.iter().map(share).collect();
        let effort = |task: &Task| {
            let nothing = Task::default();
            let old = before.tasks.iter().find(|old| old.id == task.id).unwrap_or(&nothing);
            Effort::between(old, task, interval)
        };
        let tasks = now.tasks.iter().map(effort).collect();
        let of_drive = |drive: &Drive| {
            let old = before.drives.iter().find(|old| old.name == drive.name);
            DriveRate::between(old, drive, interval)
        };
        let drives = now.drives.iter().map(of_drive).collect();
        let of_pool = |pool: &Pool| {
            let old = before.pools.iter().find(|old| old.name == pool.name);
            PoolRate::between(old, pool, interval)
        };
        let pools = now.pools.iter().map(of_pool).collect();
        let of_host = |host: &Host| {
            let is_same = |old: &&Host| {
                (&old.subsystem, &old.name, old.controller) == (&host.subsystem, &host.name, host.controller)
            };
            let old = before.hosts.iter().find(is_same);
            HostRate::between(old, host, interval)
        };
        let hosts = now.hosts.iter().map(of_host).collect();
        Self {
            seconds,
            disks,
            places,
            groups,
            controllers,
            reactors,
            tasks,
            drives,
            pools,
            volumes: now.volumes.clone(),
            hosts,
            total,
        }
    }
}

impl Rates {
    /// The names of the disks of a group, including its subgroups, of a controller, or of a drive.
    pub fn disks_of(&self, view: View, name: &str) -> HashSet<&str> {
        if view == View::Controllers {
            let controller = self.controllers.iter().find(|(controller, _)| controller.name == name);
            return controller.into_iter().flat_map(|(c, _)| &c.disks).map(|disk| &**disk).collect();
        }
        if view == View::Drives {
            let drive = self.drives.iter().find(|rate| rate.drive.name == name);
            return drive.into_iter().flat_map(|rate| &rate.drive.disks).map(|disk| &**disk).collect();
        }
        let mut groups = HashSet::from([name]);
        for (group, _) in &self.groups {
            // Each group comes after its parent.
            if group.parent.as_deref().is_some_and(|parent| groups.contains(parent)) {
                groups.insert(&group.name);
            }
        }
        let is_in = |place: &&(String, String)| groups.contains(&*place.1);
        self.places.iter().filter(is_in).map(|(disk, _)| &**disk).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A reading at this second, of disks with these numbers of reads.
    fn pool(second: u64) -> Pool {
        Pool {
            name: "p1".into(),
            writable: true,
            total_bytes: 100 << 30,
            free_bytes: 25 << 30,
            user_write_bytes: second << 20,
            user_read_bytes: second << 21,
            written_bytes: (second * 3) << 19,
            read_bytes: second << 21,
            cache_hits: second * 90,
            cache_misses: second * 10,
            backlog_bytes: 4 << 20,
            debt_bytes: 8 << 20,
            ..Pool::default()
        }
    }

    /// A volume or a snapshot that has so many MiB for itself.
    fn volume(name: &str, kind: &str, own: u64) -> Volume {
        Volume {
            name: name.into(),
            kind: kind.into(),
            size: 8 << 20,
            own_bytes: own << 20,
            shared_bytes: 2 << 20,
            counted_seconds_ago: 7,
        }
    }

    /// A controller of a host, with so many writes for each second.
    fn host(second: u64, controller: u16) -> Host {
        let writes = second * u64::from(controller) * 100;
        Host {
            name: "nqn.2014-08.org.nvmexpress:uuid:913fc008".into(),
            subsystem: "nqn.2026-01.io.aryk:data".into(),
            controller,
            queues: 4,
            work: Work {
                write_ops: writes,
                write_bytes: writes * 4096,
                errors: 1,
                latency_ticks: writes * 5,
                ..Work::default()
            },
            // Fifty were slow at first, and one of a hundred is since.
            latency_buckets: [(5, writes * 99 / 100), (1000, writes / 100 + 50)].into(),
        }
    }

    pub fn reading(second: u64, disks: &[(&str, u64)]) -> Reading {
        let disk = |&(name, reads): &(&str, u64)| Disk {
            name: name.into(),
            kind: "Malloc disk".into(),
            group: (name != "db").then(|| "inner".into()),
            work: Work {
                read_ops: reads,
                read_bytes: reads * 4096,
                latency_ticks: reads * 10_000,
                throttled_ticks: reads * 500,
                queue_ticks: reads * 2_000,
                in_flight: reads % 7,
                ..Work::default()
            },
            ..Disk::default()
        };
        let group = |name: &str, parent: Option<&str>| Group {
            name: name.into(),
            parent: parent.map(Into::into),
            disks: 2,
            limits: Limits { rw_ios_per_sec: 6000, rw_mbytes_per_sec: 0 },
            work: Work { write_ops: second * 50, latency_ticks: second * 500, ..Work::default() },
        };
        let names = disks.iter().map(|(name, _)| (*name).to_owned()).collect();
        Reading {
            tick_rate: 1_000_000_000,
            ticks: second * 1_000_000_000,
            disks: disks.iter().map(disk).collect(),
            groups: vec![group("outer", None), group("inner", Some("outer"))],
            controllers: vec![Controller {
                name: "host".into(),
                kind: "scsi".into(),
                disks: names,
                connected: true,
                queues: 2,
            }],
            reactors: vec![Reactor {
                core: 1,
                busy_ticks: second * 250_000_000,
                idle_ticks: second * 500_000_000,
                sleeping_ticks: second * 250_000_000,
                turns: second * 1000,
                longest_turn_ticks: 7_000,
                members: 3,
            }],
            tasks: vec![Task {
                name: "patrol db".into(),
                id: 9,
                core: Some(1),
                busy_ticks: second * 20_000_000,
                budget_ticks: 50_000,
                granted: second * 500,
            }],
            drives: vec![Drive {
                name: "nvme0".into(),
                ready: true,
                disks: vec!["vm1".into()],
                temperature_celsius: Some(41),
                commands: second * 320,
                doorbells: second * 10,
                in_flight: 32,
                aborts: 1,
                errors: [("media".to_owned(), 2), ("generic".to_owned(), 1)].into(),
                ..Drive::default()
            }],
            pools: vec![pool(second)],
            volumes: vec![volume("p1/vm1@old", "snapshot", 1), volume("p1/vm1", "volume", 3)],
            hosts: [1, 2].map(|controller| host(second, controller)).into(),
        }
    }

    #[test]
    fn rates_are_per_second_between_two_readings() {
        let rates = Rates::between(&reading(1, &[("a", 100)]), &reading(3, &[("a", 300), ("b", 50)]));
        let (a, b) = (&rates.disks[0], &rates.disks[1]);
        assert_eq!((a.reads, a.read_bytes, a.mean_ns(), a.wait_percent()), (100, 409_600, Some(10_000), 25));
        assert_eq!((b.reads, rates.total.ops(), rates.controllers[0].1.ops()), (25, 125, 125));
        let (group, rate) = &rates.groups[1];
        assert_eq!((&*group.name, rate.writes, rate.mean_ns()), ("inner", 50, Some(10)));
        let core = &rates.reactors[0];
        assert_eq!((core.busy, core.idle, core.asleep, core.turns), (25, 50, 25, 1000));
        let task = &rates.tasks[0];
        assert_eq!((task.core, task.busy, task.granted, task.used), (Some(1), 2.0, 500, Some(80)));
        // Counts that were reset start from zero.
        let rates = Rates::between(&reading(3, &[("a", 300)]), &reading(4, &[("a", 10)]));
        assert_eq!((rates.disks[0].reads, rates.disks[0].mean_ns()), (10, Some(10_000)));
    }
}
