//! The sleep policies of a reactor with a drive: which completions need an interrupt, and whether an idle drive keeps the reactor
//! awake.

use super::OnModel;
use super::sleep::{REQUESTS, exercise};
use crate::Dma;
use aryk_bdev::{Env, Registry};
use aryk_bdev_conformance::block_on;
use aryk_nvme_model::{Config, Timing};
use aryk_reactor::{Options, Reactors, SleepPolicy};
use std::sync::Arc;
use std::time::Duration;

/// Commands of one [`exercise`]: a write and a read for each request.
const COMMANDS: u64 = 2 * REQUESTS as u64;

/// A drive, and the reactor that uses it.
struct Rig {
    on: OnModel,
    reactors: Reactors,
}

impl Rig {
    /// A drive with this latency in nanoseconds.
    fn new(policy: SleepPolicy, latency: u64) -> Self {
        let reactors = Reactors::start(&Options { policy, ..Options::default() }).unwrap();
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let timing = Timing { io: latency..=latency, ..Timing::IMMEDIATE };
        let config = Config { timing, ..Config::default() };
        Self { on: OnModel::with(env, config, |attach| attach.dma = Dma::Pin), reactors }
    }

    /// Writes and reads one block after the other. Returns the interrupts of the queue pairs meanwhile.
    fn exercise(&self) -> u64 {
        let before = self.interrupts();
        block_on(exercise(&self.on, &self.reactors.handles()[0], 0)).unwrap();
        self.interrupts() - before
    }

    fn interrupts(&self) -> u64 {
        // Vector 0 is the admin queue's.
        (1..17).map(|vector| self.on.model.with(|model| model.interrupts(vector))).sum()
    }

    fn asleep(&self) -> Duration {
        self.reactors.handles()[0].stats().sleeping
    }
}

#[test]
fn an_adaptive_reactor_sleeps_through_latencies_that_no_window_bridges() {
    let rig = Rig::new(SleepPolicy::Adaptive, 5_000_000);
    let interrupts = rig.exercise();
    // A masked vector may signal once more when it is unmasked.
    assert!((COMMANDS..=2 * COMMANDS).contains(&interrupts), "{interrupts} interrupts");
    let asleep = rig.asleep();
    assert!(asleep >= Duration::from_millis(5) * COMMANDS as u32 / 2, "asleep for {asleep:?}");
}

#[test]
fn an_adaptive_reactor_polls_through_short_latencies() {
    let rig = Rig::new(SleepPolicy::Adaptive, 20_000);
    // Other programs delay the thread of the model, and so make latencies long: but not always.
    OnModel::until("a time with few interrupts", || rig.exercise() < COMMANDS / 2);
}

#[test]
fn a_reactor_with_the_policy_interrupt_polls_through_no_latency() {
    let rig = Rig::new(SleepPolicy::Interrupt, 200_000);
    let interrupts = rig.exercise();
    assert!((COMMANDS..=2 * COMMANDS).contains(&interrupts), "{interrupts} interrupts");
}

#[test]
fn an_idle_drive_has_no_interrupts_and_lets_the_reactor_sleep_unless_it_polls() {
    for policy in [SleepPolicy::Interrupt, SleepPolicy::Adaptive] {
        let rig = Rig::new(policy, 20_000);
        rig.exercise();
        let (before, interrupts) = (rig.asleep(), rig.interrupts());
        let until = before + Duration::from_millis(200);
        OnModel::until("the reactor to sleep", || rig.asleep() >= until);
        assert_eq!(rig.interrupts(), interrupts, "{policy:?}");
    }
    let rig = Rig::new(SleepPolicy::Poll, 20_000);
    assert_eq!((rig.exercise(), rig.asleep()), (0, Duration::ZERO));
}
