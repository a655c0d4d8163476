//! I/O without faults.

use aryk_nvme::spec::status::Code;
use aryk_nvme_model::{Config, NamespaceConfig, Timing};

use std::net::Shutdown;

use aryk_nvme::controller::{ResetReason, SECOND};

use super::rig::{Keeper, Note, Rig, US};
use super::traffic::{Kind, Traffic, run};

fn config(seed: u64) -> Config {
    Config {
        seed,
        queue_entries: 2048,
        namespaces: vec![(1, NamespaceConfig::new(131_072, 0, 1))],
        timing: Timing { io: 5 * US..=200 * US, admin: 10 * US..=50 * US, ..Timing::IMMEDIATE },
        ..Config::default()
    }
}

#[test]
fn every_read_returns_what_was_written_at_any_depth() {
    for (seed, depth, count) in [(1, 1, 500), (2, 2, 1000), (3, 32, 4000), (4, 128, 8000), (5, 1024, 20_000)]
    {
        let mut rig = Rig::ready(config(seed), &[depth]);
        assert_eq!(rig.pairs[0].depth(), depth);
        let mut traffic = Traffic::new(&rig, seed, usize::from(depth));
        run(&mut rig, &mut traffic, usize::from(depth), count);
        assert!(traffic.tally.reads > count / 20, "{:?}", traffic.tally);
        rig.assert_clean();
    }
}

#[test]
fn shapes_of_controllers_do_not_matter() {
    let changes: [fn(&mut Config); 8] = [
        |config| config.sgls = 0,
        |config| config.sgls = 2,
        |config| config.oacs = 0,
        |config| config.dstrd = 3,
        |config| (config.mpsmin, config.mpsmax) = (1, 4),
        |config| config.queue_entries = 2,
        |config| (config.vs, config.css) = (0x0001_0000, 1),
        |config| (config.css, config.namespaces[0].1.format) = (1 << 6, 1),
    ];
    for (seed, change) in changes.into_iter().enumerate() {
        let mut config = config(seed as u64);
        change(&mut config);
        let mut rig = Rig::ready(config, &[16, 7]);
        let mut traffic = Traffic::new(&rig, seed as u64, 24);
        run(&mut rig, &mut traffic, 24, 2000);
        assert!(traffic.tally.reads > 100, "{seed}: {:?}", traffic.tally);
        rig.assert_clean();
    }
}

#[test]
fn doorbells_are_rung_once_per_batch_or_in_shadow_memory() {
    for oacs in [0, 1 << 8] {
        let mut rig = Rig::ready(Config { oacs, timing: Timing::IMMEDIATE, ..config(1) }, &[64]);
        let before = rig.model.with(|model| model.counts().clone());
        let turns = rig.turns;
        let mut traffic = Traffic::new(&rig, 1, 64);
        traffic.kinds = vec![Kind::Read, Kind::Write];
        run(&mut rig, &mut traffic, 32, 3200);
        let after = rig.model.with(|model| model.counts().clone());
        let counters = rig.pairs[0].counters();
        let most = 2 * (rig.turns - turns);
        assert!(most < 2 * counters.submitted && counters.doorbells() <= most, "{most}: {counters:?}");
        let in_memory = after.shadow_doorbells - before.shadow_doorbells;
        assert_eq!(in_memory > 0, oacs != 0, "{in_memory}");
        rig.assert_clean();
    }
}

#[test]
fn a_fused_compare_and_write_writes_only_after_an_equal_compare() {
    let mut rig = Rig::ready(config(1), &[8]);
    let buffer = rig.buffer(8192);
    let namespace = rig.controller.namespaces()[0].namespace.clone().unwrap();
    let commands = aryk_nvme::io::Commands::new(&namespace, rig.controller.info().unwrap());
    let piece = |at: u64| [aryk_nvme::data::Piece { iova: buffer.iova + at, len: 512 }];
    let mut keeper = Keeper::default();
    for (round, compare, write, codes) in [
        (0, 0_u8, 7_u8, [Code::SUCCESS; 2]),
        (2, 0, 9, [Code::COMPARE_FAILURE, Code::FUSED_FAILED]),
        (4, 7, 8, [Code::SUCCESS; 2]),
    ] {
        buffer.area.write_bytes(0, &[compare; 512]);
        buffer.area.write_bytes(4096, &[write; 512]);
        let entries = commands.compare_and_write(5, 1, false).unwrap();
        let now = rig.now;
        rig.pairs[0].submit_fused(entries, [&piece(0), &piece(4096)], [round, round + 1], now).unwrap();
        rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 0);
        let found = [0, 1].map(|i| keeper.of(round + i).unwrap().status.code());
        assert_eq!(found, codes);
    }
    rig.model.with(|model| assert_eq!(model.data(1, 5, 1).unwrap(), [8; 512]));
    rig.assert_clean();
}

#[test]
fn media_errors_are_reported_as_such() {
    let mut rig = Rig::ready(config(1), &[8]);
    let buffer = rig.buffer(4096);
    rig.model.with(|model| model.damage(1, 3, 1));
    let namespace = rig.controller.namespaces()[0].namespace.clone().unwrap();
    let commands = aryk_nvme::io::Commands::new(&namespace, rig.controller.info().unwrap());
    let piece = [aryk_nvme::data::Piece { iova: buffer.iova, len: 512 }];
    let mut keeper = Keeper::default();
    let now = rig.now;
    rig.pairs[0].submit(commands.read(3, 1).unwrap(), &piece, 1, now).unwrap();
    rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 0);
    let delays = rig.controller.info().unwrap().retry_delays;
    let verdict = aryk_nvme::errors::classify(keeper.of(1).unwrap().status, delays);
    assert_eq!((verdict.class, verdict.retry_after), (aryk_nvme::errors::Class::Media, None));
}

#[test]
fn a_controller_in_another_process_serves_the_same_io_and_survives_a_reset() {
    let mut rig = Rig::over_vfio_user(config(1)).with_pairs(&[32, 8]);
    let mut traffic = Traffic::new(&rig, 1, 32);
    run(&mut rig, &mut traffic, 32, 1000);
    traffic.fill(&mut rig.pairs, 32, rig.now);
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    run(&mut rig, &mut traffic, 32, 1000);
    assert!(traffic.tally.reads > 200 && rig.has(&Note::Recovered), "{:?}", traffic.tally);
    rig.assert_clean();
}

#[test]
fn a_server_that_goes_is_a_device_that_vanishes() {
    let mut rig = Rig::over_vfio_user(config(1)).with_pairs(&[16]);
    let mut traffic = Traffic::new(&rig, 1, 16);
    run(&mut rig, &mut traffic, 16, 100);
    traffic.fill(&mut rig.pairs, 16, rig.now);
    rig.hang_up.take().unwrap().shutdown(Shutdown::Both).unwrap();
    traffic.is_removed = true;
    rig.run_until(&mut traffic, SECOND, |rig| rig.is_ended);
    assert_eq!(traffic.in_flight(), 0);
    assert!(rig.end().unwrap().contains("model is gone"), "{:?}", rig.end());
}
