//! Calls of the owner in any order, beside I/O, resets and faults: no call panics, no data is wrong, the controller accesses no
//! memory that it may not, and everything can be used afterwards.

use aryk_nvme::admin;
use aryk_nvme::controller::{Options, PairRequest, ResetReason, SECOND};
use aryk_nvme::queue::Timeouts;
use aryk_nvme::spec::log;
use aryk_nvme::spec::register::Shutdown;
use aryk_nvme_model::{Config, NamespaceConfig, Random, Timing, Violation};
use std::sync::{Arc, LazyLock};

use super::rig::{MS, Rig, US, options};
use super::traffic::{Traffic, run};

/// A command that does not end.
static IN_FLIGHT: LazyLock<Arc<()>> = LazyLock::new(Arc::default);

fn rig(seed: u64) -> Rig {
    let config = Config {
        seed,
        io_queues: 4,
        // Half of the controllers have shadow doorbells.
        oacs: if seed.is_multiple_of(2) { 1 << 8 } else { 0 },
        namespaces: vec![(1, NamespaceConfig::new(32_768, 0, 1))],
        timing: Timing {
            enable: 20 * US,
            disable: 20 * US,
            io: 5 * US..=100 * US,
            admin: 10 * US..=50 * US,
            ..Timing::IMMEDIATE
        },
        ..Config::default()
    };
    let options = Options {
        io: Timeouts { command: 20 * MS, grace: 5 * MS },
        admin: 50 * MS,
        quiesce: MS,
        attempts: u32::MAX,
        ..options()
    };
    Rig::ready_with(config, options, &[16, 16])
}

/// One call of the owner, or a change of the device.
fn disturb(rig: &mut Rig, random: &mut fastrand::Rng) {
    let (now, qid) = (rig.now, random.u16(1..=5));
    let is_deleted = rig.deleted.contains(&qid);
    match random.u8(..20) {
        0..4 if !is_deleted => {
            // Refused while the controller is not ready, or has no more pairs.
            let request = PairRequest { depth: random.u16(1..20), vector: None };
            let _ = rig.controller.create_pair(request);
        }
        4..7 if !is_deleted && rig.controller.delete_pair(qid).is_ok() => {
            rig.deleted.push(qid);
            quiesce(rig, qid);
        }
        7..9 if !is_deleted && rig.controller.reset_pair(qid).is_ok() => quiesce(rig, qid),
        9 => rig.controller.reset(ResetReason::Request, now),
        10 => rig.controller.abort(qid, random.u16(..), Arc::downgrade(&IN_FLIGHT)),
        11..13 => {
            let len = 4 << random.u32(..16);
            let _ = rig.controller.admin(&admin::get_log(log::SMART, u32::MAX, 0, len, true), now);
        }
        13 => rig.controller.set_watch(random.u64(..100 * MS), now),
        14 if rig.has_slow_owner => rig.is_deaf = !rig.is_deaf,
        15 => rig.model.with(|model| model.fail_fatally()),
        16 => rig.controller.queue_rewound(qid),
        17 => {
            let lose = random.u16(..200);
            rig.model.with(|model| model.faults().set_random(Random { lose, ..Random::default() }));
        }
        _ => {}
    }
}

/// Quiesces a pair before the controller deletes its queues.
fn quiesce(rig: &mut Rig, qid: u16) {
    rig.pairs.iter_mut().filter(|pair| pair.qid() == qid).for_each(aryk_nvme::queue::QueuePair::quiesce);
}

fn turns(rig: &mut Rig, traffic: &mut Traffic, random: &mut fastrand::Rng) {
    for _ in 0..random.u32(1..40) {
        if !rig.pairs.is_empty() {
            traffic.fill(&mut rig.pairs, 24, rig.now);
        }
        rig.turn(traffic, random.u64(1..20 * US));
        let pairs = &rig.pairs;
        rig.deleted.retain(|qid| pairs.iter().any(|pair| pair.qid() == *qid));
    }
}

#[test]
fn calls_in_any_order_lose_nothing_and_leave_nothing_behind() {
    for seed in 0..24 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut rig = rig(seed);
        rig.has_slow_owner = seed % 4 == 3;
        let mut traffic = Traffic::new(&rig, seed, 24);
        traffic.is_strict = false;
        for _ in 0..150 {
            disturb(&mut rig, &mut random);
            turns(&mut rig, &mut traffic, &mut random);
        }
        assert!(!rig.is_ended, "seed {seed}: {:?}", rig.notes.last());
        rig.model.with(|model| model.faults().clear());
        rig.is_deaf = false;
        let now = rig.now;
        rig.controller.set_watch(50 * MS, now);
        rig.run_for(&mut traffic, 2 * SECOND, 200 * US);
        let pairs = &rig.pairs;
        rig.deleted.retain(|qid| pairs.iter().any(|pair| pair.qid() == *qid));
        assert!(rig.deleted.is_empty(), "seed {seed}: a deleted pair whose end was not reported");
        while rig.pairs.len() < 4 {
            let pairs = rig.pairs.len();
            rig.controller.create_pair(PairRequest { depth: 8, vector: None }).unwrap();
            rig.run_until(&mut traffic, SECOND, |rig| rig.pairs.len() > pairs);
        }
        assert!(
            rig.pairs.iter().all(aryk_nvme::queue::QueuePair::is_running),
            "seed {seed}: {:?}",
            rig.notes.last()
        );
        traffic.is_strict = true;
        run(&mut rig, &mut traffic, 24, 300);
        let violations = rig.violations();
        // An owner that does not quiesce in time rings doorbells of queues that are gone, which does no harm.
        let is_harmless =
            |violation: &Violation| rig.has_slow_owner && matches!(violation, Violation::Doorbell { .. });
        assert!(violations.first.iter().all(is_harmless), "seed {seed}: {violations:?}");
        let now = rig.now;
        rig.controller.shut_down(Shutdown::Normal, now);
        rig.run_until(&mut traffic, 20 * SECOND, |rig| rig.is_ended);
        let Rig { model, controller, pairs, .. } = rig;
        drop((controller, pairs, traffic));
        assert_eq!(model.with(|model| model.mappings()), 0, "seed {seed}: memory that stays mapped");
    }
}
