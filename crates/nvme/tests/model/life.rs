//! Attach, failures to start, removal, shutdown, namespaces that come and go, keep-alive, interrupts.

use std::os::fd::AsFd;

use aryk_nvme::controller::{
    Event, NamespaceChange, Options, PairRequest, RecoveryStep, ResetReason, SECOND,
};
use aryk_nvme::data::Piece;
use aryk_nvme::queue::{Fate, LateStep};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::register::{CSTS, Shutdown};
use aryk_nvme_model::{Action, Config, Hostile, NamespaceConfig, Patch, Queue, Rule, Timing};

use aryk_pci::{Function, Width};

use super::rig::{Keeper, MS, Nobody, Note, Rig, US, options};
use super::traffic::{Traffic, run};

fn config() -> Config {
    Config {
        timing: Timing {
            enable: 50 * MS,
            disable: 20 * MS,
            shutdown: 100 * MS,
            io: 5 * US..=100 * US,
            admin: 10 * US..=50 * US,
            ..Timing::IMMEDIATE
        },
        ..Config::default()
    }
}

#[test]
fn a_controller_is_attached_and_identified() {
    let rig = Rig::ready(config(), &[]);
    let info = rig.controller.info().unwrap();
    assert_eq!((info.serial.as_str(), info.model.as_str()), ("ARYKMODEL0001", "Aryk NVMe model"));
    assert_eq!((info.transfer_max, info.aborts_max, info.firmware_slots), (131_072, 4, 3));
    assert!(info.has_write_cache && info.supported.copy && info.locking.is_none());
    assert_eq!((info.retry_delays, rig.controller.pairs_allowed()), ([1, 5, 20], 16));
    let listed = rig.controller.namespaces();
    assert_eq!((listed.len(), listed[0].nsid), (1, 1));
    let namespace = listed[0].namespace.as_ref().unwrap();
    assert_eq!((namespace.blocks, namespace.block_size()), (16_384, 4096));
    assert!(namespace.reads_zeroes && namespace.write_zeroes_deallocates);
    rig.assert_clean();
}

#[test]
fn identifiers_come_from_the_descriptors_unless_the_device_is_known_to_invent_them() {
    let ids = |pci_id| {
        let rig = Rig::ready(Config { pci_id, ..config() }, &[]);
        rig.controller.namespaces()[0].namespace.as_ref().unwrap().ids
    };
    let real = ids((0x1234, 0x5678));
    assert_eq!((real.nguid.unwrap()[15], real.eui64.unwrap()[7]), (1, 1));
    assert_eq!(ids((0x1b36, 0x0010)).nguid, None);
}

#[test]
fn a_controller_that_never_becomes_ready_is_given_up_with_the_time() {
    let mut rig = Rig::with_options(Config { to: 2, ..config() }, options()).unwrap();
    rig.model.with(|model| model.faults().never_ready = true);
    rig.run_until(&mut Nobody, 30 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("CSTS.RDY did not become 1 within 1000 ms"));
    assert_eq!(rig.notes.iter().filter(|note| matches!(note, Note::AttemptFailed(_))).count(), 2);
    assert!(rig.has(&Note::Step(RecoveryStep::FunctionReset)), "{:?}", rig.notes);
}

#[test]
fn a_controller_that_does_not_stop_is_reset_as_a_function() {
    let mut rig = Rig::ready(Config { to: 2, ..config() }, &[16]);
    let mut traffic = Traffic::new(&rig, 1, 16);
    run(&mut rig, &mut traffic, 16, 100);
    rig.model.with(|model| model.faults().never_disabled = true);
    traffic.fill(&mut rig.pairs, 16, rig.now);
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_until(&mut traffic, 20 * SECOND, |rig| rig.has(&Note::Recovered));
    assert!(rig.has(&Note::Step(RecoveryStep::FunctionReset)), "{:?}", rig.notes);
    run(&mut rig, &mut traffic, 16, 500);
    rig.assert_clean();
}

#[test]
fn a_fatal_controller_is_reset_and_given_up_if_it_stays_fatal() {
    let mut rig = Rig::ready(config(), &[16]);
    let mut traffic = Traffic::new(&rig, 1, 16);
    traffic.fill(&mut rig.pairs, 16, rig.now);
    rig.turn(&mut traffic, US);
    rig.model.with(|model| model.fail_fatally());
    let start = rig.now;
    rig.run_until(&mut traffic, SECOND, |rig| rig.has(&Note::Quiesce(ResetReason::Fatal)));
    assert!(rig.now - start < 100 * MS, "noticed after {} us", (rig.now - start) / US);
    rig.run_until(&mut traffic, SECOND, |rig| rig.has(&Note::Recovered));
    run(&mut rig, &mut traffic, 16, 300);
    rig.model.with(|model| model.faults().is_fatal_forever = true);
    rig.model.with(|model| model.fail_fatally());
    traffic.is_removed = true;
    rig.run_until(&mut traffic, 60 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("the controller reports a fatal status (CSTS.CFS)"));
    rig.assert_clean();
}

#[test]
fn a_removed_device_is_noticed_within_100_ms_and_all_commands_end() {
    for action in [None, Some(Action::PullOut)] {
        let mut rig = Rig::ready(config(), &[32, 32]);
        let mut traffic = Traffic::new(&rig, 1, 48);
        run(&mut rig, &mut traffic, 48, 500);
        traffic.fill(&mut rig.pairs, 48, rig.now);
        rig.turn(&mut traffic, US);
        match action {
            Some(action) => rig.model.with(|model| {
                model.faults().add(Rule { times: 1, action, ..Rule::once(Queue::Io, 2, action) });
            }),
            None => rig.model.with(|model| model.pull_out()),
        }
        let start = rig.now;
        traffic.is_removed = true;
        while !rig.is_ended {
            traffic.fill(&mut rig.pairs, 48, rig.now);
            rig.turn(&mut traffic, 10 * US);
            assert!(rig.now - start < 200 * MS, "{:?}", rig.notes);
        }
        assert_eq!(traffic.in_flight(), 0);
        assert_eq!(rig.end(), Some("the controller vanished: CSTS reads as all ones"));
        drop(traffic);
        rig.model.with(|model| model.plug_in());
        rig.run_for(&mut Nobody, SECOND, MS);
        rig.assert_clean();
    }
}

#[test]
fn a_device_that_another_one_replaces_during_a_reset_is_refused() {
    let mut rig = Rig::ready(config(), &[4]);
    rig.model.with(|model| {
        let bytes = b"ANOTHER".to_vec();
        model.faults().patch_identify(aryk_nvme_model::Patch { cns: 1, offset: 4, bytes });
    });
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    let end = rig.end().unwrap();
    assert!(end.starts_with("another device answers after the reset: serial number ANOTHER"), "{end}");
}

#[test]
fn a_shutdown_waits_for_the_controller() {
    let mut rig = Rig::ready(config(), &[4]);
    let now = rig.now;
    rig.controller.shut_down(Shutdown::Normal, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("stopped"));
    assert!(rig.has(&Note::ShuttingDown) && rig.now - now >= 100 * MS);
    assert_eq!(rig.model.read_register(CSTS, Width::Four).unwrap() >> 2 & 3, 2);
    let mappings = rig.model.with(|model| model.mappings());
    let Rig { model, controller, pairs, .. } = rig;
    drop((controller, pairs));
    assert!(mappings > 0 && model.with(|model| model.mappings()) == 0, "all memory is unmapped");
    model.with(|model| assert_eq!(model.violations().count, 0, "{:?}", model.violations().first));
}

#[test]
fn a_shutdown_during_a_reset_follows_it() {
    let mut rig = Rig::ready(config(), &[4]);
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_for(&mut Nobody, 10 * US, US);
    rig.controller.shut_down(Shutdown::Normal, rig.now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("stopped"));
    assert_eq!(rig.model.read_register(CSTS, Width::Four).unwrap() >> 2 & 3, 2);
    rig.assert_clean();
}

#[test]
fn an_end_without_a_completed_shutdown_is_reported_as_such() {
    // The drive is pulled out, and the kernel reports that as a request for removal.
    let mut rig = Rig::ready(config(), &[4]);
    rig.model.with(|model| model.pull_out());
    rig.controller.shut_down(Shutdown::Normal, rig.now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("stopped without a shutdown"));
    // CSTS.SHST stays 0.
    let mut rig = Rig::ready(config(), &[4]);
    rig.model.with(|model| model.faults().set_register(CSTS, 1));
    let now = rig.now;
    rig.controller.shut_down(Shutdown::Normal, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("stopped without a shutdown"));
    assert!(rig.now - now >= 10 * SECOND);
    // A reset that does not end.
    let mut rig = Rig::ready(config(), &[4]);
    rig.model.with(|model| model.faults().never_ready = true);
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.controller.shut_down(Shutdown::Normal, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    assert_eq!(rig.end(), Some("stopped without a shutdown"));
}

#[test]
fn a_controller_that_ends_before_the_shutdown_behind_a_reset_ends_once() {
    let mut rig = Rig::ready(config(), &[4]);
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.controller.shut_down(Shutdown::Normal, now);
    rig.model.with(|model| model.pull_out());
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.is_ended);
    rig.run_for(&mut Nobody, 20 * SECOND, SECOND);
    let ends = rig.notes.iter().filter(|note| matches!(note, Note::Ended(_)));
    assert_eq!(ends.count(), 1, "{:?}", rig.notes);
}

#[test]
fn a_dropped_controller_leaves_no_access_behind() {
    let mut rig = Rig::ready(config(), &[16]);
    let mut traffic = Traffic::new(&rig, 1, 16);
    traffic.fill(&mut rig.pairs, 16, rig.now);
    rig.turn(&mut traffic, 0);
    let Rig { model, controller, pairs, now, .. } = rig;
    drop((controller, pairs, traffic));
    for step in 0..1000 {
        model.step(now + step * 100 * US);
    }
    model.with(|model| {
        let unmapped =
            |v: &aryk_nvme_model::Violation| matches!(v, aryk_nvme_model::Violation::Unmapped { .. });
        assert!(!model.violations().first.iter().any(unmapped), "{:?}", model.violations().first);
    });
}

#[test]
fn namespaces_come_grow_shrink_and_go_as_events() {
    let mut rig = Rig::ready(config(), &[4]);
    type Change = fn(&mut aryk_nvme_model::Controller);
    let changes: [(Change, NamespaceChange); 5] = [
        (|model| model.add_namespace(3, NamespaceConfig::new(100, 0, 3)), NamespaceChange::Added(3)),
        (|model| model.resize_namespace(3, 200), NamespaceChange::Changed(3)),
        (|model| model.resize_namespace(3, 50), NamespaceChange::Changed(3)),
        (|model| model.attach_namespace(1, false), NamespaceChange::Removed(1)),
        (|model| model.remove_namespace(3), NamespaceChange::Removed(3)),
    ];
    for (change, expected) in changes {
        rig.notes.clear();
        rig.model.with(change);
        rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Namespaces(vec![expected])));
    }
    assert_eq!(rig.controller.namespaces(), []);
    rig.assert_clean();
}

#[test]
fn more_than_one_list_of_namespaces_is_read() {
    let namespaces = (1..=1100).map(|nsid| (nsid, NamespaceConfig::new(8, 0, nsid.into()))).collect();
    let rig = Rig::ready(Config { nn: 2000, namespaces, ..config() }, &[]);
    assert_eq!(rig.controller.namespaces().len(), 1024, "the driver's limit");
    assert_eq!(rig.controller.namespaces()[1023].nsid, 1024);
    assert!(rig.has(&Note::TooManyNamespaces), "{:?}", rig.notes);
    // NVMe 1.0 has no lists: the namespace IDs up to NN are tried.
    let old = Config { nn: 2000, vs: 0x0001_0000, ..config() };
    let rig = Rig::ready(old, &[]);
    assert!(rig.has(&Note::TooManyNamespaces), "{:?}", rig.notes);
    assert_eq!(rig.controller.namespaces().len(), 1, "the active one");
    let namespaces = (1..=1024).map(|nsid| (2 * nsid, NamespaceConfig::new(8, 0, nsid.into()))).collect();
    let rig = Rig::ready(Config { nn: 3000, namespaces, ..config() }, &[]);
    assert_eq!(rig.controller.namespaces().last().unwrap().nsid, 2048);
    assert!(!rig.has(&Note::TooManyNamespaces));
}

#[test]
fn a_keep_alive_timer_does_not_expire() {
    let options = Options { keep_alive: 2 * SECOND, ..options() };
    let mut rig = Rig::ready_with(config(), options, &[4]);
    rig.run_for(&mut Nobody, 20 * SECOND, 10 * MS);
    assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))), "{:?}", rig.notes);
}

#[test]
fn requests_of_the_transport_are_passed_on() {
    let mut rig = Rig::ready(config(), &[4]);
    rig.model.request_removal();
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::RemovalRequested));
    rig.model.report_error();
    rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.has(&Note::Quiesce(ResetReason::BusError)));
    rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.has(&Note::Recovered));
}

#[test]
fn a_pair_without_a_vector_raises_no_interrupts() {
    for vector in [None, Some(3)] {
        let mut rig = Rig::ready(config(), &[]);
        rig.controller.create_pair(PairRequest { depth: 16, vector }).unwrap();
        rig.run_until(&mut Nobody, SECOND, |rig| rig.pairs.len() == 1);
        let interrupts = |rig: &Rig| rig.model.with(|model| model.interrupts(3));
        let sink = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        rig.model.set_interrupts(&[sink.as_fd(); 17]).unwrap();
        let before = interrupts(&rig);
        let mut traffic = Traffic::new(&rig, 1, 16);
        run(&mut rig, &mut traffic, 16, 300);
        assert_eq!(interrupts(&rig) - before > 0, vector.is_some());
    }
    let mut rig = Rig::ready(config(), &[]);
    let refused = rig.controller.create_pair(PairRequest { depth: 16, vector: Some(17) }).unwrap_err();
    assert_eq!(refused.to_string(), "the function has 17 MSI-X vectors, not one with number 17");
}

#[test]
fn pairs_are_created_up_to_the_limit_and_deleted() {
    let mut rig = Rig::ready(Config { io_queues: 3, ..config() }, &[4, 4, 4]);
    let refused = rig.controller.create_pair(PairRequest { depth: 4, vector: None }).unwrap_err();
    assert_eq!(refused.to_string(), "the controller allows 3 queue pairs, and all are in use");
    let mut traffic = Traffic::new(&rig, 1, 12);
    traffic.fill(&mut rig.pairs, 12, rig.now);
    rig.deleted.push(2);
    traffic.is_strict = false;
    rig.controller.delete_pair(2).unwrap();
    rig.run_until(&mut traffic, SECOND, |rig| rig.pairs.len() == 2);
    run(&mut rig, &mut traffic, 8, 100);
    rig.deleted.clear();
    assert_eq!(rig.controller.create_pair(PairRequest { depth: 4, vector: None }).unwrap(), 2);
    rig.run_until(&mut traffic, SECOND, |rig| rig.pairs.len() == 3);
    traffic.is_strict = true;
    run(&mut rig, &mut traffic, 12, 300);
    rig.assert_clean();
}

#[test]
fn a_new_pair_does_not_begin_with_the_shadow_doorbells_of_an_old_one() {
    let mut rig = Rig::ready(config(), &[4]);
    let mut keeper = Keeper::default();
    for token in 0..3 {
        let now = rig.now;
        rig.pairs[0].submit(SubmissionEntry::new(0, 1), &[], token, now).unwrap();
    }
    rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 0);
    rig.deleted.push(1);
    rig.controller.delete_pair(1).unwrap();
    rig.run_until(&mut keeper, SECOND, |rig| rig.pairs.is_empty());
    rig.deleted.clear();
    rig.controller.create_pair(PairRequest { depth: 4, vector: None }).unwrap();
    rig.run_for(&mut keeper, 100 * MS, 10 * US);
    assert_eq!(
        rig.model.with(|model| model.counts().io_commands),
        3,
        "no command was fetched from the new queue"
    );
    assert!(rig.pairs[0].error().is_none());
    rig.assert_clean();
}

#[test]
fn a_pairs_number_is_free_again_when_its_owner_has_rewound_it() {
    let mut rig = Rig::ready(Config { io_queues: 2, ..config() }, &[4, 4]);
    rig.controller.delete_pair(2).unwrap();
    let mut proof = None;
    while proof.is_none() {
        rig.model.step(rig.now);
        while let Some(event) = rig.controller.poll(rig.now) {
            if let Event::DmaEnded(ended) = event {
                proof = Some(ended);
            }
        }
        rig.now += 10 * US;
        assert!(rig.now < 10 * SECOND);
    }
    // The old pair still runs on its reactor, and may ring the doorbells.
    let request = PairRequest { depth: 4, vector: None };
    assert!(rig.controller.create_pair(request).is_err(), "no pair is free");
    rig.pairs[1].rewind(proof.unwrap(), |_| Fate::Fail);
    rig.pairs.pop();
    assert_eq!(rig.controller.create_pair(request).unwrap(), 2);
    rig.run_until(&mut Nobody, SECOND, |rig| rig.pairs.len() == 2);
    rig.assert_clean();
}

#[test]
fn a_pair_that_is_deleted_while_a_reset_creates_it_leaves_no_queues_behind() {
    for turns in 0..60 {
        let mut rig = Rig::ready(config(), &[8]);
        let now = rig.now;
        rig.controller.reset(ResetReason::Request, now);
        rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Recovered));
        (0..turns).for_each(|_| rig.turn(&mut Nobody, 4 * US));
        rig.deleted.push(1);
        rig.controller.delete_pair(1).unwrap();
        rig.run_until(&mut Nobody, SECOND, |rig| rig.pairs.is_empty());
        rig.run_for(&mut Nobody, MS, 10 * US);
        assert_eq!(rig.model.with(|model| model.io_queues()), 0, "after {turns} turns");
        rig.deleted.clear();
        assert_eq!(rig.controller.create_pair(PairRequest { depth: 8, vector: None }).unwrap(), 1);
        rig.run_until(&mut Nobody, SECOND, |rig| rig.pairs.len() == 1);
        let mut traffic = Traffic::new(&rig, 1, 8);
        run(&mut rig, &mut traffic, 8, 50);
        assert_eq!(
            rig.notes.iter().filter(|note| matches!(note, Note::Quiesce(_))).count(),
            1,
            "{:?}",
            rig.notes
        );
        rig.assert_clean();
    }
}

#[test]
fn doorbells_any_distance_apart_are_served() {
    for dstrd in [1, 4, 12, 13, 14, 15] {
        let mut rig = Rig::ready(Config { dstrd, ..config() }, &[8]);
        let mut traffic = Traffic::new(&rig, 1, 8);
        run(&mut rig, &mut traffic, 8, 50);
        rig.assert_clean();
    }
}

#[test]
fn more_pairs_than_bar_0_has_doorbells_for_are_not_asked_for() {
    let options = Options { pairs: 4000, ..options() };
    let mut rig = Rig::ready_with(Config { io_queues: 300, ..config() }, options, &[8]);
    assert_eq!(rig.controller.pairs_allowed(), 300);
    let mut traffic = Traffic::new(&rig, 1, 8);
    run(&mut rig, &mut traffic, 8, 50);
    rig.assert_clean();
}

#[test]
fn a_controller_that_answers_every_event_request_at_once_keeps_nobody_busy() {
    let mut rig = Rig::ready(config(), &[8]);
    rig.model.with(|model| {
        model.timing().admin = 0..=0;
        model.faults().hostile = Hostile { events: true, ..Hostile::default() };
        // The open requests are answered.
        model.add_namespace(2, NamespaceConfig::new(64, 0, 2));
    });
    let mut events = 0;
    for _ in 0..100 {
        let mut polls = 0;
        // The device answers as fast as it is asked.
        while rig.controller.poll(rig.now).is_some() {
            rig.model.step(rig.now);
            polls += 1;
            assert!(polls < 50, "a poll that does not end");
        }
        rig.model.step(rig.now);
        events += polls;
        rig.now += 10 * MS;
    }
    assert!((100..1000).contains(&events), "{events} events in a second");
    let mut traffic = Traffic::new(&rig, 1, 8);
    run(&mut rig, &mut traffic, 8, 200);
    rig.assert_clean();
}

#[test]
fn a_pause_of_the_controller_is_no_timeout_unless_it_is_too_long() {
    // MTFA of 1.9 s; commands are late after 1 s, and again after 1.5 s.
    let attach = || {
        let model = aryk_nvme_model::Model::new("model", config()).unwrap();
        let bytes = 19_u16.to_le_bytes().to_vec();
        model.with(|model| model.faults().patch_identify(Patch { cns: 1, offset: 270, bytes }));
        let mut rig = Rig::on(model, options()).unwrap().with_pairs(&[8]);
        rig.model.with(|model| {
            model.faults().add(Rule::once(Queue::Io, 2, Action::Delay(1850 * MS)));
            model.faults().set_register(CSTS, 1 | 1 << 5);
        });
        let buffer = rig.buffer(4096);
        let entry = SubmissionEntry::new(2, 1).with_cdw10_11(0, 0);
        let now = rig.now;
        rig.pairs[0].submit(entry, &[Piece { iova: buffer.iova, len: 4096 }], 1, now).unwrap();
        (rig, buffer)
    };
    let (mut rig, buffer) = attach();
    let mut keeper = Keeper::default();
    rig.run_for(&mut keeper, 1800 * MS, MS);
    assert!(rig.has(&Note::Paused) && rig.has(&Note::Late(LateStep::Reset)), "{:?}", rig.notes);
    rig.model.with(|model| model.faults().set_register(CSTS, 1));
    rig.run_until(&mut keeper, SECOND, |rig| rig.has(&Note::Resumed) && rig.pairs[0].in_flight() == 0);
    assert!(keeper.of(1).unwrap().status.is_success());
    let is_recovery =
        |note: &&Note| matches!(note, Note::Quiesce(_) | Note::Step(RecoveryStep::Abort { .. }));
    assert_eq!(rig.notes.iter().find(is_recovery), None);
    drop(buffer);
    rig.assert_clean();

    let (mut rig, _buffer) = attach();
    let mut keeper = Keeper::default();
    let start = rig.now;
    rig.run_until(&mut keeper, 5 * SECOND, |rig| rig.has(&Note::Quiesce(ResetReason::Paused)));
    assert!((1900 * MS..2100 * MS).contains(&(rig.now - start)), "{} ms", (rig.now - start) / MS);
}

#[test]
fn an_idle_controller_is_watched_rarely_and_a_busy_one_often() {
    let mut rig = Rig::ready(config(), &[8]);
    let noticed_after = |rig: &mut Rig| {
        rig.model.with(|model| model.fail_fatally());
        let start = rig.now;
        rig.notes.clear();
        rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.has(&Note::Quiesce(ResetReason::Fatal)));
        let took = rig.now - start;
        rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.has(&Note::Recovered));
        // The reset is forgotten.
        rig.run_for(&mut Nobody, 12 * SECOND, 10 * MS);
        took
    };
    rig.controller.set_watch(SECOND, rig.now);
    rig.run_for(&mut Nobody, 100 * MS, MS);
    let idle = noticed_after(&mut rig);
    assert!((500 * MS..1100 * MS).contains(&idle), "{} ms", idle / MS);
    rig.controller.set_watch(50 * MS, rig.now);
    let busy = noticed_after(&mut rig);
    assert!(busy <= 60 * MS, "{} ms", busy / MS);
}

#[test]
fn a_refused_pair_is_an_event_and_disturbs_nothing() {
    let refuse = |opcode| Rule::once(Queue::Admin, opcode, Action::Fail(aryk_nvme_model::Status::new(1, 2)));
    for opcode in [0x01, 0x05] {
        let mut rig = Rig::ready(config(), &[8]);
        rig.model.with(|model| model.faults().add(refuse(opcode)));
        let qid = rig.controller.create_pair(PairRequest { depth: 8, vector: None }).unwrap();
        let mut traffic = Traffic::new(&rig, 1, 8);
        run(&mut rig, &mut traffic, 8, 200);
        assert!(rig.has(&Note::QueueFailed(qid)), "{:?}", rig.notes);
        let mappings = rig.model.with(|model| model.mappings());
        assert_eq!(rig.controller.create_pair(PairRequest { depth: 8, vector: None }).unwrap(), qid);
        rig.run_until(&mut traffic, SECOND, |rig| rig.pairs.len() == 2);
        assert_eq!(
            rig.model.with(|model| model.mappings()),
            mappings + 1,
            "the refused pair's memory is unmapped"
        );
        run(&mut rig, &mut traffic, 8, 200);
        assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))), "{:?}", rig.notes);
        rig.assert_clean();
    }
}

#[test]
fn transfers_stay_as_long_as_the_lists_of_the_pairs_that_are_there() {
    // MDTS is 8 KiB, and 128 KiB with a new firmware.
    let mut rig = Rig::ready(Config { mdts: 1, ..config() }, &[16]);
    let transfer_max = |rig: &Rig| rig.controller.info().unwrap().transfer_max;
    assert_eq!(transfer_max(&rig), 8192);
    rig.model.with(|model| model.faults().patch_identify(Patch { cns: 1, offset: 77, bytes: vec![5] }));
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.has(&Note::Recovered));
    assert_eq!(transfer_max(&rig), 8192);
    // Without pairs, there are no lists.
    let mut rig = Rig::ready(Config { mdts: 1, ..config() }, &[]);
    rig.model.with(|model| model.faults().patch_identify(Patch { cns: 1, offset: 77, bytes: vec![5] }));
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_until(&mut Nobody, 20 * SECOND, |rig| rig.has(&Note::Recovered));
    assert_eq!(transfer_max(&rig), 131_072);
}

#[test]
fn commands_use_sgls_only_where_the_firmware_that_runs_has_them() {
    let mut rig = Rig::ready(config(), &[16]);
    let buffer = rig.buffer(8192);
    // Only an SGL describes a piece that ends within a page, and is not the last.
    let data = [(512, 512), (4096, 3584)].map(|(at, len)| Piece { iova: buffer.iova + at, len });
    let mut keeper = Keeper::default();
    for (token, (sgls, is_fit)) in (1..).zip([(None, true), (Some(0), false), (Some(1), true)]) {
        if let Some(sgls) = sgls {
            let bytes = u32::to_le_bytes(sgls).to_vec();
            rig.model.with(|model| model.faults().patch_identify(Patch { cns: 1, offset: 536, bytes }));
            rig.notes.clear();
            let now = rig.now;
            rig.controller.reset(ResetReason::Request, now);
            rig.run_until(&mut keeper, 20 * SECOND, |rig| rig.has(&Note::Recovered));
            rig.run_for(&mut keeper, 10 * MS, MS);
        }
        let info = rig.controller.info().unwrap();
        let namespace = rig.controller.namespaces()[0].namespace.as_ref().unwrap();
        let entry = aryk_nvme::io::Commands::new(namespace, info).read(0, 1).unwrap();
        let now = rig.now;
        let submitted = rig.pairs[0].submit(entry, &data, token, now);
        assert_eq!(submitted.is_ok(), is_fit, "SGLS {sgls:?}: {submitted:?}");
        rig.pairs[0].flush();
        rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 0);
        let status = keeper.of(token).map(|done| done.status);
        assert_eq!(status.is_some_and(|status| status.is_success()), is_fit, "SGLS {sgls:?}: {status:?}");
    }
    rig.assert_clean();
}

#[test]
fn namespaces_are_read_again_on_request() {
    let mut rig = Rig::ready(config(), &[]);
    let size = [8192_u64, 8192, 8192].map(u64::to_le_bytes).concat();
    rig.model.with(|model| model.faults().patch_identify(Patch { cns: 0, offset: 0, bytes: size }));
    rig.run_for(&mut Nobody, SECOND, MS);
    assert!(!rig.has(&Note::Rescanned), "the controller reports no event");
    rig.controller.rescan().unwrap();
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Rescanned));
    assert!(rig.has(&Note::Namespaces(vec![NamespaceChange::Changed(1)])), "{:?}", rig.notes);
    assert_eq!(rig.controller.namespaces()[0].namespace.as_ref().unwrap().blocks, 8192);
}

#[test]
fn a_start_with_many_slow_commands_ends_after_twice_the_limit_of_one() {
    const IDENTIFY: u8 = 6;
    let namespaces = (1..=200).map(|nsid| (nsid, NamespaceConfig::new(8, 1, nsid.into()))).collect();
    let config = Config { nn: 200, namespaces, ..config() };
    let start = |delay| {
        let rig = Rig::with_options(config.clone(), options()).unwrap();
        let rule = Rule { times: u64::MAX, ..Rule::once(Queue::Admin, IDENTIFY, Action::Delay(delay)) };
        rig.model.with(|model| model.faults().add(rule));
        rig
    };
    // Each command ends within its limit of 2 s.
    let mut rig = start(100 * MS);
    rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.is_ended);
    let end = rig.end().unwrap();
    assert!(end.starts_with("the controller was not identified within 4 s: "), "{end}");
    assert!(end.contains(" of 200 namespaces were read, and the command Identify "), "{end}");
    assert!(!rig.notes.iter().any(|note| matches!(note, Note::AttemptFailed(_))), "{:?}", rig.notes);
    rig.assert_clean();
    let mut rig = start(5 * MS);
    rig.run_until(&mut Nobody, 5 * SECOND, |rig| rig.has(&Note::Ready));
    assert_eq!(rig.controller.namespaces().len(), 200);
    rig.assert_clean();
}
