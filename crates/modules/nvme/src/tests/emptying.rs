//! Discards and zeroes on a drive that takes a time for each of their bytes, and executes one after the other.

use super::recovery::{open, with};
use crate::{Config as Attach, Phase};
use aryk_bdev::Op;
use aryk_bdev_conformance::{Bench, Opener, Shape};
use aryk_nvme::controller::SECOND;
use aryk_nvme::queue::Timeouts;
use aryk_nvme_model::{Config, Data, NamespaceConfig, Timing};

/// Blocks of 4 KiB in the largest discard, and in the largest command of zeroes.
const DISCARD: u64 = (128 << 20) >> 12;
const ZEROES: u64 = (8 << 20) >> 12;
/// The requests: discards of 2 GiB, and zeroes of 512 MiB, which all end after 2.5 s.
const DISCARDS: u64 = 16;
const ZEROED: u64 = 64;

/// A drive that empties a MiB in a millisecond.
fn drive() -> Config {
    Config {
        namespaces: vec![(1, NamespaceConfig::new(1 << 20, 1, 1))],
        data: Data::Null,
        timing: Timing { empty_mib: 1_000_000, ..Timing::IMMEDIATE },
        ..Config::default()
    }
}

/// A command is late after a second.
fn limit(attach: &mut Attach) {
    attach.options.io = Timeouts { command: SECOND, grace: SECOND };
}

fn submit_all(disk: &mut Opener, bench: &mut Bench) {
    for i in 0..DISCARDS {
        disk.command(Op::Unmap, i * DISCARD, DISCARD, bench);
    }
    for i in 0..ZEROED {
        disk.command(Op::WriteZeroes, i * ZEROES, ZEROES, bench);
    }
}

#[test]
fn a_full_queue_of_discards_and_zeroes_is_never_late_and_delays_no_read() {
    let on = with(drive(), limit);
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    submit_all(&mut disk, &mut bench);
    let read = disk.read(0, 1, Shape::Crossing, &mut bench);
    let held = || on.model.with(|model| model.held_commands());
    bench.until("discards at the drive", || held() > 0);
    for _ in 0..10_000 {
        bench.turn();
        assert!(held() <= 2, "{} discards at the drive", held());
    }
    let outcomes = disk.drain(&mut bench);
    assert_eq!((outcomes[0].id, outcomes.len() as u64), (read, DISCARDS + ZEROED + 1));
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
    let counts = on.controllers.find("nv").unwrap().counts();
    assert_eq!((counts.aborts, counts.resets), (0, 0));
    disk.close(&mut bench);
}

#[test]
fn discards_that_wait_for_others_outlive_a_reset_and_a_return() {
    let on = with(Config { volatile_write_cache: false, ..drive() }, limit);
    let mut bench = Bench::new();
    let mut disk = open(&on, &mut bench);
    let controller = on.controllers.find("nv").unwrap();
    submit_all(&mut disk, &mut bench);
    let reset = controller.reset();
    bench.wait("the reset", reset).unwrap();
    on.model.with(|model| model.pull_out());
    bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
    on.model.with(|model| model.plug_in());
    let outcomes = disk.drain(&mut bench);
    assert_eq!(outcomes.len() as u64, DISCARDS + ZEROED);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
    let counts = controller.counts();
    assert!(counts.resubmitted > 0 && counts.aborts == 0, "{counts:?}");
    disk.close(&mut bench);
}
