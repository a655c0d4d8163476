//! A cluster that does not answer harms its own disks only. A disk in memory on the same reactor is measured while it does not
//! answer, and in quiet windows before and after; beside that, the daemon's calls and the reactor's longest turn.
//! [`Openings`] are images that are being opened then.
//!
//! `ARYK_CEPH_SECONDS` sets how long the cluster does not answer.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;

use super::{CLIENT, Case, Site, Skipped, number};
use crate::cluster::POOL;
use crate::network::Network;
use crate::vm::Vm;
use crate::{Cluster, Kind};
use openings::Openings;

mod openings;

/// How long the cluster does not answer, in seconds.
const SECONDS: usize = 2;
/// The aims: another disk's p99 in quiet windows, times this; a turn of the reactor; a call.
const SLOWER: f64 = 1.5;
const TURN: Duration = Duration::from_millis(1);
const CALL: Duration = Duration::from_millis(100);
/// Other work of the test's computer disturbs a measurement now and then, but not each.
const ROUNDS: usize = 4;
const WINDOW: Duration = Duration::from_millis(100);
/// Pause between two calls.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a load runs before a disturbance, and how long a cut is.
const CALM: Duration = Duration::from_millis(500);
/// How long a request may take beside the time for which the cluster does not answer.
const SLACK: Duration = Duration::from_secs(30);

pub(super) const CASES: [Case; 3] = [
    Case {
        name: "stuck/osds",
        body: |site| beside(site, Load::InDisturbance, || site.cluster().stop_osds()),
    },
    Case { name: "stuck/monitor", body: |site| beside(site, Load::Always, || site.cluster().stop_monitor()) },
    Case { name: "stuck/cut", body: cut },
];

/// When the VM with an image has a load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    /// While the cluster does not answer, so that its requests wait: they must cost the reactor nothing.
    InDisturbance,
    /// In the quiet windows, too, since requests go on without what is stopped.
    Always,
}

/// What was seen in one round.
#[derive(Debug)]
struct Seen {
    /// The medians of the windows' p99.
    quiet: Duration,
    disturbed: Duration,
    /// The longest of the reactor's turns, lately.
    turn: Duration,
    /// For how long at most, in a tenth of a second, the reactor's thread was ready to run, but another program had its core:
    /// such a time is a part of a turn.
    displaced: Duration,
    /// The longest call while the cluster did not answer, and the number of calls.
    call: Duration,
    calls: usize,
    /// The longest time without a completion of the VM with the image.
    waited: Duration,
}

impl Seen {
    fn meets_aims(&self) -> bool {
        self.disturbed.as_secs_f64() <= SLOWER * self.quiet.as_secs_f64()
            && self.turn.saturating_sub(self.displaced) <= TURN
            && self.call <= CALL
    }
}

/// Where the cases of this file run: a cluster, and a way to start a daemon.
struct Place<'a> {
    cluster: &'a Cluster,
    start: &'a dyn Fn() -> Result<Daemon>,
    load: Load,
    /// How long the cluster does not answer.
    span: Duration,
}

/// Keeps this thread and the threads that it will start, and those of some processes, from core 0, on which the reactor is: until
/// dropped.
struct OffCore0(Vec<(Option<Pid>, CpuSet)>);

impl OffCore0 {
    fn new(pids: &[u32]) -> Result<Self> {
        let mut before = Self(Vec::new());
        let mut threads = vec![None];
        for pid in pids {
            for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let name = task?.file_name();
                threads.push(name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?)));
            }
        }
        for thread in threads {
            // A thread may have ended.
            let Ok(mut set) = sched_getaffinity(thread) else { continue };
            before.0.push((thread, set));
            set.unset(0);
            if set.count() > 0 {
                let _ = sched_setaffinity(thread, &set);
            }
        }
        Ok(before)
    }
}

impl Drop for OffCore0 {
    fn drop(&mut self) {
        for (thread, set) in &self.0 {
            let _ = sched_setaffinity(*thread, set);
        }
    }
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Whether calls are counted, and when they end.
const UNCOUNTED: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

/// For how long the reactor's thread has waited for its core so far (schedstat: processor time, waiting time, slices).
fn displaced(daemon: &Daemon) -> Result<Duration> {
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.pid()))? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm"))?.starts_with("reactor") {
            let times = std::fs::read_to_string(path.join("schedstat"))?;
            let waited = times.split_whitespace().nth(1).context("a schedstat of one field")?;
            return Ok(Duration::from_nanos(waited.parse()?));
        }
    }
    anyhow::bail!("a daemon without a reactor")
}

/// What calls have shown: [`Seen`].
struct Calls {
    longest: Duration,
    count: usize,
    turn: Duration,
    displaced: Duration,
}

/// Makes calls until `phase` is over.
fn calls(daemon: &Daemon, phase: &AtomicU8) -> Result<Calls> {
    const METHODS: [&str; 4] =
        ["bdev_get_bdevs", "bdev_rbd_get_clusters_info", "aryk_stats_get", "vhost_get_controllers"];
    let (mut longest, mut count) = (Duration::ZERO, 0);
    let mut looks = vec![Duration::ZERO];
    for method in METHODS.iter().cycle() {
        let now = phase.load(Ordering::Relaxed);
        if now == OVER {
            break;
        }
        let (_, took) = daemon.call(method, &json!({}))?;
        if now == COUNTED {
            longest = longest.max(took);
            count += 1;
        }
        looks.push(displaced(daemon)?);
        std::thread::sleep(PAUSE);
    }
    let (stats, _) = daemon.call("aryk_stats_get", &json!({}))?;
    let rate = stats["tick_rate"].as_u64().context("no tick rate")?;
    let ticks = stats["reactors"][0]["longest_turn_ticks"].as_u64().context("no turns")?;
    // A turn of some milliseconds lies between three looks.
    let displaced = looks.windows(3).map(|three| three[2] - three[0]).max().unwrap_or_default();
    Ok(Calls { longest, count, turn: Duration::from_secs_f64(ticks as f64 / rate as f64), displaced })
}

impl Place<'_> {
    /// Measures a neighbour of `vm` around a disturbance, which ends when its result is dropped.
    fn measure<T>(
        &self,
        daemon: &Daemon,
        (vm, neighbour): (&mut Vm, &mut Vm),
        disturb: &dyn Fn() -> Result<T>,
    ) -> Result<Seen> {
        let windows = (self.span.as_millis() / WINDOW.as_millis()).max(2) as usize;
        let (stop, phase, patience) = (AtomicBool::new(false), AtomicU8::new(UNCOUNTED), self.span + SLACK);
        let (mut quiet, mut disturbed) = (Vec::new(), Vec::new());
        let measure = |neighbour: &mut Vm, list: &mut Vec<Duration>, count: usize| -> Result<()> {
            for _ in 0..count {
                list.push(neighbour.p99(WINDOW)?);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| calls(daemon, &phase));
            let mut waiting = Some(vm);
            let mut start = || waiting.take().map(|vm| scope.spawn(|| vm.load(patience, &stop)));
            let mut load = (self.load == Load::Always).then(&mut start).flatten();
            let result = (|| {
                measure(neighbour, &mut quiet, windows / 2)?;
                load = load.take().or_else(&mut start);
                std::thread::sleep(CALM);
                let disturbance = disturb()?;
                phase.store(COUNTED, Ordering::Relaxed);
                let measured = measure(neighbour, &mut disturbed, windows);
                phase.store(UNCOUNTED, Ordering::Relaxed);
                drop(disturbance);
                std::thread::sleep(CALM);
                measured
            })();
            let mut end = || {
                stop.store(true, Ordering::Relaxed);
                load.take().map(|load| load.join().expect("a load does not panic"))
            };
            let ended = if self.load == Load::InDisturbance || result.is_err() { end() } else { None };
            let result = result.and_then(|()| measure(neighbour, &mut quiet, windows - windows / 2));
            let ended = ended.or_else(end);
            phase.store(OVER, Ordering::Relaxed);
            let Calls { longest, count, turn, displaced } = caller.join().expect("the calls do not panic")?;
            // A load that has failed says more.
            let seen = ended.context("no load")?.context("the load")?;
            result?;
            let (quiet, disturbed) = (median(quiet), median(disturbed));
            Ok(Seen { quiet, disturbed, turn, displaced, call: longest, calls: count, waited: seen.longest })
        })
    }

    /// Measures until one round meets the aims.
    fn rounds<T>(&self, is_stuck: bool, disturb: &dyn Fn() -> Result<T>) -> Result<()> {
        self.rounds_with(is_stuck, &|_| disturb(), &|_| Ok(()))
    }

    /// As [`Place::rounds`]; `check` checks each round's daemon after the disturbance.
    fn rounds_with<T>(
        &self,
        is_stuck: bool,
        disturb: &dyn Fn(&Daemon) -> Result<T>,
        check: &dyn Fn(&Daemon) -> Result<()>,
    ) -> Result<()> {
        let mut seen = Vec::new();
        for round in 0..ROUNDS {
            let image = format!("stuck{round}-{}", std::process::id());
            let image = &*format!("{image}-{}", self.cluster.rbd(&["ls", POOL])?.lines().count());
            // A reactor's turns are reported for half a minute: each round has a new daemon.
            let daemon = (self.start)()?;
            daemon.rpc(
                "bdev_rbd_register_cluster",
                &json!({"name": CLIENT, "config_file": self.cluster.conf()}),
            )?;
            self.cluster.rbd(&[
                "create",
                "--size",
                "4M",
                "--object-size",
                "64K",
                &format!("{POOL}/{image}"),
            ])?;
            daemon.rpc("bdev_rbd_create", &super::image(image))?;
            daemon.aryk(&["disk", "create", "memory", "--memory", "--size", "1M"])?;
            let mut vm = Vm::connect(&daemon.attach(image, &[])?)?;
            let mut neighbour = Vm::connect(&daemon.attach("memory", &[])?)?;
            let off_core_0 = OffCore0::new(&self.cluster.pids())?;
            let now = self.measure(&daemon, (&mut vm, &mut neighbour), &|| disturb(&daemon))?;
            drop(off_core_0);
            println!(
                "neighbour's p99 {:?}, {:?} in quiet windows; longest turn {:?}, of which displaced up to {:?}; longest of {} calls {:?}; \
                 requests waited {:?}",
                now.disturbed, now.quiet, now.turn, now.displaced, now.calls, now.call, now.waited
            );
            vm.check_image(&self.cluster.content(image)?)?;
            ensure!(!is_stuck || now.waited > self.span / 2, "the requests did not wait: {now:?}");
            check(&daemon)?;
            daemon.stop()?;
            if now.meets_aims() {
                return Ok(());
            }
            seen.push(now);
        }
        anyhow::bail!("no round met the aims: {seen:?}")
    }
}

fn span() -> Result<Duration> {
    Ok(Duration::from_secs(number("ARYK_CEPH_SECONDS", SECONDS)? as u64))
}

/// Disturbs the cluster of all cases.
fn beside<T>(site: &Site<'_>, load: Load, disturb: impl Fn() -> Result<T>) -> Result<()> {
    let start = || site.daemon(&[]);
    let place = Place { cluster: site.cluster(), start: &start, load, span: span()? };
    place.rounds(load == Load::InDisturbance, &disturb)
}

/// A cluster of its own, behind a network that can be cut: one of two OSDs does not answer, the network loses all packets, also
/// in the middle of openings. Only root can cut a network.
fn cut(site: &Site<'_>) -> Result<()> {
    let kind = Kind { osds: 2, ..Kind::SMALL };
    if !rustix::process::geteuid().is_root() {
        object(site, &Cluster::start(&kind)?)?;
        return Err(Skipped("only root can cut a network").into());
    }
    let network = Network::new(&site.directory.join("network.log"))?;
    let cluster = Cluster::start_at(&kind, &network.address())?;
    let programs = network.programs(&site.lab.bin, site.directory)?;
    let start = || Daemon::start(&programs, site.directory, &[]);
    object(site, &cluster).context("an OSD")?;
    let place = Place { cluster: &cluster, start: &start, load: Load::InDisturbance, span: span()? };
    place.rounds(true, &|| network.cut()).context("the network")?;
    let openings = Openings::new(&cluster, &network, site.directory)?;
    place
        .rounds_with(true, &|daemon| openings.begin(daemon), &|daemon| openings.check(daemon))
        .context("openings")
}

/// Requests to the objects of an OSD that does not answer wait, and those of the other go on.
fn object(site: &Site<'_>, cluster: &Cluster) -> Result<()> {
    let start = || site.daemon(&[]);
    let place = Place { cluster, start: &start, load: Load::InDisturbance, span: span()? };
    place.rounds(true, &|| cluster.stop_osd(1))
}
