//! Completions that no correct controller posts, on one of two queue pairs.

use super::recovery::{BLOCK, READ, WRITE, open, read_all, slow, with, write_all};
use crate::Phase;
use aryk_bdev::{Access, Status};
use aryk_bdev_conformance::{Bench, Outcome, Shape, contents};
use aryk_nvme_model::{Action, Distortion, Queue, Rule};
use std::time::Duration;

const MS: u64 = 1_000_000;

#[test]
fn a_wrong_completion_resets_its_pair_and_another_one_soon_the_controller() {
    for distortion in [Distortion::Cid, Distortion::SqHead, Distortion::Sqid, Distortion::Doubled] {
        let on = with(slow(), |_| ());
        let mut bench = Bench::new();
        let mut disk = open(&on, &mut bench);
        let controller = on.controllers.find("nv").unwrap();
        let rule = Rule { skip: 20, ..Rule::once(Queue::Io, WRITE, Action::Distort(distortion)) };
        for (seed, resets) in [(1, 0), (2, 1)] {
            on.model.with(|model| model.faults().add(rule));
            write_all(&mut disk, seed, &mut bench);
            let outcomes = disk.drain(&mut bench);
            assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{distortion:?}: {outcomes:?}");
            read_all(&mut disk, seed, &mut bench);
            bench.until("the end of the reset", || controller.info().phase == Phase::Ready);
            let counts = controller.counts();
            assert_eq!((counts.queue_resets, counts.resets), (1, resets), "{distortion:?}");
        }
        disk.close(&mut bench);
    }
}

/// Two reactors, the first with a write that the controller does not answer, and with a wrong completion; the second with a write
/// of the same block, which ends later. The first write may have been seen, and must not replace the second.
#[test]
fn a_write_of_a_broken_pair_is_not_repeated_after_a_later_write_of_another_pair() {
    let on = with(slow(), |_| ());
    let (mut bench, mut other) = (Bench::new(), Bench::new());
    let mut broken = bench.open(on.env.registry(), "nvn1", Access::Shared, 16, 8 * BLOCK);
    let mut whole = other.open(on.env.registry(), "nvn1", Access::Shared, 16, 8 * BLOCK);
    let controller = on.controllers.find("nv").unwrap();
    let rule = |qid, action| Rule::once(Queue::Id(qid), WRITE, action);
    on.model.with(|model| {
        model.faults().add(rule(1, Action::Stick { is_abortable: false }));
        model.faults().add(rule(1, Action::Distort(Distortion::Cid)));
        model.faults().add(rule(2, Action::Delay(400 * MS)));
        model.faults().add(Rule::once(Queue::Id(2), READ, Action::Delay(400 * MS)));
    });
    let stuck = broken.write(0, &contents(1, 0, 1, BLOCK), Shape::Single, &mut bench);
    bench.until("the write to be stuck", || on.model.with(|model| model.held_commands()) == 1);
    let later = whole.write(0, &contents(2, 0, 1, BLOCK), Shape::Single, &mut other);
    let read = whole.read(24, 1, Shape::Single, &mut other);
    other.until("the other pair's commands", || on.model.with(|model| model.held_commands()) == 3);
    let distorted = broken.write(8, &contents(3, 8, 1, BLOCK), Shape::Single, &mut bench);
    bench.until("the wrong completion", || controller.info().last_failure.is_some());
    // The other pair gets to know it by a message.
    for _ in 0..20 {
        other.turn();
        std::thread::park_timeout(Duration::from_millis(1));
    }
    // Begins when the broken pair has replayed its commands.
    let new = whole.write(0, &contents(4, 0, 1, BLOCK), Shape::Single, &mut other);

    let (mut of_broken, mut of_whole) = (Vec::new(), Vec::new());
    bench.until("all outcomes", || {
        other.turn();
        of_broken.extend(broken.completed());
        of_whole.extend(whole.completed());
        of_broken.len() + of_whole.len() == 5
    });
    let status = |outcomes: &[Outcome], id| outcomes.iter().find(|outcome| outcome.id == id).unwrap().status;
    assert_eq!((status(&of_broken, stuck), status(&of_broken, distorted)), (Status::Medium, Status::Ok));
    assert!([later, read, new].iter().all(|id| status(&of_whole, *id).is_ok()), "{of_whole:?}");
    let ids: Vec<u64> = of_whole.iter().map(|outcome| outcome.id).collect();
    assert_eq!(ids.last(), Some(&new), "the new write was not behind those in flight");
    let counts = controller.counts();
    assert_eq!((counts.queue_resets, counts.resets), (1, 0), "{counts:?}");
    assert_eq!((counts.failed_by_reset, counts.resubmitted), (1, 1), "{counts:?}");
    for (lba, seed) in [(0, 4), (8, 3)] {
        broken.read(lba, 1, Shape::Single, &mut bench);
        assert!(broken.finish(&mut bench).data == contents(seed, lba, 1, BLOCK), "{lba}");
    }
    broken.close(&mut bench);
    whole.close(&mut other);
}

/// The other pair does not end its command: the controller is reset at the time limit of that, and both pairs go on.
#[test]
fn a_pair_that_does_not_end_its_commands_delays_the_reset_of_another_for_its_time_limit() {
    let on = with(slow(), super::recovery::impatient);
    let (mut bench, mut other) = (Bench::new(), Bench::new());
    let mut broken = bench.open(on.env.registry(), "nvn1", Access::Shared, 16, 8 * BLOCK);
    let mut whole = other.open(on.env.registry(), "nvn1", Access::Shared, 16, 8 * BLOCK);
    let controller = on.controllers.find("nv").unwrap();
    on.model.with(|model| {
        model.faults().add(Rule::once(Queue::Id(2), READ, Action::Stick { is_abortable: false }));
        model.faults().add(Rule::once(Queue::Id(1), WRITE, Action::Distort(Distortion::Cid)));
    });
    whole.read(0, 1, Shape::Single, &mut other);
    other.until("the read to be stuck", || on.model.with(|model| model.held_commands()) == 1);
    broken.write(8, &contents(3, 8, 1, BLOCK), Shape::Single, &mut bench);
    let (mut of_broken, mut of_whole) = (Vec::new(), Vec::new());
    bench.until("all outcomes", || {
        other.turn();
        of_broken.extend(broken.completed());
        of_whole.extend(whole.completed());
        of_broken.len() + of_whole.len() == 2
    });
    assert!(of_broken[0].status.is_ok() && of_whole[0].status.is_ok(), "{of_broken:?} {of_whole:?}");
    let counts = controller.counts();
    assert!(counts.queue_resets == 0 && counts.resets >= 1, "{counts:?}");
    broken.close(&mut bench);
    whole.close(&mut other);
}
