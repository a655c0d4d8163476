//! Hostile front-ends beside a victim on the same reactor: within the protocol they cost the victim little, and cause no long
//! turn of the reactor.
//!
//! Each scene is an attack. A daemon with one reactor serves the attackers and a victim, whose disk completes requests after half
//! a millisecond. The test measures the victim alone, then during the attack. `ARYK_ADVERSARY_SECONDS` sets the duration of an
//! attack instead of a second, `ARYK_ADVERSARY_SEED` its random seed; `cargo xtask adversary` sets both.
//!
//! The hypervisor of a test machine takes a core away for milliseconds now and then, which looks like a long turn, and is worse
//! for minutes at a time. So a scene has many attempts, with growing pauses, and must be within each bound in one of them: an
//! attack that can cause a long turn causes it in each attempt. A daemon that had a long turn before the attack is started
//! again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "the test measures the victim's latency")]

mod attacks;
#[path = "../daemon/harness.rs"]
#[expect(dead_code, reason = "the daemon's other tests use the rest")]
mod harness;
mod raw;
mod victim;

use aryk_front_end::Memory;
use attacks::Attack;
use fastrand::Rng;
use harness::Daemon;
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use victim::{ObserversMoved, Victim};

/// The longest permitted turn of a reactor. The longest ones take a millisecond in a quiet hour, and 5 to 8 ms in others, once in
/// the first 30 ms of an attack: probably the first touch of memory that the hypervisor of a test machine had taken back.
const TURN_MAX: Duration = Duration::from_millis(10);
/// The highest permitted p99 of the victim during an attack, in percent of its p99 alone.
const P99_PERCENT_MAX: u32 = 200;
const ATTEMPTS: u32 = 16;
/// The pause before the second attempt, and what is added to it for each further one, and the longest pause.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Daemons that are started at most until one has no long turn before the attack.
const STARTS: usize = 20;
/// Duration of the measurement of the victim alone.
const QUIET: Duration = Duration::from_millis(500);
/// Latency of the victim's disk in microseconds.
const VICTIM_LATENCY_US: u64 = 500;
/// Attackers of a scene, each with its own controllers.
const ATTACKERS: usize = 2;
/// The reactor's core, and the core of the victim, the attackers, and the daemon's other threads.
const REACTOR_CORE: usize = 0;
const OTHER_CORE: usize = 1;

/// Scenes run one at a time: each needs both cores.
static SCENE_LOCK: Mutex<()> = Mutex::new(());

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// The measurements of a scene.
#[derive(Debug)]
struct Outcome {
    quiet_p99: Duration,
    attacked_p99: Duration,
    longest_turn: Duration,
    /// Rounds of the attackers: requests, messages or sessions.
    rounds: u64,
}

impl Outcome {
    fn has_short_turns(&self) -> bool {
        self.longest_turn <= TURN_MAX
    }

    fn has_a_served_victim(&self) -> bool {
        self.attacked_p99 <= self.quiet_p99 * P99_PERCENT_MAX / 100
    }
}

/// A daemon with the disks of the victim and of the attackers.
fn daemon() -> Daemon {
    // The daemon inherits the cores on which it may run.
    victim::restrict_to(&[REACTOR_CORE, OTHER_CORE]);
    let mask = format!("{:#x}", 1 << REACTOR_CORE);
    let daemon = Daemon::start(&["-m", &mask, "--sleep-policy", "poll", "-L", "warning"]);
    victim::restrict_to(&[OTHER_CORE]);
    let make = |method: &str, params| daemon.call(method, params).unwrap();
    make("bdev_malloc_create", json!({"name": "memory", "block_size": 512, "num_blocks": 32 << 11}));
    let latency = VICTIM_LATENCY_US;
    let delayed = |name: &str, base: &str, latency: u64| {
        json!({"name": name, "base_bdev_name": base, "avg_read_latency": latency, "p99_read_latency": latency,
            "avg_write_latency": latency, "p99_write_latency": latency})
    };
    make("bdev_delay_create", delayed("victim", "memory", latency));
    make("vhost_create_blk_controller", json!({"ctrlr": "victim", "dev_name": "victim"}));
    for attacker in 0..ATTACKERS {
        let name = |kind: &str| format!("{kind}{attacker}");
        make("bdev_malloc_create", json!({"name": name("fast"), "block_size": 512, "num_blocks": 256 << 11}));
        make("bdev_null_create", json!({"name": name("never"), "block_size": 512, "num_blocks": 64 << 11}));
        make("bdev_delay_create", delayed(&name("slow"), &name("never"), 60_000_000));
        for disk in ["fast", "slow"] {
            make("vhost_create_blk_controller", json!({"ctrlr": name(disk), "dev_name": name(disk)}));
        }
        make("bdev_malloc_create", json!({"name": name("unit"), "block_size": 512, "num_blocks": 256 << 11}));
        make("vhost_create_scsi_controller", json!({"ctrlr": name("scsi")}));
        let target = json!({"ctrlr": name("scsi"), "scsi_target_num": 0, "bdev_name": name("unit")});
        make("vhost_scsi_controller_add_target", target);
    }
    daemon
}

/// Stops the attackers when dropped, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn longest_turn(daemon: &Daemon) -> Duration {
    let stats = daemon.call("aryk_stats_get", json!({})).unwrap();
    let ticks = stats["reactors"][0]["longest_turn_ticks"].as_u64().unwrap();
    Duration::from_secs_f64(ticks as f64 / stats["tick_rate"].as_f64().unwrap())
}

/// A daemon without a long turn so far.
fn calm_daemon() -> Daemon {
    let calm = (0..STARTS).map(|_| daemon()).find(|daemon| longest_turn(daemon) <= TURN_MAX);
    calm.expect("the machine is too busy: each daemon has a long turn before it is attacked")
}

/// Runs a scene, all of it on the other core: each thread on the reactor's core would take time slices of milliseconds from the
/// reactor.
fn run_scene(attacks: &[Attack], seed: u64, attacked: Duration) -> Outcome {
    // Threads that are started from here on inherit the core; so does the one that unmaps the attackers' memory.
    victim::restrict_to(&[OTHER_CORE]);
    drop(Memory::new(4096).unwrap());
    let _observers = ObserversMoved::to(OTHER_CORE);
    let daemon = calm_daemon();
    let socket = |name: &str| daemon.dir().join("vhost").join(name);
    let mut victim = Victim::connect(&socket("victim"));
    let stop = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    let mut measure = |times: &[Duration]| {
        let measuring = || {
            victim::raise_priority();
            times.iter().map(|time| victim.measure(*time)).last().unwrap()
        };
        thread::scope(|scope| scope.spawn(measuring).join().unwrap())
    };
    // The first run, which has the costs of starting, is not used.
    let quiet_p99 = measure(&[QUIET / 5, QUIET]);
    thread::scope(|scope| {
        let stop_at_the_end = Stop(&stop);
        for attacker in 0..ATTACKERS {
            let (stop, rounds, vhost) = (&stop, &rounds, daemon.dir().join("vhost"));
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed.wrapping_add(attacker as u64));
                while !stop.load(Ordering::Relaxed) {
                    let attack = attacks[random.u64(..attacks.len() as u64) as usize];
                    attack.run(&vhost, attacker, &mut random, stop, rounds);
                }
            });
        }
        let attacked_p99 = measure(&[attacked]);
        drop(stop_at_the_end);
        let longest_turn = longest_turn(&daemon);
        Outcome { quiet_p99, attacked_p99, longest_turn, rounds: rounds.load(Ordering::Relaxed) }
    })
}

/// Repeats a scene until it was within both bounds, each in any attempt.
#[track_caller]
fn check_scene(attacks: &[Attack]) {
    // A scene that failed poisons the lock; the next one may run nevertheless.
    let _scene = SCENE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let seconds = from_environment("ARYK_ADVERSARY_SECONDS", 1);
    let seed = from_environment("ARYK_ADVERSARY_SEED", 1);
    let mut outcomes = Vec::new();
    for attempt in 0..ATTEMPTS {
        thread::sleep((PAUSE * attempt).min(PAUSE_MAX));
        let outcome = run_scene(attacks, seed, Duration::from_secs(seconds));
        eprintln!("{attacks:?}: {outcome:?}");
        assert!(outcome.rounds > 0, "the attack ran");
        outcomes.push(outcome);
        if outcomes.iter().any(Outcome::has_short_turns) && outcomes.iter().any(Outcome::has_a_served_victim)
        {
            return;
        }
    }
    panic!(
        "{attacks:?}: turns of {TURN_MAX:?} and a p99 of {P99_PERCENT_MAX}% at most, seed {seed}: {outcomes:#?}"
    );
}

macro_rules! scenes {
    ($($name:ident: $($attack:ident),+;)*) => {
        $(
            #[test]
            fn $name() {
                check_scene(&[$(Attack::$attack),+]);
            }
        )*
    };
}

scenes! {
    full_rings: FullRing;
    long_chains: LongChains;
    long_transfers: LongTransfers;
    dirty_logs: DirtyLog;
    revoked_requests: Revoke;
    huge_memory: HugeMemory;
    memory_that_goes: LargeMemoryGoes;
    refused_messages: Messages;
    reconnects: Reconnects;
    kicks: Kicks;
    zeroes_and_discards: Ranges;
    scsi_commands: ScsiCommands;
    task_management: TaskManagement;
    stops_and_starts: Flips;
    anything_at_random: FullRing, LongChains, LongTransfers, DirtyLog, Revoke, HugeMemory, Messages, Reconnects, Kicks, Ranges, ScsiCommands,
        TaskManagement, Flips;
}
