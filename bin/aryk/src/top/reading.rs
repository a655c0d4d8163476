//! What the daemon has counted, as `aryk_stats_get` tells it, and what that makes per second.

use serde::Deserialize;
use std::collections::HashMap;

/// All counts at one time. Times in ticks.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Reading {
    pub tick_rate: u64,
    pub ticks: u64,
    pub disks: Vec<Disk>,
    pub controllers: Vec<Controller>,
    pub reactors: Vec<Reactor>,
}

/// A disk's.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub name: String,
    pub kind: String,
    pub size: u64,
    pub read_ops: u64,
    pub read_bytes: u64,
    pub write_ops: u64,
    pub write_bytes: u64,
    pub other_ops: u64,
    pub errors: u64,
    pub latency_ticks: u64,
    pub queue_ticks: u64,
    pub in_flight: u64,
    pub waiting: u64,
}

/// A controller's.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Controller {
    pub name: String,
    pub kind: String,
    pub disks: Vec<String>,
    pub connected: bool,
    pub queues: u64,
}

/// A reactor's.
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

/// What a disk, or several, did per second.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rate {
    pub name: String,
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub others: u64,
    pub errors: u64,
    /// Time of all requests, and the part of it spent in the block layer's queue, in nanoseconds.
    pub latency_ns: u64,
    pub queue_ns: u64,
    pub in_flight: u64,
    pub waiting: u64,
}

impl Rate {
    pub const fn ops(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    pub const fn bytes(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// How long a request took on average.
    pub const fn mean_ns(&self) -> Option<u64> {
        self.latency_ns.checked_div(self.ops())
    }

    /// Which part of that, in hundredths, requests waited in the block layer's queue.
    pub const fn queue_percent(&self) -> u64 {
        match self.latency_ns {
            0 => 0,
            ns => self.queue_ns.saturating_mul(100) / ns,
        }
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
        self.others += other.others;
        self.errors += other.errors;
        self.latency_ns += other.latency_ns;
        self.queue_ns += other.queue_ns;
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
    }
}

/// How a reactor spent its time, in hundredths of it.
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

/// What happened between two readings.
#[derive(Debug, Clone, Default)]
pub struct Rates {
    pub seconds: f64,
    pub disks: Vec<Rate>,
    pub controllers: Vec<(Controller, Rate)>,
    pub reactors: Vec<Share>,
    pub total: Rate,
}

impl Rates {
    /// A disk that was made in between began with nothing; so did one whose counts were set to zero.
    pub fn between(before: &Reading, now: &Reading) -> Self {
        let tick_rate = now.tick_rate.max(1);
        let ticks = now.ticks.saturating_sub(before.ticks).max(1);
        let seconds = ticks as f64 / tick_rate as f64;
        let per_second = |now: u64, old: u64| {
            let grown = if now >= old { now - old } else { now };
            (grown as f64 / seconds).round() as u64
        };
        let nanoseconds = |ticks: u64| (u128::from(ticks) * 1_000_000_000 / u128::from(tick_rate)) as u64;
        let old: HashMap<_, _> = before.disks.iter().map(|disk| (&*disk.name, disk)).collect();
        let nothing = Disk::default();
        let rate = |disk: &Disk| {
            let old = *old.get(&*disk.name).unwrap_or(&&nothing);
            Rate {
                name: disk.name.clone(),
                reads: per_second(disk.read_ops, old.read_ops),
                read_bytes: per_second(disk.read_bytes, old.read_bytes),
                writes: per_second(disk.write_ops, old.write_ops),
                write_bytes: per_second(disk.write_bytes, old.write_bytes),
                others: per_second(disk.other_ops, old.other_ops),
                errors: per_second(disk.errors, old.errors),
                latency_ns: nanoseconds(per_second(disk.latency_ticks, old.latency_ticks)),
                queue_ns: nanoseconds(per_second(disk.queue_ticks, old.queue_ticks)),
                in_flight: disk.in_flight,
                waiting: disk.waiting,
            }
        };
        let disks: Vec<_> = now.disks.iter().map(rate).collect();
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
            let times = [
                reactor.busy_ticks.saturating_sub(old.busy_ticks),
                reactor.idle_ticks.saturating_sub(old.idle_ticks),
                reactor.sleeping_ticks.saturating_sub(old.sleeping_ticks),
            ];
            let [busy, idle, asleep] = times.map(|t| t * 100 / times.iter().sum::<u64>().max(1));
            Share {
                core: reactor.core,
                busy,
                idle,
                asleep,
                turns: per_second(reactor.turns, old.turns),
                longest_turn_ns: nanoseconds(reactor.longest_turn_ticks),
                members: reactor.members,
            }
        };
        let reactors = now.reactors.iter().map(share).collect();
        Self { seconds, disks, controllers, reactors, total }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A reading at a second, with disks that have done so many reads each.
    pub fn reading(second: u64, disks: &[(&str, u64)]) -> Reading {
        let disk = |&(name, reads): &(&str, u64)| Disk {
            name: name.into(),
            kind: "Malloc disk".into(),
            read_ops: reads,
            read_bytes: reads * 4096,
            latency_ticks: reads * 10_000,
            queue_ticks: reads * 2_500,
            in_flight: reads % 7,
            ..Disk::default()
        };
        let names = disks.iter().map(|(name, _)| (*name).to_owned()).collect();
        Reading {
            tick_rate: 1_000_000_000,
            ticks: second * 1_000_000_000,
            disks: disks.iter().map(disk).collect(),
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
        }
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let rates = Rates::between(&reading(1, &[("a", 100)]), &reading(3, &[("a", 300), ("b", 50)]));
        let (a, b) = (&rates.disks[0], &rates.disks[1]);
        assert_eq!((a.reads, a.read_bytes, a.mean_ns(), a.queue_percent()), (100, 409_600, Some(10_000), 25));
        assert_eq!((b.reads, rates.total.ops(), rates.controllers[0].1.ops()), (25, 125, 125));
        let core = &rates.reactors[0];
        assert_eq!((core.busy, core.idle, core.asleep, core.turns), (25, 50, 25, 1000));
        // Counts that were set to zero begin anew.
        let rates = Rates::between(&reading(3, &[("a", 300)]), &reading(4, &[("a", 10)]));
        assert_eq!((rates.disks[0].reads, rates.disks[0].mean_ns()), (10, Some(10_000)));
    }
}
