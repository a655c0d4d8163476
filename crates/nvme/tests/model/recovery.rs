//! Faults: late and lost commands, hostile completions, resets under load.

use aryk_nvme::controller::{Options, RecoveryStep, ResetReason, SECOND};
use aryk_nvme::data::Piece;
use aryk_nvme::queue::{LateStep, QueueError, Timeouts};
use aryk_nvme::replay::{Change, History};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::status::Code;
use aryk_nvme_model::{Action, Config, Distortion, NamespaceConfig, Queue, Random, Rule, Timing};

use super::rig::{Keeper, MS, Note, Rig, US, options};
use super::traffic::{Traffic, run};

fn config(seed: u64) -> Config {
    Config {
        seed,
        namespaces: vec![(1, NamespaceConfig::new(32_768, 0, 1))],
        timing: Timing {
            enable: 50 * MS,
            disable: 20 * MS,
            io: 5 * US..=100 * US,
            admin: 10 * US..=50 * US,
            ..Timing::IMMEDIATE
        },
        ..Config::default()
    }
}

fn faulty(seed: u64, action: Action) -> (Rig, Keeper) {
    let rig = Rig::ready(config(seed), &[8]);
    rig.model.with(|model| model.faults().add(Rule::once(Queue::Io, io::READ, action)));
    (rig, Keeper::default())
}

fn read(rig: &mut Rig, buffer: &super::rig::Buffer, lba: u32, token: u64) {
    let entry = SubmissionEntry::new(io::READ, 1).with_cdw10_11(lba, 0);
    let now = rig.now;
    rig.pairs[0].submit(entry, &[Piece { iova: buffer.iova, len: 512 }], token, now).unwrap();
}

#[test]
fn a_stuck_command_is_aborted_and_nothing_is_reset() {
    let (mut rig, mut keeper) = faulty(1, Action::Stick { is_abortable: true });
    let buffer = rig.buffer(4096);
    read(&mut rig, &buffer, 0, 1);
    let start = rig.now;
    rig.run_until(&mut keeper, 10 * SECOND, |rig| rig.pairs[0].in_flight() == 0);
    assert!((SECOND..SECOND + 10 * MS).contains(&(rig.now - start)), "{}", rig.now - start);
    assert_eq!(keeper.of(1).unwrap().status.code(), Code::ABORT_REQUESTED);
    rig.run_for(&mut keeper, 10 * MS, MS);
    let did_abort = |note: &Note| matches!(note, Note::Step(RecoveryStep::Abort { did_abort: true, .. }));
    assert!(rig.notes.iter().any(did_abort), "{:?}", rig.notes);
    assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))));
    rig.assert_clean();
}

#[test]
fn commands_that_end_before_their_abort_is_sent_are_not_aborted() {
    let mut rig = Rig::ready(config(1), &[32]);
    // The reads are late, and end while the first four Aborts are in flight.
    rig.model.with(|model| {
        let late = Action::Delay(SECOND + 100 * MS);
        model.faults().add(Rule { times: 30, ..Rule::once(Queue::Io, io::READ, late) });
        let slow = Action::Delay(200 * MS);
        model.faults().add(Rule { times: 30, ..Rule::once(Queue::Admin, admin::ABORT, slow) });
    });
    let (mut keeper, buffer) = (Keeper::default(), rig.buffer(4096));
    (0..30).for_each(|token| read(&mut rig, &buffer, 0, token));
    rig.run_until(&mut keeper, 10 * SECOND, |rig| rig.pairs[0].in_flight() == 0);
    rig.run_for(&mut keeper, SECOND, MS);
    let is_abort = |note: &&Note| matches!(note, Note::Step(RecoveryStep::Abort { .. }));
    let is_late = |note: &&Note| matches!(note, Note::Late(LateStep::Abort));
    assert_eq!(rig.notes.iter().filter(is_late).count(), 30);
    assert_eq!(rig.notes.iter().filter(is_abort).count(), 4);
    assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))));
    rig.assert_clean();
}

#[test]
fn a_lost_read_is_submitted_again_after_a_reset_and_ends_once() {
    for action in [Action::Lose { after: 0 }, Action::Stick { is_abortable: false }] {
        let (mut rig, mut keeper) = faulty(1, action);
        let buffer = rig.buffer(4096);
        read(&mut rig, &buffer, 0, 1);
        let start = rig.now;
        rig.run_until(&mut keeper, 10 * SECOND, |rig| rig.pairs[0].in_flight() == 0);
        assert_eq!(keeper.of(1).unwrap().status.code(), Code::SUCCESS);
        assert!(rig.now - start > 3 * SECOND / 2, "abort after 1 s, reset after 1.5 s");
        let steps: Vec<_> = rig.notes.iter().filter(|note| !matches!(note, Note::Ready)).collect();
        let is = |index: usize, expected: Note| assert_eq!(steps.get(index), Some(&&expected), "{steps:?}");
        let after =
            steps.iter().position(|note| **note == Note::Quiesce(ResetReason::CommandTimeout)).unwrap();
        assert_eq!(steps.iter().filter(|note| ***note == Note::Late(LateStep::Reset)).count(), 1);
        is(after + 1, Note::Step(RecoveryStep::Quiesced));
        is(after + 2, Note::Step(RecoveryStep::Disabled));
        is(after + 3, Note::Step(RecoveryStep::Enabled));
        is(after + 4, Note::Recovered);
        assert_eq!(rig.pairs[0].counters().resubmitted, 1);
        rig.assert_clean();
    }
}

#[test]
fn a_write_is_not_replayed_over_a_later_one() {
    let mut rig = Rig::ready(config(1), &[8]);
    let buffer = rig.buffer(8192);
    let lose = Rule::once(Queue::Io, io::WRITE, Action::Lose { after: 0 });
    rig.model.with(|model| model.faults().add(lose));
    rig.model.with(|model| model.faults().add(lose));
    let mut keeper = Keeper { history: Some(History::new(16)), ..Keeper::default() };
    let write = |rig: &mut Rig, lba: u32, fill: u8, token: u64| {
        let at = token * 512;
        buffer.area.write_bytes(at as usize, &[fill; 512]);
        let piece = [Piece { iova: buffer.iova + at, len: 512 }];
        let now = rig.now;
        let entry = SubmissionEntry::new(io::WRITE, 1).with_cdw10_11(lba, 0);
        rig.pairs[0].submit(entry, &piece, token, now).unwrap();
    };
    write(&mut rig, 7, 1, 1);
    write(&mut rig, 9, 1, 2);
    write(&mut rig, 7, 2, 3);
    rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 2);
    let history = keeper.history.as_mut().unwrap();
    history.add(Change { nsid: 1, slba: 7, blocks: 1, completed: rig.now });
    rig.run_until(&mut keeper, 10 * SECOND, |rig| rig.pairs[0].in_flight() == 0);
    assert_eq!(keeper.failed, [1], "the first write may have been seen, and was replaced");
    assert_eq!(keeper.of(2).unwrap().status.code(), Code::SUCCESS);
    rig.model.with(|model| {
        assert_eq!((model.data(1, 7, 1).unwrap()[0], model.data(1, 9, 1).unwrap()[0]), (2, 1));
    });
    rig.assert_clean();
}

#[test]
fn a_wrong_completion_resets_its_pair_only() {
    for kind in
        [Distortion::Cid, Distortion::Doubled, Distortion::SqHead, Distortion::Sqid, Distortion::Random]
    {
        let mut rig = Rig::ready(config(1), &[8, 8]);
        rig.model.with(|model| model.faults().add(Rule::once(Queue::Id(1), io::READ, Action::Distort(kind))));
        let (mut keeper, buffer) = (Keeper::default(), rig.buffer(4096));
        (1..=4).for_each(|token| read(&mut rig, &buffer, 0, token));
        rig.run_until(&mut keeper, 20 * SECOND, |rig| {
            let is_empty = rig.pairs.iter().all(|pair| pair.in_flight() == 0);
            is_empty && rig.pairs.iter().all(|pair| pair.is_running())
        });
        assert_eq!(keeper.completed.len(), 4, "{kind:?}: {:?}", rig.notes);
        assert!(keeper.completed.iter().all(|completed| completed.status.is_success()));
        let errors: Vec<&QueueError> = rig
            .notes
            .iter()
            .filter_map(|note| match note {
                Note::QueueError(error) => Some(error),
                _ => None,
            })
            .collect();
        // A doubled completion may find the queue's new life.
        assert!(
            errors.len() <= 1 && (errors.len() == 1 || kind == Distortion::Doubled),
            "{kind:?}: {errors:?}"
        );
        assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))), "{:?}", rig.notes);
        assert_eq!(rig.pairs[1].counters().resubmitted, 0);
        rig.assert_clean();
    }
}

#[test]
fn an_inverted_phase_is_a_lost_completion() {
    let (mut rig, mut keeper) = faulty(1, Action::Distort(Distortion::Phase));
    let buffer = rig.buffer(4096);
    read(&mut rig, &buffer, 0, 1);
    rig.run_until(&mut keeper, 20 * SECOND, |rig| rig.pairs[0].in_flight() == 0 && rig.pairs[0].is_running());
    assert!(keeper.of(1).unwrap().status.is_success() && rig.has(&Note::Recovered), "{:?}", rig.notes);
}

#[test]
fn resets_under_load_lose_and_invent_nothing() {
    for seed in 0..6 {
        let mut rig = Rig::ready(config(seed), &[64, 16]);
        let mut traffic = Traffic::new(&rig, seed, 64);
        // What is no read or plain write is given up, so that statuses other than success do not occur.
        for _ in 0..8 {
            run(&mut rig, &mut traffic, 64, 300);
            traffic.fill(&mut rig.pairs, 64, rig.now);
            rig.turn(&mut traffic, 10 * US);
            let now = rig.now;
            rig.controller.reset(ResetReason::Request, now);
        }
        run(&mut rig, &mut traffic, 64, 300);
        assert_eq!(rig.notes.iter().filter(|note| **note == Note::Recovered).count(), 8);
        assert!(traffic.tally.again > 50 && traffic.tally.reads > 200, "{:?}", traffic.tally);
        rig.assert_clean();
    }
}

#[test]
fn random_faults_never_give_wrong_data() {
    for seed in 0..20 {
        let options = Options {
            io: Timeouts { command: 200 * MS, grace: 50 * MS },
            admin: 300 * MS,
            attempts: 1000,
            ..options()
        };
        let mut rig = Rig::ready_with(config(seed), options, &[32, 32]);
        rig.model.with(|model| {
            model.faults().set_random(Random {
                retryable: 300,
                media: 300,
                any_status: 300,
                delay: 2000,
                delay_max: 300 * MS,
                lose: 100,
                stick: 100,
                distort: 150,
                fail_controller: 20,
            });
        });
        let mut traffic = Traffic::new(&rig, seed, 48);
        traffic.is_strict = false;
        run(&mut rig, &mut traffic, 48, 3000);
        assert!(!rig.is_ended, "seed {seed}: {:?}", rig.notes.last());
        rig.model.with(|model| model.faults().clear());
        // What the last faults left behind.
        rig.run_for(&mut traffic, SECOND, MS);
        rig.run_until(&mut traffic, 30 * SECOND, |rig| {
            rig.controller.is_ready() && rig.pairs.iter().all(|pair| pair.is_running())
        });
        traffic.is_strict = true;
        run(&mut rig, &mut traffic, 48, 2000);
        assert!(traffic.tally.reads > 500, "seed {seed}: {:?}", traffic.tally);
        let violations = rig.violations();
        assert_eq!(violations.count, 0, "seed {seed}: {:?}", violations.first);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let history = |seed| {
        let mut rig = Rig::ready(config(seed), &[32]);
        rig.model.with(|model| {
            model.faults().set_random(Random {
                lose: 100,
                delay: 5000,
                delay_max: 5 * MS,
                ..Random::default()
            });
        });
        let mut traffic = Traffic::new(&rig, seed, 32);
        traffic.is_strict = false;
        run(&mut rig, &mut traffic, 32, 1000);
        (rig.now, rig.notes.clone(), traffic.tally.clone())
    };
    assert_eq!(history(7), history(7));
    assert_ne!(history(7), history(8));
}

#[test]
fn an_owner_that_does_not_quiesce_delays_a_reset_by_a_second_only() {
    let mut rig = Rig::ready(config(1), &[8]);
    rig.is_deaf = true;
    let now = rig.now;
    rig.controller.reset(ResetReason::Request, now);
    rig.run_until(&mut super::rig::Nobody, 5 * SECOND, |rig| rig.has(&Note::Recovered));
    assert!((SECOND..SECOND + 200 * MS).contains(&(rig.now - now)), "{}", rig.now - now);
}
